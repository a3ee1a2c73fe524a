//! What happened to a sandbox, as pages and as streams, and why it is as it is.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use api::event::EventPage;
use api::sandbox::{Sandbox, Status, WaitsFor, Why};
use api::{ApiError, Code, Event, SandboxId};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt, stream};
use serde::Deserialize;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, watch};

use crate::App;
use crate::failure::Failure;
use crate::input::{At, Query};
use crate::journal::{EVENTS_KEPT, Piece, Place, now_ms, unix_ms};
use crate::validate;

/// Entries on one page, unless asked otherwise.
const PAGE_DEFAULT: usize = 100;
/// Most entries on one page.
const PAGE_MAX: usize = 1000;
/// Entries of the timeline in a `why`.
const WHY_EVENTS_MAX: usize = 100;
/// A place that is later than now by more than this, milliseconds, is one of before the clock was set back.
const SET_BACK_MIN_MS: u64 = 1000;

/// How often a silent stream says that it lives, so that dead clients are noticed and proxies keep it.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Kind of the event that says that others are missing.
const LOST: &str = "events.lost";
/// The header with which a cut stream goes on.
const LAST_EVENT_ID: &str = "Last-Event-ID";

/// Which entries, and how.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventsQuery {
    /// Only entries with a higher `seq`; default 0: from the beginning.
    #[param(example = 0)]
    after: Option<u64>,
    /// At most this many (1-1000) on a page; default 100.
    #[param(minimum = 1, maximum = 1000, example = 100)]
    limit: Option<usize>,
    /// As server-sent events, which go on as things happen; default: as `Accept` says.
    #[param(example = false)]
    stream: Option<bool>,
}

/// Read the timeline
///
/// What happened to a sandbox, oldest first. With `Accept: text/event-stream` or `stream=true` as server-sent events whose
/// ids are `seq`: after a cut, `Last-Event-ID` goes on without a gap. The newest ten thousand entries at least are kept; where
/// older ones are asked for, an event `events.lost` (an entry like the others) says how many are missing. A comment every
/// 15 s says that the stream lives. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/events", tag = "events", operation_id = "list_events",
    params(
        ("id" = String, Path, description = "Id or name", example = "web"),
        EventsQuery,
        ("Last-Event-ID" = Option<u64>, Header, description = "For a stream: the last `seq` received", example = 7),
    ),
    responses((status = 200, description = "One page, or the stream", content(
        (EventPage = "application/json"),
        (String = "text/event-stream"),
    ))),
)]
pub(crate) async fn of_one(
    State(app): State<App>,
    At(entry): At,
    Query(query): Query<EventsQuery>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let after = query.after.unwrap_or(0);
    let limit = query.limit.unwrap_or(PAGE_DEFAULT);
    if !(1..=PAGE_MAX).contains(&limit) {
        return Err(validate::out_of_range("limit", limit, 1, PAGE_MAX).into());
    }
    // Wrong in a request for a page, too, which has no use for it.
    let last_seq = match last_event_id(&headers)? {
        None => None,
        Some(id) => Some(id.parse().map_err(|_| {
            ApiError::invalid(LAST_EVENT_ID, "not the id of an event of this stream")
                .hint("a `seq`, such as `7`")
        })?),
    };
    let accepts =
        headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    if query.stream.unwrap_or(accepts.contains("text/event-stream")) {
        let after = last_seq.unwrap_or(after);
        // Begun here, so that an error is an ordinary answer. Watched before the past is read: nothing falls between.
        let watch = app.host().watch();
        let first = app.host().events(&entry.id, after, PAGE_MAX).await?;
        return Ok(sse(&app, follow(app.clone(), entry.id, after, first, watch)));
    }
    let events = app.host().events(&entry.id, after, limit).await?;
    let next_after = events.last().map_or(after, |event| event.seq);
    Ok(Json(EventPage { events, next_after }).into_response())
}

/// From where on.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct FollowQuery {
    /// Go on after the event with this id; default: from now on.
    #[param(example = "5f0c9d21-7-1796000000123")]
    after: Option<String>,
}

