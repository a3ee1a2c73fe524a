//! QEMU's command line. Pure: text from values.
//!
//! Its shaping part, [`machine_line`], is what a saved state depends on: changing it strands stored machines (their fingerprint no
//! longer agrees), so it must only grow a second variant beside the first.

use std::os::fd::RawFd;
use std::path::Path;

use crate::qemu::{Accelerator, Qemu};
use crate::spec::{
    BootImage, DRIVE_PLACES, Drive, DriveAccess, GUEST_PORT, MachineSpec, drive_serial,
};

/// TCG's translation buffer, MiB. 16 to 32 halves the anonymous memory of a booted QEMU and slows nothing that was measured.
const TCG_BUFFER_MIB: u32 = 32;

/// The descriptors QEMU inherits, under their numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Numbers {
    pub(crate) qmp: RawFd,
    pub(crate) guest: RawFd,
    pub(crate) tap: Option<RawFd>,
}

/// How the machine comes to life.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Start<'a> {
    /// From a kernel.
    Boot(&'a BootImage),
    /// From a state that comes over QMP; it then stands until `cont`.
    Incoming,
}

/// All arguments after the program's name.
pub(crate) fn arguments(
    qemu: &Qemu,
    spec: &MachineSpec,
    numbers: Numbers,
    start: Start<'_>,
) -> Vec<String> {
    let mut line = Arguments(Vec::new());
    for folder in &qemu.data_dirs {
        line.pair("-L", text(folder));
    }
    line.pair("-name", format!("guest={},debug-threads=on", spec.label));
    line.pair("-machine", machine_type());
    line.pair(
        "-accel",
        match qemu.accelerator {
            Accelerator::Kvm => "kvm".to_owned(),
            Accelerator::Tcg => format!("tcg,tb-size={TCG_BUFFER_MIB}"),
        },
    );
    line.pair("-cpu", qemu.cpu_model().to_owned());
    line.pair("-smp", smp(spec));
    line.pair("-m", size(spec));
    line.0.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned));
    line.pair("-display", "none".to_owned());
    // `debug-threads` names the threads; `-sandbox` denies what a taken-over QEMU would want first. With `spawn=deny` there is no `exec:`
    // migration (7.2 is killed for trying), hence states by descriptor.
    line.pair(
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny".to_owned(),
    );
    line.pair("-object", memory_argument(spec));
    line.pair("-chardev", format!("socket,id=qmp,fd={},server=on,wait=off", numbers.qmp));
    line.pair("-mon", "chardev=qmp,mode=control".to_owned());
    line.pair(
        "-chardev",
        format!("file,id=console,path={},append=on", escaped(&spec.outlets.console)),
    );
    line.pair("-serial", "chardev:console".to_owned());
    line.pair("-chardev", format!("socket,id=guest,fd={},server=on,wait=off", numbers.guest));
    if let Some(disk) = &spec.disk {
        line.pair("-blockdev", blockdev_base(&disk.base));
        line.pair("-blockdev", blockdev_overlay(&disk.overlay));
    }
    if let Some(drives) = &spec.drives {
        for place in 0..DRIVE_PLACES {
            line.pair("-blockdev", blockdev_drive(place, drives.get(place)));
        }
    }
    if let (Some(_), Some(tap)) = (&spec.network, numbers.tap) {
        line.pair("-netdev", format!("tap,id=net,fd={tap}"));
    }
    for device in devices(spec) {
        line.pair("-device", device);
    }
    match start {
        Start::Boot(image) => {
            line.pair("-kernel", text(&image.kernel));
            line.pair("-initrd", text(&image.initrd));
            line.pair("-append", image.cmdline.clone());
        }
        Start::Incoming => {
            line.0.push("-S".to_owned());
            line.pair("-incoming", "defer".to_owned());
        }
    }
    line.0
}

/// What of the command line shapes a saved state.
pub(crate) fn machine_line(spec: &MachineSpec) -> String {
    let mut parts = vec![machine_type(), format!("smp={}", smp(spec)), format!("m={}", size(spec))];
    // The address is in the state too, but a restored clone may be given another: QEMU takes the state's.
    parts.extend(devices(&MachineSpec { network: None, ..spec.clone() }));
    if spec.network.is_some() {
        parts.push(format!("virtio-net-device,{NO_ANNOUNCE}"));
    }
    parts.join(" ")
}

