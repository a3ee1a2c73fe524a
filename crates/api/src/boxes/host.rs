//! A box as its host knows it: the settings of its policy, and what that policy makes of its use.
//!
//! The rest of a box (goal, services, URLs, who works with it) the control plane keeps.

use serde::{Deserialize, Serialize};

const MINUTE_MS: u64 = 60_000;
const HOUR_MS: u64 = 60 * MINUTE_MS;

/// The settings of a box's policy, all in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BoxLimits {
    /// Without activity for so long it is frozen (B8).
    pub freeze_after_ms: u64,
    /// Requests through its URLs are activity until so long after the last use (B9).
    pub url_window_ms: u64,
    /// Commands in the background keep it awake until so long after the last use (B11).
    pub background_window_ms: u64,
    /// A recording keeps it awake until so long after the last use (B12).
    pub recording_window_ms: u64,
    /// Frozen, it is stopped for good so long after the later of its last use and its freezing (B23).
    pub stop_after_ms: u64,
    /// Instead of that: so long after its last use, frozen or not (B24).
    pub idle_timeout_ms: Option<u64>,
    /// One that was stopped by these rules is kept for so long (B27).
    pub keep_copy_ms: u64,
}

impl Default for BoxLimits {
    /// As the B-rules have it.
    fn default() -> Self {
        Self {
            freeze_after_ms: 10 * MINUTE_MS,
            url_window_ms: 2 * HOUR_MS,
            background_window_ms: HOUR_MS,
            recording_window_ms: HOUR_MS,
            stop_after_ms: 24 * HOUR_MS,
            idle_timeout_ms: None,
            keep_copy_ms: 24 * HOUR_MS,
        }
    }
}

/// Where in its life a box is (B1).
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    utoipa::ToSchema,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum BoxStatus {
    /// It is being made.
    Claimed,
    /// It can be used.
    Ready,
    /// A person holds its screen.
    Takeover,
    /// Memory and disk are kept, nothing of it runs; what acts on it thaws it.
    Frozen,
    /// It is being removed.
    Stopping,
    /// Stopped for good.
    Terminated,
    /// It failed, or its host is gone.
    Interrupted,
}

impl BoxStatus {
    /// The word as it stands in answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Claimed => "claimed",
            Self::Ready => "ready",
            Self::Takeover => "takeover",
            Self::Frozen => "frozen",
            Self::Stopping => "stopping",
            Self::Terminated => "terminated",
            Self::Interrupted => "interrupted",
        }
    }

    /// Whether it is neither gone nor on its way there: it counts for the plan (B42).
    pub fn is_live(self) -> bool {
        match self {
            Self::Claimed | Self::Ready | Self::Takeover | Self::Frozen => true,
            Self::Stopping | Self::Terminated | Self::Interrupted => false,
        }
    }
}

/// Why a box is not frozen yet (B13).
#[derive(
    Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema, schemars::JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct BoxBlocker {
    /// `background`, `url`, `recording`, each until a time; `takeover`, `foreground`, `link`, `phone` until they end.
    #[schema(example = "background")]
    pub kind: String,
    /// Until when at the latest, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "2026-12-01T13:00:00.000Z")]
    pub until: Option<String>,
}

/// When a box is frozen, and what it waits for (B13).
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
pub struct BoxFreeze {
    /// When, if nothing changes, RFC 3339; absent while something holds it whose end nobody knows.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "2026-12-01T12:10:00.000Z")]
    pub at: Option<String>,
    /// What it waits for besides ten quiet minutes.
    pub blocked_by: Vec<BoxBlocker>,
}

/// What a host says of a box beside its sandbox. Times are milliseconds since 1970, as of now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoxLife {
    /// Where in its life it is.
    pub status: BoxStatus,
    /// When it is frozen, and what it waits for.
    pub freeze: BoxFreeze,
    /// The latest of its uses (B5).
    pub last_used_unix_ms: u64,
    /// Since when it has been frozen, or is of no more use.
    pub rests_since_unix_ms: Option<u64>,
    /// When the rules of idleness stop it for good, if nothing uses it (B25).
    pub stops_at_unix_ms: Option<u64>,
    /// When they have.
    pub stopped_unix_ms: Option<u64>,
    /// Until when it can be brought back then (B27).
    pub restorable_until_unix_ms: Option<u64>,
    /// Why it is what it is, where there is more to say than its status (B2, B29).
    pub reason: Option<String>,
    /// How often it was booted from its disk after its machine had ended by itself: what ran before the last of these is lost.
    pub boots: u64,
}
