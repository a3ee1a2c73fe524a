//! The timeline of a sandbox: one line of JSON per event in a file of its own.
//!
//! The host keeps it, not the catalogue, because the host is where things happen and a daemon killed between a wake and a
//! database must not forget the wake. Lines are appended, not synced: after a power cut the last ones may be missing, but
//! never a sandbox's state, which is the manifest's.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use api::{Event, SandboxId};
use serde_json::{Map, Value};
use tokio::sync::broadcast;

use crate::clock;

/// Events kept of one sandbox. When twice as many stand in the file, the older half is dropped.
pub const EVENTS_KEPT: u64 = 10_000;

/// The longest line that is read back; longer ones are damage.
const LINE_MAX: usize = 64 * 1024;

/// Events that a slow watcher may lag behind before it is told that it lost some.
pub const WATCH_BACKLOG: usize = 1024;

/// Writes a sandbox's events and tells those who watch.
pub struct Timeline {
    id: SandboxId,
    path: PathBuf,
    file: File,
    next: u64,
    first: u64,
    watchers: broadcast::Sender<Event>,
}

impl Timeline {
    /// Opens the file, made when missing; goes on counting where it ended.
    pub fn open(
        id: SandboxId,
        path: &Path,
        watchers: broadcast::Sender<Event>,
    ) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let (first, last) = span(path)?;
        let next = last + 1;
        let mut timeline = Self { id, path: path.to_owned(), file, next, first, watchers };
        timeline.end_torn_line()?;
        Ok(timeline)
    }

    /// Appends an event. A disk that is full must not stop a sandbox from being woken, so that is logged and the event is
    /// told to those who watch all the same.
    pub fn add(&mut self, kind: &str, text: impl Into<String>, data: Map<String, Value>) -> Event {
        let event = Event {
            seq: self.next,
            at: clock::rfc3339(clock::unix_ms()),
            sandbox_id: self.id.clone(),
            kind: format!("sandbox.{kind}"),
            text: text.into(),
            data,
        };
        self.next += 1;
        if let Err(error) = self.append(&event) {
            tracing::error!(sandbox = %self.id, %error, event = event.kind, "timeline not written");
        }
        // Nobody watching is fine.
        let _ = self.watchers.send(event.clone());
        event
    }

    fn append(&mut self, event: &Event) -> io::Result<()> {
        let mut line = serde_json::to_vec(event).map_err(io::Error::other)?;
        line.push(b'\n');
        self.file.write_all(&line)?;
        if self.next - self.first > 2 * EVENTS_KEPT {
            self.shorten()?;
        }
        Ok(())
    }

    /// Keeps the newer half.
    fn shorten(&mut self) -> io::Result<()> {
        let kept = read(&self.path, self.next - 1 - EVENTS_KEPT, usize::MAX)?;
        let new = self.path.with_extension("new");
        let mut file = File::create(&new)?;
        for event in &kept {
            serde_json::to_writer(&mut file, event)?;
            file.write_all(b"\n")?;
        }
        std::fs::rename(&new, &self.path)?;
        self.file = OpenOptions::new().append(true).open(&self.path)?;
        self.first = kept.first().map_or(self.next, |event| event.seq);
        Ok(())
    }

    /// A daemon killed while writing leaves half a line; the next event must not be glued to it.
    fn end_torn_line(&mut self) -> io::Result<()> {
        use std::io::{Seek, SeekFrom};
        let mut file = File::open(&self.path)?;
        let length = file.seek(SeekFrom::End(0))?;
        if length == 0 {
            return Ok(());
        }
        file.seek(SeekFrom::Start(length - 1))?;
        let mut last = [0];
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            self.file.write_all(b"\n")?;
        }
        Ok(())
    }
}

/// Events after `after`, oldest first, at most `limit`. Lines that are damaged are left out and logged.
pub fn read(path: &Path, after: u64, limit: usize) -> io::Result<Vec<Event>> {
    let mut events = Vec::new();
    let Some(mut lines) = Lines::open(path)? else { return Ok(events) };
    while events.len() < limit {
        let Some(line) = lines.next()? else { break };
        // Most lines are long past: their number is all that is read of them.
        if seq_of(line).is_some_and(|seq| seq <= after) {
            continue;
        }
        match serde_json::from_slice::<Event>(line) {
            Ok(event) if event.seq > after => events.push(event),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "damaged line in a timeline");
            }
        }
    }
    Ok(events)
}

/// Numbers of the first and the last event; (1, 0): there is none.
fn span(path: &Path) -> io::Result<(u64, u64)> {
    let (mut first, mut last) = (None, 0);
    let Some(mut lines) = Lines::open(path)? else { return Ok((1, 0)) };
    while let Some(line) = lines.next()? {
        // The last line may be torn: its number was never told to anybody.
        let whole = line.ends_with(b"}").then(|| seq_of(line)).flatten();
        if let Some(seq) = whole {
            first.get_or_insert(seq);
            last = seq;
        }
    }
    Ok((first.unwrap_or(last + 1), last))
}

/// The number with which each line begins, without reading the rest.
fn seq_of(line: &[u8]) -> Option<u64> {
    let rest = line.strip_prefix(b"{\"seq\":")?;
    let digits = rest.iter().position(|byte| !byte.is_ascii_digit())?;
    std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
}

