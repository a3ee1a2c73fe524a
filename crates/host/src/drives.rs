//! Drives: disks with names that outlive sandboxes. A folder each, with the disk and a note that says what it is.
//!
//! ```text
//! <data>/drives/<name>/drive.json   size, when it was made
//! <data>/drives/<name>/disk         raw, sparse, an ext4 file system without partitions
//! <data>/drives/.making-<name>/     one that is being made
//! ```
//!
//! # Who has a drive
//!
//! One sandbox at a time, from its creation to its deletion, awake or asleep: its memory knows what is on the drive, so nobody
//! else may change that in between. The sandboxes' manifests say who has which; here it is known from them, and a drive is
//! taken and given back in one piece with the changes of the manifests. A crash in between is made good by the next start, which
//! reads the manifests anew.
//!
//! Copies (of forks and snapshots) are no drives: they lie among the files of the sandbox and are gone with it.

use std::collections::HashMap;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::SandboxId;
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use crate::clock::Moment;
use crate::ext4;
use crate::images::{ImageError, commands};
use crate::manifest::{DriveKind, DriveUse};

/// The format this build writes and reads.
const FORMAT: u32 = 1;

/// What begins the name of a folder that is no drive yet, or none any more. No name of a drive begins so.
const UNFINISHED: char = '.';

/// How long making a file system may take: for 1 TiB some seconds, as only its tables are looked at.
const FILE_SYSTEM_LIMIT: Duration = Duration::from_mins(5);

/// MiB of a drive's journal: for drives of less than 1 GiB what mke2fs thinks right, else as much as the root has.
const JOURNAL_MIB: u64 = 64;

/// The note in a drive's folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Note {
    format: u32,
    pub(crate) size_mib: u64,
    pub(crate) made_at: Moment,
    /// It was brought here with this sandbox, from a checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    came_with: Option<SandboxId>,
}

