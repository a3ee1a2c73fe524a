//! Answers that say what waking cost.

use api::host::Answer;
use axum::Json;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// A JSON answer with `Server-Timing` if the sandbox had to be woken for it.
pub(crate) struct Timed<T>(pub(crate) Answer<T>);

impl<T: Serialize> IntoResponse for Timed<T> {
    fn into_response(self) -> Response {
        let mut response = Json(self.0.value).into_response();
        add_wake(response.headers_mut(), self.0.woke_ms);
        response
    }
}

/// Adds `Server-Timing: wake;dur=<ms>` where the request had to wait for a wake.
pub(crate) fn add_wake(headers: &mut HeaderMap, woke_ms: Option<f64>) {
    if let Some(ms) = woke_ms {
        let value = HeaderValue::try_from(format!("wake;dur={ms:.1}"));
        headers.append(SERVER_TIMING, value.expect("digits and a point are a header value"));
    }
}

/// What two verbs of one request waited for: they wait one after the other, for one wake or two.
pub(crate) fn both(first: Option<f64>, second: Option<f64>) -> Option<f64> {
    match (first, second) {
        (Some(first), Some(second)) => Some(first + second),
        (one, other) => one.or(other),
    }
}
