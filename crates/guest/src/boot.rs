//! From the kernel's first program to a guest with its own root: mounts, modules, disk, loopback, cgroups.
//!
//! Runs as `/init` of an initramfs that holds this program, decompressed modules and a list of them in order. Learnt on
//! Debian's 6.12 cloud kernel: ext4 and the console driver are built in; `virtio_mmio`, `virtio_blk`, `virtio_net` (with `failover`,
//! `net_failover`), `inet_diag` and `tcp_diag` are modules; the kernel's own empty initramfs brings `/dev/console`, so
//! standard error is the serial console from the first moment; devices are there when the module's load returns.

use std::{
    fs::{self, File},
    io::{self, Read, Seek},
    os::unix::fs::{DirBuilderExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    mount::MountFlags,
    process::{Resource, Rlimit},
};

use wire::VersionRange;

use crate::netlink::Card;

/// Which modules to load: one path per line.
const MODULES: &str = "/etc/dormouse/modules";
/// The newest version of the protocol that the agent shall speak; missing: all that it knows.
const PROTOCOL_MAX: &str = "/etc/dormouse/protocol-max";
/// Where the root is mounted before it is the root.
const NEW_ROOT: &str = "/newroot";
/// How long a device may take to appear. They are there at once; this is for a machine under load.
const DEVICE_LIMIT: Duration = Duration::from_secs(10);
/// Pause between two looks for a device.
const DEVICE_PAUSE: Duration = Duration::from_millis(5);
/// The agent answers also when the user's programs want all of the processor, as they do right after a wake.
const AGENT_NICE: i32 = -10;
/// Characters of a bad setting that are shown.
const SHOWN_MAX: usize = 40;
/// Open files that a program may raise its limit to, as on other systems; the kernel's default for the first program is 4,096.
const OPEN_FILES_MAX: u64 = 524_288;

/// Why the guest did not boot. The kernel panics when its first program ends, which stops the machine; the text is on the console.
#[derive(Debug, thiserror::Error)]
#[error("{doing}")]
pub struct BootError {
    doing: String,
    #[source]
    source: io::Error,
}

/// The versions of the protocol that the agent shall speak, as the image says. To be asked before [`boot`], after which the initial
/// RAM disk is gone.
///
/// # Errors
/// When the image names a version that this agent does not know.
pub fn versions() -> Result<VersionRange, BootError> {
    let newest =
        step(&format!("read {PROTOCOL_MAX}"), || match fs::read_to_string(PROTOCOL_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            text => text.map(Some),
        })?;
    let Some(newest) = newest else { return Ok(wire::VERSIONS) };
    step("take the newest version of the protocol from the image", || {
        at_most(&newest).map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))
    })
}

/// The versions up to the one that a text names.
fn at_most(text: &str) -> Result<VersionRange, String> {
    let VersionRange { oldest, newest } = wire::VERSIONS;
    let known = |version: &u16| (oldest..=newest).contains(version);
    let wanted = text.trim().parse().ok().filter(known);
    wanted.map(|newest| VersionRange { oldest, newest }).ok_or_else(|| {
        let shown: String = text.trim().chars().take(SHOWN_MAX).collect();
        format!("`{}` is no version from {oldest} to {newest}", shown.escape_debug())
    })
}

/// Boots.
pub fn boot() -> Result<(), BootError> {
    for (kind, to) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        mount(kind, to, MountFlags::empty(), "")?;
    }
    // First of all: what is started before is not protected.
    step("protect the agent from the out-of-memory killer", || {
        fs::write("/proc/self/oom_score_adj", "-1000")
    })?;
    step("put the agent before the user's programs", || {
        Ok(rustix::process::nice(AGENT_NICE).map(drop)?)
    })?;
    load_modules()?;
    let disk = wait("find a disk with an ext4 file system", root_disk)?;
    step("make the new root's directory", || make(NEW_ROOT, 0o755))?;
    let disk = disk.display().to_string();
    step(&format!("mount {disk}"), || {
        let options = c"discard";
        Ok(rustix::mount::mount(&*disk, NEW_ROOT, "ext4", MountFlags::NOATIME, options)?)
    })?;
    switch_root()?;
    for (kind, to, flags, options) in [
        ("tmpfs", "/run", MountFlags::NOSUID | MountFlags::NODEV, "mode=0755"),
        (
            "devpts",
            "/dev/pts",
            MountFlags::NOSUID | MountFlags::NOEXEC,
            "gid=5,mode=620,ptmxmode=666",
        ),
        ("tmpfs", "/dev/shm", MountFlags::NOSUID | MountFlags::NODEV, "mode=1777"),
        (
            "cgroup2",
            "/sys/fs/cgroup",
            MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC,
            // Processes come and go all the time here, controllers never: the slow path is the other one then.
            "favordynmods",
        ),
    ] {
        mount(kind, to, flags, options)?;
    }
    for (link, to) in [("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")] {
        step(&format!("make /dev/{link}"), || {
            symlink(Path::new("/proc/self").join(to), Path::new("/dev").join(link))
        })?;
    }
    step("make /run/sbx and /run/lock", || {
        make("/run/sbx", 0o755)?;
        make("/run/lock", 0o755)?;
        // Beyond what the file mode mask lets `mkdir` give.
        fs::set_permissions("/run/lock", fs::Permissions::from_mode(0o1777))
    })?;
    step("raise the limit on open files", || {
        let limit = Rlimit { current: Some(1024), maximum: Some(OPEN_FILES_MAX) };
        Ok(rustix::process::setrlimit(Resource::Nofile, limit)?)
    })?;
    step("set the host name", || {
        let name = fs::read_to_string("/etc/hostname").unwrap_or_default();
        let name = name.trim();
        let name = if name.is_empty() { "sandbox" } else { name };
        Ok(rustix::system::sethostname(name.as_bytes())?)
    })?;
    step("switch the loopback on", || Card::find("lo")?.up())
}

