//! The object store, as checkpoints need it: small objects, put whole, each operation with a limit.
//!
//! A store is a folder so far (`file:///…`); everything else here speaks to it as an object store. It is known by a mark, put
//! there by the first daemon that uses it: a folder that was unmounted or removed must not be taken for an empty store.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tokio::sync::{OnceCell, Semaphore, SemaphorePermit};

/// How long one operation may take. A store that answers no sooner counts as silent.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// Operations of all sandboxes at a time: each holds a piece in memory and, in a folder, a thread.
const OPERATIONS_MAX: usize = 16;

/// Largest object that is read, bytes: the list of a checkpoint of the largest sandbox (16 GiB in pieces of 32 KiB) takes less.
const OBJECT_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// What marks a folder as a store.
const MARK: &str = "dormouse-store.json";

/// See the module.
#[derive(Debug)]
pub(crate) struct Store {
    folder: PathBuf,
    opened: OnceCell<Arc<dyn ObjectStore>>,
    turns: Semaphore,
}

/// Why the store did not do it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    #[error("the store is not there")]
    Absent,
    #[error("the store does not answer within {ANSWER_MAX:?}")]
    Silent,
    #[error("the store is full")]
    Full,
    #[error("the store has no such object")]
    Missing,
    #[error("the store has such an object already")]
    Taken,
    #[error("the store failed: {0}")]
    Failed(String),
    /// It belongs to another host now.
    #[error("it belongs to another host now: {0}")]
    Lost(String),
    #[error("what the store has is damaged: {0}")]
    Damaged(String),
    #[error("the checkpoint's own copy on this host")]
    Local(#[source] std::io::Error),
}

/// Why the setting is of no use.
#[derive(Debug, thiserror::Error)]
#[error("the store `{0}` cannot be used: it must be `file:///` and the full path of a folder")]
pub struct StoreUrlError(String);

impl Store {
    /// By its address. Whether it is there shows when it is used.
    pub(crate) fn new(url: &str) -> Result<Self, StoreUrlError> {
        let folder = url.strip_prefix("file://").filter(|path| path.starts_with('/'));
        let folder = folder.ok_or_else(|| StoreUrlError(url.to_owned()))?;
        Ok(Self {
            folder: folder.into(),
            opened: OnceCell::new(),
            turns: Semaphore::new(OPERATIONS_MAX),
        })
    }

    /// Marks an empty folder as a store; one that is marked stays as it is.
    pub(crate) async fn found(&self) -> Result<(), StoreError> {
        match self.is_there().await {
            Err(StoreError::Absent) => {}
            other => return other,
        }
        if !self.list("").await?.is_empty() {
            return Err(StoreError::Failed("the folder has other things in it".to_owned()));
        }
        match self.put_new(MARK, br#"{"format": 1}"#.to_vec()).await {
            // Another daemon was faster.
            Err(StoreError::Taken) => Ok(()),
            put => put,
        }
    }

    /// Whether it is there and answers.
    pub(crate) async fn is_there(&self) -> Result<(), StoreError> {
        match self.get(MARK).await {
            Ok(_) => Ok(()),
            Err(StoreError::Missing) => Err(StoreError::Absent),
            Err(error) => Err(error),
        }
    }

    /// Writes an object, in place of an older one.
    pub(crate) async fn put(&self, path: &str, bytes: Vec<u8>) -> Result<(), StoreError> {
        self.put_as(path, bytes, PutMode::Overwrite).await
    }

    /// Writes an object that must not be there yet ([`StoreError::Taken`]).
    pub(crate) async fn put_new(&self, path: &str, bytes: Vec<u8>) -> Result<(), StoreError> {
        self.put_as(path, bytes, PutMode::Create).await
    }

    async fn put_as(&self, path: &str, bytes: Vec<u8>, mode: PutMode) -> Result<(), StoreError> {
        let (objects, _turn) = self.turn().await?;
        let (path, options) = (Path::from(path), PutOptions { mode, ..PutOptions::default() });
        bounded(objects.put_opts(&path, PutPayload::from(bytes), options)).await.map(drop)
    }

    /// Reads an object.
    pub(crate) async fn get(&self, path: &str) -> Result<Bytes, StoreError> {
        let (objects, _turn) = self.turn().await?;
        let path = Path::from(path);
        let found = bounded(objects.get(&path)).await?;
        if found.meta.size > OBJECT_BYTES_MAX {
            return Err(StoreError::Damaged(format!("an object of {} bytes", found.meta.size)));
        }
        bounded(found.bytes()).await
    }

    /// Paths and sizes of all objects below a folder.
    pub(crate) async fn list(&self, below: &str) -> Result<Vec<(String, u64)>, StoreError> {
        let (objects, _turn) = self.turn().await?;
        let below = Path::from(below);
        let mut list = objects.list(Some(&below));
        let mut all = Vec::new();
        while let Some(found) = bounded(async { Ok(list.next().await) }).await? {
            match found {
                Ok(found) => all.push((found.location.to_string(), found.size)),
                // One that was removed meanwhile.
                Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(explained(&error)),
            }
        }
        Ok(all)
    }

