//! Making, listing, changing, sleeping, restarting, forking and deleting sandboxes, and their links.

use std::collections::HashMap;

use api::host::{Change, Log, SleepFor};
use api::sandbox::{
    CreateSandbox, ForkList, ForkRequest, Forked, Link, RestartRequest, Sandbox, SandboxPage,
    SleepRequest, Status, UpdateSandbox,
};
use api::{ApiError, Code, SandboxId};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

use super::{to_the_end, told};
use crate::App;
use crate::catalogue::{Entry, Face};
use crate::edge;
use crate::failure::Failure;
use crate::input::{At, JsonBody, Port, Query};
use crate::make::{Made, Order, make, name_taken};
use crate::{reconcile, validate};

/// Sandboxes on one page, unless asked otherwise.
const PAGE_DEFAULT: usize = 100;
/// Most sandboxes on one page.
const PAGE_MAX: usize = 1000;
/// Bytes of a log, unless asked otherwise.
const LOG_BYTES_DEFAULT: u64 = 64 * 1024;
/// Most bytes of a log in one answer.
const LOG_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// Most characters of an idempotency key.
const KEY_CHARS_MAX: usize = 255;
const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// Make a sandbox
///
/// Answers when its guest runs and takes commands. With an `Idempotency-Key` the same request may be sent again: it
/// makes one sandbox and gets the same answer for 24 hours, with the header `Idempotency-Replayed: true`; that answer says how
/// the sandbox was then, also where it was deleted since.
#[utoipa::path(
    post, path = "/v1/sandboxes", tag = "sandboxes", operation_id = "create_sandbox",
    params(("Idempotency-Key" = Option<String>, Header, description = "Any text of at most 255 visible characters", example = "build-17")),
    request_body(content = CreateSandbox, description = "What it shall be; may be left out"),
    responses((status = 201, description = "It runs", body = Sandbox)),
)]
pub(crate) async fn create(
    State(app): State<App>,
    headers: HeaderMap,
    JsonBody(request): JsonBody<CreateSandbox>,
) -> Result<Response, Failure> {
    validate::create(&request)?;
    let key = idempotency_key(&headers)?;
    let Made { mut sandboxes, replayed } =
        make(&app, key, Order::Create(Box::new(request))).await?;
    let sandbox = sandboxes.pop().ok_or_else(|| ApiError::new(Code::Internal, "none was made"))?;
    Ok(answer(sandbox, replayed))
}

/// Filters and paging of the list.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Only the one with this name.
    #[param(example = "web")]
    name: Option<String>,
    /// Only those in this status.
    #[param(example = "running")]
    status: Option<Status>,
    /// Only those with these labels: `key=value`, or `key` for any value; several separated by commas.
    #[param(example = "team=web,stage")]
    label: Option<String>,
    /// At most this many (1-1000); default 100.
    #[param(minimum = 1, maximum = 1000, example = 100)]
    limit: Option<usize>,
    /// Go on where an earlier page ended: its `next_cursor`.
    cursor: Option<String>,
}

