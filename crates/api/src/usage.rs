//! What a sandbox has used: the figures of a bill (S23).

use serde::{Deserialize, Serialize};

/// Bytes of a gigabyte, as bills count them.
pub const GB_BYTES: f64 = 1e9;
/// Seconds of a month, as bills count them: 730 hours.
pub const MONTH_SECONDS: f64 = 730.0 * 3600.0;

/// What one sandbox, or several together, have used since they were made.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Usage {
    /// Seconds awake: its guest ran.
    #[schema(example = 5400.25)]
    pub awake_seconds: f64,
    /// Seconds asleep in memory.
    pub asleep_memory_seconds: f64,
    /// Seconds asleep on disk.
    pub asleep_disk_seconds: f64,
    /// Seconds off or failed: no machine, and no memory kept.
    pub off_seconds: f64,
    /// Seconds of processor time of its own programs, as its guest counts them.
    pub cpu_seconds: f64,
    /// Memory while awake: GiB times seconds.
    pub memory_gib_seconds: f64,
    /// Bytes that it keeps on the host's disk now: memory, disk, device state.
    pub state_bytes: u64,
    /// What it kept while it was not awake: gigabytes times months of 730 hours.
    pub state_gb_months: f64,
}

impl Usage {
    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            awake_seconds: self.awake_seconds + other.awake_seconds,
            asleep_memory_seconds: self.asleep_memory_seconds + other.asleep_memory_seconds,
            asleep_disk_seconds: self.asleep_disk_seconds + other.asleep_disk_seconds,
            off_seconds: self.off_seconds + other.off_seconds,
            cpu_seconds: self.cpu_seconds + other.cpu_seconds,
            memory_gib_seconds: self.memory_gib_seconds + other.memory_gib_seconds,
            state_bytes: self.state_bytes + other.state_bytes,
            state_gb_months: self.state_gb_months + other.state_gb_months,
        }
    }
}

/// What one sandbox has used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct SandboxUsage {
    /// Its id.
    pub id: crate::SandboxId,
    /// Its name.
    #[schema(example = "web")]
    pub name: String,
    /// The name of the box that it is; absent where it is none, or has no name.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "Refunds in the member centre")]
    pub box_name: Option<String>,
    /// Since when it is counted: when it was made, RFC 3339.
    pub since: String,
    /// What it has used.
    pub usage: Usage,
}

/// What all have used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct UsageReport {
    /// Each that exists, oldest first.
    pub sandboxes: Vec<SandboxUsage>,
    /// Those that were deleted, together.
    pub deleted: Usage,
    /// All together.
    pub total: Usage,
}
