//! A way to a port of a guest: over the network, or over its link to what listens on its loopback alone.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use api::host::Duplex;
use api::{ApiError, Code};
use tokio::net::TcpStream;

use crate::daemon::Daemon;
use crate::exec::guest_error;
use crate::guest::{FailureCode, GuestError};
use crate::loopback::Loopback;
use crate::sandbox::Ready;

/// How long a connection to a guest's port may take to be answered at all.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Pause before a refused port is tried for the second time, which doubles from then on.
const PORT_RETRY_FIRST: Duration = Duration::from_millis(25);
/// Longest pause between two tries: a guest that is busy enough as it is has other things to do than to refuse.
const PORT_RETRY_PAUSE_MAX: Duration = Duration::from_millis(200);

impl Daemon {
    /// A connection to a port of a guest that is awake. A refused port is tried again for a while after a wake or start.
    pub(crate) async fn reach(
        &self,
        ready: &Ready,
        port: u16,
    ) -> Result<Box<dyn Duplex>, ApiError> {
        let patience = self.ground.settings.port_retry.saturating_sub(ready.awake_since.elapsed());
        connect(ready, port, patience).await
    }
}

/// Connects over the network, else to the guest's loopback, and again while that may help.
async fn connect(
    ready: &Ready,
    port: u16,
    patience: Duration,
) -> Result<Box<dyn Duplex>, ApiError> {
    let address = SocketAddr::from((ready.address, port));
    let begun = Instant::now();
    let mut pause = PORT_RETRY_FIRST;
    loop {
        match tokio::time::timeout(CONNECT_LIMIT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "no delay not set");
                }
                return Ok(Box::new(stream));
            }
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Ok(Err(error)) => {
                tracing::debug!(%address, %error, "port not reached over the network");
            }
            Err(_) => tracing::debug!(%address, "port did not answer over the network"),
        }
        match ready.link.connect_port(port).await {
            Ok(stream) => return Ok(Box::new(Loopback::new(stream, ready.guard.flow()))),
            Err(GuestError::Failed(failure)) if failure.code == FailureCode::Refused => {}
            Err(error) => return Err(guest_error(error)),
        }
        if begun.elapsed() >= patience {
            let error = ApiError::new(
                Code::PortClosed,
                format!("nothing listens on port {port} in the sandbox"),
            );
            return Err(
                error.hint("start the server first; it may listen on any address, 127.0.0.1 too")
            );
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PORT_RETRY_PAUSE_MAX);
    }
}
