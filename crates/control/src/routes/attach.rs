//! A command's streams over one WebSocket, with which a cut connection can go on where it was.
//!
//! Bytes are binary messages, whose first byte says the stream; everything else is text ([`AttachMessage`]). The client
//! counts the bytes of each stream and, after a cut, connects again with those counts as `stdout` and `stderr`.

use std::time::Duration;

use api::exec::{ATTACH_STDERR, ATTACH_STDIN, ATTACH_STDOUT, AttachMessage, Output};
use api::host::{OutputEvent, OutputFrom};
use api::{ApiError, Code, SandboxId};
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use serde::Deserialize;
use tokio::sync::mpsc;

use super::execs::parse_signal;
use super::upgrade_required;
use crate::App;
use crate::answer::add_wake;
use crate::failure::Failure;
use crate::input::{At, ExecId, Query};

/// Most bytes of one message in either direction: clients split standard input.
const MESSAGE_BYTES_MAX: usize = 1024 * 1024;
/// Pieces of standard input that wait for the command to take them; then the connection is not read further.
const STDIN_PIECES_MAX: usize = 8;

/// How long a client may take to close after it was told the end.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(5);

/// Where to begin.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct AttachQuery {
    /// Position in standard output; default 0.
    #[param(example = 0)]
    stdout: Option<u64>,
    /// Position in standard error; default 0.
    #[param(example = 0)]
    stderr: Option<u64>,
    /// The client waits for the result: keeps the sandbox awake; default false.
    #[param(example = true)]
    hold: Option<bool>,
}

