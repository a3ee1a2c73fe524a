//! Settings of the project.

use std::sync::PoisonError;

use api::project::Project;
use serde::{Deserialize, Serialize};
use sqlx::{Any, Row, Transaction};

use super::{Catalogue, OpenError};
use crate::failure::Failure;

/// The setting's name in the table.
const DELETE_AFTER_IDLE_DAYS: &str = "delete_after_idle_days";
/// The setting's name in the table.
const SPENDING_LIMIT: &str = "spending_limit";
/// Not a setting, but kept with them: a [`CountedMonth`].
const SPENDING_MONTH: &str = "spending_month";

/// A month whose spending is counted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CountedMonth {
    /// Such as `2026-11`, UTC.
    pub(crate) month: String,
    /// What all sandboxes had used when counting began, GiB times seconds.
    pub(crate) from_gib_seconds: f64,
    /// The month that counted before, and its `from_gib_seconds`: where the wall clock is set over the turn of a month and back again,
    /// the month goes on with what was spent in it.
    #[serde(default)]
    pub(crate) before: Option<(String, f64)>,
}

impl Catalogue {
    /// The settings as they stand.
    pub(crate) fn project(&self) -> Project {
        self.project.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes all settings at once.
    pub(crate) async fn set_project(&self, project: Project) -> Result<(), Failure> {
        let mut tx = self.begin().await?;
        let days = serde_json::to_string(&project.delete_after_idle_days);
        let limit = serde_json::to_string(&project.spending_limit);
        for (setting, value) in [(DELETE_AFTER_IDLE_DAYS, days), (SPENDING_LIMIT, limit)] {
            let value = value.map_err(Failure::internal("write the project's settings"))?;
            put(&mut tx, setting, &value).await?;
        }
        tx.commit().await.map_err(Failure::internal("write the project's settings"))?;
        *self.project.write().unwrap_or_else(PoisonError::into_inner) = project;
        Ok(())
    }

    /// From which sum on the present month's spending counts; `None`: nothing is counted yet.
    pub(crate) async fn spending_month(&self) -> Result<Option<CountedMonth>, Failure> {
        let row = sqlx::query("SELECT value FROM project WHERE setting = $1")
            .bind(SPENDING_MONTH)
            .fetch_optional(&self.reader)
            .await
            .map_err(Failure::internal("read the month's spending"))?;
        let Some(row) = row else { return Ok(None) };
        let value: String =
            row.try_get("value").map_err(Failure::internal("read the month's spending"))?;
        serde_json::from_str(&value).map_err(Failure::internal("read the month's spending"))
    }

    /// Changes that; `None`: nothing is counted any more.
    pub(crate) async fn set_spending_month(
        &self,
        month: Option<&CountedMonth>,
    ) -> Result<(), Failure> {
        let value = serde_json::to_string(&month)
            .map_err(Failure::internal("write the month's spending"))?;
        let mut tx = self.begin().await?;
        put(&mut tx, SPENDING_MONTH, &value).await?;
        tx.commit().await.map_err(Failure::internal("write the month's spending"))
    }
}

async fn put(tx: &mut Transaction<'_, Any>, setting: &str, value: &str) -> Result<(), Failure> {
    sqlx::query(
        "INSERT INTO project (setting, value) VALUES ($1, $2) ON CONFLICT (setting) DO UPDATE SET value = $2",
    )
    .bind(setting)
    .bind(value)
    .execute(&mut **tx)
    .await
    .map_err(Failure::internal("write the project's settings"))?;
    Ok(())
}

/// Reads the settings at the start.
pub(super) async fn read(reader: &sqlx::AnyPool) -> Result<Project, OpenError> {
    let rows = sqlx::query("SELECT setting, value FROM project")
        .fetch_all(reader)
        .await
        .map_err(OpenError::Read)?;
    let mut project = Project::default();
    for row in rows {
        let setting: String = row.try_get("setting").map_err(OpenError::Read)?;
        let value: String = row.try_get("value").map_err(OpenError::Read)?;
        if setting == DELETE_AFTER_IDLE_DAYS {
            project.delete_after_idle_days =
                serde_json::from_str(&value).map_err(|_| OpenError::Damaged(setting))?;
        } else if setting == SPENDING_LIMIT {
            project.spending_limit =
                serde_json::from_str(&value).map_err(|_| OpenError::Damaged(setting))?;
        }
    }
    Ok(project)
}
