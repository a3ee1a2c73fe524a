//! One request to a sandbox's port: held while it wakes, passed on, streamed back.
//!
//! Each request has a connection of its own. A pool would save a handshake over the tap, but a pooled connection can die
//! in the moment it is used, and a request that was half sent may not be sent again.

use std::pin::Pin;
use std::task::{Context, Poll};

use api::host::{Caller, Hold};
use api::{ApiError, Code};
use axum::body::Body;
use axum::http::{Method, Request, Response, StatusCode, Uri, Version};
use axum::response::IntoResponse;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::task::AbortHandle;

use super::headers::{Outside, forward, pass, upgrade};
use super::{Address, find};
use crate::App;
use crate::answer::{add_wake, both};
use crate::failure::{Failure, chain};
use crate::server::Peer;

/// Most bytes of an answer's head from a sandbox.
const ANSWER_HEAD_BYTES_MAX: usize = 256 * 1024;
/// Most headers of an answer from a sandbox.
const ANSWER_HEADERS_MAX: usize = 200;

/// Serves one request below `box.<domain>`.
pub(crate) async fn handle(
    app: &App,
    address: Address,
    request: Request<Incoming>,
    peer: Peer,
) -> Response<Body> {
    let Some((label, entry)) =
        address.label.as_ref().and_then(|label| Some((label, find(app, label)?)))
    else {
        return Failure::from(no_such_link()).into_response();
    };
    let peer = match peer {
        Peer::Tcp(peer) => Some(peer),
        Peer::Local => None,
    };
    let caller = Caller { what: format!("request through the link to port {}", label.port), peer };
    let outside = Outside { host: &address.written, scheme: app.links().scheme(), peer };
    match pass_on(app, &entry.id, label.port, caller, request, &outside).await {
        Ok(response) => response,
        Err(error) => Failure::from(error).into_response(),
    }
}

async fn pass_on(
    app: &App,
    id: &api::SandboxId,
    port: u16,
    caller: Caller,
    mut request: Request<Incoming>,
    outside: &Outside<'_>,
) -> Result<Response<Body>, ApiError> {
    if request.method() == Method::CONNECT {
        return Err(ApiError::new(Code::MethodNotAllowed, "a link is no proxy"));
    }
    let hold = app.host().hold(id, caller.clone()).await?;
    let connection = app.host().connect(id, port, caller).await?;
    let woke_ms = both(hold.woke_ms, connection.woke_ms);

    let wish = upgrade(request.headers());
    let client = wish.is_some().then(|| hyper::upgrade::on(&mut request));
    pass(request.headers_mut(), wish);
    forward(request.headers_mut(), port, outside);
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() =
        path.parse::<Uri>().map_err(|_| ApiError::invalid("path", "not a path"))?;
    *request.version_mut() = Version::HTTP_11;

    let bad_answer = |what: &'static str| {
        move |error: hyper::Error| {
            tracing::debug!(error = chain(&error), what, port, "a sandbox's server did not answer");
            let text = format!("what listens on port {port} in the sandbox {what}");
            ApiError::new(Code::BadAnswer, text).hint("look at the server's own log")
        }
    };
    let (mut sender, wire) = http1::Builder::new()
        .max_buf_size(ANSWER_HEAD_BYTES_MAX)
        .max_headers(ANSWER_HEADERS_MAX)
        .handshake(TokioIo::new(connection.value.stream))
        .await
        .map_err(bad_answer("does not speak HTTP/1"))?;
    // Dropped with the request or its answer: a client that goes away ends the connection into the sandbox.
    let wire = AbortOnDrop(tokio::spawn(wire.with_upgrades()).abort_handle());
    let mut response = sender
        .send_request(request)
        .await
        .map_err(bad_answer("broke off before it had answered"))?;

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
            // Open and silent it keeps nothing awake: its packets do.
            drop(hold);
            let stop = app.stop().clone();
            tokio::spawn(async move {
                let _wire = wire;
                tokio::select! {
                    () = copy(client, server) => {}
                    () = stop.cancelled() => {}
                }
            });
            Ok(response.map(|_| Body::empty()))
        }
        (None, Some(_)) => Err(ApiError::new(
            Code::BadAnswer,
            "the server changed the protocol without being asked",
        )),
        (_, None) => {
            Ok(response.map(|body| Body::new(Answering { body, _hold: hold.value, _wire: wire })))
        }
    }
}

/// Copies bytes both ways until both sides have ended.
async fn copy(client: hyper::upgrade::OnUpgrade, server: hyper::upgrade::OnUpgrade) {
    let (client, server) = match tokio::try_join!(client, server) {
        Ok(both) => both,
        Err(error) => {
            return tracing::debug!(error = chain(&error), "an upgrade was not completed");
        }
    };
    let (mut client, mut server) = (TokioIo::new(client), TokioIo::new(server));
    match tokio::io::copy_bidirectional(&mut client, &mut server).await {
        Ok((up, down)) => tracing::debug!(up, down, "an upgraded connection ended"),
        Err(error) => tracing::debug!(error = %error, "an upgraded connection broke"),
    }
}

fn no_such_link() -> ApiError {
    ApiError::new(Code::NotFound, "nothing is here")
        .hint("`dormouse link NAME PORT` prints the URL of a port")
}

/// An answer on its way: while it lives, the sandbox is held awake.
struct Answering {
    body: Incoming,
    _hold: Box<dyn Hold>,
    _wire: AbortOnDrop,
}

impl HttpBody for Answering {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
