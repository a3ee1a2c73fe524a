//! Terminals in a sandbox: made, looked at and typed to over a WebSocket, resized and closed.
//!
//! A viewer is drawn the whole screen first and then told what comes, so one who comes again after a cut needs to remember
//! nothing. Bytes are binary messages in both directions; everything else is text ([`TerminalMessage`]).

use std::time::Duration;

use api::host::Answer;
use api::terminal::{
    Terminal, TerminalEvent, TerminalList, TerminalMessage, TerminalRequest, TerminalScreen,
    TerminalSize,
};
use api::{ApiError, Code, SandboxId};
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::Deserialize;
use tokio::sync::mpsc;

use super::upgrade_required;
use crate::App;
use crate::answer::{Timed, add_wake};
use crate::failure::Failure;
use crate::input::{At, JsonBody, Query, TerminalId};
use crate::validate;

/// Most bytes of one message from a client: what is pasted is longer than what is typed.
const MESSAGE_BYTES_MAX: usize = 1024 * 1024;
/// Pieces of input that wait for the terminal to take them; then the connection is not read further.
const INPUT_PIECES_MAX: usize = 8;
/// How long a client may take to close after it was told the end.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(5);

/// Start a terminal
///
/// Runs a program, or a login shell, on a terminal of its own. It is a command as well: `execs` lists it under the same
/// number, and has its whole output. Wakes the sandbox. An open terminal does not keep it awake; what runs on it may.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/terminals", tag = "terminals", operation_id = "start_terminal",
    params(("id" = String, Path, description = "Id or name", example = "web")),
    request_body(content = TerminalRequest, description = "What to run; `{}` is a login shell"),
    responses((status = 201, description = "It runs", body = Terminal)),
)]
pub(crate) async fn start(
    State(app): State<App>,
    At(entry): At,
    JsonBody(request): JsonBody<TerminalRequest>,
) -> Result<Response, Failure> {
    validate::terminal(&request)?;
    let started = app.host().terminal_start(&entry.id, request).await?;
    Ok((StatusCode::CREATED, Timed(started)).into_response())
}

/// List terminals
///
/// Those of the present life, running or ended, newest last. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/terminals", tag = "terminals", operation_id = "list_terminals",
    params(("id" = String, Path, description = "Id or name", example = "web")),
    responses((status = 200, description = "The terminals", body = TerminalList)),
)]
pub(crate) async fn list(
    State(app): State<App>,
    At(entry): At,
) -> Result<Timed<TerminalList>, Failure> {
    let terminals = app.host().terminal_list(&entry.id).await?;
    Ok(asleep_is_fine(TerminalList { terminals }))
}

/// Tell about a terminal
///
/// Its size, whether its program runs, how it ended. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/terminals/{terminal_id}", tag = "terminals", operation_id = "get_terminal",
    params(
        ("id" = String, Path, description = "Id or name", example = "web"),
        ("terminal_id" = String, Path, description = "Id of the terminal", example = "hnkainteaodl"),
    ),
    responses((status = 200, description = "The terminal", body = Terminal)),
)]
pub(crate) async fn view(
    State(app): State<App>,
    At(entry): At,
    TerminalId(terminal): TerminalId,
) -> Result<Timed<Terminal>, Failure> {
    Ok(asleep_is_fine(app.host().terminal_view(&entry.id, &terminal).await?))
}

/// Read a terminal's screen
///
/// What is on it, as text without colours. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/terminals/{terminal_id}/screen", tag = "terminals",
    operation_id = "get_terminal_screen",
    params(
        ("id" = String, Path, description = "Id or name", example = "web"),
        ("terminal_id" = String, Path, description = "Id of the terminal", example = "hnkainteaodl"),
    ),
    responses((status = 200, description = "The screen", body = TerminalScreen)),
)]
pub(crate) async fn screen(
    State(app): State<App>,
    At(entry): At,
    TerminalId(terminal): TerminalId,
) -> Result<Timed<TerminalScreen>, Failure> {
    Ok(asleep_is_fine(app.host().terminal_screen(&entry.id, &terminal).await?))
}

/// Resize a terminal
///
/// For all who look at it. Wakes nothing: asleep, its programs are told when the sandbox wakes, before anything is typed.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/terminals/{terminal_id}/resize", tag = "terminals",
    operation_id = "resize_terminal",
    params(
        ("id" = String, Path, description = "Id or name", example = "web"),
        ("terminal_id" = String, Path, description = "Id of the terminal", example = "hnkainteaodl"),
    ),
    request_body(content = TerminalSize, description = "The new size"),
    responses((status = 200, description = "The terminal", body = Terminal)),
)]
pub(crate) async fn resize(
    State(app): State<App>,
    At(entry): At,
    TerminalId(terminal): TerminalId,
    JsonBody(size): JsonBody<TerminalSize>,
) -> Result<Timed<Terminal>, Failure> {
    validate::terminal_size(size)?;
    Ok(asleep_is_fine(app.host().terminal_resize(&entry.id, &terminal, size).await?))
}