/// A stream of all timelines on its way.
struct FollowAll {
    app: App,
    place: Place,
    ready: VecDeque<Piece>,
    newest: watch::Receiver<u64>,
    /// Up to where each timeline was read, before the journal goes on.
    read: HashMap<SandboxId, u64>,
}

/// What happened since a time before this journal, from the timelines: at most as many entries as a journal keeps. Those of
/// sandboxes that were deleted meanwhile are gone with them.
async fn from_timelines(app: &App, since_ms: u64) -> Result<Vec<Event>, ApiError> {
    let mut events = Vec::new();
    for known in app.host().list().await {
        let id = known.sandbox.id;
        let mut after = 0;
        loop {
            let page = match app.host().events(&id, after, PAGE_MAX).await {
                Ok(page) => page,
                // Deleted meanwhile.
                Err(error) if error.code == Code::NotFound => break,
                Err(error) => return Err(error),
            };
            let Some(last) = page.last() else { break };
            after = last.seq;
            // Also those of the same moment: one may come again, none is left out.
            events.extend(page.into_iter().filter(|event| unix_ms(&event.at) >= since_ms));
        }
    }
    events.sort_by(|one, other| (&one.at, one.seq).cmp(&(&other.at, other.seq)));
    Ok(events)
}

/// Follow all timelines
///
/// Server-sent events of every sandbox, from now on, or on from where a stream was cut: `Last-Event-ID` (or `after`) with
/// the `id` of the last event received. Some ten thousand events are kept for that. After a restart of the daemon it goes on
/// from the timelines of the sandboxes that there are: an event of the very millisecond may come again, none is left out.
/// Where some are missing, because a client is further behind than that or the host's clock was set back meanwhile, an event `events.lost` says so in its place: read
/// the timelines of single sandboxes again. A `Last-Event-ID` that is none of this stream counts as one that is too far behind. A comment every 15 s says that the stream lives. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/events", tag = "events", operation_id = "follow_events",
    params(
        FollowQuery,
        ("Last-Event-ID" = Option<String>, Header, description = "The last `id` received; beats `after`", example = "5f0c9d21-7-1796000000123"),
    ),
    responses((status = 200, description = "The stream", body = String, content_type = "text/event-stream",
        example = "id: 5f0c9d21-7-1796000000123\nevent: sandbox.woke\ndata: {…}\n\n")),
)]
pub(crate) async fn of_all(
    State(app): State<App>,
    Query(query): Query<FollowQuery>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let place = |field: &str, text: &str| {
        text.parse::<Place>().map_err(|()| {
            ApiError::invalid(field, "not the id of an event of this stream")
                .hint("the `id` of an event as it was received, such as `5f0c9d21-7-1796000000123`")
        })
    };
    let end = app.journal().end();
    // A client that goes on by itself would give up for good if it were refused: it is told that something is missing.
    let unknown = headers.get(LAST_EVENT_ID).map(|id| id.to_str().ok()?.parse::<Place>().ok());
    // Checked where it is beaten, too.
    let after = query.after.as_deref().map(|after| place("after", after)).transpose()?;
    let place = match unknown {
        Some(place) => place.unwrap_or(end),
        None => after.unwrap_or(end),
    };
    let newest = app.journal().watch();
    let mut start =
        FollowAll { app: app.clone(), place, ready: VecDeque::new(), newest, read: HashMap::new() };
    if unknown == Some(None) {
        start.ready.push_back(Piece::Lost(None, end));
    }
    let since = place.since().filter(|_| !app.journal().knows(place));
    // Where the clock was set back meanwhile, times do not tell what came after: the journal says that something is missing.
    if let Some(since) = since.filter(|since| *since <= now_ms() + SET_BACK_MIN_MS) {
        // Before the timelines are read: what happens meanwhile stands in both, and is told once.
        let end = app.journal().end();
        let events = from_timelines(&app, since).await?;
        let missing = events.len().saturating_sub(EVENTS_KEPT);
        if missing > 0 {
            start.ready.push_back(Piece::Lost(Some(missing as u64), place));
        }
        for event in events.into_iter().skip(missing) {
            // The times of one sandbox may go back where its numbers do not.
            let read = start.read.entry(event.sandbox_id.clone()).or_default();
            *read = event.seq.max(*read);
            let place = Place::at(&event);
            start.ready.push_back(Piece::Event(Box::new(event), place));
        }
        start.place = end;
    }
    let events = stream::unfold(start, |mut follow| async move {
        loop {
            match follow.ready.pop_front() {
                // Read in its timeline already.
                Some(Piece::Event(event, place))
                    if place.is_in_journal()
                        && follow
                            .read
                            .get(&event.sandbox_id)
                            .is_some_and(|seq| event.seq <= *seq) =>
                {
                    follow.place = place;
                }
                Some(Piece::Event(event, place)) => {
                    if place.is_in_journal() {
                        follow.place = place;
                    }
                    return Some((sse_event(&event, &place.to_string()), follow));
                }
                Some(Piece::Lost(missing, place)) => {
                    if follow.app.journal().knows(place) {
                        follow.place = place;
                    }
                    return Some((lost(missing, place), follow));
                }
                None => {}
            }
            if !follow.ready.is_empty() {
                continue;
            }
            follow.newest.mark_unchanged();
            follow.ready = follow.app.journal().after(follow.place).into();
            // The journal lives as long as what is followed here.
            if follow.ready.is_empty() && follow.newest.changed().await.is_err() {
                return None;
            }
        }
    });
    Ok(sse(&app, events))
}

