//! Putting everything to sleep on disk, before a host goes down: what sleeps there survives it.

use std::time::Duration;

use api::drain::{DrainFailure, DrainReport};
use api::host::{Host, SleepFor};
use api::sandbox::{Sandbox, SleepTier, Status};
use api::{ApiError, Code};
use futures_util::StreamExt;

/// How many are put to sleep at a time: it is the disk that takes the time, and one that is shared by more is not faster.
pub(crate) const DRAIN_AT_ONCE: usize = 4;

/// How often all are looked at: a request that is under way wakes its sandbox once more, and one that starts cannot sleep yet.
const PASSES_MAX: usize = 3;

/// How long one may take: a second, on a slow and busy disk a minute.
const ONE_TIME_MAX: Duration = Duration::from_mins(2);

/// Puts every sandbox of a host to sleep on disk. Whatever needs one wakes it again.
pub async fn drain(host: &dyn Host) -> DrainReport {
    let mut report = DrainReport::default();
    for _ in 0..PASSES_MAX {
        // Those that woke once more are among them the next time.
        let pass = put_to_sleep(host, has_a_machine).await;
        report.slept += pass.slept;
        report.left = pass.left;
        if pass.asked == 0 || !report.left.is_empty() && !again(&report) {
            break;
        }
    }
    tell(&report);
    report
}

/// As [`drain`], for good: the host goes down, and nothing wakes any of them any more. One that is being woken looks like one that
/// sleeps, so all are asked.
pub async fn leave(host: &dyn Host) -> DrainReport {
    host.leave();
    let mut report = DrainReport::default();
    for _ in 0..PASSES_MAX {
        let pass = put_to_sleep(host, may_have_a_machine).await;
        report.slept += pass.slept;
        report.left = pass.left;
        if !again(&report) {
            break;
        }
    }
    tell(&report);
    report
}

/// Asked once.
struct Pass {
    asked: usize,
    /// Those that had a machine and sleep now.
    slept: u32,
    left: Vec<DrainFailure>,
}

async fn put_to_sleep(host: &dyn Host, wanted: impl Fn(&Sandbox) -> bool) -> Pass {
    let known = host.list().await;
    let wanted: Vec<Sandbox> =
        known.into_iter().map(|known| known.sandbox).filter(wanted).collect();
    let mut pass = Pass { asked: wanted.len(), slept: 0, left: Vec::new() };
    let asked = wanted.into_iter().map(|sandbox| async move {
        let sleep = host.sleep(&sandbox.id, Some(SleepTier::Disk), SleepFor::Drain);
        let slept = tokio::time::timeout(ONE_TIME_MAX, sleep).await.unwrap_or_else(|_| {
            let text = format!("it did not sleep within {} s", ONE_TIME_MAX.as_secs());
            Err(ApiError::new(Code::Timeout, text))
        });
        match slept {
            Ok(_) => Ok(has_a_machine(&sandbox)),
            Err(error) => Err(DrainFailure { id: sandbox.id, name: sandbox.name, error }),
        }
    });
    let all: Vec<Result<bool, DrainFailure>> =
        futures_util::stream::iter(asked).buffer_unordered(DRAIN_AT_ONCE).collect().await;
    for one in all {
        match one {
            Ok(had_a_machine) => pass.slept += u32::from(had_a_machine),
            Err(failure) => pass.left.push(failure),
        }
    }
    pass
}

/// Whether any of those that did not sleep may do so if it is asked again.
fn again(report: &DrainReport) -> bool {
    report.left.iter().any(|failure| failure.error.retryable)
}

fn tell(report: &DrainReport) {
    for DrainFailure { id, error, .. } in &report.left {
        tracing::warn!(sandbox = %id, error = %error, "not put to sleep: it would boot from its disk");
    }
    tracing::info!(slept = report.slept, left = report.left.len(), "all put to sleep on disk");
}

/// Whether it has a machine, or may be about to have one.
fn may_have_a_machine(sandbox: &Sandbox) -> bool {
    has_a_machine(sandbox) || sandbox.sleep_tier == Some(SleepTier::Disk)
}

/// Whether the host's end would cost it what runs in it.
fn has_a_machine(sandbox: &Sandbox) -> bool {
    match sandbox.status {
        Status::Starting | Status::Running => true,
        Status::Sleeping => sandbox.sleep_tier == Some(SleepTier::Memory),
        Status::Failed => false,
    }
}
