//! One request to a sandbox's port: held while it wakes, passed on, streamed back.
//!
//! A request has a connection of its own, or one that another request has left and that may carry it ([`pool`](super::pool)).

use std::net::SocketAddr;
use std::time::Duration;

use api::boxes::BoxStatus;
use api::host::{Answer, Caller, Connection, Hold, HoldKind};
use api::{ApiError, Code};
use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio_util::sync::CancellationToken;

use super::activity::Activity;
use super::body::{Answering, Asking, Held};
use super::headers::{Outside, forward, pass, upgrade};
use super::limits::CONNECT_TIME_MAX;
use super::pool::{self, Line, Visit, Wire};
use super::refusal::{self, Form};
use super::{Address, Conversation, Target, boxes, find};
use crate::App;
use crate::answer::{add_wake, both};
use crate::failure::chain;
use crate::server::Peer;

/// Most bytes of an answer's head from a sandbox.
const ANSWER_HEAD_BYTES_MAX: usize = 256 * 1024;
/// The kind of an event stream.
const EVENT_STREAM: &str = "text/event-stream";
/// Most headers of an answer from a sandbox.
const ANSWER_HEADERS_MAX: usize = 200;

/// Serves one request below `box.<domain>`.
pub(crate) async fn handle(
    app: &App,
    address: Address,
    request: Request<Incoming>,
    peer: Peer,
) -> Response<Body> {
    let form = Form::wanted(request.headers());
    let peer = app.proxies().peer(peer, request.headers());
    let target = address.label.as_ref();
    let target = target.and_then(|label| Some((label, find(app, label, peer.map(|at| at.ip()))?)));
    let Some((label, target)) = target else {
        return refusal::response(no_such_link(), form);
    };
    let outside = Outside { host: &address.written, scheme: app.links().scheme(), peer };
    match target {
        Target::Box(record) => {
            let passing = Passing { outside, peer, is_box: true, external: false, patience: None };
            boxes::serve(app, &record, label.port, request, passing).await
        }
        Target::Sandbox(entry) => {
            let passing = Passing { outside, peer, is_box: false, external: false, patience: None };
            match pass_on(app, &entry.id, label.sandbox_port(), request, &passing).await {
                Ok(response) => response,
                Err((_, error)) => refusal::response(error, form),
            }
        }
    }
}

/// How a request came.
pub(super) struct Passing<'a> {
    pub(super) outside: Outside<'a>,
    pub(super) peer: Option<SocketAddr>,
    /// What comes over a connection that stays open counts for nothing (B9).
    pub(super) is_box: bool,
    /// The service is not in the box, but at its external base (T17).
    pub(super) external: bool,
    /// How long a connection to the service may take, where that is less than [`CONNECT_TIME_MAX`].
    pub(super) patience: Option<Duration>,
}

/// Passes a request on to a port. An error comes with the request where nothing was done with it yet.
pub(super) async fn pass_on(
    app: &App,
    id: &api::SandboxId,
    port: u16,
    request: Request<Incoming>,
    passing: &Passing<'_>,
) -> Result<Response<Body>, (Option<Request<Incoming>>, ApiError)> {
    if request.method() == Method::CONNECT {
        let error = ApiError::new(Code::MethodNotAllowed, "a link is no proxy");
        return Err((None, error));
    }
    let what = format!("request through the link to port {port}");
    let caller = Caller { what, peer: passing.peer };
    // Taken before it is held, which it is only while it is awake: so no freeze is missed.
    let freezes = passing.is_box.then(|| app.machines().rest_of(id));
    let hold = match app.host().hold(id, HoldKind::Request, caller.clone()).await {
        Ok(hold) => hold,
        Err(error) => return Err((Some(request), error)),
    };
    let held = Awake { hold, freezes };
    let passed = pass_held(app, id, port, caller, request, passing, held).await;
    passed.map_err(|error| (None, error))
}

/// A sandbox that is held awake for a request.
struct Awake {
    hold: Answer<Box<dyn Hold>>,
    /// The next time that it may be frozen nevertheless; `None`: it is no box.
    freezes: Option<CancellationToken>,
}

