//! How much memory guests may hold resident on this host, and who waits for it.
//!
//! Every machine has a [`Seat`] for as long as its process exists: the guest's whole memory and what QEMU itself may take,
//! so that the sum of what is resident can never be more than the budget, whatever guests do. Who finds no room waits in
//! order of arrival; a timer, whose time goes by, as if it had come some seconds earlier. Meanwhile those that sleep in memory are asked to move to disk, the longest asleep first, and no more
//! of them than are needed.
//!
//! Machines that a starting daemon finds alive have their seats in any case: a budget that was made smaller is reached by
//! and by, and nothing is ended for it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::SandboxId;
use tokio::sync::{Notify, oneshot};

use crate::clock;
use crate::turns::Urgency;

/// What QEMU takes beside its guest's memory, MiB: its own (some 35), the buffer for translated code (32), and as much again
/// for stacks and queues. Measured as 30 to 75 on QEMU 7.2 with TCG.
pub(crate) const QEMU_MIB: u64 = 96;

/// How long a machine waits for room, unless set otherwise: longer than it takes to move a few sleepers to disk, and about as
/// long as whoever waits for its answer will.
pub const WAIT_DEFAULT: Duration = Duration::from_mins(1);

/// So much earlier a timer (S3) counts as having come: it is late where it waits, but calls must have their turn as well on a host
/// whose timers alone would fill it.
const TIMER_AHEAD: Duration = Duration::from_secs(5);

/// Why there is no room.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    /// It can never have it.
    #[error(
        "it needs {needed} MiB with its emulator, and the host's memory budget is {budget} MiB in all"
    )]
    TooLarge {
        /// MiB.
        needed: u64,
        /// MiB.
        budget: u64,
    },
    /// Nobody made room in time.
    #[error(
        "the host's memory budget of {budget} MiB is taken by sandboxes that are awake, and {needed} MiB are needed"
    )]
    Taken {
        /// MiB.
        needed: u64,
        /// MiB.
        budget: u64,
    },
}

/// The budget of a host. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Budget(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    /// `None`: no limit.
    total_mib: Option<u64>,
    taken_mib: u64,
    /// The first goes next.
    waiting: VecDeque<Waiting>,
    /// Those that can make room, by when they offered, and a number for those of the same moment.
    offers: BTreeMap<(u64, u64), Offered>,
    numbers: u64,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    who: Option<SandboxId>,
    /// Since when, milliseconds since the host was booted.
    since_ms: u64,
    /// From when on it counts as waiting, by the same clock.
    counts_from_ms: u64,
    mib: u64,
    granted: oneshot::Sender<()>,
}

#[derive(Debug)]
struct Offered {
    mib: u64,
    asked: bool,
    ask: Arc<Notify>,
}

/// Room for one machine; given back when dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    budget: Budget,
    mib: u64,
}

/// A sleeper's readiness to make room; withdrawn when dropped.
#[derive(Debug)]
pub(crate) struct Offer {
    budget: Budget,
    key: (u64, u64),
    ask: Arc<Notify>,
}

impl Budget {
    /// `None`: without a limit.
    pub(crate) fn new(total_mib: Option<u64>) -> Self {
        Self(Arc::new(Mutex::new(Inner { total_mib, ..Inner::default() })))
    }

    /// Room for a guest of this size, MiB, as soon as there is some. Served in order of arrival, timers some seconds ahead. `who`: for
    /// whom, where it is for a sandbox.
    pub(crate) async fn seat(
        &self,
        who: Option<&SandboxId>,
        urgency: Urgency,
        memory_mib: u32,
        limit: Duration,
    ) -> Result<Seat, NoRoom> {
        let mib = u64::from(memory_mib) + QEMU_MIB;
        let (granted, mut grant) = oneshot::channel();
        self.check(memory_mib)?;
        let (number, budget) = {
            let mut inner = self.inner();
            inner.numbers += 1;
            let number = inner.numbers;
            let since_ms = clock::since_boot_ms();
            inner.stand_in_line(
                urgency,
                Waiting {
                    number,
                    who: who.cloned(),
                    since_ms,
                    counts_from_ms: since_ms,
                    mib,
                    granted,
                },
            );
            inner.serve();
            (number, inner.total_mib.unwrap_or(u64::MAX))
        };
        // Whoever gives up leaves the queue, and gives back what was granted in that very moment.
        let mut place = Place { budget: self, number, mib, kept: true };
        if tokio::time::timeout(limit, &mut grant).await.is_ok() {
            place.kept = false;
            return Ok(Seat { budget: self.clone(), mib });
        }
        Err(NoRoom::Taken { needed: mib, budget })
    }

    /// Refuses a guest of a size, MiB, that can never have room.
    pub(crate) fn check(&self, memory_mib: u32) -> Result<(), NoRoom> {
        let needed = u64::from(memory_mib) + QEMU_MIB;
        match self.inner().total_mib {
            Some(budget) if needed > budget => Err(NoRoom::TooLarge { needed, budget }),
            _ => Ok(()),
        }
    }

