//! The host's side of the link: up, addressed, and able to reach the guest without asking.
//!
//! Spoken to the kernel directly (rtnetlink): five messages of some 20 µs, where five runs of `ip` would take 15 ms.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
};

use super::{Tap, TapError};

/// How a tap's link is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkSetup {
    /// The host's address on the link, the guest's gateway. May be the same on all taps (it gets a /32).
    pub gateway: Ipv4Addr,
    /// The host's link address. May be the same on all taps.
    pub host_mac: [u8; 6],
    /// The guest's address; it gets a host route.
    pub guest: Ipv4Addr,
    /// The guest's link address; it gets a permanent neighbour entry, so that nobody has to answer for it while it sleeps.
    pub guest_mac: [u8; 6],
    /// Largest packet, bytes.
    pub mtu: u32,
    /// Packets that wait while the guest sleeps (the kernel's default is 1000).
    pub queue_packets: u32,
    /// The guest's IPv6; `None`: it is switched off on the link.
    pub ipv6: Option<Ipv6Setup>,
}

/// IPv6 on a tap's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv6Setup {
    /// The host's address, which it speaks to the guest from. It must be on another interface of the host already.
    pub gateway: Ipv6Addr,
    /// The guest's address; it gets a host route and a permanent neighbour entry.
    pub guest: Ipv6Addr,
}

/// Sets up a tap's link in the network namespace of the calling thread. Doing it twice changes nothing. Well below a millisecond.
pub fn set_up(tap: &Tap, setup: LinkSetup) -> Result<(), TapError> {
    let fail = |doing| move |source| TapError::new(doing, tap.name(), source);
    match setup.ipv6 {
        Some(_) => prepare_ipv6(tap.name()).map_err(fail("switch on IPv6 on"))?,
        None => switch_off_ipv6(tap.name()).map_err(fail("switch off IPv6 on"))?,
    }
    let mut netlink = Netlink::open().map_err(fail("open netlink for"))?;
    let index = tap.index();

    // MAC, MTU and queue before it is up: otherwise the kernel would announce the old ones.
    let mut link = Message::new(libc::RTM_NEWLINK, 0);
    link.interface_head(index, 0, 0);
    link.attribute(libc::IFLA_ADDRESS, &setup.host_mac);
    link.attribute(libc::IFLA_MTU, &setup.mtu.to_ne_bytes());
    link.attribute(libc::IFLA_TXQLEN, &setup.queue_packets.to_ne_bytes());
    netlink.ask(link).map_err(fail("set link address, MTU and queue of"))?;

    let up = libc::IFF_UP.cast_unsigned();
    let mut link = Message::new(libc::RTM_NEWLINK, 0);
    link.interface_head(index, up, up);
    netlink.ask(link).map_err(fail("set up"))?;

    let replace = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
    let mut address = Message::new(libc::RTM_NEWADDR, replace);
    // ifaddrmsg: family, prefix length, flags, scope, index
    address.bytes(&[INET, 32, 0, libc::RT_SCOPE_UNIVERSE]);
    address.bytes(&index.to_ne_bytes());
    address.attribute(libc::IFA_LOCAL, &setup.gateway.octets());
    address.attribute(libc::IFA_ADDRESS, &setup.gateway.octets());
    netlink.ask(address).map_err(fail("set address of"))?;

    let mut neighbour = Message::new(libc::RTM_NEWNEIGH, replace);
    // ndmsg: family, padding, index, state, flags, type
    neighbour.bytes(&[INET, 0, 0, 0]);
    neighbour.bytes(&index.to_ne_bytes());
    neighbour.bytes(&libc::NUD_PERMANENT.to_ne_bytes());
    neighbour.bytes(&[0, 0]);
    neighbour.attribute(libc::NDA_DST, &setup.guest.octets());
    neighbour.attribute(libc::NDA_LLADDR, &setup.guest_mac);
    netlink.ask(neighbour).map_err(fail("set neighbour of"))?;

    let mut route = Message::new(libc::RTM_NEWROUTE, replace);
    // rtmsg: family, destination's and source's prefix length, type of service, table, protocol, scope, kind, flags
    route.bytes(&[
        INET,
        32,
        0,
        0,
        libc::RT_TABLE_MAIN,
        libc::RTPROT_STATIC,
        libc::RT_SCOPE_LINK,
        libc::RTN_UNICAST,
        0,
        0,
        0,
        0,
    ]);
    route.attribute(libc::RTA_DST, &setup.guest.octets());
    route.attribute(libc::RTA_OIF, &index.to_ne_bytes());
    route.attribute(libc::RTA_PREFSRC, &setup.gateway.octets());
    netlink.ask(route).map_err(fail("set route of"))?;
    match setup.ipv6 {
        Some(ipv6) => {
            set_up_ipv6(&mut netlink, index, setup, ipv6).map_err(fail("set IPv6 route of"))
        }
        None => Ok(()),
    }
}

