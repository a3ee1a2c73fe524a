//! What happened, for a sandbox's timeline.

use crate::boxed::StopCause;
use crate::need::{CaptureId, Cause, Refusal, SleepCause};
use crate::order::{Death, FailureCode};
use crate::phase::{Start, Tier};
use crate::time::Time;

/// One entry of a sandbox's timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// When it was learned.
    pub at: Time,
    /// What it was.
    pub what: What,
}

/// What an [`Event`] tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// A start was ordered.
    Starting {
        /// From where.
        how: Start,
        /// What for; `None` for the first start of its life, or one that is made up for after the daemon died.
        cause: Option<Cause>,
    },
    /// It runs for the first time since [`What::Starting`].
    Started {
        /// From where.
        how: Start,
    },
    /// It is being put to sleep.
    FallingAsleep {
        /// Why.
        cause: SleepCause,
    },
    /// Something needed it before it slept, and it could be kept awake.
    SleepCancelled {
        /// What needed it; `None` if the host gave up by itself.
        cause: Option<Cause>,
    },
    /// It could not be put to sleep, and runs on.
    SleepFailed {
        /// Why.
        code: FailureCode,
    },
    /// It sleeps.
    Slept {
        /// Where its memory is.
        tier: Tier,
        /// Why.
        cause: SleepCause,
    },
    /// A sleeper went from memory to disk.
    Demoted,
    /// A sleeper could not go from memory to disk, and sleeps on in memory.
    DemoteFailed {
        /// Why.
        code: FailureCode,
    },
    /// It is being woken.
    Waking {
        /// Where its memory is.
        from: Tier,
        /// By what.
        cause: Cause,
    },
    /// A wake failed and its memory is whole.
    WakeFailed {
        /// Why.
        code: FailureCode,
        /// Whether it is tried again. If not, whoever waits is refused; what the sandbox is then, its phase says.
        again: bool,
    },
    /// It runs on, exactly where it was.
    Woke {
        /// Where its memory was.
        from: Tier,
        /// By what.
        cause: Cause,
        /// How long it slept, in milliseconds.
        slept_ms: u64,
    },
    /// Its machine ended by itself. [`Death::Killed`] is `machine_lost` (S24).
    Died {
        /// How.
        death: Death,
    },
    /// A boot from its disk found no room on the host. Nothing is wrong with it: it is off, and what needs it next tries
    /// again. Whoever waits is refused.
    StartRefused {
        /// What was lacking.
        code: FailureCode,
    },
    /// It could not be started or woken.
    Failed {
        /// Why.
        code: FailureCode,
    },
    /// A box was stopped for good by the rules of idleness (B23, B24). Its copy is kept for a while (B27).
    StoppedForGood {
        /// Why.
        cause: StopCause,
        /// How long it had not been used, in milliseconds.
        unused_ms: u64,
    },
    /// A box that had been stopped for good is brought back (B27).
    Restored,
    /// A fork or snapshot that was accepted has ended, well or not.
    CaptureEnded {
        /// Which.
        capture: CaptureId,
        /// How.
        result: Result<(), Refusal>,
    },
    /// No sample has come from the guest for [`SAMPLE_SILENCE_MS`](crate::SAMPLE_SILENCE_MS) while it runs: its agent
    /// may hang. It is told once per silence.
    GuestSilent {
        /// Since when.
        since: Time,
    },
    /// It is being removed.
    Deleting,
    /// A removal failed; it is tried again.
    DeleteFailed {
        /// Why.
        code: FailureCode,
    },
    /// Nothing is left of it.
    Deleted,
}