/// List sandboxes
///
/// Oldest first. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/sandboxes", tag = "sandboxes", operation_id = "list_sandboxes", params(ListQuery),
    responses((status = 200, description = "One page", body = SandboxPage)),
)]
pub(crate) async fn list(
    State(app): State<App>,
    Query(query): Query<ListQuery>,
) -> Result<Json<SandboxPage>, Failure> {
    let limit = query.limit.unwrap_or(PAGE_DEFAULT);
    if !(1..=PAGE_MAX).contains(&limit) {
        return Err(validate::out_of_range("limit", limit, 1, PAGE_MAX).into());
    }
    let after = query.cursor.as_deref().map(read_cursor).transpose()?;
    let labels: Vec<(&str, Option<&str>)> = query
        .label
        .as_deref()
        .into_iter()
        .flat_map(|labels| labels.split(','))
        .map(|label| label.split_once('=').map_or((label, None), |(key, value)| (key, Some(value))))
        .collect();
    let mut views: HashMap<SandboxId, Sandbox> = app
        .host()
        .list()
        .await
        .into_iter()
        .filter(|known| !known.going)
        .map(|known| (known.sandbox.id.clone(), known.sandbox))
        .collect();
    let mut sandboxes = Vec::new();
    let mut last: Option<Entry> = None;
    let mut next_cursor = None;
    for entry in app.catalogue().all() {
        if after.as_ref().is_some_and(|(ms, id)| (entry.created_ms, &entry.id) <= (*ms, id)) {
            continue;
        }
        // Those being made appear when their host has begun with them, and go when it begins to delete them.
        let Some(view) = views.remove(&entry.id) else { continue };
        if entry.face == Face::Box {
            continue;
        }
        let wanted = query.name.as_ref().is_none_or(|name| view.name == *name)
            && query.status.is_none_or(|status| view.status == status)
            && labels.iter().all(|(key, value)| {
                view.labels.get(*key).is_some_and(|found| value.is_none_or(|value| value == found))
            });
        if !wanted {
            continue;
        }
        if sandboxes.len() == limit {
            next_cursor = last.as_ref().map(cursor);
            break;
        }
        sandboxes.push(view);
        last = Some(entry);
    }
    Ok(Json(SandboxPage { sandboxes, next_cursor }))
}

/// Tell about a sandbox
///
/// What it does and why, when it will sleep, how it sleeps. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}", tag = "sandboxes", operation_id = "get_sandbox",
    params(("id" = String, Path, description = "Id or name", example = "web")),
    responses((status = 200, description = "Its view", body = Sandbox)),
)]
pub(crate) async fn view(State(app): State<App>, At(entry): At) -> Result<Json<Sandbox>, Failure> {
    Ok(Json(told(&app, &entry.id).await?))
}

/// Change a sandbox
///
/// Takes effect at once, asleep too. Wakes nothing.
#[utoipa::path(
    patch, path = "/v1/sandboxes/{id}", tag = "sandboxes", operation_id = "update_sandbox",
    params(("id" = String, Path, description = "Id or name", example = "web")),
    request_body(content = UpdateSandbox, description = "What shall be different"),
    responses((status = 200, description = "Its view after the change", body = Sandbox)),
)]
pub(crate) async fn update(
    State(app): State<App>,
    At(entry): At,
    JsonBody(request): JsonBody<UpdateSandbox>,
) -> Result<Json<Sandbox>, Failure> {
    validate::update(&request)?;
    to_the_end(async move {
        let policy = request.policy();
        let name = request.name.filter(|name| *name != entry.name);
        if let Some(name) = &name
            && !app.catalogue().rename(&entry.id, name).await?
        {
            return Err(name_taken(name).into());
        }
        let change = Change {
            name: name.clone(),
            labels: request.labels,
            policy,
            ..Change::default()
        };
        match app.host().update(&entry.id, change).await {
            Ok(sandbox) => Ok(Json(sandbox)),
            Err(error) => {
                if name.is_some() && !app.catalogue().rename(&entry.id, &entry.name).await? {
                    tracing::error!(sandbox = %entry.id, "its old name was taken before a failed rename could be undone");
                }
                Err(error.into())
            }
        }
    })
    .await
}

