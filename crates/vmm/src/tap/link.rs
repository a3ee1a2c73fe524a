//! The host's side of the link: up, addressed, and able to reach the guest without asking.

use std::net::Ipv4Addr;

use super::{Tap, TapError};

/// How a tap's link is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkSetup {
    /// The host's address on the link, the guest's gateway. May be the same on all taps (it gets a /32).
    pub gateway: Ipv4Addr,
    /// The guest's address; it gets a host route.
    pub guest: Ipv4Addr,
    /// The guest's link address; it gets a permanent neighbour entry.
    pub guest_mac: [u8; 6],
    /// Largest packet, bytes.
    pub mtu: u32,
    /// Packets that wait while the guest sleeps (the kernel's default is 1000).
    pub queue_packets: u32,
}

/// Sets up a tap's link in the network namespace of the calling thread. Doing it twice changes nothing. IPv6 is switched off on it. Well below a millisecond.
pub fn set_up(tap: &Tap, setup: LinkSetup) -> Result<(), TapError> {
    let _ = (tap, setup);
    unimplemented!()
}
