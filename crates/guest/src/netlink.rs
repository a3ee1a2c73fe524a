//! The little of netlink that is needed: one card's link, addresses, routes, a neighbour, and cutting TCP connections.
//!
//! Numbers are the kernel's, from its `uapi` headers; they are part of its stable interface.

use std::{io, os::fd::OwnedFd};

use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, netlink,
};
use wire::{Ipv6Network, Network};

/// `NETLINK_ROUTE` is 0, the family's default.
const ROUTE: Option<Protocol> = None;

const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_NEWNEIGH: u16 = 28;
/// The older way to ask, which gives both families in one pass over the kernel's table whatever family is named.
const TCPDIAG_GETSOCK: u16 = 18;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;

const IFF_UP: u32 = 1;
pub(crate) const AF_INET: u8 = 2;
pub(crate) const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_SCOPE_LINK: u8 = 253;
const RTN_UNICAST: u8 = 1;
const NUD_PERMANENT: u16 = 0x80;
/// TCP states with somebody at the other end: all but listening (10), time-wait (6) and closed (7).
const CONNECTED: u32 = 0b1_1011_0011_1110;
/// All TCP states but closed (7).
const OPEN: u32 = 0b1_1111_0111_1110;
/// An address is used at once, without asking whether somebody else has it: nobody else is on the link.
const IFA_F_NODAD: u8 = 0x02;

/// Bytes received at a time; the kernel fills no more than 32 KiB into one answer.
const ANSWER_MAX: usize = 64 * 1024;
/// Messages taken of one answer: more TCP connections than a guest's memory holds.
const MESSAGES_MAX: usize = 1_000_000;

/// A network card.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Card(u32);

impl Card {
    /// Finds a card by name.
    pub(crate) fn find(name: &str) -> io::Result<Self> {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
        Ok(Self(rustix::net::netdevice::name_to_index(socket, name)?))
    }

    /// Switches it on.
    pub(crate) fn up(self) -> io::Result<()> {
        self.link(IFF_UP, None)
    }

    /// Switches it off, which also drops its routes, and takes its addresses away.
    pub(crate) fn down(self) -> io::Result<()> {
        self.link(0, None)?;
        self.drop_addresses(AF_INET)?;
        // The kernel has dropped them with the link, unless it was told to keep them.
        self.drop_addresses(AF_INET6)
    }

    fn drop_addresses(self, family: u8) -> io::Result<()> {
        let mut netlink = Netlink::open(ROUTE)?;
        for address in netlink.ask(RTM_GETADDR, NLM_F_DUMP, &[family, 0, 0, 0, 0, 0, 0, 0])? {
            let is_ours = address.len() >= 8 && address[4..8] == self.0.to_ne_bytes();
            // Those of the link itself (253) are the kernel's own, and go and come with it.
            if is_ours && (family == AF_INET || address[3] != RT_SCOPE_LINK) {
                netlink.ask(RTM_DELADDR, NLM_F_ACK, &address)?;
            }
        }
        Ok(())
    }

    /// Gives a card that is up its only IPv6 address, and routes.
    pub(crate) fn configure_ipv6(self, network: &Ipv6Network) -> io::Result<()> {
        self.drop_addresses(AF_INET6)?;
        let mut netlink = Netlink::open(ROUTE)?;
        let make = NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;
        let mut address = vec![AF_INET6, 128, IFA_F_NODAD, RT_SCOPE_UNIVERSE];
        address.extend(self.0.to_ne_bytes());
        attribute(&mut address, 2, &network.address);
        attribute(&mut address, 1, &network.address);
        netlink.ask(RTM_NEWADDR, make, &address)?;

        let mut neighbour = vec![AF_INET6, 0, 0, 0];
        neighbour.extend(self.0.to_ne_bytes());
        neighbour.extend(NUD_PERMANENT.to_ne_bytes());
        neighbour.extend([0, 0]);
        attribute(&mut neighbour, 1, &network.gateway);
        attribute(&mut neighbour, 2, &network.gateway_mac);
        netlink.ask(RTM_NEWNEIGH, make, &neighbour)?;

        let route = |prefix: u8| {
            let mut route = vec![AF_INET6, prefix, 0, 0];
            route.extend([RT_TABLE_MAIN, RTPROT_STATIC, RT_SCOPE_UNIVERSE, RTN_UNICAST]);
            route.extend([0, 0, 0, 0]);
            attribute(&mut route, 4, &self.0.to_ne_bytes());
            route
        };
        let mut gateway = route(128);
        attribute(&mut gateway, 1, &network.gateway);
        netlink.ask(RTM_NEWROUTE, make, &gateway)?;
        let mut default = route(0);
        attribute(&mut default, 5, &network.gateway);
        netlink.ask(RTM_NEWROUTE, make, &default)?;
        Ok(())
    }

