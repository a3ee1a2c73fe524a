//! What a sandbox is told about its guest, its network and the time.

use super::{Sandbox, Withheld};
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
        self.note_call(now, kind);
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
                    SleepCause::Idle | SleepCause::HoldCap | SleepCause::IdleTimeout => true,
                    SleepCause::Asked
                    | SleepCause::Shutdown
                    | SleepCause::Drain
                    | SleepCause::Spending => false,
                };
                let near = self.facts.timer_due().filter(|due| due.ms_since(now) <= TIMER_NEAR_MS);
                if let Some(due) = near
                    && for_idleness
                    && self.policy.is_open()
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

    /// A command was started: it counts at once, and with the next [`Sample`] as the guest says.
    pub fn handle_command(&mut self, now: Time) {
        if matches!(self.phase, Phase::Running { .. } | Phase::CapturingAwake { .. }) {
            self.facts.add_command();
            self.settle(now);
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

    /// The host makes the running guest stand still, because its disk has no room for what the guest may write. Until
    /// [`Sandbox::handle_resumed`], or until it runs no more, it is neither idle nor silent, and can neither be put to sleep
    /// nor be copied. Changes nothing where the guest does not run.
    pub fn handle_halted(&mut self, now: Time) {
        if self.is_awake() {
            self.halted_since.get_or_insert(now);
            self.settle(now);
        }
    }

    /// The guest goes on after [`Sandbox::handle_halted`]; all that must be quiet is so from now at the earliest.
    pub fn handle_resumed(&mut self, now: Time) {
        if self.halted_since.take().is_some() {
            self.facts.woke(now);
            self.silence_told = false;
            self.settle(now);
        }
    }

    /// The project's spending limit is reached, or is not any more (S23). From then on it is put to sleep on disk whatever holds
    /// it awake, and nothing wakes it, not even a timer of its own; one that is due meanwhile wakes it afterwards.
    pub fn handle_spending(&mut self, now: Time, reached: bool) {
        if self.withheld != Some(Withheld::Leaving) {
            self.withheld = reached.then_some(Withheld::Spending);
            self.withhold_not_before = Time::default();
        }
        self.settle(now);
    }

    /// Its host goes down. From now on it is put to sleep on disk whatever holds it awake, and nothing wakes it any more, not even
    /// a timer of its own: what would be awake then would be lost.
    pub fn handle_leaving(&mut self, now: Time) {
        self.withheld = Some(Withheld::Leaving);
        self.withhold_not_before = Time::default();
        self.settle(now);
    }

    /// Time has passed. Early and needless calls do nothing.
    pub fn handle_deadline(&mut self, now: Time) {
        self.settle(now);
    }
}
