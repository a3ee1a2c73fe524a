//! The saved device state: some 60 KiB that, with the memory file, are the machine.
//!
//! A state is checked twice before QEMU sees it: its digest against what the caller wrote down, and its form by walking every
//! section of the stream ([`stream`]). Then its clock is moved on by the time the machine slept ([`clock`]).

pub mod clock;
pub mod digest;
pub mod stream;

pub use clock::{ClockAdvance, advance};
pub use digest::Digest;
pub use stream::{Stream, StreamError};

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Largest state accepted, bytes. 57 to 89 KiB were measured for one processor; each further one adds some 10 KiB.
pub const STATE_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// What identifies a saved state's content; for the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateMark {
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 of the file.
    pub sha256: Digest,
}

/// A stored state that must not be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Missing or unreadable.
    #[error("read state {path:?}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Cut short, or something was appended.
    #[error("state {path:?} has {found} bytes, expected {expected}")]
    Size {
        /// The file.
        path: PathBuf,
        /// Its size.
        found: u64,
        /// As in the manifest.
        expected: u64,
    },
    /// Not the bytes that were saved.
    #[error("state {path:?} has SHA-256 {found}, expected {expected}")]
    Digest {
        /// The file.
        path: PathBuf,
        /// Of the file.
        found: Digest,
        /// As in the manifest.
        expected: Digest,
    },
    /// The bytes are those that were saved, but not a stream we understand.
    #[error("state {path:?} is not a device state we can restore")]
    Stream {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: StreamError,
    },
}

impl StateMark {
    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self { bytes: bytes.len() as u64, sha256: Digest::of(bytes) }
    }
}

/// Reads a state and checks it against its mark. Blocking; the file is small.
pub fn read_checked(path: &Path, mark: &StateMark) -> Result<Vec<u8>, StateError> {
    use std::io::Read as _;
    let fail = |source| StateError::Read { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(fail)?;
    let found = file.metadata().map_err(fail)?.len();
    if found != mark.bytes || found > STATE_BYTES_MAX {
        return Err(StateError::Size {
            path: path.to_owned(),
            found,
            expected: mark.bytes.min(STATE_BYTES_MAX),
        });
    }
    let mut bytes = Vec::new();
    file.take(STATE_BYTES_MAX).read_to_end(&mut bytes).map_err(fail)?;
    let found = Digest::of(&bytes);
    if found != mark.sha256 {
        return Err(StateError::Digest { path: path.to_owned(), found, expected: mark.sha256 });
    }
    Ok(bytes)
}
