//! The newest events of all sandboxes, numbered in one row, so that a stream of all of them can go on where it was cut.
//!
//! Timelines are the hosts' and are durable; this is a window on all of them at once, in memory. A place in it is told as
//! `<journal>-<number>-<milliseconds>`. With the daemon the journal begins anew: a place in an earlier one is not found, but
//! says since when it lacks something, which the timelines have ([`Place::since`]). Whoever comes with a place that says
//! nothing is told so ([`Piece::Lost`]) instead of being sent on as if nothing were missing.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use api::Event;
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::watch;

use crate::App;
use crate::failure::Failure;

/// Events that are kept: some MiB, and an hour of a busy host. A client that is further behind has lost some.
pub(crate) const EVENTS_KEPT: usize = 10_000;

/// Most entries that are taken out at a time.
const BATCH_MAX: usize = 256;

/// See the module.
pub(crate) struct Journal {
    name: u32,
    ring: Mutex<Ring>,
    newest: watch::Sender<u64>,
}

#[derive(Default)]
struct Ring {
    /// What was lost before it came here stands as a number of events.
    entries: VecDeque<Result<Event, u64>>,
    /// Number of the newest entry; 0: there is none yet.
    newest: u64,
}

/// A place in a journal: after this entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    journal: u32,
    number: u64,
    /// When the entry was made, milliseconds since 1970; 0: not told.
    at_ms: u64,
}

impl Place {
    /// A place in no journal: after all that happened until then.
    pub(crate) fn at(event: &Event) -> Self {
        Self { journal: 0, number: 0, at_ms: unix_ms(&event.at) }
    }

    /// Whether it is one of a journal, and not of a timeline.
    pub(crate) fn is_in_journal(&self) -> bool {
        self.number > 0
    }

    /// Since when something may be lacking, milliseconds since 1970.
    pub(crate) fn since(&self) -> Option<u64> {
        (self.at_ms > 0).then_some(self.at_ms)
    }
}

/// What comes next.
#[derive(Debug, PartialEq)]
pub(crate) enum Piece {
    /// An event, and the place after it.
    Event(Box<Event>, Place),
    /// Some are missing here: how many, where that is known.
    Lost(Option<u64>, Place),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}-{}-{}", self.journal, self.number, self.at_ms)
    }
}

impl FromStr for Place {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (journal, rest) = text.split_once('-').ok_or(())?;
        // Those of earlier versions end with the number.
        let (number, at_ms) = rest.split_once('-').unwrap_or((rest, "0"));
        let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if journal.len() != 8 || !is_number(number) || !is_number(at_ms) {
            return Err(());
        }
        let journal = u32::from_str_radix(journal, 16).map_err(drop)?;
        let number = number.parse().map_err(drop)?;
        Ok(Self { journal, number, at_ms: at_ms.parse().map_err(drop)? })
    }
}

impl Journal {
    /// An empty one, under a name of its own.
    pub(crate) fn new() -> Result<Self, Failure> {
        let mut name = [0; 4];
        getrandom::fill(&mut name).map_err(Failure::internal("name the journal"))?;
        let name = u32::from_be_bytes(name);
        Ok(Self { name, ring: Mutex::default(), newest: watch::channel(0).0 })
    }

    /// After the newest entry.
    pub(crate) fn end(&self) -> Place {
        self.place(self.ring().newest, now_ms())
    }

    /// Whether it can go on from a place, or says itself what is missing.
    pub(crate) fn knows(&self, place: Place) -> bool {
        place.journal == self.name && place.number <= self.ring().newest
    }

    /// Tells of new entries.
    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    /// What stands after a place, oldest first; empty: nothing yet.
    pub(crate) fn after(&self, place: Place) -> Vec<Piece> {
        let ring = self.ring();
        let oldest = ring.newest - ring.entries.len() as u64;
        if place.journal != self.name || place.number > ring.newest {
            return vec![Piece::Lost(None, self.place(oldest, now_ms()))];
        }
        if place.number < oldest {
            return vec![Piece::Lost(Some(oldest - place.number), self.place(oldest, place.at_ms))];
        }
        // Within the ring, so it fits.
        let skip = usize::try_from(place.number - oldest).unwrap_or(usize::MAX);
        let numbered = ring.entries.iter().zip(oldest + 1..).skip(skip).take(BATCH_MAX);
        numbered
            .map(|(entry, number)| match entry {
                Ok(event) => {
                    let place = self.place(number, unix_ms(&event.at));
                    Piece::Event(Box::new(event.clone()), place)
                }
                Err(missing) => Piece::Lost(Some(*missing), self.place(number, now_ms())),
            })
            .collect()
    }