/// Attach to a command
///
/// A WebSocket. Binary messages carry bytes, the first byte says the stream: 0 standard input (from the client), 1
/// standard output, 2 standard error. Text messages are JSON (`AttachMessage`). After `exit` or `error` the server closes.
/// After a cut, connect again with the counts of bytes received as `stdout` and `stderr`.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/execs/{exec_id}/attach", tag = "execs", operation_id = "attach_exec",
    params(
        ("id" = String, Path, description = "Id or name", example = "web"),
        ("exec_id" = String, Path, description = "Id of the command", example = "hnkainteaodl"),
        AttachQuery,
    ),
    responses((status = 101, description = "The WebSocket is open")),
)]
pub(crate) async fn attach(
    State(app): State<App>,
    At(entry): At,
    ExecId(exec): ExecId,
    Query(query): Query<AttachQuery>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Failure> {
    let Ok(upgrade) = upgrade else {
        let error = ApiError::new(Code::UpgradeRequired, "this path is a WebSocket");
        let hint = "`GET …/output` reads the same bytes without one";
        return Ok(upgrade_required("websocket", error.hint(hint)));
    };
    let from = OutputFrom {
        stdout: Some(query.stdout.unwrap_or(0)),
        stderr: Some(query.stderr.unwrap_or(0)),
        follow: true,
        hold: query.hold.unwrap_or(false),
    };
    // Before the upgrade, so that an unknown command is an ordinary answer.
    let events = app.host().exec_output(&entry.id, &exec, from).await?;
    let woke_ms = events.woke_ms;
    let session = Session {
        app,
        id: entry.id,
        exec,
        next: [query.stdout.unwrap_or(0), query.stderr.unwrap_or(0)],
    };
    let mut response = upgrade
        .max_message_size(MESSAGE_BYTES_MAX)
        .max_frame_size(MESSAGE_BYTES_MAX)
        .on_upgrade(|socket| session.run(socket, events.value));
    add_wake(response.headers_mut(), woke_ms);
    Ok(response)
}

/// One attached client.
struct Session {
    app: App,
    id: SandboxId,
    exec: String,
    /// Positions of the next bytes of standard output and standard error.
    next: [u64; 2],
}

/// What the client asks of the command.
enum Input {
    Bytes(Bytes),
    Close,
    Signal(i32),
}

impl Session {
    async fn run(
        mut self,
        mut socket: WebSocket,
        mut events: mpsc::Receiver<Result<OutputEvent, ApiError>>,
    ) {
        // A command that does not read its input must not stop its output: input is handed over by a task of its own.
        let (input, waiting) = mpsc::channel(STDIN_PIECES_MAX);
        let (taken, mut told) = mpsc::channel(STDIN_PIECES_MAX);
        let feeder = tokio::spawn(feed(
            self.app.clone(),
            self.id.clone(),
            self.exec.clone(),
            waiting,
            taken,
        ));
        let stop = self.app.stop().clone();
        let result = loop {
            // While earlier input waits, the socket is not read: that is the client's back-pressure.
            let room = input.capacity() > 0;
            tokio::select! {
                event = events.recv() => match self.tell(&mut socket, event).await {
                    Ok(true) => {}
                    end => break end.map(drop),
                },
                Some(message) = told.recv() => {
                    if let Err(error) = send(&mut socket, &message).await {
                        break Err(error);
                    }
                }
                message = socket.recv(), if room => match message {
                    Some(Ok(message)) => match read(message) {
                        Ok(Some(wish)) => if input.try_send(wish).is_err() {
                            // There was room, so the feeder has ended; it said why.
                        },
                        Ok(None) => {}
                        Err(error) => {
                            if let Err(error) = send(&mut socket, &AttachMessage::Error(error)).await {
                                break Err(error);
                            }
                            break close(&mut socket).await;
                        }
                    },
                    // The client went away; the command runs on.
                    Some(Err(_)) | None => break Ok(()),
                },
                () = stop.cancelled() => break close(&mut socket).await,
            }
        };
        feeder.abort();
        // Closing with unread input would reset the connection, and what was said last with it.
        let unread = async { while let Some(Ok(_)) = socket.recv().await {} };
        let unread = tokio::time::timeout(CLOSE_TIME_MAX, unread).await;
        if unread.is_err() {
            tracing::debug!("an attached client did not close");
        }
        if let Err(error) = result {
            tracing::debug!(error = %error, "an attached client went away");
        }
    }

    /// Passes one event on. `false`: it was the last.
    async fn tell(
        &mut self,
        socket: &mut WebSocket,
        event: Option<Result<OutputEvent, ApiError>>,
    ) -> Result<bool, axum::Error> {
        let last = match event {
            Some(Ok(OutputEvent::Data { stream, offset, bytes })) => {
                let (index, tag) = match stream {
                    Output::Stdout => (0, ATTACH_STDOUT),
                    Output::Stderr => (1, ATTACH_STDERR),
                };
                if offset != self.next[index] {
                    send(socket, &AttachMessage::Gap { stream, offset }).await?;
                }
                self.next[index] = offset + bytes.len() as u64;
                let mut message = BytesMut::with_capacity(bytes.len() + 1);
                message.put_u8(tag);
                message.extend_from_slice(&bytes);
                socket.send(Message::Binary(message.freeze())).await?;
                return Ok(true);
            }
            Some(Ok(OutputEvent::Exit(exit))) => AttachMessage::Exit(exit),
            Some(Err(error)) => AttachMessage::Error(error),
            None => AttachMessage::Error(ApiError::new(
                Code::Internal,
                "the command's output ended without its end",
            )),
        };
        send(socket, &last).await?;
        close(socket).await?;
        Ok(false)
    }
}

/// Hands input to the command, one piece after the other.
async fn feed(
    app: App,
    id: SandboxId,
    exec: String,
    mut waiting: mpsc::Receiver<Input>,
    told: mpsc::Sender<AttachMessage>,
) {
    let mut bytes = 0;
    while let Some(input) = waiting.recv().await {
        let result = match input {
            Input::Bytes(piece) => {
                bytes += piece.len() as u64;
                let result = app.host().exec_stdin(&id, &exec, piece, false).await;
                result.map(|_| Some(AttachMessage::StdinTaken { bytes }))
            }
            Input::Close => {
                app.host().exec_stdin(&id, &exec, Bytes::new(), true).await.map(|_| None)
            }
            Input::Signal(signal) => app.host().exec_signal(&id, &exec, signal).await.map(|_| None),
        };
        let message = match result {
            Ok(None) => continue,
            Ok(Some(message)) => message,
            // The command ended, or never had an open input. What it wrote is told all the same, and then how it ended.
            Err(error) => {
                tracing::debug!(error = %error, "input was not taken");
                continue;
            }
        };
        if told.send(message).await.is_err() {
            return;
        }
    }
}

/// What a message asks for; `None`: nothing (the protocol's own pings).
fn read(message: Message) -> Result<Option<Input>, ApiError> {
    match message {
        Message::Binary(bytes) => match bytes.first() {
            Some(&ATTACH_STDIN) => Ok(Some(Input::Bytes(bytes.slice(1..)))),
            _ => Err(ApiError::invalid(
                "message",
                "a binary message does not begin with byte 0 (standard input)",
            )),
        },
        Message::Text(text) => match crate::input::parse(text.as_bytes())? {
            AttachMessage::CloseStdin => Ok(Some(Input::Close)),
            AttachMessage::Signal { signal } => Ok(Some(Input::Signal(parse_signal(&signal)?))),
            AttachMessage::Exit(_)
            | AttachMessage::Error(_)
            | AttachMessage::Gap { .. }
            | AttachMessage::StdinTaken { .. } => {
                Err(ApiError::invalid("type", "only the server says this")
                    .hint("`close_stdin` or `signal`"))
            }
        },
        Message::Ping(_) | Message::Pong(_) | Message::Close(_) => Ok(None),
    }
}

async fn send(socket: &mut WebSocket, message: &AttachMessage) -> Result<(), axum::Error> {
    let text = serde_json::to_string(message).map_err(axum::Error::new)?;
    socket.send(Message::Text(text.into())).await
}

async fn close(socket: &mut WebSocket) -> Result<(), axum::Error> {
    let frame = CloseFrame { code: close_code::NORMAL, reason: "".into() };
    socket.send(Message::Close(Some(frame))).await
}
