//! A sandbox, as a person reads it.

use api::sandbox::{Lack, Sandbox, SleepTier, Status, WaitsFor};

use crate::problem::Problem;
use crate::show;

/// Everything a person asks about one, most important first.
pub(crate) fn print(sandbox: &Sandbox) -> Result<(), Problem> {
    line("name", &sandbox.name)?;
    line("id", sandbox.id.as_str())?;
    line("status", &format!("{} since {}", status_text(sandbox), show::time(&sandbox.since)))?;
    if let Some(waits) = &sandbox.waits_for {
        line("waits", &format!("{}, since {}", waits.text, show::time(&waits.since)))?;
    }
    for reason in &sandbox.awake_because {
        let until = reason
            .until
            .as_deref()
            .map(|at| format!(", until {}", show::time(at)))
            .unwrap_or_default();
        line("awake", &format!("{}{until}", reason.text))?;
    }
    if let Some(at) = &sandbox.will_wake_at {
        line(
            "wakes",
            &format!("for a timer of its own at {}, or when it is needed", show::time(at)),
        )?;
    }
    let after = match sandbox.sleep_after_seconds {
        Some(seconds) => format!("after {} of quiet", show::seconds(seconds)),
        None => "never by itself".to_owned(),
    };
    match &sandbox.will_sleep_at {
        Some(at) => line("sleeps", &format!("at {}, {after}", show::time(at)))?,
        None => line("sleeps", &after)?,
    }
    let tier = match sandbox.memory_tier_seconds {
        0 => "straight to disk".to_owned(),
        seconds => format!("in memory for {}, then on disk", show::seconds(seconds)),
    };
    line("how", &tier)?;
    print_settings(sandbox)?;
    if !sandbox.awake_ports.is_empty() {
        let ports: Vec<String> = sandbox.awake_ports.iter().map(u16::to_string).collect();
        let open = sandbox.awake_connections;
        line("awake ports", &format!("{} ({open} connections)", ports.join(", ")))?;
    }
    if let Some(checkpoint) = &sandbox.checkpoint {
        let every = show::seconds(checkpoint.every_seconds);
        let last = match (&checkpoint.last_at, checkpoint.behind_seconds) {
            (Some(at), Some(behind)) => {
                let size = show::size(checkpoint.stored_bytes);
                format!("last at {}, {} behind, {size}", show::time(at), show::seconds(behind))
            }
            _ => "none yet".to_owned(),
        };
        line("checkpoints", &format!("each {every} awake; {last}"))?;
        if let Some(error) = &checkpoint.error {
            line("", error)?;
        }
    }
    if let Some(cause) = &sandbox.woke_because {
        line("woken by", cause)?;
    }
    if let Some(failure) = &sandbox.failure {
        let code =
            sandbox.failure_code.as_deref().map(|code| format!(" ({code})")).unwrap_or_default();
        line("failure", &format!("{failure}{code}"))?;
    }
    line("image", &sandbox.image)?;
    line("size", &format!("{} cpu, {} MiB", sandbox.cpus, sandbox.memory_mib))?;
    for drive in &sandbox.drives {
        let how = match (drive.read_only, drive.copy) {
            (false, false) => "",
            (true, false) => " (read-only)",
            (false, true) => " (a copy)",
            (true, true) => " (a copy, read-only)",
        };
        line("drive", &format!("{} at {}{how}", drive.name, drive.path))?;
    }
    for volume in &sandbox.volumes {
        line("volume", &format!("{} at {}", volume.name, volume.path))?;
    }
    line("address", &sandbox.address)?;
    if let Some(address) = &sandbox.ipv6_address {
        line("ipv6", address)?;
    }
    line("life", &sandbox.life.to_string())?;
    line("created", &show::time(&sandbox.created_at))?;
    if let Some(parent) = &sandbox.forked_from {
        line("fork of", parent.as_str())?;
    }
    if !sandbox.labels.is_empty() {
        let labels: Vec<String> =
            sandbox.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        line("labels", &labels.join(","))?;
    }
    for (key, value) in &sandbox.env {
        line("env", &format!("{key}={value}"))?;
    }
    Ok(())
}

/// Settings that are mostly not made.
fn print_settings(sandbox: &Sandbox) -> Result<(), Problem> {
    if let Some(ms) = sandbox.sleep_notice_ms {
        line("notice", &format!("{} before it sleeps", show::milliseconds(ms)))?;
    }
    if let Some(seconds) = sandbox.connection_idle_seconds {
        line("connections", &format!("closed after {} without a byte", show::seconds(seconds)))?;
    }
    if let Some(ms) = sandbox.delete_after_idle_ms {
        line("deleted", &format!("when it has slept for {}", show::milliseconds(ms)))?;
    }
    if let Some(at) = &sandbox.expires_at {
        line("expires", &format!("at {}, whatever it does then", show::time(at)))?;
    }
    Ok(())
}

fn line(label: &str, text: &str) -> Result<(), Problem> {
    show::data(&format!("{label:<12}{text}"))
}

pub(crate) fn status_text(sandbox: &Sandbox) -> String {
    let status = match (sandbox.status, sandbox.sleep_tier) {
        (Status::Sleeping, Some(tier)) => format!("sleeping ({})", tier_name(tier)),
        (status, _) => status_name(status).to_owned(),
    };
    match &sandbox.waits_for {
        None => status,
        Some(WaitsFor { what: Lack::Disk, .. }) => format!("{status}, stands still (disk full)"),
        Some(WaitsFor { what: Lack::Memory, .. }) => format!("{status}, waits for memory"),
        Some(WaitsFor { what: Lack::Spending, .. }) => format!("{status}, spending limit"),
    }
}

pub(crate) fn status_name(status: Status) -> &'static str {
    match status {
        Status::Starting => "starting",
        Status::Running => "running",
        Status::Sleeping => "sleeping",
        Status::Failed => "failed",
    }
}

fn tier_name(tier: SleepTier) -> &'static str {
    match tier {
        SleepTier::Memory => "memory",
        SleepTier::Disk => "disk",
        SleepTier::Store => "store",
        SleepTier::Off => "off",
    }
}
