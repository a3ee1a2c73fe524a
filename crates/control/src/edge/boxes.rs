//! The edge of boxes (B18-B21, T17): a page load thaws a frozen box, nothing else does; and what is answered where the box
//! cannot.

use std::time::{Duration, Instant};

use api::boxes::BoxStatus;
use api::host::{Caller, HoldKind};
use api::sandbox::SleepTier;
use api::{ApiError, Code};
use axum::body::Body;
use axum::http::header::{
    ACCEPT, ACCEPT_LANGUAGE, CACHE_CONTROL, CONTENT_LANGUAGE, CONTENT_SECURITY_POLICY,
    CONTENT_TYPE, RETRY_AFTER, VARY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use axum::response::IntoResponse;
use hyper::body::Incoming;

use super::proxy::{Passing, no_such_link, pass_on};
use super::refusal::{self, Form};
use crate::App;
use crate::boxes::{BoxRecord, first_service, no_credit, target_of};

/// Seconds after which the waking page asks again.
const PAGE_RETRY_SECONDS: u32 = 3;
/// How long a page load that follows another's thaw waits at least for a connection: however short page loads are held, an app that
/// is there must get it.
const PATIENCE_MIN: Duration = Duration::from_secs(1);
const SEC_FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

/// Serves one request to a box's URL. `port`: that of its label.
pub(super) async fn serve(
    app: &App,
    record: &BoxRecord,
    port: Option<u16>,
    request: Request<Incoming>,
    mut passing: Passing<'_>,
) -> Response<Body> {
    let form = Form::wanted(request.headers());
    if let Some(ended) = &record.ended {
        return told(ended.status, false);
    }
    let Some((place, service)) = target_of(record, port) else {
        if port.is_none() && first_service(record).is_none() {
            let error = ApiError::new(Code::PortClosed, "this box has no service");
            let mut response =
                refusal::response(error.hint("declare one with sandbox_start: `services`"), form);
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
            return response;
        }
        // Not to be told from a box that does not exist: nobody finds hidden services by trying.
        return refusal::response(no_such_link(), form);
    };
    let port = service.target();
    passing.external = record.is_external(place);
    let page_load = is_page_load(request.method(), request.headers());
    let language = Language::wanted(request.headers());
    if page_load && app.machines().comes_up(&record.id) {
        passing.patience = Some(app.boxes().settings.page_hold.max(PATIENCE_MIN));
    }
    let (request, error) = match pass_paid(app, record, port, request, &passing).await {
        Ok(response) => return response,
        Err((Some(request), error)) if error.code == Code::BoxFrozen => (request, error),
        Err((_, error)) => return refused(app, record, error, page_load, language, form).await,
    };
    let (status, is_off) = match app.host().view(&record.id).await {
        Ok(known) => {
            let is_off = known.sandbox.sleep_tier == Some(SleepTier::Off);
            (known.boxed.map(|life| life.status), is_off)
        }
        Err(_) => (status(app, record).await, false),
    };
    // While it is being frozen it is told as ready still.
    let freezes =
        matches!(status, Some(BoxStatus::Ready | BoxStatus::Takeover | BoxStatus::Frozen));
    match status {
        // Powered off it is ready, and nothing listens in it until something acts on it (B44).
        _ if is_off => {
            let error = ApiError::new(Code::PortClosed, "this box is switched off");
            refusal::response(error.hint("the next call that acts on it boots it"), form)
        }
        _ if freezes && page_load => {
            if !app.boxes().may_ask(&record.id) {
                return waking(language);
            }
            tracing::debug!(sandbox = %record.id, code = ?error.code, "a page load thaws it");
            app.machines().thaws(&record.id);
            let begun = Instant::now();
            let (app_, id) = (app.clone(), record.id.clone());
            let peer = passing.peer;
            // It goes on, whoever gives up waiting.
            let thaw = tokio::spawn(async move {
                let caller = Caller { what: "a page load".to_owned(), peer };
                app_.host().hold(&id, HoldKind::Tool, caller).await
            });
            let page_hold = app.boxes().settings.page_hold;
            match tokio::time::timeout(page_hold, thaw).await {
                Ok(Ok(Ok(_held))) => {
                    passing.patience = Some(page_hold.saturating_sub(begun.elapsed()));
                    match pass_paid(app, record, port, request, &passing).await {
                        Ok(response) => response,
                        // Its program is not there yet, or it froze again.
                        Err((_, error)) => {
                            refused(app, record, error, page_load, language, form).await
                        }
                    }
                }
                Ok(Ok(Err(error))) => refused(app, record, error, page_load, language, form).await,
                Ok(Err(_)) | Err(_) => waking(language),
            }
        }
        _ if freezes => told(BoxStatus::Frozen, false),
        Some(status) => told(status, false),
        None => told(BoxStatus::Interrupted, false),
    }
}

/// As [`pass_on`]; where the account has no credit, or runs out of it meanwhile, that is told (B14, B20).
async fn pass_paid(
    app: &App,
    record: &BoxRecord,
    port: u16,
    request: Request<Incoming>,
    passing: &Passing<'_>,
) -> Result<Response<Body>, (Option<Request<Incoming>>, ApiError)> {
    tokio::select! {
        biased;
        () = app.accounts().without_credit(&record.account) => Err((None, no_credit())),
        passed = pass_on(app, &record.id, port, request, passing) => passed,
    }
}

/// What its host could not do.
async fn refused(
    app: &App,
    record: &BoxRecord,
    error: ApiError,
    page_load: bool,
    language: Language,
    form: Form,
) -> Response<Body> {
    match error.code {
        Code::SpendingLimit if page_load => paused(language),
        Code::SpendingLimit => {
            json(StatusCode::PAYMENT_REQUIRED, "box is paused", BoxStatus::Frozen)
        }
        // Thawed, and its app is not there yet: the page that stands there reloads on.
        Code::PortClosed if page_load && app.machines().comes_up(&record.id) => waking(language),
        Code::BoxFrozen => told(BoxStatus::Frozen, false),
        Code::BoxStopped => told(BoxStatus::Terminated, false),
        Code::NotFound | Code::BeingDeleted | Code::SandboxFailed => {
            match status(app, record).await {
                Some(status @ (BoxStatus::Ready | BoxStatus::Takeover)) => {
                    tracing::debug!(sandbox = %record.id, ?status, %error, "not answered");
                    refusal::response(error, form)
                }
                Some(status) => told(status, status == BoxStatus::Claimed),
                None => told(BoxStatus::Interrupted, false),
            }
        }
        _ => refusal::response(error, form),
    }
}

async fn status(app: &App, record: &BoxRecord) -> Option<BoxStatus> {
    if let Ok(known) = app.host().view(&record.id).await {
        return Some(known.boxed?.status);
    }
    let record = app.boxes().record(&record.id)?;
    record.ended.as_ref().map(|ended| ended.status)
}

/// Whether a person opens a page with it (B18).
fn is_page_load(method: &Method, headers: &HeaderMap) -> bool {
    if !matches!(*method, Method::GET | Method::HEAD) {
        return false;
    }
    if let Some(mode) = headers.get(SEC_FETCH_MODE) {
        return mode == "navigate";
    }
    let values = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    values.map(str::to_ascii_lowercase).any(|accept| accept.contains("text/html"))
}

/// The status of a box that does not answer (B19, B21).
fn told(status: BoxStatus, soon: bool) -> Response<Body> {
    let text = format!("box is {}", status.as_str());
    let mut response = json(StatusCode::SERVICE_UNAVAILABLE, &text, status);
    if soon {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(PAGE_RETRY_SECONDS));
    }
    response
}