async fn pass_held(
    app: &App,
    id: &api::SandboxId,
    port: u16,
    caller: Caller,
    mut request: Request<Incoming>,
    passing: &Passing<'_>,
    Awake { hold, freezes }: Awake,
) -> Result<Response<Body>, ApiError> {
    let machine = app.machines().end_of(id);
    let visit = (!passing.external).then(|| app.pool().visit(id, port));

    let wish = upgrade(request.headers());
    let may_repeat = wish.is_none() && pool::may_repeat(&request);
    let client = wish.is_some().then(|| hyper::upgrade::on(&mut request));
    pass(request.headers_mut(), wish);
    forward(request.headers_mut(), port, &passing.outside);
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() =
        path.parse::<Uri>().map_err(|_| ApiError::invalid("path", "not a path"))?;
    *request.version_mut() = Version::HTTP_11;

    let activity = Activity::new();
    let (request, broke) = Asking::wrap(request, activity.clone());
    let waiting = Waiting {
        app,
        id,
        port,
        hold: &*hold.value,
        freezes: freezes.as_ref(),
        machine: &machine,
        activity: &activity,
    };
    // Without a body alone.
    let kept = visit.as_ref().filter(|_| may_repeat).and_then(Visit::take);
    let (kept, request) = match kept.map(|line| (line, Asking::again(&request))) {
        Some((line, Some(again))) => (waiting.repeatable(line, request).await?, again),
        _ => (None, request),
    };
    let (mut response, line, woke_ms) = if let Some((response, line)) = kept {
        (response, line, hold.woke_ms)
    } else {
        let (stream, woke_ms) = if passing.external {
            (app.host().external(id)?, hold.woke_ms)
        } else {
            let connection = reach(app, id, port, caller.clone());
            let limit = passing.patience.unwrap_or(CONNECT_TIME_MAX);
            let connection =
                tokio::time::timeout(limit, connection).await.unwrap_or_else(|_| {
                    let text = format!("port {port} in the sandbox takes no connection yet");
                    Err(ApiError::new(Code::PortClosed, text))
                })?;
            (connection.value.stream, both(hold.woke_ms, connection.woke_ms))
        };
        let mut line = open(stream, port, machine.clone()).await?;
        if !may_repeat {
            line.wire = line.wire.leave();
        }
        let Line { sender, wire, .. } = &mut line;
        let answered = waiting.answered(wire.carry_for(sender.send_request(request))).await?;
        let response = answered.map_err(|error| {
            if broke.is_set() {
                return broken_body(&error);
            }
            bad_answer(&error, port, "broke off before it had answered")
        })?;
        (response, line, woke_ms)
    };

    let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    let agreed = if switched { upgrade(response.headers()) } else { None };
    let server = switched.then(|| hyper::upgrade::on(&mut response));
    pass(response.headers_mut(), agreed);
    add_wake(response.headers_mut(), woke_ms);
    // The version speaks of one connection: said again to the client, HTTP/1.0 would end its own, and a body without a
    // length would have no mark at its end.
    *response.version_mut() = Version::HTTP_11;
    match (client, server) {
        (Some(client), Some(server)) => {
            // Counted before the request has ended, so that there is no moment between.
            let counts = !passing.is_box;
            let conversation = Conversation::begin(app, id, port, caller, machine, counts).await?;
            drop(visit);
            drop(hold);
            tokio::spawn(async move {
                let _line = line;
                match tokio::try_join!(client, server) {
                    Ok((client, server)) => {
                        conversation.copy(TokioIo::new(client), TokioIo::new(server)).await;
                    }
                    Err(error) => {
                        tracing::debug!(error = chain(&error), "an upgrade was not completed");
                    }
                }
            });
            Ok(response.map(|_| Body::empty()))
        }
        (None, Some(_)) => Err(ApiError::new(
            Code::BadAnswer,
            "the server changed the protocol without being asked",
        )),
        (_, None) => {
            let idle = app.host().connection_rules(id, port)?.idle.unwrap_or(app.edge().idle);
            let (held, freezes) = if is_event_stream(response.headers()) {
                let hold = standing(app, id, port, caller).await?;
                // It stands still with its box, and goes on when that does.
                (Held { line, may_keep: false, visit: None, hold }, None)
            } else {
                let hold = Some(hold.value);
                (Held { line, may_keep: may_repeat, visit, hold }, freezes)
            };
            let (parts, body) = response.into_parts();
            let (app, id) = (app.clone(), id.clone());
            // Nobody is held by a frozen box (B19), also not for the rest of an answer.
            let cut = async move { frozen(&app, &id, freezes.as_ref()).await };
            let body = Answering::begin(body, held, activity, idle, machine, cut).await;
            Ok(Response::from_parts(parts, Body::new(body)))
        }
    }
}

/// Opens a connection for requests.
async fn open(
    stream: Box<dyn api::host::Duplex>,
    port: u16,
    machine: CancellationToken,
) -> Result<Line, ApiError> {
    let (sender, wire) = http1::Builder::new()
        .max_buf_size(ANSWER_HEAD_BYTES_MAX)
        .max_headers(ANSWER_HEADERS_MAX)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|error| bad_answer(&error, port, "does not speak HTTP/1"))?;
    // Dropped with the request or its answer: a client that goes away ends the connection into the sandbox.
    Ok(Line { sender, wire: Wire::Waiter(Box::pin(wire.with_upgrades())), machine })
}

/// Waiting for an answer, and for what ends the waiting.
struct Waiting<'a> {
    app: &'a App,
    id: &'a api::SandboxId,
    port: u16,
    hold: &'a dyn Hold,
    freezes: Option<&'a CancellationToken>,
    machine: &'a CancellationToken,
    activity: &'a Activity,
}

