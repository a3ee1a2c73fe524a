//! Local sockets whose path may be longer than a socket's address.
//!
//! An address holds 107 bytes of path; a data folder may be deeper. Through `/proc/self/fd/<folder>/<name>` any path is short,
//! and the kernel finds the same file.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

/// Most bytes of a path in a socket's address: `sun_path` has 108 with the zero at its end.
const ADDRESS_BYTES_MAX: usize = 107;

/// A way to a socket that fits into an address. Good while it lives.
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    _folder: Option<OwnedFd>,
}

impl SocketPath {
    /// To this path, whose folder must be there if it is too long.
    ///
    /// # Errors
    ///
    /// The folder cannot be entered.
    pub fn to(path: &Path) -> io::Result<Self> {
        if path.as_os_str().len() <= ADDRESS_BYTES_MAX {
            return Ok(Self { path: path.to_owned(), _folder: None });
        }
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not the path of a socket"));
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(folder, flags, Mode::empty())?;
        let path = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
        Ok(Self { path, _folder: Some(folder) })
    }

    /// The path to bind or to connect to.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
