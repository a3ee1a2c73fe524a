//! Volumes: files that many sandboxes share and none can write. A folder each, with a disk and a note that says what it is.
//!
//! ```text
//! <data>/volumes/<name>/volume.json   what is in it, when it was made
//! <data>/volumes/<name>/disk          raw, an ext4 file system without a journal; never changed
//! <data>/volumes/.making-<name>/      one that is being made, with the files that go into it
//! ```
//!
//! A volume is made of a tar stream: the files are unpacked into a folder that only the daemon can enter, and from there into a
//! file system of its own. What is no file, folder or link is refused, and so is what would leave the folder.
//!
//! A volume cannot be removed while a sandbox has it: a sleeper's memory knows what is on it. Snapshots count too; who
//! removes one looks at them.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::{File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::SandboxId;
use serde::{Deserialize, Serialize};
use tar::EntryType;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;
use tokio_util::io::SyncIoBridge;

use crate::clock::Moment;
use crate::ext4;
use crate::ground::FREE_BYTES_MIN;
use crate::images::{ImageError, commands};
use crate::manifest::{DriveKind, DriveUse};
use crate::promises::{NoRoom, Promise, Promises};

/// The format this build writes and reads.
const FORMAT: u32 = 1;

/// What begins the name of a folder that is no volume yet, or none any more. No name of a volume begins so.
const UNFINISHED: char = '.';

/// Most entries of a volume: each takes an inode, and the list of them is gone through on the host.
const ENTRIES_MAX: u64 = 4_000_000;

/// How long the file system may take to be filled: a slow disk writes 1 TiB in three hours.
const FILL_LIMIT: Duration = Duration::from_hours(4);

/// Bytes of a volume's disk beside its files: tables, and room so that it is never too small. Holes take none.
const BESIDE_BYTES: u64 = 64 << 20;

/// Bytes that each entry takes beside its content at most: an inode, and its place in a folder.
const ENTRY_BYTES: u64 = 1024;

/// Bytes that are read of a stream that is of no use any more: who sends it looks for the answer when all is sent, and a
/// connection that is closed before that reads as broken. A longer one is cut off.
const REST_BYTES_MAX: u64 = 256 << 20;

/// Bytes of a block: content is rounded up to it.
const BLOCK_BYTES: u64 = 4096;

/// The note in a volume's folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Note {
    format: u32,
    pub(crate) made_at: Moment,
    /// Files, folders and links in it.
    pub(crate) entries: u64,
    /// Bytes in its files.
    pub(crate) content_bytes: u64,
}

/// The volumes of a host.
#[derive(Debug)]
pub(crate) struct Volumes {
    dir: PathBuf,
    room: Promises,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    /// The sandboxes that have each.
    by: HashMap<String, BTreeSet<SandboxId>>,
    /// Those that are being removed.
    removed: HashSet<String>,
}

