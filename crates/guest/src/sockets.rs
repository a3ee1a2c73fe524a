//! What is open on the network: listening ports and TCP connections, as the kernel tells them.
//!
//! TCP by `sock_diag`, which knows whether an IPv6 socket takes IPv4 too, and how much nobody has read yet; UDP from
//! `/proc/net`, since the kernel's module for asking the same of UDP is not in the guest.

use std::{
    collections::HashSet,
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use wire::{
    Connection, Listener, Sockets, Transport,
    sockets::{CONNECTIONS_MAX, LISTENERS_MAX},
};

use crate::netlink;

/// `TCP_ESTABLISHED`, `TCP_CLOSE_WAIT` and `TCP_LISTEN` of the kernel.
const ESTABLISHED: u8 = 1;
const CLOSE_WAIT: u8 = 8;
const LISTEN: u8 = 10;

/// Looks. Some hundred microseconds.
pub(crate) fn look(proc: &Path) -> io::Result<Sockets> {
    look_and_count(proc).map(|(sockets, _)| sockets)
}

/// As [`look`]; also how many connections to somewhere outside were opened from here: established ones on whose local port
/// nobody listens. Those on the guest's own IPv6 address do not count: while it sleeps the host answers their keepalive probes.
pub(crate) fn look_and_count(proc: &Path) -> io::Result<(Sockets, u32)> {
    let mut sockets = Sockets { whole: !rewrites(proc), ..Sockets::default() };
    let tcp = netlink::tcp_sockets()?;
    let tcp: Vec<_> = tcp.iter().filter_map(|message| TcpSocket::parse(message)).collect();
    for socket in &tcp {
        socket.note(&mut sockets);
    }
    for table in ["net/udp", "net/udp6"] {
        match fs::read_to_string(proc.join(table)) {
            Ok(text) => udp(&text, &mut sockets),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    if sockets.listeners.len() > LISTENERS_MAX || sockets.connections.len() > CONNECTIONS_MAX {
        sockets.whole = false;
        sockets.listeners.truncate(LISTENERS_MAX);
        sockets.connections.truncate(CONNECTIONS_MAX);
    }
    Ok((sockets, outbound_of(tcp.into_iter())))
}

fn outbound_of(sockets: impl Iterator<Item = TcpSocket>) -> u32 {
    let (listening, rest): (Vec<_>, Vec<_>) = sockets.partition(|socket| socket.state == LISTEN);
    let listening: HashSet<u16> = listening.iter().map(|socket| socket.local.port()).collect();
    let count = rest
        .iter()
        .filter(|socket| socket.state == ESTABLISHED && socket.local.is_ipv4())
        .filter(|socket| !socket.peer.ip().is_loopback())
        .filter(|socket| !listening.contains(&socket.local.port()))
        .count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Whether packets may go somewhere else than their addresses say: this guest forwards, or keeps track of connections, without
/// which the kernel rewrites none.
fn rewrites(proc: &Path) -> bool {
    let forwards = ["sys/net/ipv4/ip_forward", "sys/net/ipv6/conf/all/forwarding"]
        .iter()
        .any(|switch| fs::read_to_string(proc.join(switch)).is_ok_and(|text| text.trim() != "0"));
    forwards || proc.join("sys/net/netfilter/nf_conntrack_count").exists()
}

/// A socket as `inet_diag_msg` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TcpSocket {
    state: u8,
    local: SocketAddr,
    peer: SocketAddr,
    /// Bytes nobody has read; of a listening one, connections nobody has accepted.
    unread: u32,
    v6_only: bool,
}

impl TcpSocket {
    fn parse(message: &[u8]) -> Option<Self> {
        /// `INET_DIAG_SKV6ONLY`.
        const V6_ONLY: u16 = 11;
        let v6 = match *message.first()? {
            netlink::AF_INET => false,
            netlink::AF_INET6 => true,
            _ => return None,
        };
        let port = |at: usize| Some(u16::from_be_bytes(*message.get(at..)?.first_chunk()?));
        let address = |at: usize| {
            let bytes = message.get(at..)?;
            Some(if v6 {
                Ipv6Addr::from(*bytes.first_chunk::<16>()?).to_canonical()
            } else {
                IpAddr::from(*bytes.first_chunk::<4>()?)
            })
        };
        let unread = u32::from_ne_bytes(*message.get(56..)?.first_chunk()?);
        let v6_only = netlink::attribute_of(message.get(72..)?, V6_ONLY);
        Some(Self {
            state: message[1],
            local: SocketAddr::new(address(8)?, port(4)?),
            peer: SocketAddr::new(address(24)?, port(6)?),
            unread,
            v6_only: v6_only.is_some_and(|value| value.first() == Some(&1)),
        })
    }

    fn note(self, sockets: &mut Sockets) {
        if self.local.ip().is_loopback() || self.state == LISTEN && self.local.port() == 0 {
            return;
        }
        if self.state == LISTEN {
            sockets.unread |= self.unread > 0;
            sockets.listeners.push(Listener {
                transport: Transport::Tcp,
                address: self.local.ip(),
                port: self.local.port(),
                v6_only: self.v6_only,
            });
        } else if self.local.ip() != self.peer.ip() {
            sockets.unread |= self.unread > 0;
            let stands = matches!(self.state, ESTABLISHED | CLOSE_WAIT);
            sockets.connections.push(Connection { local: self.local, peer: self.peer, stands });
        }
    }
}

/// Notes the rows of `/proc/net/udp` or `udp6`.
fn udp(table: &str, sockets: &mut Sockets) {
    for line in table.lines().skip(1) {
        let mut words = line.split_ascii_whitespace().skip(1);
        let Some(local) = words.next().and_then(endpoint) else { continue };
        if local.ip().is_loopback() || local.port() == 0 {
            continue;
        }
        // Peer, state, then the two queues.
        let queues = words.nth(2).and_then(|queues| queues.split_once(':'));
        sockets.unread |= queues.is_some_and(|(_, unread)| unread.bytes().any(|byte| byte != b'0'));
        sockets.listeners.push(Listener {
            transport: Transport::Udp,
            address: local.ip(),
            port: local.port(),
            // Not told there: it may take IPv4 as well.
            v6_only: false,
        });
    }
}

/// An address and port as the kernel prints them: hexadecimal, each 32 bits of the address in the machine's order.
fn endpoint(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let word = |at: usize| {
        let word = address.get(at * 8..at * 8 + 8)?;
        Some(u32::from_str_radix(word, 16).ok()?.to_ne_bytes())
    };
    let address = match address.len() {
        8 => IpAddr::from(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (at, four) in bytes.chunks_exact_mut(4).enumerate() {
                four.copy_from_slice(&word(at)?);
            }
            Ipv6Addr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(address, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel tells of a socket, with the attribute that only listening IPv6 sockets have.
    fn message(state: u8, local: SocketAddr, peer: SocketAddr, unread: u32) -> Vec<u8> {
        let mut bytes = vec![0; 72];
        bytes[0] = if local.is_ipv4() { netlink::AF_INET } else { netlink::AF_INET6 };
        bytes[1] = state;
        for (port, address, end) in [(4, 8, local), (6, 24, peer)] {
            bytes[port..port + 2].copy_from_slice(&end.port().to_be_bytes());
            match end.ip() {
                IpAddr::V4(ip) => bytes[address..address + 4].copy_from_slice(&ip.octets()),
                IpAddr::V6(ip) => bytes[address..address + 16].copy_from_slice(&ip.octets()),
            }
        }
        bytes[56..60].copy_from_slice(&unread.to_ne_bytes());
        if state == LISTEN && local.is_ipv6() {
            bytes.extend([5, 0, 11, 0, 1, 0, 0, 0]);
        }
        bytes
    }

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn s08_what_only_the_guest_itself_reaches_is_not_told() {
        let mut sockets = Sockets::default();
        for (state, local, peer) in [
            (LISTEN, "0.0.0.0:8000", "0.0.0.0:0"),
            (LISTEN, "127.0.0.1:9000", "0.0.0.0:0"),
            (LISTEN, "[::]:8001", "[::]:0"),
            (LISTEN, "[::1]:9001", "[::]:0"),
            (ESTABLISHED, "10.0.0.2:8000", "10.0.0.1:40000"),
            (ESTABLISHED, "127.0.0.1:8000", "127.0.0.1:40000"),
            (ESTABLISHED, "10.0.0.2:8000", "10.0.0.2:40000"),
            (CLOSE_WAIT, "[::ffff:10.0.0.2]:8001", "[::ffff:10.0.0.1]:40001"),
            (6, "[fd00::2]:8001", "[fd00::1]:40002"),
        ] {
            TcpSocket::parse(&message(state, at(local), at(peer), 0)).unwrap().note(&mut sockets);
        }
        let listening: Vec<_> =
            sockets.listeners.iter().map(|one| (one.address, one.port, one.v6_only)).collect();
        assert_eq!(
            listening,
            [(at("0.0.0.0:0").ip(), 8000, false), (at("[::]:0").ip(), 8001, true)]
        );
        let connections = sockets.connections.iter().map(|one| (one.local, one.stands));
        let connections: Vec<_> = connections.collect();
        assert_eq!(
            connections,
            [
                (at("10.0.0.2:8000"), true),
                (at("10.0.0.2:8001"), true),
                (at("[fd00::2]:8001"), false)
            ]
        );
        assert!(!sockets.unread);
        let waits = message(LISTEN, at("0.0.0.0:8000"), at("0.0.0.0:0"), 1);
        TcpSocket::parse(&waits).unwrap().note(&mut sockets);
        assert!(sockets.unread, "a connection that nobody has accepted");
        for cut in 0..waits.len() {
            assert_eq!(TcpSocket::parse(&waits[..cut]), None, "{cut} bytes");
        }
    }

    #[test]
    fn s02_outbound_connections_are_those_opened_from_here_to_outside() {
        let sockets = [
            (LISTEN, "0.0.0.0:8080", "0.0.0.0:0", false),
            (ESTABLISHED, "10.0.0.2:8080", "10.0.0.1:49152", false),
            (ESTABLISHED, "10.0.0.2:54321", "10.0.0.1:443", true),
            (ESTABLISHED, "127.0.0.1:54322", "127.0.0.1:8080", false),
            (6, "10.0.0.2:54323", "10.0.0.1:443", false),
            (ESTABLISHED, "[::1]:212", "[::1]:80", false),
            (ESTABLISHED, "[::ffff:10.0.0.2]:213", "[::ffff:10.0.0.1]:80", true),
            (ESTABLISHED, "[::ffff:127.0.0.1]:214", "[::ffff:127.0.0.1]:80", false),
            (ESTABLISHED, "[fd00::2]:215", "[fd00::1]:80", false),
        ];
        let parsed = |(state, local, peer, _): &(u8, &str, &str, bool)| {
            TcpSocket::parse(&message(*state, at(local), at(peer), 0)).unwrap()
        };
        for socket in sockets.iter().filter(|socket| socket.0 != LISTEN) {
            let alone = [parsed(&sockets[0]), parsed(socket)];
            assert_eq!(outbound_of(alone.into_iter()), u32::from(socket.3), "{socket:?}");
        }
        assert_eq!(outbound_of(sockets.iter().map(parsed)), 2);
    }

    #[test]
    fn s08_udp_is_read_from_the_kernels_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when
  100: 0200000A:0035 00000000:0000 07 00000000:00000000 00:00000000
  101: 0100007F:0036 00000000:0000 07 00000000:00000000 00:00000000
  102: 00000000000000000000000000000000:0037 00000000000000000000000000000000:0000 07 00000000:00000000 00:0
  103: what";
        let mut sockets = Sockets::default();
        udp(table, &mut sockets);
        let listening: Vec<_> =
            sockets.listeners.iter().map(|one| (one.address, one.port)).collect();
        assert_eq!(listening, [(at("10.0.0.2:0").ip(), 53), (at("[::]:0").ip(), 55)]);
        assert!(!sockets.unread);
        udp(&table.replace("00000000:00000000", "00000000:00000240"), &mut sockets);
        assert!(sockets.unread, "a datagram that nobody has read");
    }

    #[test]
    fn s08_this_machine_tells_its_own_sockets() {
        let v4 = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
        let v6 = std::net::TcpListener::bind("[::]:0").unwrap();
        let sockets = look(Path::new("/proc")).unwrap();
        for listener in [v4, v6] {
            let address = listener.local_addr().unwrap();
            let found = sockets.listeners.iter().find(|one| one.port == address.port()).unwrap();
            assert_eq!((found.transport, found.address), (Transport::Tcp, address.ip()));
        }
    }
}