/// After a load QEMU would ask the guest to announce its address. Nobody listens for that here, and it can hang the guest for
/// good: Linux (6.12) announces from a work that takes the lock under which closing the device waits for that same work.
const NO_ANNOUNCE: &str = "guest_announce=off";

/// The memory object. Its path makes it unique among the command lines of a host.
pub(crate) fn memory_argument(spec: &MachineSpec) -> String {
    format!(
        "memory-backend-file,id=ram,size={},mem-path={},share=on,dump=off,merge=off",
        size(spec),
        escaped(&spec.memory)
    )
}

fn machine_type() -> String {
    // rtc=off costs 2 s of boot; ACPI stays on, for Debian's kernels find virtio-mmio only through it.
    "microvm,memory-backend=ram,rtc=on".to_owned()
}

fn smp(spec: &MachineSpec) -> String {
    spec.cpus.to_string()
}

fn size(spec: &MachineSpec) -> String {
    format!("{}M", spec.memory_mib)
}

/// The devices, in the order in which they get their addresses.
fn devices(spec: &MachineSpec) -> Vec<String> {
    let mut devices = vec![
        "virtio-serial-device,max_ports=2".to_owned(),
        format!("virtserialport,chardev=guest,name={GUEST_PORT},nr=1"),
    ];
    if spec.disk.is_some() {
        devices.push("virtio-blk-device,drive=disk".to_owned());
    }
    if let Some(network) = &spec.network {
        let mac = network.mac.map(|byte| format!("{byte:02x}")).join(":");
        devices.push(format!("virtio-net-device,{NO_ANNOUNCE},netdev=net,mac={mac}"));
    }
    devices.push("virtio-balloon-device,free-page-reporting=on".to_owned());
    // Tells a panic from a reboot, if the guest has the driver.
    devices.push("pvpanic".to_owned());
    // Last, so that everything else has the address that it has in a machine without. Who is where a guest tells by the serial
    // number, for its kernel numbers disks as it likes.
    if spec.drives.is_some() {
        devices.extend((0..DRIVE_PLACES).map(|place| {
            format!("virtio-blk-device,drive=place{place},serial={}", drive_serial(place))
        }));
    }
    devices
}

/// Shared by many machines and written by none: no locks, read-only.
fn blockdev_base(base: &Path) -> String {
    format!(
        "driver=raw,node-name=base,read-only=on,file.driver=file,file.filename={},file.locking=off,file.read-only=on",
        escaped(base)
    )
}

fn blockdev_overlay(overlay: &Path) -> String {
    format!(
        "driver=qcow2,node-name=disk,discard=unmap,detect-zeroes=unmap,file.driver=file,file.filename={},file.discard=unmap,backing=base",
        escaped(overlay)
    )
}

/// What is in a place for a drive: the drive, or a disk of no size.
fn blockdev_drive(place: usize, drive: Option<&Drive>) -> String {
    let Some(Drive { image, access }) = drive else {
        return format!("driver=null-co,node-name=place{place},size=0,read-zeroes=on");
    };
    let image = escaped(image);
    match access {
        DriveAccess::Write => format!(
            "driver=raw,node-name=place{place},discard=unmap,detect-zeroes=unmap,file.driver=file,file.filename={image},file.discard=unmap"
        ),
        DriveAccess::Read => format!(
            "driver=raw,node-name=place{place},read-only=on,file.driver=file,file.filename={image},file.read-only=on"
        ),
        DriveAccess::Shared => format!(
            "driver=raw,node-name=place{place},read-only=on,file.driver=file,file.filename={image},file.locking=off,file.read-only=on"
        ),
    }
}

/// In QEMU's option lists a comma ends a value, two stand for one.
fn escaped(path: &Path) -> String {
    text(path).replace(',', ",,")
}

/// `MachineSpec::validate` has made sure that nothing is lost here.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

struct Arguments(Vec<String>);