/// Why a volume is not there, cannot be made, or cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VolumeError {
    #[error("there is no volume of this name")]
    Missing,
    #[error("a volume of this name is there already")]
    Taken,
    #[error("sandboxes have it")]
    Held(BTreeSet<SandboxId>),
    #[error("it is being deleted")]
    Removed,
    /// The stream is none, breaks off, or has what cannot be in a volume.
    #[error("{0}")]
    Archive(String),
    #[error("the disk has no room for it")]
    NoSpace,
    #[error("written by another version (format {0})")]
    Format(u32),
    #[error("make its file system")]
    FileSystem(#[from] ImageError),
    #[error("{0}")]
    File(&'static str, #[source] io::Error),
}

/// Volumes that a sandbox has while this lives, and keeps if [`keep`](Self::keep) is called.
#[derive(Debug)]
pub(crate) struct VolumeClaim {
    volumes: Arc<Volumes>,
    id: SandboxId,
    names: Vec<String>,
}

impl VolumeClaim {
    /// They are the sandbox's until it gives them back.
    pub(crate) fn keep(mut self) {
        self.names.clear();
    }
}

impl Drop for VolumeClaim {
    fn drop(&mut self) {
        let mut held = self.volumes.held();
        for name in &self.names {
            if let Some(by) = held.by.get_mut(name) {
                by.remove(&self.id);
            }
        }
    }
}

impl Volumes {
    /// Over a folder, which is made when the first is. Removes what an earlier daemon left half made.
    pub(crate) fn open(dir: PathBuf, room: Promises) -> io::Result<Self> {
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
        Ok(Self { dir, room, held: Mutex::default() })
    }

    /// The disk of a volume.
    pub(crate) fn disk(&self, name: &str) -> PathBuf {
        self.dir.join(name).join("disk")
    }

    /// Makes one of a tar stream.
    pub(crate) async fn create(
        &self,
        name: &str,
        archive: Box<dyn AsyncRead + Send + Unpin>,
    ) -> Result<Note, VolumeError> {
        let draft = match self.draft(name) {
            Ok(draft) => draft,
            Err(error) => {
                let mut rest = archive.take(REST_BYTES_MAX);
                // Whoever has gone away meanwhile hears no answer.
                let _ = tokio::io::copy(&mut rest, &mut tokio::io::sink()).await;
                return Err(error);
            }
        };
        let made = self.fill(&draft, name, archive).await;
        if made.is_err()
            && let Err(error) = std::fs::remove_dir_all(&draft)
        {
            tracing::error!(dir = %draft.display(), %error, "a half-made volume is not removed before the next start");
        }
        made
    }

    async fn fill(
        &self,
        draft: &Path,
        name: &str,
        archive: Box<dyn AsyncRead + Send + Unpin>,
    ) -> Result<Note, VolumeError> {
        let tree = draft.join("tree");
        let (into, room) = (tree.clone(), self.room.clone());
        let archive = SyncIoBridge::new(archive);
        let unpacked = tokio::task::spawn_blocking(move || {
            let mut archive = archive;
            let unpacked = unpack(&mut archive, &into, &room);
            // Also behind its end: padding, which some write more of than others.
            let _ = io::copy(&mut Read::take(archive, REST_BYTES_MAX), &mut io::sink());
            unpacked
        });
        let unpacked = unpacked.await;
        let contents = unpacked
            .map_err(|error| VolumeError::File("unpack the volume", io::Error::other(error)))??;
        let room = promise(&self.room, contents.disk_bytes())?;
        let disk = draft.join("disk");
        let mut command = Command::new(commands::program("mke2fs", "e2fsprogs")?);
        // Nobody writes it, so it needs no journal and none of the room that root keeps.
        command.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-O", "^has_journal"]);
        command.args(["-E", "lazy_itable_init=0,discard,root_owner=0:0"]);
        command.args(["-N", &(contents.entries + 1024).to_string(), "-d"]).arg(&tree).arg(&disk);
        command.arg(format!("{}k", contents.disk_bytes() / 1024));
        let doing = "make the volume's file system (mke2fs)";
        let filled = commands::run(command, doing, FILL_LIMIT, &mut |_| {}).await;
        if filled.is_err() && matches!(self.room.check(FREE_BYTES_MIN), Err(NoRoom::Short { .. })) {
            return Err(VolumeError::NoSpace);
        }
        filled?;
        ext4::empty(&disk).await?;
        drop(room);
        let sealed = tokio::task::spawn_blocking(move || {
            std::fs::remove_dir_all(&tree)
                .map_err(|error| VolumeError::File("remove the unpacked files", error))?;
            crate::images::trim(&disk)?;
            File::open(&disk)
                .and_then(|disk| {
                    // Every sandbox's account reads it.
                    disk.set_permissions(Permissions::from_mode(0o444))?;
                    disk.sync_all()
                })
                .map_err(|error| VolumeError::File("write the volume to disk", error))
        });
        sealed
            .await
            .map_err(|error| VolumeError::File("seal the volume", io::Error::other(error)))??;
        let note = Note {
            format: FORMAT,
            made_at: Moment::now(),
            entries: contents.entries,
            content_bytes: contents.bytes,
        };
        self.publish(draft, name, &note)?;
        Ok(note)
    }

    /// Its note.
    pub(crate) fn note(&self, name: &str) -> Result<Note, VolumeError> {
        let fail = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => VolumeError::Missing,
            _ => VolumeError::File("read the volume's note", error),
        };
        let text = std::fs::read(self.dir.join(name).join("volume.json")).map_err(fail)?;
        let note: serde_json::Value =
            serde_json::from_slice(&text).map_err(|error| fail(error.into()))?;
        let format = note["format"].as_u64().and_then(|format| u32::try_from(format).ok());
        if format != Some(FORMAT) {
            return Err(VolumeError::Format(format.unwrap_or(0)));
        }
        serde_json::from_value(note).map_err(|error| fail(error.into()))
    }

    /// Names and notes of all, by name. One that cannot be read is logged and left out.
    pub(crate) fn list(&self) -> Result<Vec<(String, Note)>, VolumeError> {
        let entries = match std::fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(VolumeError::File("read the folder of volumes", error)),
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
                Err(VolumeError::Missing) => {}
                Err(error) => tracing::error!(name, %error, "a volume cannot be read"),
            }
        }
        all.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(all)
    }

    /// The sandboxes that have it.
    pub(crate) fn holders(&self, name: &str) -> BTreeSet<SandboxId> {
        self.held().by.get(name).cloned().unwrap_or_default()
    }

    /// Removes one that no sandbox has. `else_held` is asked, once nobody can begin to have it, whether anything else does.
    pub(crate) fn delete<E: From<VolumeError>>(
        &self,
        name: &str,
        else_held: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        {
            let mut held = self.held();
            if let Some(by) = held.by.get(name).filter(|by| !by.is_empty()) {
                return Err(VolumeError::Held(by.clone()).into());
            }
            if !held.removed.insert(name.to_owned()) {
                return Err(VolumeError::Removed.into());
            }
        }
        let removed = else_held().and_then(|()| self.remove(name).map_err(E::from));
        self.held().removed.remove(name);
        removed
    }

    /// Takes volumes for a sandbox, all of them or none: then it says which could not be had.
    pub(crate) fn claim(
        self: &Arc<Self>,
        id: &SandboxId,
        uses: &[DriveUse],
    ) -> Result<VolumeClaim, (usize, VolumeError)> {
        let mut held = self.held();
        let wanted = uses.iter().enumerate();
        let wanted = wanted.filter(|(_, wanted)| wanted.kind == DriveKind::Volume);
        let mut names = Vec::new();
        for (at, wanted) in wanted {
            if held.removed.contains(&wanted.name) {
                return Err((at, VolumeError::Removed));
            }
            self.note(&wanted.name).map_err(|error| (at, error))?;
            let has = held.by.get(&wanted.name).is_some_and(|by| by.contains(id));
            if !has {
                names.push(wanted.name.clone());
            }
        }
        for name in &names {
            held.by.entry(name.clone()).or_default().insert(id.clone());
        }
        drop(held);
        Ok(VolumeClaim { volumes: Arc::clone(self), id: id.clone(), names })
    }

    /// Takes note of what a sandbox has by its manifest, which is the truth.
    pub(crate) fn settle(&self, id: &SandboxId, uses: &[DriveUse]) {
        let mut held = self.held();
        for by in held.by.values_mut() {
            by.remove(id);
        }
        for volume in uses.iter().filter(|wanted| wanted.kind == DriveKind::Volume) {
            held.by.entry(volume.name.clone()).or_default().insert(id.clone());
        }
        held.by.retain(|_, by| !by.is_empty());
    }

    fn draft(&self, name: &str) -> Result<PathBuf, VolumeError> {
        let fail = |error| VolumeError::File("make the volume's folder", error);
        if self.dir.join(name).exists() {
            return Err(VolumeError::Taken);
        }
        std::fs::create_dir_all(&self.dir).map_err(fail)?;
        // Guests' accounts may pass through but not look around.
        std::fs::set_permissions(&self.dir, Permissions::from_mode(0o711)).map_err(fail)?;
        let draft = self.dir.join(format!("{UNFINISHED}making-{name}"));
        match std::fs::create_dir(&draft) {
            // One of the same name is being made at the moment.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(VolumeError::Taken),
            made => {
                made.map_err(fail)?;
                // Nobody but the daemon: what is unpacked may be set-user-id.
                std::fs::set_permissions(&draft, Permissions::from_mode(0o700)).map_err(fail)?;
                Ok(draft)
            }
        }
    }

    /// Gives a draft its name; from then on it is there.
    fn publish(&self, draft: &Path, name: &str, note: &Note) -> Result<(), VolumeError> {
        let text = serde_json::to_vec_pretty(note)
            .map_err(|error| VolumeError::File("write the volume's note", error.into()))?;
        vmm::files::replace(&draft.join("volume.json"), &text)
            .map_err(|error| VolumeError::File("write the volume's note", error.source))?;
        std::fs::set_permissions(draft, Permissions::from_mode(0o711))
            .map_err(|error| VolumeError::File("open the volume's folder", error))?;
        std::fs::rename(draft, self.dir.join(name)).map_err(|error| match error.kind() {
            // Another of this name has come meanwhile.
            io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists => VolumeError::Taken,
            _ => VolumeError::File("name the volume", error),
        })?;
        vmm::files::sync_folder(&self.dir)
            .map_err(|error| VolumeError::File("write the folder of volumes", error.source))
    }

    fn remove(&self, name: &str) -> Result<(), VolumeError> {
        let gone = self.dir.join(format!("{UNFINISHED}deleting-{name}"));
        match std::fs::rename(self.dir.join(name), &gone) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(VolumeError::Missing);
            }
            renamed => renamed.map_err(|error| VolumeError::File("rename the volume", error))?,
        }
        std::fs::remove_dir_all(&gone)
            .map_err(|error| VolumeError::File("remove the volume's files", error))
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What was unpacked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Contents {
    entries: u64,
    bytes: u64,
    /// The same by whole blocks.
    rounded: u64,
}

