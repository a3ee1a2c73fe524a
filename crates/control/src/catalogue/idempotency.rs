//! One request, one sandbox (or as many as it asks for), however often it is sent.
//!
//! ```text
//!            reserve                       answer
//!   unknown ---------> being worked on -------------> answered (kept for days)
//!      ^                     |
//!      +--- remove (failed) -+      after a crash: worked on again, with the same sandbox id
//! ```
//!
//! The row of the sandbox, with its id chosen, and the row of the key are written in one transaction before the host
//! hears of it. Whatever happens after that, a repeated request finds the same id. A request for several sandboxes has a row of
//! the key for each, all written in that transaction and answered in another.

use api::sandbox::Sandbox;
use sqlx::Row;

use super::{Catalogue, Entry, State, insert, now_ms, taken};
use crate::failure::Failure;

/// How long an answered request is remembered by the wall clock, milliseconds. A day is promised, in which a client's retries have
/// long ended; three are kept, so that none is forgotten too early where the clock is set on by a day or two meanwhile.
const KEEP_MS: i64 = 3 * 24 * 60 * 60 * 1000;

/// Sandboxes that shall be made.
pub(crate) struct Wanted<'a> {
    /// The host it goes to.
    pub(crate) host: &'a str,
    /// `Idempotency-Key`, and the SHA-256 in hex of the request it stands for.
    pub(crate) key: Option<(&'a str, &'a str)>,
    /// Their rows: one at least.
    pub(crate) entries: Vec<Entry>,
    /// What was asked for, as JSON.
    pub(crate) spec: &'a str,
}

/// What a request turned out to be.
pub(crate) enum Reservation {
    /// A new one: written down.
    New,
    /// A repeated one that is (or was, before a crash) being worked on. After a crash some of the sandboxes may be missing.
    Begun(Vec<Entry>),
    /// A repeated one that was answered.
    Answered(Vec<Sandbox>),
    /// The key belongs to another request.
    Mismatch,
    /// This name belongs to another sandbox.
    NameTaken(String),
}

impl Catalogue {
    /// Writes down that these sandboxes shall be made, unless the request was seen before.
    pub(crate) async fn reserve(&self, wanted: Wanted<'_>) -> Result<Reservation, Failure> {
        let now = now_ms();
        let mut tx = self.begin().await?;
        sqlx::query("DELETE FROM idempotency WHERE created_ms < $1")
            .bind(now - KEEP_MS)
            .execute(&mut *tx)
            .await
            .map_err(Failure::internal("forget old idempotency keys"))?;
        let count = wanted.entries.len();
        if let Some((key, hash)) = wanted.key {
            let (mut answers, mut begun) = (Vec::new(), Vec::new());
            for number in 0..count {
                let row = sqlx::query(
                    "SELECT request_hash, sandbox_id, answer FROM idempotency WHERE key = $1",
                )
                .bind(row_key(key, number))
                .fetch_optional(&mut *tx)
                .await
                .map_err(Failure::internal("look up an idempotency key"))?;
                let Some(row) = row else { continue };
                let field = |name| {
                    row.try_get::<String, _>(name)
                        .map_err(Failure::internal("read an idempotency key"))
                };
                if field("request_hash")? != hash {
                    return Ok(Reservation::Mismatch);
                }
                let answer = field("answer")?;
                if answer.is_empty() {
                    begun.extend(self.find(&field("sandbox_id")?));
                } else {
                    let sandbox = serde_json::from_str(&answer)
                        .map_err(Failure::internal("read a stored answer"))?;
                    answers.push(sandbox);
                }
            }
            // All are answered at once; one that was deleted before that is in no answer.
            if begun.is_empty() && !answers.is_empty() {
                return Ok(Reservation::Answered(answers));
            }
            if !begun.is_empty() {
                return Ok(Reservation::Begun(begun));
            }
            // What was made was deleted before it was ever answered: nothing is left of it, so this is a new request.
            for number in 0..count {
                sqlx::query("DELETE FROM idempotency WHERE key = $1")
                    .bind(row_key(key, number))
                    .execute(&mut *tx)
                    .await
                    .map_err(Failure::internal("forget an idempotency key"))?;
            }
        }
        for (number, entry) in wanted.entries.iter().enumerate() {
            if taken(&mut tx, &entry.name, &entry.id).await? {
                return Ok(Reservation::NameTaken(entry.name.clone()));
            }
            insert(&mut tx, wanted.host, entry, wanted.spec).await?;
            if let Some((key, hash)) = wanted.key {
                sqlx::query(
                    "INSERT INTO idempotency (key, request_hash, sandbox_id, answer, created_ms) VALUES ($1, $2, $3, '', $4)",
                )
                .bind(row_key(key, number))
                .bind(hash)
                .bind(entry.id.as_str())
                .bind(now)
                .execute(&mut *tx)
                .await
                .map_err(Failure::internal("write down an idempotency key"))?;
            }
        }
        tx.commit().await.map_err(Failure::internal("write the catalogue"))?;
        let mut index = self.write_index();
        for entry in wanted.entries {
            index.insert(entry);
        }
        Ok(Reservation::New)
    }

    /// The host has them: from now on every repeated request gets this answer.
    pub(crate) async fn answer(&self, sandboxes: &[Sandbox]) -> Result<(), Failure> {
        let mut tx = self.begin().await?;
        for sandbox in sandboxes {
            let text = serde_json::to_string(sandbox)
                .map_err(Failure::internal("write an answer as JSON"))?;
            sqlx::query("UPDATE idempotency SET answer = $2 WHERE sandbox_id = $1 AND answer = ''")
                .bind(sandbox.id.as_str())
                .bind(text)
                .execute(&mut *tx)
                .await
                .map_err(Failure::internal("store an answer"))?;
            sqlx::query(
                "UPDATE sandboxes SET state = 'ready' WHERE id = $1 AND state = 'creating'",
            )
            .bind(sandbox.id.as_str())
            .execute(&mut *tx)
            .await
            .map_err(Failure::internal("write the catalogue"))?;
        }
        tx.commit().await.map_err(Failure::internal("write the catalogue"))?;
        let mut index = self.write_index();
        for sandbox in sandboxes {
            index.change(&sandbox.id, |entry| {
                if entry.state == State::Creating {
                    entry.state = State::Ready;
                }
            });
        }
        Ok(())
    }
}

/// The key of one of a request's sandboxes. No client's key has a line break.
fn row_key(key: &str, number: usize) -> String {
    if number == 0 { key.to_owned() } else { format!("{key}\n{number}") }
}
