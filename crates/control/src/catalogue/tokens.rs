//! Tokens (keys), of which only hashes are kept.

use sqlx::Row;

use super::Catalogue;
use crate::auth::Token;
use crate::failure::Failure;

impl Catalogue {
    /// Every token, oldest first.
    pub(crate) async fn tokens(&self) -> Result<Vec<Token>, Failure> {
        let rows = sqlx::query(
            "SELECT id, hash, label, account, scope, created_ms FROM tokens ORDER BY created_ms, id",
        )
        .fetch_all(&self.reader)
        .await
        .map_err(Failure::internal("read the tokens"))?;
        rows.iter().map(token).collect()
    }

    /// Remembers a token by its hash.
    pub(crate) async fn add_token(&self, token: &Token) -> Result<(), Failure> {
        sqlx::query(
            "INSERT INTO tokens (id, hash, label, account, scope, created_ms) VALUES ($1, $2, $3, $4, $5, $6)",
        )
        .bind(token.id.as_str())
        .bind(token.hash.as_str())
        .bind(token.label.as_str())
        .bind(token.account.as_str())
        .bind(token.scope.as_str())
        .bind(token.created_ms)
        .execute(&self.writer)
        .await
        .map_err(Failure::internal("write down a token"))?;
        Ok(())
    }

    /// Forgets a token.
    pub(crate) async fn forget_token(&self, id: &str) -> Result<(), Failure> {
        sqlx::query("DELETE FROM tokens WHERE id = $1")
            .bind(id)
            .execute(&self.writer)
            .await
            .map_err(Failure::internal("forget a token"))?;
        Ok(())
    }
}

fn token(row: &sqlx::any::AnyRow) -> Result<Token, Failure> {
    let failed = || Failure::internal::<sqlx::Error>("read a token");
    let scope: String = row.try_get("scope").map_err(failed())?;
    Ok(Token {
        id: row.try_get("id").map_err(failed())?,
        hash: row.try_get("hash").map_err(failed())?,
        label: row.try_get("label").map_err(failed())?,
        account: row.try_get("account").map_err(failed())?,
        scope: serde_json::from_str(&format!("\"{scope}\""))
            .map_err(Failure::internal("read a token's scope"))?,
        created_ms: row.try_get("created_ms").map_err(failed())?,
    })
}
