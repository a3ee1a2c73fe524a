//! Carries one sandbox's checkpoints into the store: what differed since the last one, then the list, then the word that it
//! is the newest.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use api::SandboxId;
use futures_util::{StreamExt as _, TryStreamExt as _};
use vmm::files::{Compared, PIECE};

use super::{
    FORMAT, Host, Latest, List, PARTS, Part, STATE, Store, StoreError, chunk_path, claim, forget,
    hex_sha256, list_path, part_files, place,
};
use crate::manifest::{DriveUse, Manifest, Saved};
use crate::settings::Files;

/// Pieces of one sandbox that are packed and carried at a time.
const CARRIED_AT_ONCE: usize = 8;

/// How hard a piece is packed: at 1 zstd packs some 400 MB/s and saves nearly as much as at 3.
const PACKED: i32 = 1;

/// A checkpoint that is taken: the shadow is as the guest was, and is to be carried away.
#[derive(Clone, Debug)]
pub(crate) struct Taken {
    pub(crate) of: Manifest,
    pub(crate) saved: Saved,
    /// The sandbox slept.
    pub(crate) asleep: bool,
    /// What differed, as [`PARTS`], and its drives.
    pub(crate) differed: Vec<Compared>,
    /// How long the guest stood, milliseconds.
    pub(crate) pause_ms: u64,
}

/// A checkpoint that is kept.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub(crate) latest: Latest,
    /// Bytes of memory, disk and device state that differed from the checkpoint before.
    pub(crate) changed_bytes: u64,
    /// Bytes that were carried to the store for it.
    pub(crate) carried_bytes: u64,
}

/// See the module. One per sandbox with checkpoints.
#[derive(Debug)]
pub(crate) struct Keeper {
    id: SandboxId,
    epoch: i64,
    host: Host,
    store: Arc<Store>,
    shadow: Files,
    inner: tokio::sync::Mutex<Inner>,
    /// The shadow may differ from what is known of it.
    doubted: AtomicBool,
    /// There are to be checkpoints.
    wanted: AtomicBool,
}

#[derive(Debug, Default)]
struct Inner {
    /// Pieces that differ from what the store has, as the parts. Everything, until the first checkpoint of this daemon, and after
    /// the sandbox was given other drives.
    pending: Option<Vec<BTreeSet<u32>>>,
    /// Bytes that differ.
    changed_bytes: u64,
    /// Names of the chunks of the newest checkpoint, as [`PARTS`] and the drives; `None`: zeros.
    parts: Vec<(u64, Vec<Option<String>>)>,
    /// The drives whose parts they are.
    drives: Vec<DriveUse>,
    /// Chunks in the store, with the bytes that they take there.
    there: Option<HashMap<String, u64>>,
    number: u64,
}

/// Which part, and which piece of it.
type Place = (usize, usize);

/// A piece that was looked at.
struct Carried {
    part: usize,
    at: usize,
    name: Option<String>,
    /// Bytes in the store, where it was put there now.
    put: Option<u64>,
}

impl Keeper {
    /// For a sandbox with these files, owned under this epoch.
    pub(crate) fn new(
        store: &Arc<Store>,
        host: &Host,
        id: &SandboxId,
        epoch: i64,
        files: &Files,
    ) -> Self {
        Self {
            id: id.clone(),
            epoch,
            host: host.clone(),
            store: Arc::clone(store),
            shadow: shadow_of(files),
            inner: tokio::sync::Mutex::default(),
            doubted: AtomicBool::new(false),
            wanted: AtomicBool::new(true),
        }
    }

    /// Where the sandbox is copied to.
    pub(crate) fn shadow(&self) -> &Files {
        &self.shadow
    }

    /// The newest checkpoint that the store has of it.
    pub(crate) async fn newest(&self) -> Result<Option<Latest>, StoreError> {
        latest(&self.store, &self.id, self.epoch).await
    }

    /// A copy was begun and not finished: the next checkpoint looks at everything.
    pub(crate) fn doubt(&self) {
        self.doubted.store(true, Ordering::Relaxed);
    }

