//! Copies and holes: a memory file of 1 GiB has some 80 MiB in it, and only those should be read, written and kept.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, Mode, OFlags, SeekFrom, fallocate, ioctl_ficlone, seek};
use rustix::io::Errno;

use super::FileError;

/// What a copy did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copied {
    /// Bytes read and written. 0 when the file system shares the blocks.
    pub bytes: u64,
    /// The blocks are shared with the source (reflink) and split when one of the two is written.
    pub shared: bool,
}

/// Bytes that zeros are looked for in at once, and least size of a hole that is dug: the page size of all file systems in question.
const BLOCK: usize = 4096;
/// Bytes written at once when copying. With 4 KiB what follows is a little faster still, but the copy takes three times as long
/// as at once; with this half as long again.
const WRITTEN_AT_ONCE: usize = 16 * 1024;
/// Bytes read at once.
const CHUNK: usize = 1024 * 1024;

/// Copies a file, holes staying holes. The target must not exist. Shares the blocks where the file system can. Blocking.
pub fn copy_sparse(from: &Path, to: &Path) -> Result<Copied, FileError> {
    Copying::begin(from, to)?.finish()
}

/// A copy that has been begun: the target is there, and has its length.
#[derive(Debug)]
pub struct Copying {
    source: File,
    target: File,
    from: PathBuf,
    to: PathBuf,
    shared: bool,
}

impl Copying {
    /// Makes the target, which must not exist, as long as the source. Where the file system shares blocks nothing is left to do.
    pub fn begin(from: &Path, to: &Path) -> Result<Self, FileError> {
        let source = File::open(from).map_err(|error| FileError::new("open", from, error))?;
        let target = File::create_new(to).map_err(|error| FileError::new("create", to, error))?;
        let shared = match ioctl_ficlone(&target, &source) {
            Ok(()) => true,
            // Another file system, or one without reflinks.
            Err(
                Errno::OPNOTSUPP
                | Errno::XDEV
                | Errno::INVAL
                | Errno::NOTTY
                | Errno::NOSYS
                | Errno::PERM,
            ) => false,
            Err(errno) => return Err(FileError::new("share blocks with", to, errno)),
        };
        let length = source.metadata().map_err(|error| FileError::new("look at", from, error))?;
        target.set_len(length.len()).map_err(|error| FileError::new("set size of", to, error))?;
        Ok(Self { source, target, from: from.to_owned(), to: to.to_owned(), shared })
    }

    /// Copies the content. Blocking.
    pub fn finish(self) -> Result<Copied, FileError> {
        let Self { source, target, from, to, shared } = self;
        if shared {
            return Ok(Copied { bytes: 0, shared });
        }
        let mut bytes = 0;
        for extent in Extents::new(&source) {
            let (start, end) =
                extent.map_err(|error| FileError::new("find data in", &from, error))?;
            copy_extent(&source, &target, start, end)
                .map_err(|error| FileError::new("copy to", &to, error))?;
            bytes += end - start;
        }
        Ok(Copied { bytes, shared })
    }
}

/// Bytes of disk that a file takes, as opposed to its length.
pub fn allocated_bytes(path: &Path) -> Result<u64, FileError> {
    let metadata =
        std::fs::metadata(path).map_err(|error| FileError::new("look at", path, error))?;
    // `st_blocks` counts 512 bytes whatever the file system's block is.
    Ok(metadata.blocks() * 512)
}

/// Bytes of disk that a copy of a file in this folder takes at first: none where the file system shares blocks. Writes nothing.
/// Blocking.
pub fn bytes_to_copy(from: &Path, folder: &Path) -> Result<u64, FileError> {
    let source = File::open(from).map_err(|error| FileError::new("open", from, error))?;
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    // A file system without files that have no name has no reflinks either.
    let shares = rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR)
        .is_ok_and(|nameless| ioctl_ficlone(&nameless, &source).is_ok());
    if shares { Ok(0) } else { allocated_bytes(from) }
}

/// Gives blocks full of zeros back to the file system; the content stays the same. Returns the bytes given back. Nobody may write
/// the file meanwhile. Blocking.
pub fn dig_holes(path: &Path) -> Result<u64, FileError> {
    let file = File::options()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|error| FileError::new("open", path, error))?;
    let mut chunk = vec![0; CHUNK];
    let mut freed = 0;
    for extent in Extents::new(&file) {
        let (start, end) = extent.map_err(|error| FileError::new("find data in", path, error))?;
        let mut at = start;
        while at < end {
            let length = usize::try_from(end - at).map_or(CHUNK, |rest| rest.min(CHUNK));
            let part = &mut chunk[..length];
            file.read_exact_at(part, at).map_err(|error| FileError::new("read", path, error))?;
            freed += punch_zeros(&file, part, at)
                .map_err(|error| FileError::new("dig holes in", path, error))?;
            at += length as u64;
        }
    }
    Ok(freed)
}

