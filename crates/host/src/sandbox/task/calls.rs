//! What others ask of a sandbox's task, and how they are answered.

use std::time::Instant;

use api::host::Change;
use api::sandbox::{Lack, SleepTier, WaitsFor};
use api::{ApiError, Code};
use lifecycle::{Call, CaptureId, Phase, Served, Start, Tier};
use serde_json::Map;
use tokio::sync::oneshot;

use super::{Halt, Task, now};
use crate::budget::NoRoom;
use crate::clock::{rfc3339, unix_ms_of};
use crate::exec::stands_still_error;
use crate::guest::LinkState;
use crate::sandbox::replies::{
    Goal, WAITERS_MAX, Waiter, leaving_error, needed_error, never_fits_error, refusal_error,
};
use crate::sandbox::work::{CaptureTo, chain};
use crate::sandbox::{CallGuard, Message, Ready, story, view};

impl Task {
    pub(super) async fn on_message(&mut self, message: Message) {
        let now = now();
        match message {
            Message::Call { call, what, began, reply } => self.on_call(call, what, began, reply),
            Message::CallEnded(kind) => self.core.handle_call_ended(now, kind),
            Message::Flowed => self.core.handle_packets(now),
            Message::Sleep { tier, cause, reply } => {
                let tier = tier
                    .map(|tier| if tier == SleepTier::Memory { Tier::Memory } else { Tier::Disk });
                match (self.core.handle_sleep(now, cause, tier), self.core.needed_by()) {
                    (Err(lifecycle::Refusal::Waking), Some(cause)) => {
                        let what = story::need(cause, self.need.as_deref());
                        drop(reply.send(Err(needed_error(&what))));
                    }
                    (served, _) => self.wait_for(Goal::Asleep, served, reply),
                }
            }
            Message::Restart { reply } => self.on_restart(reply),
            Message::Restore { reply } => {
                let served = self.core.handle_restore(now);
                self.wait_for(Goal::Awake, served, reply);
            }
            Message::CommandStarted => self.core.handle_command(now),
            Message::Drives(drives) => self.drives_next = drives,
            Message::Room(seat) => self.on_room(seat),
            Message::Delete { reply } => {
                let served = self.core.handle_delete(now);
                self.end_checkpoints();
                self.wait_for(Goal::Gone, Ok(served), reply);
            }
            Message::DeleteIdle { asleep_at_least_ms, reply } => {
                let asleep = self.record.with(|manifest| view::asleep_ms(&self.core, manifest));
                let due = asleep.is_some_and(|ms| ms >= asleep_at_least_ms);
                if due {
                    let text = "is deleted: it has slept for as long as its settings let it";
                    self.timeline.add("expired", text, Map::new());
                    self.end_checkpoints();
                    // The caller asks again and waits for its end.
                    let _ = self.core.handle_delete(now);
                }
                // Whoever asked may have gone away.
                let _ = reply.send(due);
            }
            Message::Update { change, reply } => {
                let result = self.update(*change).await;
                drop(reply.send(result));
            }
            Message::Capture { to, reply } => {
                self.captures += 1;
                let capture = CaptureId(self.captures);
                let served = self.core.handle_capture(now, capture);
                if served.is_ok() {
                    self.capture_to.push((capture, CaptureTo::Files(to)));
                }
                self.wait_for(Goal::Captured(capture), served, reply);
            }
            // Who asked may have gone away.
            Message::Limit(reached) => {
                self.limited = reached;
                self.on_spending();
            }
            Message::Leave => {
                self.core.handle_leaving(now);
                self.refuse_waiters(|_| leaving_error());
            }
            Message::Link { reply } => drop(reply.send(self.link.clone())),
            Message::View { reply } => {
                let mut known = self.record.with(|manifest| {
                    view::known(
                        &self.core,
                        manifest,
                        self.address,
                        self.life,
                        self.failure.as_deref(),
                    )
                });
                known.sandbox.woke_because.clone_from(&self.woke_because);
                known.sandbox.waits_for = self
                    .waits_for_disk()
                    .or_else(|| self.waits_for_memory())
                    .or_else(|| self.waits_for_spending());
                let halted = self.halt.is_some();
                known.sandbox.checkpoint = self.checkpoints.as_ref().map(|checkpoints| {
                    self.record.with(|manifest| checkpoints.status(manifest, halted))
                });
                drop(reply.send(known));
            }
            Message::Started { reply } => {
                let served = match self.core.phase() {
                    Phase::Starting { how: Start::Create, .. } => Ok(Served::Later),
                    Phase::Failed { code, .. } => Err(lifecycle::Refusal::Failed { code: *code }),
                    Phase::Deleting { .. } | Phase::Deleted => Err(lifecycle::Refusal::Deleted),
                    _ => Ok(Served::Now),
                };
                self.wait_for(Goal::Started, served, reply);
            }
            Message::Sample(sample) => self.on_sample(sample).await,
            Message::LastSample { sample, heard } => {
                self.record.note_cpu(sample.cpu_usec);
                self.core.handle_sample(now, self.facts(&sample));
                // Whoever waited may have given up.
                let _ = heard.send(());
            }
            Message::CheckpointFound(newest) => self.on_checkpoint_found(newest),
            Message::CheckpointKept(kept) => self.on_checkpoint_kept(kept).await,
            Message::Reattached(Ok(())) => self.reattach_at = None,
            Message::Reattached(Err(error)) => {
                tracing::warn!(sandbox = %self.id, error, "the guest agent was not met again");
            }
        }
    }