impl Contents {
    /// Bytes of a disk that has room for it.
    fn disk_bytes(self) -> u64 {
        self.rounded + self.rounded / 50 + self.entries * ENTRY_BYTES + BESIDE_BYTES
    }
}

/// Unpacks a tar stream into a new folder. Blocking.
fn unpack(archive: impl Read, into: &Path, room: &Promises) -> Result<Contents, VolumeError> {
    let local = |error: io::Error| VolumeError::File("unpack the volume", error);
    std::fs::create_dir(into).map_err(local)?;
    std::fs::set_permissions(into, Permissions::from_mode(0o755)).map_err(local)?;
    let mut archive = tar::Archive::new(archive);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    archive.set_preserve_mtime(true);
    archive.set_unpack_xattrs(false);
    let broken = |error: io::Error| VolumeError::Archive(format!("the tar stream: {error}"));
    let mut contents = Contents::default();
    for entry in archive.entries().map_err(broken)? {
        let mut entry = entry.map_err(broken)?;
        let named = entry.path().map_err(broken)?.display().to_string();
        match entry.header().entry_type() {
            EntryType::Regular
            | EntryType::Continuous
            | EntryType::Directory
            | EntryType::Symlink
            | EntryType::Link
            | EntryType::GNUSparse => {}
            // Words about the archive itself.
            EntryType::XGlobalHeader => continue,
            _ => {
                let text = format!("`{named}` is no file, folder or link");
                return Err(VolumeError::Archive(text));
            }
        }
        contents.entries += 1;
        if contents.entries > ENTRIES_MAX {
            return Err(VolumeError::Archive(format!("more than {ENTRIES_MAX} entries")));
        }
        // Of what follows nothing is known yet.
        let _room = promise(room, entry.size())?;
        match entry.unpack_in(into) {
            Ok(true) => {}
            Ok(false) => {
                return Err(VolumeError::Archive(format!("`{named}` is outside of the volume")));
            }
            Err(error) if crate::sandbox::work::is_full(&error) => {
                return Err(VolumeError::NoSpace);
            }
            Err(error) => {
                return Err(VolumeError::Archive(format!("`{named}`: {}", cause_of(&error))));
            }
        }
        let stored = into.join(entry.path().map_err(broken)?);
        // A link adds nothing; a second entry of the same name counts twice, which costs a hole.
        if let Ok(meta) = std::fs::symlink_metadata(&stored)
            && meta.is_file()
            && meta.nlink() == 1
        {
            contents.bytes += meta.len();
            contents.rounded += meta.len().next_multiple_of(BLOCK_BYTES);
        } else {
            contents.rounded += BLOCK_BYTES;
        }
    }
    Ok(contents)
}

