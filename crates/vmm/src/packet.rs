//! What a frame for a sleeping machine means. Pure; the frames come from anybody on the network.

use std::net::IpAddr;

/// What to do about a frame that was read from the tap of a sleeping machine, that is one sent *to* the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It matters to the guest: wake it and put the frame back ([`crate::tap::Injector`]).
    Wake(Wake),
    /// A bare TCP segment (only ACK set, at most one byte): a keepalive probe, or an acknowledgement or window update. Neither
    /// wakes; a probe is to be answered for the guest.
    KeepaliveProbe(Probe),
    /// A ping, to be answered for the guest.
    EchoRequest {
        /// Who asks.
        peer: IpAddr,
    },
    /// Somebody asks for the guest's link address. With the permanent neighbour entry nobody needs to.
    ArpRequest,
    /// Nothing that matters.
    Ignore(Ignored),
}

/// What would wake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// A new connection.
    TcpSyn {
        /// The guest's port.
        port: u16,
        /// Who.
        peer: IpAddr,
    },
    /// Data on a connection, or its end (FIN, RST).
    TcpData {
        /// The guest's port.
        port: u16,
        /// Who.
        peer: IpAddr,
    },
    /// A datagram.
    Udp {
        /// The guest's port.
        port: u16,
        /// Who.
        peer: IpAddr,
    },
    /// Another protocol, or a part of a packet without the head that would tell.
    Other {
        /// The number in the IP header.
        protocol: u8,
        /// Who.
        peer: IpAddr,
    },
}

/// A bare TCP segment, with what an answer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    /// Who.
    pub peer: IpAddr,
    /// Its port.
    pub peer_port: u16,
    /// The guest's port.
    pub port: u16,
    /// Its sequence number. A probe has the guest's last acknowledgement less one.
    pub sequence: u32,
    /// Its acknowledgement number.
    pub acknowledgement: u32,
    /// Its timestamp value, if it has the option; the answer echoes it.
    pub timestamp: Option<u32>,
    /// Bytes of payload, 0 or 1.
    pub payload: u8,
}

/// Why a frame does not matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ignored {
    /// Link multicast or broadcast, or an IP group.
    Group,
    /// Neither IPv4, IPv6 nor an ARP request.
    Protocol,
    /// Neighbour discovery or group membership.
    Housekeeping,
    /// Cut short, or lengths that contradict each other: the guest would drop it.
    Malformed,
}

/// Judges an Ethernet frame (without virtio header).
pub fn classify(frame: &[u8]) -> Verdict {
    let _ = frame;
    unimplemented!()
}
