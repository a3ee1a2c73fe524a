//! What happened to a sandbox, as pages and as streams, and why it is as it is.

use std::collections::VecDeque;
use std::time::Duration;

use api::event::EventPage;
use api::sandbox::{Sandbox, Status, Why};
use api::{ApiError, Event, SandboxId};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt, stream};
use serde::Deserialize;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::App;
use crate::failure::Failure;
use crate::input::{At, Query};
use crate::validate;

/// Entries on one page, unless asked otherwise.
const PAGE_DEFAULT: usize = 100;
/// Most entries on one page.
const PAGE_MAX: usize = 1000;
/// Entries of the timeline in a `why`.
const WHY_EVENTS_MAX: usize = 100;
/// How often a silent stream says that it lives, so that dead clients are noticed and proxies keep it.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

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
/// ids are `seq`: after a cut, `Last-Event-ID` goes on without a gap. Wakes nothing.
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
    let accepts =
        headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    if query.stream.unwrap_or(accepts.contains("text/event-stream")) {
        let after = match headers.get("last-event-id") {
            None => after,
            Some(id) => id.to_str().ok().and_then(|id| id.parse().ok()).ok_or_else(|| {
                ApiError::invalid("Last-Event-ID", "not the id of an event of this stream")
                    .hint("a `seq`, such as `7`")
            })?,
        };
        // Begun here, so that an error is an ordinary answer. Watched before the past is read: nothing falls between.
        let watch = app.host().watch();
        let first = app.host().events(&entry.id, after, PAGE_MAX).await?;
        return Ok(sse(&app, follow(app.clone(), entry.id, after, first, watch)));
    }
    let events = app.host().events(&entry.id, after, limit).await?;
    let next_after = events.last().map_or(after, |event| event.seq);
    Ok(Json(EventPage { events, next_after }).into_response())
}

/// Follow all timelines
///
/// Server-sent events of every sandbox from now on; their ids are `<sandbox id>/<seq>`. An event named `lost` says that the
/// client was too slow and some are missing: read the timelines of single sandboxes again. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/events", tag = "events", operation_id = "follow_events",
    responses((status = 200, description = "The stream", body = String, content_type = "text/event-stream",
        example = "id: k3vq7mzt2abc/7\nevent: sandbox.woke\ndata: {…}\n\n")),
)]
pub(crate) async fn of_all(State(app): State<App>) -> Response {
    let watch = app.host().watch();
    let events = stream::unfold(watch, |mut watch| async move {
        let event = match watch.recv().await {
            Ok(event) => sse_event(&event, &format!("{}/{}", event.sandbox_id, event.seq)),
            Err(RecvError::Lagged(missing)) => {
                sse::Event::default().event("lost").data(missing.to_string())
            }
            Err(RecvError::Closed) => return None,
        };
        Some((event, watch))
    });
    sse(&app, events)
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
    let sandbox = app.host().view(&entry.id).await?.sandbox;
    let summary = summary(&sandbox);
    Ok(Json(Why { sandbox, summary, wakes, sleeps, timeline: timeline.into() }))
}

/// One sentence for a person.
fn summary(sandbox: &Sandbox) -> String {
    let Sandbox { name, since, .. } = sandbox;
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
            format!("`{name}` sleeps{how} since {since}; anything that needs it wakes it")
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
