//! Finds checkpoints in the store, and brings one to this host.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use api::SandboxId;
use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _};
use vmm::files::PIECE;

use super::keeper::latest;
use super::{
    FORMAT, Latest, List, PARTS, Store, StoreError, chunk_path, hex_sha256, list_path, part_files,
};
use crate::settings::Files;

/// Chunks that are fetched at a time.
const FETCHED_AT_ONCE: usize = 8;

/// Bytes that a list may take when it is unpacked: that of 16 GiB, all different, has some 20 MB.
const LIST_BYTES_MAX: usize = 64 * 1024 * 1024;

/// A checkpoint that can be taken up.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) latest: Latest,
    /// Under which its chunks lie.
    pub(crate) epoch: i64,
    /// The highest under which anybody owns it.
    pub(crate) owned_epoch: i64,
}

/// The newest checkpoint of each sandbox, oldest first. One that cannot be read is logged and left out.
pub(crate) async fn list(store: &Store) -> Result<Vec<Found>, StoreError> {
    store.is_there().await?;
    let mut all = Vec::new();
    for name in store.folders("").await? {
        let Ok(id) = name.parse::<SandboxId>() else { continue };
        match find(store, &id).await {
            Ok(found) => all.extend(found),
            Err(error) => tracing::error!(sandbox = %id, %error, "a checkpoint cannot be read"),
        }
    }
    all.sort_by_key(|found| found.latest.taken_at.unix_ms);
    Ok(all)
}

/// The newest checkpoint of a sandbox: of the highest epoch that has a complete one.
pub(crate) async fn find(store: &Store, id: &SandboxId) -> Result<Option<Found>, StoreError> {
    let folders = store.folders(id.as_str()).await?;
    let mut epochs: Vec<i64> = folders.iter().filter_map(|name| name.parse().ok()).collect();
    epochs.sort_unstable();
    let owner = super::owner(store, id).await?;
    for epoch in epochs.into_iter().rev() {
        if let Some(latest) = latest(store, id, epoch).await? {
            let owned_epoch = owner.map_or(epoch, |(owned, _)| owned.max(epoch));
            return Ok(Some(Found { latest, epoch, owned_epoch }));
        }
    }
    Ok(None)
}

/// Its list, verified.
pub(crate) async fn read_list(store: &Store, found: &Found) -> Result<List, StoreError> {
    let damaged = |error: &dyn std::fmt::Display| StoreError::Damaged(error.to_string());
    let path = list_path(&found.latest.id, found.epoch, found.latest.number);
    let text = store.get(&path).await?;
    if hex_sha256(&text) != found.latest.sha256 {
        return Err(StoreError::Damaged("its list is not the one that was written".to_owned()));
    }
    let text = zstd::bulk::decompress(&text, LIST_BYTES_MAX).map_err(|error| damaged(&error))?;
    let list: List = serde_json::from_slice(&text).map_err(|error| damaged(&error))?;
    if list.format != FORMAT || list.parts.len() != PARTS.len() + list.of.drives.len() {
        return Err(StoreError::Damaged(format!(
            "written by another version (format {})",
            list.format
        )));
    }
    Ok(list)
}

/// Writes a checkpoint's memory, disk, device state and drives into these files, which must not be there yet; synced, every chunk
/// verified.
pub(crate) async fn fetch(
    store: &Arc<Store>,
    found: &Found,
    list: &List,
    files: &Files,
) -> Result<(), StoreError> {
    for (part, path) in list.parts.iter().zip(part_files(&list.of, files)) {
        let file = File::create_new(&path)
            .and_then(|file| file.set_len(part.length).map(|()| Arc::new(file)))
            .map_err(StoreError::Local)?;
        let mut pieces = Vec::new();
        for (at, chunk) in part.pieces.iter().enumerate() {
            if let Some(chunk) = chunk.checked_sub(1) {
                let name = list.chunks.get(chunk as usize).cloned();
                pieces.push((at as u64 * PIECE as u64, name));
            }
        }
        futures_util::stream::iter(pieces)
            .map(|(at, name)| fetch_one(store, found, name, Arc::clone(&file), at))
            .buffer_unordered(FETCHED_AT_ONCE)
            .try_collect::<Vec<()>>()
            .await?;
        let synced = tokio::task::spawn_blocking(move || file.sync_all()).await;
        synced
            .map_err(|error| StoreError::Failed(error.to_string()))?
            .map_err(StoreError::Local)?;
    }
    Ok(())
}

async fn fetch_one(
    store: &Store,
    found: &Found,
    name: Option<String>,
    file: Arc<File>,
    at: u64,
) -> Result<(), StoreError> {
    let name =
        name.ok_or_else(|| StoreError::Damaged("its list names no such chunk".to_owned()))?;
    let packed = store.get(&chunk_path(&found.latest.id, found.epoch, &name)).await?;
    let written = tokio::task::spawn_blocking(move || write_piece(&packed, &name, &file, at)).await;
    written.map_err(|error| StoreError::Failed(error.to_string()))?
}

fn write_piece(packed: &Bytes, name: &str, file: &File, at: u64) -> Result<(), StoreError> {
    let bytes = zstd::bulk::decompress(packed, PIECE)
        .map_err(|error| StoreError::Damaged(format!("chunk {name}: {error}")))?;
    if hex_sha256(&bytes) != name {
        return Err(StoreError::Damaged(format!("chunk {name} is not what was written")));
    }
    file.write_all_at(&bytes, at).map_err(StoreError::Local)
}
