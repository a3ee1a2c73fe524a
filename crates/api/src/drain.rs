//! Putting everything to sleep on disk, before a host goes down.

use serde::{Deserialize, Serialize};

use crate::{ApiError, SandboxId};

/// How a host is emptied.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainRequest {
    /// The daemon ends afterwards; default false. Without it whatever needs a sandbox wakes it again.
    #[serde(default)]
    #[schema(example = true)]
    pub stop: bool,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct DrainReport {
    /// How many were put to sleep on disk.
    #[schema(example = 12)]
    pub slept: u32,
    /// Those that could not be, and why: they would boot from their disks.
    pub left: Vec<DrainFailure>,
}

/// One that could not be put to sleep on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct DrainFailure {
    /// Its id.
    pub id: SandboxId,
    /// Its name.
    pub name: String,
    /// Why.
    pub error: ApiError,
}
