//! What the control plane must not forget: names, owners, URL keys, tokens, and which requests were answered.
//!
//! SQLite through sqlx's `Any`, so that the same text runs on PostgreSQL: `$1` placeholders, TEXT and BIGINT only. One
//! process owns the file; an index in memory answers the questions of every request (which id has this name, which key
//! has this id), and every change goes to the file first.
//!
//! # Not here
//!
//! What a sandbox does at the moment: its host knows that, and is asked each time.

mod accounts;
mod boxes;
mod idempotency;
mod index;
mod meters;
mod project;
mod secrets;
mod tokens;
mod usage;

use std::path::Path;
use std::sync::RwLock;
use std::time::{SystemTime, UNIX_EPOCH};

use api::SandboxId;
use api::project::Project;
use sqlx::AnyPool;
use sqlx::any::AnyPoolOptions;
use sqlx::{Any, Connection as _, Row, Transaction};

use crate::failure::Failure;

pub(crate) use idempotency::{Reservation, Wanted};
use index::Index;
pub(crate) use index::{Entry, Face, State};
pub(crate) use project::CountedMonth;

/// Connections that read beside the one that writes. Only start-up and tokens read from the file.
const READERS_MAX: u32 = 2;
/// How long a statement waits for another process's lock on the file, milliseconds (a backup tool may hold one).
const BUSY_TIMEOUT_MS: u32 = 5_000;

/// The catalogue of one control plane.
pub(crate) struct Catalogue {
    /// One connection, so that SQLite's single writer is waited for here and not by polling.
    writer: AnyPool,
    reader: AnyPool,
    index: RwLock<Index>,
    project: RwLock<Project>,
}

