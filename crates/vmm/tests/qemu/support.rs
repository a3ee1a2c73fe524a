//! What the tests against a real QEMU share: a folder, a guest that answers line by line, and waiting for a state.
//!
//! They need an image (`DORMOUSE_TEST_IMAGE`: a folder with `vmlinuz`, `initrd`, `root.ext4`) and fail without one. They take QEMU from `PATH`, or
//! from `DORMOUSE_TEST_QEMU` with its data folders in `DORMOUSE_TEST_QEMU_DATA` (separated by colons).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use vmm::qemu::{Known, Places};
use vmm::{Account, BootImage, Disk, Machine, MachineSpec, Outlets, Qemu};

/// How long a boot may take here: some 3 s under TCG, more when other tests run beside it.
pub(crate) const BOOT_MAX: Duration = Duration::from_mins(1);
/// How long anything else may take.
pub(crate) const STEP_MAX: Duration = Duration::from_secs(20);

/// One test's QEMU, image and folder.
pub(crate) struct Bench {
    pub(crate) qemu: Qemu,
    pub(crate) image: BootImage,
    pub(crate) root: PathBuf,
    pub(crate) folder: tempfile::TempDir,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let Some(image) = std::env::var_os("DORMOUSE_TEST_IMAGE").map(PathBuf::from) else {
            panic!(
                "DORMOUSE_TEST_IMAGE is not set: this test boots a real guest and needs a folder with `vmlinuz`, `initrd` and \
                 `root.ext4`, as `dormouse images build` makes it"
            );
        };
        for name in ["vmlinuz", "initrd", "root.ext4"] {
            assert!(
                image.join(name).is_file(),
                "DORMOUSE_TEST_IMAGE: {} is missing",
                image.join(name).display()
            );
        }
        let data = std::env::var_os("DORMOUSE_TEST_QEMU_DATA").unwrap_or_default();
        let places = Places {
            binary: std::env::var_os("DORMOUSE_TEST_QEMU").map(PathBuf::from),
            image_tool: None,
            data_dirs: std::env::split_paths(&data)
                .filter(|path| !path.as_os_str().is_empty())
                .collect(),
        };
        let qemu = Qemu::discover(&places, Known::default()).unwrap();
        // Machines run unprivileged in these tests, so the way to their files must be open.
        let folder =
            tempfile::Builder::new().prefix("vmm-").permissions(open_folder()).tempdir().unwrap();
        let initrd = folder.path().join("initrd");
        std::fs::write(&initrd, initrd_with_guest(&image.join("initrd"))).unwrap();
        std::fs::set_permissions(&initrd, std::os::unix::fs::PermissionsExt::from_mode(0o644))
            .unwrap();
        let cmdline =
            format!("{} quiet rdinit=/vmm-guest", vmm::qemu::kernel_parameters(qemu.tsc_khz()));
        let boot = BootImage { kernel: image.join("vmlinuz"), initrd, cmdline };
        Self { qemu, image: boot, root: image.join("root.ext4"), folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A machine with neither disk nor network, run by an account without rights.
    pub(crate) fn spec(&self) -> MachineSpec {
        MachineSpec {
            label: "test".to_owned(),
            cpus: 1,
            memory_mib: 256,
            memory: self.path("memory"),
            disk: None,
            drives: None,
            network: None,
            outlets: Outlets {
                sockets: self.folder.path().to_owned(),
                console: self.path("console"),
                log: self.path("log"),
            },
            account: Account { uid: 64_200, gid: 64_200, threads_max: None },
        }
    }

    /// The same with a fresh disk over the image's root file system.
    pub(crate) async fn spec_with_disk(&self) -> MachineSpec {
        let overlay = self.path("disk.qcow2");
        vmm::files::create_overlay(&self.qemu, &overlay, &self.root, None).await.unwrap();
        MachineSpec { disk: Some(Disk { overlay, base: self.root.clone() }), ..self.spec() }
    }

    /// Boots and waits until the guest answers.
    pub(crate) async fn boot(&self, spec: &MachineSpec) -> (Machine, Guest) {
        let machine = Machine::boot(&self.qemu, spec, &self.image).await.unwrap();
        let mut guest = Guest::of(&machine);
        guest.ask_within("ping", BOOT_MAX).await;
        (machine, guest)
    }
}

/// A test that fails leaves its machines running, as they do not die with their owner: they end here, known by the test's own folder.
impl Drop for Bench {
    fn drop(&mut self) {
        let folder = self.folder.path().as_os_str().as_encoded_bytes();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let name = entry.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let is_ours = line.windows(folder.len()).any(|window| window == folder);
            if is_ours && let Some(pid) = rustix::process::Pid::from_raw(pid) {
                // It may have ended meanwhile.
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
            }
        }
    }
}

