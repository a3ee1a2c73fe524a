//! Settings that hold for all sandboxes which do not say otherwise.

use serde::{Deserialize, Serialize};

/// The longest that sandboxes may sleep before they are deleted for it, days.
pub const DELETE_AFTER_IDLE_DAYS_MAX: u32 = 3650;

/// The highest spending limit, GiB times seconds: a million GiB awake for a year.
pub const SPENDING_LIMIT_MAX: u64 = 31_536_000_000_000;

/// The project's settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"delete_after_idle_days": 30, "spending_limit": {"memory_gib_seconds": 1_800_000},
    "spending": {"month": "2026-11", "memory_gib_seconds": 1234, "reached": false}}))]
pub struct Project {
    /// Days that a sandbox may sleep before it is deleted, unless it has a setting of its own; null: as long as it likes.
    pub delete_after_idle_days: Option<u32>,
    /// What all sandboxes together may use in a calendar month (UTC); null: as much as they like.
    #[serde(default)]
    pub spending_limit: Option<SpendingLimit>,
    /// What they have used of it; absent without a limit.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub spending: Option<Spending>,
}

/// What may be used in a month.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"memory_gib_seconds": 1_800_000}))]
pub struct SpendingLimit {
    /// Memory while awake, GiB times seconds (1-31536000000000), as `memory_gib_seconds` of the usage counts it: 1800000 is
    /// 500 hours of one GiB. When it is reached all sandboxes are put to sleep, and none is made or woken until there is more
    /// to spend; none is deleted.
    #[schema(minimum = 1, maximum = 31_536_000_000_000_u64)]
    pub memory_gib_seconds: u64,
}

/// What is used of a limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"month": "2026-11", "memory_gib_seconds": 1234, "reached": false}))]
pub struct Spending {
    /// The calendar month, UTC. In that in which the limit was first set it is counted from then.
    pub month: String,
    /// Memory while awake, GiB times seconds.
    pub memory_gib_seconds: u64,
    /// Whether the limit is reached.
    pub reached: bool,
}

/// Changes of the project's settings; what is absent stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"delete_after_idle_days": 30, "spending_limit": {"memory_gib_seconds": 1_800_000}}))]
pub struct UpdateProject {
    /// Days that a sandbox may sleep before it is deleted (1-3650), unless it has a setting of its own; null: as long as it
    /// likes.
    #[serde(
        default,
        deserialize_with = "crate::sandbox::some_option",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<u32>, minimum = 1, maximum = 3650)]
    pub delete_after_idle_days: Option<Option<u32>>,
    /// What all sandboxes together may use in a calendar month; null: as much as they like.
    #[serde(
        default,
        deserialize_with = "crate::sandbox::some_option",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<SpendingLimit>)]
    pub spending_limit: Option<Option<SpendingLimit>>,
}
