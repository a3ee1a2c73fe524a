//! Channels: what the host asks for when it opens one, and what the guest answers on it.
//!
//! The guest answers each request with one or more [`Reply`] messages and, where noted, `Data`; it ends with `Fin`.
//! [`Reply::Failed`] may come in place of any reply and is the last one. Either side may `Reset` at any time, which undoes
//! what is half done (a file being written never appears) but ends no exec.

use serde::{Deserialize, Serialize};

use crate::{
    Entry, ExecId, ExecInfo, ExecSpec, ExecState, Failure, Sample, Sockets, Stat, TerminalSize,
    TerminalSpec, WriteSpec,
};

/// What a channel is opened for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Are you there? → [`Reply::Done`].
    Ping,
    /// → [`Reply::Sample`].
    Sample,
    /// Run a program → [`Reply::ExecStarted`].
    ExecStart(ExecSpec),
    /// Wait for its end → [`Reply::ExecState`].
    ExecWait(ExecId),
    /// Its output → `Data` with [`OutputChunk`](crate::OutputChunk)s.
    ExecOutput {
        /// Whose.
        id: ExecId,
        /// Stdout from this offset; `None`: without stdout.
        stdout: Option<u64>,
        /// Stderr from this offset; `None`: without stderr.
        stderr: Option<u64>,
        /// Go on with what comes, until the exec has ended.
        follow: bool,
    },
    /// `Data` from the host goes to its stdin → [`Reply::Written`] after the host's `Fin`.
    ExecStdin {
        /// Whose.
        id: ExecId,
        /// Close stdin after the host's `Fin`; a terminal is hung up instead.
        close: bool,
    },
    /// Send a signal to its process group; 9 kills everything that it started → [`Reply::Done`].
    ExecSignal {
        /// Whose.
        id: ExecId,
        /// Number of the signal, 1–64.
        signal: i32,
    },
    /// All execs → [`Reply::Execs`], any number.
    ExecList,
    /// A file → [`Reply::Stat`], then `Data`.
    FileRead {
        /// Absolute path.
        path: Vec<u8>,
        /// First byte wanted.
        offset: u64,
        /// Bytes wanted; `None`: up to the end.
        length: Option<u64>,
    },
    /// `Data` from the host becomes the file → [`Reply::Written`] after the host's `Fin`.
    FileWrite(WriteSpec),
    /// What is at a path (a link is not followed) → [`Reply::Stat`].
    FileStat {
        /// Absolute path.
        path: Vec<u8>,
    },
    /// A directory's entries, sorted by name → [`Reply::Entries`], any number.
    FileList {
        /// Absolute path.
        path: Vec<u8>,
    },
    /// Make a directory → [`Reply::Done`].
    FileMkdir {
        /// Absolute path.
        path: Vec<u8>,
        /// Make missing ones on the way, and be content if it exists.
        parents: bool,
    },
    /// Rename; replaces a file at the target → [`Reply::Done`].
    FileRename {
        /// Absolute path.
        from: Vec<u8>,
        /// Absolute path.
        to: Vec<u8>,
    },
    /// Remove a file or directory → [`Reply::Done`].
    FileRemove {
        /// Absolute path.
        path: Vec<u8>,
        /// With all that is in it.
        recursive: bool,
    },
    /// A directory's content as a tar stream → `Data`.
    TreeRead {
        /// Absolute path of a directory.
        path: Vec<u8>,
    },
    /// `Data` from the host is a tar stream to unpack → [`Reply::Written`] after the host's `Fin`.
    TreeWrite {
        /// Absolute path of the target directory; made if missing.
        path: Vec<u8>,
    },
    /// A TCP connection to a port on 127.0.0.1 → [`Reply::Connected`], then `Data` both ways; `Fin` is a half close.
    Connect {
        /// The port.
        port: u16,
    },
    /// Since version 2. A request that does not fit into one frame: `Data` from the host, up to its `Fin`, is the encoded
    /// request → what that one is answered with. The request may be any for which the host sends nothing more.
    Long {
        /// Bytes of the encoded request, at most [`LONG_REQUEST_MAX`].
        bytes: u32,
    },
    /// Since version 2. Run a program on a terminal of its own → [`Reply::ExecStarted`]. From then on it is an exec: what the
    /// terminal shows is its stdout, what is typed goes through [`Request::ExecStdin`].
    TerminalStart(TerminalSpec),
    /// Since version 2. Change a terminal's size; its foreground programs are told → [`Reply::Done`].
    TerminalResize {
        /// Whose.
        id: ExecId,
        /// The new size.
        size: TerminalSize,
    },
    /// Since version 2. What is open on the network → [`Reply::Sockets`].
    Sockets,
    /// Since version 3. Write what the file systems hold in memory to their disks, while programs run on →
    /// [`Reply::Done`] when it is there.
    Flush,
    /// Since version 5. What programs connect to on these ports of 127.0.0.1 leads elsewhere, and on all others no more; until
    /// the guest boots anew → [`Reply::Done`]. More than a few belong into a [`Request::Long`].
    Loopback(Vec<LoopbackWay>),
}

