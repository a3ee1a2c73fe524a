//! What holds sandboxes awake for a moment because a client has just sent something over a connection that stays open.
//!
//! A sleep that is asked for ends it: what was sent has been passed on, and what is sent from then on is a need of its own. What is
//! on its way in that very moment reaches a sleeper as any packet does, and wakes it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::SandboxId;
use api::host::Hold;

/// A client's last need, if it is recent.
type Held = Arc<tokio::sync::Mutex<Option<Box<dyn Hold>>>>;

/// Of all connections that stay open. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Bursts(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    numbers: u64,
    open: HashMap<u64, (SandboxId, Held)>,
}

/// That of one connection, for as long as it is open.
pub(super) struct Burst {
    all: Bursts,
    number: u64,
    pub(super) held: Held,
}

impl Bursts {
    /// A connection to this sandbox is open from now on.
    pub(super) fn open(&self, id: &SandboxId) -> Burst {
        let held = Held::default();
        let mut inner = self.inner();
        inner.numbers += 1;
        let number = inner.numbers;
        inner.open.insert(number, (id.clone(), Arc::clone(&held)));
        drop(inner);
        Burst { all: self.clone(), number, held }
    }

    /// Ends those of a sandbox, or all.
    pub(super) fn end(&self, id: Option<&SandboxId>) {
        let inner = self.inner();
        let wanted = inner.open.values().filter(|(of, _)| id.is_none_or(|id| id == of));
        let wanted: Vec<Held> = wanted.map(|(_, held)| Arc::clone(held)).collect();
        drop(inner);
        for held in wanted {
            // Not waited for: whoever has it just now is about to need it.
            if let Ok(mut held) = held.try_lock() {
                *held = None;
            }
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Burst {
    fn drop(&mut self) {
        self.all.inner().open.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;
    impl Hold for Nothing {}

    #[tokio::test]
    async fn a_sleep_ends_what_a_client_has_just_sent_to_that_sandbox() {
        let bursts = Bursts::default();
        let (one, other): (SandboxId, SandboxId) =
            ("k3b5qj2m4x7a".parse().unwrap(), "k3b5qj2m4x7b".parse().unwrap());
        let (mine, others) = (bursts.open(&one), bursts.open(&other));
        for burst in [&mine, &others] {
            *burst.held.lock().await = Some(Box::new(Nothing));
        }
        bursts.end(Some(&one));
        assert!(mine.held.lock().await.is_none());
        assert!(others.held.lock().await.is_some());
        // It is being passed on just now.
        let passing = others.held.lock().await;
        bursts.end(None);
        assert!(passing.is_some());
        drop(passing);
        bursts.end(None);
        assert!(others.held.lock().await.is_none());
        drop((mine, others));
        assert!(bursts.inner().open.is_empty());
    }
}
