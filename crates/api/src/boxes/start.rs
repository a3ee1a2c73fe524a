//! Starting a box (T-rules).

use serde::{Deserialize, Serialize};

use super::view::BoxView;

/// Most characters of a goal; longer ones are cut (T1).
pub const GOAL_CHARS_MAX: usize = 500;
/// Most characters of a box's title.
pub const TITLE_CHARS_MAX: usize = 200;
/// Most services of a box.
pub const SERVICES_MAX: usize = 64;
/// The longest `idleTimeoutMin`: a week. A larger one is cut to it (B24).
pub const IDLE_TIMEOUT_MIN_MAX: u64 = 10_080;
/// The longest `waitForCapacitySec` (T15).
pub const WAIT_FOR_CAPACITY_SEC_MAX: u64 = 1_800;
/// Sizes that there are (T3).
pub const SIZES: [u32; 4] = [1, 2, 4, 8];
/// Ports in a box that belong to its guest agent (T8).
pub const AGENT_PORTS: [u16; 2] = [80, 9095];

/// What a box shall be.
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
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(example = json!({"goal": "The refund button books a refund; done when it works in the browser.", "services": [{"name": "shop.internal", "port": 8080, "web": true}]}))]
pub struct StartBox {
    /// Its title for people, at most 200 characters. Without it they see only its id.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "Refunds in the member centre", max_length = 200)]
    pub name: Option<String>,
    /// One or two sentences, in the language of the person who reads it: why this box exists, and what done looks like. Cut at 500
    /// characters.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "The refund button books a refund; done when it works in the browser.")]
    pub goal: Option<String>,
    /// What runs in it, by the names that its programs call; at most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 64)]
    pub services: Vec<ServiceSpec>,
    /// Where the services are that have not been changed: `http(s)://host[/path]`. With it every service starts in external mode.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "https://staging.example.com")]
    pub external_base_url: Option<String>,
    /// Names of stored secrets, injected as environment variables.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 64)]
    pub secrets: Vec<String>,
    /// 1 (default), 2, 4 or 8 units of processors, memory and disk.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(minimum = 1, maximum = 8, example = 1)]
    #[schemars(range(min = 1, max = 8))]
    pub size: Option<u32>,
    /// Languages that the box needs. Naming one changes nothing: the image has python3 (3.11, without pip and venv), and neither Go nor
    /// Node; install what is missing with apt-get, where the box has a network. `toolchainsNote` says it. Others are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 16)]
    pub toolchains: Vec<String>,
    /// Stop it for good after so many minutes without use, frozen or not; 0: 24 hours after it froze. At most 10080.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(minimum = 0, example = 0)]
    pub idle_timeout_min: Option<u64>,
    /// Id of a box that was stopped for idleness, to be brought back as it was when it froze. Its other settings are its own.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub restore: Option<String>,
    /// How long to wait for room, seconds (0-1800).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(minimum = 0, maximum = 1800, example = 0)]
    #[schemars(range(min = 0, max = 1800))]
    pub wait_for_capacity_sec: Option<u64>,
}

/// A service that a box has, or reaches in another box.
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
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ServiceSpec {
    /// A host name (a-z, 0-9, `-`, `.`), or a private IPv4 address or range.
    #[schema(example = "shop.internal")]
    pub name: String,
    /// The port on which it is called.
    #[schema(minimum = 1, maximum = 65535, example = 8080)]
    #[schemars(range(min = 1, max = 65535))]
    pub port: u16,
    /// The port on which its process listens; default `port`. Never 80 or 9095.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(minimum = 1, maximum = 65535, example = 8080)]
    #[schemars(range(min = 1, max = 65535))]
    pub target_port: Option<u16>,
    /// A person can open it in a browser: it gets a URL.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[schema(example = true)]
    pub web: bool,
    /// It is in this other box.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub from_box: Option<String>,
    /// The port there. Default: where the service of the same name listens there, else the only one on `port`, else the only one that
    /// there is; else `port`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(minimum = 1, maximum = 65535, example = 8080)]
    #[schemars(range(min = 1, max = 65535))]
    pub from_port: Option<u16>,
}

impl ServiceSpec {
    /// The port on which its process listens.
    pub fn target(&self) -> u16 {
        self.target_port.unwrap_or(self.port)
    }

    /// Whether it is in this box, and not reached in another.
    pub fn is_here(&self) -> bool {
        self.from_box.is_none()
    }
}

/// What is changed of a box; what is left out stays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(example = json!({"goal": "The refund button books a refund, in both currencies."}))]
pub struct UpdateBox {
    /// What people call it, one line of 1-200 characters; null: nothing.
    #[serde(
        default,
        deserialize_with = "crate::sandbox::some_option",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>, min_length = 1, max_length = 200, example = "shop")]
    pub name: Option<Option<String>>,
    /// Why it exists and what done looks like; cut to 500 characters; null: nothing.
    #[serde(
        default,
        deserialize_with = "crate::sandbox::some_option",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<String>, example = "The refund button books a refund.")]
    pub goal: Option<Option<String>>,
    /// Minutes without use after which it is stopped for good, counted from its last use: one that has been unused for longer is
    /// stopped at once. 0 or null: 24 hours after it froze. More than 10080 are cut to that, as the answer tells.
    #[serde(
        default,
        deserialize_with = "crate::sandbox::some_option",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<u64>, minimum = 0, example = 120)]
    pub idle_timeout_min: Option<Option<u64>>,
}

/// A box that was started.
#[derive(
    Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema, schemars::JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct StartedBox {
    /// The box.
    #[serde(flatten)]
    pub started: BoxView,
    /// What of the toolchains was ignored.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub toolchains_note: Option<String>,
    /// That `idleTimeoutMin` was cut.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub idle_timeout_note: Option<String>,
    /// What to do next, in one line.
    #[schema(example = "Copy your project with sandbox_sync, then run it with sandbox_exec.")]
    pub next: String,
}
