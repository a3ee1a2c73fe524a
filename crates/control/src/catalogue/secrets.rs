//! Secrets, as they are kept: encrypted.

use sqlx::Row;

use super::Catalogue;
use crate::failure::Failure;
use crate::secrets::Stored;

impl Catalogue {
    /// Every secret, with its account and name.
    pub(crate) async fn secrets(&self) -> Result<Vec<((String, String), Stored)>, Failure> {
        let rows = sqlx::query("SELECT account, name, sealed, updated_ms FROM secrets")
            .fetch_all(&self.reader)
            .await
            .map_err(Failure::internal("read the secrets"))?;
        let secret = |row: &sqlx::any::AnyRow| {
            let read = || -> Result<_, sqlx::Error> {
                let stored = Stored {
                    sealed: row.try_get("sealed")?,
                    updated_ms: row.try_get("updated_ms")?,
                };
                Ok(((row.try_get("account")?, row.try_get("name")?), stored))
            };
            read().map_err(Failure::internal("read a secret"))
        };
        rows.iter().map(secret).collect()
    }

    /// Keeps a secret, in place of the one of this name.
    pub(crate) async fn keep_secret(
        &self,
        account: &str,
        name: &str,
        stored: &Stored,
    ) -> Result<(), Failure> {
        sqlx::query(
            "INSERT INTO secrets (account, name, sealed, updated_ms) VALUES ($1, $2, $3, $4) \
             ON CONFLICT (account, name) DO UPDATE SET sealed = $3, updated_ms = $4",
        )
        .bind(account)
        .bind(name)
        .bind(stored.sealed.as_str())
        .bind(stored.updated_ms)
        .execute(&self.writer)
        .await
        .map_err(Failure::internal("write down a secret"))?;
        Ok(())
    }

    /// Forgets a secret.
    pub(crate) async fn forget_secret(&self, account: &str, name: &str) -> Result<(), Failure> {
        sqlx::query("DELETE FROM secrets WHERE account = $1 AND name = $2")
            .bind(account)
            .bind(name)
            .execute(&self.writer)
            .await
            .map_err(Failure::internal("forget a secret"))?;
        Ok(())
    }
}