    /// Room for a guest of this size that nobody else waits for and nobody has to make; `None`: there is none.
    pub(crate) fn seat_if_free(&self, memory_mib: u32) -> Option<Seat> {
        let mib = u64::from(memory_mib) + QEMU_MIB;
        let mut inner = self.inner();
        if !inner.waiting.is_empty() || inner.free_mib() < mib {
            return None;
        }
        inner.taken_mib += mib;
        Some(Seat { budget: self.clone(), mib })
    }

    /// For a machine that is there already.
    pub(crate) fn seat_of_living(&self, memory_mib: u32) -> Seat {
        let mib = u64::from(memory_mib) + QEMU_MIB;
        self.inner().taken_mib += mib;
        Seat { budget: self.clone(), mib }
    }

    /// A sleeper in memory, asleep since this moment of a clock, can make room for others.
    pub(crate) fn offer(&self, since_ms: u64, memory_mib: u32) -> Offer {
        let ask = Arc::new(Notify::new());
        let mut inner = self.inner();
        inner.numbers += 1;
        let key = (since_ms, inner.numbers);
        let mib = u64::from(memory_mib) + QEMU_MIB;
        inner.offers.insert(key, Offered { mib, asked: false, ask: Arc::clone(&ask) });
        inner.serve();
        Offer { budget: self.clone(), key, ask }
    }

    /// In which place a sandbox waits (1 is next), and since when, in milliseconds since the host was booted. `None`: it does
    /// not wait.
    pub(crate) fn place_of(&self, who: &SandboxId) -> Option<(u64, u64)> {
        let inner = self.inner();
        let (ahead, waiting) =
            inner.waiting.iter().enumerate().find(|(_, one)| one.who.as_ref() == Some(who))?;
        Some((ahead as u64 + 1, waiting.since_ms))
    }

    /// MiB that are taken, and how many machines wait.
    #[cfg(test)]
    fn load(&self) -> (u64, usize) {
        let inner = self.inner();
        (inner.taken_mib, inner.waiting.len())
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // No code under this lock can leave it half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn free_mib(&self) -> u64 {
        self.total_mib.map_or(u64::MAX, |total| total.saturating_sub(self.taken_mib))
    }

    fn stand_in_line(&mut self, urgency: Urgency, mut new: Waiting) {
        if urgency == Urgency::Timer {
            let ahead = u64::try_from(TIMER_AHEAD.as_millis()).unwrap_or(0);
            new.counts_from_ms = new.since_ms.saturating_sub(ahead);
        }
        let place = self.waiting.partition_point(|one| one.counts_from_ms <= new.counts_from_ms);
        self.waiting.insert(place, new);
    }

    /// Serves who waits, in order; for the first that cannot be served sleepers are asked.
    fn serve(&mut self) {
        while let Some(first) = self.waiting.front() {
            if first.mib > self.free_mib() {
                return self.ask_sleepers();
            }
            let Some(first) = self.waiting.pop_front() else { return };
            self.taken_mib += first.mib;
            if first.granted.send(()).is_err() {
                self.taken_mib -= first.mib;
            }
        }
    }

    fn ask_sleepers(&mut self) {
        let wanted: u64 = self.waiting.iter().map(|waiting| waiting.mib).sum();
        let coming: u64 =
            self.offers.values().filter(|offer| offer.asked).map(|offer| offer.mib).sum();
        let mut lacking = wanted.saturating_sub(self.free_mib()).saturating_sub(coming);
        for offer in self.offers.values_mut().filter(|offer| !offer.asked) {
            if lacking == 0 {
                return;
            }
            offer.asked = true;
            offer.ask.notify_one();
            lacking = lacking.saturating_sub(offer.mib);
        }
    }
}

impl Offer {
    /// Waits until room is needed.
    pub(crate) async fn asked(&self) {
        self.ask.notified().await;
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        let mut inner = self.budget.inner();
        inner.offers.remove(&self.key);
        // If it woke instead, somebody else must make room.
        inner.serve();
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut inner = self.budget.inner();
        inner.taken_mib = inner.taken_mib.saturating_sub(self.mib);
        inner.serve();
    }
}

