//! The state machine's orders: one at a time works on the body, and reports how it ended.

use std::sync::Arc;
use std::time::Instant;

use lifecycle::{Cause, FailureCode, Heard, Order, Report, Tier, Work};

use super::{Task, now};
use crate::sandbox::work::{Done, Signals, Worker, without_paths};
use crate::turns::{Place, Urgency};

impl Task {
    pub(super) fn take_order(&mut self, order: Order) {
        match order.work {
            Work::Cancel => {
                if let Some((attempt, signals)) = &self.signals
                    && *attempt == order.attempt
                {
                    signals.send_modify(|said| said.cancel = true);
                } else {
                    self.waiting.retain(|waiting| waiting.attempt != order.attempt);
                }
            }
            Work::Sample => self.sample_now(),
            Work::Notice { in_ms, cap } => self.tell_sleep(in_ms, cap),
            _ => {
                // A newer order supersedes every earlier one.
                self.waiting.clear();
                if let Some((_, signals)) = &self.signals {
                    signals.send_modify(|said| said.superseded = true);
                }
                self.waiting.push_back(order);
            }
        }
    }

    pub(super) fn begin_work(&mut self) {
        if self.body.is_none() {
            return;
        }
        let Some(order) = self.waiting.pop_front() else { return };
        let Some(mut body) = self.body.take() else { return };
        if body.machine.as_ref().is_some_and(|machine| machine.exit().is_some()) {
            body.machine = None;
            body.seat = None;
        }
        let waited_for = self.restarts.take_seat();
        if order.work == Work::Boot && body.seat.is_none() {
            body.seat = waited_for;
        }
        self.forget_halt();
        let (say, signals) = Signals::new();
        self.signals = Some((order.attempt, say));
        let capture_to = match order.work {
            Work::Capture { capture, .. } => {
                let at = self.capture_to.iter().position(|(id, _)| *id == capture);
                at.map(|at| self.capture_to.swap_remove(at).1)
            }
            _ => None,
        };
        let drives = match order.work {
            Work::Boot | Work::Create => self.drives_next.take(),
            _ => None,
        };
        let from_disk = matches!(order.work, Work::Wake { from: Tier::Disk | Tier::Store });
        let worker = Worker {
            ground: Arc::clone(&self.ground),
            id: self.id.clone(),
            record: self.record.clone(),
            body,
            phases: crate::phases::Phases::begin(),
            signals,
            messages: self.messages.clone(),
            next_life: self.life + 1,
            place: from_disk.then(|| self.stand_in_line()),
            woke_because: self.woke_because.clone(),
            capture_to,
            drives,
        };
        let done = self.done.clone();
        tracing::debug!(sandbox = %self.id, ?order, "order");
        tokio::spawn(async move {
            let finished = worker.carry_out(order).await;
            // The task waits for this; it is gone only when the daemon goes down.
            let _ = done.send(finished);
        });
    }

    /// A place in the line of those that are brought back from disk, by when it was asked for what is ordered now.
    fn stand_in_line(&self) -> Place {
        let since = self.waiters.iter().map(|waiter| waiter.began).min();
        let urgency = match self.core.needed_by() {
            Some(Cause::Timer { .. }) => Urgency::Timer,
            _ => Urgency::Call,
        };
        self.ground.restores.stand_in_line(urgency, since.unwrap_or_else(Instant::now))
    }

    pub(super) async fn on_done(&mut self, done: Done) {
        self.signals = None;
        self.link = done.body.link.clone();
        if let Some(error) = &done.error {
            let of_guest =
                matches!(done.report, Report::Failed { code: FailureCode::DriveUnusable, .. });
            // Of a drive nothing is said but where it should be in the guest.
            self.failure = Some(if of_guest { error.clone() } else { without_paths(error) });
        }
        self.log_failure(&done);
        let machine = done.body.machine.as_ref().map(vmm::Machine::exit_watch);
        let mut body = done.body;
        if machine.is_none() {
            body.seat = None;
        }
        self.body = Some(body);
        let now = now();
        let heard = self.core.handle_report(now, done.attempt, done.report);
        if heard == Heard::OutOfPlace {
            tracing::error!(sandbox = %self.id, report = ?done.report, phase = ?self.core.phase(), "report out of place");
        }
        if heard == Heard::Taken && done.report == Report::Ready {
            self.life += 1;
            // Not at once: what it was woken for comes first.
            self.sample_next();
        }
        // After a stale report the machine is an earlier one, which the waiting order ends: its end is no news.
        self.exit = match (machine, self.core.machine()) {
            (Some(watch), Some(attempt)) if heard == Heard::Taken => Some((attempt, watch)),
            _ => None,
        };
        self.pump(done.data).await;
    }

    /// An order that failed is logged; one that a newer order has ended early has not failed, and a lack of the host that
    /// lasts is said once.
    fn log_failure(&mut self, done: &Done) {
        let Some(error) = &done.error else {
            self.short_of = None;
            return;
        };
        let lacking = match done.report {
            Report::Failed { code, .. } if code.is_shortage() => Some(code),
            _ => None,
        };
        let known = lacking.is_some() && lacking == self.short_of;
        self.short_of = lacking;
        if known || !self.waiting.is_empty() {
            tracing::debug!(sandbox = %self.id, error, report = ?done.report, "an order failed");
        } else {
            tracing::warn!(sandbox = %self.id, error, report = ?done.report, "an order failed");
        }
    }
}
