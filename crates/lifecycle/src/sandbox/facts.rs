//! What a sandbox is told about its guest, its network and the time.

use super::Sandbox;
use crate::idle::Sample;
use crate::limits::TIMER_NEAR_MS;
use crate::need::{CallKind, Cause, SleepCause};
use crate::phase::Phase;
use crate::time::Time;

/// Facts.
impl Sandbox {
    /// A call that was accepted by [`Sandbox::handle_call_began`] has ended, well or not. Every call must be ended, also
    /// when its sandbox dies or is deleted.
    pub fn handle_call_ended(&mut self, now: Time, kind: CallKind) {
        self.facts.call_ended(now, kind);
        self.settle(now);
    }

    /// Packets that count (S2) crossed its network link while it is awake. One that comes for it while it is not, or not
    /// for long any more, is a [`Cause::Packet`](crate::Cause::Packet) for [`Sandbox::handle_need`].
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

    /// Time has passed. Early and needless calls do nothing.
    pub fn handle_deadline(&mut self, now: Time) {
        self.settle(now);
    }
}
