//! What is answered where the sandbox's server does not: to browsers a page, to programs that ask for JSON the one error body,
//! to everybody else (curl asks for anything) plain text.

use api::ApiError;
use axum::body::Body;
use axum::http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, RETRY_AFTER,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode};
use axum::response::IntoResponse;

use crate::failure::{ErrorCode, Failure};

/// Seconds after which it may be tried again, where that may help.
const RETRY_SECONDS: HeaderValue = HeaderValue::from_static("1");

/// How the client wants to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Json,
    Html,
    Plain,
}

impl Form {
    /// What `Accept` prefers; of equals what stands first.
    pub(super) fn wanted(headers: &HeaderMap) -> Self {
        let mut best = (Self::Plain, 0.0);
        let values = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
        for range in values.flat_map(|value| value.split(',')) {
            let mut parts = range.split(';').map(str::trim);
            let form = match parts.next().unwrap_or_default().to_ascii_lowercase().as_str() {
                "application/json" => Self::Json,
                "text/html" | "application/xhtml+xml" => Self::Html,
                "text/plain" | "text/*" | "*/*" => Self::Plain,
                _ => continue,
            };
            let quality =
                parts.find_map(|part| part.strip_prefix("q=")?.parse::<f32>().ok()).unwrap_or(1.0);
            if quality > best.1 {
                best = (form, quality);
            }
        }
        best.0
    }
}

/// The answer.
pub(super) fn response(error: ApiError, form: Form) -> Response<Body> {
    let code = error.code;
    let retryable = error.retryable;
    let mut response = match form {
        Form::Json => Failure::from(error).into_response(),
        Form::Html => written(&error, "text/html; charset=utf-8", page(&error)),
        Form::Plain => written(&error, "text/plain; charset=utf-8", text(&error)),
    };
    let headers = response.headers_mut();
    // It is no page of the server's: nothing may keep it, run in it or guess what it is.
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(
        CONTENT_SECURITY_POLICY,
        HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'"),
    );
    if retryable {
        headers.insert(RETRY_AFTER, RETRY_SECONDS);
    }
    response.extensions_mut().insert(ErrorCode(code));
    response
}

fn written(error: &ApiError, kind: &'static str, body: String) -> Response<Body> {
    let status =
        StatusCode::from_u16(error.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (status, [(CONTENT_TYPE, HeaderValue::from_static(kind))], body).into_response()
}

fn text(error: &ApiError) -> String {
    let mut text = format!("{} ({})\n", error.error, code_word(error));
    if let Some(hint) = &error.hint {
        text = format!("{text}hint: {hint}\n");
    }
    text
}

fn page(error: &ApiError) -> String {
    let sentence = escaped(&error.error);
    let hint = error
        .hint
        .as_deref()
        .map_or_else(String::new, |hint| format!("<p>{}</p>\n", escaped(hint)));
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{sentence}</title>\n\
         <style>body {{ font: 1rem/1.5 sans-serif; max-width: 36rem; margin: 4rem auto; padding: 0 1rem }} small {{ color: #666 }}</style>\n\
         <h1>{sentence}</h1>\n{hint}<p><small>Dormouse: {} {}</small></p>\n</html>\n",
        error.code.status(),
        code_word(error),
    )
}

fn code_word(error: &ApiError) -> String {
    let word = serde_json::to_value(error.code).ok();
    word.as_ref().and_then(serde_json::Value::as_str).unwrap_or("internal").to_owned()
}

fn escaped(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut escaped, char| {
        match char {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            char => escaped.push(char),
        }
        escaped
    })
}

#[cfg(test)]
mod tests {
    use api::Code;

    use super::*;

    #[test]
    fn the_form_is_what_the_client_prefers() {
        let wanted = |accept: Option<&'static str>| {
            let headers = accept.map(|accept| (ACCEPT, HeaderValue::from_static(accept)));
            Form::wanted(&headers.into_iter().collect())
        };
        let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
        for (accept, form) in [
            (None, Form::Plain),
            (Some("*/*"), Form::Plain),
            (Some(browser), Form::Html),
            (Some("application/json, text/plain, */*"), Form::Json),
            (Some("text/html;q=0.5, application/json;q=0.9"), Form::Json),
            (Some("image/png"), Form::Plain),
            (Some("text/html;q=0"), Form::Plain),
        ] {
            assert_eq!(wanted(accept), form, "{accept:?}");
        }
    }

    #[test]
    fn every_form_ends_with_a_line_break_and_lets_no_markup_through() {
        let error = ApiError::new(Code::PortClosed, "<b>\"&").hint("<i>");
        let page = page(&error);
        assert!(page.ends_with('\n') && page.contains("<h1>&lt;b&gt;&quot;&amp;</h1>"), "{page}");
        assert!(!page.contains("<i>") && !page.contains("<b>"), "{page}");
        assert_eq!(text(&error), "<b>\"& (port_closed)\nhint: <i>\n");
    }
}
