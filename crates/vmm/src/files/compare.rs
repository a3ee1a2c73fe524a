//! A copy that is brought up to date by what differs: the same two files are compared again and again, and mostly little of
//! them has changed. Comparing costs reading; only what differs is written, and told.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::fs::{FallocateFlags, fallocate};

use super::FileError;
use super::sparse::Extents;

/// Bytes that are told as one piece that has changed. Larger pieces pack better and need fewer names, smaller ones carry less
/// along that has not changed.
pub const PIECE: usize = 32 * 1024;

/// Bytes that are compared and written as one: a page of the guest's memory.
const PAGE: usize = 4096;

/// What bringing a copy up to date has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Compared {
    /// Numbers of the pieces of [`PIECE`] bytes that differed.
    pub pieces: BTreeSet<u32>,
    /// Bytes that differed, by whole pages.
    pub bytes: u64,
}

/// Makes `to` the same as `from`, holes staying holes where whole pieces are empty; makes `to` where there is none. `threads`
/// work on it at a time. Somebody may write `from` meanwhile: then some of `to` is newer than the rest, and a later call
/// makes good for it. Blocking.
///
/// # Errors
///
/// After an error `to` is neither the old nor the new, and what differed is not known.
pub fn bring_up_to_date(from: &Path, to: &Path, threads: usize) -> Result<Compared, FileError> {
    let source = File::open(from).map_err(|error| FileError::new("open", from, error))?;
    let target = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(to)
        .map_err(|error| FileError::new("open", to, error))?;
    let length = source.metadata().map_err(|error| FileError::new("look at", from, error))?.len();
    let before = target.metadata().map_err(|error| FileError::new("look at", to, error))?.len();
    if before != length {
        target.set_len(length).map_err(|error| FileError::new("set size of", to, error))?;
    }
    let mut places = BTreeSet::new();
    with_data(&source, &mut places).map_err(|error| FileError::new("find data in", from, error))?;
    with_data(&target, &mut places).map_err(|error| FileError::new("find data in", to, error))?;
    let places: Vec<u32> = places.into_iter().collect();
    let share = places.len().div_ceil(threads.max(1)).max(1);
    let found = std::thread::scope(|scope| {
        let parts: Vec<_> = places
            .chunks(share)
            .map(|part| scope.spawn(|| compare(&source, &target, part, length)))
            .collect();
        let joined = parts.into_iter().map(|part| match part.join() {
            Ok(found) => found,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.collect::<io::Result<Vec<_>>>()
    });
    let found = found.map_err(|error| FileError::new("compare and copy to", to, error))?;
    let mut all = Compared::default();
    for part in found {
        all.pieces.extend(part.pieces);
        all.bytes += part.bytes;
    }
    Ok(all)
}

/// Adds the pieces that are not whole holes.
fn with_data(file: &File, places: &mut BTreeSet<u32>) -> io::Result<()> {
    for extent in Extents::new(file) {
        let (start, end) = extent?;
        let Range { start, end } = start / PIECE as u64..end.div_ceil(PIECE as u64);
        let number = |place| u32::try_from(place).map_err(|_| io::ErrorKind::FileTooLarge);
        places.extend(number(start)?..number(end)?);
    }
    Ok(())
}

fn compare(source: &File, target: &File, places: &[u32], length: u64) -> io::Result<Compared> {
    let mut found = Compared::default();
    let (mut new, mut old) = (vec![0; PIECE], vec![0; PIECE]);
    for &place in places {
        let at = u64::from(place) * PIECE as u64;
        let bytes = usize::try_from(length - at).map_or(PIECE, |rest| rest.min(PIECE));
        let (new, old) = (&mut new[..bytes], &mut old[..bytes]);
        source.read_exact_at(new, at)?;
        target.read_exact_at(old, at)?;
        if new == old {
            continue;
        }
        found.pieces.insert(place);
        for (page, (new, old)) in new.chunks(PAGE).zip(old.chunks(PAGE)).enumerate() {
            if new != old {
                target.write_all_at(new, at + (page * PAGE) as u64)?;
                found.bytes += new.len() as u64;
            }
        }
        if is_zero(new) {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(target, flags, at, bytes as u64)?;
        }
    }
    Ok(found)
}

/// Whether there is nothing but zeros.
pub fn is_zero(bytes: &[u8]) -> bool {
    // A comparison with itself, moved by one, is one call of the C library's fast one.
    bytes.first().is_none_or(|first| *first == 0)
        && bytes.get(1..).is_none_or(|rest| rest == &bytes[..rest.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_follows_its_source_and_tells_what_differed() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        let file = File::create(&from).unwrap();
        file.set_len(40 * PIECE as u64 + 100).unwrap();
        file.write_all_at(&vec![7; 3 * PIECE], 5 * PIECE as u64).unwrap();
        file.write_all_at(b"end", 40 * PIECE as u64 + 97).unwrap();
        let first = bring_up_to_date(&from, &to, 2).unwrap();
        assert_eq!(first.pieces, BTreeSet::from([5, 6, 7, 40]));
        assert!(std::fs::read(&from).unwrap() == std::fs::read(&to).unwrap());
        assert_eq!(bring_up_to_date(&from, &to, 2).unwrap(), Compared::default());

        // A byte, a hole, and a file that became longer.
        file.write_all_at(&[8], 6 * PIECE as u64 + 9).unwrap();
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, flags, 5 * PIECE as u64, PIECE as u64).unwrap();
        file.set_len(41 * PIECE as u64).unwrap();
        let second = bring_up_to_date(&from, &to, 3).unwrap();
        assert_eq!(second.pieces, BTreeSet::from([5, 6]));
        assert_eq!(second.bytes, (PIECE + PAGE) as u64);
        assert!(std::fs::read(&from).unwrap() == std::fs::read(&to).unwrap());
        assert!(super::super::allocated_bytes(&to).unwrap() < 4 * PIECE as u64);

        file.set_len(6 * PIECE as u64).unwrap();
        bring_up_to_date(&from, &to, 1).unwrap();
        assert_eq!(std::fs::metadata(&to).unwrap().len(), 6 * PIECE as u64);
        assert!(std::fs::read(&from).unwrap() == std::fs::read(&to).unwrap());
    }

    #[test]
    fn zeros_are_told_from_what_ends_or_begins_otherwise() {
        assert!(is_zero(&[]) && is_zero(&[0]) && is_zero(&[0; 9000]));
        let mut bytes = [0; 9000];
        bytes[8999] = 1;
        assert!(!is_zero(&bytes) && !is_zero(&[1]));
        bytes[8999] = 0;
        bytes[0] = 1;
        assert!(!is_zero(&bytes));
    }
}
