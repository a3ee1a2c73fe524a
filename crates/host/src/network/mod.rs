//! The host's side of the guests' network.
//!
//! Every sandbox has a tap of its own and an address of its own, routed as a single host route: there is no bridge, and
//! no guest shares a link with another. All guests see the same gateway address, which lies on the host's loopback.
//! Both ends know each other's hardware address beforehand, so no ARP is needed, asleep or awake.
//!
//! What this module changes on the host: one nftables table, IPv4 forwarding, an address of each family on `lo`, and IPv6
//! forwarding if that is asked for. [`Network::undo`]
//! takes it away again.

pub(crate) mod asleep;
pub mod dns;
mod hold;
pub mod ipv6;
mod rules;
pub(crate) mod services;

pub(crate) use hold::{SubnetHold, SubnetTaken};

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::Stdio;

use api::boxes::wiring::within_v6;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// Begins the name of every tap of the default subnet; the rules name all of them by it. At most 9 characters, as names
/// have 15.
pub const TAP_PREFIX: &str = "dmouse";

/// The first address of the subnet that is used unless another is chosen.
pub const SUBNET_DEFAULT: Ipv4Addr = Ipv4Addr::new(10, 118, 0, 0);

/// Hardware address of the host's end of every tap (locally administered).
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0x64, 0x6d, 0, 0, 1];

/// The first slot that a sandbox may have: `.0.0` is the net's, `.0.1` the gateway's.
pub const FIRST_SLOT: u32 = 2;

/// One more than the last slot: the last address of the /16 is kept free.
pub const SLOT_END: u32 = 65_535;

/// Where sandboxes get their addresses from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet(Ipv4Addr, Option<Ipv6Addr>);

impl Subnet {
    /// The /16 that begins here.
    pub fn new(first: Ipv4Addr) -> Self {
        let [a, b, _, _] = first.octets();
        Self(Ipv4Addr::new(a, b, 0, 0), None)
    }

    /// With IPv6 addresses too, from the /64 that this address is in.
    #[must_use]
    pub fn with_ipv6(self, prefix: Option<Ipv6Addr>) -> Self {
        let net = |address: Ipv6Addr| Ipv6Addr::from_bits(address.to_bits() >> 64 << 64);
        Self(self.0, prefix.map(net))
    }

    /// The first address of the /64, if sandboxes have IPv6.
    pub fn ipv6_prefix(self) -> Option<Ipv6Addr> {
        self.1
    }

    /// The IPv6 address that guests know as their gateway.
    pub fn gateway_ipv6(self) -> Option<Ipv6Addr> {
        self.ipv6(1)
    }

    /// IPv6 address of a slot.
    pub fn ipv6(self, slot: u32) -> Option<Ipv6Addr> {
        self.1.map(|prefix| Ipv6Addr::from_bits(prefix.to_bits() + u128::from(slot)))
    }

    fn is_default(self) -> bool {
        self.0 == Self::new(SUBNET_DEFAULT).0
    }

    /// The address that guests know as their gateway and name server.
    pub fn gateway(self) -> Ipv4Addr {
        self.address(1)
    }

    /// Address of a slot.
    pub fn address(self, slot: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.0.to_bits() + slot)
    }

    /// Hardware address of a slot's guest (locally administered).
    pub fn mac(self, slot: u32) -> [u8; 6] {
        let [a, b, c, d] = self.address(slot).octets();
        [0x06, 0x64, a, b, c, d]
    }

    /// Name of a slot's tap.
    pub fn tap(self, slot: u32) -> String {
        format!("{}{slot}", self.tap_prefix())
    }

    /// Begins the name of every tap, and of no tap of another subnet: each has a daemon of its own.
    pub fn tap_prefix(self) -> String {
        if self.is_default() {
            return TAP_PREFIX.to_owned();
        }
        let [a, b, _, _] = self.0.octets();
        format!("dm{a:02x}{b:02x}-")
    }

    /// Whether an address is in it, or is that of its gateway.
    pub fn contains(self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V4(ip) => (ip.to_bits() ^ self.0.to_bits()) >> 16 == 0,
            IpAddr::V6(ip) => {
                self.1.is_some_and(|prefix| (ip.to_bits() ^ prefix.to_bits()) >> 64 == 0)
                    || within_v6(ip).is_some_and(|ip| self.contains(ip.into()))
            }
        }
    }

    /// Name of its table of rules.
    fn table(self) -> String {
        if self.is_default() {
            return "dormouse".to_owned();
        }
        let [a, b, _, _] = self.0.octets();
        format!("dormouse_{a}_{b}")
    }
}

