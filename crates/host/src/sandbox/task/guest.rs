//! What a task hears of its guest and says to it: samples, holds, a lost link.

use std::time::{Duration, Instant};

use wire::{Held, SleepNotice};

use super::{REATTACH_AFTER, REATTACH_EVERY, REATTACH_LIMIT, Task, now};
use crate::guest::{Continuity, GuestLink, LinkState, Sample, WakeParams};
use crate::sandbox::body::{Told, identity_owed, ipv6_owed, mounts_owed, note_told};
use crate::sandbox::work::{MOUNT_LIMIT, SAMPLE_LIMIT, chain, sync};
use crate::sandbox::{Message, story};

/// How long after a wake a guest writes to its disk for the first time without a sleep: what it was woken for is mostly done.
const FLUSH_AFTER: Duration = Duration::from_millis(900);
/// How long that may take. Nobody waits for it.
const FLUSH_LIMIT: Duration = Duration::from_mins(1);
/// How much later than usual a guest may be looked at while others wait for their turn to be brought back: so much later it may
/// fall asleep.
const SAMPLE_PUT_OFF_MAX: Duration = Duration::from_secs(2);
/// After which time that is looked at again.
const SAMPLE_LATER: Duration = Duration::from_millis(250);

impl Task {
    /// The guest runs and its link is gone. Usually its machine is ending, which shows first; else the agent is met anew.
    pub(super) fn reattach(&mut self) {
        self.reattach_at = Some(Instant::now() + REATTACH_EVERY);
        let Some(body) = &self.body else { return };
        let Some(machine) = &body.machine else { return };
        if machine.exit_watch().exited_yet().is_some() {
            return;
        }
        let socket = machine.guest_stream();
        let who = identity_owed(&self.ground, &self.record, body);
        let ipv6 = ipv6_owed(&self.ground, &self.record, body);
        let mounts = mounts_owed(&self.record);
        let limit = if mounts.is_empty() { REATTACH_LIMIT } else { MOUNT_LIMIT };
        let (link, messages, record) =
            (self.link.clone(), self.messages.clone(), self.record.clone());
        tokio::spawn(async move {
            let met = async {
                let socket = socket.map_err(|error| chain(&error))?;
                let who = who.map_err(|error| error.to_string())?;
                link.attach(socket, Continuity::Unknown, REATTACH_LIMIT)
                    .await
                    .map_err(|error| chain(&error))?;
                let told = who.as_ref().map(Told::of);
                let params = WakeParams { fork: told.is_some(), identity: who };
                let woke = link.wake_with(params, ipv6, mounts, limit).await;
                let woke = woke.map_err(|error| chain(&error))?;
                if told.is_some() || ipv6.is_some() {
                    let noted = record.change(|manifest| note_told(manifest, told, ipv6, &woke));
                    noted.await.map_err(|error| chain(&error))?;
                }
                Ok(())
            };
            // The task is gone only with the sandbox.
            let _ = messages.send(Message::Reattached(met.await));
        });
    }

    pub(super) fn ask_sample(&mut self) {
        if self.ground.restores.all_taken() && Instant::now() < self.sample_by {
            // What others wait for comes first.
            self.sample_at = (Instant::now() + SAMPLE_LATER).min(self.sample_by);
            return;
        }
        self.sampling = true;
        let seen = self
            .body
            .as_mut()
            .and_then(|body| body.port.as_mut())
            .is_some_and(|port| port.activity());
        if seen {
            self.core.handle_packets(now());
        }
        if let Err(error) = self.link.keep_clock() {
            tracing::debug!(sandbox = %self.id, error = chain(&error), "its clock is not set again");
        }
        self.flush_early();
        let (link, messages) = (self.link.clone(), self.messages.clone());
        tokio::spawn(async move {
            let sample = match tokio::time::timeout(SAMPLE_LIMIT, link.sample()).await {
                Ok(sample) => sample.map_err(|error| chain(&error)),
                Err(_) => Err(format!("no sample within {SAMPLE_LIMIT:?}")),
            };
            // The task is gone only with the sandbox.
            let _ = messages.send(Message::Sample(sample));
        });
    }