impl Waiting<'_> {
    async fn answered<T>(&self, answer: impl Future<Output = T>) -> Result<T, ApiError> {
        let Self { app, id, port, .. } = *self;
        let limit = app.edge().answer;
        tokio::select! {
            answered = answer => Ok(answered),
            () = self.machine.cancelled() => Err(machine_ended(port)),
            error = self.hold.stands_still() => Err(error),
            // Past the time in which requests hold it a box freezes under them (B9); nobody is held then (B19).
            () = frozen(app, id, self.freezes) => {
                Err(ApiError::new(Code::BoxFrozen, "the box was frozen before it had answered"))
            }
            () = self.activity.silence(limit) => Err(too_late(port, limit)),
        }
    }

    /// Sends what may be sent twice over a connection that was used before. `None`: that has ended.
    async fn repeatable(
        &self,
        mut line: Line,
        request: Request<Asking>,
    ) -> Result<Option<(Response<Incoming>, Line)>, ApiError> {
        let Line { sender, wire, .. } = &mut line;
        let sent = async {
            sender.ready().await?;
            sender.send_request(request).await
        };
        match self.answered(wire.carry_for(sent)).await? {
            Ok(response) => Ok(Some((response, line))),
            Err(error) => {
                tracing::debug!(
                    error = chain(&error),
                    "a connection had ended: sent again over a new one"
                );
                Ok(None)
            }
        }
    }
}

/// Waits until a box is frozen, which was not when `next` was taken; for ever without one.
async fn frozen(app: &App, id: &api::SandboxId, next: Option<&CancellationToken>) {
    let Some(next) = next else { return std::future::pending().await };
    let mut next = next.clone();
    loop {
        next.cancelled().await;
        // Before it is looked at, so that a rest meanwhile is not missed.
        next = app.machines().rest_of(id);
        let view = app.host().view(id).await;
        let status = view.ok().and_then(|known| known.boxed).map(|boxed| boxed.status);
        if status == Some(BoxStatus::Frozen) {
            return;
        }
    }
}

/// Whether nobody waits for the end of an answer (S2).
fn is_event_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.get(..EVENT_STREAM.len()).is_some_and(|start| start.eq_ignore_ascii_case(EVENT_STREAM))
}

/// What holds the sandbox awake while an event stream goes on: nothing (S2), or that it is open on a port of `awake_ports` (S4).
async fn standing(
    app: &App,
    id: &api::SandboxId,
    port: u16,
    caller: Caller,
) -> Result<Option<Box<dyn Hold>>, ApiError> {
    if app.host().connection_rules(id, port)?.keeps_awake {
        let hold = app.host().hold(id, HoldKind::AwakeConnection, caller).await?;
        return Ok(Some(hold.value));
    }
    Ok(None)
}

/// A connection to a port of a sandbox that may sleep. Waking has limits of its own.
pub(crate) async fn connect(
    app: &App,
    id: &api::SandboxId,
    port: u16,
    caller: Caller,
) -> Result<Answer<Connection>, ApiError> {
    let hold = app.host().hold(id, HoldKind::Request, caller.clone()).await?;
    let connection = reach(app, id, port, caller).await?;
    Ok(Answer { woke_ms: both(hold.woke_ms, connection.woke_ms), value: connection.value })
}

/// A connection to a port of a sandbox that is held awake, in time.
async fn reach(
    app: &App,
    id: &api::SandboxId,
    port: u16,
    caller: Caller,
) -> Result<Answer<Connection>, ApiError> {
    let connection = app.host().connect(id, port, caller);
    tokio::time::timeout(CONNECT_TIME_MAX, connection).await.unwrap_or_else(|_| {
        let seconds = CONNECT_TIME_MAX.as_secs();
        let text = format!("port {port} in the sandbox took no connection in {seconds} s");
        Err(ApiError::new(Code::Timeout, text).hint("look whether its programs are overloaded"))
    })
}

fn bad_answer(error: &hyper::Error, port: u16, what: &str) -> ApiError {
    tracing::debug!(error = chain(error), what, port, "a sandbox's server did not answer");
    let text = format!("what listens on port {port} in the sandbox {what}");
    ApiError::new(Code::BadAnswer, text).hint("look at the server's own log")
}

/// The client's fault, not the server's. Mostly nobody reads this: the client has gone.
fn broken_body(error: &hyper::Error) -> ApiError {
    tracing::debug!(error = chain(error), "a client's body broke off");
    ApiError::invalid("body", "the body broke off before its end")
}

fn machine_ended(port: u16) -> ApiError {
    let text =
        format!("the sandbox's machine ended before what listens on port {port} had answered");
    ApiError::new(Code::BadAnswer, text)
        .hint("it was restarted, rebooted, powered off or lost; its events say which")
}

fn too_late(port: u16, limit: Duration) -> ApiError {
    let text =
        format!("what listens on port {port} in the sandbox was silent for {} s", limit.as_secs());
    let error = ApiError::new(Code::Timeout, text).hint(
        "look at the server's own log; `dormouse serve --edge-answer-seconds` sets the limit",
    );
    // It may have done its work all the same: who asks again must know that it is harmless.
    ApiError { retryable: false, ..error }
}

pub(super) fn no_such_link() -> ApiError {
    ApiError::new(Code::NotFound, "nothing is here")
        .hint("`dormouse link NAME PORT` prints the URL of a sandbox's port, sandbox_status those of a box")
}