impl Arguments {
    fn pair(&mut self, name: &str, value: String) {
        self.0.extend([name.to_owned(), value]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qemu::{Known, Version};
    use crate::spec::{Account, Disk, Network, Outlets};
    use expect_test::{Expect, expect};
    use std::sync::Arc;

    fn qemu(major: u32, accelerator: Accelerator) -> Qemu {
        Qemu {
            binary: "/usr/bin/qemu-system-x86_64".into(),
            image_tool: "/usr/bin/qemu-img".into(),
            data_dirs: Vec::new(),
            firmware: "/usr/share/qemu/bios-microvm.bin".into(),
            modules: None,
            version: Version { major, minor: 0, micro: 0 },
            accelerator,
            binary_digest: String::new(),
            firmware_digest: String::new(),
            tsc_khz: 2_596_094,
            known: Known::default(),
        }
    }

    fn spec() -> MachineSpec {
        MachineSpec {
            label: "box-1".into(),
            cpus: 2,
            memory_mib: 512,
            memory: "/data/a,b/memory".into(),
            disk: Some(Disk {
                overlay: "/data/a,b/disk.qcow2".into(),
                base: "/images/root.ext4".into(),
            }),
            drives: None,
            network: Some(Network {
                tap: Arc::new(std::fs::File::open("/dev/null").unwrap().into()),
                mac: [2, 0, 0, 0, 0, 10],
            }),
            outlets: Outlets {
                sockets: "/data/a,b".into(),
                console: "/data/a,b/console".into(),
                log: "/data/a,b/log".into(),
            },
            account: Account::ROOT,
        }
    }

    const NUMBERS: Numbers = Numbers { qmp: 5, guest: 6, tap: Some(7) };

    fn check(qemu: &Qemu, spec: &MachineSpec, start: Start<'_>, expected: &Expect) {
        let mut lines = String::new();
        for argument in arguments(qemu, spec, NUMBERS, start) {
            lines.push_str(if argument.starts_with('-') && !lines.is_empty() { "\n" } else { "" });
            lines.push_str(if argument.starts_with('-') { "" } else { " " });
            lines.push_str(&argument);
        }
        expected.assert_eq(&lines);
    }

    #[test]
    fn a_boot_under_tcg() {
        let image = BootImage {
            kernel: "/images/vmlinuz".into(),
            initrd: "/images/initrd".into(),
            cmdline: "console=ttyS0 quiet".into(),
        };
        check(
            &qemu(7, Accelerator::Tcg),
            &spec(),
            Start::Boot(&image),
            &expect![[r"
            -name guest=box-1,debug-threads=on
            -machine microvm,memory-backend=ram,rtc=on
            -accel tcg,tb-size=32
            -cpu max,-cx16
            -smp 2
            -m 512M
            -nodefaults
            -no-user-config
            -no-reboot
            -display none
            -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny
            -object memory-backend-file,id=ram,size=512M,mem-path=/data/a,,b/memory,share=on,dump=off,merge=off
            -chardev socket,id=qmp,fd=5,server=on,wait=off
            -mon chardev=qmp,mode=control
            -chardev file,id=console,path=/data/a,,b/console,append=on
            -serial chardev:console
            -chardev socket,id=guest,fd=6,server=on,wait=off
            -blockdev driver=raw,node-name=base,read-only=on,file.driver=file,file.filename=/images/root.ext4,file.locking=off,file.read-only=on
            -blockdev driver=qcow2,node-name=disk,discard=unmap,detect-zeroes=unmap,file.driver=file,file.filename=/data/a,,b/disk.qcow2,file.discard=unmap,backing=base
            -netdev tap,id=net,fd=7
            -device virtio-serial-device,max_ports=2
            -device virtserialport,chardev=guest,name=dormouse.agent,nr=1
            -device virtio-blk-device,drive=disk
            -device virtio-net-device,guest_announce=off,netdev=net,mac=02:00:00:00:00:0a
            -device virtio-balloon-device,free-page-reporting=on
            -device pvpanic
            -kernel /images/vmlinuz
            -initrd /images/initrd
            -append console=ttyS0 quiet"]],
        );
    }

    #[test]
    fn a_restore_under_kvm_without_disk_and_network() {
        let qemu = Qemu { data_dirs: vec!["/opt/qemu/share".into()], ..qemu(10, Accelerator::Kvm) };
        check(
            &qemu,
            &MachineSpec { disk: None, network: None, ..spec() },
            Start::Incoming,
            &expect![[r"
                -L /opt/qemu/share
                -name guest=box-1,debug-threads=on
                -machine microvm,memory-backend=ram,rtc=on
                -accel kvm
                -cpu host
                -smp 2
                -m 512M
                -nodefaults
                -no-user-config
                -no-reboot
                -display none
                -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny
                -object memory-backend-file,id=ram,size=512M,mem-path=/data/a,,b/memory,share=on,dump=off,merge=off
                -chardev socket,id=qmp,fd=5,server=on,wait=off
                -mon chardev=qmp,mode=control
                -chardev file,id=console,path=/data/a,,b/console,append=on
                -serial chardev:console
                -chardev socket,id=guest,fd=6,server=on,wait=off
                -device virtio-serial-device,max_ports=2
                -device virtserialport,chardev=guest,name=dormouse.agent,nr=1
                -device virtio-balloon-device,free-page-reporting=on
                -device pvpanic
                -S
                -incoming defer"]],
        );
    }

    /// Stored states depend on this text: a change strands them.
    #[test]
    fn what_shapes_a_state_does_not_change() {
        expect!["microvm,memory-backend=ram,rtc=on smp=2 m=512M virtio-serial-device,max_ports=2 virtserialport,chardev=guest,name=dormouse.agent,nr=1 virtio-blk-device,drive=disk virtio-balloon-device,free-page-reporting=on pvpanic virtio-net-device,guest_announce=off"].assert_eq(&machine_line(&spec()));
        let elsewhere = MachineSpec {
            label: "other".into(),
            memory: "/x".into(),
            network: spec().network.map(|network| Network { mac: [2; 6], ..network }),
            ..spec()
        };
        assert_eq!(machine_line(&elsewhere), machine_line(&spec()));
        assert_ne!(machine_line(&MachineSpec { network: None, ..spec() }), machine_line(&spec()));
        assert_ne!(machine_line(&MachineSpec { cpus: 1, ..spec() }), machine_line(&spec()));
    }

    #[test]
    fn a_state_depends_on_the_places_for_drives_and_not_on_the_drives() {
        let image = "/data/drives/d,1/disk".into();
        let none = MachineSpec { drives: Some(Vec::new()), ..spec() };
        let one = MachineSpec {
            drives: Some(vec![Drive { image, access: DriveAccess::Write }]),
            ..spec()
        };
        assert_eq!(machine_line(&none), machine_line(&one));
        assert_ne!(machine_line(&none), machine_line(&spec()));
        expect!["microvm,memory-backend=ram,rtc=on smp=2 m=512M virtio-serial-device,max_ports=2 virtserialport,chardev=guest,name=dormouse.agent,nr=1 virtio-blk-device,drive=disk virtio-balloon-device,free-page-reporting=on pvpanic virtio-blk-device,drive=place0,serial=drive0 virtio-blk-device,drive=place1,serial=drive1 virtio-blk-device,drive=place2,serial=drive2 virtio-blk-device,drive=place3,serial=drive3 virtio-blk-device,drive=place4,serial=drive4 virtio-blk-device,drive=place5,serial=drive5 virtio-blk-device,drive=place6,serial=drive6 virtio-blk-device,drive=place7,serial=drive7 virtio-net-device,guest_announce=off"].assert_eq(&machine_line(&none));
        let drives = |access| blockdev_drive(0, Some(&Drive { image: "/d,1/disk".into(), access }));
        expect!["driver=raw,node-name=place0,discard=unmap,detect-zeroes=unmap,file.driver=file,file.filename=/d,,1/disk,file.discard=unmap"].assert_eq(&drives(DriveAccess::Write));
        expect!["driver=raw,node-name=place0,read-only=on,file.driver=file,file.filename=/d,,1/disk,file.read-only=on"].assert_eq(&drives(DriveAccess::Read));
        expect!["driver=raw,node-name=place0,read-only=on,file.driver=file,file.filename=/d,,1/disk,file.locking=off,file.read-only=on"].assert_eq(&drives(DriveAccess::Shared));
        expect!["driver=null-co,node-name=place7,size=0,read-zeroes=on"]
            .assert_eq(&blockdev_drive(7, None));
        let many = vec![Drive { image: "/d".into(), access: DriveAccess::Read }; 9];
        let refused = MachineSpec { drives: Some(many), ..spec() }.validate();
        assert_eq!(refused.unwrap_err().to_string(), "9 drives: expected at most 8");
    }

    #[test]
    fn qemu_7_under_tcg_hides_cmpxchg16b() {
        let models = [(7, Accelerator::Tcg), (10, Accelerator::Tcg), (7, Accelerator::Kvm)]
            .map(|(major, accelerator)| qemu(major, accelerator).cpu_model());
        assert_eq!(models, ["max,-cx16", "max", "host"]);
    }
}
