//! A running guest that stands still because the host's disk is nearly full.
//!
//! Either the host pauses it, before its disk is full: a guest that touches a new page of its memory and finds no room for it
//! would die. Or QEMU stops it, because the disk has not taken what it wrote. Both cost it nothing but time: it goes on by
//! itself when there is room. Meanwhile it says so, nobody asks its agent anything, and callers are told instead of waiting.

use std::time::{Duration, Instant};

use api::sandbox::{Lack, WaitsFor};
use serde_json::Map;
use tokio::sync::watch;
use vmm::machine::GuestState;

use super::{Task, now};
use crate::clock::{rfc3339, unix_ms_of};
use crate::exec::stands_still_error;
use crate::guest::{LinkState, WakeParams};
use crate::sandbox::work::chain;

/// How long a caller is let wait for a guest that stands still, before he is told. A disk that is made room on is often so
/// within seconds; who waits for an answer, and his own timeouts, should not wait much longer.
pub(super) const CALLER_WAIT: Duration = Duration::from_secs(5);

/// How often it is tried to let a guest go on whose write the disk has not taken, though it seems to have room: a quota, or a
/// disk that is broken.
const TRY_EVERY: Duration = Duration::from_secs(5);

/// How long the agent of a guest that goes on may take to wake its programs.
const WAKE_LIMIT: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Debug)]
pub(super) struct Halt {
    by: By,
    since: Instant,
    /// Callers have been told.
    told: bool,
    /// When it is tried to let it go on, where QEMU has stopped it.
    try_at: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// The host has paused it.
    Host,
    /// QEMU waits to write.
    Qemu,
}

impl Halt {
    fn new(by: By) -> Self {
        let now = Instant::now();
        Self { by, since: now, told: false, try_at: now + TRY_EVERY }
    }

    /// Whether callers are not let wait any more.
    pub(super) fn has_told(&self) -> bool {
        self.told
    }

    /// When something is to be done about it, if the disk stays as it is.
    fn due(&self) -> Option<Instant> {
        let tell_at = (!self.told).then(|| self.since + CALLER_WAIT);
        let try_at = (self.by == By::Qemu).then_some(self.try_at);
        tell_at.into_iter().chain(try_at).min()
    }
}

impl Task {
    /// The disk is nearly full, or no longer.
    pub(super) async fn halt_or_go_on(&mut self) {
        let low = *self.disk_low.borrow_and_update();
        let Some(machine) = self.body.as_mut().and_then(|body| body.machine.as_mut()) else {
            return;
        };
        if low {
            if let Err(error) = machine.pause().await {
                // Its end, if that is the reason, is noticed by itself.
                tracing::warn!(sandbox = %self.id, error = chain(&error), "a machine does not stand still, though the disk is nearly full");
            }
            self.halted(By::Host);
        } else if let Err(error) = machine.cont().await {
            tracing::warn!(sandbox = %self.id, error = chain(&error), "a machine that stands still does not go on");
            // Tried again like one that the disk has refused.
            self.halt = Some(Halt {
                told: self.halt.as_ref().is_some_and(Halt::has_told),
                ..Halt::new(By::Qemu)
            });
        } else {
            self.resumed();
        }
    }

    fn halted(&mut self, by: By) {
        let before = self.halt.take();
        let news = before.is_none();
        self.halt = Some(Halt { by, ..before.unwrap_or_else(|| Halt::new(by)) });
        if news {
            self.core.handle_halted(now());
            let text = "stands still: the host's disk is nearly full";
            tracing::warn!(sandbox = %self.id, "it {text}");
            self.timeline.add("halted", text, Map::new());
        }
    }

    fn resumed(&mut self) {
        if self.halt.take().is_some() {
            self.link.stand_still(false);
            self.core.handle_resumed(now());
            self.sample_now();
            let text = "goes on: the host's disk has room again";
            tracing::info!(sandbox = %self.id, "it {text}");
            self.timeline.add("resumed", text, Map::new());
        }
    }

    /// Its machine is ended or was handed to an order: whatever it does, it does not stand still for this any more.
    pub(super) fn forget_halt(&mut self) {
        if self.halt.take().is_some() {
            self.link.stand_still(false);
        }
    }

    /// When something is to be done about a guest that stands still.
    pub(super) fn halt_due(&self) -> Option<Instant> {
        self.body.as_ref()?;
        self.halt.as_ref()?.due()
    }

    /// That time has come.
    pub(super) async fn on_halt_due(&mut self) {
        let Some(halt) = &mut self.halt else { return };
        let now = Instant::now();
        if !halt.told && halt.since + CALLER_WAIT <= now {
            halt.told = true;
            self.link.stand_still(true);
            self.refuse_waiters(|_| stands_still_error());
        }
        let Some(halt) = &mut self.halt else { return };
        if halt.by == By::Qemu && halt.try_at <= now {
            halt.try_at = now + TRY_EVERY;
            let Some(machine) = self.body.as_mut().and_then(|body| body.machine.as_mut()) else {
                return;
            };
            match machine.cont().await {
                // Whether it goes on its agent says.
                Ok(_) => self.ask_sample(),
                Err(error) => {
                    tracing::debug!(sandbox = %self.id, error = chain(&error), "a guest that waits to write does not go on");
                }
            }
        }
    }

    /// The guest has answered: whatever stopped it is over, unless it is the host that does.
    pub(super) fn guest_answers(&mut self) {
        if self.halt.as_ref().is_some_and(|halt| halt.by == By::Qemu) {
            self.resumed();
        }
    }

    /// A running guest that does not say what it does may have been stopped by QEMU because the host's disk is full, or stand
    /// still after a sleep that was given up then.
    pub(super) async fn nudge(&mut self) {
        let Some(machine) = self.body.as_mut().and_then(|body| body.machine.as_mut()) else {
            return;
        };
        if matches!(machine.guest_state().await, Ok(GuestState::DiskError)) {
            if self.halt.is_none() {
                self.halted(By::Qemu);
            }
            return;
        }
        if matches!(self.link.state(), LinkState::Quiesced | LinkState::Quiescing) {
            let (link, id) = (self.link.clone(), self.id.clone());
            tokio::spawn(async move {
                let params = WakeParams { identity: None, fork: false };
                if let Err(error) = link.wake(params, WAKE_LIMIT).await {
                    tracing::warn!(sandbox = %id, error = chain(&error), "a guest that stands still does not go on");
                }
            });
        }
    }

    /// What it waits for on the disk.
    pub(super) fn waits_for_disk(&self) -> Option<WaitsFor> {
        let since = self.core.halted_since()?;
        Some(WaitsFor {
            what: Lack::Disk,
            since: rfc3339(unix_ms_of(since)),
            position: None,
            text: "stands still, because the host's disk is nearly full; it goes on by itself when there is room"
                .to_owned(),
        })
    }
}

/// Waits until the disk's state is another than the one that a running guest was last told.
pub(super) async fn disk_changed(
    low: &mut watch::Receiver<bool>,
    halt: Option<&Halt>,
    running: bool,
) {
    // One that QEMU has stopped is tried by and by; a disk that is nearly full stops that too.
    let paused = halt.is_some_and(|halt| halt.by == By::Host);
    if !running || low.wait_for(|low| *low != paused).await.is_err() {
        std::future::pending::<()>().await;
    }
}