/// Why the catalogue could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The path of the data folder cannot stand in a database URL.
    #[error("the data folder's path is no UTF-8")]
    Path,
    /// SQLite refused.
    #[error("open the catalogue")]
    Open(#[source] sqlx::Error),
    /// The schema could not be brought up to date.
    #[error("bring the catalogue's schema up to date")]
    Migrate(#[source] sqlx::migrate::MigrateError),
    /// A row cannot be read.
    #[error("read the catalogue")]
    Read(#[source] sqlx::Error),
    /// A row holds what this program never writes.
    #[error("the catalogue's row of `{0}` is damaged")]
    Damaged(String),
}

impl Catalogue {
    /// Opens (or makes) `dormouse.db` in the data folder and brings its schema up to date.
    pub(crate) async fn open(data: &Path) -> Result<Self, OpenError> {
        sqlx::any::install_default_drivers();
        let path = data.join("dormouse.db");
        let path = path.to_str().ok_or(OpenError::Path)?;
        // `?` and `%` would be taken for the URL's own.
        let url = format!("sqlite://{}?mode=rwc", path.replace('%', "%25").replace('?', "%3f"));
        let writer = pool(&url, 1).await.map_err(OpenError::Open)?;
        sqlx::migrate!("./migrations").run(&writer).await.map_err(OpenError::Migrate)?;
        let reader = pool(&url, READERS_MAX).await.map_err(OpenError::Open)?;
        let rows =
            sqlx::query("SELECT id, name, state, link_key, epoch, created_ms, face FROM sandboxes")
                .fetch_all(&reader)
                .await
                .map_err(OpenError::Read)?;
        let mut index = Index::default();
        for row in rows {
            let id: String = row.try_get("id").map_err(OpenError::Read)?;
            let state: String = row.try_get("state").map_err(OpenError::Read)?;
            let face: String = row.try_get("face").map_err(OpenError::Read)?;
            let entry = Entry {
                id: id.parse().map_err(|_| OpenError::Damaged(id.clone()))?,
                name: row.try_get("name").map_err(OpenError::Read)?,
                state: State::parse(&state).ok_or_else(|| OpenError::Damaged(id.clone()))?,
                face: Face::parse(&face).ok_or(OpenError::Damaged(id))?,
                link_key: row.try_get("link_key").map_err(OpenError::Read)?,
                epoch: row.try_get("epoch").map_err(OpenError::Read)?,
                created_ms: row.try_get("created_ms").map_err(OpenError::Read)?,
            };
            index.insert(entry);
        }
        let project = RwLock::new(project::read(&reader).await?);
        Ok(Self { writer, reader, index: RwLock::new(index), project })
    }

    /// Finishes what is being written and closes the file.
    pub(crate) async fn close(&self) {
        self.reader.close().await;
        self.writer.close().await;
    }

    /// A sandbox by id or, where no id is like this, by name.
    pub(crate) fn find(&self, id_or_name: &str) -> Option<Entry> {
        let index = self.read_index();
        id_or_name
            .parse()
            .ok()
            .and_then(|id| index.by_id(&id))
            .or_else(|| index.by_name(id_or_name))
            .cloned()
    }

    /// As [`find`](Self::find), of the sandbox face alone.
    pub(crate) fn find_sandbox(&self, id_or_name: &str) -> Option<Entry> {
        self.find(id_or_name).filter(|entry| entry.face == Face::Sandbox)
    }

    /// All sandboxes, of both faces, oldest first.
    pub(crate) fn all(&self) -> Vec<Entry> {
        self.read_index().all()
    }

    /// Writes down a host, so that its sandboxes have an owner.
    pub(crate) async fn add_host(&self, name: &str) -> Result<(), Failure> {
        sqlx::query(
            "INSERT INTO hosts (id, epoch, lease_until_ms, created_ms) VALUES ($1, 1, 0, $2) ON CONFLICT (id) DO NOTHING",
        )
        .bind(name)
        .bind(now_ms())
        .execute(&self.writer)
        .await
        .map_err(Failure::internal("write the host into the catalogue"))?;
        Ok(())
    }

    /// Enters a sandbox that a host has and the catalogue lost. `false`: its name is taken by another.
    pub(crate) async fn adopt(&self, host: &str, entry: Entry) -> Result<bool, Failure> {
        let mut tx = self.begin().await?;
        if taken(&mut tx, &entry.name, &entry.id).await? {
            return Ok(false);
        }
        insert(&mut tx, host, &entry, "{}").await?;
        tx.commit().await.map_err(Failure::internal("write the catalogue"))?;
        self.write_index().insert(entry);
        Ok(true)
    }

    /// Gives it another name. `false`: that one is taken.
    pub(crate) async fn rename(&self, id: &SandboxId, name: &str) -> Result<bool, Failure> {
        let mut tx = self.begin().await?;
        if taken(&mut tx, name, id).await? {
            return Ok(false);
        }
        sqlx::query("UPDATE sandboxes SET name = $2 WHERE id = $1")
            .bind(id.as_str())
            .bind(name)
            .execute(&mut *tx)
            .await
            .map_err(Failure::internal("rename in the catalogue"))?;
        tx.commit().await.map_err(Failure::internal("write the catalogue"))?;
        self.write_index().change(id, |entry| name.clone_into(&mut entry.name));
        Ok(true)
    }

    /// Moves it on.
    pub(crate) async fn set_state(&self, id: &SandboxId, state: State) -> Result<(), Failure> {
        sqlx::query("UPDATE sandboxes SET state = $2 WHERE id = $1")
            .bind(id.as_str())
            .bind(state.as_str())
            .execute(&self.writer)
            .await
            .map_err(Failure::internal("write the catalogue"))?;
        self.write_index().change(id, |entry| entry.state = state);
        Ok(())
    }

    /// Forgets a sandbox, and every unanswered request for it, so that the request may be made again.
    pub(crate) async fn remove(&self, id: &SandboxId) -> Result<(), Failure> {
        let mut tx = self.begin().await?;
        for statement in [
            "DELETE FROM idempotency WHERE sandbox_id = $1 AND answer = ''",
            "DELETE FROM sandboxes WHERE id = $1",
        ] {
            sqlx::query(statement)
                .bind(id.as_str())
                .execute(&mut *tx)
                .await
                .map_err(Failure::internal("delete from the catalogue"))?;
        }
        tx.commit().await.map_err(Failure::internal("write the catalogue"))?;
        self.write_index().remove(id);
        Ok(())
    }

    async fn begin(&self) -> Result<Transaction<'static, Any>, Failure> {
        // Takes the write lock at once: a transaction that began with a read could fail later with `busy` on an
        // upgrade that no time-out helps.
        self.writer
            .begin_with("BEGIN IMMEDIATE")
            .await
            .map_err(Failure::internal("begin in the catalogue"))
    }

    fn read_index(&self) -> std::sync::RwLockReadGuard<'_, Index> {
        self.index.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn write_index(&self) -> std::sync::RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Milliseconds since 1970 by the host's clock.
pub(crate) fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

async fn pool(url: &str, connections: u32) -> Result<AnyPool, sqlx::Error> {
    AnyPoolOptions::new()
        .max_connections(connections)
        // SQLite itself gives a transaction up that finds no room on the disk, or that cannot be read or written. Then sqlx counts one
        // for good that is over, and begins none any more on this connection.
        .before_acquire(|connection, _| {
            let usable = !connection.is_in_transaction();
            Box::pin(async move { Ok(usable) })
        })
        .after_connect(|connection, _| {
            Box::pin(async move {
                // FULL: what was answered to a client survives a power cut. Writes are rare (create, rename, delete).
                for statement in [
                    sqlx::AssertSqlSafe(format!("PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")),
                    sqlx::AssertSqlSafe("PRAGMA journal_mode = WAL".to_owned()),
                    sqlx::AssertSqlSafe("PRAGMA synchronous = FULL".to_owned()),
                ] {
                    sqlx::query(statement).execute(&mut *connection).await?;
                }
                Ok(())
            })
        })
        .connect(url)
        .await
}

/// Whether another sandbox has this name, or this name as its id (which would hide it).
async fn taken(
    tx: &mut Transaction<'static, Any>,
    name: &str,
    id: &SandboxId,
) -> Result<bool, Failure> {
    let row = sqlx::query("SELECT id FROM sandboxes WHERE (name = $1 OR id = $1) AND id <> $2")
        .bind(name)
        .bind(id.as_str())
        .fetch_optional(&mut **tx)
        .await
        .map_err(Failure::internal("look up a name in the catalogue"))?;
    Ok(row.is_some())
}

async fn insert(
    tx: &mut Transaction<'static, Any>,
    host: &str,
    entry: &Entry,
    spec: &str,
) -> Result<(), Failure> {
    sqlx::query(
        "INSERT INTO sandboxes (id, name, host, epoch, state, link_key, spec, created_ms, face) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
    )
    .bind(entry.id.as_str())
    .bind(entry.name.as_str())
    .bind(host)
    .bind(entry.epoch)
    .bind(entry.state.as_str())
    .bind(entry.link_key.as_str())
    .bind(spec)
    .bind(entry.created_ms)
    .bind(entry.face.as_str())
    .execute(&mut **tx)
    .await
    .map_err(Failure::internal("enter a sandbox into the catalogue"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a disk on which there is no room for some time.
    async fn fill(catalogue: &Catalogue, is_full: bool) {
        let (pages,): (i64,) =
            sqlx::query_as("PRAGMA page_count").fetch_one(&catalogue.writer).await.unwrap();
        let most = if is_full { pages } else { i64::from(i32::MAX) };
        let statement = sqlx::AssertSqlSafe(format!("PRAGMA max_page_count = {most}"));
        sqlx::query(statement).execute(&catalogue.writer).await.unwrap();
    }

    #[tokio::test]
    async fn s07_a_full_disk_is_told_and_once_there_is_room_everything_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let catalogue = Catalogue::open(folder.path()).await.unwrap();
        catalogue.add_host("here").await.unwrap();
        let entry = |n: usize| Entry {
            id: format!("k3b5qj2m4{:a>3}", ["a", "b", "c"][n]).parse().unwrap(),
            // So long that free pages in the file are not enough for it.
            name: "n".repeat(500_000) + &n.to_string(),
            state: State::Ready,
            face: Face::Sandbox,
            link_key: "key".to_owned(),
            epoch: 1,
            created_ms: 1,
        };
        catalogue.adopt("here", entry(0)).await.unwrap();
        fill(&catalogue, true).await;
        let error = catalogue.adopt("here", entry(1)).await.unwrap_err().into_api_error();
        assert_eq!(error.code, api::Code::NoSpace, "{error:?}");
        assert!(error.retryable);
        fill(&catalogue, false).await;
        assert!(catalogue.adopt("here", entry(1)).await.unwrap());
        catalogue.remove(&entry(0).id).await.unwrap();
    }
}
