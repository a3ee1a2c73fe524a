//! What follows by itself from where a sandbox is and what time it is: every `handle_*` ends here.

use super::{Noticed, Sandbox};
use crate::event::What;
use crate::idle::{Forecast, Sample};
use crate::limits::{SAMPLE_AT_SLEEP_MS, SAMPLE_FRESH_MS, SAMPLE_SILENCE_MS, TIMER_LEAD_MS};
use crate::need::{Cause, Refusal, SleepCause};
use crate::order::{CaptureOf, FailureCode, Work};
use crate::phase::{Phase, Tier};
use crate::policy::Tiers;
use crate::time::Time;

/// When something happens by itself, and what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    SleepAt(Time),
    NoticeAt { at: Time, in_ms: u64 },
}

impl Plan {
    pub(super) fn at(self) -> Time {
        match self {
            Self::SleepAt(at) | Self::NoticeAt { at, .. } => at,
        }
    }
}

/// What happens by itself.
impl Sandbox {
    /// Does what follows from where it is now and what time it is. Every `handle_*` ends here.
    pub(super) fn settle(&mut self, now: Time) {
        match self.phase {
            Phase::Running { .. } if self.halted_since.is_some() => self.settle_halted(now),
            Phase::Running { since } => {
                if let Some(capture) = self.captures.pop_front() {
                    let attempt = self.order(Work::Capture { capture, of: CaptureOf::Awake });
                    self.phase = Phase::CapturingAwake { attempt, capture, since };
                } else if let Some((cause, tier)) = self.sleep_asked.take() {
                    self.suspend(now, cause, tier);
                } else if let Some(withheld) = self.withheld {
                    if self.withhold_not_before <= now {
                        self.suspend(now, withheld.cause(), Tier::Disk);
                    }
                } else {
                    self.listen(now);
                    self.consider_sleep(now);
                }
            }
            Phase::Asleep { tier, since } => self.settle_asleep(now, tier, since),
            Phase::Demoting { wake: None, .. } | Phase::CapturingAsleep { wake: None, .. } => {
                if let Some(due) = self.timer_to_wake_for(now) {
                    self.cancel_for(Cause::Timer { due });
                }
            }
            Phase::Waking { from, since, cause, failed_tries, retry_at: Some(at), .. }
                if at <= now =>
            {
                self.wake(now, from, since, cause, failed_tries);
            }
            Phase::Deleting { failed_tries, retry_at: Some(at), .. } if at <= now => {
                self.destroy(failed_tries);
            }
            Phase::Off { .. } | Phase::Failed { .. } => {
                self.settle_box(now);
            }
            Phase::Waking { .. }
            | Phase::Deleting { .. }
            | Phase::Starting { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Deleted => {}
        }
    }

    /// It can do nothing until the host has room: who waits for a copy or a sleep need not wait for that.
    fn settle_halted(&mut self, now: Time) {
        let code = FailureCode::DiskFull;
        self.drop_captures(now, Refusal::CaptureFailed { code });
        if self.sleep_asked.take().is_some() {
            self.tell(now, What::SleepFailed { code });
        }
    }

    pub(super) fn settle_asleep(&mut self, now: Time, tier: Tier, since: Time) {
        if self.settle_box(now) {
            return;
        }
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
        } else if let Some(due) = self.timer_to_wake_for(now) {
            self.wake(now, tier, since, Cause::Timer { due }, 0);
        } else if self.demote_at(tier, since).is_some_and(|at| at <= now) {
            self.demote(since);
        }
    }

    /// Notices that the guest has been silent for too long.
    pub(super) fn listen(&mut self, now: Time) {
        if self.silence_at().is_some_and(|at| at <= now) {
            self.silence_told = true;
            let since = self.facts.heard_at();
            self.tell(now, What::GuestSilent { since });
        }
    }

