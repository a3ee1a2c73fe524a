//! Snapshots: a sandbox of one moment, kept under a name, from which others are made.

use serde::{Deserialize, Serialize};

use crate::SandboxId;

/// A snapshot to be taken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "ready"}))]
pub struct TakeSnapshot {
    /// 1-63 characters of a-z, 0-9 and `-`, not at the ends; unique among snapshots.
    #[schema(min_length = 1, max_length = 63, pattern = "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
    pub name: String,
}

/// Memory, devices and disk of a sandbox at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"name": "ready", "of": "k3vq7mzt2abc", "of_name": "web", "taken_at": "2026-11-30T10:15:30.123Z", "image": "default", "cpus": 1, "memory_mib": 512, "stored_bytes": 127_000_000}))]
pub struct Snapshot {
    /// Its name.
    pub name: String,
    /// The sandbox it was taken of; it may be gone.
    pub of: SandboxId,
    /// That sandbox's name then.
    pub of_name: String,
    /// When, RFC 3339.
    pub taken_at: String,
    /// The image below its disk.
    pub image: String,
    /// Virtual processors of what is made from it.
    pub cpus: u32,
    /// Memory of what is made from it, MiB.
    pub memory_mib: u32,
    /// What it takes on the host's disk, bytes.
    pub stored_bytes: u64,
}

/// All snapshots, oldest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"snapshots": []}))]
pub struct SnapshotList {
    /// The snapshots.
    pub snapshots: Vec<Snapshot>,
}