/// What is at the bottom of an error: what is above it names the host's own paths.
fn cause_of(error: &io::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

/// Room for so many bytes beside what running guests need.
fn promise(room: &Promises, bytes: u64) -> Result<Promise, VolumeError> {
    room.promise(bytes, FREE_BYTES_MIN).map_err(|error| match error {
        NoRoom::Short { .. } => VolumeError::NoSpace,
        NoRoom::Unknown(error) => VolumeError::File("look how much room there is", error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(entries: &[(&str, EntryType, &str)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, kind, content) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_mode(0o644);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(1);
            // Past the builder, which would not write such a name.
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            match kind {
                EntryType::Symlink | EntryType::Link => {
                    header.set_size(0);
                    header.set_link_name_literal(content).expect("short");
                    header.set_cksum();
                    builder.append(&header, io::empty()).expect("written");
                }
                _ => {
                    header.set_size(content.len() as u64);
                    header.set_cksum();
                    builder.append(&header, content.as_bytes()).expect("written");
                }
            }
        }
        builder.into_inner().expect("written")
    }

    fn volume(name: &str) -> DriveUse {
        let (name, path) = (name.to_owned(), "/v".to_owned());
        DriveUse { name, path, read_only: true, kind: DriveKind::Volume }
    }

    #[tokio::test]
    async fn s22_a_volume_has_what_was_in_the_stream_and_stays_while_it_is_had() {
        let folder = tempfile::tempdir().expect("folder");
        let dir = folder.path().join("volumes");
        std::fs::create_dir_all(dir.join(".making-x")).expect("as a crash leaves it");
        let volumes =
            Arc::new(Volumes::open(dir.clone(), Promises::new(dir.clone())).expect("opened"));
        assert!(!dir.join(".making-x").exists());
        let tar = archive(&[
            ("a", EntryType::Regular, "hello"),
            ("link", EntryType::Symlink, "a"),
            ("hard", EntryType::Link, "a"),
        ]);
        let made = volumes.create("files", Box::new(io::Cursor::new(tar.clone()))).await;
        let note = made.expect("made");
        assert_eq!((note.entries, note.content_bytes), (3, 5));
        let again = volumes.create("files", Box::new(io::Cursor::new(tar))).await;
        assert!(matches!(again, Err(VolumeError::Taken)));
        let disk = volumes.disk("files");
        assert_eq!(disk.metadata().expect("there").mode() & 0o777, 0o444);
        assert!(ext4::is_clean(&disk).expect("read"));
        assert!(!dir.join("files/tree").exists());

        let (a, b) = (SandboxId::from_random([1; 12]), SandboxId::from_random([2; 12]));
        volumes.claim(&a, &[volume("files")]).expect("had").keep();
        drop(volumes.claim(&b, &[volume("files")]).expect("had as well"));
        assert!(matches!(volumes.claim(&b, &[volume("no")]), Err((0, VolumeError::Missing))));
        let delete = || volumes.delete("files", || Ok::<_, VolumeError>(()));
        assert!(
            matches!(delete(), Err(VolumeError::Held(by)) if by == BTreeSet::from([a.clone()]))
        );
        volumes.settle(&a, &[]);
        let elsewhere = volumes.delete("files", || Err::<(), _>(VolumeError::Removed));
        assert!(matches!(elsewhere, Err(VolumeError::Removed)));
        delete().expect("deleted");
        assert!(matches!(delete(), Err(VolumeError::Missing)));
    }

    #[tokio::test]
    async fn what_leaves_the_volume_or_is_no_file_is_refused_and_leaves_nothing() {
        let folder = tempfile::tempdir().expect("folder");
        let dir = folder.path().join("volumes");
        let volumes = Volumes::open(dir.clone(), Promises::new(dir.clone())).expect("opened");
        let outside = folder.path().join("outside");
        std::fs::create_dir(&outside).expect("made");
        let to = outside.to_string_lossy().into_owned();
        let refused = [
            archive(&[("../x", EntryType::Regular, "x")]),
            archive(&[("to", EntryType::Symlink, &to), ("to/x", EntryType::Regular, "x")]),
            archive(&[("hard", EntryType::Link, "../../../../etc/passwd")]),
            archive(&[("null", EntryType::Char, "")]),
            archive(&[("pipe", EntryType::Fifo, "")]),
            archive(&[("a", EntryType::Regular, &"x".repeat(5000))])[..2000].to_vec(),
            b"no archive at all".repeat(100),
        ];
        for (number, tar) in refused.into_iter().enumerate() {
            let made = volumes.create("v", Box::new(io::Cursor::new(tar))).await;
            assert!(matches!(made, Err(VolumeError::Archive(_))), "{number}: {made:?}");
            assert_eq!(std::fs::read_dir(&dir).expect("folder").count(), 0, "{number}");
            assert_eq!(std::fs::read_dir(&outside).expect("folder").count(), 0, "{number}");
        }
    }
}