/// Close a terminal
///
/// Hangs it up, and five seconds later kills everything that it has started and that is still there. One that has ended is
/// closed already. Wakes the sandbox.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{id}/terminals/{terminal_id}", tag = "terminals", operation_id = "close_terminal",
    params(
        ("id" = String, Path, description = "Id or name", example = "web"),
        ("terminal_id" = String, Path, description = "Id of the terminal", example = "hnkainteaodl"),
    ),
    responses((status = 204, description = "Its program has ended")),
)]
pub(crate) async fn close(
    State(app): State<App>,
    At(entry): At,
    TerminalId(terminal): TerminalId,
) -> Result<Response, Failure> {
    let closed = app.host().terminal_close(&entry.id, &terminal).await?;
    let mut response = StatusCode::NO_CONTENT.into_response();
    add_wake(response.headers_mut(), closed.woke_ms);
    Ok(response)
}

/// The client's size.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct AttachQuery {
    /// Resize it to so many columns first, 2-500; with `rows`.
    #[param(example = 120)]
    columns: Option<u16>,
    /// Resize it to so many rows first, 2-500; with `columns`.
    #[param(example = 40)]
    rows: Option<u16>,
}

/// Attach to a terminal
///
/// A WebSocket, of which a terminal may have several. Binary messages are bytes: from the server what is to be shown, from
/// the client what was typed. Text messages are JSON (`TerminalMessage`). First comes `screen` and a binary message that
/// draws all of it; so after a cut, attach again. After `exit` or `error` the server closes. Looking neither wakes the
/// sandbox nor keeps it awake; what is typed wakes it.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/terminals/{terminal_id}/attach", tag = "terminals",
    operation_id = "attach_terminal",
    params(
        ("id" = String, Path, description = "Id or name", example = "web"),
        ("terminal_id" = String, Path, description = "Id of the terminal", example = "hnkainteaodl"),
        AttachQuery,
    ),
    responses((status = 101, description = "The WebSocket is open")),
)]
pub(crate) async fn attach(
    State(app): State<App>,
    At(entry): At,
    TerminalId(terminal): TerminalId,
    Query(query): Query<AttachQuery>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Failure> {
    let usual = TerminalSize::default();
    let size = match (query.columns, query.rows) {
        (Some(columns), Some(rows)) => Some(TerminalSize { columns, rows }),
        (None, None) => None,
        (Some(columns), None) => {
            return Err(half_a_size(TerminalSize { columns, ..usual }, "rows"));
        }
        (None, Some(rows)) => return Err(half_a_size(TerminalSize { rows, ..usual }, "columns")),
    };
    size.map_or(Ok(()), validate::terminal_size)?;
    let Ok(upgrade) = upgrade else {
        let error = ApiError::new(Code::UpgradeRequired, "this path is a WebSocket");
        let hint = "`GET …/screen` reads the screen without one";
        return Ok(upgrade_required("websocket", error.hint(hint)));
    };
    if let Some(size) = size {
        app.host().terminal_resize(&entry.id, &terminal, size).await?;
    }
    // Before the upgrade, so that an unknown terminal is an ordinary answer.
    let events = app.host().terminal_attach(&entry.id, &terminal).await?;
    let viewer = Viewer { app, id: entry.id, terminal };
    Ok(upgrade
        .max_message_size(MESSAGE_BYTES_MAX)
        .max_frame_size(MESSAGE_BYTES_MAX)
        .on_upgrade(|socket| viewer.run(socket, events)))
}

/// One side alone, which is refused for what it is where it is wrong itself.
fn half_a_size(given: TerminalSize, missing: &str) -> Failure {
    let text = format!("`{missing}`: `columns` and `rows` go together");
    validate::terminal_size(given)
        .err()
        .unwrap_or_else(|| ApiError::unprocessable(missing, text))
        .into()
}

fn asleep_is_fine<T>(value: T) -> Timed<T> {
    Timed(Answer { value, woke_ms: None })
}

/// One who looks at a terminal.
struct Viewer {
    app: App,
    id: SandboxId,
    terminal: String,
}

/// What a client wishes.
enum Wish {
    Type(Bytes),
    Resize(TerminalSize),
}

impl Viewer {
    async fn run(
        self,
        mut socket: WebSocket,
        mut events: mpsc::Receiver<Result<TerminalEvent, ApiError>>,
    ) {
        let stop = self.app.stop().clone();
        // A wake takes its time, and a program may not read: what is shown must not wait for what is typed.
        let (wishes, waiting) = mpsc::channel(INPUT_PIECES_MAX);
        let (failed, mut failures) = mpsc::channel(1);
        let feeder = tokio::spawn(self.feed(waiting, failed));
        // Room for the next wish. While there is none the socket is not read: that is the client's back-pressure.
        let mut room = None;
        let mut fed = true;
        let result = loop {
            tokio::select! {
                event = events.recv() => match tell(&mut socket, event).await {
                    Ok(true) => {}
                    end => break end.map(drop),
                },
                Some(error) = failures.recv() => break fail(&mut socket, error).await,
                reserved = wishes.reserve(), if room.is_none() && fed => match reserved {
                    Ok(reserved) => room = Some(reserved),
                    // Without a feeder there is an error to be told next.
                    Err(_) => fed = false,
                },
                message = socket.recv(), if room.is_some() => match message {
                    Some(Ok(message)) => match read(message) {
                        Ok(Some(wish)) => if let Some(room) = room.take() {
                            room.send(wish);
                        },
                        Ok(None) => {}
                        Err(error) => break fail(&mut socket, error).await,
                    },
                    Some(Err(_)) | None => break Ok(()),
                },
                () = stop.cancelled() => break end(&mut socket).await,
            }
        };
        feeder.abort();
        // Closing with unread input would reset the connection, and what was said last with it.
        let unread = async { while let Some(Ok(_)) = socket.recv().await {} };
        if tokio::time::timeout(CLOSE_TIME_MAX, unread).await.is_err() {
            tracing::debug!("a viewer of a terminal did not close");
        }
        if let Err(error) = result {
            tracing::debug!(error = %error, "a viewer of a terminal went away");
        }
    }

    /// Carries out one wish after the other. What cannot be carried out is told, unless the program has just ended.
    async fn feed(self, mut waiting: mpsc::Receiver<Wish>, failed: mpsc::Sender<ApiError>) {
        while let Some(wish) = waiting.recv().await {
            let host = self.app.host();
            let result = match wish {
                Wish::Type(bytes) => {
                    host.terminal_input(&self.id, &self.terminal, bytes).await.map(drop)
                }
                Wish::Resize(size) => {
                    host.terminal_resize(&self.id, &self.terminal, size).await.map(drop)
                }
            };
            match result {
                Ok(()) => {}
                Err(error) if error.code == Code::Exists => {
                    tracing::debug!(error = %error, "input was not taken");
                }
                // The connection may be at its end as well.
                Err(error) => return drop(failed.send(error).await),
            }
        }
    }
}

/// Passes one event on. `false`: it was the last.
async fn tell(
    socket: &mut WebSocket,
    event: Option<Result<TerminalEvent, ApiError>>,
) -> Result<bool, axum::Error> {
    let last = match event {
        Some(Ok(TerminalEvent::Screen(size, drawing))) => {
            send(socket, &TerminalMessage::Screen(size)).await?;
            socket.send(Message::Binary(drawing)).await?;
            return Ok(true);
        }
        Some(Ok(TerminalEvent::Output(bytes))) => {
            socket.send(Message::Binary(bytes)).await?;
            return Ok(true);
        }
        Some(Ok(TerminalEvent::Size(size))) => {
            send(socket, &TerminalMessage::Size(size)).await?;
            return Ok(true);
        }
        Some(Ok(TerminalEvent::Exit(exit))) => TerminalMessage::Exit(exit),
        Some(Err(error)) => TerminalMessage::Error(error),
        None => TerminalMessage::Error(ApiError::new(
            Code::NotFound,
            "the sandbox is deleted, and the terminal with it",
        )),
    };
    send(socket, &last).await?;
    end(socket).await?;
    Ok(false)
}

/// What a message asks for; `None`: nothing (the protocol's own pings).
fn read(message: Message) -> Result<Option<Wish>, ApiError> {
    match message {
        Message::Binary(bytes) => Ok(Some(Wish::Type(bytes))
            .filter(|wish| !matches!(wish, Wish::Type(bytes) if bytes.is_empty()))),
        Message::Text(text) => match crate::input::parse(text.as_bytes())? {
            TerminalMessage::Size(size) => {
                validate::terminal_size(size)?;
                Ok(Some(Wish::Resize(size)))
            }
            TerminalMessage::Screen(_) | TerminalMessage::Exit(_) | TerminalMessage::Error(_) => {
                Err(ApiError::invalid("type", "only the server says this").hint("`size`"))
            }
        },
        Message::Ping(_) | Message::Pong(_) | Message::Close(_) => Ok(None),
    }
}

async fn fail(socket: &mut WebSocket, error: ApiError) -> Result<(), axum::Error> {
    send(socket, &TerminalMessage::Error(error)).await?;
    end(socket).await
}

async fn send(socket: &mut WebSocket, message: &TerminalMessage) -> Result<(), axum::Error> {
    let text = serde_json::to_string(message).map_err(axum::Error::new)?;
    socket.send(Message::Text(text.into())).await
}

async fn end(socket: &mut WebSocket) -> Result<(), axum::Error> {
    let frame = CloseFrame { code: close_code::NORMAL, reason: "".into() };
    socket.send(Message::Close(Some(frame))).await
}
