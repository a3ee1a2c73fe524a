//! Links to other boxes: bytes both ways, which are use of the box at the other end and hold it while this one is awake (B3, B10).

use api::SandboxId;
use lifecycle::{Call, CallKind};
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;

use crate::Daemon;

/// Serves one connection from a box to a port of another.
pub(super) async fn serve(
    daemon: &Daemon,
    from: &SandboxId,
    to: &SandboxId,
    port: u16,
    mut stream: TcpStream,
) {
    let held = async {
        let call = Call::to_port(CallKind::Link, port);
        let ready = daemon.handle(to)?.call(call, format!("a link from the box {from}")).await?;
        let connection = daemon.reach(&ready, port).await?;
        Ok::<_, api::ApiError>((ready, connection))
    };
    let (_ready, mut connection) = match held.await {
        Ok(held) => held,
        Err(error) => return tracing::debug!(%from, %to, port, %error, "a link is closed"),
    };
    if let Err(error) = copy_bidirectional(&mut stream, &mut connection).await {
        tracing::debug!(%from, %to, port, %error, "a link broke");
    }
}
