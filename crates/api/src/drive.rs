//! Drives: disks that outlive sandboxes, attached to one sandbox at a time. Volumes: files that many share and none can write.

use serde::{Deserialize, Serialize};

use crate::SandboxId;

/// Size of a drive, MiB, unless it says otherwise: 10 GiB. It takes room on the host only as it is filled.
pub const DRIVE_MIB_DEFAULT: u64 = 10 * 1024;
/// Least and most size of a drive, MiB: 64 MiB to 1 TiB.
pub const DRIVE_MIB_RANGE: std::ops::RangeInclusive<u64> = 64..=1024 * 1024;
/// Most drives and volumes of a sandbox: as many as its machine has places for.
pub const DRIVES_MAX: usize = 8;

/// A drive to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "data", "size_mib": 2048}))]
pub struct CreateDrive {
    /// 1-63 characters of a-z, 0-9 and `-`, not at the ends; unique among drives.
    #[schema(min_length = 1, max_length = 63, pattern = "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
    pub name: String,
    /// Size of its file system, 64-1048576 MiB; default 10240. It takes room on the host only as it is filled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 64, maximum = 1_048_576)]
    pub size_mib: Option<u64>,
}

/// A drive that a sandbox shall have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "data", "path": "/data"}))]
pub struct AttachDrive {
    /// Its name.
    pub name: String,
    /// Absolute path of the folder in the sandbox where its files are; made if it is not there, and hiding what is in it.
    pub path: String,
    /// The sandbox cannot write it. Needs a drive that was left in order.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

/// A drive of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"name": "data", "path": "/data"}))]
pub struct SandboxDrive {
    /// Its name.
    pub name: String,
    /// Where its files are in the sandbox.
    pub path: String,
    /// The sandbox cannot write it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// It is the sandbox's own copy of a drive of this name, as it was when the sandbox was forked or the snapshot taken; deleted
    /// with the sandbox.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub copy: bool,
}

/// Who has a drive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct DriveUser {
    /// The sandbox.
    pub id: SandboxId,
    /// That sandbox's name.
    pub name: String,
    /// Where the drive's files are in it.
    pub path: String,
}

/// A disk with a file system that outlives sandboxes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"name": "data", "size_mib": 2048, "stored_bytes": 4_194_304, "created_at": "2026-11-30T10:15:30.123Z", "attached_to": {"id": "k3vq7mzt2abc", "name": "web", "path": "/data"}}))]
pub struct Drive {
    /// Its name.
    pub name: String,
    /// Size of its file system, MiB.
    pub size_mib: u64,
    /// What it takes on the host's disk, bytes.
    pub stored_bytes: u64,
    /// When it was made, RFC 3339.
    pub created_at: String,
    /// The sandbox that has it, awake or asleep; absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attached_to: Option<DriveUser>,
}

/// All drives, by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"drives": []}))]
pub struct DriveList {
    /// The drives.
    pub drives: Vec<Drive>,
}

/// A volume that a sandbox has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "models", "path": "/models"}))]
pub struct AttachVolume {
    /// Its name.
    pub name: String,
    /// Absolute path of the folder in the sandbox where its files are; made if it is not there, and hiding what is in it.
    pub path: String,
}

/// Who has a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct VolumeUser {
    /// The sandbox.
    pub id: SandboxId,
    /// That sandbox's name.
    pub name: String,
}

/// Files that many sandboxes share and none can write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"name": "models", "entries": 214, "content_bytes": 734_003_200, "stored_bytes": 736_100_352, "created_at": "2026-11-30T10:15:30.123Z", "attached_to": [{"id": "k3vq7mzt2abc", "name": "web"}]}))]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// Files, folders and links in it.
    pub entries: u64,
    /// Bytes in its files.
    pub content_bytes: u64,
    /// What it takes on the host's disk, bytes, however many have it.
    pub stored_bytes: u64,
    /// When it was made, RFC 3339.
    pub created_at: String,
    /// The sandboxes that have it, awake or asleep.
    pub attached_to: Vec<VolumeUser>,
}

/// All volumes, by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"volumes": []}))]
pub struct VolumeList {
    /// The volumes.
    pub volumes: Vec<Volume>,
}
