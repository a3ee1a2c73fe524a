//! One daemon per subnet: two on one would answer for each other's guests and take each other's taps away.
//!
//! Held by an abstract socket's name, which is of this network namespace, as the addresses are, and ends with the process.

use std::io;
use std::net::Ipv4Addr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use super::Subnet;

/// How long a daemon that starts waits for one that is ending.
const WAIT: Duration = Duration::from_secs(3);

/// Time between two tries.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Another daemon has it.
#[derive(Debug, thiserror::Error)]
#[error(
    "another daemon{} uses the guests' addresses around {gateway} already; choose another subnet with `--subnet` \
     (`DORMOUSE_SUBNET`), such as `--subnet {other}`",
    by(*pid)
)]
pub struct SubnetTaken {
    /// The gateway's address in the subnet.
    gateway: Ipv4Addr,
    /// A subnet beside it.
    other: Ipv4Addr,
    /// Which process.
    pid: Option<i32>,
}

/// Holds a subnet while it lives.
#[derive(Debug)]
pub(crate) struct SubnetHold(#[expect(dead_code, reason = "held, not used")] UnixListener);

impl SubnetHold {
    /// Takes it, or says who has it.
    pub(crate) async fn take(subnet: Subnet) -> Result<Self, SubnetTaken> {
        let gateway = subnet.gateway();
        let begun = Instant::now();
        loop {
            match listen(gateway) {
                Ok(listener) => return Ok(Self(listener)),
                Err(_) if begun.elapsed() < WAIT => tokio::time::sleep(LOOK_EVERY).await,
                Err(error) => {
                    tracing::error!(%error, %gateway, "the subnet is not free");
                    let [a, b, _, _] = gateway.octets();
                    let other = Ipv4Addr::new(a, if b == u8::MAX { b - 1 } else { b + 1 }, 0, 0);
                    return Err(SubnetTaken { gateway, other, pid: holder(gateway) });
                }
            }
        }
    }
}

fn address(gateway: Ipv4Addr) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("dormouse/{gateway}"))
}

fn listen(gateway: Ipv4Addr) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&address(gateway)?)
}

/// Who listens there.
fn holder(gateway: Ipv4Addr) -> Option<i32> {
    let stream = UnixStream::connect_addr(&address(gateway).ok()?).ok()?;
    let who = rustix::net::sockopt::socket_peercred(&stream).ok()?;
    Some(who.pid.as_raw_nonzero().get())
}

fn by(pid: Option<i32>) -> String {
    pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_subnet_has_one_daemon() {
        // No daemon has this one: it belongs to documentation.
        let subnet = Subnet::new(Ipv4Addr::new(198, 51, 0, 0));
        let first = SubnetHold::take(subnet).await.unwrap();
        let text = SubnetHold::take(subnet).await.unwrap_err().to_string();
        let want = format!("another daemon (process {}) uses", std::process::id());
        assert!(text.starts_with(&want), "{text}");
        assert!(text.contains("198.51.0.1") && text.contains("--subnet 198.52.0.0"), "{text}");
        drop(first);
        SubnetHold::take(subnet).await.unwrap();
    }
}
