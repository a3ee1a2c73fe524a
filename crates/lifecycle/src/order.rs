//! What goes out (orders) and what comes back about them (reports).

use crate::need::CaptureId;
use crate::phase::Tier;

/// Number of an order; goes up by one with each, and never repeats within the life of a [`Sandbox`](crate::Sandbox)
/// value.
///
/// A report names the attempt it is about. Hosts crash, retry and reply late; a report about an attempt that has
/// been superseded changes nothing, and that is what makes all of it harmless.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt(pub u64);

impl Attempt {
    /// Stands for the machine that was found alive when the daemon started
    /// ([`Recovered::Running`](crate::Recovered::Running), or asleep in memory). Orders begin at 1.
    pub const RECOVERED: Self = Self(0);
}

/// Something the host must do now.
///
/// An order with a new attempt number supersedes every earlier one: the host finishes or abandons what it was
/// doing for the older attempt, whose outcome it need not report any more. [`Work::Cancel`], [`Work::Sample`] and
/// [`Work::Notice`] are remarks beside the order under way: they supersede nothing and carry the newest number again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// To be repeated in the report.
    pub attempt: Attempt,
    /// What to do.
    pub work: Work,
}

/// What an [`Order`] asks for, and which [`Report`]s answer it. Each may also be answered by [`Report::Failed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Make the sandbox by cloning its template; the first start of its life. Answer: [`Report::Ready`].
    Create,
    /// Boot from the sandbox's own disk. A machine that still exists is ended first, a saved memory is discarded.
    /// Answer: [`Report::Ready`].
    Boot,
    /// Put the running machine to sleep. Answer: [`Report::Suspended`], or [`Report::BackAwake`] if it was
    /// cancelled.
    Suspend {
        /// How deep.
        tier: Tier,
    },
    /// Give up the [`Work::Suspend`] or [`Work::Demote`] of the same attempt if that is still possible, otherwise
    /// finish it. Has no report of its own: the order it cancels reports how it ended. May come late; then it
    /// means nothing.
    Cancel,
    /// Move a sleeper from memory to disk without letting its guest run. Answer: [`Report::Demoted`], or
    /// [`Report::StillInMemory`] if it was cancelled.
    Demote,
    /// Let it go on exactly where it was. Answer: [`Report::Ready`].
    Wake {
        /// Where its memory is.
        from: Tier,
    },
    /// Copy memory and disk at one moment, for a fork or a snapshot. Answer: [`Report::Captured`].
    Capture {
        /// Which of the captures asked for.
        capture: CaptureId,
        /// Whether the guest must be stood still for it.
        of: CaptureOf,
    },
    /// End the machine if there is one and remove all that belongs to the sandbox. Answer: [`Report::Destroyed`].
    Destroy,
    /// Ask the guest for a [`Sample`](crate::Sample) now, without waiting for the next regular one; pass it on as always.
    /// It is about to be put to sleep, and what the guest said last is too old for that.
    Sample,
    /// Tell every program connected to the guest's awake socket that it sleeps soon (S13). Has no answer.
    Notice {
        /// How long until it sleeps, in milliseconds.
        in_ms: u64,
        /// It sleeps because a hold reached `sleep_hold_max_ms`; holding does not stop this one.
        cap: bool,
    },
}

/// What a [`Work::Capture`] finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureOf {
    /// A running guest: stand it still, copy, let it go on. Also if the copying fails.
    Awake,
    /// A saved one, on disk: its guest does not notice.
    AsleepOnDisk,
}

/// How an order ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// [`Work::Create`], [`Work::Boot`], [`Work::Wake`]: the guest runs and its agent answers.
    Ready,
    /// [`Work::Suspend`] is done and published; nothing of it runs any more.
    Suspended {
        /// Where its memory is now. May be another tier than was asked for, if the host could not do that one.
        tier: Tier,
    },
    /// [`Work::Suspend`] was cancelled; the guest runs as before.
    BackAwake,
    /// [`Work::Demote`] is done and published; the machine is gone, its memory is on disk.
    Demoted,
    /// [`Work::Demote`] was cancelled; it still sleeps in memory.
    StillInMemory,
    /// [`Work::Capture`] is done; the source is as it was.
    Captured,
    /// [`Work::Destroy`] is done; nothing is left.
    Destroyed,
    /// The order failed.
    Failed {
        /// Why.
        code: FailureCode,
        /// What there is of the sandbox now.
        left: Left,
    },
}

