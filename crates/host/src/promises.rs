//! Room on the host's disk that was promised to copies that are being made: each alone would find room, all together would
//! not, and a running guest that finds none for a page of its memory dies of it.
//!
//! Whoever copies asks for a [`Promise`] first and keeps it until the copy is there or has failed. From then on what was
//! written is no longer free, and counts by itself. Promised are copies alone, not what running guests write meanwhile:
//! that is what the least that is left is for.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm::files::{allocated_bytes, bytes_to_copy};

use crate::ground::free_bytes;

/// What is promised on one file system.
#[derive(Clone, Debug)]
pub(crate) struct Promises {
    dir: PathBuf,
    given: Arc<Mutex<Given>>,
}

#[derive(Debug, Default)]
struct Given {
    next: u64,
    by: HashMap<u64, Entry>,
}

/// One promise.
#[derive(Debug)]
struct Entry {
    bytes: u64,
    /// Folders in which nothing was before: what is in them was written of the promise already.
    into: Vec<PathBuf>,
}

/// Room for so many bytes; given back when dropped.
#[derive(Debug)]
#[must_use = "the room is given back when this is dropped"]
pub(crate) struct Promise {
    of: Promises,
    number: u64,
}

/// Why there is no room.
#[derive(Debug, thiserror::Error)]
pub enum NoRoom {
    /// Nobody knows how much is free.
    #[error("free space is not known")]
    Unknown(#[from] io::Error),
    /// Too little is free beside what is promised to others.
    #[error("{}", words(*free, *promised, *bytes, *least_left))]
    Short {
        /// Free bytes.
        free: u64,
        /// Bytes of those that others will write.
        promised: u64,
        /// Bytes that are wanted.
        bytes: u64,
        /// Bytes that must be left beside.
        least_left: u64,
    },
}

fn words(free: u64, promised: u64, bytes: u64, least_left: u64) -> String {
    let wanted = bytes.saturating_add(least_left) >> 20;
    let others = match promised >> 20 {
        0 => String::new(),
        mib => format!(" ({mib} of them promised to copies that are being made)"),
    };
    let spare =
        if bytes == 0 { String::new() } else { format!(", {} of them to spare", least_left >> 20) };
    format!("{} MiB are free on the disk{others}, {wanted} are needed{spare}", free >> 20)
}

impl Promises {
    /// Of the file system on which this folder lies.
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir, given: Arc::default() }
    }

    /// Promises room for so many bytes, if so many are left beside them and all that is promised to others.
    pub(crate) fn promise(&self, bytes: u64, least_left: u64) -> Result<Promise, NoRoom> {
        self.promise_of(|| free_bytes(&self.dir), bytes, least_left)
    }

    /// Bytes that are free and promised to nobody.
    pub(crate) fn free(&self) -> io::Result<u64> {
        // In this order: what is written in between counts twice rather than not at all.
        let promised = self.given().promised();
        Ok(free_bytes(&self.dir)?.saturating_sub(promised))
    }

    /// Refuses where less than this would be left beside what is promised.
    pub(crate) fn check(&self, least_left: u64) -> Result<(), NoRoom> {
        let promised = self.given().promised();
        is_enough(free_bytes(&self.dir)?, promised, 0, least_left)
    }

    fn promise_of(
        &self,
        free: impl FnOnce() -> io::Result<u64>,
        bytes: u64,
        least_left: u64,
    ) -> Result<Promise, NoRoom> {
        let mut given = self.given();
        let promised = given.promised();
        is_enough(free()?, promised, bytes, least_left)?;
        let number = given.next;
        given.next += 1;
        given.by.insert(number, Entry { bytes, into: Vec::new() });
        Ok(Promise { of: self.clone(), number })
    }

    fn given(&self) -> MutexGuard<'_, Given> {
        // Nothing under this lock can leave it half changed.
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Given {
    /// What is still to be written of all promises.
    fn promised(&self) -> u64 {
        self.by.values().map(Entry::to_come).fold(0, u64::saturating_add)
    }
}

impl Entry {
    fn to_come(&self) -> u64 {
        let written = self.into.iter().map(|dir| stored_in(dir)).fold(0, u64::saturating_add);
        self.bytes.saturating_sub(written)
    }
}

impl Promise {
    /// This folder, in which nothing is yet, is where some of it is written. What nobody says counts as not written before the
    /// whole promise is given back.
    pub(crate) fn is_for(&self, dir: &Path) {
        if let Some(entry) = self.of.given().by.get_mut(&self.number) {
            entry.into.push(dir.to_owned());
        }
    }

    /// Room for so many bytes in place of what it was for, of which what is written counts by itself. Where there is none it is
    /// as it was.
    pub(crate) fn renew(&mut self, bytes: u64, least_left: u64) -> Result<(), NoRoom> {
        let mut given = self.of.given();
        let others = given.by.iter().filter(|(number, _)| **number != self.number);
        let promised = others.map(|(_, other)| other.to_come()).fold(0, u64::saturating_add);
        is_enough(free_bytes(&self.of.dir)?, promised, bytes, least_left)?;
        given.by.insert(self.number, Entry { bytes, into: Vec::new() });
        Ok(())
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.of.given().by.remove(&self.number);
    }
}

