//! What is done with a box.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A command to run in a box, or to go on reading.
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
#[schema(example = json!({"command": "npm test", "cwd": "/work"}))]
pub struct BoxExec {
    /// A line for `bash -c`. Exactly one of this and `execId`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "npm test")]
    pub command: Option<String>,
    /// A command that was started before: its output is read on, from `offset`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub exec_id: Option<String>,
    /// Position in its output from which to read; default 0. Only with `execId`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub offset: Option<u64>,
    /// Working folder; default `/work`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = "/work")]
    pub cwd: Option<String>,
    /// Added to its environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Answer at once; it goes on by itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub background: bool,
    /// Leave its standard input open, for `POST /v1/boxes/{id}/execs/{exec_id}/stdin`; otherwise it is empty.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[schemars(skip)]
    pub open_stdin: bool,
    /// It changes nothing in the box.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// Kill it after so many seconds (1-86400); default: never.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(minimum = 1, maximum = 86_400, example = 600)]
    #[schemars(range(min = 1, max = 86_400))]
    pub timeout_sec: Option<u64>,
    /// Wait for its end for so long, seconds (0-3600); then the answer says how to read on. Default 3600; over MCP what the client can
    /// wait.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(minimum = 0, maximum = 3600, example = 60)]
    #[schemars(range(min = 0, max = 3600))]
    pub wait_sec: Option<u64>,
    /// Most bytes of output in the answer (1-1048576); default 1048576, over MCP 30000.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(minimum = 1, maximum = 1_048_576)]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub max_bytes: Option<u64>,
}

/// What came of a command.
#[derive(
    Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema, schemars::JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct BoxExecResult {
    /// Its id, to read on.
    #[schema(example = "hnkainteaodl")]
    pub exec_id: String,
    /// It has not ended.
    pub running: bool,
    /// How it ended; absent while it runs, or where a signal ended it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = 0)]
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub signal: Option<i32>,
    /// `timeoutSec` ran out, and it was killed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub timed_out: bool,
    /// What it wrote to standard output and standard error, in the order in which it came; bytes that are no UTF-8 replaced.
    #[schema(example = "ok\n")]
    pub output: String,
    /// Position in the output after what is told here.
    #[schema(example = 3)]
    pub next_offset: u64,
    /// More was written than is told here: read on from `nextOffset`.
    pub truncated: bool,
    /// That the box was thawed for it, or booted anew.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub note: Option<String>,
}

/// A command that was run in a box.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BoxCommand {
    /// Its id, to read its output (`GET /v1/boxes/{id}/execs/{exec_id}/output`, or `POST /v1/boxes/{id}/exec` with `execId`).
    #[schema(example = "hnkainteaodl")]
    pub exec_id: String,
    /// Its process id in the box.
    #[schema(example = 412)]
    pub pid: u32,
    /// What was run, for a person.
    #[schema(example = "npm test")]
    pub command: String,
    /// It has not ended.
    pub running: bool,
    /// How it ended; absent while it runs, or where a signal ended it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = 0)]
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub signal: Option<i32>,
    /// `timeoutSec` ran out, and it was killed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub timed_out: bool,
    /// Bytes that it has written so far.
    #[schema(example = 3)]
    pub output_bytes: u64,
}

/// The commands of a box since it was booted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BoxCommands {
    /// Newest last.
    pub execs: Vec<BoxCommand>,
}

/// One process in a box.
#[derive(
    Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema, schemars::JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct BoxProcess {
    /// Process id.
    #[schema(example = 412)]
    pub pid: u32,
    /// Its parent's.
    #[schema(example = 1)]
    pub ppid: u32,
    /// Resident memory, MiB.
    #[schema(example = 24)]
    pub memory_mib: u64,
    /// Processor time used, seconds.
    #[schema(example = 3)]
    pub cpu_sec: u64,
    /// TCP ports on which it listens.
    pub listens: Vec<u16>,
    /// What runs.
    #[schema(example = "python3 -m http.server 8080")]
    pub command: String,
}

/// The processes of a box.
#[derive(
    Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema, schemars::JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct BoxProcesses {
    /// By process id.
    pub processes: Vec<BoxProcess>,
}

/// How services are reached.
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
pub struct BoxWire {
    /// The service's name.
    #[schema(example = "shop.internal")]
    pub service: String,
    /// Its port, where the name has several.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(minimum = 1, maximum = 65535, example = 8080)]
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<u16>,
    /// `box` or `external`.
    #[schema(example = "box")]
    pub mode: String,
}

/// Checkpoints of a box.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(example = json!({"everySeconds": 10}))]
pub struct BoxCheckpoint {
    /// Seconds of being awake from the end of one checkpoint to the next, 1-600; default 10. Null: there are to be none any more, and
    /// what the store has of it is removed.
    #[serde(
        default,
        deserialize_with = "crate::sandbox::some_option",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<u64>, minimum = 1, maximum = 600, example = 10)]
    pub every_seconds: Option<Option<u64>>,
}

impl BoxCheckpoint {
    /// How often; `None`: never.
    pub fn every(&self) -> Option<u64> {
        self.every_seconds.unwrap_or(Some(crate::checkpoint::EVERY_SECONDS_DEFAULT))
    }
}

/// The secrets of a box.
#[derive(
    Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema, schemars::JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct BoxSecretNames {
    /// Names of all that it has: environment variables of the commands that start from now on.
    #[schema(example = json!(["API_TOKEN"]))]
    pub secrets: Vec<String>,
}

/// Secrets to add to a box.
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
pub struct BoxSecrets {
    /// Names of stored secrets.
    #[schema(example = json!(["API_TOKEN"]))]
    pub add: Vec<String>,
}
