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

/// How long a daemon that was told to end is waited for. It takes a second or two.
const END_TIME_MAX: Duration = Duration::from_secs(30);
/// How often is looked whether it has.
const END_LOOK_EVERY: Duration = Duration::from_millis(50);

pub(crate) async fn usage(client: &Client, name: Option<&str>, json: bool) -> Result<i32, Problem> {
    if let Some(name) = name {
        let one: SandboxUsage = client.get(&format!("{}/usage", path(name))).await?;
        if json {
            show::json(&one)?;
        } else {
            show::table(&HEADINGS, &[row(&one.name, &one.usage)])?;
        }
        return Ok(0);
    }
    let report: UsageReport = client.get("/v1/usage").await?;
    if json {
        show::json(&report)?;
        return Ok(0);
    }
    let mut rows: Vec<Vec<String>> =
        report.sandboxes.iter().map(|one| row(&one.name, &one.usage)).collect();
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
