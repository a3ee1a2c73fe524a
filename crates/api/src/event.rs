//! The timeline of a sandbox: what happened to it, when, and how long each phase took.

use serde::{Deserialize, Serialize};

/// One entry of a sandbox's timeline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Event {
    /// Counts up from 1 in each sandbox, without gaps.
    #[schema(example = 7)]
    pub seq: u64,
    /// RFC 3339, UTC, milliseconds.
    #[schema(example = "2026-11-30T10:15:30.123Z")]
    pub at: String,
    /// The sandbox it happened to.
    pub sandbox_id: crate::SandboxId,
    /// `sandbox.created`, `.forked`, `.running`, `.sleeping`, `.slept`, `.woke`, `.demoted`, `.stopped` (the guest ended
    /// by itself), `.restarted`, `.updated`, `.failed`, `.deleted`, `.adopted` (the daemon was restarted),
    /// `.moved` (taken over from its checkpoint), `.moved_away`, `.checkpoint_failed`, `.checkpoints_resumed`.
    #[serde(rename = "type")]
    #[schema(example = "sandbox.woke")]
    pub kind: String,
    /// One line for a person, such as `woken by a request to port 8000`.
    pub text: String,
    /// Details by kind: `tier`, `cause`, `life`, `phases_ms` (`{"spawn": 21.3, …}`, which sum up to `total_ms`), `code`.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub data: serde_json::Map<String, serde_json::Value>,
}

/// One page of a timeline, oldest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct EventPage {
    /// The entries.
    pub events: Vec<Event>,
    /// Give this as `after` to go on: the `seq` of the last entry told, or what was asked for if there was none.
    pub next_after: u64,
}
