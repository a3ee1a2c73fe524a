//! What is wanted of a sandbox, and in which phase it is accepted, already so, or refused.

use super::Sandbox;
use crate::event::What;
use crate::limits::CAPTURES_WAITING_MAX;
use crate::need::{Call, CallKind, CaptureId, Cause, Refusal, Served, SleepCause};
use crate::order::{Death, Order, Work};
use crate::phase::{Phase, Start, Tier};
use crate::policy::Policy;
use crate::time::Time;

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
        let cause = match call.kind {
            CallKind::Terminal => Cause::Terminal,
            CallKind::Exec
            | CallKind::Files
            | CallKind::EdgeRequest
            | CallKind::Api
            | CallKind::AwakeConnection
            | CallKind::Tool
            | CallKind::Link => Cause::Call(call),
        };
        let served = self.need(now, cause)?;
        self.facts.call_began(call.kind);
        self.note_call(now, call.kind);
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
        let served = match &mut self.phase {
            Phase::Running { .. } if self.halted_since.is_some() => {
                return Err(Refusal::HostDiskFull);
            }
            Phase::Running { .. } => {
                self.suspend(now, cause, tier);
                Served::Later
            }
            Phase::CapturingAwake { .. } => {
                self.sleep_asked = Some((cause, tier));
                Served::Later
            }
            Phase::Suspending { wake: None, cause: why, .. } => {
                // From now on it sleeps because it must, not because it may.
                *why = cause;
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
            | Phase::Waking { .. }
            | Phase::Starting { .. }
                if self.withheld.is_some() =>
            {
                // It sleeps as soon as it is there.
                Served::Later
            }
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
            Phase::Running { .. } if self.halted_since.is_some() => {
                return Err(Refusal::HostDiskFull);
            }
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
        if matches!(self.phase, Phase::Off { .. })
            && let Err(refusal) = self.need(now, Cause::Capture)
        {
            self.captures.pop_back();
            return Err(refusal);
        }
        self.settle(now);
        Ok(Served::Later)
    }

    /// Boots it from its disk; what ran is lost (S15). Also the cure of one that failed (S17).
    pub fn handle_restart(&mut self, now: Time) -> Result<Served, Refusal> {
        if !matches!(self.phase, Phase::Deleting { .. } | Phase::Deleted) {
            self.check_withheld()?;
        }
        self.check_box(Cause::Restart)?;
        match self.phase {
            Phase::Starting { .. } => return Ok(Served::Later),
            Phase::Deleting { .. } | Phase::Deleted => return Err(Refusal::Deleted),
            Phase::Failed { saved, .. } => self.last_death = saved.then_some(Death::Killed),
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
                self.destroy(failed_tries);
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
                self.destroy(0);
            }
        }
        Served::Later
    }

    /// New settings, in force at once (S6).
    pub fn handle_policy(&mut self, now: Time, policy: Policy) {
        self.policy = policy;
        self.facts.settings_changed();
        self.noticed = None;
        self.settle(now);
    }

    pub(super) fn need(&mut self, now: Time, cause: Cause) -> Result<Served, Refusal> {
        self.check_need()?;
        self.check_box(cause)?;
        match self.phase {
            Phase::Running { .. } | Phase::CapturingAwake { .. } => {
                match cause {
                    Cause::Packet { .. } => self.facts.packet(now),
                    Cause::Call(_)
                    | Cause::Terminal
                    | Cause::Capture
                    | Cause::Timer { .. }
                    | Cause::Restart
                    | Cause::Restore => {
                        self.facts.needed(now);
                    }
                }
                return Ok(Served::Now);
            }
            Phase::Suspending { .. } | Phase::Demoting { .. } | Phase::CapturingAsleep { .. } => {
                self.cancel_for(cause);
            }

            Phase::Asleep { tier, since } => self.wake(now, tier, since, cause, 0),
            Phase::Off { .. } => self.start(now, Start::Boot, Some(cause)),
            Phase::Starting { .. } | Phase::Waking { .. } => {}
            Phase::Failed { code, .. } => return Err(Refusal::Failed { code }),
            Phase::Deleting { .. } | Phase::Deleted => return Err(Refusal::Deleted),
        }
        Ok(Served::Later)
    }

    /// Refuses what would need a machine while it may have none.
    pub(super) fn check_withheld(&self) -> Result<(), Refusal> {
        self.withheld.map_or(Ok(()), |withheld| Err(withheld.refusal()))
    }

    /// As [`check_withheld`](Self::check_withheld); what is wrong with the sandbox itself is told first.
    fn check_need(&self) -> Result<(), Refusal> {
        match self.phase {
            Phase::Failed { .. } | Phase::Deleting { .. } | Phase::Deleted => Ok(()),
            Phase::Starting { .. }
            | Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Asleep { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. } => self.check_withheld(),
        }
    }

    /// Remembers what needs it and asks the host to turn back if it still can.
    pub(super) fn cancel_for(&mut self, cause: Cause) {
        match &mut self.phase {
            Phase::Suspending { attempt, wake: wake @ None, .. }
            | Phase::Demoting { attempt, wake: wake @ None, .. } => {
                *wake = Some(cause);
                let attempt = *attempt;
                self.orders.push_back(Order { attempt, work: Work::Cancel });
            }
            // A copy of what is stored takes as long as it takes, and one that is half done is worth nothing.
            Phase::CapturingAsleep { wake, .. } => {
                wake.get_or_insert(cause);
            }
            Phase::Suspending { wake: Some(_), .. }
            | Phase::Demoting { wake: Some(_), .. }
            | Phase::Starting { .. }
            | Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Asleep { .. }
            | Phase::Waking { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => {}
        }
    }
}
