//! Running programs: what is asked, and what is told about them.

use serde::{Deserialize, Serialize};

/// Names an exec in one guest. Never given twice, also not after a reboot: its upper half is random per boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ExecId(pub u64);

impl std::fmt::Display for ExecId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Program {
    /// A program and its arguments; the first is looked up in `PATH` unless it holds a slash.
    Argv(Vec<String>),
    /// A line for the shell: `/bin/bash -c`, or `/bin/sh -c` where there is no bash.
    Shell(String),
}

/// Where a program's standard input comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stdin {
    /// `/dev/null`.
    Null,
    /// A pipe that is filled by [`Request::ExecStdin`](crate::Request::ExecStdin).
    Pipe,
}

/// How to run a program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecSpec {
    /// What to run.
    pub program: Program,
    /// Absolute working directory; `None`: the user's home, or `/`.
    pub cwd: Option<String>,
    /// Added to `PATH`, `HOME`, `USER`, `LOGNAME`, `SHELL`, `LANG`; same names replace those.
    pub env: Vec<(String, String)>,
    /// Name or number of the user; `None`: root.
    pub user: Option<String>,
    /// Standard input.
    pub stdin: Stdin,
    /// The whole exec is killed after so many milliseconds; `None`: never.
    pub timeout_ms: Option<u64>,
    /// A name for people and lists; not looked at otherwise.
    pub name: Option<String>,
}

impl ExecSpec {
    /// A shell line with all defaults.
    pub fn shell(line: impl Into<String>) -> Self {
        Self::new(Program::Shell(line.into()))
    }

    /// A program and arguments with all defaults.
    pub fn argv<S: Into<String>>(argv: impl IntoIterator<Item = S>) -> Self {
        Self::new(Program::Argv(argv.into_iter().map(Into::into).collect()))
    }

    fn new(program: Program) -> Self {
        Self {
            program,
            cwd: None,
            env: Vec::new(),
            user: None,
            stdin: Stdin::Null,
            timeout_ms: None,
            name: None,
        }
    }
}

/// How many characters a terminal shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Characters of a line.
    pub columns: u16,
    /// Lines.
    pub rows: u16,
}

/// How to run a program on a terminal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSpec {
    /// The program. Its `stdin` is not looked at: it is the terminal.
    pub exec: ExecSpec,
    /// Kind of the terminal, for `TERM`; the exec's own `env` goes before.
    pub term: String,
    /// Its size from the first byte on.
    pub size: TerminalSize,
}

/// How an exec ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Its exit code, if it exited by itself.
    pub code: Option<i32>,
    /// The signal that ended it, otherwise.
    pub signal: Option<i32>,
    /// It was ended by its `timeout_ms`.
    pub timed_out: bool,
    /// When, by the guest's wall clock, in milliseconds since 1970.
    pub at_ms: i64,
    /// Bytes written to stdout and stderr by then, which is where a reader of its result may stop.
    pub output_end: OutputFrom,
}

/// A position in both output streams, in bytes since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct OutputFrom {
    /// In stdout.
    pub stdout: u64,
    /// In stderr.
    pub stderr: u64,
}

/// Whether an exec still runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExecState {
    /// Its first process runs.
    Running,
    /// Its first process ended; processes that it left behind may run on.
    Ended(Ended),
}

/// One line of the list of execs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecInfo {
    /// Its id.
    pub id: ExecId,
    /// Process id of its first process.
    pub pid: u32,
    /// Name given at the start.
    pub name: Option<String>,
    /// The command for people, cut to [`COMMAND_SHOWN_MAX`] bytes.
    pub command: String,
    /// When it began, by the guest's wall clock, in milliseconds since 1970.
    pub started_ms: i64,
    /// Whether it runs.
    pub state: ExecState,
    /// The oldest output still kept.
    pub output_start: OutputFrom,
    /// The end of the output so far.
    pub output_end: OutputFrom,
}

/// Bytes of a command shown in a list.
pub const COMMAND_SHOWN_MAX: usize = 200;

/// Which output stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A piece of output: the payload of a `Data` frame on an output channel is a byte for the stream (1 or 2), the offset
/// as a little-endian `u64`, and the bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputChunk {
    /// Which stream.
    pub stream: Stream,
    /// Position of the first byte in that stream. Larger than where the last chunk ended: what lay between was dropped.
    pub offset: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
}

/// Bytes before the output in a chunk's payload.
pub const CHUNK_HEADER_LEN: usize = 9;

impl OutputChunk {
    /// The payload.
    pub fn to_payload(&self) -> Vec<u8> {
        let mut payload = Vec::with_capacity(CHUNK_HEADER_LEN + self.bytes.len());
        payload.push(match self.stream {
            Stream::Stdout => 1,
            Stream::Stderr => 2,
        });
        payload.extend_from_slice(&self.offset.to_le_bytes());
        payload.extend_from_slice(&self.bytes);
        payload
    }

    /// The chunk in a payload, or none if it is malformed.
    pub fn from_payload(payload: &[u8]) -> Option<Self> {
        let (&stream, rest) = payload.split_first()?;
        let (offset, bytes) = rest.split_first_chunk::<8>()?;
        let stream = match stream {
            1 => Stream::Stdout,
            2 => Stream::Stderr,
            _ => return None,
        };
        Some(Self { stream, offset: u64::from_le_bytes(*offset), bytes: bytes.to_vec() })
    }
}
