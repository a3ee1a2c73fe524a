//! Commands in a sandbox.

use std::io;

use api::exec::{
    Exec, ExecList, ExecRequest, ExecResult, Exit, Output, SignalRequest, signal_number,
};
use api::host::{Answer, OutputEvent, OutputFrom};
use api::{ApiError, Code, SandboxId};
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::BodyExt;
use serde::Deserialize;
use tokio::sync::mpsc;

use crate::App;
use crate::answer::{Timed, add_wake, both};
use crate::failure::Failure;
use crate::input::{At, ExecId, JsonBody, Query};
use crate::openapi::Raw;
use crate::validate;

/// Most bytes of each output stream in the answer of a command that was waited for.
const RESULT_BYTES_MAX: usize = 1024 * 1024;

/// Run a command
///
/// Waits for its end and answers with its output (the first 1 MiB of each stream), unless `background` is true. A
/// command whose client goes away runs on and is found in the list. Wakes the sandbox, and keeps it awake while somebody
/// waits.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/execs", tag = "execs", operation_id = "exec",
    params(("id" = String, Path, description = "Id or name", example = "web")),
    request_body(content = ExecRequest, description = "Exactly one of `argv` and `command`", example = json!({"argv": ["uname", "-a"]})),
    responses(
        (status = 200, description = "It has ended", body = ExecResult),
        (status = 201, description = "It was started in the background", body = Exec),
    ),
)]
pub(crate) async fn start(
    State(app): State<App>,
    At(entry): At,
    JsonBody(request): JsonBody<ExecRequest>,
) -> Result<Response, Failure> {
    validate::exec(&request)?;
    let background = request.background;
    let started = app.host().exec_start(&entry.id, request).await?;
    if background {
        return Ok((StatusCode::CREATED, Timed(started)).into_response());
    }
    let from = OutputFrom { stdout: Some(0), stderr: Some(0), follow: true, hold: true };
    let output = app.host().exec_output(&entry.id, &started.value.exec_id, from).await?;
    let woke_ms = both(started.woke_ms, output.woke_ms);
    let result = collect(&started.value, output.value).await?;
    Ok(Timed(Answer { value: result, woke_ms }).into_response())
}

/// List commands
///
/// Those of the present life, running or ended, newest last. Of a sandbox that sleeps they are told as they were when it fell
/// asleep, without waking it.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/execs", tag = "execs", operation_id = "list_execs",
    params(("id" = String, Path, description = "Id or name", example = "web")),
    responses((status = 200, description = "The commands", body = ExecList)),
)]
pub(crate) async fn list(
    State(app): State<App>,
    At(entry): At,
) -> Result<Timed<ExecList>, Failure> {
    Ok(Timed(app.host().exec_list(&entry.id).await?.map(|execs| ExecList { execs })))
}

/// Tell about a command
///
/// Whether it runs, how it ended, how much it wrote. Of a sandbox that sleeps this is told as it was when it fell asleep,
/// without waking it.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/execs/{exec_id}", tag = "execs", operation_id = "get_exec",
    params(
        ("id" = String, Path, description = "Id or name", example = "web"),
        ("exec_id" = String, Path, description = "Id of the command", example = "hnkainteaodl"),
    ),
    responses((status = 200, description = "The command", body = Exec)),
)]
pub(crate) async fn view(
    State(app): State<App>,
    At(entry): At,
    ExecId(exec): ExecId,
) -> Result<Timed<Exec>, Failure> {
    Ok(Timed(app.host().exec_view(&entry.id, &exec).await?))
}

/// Which bytes.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct OutputQuery {
    /// `stdout` or `stderr`; default `stdout`.
    #[param(example = "stdout")]
    stream: Option<Output>,
    /// Position of the first byte; default 0.
    #[param(example = 0)]
    offset: Option<u64>,
    /// Go on until the command has ended, or as long as the host lets one answer follow (`--follow-seconds`); default false: what is
    /// there now.
    #[param(example = false)]
    follow: Option<bool>,
}

/// Read output
///
/// The raw bytes of one stream. `dormouse-offset` is the position of the first byte told (later than asked for if older
/// output is no longer kept); without `follow`, `dormouse-next-offset` is where to go on. The output is in the sandbox, so
/// this wakes it; an open stream does not keep it awake.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/execs/{exec_id}/output", tag = "execs", operation_id = "get_exec_output",
    params(
        ("id" = String, Path, description = "Id or name", example = "web"),
        ("exec_id" = String, Path, description = "Id of the command", example = "hnkainteaodl"),
        OutputQuery,
    ),
    responses((
        status = 200, description = "The bytes", body = Raw, content_type = "application/octet-stream",
        headers(
            ("dormouse-offset" = u64, description = "Position of the first byte"),
            ("dormouse-next-offset" = u64, description = "Where to go on; not with `follow`"),
        ),
    )),
)]
pub(crate) async fn output(
    State(app): State<App>,
    At(entry): At,
    ExecId(exec): ExecId,
    Query(query): Query<OutputQuery>,
) -> Result<Response, Failure> {
    let part = Part {
        which: query.stream.unwrap_or(Output::Stdout),
        offset: query.offset.unwrap_or(0),
        follow: query.follow.unwrap_or(false),
    };
    let most = app.follow_max().filter(|_| part.follow);
    let ends = async move {
        match most {
            Some(most) => tokio::time::sleep(most).await,
            None => std::future::pending().await,
        }
    };
    read_output(&app, &entry.id, &exec, part, ends, ()).await
}

