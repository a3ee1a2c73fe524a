//! Checkpoints: awake sandboxes kept in an object store, so that another host can take them up.

use serde::{Deserialize, Serialize};

use crate::SandboxId;

/// Seconds of being awake from one checkpoint to the next, unless said otherwise.
pub const EVERY_SECONDS_DEFAULT: u64 = 10;
/// Least and most seconds from one checkpoint to the next.
pub const EVERY_SECONDS_RANGE: std::ops::RangeInclusive<u64> = 1..=600;

/// How often a sandbox is kept in the store while it is awake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"every_seconds": 10}))]
pub struct CheckpointSetting {
    /// Seconds of being awake from the end of one checkpoint to the next, 1-600; default 10.
    #[serde(default = "default_every")]
    #[schema(minimum = 1, maximum = 600)]
    pub every_seconds: u64,
}

impl Default for CheckpointSetting {
    fn default() -> Self {
        Self { every_seconds: EVERY_SECONDS_DEFAULT }
    }
}

fn default_every() -> u64 {
    EVERY_SECONDS_DEFAULT
}

/// How the checkpoints of a sandbox stand (S19).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct CheckpointStatus {
    /// Seconds of being awake from one to the next.
    pub every_seconds: u64,
    /// When the newest complete one was taken, RFC 3339; null: there is none yet.
    pub last_at: Option<String>,
    /// How much of its being awake the newest one lacks, seconds; null: there is none yet.
    pub behind_seconds: Option<u64>,
    /// Bytes that the newest one takes in the store.
    pub stored_bytes: u64,
    /// Bytes of memory and disk that differed for the newest one, by pages of 4 KiB; null: not taken by this daemon.
    pub changed_bytes: Option<u64>,
    /// Bytes that were carried to the store for it.
    pub carried_bytes: Option<u64>,
    /// How long its programs stood for the last one taken while it was awake, milliseconds.
    pub pause_ms: Option<u64>,
    /// Why none can be taken or kept now; null: all is well. The sandbox runs on.
    pub error: Option<String>,
}

/// The newest checkpoint of a sandbox in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"id": "k3vq7mzt2abc", "name": "web", "host": "local (1f00ba11)", "here": false, "taken_at": "2026-11-30T10:15:30.123Z", "asleep": false, "image": "default", "cpus": 1, "memory_mib": 512, "stored_bytes": 61_000_000}))]
pub struct Checkpoint {
    /// The sandbox.
    pub id: SandboxId,
    /// Its name then.
    pub name: String,
    /// The host that has kept it.
    pub host: String,
    /// This host has the sandbox.
    pub here: bool,
    /// When it was taken, RFC 3339.
    pub taken_at: String,
    /// The sandbox slept then.
    pub asleep: bool,
    /// The image below its disk.
    pub image: String,
    /// Virtual processors.
    pub cpus: u32,
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Bytes that it takes in the store.
    pub stored_bytes: u64,
}

/// The newest checkpoint of each sandbox, oldest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"checkpoints": []}))]
pub struct CheckpointList {
    /// The checkpoints.
    pub checkpoints: Vec<Checkpoint>,
}
