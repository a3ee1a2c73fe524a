//! QEMU's control protocol: one JSON object a line, over a unix socket.
//!
//! One task owns the connection ([`client`]); whoever has an order for QEMU sends it there and waits. So two commands never
//! interleave, even when a caller gives up waiting, and what QEMU says in between is folded into [`Seen`] instead of a queue: a
//! guest that provokes events without end fills nothing.

mod client;
mod message;

pub use client::{Qmp, QmpError};
pub use message::{LINE_BYTES_MAX, Message, MessageError, parse};

/// What QEMU has reported on this connection. Facts only ever added, except the state of a migration, which is the latest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Seen {
    /// The greeting came and capabilities were agreed.
    pub ready: bool,
    /// `SHUTDOWN`, by reason.
    pub shutdown: Option<Shutdown>,
    /// `GUEST_PANICKED`.
    pub panicked: bool,
    /// `MIGRATION`, the latest status.
    pub migration: Option<Migration>,
    /// The connection has ended.
    pub closed: bool,
}

/// The reasons of a `SHUTDOWN` event that lead to different [`crate::ExitCause`]s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shutdown {
    /// `guest-shutdown`
    GuestShutdown,
    /// `guest-reset`
    GuestReset,
    /// `guest-panic`
    GuestPanic,
    /// `host-qmp-quit`
    Quit,
    /// Any other.
    Other,
}

/// The states of a migration that matter here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Migration {
    /// `completed`
    Completed,
    /// `failed` or `cancelled`
    Failed,
    /// Any other: still at it.
    Underway,
}
