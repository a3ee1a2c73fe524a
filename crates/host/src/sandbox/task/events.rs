//! What follows from each event of the state machine: the timeline, the manifest, and those who wait for it.

use std::time::Instant;

use lifecycle::{Call, CallKind, Cause, Death, Phase, Start, What};
use serde_json::{Map, Value};

use super::{Task, now};
use crate::clock::Moment;
use crate::manifest::{Manifest, State};
use crate::sandbox::replies::{outcome, shortage_error};
use crate::sandbox::story;
use crate::sandbox::work::chain;

impl Task {
    /// Who waited when the machine ended still needs it: their need was counted as served by the machine that is gone.
    pub(super) fn need_again(&mut self) -> bool {
        let Phase::Off { .. } = self.core.phase() else { return false };
        let Some(waiter) = self.waiters.first() else { return false };
        self.core.handle_need(now(), Cause::Call(waiter.call)).is_ok()
    }

    pub(super) async fn on_event(&mut self, what: &What, data: &mut Option<Map<String, Value>>) {
        let need = self.need.clone();
        if self.on_checkpoint_event(what) {
            return;
        }
        if let Some((kind, text, mut facts)) = story::tell(what, self.need.as_deref()) {
            if has_phases(what)
                && let Some(mut measured) = data.take()
            {
                facts.append(&mut measured);
            }
            if let What::FallingAsleep { .. } = what {
                facts.insert(
                    "awake_seconds".to_owned(),
                    self.awake_since.elapsed().as_secs().into(),
                );
                facts.insert(
                    "kept_awake_by".to_owned(),
                    self.last_reasons.take().unwrap_or_default(),
                );
            }
            if let (What::Deleted, Some(to)) =
                (what, self.record.with(|manifest| manifest.moved_to.clone()))
            {
                facts.insert("moved_to".to_owned(), to.into());
            }
            self.timeline.add(kind, text, facts);
        }
        match what {
            What::Waking { cause, .. } => {
                let because = story::need(*cause, self.need.as_deref());
                self.woke_because = Some(because);
            }
            What::Woke { .. } | What::Started { .. } => {
                self.awake_since = Instant::now();
                self.flush_owed = true;
                self.need = None;
                self.failure = None;
                if matches!(what, What::Started { how: Start::Boot })
                    && self.core.last_death().is_some()
                {
                    self.note(|manifest| manifest.boots += 1).await;
                }
                let told = self.core.last_death().is_none()
                    && self.record.with(|manifest| manifest.last_end.is_some());
                if told {
                    self.note(|manifest| manifest.last_end = None).await;
                }
            }
            // What kept it awake is served; the next need has words of its own.
            What::SleepCancelled { .. } => self.need = None,
            What::Slept { .. } => {
                // Put to sleep under calls that are under way: they need it still. One that waits for a command's result can
                // wait, whoever asked for the sleep has seen to that.
                let kinds = [
                    CallKind::Api,
                    CallKind::Files,
                    CallKind::EdgeRequest,
                    CallKind::Terminal,
                    CallKind::Tool,
                ];
                if let Some(kind) = kinds.into_iter().find(|kind| self.core.calls(*kind) > 0) {
                    self.need.get_or_insert_with(|| "a call that was under way".to_owned());
                    if let Err(refusal) = self.core.handle_need(now(), Cause::Call(Call::of(kind)))
                    {
                        tracing::debug!(sandbox = %self.id, %refusal, "a call under way cannot be served");
                    }
                }
            }
            What::Died { death } => {
                let code = story::death_code(*death);
                self.note(move |manifest| {
                    manifest.state = State::Off { code: code.to_owned() };
                    manifest.since = Moment::now();
                    manifest.last_end = Some(code.to_owned());
                })
                .await;
            }
            What::Failed { code } => {
                let text = self.failure.clone().unwrap_or_default();
                self.note(move |manifest| {
                    let saved = match &manifest.state {
                        State::SleepingOnDisk(saved) => Some(saved.clone()),
                        _ => None,
                    };
                    manifest.state = State::Failed { code: code.as_str().to_owned(), text, saved };
                    manifest.since = Moment::now();
                })
                .await;
            }
            _ => {}
        }
        let lacking = match what {
            What::WakeFailed { code, again: false }
                if matches!(
                    self.core.phase(),
                    // Or what it sleeps with is about to be copied.
                    Phase::Asleep { .. } | Phase::CapturingAsleep { .. } | Phase::Demoting { .. }
                ) =>
            {
                Some(*code)
            }
            What::StartRefused { code } => {
                self.note(|manifest| {
                    manifest.state = State::Off { code: self.end_code().to_owned() };
                    manifest.since = Moment::now();
                })
                .await;
                Some(*code)
            }
            _ => None,
        };
        if let Some(code) = lacking {
            self.refuse_waiters(|failure| shortage_error(code, failure));
            let error = shortage_error(code, self.failure.as_deref());
            self.refuse_restarts(error.code, &error.error);
        }
        let failure = self.failure.as_deref();
        let mut still = Vec::new();
        for (goal, reply) in self.watchers.drain(..) {
            match outcome(&goal, what, failure, need.as_deref()) {
                // The caller may have gone away: then nobody needs the answer.
                Some(result) => drop(reply.send(result)),
                None => still.push((goal, reply)),
            }
        }
        self.watchers = still;
    }

    /// How its machine ended, for programs.
    pub(super) fn end_code(&self) -> &'static str {
        match self.core.phase() {
            Phase::Off { death, .. } => story::death_code(*death),
            _ => story::death_code(Death::Killed),
        }
    }

    /// Notes something in the manifest. A disk that refuses is logged: the living state is right, and a new daemon finds out
    /// by looking at the processes.
    pub(super) async fn note(&self, change: impl FnOnce(&mut Manifest)) {
        if let Err(error) = self.record.change(change).await {
            tracing::error!(sandbox = %self.id, error = chain(&error), "manifest not written");
        }
    }
}

/// Whether the event ends an order whose phases were measured.
fn has_phases(what: &What) -> bool {
    matches!(
        what,
        What::Started { .. }
            | What::Slept { .. }
            | What::Woke { .. }
            | What::Demoted
            | What::SleepFailed { .. }
            | What::SleepCancelled { .. }
            | What::WakeFailed { .. }
            | What::Failed { .. }
            | What::CaptureEnded { .. }
    )
}