/// The host's network, made ready for guests.
#[derive(Debug)]
pub struct Network {
    subnet: Subnet,
}

impl Network {
    /// Makes the host ready: forwarding, the gateway's address, the rules. Repeating it changes nothing.
    ///
    /// A host without IPv6 gives its guests none, whatever the subnet says: [`Network::subnet`] tells. With `ipv6_outbound`
    /// guests reach the internet over it too, for which the host must forward it.
    pub async fn set_up(subnet: Subnet, ipv6_outbound: bool) -> io::Result<Self> {
        enable_forwarding()?;
        let gateway = format!("{}/32", subnet.gateway());
        run("ip", &["link", "set", "lo", "up"], "").await?;
        run("ip", &["address", "replace", &gateway, "dev", "lo"], "").await?;
        let subnet = ipv6::set_up(subnet, ipv6_outbound).await;
        run("nft", &["-f", "-"], &rules::script(subnet, ipv6_outbound)).await?;
        Ok(Self { subnet })
    }

    /// Takes away what `set_up` made, save forwarding (others may need it by now).
    pub async fn undo(subnet: Subnet) -> io::Result<()> {
        run("nft", &["-f", "-"], &rules::remove(subnet)).await?;
        ipv6::undo(subnet).await?;
        let gateway = format!("{}/32", subnet.gateway());
        run("ip", &["address", "del", &gateway, "dev", "lo"], "").await
    }

    /// Where sandboxes get their addresses from.
    pub fn subnet(&self) -> Subnet {
        self.subnet
    }
}

/// Removes the taps of a subnet but those named; answers how many.
pub(crate) async fn remove_taps_except(subnet: Subnet, kept: &[String]) -> io::Result<usize> {
    let prefix = subnet.tap_prefix();
    let mut removed = 0;
    for entry in std::fs::read_dir("/proc/sys/net/ipv4/conf")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let number = name.strip_prefix(&prefix).and_then(|rest| rest.parse::<u32>().ok());
        if number.is_some() && !kept.contains(&name) {
            run("ip", &["link", "delete", &name], "").await?;
            removed += 1;
        }
    }
    Ok(removed)
}

fn enable_forwarding() -> io::Result<()> {
    let path = Path::new("/proc/sys/net/ipv4/ip_forward");
    if std::fs::read_to_string(path)?.trim() == "1" {
        return Ok(());
    }
    tracing::info!("switching IPv4 forwarding on: guests reach the internet through this host");
    std::fs::write(path, "1")
}

/// Runs a program of the host with text on its standard input; its complaint becomes the error.
async fn run(program: &str, arguments: &[&str], input: &str) -> io::Result<()> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| io::Error::new(error.kind(), format!("run `{program}`: {error}")))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes()).await?;
    }
    let output = child.wait_with_output().await?;
    if output.status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("`{program} {}`: {}", arguments.join(" "), complaint.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_slot_has_an_address_a_mac_and_a_tap_of_its_own() {
        let subnet = Subnet::new(Ipv4Addr::new(10, 118, 7, 9));
        assert_eq!(subnet.gateway(), Ipv4Addr::new(10, 118, 0, 1));
        assert_eq!(subnet.address(FIRST_SLOT), Ipv4Addr::new(10, 118, 0, 2));
        assert_eq!(subnet.address(SLOT_END - 1), Ipv4Addr::new(10, 118, 255, 254));
        assert_eq!(subnet.mac(258), [0x06, 0x64, 10, 118, 1, 2]);
        let other = Subnet::new(Ipv4Addr::new(172, 255, 0, 0));
        for subnet in [subnet, other] {
            assert!(subnet.tap(SLOT_END).len() <= 15);
        }
        assert_eq!(subnet.tap(7), "dmouse7");
        assert!(!other.tap(7).starts_with(&subnet.tap_prefix()), "{}", other.tap(7));
        assert_ne!(other.table(), subnet.table());
    }
}
