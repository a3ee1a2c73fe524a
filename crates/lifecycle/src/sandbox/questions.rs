//! What people and the host ask about a sandbox. None of it wakes, holds awake or changes anything.

use super::settle::Plan;
use super::{LastSleep, LastWake, Sandbox, Withheld};
use crate::need::{CallKind, Cause};
use crate::order::{Attempt, Death, FailureCode};
use crate::phase::{Phase, SleepTier, Status};
use crate::policy::Policy;
use crate::reason::{AwakeReason, Reason};
use crate::time::Time;

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
        let mut reasons = self.verdict(now).reasons;
        if self.halted_since.is_some() {
            // Nobody asks it meanwhile: that nothing is known of it is no reason of its own.
            reasons.retain(|awake| awake.reason != Reason::NoSample);
            reasons.insert(0, AwakeReason { reason: Reason::HostDiskFull, until: None });
        }
        if let Some(noticed) = self.noticed {
            reasons.push(AwakeReason { reason: Reason::Noticed, until: Some(noticed.sleeps_at) });
        }
        if matches!(self.phase, Phase::CapturingAwake { .. }) {
            reasons.push(AwakeReason { reason: Reason::Capturing, until: None });
        }
        if reasons.is_empty() {
            reasons.push(AwakeReason { reason: Reason::FallingAsleep, until: None });
        }
        reasons
    }

    /// When it will fall asleep if nothing new happens; `None` if that cannot be foreseen, or it is not running.
    pub fn will_sleep_at(&self, now: Time) -> Option<Time> {
        match self.phase {
            Phase::Running { .. } if self.halted_since.is_some() => None,
            Phase::Running { .. } => {
                let forecast = self.verdict(now).sleep?;
                Some(match self.plan(forecast) {
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

    /// Since when the host makes its guest stand still for lack of disk.
    pub fn halted_since(&self) -> Option<Time> {
        self.halted_since
    }

    /// Whether the project's spending limit keeps it from waking (S23).
    pub fn is_withheld(&self) -> bool {
        self.withheld == Some(Withheld::Spending)
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

    /// What it is being brought back for, or is brought back for as soon as it sleeps; `None`: nothing that is not there yet needs it.
    pub fn needed_by(&self) -> Option<Cause> {
        match self.phase {
            Phase::Waking { cause, .. } => Some(cause),
            Phase::Suspending { wake, .. }
            | Phase::Demoting { wake, .. }
            | Phase::CapturingAsleep { wake, .. } => wake,
            Phase::Starting { .. }
            | Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Asleep { .. }
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

    /// Whether it is being removed, or is gone. One that could not be removed so far is there still, as failed: somebody may have
    /// to look after it.
    pub fn is_going(&self) -> bool {
        matches!(self.phase, Phase::Deleting { failed_tries: 0, .. } | Phase::Deleted)
    }

    /// The `failure_code`: why it failed, or `machine_lost` on one that runs again after its machine was lost (S24).
    pub fn failure_code(&self) -> Option<FailureCode> {
        match self.phase {
            Phase::Failed { code, .. } => Some(code),
            Phase::Deleting { failed_tries: 1.., .. } => Some(FailureCode::DestroyFailed),
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

    /// The number of the machine that exists or is being made: that of the order that made it ([`Work::Create`](crate::Work::Create),
    /// [`Work::Boot`](crate::Work::Boot), or [`Work::Wake`](crate::Work::Wake) from disk). A wake from memory goes on with the same machine.
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
