//! The output of one exec: everything it printed, by offset, within bounds.
//!
//! Records (`stream`, `length`, bytes) go into segments in the order in which they were read, so both streams can be read
//! back together as they came. The first segment is in memory, which is where the output of most execs stays; a longer one
//! goes to files, and when the whole is over [`KEPT_MAX`] the oldest segment is dropped and the start moves on. The program is
//! never made to wait, not even by a full disk.

use std::{
    collections::VecDeque,
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::FileExt,
    path::PathBuf,
};

use wire::{OutputChunk, OutputFrom, Stream};

/// Bytes of records in memory before they go to disk, for each exec that is kept.
pub(crate) const MEMORY_MAX: usize = 32 * 1024;
/// Bytes of records in one file.
pub(crate) const SEGMENT_MAX: usize = 4 * 1024 * 1024;
/// Bytes of records kept of one exec.
pub(crate) const KEPT_MAX: usize = 64 * 1024 * 1024;
/// Bytes before a record's own.
const RECORD_HEADER: usize = 5;

/// What one exec printed.
#[derive(Debug)]
pub(crate) struct OutputLog {
    folder: PathBuf,
    segments: VecDeque<Segment>,
    number_next: u64,
    end: OutputFrom,
    discarded: bool,
}

#[derive(Debug)]
struct Segment {
    number: u64,
    start: OutputFrom,
    end: OutputFrom,
    bytes: usize,
    records: Records,
}

#[derive(Debug)]
enum Records {
    Memory(Vec<u8>),
    File { file: File, path: PathBuf },
}

/// A reader's place.
#[derive(Debug)]
pub(crate) struct Cursor {
    wanted: [Option<u64>; 2],
    segment: u64,
    position: usize,
    at: OutputFrom,
}

impl Cursor {
    /// Reads stdout and stderr, each from an offset if at all.
    pub(crate) fn new(stdout: Option<u64>, stderr: Option<u64>) -> Self {
        Self { wanted: [stdout, stderr], segment: 0, position: 0, at: OutputFrom::default() }
    }

    /// Whether all that is wanted was read up to `end`.
    pub(crate) fn reached(&self, end: OutputFrom) -> bool {
        let reached = |at: Option<u64>, end| at.is_none_or(|at| at >= end);
        reached(self.wanted[0], end.stdout) && reached(self.wanted[1], end.stderr)
    }
}