    /// Gives a card that is down its hardware address, address and routes, and switches it on.
    pub(crate) fn configure(self, network: &Network) -> io::Result<()> {
        self.link(0, Some(network.mac))?;
        let mut netlink = Netlink::open(ROUTE)?;
        let make = NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;

        let mut address = vec![AF_INET, 32, 0, RT_SCOPE_UNIVERSE];
        address.extend(self.0.to_ne_bytes());
        attribute(&mut address, 2, &network.address);
        attribute(&mut address, 1, &network.address);
        netlink.ask(RTM_NEWADDR, make, &address)?;
        self.up()?;

        let route = |scope: u8, prefix: u8| {
            let mut route = vec![AF_INET, prefix, 0, 0];
            route.extend([RT_TABLE_MAIN, RTPROT_STATIC, scope, RTN_UNICAST, 0, 0, 0, 0]);
            attribute(&mut route, 4, &self.0.to_ne_bytes());
            attribute(&mut route, 7, &network.address);
            route
        };
        let mut gateway = route(RT_SCOPE_LINK, 32);
        attribute(&mut gateway, 1, &network.gateway);
        netlink.ask(RTM_NEWROUTE, make, &gateway)?;

        let mut neighbour = vec![AF_INET, 0, 0, 0];
        neighbour.extend(self.0.to_ne_bytes());
        neighbour.extend(NUD_PERMANENT.to_ne_bytes());
        neighbour.extend([0, 0]);
        attribute(&mut neighbour, 1, &network.gateway);
        attribute(&mut neighbour, 2, &network.gateway_mac);
        netlink.ask(RTM_NEWNEIGH, make, &neighbour)?;

        let mut default = route(RT_SCOPE_UNIVERSE, 0);
        attribute(&mut default, 5, &network.gateway);
        netlink.ask(RTM_NEWROUTE, make, &default)?;
        Ok(())
    }

    fn link(self, flags: u32, mac: Option<[u8; 6]>) -> io::Result<()> {
        let mut link = vec![0, 0, 0, 0];
        link.extend(self.0.to_ne_bytes());
        link.extend(flags.to_ne_bytes());
        link.extend(IFF_UP.to_ne_bytes());
        if let Some(mac) = mac {
            attribute(&mut link, 1, &mac);
        }
        Netlink::open(ROUTE)?.ask(RTM_NEWLINK, NLM_F_ACK, &link)?;
        Ok(())
    }
}

/// All TCP sockets but closed ones, each as an `inet_diag_msg` with its attributes.
///
/// # Errors
/// Also when the kernel has no `tcp_diag`.
pub(crate) fn tcp_sockets() -> io::Result<Vec<Vec<u8>>> {
    let mut every = vec![AF_INET, 0, 0, 0];
    every.extend([0; 48]);
    every.extend(OPEN.to_ne_bytes());
    every.extend([0; 4]);
    Netlink::open(Some(netlink::SOCK_DIAG))?.ask(TCPDIAG_GETSOCK, NLM_F_DUMP, &every)
}

