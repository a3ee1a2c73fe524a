//! Reading requests strictly: what is wrong is named, with what would be right.

use std::time::Duration;

use api::{ApiError, Code};
use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, RawPathParams, Request};
use axum::http::header::CONTENT_LENGTH;
use axum::http::request::Parts;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::{DeserializeOwned, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use crate::App;
use crate::catalogue::Entry;
use crate::failure::Failure;

/// Most bytes of a JSON body: 1 MiB, as much as a command line's environment and standard input need. Files and trees
/// are streams and have no limit.
pub(crate) const JSON_BYTES_MAX: usize = 1024 * 1024;
/// How long a JSON body may take to arrive, from its head to its end.
pub(crate) const JSON_BODY_TIME_MAX: Duration = Duration::from_secs(30);
/// Integers up to here are exact as JSON's only kind of number.
const EXACT_INTEGER_MAX: f64 = 9_007_199_254_740_992.0;

/// A JSON body; an empty one counts as `{}`.
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<App> for JsonBody<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &App) -> Result<Self, Failure> {
        let announced = request
            .headers()
            .get(CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if announced.is_some_and(|length| length > JSON_BYTES_MAX as u64) {
            return Err(too_large().into());
        }
        let body = Limited::new(request.into_body(), JSON_BYTES_MAX).collect();
        let bytes = match tokio::time::timeout(JSON_BODY_TIME_MAX, body).await {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(error)) if error.is::<LengthLimitError>() => return Err(too_large().into()),
            Ok(Err(error)) => {
                // Mostly nobody reads this answer: the client has gone.
                tracing::debug!(error = %error, "body broke off");
                return Err(ApiError::invalid("body", "the body broke off before its end").into());
            }
            Err(_) => {
                let text =
                    format!("the body did not arrive within {} s", JSON_BODY_TIME_MAX.as_secs());
                return Err(ApiError::invalid("body", text).into());
            }
        };
        Ok(Self(parse(if bytes.is_empty() { b"{}" } else { &bytes })?))
    }
}

/// Parameters after the `?`.
pub(crate) struct Query<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequestParts<App> for Query<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Failure> {
        let pairs = form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes());
        let value = serde_path_to_error::deserialize(serde_urlencoded::Deserializer::new(pairs))
            .map_err(|error| {
                explain("the query", &error.path().to_string(), &error.inner().to_string())
            })?;
        Ok(Self(value))
    }
}

/// The sandbox that the path names, by id or name.
pub(crate) struct At(pub(crate) Entry);

impl FromRequestParts<App> for At {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        let given = path_param(parts, app, "id").await?;
        app.catalogue().find_sandbox(&given).map(Self).ok_or_else(|| {
            // What is no name at all is not repeated into the answer.
            let text = if given.len() <= api::sandbox::NAME_CHARS_MAX
                && crate::validate::is_name(&given)
            {
                format!("no sandbox has the id or name `{given}`")
            } else {
                "no sandbox has this id or name".to_owned()
            };
            ApiError::new(Code::NotFound, text)
                .hint("`GET /v1/sandboxes` or `dormouse sandboxes list` shows what there is")
                .into()
        })
    }
}

/// The box that the path names; whether there is one is found out by what is done with it.
pub(crate) struct BoxId(pub(crate) String);

impl FromRequestParts<App> for BoxId {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        path_param(parts, app, "id").await.map(Self)
    }
}

/// The command that the path names.
pub(crate) struct ExecId(pub(crate) String);

/// Most characters of a command's number in a path.
const EXEC_ID_CHARS_MAX: usize = 64;

impl FromRequestParts<App> for ExecId {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        let given = path_param(parts, app, "exec_id").await?;
        let plain =
            given.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_');
        if given.is_empty() || given.len() > EXEC_ID_CHARS_MAX || !plain {
            return Err(ApiError::new(Code::NotFound, "no command has this id")
                .hint("`GET /v1/sandboxes/{id}/execs` lists them, of a box `GET /v1/boxes/{id}/execs`")
                .into());
        }
        Ok(Self(given))
    }
}

/// The snapshot that the path names.
pub(crate) struct SnapshotName(pub(crate) String);

impl FromRequestParts<App> for SnapshotName {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        let given = path_param(parts, app, "name").await?;
        if !crate::validate::is_name(&given) {
            return Err(ApiError::new(Code::NotFound, "there is no snapshot of this name")
                .hint("`GET /v1/snapshots` lists them")
                .into());
        }
        Ok(Self(given))
    }
}

