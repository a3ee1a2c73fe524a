//! What is kept of boxes and of the conversations that use them.

use api::SandboxId;
use sqlx::Row;

use super::Catalogue;
use crate::boxes::{Agent, BoxRecord};
use crate::failure::Failure;

impl Catalogue {
    /// Every box that is kept, oldest first.
    pub(crate) async fn boxes(&self) -> Result<Vec<BoxRecord>, Failure> {
        let rows = sqlx::query("SELECT record FROM boxes ORDER BY created_ms, id")
            .fetch_all(&self.reader)
            .await
            .map_err(Failure::internal("read the boxes"))?;
        let record = |row: &sqlx::any::AnyRow| {
            let text: String = row.try_get("record").map_err(Failure::internal("read a box"))?;
            serde_json::from_str(&text).map_err(Failure::internal("read a box"))
        };
        rows.iter().map(record).collect()
    }

    /// Keeps a box as it is now.
    pub(crate) async fn keep_box(&self, record: &BoxRecord) -> Result<(), Failure> {
        let text =
            serde_json::to_string(record).map_err(Failure::internal("write a box as JSON"))?;
        sqlx::query(
            "INSERT INTO boxes (id, account, record, created_ms, ended_ms) VALUES ($1, $2, $3, $4, $5) \
             ON CONFLICT (id) DO UPDATE SET record = $3, ended_ms = $5",
        )
        .bind(record.id.as_str())
        .bind(record.account.as_str())
        .bind(text)
        .bind(record.created_ms)
        .bind(record.ended.as_ref().map_or(0, |ended| ended.at_ms))
        .execute(&self.writer)
        .await
        .map_err(Failure::internal("write down a box"))?;
        Ok(())
    }

    /// Forgets a box.
    pub(crate) async fn forget_box(&self, id: &SandboxId) -> Result<(), Failure> {
        sqlx::query("DELETE FROM boxes WHERE id = $1")
            .bind(id.as_str())
            .execute(&self.writer)
            .await
            .map_err(Failure::internal("forget a box"))?;
        Ok(())
    }

    /// Every conversation that has given a sign of life since then.
    pub(crate) async fn agents(&self, since_ms: i64) -> Result<Vec<(String, Agent)>, Failure> {
        let rows =
            sqlx::query("SELECT id, client, heard_ms, has_left FROM agents WHERE heard_ms >= $1")
                .bind(since_ms)
                .fetch_all(&self.reader)
                .await
                .map_err(Failure::internal("read the conversations"))?;
        let agent = |row: &sqlx::any::AnyRow| {
            let failed = Failure::internal::<sqlx::Error>("read a conversation");
            let read = || -> Result<_, sqlx::Error> {
                let client: String = row.try_get("client")?;
                let agent = Agent {
                    client: Some(client).filter(|client| !client.is_empty()),
                    heard_ms: row.try_get("heard_ms")?,
                    has_left: row.try_get::<i64, _>("has_left")? != 0,
                };
                Ok((row.try_get("id")?, agent))
            };
            read().map_err(failed)
        };
        rows.iter().map(agent).collect()
    }

    /// Keeps a conversation as it is now, and forgets those that have been silent since then.
    pub(crate) async fn keep_agent(
        &self,
        id: &str,
        agent: &Agent,
        forget_before_ms: i64,
    ) -> Result<(), Failure> {
        sqlx::query(
            "INSERT INTO agents (id, client, heard_ms, has_left) VALUES ($1, $2, $3, $4) \
             ON CONFLICT (id) DO UPDATE SET client = $2, heard_ms = $3, has_left = $4",
        )
        .bind(id)
        .bind(agent.client.as_deref().unwrap_or_default())
        .bind(agent.heard_ms)
        .bind(i64::from(agent.has_left))
        .execute(&self.writer)
        .await
        .map_err(Failure::internal("write down a conversation"))?;
        sqlx::query("DELETE FROM agents WHERE heard_ms < $1")
            .bind(forget_before_ms)
            .execute(&self.writer)
            .await
            .map_err(Failure::internal("forget old conversations"))?;
        Ok(())
    }
}