    /// Names of the folders in a folder.
    pub(crate) async fn folders(&self, within: &str) -> Result<Vec<String>, StoreError> {
        let (objects, _turn) = self.turn().await?;
        let within = Path::from(within);
        let found = bounded(objects.list_with_delimiter(Some(&within))).await?;
        let names = found.common_prefixes.iter().filter_map(Path::filename);
        Ok(names.map(str::to_owned).collect())
    }

    /// Removes an object; gone already is fine.
    pub(crate) async fn delete(&self, path: &str) -> Result<(), StoreError> {
        let (objects, _turn) = self.turn().await?;
        let path = Path::from(path);
        match bounded(objects.delete(&path)).await {
            Err(StoreError::Missing) => Ok(()),
            deleted => deleted,
        }
    }

    /// Waits for one's turn for one operation.
    async fn turn(&self) -> Result<(&dyn ObjectStore, SemaphorePermit<'_>), StoreError> {
        let turn = async {
            let turn = self.turns.acquire().await.map_err(|_| StoreError::Silent)?;
            let objects = self.opened.get_or_try_init(|| self.open()).await?;
            Ok((&**objects, turn))
        };
        tokio::time::timeout(ANSWER_MAX, turn).await.unwrap_or(Err(StoreError::Silent))
    }

    async fn open(&self) -> Result<Arc<dyn ObjectStore>, StoreError> {
        let folder = self.folder.clone();
        let opened = tokio::task::spawn_blocking(move || LocalFileSystem::new_with_prefix(folder));
        let opened = opened.await.map_err(|error| StoreError::Failed(error.to_string()))?;
        // What a checkpoint's list names must outlast a power cut that the list outlasts.
        let opened = opened.map(|opened| opened.with_fsync(true).with_automatic_cleanup(true));
        match opened {
            Ok(opened) => Ok(Arc::new(opened)),
            Err(_) if !self.folder.is_dir() => Err(StoreError::Absent),
            Err(error) => Err(explained(&error)),
        }
    }
}

/// One operation, within its limit.
async fn bounded<T>(work: impl Future<Output = object_store::Result<T>>) -> Result<T, StoreError> {
    match tokio::time::timeout(ANSWER_MAX, work).await {
        Ok(done) => done.map_err(|error| explained(&error)),
        Err(_) => Err(StoreError::Silent),
    }
}

fn explained(error: &object_store::Error) -> StoreError {
    match error {
        object_store::Error::NotFound { .. } => return StoreError::Missing,
        object_store::Error::AlreadyExists { .. } => return StoreError::Taken,
        _ => {}
    }
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = next {
        if let Some(cause) = cause.downcast_ref::<std::io::Error>()
            && matches!(
                cause.kind(),
                std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded
            )
        {
            return StoreError::Full;
        }
        next = cause.source();
    }
    StoreError::Failed(crate::sandbox::work::chain(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(folder: &std::path::Path) -> Store {
        Store::new(&format!("file://{}", folder.display())).expect("an address")
    }

    #[tokio::test]
    async fn s20_only_a_marked_or_an_empty_folder_is_a_store() {
        let folder = tempfile::tempdir().expect("folder");
        let place = folder.path().join("store");
        let one = store(&place);
        assert!(matches!(one.found().await, Err(StoreError::Absent)));
        std::fs::create_dir(&place).expect("made");
        std::fs::write(place.join("other"), "x").expect("written");
        assert!(matches!(one.found().await, Err(StoreError::Failed(_))));
        std::fs::remove_file(place.join("other")).expect("removed");
        one.found().await.expect("founded");
        one.found().await.expect("founded before");
        one.is_there().await.expect("there");
        std::fs::rename(&place, folder.path().join("away")).expect("moved");
        assert!(matches!(one.is_there().await, Err(StoreError::Absent)));
        std::fs::create_dir(&place).expect("made");
        assert!(matches!(one.is_there().await, Err(StoreError::Absent)), "empty is not a store");
        for wrong in ["/srv/store", "file://store", "s3://bucket"] {
            assert!(Store::new(wrong).is_err(), "{wrong}");
        }
    }

    #[tokio::test]
    async fn an_object_is_claimed_once_and_replaced_whole() {
        let folder = tempfile::tempdir().expect("folder");
        let store = store(folder.path());
        store.put_new("a/owner/1", b"one".to_vec()).await.expect("new");
        assert!(matches!(
            store.put_new("a/owner/1", b"two".to_vec()).await,
            Err(StoreError::Taken)
        ));
        store.put("a/latest", b"1".to_vec()).await.expect("put");
        store.put("a/latest", b"2".to_vec()).await.expect("put again");
        assert_eq!(store.get("a/latest").await.expect("there"), b"2".as_slice());
        assert!(matches!(store.get("a/none").await, Err(StoreError::Missing)));
        assert_eq!(store.folders("a").await.expect("listed"), ["owner"]);
        store.delete("a/latest").await.expect("deleted");
        store.delete("a/latest").await.expect("gone already");
        assert_eq!(store.list("a").await.expect("listed"), [("a/owner/1".to_owned(), 3)]);
        assert_eq!(store.list("none").await.expect("listed"), []);
    }
}
