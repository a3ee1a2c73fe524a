//! When a sandbox's checkpoints are taken: while it is awake, each so many seconds of being awake, counted from the end of the
//! last; and once when it has come to sleep on disk. One at a time: the copy is an order like a fork's, which is no activity
//! and wakes nobody; carrying it to the store goes on beside everything else.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use api::checkpoint::CheckpointStatus;
use lifecycle::{CaptureId, FailureCode, Phase, Refusal, Tier, What};
use serde_json::{Map, json};

use super::{Task, now};
use crate::checkpoints::{Keeper, Kept, Latest, StoreError, Taken};
use crate::clock::{Moment, rfc3339};
use crate::ground::Ground;
use crate::manifest::{Manifest, State};
use crate::sandbox::Message;
use crate::sandbox::work::{CaptureTo, chain, without_paths};
use crate::settings::Files;

/// Why there is none, where the host's disk is nearly full.
const NO_SPACE: &str = "no_space: the host's disk has no room for a checkpoint";

/// Checkpoints of one sandbox.
#[derive(Debug)]
pub(super) struct Checkpoints {
    every: Duration,
    /// `None`: this daemon has no store.
    keeper: Option<Arc<Keeper>>,
    under_way: UnderWay,
    /// How long it has been awake since the last one, up to `awake_from`.
    awake: Duration,
    /// Since when it is awake.
    awake_from: Option<Instant>,
    /// After a failed one the next is tried then.
    not_before: Instant,
    /// Goes up whenever it begins to run.
    runs: u64,
    /// The newest one is of the present sleep.
    covered: bool,
    newest: Option<Latest>,
    last: Option<Kept>,
    pause_ms: Option<u64>,
    error: Option<String>,
}

#[derive(Debug)]
enum UnderWay {
    Nothing,
    Copying { capture: CaptureId, taken: Arc<Mutex<Option<Taken>>>, runs: u64 },
    Carrying { runs: u64, asleep: bool },
}

impl Checkpoints {
    /// As the settings say; `None`: there are to be none.
    pub(super) fn of(ground: &Ground, manifest: &Manifest, files: &Files) -> Option<Self> {
        let every = Duration::from_secs(manifest.policy.checkpoint_seconds?);
        let keeper = ground.store.as_ref().map(|store| {
            Arc::new(Keeper::new(store, &ground.host, &manifest.id, manifest.epoch, files))
        });
        let error = keeper.is_none().then(|| "this host has no store of checkpoints".to_owned());
        Some(Self {
            every,
            keeper,
            under_way: UnderWay::Nothing,
            awake: Duration::ZERO,
            awake_from: matches!(manifest.state, State::Running).then(Instant::now),
            not_before: Instant::now(),
            runs: 0,
            covered: false,
            newest: None,
            last: None,
            pause_ms: None,
            error,
        })
    }

    /// In how long one is to be begun; `None`: not as things are.
    pub(super) fn due_in(&self, phase: &Phase) -> Option<Duration> {
        if self.keeper.is_none() || !matches!(self.under_way, UnderWay::Nothing) {
            return None;
        }
        let due = match phase {
            Phase::Running { .. } => {
                let awake = self.awake + self.awake_from.map_or(Duration::ZERO, |at| at.elapsed());
                self.every.saturating_sub(awake)
            }
            Phase::Asleep { tier: Tier::Disk, .. } if !self.covered => Duration::ZERO,
            _ => return None,
        };
        Some(due.max(self.not_before.saturating_duration_since(Instant::now())))
    }

    /// Whether this copy is of a checkpoint.
    pub(super) fn is_copying(&self, what: &What) -> bool {
        matches!((what, &self.under_way),
            (What::CaptureEnded { capture, .. }, UnderWay::Copying { capture: own, .. }) if capture == own)
    }

    fn ended(&mut self) {
        self.under_way = UnderWay::Nothing;
        self.awake = Duration::ZERO;
        self.awake_from = self.awake_from.map(|_| Instant::now());
    }

    fn failed(&mut self, error: String) {
        self.ended();
        self.not_before = Instant::now() + self.every;
        self.error = Some(error);
    }

