//! The moves from phase to phase. Each leaves phase, machine and orders in agreement.

use std::mem;

use super::{LastSleep, LastWake, Sandbox};
use crate::event::{Event, What};
use crate::limits::{
    DEMOTE_RETRY_MS, EVENTS_WAITING_MAX, SLEEP_RETRY_MS, WAKE_RETRY_MS, WAKE_SHORT_MS,
    WAKE_TRIES_MAX,
};
use crate::need::{Cause, Refusal, SleepCause};
use crate::order::{Attempt, Death, FailureCode, Order, Work};
use crate::phase::{Phase, Start, Tier};
use crate::time::Time;

/// The moves.
impl Sandbox {
    /// Gives an order that supersedes all earlier ones, also those that nobody has seen yet.
    pub(super) fn order(&mut self, work: Work) -> Attempt {
        self.orders.clear();
        self.attempt = Attempt(self.attempt.0 + 1);
        self.orders.push_back(Order { attempt: self.attempt, work });
        self.attempt
    }

    /// Gives an order beside the one under way, instead of one of its kind that nobody has seen yet.
    pub(super) fn remark(&mut self, work: Work) {
        let same = |order: &Order| mem::discriminant(&order.work) == mem::discriminant(&work);
        self.orders.retain(|order| !same(order));
        self.orders.push_back(Order { attempt: self.attempt, work });
    }

    pub(super) fn start(&mut self, now: Time, how: Start, cause: Option<Cause>) {
        let work = match how {
            Start::Create => Work::Create,
            Start::Boot => Work::Boot,
        };
        let attempt = self.order(work);
        self.machine = Some(attempt);
        self.halted_since = None;
        self.sleep_asked = None;
        self.disk_wanted = false;
        self.phase = Phase::Starting { attempt, how, cause };
        self.tell(now, What::Starting { how, cause });
    }