    pub(super) fn consider_sleep(&mut self, now: Time) {
        let Some(forecast) = self.verdict(self.sampled_at(now)).sleep else {
            self.noticed = None;
            return;
        };
        if self.noticed.is_some_and(|noticed| forecast.at > noticed.sleeps_at) {
            self.noticed = None;
        }
        let plan = self.plan(forecast);
        if plan.at() > now {
            return;
        }
        let newer_than_ms = match plan {
            Plan::SleepAt(_) => SAMPLE_AT_SLEEP_MS,
            Plan::NoticeAt { .. } => SAMPLE_FRESH_MS,
        };
        if !self.policy.awake_ports && !self.facts.has_sample(now, newer_than_ms) {
            if !self.lacks_sample {
                self.lacks_sample = true;
                self.remark(Work::Sample);
            }
            return;
        }
        match plan {
            Plan::SleepAt(_) => self.suspend(now, forecast.cause, self.first_tier()),
            Plan::NoticeAt { in_ms, .. } => {
                let cap = forecast.cause == SleepCause::HoldCap;
                self.noticed = Some(Noticed { sleeps_at: now.plus_ms(in_ms), cap });
                self.remark(Work::Notice { in_ms, cap });
            }
        }
    }

    /// What comes next of a forecast: a notice (S13), or sleep.
    pub(super) fn plan(&self, forecast: Forecast) -> Plan {
        match (self.noticed, self.policy.sleep_notice_ms) {
            (Some(noticed), _) if forecast.at <= noticed.sleeps_at => {
                Plan::SleepAt(noticed.sleeps_at)
            }
            (_, Some(in_ms)) if self.policy.is_open() && self.facts.hold_connections() > 0 => {
                Plan::NoticeAt { at: forecast.at.minus_ms(in_ms), in_ms }
            }
            (_, _) => Plan::SleepAt(forecast.at),
        }
    }

    /// What happens next by itself to a running one, as far as its newest sample tells.
    pub(super) fn next_plan(&self) -> Option<Plan> {
        if self.lacks_sample {
            return None;
        }
        let now = self.sampled_at(self.facts.heard_at());
        let forecast = self.verdict(now).sleep?;
        Some(self.plan(forecast))
    }

    /// The moment for which the newest sample holds: whether it is still fresh when the time has come is asked then.
    pub(super) fn sampled_at(&self, now: Time) -> Time {
        self.facts.heard_at().min(now)
    }

    pub(super) fn take_sample(&mut self, now: Time, sample: Sample) {
        let holds_count = self.holds_count();
        self.facts.sample(now, sample, &self.policy, holds_count);
        self.lacks_sample = false;
        self.silence_told = false;
    }

    /// After a notice that a hold has reached its limit, lowering and raising holds changes nothing any more (S13).
    pub(super) fn holds_count(&self) -> bool {
        !self.noticed.is_some_and(|noticed| noticed.cap)
    }

    pub(super) fn silence_at(&self) -> Option<Time> {
        (!self.silence_told).then(|| self.facts.heard_at().plus_ms(SAMPLE_SILENCE_MS))
    }

    pub(super) fn timer_wake_at(&self) -> Option<Time> {
        if !self.policy.is_open() || self.withheld.is_some() {
            return None;
        }
        self.facts.timer_due().map(|due| due.minus_ms(TIMER_LEAD_MS).max(self.wake_not_before))
    }

    /// When the timer is due for which a sleeper is to be woken now.
    pub(super) fn timer_to_wake_for(&self, now: Time) -> Option<Time> {
        self.timer_wake_at().filter(|&at| at <= now).and(self.timer_due())
    }

    pub(super) fn demote_at(&self, tier: Tier, since: Time) -> Option<Time> {
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

    pub(super) fn first_tier(&self) -> Tier {
        match self.policy.tiers {
            Tiers::MemoryThenDisk { .. } => Tier::Memory,
            Tiers::Disk => Tier::Disk,
        }
    }
}
