//! Running commands in a sandbox.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Most bytes of one argument, and of one variable of the environment with its name and the `=`: Linux takes 128 KiB with
/// the NUL at the end. All together may have 2 MiB there.
pub const ARGUMENT_BYTES_MAX: usize = 128 * 1024 - 1;

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
    /// Id of the command; lasts over sleep, not over a restart.
    #[schema(example = "hnkainteaodl")]
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
    /// Id of the command.
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

/// Commands of a sandbox's present life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ExecList {
    /// Newest last.
    pub execs: Vec<Exec>,
}

/// Text messages of the attach stream. Bytes go in binary messages: the first byte says which stream they belong to
/// (0 standard input, 1 standard output, 2 standard error).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AttachMessage {
    /// Server: the command has ended, all of its output was told; the last message.
    Exit(Exit),
    /// Server: it cannot go on; the last message.
    Error(crate::ApiError),
    /// Server: the next bytes of this stream begin here, because those before are no longer kept.
    Gap {
        /// Which stream.
        stream: Output,
        /// Position of the next byte.
        offset: u64,
    },
    /// Server: this many bytes of standard input, counted over this connection, were handed to the command.
    StdinTaken {
        /// Bytes.
        bytes: u64,
    },
    /// Client: standard input ends here.
    CloseStdin,
    /// Client: send a signal to the command's process group.
    Signal {
        /// `TERM`, `SIGTERM` or `15`.
        signal: String,
    },
}

/// First byte of a binary attach message that carries standard input.
pub const ATTACH_STDIN: u8 = 0;
/// First byte of a binary attach message that carries standard output.
pub const ATTACH_STDOUT: u8 = 1;
/// First byte of a binary attach message that carries standard error.
pub const ATTACH_STDERR: u8 = 2;

/// Numbers of the signals that may be named, as Linux on x86-64 counts them.
const SIGNALS: [(&str, i32); 31] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("STKFLT", 16),
    ("CHLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("XCPU", 24),
    ("XFSZ", 25),
    ("VTALRM", 26),
    ("PROF", 27),
    ("WINCH", 28),
    ("IO", 29),
    ("PWR", 30),
    ("SYS", 31),
];

/// The number of a signal given as `TERM`, `SIGTERM` or `15` (1-64); `None`: there is no such signal.
pub fn signal_number(text: &str) -> Option<i32> {
    // One way to write each number: no sign, no leading zero.
    if let Ok(number) = text.parse::<i32>()
        && !text.starts_with(['+', '0'])
    {
        return (1..=64).contains(&number).then_some(number);
    }
    let name = text.strip_prefix("SIG").unwrap_or(text);
    SIGNALS.iter().find(|(known, _)| *known == name).map(|&(_, number)| number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_by_name_and_number() {
        let check = |text, number| assert_eq!(signal_number(text), number, "{text}");
        check("TERM", Some(15));
        check("SIGKILL", Some(9));
        check("34", Some(34));
        for bad in ["0", "+15", "015", "65", "-9", "term", "SIG", "", "SIGSIGTERM"] {
            check(bad, None);
        }
    }
}
