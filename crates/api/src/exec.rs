//! Running commands in a sandbox.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A command to run: exactly one of `argv` and `command`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// Program and arguments, not seen by a shell.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(example = json!(["python3", "-c", "print(1)"]))]
    pub argv: Option<Vec<String>>,
    /// A line for the guest's shell (`bash -c`, or `sh -c` where there is no bash).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub command: Option<String>,
    /// Working folder (absolute); default `/work` where it exists, else the user's home.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cwd: Option<String>,
    /// Added to the environment (the sandbox's own `env`, then these).
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Name or number of the guest's user; default root.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub user: Option<String>,
    /// Text for standard input, which is then closed. At most 1 MiB; more goes through the attach stream.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stdin: Option<String>,
    /// Leave standard input open for `…/stdin` and the attach stream (default: it is empty).
    #[serde(default)]
    pub open_stdin: bool,
    /// The whole process group is killed after this time, milliseconds; absent: never.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub timeout_ms: Option<u64>,
    /// Answer at once instead of waiting for the end. A background command does not keep the sandbox awake by being
    /// asked for: what it does (CPU, connections, timers) does.
    #[serde(default)]
    pub background: bool,
}

/// A command that was started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Exec {
    /// Number of the command in its sandbox; lasts over sleep, not over a restart.
    #[schema(example = "12")]
    pub exec_id: String,
    /// Process id in the guest.
    pub pid: u32,
    /// `running` or `exited`.
    pub status: ExecStatus,
    /// What was run, for a person.
    pub command: String,
    /// How it ended, once it has.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub exit: Option<Exit>,
    /// Bytes written so far to standard output.
    pub stdout_bytes: u64,
    /// Bytes written so far to standard error.
    pub stderr_bytes: u64,
}

/// Whether a command still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExecStatus {
    /// Not ended.
    Running,
    /// Ended; `exit` says how.
    Exited,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Exit {
    /// Exit code, absent when a signal ended it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub signal: Option<i32>,
    /// `timeout_ms` ran out and Dormouse killed it.
    #[serde(default)]
    pub timed_out: bool,
}

/// The answer to a command that was waited for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ExecResult {
    /// Number of the command in its sandbox.
    pub exec_id: String,
    /// Process id in the guest.
    pub pid: u32,
    /// How it ended.
    #[serde(flatten)]
    pub exit: Exit,
    /// Standard output as text (bytes that are no UTF-8 replaced), the first 1 MiB.
    pub stdout: String,
    /// Standard error as text, the first 1 MiB.
    pub stderr: String,
    /// The exact bytes in base 64, where they are no UTF-8.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stdout_base64: Option<String>,
    /// The exact bytes in base 64, where they are no UTF-8.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stderr_base64: Option<String>,
    /// More was written than is in this answer: read it from `…/output`.
    pub truncated: bool,
}

/// Which output of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Output {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A signal for a command's whole process group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignalRequest {
    /// `TERM`, `SIGTERM` or `15`; `KILL` ends everything the command started.
    #[schema(example = "TERM")]
    pub signal: String,
}
