//! One request, one sandbox, however often it is sent.
//!
//! ```text
//!            reserve                       answer
//!   unknown ---------> being worked on -------------> answered (kept 24 h)
//!      ^                     |
//!      +--- remove (failed) -+      after a crash: worked on again, with the same sandbox id
//! ```
//!
//! The row of the sandbox, with its id chosen, and the row of the key are written in one transaction before the host
//! hears of it. Whatever happens after that, a repeated request finds the same id.

use api::SandboxId;
use api::sandbox::Sandbox;
use sqlx::Row;

use super::{Catalogue, Entry, State, insert, now_ms, taken};
use crate::failure::Failure;

/// How long an answered request is remembered, milliseconds: a day, in which a client's retries have long ended.
const KEEP_MS: i64 = 24 * 60 * 60 * 1000;

/// A sandbox that shall be made.
pub(crate) struct Wanted<'a> {
    /// The host it goes to.
    pub(crate) host: &'a str,
    /// `Idempotency-Key`, and the SHA-256 in hex of the request it stands for.
    pub(crate) key: Option<(&'a str, &'a str)>,
    /// Its row.
    pub(crate) entry: Entry,
    /// What was asked for, as JSON.
    pub(crate) spec: &'a str,
}

/// What a request turned out to be.
pub(crate) enum Reservation {
    /// A new one: written down.
    New,
    /// A repeated one that is (or was, before a crash) being worked on.
    Begun(Entry),
    /// A repeated one that was answered.
    Answered(Box<Sandbox>),
    /// The key belongs to another request.
    Mismatch,
    /// The name belongs to another sandbox.
    NameTaken,
}

impl Catalogue {
    /// Writes down that this sandbox shall be made, unless the request was seen before.
    pub(crate) async fn reserve(&self, wanted: Wanted<'_>) -> Result<Reservation, Failure> {
        let now = now_ms();
        let mut tx = self.begin().await?;
        sqlx::query("DELETE FROM idempotency WHERE created_ms < $1")
            .bind(now - KEEP_MS)
            .execute(&mut *tx)
            .await
            .map_err(Failure::internal("forget old idempotency keys"))?;
        if let Some((key, hash)) = wanted.key {
            let row = sqlx::query(
                "SELECT request_hash, sandbox_id, answer FROM idempotency WHERE key = $1",
            )
            .bind(key)
            .fetch_optional(&mut *tx)
            .await
            .map_err(Failure::internal("look up an idempotency key"))?;
            if let Some(row) = row {
                let field = |name| {
                    row.try_get::<String, _>(name)
                        .map_err(Failure::internal("read an idempotency key"))
                };
                if field("request_hash")? != hash {
                    return Ok(Reservation::Mismatch);
                }
                let answer = field("answer")?;
                if !answer.is_empty() {
                    let sandbox = serde_json::from_str(&answer)
                        .map_err(Failure::internal("read a stored answer"))?;
                    return Ok(Reservation::Answered(Box::new(sandbox)));
                }
                if let Some(entry) = self.find(&field("sandbox_id")?) {
                    return Ok(Reservation::Begun(entry));
                }
                // Its sandbox was deleted before it was ever answered: nothing is left of it, so this is a new request.
                sqlx::query("DELETE FROM idempotency WHERE key = $1")
                    .bind(key)
                    .execute(&mut *tx)
                    .await
                    .map_err(Failure::internal("forget an idempotency key"))?;
            }
        }
        if taken(&mut tx, &wanted.entry.name, &wanted.entry.id).await? {
            return Ok(Reservation::NameTaken);
        }
        insert(&mut tx, wanted.host, &wanted.entry, wanted.spec).await?;
        if let Some((key, hash)) = wanted.key {
            sqlx::query(
                "INSERT INTO idempotency (key, request_hash, sandbox_id, answer, created_ms) VALUES ($1, $2, $3, '', $4)",
            )
            .bind(key)
            .bind(hash)
            .bind(wanted.entry.id.as_str())
            .bind(now)
            .execute(&mut *tx)
            .await
            .map_err(Failure::internal("write down an idempotency key"))?;
        }
        tx.commit().await.map_err(Failure::internal("write the catalogue"))?;
        self.write_index().insert(wanted.entry);
        Ok(Reservation::New)
    }

    /// The host has it: from now on every repeated request gets this answer.
    pub(crate) async fn answer(&self, id: &SandboxId, sandbox: &Sandbox) -> Result<(), Failure> {
        let text =
            serde_json::to_string(sandbox).map_err(Failure::internal("write an answer as JSON"))?;
        let mut tx = self.begin().await?;
        sqlx::query("UPDATE idempotency SET answer = $2 WHERE sandbox_id = $1 AND answer = ''")
            .bind(id.as_str())
            .bind(text)
            .execute(&mut *tx)
            .await
            .map_err(Failure::internal("store an answer"))?;
        sqlx::query("UPDATE sandboxes SET state = 'ready' WHERE id = $1 AND state = 'creating'")
            .bind(id.as_str())
            .execute(&mut *tx)
            .await
            .map_err(Failure::internal("write the catalogue"))?;
        tx.commit().await.map_err(Failure::internal("write the catalogue"))?;
        self.write_index().change(id, |entry| {
            if entry.state == State::Creating {
                entry.state = State::Ready;
            }
        });
        Ok(())
    }
}
