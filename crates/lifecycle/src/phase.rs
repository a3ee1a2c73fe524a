//! Where in its life a sandbox is.

use crate::need::{CaptureId, Cause, SleepCause};
use crate::order::{Attempt, Death, FailureCode};
use crate::time::Time;

/// Where the memory of a sleeper is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Its machine is stopped, its memory resident; it wakes in a millisecond or two.
    Memory,
    /// On the host's disk; no process.
    Disk,
    /// In the object store; nothing on the host. Reserved: no order for it is given yet.
    Store,
}

/// The phase of a sandbox. Each variant holds only what is true in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// A machine is being started that has no memory to go on from.
    Starting {
        /// The order under way.
        attempt: Attempt,
        /// From where.
        how: Start,
        /// What for; `None` for the first start of its life, or one made up for after the daemon died.
        cause: Option<Cause>,
    },
    /// The guest runs.
    Running {
        /// Since when it has been running without interruption.
        since: Time,
    },
    /// The guest runs, but for a moment in which memory and disk are copied. It does not sleep meanwhile.
    CapturingAwake {
        /// The order under way.
        attempt: Attempt,
        /// Which capture.
        capture: CaptureId,
        /// Since when it has been running.
        since: Time,
    },
    /// It is being put to sleep. Cancelled, if that is still possible, by anything that needs it.
    Suspending {
        /// The order under way.
        attempt: Attempt,
        /// How deep it was asked to sleep.
        tier: Tier,
        /// Why it sleeps.
        cause: SleepCause,
        /// What needs it meanwhile: it comes back at once, cancelled or woken.
        wake: Option<Cause>,
        /// Since when it had been running.
        since: Time,
    },
    /// It sleeps.
    Asleep {
        /// Where its memory is.
        tier: Tier,
        /// Since when.
        since: Time,
    },
    /// It sleeps, and its memory goes from the host's memory to disk.
    Demoting {
        /// The order under way.
        attempt: Attempt,
        /// Since when it sleeps.
        since: Time,
        /// What needs it meanwhile: it wakes at once afterwards.
        wake: Option<Cause>,
    },
    /// It sleeps on disk, and what is stored is being copied.
    CapturingAsleep {
        /// The order under way.
        attempt: Attempt,
        /// Which capture.
        capture: CaptureId,
        /// Since when it sleeps.
        since: Time,
        /// What needs it meanwhile: it wakes at once afterwards.
        wake: Option<Cause>,
    },
    /// It is being woken.
    Waking {
        /// The order under way, or the one that failed last while waiting to try again.
        attempt: Attempt,
        /// Where its memory is.
        from: Tier,
        /// Since when it slept.
        since: Time,
        /// What woke it.
        cause: Cause,
        /// How many tries have failed.
        failed_tries: u32,
        /// A try has failed; the next one is at this moment.
        retry_at: Option<Time>,
    },
    /// Its machine has ended by itself; the next need boots it from disk.
    Off {
        /// How it ended.
        death: Death,
        /// When.
        since: Time,
    },
    /// It could not be started or woken. A restart or a deletion cures it.
    Failed {
        /// Why.
        code: FailureCode,
        /// When.
        since: Time,
        /// Whether its memory is still stored: it could not be woken. A restart discards it and says so, with
        /// `machine_lost` (S24).
        saved: bool,
    },
    /// It is being removed.
    Deleting {
        /// The order under way, or the one that failed last while waiting to try again.
        attempt: Attempt,
        /// How many tries have failed.
        failed_tries: u32,
        /// A try has failed; the next one is at this moment.
        retry_at: Option<Time>,
    },
    /// Nothing is left of it.
    Deleted,
}

/// From where a machine is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// As a clone of its template, for the first time.
    Create,
    /// From its own disk.
    Boot,
}

/// The phase in one word of the sandbox face (S1), with two more for what is on its way out of every list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Its first start, or a boot from disk.
    Starting,
    /// Awake, also while it is still being put to sleep.
    Running,
    /// Asleep, also while it is being woken, or powered off.
    Sleeping,
    /// See the failure code.
    Failed,
    /// Being removed.
    Deleting,
    /// Gone.
    Deleted,
}

impl Status {
    /// The word as it stands in answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Sleeping => "sleeping",
            Self::Failed => "failed",
            Self::Deleting => "deleting",
            Self::Deleted => "deleted",
        }
    }
}

/// How a sleeping sandbox sleeps (S9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SleepTier {
    /// See [`Tier::Memory`].
    Memory,
    /// See [`Tier::Disk`].
    Disk,
    /// See [`Tier::Store`].
    Store,
    /// Powered off by itself: the next need boots it.
    Off,
}

impl SleepTier {
    /// The word as it stands in answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::Store => "store",
            Self::Off => "off",
        }
    }
}

impl From<Tier> for SleepTier {
    fn from(tier: Tier) -> Self {
        match tier {
            Tier::Memory => Self::Memory,
            Tier::Disk => Self::Disk,
            Tier::Store => Self::Store,
        }
    }
}
