//! Boxes (B- and T-rules): starting, listing, changing and stopping them. What is done in one: [`super::box_work`].

use api::boxes::act::{BoxCheckpoint, BoxSecretNames, BoxSecrets, BoxWire};
use api::boxes::start::{StartBox, StartedBox, UpdateBox};
use api::boxes::view::{
    BoxCheckpointView, BoxEvents, BoxList, BoxView, Done, Heartbeat, ServiceList,
};
use api::host::Answer;
use api::{ApiError, Code};

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

use super::sandboxes::{idempotency_key, say_replayed};
use super::to_the_end;
use crate::App;
use crate::answer::Timed;
use crate::auth::Grant;
use crate::boxes::{self, AgentId, Asked, Who};
use crate::failure::Failure;
use crate::input::{BoxId, JsonBody, Query};

/// Most characters of a program's name.
const CLIENT_CHARS_MAX: usize = 100;
/// Names the conversation that a call comes from (B35).
const AGENT_HEADER: &str = "x-psbx-agent";

impl FromRequestParts<App> for Who {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Failure> {
        Ok(Self::of(parts)?)
    }
}

impl Who {
    /// Who sends this request, as the guard has found out. On a path without a guard nobody is anybody.
    pub(crate) fn of(parts: &Parts) -> Result<Self, ApiError> {
        let grant = parts.extensions.get::<Grant>().ok_or_else(|| {
            ApiError::new(Code::Unauthorized, "nobody said for whom this is asked")
        })?;
        // A header that breaks the rule is ignored (B35).
        let agent = parts.headers.get(AGENT_HEADER).and_then(|id| id.to_str().ok()?.parse().ok());
        Ok(Self { account: grant.account.clone(), agent })
    }
}

/// Start a box
///
/// Answers when it can be used: in a second or so. With `restore` it brings back a box that was stopped for idleness, as it was when
/// it froze. With an `Idempotency-Key` the same request may be sent again: it makes one box.
#[utoipa::path(
    post, path = "/v1/boxes", tag = "boxes", operation_id = "start_box",
    params(
        ("X-Psbx-Agent" = Option<String>, Header, description = "The conversation that this comes from: 1-64 of letters, digits, `-`, `_`", example = "c-7Qx2"),
        ("Idempotency-Key" = Option<String>, Header, description = "Any text of at most 255 visible characters", example = "box-17"),
    ),
    request_body(content = StartBox, description = "What it shall be; may be left out"),
    responses((status = 201, description = "It can be used", body = StartedBox)),
)]
pub(crate) async fn start(
    State(app): State<App>,
    who: Who,
    headers: HeaderMap,
    JsonBody(request): JsonBody<StartBox>,
) -> Result<Response, Failure> {
    let key = idempotency_key(&headers)?.map(str::to_owned);
    let started = to_the_end(async move {
        let asked = Asked { key: key.as_deref(), ..Asked::default() };
        boxes::start(&app, &who, asked, request, &|_| {}).await
    })
    .await?;
    let mut response = (StatusCode::CREATED, Json(started.body)).into_response();
    if started.replayed {
        say_replayed(&mut response);
    }
    Ok(response)
}

/// Which boxes.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Also those that have ended within the last week: `1` or `true`.
    #[param(inline, example = "1")]
    all: Option<Flag>,
}

/// `1`, `true`, `0` or `false`.
#[derive(Clone, Copy, Debug, Deserialize, utoipa::ToSchema)]
enum Flag {
    #[serde(rename = "1")]
    One,
    #[serde(rename = "true")]
    True,
    #[serde(rename = "0")]
    Zero,
    #[serde(rename = "false")]
    False,
}

/// List boxes
///
/// Oldest first. No use of any of them.
#[utoipa::path(
    get, path = "/v1/boxes", tag = "boxes", operation_id = "list_boxes",
    params(
        ListQuery,
        ("X-Dormouse-Account" = Option<String>, Header, description = "With a key of scope `admin`: for this account instead of the key's. Every request may carry it", example = "default"),
    ),
    responses((status = 200, description = "The boxes", body = BoxList)),
)]
pub(crate) async fn list(
    State(app): State<App>,
    who: Who,
    Query(query): Query<ListQuery>,
) -> Json<BoxList> {
    let all = matches!(query.all, Some(Flag::One | Flag::True));
    Json(boxes::list(&app, &who, all).await)
}

/// Tell about a box
///
/// What it is, what it does and why, when it is frozen and stopped. No use of it.
#[utoipa::path(
    get, path = "/v1/boxes/{id}", tag = "boxes", operation_id = "get_box",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a")),
    responses((status = 200, description = "The box", body = BoxView)),
)]
pub(crate) async fn view(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
) -> Result<Json<BoxView>, Failure> {
    Ok(Json(boxes::status(&app, &who, &id).await?))
}

/// Change a box
///
/// Its name and its goal, which are for people and for whoever goes on with it, and how long it may be unused. No use of it.
#[utoipa::path(
    patch, path = "/v1/boxes/{id}", tag = "boxes", operation_id = "update_box",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a")),
    request_body(content = UpdateBox, description = "What changes; may be left out"),
    responses((status = 200, description = "The box as it is now", body = BoxView)),
)]
pub(crate) async fn update(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
    JsonBody(request): JsonBody<UpdateBox>,
) -> Result<Json<BoxView>, Failure> {
    to_the_end(async move { Ok(Json(boxes::update(&app, &who, &id, request).await?)) }).await
}

