//! Settings of the project.

use std::sync::PoisonError;

use api::project::Project;
use sqlx::Row;

use super::{Catalogue, OpenError};
use crate::failure::Failure;

/// The setting's name in the table.
const DELETE_AFTER_IDLE_DAYS: &str = "delete_after_idle_days";

impl Catalogue {
    /// The settings as they stand.
    pub(crate) fn project(&self) -> Project {
        self.project.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes all settings at once.
    pub(crate) async fn set_project(&self, project: Project) -> Result<(), Failure> {
        let value = serde_json::Value::from(project.delete_after_idle_days).to_string();
        sqlx::query(
            "INSERT INTO project (setting, value) VALUES ($1, $2) ON CONFLICT (setting) DO UPDATE SET value = $2",
        )
        .bind(DELETE_AFTER_IDLE_DAYS)
        .bind(value)
        .execute(&self.writer)
        .await
        .map_err(Failure::internal("write the project's settings"))?;
        *self.project.write().unwrap_or_else(PoisonError::into_inner) = project;
        Ok(())
    }
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
        }
    }
    Ok(project)
}