/// The drive that the path names.
pub(crate) struct DriveName(pub(crate) String);

impl FromRequestParts<App> for DriveName {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        let given = path_param(parts, app, "name").await?;
        if !crate::validate::is_name(&given) {
            return Err(ApiError::new(Code::NotFound, "there is no drive of this name")
                .hint("`GET /v1/drives` lists them")
                .into());
        }
        Ok(Self(given))
    }
}

/// The volume that the path names, or that is to be made under this name.
pub(crate) struct VolumeName(pub(crate) String);

impl FromRequestParts<App> for VolumeName {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        path_param(parts, app, "name").await.map(Self)
    }
}

/// The sandbox whose checkpoint the path names: the store knows it, the catalogue need not.
pub(crate) struct CheckpointOf(pub(crate) api::SandboxId);

impl FromRequestParts<App> for CheckpointOf {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        let given = path_param(parts, app, "id").await?;
        given.parse().map(Self).map_err(|_| {
            ApiError::new(Code::NotFound, "there is no checkpoint of this id")
                .hint("`GET /v1/checkpoints` lists them; a name is none")
                .into()
        })
    }
}

/// The terminal that the path names.
pub(crate) struct TerminalId(pub(crate) String);

impl FromRequestParts<App> for TerminalId {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        let given = path_param(parts, app, "terminal_id").await?;
        let plain = given.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if given.is_empty() || given.len() > EXEC_ID_CHARS_MAX || !plain {
            return Err(ApiError::new(Code::NotFound, "no terminal has this id")
                .hint("`GET /v1/sandboxes/{id}/terminals` lists them")
                .into());
        }
        Ok(Self(given))
    }
}

/// The port that the path names.
pub(crate) struct Port(pub(crate) u16);

impl FromRequestParts<App> for Port {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        let given = path_param(parts, app, "port").await?;
        match given.parse() {
            Ok(port) if port > 0 => Ok(Self(port)),
            _ => Err(ApiError::invalid("port", "not a port")
                .hint("a whole number from 1 to 65535")
                .into()),
        }
    }
}

/// A body of any length as a reader; a client that goes away before its end reads as an error, never as the end.
pub(crate) fn body_reader(body: Body) -> Box<dyn tokio::io::AsyncRead + Send + Unpin> {
    let pieces =
        futures_util::TryStreamExt::map_err(body.into_data_stream(), std::io::Error::other);
    Box::new(tokio_util::io::StreamReader::new(pieces))
}

/// Parses a JSON object into `T`.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let Unambiguous(value) = serde_json::from_slice(bytes).map_err(|error| {
        let text = error.to_string();
        if let Some((name, _)) =
            text.strip_prefix(TWICE).and_then(|rest| rest.split_once("` at line "))
        {
            return twice("the body", name);
        }
        ApiError::invalid("body", format!("the body is no JSON: {error}"))
            .hint("send a JSON object, such as `{}`")
    })?;
    if !value.is_object() {
        return Err(ApiError::invalid("body", "the body is not a JSON object").hint("such as `{}`"));
    }
    read_object("the body", value)
}

/// Reads an object into `T`. `place`: what a person calls it, such as `the body`.
pub(crate) fn read_object<T: DeserializeOwned>(
    place: &str,
    mut value: Value,
) -> Result<T, ApiError> {
    make_integers(&mut value);
    serde_path_to_error::deserialize(value)
        .map_err(|error| explain(place, &error.path().to_string(), &error.inner().to_string()))
}

/// JSON in which no object has a field twice: of two values nobody knows which was meant, and readers differ in which they take.
struct Unambiguous(Value);

/// How the error about that begins.
const TWICE: &str = "twice: `";

impl<'de> serde::Deserialize<'de> for Unambiguous {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reading)
    }
}

struct Reading;

