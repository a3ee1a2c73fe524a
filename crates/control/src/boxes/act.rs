//! Calls that act on a box: each is use from its start to its end, thaws a frozen one first, and holds it until it ends (B3-B7, B15).

use std::sync::Arc;

use api::boxes::{BoxLife, BoxStatus};
use api::host::{Caller, Hold, HoldKind};
use api::{ApiError, Code};

use super::{AgentId, BoxRecord, Ended, Who, no_credit, view};
use crate::App;
use crate::catalogue::now_ms;
use crate::failure::{Failure, chain};

/// Why a box is interrupted that another host has.
const MOVED_AWAY: &str = "another host has taken it over from its checkpoint; it goes on there";

/// A call that acts on a box, while it lives.
pub(crate) struct Acting {
    /// The box.
    pub(crate) record: Arc<BoxRecord>,
    /// What the caller should know of how the box came to be awake.
    pub(crate) note: Option<String>,
    /// How long it took to thaw it, milliseconds.
    pub(crate) woke_ms: Option<f64>,
    /// How often it was booted after an end by itself.
    boots: u64,
    /// Who acts.
    agent: Option<AgentId>,
    /// Holds the box until it is dropped.
    _hold: Box<dyn Hold>,
}

impl Acting {
    /// The caller is told the note: that the box was booted each of them is told once.
    pub(super) async fn noted(&self, app: &App) {
        let (id, boots, agent) = (&self.record.id, self.boots, self.agent.as_ref());
        if boots <= self.record.told.to(agent) {
            return;
        }
        let told = |record: &mut BoxRecord| record.told.tell(agent, boots);
        if let Err(error) = app.boxes().change(app.catalogue(), id, told).await {
            tracing::error!(sandbox = %id, ?error, "that it was booted is told once more");
        }
        carry(app, id).await;
    }
}

/// Another host that takes the box over is to know what has changed.
async fn carry(app: &App, id: &api::SandboxId) {
    if let Err(error) = super::checkpoint::carry(app, id).await {
        tracing::error!(sandbox = %id, ?error, "another host would not know who was told of what");
    }
}

/// A box of the account, by its id.
pub(super) fn find(app: &App, who: &Who, id: &str) -> Result<Arc<BoxRecord>, ApiError> {
    let record = id.parse().ok().and_then(|id| app.boxes().record(&id));
    record.filter(|record| record.account == who.account).ok_or_else(|| {
        ApiError::new(Code::NotFound, "there is no box of this id")
            .hint("sandbox_list (GET /v1/boxes) shows the boxes that there are; `all` also those that have ended")
    })
}

/// What its host says of a box, which must not have ended, be stopped or have failed.
pub(super) async fn living(app: &App, record: &BoxRecord) -> Result<BoxLife, Failure> {
    let id = &record.id;
    let known = view::known(app, record).await?;
    // It may have turned out just now that another host has it.
    let ended = app.boxes().record(id).and_then(|record| record.ended.clone());
    if let Some(ended) = &ended {
        return Err(ended_error(record, ended).into());
    }
    let Some((_, life)) = known else {
        let text = format!("box {id} is interrupted: its host is gone, and nothing on it survived");
        return Err(ApiError::new(Code::BoxStopped, text)
            .hint("start a new one with sandbox_start (POST /v1/boxes)")
            .into());
    };
    if life.stopped_unix_ms.is_some() {
        return Err(stopped_error(record, &life).into());
    }
    if life.status == BoxStatus::Interrupted {
        let reason = life.reason.clone().unwrap_or_else(|| "it failed".to_owned());
        let text = format!("box {id} is interrupted: {reason}");
        return Err(ApiError::new(Code::SandboxFailed, text)
            .hint("stop it with sandbox_stop (DELETE /v1/boxes/{id}, `dormouse boxes stop`) and start a new one")
            .into());
    }
    Ok(life)
}

/// Begins to act on a box. `what`: for its timeline, such as `sandbox_exec`.
pub(crate) async fn act(app: &App, who: &Who, id: &str, what: &str) -> Result<Acting, Failure> {
    let record = find(app, who, id)?;
    let life = living(app, &record).await?;
    let caller = Caller { what: what.to_owned(), peer: None };
    let held = app.host().hold(&record.id, HoldKind::Tool, caller).await;
    let hold = held.map_err(|error| told(app, &record, error))?;
    app.credit().begun(app.accounts(), &record.account);
    let agent = who.agent.as_ref();
    let knows = record.told.to(agent);
    // Who used it last is known from here on (B36), and who is to be told of its boots.
    if (agent.is_some() && agent != record.agent.as_ref()) || !record.told.knows(agent) {
        let change = |record: &mut BoxRecord| {
            record.agent = agent.or(record.agent.as_ref()).cloned();
            record.told.tell(agent, knows);
        };
        app.boxes().change(app.catalogue(), &record.id, change).await?;
        carry(app, &record.id).await;
    }
    // Also one that ended under a call, which has it booted at once, and of which nobody has heard yet.
    let boots = app.host().view(&record.id).await?.boxed.map_or(0, |life| life.boots);
    let note = if boots > knows {
        Some("The box had ended by itself (power off, reboot or crash) and was booted from its disk: the processes that ran in it \
              are lost, what was written is there."
            .to_owned())
    } else if life.status == BoxStatus::Frozen {
        Some(
            "The box was frozen and has been thawed: memory, processes and files are as they were."
                .to_owned(),
        )
    } else {
        None
    };
    Ok(Acting {
        record,
        note,
        woke_ms: hold.woke_ms,
        boots,
        agent: who.agent.clone(),
        _hold: hold.value,
    })
}