    /// What is told about them. `halted`: none are taken, for lack of disk.
    pub(super) fn status(&self, manifest: &Manifest, halted: bool) -> CheckpointStatus {
        let behind = |latest: &Latest| {
            if self.covered {
                return 0;
            }
            let since = latest.taken_at.elapsed();
            // Asleep nothing is added any more.
            let asleep = match &manifest.state {
                State::SleepingInMemory { slept_at, .. } => slept_at.elapsed(),
                State::SleepingOnDisk(saved) => saved.slept_at.elapsed(),
                _ => Duration::ZERO,
            };
            // Rounded up: 0 says that nothing is lacking.
            u64::try_from(since.saturating_sub(asleep).as_millis().div_ceil(1000))
                .unwrap_or(u64::MAX)
        };
        CheckpointStatus {
            every_seconds: self.every.as_secs(),
            last_at: self.newest.as_ref().map(|latest| rfc3339(latest.taken_at.unix_ms)),
            behind_seconds: self.newest.as_ref().map(behind),
            stored_bytes: self.newest.as_ref().map_or(0, |latest| latest.stored_bytes),
            changed_bytes: self.last.as_ref().map(|kept| kept.changed_bytes),
            carried_bytes: self.last.as_ref().map(|kept| kept.carried_bytes),
            pause_ms: self.pause_ms,
            error: if halted { Some(NO_SPACE.to_owned()) } else { self.error.clone() },
        }
    }
}

impl Task {
    /// Settings have changed.
    pub(super) fn set_checkpoints(&mut self) {
        let manifest = self.record.get();
        match (&mut self.checkpoints, manifest.policy.checkpoint_seconds) {
            (Some(checkpoints), Some(seconds)) => checkpoints.every = Duration::from_secs(seconds),
            (None, None) => {}
            (checkpoints @ None, Some(_)) => {
                let dir = self.ground.settings.sandboxes_dir().join(self.id.as_str());
                *checkpoints = Checkpoints::of(&self.ground, &manifest, &Files::in_dir(dir));
                if let Some(checkpoints) = checkpoints {
                    checkpoints.awake_from = self.core.is_awake().then(Instant::now);
                    // One that was ended may not be at its end yet: only the same can wait for that.
                    if let Some(ended) = self.ended_keeper.take() {
                        ended.want(true);
                        checkpoints.keeper = Some(ended);
                    }
                }
                self.ask_newest();
            }
            (Some(_), None) => self.end_checkpoints(),
        }
    }

    /// There are to be none any more: what the store has of it is removed, beside everything else.
    pub(super) fn end_checkpoints(&mut self) {
        let keeper = self.checkpoints.take().and_then(|checkpoints| checkpoints.keeper);
        let Some(keeper) = keeper else { return };
        keeper.want(false);
        self.ended_keeper = Some(Arc::clone(&keeper));
        let id = self.id.clone();
        tokio::spawn(async move {
            if let Err(error) = keeper.end().await {
                tracing::warn!(sandbox = %id, error = chain(&error), "its checkpoints are not removed from the store");
            }
        });
    }