/// Waits for something to appear.
pub fn wait<T>(
    doing: &str,
    mut look: impl FnMut() -> io::Result<Option<T>>,
) -> Result<T, BootError> {
    let start = Instant::now();
    step(doing, || {
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            if start.elapsed() > DEVICE_LIMIT {
                return Err(io::Error::from(io::ErrorKind::TimedOut));
            }
            #[expect(clippy::disallowed_methods, reason = "boot has nothing else to do meanwhile")]
            std::thread::sleep(DEVICE_PAUSE);
        }
    })
}

/// Loads the modules of the list. One that the kernel has already is no error; any other failure is told and does not stop
/// the boot: what really is missing shows itself by name later.
fn load_modules() -> Result<(), BootError> {
    let list = match fs::read_to_string(MODULES) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        list => list.map_err(|source| BootError { doing: format!("read {MODULES}"), source })?,
    };
    for path in list.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let loaded =
            File::open(path).and_then(|file| Ok(rustix::system::finit_module(&file, c"", 0)?));
        match loaded {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                eprintln!("load {path}: {error}");
            }
            _ => {}
        }
    }
    Ok(())
}

/// The first virtio disk without a serial number that holds an ext file system.
fn root_disk() -> io::Result<Option<PathBuf>> {
    for letter in 'a'..='z' {
        let disk = PathBuf::from(format!("/dev/vd{letter}"));
        // The root has no serial number; drives have.
        let serial = fs::read_to_string(format!("/sys/block/vd{letter}/serial"));
        if serial.is_ok_and(|serial| !serial.trim().is_empty()) {
            continue;
        }
        let mut file = match File::open(&disk) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            file => file?,
        };
        // The superblock's magic number, at byte 56 of the superblock at 1024.
        let mut magic = [0; 2];
        file.seek(io::SeekFrom::Start(1024 + 56))?;
        if file.read_exact(&mut magic).is_ok() && magic == [0x53, 0xef] {
            return Ok(Some(disk));
        }
    }
    Ok(None)
}

fn switch_root() -> Result<(), BootError> {
    // They live in memory for ever otherwise.
    for path in ["/init", MODULES, PROTOCOL_MAX] {
        step(&format!("remove {path}"), || gone(fs::remove_file(path)))?;
    }
    step("remove the modules", || gone(fs::remove_dir_all("/lib")))?;
    for from in ["/proc", "/sys", "/dev"] {
        let to = format!("{NEW_ROOT}{from}");
        step(&format!("move {from} to the new root"), || {
            make(&to, 0o755)?;
            Ok(rustix::mount::mount_move(from, &*to)?)
        })?;
    }
    step("switch to the new root", || {
        rustix::process::chdir(NEW_ROOT)?;
        rustix::mount::mount_move(".", "/")?;
        rustix::process::chroot(".")?;
        Ok(rustix::process::chdir("/")?)
    })
}

fn mount(kind: &str, to: &str, flags: MountFlags, options: &str) -> Result<(), BootError> {
    step(&format!("mount {kind} at {to}"), || {
        make(to, 0o755)?;
        let options = std::ffi::CString::new(options)?;
        Ok(rustix::mount::mount(kind, to, kind, flags, &*options)?)
    })
}

fn make(path: &str, mode: u32) -> io::Result<()> {
    match fs::DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn step<T>(doing: &str, work: impl FnOnce() -> io::Result<T>) -> Result<T, BootError> {
    work().map_err(|source| BootError { doing: doing.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_versions_that_the_agent_knows_are_taken_from_an_image() {
        let newest = wire::VERSIONS.newest;
        assert_eq!(at_most("1\n"), Ok(VersionRange { oldest: 1, newest: 1 }));
        assert_eq!(at_most(&newest.to_string()), Ok(wire::VERSIONS));
        for bad in ["", "0", "-1", "1.0", "x", &(newest + 1).to_string()] {
            let why = at_most(bad).unwrap_err();
            assert!(why.contains(&format!("no version from 1 to {newest}")), "{bad}: {why}");
        }
    }
}
