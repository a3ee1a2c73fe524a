//! Drives: disks besides the root, mounted where the host says, and left whole whenever the guest stands still.
//!
//! A guest that is a copy of a template had disks of no size in the places for drives when its kernel looked at them. So a disk
//! of no size is looked at anew, by taking it from its driver and giving it back.
//!
//! While the guest stands still the file systems of its drives are frozen (`FIFREEZE`): everything is where it belongs, nothing
//! is left in the journal. If the sandbox is deleted asleep, its drives are as if they had been unmounted.

use std::{
    fs::{self, File},
    io,
    os::{linux::fs::MetadataExt as _, unix::ffi::OsStrExt as _},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::mount::MountFlags;
use wire::Mount;

/// Where the kernel lists its disks.
const BLOCK: &str = "/sys/block";
/// The driver of virtio disks.
const DRIVER: &str = "/sys/bus/virtio/drivers/virtio_blk";

/// The drives of this guest.
#[derive(Debug, Default)]
pub struct Drives(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    mounted: Vec<Mounted>,
    /// Folders of the file systems that are frozen.
    frozen: Vec<File>,
}

#[derive(Debug)]
struct Mounted {
    serial: String,
    path: PathBuf,
    read_only: bool,
    /// Number of the device: what is at the path may be something else by now.
    device: u64,
}

impl Drives {
    /// Mounts what is not mounted yet, those that others may be mounted below first.
    pub(crate) fn mount(&self, mounts: &[Mount]) -> Result<(), String> {
        let mut state = self.state();
        let mut mounts: Vec<&Mount> = mounts.iter().collect();
        mounts.sort_by_key(|mount| mount.path.len());
        for mount in mounts {
            let path = PathBuf::from(std::ffi::OsStr::from_bytes(&mount.path));
            let known = state.mounted.iter().any(|known| {
                known.serial == mount.serial && known.path == path && known.is_there()
            });
            if known {
                continue;
            }
            let device = mount_one(mount, &path).map_err(|error| {
                format!("mount {} at {}: {error}", mount.serial, path.display())
            })?;
            state.mounted.retain(|known| known.serial != mount.serial);
            let (serial, read_only) = (mount.serial.clone(), mount.read_only);
            state.mounted.push(Mounted { serial, path, read_only, device });
        }
        Ok(())
    }

    /// Freezes those that are written. The lock is not held meanwhile: [`thaw`](Self::thaw) must not wait for a disk.
    pub(crate) fn freeze(&self) -> Result<(), String> {
        let folders: Vec<PathBuf> = {
            let state = self.state();
            let writable = state.mounted.iter().filter(|known| !known.read_only);
            writable.filter(|known| known.is_there()).map(|known| known.path.clone()).collect()
        };
        let mut result = Ok(());
        for path in folders {
            let frozen = File::open(&path).and_then(|folder| {
                requests::freeze(&folder)?;
                Ok(folder)
            });
            match frozen {
                Ok(folder) => self.state().frozen.push(folder),
                // Frozen by somebody else already.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                Err(error) => result = Err(format!("freeze {}: {error}", path.display())),
            }
        }
        result
    }

    /// Undoes [`freeze`](Self::freeze).
    pub(crate) fn thaw(&self) -> Result<(), String> {
        let frozen = std::mem::take(&mut self.state().frozen);
        let mut result = Ok(());
        for folder in frozen {
            if let Err(error) = requests::thaw(&folder) {
                result = Err(format!("thaw a drive: {error}"));
            }
        }
        result
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mounted {
    fn is_there(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|found| found.st_dev() == self.device)
    }
}

fn mount_one(mount: &Mount, path: &Path) -> io::Result<u64> {
    let mut disk = find(&mount.serial)?;
    if sectors(&disk)? == 0 {
        look_anew(&disk)?;
        disk = find(&mount.serial)?;
        if sectors(&disk)? == 0 {
            return Err(io::Error::other("the disk is empty"));
        }
    }
    fs::create_dir_all(path)?;
    let mut flags = MountFlags::NOATIME;
    if mount.read_only {
        flags |= MountFlags::RDONLY;
    }
    let options = if mount.read_only { c"" } else { c"discard" };
    rustix::mount::mount(Path::new("/dev").join(&disk), path, "ext4", flags, options)?;
    Ok(fs::metadata(path)?.st_dev())
}

/// The kernel's name of the disk with this serial number.
fn find(serial: &str) -> io::Result<String> {
    for entry in fs::read_dir(BLOCK)? {
        let entry = entry?;
        let found = match fs::read_to_string(entry.path().join("serial")) {
            // Disks of other kinds have none.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            found => found?,
        };
        if found.trim() == serial {
            return Ok(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "there is no such disk"))
}

fn sectors(disk: &str) -> io::Result<u64> {
    let text = fs::read_to_string(Path::new(BLOCK).join(disk).join("size"))?;
    text.trim().parse().map_err(io::Error::other)
}

/// Has the kernel look at a disk as if it had just come.
fn look_anew(disk: &str) -> io::Result<()> {
    let device = fs::canonicalize(Path::new(BLOCK).join(disk).join("device"))?;
    let name = device.file_name().unwrap_or_default().as_bytes();
    fs::write(Path::new(DRIVER).join("unbind"), name)?;
    fs::write(Path::new(DRIVER).join("bind"), name)
}

/// The two requests to a file system that have no safe wrapper.
mod requests {
    use std::{fs::File, io, os::fd::AsRawFd};

    /// `_IOWR('X', 119, int)`.
    const FIFREEZE: libc::Ioctl = 0xC004_5877;
    /// `_IOWR('X', 120, int)`.
    const FITHAW: libc::Ioctl = 0xC004_5878;

    pub(super) fn freeze(folder: &File) -> io::Result<()> {
        call(folder, FIFREEZE)
    }

    pub(super) fn thaw(folder: &File) -> io::Result<()> {
        call(folder, FITHAW)
    }

    #[expect(unsafe_code, reason = "ioctls of a file system")]
    fn call(folder: &File, request: libc::Ioctl) -> io::Result<()> {
        // SAFETY: neither request reads or writes what the argument points to, whatever its number says: the kernel ignores the
        // argument of both. The descriptor is open for the duration of the call.
        if unsafe { libc::ioctl(folder.as_raw_fd(), request, std::ptr::null_mut::<libc::c_int>()) }
            != 0
        {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_is_not_there_is_named() {
        let drives = Drives::default();
        let mount = Mount { serial: "drive7".into(), path: b"/data".to_vec(), read_only: false };
        let error = drives.mount(&[mount]).unwrap_err();
        assert_eq!(error, "mount drive7 at /data: there is no such disk");
        assert_eq!(drives.freeze().and(drives.thaw()), Ok(()), "nothing is mounted");
    }
}
