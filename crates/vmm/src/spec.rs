//! What one machine is made of. Plain values: nothing here touches the system.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The name of the QMP socket in [`Outlets::sockets`].
pub const QMP_SOCKET: &str = "qmp.sock";
/// The name of the guest agent's socket in [`Outlets::sockets`].
pub const GUEST_SOCKET: &str = "guest.sock";
/// The name of the virtio-serial port that the guest agent opens (`/sys/class/virtio-ports/*/name` in the guest).
pub const GUEST_PORT: &str = "dormouse.agent";

/// One machine: what it has, and where its files are. The same value serves [`crate::Machine::boot`] and
/// [`crate::Machine::restore`]; a state can only be restored with the `cpus`, `memory_mib` and devices it was saved with
/// (see [`crate::Fingerprint`]).
#[derive(Debug, Clone)]
pub struct MachineSpec {
    /// A label for people who look at the process list. Letters, digits, `-`, `_`, `.`; at most 64 bytes.
    pub label: String,
    /// Virtual processors, 1 to [`CPUS_MAX`].
    pub cpus: u32,
    /// Memory in MiB, [`MEMORY_MIB_MIN`] to [`MEMORY_MIB_MAX`].
    pub memory_mib: u32,
    /// The guest's memory: a file mapped shared, of exactly `memory_mib`. Boot makes it (an old one is replaced), restore demands it.
    pub memory: PathBuf,
    /// The root disk. None: no block device (a guest that lives in its initramfs).
    pub disk: Option<Disk>,
    /// Further disks. None: the machine has no places for any; `Some`: it has [`DRIVE_PLACES`] places, and these are in the first of
    /// them. A state can be restored with other drives in its places, but not with places where it had none.
    pub drives: Option<Vec<Drive>>,
    /// The network link. None: no network device.
    pub network: Option<Network>,
    /// Sockets and logs.
    pub outlets: Outlets,
    /// Whom QEMU runs as.
    pub account: Account,
}

/// Most virtual processors of a machine: more than any host in sight gives to one sandbox, and far below QEMU's own limit (288 for microvm).
pub const CPUS_MAX: u32 = 64;
/// Least memory, MiB: a 6.12 kernel with its initramfs does not come up below about 100.
pub const MEMORY_MIB_MIN: u32 = 128;
/// Most memory, MiB (256 GiB).
pub const MEMORY_MIB_MAX: u32 = 256 * 1024;

/// A root disk: a qcow2 overlay, private to the machine, over a raw image that many share and nobody writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// The qcow2 overlay (see [`crate::files::create_overlay`]).
    pub overlay: PathBuf,
    /// The base image, raw. Opened read-only and without locks.
    pub base: PathBuf,
}

/// Places for further disks of a machine that has any. Each costs a guest some 0.5 MiB, taken or not, and a saved state 5 KB; all
/// machines with drives have the same number, so that one template serves them.
pub const DRIVE_PLACES: usize = 8;

/// A further disk: a raw image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drive {
    /// The image.
    pub image: PathBuf,
    /// Who writes it.
    pub access: DriveAccess,
}

/// What a machine may do with a [`Drive`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriveAccess {
    /// This machine alone has it, and writes it. QEMU locks the image.
    Write,
    /// This machine alone has it, and cannot write it. QEMU locks the image.
    Read,
    /// Many have it and nobody writes it: no locks, and the image is not given to the machine's account, which must be able to
    /// read it.
    Shared,
}

/// The serial number under which a guest finds the drive in a place, counted from 0.
pub fn drive_serial(place: usize) -> String {
    format!("drive{place}")
}

/// A network link over a tap that the caller owns ([`crate::tap::Tap`]).
#[derive(Debug, Clone)]
pub struct Network {
    /// The tap. QEMU gets a duplicate, that is the same queue.
    pub tap: Arc<OwnedFd>,
    /// The guest's address on the link. Unicast.
    pub mac: [u8; 6],
}

/// Where a machine can be reached and what it writes. Kept by the caller to adopt the machine later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outlets {
    /// The folder for [`QMP_SOCKET`] and [`GUEST_SOCKET`]. Its path may be longer than a socket address allows (107 bytes).
    pub sockets: PathBuf,
    /// The guest's serial console. QEMU appends; [`crate::Machine`] keeps it below [`CONSOLE_BYTES_MAX`] (see there for how).
    pub console: PathBuf,
    /// What QEMU itself says on stdout and stderr. Kept below [`CONSOLE_BYTES_MAX`] in the same way.
    pub log: PathBuf,
}

/// Size from which a console or log file is cut down to its last [`CONSOLE_BYTES_KEPT`]. It is looked at with every order and, while the
/// machine runs, every [`CONSOLE_TRIM_EVERY`]; between two looks a guest that does nothing else writes some 10 MiB at most
/// (the emulated UART gives about 1 MiB/s), so that is the true bound.
pub const CONSOLE_BYTES_MAX: u64 = 1024 * 1024;
/// What remains of a console or log that was cut.
pub const CONSOLE_BYTES_KEPT: u64 = 256 * 1024;
/// How often a running machine's console and log are looked at.
pub const CONSOLE_TRIM_EVERY: std::time::Duration = std::time::Duration::from_secs(10);

