//! Which machines have ended: what is connected to one that has must not wait for it.
//!
//! A machine that reboots, dies or is restarted says no word on its connections any more, and a host's own end of them would
//! wait for minutes. The timeline says at once that it has ended.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use api::{Event, SandboxId};
use tokio_util::sync::CancellationToken;

/// Kinds of events after which what ran in a sandbox runs no more.
const ENDS: [&str; 4] =
    ["sandbox.stopped", "sandbox.starting", "sandbox.failed", "sandbox.deleted"];

/// A token for each sandbox that somebody is connected to.
#[derive(Debug, Default)]
pub(crate) struct Machines(Mutex<HashMap<SandboxId, CancellationToken>>);

impl Machines {
    /// Fires when the machine that runs now has ended.
    pub(crate) fn end_of(&self, id: &SandboxId) -> CancellationToken {
        // A child each, so that those who listen no more leave nothing behind.
        self.lock().entry(id.clone()).or_default().child_token()
    }

    /// Takes note of what happened to a sandbox.
    pub(crate) fn hear(&self, event: &Event) {
        if ENDS.contains(&event.kind.as_str())
            && let Some(token) = self.lock().remove(&event.sandbox_id)
        {
            token.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, CancellationToken>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