impl OutputLog {
    /// A log that will keep its files in `folder`, which is made when the first is needed.
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            segments: VecDeque::new(),
            number_next: 0,
            end: OutputFrom::default(),
            discarded: false,
        }
    }

    /// The oldest output kept.
    pub(crate) fn start(&self) -> OutputFrom {
        self.segments.front().map_or(self.end, |segment| segment.start)
    }

    /// Where the output ends so far.
    pub(crate) fn end(&self) -> OutputFrom {
        self.end
    }

    /// Adds what was read from a stream. Whatever cannot be kept is counted all the same.
    pub(crate) fn append(&mut self, stream: Stream, bytes: &[u8]) {
        let Ok(length) = u32::try_from(bytes.len()) else { return };
        if bytes.is_empty() {
            return;
        }
        if !self.discarded {
            let mut record = Vec::with_capacity(RECORD_HEADER + bytes.len());
            record.push(u8::from(stream == Stream::Stderr));
            record.extend_from_slice(&length.to_le_bytes());
            record.extend_from_slice(bytes);
            if let Err(error) = self.store(&record) {
                eprintln!("keep output in {}: {error}", self.folder.display());
                self.clear();
            }
        }
        *side(&mut self.end, stream) += u64::from(length);
        if let Some(segment) = self.segments.back_mut() {
            segment.end = self.end;
        }
    }

    /// Drops all output and keeps none from now on.
    pub(crate) fn discard(&mut self) {
        self.clear();
        self.discarded = true;
        // Its files are gone; an empty folder that stays is removed at the next boot.
        let _stays = fs::remove_dir(&self.folder);
    }

    /// The next piece that the cursor wants, if there is one.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub(crate) fn read(&self, cursor: &mut Cursor) -> io::Result<Option<OutputChunk>> {
        loop {
            let Some(front) = self.segments.front() else { return Ok(None) };
            let Some(ahead) = cursor.segment.checked_sub(front.number) else {
                // Never seen, or dropped meanwhile.
                cursor.enter(front);
                continue;
            };
            if cursor.segment == front.number && cursor.position == 0 {
                cursor.enter(front);
            }
            let index = usize::try_from(ahead).unwrap_or(usize::MAX);
            let Some(segment) = self.segments.get(index) else { return Ok(None) };
            let through = cursor.reached(segment.end);
            if through || cursor.position >= segment.bytes {
                let Some(next) = self.segments.get(index + 1) else { return Ok(None) };
                cursor.enter(next);
                continue;
            }
            let mut header = [0; RECORD_HEADER];
            segment.records.read(cursor.position, &mut header)?;
            let [is_stderr, length @ ..] = header;
            let length = u32::from_le_bytes(length) as usize;
            let stream = if is_stderr == 0 { Stream::Stdout } else { Stream::Stderr };
            let begin = cursor.position + RECORD_HEADER;
            let offset = *side(&mut cursor.at, stream);
            cursor.position = begin + length;
            *side(&mut cursor.at, stream) += length as u64;
            let end = offset + length as u64;
            let Some(wanted) = &mut cursor.wanted[usize::from(is_stderr != 0)] else { continue };
            if *wanted >= end {
                continue;
            }
            let from = offset.max(*wanted);
            *wanted = end;
            let skip = usize::try_from(from - offset).unwrap_or(length);
            let mut bytes = vec![0; length - skip];
            segment.records.read(begin + skip, &mut bytes)?;
            return Ok(Some(OutputChunk { stream, offset: from, bytes }));
        }
    }

    fn store(&mut self, record: &[u8]) -> io::Result<()> {
        let room = self.segments.back().is_some_and(|segment| match segment.records {
            Records::Memory(_) => true,
            Records::File { .. } => segment.bytes + record.len() <= SEGMENT_MAX,
        });
        if !room {
            // Only the first segment begins in memory.
            let records = if self.number_next == 0 || self.segments.is_empty() {
                Records::Memory(Vec::new())
            } else {
                self.file(self.number_next)?
            };
            self.segments.push_back(Segment {
                number: self.number_next,
                start: self.end,
                end: self.end,
                bytes: 0,
                records,
            });
            self.number_next += 1;
        }
        let spill = self.segments.back().filter(|segment| {
            matches!(segment.records, Records::Memory(_))
                && segment.bytes + record.len() > MEMORY_MAX
        });
        if let Some(segment) = spill {
            let file = self.file(segment.number)?;
            if let Some(segment) = self.segments.back_mut()
                && let Records::Memory(bytes) = std::mem::replace(&mut segment.records, file)
            {
                segment.records.append(&bytes)?;
            }
        }
        if let Some(segment) = self.segments.back_mut() {
            segment.records.append(record)?;
            segment.bytes += record.len();
        }
        while self.segments.len() > 1
            && self.segments.iter().map(|segment| segment.bytes).sum::<usize>() > KEPT_MAX
        {
            self.drop_oldest();
        }
        Ok(())
    }

    fn file(&self, number: u64) -> io::Result<Records> {
        fs::create_dir_all(&self.folder)?;
        let path = self.folder.join(number.to_string());
        let file = File::options().read(true).append(true).create_new(true).open(&path)?;
        Ok(Records::File { file, path })
    }

    fn clear(&mut self) {
        while !self.segments.is_empty() {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        if let Some(segment) = self.segments.pop_front()
            && let Records::File { path, .. } = segment.records
            && let Err(error) = fs::remove_file(&path)
        {
            eprintln!("remove {}: {error}", path.display());
        }
    }
}

impl Cursor {
    fn enter(&mut self, segment: &Segment) {
        self.segment = segment.number;
        self.position = 0;
        self.at = segment.start;
    }
}

impl Records {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Memory(kept) => kept.extend_from_slice(bytes),
            Self::File { file, .. } => file.write_all(bytes)?,
        }
        Ok(())
    }

    fn read(&self, at: usize, into: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Memory(kept) => {
                let found = kept.get(at..at + into.len());
                into.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
                Ok(())
            }
            Self::File { file, .. } => file.read_exact_at(into, at as u64),
        }
    }
}

