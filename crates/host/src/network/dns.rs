//! The guests' name server: hands each question on to the host's own resolvers and the answer back.
//!
//! Guests cannot use the host's resolver directly, because it often lies at a private or loopback address, which guests
//! must not reach. Questions are handed on as they are, so every record type works; what comes back is believed only
//! from the resolver asked, on a socket of the question's own.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Questions of all guests that may wait for an answer at a time; more are dropped, and guests ask again.
const WAITING_MAX: usize = 256;

/// How long a resolver is waited for before the next is asked.
const ANSWER_WAIT: Duration = Duration::from_secs(3);

/// How long a connection over TCP may last.
const TCP_LIFE: Duration = Duration::from_secs(30);

/// The largest answer over UDP (EDNS allows no more than this).
const DATAGRAM_MAX: usize = 65_535;

/// A running name server; ends when dropped.
#[derive(Debug)]
pub struct Dns {
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Drop for Dns {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Dns {
    /// Listens on port 53 of this address.
    pub async fn start(address: Ipv4Addr) -> io::Result<Self> {
        let udp = Arc::new(UdpSocket::bind((address, 53)).await?);
        let tcp = TcpListener::bind((address, 53)).await?;
        let room = Arc::new(Semaphore::new(WAITING_MAX));
        let tasks = vec![
            tokio::spawn(serve_udp(udp, Arc::clone(&room))),
            tokio::spawn(serve_tcp(tcp, room)),
        ];
        Ok(Self { tasks })
    }
}

async fn serve_udp(socket: Arc<UdpSocket>, room: Arc<Semaphore>) {
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        let (length, guest) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::warn!(%error, "name server: receive");
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&room).try_acquire_owned() else { continue };
        let (socket, question) = (Arc::clone(&socket), buffer[..length].to_vec());
        tokio::spawn(async move {
            if let Some(answer) = ask(&question).await
                && let Err(error) = socket.send_to(&answer, guest).await
            {
                tracing::debug!(%error, %guest, "name server: answer not sent");
            }
            drop(permit);
        });
    }
}

/// Asks one resolver after the other.
async fn ask(question: &[u8]) -> Option<Vec<u8>> {
    for resolver in resolvers() {
        match timeout(ANSWER_WAIT, ask_one(question, resolver)).await {
            Ok(Ok(answer)) => return Some(answer),
            Ok(Err(error)) => tracing::debug!(%error, %resolver, "name server: resolver failed"),
            Err(_) => tracing::debug!(%resolver, "name server: resolver silent"),
        }
    }
    None
}

async fn ask_one(question: &[u8], resolver: SocketAddr) -> io::Result<Vec<u8>> {
    let any: IpAddr = if resolver.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        std::net::Ipv6Addr::UNSPECIFIED.into()
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(resolver).await?;
    socket.send(question).await?;
    let mut answer = vec![0; DATAGRAM_MAX];
    loop {
        let length = socket.recv(&mut answer).await?;
        // Same question number: not a late answer to something else.
        if length >= 2 && answer[..2] == question[..2.min(question.len())] {
            answer.truncate(length);
            return Ok(answer);
        }
    }
}

async fn serve_tcp(listener: TcpListener, room: Arc<Semaphore>) {
    loop {
        let mut guest = match listener.accept().await {
            Ok((guest, _)) => guest,
            Err(error) => {
                tracing::warn!(%error, "name server: accept");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&room).try_acquire_owned() else { continue };
        tokio::spawn(async move {
            let relay = async {
                for resolver in resolvers() {
                    if let Ok(Ok(mut upstream)) =
                        timeout(ANSWER_WAIT, TcpStream::connect(resolver)).await
                    {
                        return copy_bidirectional(&mut guest, &mut upstream).await.map(drop);
                    }
                }
                Ok(())
            };
            if !matches!(timeout(TCP_LIFE, relay).await, Ok(Ok(()))) {
                tracing::debug!("name server: connection cut");
            }
            drop(permit);
        });
    }
}

/// The host's resolvers, read anew each time: they change when a host moves between networks.
fn resolvers() -> Vec<SocketAddr> {
    let text = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    parse_resolvers(&text)
}

fn parse_resolvers(text: &str) -> Vec<SocketAddr> {
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("nameserver"))
        .filter_map(|rest| rest.trim().parse::<IpAddr>().ok())
        .map(|address| SocketAddr::new(address, 53))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolvers_are_read_as_the_host_reads_them() {
        let text = "# c\nsearch x\nnameserver 127.0.0.53\nnameserver  ::1\nnameserver fe80::1%eth0\noptions edns0\n";
        assert_eq!(
            parse_resolvers(text),
            ["127.0.0.53:53".parse().expect("v4"), "[::1]:53".parse().expect("v6")]
        );
    }
}
