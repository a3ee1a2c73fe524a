//! The project's settings.

use api::project::{Project, UpdateProject};

use crate::cli::OrNever;
use crate::client::Client;
use crate::problem::Problem;
use crate::show;

/// Shows the settings, after changing them if there is something to change.
pub(crate) async fn project(
    client: &Client,
    delete_after_idle_days: Option<OrNever>,
    json: bool,
) -> Result<i32, Problem> {
    let project: Project = match delete_after_idle_days {
        None => client.json("GET", "/v1/project", None::<&()>).await?,
        Some(OrNever(days)) => {
            let days = days.map(|days| u32::try_from(days).unwrap_or(u32::MAX));
            let body = UpdateProject { delete_after_idle_days: Some(days) };
            client.json("PATCH", "/v1/project", Some(&body)).await?
        }
    };
    if json {
        show::json(&project)?;
        return Ok(0);
    }
    let days = project.delete_after_idle_days;
    show::data(&format!(
        "sleepers   {}",
        days.map_or_else(
            || "are never deleted".to_owned(),
            |days| format!("are deleted after {days} days asleep")
        )
    ))?;
    Ok(0)
}
