//! Forks of one moment are there all or none, whenever the daemon dies.
//!
//! Each fork is published by its own manifest, so several are published one after the other. Before the first is, their ids are
//! written down in one note; once the last is, the note is removed. That removal is the moment at which all of them exist: none is
//! started, and nobody hears of them, before it. A daemon that starts and finds a note undoes what there is of the forks it names.
//!
//! ```text
//! <data>/fork-sets/<id of the first>.json
//! ```

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use api::SandboxId;
use serde::{Deserialize, Serialize};
use vmm::files::{FileError, replace, sync_folder};

use crate::sandbox::work::chain;

/// The format this build writes and reads.
const FORMAT: u32 = 1;

/// Most bytes of a note: 16 ids take some 300.
const BYTES_MAX: u64 = 64 * 1024;

#[derive(Debug, Serialize, Deserialize)]
struct Note {
    format: u32,
    forks: Vec<SandboxId>,
}

/// Forks that are there all or none. While this lives they are none.
#[derive(Debug)]
pub(crate) struct ForkSet {
    path: PathBuf,
}

impl ForkSet {
    /// From here on, until it is [closed](Self::close), a daemon that starts undoes them. One fork alone needs no note.
    pub(crate) async fn open(
        dir: PathBuf,
        forks: Vec<SandboxId>,
    ) -> Result<Option<Self>, FileError> {
        let Some(first) = forks.first().filter(|_| forks.len() > 1) else { return Ok(None) };
        let path = dir.join(format!("{first}.json"));
        let set = Self { path: path.clone() };
        blocking(move || {
            let fail = |source| FileError { doing: "make folder", path: dir.clone(), source };
            if !dir.exists() {
                std::fs::create_dir(&dir).map_err(fail)?;
                sync_folder(dir.parent().unwrap_or(Path::new("/")))?;
            }
            let text = serde_json::to_vec(&Note { format: FORMAT, forks });
            replace(&path, &text.map_err(|error| fail(error.into()))?)
        })
        .await?;
        Ok(Some(set))
    }

    /// What is there of them stays.
    pub(crate) async fn close(self) -> Result<(), FileError> {
        blocking(move || {
            remove(&self.path)?;
            sync_folder(self.path.parent().unwrap_or(Path::new("/")))
        })
        .await
    }
}

/// What an earlier daemon has left of forks that are none.
#[derive(Debug, Default)]
pub(crate) struct Unfinished {
    notes: Vec<PathBuf>,
    forks: BTreeSet<SandboxId>,
}

impl Unfinished {
    /// Reads the notes. One that cannot be read stays, and is told: nothing is deleted for what nobody understands.
    pub(crate) fn find(dir: &Path) -> io::Result<Self> {
        let mut found = Self::default();
        let entries = match std::fs::read_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
            entries => entries?,
        };
        for entry in entries {
            let path = entry?.path();
            // Of one that was being written no fork is published yet.
            if path.extension().is_none_or(|extension| extension != "json") {
                std::fs::remove_file(&path)?;
                continue;
            }
            match read(&path) {
                Ok(note) => {
                    found.forks.extend(note.forks);
                    found.notes.push(path);
                }
                Err(error) => {
                    tracing::error!(path = %path.display(), error = chain(&error), "a note about forks cannot be read: whether all of them are there is not known");
                }
            }
        }
        Ok(found)
    }

    /// Whether this is a fork that is not to be.
    pub(crate) fn has(&self, id: &SandboxId) -> bool {
        self.forks.contains(id)
    }

    /// All of them are undone.
    pub(crate) fn forget(self) -> Result<(), FileError> {
        for path in &self.notes {
            remove(path)?;
        }
        self.notes.first().and_then(|path| path.parent()).map_or(Ok(()), sync_folder)
    }
}

fn read(path: &Path) -> io::Result<Note> {
    let damaged = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    let length = std::fs::metadata(path)?.len();
    if length > BYTES_MAX {
        return Err(damaged(format!("{length} bytes long")));
    }
    let note: Note = serde_json::from_slice(&std::fs::read(path)?)?;
    if note.format == FORMAT {
        Ok(note)
    } else {
        Err(damaged(format!("written by another version (format {})", note.format)))
    }
}

fn remove(path: &Path) -> Result<(), FileError> {
    std::fs::remove_file(path).map_err(|source| FileError {
        doing: "remove",
        path: path.to_owned(),
        source,
    })
}

async fn blocking(
    work: impl FnOnce() -> Result<(), FileError> + Send + 'static,
) -> Result<(), FileError> {
    let done = tokio::task::spawn_blocking(work).await;
    // The task panics or is cancelled only when the daemon goes down.
    done.unwrap_or_else(|gone| std::panic::resume_unwind(gone.into_panic()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u8) -> SandboxId {
        SandboxId::from_random([n; 12])
    }

    #[tokio::test]
    async fn what_is_open_when_the_daemon_dies_is_undone_and_what_is_closed_stays() {
        let data = tempfile::tempdir().expect("temp folder");
        let dir = data.path().join("fork-sets");
        assert!(Unfinished::find(&dir).expect("none yet").notes.is_empty());
        assert!(ForkSet::open(dir.clone(), vec![id(1)]).await.expect("written").is_none());
        let one = ForkSet::open(dir.clone(), vec![id(1), id(2)]).await.expect("written");
        let other = ForkSet::open(dir.clone(), vec![id(3), id(4)]).await.expect("written");
        one.expect("two forks have a note").close().await.expect("removed");
        drop(other);
        std::fs::write(dir.join("half.json.new"), "{").expect("half written");
        let found = Unfinished::find(&dir).expect("read");
        assert_eq!(
            (1..5).map(|n| found.has(&id(n))).collect::<Vec<_>>(),
            [false, false, true, true]
        );
        found.forget().expect("removed");
        assert_eq!(std::fs::read_dir(&dir).expect("listed").count(), 0);
    }

    #[test]
    fn a_note_that_nobody_understands_deletes_nothing_and_stays() {
        let dir = tempfile::tempdir().expect("temp folder");
        let newer = format!("{{\"format\": 2, \"forks\": [\"{}\"]}}", id(1));
        std::fs::write(dir.path().join("newer.json"), newer).expect("written");
        std::fs::write(dir.path().join("torn.json"), "{\"form").expect("written");
        let found = Unfinished::find(dir.path()).expect("read");
        assert!(!found.has(&id(1)));
        found.forget().expect("nothing to forget");
        assert_eq!(std::fs::read_dir(dir.path()).expect("listed").count(), 2);
    }
}
