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
        let known = host.list().await;
        let wanted: Vec<Sandbox> =
            known.into_iter().map(|known| known.sandbox).filter(has_a_machine).collect();
        if wanted.is_empty() {
            report.left.clear();
            break;
        }
        let asked = wanted.into_iter().map(|sandbox| async move {
            let sleep = host.sleep(&sandbox.id, Some(SleepTier::Disk), SleepFor::Drain);
            let slept = tokio::time::timeout(ONE_TIME_MAX, sleep).await.unwrap_or_else(|_| {
                let text = format!("it did not sleep within {} s", ONE_TIME_MAX.as_secs());
                Err(ApiError::new(Code::Timeout, text))
            });
            slept.map_err(|error| DrainFailure { id: sandbox.id, name: sandbox.name, error })
        });
        let all: Vec<Result<Sandbox, DrainFailure>> =
            futures_util::stream::iter(asked).buffer_unordered(DRAIN_AT_ONCE).collect().await;
        report.left.clear();
        for one in all {
            match one {
                Ok(_) => report.slept += 1,
                Err(failure) => report.left.push(failure),
            }
        }
        let again = report.left.iter().any(|failure| failure.error.retryable);
        if !report.left.is_empty() && !again {
            break;
        }
    }
    for DrainFailure { id, error, .. } in &report.left {
        tracing::warn!(sandbox = %id, error = %error, "not put to sleep: it would boot from its disk");
    }
    tracing::info!(slept = report.slept, left = report.left.len(), "all put to sleep on disk");
    report
}

/// Whether the host's end would cost it what runs in it.
fn has_a_machine(sandbox: &Sandbox) -> bool {
    match sandbox.status {
        Status::Starting | Status::Running => true,
        Status::Sleeping => sandbox.sleep_tier == Some(SleepTier::Memory),
        Status::Failed => false,
    }
}
