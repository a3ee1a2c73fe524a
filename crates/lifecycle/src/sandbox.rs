//! The state machine itself: which wish, fact or report leads from which phase to which, and what is ordered on the way.
//!
//! Every match over the phase is written out without a wildcard: a new phase must not compile until somebody has decided
//! what each wish and each report means in it.

mod box_life;
mod facts;
mod moves;
mod questions;
mod reports;
mod settle;
mod wishes;

use std::collections::VecDeque;

use crate::boxed::Uses;
use crate::event::Event;
use crate::idle::Facts;
use crate::need::{CaptureId, Cause, Refusal, SleepCause};
use crate::order::{Attempt, Death, FailureCode, Order};
use crate::phase::{Phase, Start, Tier};
use crate::policy::Policy;
use crate::time::Time;
use settle::Plan;

/// Why it may not be awake, whatever needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Withheld {
    /// The project's spending limit is reached (S23).
    Spending,
    /// Its host goes down.
    Leaving,
}

impl Withheld {
    fn cause(self) -> SleepCause {
        match self {
            Self::Spending => SleepCause::Spending,
            Self::Leaving => SleepCause::Drain,
        }
    }

    fn refusal(self) -> Refusal {
        match self {
            Self::Spending => Refusal::SpendingLimit,
            Self::Leaving => Refusal::HostLeaves,
        }
    }
}

/// One sandbox. See the [crate] for how it is used and what it promises.
///
/// Methods come in four families: questions (`&self`), `handle_*` (facts, wishes, reports: what to tell it), `poll_*` (what
/// it wants: orders, events, the next deadline), and two constructors.
#[derive(Debug)]
pub struct Sandbox {
    phase: Phase,
    policy: Policy,
    facts: Facts,
    /// Of a box; of a sandbox it says nothing.
    uses: Uses,
    /// The number of the newest order.
    attempt: Attempt,
    /// The order that made the machine which exists now, or which is being made.
    machine: Option<Attempt>,
    /// Whether it has ever run: only then there is a disk to boot from.
    born: bool,
    /// What programs in it have been told about its next sleep.
    noticed: Option<Noticed>,
    /// The time to sleep has come, but what the guest said last is too old to rely on.
    lacks_sample: bool,
    /// The guest's present silence has been told.
    silence_told: bool,
    /// Since when the host makes it stand still for lack of disk; only while its guest runs.
    halted_since: Option<Time>,
    /// It is put to sleep, and nothing wakes it.
    withheld: Option<Withheld>,
    /// While withheld: a sleep has failed, and is not tried again before.
    withhold_not_before: Time,
    /// Asked to sleep while it was being copied.
    sleep_asked: Option<(SleepCause, Tier)>,
    /// Asked to sleep on disk, not only in memory.
    disk_wanted: bool,
    demote_not_before: Time,
    /// For timers: a wake was given up for lack of disk or memory.
    wake_not_before: Time,
    captures: VecDeque<CaptureId>,
    orders: VecDeque<Order>,
    events: VecDeque<Event>,
    last_wake: Option<LastWake>,
    last_sleep: Option<LastSleep>,
    last_death: Option<Death>,
}

/// What made a sandbox run the last time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastWake {
    /// What needed it.
    pub cause: Cause,
    /// When it was ready.
    pub at: Time,
}

/// Why a sandbox fell asleep the last time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastSleep {
    /// Why.
    pub cause: SleepCause,
    /// When it slept.
    pub at: Time,
}

/// What a starting daemon found of a sandbox. Half-done orders have been finished or undone before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovered {
    /// Accepted, but its first start was never finished: it is started again.
    Unstarted,
    /// Its boot from disk was never finished: it is booted again.
    Unbooted,
    /// Its machine lives and its guest runs. Its number is [`Attempt::RECOVERED`].
    Running,
    /// It sleeps. In memory: its stopped machine's number is [`Attempt::RECOVERED`].
    Asleep {
        /// Where its memory is.
        tier: Tier,
        /// Since when. For one that fell asleep before the host was booted: the clock's zero.
        since: Time,
        /// Why.
        cause: SleepCause,
        /// When its next timer is due, as [`Sandbox::timer_due`] told when it fell asleep.
        timer_due: Option<Time>,
    },
    /// Its machine ended by itself, or is gone without anybody knowing how ([`Death::Killed`], `machine_lost`).
    Off {
        /// How.
        death: Death,
        /// Since when, as far as is known.
        since: Time,
    },
    /// It had failed.
    Failed {
        /// Why.
        code: FailureCode,
        /// Since when.
        since: Time,
        /// Whether it had ever run before; if not, a restart creates it anew.
        has_run: bool,
        /// See [`Phase::Failed`].
        saved: bool,
    },
    /// Its removal was never finished.
    Deleting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Noticed {
    sleeps_at: Time,
    cap: bool,
}

