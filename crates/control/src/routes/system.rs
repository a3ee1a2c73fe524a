//! The service itself.

use axum::Json;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

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
