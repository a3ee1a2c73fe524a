//! Deletes what its owner wanted deleted by itself: sandboxes that have slept for too long, or whose time is over.
//!
//! How long one has slept its host measures, on a clock that no step of the wall clock moves; whether it still sleeps is
//! decided there too, in the moment of deleting. An `expires_at` is a time of the wall clock.

use std::time::Duration;

use api::host::Known;

use crate::App;
use crate::failure::Failure;
use crate::reconcile;

/// Time between two looks: short for those who wait for it, and too long to be noticed in what a thousand sleepers cost.
const LOOK_EVERY: Duration = Duration::from_secs(10);

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

/// Looks again and again until the server stops.
pub(crate) async fn run(app: App) {
    loop {
        tokio::select! {
            () = app.stop().cancelled() => return,
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        let days = app.catalogue().project().delete_after_idle_days;
        let default_ms = days.map(|days| u64::from(days) * DAY_MS);
        for known in app.host().list().await {
            // A box ends by rules of its own.
            if known.boxed.is_some() {
                continue;
            }
            let Some(due) = due(&known, default_ms, jiff::Timestamp::now()) else { continue };
            if let Err(error) = delete(&app, &known, due).await {
                tracing::error!(sandbox = %known.sandbox.id, error = ?error, "not deleted although it is due; tried again");
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    /// It has slept for longer than this.
    Idle { limit_ms: u64 },
    /// Its time is over.
    Expired,
}

fn due(known: &Known, default_ms: Option<u64>, now: jiff::Timestamp) -> Option<Due> {
    let expires_at = known.sandbox.expires_at.as_deref().map(str::parse::<jiff::Timestamp>);
    if let Some(Ok(at)) = expires_at
        && at <= now
    {
        return Some(Due::Expired);
    }
    let limit_ms = known.sandbox.delete_after_idle_ms.or(default_ms)?;
    known.asleep_ms.filter(|asleep| *asleep >= limit_ms).map(|_| Due::Idle { limit_ms })
}

async fn delete(app: &App, known: &Known, due: Due) -> Result<(), Failure> {
    let id = &known.sandbox.id;
    let Some(entry) = app.catalogue().find(id.as_str()) else { return Ok(()) };
    match due {
        Due::Expired => {
            tracing::info!(sandbox = %id, name = entry.name, at = known.sandbox.expires_at, "deleted: its time is over");
            reconcile::delete(app, &entry).await
        }
        Due::Idle { limit_ms } => {
            // Read before and kept after: one that wakes in between is not deleted, and goes on counting for itself.
            let usage = app.host().usage(id).await;
            if !app.host().delete_idle(id, limit_ms).await? {
                return Ok(());
            }
            reconcile::keep_usage(app, &entry, usage.ok()).await;
            tracing::info!(sandbox = %id, name = entry.name, limit_ms, "deleted: it has slept for so long");
            app.catalogue().remove(id).await
        }
    }
}
