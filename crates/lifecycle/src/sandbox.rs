//! The state machine itself: which wish, fact or report leads from which phase to which, and what is ordered on the way.
//!
//! Every match over the phase is written out without a wildcard: a new phase must not compile until somebody has decided
//! what each wish and each report means in it.

use std::collections::VecDeque;

use crate::event::{Event, What};
use crate::idle::{Facts, Forecast, Sample, sandbox_verdict};
use crate::limits::{
    CAPTURES_WAITING_MAX, DEMOTE_RETRY_MS, DESTROY_RETRY_MS, DESTROY_RETRY_MS_MAX,
    EVENTS_WAITING_MAX, SAMPLE_SILENCE_MS, SLEEP_RETRY_MS, TIMER_LEAD_MS, TIMER_NEAR_MS,
    WAKE_RETRY_MS, WAKE_TRIES_MAX,
};
use crate::need::{Call, CallKind, CaptureId, Cause, Refusal, Served, SleepCause};
use crate::order::{Attempt, CaptureOf, Death, FailureCode, Heard, Left, Order, Report, Work};
use crate::phase::{Phase, SleepTier, Start, Status, Tier};
use crate::policy::{Policy, Tiers};
use crate::reason::{AwakeReason, Reason};
use crate::time::Time;

/// One sandbox. See the [crate] for how it is used and what it promises.
///
/// Methods come in four families: questions (`&self`), `handle_*` (facts, wishes, reports: what to tell it), `poll_*` (what
/// it wants: orders, events, the next deadline), and two constructors.
#[derive(Debug)]
pub struct Sandbox {
    phase: Phase,
    policy: Policy,
    facts: Facts,
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
    /// Asked to sleep while it was being copied.
    sleep_asked: Option<(SleepCause, Tier)>,
    /// Asked to sleep on disk, not only in memory.
    disk_wanted: bool,
    demote_not_before: Time,
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
    /// A new sandbox; its first order is [`Work::Create`].
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
            Recovered::Failed { code, since, has_run } => {
                sandbox.phase = Phase::Failed { code, since };
                sandbox.born = has_run;
            }
            Recovered::Deleting => sandbox.destroy(now, 0),
        }
        sandbox.settle(now);
        sandbox
    }

    fn blank(now: Time, policy: Policy, phase: Phase) -> Self {
        Self {
            phase,
            policy,
            facts: Facts::new(now),
            attempt: Attempt::RECOVERED,
            machine: None,
            born: false,
            noticed: None,
            lacks_sample: false,
            silence_told: false,
            sleep_asked: None,
            disk_wanted: false,
            demote_not_before: Time::default(),
            captures: VecDeque::new(),
            orders: VecDeque::new(),
            events: VecDeque::new(),
            last_wake: None,
            last_sleep: None,
            last_death: None,
        }
    }
}

/// Questions. None of them wakes, holds awake or changes anything.
impl Sandbox {
    /// Where in its life it is.
    pub fn phase(&self) -> &Phase {
        &self.phase
    }

    /// The settings in force.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The phase in one word (S1).
    pub fn status(&self) -> Status {
        match self.phase {
            Phase::Starting { .. } => Status::Starting,
            Phase::Running { .. } | Phase::CapturingAwake { .. } | Phase::Suspending { .. } => {
                Status::Running
            }
            Phase::Asleep { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. } => Status::Sleeping,
            Phase::Failed { .. } => Status::Failed,
            Phase::Deleting { .. } => Status::Deleting,
            Phase::Deleted => Status::Deleted,
        }
    }

