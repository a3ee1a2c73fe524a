//! Files of a sandbox.

use serde::{Deserialize, Serialize};

/// What a path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A regular file.
    File,
    /// A folder.
    Directory,
    /// A symbolic link (not followed).
    Symlink,
    /// A device, socket or pipe.
    Other,
}

/// A file or folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct FileInfo {
    /// Absolute path.
    pub path: String,
    /// What it is.
    pub kind: FileKind,
    /// Bytes.
    pub size: u64,
    /// Permission bits, such as 420 (0644).
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last change, RFC 3339.
    pub modified_at: String,
    /// Where a symbolic link points.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub target: Option<String>,
}

/// Moves or renames.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// Absolute path that exists.
    #[schema(example = "/work/old.txt")]
    pub from: String,
    /// Absolute path it shall have; an existing file there is replaced.
    #[schema(example = "/work/new.txt")]
    pub to: String,
}

/// What a folder holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct FileList {
    /// By name.
    pub files: Vec<FileInfo>,
}

/// Makes a folder and those above it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MkdirRequest {
    /// Absolute path. A folder that exists is a success.
    #[schema(example = "/work/data")]
    pub path: String,
}
