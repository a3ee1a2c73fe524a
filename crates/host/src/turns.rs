//! Turns for bringing machines back from disk, given in order of arrival.
//!
//! Each costs a processor for some tenths of a second. More of them at a time than there are processors help nobody, and the
//! first that came would end last. What counts is when it was asked for and not when that came as far as here: on a machine that
//! is busy waking others the one has little to do with the other. What has a time at which it must be there goes first: a caller
//! waits, a time goes by. What nobody waits for is put off while turns are taken.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::task::AbortHandle;

/// How long others wait for one: ten times what it takes. A guest that does not answer is waited for longer, and costs the
/// processors nothing.
const TURN_TIME_MAX: Duration = Duration::from_secs(3);

/// For what a machine is brought back, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Urgency {
    /// A timer of its own, at its time (S3).
    Timer,
    /// Somebody who waits for it.
    Call,
}

/// How urgent it is, since when it waits, and a number for those of the same moment.
type Key = (Urgency, Instant, u64);

/// The turns of a host. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Turns {
    at_once: usize,
    line: Arc<Mutex<Line>>,
}

#[derive(Debug)]
struct Line {
    free: usize,
    /// The first goes next.
    waiting: BTreeMap<Key, oneshot::Sender<Taken>>,
    numbers: u64,
}

/// A place in line; left when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    turns: Turns,
    key: Key,
    turn: oneshot::Receiver<Taken>,
}

/// Given back when dropped, or after [`TURN_TIME_MAX`].
#[derive(Debug)]
pub(crate) struct Turn(AbortHandle);

/// What is given back when dropped.
#[derive(Debug)]
struct Taken(Turns);

impl Turns {
    /// As many at a time as there are processors. Measured with fifty sleepers on two processors: with one turn a processor was
    /// idle now and then, with three and four each took more of the processors' time than with two.
    pub(crate) fn new() -> Self {
        Self::at_once(std::thread::available_parallelism().map_or(2, std::num::NonZero::get))
    }

    fn at_once(at_once: usize) -> Self {
        let line = Line { free: at_once, waiting: BTreeMap::new(), numbers: 0 };
        Self { at_once, line: Arc::new(Mutex::new(line)) }
    }

    /// Takes the place of something that was asked for at this moment.
    pub(crate) fn stand_in_line(&self, urgency: Urgency, since: Instant) -> Place {
        let (give, turn) = oneshot::channel();
        let mut line = self.line();
        line.numbers += 1;
        let key = (urgency, since, line.numbers);
        line.waiting.insert(key, give);
        self.serve(line);
        Place { turns: self.clone(), key, turn }
    }

    /// Whether others would have to wait for one.
    pub(crate) fn all_taken(&self) -> bool {
        self.line().free == 0
    }

    /// Whether any machine is being brought back.
    pub(crate) fn any_taken(&self) -> bool {
        self.line().free < self.at_once
    }

    fn serve(&self, mut line: MutexGuard<'_, Line>) {
        let mut left = Vec::new();
        while line.free > 0
            && let Some((_, give)) = line.waiting.pop_first()
        {
            line.free -= 1;
            // Of one that has just left its turn comes back.
            left.extend(give.send(Taken(self.clone())).err());
        }
        // A turn that is dropped asks for the line.
        drop(line);
        drop(left);
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        // No code under this lock can leave it half changed.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// How urgent what waits is.
    pub(crate) fn urgency(&self) -> Urgency {
        self.key.0
    }

    /// Waits until it is its turn.
    pub(crate) async fn turn(mut self) -> Turn {
        match (&mut self.turn).await {
            Ok(taken) => {
                let lapses = tokio::spawn(async move {
                    tokio::time::sleep(TURN_TIME_MAX).await;
                    drop(taken);
                });
                Turn(lapses.abort_handle())
            }
            Err(_) => unreachable!("a place is in line until it has had its turn or is dropped"),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.turns.line().waiting.remove(&self.key);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut line = self.0.line();
        line.free += 1;
        self.0.serve(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_turn_that_takes_too_long_holds_nobody_up() {
        let turns = Turns::at_once(1);
        let now = Instant::now();
        let first = turns.stand_in_line(Urgency::Call, now).turn().await;
        drop(turns.stand_in_line(Urgency::Call, now).turn().await);
        until_free(&turns).await;
        // It has been given back already, and is not twice.
        drop(first);
        let _second = turns.stand_in_line(Urgency::Call, now).turn().await;
        assert!(turns.all_taken());
    }

    #[tokio::test]
    async fn turns_are_given_in_the_order_in_which_they_were_asked_for() {
        let turns = Turns::at_once(1);
        assert!(!turns.any_taken());
        let now = Instant::now();
        let first = turns.stand_in_line(Urgency::Call, now).turn().await;
        assert!(turns.any_taken() && turns.all_taken());
        // It came later, and was asked for earlier.
        let mut third = turns.stand_in_line(Urgency::Call, now + Duration::from_millis(2));
        let mut second = turns.stand_in_line(Urgency::Call, now + Duration::from_millis(1));
        assert!(second.turn.try_recv().is_err());
        drop(first);
        let turn = second.turn().await;
        assert!(third.turn.try_recv().is_err());
        drop(turn);
        drop(third.turn().await);
        until_free(&turns).await;
    }

    #[tokio::test]
    async fn a_timer_goes_before_those_who_have_waited_for_longer() {
        let turns = Turns::at_once(1);
        let now = Instant::now();
        let first = turns.stand_in_line(Urgency::Call, now).turn().await;
        let mut call = turns.stand_in_line(Urgency::Call, now);
        let timer = turns.stand_in_line(Urgency::Timer, now + Duration::from_secs(1));
        drop(first);
        let turn = timer.turn().await;
        assert!(call.turn.try_recv().is_err());
        drop(turn);
        drop(call.turn().await);
        until_free(&turns).await;
    }

    #[tokio::test]
    async fn a_place_that_is_left_holds_nobody_up() {
        let turns = Turns::at_once(1);
        let now = Instant::now();
        // Its turn came before it was waited for.
        let first = turns.stand_in_line(Urgency::Call, now);
        let second = turns.stand_in_line(Urgency::Call, now);
        let mut third = turns.stand_in_line(Urgency::Call, now);
        drop(second);
        assert!(third.turn.try_recv().is_err());
        drop(first);
        drop(third.turn().await);
        until_free(&turns).await;
    }

    /// What is given back is free a moment later.
    async fn until_free(turns: &Turns) {
        while turns.any_taken() {
            tokio::task::yield_now().await;
        }
    }
}