    /// Whether there are to be checkpoints; if not, [`end`](Self::end) follows.
    pub(crate) fn want(&self, wanted: bool) {
        self.wanted.store(wanted, Ordering::Relaxed);
    }

    /// Removes what the store and this host have of them, unless they are wanted again.
    pub(crate) async fn end(&self) -> Result<(), StoreError> {
        let mut inner = self.inner.lock().await;
        if self.wanted.load(Ordering::Relaxed) {
            return Ok(());
        }
        *inner = Inner::default();
        match tokio::fs::remove_dir_all(self.shadow.dir()).await {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(StoreError::Local(error));
            }
            _ => {}
        }
        forget(&self.store, &self.host, &self.id, self.epoch).await
    }

    /// Carries what was taken. After an error nothing is lost: the next one carries what this one could not.
    pub(crate) async fn keep(&self, taken: Taken) -> Result<Kept, StoreError> {
        let mut inner = self.inner.lock().await;
        if !self.wanted.load(Ordering::Relaxed) {
            return Err(StoreError::Failed("checkpoints were turned off".to_owned()));
        }
        if self.doubted.swap(false, Ordering::Relaxed) {
            inner.pending = None;
        }
        if inner.drives != taken.of.drives || inner.parts.is_empty() {
            inner.drives.clone_from(&taken.of.drives);
            inner.parts = vec![Default::default(); PARTS.len() + taken.of.drives.len()];
            inner.pending = None;
        }
        if let Some(pending) = &mut inner.pending {
            for (pending, differed) in pending.iter_mut().zip(&taken.differed) {
                pending.extend(differed.pieces.iter().copied());
            }
        }
        inner.changed_bytes += taken.differed.iter().map(|part| part.bytes).sum::<u64>();
        claim(&self.store, &self.host, &self.id, self.epoch).await?;
        if inner.there.is_none() {
            inner.there = Some(self.chunks_there().await?);
            inner.number = self.newest().await?.map_or(0, |latest| latest.number);
        }
        let files = part_files(&taken.of, &self.shadow);
        let (pieces, lengths) = pieces(&files, &mut inner)?;
        let mut carried_bytes = self.carry(&files, &mut inner, pieces).await?;
        for ((known, _), length) in inner.parts.iter_mut().zip(&lengths) {
            *known = *length;
        }
        let number = inner.number + 1;
        let (list, mut stored_bytes) = list_of(&inner, &taken, number, &lengths);
        crate::fault::point("checkpoint_carried");
        let text =
            serde_json::to_vec(&list).map_err(|error| StoreError::Failed(error.to_string()))?;
        let text = pack(&text)?;
        let sha256 = hex_sha256(&text);
        carried_bytes += text.len() as u64;
        stored_bytes += text.len() as u64;
        self.store.put(&list_path(&self.id, self.epoch, number), text).await?;
        let latest = Latest {
            format: FORMAT,
            number,
            sha256,
            id: self.id.clone(),
            name: taken.of.name.clone(),
            host: self.host.name.clone(),
            taken_at: taken.saved.slept_at.clone(),
            asleep: taken.asleep,
            image: taken.of.image.clone(),
            cpus: taken.of.cpus,
            memory_mib: taken.of.memory_mib,
            stored_bytes,
        };
        crate::fault::point("checkpoint_listed");
        let word =
            serde_json::to_vec(&latest).map_err(|error| StoreError::Failed(error.to_string()))?;
        self.store.put(&format!("{}/latest", place(&self.id, self.epoch)), word).await?;
        // It is there. What is left of older ones is no more than a waste.
        inner.number = number;
        inner.pending = Some(vec![BTreeSet::new(); inner.parts.len()]);
        let changed_bytes = std::mem::take(&mut inner.changed_bytes);
        if let Err(error) = self.tidy(&mut inner, &list).await {
            tracing::warn!(sandbox = %self.id, %error, "older checkpoints are not removed yet");
        }
        Ok(Kept { latest, changed_bytes, carried_bytes })
    }

    /// Chunks that an earlier daemon has put there.
    async fn chunks_there(&self) -> Result<HashMap<String, u64>, StoreError> {
        let found = self.store.list(&format!("{}/chunks", place(&self.id, self.epoch))).await?;
        let named = found.into_iter().filter(|(_, bytes)| *bytes > 0);
        Ok(named
            .filter_map(|(path, bytes)| Some((path.rsplit('/').next()?.to_owned(), bytes)))
            .collect())
    }

    /// Carries the pieces that the store does not have. Returns the bytes that were carried.
    async fn carry(
        &self,
        paths: &[PathBuf],
        inner: &mut Inner,
        pieces: Vec<Place>,
    ) -> Result<u64, StoreError> {
        let mut files = Vec::new();
        for path in paths {
            files.push(Arc::new(File::open(path).map_err(StoreError::Local)?));
        }
        let there = inner.there.take().unwrap_or_default();
        let there = Arc::new(std::sync::Mutex::new(there));
        let carried = futures_util::stream::iter(pieces)
            .map(|(part, at)| self.carry_one(Arc::clone(&files[part]), part, at, &there))
            .buffer_unordered(CARRIED_AT_ONCE)
            .try_fold((Vec::new(), 0), |(mut all, bytes), one| async move {
                let put = one.put.unwrap_or(0);
                all.push(one);
                Ok((all, bytes + put))
            })
            .await;
        let taken = there.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        inner.there = Some(taken);
        let (carried, bytes) = carried?;
        for Carried { part, at, name, .. } in carried {
            inner.parts[part].1[at] = name;
        }
        Ok(bytes)
    }

    async fn carry_one(
        &self,
        file: Arc<File>,
        part: usize,
        at: usize,
        there: &std::sync::Mutex<HashMap<String, u64>>,
    ) -> Result<Carried, StoreError> {
        let known = || there.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let read = tokio::task::spawn_blocking(move || {
            let bytes = read_piece(&file, at)?;
            if vmm::files::is_zero(&bytes) {
                return Ok(None);
            }
            Ok::<_, io::Error>(Some((hex_sha256(&bytes), bytes)))
        });
        let read = read.await.map_err(|error| StoreError::Failed(error.to_string()))?;
        let Some((name, bytes)) = read.map_err(StoreError::Local)? else {
            return Ok(Carried { part, at, name: None, put: None });
        };
        if known().contains_key(&name) {
            return Ok(Carried { part, at, name: Some(name), put: None });
        }
        let packed = tokio::task::spawn_blocking(move || pack(&bytes)).await;
        let packed = packed.map_err(|error| StoreError::Failed(error.to_string()))??;
        let size = packed.len() as u64;
        self.store.put(&chunk_path(&self.id, self.epoch, &name), packed).await?;
        known().insert(name.clone(), size);
        crate::fault::point("checkpoint_carrying");
        Ok(Carried { part, at, name: Some(name), put: Some(size) })
    }

    /// Removes what this list does not name: chunks and lists of older checkpoints, what was half carried, and what hosts
    /// before this one have left.
    async fn tidy(&self, inner: &mut Inner, list: &List) -> Result<(), StoreError> {
        let named: BTreeSet<&str> = list.chunks.iter().map(String::as_str).collect();
        let there = inner.there.get_or_insert_default();
        let waste: Vec<String> =
            there.keys().filter(|name| !named.contains(name.as_str())).cloned().collect();
        // Forgotten first: what is not known to be there is put again.
        for name in &waste {
            there.remove(name);
        }
        let mut paths: Vec<String> =
            waste.iter().map(|name| chunk_path(&self.id, self.epoch, name)).collect();
        let place = place(&self.id, self.epoch);
        let own_list = list_path(&self.id, self.epoch, list.number);
        let lists = self.store.list(&format!("{place}/lists")).await?;
        paths.extend(lists.into_iter().map(|(path, _)| path).filter(|path| *path != own_list));
        for epoch in self.store.folders(self.id.as_str()).await? {
            if epoch.parse::<i64>().is_ok_and(|epoch| epoch < self.epoch) {
                let older = self.store.list(&format!("{}/{epoch}", self.id)).await?;
                paths.extend(older.into_iter().map(|(path, _)| path));
            }
        }
        futures_util::stream::iter(paths)
            .map(|path| async move { self.store.delete(&path).await })
            .buffer_unordered(CARRIED_AT_ONCE)
            .try_collect::<Vec<()>>()
            .await
            .map(drop)
    }
}

