//! The object store, as checkpoints need it: small objects, put whole, each operation with a limit.
//!
//! A store is a folder (`file:///…`) or a bucket ([`s3`](super::s3)). It is known by a mark, put there by the first daemon that
//! uses it: a folder that was unmounted or removed must not be taken for an empty store.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tokio::sync::{OnceCell, Semaphore, SemaphorePermit};

use super::s3::Bucket;

/// How long one operation may take. A store that answers no sooner counts as silent.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// Operations of all sandboxes at a time: each holds a piece in memory and, in a folder, a thread.
const OPERATIONS_MAX: usize = 16;

/// Largest object that is read, bytes: the list of a checkpoint of the largest sandbox (16 GiB in pieces of 32 KiB) takes less.
const OBJECT_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// What marks a folder as a store.
const MARK: &str = "dormouse-store.json";

/// What stands in it.
const MARK_TEXT: &[u8] = br#"{"format": 1}"#;

/// See the module.
#[derive(Debug)]
pub(crate) struct Store {
    place: Place,
    opened: OnceCell<Arc<dyn ObjectStore>>,
    /// It has refused to overwrite what is put once.
    conditional: OnceCell<()>,
    turns: Semaphore,
}

#[derive(Debug)]
enum Place {
    Folder(PathBuf),
    Bucket,
}

/// Why the store did not do it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    #[error("the store is not there")]
    Absent,
    #[error("the store does not answer within {ANSWER_MAX:?}")]
    Silent,
    /// No connection to it, or none that lasts.
    #[error("the store cannot be reached: {0}")]
    Unreachable(String),
    #[error("the store refuses this host's credentials: {0}")]
    Denied(String),
    /// Two hosts could believe that a sandbox is theirs.
    #[error(
        "the store overwrites what is to be put only once (it does not keep to `If-None-Match: *`): \
         it cannot say whose a sandbox is, and checkpoints cannot be kept there"
    )]
    Unconditional,
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
pub enum StoreUrlError {
    /// What the address is not.
    #[error(
        "the store `{0}` cannot be used: it must be `file:///` and the full path of a folder, or `s3://` and the name of a \
         bucket (small letters, digits, `-`, `.`) with or without a `/folder` in it (letters, digits, `-`, `_`, `.`)"
    )]
    Address(String),
    /// What is set for its client is of no use.
    #[error("the store's settings in the environment cannot be used: {0}")]
    Environment(String),
}

impl Store {
    /// By its address. Whether it is there shows when it is used.
    pub(crate) fn new(url: &str) -> Result<Self, StoreUrlError> {
        let wrong = || StoreUrlError::Address(url.to_owned());
        let (place, opened) = if let Some(address) = url.strip_prefix("s3://") {
            let bucket = Bucket::parse(address).ok_or_else(wrong)?;
            (Place::Bucket, OnceCell::new_with(Some(bucket.open()?)))
        } else {
            let folder = url.strip_prefix("file://").filter(|path| path.starts_with('/'));
            (Place::Folder(folder.ok_or_else(wrong)?.into()), OnceCell::new())
        };
        Ok(Self::at(place, opened))
    }

    fn at(place: Place, opened: OnceCell<Arc<dyn ObjectStore>>) -> Self {
        let turns = Semaphore::new(OPERATIONS_MAX);
        Self { place, opened, conditional: OnceCell::new(), turns }
    }

    /// Marks an empty place as a store; one that is marked stays as it is. Then makes sure that it is fit to be one.
    pub(crate) async fn found(&self) -> Result<(), StoreError> {
        match self.is_there().await {
            Err(StoreError::Absent) => self.mark().await?,
            other => other?,
        }
        self.is_fit().await
    }

    async fn mark(&self) -> Result<(), StoreError> {
        if !self.list("").await?.is_empty() {
            return Err(StoreError::Failed("there are other things in it".to_owned()));
        }
        match self.put_as(MARK, MARK_TEXT.to_vec(), PutMode::Create).await {
            // Another daemon was faster.
            Err(StoreError::Taken) => Ok(()),
            put => put,
        }
    }

