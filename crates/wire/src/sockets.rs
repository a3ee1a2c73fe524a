//! What a guest has open on its network: told when it is about to sleep, so that the host can answer in its place.
//!
//! It is what the kernel says about its sockets. Where that is not the whole truth (packets are forwarded or rewritten, or
//! the lists are over their limits) the guest says so, and the host wakes it for whatever comes.

use core::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

/// Most listening sockets that are told; a guest with more says that it does not tell everything.
pub const LISTENERS_MAX: usize = 1024;

/// Most connections that are told. With the listeners they fit into one frame: 40 bytes each at most, 22 a listener.
pub const CONNECTIONS_MAX: usize = 768;

/// One look at a guest's sockets, without those that are only reached within it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Sockets {
    /// Nothing but these decides what becomes of a packet: neither forwarding nor rewriting of packets is in use, and no
    /// list was cut.
    pub whole: bool,
    /// Something has come that no program has read or accepted yet.
    pub unread: bool,
    /// Who waits for connections or datagrams, at most [`LISTENERS_MAX`].
    pub listeners: Vec<Listener>,
    /// TCP connections, at most [`CONNECTIONS_MAX`].
    pub connections: Vec<Connection>,
}

/// Which protocol a port belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// A socket that takes connections (TCP), or datagrams (UDP).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Listener {
    /// Its protocol.
    pub transport: Transport,
    /// What it is bound to; unspecified: any address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// One bound to any IPv6 address takes no IPv4.
    pub v6_only: bool,
}

/// A TCP connection, in any state but closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Connection {
    /// The guest's end. IPv4 over an IPv6 socket is told as IPv4.
    pub local: SocketAddr,
    /// The other end.
    pub peer: SocketAddr,
    /// The guest may still send on it: it stands, or only the peer has ended its direction. In any other state it is
    /// about to begin or end.
    pub stands: bool,
}