/// The pieces to be looked at of the parts in these files, and the parts' lengths now.
fn pieces(files: &[PathBuf], inner: &mut Inner) -> Result<(Vec<Place>, Vec<u64>), StoreError> {
    let mut lengths = Vec::new();
    let mut all = Vec::new();
    for (part, path) in files.iter().enumerate() {
        let length = std::fs::metadata(path).map_err(StoreError::Local)?.len();
        lengths.push(length);
        let count = usize::try_from(length.div_ceil(PIECE as u64)).unwrap_or(usize::MAX);
        let (before, names) = &mut inner.parts[part];
        let resized = (*before != length).then_some([*before, length]);
        names.resize(count, None);
        match &inner.pending {
            // The device state is small, and another each time.
            _ if part == STATE => all.extend((0..count).map(|at| (part, at))),
            None => all.extend((0..count).map(|at| (part, at))),
            Some(pending) => {
                let mut these = pending[part].clone();
                // The last piece is another if the file ends elsewhere.
                for end in resized.into_iter().flatten() {
                    let last = end.saturating_sub(1) / PIECE as u64;
                    these.extend(u32::try_from(last).ok());
                }
                all.extend(
                    these.iter().map(|&at| (part, at as usize)).filter(|(_, at)| *at < count),
                );
            }
        }
    }
    Ok((all, lengths))
}