/// Lines of a file, of which only one is held, and none that is longer than any should be.
struct Lines {
    file: BufReader<File>,
    line: Vec<u8>,
    path: PathBuf,
}

impl Lines {
    /// `None`: there is no such file.
    fn open(path: &Path) -> io::Result<Option<Self>> {
        match File::open(path) {
            Ok(file) => {
                let file = BufReader::new(file);
                Ok(Some(Self { file, line: Vec::new(), path: path.to_owned() }))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The next line that is not empty, without its end; `None`: that was the last.
    fn next(&mut self) -> io::Result<Option<&[u8]>> {
        loop {
            self.line.clear();
            let mut some = self.file.by_ref().take(LINE_MAX as u64);
            if some.read_until(b'\n', &mut self.line)? == 0 {
                return Ok(None);
            }
            if self.line.len() == LINE_MAX && !self.line.ends_with(b"\n") {
                tracing::warn!(path = %self.path.display(), "overlong line in a timeline");
                self.skip_line()?;
                continue;
            }
            if self.line.ends_with(b"\n") {
                self.line.pop();
            }
            if !self.line.is_empty() {
                break;
            }
        }
        Ok(Some(&self.line))
    }

    /// Goes on behind the next line end, holding nothing.
    fn skip_line(&mut self) -> io::Result<()> {
        loop {
            let some = self.file.fill_buf()?;
            if some.is_empty() {
                return Ok(());
            }
            let end = some.iter().position(|byte| *byte == b'\n');
            let used = end.map_or(some.len(), |end| end + 1);
            self.file.consume(used);
            if end.is_some() {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> SandboxId {
        SandboxId::from_random([7; 12])
    }

    #[test]
    fn counting_goes_on_after_a_torn_line() {
        let dir = tempfile::tempdir().expect("temp folder");
        let path = dir.path().join("events.jsonl");
        let (watchers, mut seen) = broadcast::channel(8);
        let mut timeline = Timeline::open(id(), &path, watchers.clone()).expect("open");
        timeline.add("created", "made", Map::new());
        timeline.add("slept", "slept", Map::new());
        drop(timeline);
        OpenOptions::new()
            .append(true)
            .open(&path)
            .and_then(|mut f| f.write_all(b"{\"seq\":3,\"at"))
            .expect("tear");
        let mut timeline = Timeline::open(id(), &path, watchers).expect("open again");
        assert_eq!(timeline.add("woke", "woke", Map::new()).seq, 3);
        let kinds: Vec<_> =
            read(&path, 1, 10).expect("read").into_iter().map(|event| event.kind).collect();
        assert_eq!(kinds, ["sandbox.slept", "sandbox.woke"]);
        assert_eq!(seen.try_recv().expect("told").kind, "sandbox.created");
    }

    #[test]
    fn the_file_is_bounded() {
        let dir = tempfile::tempdir().expect("temp folder");
        let path = dir.path().join("events.jsonl");
        let mut timeline = Timeline::open(id(), &path, broadcast::channel(1).0).expect("open");
        for _ in 0..=2 * EVENTS_KEPT {
            timeline.add("woke", "woke", Map::new());
        }
        let events = read(&path, 0, usize::MAX).expect("read");
        assert_eq!(events.len() as u64, EVENTS_KEPT);
        assert_eq!(events.last().map(|event| event.seq), Some(2 * EVENTS_KEPT + 1));
    }

    #[test]
    fn damage_costs_its_own_line_only() {
        let dir = tempfile::tempdir().expect("temp folder");
        let path = dir.path().join("events.jsonl");
        let (watchers, _) = broadcast::channel(8);
        let mut timeline = Timeline::open(id(), &path, watchers.clone()).expect("open");
        timeline.add("created", "made", Map::new());
        timeline.add("slept", "slept", Map::new());
        drop(timeline);
        let mut file = OpenOptions::new().append(true).open(&path).expect("opened");
        file.write_all(b"\n\nnonsense\n{\"seq\":3,\"at\":7}\n").expect("damaged");
        // Longer than is ever held.
        file.write_all(&vec![b'x'; 3 * LINE_MAX]).expect("damaged");
        file.write_all(b"\n").expect("damaged");
        let mut timeline = Timeline::open(id(), &path, watchers).expect("open again");
        let woke = timeline.add("woke", "woke", Map::new());
        let seqs = |after, limit| -> Vec<u64> {
            read(&path, after, limit).expect("read").iter().map(|event| event.seq).collect()
        };
        assert_eq!(seqs(0, 10), [1, 2, woke.seq]);
        assert_eq!(seqs(0, 2), [1, 2]);
        assert_eq!(seqs(2, 10), [woke.seq]);
        assert_eq!(seqs(woke.seq, 10), Vec::<u64>::new());
    }

    #[test]
    fn the_number_is_read_as_it_is_written() {
        let event = Event {
            seq: 1234,
            at: String::new(),
            sandbox_id: id(),
            kind: String::new(),
            text: String::new(),
            data: Map::new(),
        };
        assert_eq!(seq_of(&serde_json::to_vec(&event).expect("plain data")), Some(1234));
        for bad in [&b""[..], b"{}", b"{\"seq\":", b"{\"seq\":}", b"{\"seq\":12"] {
            assert_eq!(seq_of(bad), None, "{bad:?}");
        }
    }
}