impl<'de> Visitor<'de> for Reading {
    type Value = Unambiguous;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Unambiguous, E> {
        Ok(Unambiguous(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Unambiguous, E> {
        Ok(Unambiguous(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Unambiguous, E> {
        Ok(Unambiguous(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Unambiguous, E> {
        Ok(Unambiguous(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Unambiguous, E> {
        Ok(Unambiguous(value.into()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Unambiguous, E> {
        Ok(Unambiguous(value.into()))
    }

    fn visit_string<E>(self, value: String) -> Result<Unambiguous, E> {
        Ok(Unambiguous(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Unambiguous, A::Error> {
        let mut all = Vec::new();
        while let Some(Unambiguous(item)) = items.next_element()? {
            all.push(item);
        }
        Ok(Unambiguous(all.into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Unambiguous, A::Error> {
        let mut all = serde_json::Map::new();
        while let Some((name, Unambiguous(value))) = fields.next_entry::<String, _>()? {
            if all.contains_key(&name) {
                return Err(serde::de::Error::custom(format_args!("{TWICE}{name}`")));
            }
            all.insert(name, value);
        }
        Ok(Unambiguous(all.into()))
    }
}

/// JSON knows one kind of number, and calls `350.0` an integer; serde does not. No field of ours is a fraction.
fn make_integers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            if let Some(float) = number.as_f64().filter(|_| number.is_f64())
                && float.fract() == 0.0
                && float.abs() <= EXACT_INTEGER_MAX
            {
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "whole, and within what both types hold exactly"
                )]
                let whole = float as i64;
                *number = whole.into();
            }
        }
        Value::Array(items) => items.iter_mut().for_each(make_integers),
        Value::Object(fields) => fields.values_mut().for_each(make_integers),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

/// Turns serde's sentence into ours: which field, what is wrong, what would be right.
fn explain(place: &str, path: &str, message: &str) -> ApiError {
    let message = message.split(" at line ").next().unwrap_or(message);
    if let Some(rest) = message.strip_prefix("unknown field `") {
        let (name, expected) =
            rest.split_once("`, expected ").unwrap_or((rest.trim_end_matches('`'), ""));
        let known = expected.strip_prefix("one of ").unwrap_or(expected);
        let parent =
            path.strip_suffix(name).unwrap_or(path).trim_end_matches('.').trim_matches('?');
        let field = if parent.is_empty() { name.to_owned() } else { format!("{parent}.{name}") };
        let error =
            ApiError::invalid(&field, format!("{place} has a field that is not known: `{field}`"));
        return if known.is_empty() { error } else { error.hint(format!("known are {known}")) };
    }
    if let Some(rest) = message.strip_prefix("missing field `") {
        let name = rest.trim_end_matches('`');
        let parent = if path == "." || path == "?" { String::new() } else { format!("{path}.") };
        return ApiError::invalid(
            &format!("{parent}{name}"),
            format!("{place} lacks the field `{parent}{name}`"),
        );
    }
    if let Some(rest) = message.strip_prefix("duplicate field `") {
        return twice(place, rest.trim_end_matches('`'));
    }
    let field = if path == "." || path == "?" { "body" } else { path };
    let range = crate::validate::range_of(field);
    match (message.split_once(", expected "), range) {
        (Some((wrong, expected)), range) => {
            let integer = matches!(expected, "u16" | "u32" | "u64" | "i32");
            let expected = range.filter(|_| integer).unwrap_or_else(|| in_words(expected).into());
            ApiError::invalid(field, format!("`{field}`: {wrong}"))
                .hint(format!("expected {expected}"))
        }
        (None, Some(range)) => ApiError::invalid(field, format!("`{field}`: {message}"))
            .hint(format!("expected {range}")),
        (None, None) => ApiError::invalid(field, format!("`{field}`: {message}")),
    }
}

fn twice(place: &str, name: &str) -> ApiError {
    ApiError::invalid(name, format!("{place} has the field `{name}` twice"))
        .hint("give each field once")
}

/// Rust's names of types, for people who send JSON.
fn in_words(expected: &str) -> &str {
    match expected {
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" => "a whole number, 0 or more",
        "i32" => "a whole number",
        "a map" => "an object whose values are strings",
        "a sequence" => "an array",
        other => other,
    }
}

/// One part of the path. Names that do not decode to UTF-8 name nothing we have.
pub(crate) async fn path_param(
    parts: &mut Parts,
    app: &App,
    name: &str,
) -> Result<String, Failure> {
    let not_found = || Failure::from(ApiError::new(Code::NotFound, "no such path"));
    let params = RawPathParams::from_request_parts(parts, app).await.map_err(|_| not_found())?;
    params
        .iter()
        .find(|(key, _)| *key == name)
        .map(|(_, value)| value.to_owned())
        .ok_or_else(not_found)
}

fn too_large() -> ApiError {
    let mut error =
        ApiError::new(Code::TooLarge, format!("the body is over {JSON_BYTES_MAX} bytes"));
    error.field = Some("body".to_owned());
    error.hint("large data goes through `files`, `tree` and the attach stream, which have no limit")
}

#[cfg(test)]
mod tests {
    use api::exec::ExecRequest;
    use api::file::MoveRequest;
    use api::sandbox::{CreateSandbox, SleepRequest};

    use super::*;

    /// The error as text: field, sentence, hint.
    fn told<T: DeserializeOwned + std::fmt::Debug>(body: &str) -> String {
        in_short(parse::<T>(body.as_bytes()).expect_err("must be refused"))
    }

    fn in_short(error: ApiError) -> String {
        assert_eq!(error.code, Code::InvalidRequest);
        format!(
            "{} | {} | {}",
            error.field.unwrap_or_default(),
            error.error,
            error.hint.unwrap_or_default()
        )
    }

    #[test]
    fn errors_name_the_field_and_what_would_be_right() {
        let check = |got: String, want: &str| assert_eq!(got, want);
        check(
            told::<CreateSandbox>(r#"{"cpus": "two"}"#),
            r#"cpus | `cpus`: invalid type: string "two" | expected a whole number from 1 to 8"#,
        );
        check(
            told::<CreateSandbox>(r#"{"cpus": 1.5}"#),
            "cpus | `cpus`: invalid type: floating point `1.5` | expected a whole number from 1 to 8",
        );
        check(
            told::<CreateSandbox>(r#"{"awake_ports": [80, 99999]}"#),
            "awake_ports[1] | `awake_ports[1]`: invalid value: integer `99999` | expected a whole number from 1 to 65535",
        );
        check(
            told::<CreateSandbox>(r#"{"sleep_after_seconds": -1}"#),
            "sleep_after_seconds | `sleep_after_seconds`: invalid value: integer `-1` | expected a whole number from 1 to 31536000, or never (`null` in JSON)",
        );
        check(
            told::<api::terminal::TerminalSize>(r#"{"columns": 70000, "rows": 24}"#),
            "columns | `columns`: invalid value: integer `70000` | expected a whole number from 2 to 500",
        );
        check(
            told::<api::project::UpdateProject>(r#"{"delete_after_idle_days": "x"}"#),
            r#"delete_after_idle_days | `delete_after_idle_days`: invalid type: string "x" | expected a whole number from 1 to 3650, or never (`null` in JSON)"#,
        );
        check(
            told::<CreateSandbox>(r#"{"name": "a", "env": {"A": "1", "A": "2"}}"#),
            "A | the body has the field `A` twice | give each field once",
        );
        check(
            told::<CreateSandbox>(r#"{"cpus": 1, "cpus": 2}"#),
            "cpus | the body has the field `cpus` twice | give each field once",
        );
        check(
            in_short(explain("the query", "?", "duplicate field `limit`")),
            "limit | the query has the field `limit` twice | give each field once",
        );
        check(
            told::<CreateSandbox>(r#"{"env": {"A": 1}}"#),
            "env.A | `env.A`: invalid type: integer `1` | expected a string",
        );
        check(
            told::<SleepRequest>(r#"{"teir": "disk"}"#),
            "teir | the body has a field that is not known: `teir` | known are `tier`",
        );
        check(
            told::<SleepRequest>(r#"{"tier": "ram"}"#),
            "tier | `tier`: unknown variant `ram` | expected one of `memory`, `disk`, `store`, `off`",
        );
        check(told::<MoveRequest>(r#"{"from": "/a"}"#), "to | the body lacks the field `to` | ");
        check(told::<ExecRequest>("[]"), "body | the body is not a JSON object | such as `{}`");
        check(
            told::<ExecRequest>("{"),
            "body | the body is no JSON: EOF while parsing an object at line 1 column 1 | send a JSON object, such as `{}`",
        );
    }

    #[test]
    fn whole_numbers_may_be_written_with_a_fraction() {
        let create: CreateSandbox =
            parse(br#"{"memory_mib": 512.0, "sleep_after_seconds": 5e0}"#).unwrap();
        assert_eq!((create.memory_mib, create.sleep_after_seconds), (Some(512), Some(Some(5))));
    }
}
