//! What is told about a box.

use serde::{Deserialize, Serialize};

use super::host::{BoxFreeze, BoxStatus};
use crate::checkpoint::CheckpointStatus;

/// A box.
#[derive(
    Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema, schemars::JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct BoxView {
    /// Its id.
    #[schema(example = "k3b5qj2m4x7a")]
    pub id: String,
    /// Its title.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub name: Option<String>,
    /// Why it exists.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub goal: Option<String>,
    /// Where in its life it is.
    pub status: BoxStatus,
    /// Why, where there is more to say.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "frozen and unused for 24 hours")]
    pub status_reason: Option<String>,
    /// Always `amd64`.
    #[schema(example = "amd64")]
    pub arch: String,
    /// Always `microvm`.
    #[schema(example = "microvm")]
    pub placement: String,
    /// Always `snapshot`.
    #[schema(example = "snapshot")]
    pub started_from: String,
    /// Units.
    #[schema(example = 1)]
    pub size: u32,
    /// Virtual processors.
    #[schema(example = 2)]
    pub vcpus: u32,
    /// Memory, GiB.
    #[schema(example = 8.0)]
    pub memory_gb: f64,
    /// Opens the first service.
    #[schema(example = "http://k3b5qj2m4x7a-key.box.localhost:8420/")]
    pub scene_url: String,
    /// Opens the first service for browsers.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub web_url: Option<String>,
    /// Its services.
    pub services: Vec<ServiceView>,
    /// Where unchanged services are.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub external_base_url: Option<String>,
    /// Names of the secrets that it has.
    pub secrets: Vec<String>,
    /// Its toolchains.
    pub toolchains: Vec<String>,
    /// Minutes without use after which it is stopped for good; 0: 24 hours after it froze.
    #[schema(example = 0)]
    pub idle_timeout_min: u64,
    /// When it is frozen, and what it waits for; while it is awake.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub freeze: Option<BoxFreeze>,
    /// When the idle rules stop it for good if nothing uses it, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stops_at: Option<String>,
    /// That this is soon: from half an hour before.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub warning: Option<String>,
    /// Until when it can be brought back, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub restorable_until: Option<String>,
    /// How its checkpoints stand; absent where there are none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub checkpoint: Option<BoxCheckpointView>,
    /// The latest of its uses, RFC 3339.
    #[schema(example = "2026-12-01T12:00:00.000Z")]
    pub last_used_at: String,
    /// When it was started, RFC 3339.
    #[schema(example = "2026-12-01T12:00:00.000Z")]
    pub created_at: String,
    /// When it ended, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ended_at: Option<String>,
    /// The conversation that used it last; while it is there.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub agent: Option<AgentView>,
    /// That conversation is the one that asks.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub this_conversation: bool,
    /// The last line that its AI left for the person.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "The refund goes through; the ledger is next.")]
    pub said: Option<String>,
    /// That its URLs open for some addresses only.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub box_url_access: Option<String>,
}

/// How the checkpoints of a box stand (S19).
#[derive(
    Clone,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    utoipa::ToSchema,
    schemars::JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct BoxCheckpointView {
    /// Seconds of being awake from one to the next; absent: there are none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = 10)]
    pub every_seconds: Option<u64>,
    /// When the newest complete one was taken, RFC 3339; absent: there is none yet.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "2026-12-01T12:00:00.000Z")]
    pub last_at: Option<String>,
    /// How much of its being awake the newest one lacks, seconds; absent: there is none yet.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = 4)]
    pub behind_seconds: Option<u64>,
    /// Bytes that the newest one takes in the store.
    #[schema(example = 61_000_000)]
    pub stored_bytes: u64,
    /// Why none can be taken or kept now; absent: all is well. The box runs on.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<String>,
}

impl From<CheckpointStatus> for BoxCheckpointView {
    fn from(status: CheckpointStatus) -> Self {
        Self {
            every_seconds: Some(status.every_seconds),
            last_at: status.last_at,
            behind_seconds: status.behind_seconds,
            stored_bytes: status.stored_bytes,
            error: status.error,
        }
    }
}

/// A service of a box.
#[derive(
    Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema, schemars::JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct ServiceView {
    /// The name by which it is called.
    #[schema(example = "shop.internal")]
    pub name: String,
    /// The port on which it is called.
    #[schema(example = 8080)]
    pub port: u16,
    /// The port on which its process listens.
    #[schema(example = 8080)]
    pub target_port: u16,
    /// Whether a person can open it.
    pub web: bool,
    /// `box`: its process in the box; `external`: `externalBaseUrl`; `link`: another box.
    #[schema(example = "box")]
    pub mode: String,
    /// Its address in the box; ranges have none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "198.18.0.1")]
    pub address: Option<String>,
    /// Opens it in a browser.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub url: Option<String>,
    /// The box that it is in.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub from_box: Option<String>,
    /// The port there.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub from_port: Option<u16>,
    /// Why a link may reach nothing: the other box has ended, or declares no service on that port.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(
        example = "db.internal:80 leads to port 80 of box k3b5qj2m4x7a, which declares no service there (but on 5432): connections are closed unless a process listens on it"
    )]
    pub warning: Option<String>,
}

/// The services of a box.
#[derive(
    Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema, schemars::JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct ServiceList {
    /// As they are declared.
    pub services: Vec<ServiceView>,
}

/// What the conversation does that used a box last (B37).
#[derive(
    Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema, schemars::JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct AgentView {
    /// `working`, `away`, `idle` or `left`.
    pub state: AgentState,
    /// Seconds since it used the box.
    #[schema(example = 12)]
    pub idle_sec: u64,
    /// The program that it runs in, as it says.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "claude-code")]
    pub client: Option<String>,
}

/// What a conversation does.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    utoipa::ToSchema,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum AgentState {
    /// It uses the box.
    Working,
    /// The box is frozen, or has not been used for ten minutes; the conversation is open.
    Away,
    /// The box has not been used for an hour.
    Idle,
    /// The conversation has ended.
    Left,
}

/// Boxes.
#[derive(
    Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema, schemars::JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct BoxList {
    /// Newest last.
    pub boxes: Vec<BoxView>,
}

/// An answer that says no more than that it was done.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    utoipa::ToSchema,
    schemars::JsonSchema,
)]
pub struct Done {
    /// Always true.
    #[schema(example = true)]
    pub ok: bool,
}

/// A sign of life of a conversation.
#[derive(
    Clone,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    utoipa::ToSchema,
    schemars::JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct Heartbeat {
    /// The program that it runs in.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "claude-code", max_length = 100)]
    pub client: Option<String>,
}

/// One entry of a box's timeline (B2).
#[derive(
    Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema, schemars::JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct BoxEvent {
    /// When, RFC 3339.
    #[schema(example = "2026-12-01T12:00:00.000Z")]
    pub at: String,
    /// The status from then on.
    pub status: BoxStatus,
    /// Why.
    #[schema(example = "nothing needs it")]
    pub reason: String,
    /// A line that its AI left for the person; nothing changed with it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub said: Option<String>,
}

/// A box's timeline.
#[derive(
    Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema, schemars::JsonSchema,
)]
pub struct BoxEvents {
    /// Oldest first.
    pub events: Vec<BoxEvent>,
}
