//! Checkpoints: what an awake sandbox is, kept again and again in an object store, so that another host can take it up where
//! it was when its own is lost.
//!
//! ```text
//! <store>/<id>/owner/<epoch>              whose it is: the highest decides. Put once, never changed
//! <store>/<id>/<epoch>/chunks/<sha256>    32 KiB of memory, disk or device state, packed
//! <store>/<id>/<epoch>/lists/<number>     a checkpoint: which chunks make up what, and what the sandbox is
//! <store>/<id>/<epoch>/latest             the newest complete one; replaced when all of it is there
//! ```
//!
//! On the host each such sandbox has a *shadow*, a copy of memory, disk and device state as they were at the last checkpoint.
//! A checkpoint compares and copies while the guest stands, and carries away what differed when it runs again.
//!
//! # Who owns a sandbox
//!
//! A host writes only below the epoch that it owns. Whoever takes a sandbox over puts the next owner record, which only one
//! can, reads what the epoch before it left, and begins anew below its own: so a host that comes back and does not know yet
//! cannot spoil anything. It looks at the owner records when it starts and before each checkpoint, and gives up what is not
//! its own any more ([`StoreError::Lost`]).

mod keeper;
mod restore;
mod s3;
mod store;

use std::path::PathBuf;

use api::SandboxId;
use serde::{Deserialize, Serialize};

pub(crate) use keeper::shadow_of;
pub(crate) use keeper::{Keeper, Kept, Taken};
pub(crate) use restore::{Found, fetch, find, list, read_list};
pub use store::StoreUrlError;
pub(crate) use store::{Store, StoreError};

use vmm::files::PIECE;

use crate::clock::Moment;
use crate::manifest::{Manifest, Saved};
use crate::settings::Files;

/// The format this build writes and reads.
const FORMAT: u32 = 2;

/// The parts of every sandbox in a checkpoint, by the names of their files. Its drives come after them.
const PARTS: [&str; 3] = ["memory", "disk.qcow2", "state"];

/// Which of [`PARTS`] is the device state.
pub(crate) const STATE: usize = 2;

/// The files of the parts of a sandbox below `files`, in their order.
pub(crate) fn part_files(of: &Manifest, files: &Files) -> Vec<PathBuf> {
    let drives = (0..of.drives.len()).map(|place| files.drive(place));
    PARTS.iter().map(|name| files.dir().join(name)).chain(drives).collect()
}

/// Whose a sandbox is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Owner {
    /// Random and for ever: of the data folder.
    pub(crate) host_id: String,
    /// For people.
    pub(crate) host: String,
    /// Since when, RFC 3339.
    pub(crate) since: String,
}

/// Who this host is, in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    pub(crate) id: String,
    pub(crate) name: String,
}

/// The newest checkpoint of a sandbox, in short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Latest {
    pub(crate) format: u32,
    /// Number of the list.
    pub(crate) number: u64,
    /// Of the list, as it lies in the store.
    pub(crate) sha256: String,
    pub(crate) id: SandboxId,
    pub(crate) name: String,
    pub(crate) host: String,
    pub(crate) taken_at: Moment,
    /// It slept then.
    pub(crate) asleep: bool,
    pub(crate) image: String,
    pub(crate) cpus: u32,
    pub(crate) memory_mib: u32,
    /// Bytes of its chunks and list in the store.
    pub(crate) stored_bytes: u64,
}

/// A checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct List {
    pub(crate) format: u32,
    pub(crate) number: u64,
    pub(crate) of: Manifest,
    pub(crate) saved: Saved,
    pub(crate) asleep: bool,
    /// Names of the chunks, each once.
    pub(crate) chunks: Vec<String>,
    /// As [`PARTS`], and its drives.
    pub(crate) parts: Vec<Part>,
}

impl List {
    /// Bytes that its files take on a disk: those of pieces that are not all zeros.
    pub(crate) fn bytes(&self) -> u64 {
        let pieces = self.parts.iter().flat_map(|part| &part.pieces);
        pieces.filter(|piece| **piece != 0).count() as u64 * PIECE as u64
    }
}