/// The list, and the bytes that its chunks take in the store.
fn list_of(inner: &Inner, taken: &Taken, number: u64, lengths: &[u64]) -> (List, u64) {
    let mut chunks: Vec<String> = Vec::new();
    let mut places: HashMap<&str, u32> = HashMap::new();
    let mut parts = Vec::new();
    for ((_, names), length) in inner.parts.iter().zip(lengths) {
        let pieces = names.iter().map(|name| {
            let Some(name) = name else { return 0 };
            *places.entry(name).or_insert_with(|| {
                chunks.push(name.clone());
                u32::try_from(chunks.len()).unwrap_or(u32::MAX)
            })
        });
        parts.push(Part { length: *length, pieces: pieces.collect() });
    }
    let there = inner.there.as_ref();
    let bytes = chunks.iter().filter_map(|name| there?.get(name)).sum();
    let list = List {
        format: FORMAT,
        number,
        of: taken.of.clone(),
        saved: taken.saved.clone(),
        asleep: taken.asleep,
        chunks,
        parts,
    };
    (list, bytes)
}

/// The copy of the last checkpoint beside a sandbox's own files.
pub(crate) fn shadow_of(files: &Files) -> Files {
    Files::in_dir(files.dir().join("checkpoint"))
}

/// The word about the newest checkpoint under an epoch.
pub(super) async fn latest(
    store: &Store,
    id: &SandboxId,
    epoch: i64,
) -> Result<Option<Latest>, StoreError> {
    let text = match store.get(&format!("{}/latest", place(id, epoch))).await {
        Ok(text) => text,
        Err(StoreError::Missing) => return Ok(None),
        Err(error) => return Err(error),
    };
    let latest: Latest =
        serde_json::from_slice(&text).map_err(|error| StoreError::Damaged(error.to_string()))?;
    if latest.format != FORMAT {
        return Err(StoreError::Damaged(format!(
            "written by another version (format {})",
            latest.format
        )));
    }
    Ok(Some(latest))
}

fn read_piece(file: &File, at: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; PIECE];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], (at * PIECE + filled) as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

fn pack(bytes: &[u8]) -> Result<Vec<u8>, StoreError> {
    zstd::bulk::compress(bytes, PACKED).map_err(StoreError::Local)
}
