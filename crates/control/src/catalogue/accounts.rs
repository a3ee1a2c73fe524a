//! Accounts, as they are kept.

use sqlx::Row;

use super::{Catalogue, now_ms};
use crate::accounts::Account;
use crate::failure::Failure;

/// Stands for an account whose credit is not counted.
const UNCOUNTED: i64 = -1;

impl Catalogue {
    /// Every account. The default one is made where it is not there yet.
    pub(crate) async fn accounts(&self) -> Result<Vec<Account>, Failure> {
        sqlx::query(
            "INSERT INTO accounts (id, plan, credit_ms, url_allow, created_ms) VALUES ($1, '', $2, 'null', $3) \
             ON CONFLICT (id) DO NOTHING",
        )
        .bind(api::account::ACCOUNT_DEFAULT)
        .bind(UNCOUNTED)
        .bind(now_ms())
        .execute(&self.writer)
        .await
        .map_err(Failure::internal("write down the default account"))?;
        let rows = sqlx::query(
            "SELECT id, plan, credit_ms, url_allow, created_ms FROM accounts ORDER BY id",
        )
        .fetch_all(&self.reader)
        .await
        .map_err(Failure::internal("read the accounts"))?;
        rows.iter().map(account).collect()
    }

    /// Keeps an account as it is now.
    pub(crate) async fn keep_account(&self, account: &Account) -> Result<(), Failure> {
        let url_allow = serde_json::to_string(&account.url_allow)
            .map_err(Failure::internal("write an account as JSON"))?;
        sqlx::query(
            "INSERT INTO accounts (id, plan, credit_ms, url_allow, created_ms) VALUES ($1, $2, $3, $4, $5) \
             ON CONFLICT (id) DO UPDATE SET plan = $2, credit_ms = $3, url_allow = $4",
        )
        .bind(account.id.as_str())
        .bind(account.plan.map_or("", api::account::Plan::as_str))
        .bind(kept_credit(account.credit_ms))
        .bind(url_allow)
        .bind(account.created_ms)
        .execute(&self.writer)
        .await
        .map_err(Failure::internal("write down an account"))?;
        Ok(())
    }

    /// Forgets an account, with all that is its own.
    pub(crate) async fn forget_account(&self, id: &str) -> Result<(), Failure> {
        let mut tx = self.begin().await?;
        for statement in [
            "DELETE FROM tokens WHERE account = $1",
            "DELETE FROM secrets WHERE account = $1",
            "DELETE FROM accounts WHERE id = $1",
        ] {
            sqlx::query(statement)
                .bind(id)
                .execute(&mut *tx)
                .await
                .map_err(Failure::internal("forget an account"))?;
        }
        tx.commit().await.map_err(Failure::internal("forget an account"))
    }
}

/// An account's credit as it is kept.
pub(super) fn kept_credit(credit_ms: Option<u64>) -> i64 {
    credit_ms.map_or(UNCOUNTED, |ms| i64::try_from(ms).unwrap_or(i64::MAX))
}

fn account(row: &sqlx::any::AnyRow) -> Result<Account, Failure> {
    let failed = || Failure::internal::<sqlx::Error>("read an account");
    let plan: String = row.try_get("plan").map_err(failed())?;
    let url_allow: String = row.try_get("url_allow").map_err(failed())?;
    let credit_ms: i64 = row.try_get("credit_ms").map_err(failed())?;
    let plan = if plan.is_empty() { "null".to_owned() } else { format!("\"{plan}\"") };
    Ok(Account {
        id: row.try_get("id").map_err(failed())?,
        plan: serde_json::from_str(&plan).map_err(Failure::internal("read an account's plan"))?,
        credit_ms: u64::try_from(credit_ms).ok(),
        url_allow: serde_json::from_str(&url_allow)
            .map_err(Failure::internal("read an account's allow-list"))?,
        created_ms: row.try_get("created_ms").map_err(failed())?,
    })
}