/// The guest's end of its port.
pub(crate) struct Guest {
    stream: BufReader<UnixStream>,
    logs: [PathBuf; 2],
}

impl Guest {
    pub(crate) fn of(machine: &Machine) -> Self {
        let stream = BufReader::new(machine.guest_stream().unwrap());
        let outlets = machine.outlets();
        Self { stream, logs: [outlets.console.clone(), outlets.log.clone()] }
    }

    pub(crate) async fn ask(&mut self, line: &str) -> String {
        self.ask_within(line, STEP_MAX).await
    }

    /// For what the guest does not survive.
    pub(crate) async fn tell(&mut self, line: &str) {
        self.stream.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    /// The answer to what was told.
    pub(crate) async fn read(&mut self) -> String {
        self.read_within(STEP_MAX).await
    }

    async fn read_within(&mut self, limit: Duration) -> String {
        let mut answer = String::new();
        let read = tokio::time::timeout(limit, self.stream.read_line(&mut answer)).await;
        if !matches!(read, Ok(Ok(1..))) {
            let [console, log] =
                self.logs.each_ref().map(|path| std::fs::read(path).unwrap_or_default());
            let (console, log) = (String::from_utf8_lossy(&console), String::from_utf8_lossy(&log));
            panic!("no answer within {limit:?} ({read:?}); qemu:\n{log}\nconsole:\n{console}");
        }
        answer.trim_end().to_owned()
    }

    async fn ask_within(&mut self, line: &str, limit: Duration) -> String {
        self.tell(line).await;
        self.read_within(limit).await
    }
}

/// Runs a test's body in a network namespace of its own: the test starts itself once more in one.
pub(crate) fn in_own_network(test: &str, body: impl AsyncFnOnce()) {
    const INSIDE: &str = "VMM_TEST_IN_OWN_NETWORK";
    if std::env::var_os(INSIDE).is_some_and(|name| name == test) {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(body());
        return;
    }
    let output = Command::new("unshare")
        .arg("--net")
        .arg(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(INSIDE, test)
        .output()
        .expect("run unshare (package util-linux)");
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    print!("{said}");
    assert!(
        output.status.success() && said.contains("1 passed"),
        "the test failed in its own network namespace (needs root)"
    );
}

/// Looks every millisecond until `ready` gives something.
pub(crate) async fn until<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + STEP_MAX;
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(tokio::time::Instant::now() < deadline, "{what} did not come within {STEP_MAX:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn open_folder() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o711)
}

/// The image's initramfs and, behind it, an archive with the test's own pid 1.
fn initrd_with_guest(initrd: &Path) -> Vec<u8> {
    let program = std::fs::read(guest_program()).unwrap();
    let mut bytes = std::fs::read(initrd).unwrap();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    cpio_entry(&mut bytes, "vmm-guest", 0o100_755, &program);
    cpio_entry(&mut bytes, "TRAILER!!!", 0, &[]);
    bytes
}

fn cpio_entry(archive: &mut Vec<u8>, name: &str, mode: u32, content: &[u8]) {
    archive.extend_from_slice(b"070701");
    let (size, name_size) = (content.len(), name.len() + 1);
    // inode, mode, owner, group, links, time, size, four device numbers, name's size, checksum
    let head = format!(
        "{1:08x}{mode:08x}{0:08x}{0:08x}{1:08x}{0:08x}{size:08x}{0:08x}{0:08x}{0:08x}{0:08x}{name_size:08x}{0:08x}",
        0, 1
    );
    archive.extend_from_slice(head.as_bytes());
    archive.extend_from_slice(name.as_bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend_from_slice(content);
    archive.resize(archive.len().next_multiple_of(4), 0);
}

/// Compiles the guest once; tests in other processes wait for it.
fn guest_program() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/qemu/guest/init.rs");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vmm-guest");
    let lock = std::fs::File::create(target.with_extension("lock")).unwrap();
    lock.lock().unwrap();
    let modified = |path: &Path| std::fs::metadata(path).and_then(|metadata| metadata.modified());
    let fresh = modified(&target).is_ok_and(|built| built > modified(&source).unwrap());
    if !fresh {
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let made = Command::new(rustc)
            .args([
                "--edition",
                "2024",
                "-O",
                "-C",
                "strip=symbols",
                "-C",
                "target-feature=+crt-static",
                "-o",
            ])
            .args([&target, &source])
            .status()
            .unwrap();
        assert!(made.success(), "compile {}", source.display());
    }
    target
}
