//! Checkpoints of boxes (S18-S20): turning them on and off, what goes along with them, and the box that another daemon makes of one.
//!
//! A host keeps a sandbox and no more. What a box is beyond that (whose, its goal, services and the names of its secrets) stands in the
//! catalogue of its daemon, which is lost with it; so the host is given that as a note, which it keeps with the sandbox and carries
//! with each checkpoint. Its timeline stays behind.
//!
//! # Invariants
//!
//! 1. While a box has checkpoints, each change of what is in the note is followed by [`carry`]. One at a time: no older note comes
//!    after a newer one.
//! 2. Turning them on or off is no use of the box (B3, B44): it neither thaws it nor puts off its stop.

use api::boxes::BoxStatus;
use api::boxes::start::StartBox;
use api::boxes::view::{BoxCheckpointView, BoxEvent};
use api::checkpoint::{CheckpointSetting, EVERY_SECONDS_RANGE};
use api::host::{Change, Known};
use api::sandbox::PolicyPatch;
use api::{SandboxId, account::ACCOUNT_DEFAULT};
use serde::{Deserialize, Serialize};

use super::{AgentId, BootsTold, BoxRecord, Who, act, view};
use crate::App;
use crate::catalogue::now_ms;
use crate::failure::{Failure, chain};

/// Entries of a timeline that are looked through for the one about the move, which is among its first.
const EVENTS_MAX: usize = 100;

/// What another daemon must know of a box to make the same of it. Fields may be added, with a default.
#[derive(Debug, Serialize, Deserialize)]
struct Carried {
    account: String,
    spec: StartBox,
    size: u32,
    #[serde(default)]
    external: Vec<usize>,
    #[serde(default)]
    agent: Option<AgentId>,
    created_ms: i64,
    #[serde(flatten)]
    told: BootsTold,
}

/// Has checkpoints of a box taken so often; `None`: none any more, and those that there are removed.
pub(crate) async fn set_checkpoint(
    app: &App,
    who: &Who,
    id: &str,
    every: Option<u64>,
) -> Result<BoxCheckpointView, Failure> {
    if let Some(seconds) = every.filter(|seconds| !EVERY_SECONDS_RANGE.contains(seconds)) {
        let (least, most) = (EVERY_SECONDS_RANGE.start(), EVERY_SECONDS_RANGE.end());
        return Err(crate::validate::out_of_range("everySeconds", seconds, least, most).into());
    }
    let asked = act::find(app, who, id)?;
    act::living(app, &asked).await?;
    let _one_at_a_time = app.boxes().carrying.lock().await;
    // As it is now.
    let record = act::find(app, who, id)?;
    let change = Change {
        policy: PolicyPatch {
            checkpoint: Some(every.map(|every_seconds| CheckpointSetting { every_seconds })),
            ..PolicyPatch::default()
        },
        note: Some(note(&record)?),
        ..Change::default()
    };
    let sandbox = app.host().update(&record.id, change).await?;
    Ok(sandbox.checkpoint.map(BoxCheckpointView::from).unwrap_or_default())
}

/// What goes along with a box's checkpoints has changed: it goes along from the next one on. Where it has none: nothing.
pub(super) async fn carry(app: &App, id: &SandboxId) -> Result<(), Failure> {
    let _one_at_a_time = app.boxes().carrying.lock().await;
    let Some(record) = app.boxes().record(id) else { return Ok(()) };
    let known = app.host().view(id).await?;
    let note = note(&record)?;
    if known.sandbox.checkpoint.is_none() || known.note.as_ref() == Some(&note) {
        return Ok(());
    }
    app.host().update(id, Change { note: Some(note), ..Change::default() }).await?;
    Ok(())
}

fn note(record: &BoxRecord) -> Result<String, Failure> {
    let carried = Carried {
        account: record.account.clone(),
        spec: record.spec.clone(),
        size: record.size,
        external: record.external.clone(),
        agent: record.agent.clone(),
        created_ms: record.created_ms,
        told: record.told.clone(),
    };
    serde_json::to_string(&carried).map_err(Failure::internal("write a box's note as JSON"))
}