    /// Some time after it woke it writes to its disk, and its memory is written to the host's: then there is less to be written
    /// when it sleeps, which its programs stand still for. And an emulator has to translate the code for the former, which it then
    /// has done.
    fn flush_early(&mut self) {
        let soon = self.awake_since.elapsed() < FLUSH_AFTER;
        // Those that are being brought back are waited for, and this is not.
        let others_wake = self.ground.restores.any_taken();
        if !self.flush_owed || soon || others_wake || *self.disk_low.borrow() {
            return;
        }
        // With an order under way it is as good as asleep.
        let Some(memory) = self.body.as_ref().map(|body| body.files.memory()) else { return };
        self.flush_owed = false;
        let (link, id) = (self.link.clone(), self.id.clone());
        tokio::spawn(async move {
            let (flushed, synced) = tokio::join!(link.flush(FLUSH_LIMIT), sync(memory));
            if let Err(error) = flushed {
                tracing::debug!(sandbox = %id, %error, "not flushed while awake");
            }
            if let Err(error) = synced {
                // Told once: whoever writes the same again does not hear of it (fsync(2)).
                tracing::error!(sandbox = %id, %error, "its memory cannot be written to the disk");
            }
        });
    }

    /// A sample, as the state machine takes it.
    pub(super) fn facts(&self, sample: &Sample) -> lifecycle::Sample {
        let held = self.held;
        lifecycle::Sample {
            cpu_usec: sample.cpu_usec,
            outbound_tcp: sample.tcp_outbound,
            timer_due_ms: sample.timer_due_ms,
            // A sample that was overtaken by a change of what is held would take it back.
            holds: if self.link.tells_held() { held.holds } else { sample.holds },
            hold_connections: held.connections,
            commands: sample.execs_running,
        }
    }

    /// The next look at its guest is due after the usual time.
    pub(super) fn sample_next(&mut self) {
        self.sample_at = Instant::now() + Duration::from_millis(lifecycle::SAMPLE_EVERY_MS);
        self.sample_by = self.sample_at + SAMPLE_PUT_OFF_MAX;
    }

    /// It is due now, whoever is waited for.
    pub(super) fn sample_now(&mut self) {
        self.sample_at = Instant::now();
        self.sample_by = self.sample_at;
    }

    /// Its programs hold something else than before.
    pub(super) fn on_held(&mut self, held: Held) {
        tracing::debug!(sandbox = %self.id, ?held, "its programs hold");
        self.held = held;
        self.core.handle_holds(now(), held.holds, held.connections);
    }

    /// Its programs are told that it sleeps soon. One that cannot be told sleeps all the same.
    pub(super) fn tell_sleep(&self, in_ms: u64, cap: bool) {
        tracing::debug!(sandbox = %self.id, in_ms, cap, "its programs are told that it sleeps soon");
        let notice = SleepNotice { in_ms: u32::try_from(in_ms).unwrap_or(u32::MAX), cap };
        if let Err(error) = self.link.tell_sleep(notice) {
            tracing::debug!(sandbox = %self.id, error = chain(&error), "no notice of a sleep to come");
        }
    }

    pub(super) async fn on_sample(&mut self, sample: Result<Sample, String>) {
        self.sampling = false;
        self.last_reasons = Some(story::reasons(&self.core.awake_because(now())));
        self.sample_next();
        match sample {
            Ok(sample) => {
                self.guest_answers();
                self.record.note_cpu(sample.cpu_usec);
                self.core.handle_sample(now(), self.facts(&sample));
            }
            Err(error) => {
                tracing::debug!(sandbox = %self.id, error, "no sample");
                self.nudge().await;
            }
        }
    }
}

/// Waits until something else is held than what was last heard.
pub(super) async fn held_changed(link: &GuestLink, known: Held, awake: bool) -> Held {
    if awake && let Ok(held) = link.watch_held().wait_for(|held| *held != known).await {
        return *held;
    }
    std::future::pending().await
}

/// Waits until the link of a running guest is gone and it is time to make it anew.
pub(super) async fn detached(link: &GuestLink, not_before: Option<Instant>, running: bool) {
    if !running {
        return std::future::pending().await;
    }
    let mut state = link.watch_state();
    if state.wait_for(|state| *state == LinkState::Detached).await.is_err() {
        return std::future::pending().await;
    }
    let wait = not_before.map_or(REATTACH_AFTER, |at| at.saturating_duration_since(Instant::now()));
    tokio::time::sleep(wait).await;
}