    fn add(&self, entry: Result<Event, u64>) {
        let mut ring = self.ring();
        if ring.entries.len() == EVENTS_KEPT {
            ring.entries.pop_front();
        }
        ring.entries.push_back(entry);
        ring.newest += 1;
        self.newest.send_replace(ring.newest);
    }

    fn place(&self, number: u64, at_ms: u64) -> Place {
        Place { journal: self.name, number, at_ms }
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An event's time; 0: it has none that can be read.
pub(crate) fn unix_ms(at: &str) -> u64 {
    let time = at.parse::<jiff::Timestamp>();
    time.ok().and_then(|time| u64::try_from(time.as_millisecond()).ok()).unwrap_or(0)
}

pub(crate) fn now_ms() -> u64 {
    u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or(0)
}

/// Writes the journal until the host or the server ends.
pub(crate) async fn keep(app: App, mut events: broadcast::Receiver<Event>) {
    let stop = app.stop().clone();
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = stop.cancelled() => return,
        };
        let entry = match event {
            Ok(event) => {
                app.machines().hear(&event);
                app.metrics().event(&event);
                Ok(event)
            }
            Err(RecvError::Lagged(missing)) => {
                app.metrics().lost(missing);
                tracing::warn!(missing, "the journal of events has gaps");
                Err(missing)
            }
            Err(RecvError::Closed) => return,
        };
        app.journal().add(entry);
    }
}

#[cfg(test)]
mod tests {
    use api::SandboxId;

    use super::*;

    fn event(seq: u64) -> Event {
        Event {
            seq,
            at: String::new(),
            sandbox_id: SandboxId::from_random([7; 12]),
            kind: "sandbox.woke".to_owned(),
            text: String::new(),
            data: serde_json::Map::new(),
        }
    }

    fn told(pieces: &[Piece]) -> Vec<Result<u64, Option<u64>>> {
        let told = pieces.iter().map(|piece| match piece {
            Piece::Event(event, _) => Ok(event.seq),
            Piece::Lost(missing, _) => Err(*missing),
        });
        told.collect()
    }

    #[test]
    fn it_goes_on_after_any_place_it_still_has() {
        let journal = Journal::new().unwrap();
        let begin = journal.end();
        for seq in 1..=3 {
            journal.add(Ok(event(seq)));
        }
        let pieces = journal.after(begin);
        assert_eq!(told(&pieces), [Ok(1), Ok(2), Ok(3)]);
        let Piece::Event(_, second) = &pieces[1] else { panic!("{pieces:?}") };
        let again: Place = second.to_string().parse().unwrap();
        assert_eq!(told(&journal.after(again)), [Ok(3)]);
        assert_eq!(told(&journal.after(journal.end())), []);
    }

    #[test]
    fn what_is_lost_is_told() {
        let journal = Journal::new().unwrap();
        let begin = journal.end();
        for seq in 1..=EVENTS_KEPT as u64 + 5 {
            journal.add(Ok(event(seq)));
        }
        let pieces = journal.after(begin);
        assert_eq!(told(&pieces), [Err(Some(5))]);
        let Piece::Lost(_, next) = pieces[0] else { panic!("{pieces:?}") };
        assert_eq!(told(&journal.after(next))[0], Ok(6));

        journal.add(Err(9));
        let before = journal.place(journal.end().number - 1, 0);
        assert_eq!(told(&journal.after(before)), [Err(Some(9))]);

        let foreign = Place { journal: journal.name.wrapping_add(1), number: 3, at_ms: 5 };
        assert!(!journal.knows(foreign) && journal.knows(journal.end()));
        assert_eq!(foreign.since(), Some(5));
        assert_eq!(told(&journal.after(foreign)), [Err(None)]);
        let future = Place { number: journal.end().number + 1, ..journal.end() };
        assert_eq!(told(&journal.after(future)), [Err(None)]);
    }

    #[test]
    fn places_are_read_in_one_way_only() {
        let place: Place = "0000001f-7-1796000000123".parse().unwrap();
        assert_eq!(
            (place.to_string().as_str(), place.since()),
            ("0000001f-7-1796000000123", Some(1_796_000_000_123))
        );
        let earlier: Place = "0000001f-7".parse().unwrap();
        assert_eq!(earlier.since(), None);
        for bad in [
            "",
            "7",
            "00000001-1-",
            "00000001-1-+1",
            "00000001-1-1-1",
            "abc-7",
            "0000000g-1",
            "00000001-",
            "00000001-+1",
            "00000001--1",
        ] {
            assert_eq!(bad.parse::<Place>(), Err(()), "{bad}");
        }
    }
}
