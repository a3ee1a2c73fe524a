//! The service itself.

use api::drain::{DrainReport, DrainRequest};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::to_the_end;
use crate::App;
use crate::edge;
use crate::failure::Failure;
use crate::input::JsonBody;

/// That the service answers.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Health {
    /// `ok`.
    #[schema(example = "ok")]
    status: &'static str,
    /// Version of Dormouse.
    #[schema(example = "0.1.0")]
    version: &'static str,
}

/// Check that the service answers
///
/// Needs no token. Says nothing about single sandboxes.
#[utoipa::path(
    get, path = "/v1/health", tag = "system", operation_id = "get_health", security(()),
    responses((status = 200, description = "It answers", body = Health)),
)]
pub(crate) async fn health() -> Json<Health> {
    Json(Health { status: "ok", version: env!("CARGO_PKG_VERSION") })
}

/// Put everything to sleep on disk
///
/// For a host that goes down: what sleeps on disk survives it. Answers when all sleep that can, a few at a time; with `stop`
/// the daemon ends afterwards, without it whatever needs a sandbox wakes it again.
#[utoipa::path(
    post, path = "/v1/drain", tag = "system", operation_id = "drain_host",
    request_body(content = DrainRequest, description = "How; may be left out"),
    responses((status = 200, description = "What came of it", body = DrainReport)),
)]
pub(crate) async fn drain(
    State(app): State<App>,
    JsonBody(request): JsonBody<DrainRequest>,
) -> Result<Json<DrainReport>, Failure> {
    to_the_end(async move {
        let _quiet = edge::quieten(&app, None);
        let report = crate::drain(&**app.host()).await;
        if request.stop {
            // This answer still goes out: requests in progress are let to their end.
            app.leave().cancel();
        }
        Ok(Json(report))
    })
    .await
}

/// Read figures
///
/// For a Prometheus server, in its text format (OpenMetrics): sandboxes by status and tier, wakes and sleeps by cause, how long
/// each phase took, failures by code, answers, seconds awake. Needs a token unless the daemon runs with `--open-metrics`. Wakes
/// nothing.
#[utoipa::path(
    get, path = "/metrics", tag = "system", operation_id = "get_metrics",
    responses((status = 200, description = "The figures", body = String, content_type = "application/openmetrics-text",
        example = "# TYPE dormouse_wakes counter\ndormouse_wakes_total{cause=\"call\",tier=\"disk\"} 3\n# EOF\n")),
)]
pub(crate) async fn metrics(State(app): State<App>) -> Result<Response, Failure> {
    let sandboxes: Vec<_> = app
        .host()
        .list()
        .await
        .into_iter()
        .filter(|known| !known.going)
        .map(|known| known.sandbox)
        .collect();
    let Json(used) = super::usage::of_all(State(app.clone())).await?;
    let text = app
        .metrics()
        .text(&sandboxes, &used.total, app.host().ready_copies())
        .map_err(Failure::internal("write the figures"))?;
    let kind = HeaderValue::from_static(crate::metrics::CONTENT_TYPE);
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

/// Describe the interface
///
/// This document, as OpenAPI 3.1. Needs no token.
#[utoipa::path(
    get, path = "/v1/openapi.json", tag = "system", operation_id = "get_openapi", security(()),
    responses((status = 200, description = "The OpenAPI document", body = Object, content_type = "application/json", example = json!({"openapi": "3.1.0"}))),
)]
pub(crate) async fn openapi() -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, json)], crate::openapi::document()).into_response()
}