/// Where a port of the guest's loopback leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoopbackWay {
    /// The port that programs connect to.
    pub port: u16,
    /// The IPv4 address that they get to.
    pub address: [u8; 4],
    /// The port there.
    pub to_port: u16,
}

/// Longest request sent by [`Request::Long`], in bytes: what Linux takes for one `exec` (2 MiB of arguments and environment),
/// and as much again for lengths and the other fields.
pub const LONG_REQUEST_MAX: usize = 4 * 1024 * 1024;

impl Request {
    /// The host sends `Data` on this channel and ends it with `Fin`. For all others the host's direction is closed from
    /// the start.
    pub fn host_sends(&self) -> bool {
        match self {
            Self::ExecStdin { .. }
            | Self::FileWrite(_)
            | Self::TreeWrite { .. }
            | Self::Connect { .. }
            | Self::Long { .. } => true,
            Self::Ping
            | Self::Sample
            | Self::ExecStart(_)
            | Self::ExecWait(_)
            | Self::ExecOutput { .. }
            | Self::ExecSignal { .. }
            | Self::ExecList
            | Self::FileRead { .. }
            | Self::FileStat { .. }
            | Self::FileList { .. }
            | Self::FileMkdir { .. }
            | Self::FileRename { .. }
            | Self::FileRemove { .. }
            | Self::TreeRead { .. }
            | Self::TerminalStart(_)
            | Self::TerminalResize { .. }
            | Self::Sockets
            | Self::Flush
            | Self::Loopback(_) => false,
        }
    }

    /// The first version of the protocol that has it.
    pub fn since(&self) -> u16 {
        match self {
            Self::Ping
            | Self::Sample
            | Self::ExecStart(_)
            | Self::ExecWait(_)
            | Self::ExecOutput { .. }
            | Self::ExecStdin { .. }
            | Self::ExecSignal { .. }
            | Self::ExecList
            | Self::FileRead { .. }
            | Self::FileWrite(_)
            | Self::FileStat { .. }
            | Self::FileList { .. }
            | Self::FileMkdir { .. }
            | Self::FileRename { .. }
            | Self::FileRemove { .. }
            | Self::TreeRead { .. }
            | Self::TreeWrite { .. }
            | Self::Connect { .. } => 1,
            Self::Long { .. } => crate::LONG_REQUESTS_SINCE,
            Self::TerminalStart(_) | Self::TerminalResize { .. } => crate::TERMINALS_SINCE,
            Self::Sockets => crate::NETWORK_SINCE,
            Self::Flush => crate::FLUSH_SINCE,
            Self::Loopback(_) => crate::LOOPBACK_SINCE,
        }
    }
}

/// What the guest answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// It could not be done.
    Failed(Failure),
    /// It is done.
    Done,
    /// The look taken.
    Sample(Sample),
    /// The program runs.
    ExecStarted {
        /// Its id from now on.
        id: ExecId,
        /// Its process id in the guest.
        pid: u32,
    },
    /// How the exec is.
    ExecState(ExecState),
    /// Some of the execs.
    Execs(Vec<ExecInfo>),
    /// What is known about the path.
    Stat(Stat),
    /// Some of the entries.
    Entries(Vec<Entry>),
    /// All that was sent is written.
    Written {
        /// Bytes taken.
        bytes: u64,
    },
    /// The connection stands.
    Connected,
    /// What is open on the network.
    Sockets(Sockets),
}
