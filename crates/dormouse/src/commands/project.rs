//! The project's settings.

use api::project::{Project, SpendingLimit, UpdateProject};

use crate::cli::OrNever;
use crate::client::Client;
use crate::problem::Problem;
use crate::show;

/// What is asked for on the command line.
pub(crate) fn change(
    delete_after_idle_days: Option<OrNever>,
    spending_limit: Option<OrNever>,
) -> UpdateProject {
    let days = |OrNever(days): OrNever| days.map(|days| u32::try_from(days).unwrap_or(u32::MAX));
    let limit = |OrNever(limit): OrNever| {
        limit.map(|memory_gib_seconds| SpendingLimit { memory_gib_seconds })
    };
    UpdateProject {
        delete_after_idle_days: delete_after_idle_days.map(days),
        spending_limit: spending_limit.map(limit),
    }
}

fn spending(project: &Project, limit: u64) -> String {
    let limited = format!("is limited to {} a month", in_hours(limit));
    project.spending.as_ref().map_or(limited.clone(), |spent| {
        let then = if spent.reached { "; reached: all sleep, and nothing wakes them" } else { "" };
        let used = in_hours(spent.memory_gib_seconds);
        format!("{limited}; {used} used in {}{then}", spent.month)
    })
}

/// As `dormouse usage` tells it, and as it is set.
fn in_hours(gib_seconds: u64) -> String {
    let hundredths = gib_seconds / 36;
    let (whole, rest) = (hundredths / 100, hundredths % 100);
    format!("{whole}.{rest:02} GiB x hours awake ({gib_seconds} GiB x seconds)")
}

/// Shows the settings, after changing them if there is something to change.
pub(crate) async fn project(
    client: &Client,
    change: UpdateProject,
    json: bool,
) -> Result<i32, Problem> {
    let project: Project = if change == UpdateProject::default() {
        client.json("GET", "/v1/project", None::<&()>).await?
    } else {
        client.json("PATCH", "/v1/project", Some(&change)).await?
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
    let limit = project.spending_limit.map(|limit| limit.memory_gib_seconds);
    show::data(&format!(
        "spending   {}",
        limit.map_or_else(|| "has no limit".to_owned(), |limit| spending(&project, limit))
    ))?;
    Ok(0)
}