fn side(offsets: &mut OutputFrom, stream: Stream) -> &mut u64 {
    match stream {
        Stream::Stdout => &mut offsets.stdout,
        Stream::Stderr => &mut offsets.stderr,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> (tempfile::TempDir, OutputLog) {
        let folder = tempfile::tempdir().expect("temp dir");
        let log = OutputLog::new(folder.path().join("log"));
        (folder, log)
    }

    fn all(log: &OutputLog, cursor: &mut Cursor) -> Vec<OutputChunk> {
        std::iter::from_fn(|| log.read(cursor).expect("readable")).collect()
    }

    fn text(chunks: &[OutputChunk]) -> String {
        let one = |chunk: &OutputChunk| {
            let name = if chunk.stream == Stream::Stdout { "out" } else { "err" };
            format!("{name}@{}:{} ", chunk.offset, String::from_utf8_lossy(&chunk.bytes))
        };
        chunks.iter().map(one).collect::<Vec<_>>().concat()
    }

    #[test]
    fn both_streams_come_back_in_order_and_from_any_offset() {
        let (_folder, mut log) = log();
        log.append(Stream::Stdout, b"abc");
        log.append(Stream::Stderr, b"XY");
        log.append(Stream::Stdout, b"def");
        let read = |stdout, stderr| text(&all(&log, &mut Cursor::new(stdout, stderr)));
        assert_eq!(read(Some(0), Some(0)), "out@0:abc err@0:XY out@3:def ");
        assert_eq!(read(Some(4), None), "out@4:ef ");
        assert_eq!(read(None, Some(1)), "err@1:Y ");
        assert_eq!(read(Some(99), Some(99)), "");
        assert!(!log.folder.exists(), "little output needs no file");
    }

    #[test]
    fn a_reader_at_the_end_sees_what_comes_later_also_across_the_move_to_disk() {
        let (_folder, mut log) = log();
        let mut cursor = Cursor::new(Some(0), Some(0));
        let mut expected = 0;
        for n in 0..100_u8 {
            let bytes = vec![n; 1000];
            log.append(Stream::Stdout, &bytes);
            let chunks = all(&log, &mut cursor);
            assert_eq!(chunks, [OutputChunk { stream: Stream::Stdout, offset: expected, bytes }]);
            expected += 1000;
        }
        assert!(log.folder.exists());
        assert!(cursor.reached(log.end()));
    }

    #[test]
    fn the_oldest_output_is_dropped_and_the_gap_shows_in_the_offset() {
        let (_folder, mut log) = log();
        let mut early = Cursor::new(Some(0), None);
        log.append(Stream::Stdout, b"first");
        assert_eq!(all(&log, &mut early).len(), 1);
        let piece = vec![7; 30_000];
        for _ in 0..3_000 {
            log.append(Stream::Stdout, &piece);
        }
        let start = log.start().stdout;
        let kept = log.end().stdout - start;
        assert!(start > 5 && kept <= KEPT_MAX as u64, "{start} {kept}");
        assert!(kept > (KEPT_MAX - 2 * SEGMENT_MAX) as u64, "{kept}");
        let files = fs::read_dir(&log.folder).expect("folder").count();
        assert!(files <= KEPT_MAX / SEGMENT_MAX + 1, "{files} files");
        for mut cursor in [early, Cursor::new(Some(0), None)] {
            let first = log.read(&mut cursor).expect("readable").expect("some");
            assert_eq!(first.offset, start);
            let rest: u64 =
                all(&log, &mut cursor).iter().map(|chunk| chunk.bytes.len() as u64).sum();
            assert_eq!(first.bytes.len() as u64 + rest, kept);
        }
        log.discard();
        assert!(!log.folder.exists());
    }

    #[test]
    fn a_log_that_cannot_be_written_loses_output_but_counts_on() {
        let folder = tempfile::tempdir().expect("temp dir");
        let blocked = folder.path().join("file");
        fs::write(&blocked, "").expect("write");
        let mut log = OutputLog::new(blocked.join("below a file"));
        for _ in 0..3 {
            log.append(Stream::Stdout, &vec![1; 20_000]);
        }
        assert_eq!(log.end().stdout, 60_000);
        let chunks = all(&log, &mut Cursor::new(Some(0), None));
        let last = chunks.last().expect("the newest is in memory again");
        assert_eq!(last.offset + last.bytes.len() as u64, 60_000);
    }
}
