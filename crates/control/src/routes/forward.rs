//! A connection of bytes to a port of a sandbox, through the interface: for what does not speak HTTP.

use api::host::Caller;
use api::{ApiError, Code};
use axum::extract::{Request, State};
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use hyper_util::rt::TokioIo;

use super::upgrade_required;
use crate::App;
use crate::answer::add_wake;
use crate::edge::{Conversation, connect};
use crate::failure::{Failure, chain};
use crate::input::{At, Port};
use crate::server::Peer;

/// The protocol that the connection changes to: bytes as they are, each side ended for itself.
const PROTOCOL: &str = "tcp";

/// Connect to a port
///
/// With `Connection: Upgrade` and `Upgrade: tcp` the connection becomes one to a TCP port of the sandbox, on its address or on
/// its loopback: bytes as they are. Connecting wakes it, as what the client sends does later; open and silent it keeps nothing
/// awake, except on a port of `awake_ports`.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/forward/{port}", tag = "sandboxes", operation_id = "forward_port",
    params(
        ("id" = String, Path, description = "Id or name", example = "web"),
        ("port" = u16, Path, description = "Port in the sandbox", example = 5432),
        ("Upgrade" = Option<String>, Header, description = "`tcp`; without it the answer is 426", example = "tcp"),
    ),
    responses((status = 101, description = "From here on the bytes are the port's")),
)]
pub(crate) async fn forward(
    State(app): State<App>,
    At(entry): At,
    Port(port): Port,
    mut request: Request,
) -> Result<Response, Failure> {
    if !wants(request.headers()) {
        let text = "this path is a connection, not a document";
        let error = ApiError::new(Code::UpgradeRequired, text)
            .hint("`Connection: Upgrade` and `Upgrade: tcp`, or `dormouse forward`");
        return Ok(upgrade_required(PROTOCOL, error));
    }
    let peer = match request.extensions().get::<Peer>() {
        Some(Peer::Tcp(peer)) => Some(*peer),
        Some(Peer::Local) | None => None,
    };
    let caller = Caller { what: format!("connection forwarded to port {port}"), peer };
    let connection = connect(&app, &entry.id, port, caller.clone()).await?;
    let machine = app.machines().end_of(&entry.id);
    let conversation = Conversation::begin(&app, &entry.id, port, caller, machine, true).await?;
    let client = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        match client.await {
            Ok(client) => conversation.copy(TokioIo::new(client), connection.value.stream).await,
            Err(error) => tracing::debug!(error = chain(&error), "an upgrade was not completed"),
        }
    });
    let headers = [
        (CONNECTION, HeaderValue::from_static("upgrade")),
        (UPGRADE, HeaderValue::from_static(PROTOCOL)),
    ];
    let mut response = (StatusCode::SWITCHING_PROTOCOLS, headers).into_response();
    add_wake(response.headers_mut(), connection.woke_ms);
    Ok(response)
}

fn wants(headers: &HeaderMap) -> bool {
    crate::edge::upgrade(headers)
        .is_some_and(|protocol| protocol.as_bytes().eq_ignore_ascii_case(PROTOCOL.as_bytes()))
}