/// Which output of a command.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// Of which stream.
    pub(super) which: Output,
    /// Position of the first byte.
    pub(super) offset: u64,
    /// Go on until the command has ended.
    pub(super) follow: bool,
}

/// The bytes of one stream, until `ends` ends at the latest. `held` lives until the last of them has been passed on.
pub(super) async fn read_output(
    app: &App,
    id: &SandboxId,
    exec: &str,
    Part { which, offset, follow }: Part,
    ends: impl Future<Output = ()> + Send + 'static,
    held: impl Send + 'static,
) -> Result<Response, Failure> {
    let view = app.host().exec_view(id, exec).await?;
    // Without `follow` the answer ends here, whatever is written meanwhile: so its end is known before it begins.
    let end = match which {
        Output::Stdout => view.value.stdout_bytes,
        Output::Stderr => view.value.stderr_bytes,
    };
    if offset > end {
        let error = validate::out_of_range("offset", offset, 0, end);
        return Err(ApiError { code: Code::Unprocessable, ..error }.into());
    }
    let (stdout, stderr) = match which {
        Output::Stdout => (Some(offset), None),
        Output::Stderr => (None, Some(offset)),
    };
    let from = OutputFrom { stdout, stderr, follow, hold: false };
    let events = app.host().exec_output(id, exec, from).await?;
    let woke_ms = both(view.woke_ms, events.woke_ms);
    let mut events = events.value;
    // The head says where the first byte is, so the first bytes come before the head. Following a silent command, the
    // head does not wait for them: then nothing was skipped.
    let first = if end > offset { next_bytes(&mut events).await.transpose()? } else { None };
    let begin = first.as_ref().map_or(offset, |(position, _)| *position);
    let limit = if follow { u64::MAX } else { end.saturating_sub(begin) };
    let rest = stream::unfold(events, |mut events| async move {
        Some((next_bytes(&mut events).await?, events))
    });
    let bytes = stream::iter(first.map(Ok)).chain(rest).map(|piece| match piece {
        Ok((_, bytes)) => Ok(bytes),
        Err(error) => Err(io::Error::other(error)),
    });
    let bytes = bytes.scan(limit, |left, piece| {
        let piece = piece.map(|bytes: Bytes| {
            let take = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
            *left -= take as u64;
            bytes.slice(..take)
        });
        // An empty piece after the limit ends the body.
        std::future::ready(
            Some(piece).filter(|piece| piece.as_ref().map_or(true, |bytes| !bytes.is_empty())),
        )
    });
    let bytes = bytes.take_until(ends).map(move |piece| {
        let _held = &held;
        piece
    });
    let mut response = Body::from_stream(bytes).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert("dormouse-offset", begin.into());
    if !follow {
        headers.insert("dormouse-next-offset", end.max(begin).into());
    }
    add_wake(headers, woke_ms);
    Ok(response)
}

/// Whether standard input ends.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StdinQuery {
    /// Close standard input after these bytes; default false.
    #[param(example = true)]
    close: Option<bool>,
}

/// Write to standard input
///
/// The body's raw bytes, of any length, go to a command that was started with `open_stdin`.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/execs/{exec_id}/stdin", tag = "execs", operation_id = "write_exec_stdin",
    params(
        ("id" = String, Path, description = "Id or name", example = "web"),
        ("exec_id" = String, Path, description = "Id of the command", example = "hnkainteaodl"),
        StdinQuery,
    ),
    request_body(content = Raw, description = "The bytes", content_type = "application/octet-stream"),
    responses((status = 204, description = "The command has been handed all of it")),
)]
pub(crate) async fn stdin(
    State(app): State<App>,
    At(entry): At,
    ExecId(exec): ExecId,
    Query(query): Query<StdinQuery>,
    body: Body,
) -> Result<Response, Failure> {
    let woke_ms = write_stdin(&app, &entry.id, &exec, &query, body).await?;
    let mut response = StatusCode::NO_CONTENT.into_response();
    add_wake(response.headers_mut(), woke_ms);
    Ok(response)
}