    pub(super) fn wake(
        &mut self,
        now: Time,
        from: Tier,
        since: Time,
        cause: Cause,
        failed_tries: u32,
    ) {
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

    pub(super) fn demote_failed(
        &mut self,
        now: Time,
        since: Time,
        wake: Option<Cause>,
        code: FailureCode,
    ) {
        self.disk_wanted = false;
        if wake.is_none() {
            self.demote_not_before = now.plus_ms(DEMOTE_RETRY_MS);
            self.tell(now, What::DemoteFailed { code });
            self.drop_captures(now, Refusal::CaptureFailed { code });
        }
        self.rest(now, Tier::Memory, since, wake);
    }

    pub(super) fn wake_failed(&mut self, now: Time, failed_before: u32, code: FailureCode) {
        let failed_tries = failed_before.saturating_add(1);
        // The host has waited for room already, as long as its settings say: who waits is told now.
        let again = code.is_transient() && !code.is_shortage() && failed_tries < WAKE_TRIES_MAX;
        self.tell(now, What::WakeFailed { code, again });
        let Phase::Waking { attempt, from, since, cause, .. } = self.phase else { return };
        if !again && code.is_shortage() {
            // The host lacks something for now; with the sandbox nothing is wrong, and nothing of it is given up. Who waited is
            // refused, the next need tries anew.
            if from != Tier::Memory {
                self.machine = None;
            }
            // Copies that wait need no memory: they are made of what is stored.
            self.wake_not_before = now.plus_ms(WAKE_SHORT_MS);
            self.phase = Phase::Asleep { tier: from, since };
            return;
        }
        if !again {
            let code = if code.is_transient() { FailureCode::WakeFailed } else { code };
            self.fail(now, code, true);
            return;
        }
        match from {
            Tier::Memory => {}
            Tier::Disk | Tier::Store => self.machine = None,
        }
        let retry_at = Some(now.plus_ms(doubled(WAKE_RETRY_MS, failed_before)));
        self.phase = Phase::Waking { attempt, from, since, cause, failed_tries, retry_at };
    }

    pub(super) fn suspend(&mut self, now: Time, cause: SleepCause, tier: Tier) {
        let Phase::Running { since } = self.phase else { return };
        self.facts.drop_fired_timer(now);
        let attempt = self.order(Work::Suspend { tier });
        self.noticed = None;
        self.phase = Phase::Suspending { attempt, tier, cause, wake: None, since };
        self.tell(now, What::FallingAsleep { cause });
    }

    pub(super) fn demote(&mut self, since: Time) {
        let attempt = self.order(Work::Demote);
        self.phase = Phase::Demoting { attempt, since, wake: None };
    }

    pub(super) fn destroy(&mut self, failed_tries: u32) {
        let attempt = self.order(Work::Destroy);
        self.halted_since = None;
        self.sleep_asked = None;
        self.phase = Phase::Deleting { attempt, failed_tries, retry_at: None };
    }

    /// It runs. `cause`: what it was brought back for.
    pub(super) fn run(&mut self, now: Time, since: Time, cause: Option<Cause>) {
        self.phase = Phase::Running { since };
        self.halted_since = None;
        self.noticed = None;
        self.lacks_sample = false;
        self.silence_told = false;
        if let Some(cause) = cause {
            self.last_wake = Some(LastWake { cause, at: now });
        }
    }

    /// It was nearly asleep, and runs on.
    pub(super) fn stay(&mut self, now: Time, since: Time, wake: Option<Cause>) {
        self.withhold_not_before = now.plus_ms(SLEEP_RETRY_MS);
        self.facts.stayed(now);
        self.disk_wanted = false;
        self.run(now, since, wake);
    }

    pub(super) fn slept(&mut self, now: Time, tier: Tier, cause: SleepCause, wake: Option<Cause>) {
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
    pub(super) fn rest(&mut self, now: Time, tier: Tier, since: Time, wake: Option<Cause>) {
        match wake {
            Some(cause) if self.withheld.is_none() => self.wake(now, tier, since, cause, 0),
            Some(_) | None => self.phase = Phase::Asleep { tier, since },
        }
    }

    /// The host has no room to boot it. With the sandbox nothing is wrong: it is off, and the next need tries anew.
    pub(super) fn start_refused(&mut self, now: Time, code: FailureCode) {
        // Ended by a restart it has been ended in order.
        let death = self.last_death.unwrap_or(Death::Poweroff);
        self.machine = None;
        self.drop_captures(now, Refusal::CaptureFailed { code });
        self.phase = Phase::Off { death, since: now };
        self.tell(now, What::StartRefused { code });
    }

    /// `saved`: whether its memory is still stored.
    pub(super) fn fail(&mut self, now: Time, code: FailureCode, saved: bool) {
        self.machine = None;
        self.drop_captures(now, Refusal::Failed { code });
        self.phase = Phase::Failed { code, since: now, saved };
        self.tell(now, What::Failed { code });
    }

    /// Its memory is gone. What waits for it gets a fresh boot; nothing ever gets an older memory.
    pub(super) fn lose(&mut self, now: Time, death: Death, wake: Option<Cause>) {
        self.machine = None;
        self.halted_since = None;
        self.last_death = Some(death);
        self.sleep_asked = None;
        self.disk_wanted = false;
        self.facts.booted(now);
        self.tell(now, What::Died { death });
        self.drop_captures(now, Refusal::CaptureFailed { code: FailureCode::MachineLost });
        self.phase = Phase::Off { death, since: now };
        if let Some(cause) = wake
            && self.withheld.is_none()
        {
            self.start(now, Start::Boot, Some(cause));
        }
    }

    /// Ends the capture under way and those that wait.
    pub(super) fn drop_captures(&mut self, now: Time, refusal: Refusal) {
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
        let waiting = mem::take(&mut self.captures);
        for capture in current.into_iter().chain(waiting) {
            self.tell(now, What::CaptureEnded { capture, result: Err(refusal) });
        }
    }

    pub(super) fn tell(&mut self, at: Time, what: What) {
        if self.events.len() == EVENTS_WAITING_MAX {
            self.events.pop_front();
        }
        self.events.push_back(Event { at, what });
    }
}

/// `first_ms`, doubled once for each try that had failed before.
pub(super) fn doubled(first_ms: u64, failed_before: u32) -> u64 {
    first_ms.saturating_mul(1_u64.checked_shl(failed_before).unwrap_or(u64::MAX))
}
