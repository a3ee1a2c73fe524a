//! The timeline of a sandbox: one line of JSON per event in a file of its own.
//!
//! The host keeps it, not the catalogue, because the host is where things happen and a daemon killed between a wake and a
//! database must not forget the wake. Lines are appended, not synced: after a power cut the last ones may be missing, but
//! never a sandbox's state, which is the manifest's.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
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
        let events = read(path, 0, usize::MAX)?;
        let first = events.first().map_or(1, |event| event.seq);
        let next = events.last().map_or(1, |event| event.seq + 1);
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
        use std::io::{Read, Seek, SeekFrom};
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
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut events = Vec::new();
    for line in BufReader::new(file).split(b'\n') {
        let line = line?;
        if line.is_empty() || events.len() >= limit {
            continue;
        }
        match serde_json::from_slice::<Event>(&line) {
            Ok(event) if line.len() <= LINE_MAX => {
                if event.seq > after {
                    events.push(event);
                }
            }
            Ok(_) => tracing::warn!(path = %path.display(), "overlong line in a timeline"),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "damaged line in a timeline");
            }
        }
    }
    Ok(events)
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
}