/// Some events are missing here.
fn lost(missing: Option<u64>, place: Place) -> sse::Event {
    let text = match missing {
        Some(missing) => format!("{missing} events are missing here"),
        None => "events before this are missing here".to_owned(),
    };
    let data = serde_json::json!({ "type": LOST, "missing": missing, "text": text });
    sse::Event::default().id(place.to_string()).event(LOST).data(data.to_string())
}

fn last_event_id(headers: &HeaderMap) -> Result<Option<&str>, ApiError> {
    let Some(id) = headers.get("last-event-id") else { return Ok(None) };
    id.to_str().map(Some).map_err(|_| ApiError::invalid(LAST_EVENT_ID, "not plain text"))
}

/// Explain
///
/// Why it is awake and until when, or how it sleeps; how often it slept and woke; and its newest timeline with what each
/// phase took. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/why", tag = "events", operation_id = "explain_sandbox",
    params(("id" = String, Path, description = "Id or name", example = "web")),
    responses((status = 200, description = "The explanation", body = Why)),
)]
pub(crate) async fn why(State(app): State<App>, At(entry): At) -> Result<Json<Why>, Failure> {
    let mut timeline = VecDeque::with_capacity(WHY_EVENTS_MAX + 1);
    let (mut wakes, mut sleeps, mut after) = (0, 0, 0);
    loop {
        let page = app.host().events(&entry.id, after, PAGE_MAX).await?;
        let Some(last) = page.last() else { break };
        after = last.seq;
        for event in page {
            match event.kind.as_str() {
                "sandbox.woke" => wakes += 1,
                "sandbox.slept" => sleeps += 1,
                _ => {}
            }
            timeline.push_back(event);
            if timeline.len() > WHY_EVENTS_MAX {
                timeline.pop_front();
            }
        }
    }
    // Read last, so that it is never older than the timeline.
    let sandbox = super::told(&app, &entry.id).await?;
    let summary = summary(&sandbox);
    Ok(Json(Why { sandbox, summary, wakes, sleeps, timeline: timeline.into() }))
}