    /// What the store has of it from before.
    pub(super) fn ask_newest(&self) {
        let keeper = self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.keeper.clone());
        let Some(keeper) = keeper else { return };
        let messages = self.messages.clone();
        tokio::spawn(async move {
            let newest = keeper.newest().await;
            // The task is gone only with the sandbox.
            let _ =
                messages.send(Message::CheckpointFound(newest.map(|found| found.map(Box::new))));
        });
    }

    pub(super) fn on_checkpoint_found(&mut self, newest: Result<Option<Box<Latest>>, StoreError>) {
        let Some(checkpoints) = &mut self.checkpoints else { return };
        match newest {
            Ok(Some(newest)) if checkpoints.newest.is_none() => {
                let sleep = self.record.with(|manifest| match &manifest.state {
                    State::SleepingOnDisk(saved) => Some(saved.slept_at.clone()),
                    _ => None,
                });
                checkpoints.covered = newest.asleep
                    && checkpoints.runs == 0
                    && sleep == Some(newest.taken_at.clone());
                checkpoints.newest = Some(*newest);
            }
            Ok(_) => {}
            Err(error) => checkpoints.error = Some(without_paths(&chain(&error))),
        }
    }

    /// In how long a checkpoint is to be begun. Not of a machine that stands still for lack of disk.
    pub(super) fn checkpoint_in(&self) -> Option<Duration> {
        if self.halt.is_some() || self.body.is_none() {
            return None;
        }
        self.checkpoints.as_ref()?.due_in(self.core.phase())
    }

    /// Begins one.
    pub(super) fn take_checkpoint(&mut self) {
        let Some(checkpoints) = &mut self.checkpoints else { return };
        let Some(keeper) = &checkpoints.keeper else { return };
        if self.record.with(Manifest::has_volumes) {
            let text = "no checkpoints are taken of a sandbox with volumes";
            if checkpoints.error.is_none() {
                let mut data = Map::new();
                data.insert("error".to_owned(), json!(text));
                self.timeline.add("checkpoint_failed", "is not taken; it runs on", data);
            }
            checkpoints.failed(text.to_owned());
            return;
        }
        self.captures += 1;
        let capture = CaptureId(self.captures);
        if let Err(refusal) = self.core.handle_capture(now(), capture) {
            checkpoints.failed(refusal.to_string());
            return;
        }
        let taken = Arc::new(Mutex::new(None));
        let to = CaptureTo::Shadow(keeper.shadow().clone(), Arc::clone(&taken));
        self.capture_to.push((capture, to));
        checkpoints.under_way = UnderWay::Copying { capture, taken, runs: checkpoints.runs };
    }

    /// Follows what happens to the sandbox. `true`: it is nothing but its checkpoint's copy, of which nobody is told.
    pub(super) fn on_checkpoint_event(&mut self, what: &What) -> bool {
        let Some(checkpoints) = &mut self.checkpoints else { return false };
        match what {
            What::Started { .. } | What::Woke { .. } => {
                checkpoints.awake_from = Some(Instant::now());
                checkpoints.runs += 1;
                checkpoints.covered = false;
            }
            What::Slept { .. } | What::Died { .. } | What::Failed { .. } => {
                if let Some(from) = checkpoints.awake_from.take() {
                    checkpoints.awake += from.elapsed();
                }
            }
            What::CaptureEnded { result, .. } if checkpoints.is_copying(what) => {
                let under_way = std::mem::replace(&mut checkpoints.under_way, UnderWay::Nothing);
                let UnderWay::Copying { taken, runs, .. } = under_way else { return false };
                let taken = taken.lock().unwrap_or_else(PoisonError::into_inner).take();
                match (taken, result, &checkpoints.keeper) {
                    (Some(taken), Ok(()), Some(keeper)) => {
                        checkpoints.under_way = UnderWay::Carrying { runs, asleep: taken.asleep };
                        if !taken.asleep {
                            checkpoints.pause_ms = Some(taken.pause_ms);
                        }
                        let (keeper, messages) = (Arc::clone(keeper), self.messages.clone());
                        tokio::spawn(async move {
                            let kept = keeper.keep(taken).await.map(Box::new);
                            // The task is gone only with the sandbox.
                            let _ = messages.send(Message::CheckpointKept(kept));
                        });
                    }
                    (_, _, keeper) => {
                        if let Some(keeper) = keeper {
                            keeper.doubt();
                        }
                        let why = match result {
                            Err(Refusal::CaptureFailed { code: FailureCode::DiskFull }) => {
                                NO_SPACE.to_owned()
                            }
                            Err(refusal) => {
                                self.failure.clone().unwrap_or_else(|| refusal.to_string())
                            }
                            Ok(()) => "nothing was copied".to_owned(),
                        };
                        checkpoints.failed(why);
                    }
                }
                return true;
            }
            _ => {}
        }
        false
    }

    /// One was carried to the store, or could not be.
    pub(super) async fn on_checkpoint_kept(&mut self, kept: Result<Box<Kept>, StoreError>) {
        let Some(checkpoints) = &mut self.checkpoints else { return };
        match kept {
            Ok(kept) => {
                let UnderWay::Carrying { runs, asleep } = checkpoints.under_way else { return };
                checkpoints.covered = asleep && runs == checkpoints.runs;
                checkpoints.ended();
                if checkpoints.error.take().is_some() {
                    self.timeline.add(
                        "checkpoints_resumed",
                        "its checkpoints are taken again",
                        Map::new(),
                    );
                }
                tracing::debug!(sandbox = %self.id, changed = kept.changed_bytes, carried = kept.carried_bytes,
                    pause_ms = checkpoints.pause_ms, "checkpoint");
                checkpoints.newest = Some(kept.latest.clone());
                checkpoints.last = Some(*kept);
            }
            Err(StoreError::Lost(to)) => {
                checkpoints.failed(format!("it belongs to another host now: {to}"));
                self.give_up(to).await;
            }
            Err(error) => {
                let text = without_paths(&chain(&error));
                if checkpoints.error.is_none() {
                    tracing::warn!(sandbox = %self.id, error = chain(&error), "no checkpoint");
                    let mut data = Map::new();
                    data.insert("error".to_owned(), json!(text));
                    self.timeline.add(
                        "checkpoint_failed",
                        "could not be kept in the store; it runs on",
                        data,
                    );
                }
                checkpoints.failed(text);
            }
        }
    }

    /// Another host has taken it over: here its machine ends, and its files are put aside.
    async fn give_up(&mut self, to: String) {
        tracing::error!(sandbox = %self.id, to, "another host has taken it over: it is ended here, its files are kept");
        self.checkpoints = None;
        self.timeline.add(
            "moved_away",
            "another host has taken it over; here it is ended",
            Map::new(),
        );
        self.note(move |manifest| {
            manifest.moved_to = Some(to);
            manifest.state = State::Deleting;
            manifest.since = Moment::now();
        })
        .await;
        self.core.handle_delete(now());
    }
}
