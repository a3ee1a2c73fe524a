//! The guests' name server: answers a box's questions for its own names, and hands each question on to the host's own resolvers and the answer back.
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

use crate::services::Services;

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
    pub(crate) async fn start(address: Ipv4Addr, services: Arc<Services>) -> io::Result<Self> {
        let udp = Arc::new(UdpSocket::bind((address, 53)).await?);
        let tcp = TcpListener::bind((address, 53)).await?;
        let room = Arc::new(Semaphore::new(WAITING_MAX));
        let tasks = vec![
            tokio::spawn(serve_udp(udp, Arc::clone(&room), services)),
            tokio::spawn(serve_tcp(tcp, room)),
        ];
        Ok(Self { tasks })
    }
}

async fn serve_udp(socket: Arc<UdpSocket>, room: Arc<Semaphore>, services: Arc<Services>) {
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        let (length, guest) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::warn!(%error, "name server: receive");
                continue;
            }
        };
        if let Some(answer) = own_name(&services, guest, &buffer[..length]) {
            if let Err(error) = socket.send_to(&answer, guest).await {
                tracing::debug!(%error, %guest, "name server: answer not sent");
            }
            continue;
        }
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

/// The answer to a question for one of the names of the box that asks (T6); `None`: it is for another name.
fn own_name(services: &Services, guest: SocketAddr, question: &[u8]) -> Option<Vec<u8>> {
    let IpAddr::V4(guest) = guest.ip() else { return None };
    let asked = Question::read(question)?;
    let address = services.address_of(guest, &asked.name)?;
    let is_a = asked.kind == TYPE_A;
    // The question as it was asked, as an authoritative answer (RFC 1035, 4.1).
    let mut answer = question[..asked.end].to_vec();
    answer[2] = 0x84 | (question[2] & 0x01);
    answer[3] = 0x80;
    answer[6..12].copy_from_slice(&[0, u8::from(is_a), 0, 0, 0, 0]);
    if is_a {
        // The name is that at the beginning of the question.
        answer.extend([0xc0, 12]);
        answer.extend(TYPE_A.to_be_bytes());
        answer.extend(CLASS_IN.to_be_bytes());
        answer.extend(OWN_TTL_SECONDS.to_be_bytes());
        answer.extend(4_u16.to_be_bytes());
        answer.extend(address.octets());
    }
    Some(answer)
}

/// How long a box's programs may remember its own names: not long, since they may be wired anew.
const OWN_TTL_SECONDS: u32 = 5;
const TYPE_A: u16 = 1;
const CLASS_IN: u16 = 1;
/// Bytes of a message's head (RFC 1035, 4.1.1).
const HEAD_BYTES: usize = 12;

/// The one question of a message.
#[derive(Debug, PartialEq, Eq)]
struct Question {
    /// In lower case, without the dot at the end.
    name: String,
    kind: u16,
    /// Where it ends in the message.
    end: usize,
}

impl Question {
    /// `None`: no plain question for one name.
    fn read(message: &[u8]) -> Option<Self> {
        let head = message.get(..HEAD_BYTES)?;
        let is_query = head[2] & 0xf8 == 0 && head[4..6] == [0, 1];
        if !is_query {
            return None;
        }
        let mut labels = Vec::new();
        let mut at = HEAD_BYTES;
        loop {
            let length = usize::from(*message.get(at)?);
            at += 1;
            match length {
                0 => break,
                // Questions are not compressed.
                1..=63 => labels.push(message.get(at..at + length)?.to_ascii_lowercase()),
                _ => return None,
            }
            at += length;
        }
        let kind = u16::from_be_bytes(*message.get(at..)?.first_chunk()?);
        let class = u16::from_be_bytes(*message.get(at + 2..)?.first_chunk()?);
        let name = String::from_utf8(labels.join(&b'.')).ok()?;
        (class == CLASS_IN).then_some(Self { name, kind, end: at + 4 })
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

    fn question(name: &str, kind: u16) -> Vec<u8> {
        let mut message = vec![0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1];
        for label in name.split('.') {
            message.push(u8::try_from(label.len()).expect("short"));
            message.extend(label.as_bytes());
        }
        message.push(0);
        message.extend(kind.to_be_bytes());
        message.extend(CLASS_IN.to_be_bytes());
        message
    }

    #[test]
    fn t06_a_question_is_read_in_any_case_and_noise_is_none() {
        let asked = question("API.Shop.internal", 28);
        let read = Question::read(&asked).expect("a question");
        assert_eq!(
            (read.name.as_str(), read.kind, read.end),
            ("api.shop.internal", 28, asked.len())
        );
        for cut in 0..asked.len() {
            assert_eq!(Question::read(&asked[..cut]), None, "{cut} bytes");
        }
        let mut answer = asked.clone();
        answer[2] |= 0x80;
        assert_eq!(Question::read(&answer), None, "an answer");
        let mut pointer = asked;
        pointer[HEAD_BYTES] = 0xc0;
        assert_eq!(Question::read(&pointer), None, "a compressed name");
    }

    #[test]
    fn resolvers_are_read_as_the_host_reads_them() {
        let text = "# c\nsearch x\nnameserver 127.0.0.53\nnameserver  ::1\nnameserver fe80::1%eth0\noptions edns0\n";
        assert_eq!(
            parse_resolvers(text),
            ["127.0.0.53:53".parse().expect("v4"), "[::1]:53".parse().expect("v6")]
        );
    }
}
