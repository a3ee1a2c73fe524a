//! Settings that hold for all sandboxes which do not say otherwise.

use serde::{Deserialize, Serialize};

/// The longest that sandboxes may sleep before they are deleted for it, days.
pub const DELETE_AFTER_IDLE_DAYS_MAX: u32 = 3650;

/// The project's settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"delete_after_idle_days": 30}))]
pub struct Project {
    /// Days that a sandbox may sleep before it is deleted, unless it has a setting of its own; null: as long as it likes.
    pub delete_after_idle_days: Option<u32>,
}

/// Changes of the project's settings; what is absent stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"delete_after_idle_days": 30}))]
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
}