/// The drives of a host.
#[derive(Debug)]
pub(crate) struct Drives {
    dir: PathBuf,
    /// Who has which.
    held: Mutex<HashMap<String, Holder>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Holder {
    Sandbox(SandboxId),
    /// It is being removed.
    Removal,
}

/// Why a drive is not there, cannot be made, or cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DriveError {
    #[error("there is no drive of this name")]
    Missing,
    #[error("a drive of this name is there already")]
    Taken,
    #[error("a sandbox has it: {0}")]
    Held(SandboxId),
    #[error("it is being deleted")]
    Removed,
    /// Attached for reading only it must be in order.
    #[error("whoever had it last ended without leaving it in order")]
    Unclean,
    #[error("written by another version (format {0})")]
    Format(u32),
    #[error("make its file system")]
    FileSystem(#[from] ImageError),
    #[error("{0}")]
    File(&'static str, #[source] io::Error),
}

/// Drives that a sandbox has while this lives, and keeps if [`keep`](Self::keep) is called.
#[derive(Debug)]
pub(crate) struct Claim {
    drives: Arc<Drives>,
    id: SandboxId,
    names: Vec<String>,
}

impl Claim {
    /// They are the sandbox's until it gives them back.
    pub(crate) fn keep(mut self) {
        self.names.clear();
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut held = self.drives.held();
        for name in &self.names {
            if held.get(name) == Some(&Holder::Sandbox(self.id.clone())) {
                held.remove(name);
            }
        }
    }
}

impl Drives {
    /// Over a folder, which is made when the first is. Removes what an earlier daemon left half made.
    pub(crate) fn open(dir: PathBuf) -> io::Result<Self> {
        let entries = match std::fs::read_dir(&dir) {
            Ok(entries) => Some(entries),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        for entry in entries.into_iter().flatten() {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                std::fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(Self { dir, held: Mutex::default() })
    }

    /// The disk of a drive.
    pub(crate) fn disk(&self, name: &str) -> PathBuf {
        self.dir.join(name).join("disk")
    }

    /// Makes an empty one.
    pub(crate) async fn create(&self, name: &str, size_mib: u64) -> Result<Note, DriveError> {
        let draft = self.draft(name)?;
        let note = Note { format: FORMAT, size_mib, made_at: Moment::now(), came_with: None };
        let made = async {
            make_file_system(&draft.join("disk"), size_mib).await?;
            self.publish(&draft, name, &note)
        };
        let made = made.await;
        if made.is_err() {
            discard(&draft);
        }
        made.map(|()| note)
    }

    /// Makes one of a disk that came with a sandbox from a checkpoint, in place of one that came so before and that nobody has.
    /// The disk is moved.
    pub(crate) fn adopt(&self, name: &str, disk: &Path, of: &SandboxId) -> Result<(), DriveError> {
        if self.can_adopt(name, of)? {
            self.remove(name)?;
        }
        let fail = |error| DriveError::File("take the drive's disk over", error);
        let size_mib = disk.metadata().map_err(fail)?.len() >> 20;
        let came_with = Some(of.clone());
        let note = Note { format: FORMAT, size_mib, made_at: Moment::now(), came_with };
        let draft = self.draft(name)?;
        let taken = std::fs::rename(disk, draft.join("disk"))
            .map_err(fail)
            .and_then(|()| self.publish(&draft, name, &note));
        if taken.is_err() {
            discard(&draft);
        }
        taken
    }

    /// Whether [`adopt`](Self::adopt) finds the name free; `true`: it has to remove what came so before.
    pub(crate) fn can_adopt(&self, name: &str, of: &SandboxId) -> Result<bool, DriveError> {
        match self.note(name) {
            Ok(note) if note.came_with.as_ref() != Some(of) => Err(DriveError::Taken),
            Ok(_) => self.holder(name).map_or(Ok(true), |id| Err(DriveError::Held(id))),
            Err(DriveError::Missing) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Its note.
    pub(crate) fn note(&self, name: &str) -> Result<Note, DriveError> {
        let fail = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => DriveError::Missing,
            _ => DriveError::File("read the drive's note", error),
        };
        let text = std::fs::read(self.dir.join(name).join("drive.json")).map_err(fail)?;
        let note: serde_json::Value =
            serde_json::from_slice(&text).map_err(|error| fail(error.into()))?;
        let format = note["format"].as_u64().and_then(|format| u32::try_from(format).ok());
        if format != Some(FORMAT) {
            return Err(DriveError::Format(format.unwrap_or(0)));
        }
        serde_json::from_value(note).map_err(|error| fail(error.into()))
    }

    /// Names and notes of all, by name. One that cannot be read is logged and left out.
    pub(crate) fn list(&self) -> Result<Vec<(String, Note)>, DriveError> {
        let entries = match std::fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(DriveError::File("read the folder of drives", error)),
        };
        let mut all = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(UNFINISHED) {
                continue;
            }
            match self.note(&name) {
                Ok(note) => all.push((name, note)),
                // It may have been deleted in between.
                Err(DriveError::Missing) => {}
                Err(error) => tracing::error!(name, %error, "a drive cannot be read"),
            }
        }
        all.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(all)
    }

    /// The sandbox that has it.
    pub(crate) fn holder(&self, name: &str) -> Option<SandboxId> {
        match self.held().get(name) {
            Some(Holder::Sandbox(id)) => Some(id.clone()),
            Some(Holder::Removal) | None => None,
        }
    }

    /// Removes one that nobody has.
    pub(crate) fn delete(&self, name: &str) -> Result<(), DriveError> {
        {
            let mut held = self.held();
            match held.get(name) {
                Some(Holder::Sandbox(id)) => return Err(DriveError::Held(id.clone())),
                Some(Holder::Removal) => return Err(DriveError::Removed),
                None => {}
            }
            held.insert(name.to_owned(), Holder::Removal);
        }
        let removed = self.remove(name);
        self.held().remove(name);
        removed
    }

    /// Takes drives for a sandbox, all of them or none: then it says which could not be had.
    pub(crate) fn claim(
        self: &Arc<Self>,
        id: &SandboxId,
        uses: &[DriveUse],
    ) -> Result<Claim, (usize, DriveError)> {
        let mut names = Vec::new();
        let mut held = self.held();
        for (at, wanted) in uses.iter().enumerate() {
            if wanted.kind != DriveKind::Drive {
                continue;
            }
            // Who has it comes first: it cannot have been left in order yet.
            match held.get(&wanted.name) {
                Some(Holder::Sandbox(other)) if other != id => {
                    return Err((at, DriveError::Held(other.clone())));
                }
                Some(Holder::Removal) => return Err((at, DriveError::Removed)),
                Some(Holder::Sandbox(_)) => {}
                None => names.push(wanted.name.clone()),
            }
            self.look(wanted).map_err(|error| (at, error))?;
        }
        for name in &names {
            held.insert(name.clone(), Holder::Sandbox(id.clone()));
        }
        drop(held);
        Ok(Claim { drives: Arc::clone(self), id: id.clone(), names })
    }

    /// Takes note of what a sandbox has by its manifest, which is the truth: nothing else of it is its own.
    pub(crate) fn settle(&self, id: &SandboxId, uses: &[DriveUse]) {
        let mut held = self.held();
        held.retain(|name, holder| {
            let is_own = *holder == Holder::Sandbox(id.clone());
            if is_own && !uses.iter().any(|drive| drive.name == *name) {
                self.take_back(name);
            }
            !is_own
        });
        for drive in uses.iter().filter(|drive| drive.kind == DriveKind::Drive) {
            let before = held.insert(drive.name.clone(), Holder::Sandbox(id.clone()));
            if let Some(Holder::Sandbox(other)) = before {
                tracing::error!(drive = drive.name, one = %id, %other, "two sandboxes have one drive");
            }
        }
    }

    /// Moves the drives of a sandbox that is another host's now to where its files are kept.
    pub(crate) fn set_aside(&self, id: &SandboxId, to: &Path) -> io::Result<()> {
        let names: Vec<String> = {
            let held = self.held();
            let own = held.iter().filter(|(_, holder)| **holder == Holder::Sandbox(id.clone()));
            own.map(|(name, _)| name.clone()).collect()
        };
        for name in names {
            match std::fs::rename(self.dir.join(&name), to.join(format!("drive-{name}"))) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// The account of the sandbox that had it may not open it any more: another sandbox gets that account.
    fn take_back(&self, name: &str) {
        match std::os::unix::fs::chown(self.disk(name), Some(0), Some(0)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::error!(drive = name, %error, "a drive is not taken back from an account");
            }
            _ => {}
        }
    }

    fn look(&self, wanted: &DriveUse) -> Result<(), DriveError> {
        self.note(&wanted.name)?;
        let disk = self.disk(&wanted.name);
        let clean =
            ext4::is_clean(&disk).map_err(|error| DriveError::File("look at the disk", error))?;
        if wanted.read_only && !clean { Err(DriveError::Unclean) } else { Ok(()) }
    }

    fn draft(&self, name: &str) -> Result<PathBuf, DriveError> {
        let fail = |error| DriveError::File("make the drive's folder", error);
        if self.dir.join(name).exists() {
            return Err(DriveError::Taken);
        }
        std::fs::create_dir_all(&self.dir).map_err(fail)?;
        // Guests' accounts may pass through but not look around.
        std::fs::set_permissions(&self.dir, Permissions::from_mode(0o711)).map_err(fail)?;
        let draft = self.dir.join(format!("{UNFINISHED}making-{name}"));
        match std::fs::create_dir(&draft) {
            // One of the same name is being made at the moment.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(DriveError::Taken),
            made => {
                made.map_err(fail)?;
                let mode = Permissions::from_mode(0o711);
                std::fs::set_permissions(&draft, mode).map_err(fail)?;
                Ok(draft)
            }
        }
    }

    /// Gives a draft its name; from then on it is there.
    fn publish(&self, draft: &Path, name: &str, note: &Note) -> Result<(), DriveError> {
        let disk = draft.join("disk");
        File::open(&disk)
            .and_then(|disk| {
                disk.set_permissions(Permissions::from_mode(0o600))?;
                disk.sync_all()
            })
            .map_err(|error| DriveError::File("write the drive to disk", error))?;
        let text = serde_json::to_vec_pretty(note)
            .map_err(|error| DriveError::File("write the drive's note", error.into()))?;
        vmm::files::replace(&draft.join("drive.json"), &text)
            .map_err(|error| DriveError::File("write the drive's note", error.source))?;
        std::fs::rename(draft, self.dir.join(name)).map_err(|error| match error.kind() {
            // Another of this name has come meanwhile.
            io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists => DriveError::Taken,
            _ => DriveError::File("name the drive", error),
        })?;
        vmm::files::sync_folder(&self.dir)
            .map_err(|error| DriveError::File("write the folder of drives", error.source))
    }

    fn remove(&self, name: &str) -> Result<(), DriveError> {
        let gone = self.dir.join(format!("{UNFINISHED}deleting-{name}"));
        match std::fs::rename(self.dir.join(name), &gone) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(DriveError::Missing);
            }
            renamed => renamed.map_err(|error| DriveError::File("rename the drive", error))?,
        }
        std::fs::remove_dir_all(&gone)
            .map_err(|error| DriveError::File("remove the drive's files", error))
    }

    fn held(&self) -> MutexGuard<'_, HashMap<String, Holder>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a sparse file with an empty file system.
/// Bytes that the making of a drive of this size takes for a moment, before its tables, which are zeros, are given back: an inode
/// of 256 bytes for each 16 KiB, as mke2fs makes them, and the journal.
pub(crate) fn bytes_at_first(size_mib: u64) -> u64 {
    let tables = (size_mib << 20) / 64;
    tables.saturating_add(JOURNAL_MIB.min(size_mib / 16) << 20)
}

async fn make_file_system(disk: &Path, size_mib: u64) -> Result<(), DriveError> {
    let mut command = Command::new(commands::program("mke2fs", "e2fsprogs")?);
    command.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-e", "remount-ro"]);
    // Tables are holes that read as zeros already: the guest need not write them.
    command.args(["-E", "lazy_itable_init=0,lazy_journal_init=0,discard"]);
    if size_mib >= 1024 {
        command.args(["-J", &format!("size={JOURNAL_MIB}")]);
    }
    command.arg(disk).arg(format!("{}k", size_mib * 1024));
    let doing = "make the drive's file system (mke2fs)";
    commands::run(command, doing, FILE_SYSTEM_LIMIT, &mut |_| {}).await?;
    ext4::empty(disk).await?;
    let disk = disk.to_owned();
    let trimmed = tokio::task::spawn_blocking(move || crate::images::trim(&disk)).await;
    trimmed.map_err(|error| DriveError::File("give room back", io::Error::other(error)))??;
    Ok(())
}

fn discard(draft: &Path) {
    if let Err(error) = std::fs::remove_dir_all(draft) {
        tracing::error!(dir = %draft.display(), %error, "a half-made drive is not removed before the next start");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(name: &str) -> DriveUse {
        DriveUse {
            name: name.to_owned(),
            path: "/data".to_owned(),
            read_only: false,
            kind: DriveKind::Drive,
        }
    }

    #[tokio::test]
    async fn s22_a_drive_has_one_sandbox_at_a_time_and_is_deleted_without_any() {
        let folder = tempfile::tempdir().expect("folder");
        let drives = Arc::new(Drives::open(folder.path().join("drives")).expect("opened"));
        drives.create("one", 64).await.expect("made");
        drives.create("two", 64).await.expect("made");
        assert!(matches!(drives.create("one", 64).await, Err(DriveError::Taken)));
        let (a, b) = (SandboxId::from_random([1; 12]), SandboxId::from_random([2; 12]));
        drives.claim(&a, &[wanted("one")]).expect("had").keep();
        let refused = drives.claim(&b, &[wanted("two"), wanted("one")]);
        assert!(matches!(refused, Err((1, DriveError::Held(by))) if by == a));
        assert_eq!(drives.holder("two"), None, "all or none");
        assert!(matches!(drives.claim(&b, &[wanted("no")]), Err((0, DriveError::Missing))));
        assert!(matches!(drives.delete("one"), Err(DriveError::Held(_))));
        let claim =
            drives.claim(&a, &[wanted("one"), wanted("two")]).expect("its own, and one more");
        drop(claim);
        assert_eq!((drives.holder("one"), drives.holder("two")), (Some(a.clone()), None));
        drives.settle(&a, &[]);
        drives.delete("one").expect("deleted");
        assert!(matches!(drives.delete("one"), Err(DriveError::Missing)));
        let names: Vec<_> =
            drives.list().expect("list").into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["two"]);
    }

    #[tokio::test]
    async fn a_half_made_one_is_removed_and_a_new_one_is_clean_and_takes_no_room() {
        let folder = tempfile::tempdir().expect("folder");
        let dir = folder.path().join("drives");
        std::fs::create_dir_all(dir.join(".making-x")).expect("as a crash leaves it");
        let drives = Drives::open(dir.clone()).expect("opened");
        assert!(!dir.join(".making-x").exists());
        let note = drives.create("big", 100 * 1024).await.expect("made");
        assert_eq!(note.size_mib, 100 * 1024);
        let disk = drives.disk("big");
        assert_eq!(disk.metadata().expect("there").len(), 100 << 30);
        assert!(vmm::files::allocated_bytes(&disk).expect("there") < 80 << 20);
        assert!(ext4::is_clean(&disk).expect("read"));
    }

    #[tokio::test]
    async fn what_came_with_a_sandbox_replaces_only_what_came_with_it_before() {
        let folder = tempfile::tempdir().expect("folder");
        let drives = Drives::open(folder.path().join("drives")).expect("opened");
        let (a, b) = (SandboxId::from_random([1; 12]), SandboxId::from_random([2; 12]));
        let disk = |text: &str| {
            let path = folder.path().join("disk");
            std::fs::write(&path, text).expect("written");
            path
        };
        drives.adopt("data", &disk("one"), &a).expect("taken over");
        drives.adopt("data", &disk("two"), &a).expect("taken over again");
        assert!(matches!(drives.adopt("data", &disk("three"), &b), Err(DriveError::Taken)));
        assert_eq!(std::fs::read_to_string(drives.disk("data")).expect("read"), "two");
    }
}
