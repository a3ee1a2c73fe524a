//! Tokens, of which only hashes are kept.

use sqlx::Row;

use super::{Catalogue, now_ms};
use crate::failure::Failure;

impl Catalogue {
    /// SHA-256 in hex of every token.
    pub(crate) async fn token_hashes(&self) -> Result<Vec<String>, Failure> {
        let rows = sqlx::query("SELECT hash FROM tokens ORDER BY id")
            .fetch_all(&self.reader)
            .await
            .map_err(Failure::internal("read the tokens"))?;
        rows.iter()
            .map(|row| row.try_get("hash").map_err(Failure::internal("read a token")))
            .collect()
    }

    /// Remembers a token by its hash.
    pub(crate) async fn add_token(&self, id: &str, label: &str, hash: &str) -> Result<(), Failure> {
        sqlx::query("INSERT INTO tokens (id, hash, label, created_ms) VALUES ($1, $2, $3, $4)")
            .bind(id)
            .bind(hash)
            .bind(label)
            .bind(now_ms())
            .execute(&self.writer)
            .await
            .map_err(Failure::internal("write down a token"))?;
        Ok(())
    }
}