/// Construction.
impl Sandbox {
    /// A new sandbox; its first order is [`Work::Create`](crate::Work::Create).
    pub fn create(now: Time, policy: Policy) -> Self {
        let mut sandbox = Self::blank(now, policy, Phase::Deleted);
        sandbox.start(now, Start::Create, None);
        sandbox
    }

    /// The sandbox that a starting daemon found on its host.
    pub fn recover(now: Time, policy: Policy, found: Recovered) -> Self {
        let mut sandbox = Self::blank(now, policy, Phase::Running { since: now });
        sandbox.born = true;
        match found {
            Recovered::Unstarted => {
                sandbox.born = false;
                sandbox.start(now, Start::Create, None);
            }
            Recovered::Unbooted => sandbox.start(now, Start::Boot, None),
            Recovered::Running => sandbox.machine = Some(Attempt::RECOVERED),
            Recovered::Asleep { tier, since, cause, timer_due } => {
                sandbox.phase = Phase::Asleep { tier, since };
                sandbox.machine = (tier == Tier::Memory).then_some(Attempt::RECOVERED);
                sandbox.last_sleep = Some(LastSleep { cause, at: since });
                sandbox.facts.set_timer_due(timer_due);
            }
            Recovered::Off { death, since } => {
                sandbox.phase = Phase::Off { death, since };
                sandbox.last_death = Some(death);
            }
            Recovered::Failed { code, since, has_run, saved } => {
                sandbox.phase = Phase::Failed { code, since, saved };
                sandbox.born = has_run;
            }
            Recovered::Deleting => sandbox.destroy(0),
        }
        sandbox.settle(now);
        sandbox
    }

    /// With what [`Sandbox::last_death`] said before the daemon ended, so that a machine that was lost stays told (S24).
    /// Only for what [`Sandbox::recover`] gave.
    #[must_use]
    pub fn with_last_death(mut self, death: Option<Death>) -> Self {
        self.last_death = death.or(self.last_death);
        self
    }

    fn blank(now: Time, policy: Policy, phase: Phase) -> Self {
        Self {
            phase,
            policy,
            facts: Facts::new(now),
            uses: Uses::new(now),
            attempt: Attempt::RECOVERED,
            machine: None,
            born: false,
            noticed: None,
            lacks_sample: false,
            silence_told: false,
            halted_since: None,
            withheld: None,
            withhold_not_before: Time::default(),
            sleep_asked: None,
            disk_wanted: false,
            demote_not_before: Time::default(),
            wake_not_before: Time::default(),
            captures: VecDeque::new(),
            orders: VecDeque::new(),
            events: VecDeque::new(),
            last_wake: None,
            last_sleep: None,
            last_death: None,
        }
    }
}

/// What it wants.
impl Sandbox {
    /// The next order for the host. To be called after each `handle_*` until it gives `None`.
    pub fn poll_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// The next entry of the timeline. To be called like [`Sandbox::poll_order`].
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When [`Sandbox::handle_deadline`] is to be called at the latest. May lie in the past.
    pub fn poll_deadline(&self) -> Option<Time> {
        match self.phase {
            Phase::Running { .. } if self.halted_since.is_some() => None,
            Phase::Running { .. } if self.withheld.is_some() => Some(self.withhold_not_before),
            Phase::Running { .. } => earlier(self.silence_at(), self.next_plan().map(Plan::at)),
            Phase::Asleep { tier, since } => {
                let moves = earlier(self.timer_wake_at(), self.demote_at(tier, since));
                earlier(moves, self.box_deadline())
            }
            Phase::Off { .. } | Phase::Failed { .. } => self.box_deadline(),
            Phase::Demoting { wake: None, .. } | Phase::CapturingAsleep { wake: None, .. } => {
                self.timer_wake_at()
            }
            Phase::Waking { retry_at, .. } | Phase::Deleting { retry_at, .. } => retry_at,
            Phase::Starting { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Deleted => None,
        }
    }
}

fn earlier(one: Option<Time>, other: Option<Time>) -> Option<Time> {
    one.into_iter().chain(other).min()
}