/// What a failed order left behind. The host must know this before it reports, not guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// The guest runs: a sleep that was undone, a capture of a running one. Also a wake that failed *after* the
    /// guest went on, since from then on there is no older memory to go back to.
    Awake,
    /// Its memory is whole and nothing ran since: a wake that failed before the guest went on, a capture of a
    /// sleeper, a demotion (it still sleeps in memory). After a failed [`Work::Suspend`]: it stands still in memory.
    Asleep,
    /// Its machine and memory are gone; what was written to disk is there. What every failed [`Work::Create`] and
    /// [`Work::Boot`] must leave: the host ends a half-started machine before it reports.
    Lost,
}

/// Why something failed, as shown to people (`failure_code`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum FailureCode {
    /// The first start did not succeed.
    #[error("create_failed")]
    CreateFailed,
    /// Booting from its disk did not succeed.
    #[error("boot_failed")]
    BootFailed,
    /// Saving did not succeed.
    #[error("sleep_failed")]
    SleepFailed,
    /// Its saved memory could not be brought back, after [`WAKE_TRIES_MAX`](crate::WAKE_TRIES_MAX) tries where trying
    /// again can help.
    #[error("wake_failed")]
    WakeFailed,
    /// Its saved memory does not fit this host: other QEMU, processor, kernel or format. Trying again is of no use.
    #[error("snapshot_mismatch")]
    SnapshotMismatch,
    /// A stored part is missing or its checksum is wrong. Trying again is of no use.
    #[error("state_damaged")]
    StateDamaged,
    /// The host's disk is full.
    #[error("disk_full")]
    DiskFull,
    /// The host lacks memory or another resource for now.
    #[error("no_capacity")]
    NoCapacity,
    /// The machine runs but the guest agent does not answer.
    #[error("agent_silent")]
    AgentSilent,
    /// Copying memory and disk did not succeed.
    #[error("capture_failed")]
    CaptureFailed,
    /// Removing did not succeed; it is tried again.
    #[error("destroy_failed")]
    DestroyFailed,
    /// The machine died while it was awake or while its memory existed only in it (S24).
    #[error("machine_lost")]
    MachineLost,
    /// One of its drives is missing or cannot be mounted. Trying again is of no use.
    #[error("drive_unusable")]
    DriveUnusable,
}

impl FailureCode {
    /// The code as it stands in answers, in `snake_case`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CreateFailed => "create_failed",
            Self::BootFailed => "boot_failed",
            Self::SleepFailed => "sleep_failed",
            Self::WakeFailed => "wake_failed",
            Self::SnapshotMismatch => "snapshot_mismatch",
            Self::StateDamaged => "state_damaged",
            Self::DiskFull => "disk_full",
            Self::NoCapacity => "no_capacity",
            Self::AgentSilent => "agent_silent",
            Self::CaptureFailed => "capture_failed",
            Self::DestroyFailed => "destroy_failed",
            Self::MachineLost => "machine_lost",
            Self::DriveUnusable => "drive_unusable",
        }
    }

    /// Whether only the host lacks something for now, so that nothing is wrong with the sandbox.
    pub fn is_shortage(self) -> bool {
        matches!(self, Self::DiskFull | Self::NoCapacity)
    }

    /// Whether giving the same order again on this host may succeed.
    pub fn is_transient(self) -> bool {
        match self {
            Self::CreateFailed
            | Self::BootFailed
            | Self::SleepFailed
            | Self::WakeFailed
            | Self::DiskFull
            | Self::NoCapacity
            | Self::AgentSilent
            | Self::CaptureFailed
            | Self::DestroyFailed => true,
            Self::SnapshotMismatch
            | Self::StateDamaged
            | Self::MachineLost
            | Self::DriveUnusable => false,
        }
    }
}

/// How a machine ended that nobody had ordered to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Death {
    /// The guest rebooted. A restart is left to the next need, so a reboot loop costs nothing.
    Reboot,
    /// The guest powered itself off.
    Poweroff,
    /// The guest's kernel panicked.
    Panic,
    /// Its process is gone: killed, crashed, out of memory.
    Killed,
}

/// What became of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a report that is out of place is a bug in the host and should be logged"]
pub enum Heard {
    /// It belongs to what goes on and was acted upon.
    Taken,
    /// It is about a superseded attempt or an earlier machine. Everyday; nothing changed.
    Stale,
    /// It is about the current attempt but cannot be true of it. A bug in the host; nothing changed.
    OutOfPlace,
}