/// The account that QEMU runs under. The memory file, overlay, console and log are given to it; kernel, initrd, base image and the
/// folders on the way must be readable for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Account {
    /// User id. 0 keeps root (for tests and hosts without spare ids).
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Most threads of this user (`RLIMIT_NPROC`). The kernel counts per user id, so set it only for an id that no other machine has.
    pub threads_max: Option<u64>,
}

impl Account {
    /// Root: nothing is given up.
    pub const ROOT: Self = Self { uid: 0, gid: 0, threads_max: None };
}

/// What a boot needs besides the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootImage {
    /// The kernel: a bzImage.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initrd: PathBuf,
    /// The kernel's command line; begin with [`crate::qemu::kernel_parameters`].
    pub cmdline: String,
}

impl Outlets {
    /// The QMP socket's path.
    pub fn qmp(&self) -> PathBuf {
        self.sockets.join(QMP_SOCKET)
    }

    /// The guest agent's socket's path.
    pub fn guest(&self) -> PathBuf {
        self.sockets.join(GUEST_SOCKET)
    }
}

impl MachineSpec {
    /// Checks what can be checked without the system.
    pub fn validate(&self) -> Result<(), InvalidSpec> {
        let label_fits = (1..=64).contains(&self.label.len())
            && self
                .label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        if !label_fits {
            return Err(InvalidSpec::Label(self.label.clone()));
        }
        if !(1..=CPUS_MAX).contains(&self.cpus) {
            return Err(InvalidSpec::Cpus(self.cpus));
        }
        if !(MEMORY_MIB_MIN..=MEMORY_MIB_MAX).contains(&self.memory_mib) {
            return Err(InvalidSpec::Memory(self.memory_mib));
        }
        let mut paths: Vec<(&'static str, &Path)> = vec![
            ("memory", &self.memory),
            ("outlets.sockets", &self.outlets.sockets),
            ("outlets.console", &self.outlets.console),
            ("outlets.log", &self.outlets.log),
        ];
        if let Some(disk) = &self.disk {
            paths.push(("disk.overlay", &disk.overlay));
            paths.push(("disk.base", &disk.base));
        }
        let drives = self.drives.as_deref().unwrap_or_default();
        if drives.len() > DRIVE_PLACES {
            return Err(InvalidSpec::Drives(drives.len()));
        }
        paths.extend(drives.iter().map(|drive| ("drives.image", drive.image.as_path())));
        for (field, path) in paths {
            check_path(field, path)?;
        }
        if let Some(network) = &self.network
            && (network.mac[0] & 1 == 1 || network.mac == [0; 6])
        {
            return Err(InvalidSpec::Mac(network.mac));
        }
        Ok(())
    }

    /// Memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        u64::from(self.memory_mib) << 20
    }
}

impl Network {
    /// The tap's descriptor.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.tap.as_fd()
    }
}

/// A field of a [`MachineSpec`] or [`BootImage`] that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSpec {
    /// See [`MachineSpec::label`].
    #[error("label {0:?}: expected 1 to 64 letters, digits, '-', '_' or '.'")]
    Label(String),
    /// See [`MachineSpec::cpus`].
    #[error("cpus {0}: expected 1 to {CPUS_MAX}")]
    Cpus(u32),
    /// See [`MachineSpec::memory_mib`].
    #[error("memory_mib {0}: expected {MEMORY_MIB_MIN} to {MEMORY_MIB_MAX}")]
    Memory(u32),
    /// See [`MachineSpec::drives`].
    #[error("{0} drives: expected at most {DRIVE_PLACES}")]
    Drives(usize),
    /// A multicast or zero address.
    #[error("network.mac {0:02x?}: expected a unicast address")]
    Mac([u8; 6]),
    /// QEMU runs in another folder and is given paths as text.
    #[error("{field} {path:?}: expected an absolute path in UTF-8 without line breaks")]
    Path {
        /// The field.
        field: &'static str,
        /// Its value.
        path: PathBuf,
    },
    /// The kernel takes no more than 2047 bytes, none of them zero or a line break.
    #[error("cmdline of {0} bytes: expected at most 2047 bytes of printable text")]
    Cmdline(usize),
}

/// Longest kernel command line (x86's `COMMAND_LINE_SIZE` less the final zero).
pub const CMDLINE_BYTES_MAX: usize = 2047;

impl BootImage {
    /// Checks what can be checked without the system.
    pub fn validate(&self) -> Result<(), InvalidSpec> {
        check_path("kernel", &self.kernel)?;
        check_path("initrd", &self.initrd)?;
        if self.cmdline.len() > CMDLINE_BYTES_MAX || self.cmdline.chars().any(char::is_control) {
            return Err(InvalidSpec::Cmdline(self.cmdline.len()));
        }
        Ok(())
    }
}

fn check_path(field: &'static str, path: &Path) -> Result<(), InvalidSpec> {
    let printable = path.to_str().is_some_and(|text| !text.chars().any(char::is_control));
    if path.is_absolute() && printable {
        Ok(())
    } else {
        Err(InvalidSpec::Path { field, path: path.into() })
    }
}