/// One sentence for a person.
fn summary(sandbox: &Sandbox) -> String {
    let Sandbox { name, since, .. } = sandbox;
    if let Some(WaitsFor { since, text, .. }) = &sandbox.waits_for {
        return format!("`{name}` {text} (since {since})");
    }
    match sandbox.status {
        Status::Starting => format!("`{name}` is starting since {since}"),
        Status::Running => {
            let reasons: Vec<&str> =
                sandbox.awake_because.iter().map(|reason| reason.text.as_str()).collect();
            let because = if reasons.is_empty() {
                String::new()
            } else {
                format!(": {}", reasons.join("; "))
            };
            let until = match &sandbox.will_sleep_at {
                Some(at) => format!("; if nothing changes it sleeps at {at}"),
                None => String::new(),
            };
            format!("`{name}` is awake since {since}{because}{until}")
        }
        Status::Sleeping => {
            let how = match sandbox.sleep_tier {
                Some(api::sandbox::SleepTier::Memory) => " in memory",
                Some(api::sandbox::SleepTier::Disk) => " on disk",
                Some(api::sandbox::SleepTier::Store) => " in the object store",
                Some(api::sandbox::SleepTier::Off) => ", powered off,",
                None => "",
            };
            let timer = match &sandbox.will_wake_at {
                Some(at) => format!(", at the latest a timer of its own at {at}"),
                None => String::new(),
            };
            format!("`{name}` sleeps{how} since {since}; anything that needs it wakes it{timer}")
        }
        Status::Failed => {
            let failure = sandbox.failure.as_deref().unwrap_or("it could not be started");
            format!("`{name}` has failed since {since}: {failure}; restart or delete it")
        }
    }
}

/// Past and future of one timeline without a gap: the past is read again whenever the watch skipped something.
fn follow(
    app: App,
    id: SandboxId,
    after: u64,
    first: Vec<Event>,
    watch: broadcast::Receiver<Event>,
) -> impl Stream<Item = sse::Event> + Send {
    struct Follow {
        app: App,
        id: SandboxId,
        /// `seq` of the last entry told.
        last: u64,
        ready: VecDeque<Event>,
        /// What was read last may not be all: read on before waiting.
        behind: bool,
        watch: broadcast::Receiver<Event>,
        deleted: bool,
    }
    let start =
        Follow { app, id, last: after, ready: first.into(), behind: true, watch, deleted: false };
    stream::unfold(start, |mut follow| async move {
        loop {
            if let Some(event) = follow.ready.pop_front() {
                if event.seq <= follow.last {
                    continue;
                }
                let missing = event.seq - follow.last - 1;
                if missing > 0 {
                    let lost = gap(&event, missing);
                    follow.last = lost.seq;
                    follow.ready.push_front(event);
                    return Some((sse_event(&lost, &lost.seq.to_string()), follow));
                }
                follow.last = event.seq;
                follow.deleted = event.kind == "sandbox.deleted";
                return Some((sse_event(&event, &event.seq.to_string()), follow));
            }
            if follow.deleted {
                return None;
            }
            if follow.behind {
                match follow.app.host().events(&follow.id, follow.last, PAGE_MAX).await {
                    Ok(page) => {
                        follow.behind = page.len() == PAGE_MAX;
                        follow.ready = page.into();
                    }
                    // Deleted meanwhile: there is nothing more to tell.
                    Err(error) => {
                        tracing::debug!(error = %error, "a followed timeline ended");
                        return None;
                    }
                }
                continue;
            }
            match follow.watch.recv().await {
                Ok(event) if event.sandbox_id != follow.id || event.seq <= follow.last => {}
                // The next in order needs no look at the past.
                Ok(event) if event.seq == follow.last + 1 => follow.ready.push_back(event),
                Ok(_) | Err(RecvError::Lagged(_)) => follow.behind = true,
                Err(RecvError::Closed) => return None,
            }
        }
    })
}

/// Entries before this one are not kept any more, or cannot be read. Takes the place of the last of them.
fn gap(before: &Event, missing: u64) -> Event {
    let data = serde_json::json!({ "missing": missing });
    Event {
        seq: before.seq - 1,
        at: before.at.clone(),
        sandbox_id: before.sandbox_id.clone(),
        kind: LOST.to_owned(),
        text: format!("{missing} entries are not kept any more"),
        data: data.as_object().cloned().unwrap_or_default(),
    }
}

fn sse_event(event: &Event, id: &str) -> sse::Event {
    let data = serde_json::to_string(event).expect("an event is plain data");
    // The text of an event may come from a guest; JSON escapes its line ends, and kinds are ours.
    sse::Event::default().id(id).event(&event.kind).data(data)
}

fn sse(app: &App, events: impl Stream<Item = sse::Event> + Send + 'static) -> Response {
    let events = events
        .take_until(app.stop().clone().cancelled_owned())
        .map(Ok::<_, std::convert::Infallible>);
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}
