//! Telling about boxes. None of it is use, and none of it thaws one (B4).

use std::collections::HashMap;

use api::account::ACCOUNT_DEFAULT;
use api::boxes::view::{BoxCheckpointView, BoxEvents, BoxList, BoxView};
use api::boxes::{BoxLife, BoxStatus};
use api::host::Known;
use api::{Code, SandboxId};

use super::{BoxRecord, Who, act, services};
use crate::App;
use crate::catalogue::now_ms;
use crate::failure::Failure;
use crate::spending::amount;

/// From so long before its stop on every result about a box says so, milliseconds (B26).
const WARN_BEFORE_MS: u64 = 30 * 60 * 1000;

/// Tells about a box.
pub(crate) async fn status(app: &App, who: &Who, id: &str) -> Result<BoxView, Failure> {
    let record = act::find(app, who, id)?;
    let known = known(app, &record).await?;
    // It may have turned out just now that another host has it.
    let record = act::find(app, who, id)?;
    Ok(view(app, who, &record, known.as_ref().map(|(known, life)| (known, life))))
}

/// Tells about all boxes of the account: those that live; with `all` those too that have ended within the last week.
pub(crate) async fn list(app: &App, who: &Who, all: bool) -> BoxList {
    let mut known: HashMap<SandboxId, Known> = app
        .host()
        .list()
        .await
        .into_iter()
        .filter(|known| known.boxed.is_some())
        .map(|known| (known.sandbox.id.clone(), known))
        .collect();
    let mut boxes = Vec::new();
    for record in app.boxes().of_account(&who.account) {
        let known = known.remove(&record.id);
        let life = known.as_ref().and_then(|known| Some((known, known.boxed.as_ref()?)));
        let view = view(app, who, &record, life);
        if all || view.status.is_live() || view.status == BoxStatus::Interrupted {
            boxes.push(view);
        }
    }
    BoxList { boxes }
}

/// Its timeline (B2).
pub(crate) fn events(app: &App, who: &Who, id: &str) -> Result<BoxEvents, Failure> {
    Ok(BoxEvents { events: act::find(app, who, id)?.timeline.clone() })
}

/// The line that warns of a stop to come (B26).
fn warning(id: &SandboxId, stops_at: u64) -> Option<String> {
    let left_ms = stops_at.saturating_sub(u64::try_from(now_ms()).unwrap_or(0));
    if left_ms > WARN_BEFORE_MS {
        return None;
    }
    let minutes = left_ms.div_ceil(60_000);
    let unit = if minutes == 1 { "minute" } else { "minutes" };
    Some(format!(
        "box {id}: the idle rules stop it for good at {} (in {minutes} {unit}) unless something uses it before then, and /work goes \
         with it.",
        rfc3339(stops_at)
    ))
}