fn set_up_ipv6(
    netlink: &mut Netlink,
    index: u32,
    setup: LinkSetup,
    ipv6: Ipv6Setup,
) -> io::Result<()> {
    let replace = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
    let mut neighbour = Message::new(libc::RTM_NEWNEIGH, replace);
    neighbour.bytes(&[INET6, 0, 0, 0]);
    neighbour.bytes(&index.to_ne_bytes());
    neighbour.bytes(&libc::NUD_PERMANENT.to_ne_bytes());
    neighbour.bytes(&[0, 0]);
    neighbour.attribute(libc::NDA_DST, &ipv6.guest.octets());
    neighbour.attribute(libc::NDA_LLADDR, &setup.guest_mac);
    netlink.ask(neighbour)?;

    let mut route = Message::new(libc::RTM_NEWROUTE, replace);
    route.bytes(&[INET6, 128, 0, 0, libc::RT_TABLE_MAIN, libc::RTPROT_STATIC]);
    route.bytes(&[libc::RT_SCOPE_UNIVERSE, libc::RTN_UNICAST, 0, 0, 0, 0]);
    route.attribute(libc::RTA_DST, &ipv6.guest.octets());
    route.attribute(libc::RTA_OIF, &index.to_ne_bytes());
    route.attribute(libc::RTA_PREFSRC, &ipv6.gateway.octets());
    netlink.ask(route)
}

/// Removes an interface.
pub(super) fn delete(name: &str, index: u32) -> Result<(), TapError> {
    let fail = |source| TapError::new("delete", name, source);
    let mut message = Message::new(libc::RTM_DELLINK, 0);
    message.interface_head(index, 0, 0);
    Netlink::open().and_then(|mut netlink| netlink.ask(message)).map_err(fail)
}

#[expect(clippy::cast_possible_truncation, reason = "address families are below 256")]
const INET: u8 = libc::AF_INET as u8;

#[expect(clippy::cast_possible_truncation, reason = "address families are below 256")]
const INET6: u8 = libc::AF_INET6 as u8;

/// IPv6 without what a link of two that know each other has no use for: no addresses that the kernel makes up, no routers
/// looked for or listened to.
fn prepare_ipv6(name: &str) -> io::Result<()> {
    let settings =
        [("addr_gen_mode", "1"), ("accept_ra", "0"), ("accept_dad", "0"), ("disable_ipv6", "0")];
    settings.into_iter().try_for_each(|(setting, value)| {
        std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/{setting}"), value)
    })
}

/// A host without IPv6 has nothing to switch off.
fn switch_off_ipv6(name: &str) -> io::Result<()> {
    match std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// A socket to the kernel's network configuration. It answers within the call that sends.
struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    fn open() -> io::Result<Self> {
        let socket =
            socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends one message and reads the verdict.
    fn ask(&mut self, message: Message) -> io::Result<()> {
        self.sequence += 1;
        send(&self.socket, &message.finish(self.sequence), SendFlags::empty())?;
        let mut answer = [0; 4096];
        let (length, _) = recv(&self.socket, &mut answer, RecvFlags::empty())?;
        let answer = &answer[..length];
        let number = |at: usize| answer.get(at..).and_then(<[u8]>::first_chunk::<4>).copied();
        // nlmsghdr: length, type (16 bits) and flags, sequence, port; then for NLMSG_ERROR the negative errno.
        let kind = number(4).map(|[low, high, ..]| i32::from(u16::from_ne_bytes([low, high])));
        match (kind, number(8).map(u32::from_ne_bytes), number(16).map(i32::from_ne_bytes)) {
            (Some(libc::NLMSG_ERROR), Some(sequence), Some(verdict))
                if sequence == self.sequence =>
            {
                match verdict {
                    0 => Ok(()),
                    error => Err(io::Error::from_raw_os_error(-error)),
                }
            }
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "unexpected answer from netlink")),
        }
    }
}

/// A netlink message in the making.
struct Message(Vec<u8>);

impl Message {
    fn new(kind: u16, flags: libc::c_int) -> Self {
        let flags = flags | libc::NLM_F_REQUEST | libc::NLM_F_ACK;
        let mut message = Self(vec![0; 4]);
        message.bytes(&kind.to_ne_bytes());
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "message flags are 16 bits wide"
        )]
        message.bytes(&(flags as u16).to_ne_bytes());
        message.bytes(&[0; 8]);
        message
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// ifinfomsg: family, padding, type, index, flags, which of them to change
    fn interface_head(&mut self, index: u32, flags: u32, change: u32) {
        self.bytes(&[0; 4]);
        self.bytes(&index.to_ne_bytes());
        self.bytes(&flags.to_ne_bytes());
        self.bytes(&change.to_ne_bytes());
    }

    /// Length, kind, value, padded to four bytes.
    fn attribute(&mut self, kind: u16, value: &[u8]) {
        #[expect(clippy::cast_possible_truncation, reason = "our values are at most 16 bytes long")]
        let length = 4 + value.len() as u16;
        self.bytes(&length.to_ne_bytes());
        self.bytes(&kind.to_ne_bytes());
        self.bytes(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn finish(mut self, sequence: u32) -> Vec<u8> {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "our messages are some hundred bytes long"
        )]
        let length = self.0.len() as u32;
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0
    }
}