/// One file in a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Part {
    /// Bytes.
    pub(crate) length: u64,
    /// For each piece its place among the chunks, from 1; 0: zeros.
    pub(crate) pieces: Vec<u32>,
}

/// Claims a sandbox for this host under this epoch; claimed before by this host is fine.
pub(crate) async fn claim(
    store: &Store,
    host: &Host,
    id: &SandboxId,
    epoch: i64,
) -> Result<(), StoreError> {
    store.is_there().await?;
    if let Some((newest, owner)) = owner(store, id).await? {
        if newest == epoch && owner.host_id == host.id {
            return Ok(());
        }
        if newest >= epoch {
            return Err(StoreError::Lost(format!("{} since {}", owner.host, owner.since)));
        }
    }
    let owner = Owner {
        host_id: host.id.clone(),
        host: host.name.clone(),
        since: crate::clock::rfc3339(crate::clock::unix_ms()),
    };
    let text = serde_json::to_vec(&owner).map_err(|error| StoreError::Failed(error.to_string()))?;
    match store.put_new(&owner_path(id, epoch), text).await {
        Err(StoreError::Taken) => {}
        claimed => return claimed,
    }
    // By another host at this moment, or by this one, whose first attempt came through without an answer: the record decides.
    match self::owner(store, id).await? {
        Some((newest, owner)) if newest == epoch && owner.host_id == host.id => Ok(()),
        Some((_, owner)) => Err(StoreError::Lost(format!("{} since {}", owner.host, owner.since))),
        None => Err(StoreError::Failed("the owner of the sandbox is being written".to_owned())),
    }
}

/// The newest owner of a sandbox.
pub(crate) async fn owner(
    store: &Store,
    id: &SandboxId,
) -> Result<Option<(i64, Owner)>, StoreError> {
    let found = store.list(&format!("{id}/owner")).await?;
    let epochs = found.iter().filter_map(|(path, _)| path.rsplit('/').next()?.parse::<i64>().ok());
    let Some(newest) = epochs.max() else { return Ok(None) };
    let text = store.get(&owner_path(id, newest)).await?;
    let owner =
        serde_json::from_slice(&text).map_err(|error| StoreError::Damaged(error.to_string()))?;
    Ok(Some((newest, owner)))
}

/// Whether another host has taken it over; `None`: it is this host's, or nobody's.
pub(crate) async fn lost_to(
    store: &Store,
    host: &Host,
    id: &SandboxId,
    epoch: i64,
) -> Result<Option<Owner>, StoreError> {
    let owner = owner(store, id).await?;
    Ok(owner
        .filter(|(newest, owner)| *newest > epoch || owner.host_id != host.id)
        .map(|(_, owner)| owner))
}

/// Removes what the store has of a sandbox that this host owns under this epoch; nothing of another host's. Who owned it last
/// stays known where it has moved once: a host that comes back must still learn that it is not its own.
async fn forget(store: &Store, host: &Host, id: &SandboxId, epoch: i64) -> Result<(), StoreError> {
    store.is_there().await?;
    if lost_to(store, host, id, epoch).await?.is_some() {
        return Ok(());
    }
    // From then on nobody finds it.
    store.delete(&format!("{}/latest", place(id, epoch))).await?;
    for folder in store.folders(id.as_str()).await? {
        if folder.parse::<i64>().is_ok_and(|older| older <= epoch) {
            for (path, _) in store.list(&format!("{id}/{folder}")).await? {
                store.delete(&path).await?;
            }
        }
    }
    if epoch == 1 {
        store.delete(&owner_path(id, epoch)).await?;
    }
    Ok(())
}

fn owner_path(id: &SandboxId, epoch: i64) -> String {
    format!("{id}/owner/{epoch:08}")
}

/// Where what a host writes under an epoch lies.
fn place(id: &SandboxId, epoch: i64) -> String {
    format!("{id}/{epoch:08}")
}

fn chunk_path(id: &SandboxId, epoch: i64, name: &str) -> String {
    format!("{}/chunks/{name}", place(id, epoch))
}

fn list_path(id: &SandboxId, epoch: i64, number: u64) -> String {
    format!("{}/lists/{number:012}", place(id, epoch))
}

fn hex_sha256(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    crate::manifest::hex(&sha2::Sha256::digest(bytes))
}
