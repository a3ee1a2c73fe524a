//! What the host says about its orders and machines: the table of reports.

use super::Sandbox;
use super::moves::doubled;
use crate::event::What;
use crate::limits::{DEMOTE_RETRY_MS, DESTROY_RETRY_MS, DESTROY_RETRY_MS_MAX, SLEEP_RETRY_MS};
use crate::need::Refusal;
use crate::order::{Attempt, Death, FailureCode, Heard, Left, Report};
use crate::phase::{Phase, Start, Tier};
use crate::time::Time;

/// Reports.
impl Sandbox {
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
                self.fail(now, code, false);
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
                self.uses.used(now);
                self.run(now, now, cause);
                self.tell(now, What::Started { how });
            }
            (Phase::Starting { how: Start::Boot, .. }, Report::Failed { code, .. }) if code.is_shortage() => {
                self.start_refused(now, code);
            }
            (Phase::Starting { how, .. }, Report::Failed { code, .. }) => {
                let code = match (code, how) {
                    // Say which start it was where the host has nothing better to say.
                    (FailureCode::CreateFailed | FailureCode::BootFailed, Start::Create) => FailureCode::CreateFailed,
                    (FailureCode::CreateFailed | FailureCode::BootFailed, Start::Boot) => FailureCode::BootFailed,
                    (code, _) => code,
                };
                self.fail(now, code, false);
            }

            (Phase::Suspending { cause, wake, .. }, Report::Suspended { tier }) => {
                self.slept(now, tier, cause, wake);
            }
            (Phase::Suspending { since, wake, .. }, Report::BackAwake) => {
                self.stay(now, since, wake);
                if wake.is_none() {
                    self.facts.sleep_failed(now.plus_ms(SLEEP_RETRY_MS), FailureCode::SleepFailed);
                }
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
            (Phase::Demoting { since, wake, .. }, Report::StillInMemory) => {
                self.demote_failed(now, since, wake, FailureCode::SleepFailed);
            }
            (Phase::Demoting { since, wake, .. }, Report::Failed { code, left: Left::Asleep }) => {
                self.demote_failed(now, since, wake, code);
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
                // A thaw is use.
                self.uses.used(now);
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
}
