//! Terminals in a sandbox: programs that people look at and type to.
//!
//! A terminal is a command (`exec`) that runs on a pseudo-terminal, and has the command's number. Besides, the host keeps
//! what is on its screen, so that whoever joins sees it, asleep or not.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::exec::{ExecStatus, Exit};
use crate::host::Answer;
use crate::{ApiError, SandboxId};

/// Fewest and most columns and rows of a terminal.
pub const TERMINAL_SIDE_RANGE: RangeInclusive<u16> = 2..=500;
/// Columns of a terminal, unless it says otherwise.
pub const TERMINAL_COLUMNS_DEFAULT: u16 = 80;
/// Rows of a terminal, unless it says otherwise.
pub const TERMINAL_ROWS_DEFAULT: u16 = 24;
/// `TERM` of a terminal, unless it says otherwise.
pub const TERM_DEFAULT: &str = "xterm-256color";

/// What to run on a new terminal: `argv`, `command`, or without either a login shell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"argv": ["htop"], "columns": 120, "rows": 40}))]
pub struct TerminalRequest {
    /// Program and arguments, not seen by a shell.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub argv: Option<Vec<String>>,
    /// A line for the guest's shell (`bash -c`, or `sh -c` where there is no bash).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub command: Option<String>,
    /// Working folder (absolute); default `/work` where it exists, else the user's home.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cwd: Option<String>,
    /// Added to the environment (the sandbox's own `env`, then these).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Name or number of the guest's user; default root.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub user: Option<String>,
    /// Kind of the terminal, for `TERM`; default `xterm-256color`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub term: Option<String>,
    /// Characters of a line, 2-500; default 80.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(minimum = 2, maximum = 500)]
    pub columns: Option<u16>,
    /// Lines, 2-500; default 24.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(minimum = 2, maximum = 500)]
    pub rows: Option<u16>,
}

/// How many characters a terminal shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"columns": 120, "rows": 40}))]
pub struct TerminalSize {
    /// Characters of a line, 2-500.
    #[schema(minimum = 2, maximum = 500)]
    pub columns: u16,
    /// Lines, 2-500.
    #[schema(minimum = 2, maximum = 500)]
    pub rows: u16,
}

impl Default for TerminalSize {
    fn default() -> Self {
        Self { columns: TERMINAL_COLUMNS_DEFAULT, rows: TERMINAL_ROWS_DEFAULT }
    }
}

/// A terminal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Terminal {
    /// Its number; also that of its command under `execs`. Lasts over sleep, not over a restart.
    #[schema(example = "hnkainteaodl")]
    pub terminal_id: String,
    /// Process id in the guest.
    pub pid: u32,
    /// `running` or `exited`.
    pub status: ExecStatus,
    /// What was run, for a person.
    pub command: String,
    /// Characters of a line.
    pub columns: u16,
    /// Lines.
    pub rows: u16,
    /// How many look at it now.
    pub viewers: u32,
    /// How it ended, once it has.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub exit: Option<Exit>,
}

/// Terminals of a sandbox's present life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct TerminalList {
    /// Newest last.
    pub terminals: Vec<Terminal>,
}

/// What is on a terminal's screen, as text without colours.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct TerminalScreen {
    /// Its lines, one after the other, without blanks at their ends.
    pub text: String,
    /// Line of the cursor, from 0.
    pub cursor_row: u16,
    /// Column of the cursor, from 0.
    pub cursor_column: u16,
    /// Characters of a line.
    pub columns: u16,
    /// Lines.
    pub rows: u16,
}

/// Text messages of a terminal's stream. Bytes go in binary messages: from the client what was typed, from the server what is
/// to be shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TerminalMessage {
    /// Server: the next binary message draws the whole screen anew: the first thing told, and again after a viewer was too
    /// slow for some of the output.
    Screen(TerminalSize),
    /// Server: somebody has changed the size. Client: change the size, for all who look at it.
    Size(TerminalSize),
    /// Server: its program has ended, and all of its output was told; the last message.
    Exit(Exit),
    /// Server: it cannot go on; the last message.
    Error(ApiError),
}

/// Something for one who looks at a terminal.
#[derive(Clone, Debug)]
pub enum TerminalEvent {
    /// The whole screen: its size, and bytes that draw it on an empty one.
    Screen(TerminalSize, Bytes),
    /// What the program has printed.
    Output(Bytes),
    /// The size has changed.
    Size(TerminalSize),
    /// The program has ended, and all of its output was told.
    Exit(Exit),
}

/// What a [`Host`](crate::host::Host) does about terminals.
///
/// Looking neither wakes a sandbox nor holds it awake, and works asleep. Typing wakes it.
#[async_trait]
pub trait TerminalHost: Send + Sync {
    /// Starts a program on a terminal of its own.
    async fn terminal_start(
        &self,
        id: &SandboxId,
        request: TerminalRequest,
    ) -> Result<Answer<Terminal>, ApiError>;

    /// Terminals of the present life, newest last. Asleep is fine.
    async fn terminal_list(&self, id: &SandboxId) -> Result<Vec<Terminal>, ApiError>;

    /// One terminal. Asleep is fine.
    async fn terminal_view(&self, id: &SandboxId, terminal: &str) -> Result<Terminal, ApiError>;

    /// What is on its screen. Asleep is fine.
    async fn terminal_screen(
        &self,
        id: &SandboxId,
        terminal: &str,
    ) -> Result<TerminalScreen, ApiError>;

    /// Looks at it: the screen first, then what happens. The channel closes after the exit, or with an error in its place.
    /// Asleep is fine.
    async fn terminal_attach(
        &self,
        id: &SandboxId,
        terminal: &str,
    ) -> Result<mpsc::Receiver<Result<TerminalEvent, ApiError>>, ApiError>;

    /// Types; answers when the terminal has taken it. Wakes.
    async fn terminal_input(
        &self,
        id: &SandboxId,
        terminal: &str,
        bytes: Bytes,
    ) -> Result<Answer<()>, ApiError>;

    /// Changes its size, for all who look at it. Asleep is fine: then its programs are told when they go on.
    async fn terminal_resize(
        &self,
        id: &SandboxId,
        terminal: &str,
        size: TerminalSize,
    ) -> Result<Terminal, ApiError>;

    /// Hangs it up and ends everything that it started. Wakes.
    async fn terminal_close(&self, id: &SandboxId, terminal: &str) -> Result<Answer<()>, ApiError>;
}