fn json(code: StatusCode, error: &str, status: BoxStatus) -> Response<Body> {
    let body = serde_json::json!({ "error": error, "status": status.as_str() }).to_string();
    let kind = HeaderValue::from_static("application/json");
    let no_store = HeaderValue::from_static("no-store");
    (code, [(CONTENT_TYPE, kind), (CACHE_CONTROL, no_store)], body).into_response()
}

/// The languages of the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Language {
    English,
    Japanese,
    Chinese,
}

impl Language {
    /// What the browser prefers; of equals what stands first.
    fn wanted(headers: &HeaderMap) -> Self {
        let mut best = (Self::English, 0.0);
        let values =
            headers.get_all(ACCEPT_LANGUAGE).iter().filter_map(|value| value.to_str().ok());
        for range in values.flat_map(|value| value.split(',')) {
            let mut parts = range.split(';').map(str::trim);
            let tag = parts.next().unwrap_or_default().to_ascii_lowercase();
            let language = match tag.split('-').next().unwrap_or_default() {
                "en" | "*" => Self::English,
                "ja" => Self::Japanese,
                "zh" => Self::Chinese,
                _ => continue,
            };
            let quality =
                parts.find_map(|part| part.strip_prefix("q=")?.parse::<f32>().ok()).unwrap_or(1.0);
            if quality > best.1 {
                best = (language, quality);
            }
        }
        best.0
    }