/// Hands a body to a command, as it comes. Tells how long it took to wake its sandbox, milliseconds.
pub(super) async fn write_stdin(
    app: &App,
    id: &SandboxId,
    exec: &str,
    query: &StdinQuery,
    mut body: Body,
) -> Result<Option<f64>, Failure> {
    let mut woke_ms = None;
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|_| ApiError::invalid("body", "the body broke off before its end"))?;
        if let Ok(bytes) = frame.into_data()
            && !bytes.is_empty()
        {
            woke_ms = both(woke_ms, app.host().exec_stdin(id, exec, bytes, false).await?.woke_ms);
        }
    }
    if query.close.unwrap_or(false) {
        let closed = app.host().exec_stdin(id, exec, Bytes::new(), true).await?;
        woke_ms = both(woke_ms, closed.woke_ms);
    }
    Ok(woke_ms)
}

/// Send a signal
///
/// To the command's whole process group; `KILL` to everything that it has started. Wakes the sandbox.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/execs/{exec_id}/signal", tag = "execs", operation_id = "signal_exec",
    params(
        ("id" = String, Path, description = "Id or name", example = "web"),
        ("exec_id" = String, Path, description = "Id of the command", example = "hnkainteaodl"),
    ),
    request_body(content = SignalRequest, description = "The signal"),
    responses((status = 204, description = "It was sent")),
)]
pub(crate) async fn signal(
    State(app): State<App>,
    At(entry): At,
    ExecId(exec): ExecId,
    JsonBody(request): JsonBody<SignalRequest>,
) -> Result<Response, Failure> {
    let sent = app.host().exec_signal(&entry.id, &exec, parse_signal(&request.signal)?).await?;
    let mut response = StatusCode::NO_CONTENT.into_response();
    add_wake(response.headers_mut(), sent.woke_ms);
    Ok(response)
}

/// A signal's number, or what would be right.
pub(super) fn parse_signal(text: &str) -> Result<i32, ApiError> {
    signal_number(text).ok_or_else(|| {
        ApiError::invalid("signal", "`signal`: not a signal")
            .hint("such as `TERM`, `SIGTERM` or `15`")
    })
}

/// Waits for the end, keeping the first [`RESULT_BYTES_MAX`] of each stream.
async fn collect(
    exec: &Exec,
    mut events: mpsc::Receiver<Result<OutputEvent, ApiError>>,
) -> Result<ExecResult, ApiError> {
    let (mut stdout, mut stderr) = (Kept::default(), Kept::default());
    while let Some(event) = events.recv().await {
        match event? {
            OutputEvent::Data { stream: Output::Stdout, offset, bytes } => {
                stdout.add(offset, &bytes);
            }
            OutputEvent::Data { stream: Output::Stderr, offset, bytes } => {
                stderr.add(offset, &bytes);
            }
            OutputEvent::Exit(exit) => return Ok(result(exec, exit, stdout, stderr)),
        }
    }
    Err(ApiError::new(Code::Internal, "the command's output ended without its end"))
}

fn result(exec: &Exec, exit: Exit, stdout: Kept, stderr: Kept) -> ExecResult {
    let truncated = stdout.truncated || stderr.truncated;
    let (stdout, stdout_base64) = text(stdout.bytes);
    let (stderr, stderr_base64) = text(stderr.bytes);
    ExecResult {
        exec_id: exec.exec_id.clone(),
        pid: exec.pid,
        exit,
        stdout,
        stderr,
        stdout_base64,
        stderr_base64,
        truncated,
    }
}

/// As text, and exactly where that is not the same.
fn text(bytes: Vec<u8>) -> (String, Option<String>) {
    match String::from_utf8(bytes) {
        Ok(text) => (text, None),
        Err(error) => {
            let bytes = error.into_bytes();
            (String::from_utf8_lossy(&bytes).into_owned(), Some(STANDARD.encode(bytes)))
        }
    }
}

/// The beginning of a stream.
#[derive(Default)]
struct Kept {
    bytes: Vec<u8>,
    truncated: bool,
}

impl Kept {
    fn add(&mut self, offset: u64, bytes: &[u8]) {
        // A gap means that the host no longer had what came before.
        let contiguous = offset == self.bytes.len() as u64;
        let room =
            if contiguous && !self.truncated { RESULT_BYTES_MAX - self.bytes.len() } else { 0 };
        let take = room.min(bytes.len());
        self.bytes.extend_from_slice(&bytes[..take]);
        self.truncated |= take < bytes.len();
    }
}

/// The next bytes and their position; `None` at the end.
async fn next_bytes(
    events: &mut mpsc::Receiver<Result<OutputEvent, ApiError>>,
) -> Option<Result<(u64, Bytes), ApiError>> {
    match events.recv().await? {
        Ok(OutputEvent::Data { offset, bytes, .. }) => Some(Ok((offset, bytes))),
        Ok(OutputEvent::Exit(_)) => None,
        Err(error) => Some(Err(error)),
    }
}
