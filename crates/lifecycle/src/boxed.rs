//! The box face: what counts as use and as activity, when a box is frozen, and when it is stopped for good.
//!
//! The same engine as the sandbox face, told by other facts. Only a few things are *use* (B3): calls that act on the box, what
//! thaws it, a person at its screen, a link from another box. Everything is counted from the last use. Its processor, timers,
//! packets and outbound connections count for nothing here, and none of them thaws it (B44).
//!
//! [`box_verdict`] gives for a box what [`sandbox_verdict`](crate::idle::sandbox_verdict) gives for a sandbox. On top of it stands
//! the end: [`Uses::stops_at`].

use crate::idle::{Forecast, Verdict};
use crate::need::{CallKind, SleepCause};
use crate::order::FailureCode;
use crate::reason::{AwakeReason, Reason};
use crate::time::Time;

/// The settings of the box face (B-rules). All durations in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoxPolicy {
    /// Without activity for so long it is frozen (B8).
    pub freeze_after_ms: u64,
    /// Requests through its URLs are activity until so long after the last use (B9).
    pub url_window_ms: u64,
    /// Commands in the background keep it awake until so long after the last use (B11).
    pub background_window_ms: u64,
    /// A running recording keeps it awake until so long after the last use (B12).
    pub recording_window_ms: u64,
    /// Frozen, it is stopped for good so long after the later of its last use and its freezing (B23).
    pub stop_after_ms: u64,
    /// `idleTimeoutMin`, instead of [`BoxPolicy::stop_after_ms`]: counted from the last use, frozen or not (B24).
    pub idle_timeout_ms: Option<u64>,
    /// One that these rules have stopped is kept for so long (B27).
    pub keep_copy_ms: u64,
}

const MINUTE_MS: u64 = 60_000;
const HOUR_MS: u64 = 60 * MINUTE_MS;

impl Default for BoxPolicy {
    /// As the B-rules have it.
    fn default() -> Self {
        Self {
            freeze_after_ms: 10 * MINUTE_MS,
            url_window_ms: 2 * HOUR_MS,
            background_window_ms: HOUR_MS,
            recording_window_ms: HOUR_MS,
            stop_after_ms: 24 * HOUR_MS,
            idle_timeout_ms: None,
            keep_copy_ms: 24 * HOUR_MS,
        }
    }
}

/// Something that goes on with a box for as long as somebody says so, besides calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Activity {
    /// A person holds its screen (B10).
    Takeover,
    /// Its screen is being recorded (B12).
    Recording,
    /// A phone is being attached, frozen or brought back (B13).
    Phone,
}

impl Activity {
    /// Every activity.
    pub const ALL: [Self; 3] = [Self::Takeover, Self::Recording, Self::Phone];
}

/// What keeps a box from being frozen: `freeze.blockedBy` (B13).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Blocker {
    /// Commands in the background.
    Background,
    /// Requests through its URLs.
    Url,
    /// A recording.
    Recording,
    /// A person at the screen.
    Takeover,
    /// A call that acts on it.
    Foreground,
    /// Another box, awake, is connected to it.
    Link,
    /// A phone is on its way.
    Phone,
}

impl Blocker {
    /// The word as it stands in answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Background => "background",
            Self::Url => "url",
            Self::Recording => "recording",
            Self::Takeover => "takeover",
            Self::Foreground => "foreground",
            Self::Link => "link",
            Self::Phone => "phone",
        }
    }
}

/// One thing that keeps a box from being frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// What.
    pub by: Blocker,
    /// Until when at the latest; `None`: until it ends.
    pub until: Option<Time>,
}

/// When a box will be frozen (B13).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Freeze {
    /// When, if nothing changes; `None` where something holds it whose end cannot be foreseen, or where it is not awake.
    pub at: Option<Time>,
    /// What it waits for, besides the quiet after its last use.
    pub blocked_by: Vec<Blocked>,
}

/// Why a box was stopped for good by itself (B29).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StopCause {
    /// Frozen and unused for [`BoxPolicy::stop_after_ms`].
    FrozenUnused,
    /// Unused for longer than `idleTimeoutMin`.
    IdleTimeout,
}

/// A box that was stopped for good and is still kept (B27).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// When.
    pub at: Time,
    /// Why.
    pub cause: StopCause,
    /// How long it had not been used by then, in milliseconds.
    pub unused_ms: u64,
}

/// How a box has been used. Unlike [`Facts`](crate::idle::Facts) it outlives sleep, boots and daemons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uses {
    /// The latest of all use (B5).
    pub last_used: Time,
    /// When the last request through one of its URLs came or ended.
    pub url_at: Option<Time>,
    /// It was stopped for good.
    pub stopped: Option<Stopped>,
}

impl Uses {
    /// Of a box that is used now, for the first time.
    pub fn new(now: Time) -> Self {
        Self { last_used: now, url_at: None, stopped: None }
    }

    pub(crate) fn used(&mut self, now: Time) {
        self.last_used = self.last_used.max(now);
    }

    /// When the rules stop it for good if nothing uses it; `None` where that cannot be foreseen (B25). `freeze`: of an awake one,
    /// see [`Freeze`]; `frozen_at`: of one that sleeps.
    pub(crate) fn stops_at(
        &self,
        policy: &BoxPolicy,
        freeze: Option<&Freeze>,
        frozen_at: Option<Time>,
    ) -> Option<Time> {
        let timeout = policy.idle_timeout_ms.map(|ms| self.last_used.plus_ms(ms));
        match (frozen_at, freeze, timeout) {
            (Some(_), _, Some(timeout)) => Some(timeout),
            (Some(frozen), _, None) => {
                Some(self.last_used.max(frozen).plus_ms(policy.stop_after_ms))
            }
            // What keeps it awake defers the stop until it ends.
            (None, Some(freeze), Some(timeout)) => {
                freeze.at?;
                let deferred = freeze.blocked_by.iter().filter_map(|blocked| blocked.until).max();
                Some(deferred.map_or(timeout, |until| until.max(timeout)))
            }
            (None, Some(freeze), None) => Some(freeze.at?.plus_ms(policy.stop_after_ms)),
            (None, None, _) => None,
        }
    }