    fn tag(self) -> &'static str {
        match self {
            Self::English => "en",
            Self::Japanese => "ja",
            Self::Chinese => "zh-Hant",
        }
    }
}

/// The page that is shown while a box thaws (B18).
fn waking(language: Language) -> Response<Body> {
    let (title, text) = match language {
        Language::English => ("Waking this box…", "This page reloads by itself in a few seconds."),
        Language::Japanese => {
            ("このボックスを起こしています…", "このページは数秒後に自動で再読み込みされます。")
        }
        Language::Chinese => ("正在喚醒這個箱子…", "這個頁面會在幾秒後自動重新載入。"),
    };
    let refresh = format!("<meta http-equiv=\"refresh\" content=\"{PAGE_RETRY_SECONDS}\">\n");
    let mut response = page(StatusCode::SERVICE_UNAVAILABLE, language, title, text, &refresh);
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(PAGE_RETRY_SECONDS));
    response
}

/// The page of a box whose account has no credit (B20).
fn paused(language: Language) -> Response<Body> {
    let (title, text) = match language {
        Language::English => {
            ("This box is paused", "Its account has no credit left. Everything in it is kept.")
        }
        Language::Japanese => (
            "このボックスは一時停止中です",
            "アカウントのクレジットがありません。中身はすべて残っています。",
        ),
        Language::Chinese => ("這個箱子已暫停", "帳號沒有點數了，裡面的東西都還在。"),
    };
    page(StatusCode::PAYMENT_REQUIRED, language, title, text, "")
}

fn page(
    status: StatusCode,
    language: Language,
    title: &str,
    text: &str,
    head: &str,
) -> Response<Body> {
    let tag = language.tag();
    let html = format!(
        "<!DOCTYPE html>\n<html lang=\"{tag}\">\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n\
         {head}<title>{title}</title>\n\
         <style>body {{ font: 1rem/1.6 sans-serif; max-width: 30rem; margin: 20vh auto 0; padding: 0 1rem; text-align: center; \
         color: #333; background: #fafafa }} h1 {{ font-size: 1.3rem; font-weight: 500 }}</style>\n\
         <h1>{title}</h1>\n<p>{text}</p>\n</html>\n"
    );
    let mut response = (status, html).into_response();
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CACHE_CONTROL, "no-store"),
        (CONTENT_LANGUAGE, tag),
        (VARY, "accept, accept-language, sec-fetch-mode"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (CONTENT_SECURITY_POLICY, "default-src 'none'; style-src 'unsafe-inline'"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        let header = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        list.iter().map(header).collect()
    }

    #[test]
    fn b18_what_a_page_load_is() {
        let html = ("accept", "text/html,application/xhtml+xml,*/*;q=0.8");
        let navigate = ("sec-fetch-mode", "navigate");
        let cors = ("sec-fetch-mode", "cors");
        for (method, list, expected) in [
            (Method::GET, vec![navigate], true),
            (Method::HEAD, vec![navigate], true),
            (Method::GET, vec![html], true),
            (Method::HEAD, vec![html], true),
            (Method::GET, vec![html, cors], false),
            (Method::POST, vec![navigate, html], false),
            (Method::GET, vec![("accept", "*/*")], false),
            (Method::GET, vec![], false),
            (Method::GET, vec![("sec-fetch-mode", "websocket")], false),
            (Method::GET, vec![("sec-fetch-mode", "no-cors"), ("accept", "image/png")], false),
        ] {
            assert_eq!(is_page_load(&method, &headers(&list)), expected, "{method} {list:?}");
        }
    }

    #[test]
    fn b18_pages_speak_the_browsers_language() {
        for (given, expected) in [
            ("", Language::English),
            ("de, fr", Language::English),
            ("ja", Language::Japanese),
            ("zh-TW,zh;q=0.9,en;q=0.8", Language::Chinese),
            ("en-GB, ja;q=0.9", Language::English),
            ("fr, ja;q=0.5, en;q=0.4", Language::Japanese),
        ] {
            let wanted = Language::wanted(&headers(&[("accept-language", given)]));
            assert_eq!(wanted, expected, "{given}");
        }
    }

    #[test]
    fn b18_b20_only_the_waking_page_reloads_itself() {
        for language in [Language::English, Language::Japanese, Language::Chinese] {
            let waking = waking(language);
            assert_eq!(waking.status(), 503);
            assert_eq!(waking.headers()[RETRY_AFTER], "3");
            assert_eq!(waking.headers()[CACHE_CONTROL], "no-store");
            let paused = paused(language);
            assert_eq!(paused.status(), 402);
            assert!(paused.headers().get(RETRY_AFTER).is_none());
        }
    }
}