/// Delete a sandbox
///
/// Removes it with its disk and memory; answers when it is gone. Works in every status.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{id}", tag = "sandboxes", operation_id = "delete_sandbox",
    params(("id" = String, Path, description = "Id or name", example = "web")),
    responses((status = 204, description = "It is gone")),
)]
pub(crate) async fn delete(State(app): State<App>, At(entry): At) -> Result<StatusCode, Failure> {
    to_the_end(async move { reconcile::delete(&app, &entry).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Put a sandbox to sleep
///
/// Answers when it sleeps; whatever needs it wakes it again. One that sleeps already is a success.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/sleep", tag = "sandboxes", operation_id = "sleep_sandbox",
    params(("id" = String, Path, description = "Id or name", example = "web")),
    request_body(content = SleepRequest, description = "How it shall sleep; may be left out"),
    responses((status = 200, description = "Its view, asleep", body = Sandbox)),
)]
pub(crate) async fn sleep(
    State(app): State<App>,
    At(entry): At,
    JsonBody(request): JsonBody<SleepRequest>,
) -> Result<Json<Sandbox>, Failure> {
    validate::sleep(&request)?;
    to_the_end(async move {
        let _quiet = edge::quieten(&app, Some(&entry.id));
        Ok(Json(app.host().sleep(&entry.id, request.tier, SleepFor::Asked).await?))
    })
    .await
}

/// Restart a sandbox
///
/// Boots it anew from its disk: what ran is lost, what was written stays. Answers when its guest runs. With `drives` or
/// `volumes` it has those from then on: this is how one is attached to a sandbox that is there, or taken from it.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/restart", tag = "sandboxes", operation_id = "restart_sandbox",
    params(("id" = String, Path, description = "Id or name", example = "web")),
    request_body(content = RestartRequest, description = "Which drives and volumes it shall have; may be left out"),
    responses((status = 200, description = "Its view, running", body = Sandbox)),
)]
pub(crate) async fn restart(
    State(app): State<App>,
    At(entry): At,
    JsonBody(request): JsonBody<RestartRequest>,
) -> Result<Json<Sandbox>, Failure> {
    let RestartRequest { drives, volumes } = request;
    validate::attached(
        drives.as_deref().unwrap_or_default(),
        volumes.as_deref().unwrap_or_default(),
    )?;
    to_the_end(async move { Ok(Json(app.host().restart(&entry.id, drives, volumes).await?)) }).await
}

/// Fork a sandbox
///
/// A copy with memory, disk and processes and a life of its own. The parent goes on, or sleeps on. With `count` there are so many,
/// all of the same moment, for which the parent stands still once; all of them are made, or none. Drives are copied with it.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/fork", tag = "sandboxes", operation_id = "fork_sandbox",
    params(
        ("id" = String, Path, description = "Id or name of the parent", example = "web"),
        ("Idempotency-Key" = Option<String>, Header, description = "Any text of at most 255 visible characters", example = "fork-3"),
    ),
    request_body(content = ForkRequest, description = "Its name, or how many; may be left out"),
    responses((status = 201, description = "The fork runs; with `count` all of them do", body = Forked)),
)]
pub(crate) async fn fork(
    State(app): State<App>,
    At(parent): At,
    headers: HeaderMap,
    JsonBody(request): JsonBody<ForkRequest>,
) -> Result<Response, Failure> {
    validate::fork(&request)?;
    let key = idempotency_key(&headers)?;
    let many = request.count.is_some();
    let Made { mut sandboxes, replayed } = make(&app, key, Order::Fork(parent.id, request)).await?;
    let forked = match (many, sandboxes.pop()) {
        (false, Some(one)) => Forked::One(Box::new(one)),
        (_, last) => {
            sandboxes.extend(last);
            Forked::Many(ForkList { forks: sandboxes })
        }
    };
    Ok(answer(forked, replayed))
}

/// Get the URL of a port
///
/// Whoever has the URL can use the port; a request to it wakes the sandbox. Wakes nothing by itself.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/links/{port}", tag = "sandboxes", operation_id = "get_link",
    params(
        ("id" = String, Path, description = "Id or name", example = "web"),
        ("port" = u16, Path, description = "Port in the sandbox", example = 8000),
    ),
    responses((status = 200, description = "The URL", body = Link)),
)]
pub(crate) async fn link(State(app): State<App>, At(entry): At, Port(port): Port) -> Json<Link> {
    Json(Link { url: app.links().url(&entry, port), port })
}

