//! The life of one sandbox, decided without touching the world.
//!
//! A [`Sandbox`] is told facts and wishes and answers with what to do next. It starts no process, opens no file and
//! reads no clock: time comes in as an argument, work goes out as [`Order`]s. The host daemon owns the other half, so
//! every race between the two is a list of calls that a test can write down.
//!
//! ```text
//!   Starting --ready--> Running <------------- back awake --------------.
//!      ^   '--failed--.   |  ^ '--capture--> CapturingAwake --> Running |
//!      |              |   |  '--------------- ready -----------.        |
//!      | need         v   '-- idle, asked --> Suspending ------+--------'
//!      |           Failed                        | suspended   |
//!     Off              ^                         v     need    |
//!      ^               '------ failed ------- Waking <------ Asleep <--.
//!      |                                         ^             |       |
//!      '-- died, from all with a machine         |         Demoting, CapturingAsleep
//!
//!   restart, from all but the last two: Starting     delete, from all: Deleting --> Deleted
//! ```
//!
//! # How it is used
//!
//! One task owns a [`Sandbox`]. It passes on what it learns through the `handle_*` methods; after each it carries out
//! what [`Sandbox::poll_order`] gives until that is `None`, writes down what [`Sandbox::poll_event`] gives, and sleeps
//! until [`Sandbox::poll_deadline`] or the next thing to pass on. At the deadline it calls
//! [`Sandbox::handle_deadline`]; early and needless calls do nothing.
//!
//! # Invariants
//!
//! 1. At most one machine exists per sandbox.
//! 2. It only ever goes on from its newest memory. A machine that died is booted from disk by the next need and says so
//!    (S24); a memory that was woken from is never woken from again, unless the host says that the guest did not run.
//! 3. A need is never lost. What comes while it falls asleep cancels the sleep or wakes it at once.
//! 4. A report about a superseded attempt, or the death of an earlier machine, changes nothing.
//! 5. A deletion is possible in every phase, and ends.
//! 6. Nobody is called idle without having said so: without a fresh sample from the guest it is not put to sleep for
//!    idleness.
//!
//! The tests of this crate hold these against random histories (`tests/life/histories.rs`), show the whole transition table as
//! text (`tests/life/table.rs`), prove the S-rules one by one and live through a month (`tests/life/month.rs`).
//!
//! # Not here
//!
//! How anything is done, how long an order may take, what a template or an image is, who may ask. And no randomness,
//! logging, serialization or async: those belong to the host.
#![forbid(unsafe_code)]

mod boxed;
mod event;
mod idle;
mod limits;
mod need;
mod order;
mod phase;
mod policy;
mod reason;
mod sandbox;
mod time;

pub use boxed::{Activity, Blocked, Blocker, BoxPolicy, Freeze, StopCause, Stopped, Uses};
pub use event::{Event, What};
pub use idle::Sample;
pub use limits::*;
pub use need::{Call, CallKind, CaptureId, Cause, Refusal, Served, SleepCause};
pub use order::{Attempt, CaptureOf, Death, FailureCode, Heard, Left, Order, Report, Work};
pub use phase::{Phase, SleepTier, Start, Status, Tier};
pub use policy::{Policy, Tiers};
pub use reason::{AwakeReason, Reason};
pub use sandbox::{LastSleep, LastWake, Recovered, Sandbox};
pub use time::Time;