/// The value of the first attribute of this kind.
pub(crate) fn attribute_of(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let head = attributes.first_chunk::<4>()?;
        let length = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let value = attributes.get(4..length)?;
        if u16::from_ne_bytes([head[2], head[3]]) == wanted {
            return Some(value);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

/// Cuts all TCP connections except those within the loopback. With the cards down their other ends hear nothing of it.
///
/// # Errors
/// Also when the kernel has no `tcp_diag` (a module of that name).
pub(crate) fn cut_connections() -> io::Result<()> {
    let mut netlink = Netlink::open(Some(netlink::SOCK_DIAG))?;
    for family in [AF_INET, AF_INET6] {
        let mut every = vec![family, IPPROTO_TCP, 0, 0];
        every.extend(CONNECTED.to_ne_bytes());
        every.extend([0; 48]);
        for socket in netlink.ask(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, &every)? {
            // Family, state, timer, retransmits, then the socket's id: ports, addresses, interface, cookie.
            let Some(id) = socket.get(4..52) else { continue };
            if is_loopback(socket[0], &id[4..20]) {
                continue;
            }
            let mut this = vec![socket[0], IPPROTO_TCP, 0, 0];
            this.extend(u32::MAX.to_ne_bytes());
            this.extend_from_slice(id);
            match netlink.ask(SOCK_DESTROY, NLM_F_ACK, &this) {
                // It ended by itself meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                result => drop(result?),
            }
        }
    }
    Ok(())
}

fn is_loopback(family: u8, address: &[u8]) -> bool {
    if family == AF_INET {
        return address[0] == 127;
    }
    let mut one = [0; 16];
    one[15] = 1;
    let mut mapped = [0; 13];
    mapped[10..].copy_from_slice(&[0xff, 0xff, 127]);
    address == one || address.starts_with(&mapped)
}

struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            protocol,
        )?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends a message and gives the bodies of what is answered. The kernel answers at once, so this does not wait.
    fn ask(&mut self, kind: u16, flags: u16, body: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        self.sequence += 1;
        let length = u32::try_from(16 + body.len()).map_err(io::Error::other)?;
        let mut message = Vec::with_capacity(16 + body.len());
        message.extend(length.to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend((flags | NLM_F_REQUEST).to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        message.extend([0; 4]);
        message.extend_from_slice(body);
        rustix::net::send(&self.socket, &message, SendFlags::empty())?;

        let mut answers = Vec::new();
        let mut buffer = vec![0; ANSWER_MAX];
        while answers.len() < MESSAGES_MAX {
            let (received, _) =
                rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            let mut rest = &buffer[..received];
            while let Some((header, _)) = rest.split_first_chunk::<16>() {
                let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]);
                let length = length as usize;
                let Some(body) = rest.get(16..length) else {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "short answer"));
                };
                let sequence = u32::from_ne_bytes([header[8], header[9], header[10], header[11]]);
                if sequence == self.sequence {
                    match u16::from_ne_bytes([header[4], header[5]]) {
                        NLMSG_DONE => return Ok(answers),
                        NLMSG_ERROR => return error(body).map(|()| answers),
                        _ => answers.push(body.to_vec()),
                    }
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "endless answer"))
    }
}

fn error(body: &[u8]) -> io::Result<()> {
    let Some(code) = body.first_chunk::<4>() else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "short answer"));
    };
    match i32::from_ne_bytes(*code) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(-code)),
    }
}

fn attribute(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    // Values here are addresses, of at most 16 bytes.
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend_from_slice(value);
    message.resize(message.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connected_states_are_all_but_listening_time_wait_and_closed() {
        let states: Vec<u32> = (1..=12).filter(|state| CONNECTED & (1 << state) != 0).collect();
        assert_eq!(states, [1, 2, 3, 4, 5, 8, 9, 11, 12]);
    }

    #[test]
    fn open_states_are_all_but_closed() {
        let states: Vec<u32> = (0..32).filter(|state| OPEN & (1 << state) != 0).collect();
        assert_eq!(states, [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]);
    }

    #[test]
    fn an_attribute_is_found_behind_others_and_none_in_noise() {
        let mut message = Vec::new();
        attribute(&mut message, 1, &[1, 2, 3, 4, 5, 6]);
        attribute(&mut message, 11, &[1]);
        assert_eq!(attribute_of(&message, 11), Some(&[1][..]));
        assert_eq!(attribute_of(&message, 2), None);
        for noise in [&[][..], &[0; 8], &[3, 0, 1, 0], &[255, 255, 11, 0, 1]] {
            assert_eq!(attribute_of(noise, 11), None, "{noise:?}");
        }
    }

    #[test]
    fn attributes_are_padded_to_four_bytes() {
        let mut message = Vec::new();
        attribute(&mut message, 1, &[1, 2, 3, 4, 5, 6]);
        assert_eq!(message, [10, 0, 1, 0, 1, 2, 3, 4, 5, 6, 0, 0]);
    }
}
