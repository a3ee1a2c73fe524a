//! What people, programs and the network want of a sandbox, and how wishes are answered.

use core::net::IpAddr;

use crate::order::FailureCode;
use crate::time::Time;

/// A call that waits on the sandbox: it holds it awake from begin to end (S2), and wakes it (S8).
///
/// An open output stream or terminal is not one: only what is done through it, as a [`Cause`] each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// What sort of call.
    pub kind: CallKind,
    /// The guest's port it goes to, where it goes to one.
    pub port: Option<u16>,
}

impl Call {
    /// A call that goes to no port.
    pub const fn of(kind: CallKind) -> Self {
        Self { kind, port: None }
    }

    /// A call to a port of the guest.
    pub const fn to_port(kind: CallKind, port: u16) -> Self {
        Self { kind, port: Some(port) }
    }
}

/// Sorts of [`Call`], counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CallKind {
    /// Somebody waits for a command's result.
    Exec,
    /// A file or tree is being read or written.
    Files,
    /// An HTTP request through a link, until its answer has been passed on. An upgraded connection counts only
    /// until the upgrade, unless it is an [`CallKind::AwakeConnection`].
    EdgeRequest,
    /// A terminal is opened, typed into or closed. Looking at one is no call.
    Terminal,
    /// Any other call of the API that acts on the guest.
    Api,
    /// An upgraded connection through a link to one of `awake_ports` (S4).
    AwakeConnection,
    /// A call that acts on a box, from its start to its end (B3, B6), or a person's page load that thaws it (B15).
    Tool,
    /// A connection from another box that is awake (B3, B10).
    Link,
}

impl CallKind {
    /// Every kind, in the order in which they are listed to people.
    pub const ALL: [Self; 8] = [
        Self::Exec,
        Self::Files,
        Self::EdgeRequest,
        Self::Terminal,
        Self::Api,
        Self::AwakeConnection,
        Self::Tool,
        Self::Link,
    ];

    /// Whether such a call is use of a box (B3). What comes through its URLs is not.
    pub fn is_use(self) -> bool {
        match self {
            Self::EdgeRequest | Self::AwakeConnection => false,
            Self::Exec | Self::Files | Self::Terminal | Self::Api | Self::Tool | Self::Link => true,
        }
    }

    /// What one such call is called in a sentence.
    pub(crate) fn noun(self) -> (&'static str, &'static str) {
        match self {
            Self::Exec => ("command", "commands"),
            Self::Files => ("file transfer", "file transfers"),
            Self::EdgeRequest => ("request", "requests"),
            Self::Terminal => ("terminal", "terminals"),
            Self::Api => ("API call", "API calls"),
            Self::AwakeConnection => ("connection to an awake port", "connections to awake ports"),
            Self::Tool => ("tool call", "tool calls"),
            Self::Link => ("link from another box", "links from other boxes"),
        }
    }
}

/// Why a sandbox is needed; kept as what woke it last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// A call began.
    Call(Call),
    /// A packet arrived that the host cannot answer for it: a new connection or data on an existing one.
    Packet {
        /// Who sent it, if known.
        peer: Option<IpAddr>,
        /// The guest's port, if the protocol has ports.
        port: Option<u16>,
    },
    /// Something is done in a terminal, such as a key press ([`CallKind::Terminal`]).
    Terminal,
    /// A snapshot or fork that cannot be taken from what is stored.
    Capture,
    /// A timer in the guest is about to fire.
    Timer {
        /// When it fires.
        due: Time,
    },
    /// Somebody asked for a restart.
    Restart,
    /// A box that was stopped for good is brought back (B27).
    Restore,
}

/// Names one fork or snapshot that was asked for; chosen by the host, unique per sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CaptureId(pub u64);

/// Why it is put to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SleepCause {
    /// Nothing needed it for `sleep_after_ms` (S2).
    Idle,
    /// As [`SleepCause::Idle`], a hold having reached `sleep_hold_max_ms` (S12).
    HoldCap,
    /// Somebody asked (S5).
    Asked,
    /// The host shuts down.
    Shutdown,
    /// The host is being emptied.
    Drain,
    /// A spending limit or plan.
    Spending,
    /// A box has not been used for `idleTimeoutMin`: it is frozen in order to be stopped for good (B24).
    IdleTimeout,
}

/// An accepted wish: is it already so, or does it take a while?
///
/// After [`Served::Later`] whoever waits looks at the phase until it is what they want, or one in which it cannot
/// become so ([`Phase::Failed`](crate::Phase::Failed), `Deleting`, `Deleted`): accepted does not mean that it will succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// It is so. For a need: go ahead.
    Now,
    /// It is under way.
    Later,
}

/// Why a wish was turned down. The sandbox is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It starts; ask again when it runs.
    #[error("the sandbox is starting")]
    Starting,
    /// Going to sleep would undo a wake that somebody waits for.
    #[error("the sandbox is waking because something needs it")]
    Waking,
    /// The project's spending limit is reached: it sleeps until there is more to spend, and nothing wakes it (S23).
    #[error("the project's spending limit is reached")]
    SpendingLimit,
    /// Its host goes down: it sleeps until a host has it again.
    #[error("the sandbox's host is going down")]
    HostLeaves,
    /// It stands still because the host's disk is nearly full, and goes on when there is room.
    #[error("the sandbox stands still, because the host's disk is nearly full")]
    HostDiskFull,
    /// It is a frozen box, and this does not thaw one (B19, B44).
    #[error("the box is frozen")]
    Frozen,
    /// It is a box that was stopped for good; it can be brought back as long as its copy is kept (B27).
    #[error("the box was stopped for good")]
    Stopped,
    /// It is a box that is not stopped, or no box at all: there is nothing to bring back.
    #[error("nothing was stopped that could be brought back")]
    NotStopped,
    /// Only a restart or a deletion is possible.
    #[error("the sandbox has failed ({})", .code.as_str())]
    Failed {
        /// Why it failed.
        code: FailureCode,
    },
    /// It is gone, or about to be.
    #[error("the sandbox is deleted")]
    Deleted,
    /// [`CAPTURES_WAITING_MAX`](crate::CAPTURES_WAITING_MAX) forks and snapshots are waiting already.
    #[error("too many forks and snapshots of this sandbox are waiting")]
    TooManyCaptures,
    /// A fork or snapshot that was accepted, then made pointless by a restart.
    #[error("the sandbox was restarted meanwhile")]
    Restarted,
    /// A fork or snapshot that was accepted, but could not be made.
    #[error("the copy could not be made ({})", .code.as_str())]
    CaptureFailed {
        /// Why.
        code: FailureCode,
    },
}
