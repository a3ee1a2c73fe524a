//! Files: what is asked and what is told about them. Names and paths are bytes, as Linux has them.

use serde::{Deserialize, Serialize};

/// Entries of a directory that are sent in one message, at most; also bounded by a frame's size.
pub const ENTRIES_PER_MESSAGE: usize = 100;

/// What kind of thing a path is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A device, socket, or pipe.
    Other,
}

/// What is known about one path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    /// What it is (of a symbolic link: the link itself).
    pub kind: EntryKind,
    /// Size in bytes.
    pub size: u64,
    /// Permission bits, `0o7777` at most.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// When its content last changed, in milliseconds since 1970.
    pub modified_ms: i64,
    /// Where a symbolic link points to.
    pub target: Option<Vec<u8>>,
}

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its name, without the directory.
    pub name: Vec<u8>,
    /// What is known about it.
    pub stat: Stat,
}

/// How to write a file. It appears under its name only when it is whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteSpec {
    /// Absolute path.
    pub path: Vec<u8>,
    /// Permission bits; `None`: those of the file that is replaced, or `0o644`.
    pub mode: Option<u32>,
    /// Make missing directories on the way.
    pub parents: bool,
}