/// Enters a box that its host has and that is not known here, or no more: one that it has taken over from a checkpoint. What the
/// note says it was, it is again. A sandbox that is no box: nothing.
pub(crate) async fn enter(app: &App, at_host: &Known) -> Result<(), Failure> {
    let Some(life) = &at_host.boxed else { return Ok(()) };
    let id = &at_host.sandbox.id;
    let mut reason = moved(app, id)
        .await
        .unwrap_or_else(|| "its host has it, and nobody here knew of it: entered again".to_owned());
    let carried = at_host.note.as_deref().map(serde_json::from_str::<Carried>);
    let mut carried = match carried {
        Some(Ok(carried)) => carried,
        unread => {
            if let Some(Err(error)) = unread {
                tracing::error!(sandbox = %id, %error, "what it was started as cannot be read");
            }
            reason.push_str("; its goal, services and secrets are not known here");
            Carried {
                account: ACCOUNT_DEFAULT.to_owned(),
                spec: StartBox::default(),
                size: 1,
                external: Vec::new(),
                agent: None,
                created_ms: now_ms(),
                told: BootsTold::of(life.boots),
            }
        }
    };
    if app.accounts().get(&carried.account).is_none() {
        reason = format!(
            "{reason}; there is no account `{}` here, so it belongs to the default account",
            carried.account
        );
        ACCOUNT_DEFAULT.clone_into(&mut carried.account);
        // Those of this account are others, whatever their names.
        if !carried.spec.secrets.is_empty() {
            let names = std::mem::take(&mut carried.spec.secrets).join(", ");
            reason = format!("{reason}; new commands do not get its secrets {names}");
        }
    }
    tracing::info!(sandbox = %id, account = carried.account, reason, "a box is entered");
    let before = app.boxes().record(id);
    let mut record = BoxRecord {
        id: id.clone(),
        account: carried.account,
        spec: carried.spec,
        size: carried.size,
        cpus: at_host.sandbox.cpus,
        memory_mib: at_host.sandbox.memory_mib,
        key: at_host.link_key.clone(),
        external: carried.external,
        agent: carried.agent,
        created_ms: carried.created_ms,
        last_used_ms: i64::try_from(life.last_used_unix_ms).unwrap_or_default(),
        timeline: before.map(|before| before.timeline.clone()).unwrap_or_default(),
        stop_reason: life.stopped_unix_ms.and(life.reason.clone()),
        told: carried.told,
        ended: None,
    };
    record.note(BoxEvent {
        at: view::rfc3339(u64::try_from(now_ms()).unwrap_or(0)),
        status: life.status,
        reason,
        said: None,
    });
    let account = record.account.clone();
    app.boxes().keep(app.catalogue(), record).await?;
    // What it has used elsewhere is paid for there.
    crate::credit::took_over(app, &account, id).await?;
    if matches!(life.status, BoxStatus::Claimed | BoxStatus::Ready | BoxStatus::Takeover) {
        app.credit().begun(app.accounts(), &account);
    }
    Ok(())
}

/// What its host says of how it came there.
async fn moved(app: &App, id: &SandboxId) -> Option<String> {
    let events = app.host().events(id, 0, EVENTS_MAX).await;
    let events = events.unwrap_or_else(|error| {
        tracing::error!(sandbox = %id, error = chain(&error), "how it came here cannot be read");
        Vec::new()
    });
    events.into_iter().rev().find(|event| event.kind == "sandbox.moved").map(|event| event.text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_says_what_a_box_was_started_as_and_has_no_timeline() {
        let mut record = BoxRecord::example();
        record.spec.goal = Some("count".to_owned());
        record.external = vec![1];
        record.note(BoxEvent {
            at: String::new(),
            status: BoxStatus::Ready,
            reason: "a reason".to_owned(),
            said: None,
        });
        let text = note(&record).expect("a note");
        assert!(!text.contains("a reason") && !text.contains("\"key\""), "{text}");
        let carried: Carried = serde_json::from_str(&text).expect("read");
        assert_eq!((&carried.spec, &carried.external), (&record.spec, &record.external));
    }
}