/// What its host says of a box; `None`: it has none of it.
pub(super) async fn known(
    app: &App,
    record: &BoxRecord,
) -> Result<Option<(Known, BoxLife)>, Failure> {
    if record.ended.is_some() {
        return Ok(None);
    }
    match app.host().view(&record.id).await {
        Ok(known) => {
            let life = known.boxed.clone();
            Ok(life.map(|life| (known, life)))
        }
        Err(error) if error.code == Code::NotFound => Ok(None),
        Err(error) if error.code == Code::SandboxMoved => {
            act::moved_away(app, &record.id).await?;
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

fn view(app: &App, who: &Who, record: &BoxRecord, known: Option<(&Known, &BoxLife)>) -> BoxView {
    let life = known.map(|(_, life)| life);
    let (status, reason) = match (life, &record.ended) {
        (_, Some(ended)) => (ended.status, Some(ended.reason.clone())),
        (Some(life), None) => (life.status, withheld(app, record, life).or(life.reason.clone())),
        // Its host does not have it, or not yet.
        (None, None) => (BoxStatus::Interrupted, Some("its host does not have it".to_owned())),
    };
    let last_used_ms = life
        .and_then(|life| i64::try_from(life.last_used_unix_ms).ok())
        .unwrap_or(record.last_used_ms);
    let agent = app.boxes().agents.view(record.agent.as_ref(), status, last_used_ms);
    let is_mine = who.agent.is_some() && who.agent == record.agent;
    let awake = matches!(status, BoxStatus::Ready | BoxStatus::Takeover);
    let at = |ms: Option<u64>| ms.map(rfc3339);
    BoxView {
        id: record.id.to_string(),
        name: record.spec.name.clone(),
        goal: record.spec.goal.clone(),
        status,
        status_reason: reason,
        arch: "amd64".to_owned(),
        placement: "microvm".to_owned(),
        started_from: "snapshot".to_owned(),
        size: record.size,
        vcpus: record.cpus,
        memory_gb: f64::from(record.memory_mib) / 1024.0,
        scene_url: app.links().box_url(&record.id, &record.key, None),
        web_url: services::web_url(app, record),
        services: services::view(app, record),
        external_base_url: record.spec.external_base_url.clone(),
        secrets: record.spec.secrets.clone(),
        toolchains: record.spec.toolchains.clone(),
        idle_timeout_min: record.spec.idle_timeout_min.unwrap_or(0),
        freeze: life.filter(|_| awake).map(|life| life.freeze.clone()),
        warning: life
            .and_then(|life| life.stops_at_unix_ms)
            .and_then(|stops_at| warning(&record.id, stops_at)),
        stops_at: at(life.and_then(|life| life.stops_at_unix_ms)),
        restorable_until: at(life.and_then(|life| life.restorable_until_unix_ms)),
        checkpoint: known
            .and_then(|(known, _)| known.sandbox.checkpoint.clone())
            .map(BoxCheckpointView::from),
        last_used_at: rfc3339(u64::try_from(last_used_ms).unwrap_or(0)),
        created_at: rfc3339(u64::try_from(record.created_ms).unwrap_or(0)),
        ended_at: record
            .ended
            .as_ref()
            .map(|ended| rfc3339(u64::try_from(ended.at_ms).unwrap_or(0))),
        this_conversation: is_mine && status.is_live(),
        agent: status.is_live().then_some(agent),
        said: record.timeline.iter().rev().find_map(|event| event.said.clone()),
        box_url_access: url_access(app, &record.account),
    }
}

/// Which limit keeps it frozen, of which its host knows only that there is one (B14, S23).
fn withheld(app: &App, record: &BoxRecord, life: &BoxLife) -> Option<String> {
    if life.status != BoxStatus::Frozen {
        return None;
    }
    if app.accounts().lacks_credit(&record.account) {
        return Some("the account has no credit: it stays frozen and keeps everything, and goes on when there is credit again".to_owned());
    }
    let (limit, spending) = app.spending().reached()?;
    // What all accounts together may use and have used is for the operator alone to see.
    let figures = match record.account.as_str() {
        ACCOUNT_DEFAULT => format!(
            ": {} of memory awake, of which {} are used",
            amount(limit.memory_gib_seconds),
            amount(spending.memory_gib_seconds)
        ),
        _ => String::new(),
    };
    Some(format!(
        "a limit on spending is reached, the project's for the month {} (UTC){figures}; it stays frozen and keeps everything until the \
         limit is raised or the month is over",
        spending.month
    ))
}

/// That its URLs open for some addresses only (T20).
fn url_access(app: &App, account: &str) -> Option<String> {
    let list = app.accounts().get(account)?.url_allow?;
    let list: Vec<_> = list.iter().map(ToString::to_string).collect();
    Some(format!(
        "The URLs open only from the addresses on the account's allow-list ({}); anybody else gets the answer of a box that does not \
         exist.",
        list.join(", ")
    ))
}

pub(crate) fn rfc3339(unix_ms: u64) -> String {
    let ms = i64::try_from(unix_ms).unwrap_or(i64::MAX);
    jiff::Timestamp::from_millisecond(ms)
        .map_or_else(|_| String::new(), |time| format!("{time:.3}"))
}