struct Place<'a> {
    budget: &'a Budget,
    number: u64,
    mib: u64,
    kept: bool,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.kept {
            return;
        }
        let mut inner = self.budget.inner();
        let before = inner.waiting.len();
        inner.waiting.retain(|waiting| waiting.number != self.number);
        if inner.waiting.len() == before {
            inner.taken_mib = inner.taken_mib.saturating_sub(self.mib);
        }
        inner.serve();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u32 = 104;
    const LONG: Duration = Duration::from_hours(1);

    /// A budget for so many machines of [`SIZE`].
    fn budget(machines: u64) -> Budget {
        Budget::new(Some(machines * (u64::from(SIZE) + QEMU_MIB)))
    }

    fn id() -> SandboxId {
        "k3vq7mzt2abc".parse().expect("an id")
    }

    fn is_asked(offer: &Offer) -> bool {
        let mut asked = tokio_test_task(offer.asked());
        asked()
    }

    /// Whether a future is ready when it is looked at once.
    fn tokio_test_task<'a>(future: impl Future<Output = ()> + 'a) -> impl FnMut() -> bool + 'a {
        let mut future = Box::pin(future);
        move || {
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            future.as_mut().poll(&mut context).is_ready()
        }
    }

    #[tokio::test]
    async fn room_is_given_in_order_of_arrival_and_the_oldest_sleeper_makes_it() {
        let budget = budget(2);
        let one = budget.seat(Some(&id()), Urgency::Call, SIZE, LONG).await.expect("room");
        let two = budget.seat(Some(&id()), Urgency::Call, SIZE, LONG).await.expect("room");
        let (older, newer) = (budget.offer(10, SIZE), budget.offer(20, SIZE));
        assert!(!is_asked(&older) && !is_asked(&newer), "nobody waits");
        let (first, second) = (budget.clone(), budget.clone());
        let first =
            tokio::spawn(async move { first.seat(Some(&id()), Urgency::Call, SIZE, LONG).await });
        tokio::task::yield_now().await;
        assert!(is_asked(&older), "the longest asleep");
        assert!(!is_asked(&newer), "and no more than are needed");
        let second =
            tokio::spawn(async move { second.seat(Some(&id()), Urgency::Call, SIZE, LONG).await });
        tokio::task::yield_now().await;
        assert!(is_asked(&newer));
        assert_eq!(budget.load().1, 2);
        drop((older, one));
        let first = first.await.expect("no panic").expect("its turn");
        assert!(!second.is_finished());
        drop((newer, two));
        second.await.expect("no panic").expect("its turn");
        drop(first);
        assert_eq!(budget.load(), (0, 0));
    }

    #[test]
    fn a_timer_goes_before_calls_of_the_last_seconds_and_after_those_that_wait_for_longer() {
        let mut inner = Inner::default();
        let come = [
            (Urgency::Call, 10_000),
            (Urgency::Call, 12_000),
            (Urgency::Timer, 15_500),
            (Urgency::Timer, 15_500),
            (Urgency::Call, 16_000),
        ];
        for (number, (urgency, since_ms)) in come.into_iter().enumerate() {
            let (granted, _) = oneshot::channel();
            let number = number as u64;
            let who = None;
            inner.stand_in_line(
                urgency,
                Waiting { number, who, since_ms, counts_from_ms: since_ms, mib: 1, granted },
            );
        }
        let line: Vec<_> = inner.waiting.iter().map(|one| one.number).collect();
        assert_eq!(line, [0, 2, 3, 1, 4]);
    }

    #[tokio::test]
    async fn who_waits_in_vain_is_told_and_leaves_the_queue() {
        let budget = budget(1);
        let living = budget.seat_of_living(SIZE);
        let more = budget.seat_of_living(SIZE);
        let refused = budget
            .seat(Some(&id()), Urgency::Call, SIZE, Duration::from_millis(20))
            .await
            .expect_err("no room");
        assert_eq!(refused, NoRoom::Taken { needed: 200, budget: 200 });
        assert_eq!(budget.load(), (400, 0), "what was found alive counts, beyond the budget too");
        let too_large =
            budget.seat(Some(&id()), Urgency::Call, 4096, LONG).await.expect_err("never");
        assert_eq!(too_large, NoRoom::TooLarge { needed: 4192, budget: 200 });
        drop((living, more));
        budget.seat(Some(&id()), Urgency::Call, SIZE, LONG).await.expect("room");
    }

    #[tokio::test]
    async fn a_sleeper_that_wakes_instead_of_making_room_is_replaced_by_another() {
        let budget = budget(1);
        let seat = budget.seat(Some(&id()), Urgency::Call, SIZE, LONG).await.expect("room");
        let (older, newer) = (budget.offer(1, SIZE), budget.offer(2, SIZE));
        let waiting = budget.clone();
        let waiting =
            tokio::spawn(async move { waiting.seat(Some(&id()), Urgency::Call, SIZE, LONG).await });
        tokio::task::yield_now().await;
        assert!(is_asked(&older) && !is_asked(&newer));
        drop(older);
        assert!(is_asked(&newer));
        // Who gives up waiting is forgotten, also where its turn has come in that moment.
        waiting.abort();
        drop(seat);
        tokio::task::yield_now().await;
        assert_eq!(budget.load(), (0, 0));
    }

    #[tokio::test]
    async fn without_a_budget_nobody_waits() {
        let (budget, who) = (Budget::new(None), id());
        let _all: Vec<_> = futures_util::future::join_all(
            (0..100).map(|_| budget.seat(Some(&who), Urgency::Call, 16_384, LONG)),
        )
        .await;
        assert_eq!(budget.load().1, 0);
    }
}
