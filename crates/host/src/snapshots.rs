//! Snapshots with names: a folder each, with the parts of a sandbox that sleeps on disk, and a note that says what they are.
//!
//! ```text
//! <data>/snapshots/<name>/snapshot.json   whose it was, its settings, what its state depends on
//! <data>/snapshots/<name>/memory, state, disk.qcow2, drive-<place>
//! <data>/snapshots/.making-<id>/          one that is being taken
//! ```
//!
//! A snapshot is there from the moment its folder has its name, and whole, because the folder is renamed last. What a crash
//! leaves half made is removed by the next start. Nothing in a snapshot ever changes.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use api::SandboxId;
use api::snapshot::Snapshot;
use serde::{Deserialize, Serialize};

use crate::clock::{Moment, rfc3339};
use crate::manifest::{DriveKind, Manifest, Saved};
use crate::settings::Files;

/// The format this build writes and reads.
const FORMAT: u32 = 1;

/// What begins the name of a folder that is no snapshot yet, or none any more. No name of a snapshot begins so.
const UNFINISHED: char = '.';

/// The note in a snapshot's folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Note {
    format: u32,
    pub(crate) taken_at: Moment,
    /// What the sandbox was, to make others like it.
    pub(crate) of: Manifest,
    pub(crate) saved: Saved,
}

/// The snapshots of a host.
#[derive(Debug)]
pub(crate) struct Snapshots {
    dir: PathBuf,
}

/// Why a snapshot is not there, or cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SnapshotError {
    #[error("there is no snapshot of this name")]
    Missing,
    #[error("a snapshot of this name is there already")]
    Taken,
    #[error("written by another version (format {0})")]
    Format(u32),
    #[error("{0}")]
    File(&'static str, #[source] io::Error),
}