fn is_enough(free: u64, promised: u64, bytes: u64, least_left: u64) -> Result<(), NoRoom> {
    if free.saturating_sub(promised) >= bytes.saturating_add(least_left) {
        return Ok(());
    }
    Err(NoRoom::Short { free, promised, bytes, least_left })
}

/// Bytes that copies of these files, one of each, take in this folder: none where the file system shares blocks.
pub(crate) async fn bytes_to_copy_all(parts: Vec<PathBuf>, dir: PathBuf) -> u64 {
    let needed = tokio::task::spawn_blocking(move || {
        // What is not there (a memory, where it is off) takes nothing.
        let bytes = parts.iter().map(|part| bytes_to_copy(part, &dir).unwrap_or(0));
        bytes.fold(0, u64::saturating_add)
    });
    // The task panics or is cancelled only when the daemon goes down.
    needed.await.unwrap_or_else(|gone| std::panic::resume_unwind(gone.into_panic()))
}

/// Bytes of disk that the files in a folder take. What cannot be looked at is taken as not written.
fn stored_in(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    let files =
        entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
    files.map(|file| allocated_bytes(&file.path()).unwrap_or(0)).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn ledger(dir: &Path) -> Promises {
        Promises::new(dir.to_owned())
    }

    #[test]
    fn of_many_that_ask_at_once_only_as_many_as_fit_are_promised_room() {
        let promises = ledger(Path::new("/nonexistent"));
        let (all, begin) = (16, Barrier::new(16));
        let kept: Vec<_> = std::thread::scope(|scope| {
            let ask = || {
                begin.wait();
                promises.promise_of(|| Ok(480 * MIB), 60 * MIB, 256 * MIB)
            };
            let asked: Vec<_> = (0..all).map(|_| scope.spawn(ask)).collect();
            asked.into_iter().map(|one| one.join().expect("no panic")).collect()
        });
        // 480 - 3 * 60 = 300; a fourth would leave 240.
        assert_eq!(kept.iter().filter(|one| one.is_ok()).count(), 3);
        let refused = kept.iter().find_map(|one| one.as_ref().err()).expect("refused");
        assert!(matches!(refused, NoRoom::Short { .. }), "{refused:?}");
    }

    #[test]
    fn a_promise_that_is_dropped_gives_its_room_back() {
        let promises = ledger(Path::new("/nonexistent"));
        let ask = || promises.promise_of(|| Ok(400 * MIB), 100 * MIB, 256 * MIB);
        let first = ask().expect("room");
        let refused = ask().expect_err("promised");
        assert_eq!(
            refused.to_string(),
            "400 MiB are free on the disk (100 of them promised to copies that are being made), 356 are needed, 256 of them to spare"
        );
        drop(first);
        drop(ask().expect("room again"));
        assert!(promises.given().by.is_empty());
    }

    #[test]
    fn what_is_written_of_a_promise_is_not_counted_twice() {
        let dir = tempfile::tempdir().expect("a folder");
        let promises = ledger(dir.path());
        let promise = promises.promise_of(|| Ok(400 * MIB), 100 * MIB, 256 * MIB).expect("room");
        assert_eq!(promises.given().promised(), 100 * MIB);
        let into = dir.path().join("copy");
        promise.is_for(&into);
        assert_eq!(promises.given().promised(), 100 * MIB, "the folder is not there yet");
        std::fs::create_dir(&into).expect("a folder");
        let bytes = vec![1; 3 << 20];
        std::fs::write(into.join("memory"), &bytes).expect("written");
        assert_eq!(promises.given().promised(), 97 * MIB);
        std::fs::write(into.join("disk"), vec![1; 98 << 20]).expect("written");
        assert_eq!(promises.given().promised(), 0, "more was written than was promised");
    }

    #[test]
    fn a_promise_is_renewed_beside_those_of_others_and_stays_where_there_is_no_room() {
        let dir = tempfile::tempdir().expect("a folder");
        let promises = ledger(dir.path());
        let free = free_bytes(dir.path()).expect("known");
        let _other = promises.promise_of(|| Ok(free), free / 4, 0).expect("room");
        let mut promise = promises.promise_of(|| Ok(free), free / 4, 0).expect("room");
        promise.renew(u64::MAX, 0).expect_err("too much");
        assert_eq!(promises.given().promised(), free / 4 * 2);
        promise.renew(MIB, 0).expect("less");
        assert_eq!(promises.given().promised(), free / 4 + MIB);
    }

    #[test]
    fn what_nobody_knows_is_an_error() {
        let promises = ledger(Path::new("/nonexistent"));
        assert!(matches!(promises.promise(1, 0), Err(NoRoom::Unknown(_))));
        assert!(promises.free().is_err());
        assert!(promises.given().by.is_empty());
    }
}
