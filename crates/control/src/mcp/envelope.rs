//! A request's body on its way to the tools: read whole, in time and within its limit, and looked at whether it is a message of
//! JSON-RPC 2.0 at all. What is none is told so in the words of that protocol.

use std::time::Duration;

use api::{ApiError, Code};
use axum::body::Body;
use axum::http::{Method, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::{Value, json};

use super::REQUEST_BYTES_MAX;
use crate::failure::Failure;

/// How long a body may take to arrive, from its head to its end.
const BODY_TIME_MAX: Duration = Duration::from_secs(30);
/// What JSON-RPC calls a body that is no JSON.
const PARSE_ERROR: i32 = -32700;
/// The same for JSON that is no request.
const INVALID_REQUEST: i32 = -32600;

/// Reads it. An error is the answer.
pub(super) async fn read(request: Request<Body>) -> Result<Request<Body>, Response> {
    let length = request.headers().get(header::CONTENT_LENGTH);
    let announced = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| length > REQUEST_BYTES_MAX as u64) {
        return Err(refused(too_large()));
    }
    let (parts, body) = request.into_parts();
    let body = Limited::new(body, REQUEST_BYTES_MAX).collect();
    let bytes = match tokio::time::timeout(BODY_TIME_MAX, body).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(error)) if error.is::<LengthLimitError>() => return Err(refused(too_large())),
        Ok(Err(error)) => {
            // Mostly nobody reads this answer: the client has gone.
            tracing::debug!(error = %error, "body broke off");
            return Err(refused(ApiError::invalid("body", "the body broke off before its end")));
        }
        Err(_) => {
            let text = format!("the body did not arrive within {} s", BODY_TIME_MAX.as_secs());
            return Err(refused(ApiError::invalid("body", text)));
        }
    };
    let kind = parts.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    // Another kind is refused as such.
    let is_json =
        kind.is_some_and(|kind| kind.to_ascii_lowercase().starts_with("application/json"));
    if parts.method == Method::POST && is_json {
        check(&bytes).map_err(|(code, text)| told(code, &text))?;
    }
    Ok(Request::from_parts(parts, Body::from(bytes)))
}

/// Whether it is a message.
fn check(bytes: &[u8]) -> Result<(), (i32, String)> {
    let invalid = |text: &str| (INVALID_REQUEST, text.to_owned());
    let message: Value = serde_json::from_slice(bytes)
        .map_err(|error| (PARSE_ERROR, format!("the body is no JSON: {error}")))?;
    let Value::Object(message) = message else {
        return Err(invalid("the body is no JSON object: one message at a time"));
    };
    if message.get("jsonrpc") != Some(&json!("2.0")) {
        return Err(invalid("`jsonrpc` must be \"2.0\""));
    }
    if !matches!(message.get("id"), None | Some(Value::Null | Value::String(_) | Value::Number(_)))
    {
        return Err(invalid("`id` must be a string or a number"));
    }
    match message.get("method") {
        Some(Value::String(_)) => {}
        None if message.contains_key("result") || message.contains_key("error") => {}
        None => return Err(invalid("`method` is missing")),
        Some(_) => return Err(invalid("`method` must be a string")),
    }
    if !matches!(message.get("params"), None | Some(Value::Null | Value::Object(_))) {
        return Err(invalid("`params` must be an object"));
    }
    Ok(())
}

fn told(code: i32, text: &str) -> Response {
    let error = json!({ "jsonrpc": "2.0", "id": null, "error": { "code": code, "message": text } });
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (StatusCode::BAD_REQUEST, kind, error.to_string()).into_response()
}

fn refused(error: ApiError) -> Response {
    Failure::from(error).into_response()
}

fn too_large() -> ApiError {
    let mut error =
        ApiError::new(Code::TooLarge, format!("the body is over {REQUEST_BYTES_MAX} bytes"));
    error.field = Some("body".to_owned());
    error.hint("sandbox_sync and sandbox_pull copy files of any size")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t19_what_is_no_message_is_told_by_its_field() {
        for right in [
            r#"{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}"#,
            r#"{"jsonrpc": "2.0", "id": "a", "method": "tools/list", "params": {}}"#,
            r#"{"jsonrpc": "2.0", "method": "notifications/initialized"}"#,
            r#"{"jsonrpc": "2.0", "id": 1, "result": {}}"#,
        ] {
            assert_eq!(check(right.as_bytes()), Ok(()), "{right}");
        }
        for (wrong, code, word) in [
            ("{", PARSE_ERROR, "no JSON"),
            ("[]", INVALID_REQUEST, "one message"),
            (r#"{"method": "x"}"#, INVALID_REQUEST, "`jsonrpc`"),
            (r#"{"jsonrpc": "2.0", "id": {}, "method": "x"}"#, INVALID_REQUEST, "`id`"),
            (r#"{"jsonrpc": "2.0", "id": 1}"#, INVALID_REQUEST, "`method`"),
            (r#"{"jsonrpc": "2.0", "id": 1, "method": 7}"#, INVALID_REQUEST, "`method`"),
            (
                r#"{"jsonrpc": "2.0", "id": 1, "method": "x", "params": [1]}"#,
                INVALID_REQUEST,
                "`params`",
            ),
        ] {
            let (told, text) = check(wrong.as_bytes()).expect_err(wrong);
            assert!(told == code && text.contains(word), "{wrong}: {told} {text}");
        }
        let deep = "[".repeat(100_000);
        assert_eq!(check(deep.as_bytes()).map_err(|(code, _)| code), Err(PARSE_ERROR));
    }
}
