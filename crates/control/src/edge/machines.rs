//! Which machines have ended: what is connected to one that has must not wait for it. And which ones page loads have thawed.
//!
//! A machine that reboots, dies or is restarted says no word on its connections any more, and a host's own end of them would
//! wait for minutes. The timeline says at once that it has ended.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::{Event, SandboxId};
use tokio_util::sync::CancellationToken;

/// Kinds of events after which what ran in a sandbox runs no more.
const ENDS: [&str; 4] =
    ["sandbox.stopped", "sandbox.starting", "sandbox.failed", "sandbox.deleted"];

/// The event after which a box is frozen.
const REST: &str = "sandbox.slept";

/// How long after a page load has thawed a box the waking page stands for an app that takes no connection yet. It reloads, and
/// each load is a use or keeps the box awake: for an app that never comes it must end.
const COMES_UP_MAX: Duration = Duration::from_mins(1);

type Tokens = HashMap<SandboxId, CancellationToken>;

/// Tokens for each sandbox that somebody is connected to.
#[derive(Debug, Default)]
pub(crate) struct Machines {
    ends: Mutex<Tokens>,
    rests: Mutex<Tokens>,
    thaws: Mutex<HashMap<SandboxId, Instant>>,
}

impl Machines {
    /// Fires when the machine that runs now has ended.
    pub(crate) fn end_of(&self, id: &SandboxId) -> CancellationToken {
        // A child each, so that those who listen no more leave nothing behind.
        lock(&self.ends).entry(id.clone()).or_default().child_token()
    }

    /// Fires when it sleeps the next time; perhaps once for the last time, too, if that was just now.
    pub(crate) fn rest_of(&self, id: &SandboxId) -> CancellationToken {
        lock(&self.rests).entry(id.clone()).or_default().child_token()
    }

    /// A page load thaws it now.
    pub(super) fn thaws(&self, id: &SandboxId) {
        let mut thaws = self.thaws.lock().unwrap_or_else(PoisonError::into_inner);
        thaws.retain(|_, at| at.elapsed() < COMES_UP_MAX);
        thaws.insert(id.clone(), Instant::now());
    }

    /// Whether a page load has thawed it just now, so that its app may still be coming up.
    pub(super) fn comes_up(&self, id: &SandboxId) -> bool {
        let thaws = self.thaws.lock().unwrap_or_else(PoisonError::into_inner);
        thaws.get(id).is_some_and(|at| at.elapsed() < COMES_UP_MAX)
    }

    /// Takes note of what happened to a sandbox.
    pub(crate) fn hear(&self, event: &Event) {
        let tokens = match event.kind.as_str() {
            REST => &self.rests,
            kind if ENDS.contains(&kind) => &self.ends,
            _ => return,
        };
        if let Some(token) = lock(tokens).remove(&event.sandbox_id) {
            token.cancel();
        }
    }
}

fn lock(tokens: &Mutex<Tokens>) -> MutexGuard<'_, Tokens> {
    tokens.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b18_the_waking_page_stands_for_an_app_only_where_a_page_load_has_just_thawed_its_box() {
        let machines = Machines::default();
        let ids = ["aaaaaaaaaaaa", "bbbbbbbbbbbb"].map(|id| id.parse().expect("an id"));
        machines.thaws(&ids[0]);
        assert_eq!(ids.each_ref().map(|id| machines.comes_up(id)), [true, false]);
        // Long ago is not just now, and what is long ago is forgotten.
        let long_ago = Instant::now().checked_sub(COMES_UP_MAX).expect("the machine is up");
        let thaws = || machines.thaws.lock().expect("nobody has panicked");
        thaws().insert(ids[0].clone(), long_ago);
        assert!(!machines.comes_up(&ids[0]));
        machines.thaws(&ids[1]);
        assert_eq!(thaws().len(), 1);
    }
}
