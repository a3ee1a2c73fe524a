//! Making, finding and removing taps.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::{Reader, TakeError, link, sys};
use crate::process::ProcessId;

/// A tap of this host, in the network namespace of the thread that made it. Clones are the same tap.
#[derive(Debug, Clone)]
pub struct Tap {
    name: String,
    index: u32,
    fd: Arc<OwnedFd>,
}

/// An operation on a tap that failed.
#[derive(Debug, thiserror::Error)]
#[error("{doing} tap {name:?}")]
pub struct TapError {
    /// "create", "set address of", ...
    pub doing: &'static str,
    /// Its name.
    pub name: String,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// Longest name of an interface, bytes.
const NAME_BYTES_MAX: usize = 15;

impl TapError {
    pub(super) fn new(doing: &'static str, name: &str, source: impl Into<io::Error>) -> Self {
        Self { doing, name: name.to_owned(), source: source.into() }
    }

    /// Another process (a QEMU that still runs) holds it: [`Tap::take`] shares it.
    pub fn is_busy(&self) -> bool {
        self.source.kind() == io::ErrorKind::ResourceBusy
    }
}

impl Tap {
    /// Makes a persistent tap of this name (1 to 15 letters, digits, `-`, `_`, `.`), or opens it if it exists. See [`TapError::is_busy`].
    pub fn create(name: &str) -> Result<Self, TapError> {
        let fail = |source| TapError::new("create", name, source);
        let fits = (1..=NAME_BYTES_MAX).contains(&name.len())
            && name != "."
            && name != ".."
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        if !fits {
            let expected = "expected a name of 1 to 15 letters, digits, '-', '_' or '.'";
            return Err(fail(io::Error::new(io::ErrorKind::InvalidInput, expected)));
        }
        // Not blocking: the flag belongs to the open file, which QEMU shares and would set itself.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = rustix::fs::open("/dev/net/tun", flags, Mode::empty())
            .map_err(|errno| fail(errno.into()))?;
        sys::attach(&fd, name)
            .and_then(|()| sys::persist(&fd))
            .and_then(|()| sys::set_header(&fd))
            .map_err(fail)?;
        Self::with(name, fd)
    }

    /// Opens a persistent tap that exists; else the source is `NotFound`. See [`TapError::is_busy`].
    pub fn open(name: &str) -> Result<Self, TapError> {
        index_of(name)?;
        Self::create(name)
    }

    /// Duplicates the tap from a running QEMU that holds it.
    pub fn take(process: &ProcessId, name: &str) -> Result<Self, TakeError> {
        let fd = crate::descriptor::take_tap(process, name)?;
        Ok(Self::with(name, fd)?)
    }

    fn with(name: &str, fd: OwnedFd) -> Result<Self, TapError> {
        Ok(Self { name: name.to_owned(), index: index_of(name)?, fd: Arc::new(fd) })
    }

    /// Whether the device is still there, and this very one.
    pub fn exists(&self) -> bool {
        index_of(&self.name).is_ok_and(|index| index == self.index)
    }

    /// Removes the device, at once, even if a QEMU still holds it.
    pub fn delete(self) -> Result<(), TapError> {
        link::delete(&self.name, self.index)
    }

    /// Removes a device by name. One that is not there is no error: it returns false.
    pub fn delete_named(name: &str) -> Result<bool, TapError> {
        match index_of(name) {
            Ok(index) => link::delete(name, index).map(|()| true),
            Err(error) if error.source.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its interface index.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// For [`crate::Network::tap`].
    pub fn fd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.fd)
    }

    /// Reads and writes frames in the place of a sleeping guest. While it exists every packet wakes the runtime, so keep it only that long. Call within a
    /// runtime.
    pub fn reader(&self) -> Result<Reader, TapError> {
        let fd = self.fd.try_clone().map_err(|error| TapError::new("read", &self.name, error))?;
        Reader::new(fd).map_err(|error| TapError::new("read", &self.name, error))
    }
}

fn index_of(name: &str) -> Result<u32, TapError> {
    let fail = |errno: rustix::io::Errno| {
        let source = match errno {
            rustix::io::Errno::NODEV => io::ErrorKind::NotFound.into(),
            errno => io::Error::from(errno),
        };
        TapError::new("find", name, source)
    };
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(fail)?;
    rustix::net::netdevice::name_to_index(&socket, name).map_err(fail)
}
