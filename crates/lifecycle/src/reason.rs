//! Why a sandbox is awake, for machines and for people.

use core::fmt;

use crate::boxed::Activity;
use crate::need::CallKind;
use crate::order::FailureCode;
use crate::time::Time;

/// One entry of `awake_because` (S1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AwakeReason {
    /// What holds it awake.
    pub reason: Reason,
    /// Until when, if nothing new happens; `None`: until something ends whose end cannot be foreseen.
    pub until: Option<Time>,
}

impl AwakeReason {
    /// The reason as a sentence for people.
    pub fn text(&self) -> String {
        self.reason.to_string()
    }
}

/// What can hold a sandbox awake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// `sleep_after_seconds` is null.
    NeverSleeps,
    /// It is needed, or was a moment ago.
    JustWoke,
    /// Calls wait on it.
    Calls {
        /// What sort.
        kind: CallKind,
        /// How many.
        count: u32,
    },
    /// A call has ended less than `sleep_after_ms` ago.
    CallEnded {
        /// What sort.
        kind: CallKind,
    },
    /// Its own programs compute.
    Cpu {
        /// Average since [`AwakeReason::until`] minus `sleep_after_ms`, in thousandths of one core.
        permille: u32,
    },
    /// Packets crossed its network link less than `sleep_after_ms` ago.
    Packets,
    /// It holds TCP connections to the outside.
    OutboundTcp {
        /// How many; 0: the last one ended less than `sleep_after_ms` ago.
        count: u32,
    },
    /// A timer of its own is due within [`TIMER_NEAR_MS`](crate::TIMER_NEAR_MS), or was due less than `sleep_after_ms` ago.
    Timer {
        /// When.
        due: Time,
    },
    /// Programs in it hold it awake.
    Held {
        /// How many holds; 0: the last one was lowered less than `sleep_after_ms` ago.
        count: u32,
    },
    /// Programs in it have been told that it sleeps soon.
    Noticed,
    /// A box was used less than [`BoxPolicy::freeze_after_ms`](crate::BoxPolicy::freeze_after_ms) ago (B8).
    Used,
    /// Commands run in the background of a box (B11).
    Background {
        /// How many.
        count: u32,
    },
    /// Requests came through a box's URLs (B9).
    UrlRequests,
    /// Something goes on with a box (B10, B12).
    Activity(Activity),
    /// The guest has not said lately, or not yet for long enough, what it does, so nobody can tell that it is idle.
    NoSample,
    /// The last try to put it to sleep failed.
    SleepFailed {
        /// Why.
        code: FailureCode,
    },
    /// It is being copied for a fork or a snapshot.
    Capturing,
    /// The host makes it stand still: its disk has no room for what the guest may write. It goes on by itself.
    HostDiskFull,
    /// Nothing holds it any more: it is being put to sleep, or about to be.
    FallingAsleep,
}

impl Reason {
    /// The reason in one word, as it stands in answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NeverSleeps => "never_sleeps",
            Self::JustWoke => "just_woke",
            Self::Calls { .. } => "calls",
            Self::CallEnded { .. } => "call_ended",
            Self::Cpu { .. } => "cpu",
            Self::Packets => "packets",
            Self::OutboundTcp { .. } => "outbound_tcp",
            Self::Timer { .. } => "timer",
            Self::Held { .. } => "held",
            Self::Noticed => "noticed",
            Self::Used => "used",
            Self::Background { .. } => "background",
            Self::UrlRequests => "url",
            Self::Activity(Activity::Takeover) => "takeover",
            Self::Activity(Activity::Recording) => "recording",
            Self::Activity(Activity::Phone) => "phone",
            Self::NoSample => "no_sample",
            Self::SleepFailed { .. } => "sleep_failed",
            Self::Capturing => "capturing",
            Self::HostDiskFull => "host_disk_full",
            Self::FallingAsleep => "falling_asleep",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NeverSleeps => f.write_str("it sleeps only when asked to"),
            Self::JustWoke => f.write_str("it was needed a moment ago"),
            Self::Calls { kind, count: 1 } => write!(f, "1 {} waits on it", kind.noun().0),
            Self::Calls { kind, count } => write!(f, "{count} {} wait on it", kind.noun().1),
            Self::CallEnded { kind } => {
                let noun = kind.noun().0;
                let article = if noun.starts_with(['A', 'a']) { "an" } else { "a" };
                write!(f, "{article} {noun} ended a moment ago")
            }
            Self::Cpu { permille } => {
                write!(f, "its programs use {}.{} % of a core", permille / 10, permille % 10)
            }
            Self::Packets => f.write_str("packets crossed its network link"),
            Self::OutboundTcp { count: 0 } => {
                f.write_str("its last outbound connection ended a moment ago")
            }
            Self::OutboundTcp { count: 1 } => f.write_str("it holds 1 outbound connection"),
            Self::OutboundTcp { count } => write!(f, "it holds {count} outbound connections"),
            Self::Timer { .. } => f.write_str("a timer of its own is due"),
            Self::Held { count: 0 } => {
                f.write_str("its guest let go of its last hold a moment ago")
            }
            Self::Held { count: 1 } => f.write_str("its guest holds it awake (1 hold)"),
            Self::Held { count } => write!(f, "its guest holds it awake ({count} holds)"),
            Self::Used => f.write_str("it was used a moment ago"),
            Self::Background { count: 1 } => f.write_str("1 command runs in its background"),
            Self::Background { count } => {
                write!(f, "{count} commands run in its background")
            }
            Self::UrlRequests => f.write_str("requests come through its URLs"),
            Self::Activity(Activity::Takeover) => f.write_str("a person holds its screen"),
            Self::Activity(Activity::Recording) => f.write_str("its screen is being recorded"),
            Self::Activity(Activity::Phone) => f.write_str("a phone is on its way"),
            Self::Noticed => f.write_str("its programs were told that it sleeps soon"),
            Self::NoSample => f.write_str("it is not known yet whether its programs are idle"),
            Self::SleepFailed { code } => {
                write!(f, "it could not be put to sleep ({})", code.as_str())
            }
            Self::Capturing => f.write_str("it is being copied"),
            Self::HostDiskFull => {
                f.write_str("it stands still, because the host's disk is nearly full")
            }
            Self::FallingAsleep => f.write_str("it is going to sleep"),
        }
    }
}
