//! Making, finding and removing taps.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A tap of this host.
#[derive(Debug, Clone)]
pub struct Tap {
    name: String,
    index: u32,
    fd: Arc<OwnedFd>,
}

/// An operation on a tap that failed.
#[derive(Debug, thiserror::Error)]
#[error("{doing} tap {name}")]
pub struct TapError {
    /// "create", "set up address of", ...
    pub doing: &'static str,
    /// Its name.
    pub name: String,
    /// Why.
    #[source]
    pub source: io::Error,
}

impl Tap {
    /// Makes a persistent tap of this name (at most 15 bytes), or opens it if it exists and nobody holds it (else `ResourceBusy`: see [`Tap::take`]).
    pub fn create(name: &str) -> Result<Self, TapError> {
        let _ = name;
        unimplemented!()
    }

    /// Opens a persistent tap that exists. `NotFound` if it does not, `ResourceBusy` if another process holds it.
    pub fn open(name: &str) -> Result<Self, TapError> {
        let _ = name;
        unimplemented!()
    }

    /// Duplicates the tap from a running QEMU that holds it.
    pub fn take(process: &crate::ProcessId, name: &str) -> Result<Self, crate::tap::TakeError> {
        let fd = crate::descriptor::take_tap(process, name)?;
        Ok(Self { name: name.to_owned(), index: 0, fd: Arc::new(fd) })
    }

    /// Removes the device; it is gone when the last descriptor of it is closed (QEMU's too).
    pub fn delete(self) -> Result<(), TapError> {
        unimplemented!()
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

    /// Reads and writes frames in the place of a sleeping guest. While it exists every packet wakes a task, so keep it only that long.
    pub fn reader(&self) -> Result<super::Reader, TapError> {
        unimplemented!()
    }
}