    pub(crate) fn stop_cause(policy: &BoxPolicy) -> StopCause {
        if policy.idle_timeout_ms.is_some() {
            StopCause::IdleTimeout
        } else {
            StopCause::FrozenUnused
        }
    }
}

/// What of the facts of a running guest concerns its box.
pub(crate) struct BoxFacts<'a> {
    pub(crate) calls: &'a [u32; CallKind::ALL.len()],
    /// Commands that run on with nobody waiting for them.
    pub(crate) background: u32,
    pub(crate) activities: &'a [bool; Activity::ALL.len()],
    /// Until when it is not tried again to freeze it, and why.
    pub(crate) sleep_failed: Option<(Time, FailureCode)>,
    /// The guest has said lately what it does.
    pub(crate) heard: bool,
}

impl BoxFacts<'_> {
    fn acting_calls(&self) -> impl Iterator<Item = (CallKind, u32)> {
        let kinds = CallKind::ALL.into_iter().filter(|kind| kind.is_use());
        kinds.map(|kind| (kind, self.calls[kind as usize])).filter(|&(_, count)| count > 0)
    }
}

/// What the facts make of a running box's freezing (B8-B13).
pub(crate) fn freeze(policy: &BoxPolicy, uses: &Uses, facts: &BoxFacts<'_>, now: Time) -> Freeze {
    let mut blocked_by = Vec::new();
    let mut block = |by, until: Option<Time>| {
        if until.is_none_or(|until| until > now) {
            blocked_by.push(Blocked { by, until });
        }
    };
    if facts.background > 0 {
        block(Blocker::Background, Some(uses.last_used.plus_ms(policy.background_window_ms)));
    }
    // One that came later than that keeps nothing awake, even in the middle of something.
    let url_until = uses
        .url_at
        .filter(|&at| at > uses.last_used && at <= uses.last_used.plus_ms(policy.url_window_ms))
        .map(|at| at.plus_ms(policy.freeze_after_ms));
    if let Some(until) = url_until {
        block(Blocker::Url, Some(until));
    }
    for activity in Activity::ALL {
        match (facts.activities[activity as usize], activity) {
            (false, _) => {}
            (true, Activity::Recording) => {
                let until = uses.last_used.plus_ms(policy.recording_window_ms);
                block(Blocker::Recording, Some(until));
            }
            (true, Activity::Takeover) => block(Blocker::Takeover, None),
            (true, Activity::Phone) => block(Blocker::Phone, None),
        }
    }
    if facts.acting_calls().any(|(kind, _)| kind != CallKind::Link) {
        block(Blocker::Foreground, None);
    }
    if facts.calls[CallKind::Link as usize] > 0 {
        block(Blocker::Link, None);
    }
    let quiet = uses.last_used.plus_ms(policy.freeze_after_ms);
    let open = blocked_by.iter().any(|blocked| blocked.until.is_none());
    let latest = blocked_by.iter().filter_map(|blocked| blocked.until).fold(quiet, Time::max);
    Freeze { at: (!open).then_some(latest), blocked_by }
}

/// The box face of [`sandbox_verdict`](crate::idle::sandbox_verdict).
pub(crate) fn box_verdict(
    policy: &BoxPolicy,
    uses: &Uses,
    facts: &BoxFacts<'_>,
    now: Time,
) -> Verdict {
    let freeze = freeze(policy, uses, facts, now);
    let mut reasons = Vec::new();
    let quiet = uses.last_used.plus_ms(policy.freeze_after_ms);
    if quiet > now {
        reasons.push(AwakeReason { reason: Reason::Used, until: Some(quiet) });
    }
    for (kind, count) in facts.acting_calls() {
        reasons.push(AwakeReason { reason: Reason::Calls { kind, count }, until: None });
    }
    for blocked in &freeze.blocked_by {
        let reason = match blocked.by {
            // Told as calls.
            Blocker::Foreground | Blocker::Link => continue,
            Blocker::Background => Reason::Background { count: facts.background },
            Blocker::Url => Reason::UrlRequests,
            Blocker::Recording => Reason::Activity(Activity::Recording),
            Blocker::Takeover => Reason::Activity(Activity::Takeover),
            Blocker::Phone => Reason::Activity(Activity::Phone),
        };
        reasons.push(AwakeReason { reason, until: blocked.until });
    }
    // Past its limit it is stopped, and for that frozen first, however short ago its last use was.
    let stop = policy.idle_timeout_ms.and(uses.stops_at(policy, Some(&freeze), None));
    let (at, cause) = match (freeze.at, stop) {
        (Some(freeze), Some(stop)) if stop < freeze => (Some(stop), SleepCause::IdleTimeout),
        (freeze, _) => (freeze, SleepCause::Idle),
    };
    let mut at = at;
    if let Some((until, code)) = facts.sleep_failed {
        at = at.map(|at| at.max(until));
        if until > now {
            reasons.push(AwakeReason { reason: Reason::SleepFailed { code }, until: Some(until) });
        }
    }
    if !facts.heard {
        // Whether it has commands in the background is not known.
        reasons.push(AwakeReason { reason: Reason::NoSample, until: None });
    }
    Verdict { reasons, sleep: at.map(|at| Forecast { at, cause }) }
}