    /// Whether it refuses to overwrite what is put once. Asked of each store once, with its mark: whoever overwrites that writes
    /// the same.
    async fn is_fit(&self) -> Result<(), StoreError> {
        let asked = self.conditional.get_or_try_init(async || {
            self.is_there().await?;
            match self.put_as(MARK, MARK_TEXT.to_vec(), PutMode::Create).await {
                Err(StoreError::Taken) => Ok(()),
                Ok(()) => Err(StoreError::Unconditional),
                Err(error) => Err(error),
            }
        });
        asked.await.copied()
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

    /// Writes an object that must not be there yet ([`StoreError::Taken`]). A bucket may say so of what this very call has put,
    /// when its first answer was lost.
    pub(crate) async fn put_new(&self, path: &str, bytes: Vec<u8>) -> Result<(), StoreError> {
        self.is_fit().await?;
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
        // A bucket's client is made with the store.
        let Place::Folder(folder) = &self.place else { return Err(StoreError::Absent) };
        let there = folder.clone();
        let folder = folder.clone();
        let opened = tokio::task::spawn_blocking(move || LocalFileSystem::new_with_prefix(folder));
        let opened = opened.await.map_err(|error| StoreError::Failed(error.to_string()))?;
        // What a checkpoint's list names must outlast a power cut that the list outlasts.
        let opened = opened.map(|opened| opened.with_fsync(true).with_automatic_cleanup(true));
        match opened {
            Ok(opened) => Ok(Arc::new(opened)),
            Err(_) if !there.is_dir() => Err(StoreError::Absent),
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
    super::s3::explained(error)
        .unwrap_or_else(|| StoreError::Failed(crate::sandbox::work::chain(error)))
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
        for wrong in ["/srv/store", "file://store", "s3://", "s3://a/b", "https://bucket"] {
            assert!(Store::new(wrong).is_err(), "{wrong}");
        }
    }

    /// Answers requests of the S3 protocol as a store does that ignores their conditions: it has no object at first, and says
    /// that every one was put.
    async fn careless(listener: tokio::net::TcpListener) {
        use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
        let mut is_marked = false;
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            let mut stream = BufReader::new(stream);
            let (mut first, mut length, mut line) = (String::new(), 0, String::new());
            stream.read_line(&mut first).await.expect("a request");
            while stream.read_line(&mut line).await.is_ok_and(|_| line.trim() != "") {
                if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().expect("a number");
                }
                line.clear();
            }
            stream.read_exact(&mut vec![0; length]).await.expect("a body");
            let list = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>";
            let (status, body) = match first.split(' ').next() {
                Some("PUT") => {
                    is_marked = true;
                    ("200 OK", "")
                }
                _ if first.contains("list-type") => ("200 OK", list),
                _ if is_marked => ("200 OK", "{}"),
                _ => ("404 Not Found", ""),
            };
            let answer = format!(
                "HTTP/1.1 {status}\r\nETag: \"1\"\r\nLast-Modified: Mon, 30 Nov 2026 18:00:00 GMT\r\n\
                 Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            );
            stream.write_all(answer.as_bytes()).await.expect("answered");
        }
    }

    #[tokio::test]
    async fn s20_a_bucket_that_overwrites_what_is_put_once_is_no_store() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let server = tokio::spawn(careless(listener));
        let bucket = Bucket::parse("checkpoints/one").expect("a bucket");
        let settings = object_store::aws::AmazonS3Builder::new()
            .with_endpoint(endpoint)
            .with_allow_http(true)
            .with_access_key_id("key")
            .with_secret_access_key("secret");
        let opened = bucket.open_with(settings).expect("a client");
        let store = Store::at(Place::Bucket, OnceCell::new_with(Some(opened)));
        assert!(matches!(store.found().await, Err(StoreError::Unconditional)));
        // Nor is it when it is asked later, or had a mark before.
        let claimed = store.put_new("a/owner/1", b"one".to_vec()).await;
        assert!(matches!(claimed, Err(StoreError::Unconditional)));
        server.abort();
    }

    #[tokio::test]
    async fn an_object_is_claimed_once_and_replaced_whole() {
        let folder = tempfile::tempdir().expect("folder");
        let store = store(folder.path());
        assert!(matches!(store.put_new("a", Vec::new()).await, Err(StoreError::Absent)));
        store.found().await.expect("founded");
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