/// Waits for something that is done in a box; where its account runs out of credit meanwhile, whoever waits is told so, and it goes on
/// without him when the box does (B14).
pub(crate) async fn while_paid<T>(
    app: &App,
    record: &BoxRecord,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::select! {
        biased;
        done = work => done.map_err(|failure| match failure {
            Failure::Told(error) => told(app, record, error).into(),
            internal @ Failure::Internal { .. } => internal,
        }),
        () = app.accounts().without_credit(&record.account) => Err(no_credit().into()),
    }
}

/// What keeps it frozen, where its host only knows that something does.
fn told(app: &App, record: &BoxRecord, error: ApiError) -> ApiError {
    match error.code {
        Code::SpendingLimit if app.accounts().lacks_credit(&record.account) => no_credit(),
        _ => error,
    }
}

/// Thaws a box, which is use (B15).
pub(crate) async fn wake(app: &App, who: &Who, id: &str) -> Result<Option<f64>, Failure> {
    Ok(act(app, who, id, "a request to wake it").await?.woke_ms)
}

/// Stops a box for good; one that is frozen too, without thawing it. It keeps no copy (B27).
pub(crate) async fn stop(app: &App, who: &Who, id: &str, reason: &str) -> Result<(), Failure> {
    let record = find(app, who, id)?;
    if record.ended.is_some() {
        return Ok(());
    }
    let known = view::known(app, &record).await?;
    // What it has used until now.
    if let Err(error) = crate::credit::look(app).await {
        tracing::error!(sandbox = %record.id, error = chain(&error), "what it has used is not charged");
    }
    let last_used_ms = known.and_then(|(_, life)| i64::try_from(life.last_used_unix_ms).ok());
    // First: what is left of one whose removal is cut off is removed later ([`keep`](super::keep)), and it is told as ended all along.
    end(app, &record.id, BoxStatus::Terminated, reason, last_used_ms).await?;
    match app.catalogue().find(record.id.as_str()) {
        Some(entry) => crate::reconcile::delete(app, &entry).await,
        None => Ok(()),
    }
}

/// Keeps a line for the person in a box's timeline. No use of the box, and nothing of it changes (B4).
pub(crate) async fn say(app: &App, who: &Who, id: &str, text: &str) -> Result<(), Failure> {
    let record = find(app, who, id)?;
    not_ended(&record)?;
    let status = view::status(app, who, id).await?.status;
    let event = api::boxes::view::BoxEvent {
        at: view::rfc3339(u64::try_from(now_ms()).unwrap_or(0)),
        status,
        reason: "its AI says so".to_owned(),
        said: Some(text.to_owned()),
    };
    app.boxes().change(app.catalogue(), &record.id, |record| record.note(event)).await
}

/// Notes that another host has taken a box over, which goes on there (S18).
pub(super) async fn moved_away(app: &App, id: &api::SandboxId) -> Result<(), Failure> {
    end(app, id, BoxStatus::Interrupted, MOVED_AWAY, None).await
}

/// Notes that a box has ended. The first word stands.
pub(super) async fn end(
    app: &App,
    id: &api::SandboxId,
    status: BoxStatus,
    reason: &str,
    last_used_ms: Option<i64>,
) -> Result<(), Failure> {
    let change = |record: &mut BoxRecord| {
        if record.ended.is_none() {
            let at_ms = now_ms();
            record.note(api::boxes::view::BoxEvent {
                at: view::rfc3339(u64::try_from(at_ms).unwrap_or(0)),
                status,
                reason: reason.to_owned(),
                said: None,
            });
            record.ended = Some(Ended { status, reason: reason.to_owned(), at_ms });
            record.last_used_ms = last_used_ms.unwrap_or(record.last_used_ms);
        }
    };
    app.boxes().change(app.catalogue(), id, change).await?;
    crate::credit::forget(app, id).await
}

/// Refuses what makes no sense of a box that has ended.
pub(super) fn not_ended(record: &BoxRecord) -> Result<(), ApiError> {
    record.ended.as_ref().map_or(Ok(()), |ended| Err(ended_error(record, ended)))
}

fn ended_error(record: &BoxRecord, ended: &Ended) -> ApiError {
    let text = format!("box {} is {}: {}", record.id, ended.status.as_str(), ended.reason);
    if ended.reason == MOVED_AWAY {
        return ApiError::new(Code::SandboxMoved, text).hint(
            "ask that host for it, by the same id; here it can only be forgotten (sandbox_stop, DELETE /v1/boxes/{id})",
        );
    }
    ApiError::new(Code::BoxStopped, text)
        .hint("it keeps no copy that could be brought back: start a new one with sandbox_start (POST /v1/boxes)")
}

fn stopped_error(record: &BoxRecord, life: &BoxLife) -> ApiError {
    let id = &record.id;
    let reason = life.reason.clone().unwrap_or_default();
    let until = life.restorable_until_unix_ms.map(view::rfc3339).unwrap_or_default();
    let goal = record.spec.goal.clone().unwrap_or_else(|| "its goal".to_owned());
    let call = serde_json::json!({ "restore": id, "goal": goal });
    ApiError::new(Code::BoxStopped, format!("box {id} is terminated: {reason}")).hint(format!(
        "its frozen copy is kept until {until}: sandbox_start {call} brings the same box back"
    ))
}
