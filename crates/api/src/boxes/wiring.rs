//! How a box's names are wired, as its host carries it out (T6-T11).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::{ApiError, SandboxId};

/// All names of a box, and where they lead.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wiring {
    /// Names and ranges with the port on which each is called.
    pub wires: Vec<Wire>,
    /// Where external services are: `http(s)://host[/path]`, without a slash at the end.
    pub external_base_url: Option<String>,
}

/// One name or range, on one port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wire {
    /// Its host name, which the box's name server answers; `None`: a range.
    pub name: Option<String>,
    /// Its address in the box, or the range's.
    pub address: Ipv4Addr,
    /// How many bits of the address are fixed; 32 for a name.
    pub bits: u32,
    /// The port on which it is called.
    pub port: u16,
    /// Where that leads.
    pub to: WireTo,
}

/// Where a wire leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "to", rename_all = "snake_case")]
pub enum WireTo {
    /// To a process in the box that listens on this port.
    Here {
        /// The port.
        port: u16,
    },
    /// Each HTTP request to the external base.
    External,
    /// To a port of another box.
    Link {
        /// That box.
        id: SandboxId,
        /// The port there.
        port: u16,
    },
}

impl Wire {
    /// Whether an address is this name's, or in this range.
    pub fn covers(&self, address: Ipv4Addr) -> bool {
        let differ = u32::from(self.address) ^ u32::from(address);
        self.bits == 0 || differ >> (32 - self.bits.min(32)) == 0
    }
}

/// What is told where an external base is at what it may not be at.
pub fn external_refused(what: &str) -> ApiError {
    let text = format!("`externalBaseUrl`: it leads to {what}, which boxes do not reach");
    ApiError::unprocessable("externalBaseUrl", text).hint(
        "the address or name of another machine, such as `https://staging.example.com`; a service of another box is reached with \
         `fromBox`",
    )
}

/// Addresses at which clouds tell a machine about itself, beside those that are link-local anyway: of two providers, over IPv6.
const METADATA: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
];

/// What an external base may not be at, whatever network its host and the guests have (T11); `None`: it may be at this address.
pub fn never_external(ip: IpAddr) -> Option<&'static str> {
    match ip {
        IpAddr::V4(ip) => never_external_v4(ip),
        IpAddr::V6(ip) if ip.is_loopback() => Some("this host itself"),
        IpAddr::V6(ip) if ip.is_unspecified() => Some("no machine, or this host itself"),
        IpAddr::V6(ip) if ip.is_unicast_link_local() => Some("this host's own link"),
        IpAddr::V6(ip) if ip.is_multicast() => Some("no single machine"),
        IpAddr::V6(ip) if METADATA.contains(&ip) => Some("this host's metadata"),
        IpAddr::V6(ip) => within_v6(ip).and_then(never_external_v4),
    }
}

fn never_external_v4(ip: Ipv4Addr) -> Option<&'static str> {
    let [first, second, ..] = ip.octets();
    if ip.is_loopback() {
        Some("this host itself")
    } else if first == 0 {
        Some("no machine, or this host itself")
    } else if ip.is_link_local() {
        Some("this host's own link, with its metadata")
    } else if ip.is_multicast() || ip.is_broadcast() {
        Some("no single machine")
    } else if first == 198 && second & 0xfe == 18 {
        Some("the names of boxes")
    } else {
        None
    }
}

/// The IPv4 address that an IPv6 address stands for: mapped, compatible (RFC 4291), or translated on its way (RFC 6052).
pub fn within_v6(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    let last = || {
        let [.., a, b, c, d] = ip.octets();
        Ipv4Addr::new(a, b, c, d)
    };
    match ip.segments() {
        [0, 0, 0, 0, 0, 0 | 0xffff, _, _] | [0x64, 0xff9b, 0, 0, 0, 0, _, _] => Some(last()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t11_where_an_external_base_may_never_be() {
        for (ip, never) in [
            ("127.8.9.1", true),
            ("0.0.0.0", true),
            ("0.1.2.3", true),
            ("169.254.169.254", true),
            ("224.0.0.1", true),
            ("255.255.255.255", true),
            ("198.18.0.1", true),
            ("198.19.255.255", true),
            ("198.17.0.1", false),
            ("198.20.0.1", false),
            ("10.1.2.3", false),
            ("192.168.1.1", false),
            ("100.64.0.1", false),
            ("203.0.113.5", false),
            ("::", true),
            ("::1", true),
            ("fe80::1", true),
            ("ff02::1", true),
            ("fd00:ec2::254", true),
            ("fd20:ce::254", true),
            ("::ffff:127.0.0.1", true),
            ("::ffff:198.18.0.1", true),
            ("::127.0.0.1", true),
            ("64:ff9b::169.254.169.254", true),
            ("::ffff:10.1.2.3", false),
            ("64:ff9b::10.1.2.3", false),
            ("fd00::1", false),
            ("2001:db8::1", false),
        ] {
            let found = never_external(ip.parse().expect("an address"));
            assert_eq!(found.is_some(), never, "{ip}: {found:?}");
        }
    }
}