/// Which log, and how much of it.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct LogQuery {
    /// `console` (kernel and guest agent) or `daemon` (what the daemon did with it); default `console`.
    #[param(example = "console")]
    kind: Option<LogKind>,
    /// The newest bytes, at most this many (1-4194304); default 65536.
    #[param(minimum = 1, maximum = 4_194_304, example = 65536)]
    max_bytes: Option<u64>,
}

/// Which log.
#[derive(Clone, Copy, Debug, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LogKind {
    /// Serial console of the guest.
    Console,
    /// What the daemon did with it.
    Daemon,
}

/// Read a log
///
/// The end of the boot console or of the daemon's log of this sandbox. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/logs", tag = "sandboxes", operation_id = "get_logs",
    params(("id" = String, Path, description = "Id or name", example = "web"), LogQuery),
    responses((status = 200, description = "The newest part of the log", body = String, content_type = "text/plain")),
)]
pub(crate) async fn logs(
    State(app): State<App>,
    At(entry): At,
    Query(query): Query<LogQuery>,
) -> Result<Response, Failure> {
    let max_bytes = query.max_bytes.unwrap_or(LOG_BYTES_DEFAULT);
    if !(1..=LOG_BYTES_MAX).contains(&max_bytes) {
        return Err(validate::out_of_range("max_bytes", max_bytes, 1, LOG_BYTES_MAX).into());
    }
    let log = match query.kind.unwrap_or(LogKind::Console) {
        LogKind::Console => Log::Console,
        LogKind::Daemon => Log::Daemon,
    };
    let bytes = app.host().log(&entry.id, log, max_bytes).await?;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    // A guest's bytes must never be taken for a page of this origin.
    let no_guess = HeaderValue::from_static("nosniff");
    Ok(([(header::CONTENT_TYPE, plain), (header::X_CONTENT_TYPE_OPTIONS, no_guess)], bytes)
        .into_response())
}

fn answer(made: impl serde::Serialize, replayed: bool) -> Response {
    let mut response = (StatusCode::CREATED, Json(made)).into_response();
    if replayed {
        say_replayed(&mut response);
    }
    response
}

/// It is the answer of an earlier request.
pub(super) fn say_replayed(response: &mut Response) {
    response.headers_mut().insert("idempotency-replayed", HeaderValue::from_static("true"));
}

pub(crate) fn idempotency_key(headers: &HeaderMap) -> Result<Option<&str>, ApiError> {
    let Some(value) = headers.get(IDEMPOTENCY_KEY) else { return Ok(None) };
    let key = value
        .to_str()
        .ok()
        .filter(|key| (1..=KEY_CHARS_MAX).contains(&key.len()) && !key.contains('\t'));
    key.map(Some).ok_or_else(|| {
        ApiError::invalid(
            "Idempotency-Key",
            "the idempotency key is empty, too long or not plain text",
        )
        .hint("1-255 visible characters, such as a UUID")
    })
}

/// Most digits of the time in a cursor: enough for 30,000 years.
pub(crate) const CURSOR_MS_DIGITS_MAX: usize = 15;

/// A place in the list: opaque to clients, so that the order may change one day.
fn cursor(entry: &Entry) -> String {
    format!("{}-{}", entry.created_ms, entry.id)
}

fn read_cursor(text: &str) -> Result<(i64, SandboxId), ApiError> {
    let read = || {
        let (ms, id) = text.split_once('-')?;
        // One way to write each: no sign.
        let plain = ms.bytes().all(|byte| byte.is_ascii_digit());
        Some((
            ms.parse().ok().filter(|_| plain && ms.len() <= CURSOR_MS_DIGITS_MAX)?,
            id.parse().ok()?,
        ))
    };
    read().ok_or_else(|| ApiError {
        code: Code::InvalidRequest,
        ..ApiError::invalid("cursor", "not a cursor")
            .hint("give `next_cursor` of an earlier page as it was")
    })
}