    pub(super) fn on_call(
        &mut self,
        call: Call,
        what: String,
        began: Instant,
        reply: oneshot::Sender<Result<Ready, ApiError>>,
    ) {
        if self.waiters.len() >= WAITERS_MAX {
            let text = format!("{WAITERS_MAX} calls wait for this sandbox already");
            drop(reply.send(Err(ApiError::new(Code::NoCapacity, text))));
            return;
        }
        if let Some(error) = self.never_fits() {
            drop(reply.send(Err(never_fits_error(&error))));
            return;
        }
        match self.core.handle_call_began(now(), call) {
            Ok(Served::Now) if self.halt.as_ref().is_some_and(Halt::has_told) => {
                self.core.handle_call_ended(now(), call.kind);
                drop(reply.send(Err(stands_still_error())));
            }
            // It may go on in a moment.
            Ok(Served::Now) if self.halt.is_some() => {
                self.waiters.push(Waiter { call, began, reply });
            }
            // Its machine has just ended, or its link has: either is about to be known.
            Ok(Served::Now) if self.link.state() == LinkState::Detached => {
                self.waiters.push(Waiter { call, began, reply });
            }
            Ok(Served::Now) => {
                let ready = self.ready(call, None);
                // Dropped with its guard if the caller is gone, which ends the call.
                drop(reply.send(Ok(ready)));
            }
            Ok(Served::Later) => {
                self.need.get_or_insert(what);
                self.waiters.push(Waiter { call, began, reply });
            }
            Err(refusal) => drop(reply.send(Err(refusal_error(refusal, self.failure.as_deref())))),
        }
    }

    /// Whether it sleeps, and the host will never have room for it.
    fn never_fits(&self) -> Option<NoRoom> {
        let has_room = self.body.as_ref().is_none_or(|body| body.seat.is_some());
        let memory_mib = self.record.with(|manifest| manifest.memory_mib);
        if has_room { None } else { self.ground.budget.check(memory_mib).err() }
    }

    /// Whether it would sleep through everything now (S23).
    fn waits_for_spending(&self) -> Option<WaitsFor> {
        let since = self.core.last_sleep().map(|slept| slept.at);
        self.core.is_withheld().then(|| WaitsFor {
            what: Lack::Spending,
            since: rfc3339(unix_ms_of(since.unwrap_or_else(now))),
            position: None,
            text: "is kept asleep, because the project's spending limit for this month is reached; nothing of it is deleted"
                .to_owned(),
        })
    }

    pub(super) fn ready(&self, call: Call, woke_ms: Option<f64>) -> Ready {
        Ready {
            link: self.link.impatient(),
            address: self.address,
            life: self.life,
            woke_ms,
            awake_since: self.awake_since,
            env: self.record.with(|manifest| manifest.env.clone()),
            guard: CallGuard {
                kind: call.kind,
                messages: self.messages.clone(),
                stands_still: self.link.watch_stand_still(),
            },
        }
    }

    pub(super) fn answer_waiters(&mut self) {
        let refusal = match self.core.phase() {
            Phase::Running { .. } if self.halt.is_some() => return,
            Phase::Running { .. } if self.link.state() == LinkState::Detached => return,
            Phase::Running { .. } => None,
            Phase::Failed { code, .. } => Some(lifecycle::Refusal::Failed { code: *code }),
            Phase::Deleting { .. } | Phase::Deleted => Some(lifecycle::Refusal::Deleted),
            _ => return,
        };
        if let Some(refusal) = refusal {
            self.refuse_waiters(|failure| refusal_error(refusal, failure));
        }
        for waiter in std::mem::take(&mut self.waiters) {
            let waited = waiter.began.elapsed().as_secs_f64() * 1000.0;
            drop(waiter.reply.send(Ok(self.ready(waiter.call, Some(waited)))));
        }
    }

    /// Turns away everybody who waits for it to be awake.
    pub(super) fn refuse_waiters(&mut self, error: impl Fn(Option<&str>) -> ApiError) {
        for waiter in std::mem::take(&mut self.waiters) {
            self.core.handle_call_ended(now(), waiter.call.kind);
            drop(waiter.reply.send(Err(error(self.failure.as_deref()))));
        }
        self.need = None;
    }

    pub(super) fn wait_for(
        &mut self,
        goal: Goal,
        served: Result<Served, lifecycle::Refusal>,
        reply: oneshot::Sender<Result<(), ApiError>>,
    ) {
        match served {
            Ok(Served::Now) => drop(reply.send(Ok(()))),
            Ok(Served::Later) => self.watchers.push((goal, reply)),
            Err(refusal) => drop(reply.send(Err(refusal_error(refusal, self.failure.as_deref())))),
        }
    }

    pub(super) async fn update(&mut self, change: Change) -> Result<(), ApiError> {
        let changed = self.record.change(|manifest| {
            if let Some(name) = change.name {
                manifest.name = name;
            }
            if let Some(labels) = change.labels {
                manifest.labels = labels;
            }
            manifest.policy.apply(&change.policy);
            if let (Some(limits), Some(ms)) = (&mut manifest.policy.boxed, change.idle_timeout_ms) {
                limits.idle_timeout_ms = ms;
            }
            if let Some(note) = change.note {
                manifest.note = Some(note);
            }
        });
        changed.await.map_err(|error| {
            tracing::error!(sandbox = %self.id, error = chain(&error), "update not written");
            if error.is_full() {
                ApiError::new(Code::NoSpace, "the host's disk is full")
            } else {
                ApiError::new(Code::Internal, "the change could not be stored")
            }
        })?;
        let policy = self.record.with(|manifest| view::policy(&manifest.policy));
        self.core.handle_policy(now(), policy);
        self.set_checkpoints();
        self.timeline.add("updated", "its settings were changed", Map::new());
        Ok(())
    }
}