impl Snapshots {
    /// Over a folder, which is made when the first is taken. Removes what an earlier daemon left half made.
    pub(crate) fn open(dir: PathBuf) -> io::Result<Self> {
        let entries = match std::fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self { dir }),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                std::fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(Self { dir })
    }

    /// An empty folder to take one into, for this sandbox.
    pub(crate) fn draft(&self, of: &SandboxId, name: &str) -> Result<Files, SnapshotError> {
        if self.dir.join(name).exists() {
            return Err(SnapshotError::Taken);
        }
        let files = Files::in_dir(self.dir.join(format!("{UNFINISHED}making-{of}-{name}")));
        let made = std::fs::create_dir_all(&self.dir).and_then(|()| {
            match std::fs::create_dir(files.dir()) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    // One of the same name is being taken at the moment.
                    Err(io::Error::from(io::ErrorKind::ResourceBusy))
                }
                made => made,
            }
        });
        match made {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Err(SnapshotError::Taken),
            Err(error) => Err(SnapshotError::File("make the snapshot's folder", error)),
            Ok(()) => Ok(files),
        }
    }

    /// Gives a draft its name; from then on it is there.
    pub(crate) fn publish(
        &self,
        draft: &Files,
        name: &str,
        of: Manifest,
        saved: Saved,
    ) -> Result<Snapshot, SnapshotError> {
        let note = Note { format: FORMAT, taken_at: saved.slept_at.clone(), of, saved };
        let text = serde_json::to_vec_pretty(&note)
            .map_err(|error| SnapshotError::File("write the snapshot's note", error.into()))?;
        for part in parts(draft, &note) {
            std::fs::File::open(&part)
                .and_then(|file| file.sync_all())
                .map_err(|error| SnapshotError::File("write the snapshot to disk", error))?;
        }
        vmm::files::replace(&draft.dir().join("snapshot.json"), &text)
            .map_err(|error| SnapshotError::File("write the snapshot's note", error.source))?;
        let place = self.dir.join(name);
        // Fails where another of this name has come meanwhile: such a folder is not empty.
        std::fs::rename(draft.dir(), &place).map_err(|error| match error.kind() {
            io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists => SnapshotError::Taken,
            _ => SnapshotError::File("name the snapshot", error),
        })?;
        std::fs::File::open(&self.dir)
            .and_then(|dir| dir.sync_all())
            .map_err(|error| SnapshotError::File("write the folder of snapshots", error))?;
        Ok(view(name, &note, &place))
    }

    /// One of them.
    pub(crate) fn get(&self, name: &str) -> Result<(Note, Files), SnapshotError> {
        let files = Files::in_dir(self.dir.join(name));
        let note = read(files.dir())?;
        Ok((note, files))
    }

    /// One of them, for people.
    pub(crate) fn view(&self, name: &str) -> Result<Snapshot, SnapshotError> {
        self.get(name).map(|(note, files)| view(name, &note, files.dir()))
    }

    /// All of them, oldest first. One that cannot be read is logged and left out.
    pub(crate) fn list(&self) -> Result<Vec<Snapshot>, SnapshotError> {
        let entries = match std::fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(SnapshotError::File("read the folder of snapshots", error)),
        };
        let mut all = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(UNFINISHED) {
                continue;
            }
            match read(&entry.path()) {
                Ok(note) => all.push((note.taken_at.unix_ms, view(&name, &note, &entry.path()))),
                // It may have been deleted in between.
                Err(SnapshotError::Missing) => {}
                Err(error) => tracing::error!(name, %error, "a snapshot cannot be read"),
            }
        }
        all.sort_by_key(|(taken, _)| *taken);
        Ok(all.into_iter().map(|(_, snapshot)| snapshot).collect())
    }

    /// What the machines of all snapshots were, which is needed to go on from them.
    pub(crate) fn machines(&self) -> Result<Vec<vmm::Fingerprint>, SnapshotError> {
        let all = self.list()?;
        all.iter().map(|one| self.get(&one.name).map(|(note, _)| note.saved.machine)).collect()
    }

    /// The name of one that has this volume, if there is any.
    pub(crate) fn of_volume(&self, volume: &str) -> Result<Option<String>, SnapshotError> {
        for Snapshot { name, .. } in self.list()? {
            let has = match self.get(&name) {
                Ok((note, _)) => note
                    .of
                    .drives
                    .iter()
                    .any(|drive| drive.kind == DriveKind::Volume && drive.name == volume),
                // It may have been deleted in between.
                Err(SnapshotError::Missing) => false,
                Err(error) => return Err(error),
            };
            if has {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    /// Removes one. What was made from it does not need it.
    pub(crate) fn delete(&self, name: &str) -> Result<(), SnapshotError> {
        let gone = self.dir.join(format!("{UNFINISHED}deleting-{name}"));
        match std::fs::rename(self.dir.join(name), &gone) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(SnapshotError::Missing);
            }
            renamed => {
                renamed.map_err(|error| SnapshotError::File("rename the snapshot", error))?;
            }
        }
        std::fs::remove_dir_all(&gone)
            .map_err(|error| SnapshotError::File("remove the snapshot's files", error))
    }
}

fn read(dir: &Path) -> Result<Note, SnapshotError> {
    let fail = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => SnapshotError::Missing,
        _ => SnapshotError::File("read the snapshot's note", error),
    };
    let text = std::fs::read(dir.join("snapshot.json")).map_err(fail)?;
    let note: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| fail(error.into()))?;
    let format = note["format"].as_u64().and_then(|format| u32::try_from(format).ok());
    if format != Some(FORMAT) {
        return Err(SnapshotError::Format(format.unwrap_or(0)));
    }
    serde_json::from_value(note).map_err(|error| fail(error.into()))
}

/// The files of a snapshot, without its note.
fn parts(files: &Files, note: &Note) -> Vec<PathBuf> {
    let drives = note.of.copied_places().into_iter().map(|place| files.drive(place));
    [files.memory(), files.state(), files.disk()].into_iter().chain(drives).collect()
}

fn view(name: &str, note: &Note, dir: &Path) -> Snapshot {
    let files = Files::in_dir(dir);
    let parts = parts(&files, note);
    // Of holes nothing is stored.
    let blocks: u64 =
        parts.iter().filter_map(|part| part.metadata().ok()).map(|part| part.blocks()).sum();
    Snapshot {
        name: name.to_owned(),
        of: note.of.id.clone(),
        of_name: note.of.name.clone(),
        taken_at: rfc3339(note.taken_at.unix_ms),
        image: note.of.image.clone(),
        cpus: note.of.cpus,
        memory_mib: note.of.memory_mib,
        stored_bytes: blocks * 512,
    }
}
