//! Which place in the subnet belongs to whom.
//!
//! A slot gives a sandbox its address, tap, hardware address and user id, so it belongs to one at a time and comes back only
//! when everything of it is gone. Slots are handed out in a round, not lowest first: an address that was given back lately is
//! not soon somebody else's, while others may still try to reach its last owner.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use crate::network::{FIRST_SLOT, SLOT_END};

/// The slots of one host.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slots(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    taken: BTreeSet<u32>,
    last: u32,
}

/// A slot that is held; given back when dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    number: u32,
    slots: Slots,
}

impl Slot {
    /// Its number.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.inner().taken.remove(&self.number);
    }
}

impl Slots {
    /// A free slot; `None` when all are taken.
    pub(crate) fn take(&self) -> Option<Slot> {
        let mut inner = self.inner();
        let after = inner.last.max(FIRST_SLOT - 1) + 1;
        let number = (after..SLOT_END)
            .chain(FIRST_SLOT..after)
            .find(|number| !inner.taken.contains(number))?;
        inner.taken.insert(number);
        inner.last = number;
        Some(Slot { number, slots: self.clone() })
    }

    /// This very slot, which a manifest names; `None` if it is out of range or somebody else's.
    pub(crate) fn claim(&self, number: u32) -> Option<Slot> {
        let mut inner = self.inner();
        if !(FIRST_SLOT..SLOT_END).contains(&number) || !inner.taken.insert(number) {
            return None;
        }
        inner.last = inner.last.max(number);
        Some(Slot { number, slots: self.clone() })
    }

    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        // Nothing that can panic happens under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_has_one_owner_and_comes_back_late() {
        let slots = Slots::default();
        let first = slots.take().expect("free");
        assert_eq!(first.number(), FIRST_SLOT);
        assert!(slots.claim(FIRST_SLOT).is_none());
        let second = slots.claim(9).expect("free");
        drop(first);
        assert_eq!(slots.take().map(|slot| slot.number()), Some(10));
        drop(second);
        assert!(slots.claim(SLOT_END).is_none() && slots.claim(1).is_none());
    }
}
