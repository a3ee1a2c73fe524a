//! What sandboxes have used, and putting all of them to sleep.

use std::time::Duration;

use api::drain::{DrainReport, DrainRequest};
use api::usage::{SandboxUsage, Usage, UsageReport};

use super::sandboxes::path;
use crate::client::Client;
use crate::problem::Problem;
use crate::show;

/// Headings of the table.
const HEADINGS: [&str; 7] = ["NAME", "AWAKE", "IN MEMORY", "ON DISK", "CPU", "GIB x HOURS", "KEPT"];

/// Most characters of a box's name in the table.
const BOX_NAME_CHARS: usize = 24;

/// How long a daemon that was told to end is waited for. It takes a second or two.
const END_TIME_MAX: Duration = Duration::from_secs(30);
/// How often is looked whether it has.
const END_LOOK_EVERY: Duration = Duration::from_millis(50);

pub(crate) async fn usage(
    client: &Client,
    which: Option<&str>,
    json: bool,
) -> Result<i32, Problem> {
    if let Some(which) = which {
        let one: SandboxUsage = client.get(&format!("{}/usage", path(which))).await?;
        if json {
            show::json(&one)?;
        } else {
            show::table(&HEADINGS, &[row(&name(&one), &one.usage)])?;
        }
        return Ok(0);
    }
    let report: UsageReport = client.get("/v1/usage").await?;
    if json {
        show::json(&report)?;
        return Ok(0);
    }
    let mut rows: Vec<Vec<String>> =
        report.sandboxes.iter().map(|one| row(&name(one), &one.usage)).collect();
    rows.push(row("(deleted)", &report.deleted));
    rows.push(row("(all)", &report.total));
    show::table(&HEADINGS, &rows)?;
    Ok(0)
}

pub(crate) async fn drain(client: &Client, stop: bool, json: bool) -> Result<i32, Problem> {
    let report: DrainReport =
        client.json("POST", "/v1/drain", Some(&DrainRequest { stop })).await?;
    let ends = stop && report.left.is_empty();
    if ends && !has_ended(client).await {
        eprintln!("note: the daemon answers still, after {} s", END_TIME_MAX.as_secs());
    }
    if json {
        show::json(&report)?;
    } else {
        eprintln!("{} put to sleep on disk", report.slept);
        for left in &report.left {
            eprintln!("error: {} is left: {}", left.name, left.error.error);
        }
    }
    Ok(i32::from(!report.left.is_empty()))
}

/// Waits until the daemon answers no more.
async fn has_ended(client: &Client) -> bool {
    let ends = async {
        while client.get::<serde::de::IgnoredAny>("/v1/health").await.is_ok() {
            tokio::time::sleep(END_LOOK_EVERY).await;
        }
    };
    tokio::time::timeout(END_TIME_MAX, ends).await.is_ok()
}

/// Its name; a box's id, and its name where it has one.
fn name(one: &SandboxUsage) -> String {
    match &one.box_name {
        Some(name) => format!("{} ({})", one.name, show::short_plain(name, BOX_NAME_CHARS)),
        None => one.name.clone(),
    }
}

fn row(name: &str, usage: &Usage) -> Vec<String> {
    vec![
        name.to_owned(),
        time(usage.awake_seconds),
        time(usage.asleep_memory_seconds),
        time(usage.asleep_disk_seconds),
        time(usage.cpu_seconds),
        format!("{:.2}", usage.memory_gib_seconds / 3600.0),
        show::size(usage.state_bytes),
    ]
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a time that was counted is no less than nothing, and shown to the second"
)]
fn time(seconds: f64) -> String {
    if seconds < 10.0 { format!("{seconds:.1} s") } else { show::seconds(seconds as u64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_is_told_by_its_id_and_its_name() {
        let mut one = SandboxUsage {
            id: "k3b5qj2m4x7a".parse().unwrap(),
            name: "k3b5qj2m4x7a".to_owned(),
            box_name: Some("Refunds in the\u{1b} member centre".to_owned()),
            since: "2026-12-01T12:00:00Z".to_owned(),
            usage: Usage::default(),
        };
        assert_eq!(name(&one), "k3b5qj2m4x7a (Refunds in the  member…)");
        one.box_name = None;
        assert_eq!(name(&one), "k3b5qj2m4x7a");
    }
}