    /// How it sleeps (S9); `None` unless its status is `sleeping`.
    pub fn sleep_tier(&self) -> Option<SleepTier> {
        match self.phase {
            Phase::Asleep { tier, .. } | Phase::Waking { from: tier, .. } => Some(tier.into()),
            Phase::Demoting { .. } => Some(SleepTier::Memory),
            Phase::CapturingAsleep { .. } => Some(SleepTier::Disk),
            Phase::Off { .. } => Some(SleepTier::Off),
            Phase::Starting { .. }
            | Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Failed { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => None,
        }
    }

    /// Whether its guest runs now, so that a call can be passed on to it.
    pub fn is_awake(&self) -> bool {
        matches!(self.phase, Phase::Running { .. } | Phase::CapturingAwake { .. })
    }

    /// Why it is awake (S1); empty unless its status is `running`.
    pub fn awake_because(&self, now: Time) -> Vec<AwakeReason> {
        match self.phase {
            Phase::Running { .. } | Phase::CapturingAwake { .. } => {}
            Phase::Suspending { .. } => {
                return vec![AwakeReason { reason: Reason::FallingAsleep, until: None }];
            }
            Phase::Starting { .. }
            | Phase::Asleep { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => return Vec::new(),
        }
        let mut reasons = sandbox_verdict(&self.policy, &self.facts, now).reasons;
        if let Some(noticed) = self.noticed {
            reasons.push(AwakeReason { reason: Reason::Noticed, until: Some(noticed.sleeps_at) });
        }
        if matches!(self.phase, Phase::CapturingAwake { .. }) {
            reasons.push(AwakeReason { reason: Reason::Capturing, until: None });
        }
        reasons
    }

    /// When it will fall asleep if nothing new happens; `None` if that cannot be foreseen, or it is not running.
    pub fn will_sleep_at(&self, now: Time) -> Option<Time> {
        match self.phase {
            Phase::Running { .. } => {
                let forecast = sandbox_verdict(&self.policy, &self.facts, now).sleep?;
                Some(match self.plan(now, forecast) {
                    Plan::SleepAt(at) => at.max(now),
                    Plan::NoticeAt { at, in_ms } => at.max(now).plus_ms(in_ms),
                })
            }
            Phase::Suspending { wake: None, .. } => Some(now),
            Phase::CapturingAwake { .. }
            | Phase::Suspending { wake: Some(_), .. }
            | Phase::Starting { .. }
            | Phase::Asleep { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => None,
        }
    }

    /// When its earliest timer is due, as far as its guest has said; to be stored with a sleeper. A timer that was due
    /// before `now` may be among it.
    pub fn timer_due(&self) -> Option<Time> {
        self.facts.timer_due()
    }

    /// When a sleeper will be woken by a timer of its own (S3).
    pub fn will_wake_at(&self) -> Option<Time> {
        match self.phase {
            Phase::Asleep { .. } | Phase::Demoting { .. } | Phase::CapturingAsleep { .. } => {
                self.timer_wake_at()
            }
            Phase::Starting { .. }
            | Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => None,
        }
    }

    /// What made it run the last time; `None` until something has needed it since its first start or since the daemon
    /// started.
    pub fn last_wake(&self) -> Option<LastWake> {
        self.last_wake
    }

    /// Why it fell asleep the last time.
    pub fn last_sleep(&self) -> Option<LastSleep> {
        self.last_sleep
    }

    /// How its machine ended the last time it did so by itself; cleared by a restart.
    pub fn last_death(&self) -> Option<Death> {
        self.last_death
    }

    /// The `failure_code`: why it failed, or `machine_lost` on one that runs again after its machine was lost (S24).
    pub fn failure_code(&self) -> Option<FailureCode> {
        match self.phase {
            Phase::Failed { code, .. } => Some(code),
            Phase::Starting { .. }
            | Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Asleep { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => {
                (self.last_death == Some(Death::Killed)).then_some(FailureCode::MachineLost)
            }
        }
    }

    /// The number of the machine that exists or is being made: that of the order that made it ([`Work::Create`],
    /// [`Work::Boot`], or [`Work::Wake`] from disk). A wake from memory goes on with the same machine.
    pub fn machine(&self) -> Option<Attempt> {
        self.machine
    }

    /// How many calls of a kind wait on it.
    pub fn calls(&self, kind: CallKind) -> u32 {
        self.facts.calls(kind)
    }

    /// How many forks and snapshots wait, without the one being made.
    pub fn captures_waiting(&self) -> usize {
        self.captures.len()
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
            Phase::Running { .. } => {
                earlier(self.silence_at(), self.next_plan().map(Plan::at))
            }
            Phase::Asleep { tier, since } => {
                earlier(self.timer_wake_at(), self.demote_at(tier, since))
            }
            Phase::Waking { retry_at, .. } | Phase::Deleting { retry_at, .. } => retry_at,
            Phase::Starting { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. }
            | Phase::Deleted => None,
        }
    }
}

/// Wishes.
impl Sandbox {
    /// Something needs it: it is there, or is brought back (S8).
    pub fn handle_need(&mut self, now: Time, cause: Cause) -> Result<Served, Refusal> {
        let served = self.need(now, cause)?;
        self.settle(now);
        Ok(served)
    }

    /// A call begins that waits on it: a need that also holds it awake until [`Sandbox::handle_call_ended`]. One that is
    /// refused does not count.
    pub fn handle_call_began(&mut self, now: Time, call: Call) -> Result<Served, Refusal> {
        let served = self.need(now, Cause::Call(call))?;
        self.facts.call_began(call.kind);
        self.settle(now);
        Ok(served)
    }

    /// Puts it to sleep now, whatever holds it awake (S5). `tier`: how deep at least, where the cause demands more than
    /// the policy; [`Tier::Store`] is reserved and means [`Tier::Disk`].
    ///
    /// One that is being copied sleeps afterwards. Refused while it starts, and while something needs it that is not
    /// there yet.
    pub fn handle_sleep(
        &mut self,
        now: Time,
        cause: SleepCause,
        tier: Option<Tier>,
    ) -> Result<Served, Refusal> {
        let to_disk = matches!(tier, Some(Tier::Disk | Tier::Store));
        let tier = if to_disk { Tier::Disk } else { tier.unwrap_or(self.first_tier()) };
        let served = match &self.phase {
            Phase::Running { .. } => {
                self.suspend(now, cause, tier);
                Served::Later
            }
            Phase::CapturingAwake { .. } => {
                self.sleep_asked = Some((cause, tier));
                Served::Later
            }
            Phase::Suspending { wake: None, .. } => {
                self.disk_wanted |= to_disk;
                Served::Later
            }
            Phase::Asleep { tier: Tier::Memory, .. } if to_disk => {
                self.disk_wanted = true;
                Served::Later
            }
            Phase::Demoting { wake: None, .. } if to_disk => Served::Later,
            Phase::Asleep { .. }
            | Phase::Demoting { wake: None, .. }
            | Phase::CapturingAsleep { wake: None, .. }
            | Phase::Off { .. } => Served::Now,
            Phase::Suspending { wake: Some(_), .. }
            | Phase::Demoting { wake: Some(_), .. }
            | Phase::CapturingAsleep { wake: Some(_), .. }
            | Phase::Waking { .. } => return Err(Refusal::Waking),
            Phase::Starting { .. } => return Err(Refusal::Starting),
            Phase::Failed { code, .. } => return Err(Refusal::Failed { code: *code }),
            Phase::Deleting { .. } | Phase::Deleted => return Err(Refusal::Deleted),
        };
        self.settle(now);
        Ok(served)
    }

    /// Moves a sleeper from memory to disk now, for instance because the host is short of memory. Changes nothing in any
    /// other phase.
    pub fn handle_demote(&mut self, now: Time) {
        match self.phase {
            Phase::Asleep { tier: Tier::Memory, .. } => {
                self.disk_wanted = true;
                self.settle(now);
            }
            Phase::Asleep { tier: Tier::Disk | Tier::Store, .. }
            | Phase::Starting { .. }
            | Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => {}
        }
    }

    /// A fork or a snapshot is wanted. Its end is told by [`What::CaptureEnded`]; a sleeper is not woken for it (S8), one
    /// that sleeps in memory goes to disk first.
    pub fn handle_capture(&mut self, now: Time, capture: CaptureId) -> Result<Served, Refusal> {
        match &self.phase {
            Phase::Failed { code, .. } => return Err(Refusal::Failed { code: *code }),
            Phase::Deleting { .. } | Phase::Deleted => return Err(Refusal::Deleted),
            Phase::Starting { .. }
            | Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Asleep { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. } => {}
        }
        if self.captures.len() >= CAPTURES_WAITING_MAX {
            return Err(Refusal::TooManyCaptures);
        }
        self.captures.push_back(capture);
        if matches!(self.phase, Phase::Off { .. }) {
            self.need(now, Cause::Capture)?;
        }
        self.settle(now);
        Ok(Served::Later)
    }

    /// Boots it from its disk; what ran is lost (S15). Also the cure of one that failed (S17).
    pub fn handle_restart(&mut self, now: Time) -> Result<Served, Refusal> {
        match self.phase {
            Phase::Starting { .. } => return Ok(Served::Later),
            Phase::Deleting { .. } | Phase::Deleted => return Err(Refusal::Deleted),
            Phase::Failed { code, .. } => {
                let had_memory = match code {
                    FailureCode::CreateFailed | FailureCode::BootFailed => false,
                    FailureCode::SleepFailed
                    | FailureCode::WakeFailed
                    | FailureCode::SnapshotMismatch
                    | FailureCode::StateDamaged
                    | FailureCode::DiskFull
                    | FailureCode::NoCapacity
                    | FailureCode::AgentSilent
                    | FailureCode::CaptureFailed
                    | FailureCode::DestroyFailed
                    | FailureCode::MachineLost => self.born,
                };
                self.last_death = had_memory.then_some(Death::Killed);
            }
            Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Asleep { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. } => self.last_death = None,
        }
        self.drop_captures(now, Refusal::Restarted);
        let how = if self.born { Start::Boot } else { Start::Create };
        self.start(now, how, Some(Cause::Restart));
        Ok(Served::Later)
    }

    /// Removes it, whatever it is doing. Asking again is fine; where a removal has failed it is tried at once.
    pub fn handle_delete(&mut self, now: Time) -> Served {
        match self.phase {
            Phase::Deleted => return Served::Now,
            Phase::Deleting { retry_at: None, .. } => {}
            Phase::Deleting { failed_tries, retry_at: Some(_), .. } => {
                self.destroy(now, failed_tries);
            }
            Phase::Starting { .. }
            | Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Asleep { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. } => {
                self.tell(now, What::Deleting);
                self.drop_captures(now, Refusal::Deleted);
                self.destroy(now, 0);
            }
        }
        Served::Later
    }

    /// New settings, in force at once (S6).
    pub fn handle_policy(&mut self, now: Time, policy: Policy) {
        self.policy = policy;
        self.noticed = None;
        self.settle(now);
    }
}

/// Facts.
impl Sandbox {
    /// A call that was accepted by [`Sandbox::handle_call_began`] has ended, well or not. Every call must be ended, also
    /// when its sandbox dies or is deleted.
    pub fn handle_call_ended(&mut self, now: Time, kind: CallKind) {
        self.facts.call_ended(now, kind);
        self.settle(now);
    }

    /// Packets that count (S2) crossed its network link.
    pub fn handle_packets(&mut self, now: Time) {
        self.facts.packet(now);
        self.settle(now);
    }

    /// The guest says what it does. Also right before it stops: a timer that is due soon by then still keeps it awake.
    pub fn handle_sample(&mut self, now: Time, sample: Sample) {
        match self.phase {
            Phase::Running { .. } | Phase::CapturingAwake { .. } => {
                self.take_sample(now, sample);
                self.settle(now);
            }
            Phase::Suspending { cause, wake: None, .. } => {
                self.take_sample(now, sample);
                let for_idleness = match cause {
                    SleepCause::Idle | SleepCause::HoldCap => true,
                    SleepCause::Asked
                    | SleepCause::Shutdown
                    | SleepCause::Drain
                    | SleepCause::Spending => false,
                };
                let near = self.facts.timer_due().filter(|due| due.ms_since(now) <= TIMER_NEAR_MS);
                if let Some(due) = near
                    && for_idleness
                    && !self.policy.awake_ports
                {
                    self.cancel_for(Cause::Timer { due });
                }
            }
            Phase::Suspending { wake: Some(_), .. } => self.take_sample(now, sample),
            // Late ones, from before.
            Phase::Starting { .. }
            | Phase::Asleep { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => {}
        }
    }

    /// Holds were raised or lowered, or connections to the awake socket came or went (S10): the same numbers as in a
    /// [`Sample`], told at once.
    pub fn handle_holds(&mut self, now: Time, holds: u32, connections: u32) {
        match self.phase {
            Phase::Running { .. } | Phase::CapturingAwake { .. } | Phase::Suspending { .. } => {
                self.facts.set_holds(now, holds, connections, self.holds_count());
                self.settle(now);
            }
            Phase::Starting { .. }
            | Phase::Asleep { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => {}
        }
    }

    /// A machine ended that nobody had ordered to end. `machine`: which one, see [`Sandbox::machine`]. The end of a
    /// machine that is part of an order (saved and let go, destroyed) is not reported here.
    pub fn handle_died(&mut self, now: Time, machine: Attempt, death: Death) -> Heard {
        if self.machine != Some(machine) {
            return Heard::Stale;
        }
        match self.phase {
            Phase::Starting { how, .. } => {
                let code = match how {
                    Start::Create => FailureCode::CreateFailed,
                    Start::Boot => FailureCode::BootFailed,
                };
                self.fail(now, code);
            }
            Phase::Running { .. } | Phase::CapturingAwake { .. } | Phase::Asleep { .. } => {
                self.lose(now, death, None);
            }
            Phase::Suspending { wake, .. } | Phase::Demoting { wake, .. } => {
                self.lose(now, death, wake);
            }
            Phase::Waking { cause, .. } => self.lose(now, death, Some(cause)),
            Phase::Deleting { .. } => self.machine = None,
            Phase::CapturingAsleep { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. }
            | Phase::Deleted => {
                return Heard::OutOfPlace;
            }
        }
        self.settle(now);
        Heard::Taken
    }

    /// How an order ended.
    pub fn handle_report(&mut self, now: Time, attempt: Attempt, report: Report) -> Heard {
        if attempt > self.attempt {
            return Heard::OutOfPlace;
        }
        if self.under_way() != Some(attempt) {
            return Heard::Stale;
        }
        let taken = self.report(now, report);
        self.settle(now);
        if taken { Heard::Taken } else { Heard::OutOfPlace }
    }

    /// Time has passed. Early and needless calls do nothing.
    pub fn handle_deadline(&mut self, now: Time) {
        self.settle(now);
    }
}

/// When something happens by itself, and what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    SleepAt(Time),
    NoticeAt { at: Time, in_ms: u64 },
}

impl Plan {
    fn at(self) -> Time {
        match self {
            Self::SleepAt(at) | Self::NoticeAt { at, .. } => at,
        }
    }
}

/// The steps. Each leaves phase, machine and orders in agreement.
impl Sandbox {
    fn need(&mut self, now: Time, cause: Cause) -> Result<Served, Refusal> {
        match self.phase {
            Phase::Running { .. } | Phase::CapturingAwake { .. } => {
                match cause {
                    Cause::Packet { .. } => self.facts.packet(now),
                    Cause::Call(_)
                    | Cause::Terminal
                    | Cause::Capture
                    | Cause::Timer { .. }
                    | Cause::Restart => {
                        self.facts.needed(now);
                    }
                }
                return Ok(Served::Now);
            }
            Phase::Suspending { wake: None, .. } | Phase::Demoting { wake: None, .. } => {
                self.cancel_for(cause);
            }
            Phase::CapturingAsleep { ref mut wake, .. } => {
                wake.get_or_insert(cause);
            }
            Phase::Asleep { tier, since } => self.wake(now, tier, since, cause, 0),
            Phase::Off { .. } => self.start(now, Start::Boot, Some(cause)),
            Phase::Starting { .. }
            | Phase::Suspending { wake: Some(_), .. }
            | Phase::Demoting { wake: Some(_), .. }
            | Phase::Waking { .. } => {}
            Phase::Failed { code, .. } => return Err(Refusal::Failed { code }),
            Phase::Deleting { .. } | Phase::Deleted => return Err(Refusal::Deleted),
        }
        Ok(Served::Later)
    }

    /// Remembers what needs it and asks the host to turn back if it still can.
    fn cancel_for(&mut self, cause: Cause) {
        match &mut self.phase {
            Phase::Suspending { attempt, wake, .. } | Phase::Demoting { attempt, wake, .. } => {
                if wake.is_none() {
                    *wake = Some(cause);
                    self.orders.push_back(Order { attempt: *attempt, work: Work::Cancel });
                }
            }
            Phase::Starting { .. }
            | Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Asleep { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => {}
        }
    }

    /// The order whose report is awaited.
    fn under_way(&self) -> Option<Attempt> {
        match self.phase {
            Phase::Starting { attempt, .. }
            | Phase::CapturingAwake { attempt, .. }
            | Phase::Suspending { attempt, .. }
            | Phase::Demoting { attempt, .. }
            | Phase::CapturingAsleep { attempt, .. }
            | Phase::Waking { attempt, retry_at: None, .. }
            | Phase::Deleting { attempt, retry_at: None, .. } => Some(attempt),
            Phase::Waking { retry_at: Some(_), .. }
            | Phase::Deleting { retry_at: Some(_), .. }
            | Phase::Running { .. }
            | Phase::Asleep { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. }
            | Phase::Deleted => None,
        }
    }

    /// The table of reports about the order under way. `false`: an honest host cannot say this here.
    fn report(&mut self, now: Time, report: Report) -> bool {
        match (self.phase.clone(), report) {
            (Phase::Starting { how, cause, .. }, Report::Ready) => {
                self.born = true;
                self.facts.booted(now);
                self.run(now, now, cause);
                self.tell(now, What::Started { how });
            }
            (Phase::Starting { how, .. }, Report::Failed { code, .. }) => {
                let code = match (code, how) {
                    // Say which start it was where the host has nothing better to say.
                    (FailureCode::CreateFailed | FailureCode::BootFailed, Start::Create) => FailureCode::CreateFailed,
                    (FailureCode::CreateFailed | FailureCode::BootFailed, Start::Boot) => FailureCode::BootFailed,
                    (code, _) => code,
                };
                self.fail(now, code);
            }

            (Phase::Suspending { cause, wake, .. }, Report::Suspended { tier }) => {
                self.slept(now, tier, cause, wake);
            }
            (Phase::Suspending { since, wake, .. }, Report::BackAwake) => {
                self.stay(now, since, wake);
                self.tell(now, What::SleepCancelled { cause: wake });
            }
            (Phase::Suspending { since, wake, .. }, Report::Failed { code, left: Left::Awake }) => {
                self.stay(now, since, wake);
                self.facts.sleep_failed(now.plus_ms(SLEEP_RETRY_MS), code);
                self.tell(now, What::SleepFailed { code });
            }
            (Phase::Suspending { cause, wake, .. }, Report::Failed { code, left: Left::Asleep }) => {
                self.demote_not_before = now.plus_ms(DEMOTE_RETRY_MS);
                self.tell(now, What::SleepFailed { code });
                self.slept(now, Tier::Memory, cause, wake);
                self.disk_wanted = false;
            }

            (Phase::Demoting { since, wake, .. }, Report::Demoted) => {
                self.machine = None;
                self.disk_wanted = false;
                self.tell(now, What::Demoted);
                self.rest(now, Tier::Disk, since, wake);
            }
            (Phase::Demoting { since, wake, .. }, Report::StillInMemory) => self.rest(now, Tier::Memory, since, wake),
            (Phase::Demoting { since, wake, .. }, Report::Failed { code, left: Left::Asleep }) => {
                self.demote_not_before = now.plus_ms(DEMOTE_RETRY_MS);
                self.disk_wanted = false;
                self.tell(now, What::DemoteFailed { code });
                if wake.is_none() {
                    self.drop_captures(now, Refusal::CaptureFailed { code });
                }
                self.rest(now, Tier::Memory, since, wake);
            }

            (Phase::CapturingAwake { capture, since, .. }, Report::Captured) => {
                self.phase = Phase::Running { since };
                self.tell(now, What::CaptureEnded { capture, result: Ok(()) });
            }
            (Phase::CapturingAwake { capture, since, .. }, Report::Failed { code, left: Left::Awake }) => {
                self.phase = Phase::Running { since };
                self.tell(now, What::CaptureEnded { capture, result: Err(Refusal::CaptureFailed { code }) });
            }
            (Phase::CapturingAsleep { capture, since, wake, .. }, Report::Captured) => {
                self.tell(now, What::CaptureEnded { capture, result: Ok(()) });
                self.rest(now, Tier::Disk, since, wake);
            }
            (Phase::CapturingAsleep { capture, since, wake, .. }, Report::Failed { code, left: Left::Asleep }) => {
                self.tell(now, What::CaptureEnded { capture, result: Err(Refusal::CaptureFailed { code }) });
                self.rest(now, Tier::Disk, since, wake);
            }

            (Phase::Waking { from, since, cause, .. }, Report::Ready) => {
                self.facts.woke(now);
                self.run(now, now, Some(cause));
                self.tell(now, What::Woke { from, cause, slept_ms: now.ms_since(since) });
            }
            // It runs, so there is no way back; whether it is of use is the host's to find out.
            (Phase::Waking { cause, .. }, Report::Failed { code, left: Left::Awake }) => {
                self.facts.woke(now);
                self.run(now, now, Some(cause));
                self.tell(now, What::WakeFailed { code, again: false });
            }
            (Phase::Waking { failed_tries, .. }, Report::Failed { code, left: Left::Asleep }) => {
                self.wake_failed(now, failed_tries, code);
            }

            (Phase::Deleting { .. }, Report::Destroyed) => {
                self.phase = Phase::Deleted;
                self.machine = None;
                self.tell(now, What::Deleted);
            }
            (Phase::Deleting { attempt, failed_tries, .. }, Report::Failed { code, .. }) => {
                let wait_ms = doubled(DESTROY_RETRY_MS, failed_tries).min(DESTROY_RETRY_MS_MAX);
                self.phase = Phase::Deleting {
                    attempt,
                    failed_tries: failed_tries.saturating_add(1),
                    retry_at: Some(now.plus_ms(wait_ms)),
                };
                self.tell(now, What::DeleteFailed { code });
            }

            // The memory is gone, whatever it was doing: what needs it boots it from disk.
            (
                Phase::Suspending { wake, .. } | Phase::Demoting { wake, .. } | Phase::CapturingAsleep { wake, .. },
                Report::Failed { left: Left::Lost, .. },
            ) => self.lose(now, Death::Killed, wake),
            (Phase::CapturingAwake { .. }, Report::Failed { left: Left::Lost, .. }) => {
                self.lose(now, Death::Killed, None);
            }
            (Phase::Waking { cause, .. }, Report::Failed { code, left: Left::Lost }) => {
                self.tell(now, What::WakeFailed { code, again: false });
                self.lose(now, Death::Killed, Some(cause));
            }

            (
                Phase::Starting { .. },
                Report::Suspended { .. }
                | Report::BackAwake
                | Report::Demoted
                | Report::StillInMemory
                | Report::Captured
                | Report::Destroyed,
            )
            | (
                Phase::CapturingAwake { .. },
                Report::Ready
                | Report::Suspended { .. }
                | Report::BackAwake
                | Report::Demoted
                | Report::StillInMemory
                | Report::Destroyed
                | Report::Failed { left: Left::Asleep, .. },
            )
            | (
                Phase::Suspending { .. },
                Report::Ready | Report::Demoted | Report::StillInMemory | Report::Captured | Report::Destroyed,
            )
            | (
                Phase::Demoting { .. },
                Report::Ready
                | Report::Suspended { .. }
                | Report::BackAwake
                | Report::Captured
                | Report::Destroyed
                | Report::Failed { left: Left::Awake, .. },
            )
            | (
                Phase::CapturingAsleep { .. },
                Report::Ready
                | Report::Suspended { .. }
                | Report::BackAwake
                | Report::Demoted
                | Report::StillInMemory
                | Report::Destroyed
                | Report::Failed { left: Left::Awake, .. },
            )
            | (
                Phase::Waking { .. },
                Report::Suspended { .. }
                | Report::BackAwake
                | Report::Demoted
                | Report::StillInMemory
                | Report::Captured
                | Report::Destroyed,
            )
            | (
                Phase::Deleting { .. },
                Report::Ready
                | Report::Suspended { .. }
                | Report::BackAwake
                | Report::Demoted
                | Report::StillInMemory
                | Report::Captured,
            )
            // No order is under way in these.
            | (
                Phase::Running { .. }
                | Phase::Asleep { .. }
                | Phase::Off { .. }
                | Phase::Failed { .. }
                | Phase::Deleted,
                _,
            ) => return false,
        }
        true
    }

    /// Does what follows from where it is now and what time it is. Every `handle_*` ends here.
    fn settle(&mut self, now: Time) {
        match self.phase {
            Phase::Running { since } => {
                if let Some(capture) = self.captures.pop_front() {
                    let attempt = self.order(Work::Capture { capture, of: CaptureOf::Awake });
                    self.phase = Phase::CapturingAwake { attempt, capture, since };
                } else if let Some((cause, tier)) = self.sleep_asked.take() {
                    self.suspend(now, cause, tier);
                } else {
                    self.listen(now);
                    self.consider_sleep(now);
                }
            }
            Phase::Asleep { tier, since } => self.settle_asleep(now, tier, since),
            Phase::Waking { from, since, cause, failed_tries, retry_at: Some(at), .. }
                if at <= now =>
            {
                self.wake(now, from, since, cause, failed_tries);
            }
            Phase::Deleting { failed_tries, retry_at: Some(at), .. } if at <= now => {
                self.destroy(now, failed_tries);
            }
            Phase::Waking { .. }
            | Phase::Deleting { .. }
            | Phase::Starting { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. }
            | Phase::Deleted => {}
        }
    }

    fn settle_asleep(&mut self, now: Time, tier: Tier, since: Time) {
        if !self.captures.is_empty() {
            match tier {
                Tier::Memory => self.demote(since),
                Tier::Disk => {
                    if let Some(capture) = self.captures.pop_front() {
                        let attempt =
                            self.order(Work::Capture { capture, of: CaptureOf::AsleepOnDisk });
                        self.phase = Phase::CapturingAsleep { attempt, capture, since, wake: None };
                    }
                }
                Tier::Store => self.wake(now, tier, since, Cause::Capture, 0),
            }
        } else if let Some(due) =
            self.timer_due().filter(|_| self.timer_wake_at().is_some_and(|at| at <= now))
        {
            self.wake(now, tier, since, Cause::Timer { due }, 0);
        } else if self.demote_at(tier, since).is_some_and(|at| at <= now) {
            self.demote(since);
        }
    }

    /// Notices that the guest has been silent for too long.
    fn listen(&mut self, now: Time) {
        if self.silence_at().is_some_and(|at| at <= now) {
            self.silence_told = true;
            let since = self.facts.heard_at();
            self.tell(now, What::GuestSilent { since });
        }
    }

    fn consider_sleep(&mut self, now: Time) {
        let Some(forecast) = sandbox_verdict(&self.policy, &self.facts, self.sampled_at(now)).sleep
        else {
            self.noticed = None;
            return;
        };
        if self.noticed.is_some_and(|noticed| forecast.at > noticed.sleeps_at) {
            self.noticed = None;
        }
        let plan = self.plan(now, forecast);
        if plan.at() > now {
            return;
        }
        if !self.policy.awake_ports && !self.facts.has_fresh_sample(now) {
            self.lacks_sample = true;
            return;
        }
        match plan {
            Plan::SleepAt(_) => self.suspend(now, forecast.cause, self.first_tier()),
            Plan::NoticeAt { in_ms, .. } => {
                let cap = forecast.cause == SleepCause::HoldCap;
                self.noticed = Some(Noticed { sleeps_at: now.plus_ms(in_ms), cap });
                self.orders.retain(|order| !matches!(order.work, Work::Notice { .. }));
                self.orders
                    .push_back(Order { attempt: self.attempt, work: Work::Notice { in_ms, cap } });
            }
        }
    }

    /// What comes next of a forecast: a notice (S13), or sleep.
    fn plan(&self, now: Time, forecast: Forecast) -> Plan {
        match (self.noticed, self.policy.sleep_notice_ms) {
            (Some(noticed), _) if forecast.at <= noticed.sleeps_at => {
                Plan::SleepAt(noticed.sleeps_at)
            }
            (_, Some(in_ms)) if self.facts.hold_connections() > 0 => {
                Plan::NoticeAt { at: forecast.at.minus_ms(in_ms).max(Time::default()), in_ms }
            }
            (_, _) => Plan::SleepAt(forecast.at.max(self.facts.heard_at().min(now))),
        }
    }

    /// What happens next by itself to a running one, as far as its newest sample tells.
    fn next_plan(&self) -> Option<Plan> {
        if self.lacks_sample {
            return None;
        }
        let now = self.sampled_at(self.facts.heard_at());
        let forecast = sandbox_verdict(&self.policy, &self.facts, now).sleep?;
        Some(self.plan(now, forecast))
    }

    /// The moment for which the newest sample holds: whether it is still fresh when the time has come is asked then.
    fn sampled_at(&self, now: Time) -> Time {
        self.facts.heard_at().min(now)
    }

    fn take_sample(&mut self, now: Time, sample: Sample) {
        let holds_count = self.holds_count();
        self.facts.sample(now, sample, &self.policy, holds_count);
        self.lacks_sample = false;
        self.silence_told = false;
    }

    /// After a notice that a hold has reached its limit, lowering and raising holds changes nothing any more (S13).
    fn holds_count(&self) -> bool {
        !self.noticed.is_some_and(|noticed| noticed.cap)
    }

    fn silence_at(&self) -> Option<Time> {
        (!self.silence_told).then(|| self.facts.heard_at().plus_ms(SAMPLE_SILENCE_MS))
    }

    fn timer_wake_at(&self) -> Option<Time> {
        if self.policy.awake_ports {
            return None;
        }
        self.facts.timer_due().map(|due| due.minus_ms(TIMER_LEAD_MS))
    }

    fn demote_at(&self, tier: Tier, since: Time) -> Option<Time> {
        match tier {
            Tier::Memory if self.disk_wanted => Some(Time::default()),
            Tier::Memory => {
                let wanted = match self.policy.tiers {
                    Tiers::MemoryThenDisk { memory_tier_ms } => since.plus_ms(memory_tier_ms),
                    Tiers::Disk => since,
                };
                Some(wanted.max(self.demote_not_before))
            }
            Tier::Disk | Tier::Store => None,
        }
    }

    fn first_tier(&self) -> Tier {
        match self.policy.tiers {
            Tiers::MemoryThenDisk { .. } => Tier::Memory,
            Tiers::Disk => Tier::Disk,
        }
    }

    /// Gives an order that supersedes all earlier ones, also those that nobody has seen yet.
    fn order(&mut self, work: Work) -> Attempt {
        self.orders.clear();
        self.attempt = Attempt(self.attempt.0 + 1);
        self.orders.push_back(Order { attempt: self.attempt, work });
        self.attempt
    }

    fn start(&mut self, now: Time, how: Start, cause: Option<Cause>) {
        let work = match how {
            Start::Create => Work::Create,
            Start::Boot => Work::Boot,
        };
        let attempt = self.order(work);
        self.machine = Some(attempt);
        self.sleep_asked = None;
        self.disk_wanted = false;
        self.phase = Phase::Starting { attempt, how, cause };
        self.tell(now, What::Starting { how, cause });
    }

    fn wake(&mut self, now: Time, from: Tier, since: Time, cause: Cause, failed_tries: u32) {
        let attempt = self.order(Work::Wake { from });
        match from {
            Tier::Memory => {}
            Tier::Disk | Tier::Store => self.machine = Some(attempt),
        }
        self.disk_wanted = false;
        self.phase = Phase::Waking { attempt, from, since, cause, failed_tries, retry_at: None };
        if failed_tries == 0 {
            self.tell(now, What::Waking { from, cause });
        }
    }

    fn wake_failed(&mut self, now: Time, failed_before: u32, code: FailureCode) {
        let failed_tries = failed_before.saturating_add(1);
        let again = code.is_transient() && failed_tries < WAKE_TRIES_MAX;
        self.tell(now, What::WakeFailed { code, again });
        if !again {
            self.fail(now, if code.is_transient() { FailureCode::WakeFailed } else { code });
            return;
        }
        let Phase::Waking { attempt, from, since, cause, .. } = self.phase else { return };
        match from {
            Tier::Memory => {}
            Tier::Disk | Tier::Store => self.machine = None,
        }
        let retry_at = Some(now.plus_ms(doubled(WAKE_RETRY_MS, failed_before)));
        self.phase = Phase::Waking { attempt, from, since, cause, failed_tries, retry_at };
    }

    fn suspend(&mut self, now: Time, cause: SleepCause, tier: Tier) {
        let Phase::Running { since } = self.phase else { return };
        let attempt = self.order(Work::Suspend { tier });
        self.noticed = None;
        self.phase = Phase::Suspending { attempt, tier, cause, wake: None, since };
        self.tell(now, What::FallingAsleep { cause });
    }

    fn demote(&mut self, since: Time) {
        let attempt = self.order(Work::Demote);
        self.phase = Phase::Demoting { attempt, since, wake: None };
    }

    fn destroy(&mut self, _now: Time, failed_tries: u32) {
        let attempt = self.order(Work::Destroy);
        self.sleep_asked = None;
        self.phase = Phase::Deleting { attempt, failed_tries, retry_at: None };
    }

    /// It runs. `cause`: what it was brought back for.
    fn run(&mut self, now: Time, since: Time, cause: Option<Cause>) {
        self.phase = Phase::Running { since };
        self.noticed = None;
        self.lacks_sample = false;
        self.silence_told = false;
        if let Some(cause) = cause {
            self.last_wake = Some(LastWake { cause, at: now });
        }
    }

    /// It was nearly asleep, and runs on.
    fn stay(&mut self, now: Time, since: Time, wake: Option<Cause>) {
        self.facts.stayed(now);
        self.disk_wanted = false;
        self.run(now, since, wake);
    }

    fn slept(&mut self, now: Time, tier: Tier, cause: SleepCause, wake: Option<Cause>) {
        match tier {
            Tier::Memory => {}
            Tier::Disk | Tier::Store => {
                self.machine = None;
                self.disk_wanted = false;
            }
        }
        self.last_sleep = Some(LastSleep { cause, at: now });
        self.tell(now, What::Slept { tier, cause });
        self.rest(now, tier, now, wake);
    }

    /// It sleeps, unless something needs it.
    fn rest(&mut self, now: Time, tier: Tier, since: Time, wake: Option<Cause>) {
        match wake {
            Some(cause) => self.wake(now, tier, since, cause, 0),
            None => self.phase = Phase::Asleep { tier, since },
        }
    }

    fn fail(&mut self, now: Time, code: FailureCode) {
        self.machine = None;
        self.drop_captures(now, Refusal::Failed { code });
        self.phase = Phase::Failed { code, since: now };
        self.tell(now, What::Failed { code });
    }

    /// Its memory is gone. What waits for it gets a fresh boot; nothing ever gets an older memory.
    fn lose(&mut self, now: Time, death: Death, wake: Option<Cause>) {
        self.machine = None;
        self.last_death = Some(death);
        self.sleep_asked = None;
        self.disk_wanted = false;
        self.facts.booted(now);
        self.tell(now, What::Died { death });
        self.drop_captures(now, Refusal::CaptureFailed { code: FailureCode::MachineLost });
        self.phase = Phase::Off { death, since: now };
        if let Some(cause) = wake {
            self.start(now, Start::Boot, Some(cause));
        }
    }

    /// Ends the capture under way and those that wait.
    fn drop_captures(&mut self, now: Time, refusal: Refusal) {
        let current = match self.phase {
            Phase::CapturingAwake { capture, .. } | Phase::CapturingAsleep { capture, .. } => {
                Some(capture)
            }
            Phase::Starting { .. }
            | Phase::Running { .. }
            | Phase::Suspending { .. }
            | Phase::Asleep { .. }
            | Phase::Demoting { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => None,
        };
        let waiting = std::mem::take(&mut self.captures);
        for capture in current.into_iter().chain(waiting) {
            self.tell(now, What::CaptureEnded { capture, result: Err(refusal) });
        }
    }

    fn tell(&mut self, at: Time, what: What) {
        if self.events.len() == EVENTS_WAITING_MAX {
            self.events.pop_front();
        }
        self.events.push_back(Event { at, what });
    }
}

fn earlier(one: Option<Time>, other: Option<Time>) -> Option<Time> {
    one.into_iter().chain(other).min()
}

/// `first_ms`, doubled once for each try that had failed before.
fn doubled(first_ms: u64, failed_before: u32) -> u64 {
    first_ms.saturating_mul(1_u64.checked_shl(failed_before).unwrap_or(u64::MAX))
}