/// In small pieces, so that the kernel keeps the target's pages in small pieces too: a guest that then writes to one has the
/// host write no more than that piece to its disk. Copied at once (`copy_file_range`), pieces grow up to 2 MiB; a guest that
/// had changed 300 pages since it woke had 3,000 written when it slept, which took twice as long.
fn copy_extent(source: &File, target: &File, start: u64, end: u64) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK];
    let mut at = start;
    while at < end {
        let length = usize::try_from(end - at).map_or(CHUNK, |rest| rest.min(CHUNK));
        source.read_exact_at(&mut chunk[..length], at)?;
        for (number, piece) in chunk[..length].chunks(WRITTEN_AT_ONCE).enumerate() {
            target.write_all_at(piece, at + (number * WRITTEN_AT_ONCE) as u64)?;
        }
        at += length as u64;
    }
    Ok(())
}

/// Punches the runs of zero blocks in `part`, which was read at `at`. The last block may be short: the file's end.
fn punch_zeros(file: &File, part: &[u8], at: u64) -> io::Result<u64> {
    let zero: Vec<bool> = part
        .chunks(BLOCK)
        .map(|block| block.len() == BLOCK && block.iter().all(|&byte| byte == 0))
        .collect();
    let mut freed = 0;
    let mut first = 0;
    while first < zero.len() {
        let length = zero[first..].iter().take_while(|&&is_zero| is_zero).count();
        if length > 0 {
            let (offset, bytes) = ((first * BLOCK) as u64, (length * BLOCK) as u64);
            fallocate(
                file,
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                at + offset,
                bytes,
            )?;
            freed += bytes;
        }
        first += length.max(1);
    }
    Ok(freed)
}

/// The parts of a file that are not holes.
pub(super) struct Extents<'a> {
    file: &'a File,
    at: u64,
}

impl<'a> Extents<'a> {
    pub(super) fn new(file: &'a File) -> Self {
        Self { file, at: 0 }
    }
}

impl Iterator for Extents<'_> {
    type Item = io::Result<(u64, u64)>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = match seek(self.file, SeekFrom::Data(self.at)) {
            Ok(start) => start,
            // No data behind `at`.
            Err(Errno::NXIO) => return None,
            Err(errno) => return Some(Err(errno.into())),
        };
        match seek(self.file, SeekFrom::Hole(start)) {
            Ok(end) => {
                self.at = end;
                Some(Ok((start, end)))
            }
            Err(errno) => Some(Err(errno.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of 8 MiB with data in its second and last MiB.
    fn sparse(path: &Path) -> Vec<u8> {
        let file = File::create(path).unwrap();
        file.set_len(8 << 20).unwrap();
        let data: Vec<u8> = (0..1 << 20).map(|at: u32| at.to_le_bytes()[0] | 1).collect();
        file.write_all_at(&data, 1 << 20).unwrap();
        file.write_all_at(&data, 7 << 20).unwrap();
        std::fs::read(path).unwrap()
    }

    #[test]
    fn a_copy_has_the_content_and_the_holes() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        let content = sparse(&from);
        let needed = bytes_to_copy(&from, folder.path()).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is written");
        let copied = copy_sparse(&from, &to).unwrap();
        assert_eq!(needed, if copied.shared { 0 } else { allocated_bytes(&from).unwrap() });
        assert!(copied.shared || copied.bytes == 2 << 20, "{copied:?}");
        assert!(std::fs::read(&to).unwrap() == content);
        assert!(allocated_bytes(&to).unwrap() <= (2 << 20) + 65536);
        assert_eq!(
            copy_sparse(&from, &to).unwrap_err().source.kind(),
            io::ErrorKind::AlreadyExists
        );
    }

    #[test]
    fn an_empty_file_and_one_that_is_all_hole_are_copied() {
        let folder = tempfile::tempdir().unwrap();
        for length in [0, 3 << 20] {
            let (from, to) = (
                folder.path().join(format!("from{length}")),
                folder.path().join(format!("to{length}")),
            );
            File::create(&from).unwrap().set_len(length).unwrap();
            copy_sparse(&from, &to).unwrap();
            assert_eq!(std::fs::metadata(&to).unwrap().len(), length);
            assert_eq!(allocated_bytes(&to).unwrap(), 0);
        }
    }

    #[test]
    fn zeros_become_holes_and_read_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        let mut content = vec![7; 3 << 20];
        content[1 << 20..2 << 20].fill(0);
        // A block that is zero but for its last byte must stay.
        content[BLOCK..2 * BLOCK].fill(0);
        content[2 * BLOCK - 1] = 1;
        content.extend_from_slice(&[0; 100]);
        std::fs::write(&path, &content).unwrap();
        let before = allocated_bytes(&path).unwrap();
        assert_eq!(dig_holes(&path).unwrap(), 1 << 20);
        assert!(allocated_bytes(&path).unwrap() <= before - (1 << 20));
        assert!(std::fs::read(&path).unwrap() == content);
        assert_eq!(dig_holes(&path).unwrap(), 0);
    }
}