/// Stop a box for good
///
/// `/work` and all else in it is gone; a frozen one is not thawed for it. It stays in the list for a week. One that has ended already
/// is a success.
#[utoipa::path(
    delete, path = "/v1/boxes/{id}", tag = "boxes", operation_id = "stop_box",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a")),
    responses((status = 204, description = "It has ended")),
)]
pub(crate) async fn stop(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
) -> Result<StatusCode, Failure> {
    to_the_end(async move { boxes::stop(&app, &who, &id, "stopped by a request").await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Thaw a box
///
/// Which is use of it: it stays awake for ten minutes. One that is awake is a success.
#[utoipa::path(
    post, path = "/v1/boxes/{id}/wake", tag = "boxes", operation_id = "wake_box",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a")),
    responses((status = 200, description = "The box, awake", body = BoxView)),
)]
pub(crate) async fn wake(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
) -> Result<Timed<BoxView>, Failure> {
    let woke_ms = boxes::wake(&app, &who, &id).await?;
    Ok(Timed(Answer { value: boxes::status(&app, &who, &id).await?, woke_ms }))
}

/// Tell what happened to a box
///
/// Every change of its state, with time and reason; kept as long as the box is listed.
#[utoipa::path(
    get, path = "/v1/boxes/{id}/events", tag = "boxes", operation_id = "box_events",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a")),
    responses((status = 200, description = "The timeline", body = BoxEvents)),
)]
pub(crate) async fn events(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
) -> Result<Json<BoxEvents>, Failure> {
    Ok(Json(boxes::events(&app, &who, &id)?))
}

/// Switch a service of a box
///
/// Between its process in the box and `externalBaseUrl`; names that share a process switch together. Connections that went the other
/// way end. Use of the box.
#[utoipa::path(
    post, path = "/v1/boxes/{id}/wire", tag = "boxes", operation_id = "box_wire",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a")),
    request_body(content = BoxWire, description = "Which, and where to"),
    responses((status = 200, description = "All services as they are now", body = ServiceList)),
)]
pub(crate) async fn wire(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
    JsonBody(request): JsonBody<BoxWire>,
) -> Result<Json<ServiceList>, Failure> {
    to_the_end(async move {
        Ok(Json(ServiceList { services: boxes::wire(&app, &who, &id, &request).await? }))
    })
    .await
}

/// Add secrets to a box
///
/// Stored ones, by name: the commands that start from now on have them as environment variables. Use of the box.
#[utoipa::path(
    post, path = "/v1/boxes/{id}/secrets", tag = "boxes", operation_id = "box_secrets",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a")),
    request_body(content = BoxSecrets, description = "Which"),
    responses((status = 200, description = "All that it has now", body = BoxSecretNames)),
)]
pub(crate) async fn add_secrets(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
    JsonBody(request): JsonBody<BoxSecrets>,
) -> Result<Json<BoxSecretNames>, Failure> {
    to_the_end(async move { Ok(Json(boxes::add_secrets(&app, &who, &id, &request).await?)) }).await
}

/// Set how often a box is kept in the object store
///
/// While it is awake: memory, disk and processes, so that the box outlives the loss of its host (`POST /v1/checkpoints/{id}/restore` at
/// another one). Off unless it is set. No use of the box, and a frozen one stays so.
#[utoipa::path(
    put, path = "/v1/boxes/{id}/checkpoint", tag = "boxes", operation_id = "set_box_checkpoint",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a")),
    request_body(content = BoxCheckpoint, description = "How often; may be left out"),
    responses((status = 200, description = "How its checkpoints stand", body = BoxCheckpointView)),
)]
pub(crate) async fn set_checkpoint(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
    JsonBody(request): JsonBody<BoxCheckpoint>,
) -> Result<Json<BoxCheckpointView>, Failure> {
    to_the_end(
        async move { Ok(Json(boxes::set_checkpoint(&app, &who, &id, request.every()).await?)) },
    )
    .await
}

/// Say that a conversation is there
///
/// Once a minute; silent for three minutes it is gone. After a leave: it is back.
#[utoipa::path(
    post, path = "/v1/agents/{id}/heartbeat", tag = "boxes", operation_id = "agent_heartbeat",
    params(("id" = String, Path, description = "The conversation: 1-64 of letters, digits, `-`, `_`", example = "c-7Qx2")),
    request_body(content = Heartbeat, description = "What it runs in; may be left out"),
    responses((status = 200, description = "Heard", body = Done)),
)]
pub(crate) async fn heartbeat(
    State(app): State<App>,
    AgentPath(id): AgentPath,
    JsonBody(request): JsonBody<Heartbeat>,
) -> Result<Json<Done>, Failure> {
    if let Some(client) = &request.client
        && client.chars().count() > CLIENT_CHARS_MAX
    {
        let text = format!("`client`: {} characters", client.chars().count());
        return Err(ApiError::invalid("client", text)
            .hint(format!("at most {CLIENT_CHARS_MAX}"))
            .into());
    }
    app.boxes().agents.heartbeat(app.catalogue(), &id, request.client.as_deref()).await?;
    Ok(Json(Done { ok: true }))
}

/// Say that a conversation has ended
///
/// The boxes that it used are told as left. A heartbeat afterwards: it is back.
#[utoipa::path(
    post, path = "/v1/agents/{id}/leave", tag = "boxes", operation_id = "agent_leave",
    params(("id" = String, Path, description = "The conversation: 1-64 of letters, digits, `-`, `_`", example = "c-7Qx2")),
    responses((status = 200, description = "Heard", body = Done)),
)]
pub(crate) async fn leave(
    State(app): State<App>,
    AgentPath(id): AgentPath,
) -> Result<Json<Done>, Failure> {
    app.boxes().agents.leave(app.catalogue(), &id).await?;
    Ok(Json(Done { ok: true }))
}

/// The conversation that the path names.
pub(crate) struct AgentPath(AgentId);

impl FromRequestParts<App> for AgentPath {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        let given = crate::input::path_param(parts, app, "id").await?;
        Ok(Self(given.parse()?))
    }
}
