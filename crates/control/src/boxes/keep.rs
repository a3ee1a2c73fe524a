//! What happens to boxes by themselves: their timelines, the end of those whose copy is given up, and forgetting old ones.

use std::sync::Arc;
use std::time::Duration;

use api::Event;
use api::boxes::BoxStatus;
use api::boxes::view::BoxEvent;
use tokio::sync::broadcast::{self, error::RecvError};

use super::{BoxRecord, act, view};
use crate::App;
use crate::catalogue::{Face, now_ms};
use crate::failure::{Failure, chain};

/// How long boxes that have ended stay in the list, milliseconds: a week (B30).
const LISTED_MS: i64 = 7 * 24 * 60 * 60 * 1000;
/// Between two looks at what is to be forgotten or has been missed.
const LOOK_EVERY: Duration = Duration::from_mins(1);

/// Follows what hosts tell, until the server stops.
pub(crate) async fn keep(app: App, mut events: broadcast::Receiver<Event>) {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let kept = tokio::select! {
            () = app.stop().cancelled() => return,
            event = events.recv() => match event {
                Ok(event) => on_event(&app, &event).await,
                // Some are lost: what has ended meanwhile is found by looking.
                Err(RecvError::Lagged(_)) => settle(&app).await,
                Err(RecvError::Closed) => return,
            },
            _ = looks.tick() => look(&app).await,
        };
        if let Err(error) = kept {
            tracing::error!(error = chain(&error), "what happened to a box is not kept");
        }
    }
}

/// After a start, or when events were lost: boxes that their host does not have any more have ended, and so have those that another
/// host has taken over.
pub(crate) async fn settle(app: &App) -> Result<(), Failure> {
    for record in app.boxes().live() {
        if app.catalogue().find(record.id.as_str()).is_none() {
            let reason = ended_reason(&record);
            act::end(app, &record.id, BoxStatus::Terminated, &reason, None).await?;
        }
    }
    find_moved(app).await
}

/// Finds out which boxes another host has taken over.
async fn find_moved(app: &App) -> Result<(), Failure> {
    for record in app.boxes().live() {
        view::known(app, &record).await?;
    }
    Ok(())
}

/// Removes what is left of boxes that have ended: a daemon that died meanwhile, or a full disk, has kept it.
async fn remove_rests(app: &App) -> Result<(), Failure> {
    let ended: Vec<_> = {
        let records = app.boxes().read();
        let ended = records.values().filter(|record| record.ended.is_some());
        ended.map(|record| record.id.clone()).collect()
    };
    for id in ended {
        if let Some(entry) = app.catalogue().find(id.as_str()) {
            crate::reconcile::delete(app, &entry).await?;
        }
    }
    Ok(())
}

async fn look(app: &App) -> Result<(), Failure> {
    find_moved(app).await?;
    remove_rests(app).await?;
    let now = now_ms();
    let old: Vec<_> = {
        let records = app.boxes().read();
        let is_old = |record: &&Arc<BoxRecord>| {
            record.ended.as_ref().is_some_and(|ended| now - ended.at_ms > LISTED_MS)
        };
        records.values().filter(is_old).map(|record| record.id.clone()).collect()
    };
    for id in old {
        app.boxes().forget(app.catalogue(), &id).await?;
    }
    Ok(())
}

async fn on_event(app: &App, event: &Event) -> Result<(), Failure> {
    let Some(record) = app.boxes().record(&event.sandbox_id) else { return Ok(()) };
    if record.ended.is_some() {
        return Ok(());
    }
    let kind = event.kind.strip_prefix("sandbox.").unwrap_or(&event.kind);
    if kind == "moved_away" || kind == "deleted" && event.data.contains_key("moved_to") {
        return act::moved_away(app, &record.id).await;
    }
    if kind == "deleted" {
        // Removed by its host, when its copy was no longer to be kept. What somebody removes has no row any more, or is being removed.
        let Some(entry) = app.catalogue().find(record.id.as_str()) else { return Ok(()) };
        if entry.face == Face::Box && entry.state == crate::catalogue::State::Ready {
            app.catalogue().remove(&entry.id).await?;
            let reason = ended_reason(&record);
            act::end(app, &record.id, BoxStatus::Terminated, &reason, None).await?;
        }
        return Ok(());
    }
    let Some((status, reason)) = told(kind, &event.text) else { return Ok(()) };
    app.boxes()
        .change(app.catalogue(), &record.id, |record| {
            if kind == "stopped_for_good" {
                record.stop_reason = Some(reason.clone());
            }
            record.note(BoxEvent { at: event.at.clone(), status, reason, said: None });
        })
        .await
}

fn ended_reason(record: &BoxRecord) -> String {
    record.stop_reason.clone().unwrap_or_else(|| "it was removed".to_owned())
}

/// What an entry of the sandbox's timeline is in the box's; `None`: no change of state.
fn told(kind: &str, text: &str) -> Option<(BoxStatus, String)> {
    let status = match kind {
        "created" => BoxStatus::Claimed,
        "running" | "woke" | "restarted" | "stopped" | "start_refused" => BoxStatus::Ready,
        "slept" | "restored" => BoxStatus::Frozen,
        "stopped_for_good" => BoxStatus::Terminated,
        "failed" => BoxStatus::Interrupted,
        _ => return None,
    };
    let reason = text.strip_prefix("is stopped for good: ").unwrap_or(text);
    Some((status, reason.to_owned()))
}
