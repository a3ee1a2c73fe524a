//! What only a box does: it is used, stopped for good, and brought back.

use super::Sandbox;
use crate::boxed::{Activity, Blocked, Freeze, Stopped, Uses, box_verdict, freeze};
use crate::event::What;
use crate::idle::{Verdict, sandbox_verdict};
use crate::need::{Call, CallKind, Cause, Refusal, Served};
use crate::phase::{Phase, Start};
use crate::time::Time;

/// A box's facts and wishes. None of them changes anything of a sandbox that is no box.
impl Sandbox {
    /// Something that goes on with it has begun or ended. A person's coming and going is use (B3); coming thaws nothing by itself.
    pub fn handle_activity(&mut self, now: Time, activity: Activity, goes_on: bool) {
        self.facts.set_activity(activity, goes_on);
        if activity == Activity::Takeover {
            self.uses.used(now);
        }
        self.settle(now);
    }

    /// A person has done something at its screen (B3).
    pub fn handle_used(&mut self, now: Time) {
        self.uses.used(now);
        self.settle(now);
    }

    /// Brings back one that was stopped for good, as it was when it froze (B27); it is being used from now.
    pub fn handle_restore(&mut self, now: Time) -> Result<Served, Refusal> {
        if matches!(self.phase, Phase::Deleting { .. } | Phase::Deleted) {
            return Err(Refusal::Deleted);
        }
        if self.uses.stopped.is_none() {
            return Err(Refusal::NotStopped);
        }
        self.check_withheld()?;
        self.uses.stopped = None;
        self.uses.used(now);
        self.tell(now, What::Restored);
        match self.phase {
            Phase::Asleep { tier, since } => self.wake(now, tier, since, Cause::Restore, 0),
            Phase::Off { .. } => self.start(now, Start::Boot, Some(Cause::Restore)),
            Phase::Starting { .. }
            | Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Waking { .. }
            | Phase::Failed { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => {}
        }
        self.settle(now);
        Ok(Served::Later)
    }

    /// With what was known of its use before the daemon ended. Only for what [`Sandbox::recover`] gave.
    #[must_use]
    pub fn with_uses(mut self, uses: Uses) -> Self {
        self.uses = uses;
        self
    }
}

/// A box's questions. None of them wakes, holds awake or changes anything.
impl Sandbox {
    /// How it has been used, to be kept beyond the daemon's life.
    pub fn uses(&self) -> &Uses {
        &self.uses
    }

    /// It was stopped for good by the rules of idleness (B23, B24).
    pub fn stopped(&self) -> Option<&Stopped> {
        self.uses.stopped.as_ref()
    }

    /// Until when one that was stopped for good can be brought back (B27).
    pub fn restorable_until(&self) -> Option<Time> {
        let policy = self.policy.boxed.as_ref()?;
        Some(self.uses.stopped?.at.plus_ms(policy.keep_copy_ms))
    }

    /// When it will be frozen, and what it waits for (B13). Empty unless it is an awake box.
    pub fn freeze(&self, now: Time) -> Freeze {
        let Some(policy) = self.policy.boxed.as_ref().filter(|_| self.is_awake()) else {
            return Freeze::default();
        };
        let mut freeze = freeze(policy, &self.uses, &self.facts.of_box(now), now);
        if self.halted_since.is_some() {
            freeze.at = None;
        }
        freeze.at = freeze.at.map(|at| at.max(now));
        freeze
    }

    /// When these rules stop it for good if nothing uses it (B25); `None`: that cannot be foreseen, or they do not.
    pub fn stops_at(&self, now: Time) -> Option<Time> {
        let policy = self.policy.boxed.as_ref()?;
        if self.uses.stopped.is_some() {
            return None;
        }
        let freeze = self.freeze(now);
        let awake = self.is_awake().then_some(&freeze);
        self.uses.stops_at(policy, awake, self.rests_since())
    }

    /// Since when nothing of it runs; `None` while something does, or is about to.
    pub fn rests_since(&self) -> Option<Time> {
        match self.phase {
            Phase::Asleep { since, .. }
            | Phase::Demoting { since, .. }
            | Phase::CapturingAsleep { since, .. }
            | Phase::Off { since, .. }
            | Phase::Failed { since, .. } => Some(since),
            Phase::Starting { .. }
            | Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Waking { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => None,
        }
    }

    /// Whether this goes on with it.
    pub fn goes_on(&self, activity: Activity) -> bool {
        self.facts.goes_on(activity)
    }

    /// What of [`Sandbox::freeze`] holds it now.
    pub fn blocked_by(&self, now: Time) -> Vec<Blocked> {
        self.freeze(now).blocked_by
    }
}

impl Sandbox {
    /// What its policy makes of the facts.
    pub(super) fn verdict(&self, now: Time) -> Verdict {
        match &self.policy.boxed {
            Some(policy) => box_verdict(policy, &self.uses, &self.facts.of_box(now), now),
            None => sandbox_verdict(&self.policy, &self.facts, now),
        }
    }

    /// A call has begun or ended.
    pub(super) fn note_call(&mut self, now: Time, kind: CallKind) {
        if kind.is_use() {
            self.uses.used(now);
        } else {
            self.uses.url_at = Some(now);
        }
    }

    /// Why a need does not reach a box (B19, B27, B44).
    pub(super) fn check_box(&self, cause: Cause) -> Result<(), Refusal> {
        if self.policy.boxed.is_none() {
            return Ok(());
        }
        let thaws = match cause {
            Cause::Call(Call { kind, .. }) => kind.is_use(),
            Cause::Packet { .. } | Cause::Timer { .. } => false,
            Cause::Terminal | Cause::Capture | Cause::Restart | Cause::Restore => true,
        };
        match self.phase {
            Phase::Failed { .. } | Phase::Deleting { .. } | Phase::Deleted => Ok(()),
            _ if self.uses.stopped.is_some() => Err(Refusal::Stopped),
            Phase::Starting { .. } | Phase::Running { .. } | Phase::CapturingAwake { .. } => Ok(()),
            Phase::Suspending { .. }
            | Phase::Asleep { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. } => {
                if thaws {
                    Ok(())
                } else {
                    Err(Refusal::Frozen)
                }
            }
        }
    }

    /// When something happens by itself to a box that rests: it is stopped for good, or its copy is given up.
    pub(super) fn box_deadline(&self) -> Option<Time> {
        let policy = self.policy.boxed.as_ref()?;
        match self.uses.stopped {
            Some(_) => self.restorable_until(),
            None => self.uses.stops_at(policy, None, self.rests_since()),
        }
    }

    /// Does what is due with a box that rests; whether it has ended with that.
    pub(super) fn settle_box(&mut self, now: Time) -> bool {
        if self.box_deadline().is_none_or(|due| due > now) {
            return false;
        }
        let Some(policy) = self.policy.boxed.as_ref() else { return false };
        let keeps = policy.keep_copy_ms > 0;
        if self.uses.stopped.is_none() {
            let (cause, unused_ms) = (Uses::stop_cause(policy), now.ms_since(self.uses.last_used));
            self.uses.stopped = Some(Stopped { at: now, cause, unused_ms });
            self.tell(now, What::StoppedForGood { cause, unused_ms });
            // Of one that has failed there is nothing to bring back.
            if !matches!(self.phase, Phase::Failed { .. }) && keeps {
                return true;
            }
        }
        self.handle_delete(now);
        true
    }
}
