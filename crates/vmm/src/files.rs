//! Files that hold machines: sparse copies, disk overlays, writes that survive a power cut.

mod compare;
mod durable;
mod log;
mod overlay;
mod sparse;

pub use compare::{Compared, PIECE, bring_up_to_date, is_zero};
pub use durable::{replace, sync_folder};
pub(crate) use log::log_tail;
pub use log::shorten_log;
pub use overlay::create_overlay;
pub use sparse::{Copied, Copying, allocated_bytes, bytes_to_copy, copy_sparse, dig_holes};

use std::io;
use std::path::{Path, PathBuf};

/// An operation on a file that failed.
#[derive(Debug, thiserror::Error)]
#[error("{doing} {path:?}")]
pub struct FileError {
    /// A verb phrase: "open", "copy to".
    pub doing: &'static str,
    /// The file.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

impl FileError {
    pub(crate) fn new(doing: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self { doing, path: path.to_owned(), source: source.into() }
    }

    /// The disk, or the user's share of it, is full.
    pub fn is_full(&self) -> bool {
        matches!(self.source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }
}
