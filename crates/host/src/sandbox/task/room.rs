//! A restart of one that has no machine waits for room in memory before anything of the sandbox is given up: where there is
//! none it is refused, and the sandbox is as it was.

use api::sandbox::{Lack, WaitsFor};
use api::{ApiError, Code};
use lifecycle::{Phase, Tier};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::{Task, now};
use crate::budget::{NoRoom, Seat};
use crate::clock::{boot_to_unix_ms, rfc3339};
use crate::ground::FREE_BYTES_TO_WAKE;
use crate::sandbox::Message;
use crate::sandbox::replies::Goal;
use crate::sandbox::work::chain;
use crate::turns::Urgency;

/// Callers who may wait for a restart of one sandbox. More are refused: they want the same.
const RESTARTS_WAITING_MAX: usize = 64;

/// Restarts that wait for room.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    waiting: Vec<oneshot::Sender<Result<(), ApiError>>>,
    /// Waits in the queue for room.
    queue: Option<Queued>,
    /// The room that was waited for, until the order that boots takes it.
    seat: Option<Seat>,
}

/// Leaves the queue when dropped.
#[derive(Debug)]
struct Queued(AbortHandle);

impl Drop for Queued {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Restarts {
    /// The room that was waited for.
    pub(super) fn take_seat(&mut self) -> Option<Seat> {
        self.seat.take()
    }
}

impl Task {
    pub(super) fn on_restart(&mut self, reply: oneshot::Sender<Result<(), ApiError>>) {
        if let Err(error) = self.check_disk() {
            drop(reply.send(Err(error)));
        } else if self.restarts.waiting.len() >= RESTARTS_WAITING_MAX {
            let text = format!("{RESTARTS_WAITING_MAX} callers wait for its restart already");
            drop(reply.send(Err(ApiError::new(Code::NoCapacity, text))));
        } else {
            self.restarts.waiting.push(reply);
        }
    }

    /// A disk on which it could not be booted: known before its machine is ended for it.
    fn check_disk(&self) -> Result<(), ApiError> {
        let free = self.ground.room.free();
        // What is not known is found out by the boot itself.
        if *self.disk_low.borrow() || free.is_ok_and(|free| free < FREE_BYTES_TO_WAKE) {
            let text = "it cannot be restarted now: the host's disk is nearly full";
            let mut error = ApiError::new(Code::NoSpace, text);
            error.retryable = true;
            return Err(error.hint("it is as it was; make room on the host"));
        }
        Ok(())
    }

    /// Begins a restart that is waited for, if there is room for it; else waits for some. `true`: something was ordered.
    pub(super) fn restart_if_room(&mut self) -> bool {
        if self.restarts.waiting.is_empty() {
            return false;
        }
        if self.restarts.seat.is_none() && !self.has_room() {
            self.queue_for_restart();
            return false;
        }
        self.restarts.queue = None;
        let served = self.core.handle_restart(now());
        for reply in std::mem::take(&mut self.restarts.waiting) {
            self.wait_for(Goal::Started, served, reply);
        }
        true
    }

    /// Whether it has its room, or whatever it does needs none.
    fn has_room(&self) -> bool {
        match self.core.phase() {
            Phase::Asleep { tier: Tier::Disk | Tier::Store, .. }
            | Phase::CapturingAsleep { .. }
            | Phase::Off { .. }
            | Phase::Failed { .. } => false,
            // It waits for some itself.
            Phase::Waking { from: Tier::Disk | Tier::Store, .. } => {
                self.ground.budget.place_of(&self.id).is_none()
            }
            // The start that is under way is the one that is wanted.
            Phase::Starting { .. }
            | Phase::Asleep { tier: Tier::Memory, .. }
            | Phase::Waking { from: Tier::Memory, .. }
            | Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Demoting { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => true,
        }
    }

    fn queue_for_restart(&mut self) {
        // One that is being woken waits already: for both.
        let waits = self.ground.budget.place_of(&self.id).is_some();
        if self.restarts.queue.is_some() || waits {
            return;
        }
        let (budget, limit) = (self.ground.budget.clone(), self.ground.settings.memory_wait);
        let memory_mib = self.record.with(|manifest| manifest.memory_mib);
        let (id, messages) = (self.id.clone(), self.messages.clone());
        let waiting = tokio::spawn(async move {
            let seat = budget.seat(Some(&id), Urgency::Call, memory_mib, limit).await;
            // The task is gone only with the sandbox.
            let _ = messages.send(Message::Room(seat));
        });
        self.restarts.queue = Some(Queued(waiting.abort_handle()));
    }

    /// There is room for a restart, or none came in time.
    pub(super) fn on_room(&mut self, seat: Result<Seat, NoRoom>) {
        // One that came in the very moment in which it was not needed any more is given back.
        if self.restarts.queue.take().is_none() {
            return;
        }
        match seat {
            Ok(seat) => self.restarts.seat = Some(seat),
            Err(error) => self.refuse_restarts(Code::NoCapacity, &chain(&error)),
        }
    }

    /// There is no room: it is as it was.
    pub(super) fn refuse_restarts(&mut self, code: Code, why: &str) {
        for reply in std::mem::take(&mut self.restarts.waiting) {
            let mut error = ApiError::new(code, format!("it cannot be restarted now: {why}"));
            error.retryable = true;
            let error =
                error.hint("it is as it was and nothing of it is lost; make room on the host");
            drop(reply.send(Err(error)));
        }
    }

    /// What it waits for in memory.
    pub(super) fn waits_for_memory(&self) -> Option<WaitsFor> {
        let (position, since) = self.ground.budget.place_of(&self.id)?;
        Some(WaitsFor {
            what: Lack::Memory,
            since: rfc3339(boot_to_unix_ms(since)),
            position: Some(position),
            text: format!("waits for room in the host's memory budget, as number {position}"),
        })
    }
}
