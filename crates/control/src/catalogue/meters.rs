//! How much of each box's time awake was paid for, beside the credit that paid it.

use api::SandboxId;
use sqlx::{Any, Row, Transaction};

use super::Catalogue;
use crate::failure::Failure;

impl Catalogue {
    /// What of each box is paid for, milliseconds awake.
    pub(crate) async fn meters(&self) -> Result<Vec<(SandboxId, u64)>, Failure> {
        let rows = sqlx::query("SELECT box_id, metered_ms FROM box_meters")
            .fetch_all(&self.reader)
            .await
            .map_err(Failure::internal("read the meters"))?;
        let meter = |row: &sqlx::any::AnyRow| {
            let id: String = row.try_get("box_id").map_err(Failure::internal("read a meter"))?;
            let ms: i64 = row.try_get("metered_ms").map_err(Failure::internal("read a meter"))?;
            let id = id.parse().map_err(Failure::internal("read a meter"))?;
            Ok((id, u64::try_from(ms).unwrap_or(0)))
        };
        rows.iter().map(meter).collect()
    }

    /// Keeps an account's credit and what it has paid for, both or none.
    pub(crate) async fn charge(
        &self,
        account: &str,
        credit_ms: Option<u64>,
        meters: &[(SandboxId, u64)],
    ) -> Result<(), Failure> {
        let mut tx = self.begin().await?;
        sqlx::query("UPDATE accounts SET credit_ms = $2 WHERE id = $1")
            .bind(account)
            .bind(super::accounts::kept_credit(credit_ms))
            .execute(&mut *tx)
            .await
            .map_err(Failure::internal("write down an account's credit"))?;
        for (id, ms) in meters {
            put(&mut tx, id, *ms).await?;
        }
        tx.commit().await.map_err(Failure::internal("write down an account's credit"))
    }

    /// Forgets what a box was metered.
    pub(crate) async fn forget_meter(&self, id: &SandboxId) -> Result<(), Failure> {
        sqlx::query("DELETE FROM box_meters WHERE box_id = $1")
            .bind(id.as_str())
            .execute(&self.writer)
            .await
            .map_err(Failure::internal("forget a meter"))?;
        Ok(())
    }
}

async fn put(tx: &mut Transaction<'_, Any>, id: &SandboxId, ms: u64) -> Result<(), Failure> {
    sqlx::query(
        "INSERT INTO box_meters (box_id, metered_ms) VALUES ($1, $2) ON CONFLICT (box_id) DO UPDATE SET metered_ms = $2",
    )
    .bind(id.as_str())
    .bind(i64::try_from(ms).unwrap_or(i64::MAX))
    .execute(&mut **tx)
    .await
    .map_err(Failure::internal("write down a meter"))?;
    Ok(())
}
