//! The host's end of the channel to a guest agent.
//!
//! A [`GuestLink`] outlives connections: the machine may be stopped, saved, moved to a new QEMU with a new socket and woken,
//! and callers that wait on an exec or read a file notice nothing but the time. The order of calls:
//!
//! ```text
//!                 ┌───────────────────────── lost() or the socket ends ──────────────┐
//!                 ▼                                                                  │
//!  new() ─▶ Detached ──attach(Unknown | Clean)──▶ Running ◀──wake()── Quiesced ◀──quiesce()── Running
//!                 ▲                       (Quiesced, if the guest says so)   │   ▲
//!                 └── lost() ─────────────────────────────────── Parked ◀────┘   │
//!                                                    detach()      └─attach(Resumed)
//! ```
//!
//! * The `memory` tier needs `quiesce`, stop, continue, `wake`; the socket stays.
//! * The `disk` tier needs `quiesce`, stop, save, [`detach`](GuestLink::detach), later `attach(new socket, Resumed)`, `wake`.
//! * A restarted daemon, a fork and a clone of a template make a *new* link (with a new id, so that the guest drops the
//!   channels of the old one) and `attach` with [`Continuity::Clean`] if the guest was quiesced, else [`Continuity::Unknown`].
//!
//! Requests made while the guest does not run wait for it; their time limits count only while it runs. Waking it is the
//! caller's business. When the guest is gone, everything that waits ends with [`GuestError::Gone`].
//!
//! The guest is hostile: what it sends is bounded by credit, and a guest that breaks the protocol loses its link.

mod channel;
mod connection;
mod error;
mod exec;
mod files;
mod link;
mod loopback;
mod ports;

pub use error::{GuestError, LinkError, WakeError};
pub use exec::{ExecOutput, ExecStarted, Which};
pub use files::{Download, FileReader, Listing, Upload};
pub use link::{Continuity, FREEZE_LIMIT_MS, GuestLink, LinkState, QuiesceOptions, WakeParams};
pub use ports::PortStream;
pub use wire::{
    Connection, Ended, Entry, EntryKind, ExecId, ExecInfo, ExecSpec, ExecState, Failure,
    FailureCode, GuestHello, Identity, Ipv6Network, LinkId, Listener, Mount, Network, OutputChunk,
    OutputFrom, Program, Quiesced, Sample, Sockets, Stat, Stdin, Step, StepOutcome, StepReport,
    Stream, TerminalSize, TerminalSpec, Transport, Woke, WriteSpec,
};
