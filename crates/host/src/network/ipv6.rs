//! Guests' IPv6: which prefix their addresses are from, and what the host needs for it.
//!
//! Unless a prefix is chosen, each installation has a unique local one of its own (RFC 4193), made at random once and kept in
//! the data folder: sandboxes keep their addresses over restarts of the daemon, and two hosts' sandboxes never have the same.
//!
//! Guests reach the internet over IPv4, and over IPv6 only if that is asked for: a host that forwards IPv6 stops listening to
//! the router that gave it its own route, so this must not happen unasked.

use std::io;
use std::net::Ipv6Addr;
use std::path::Path;

use super::{Subnet, run};

/// Where sandboxes' IPv6 addresses come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Ipv6Setting {
    /// From the installation's own unique local prefix.
    #[default]
    Own,
    /// From this /64, which is routed to this host.
    Prefix(Ipv6Addr),
    /// They have none.
    None,
}

impl std::str::FromStr for Ipv6Setting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self::None);
        }
        let address = text.strip_suffix("/64").unwrap_or(text).parse::<Ipv6Addr>();
        match address {
            Ok(address) if is_usable(address) => Ok(Self::Prefix(address)),
            _ => Err(format!(
                "`{text}` is no prefix for guests: expected the /64 of a global or unique local address, such as \
                 fd12:3456:789a::/64, or `none`"
            )),
        }
    }
}

/// Global (2000::/3) or unique local (fc00::/7), with nothing behind the /64.
fn is_usable(address: Ipv6Addr) -> bool {
    let first = address.segments()[0];
    let kind = first >> 13 == 1 || first >> 9 == 0x7e;
    kind && address.to_bits() << 64 == 0
}

/// Name of the file in the data folder with the installation's own prefix.
const PREFIX_FILE: &str = "ipv6-prefix";

/// The prefix by a setting; made and kept in the data folder the first time. Blocking.
pub(crate) fn prefix(setting: Ipv6Setting, data: &Path) -> io::Result<Option<Ipv6Addr>> {
    match setting {
        Ipv6Setting::None => Ok(None),
        Ipv6Setting::Prefix(prefix) => Ok(Some(prefix)),
        Ipv6Setting::Own => own_prefix(data).map(Some),
    }
}

fn own_prefix(data: &Path) -> io::Result<Ipv6Addr> {
    let path = data.join(PREFIX_FILE);
    match std::fs::read_to_string(&path) {
        Ok(text) => {
            let kept = text.trim().trim_end_matches("/64").parse().ok();
            kept.filter(|kept| is_usable(*kept)).ok_or_else(|| {
                let text =
                    format!("{} is no IPv6 prefix; remove it to have a new one", path.display());
                io::Error::new(io::ErrorKind::InvalidData, text)
            })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // fd, 40 random bits, subnet 0.
            let mut random = [0; 5];
            getrandom::fill(&mut random).map_err(io::Error::other)?;
            let mut octets = [0; 16];
            octets[0] = 0xfd;
            octets[1..6].copy_from_slice(&random);
            let prefix = Ipv6Addr::from(octets);
            vmm::files::replace(&path, format!("{prefix}/64\n").as_bytes())
                .map_err(io::Error::other)?;
            Ok(prefix)
        }
        Err(error) => Err(error),
    }
}

/// Makes the host ready for the subnet's IPv6. One that cannot be gets none, which costs nothing else.
pub(super) async fn set_up(subnet: Subnet, outbound: bool) -> Subnet {
    let Some(gateway) = subnet.gateway_ipv6() else { return subnet };
    let address = format!("{gateway}/128");
    let made = run("ip", &["address", "replace", &address, "dev", "lo"], "").await;
    let made = made.and_then(|()| if outbound { enable_forwarding() } else { Ok(()) });
    match made {
        Ok(()) => subnet,
        Err(error) => {
            tracing::warn!(%error, "this host has no IPv6 for its guests");
            subnet.with_ipv6(None)
        }
    }
}

/// Takes the gateway's address away.
pub(super) async fn undo(subnet: Subnet) -> io::Result<()> {
    let Some(gateway) = subnet.gateway_ipv6() else { return Ok(()) };
    run("ip", &["address", "del", &format!("{gateway}/128"), "dev", "lo"], "").await
}

/// Forwards IPv6, and goes on listening to routers on the interfaces that do so.
fn enable_forwarding() -> io::Result<()> {
    let conf = Path::new("/proc/sys/net/ipv6/conf");
    let forwarding = conf.join("all/forwarding");
    if std::fs::read_to_string(&forwarding)?.trim() == "1" {
        return Ok(());
    }
    tracing::info!("switching IPv6 forwarding on: guests reach the internet through this host");
    for entry in std::fs::read_dir(conf)? {
        let accept = entry?.path().join("accept_ra");
        // 1: unless it forwards; 2: even then.
        if std::fs::read_to_string(&accept).is_ok_and(|text| text.trim() == "1") {
            std::fs::write(&accept, "2")?;
        }
    }
    std::fs::write(forwarding, "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_installation_has_one_prefix_of_its_own() {
        let dir = tempfile::tempdir().expect("temp folder");
        let first = prefix(Ipv6Setting::Own, dir.path()).expect("made").expect("a prefix");
        assert_eq!(first.octets()[0], 0xfd);
        assert!(is_usable(first), "{first}");
        assert_eq!(prefix(Ipv6Setting::Own, dir.path()).expect("kept"), Some(first));
        let other = tempfile::tempdir().expect("temp folder");
        assert_ne!(prefix(Ipv6Setting::Own, other.path()).expect("made"), Some(first));
        std::fs::write(dir.path().join(PREFIX_FILE), "what").expect("damaged");
        let error = prefix(Ipv6Setting::Own, dir.path()).expect_err("not guessed at");
        assert!(error.to_string().contains("ipv6-prefix"), "{error}");
        assert_eq!(prefix(Ipv6Setting::None, dir.path()).expect("none"), None);
    }

    #[test]
    fn a_prefix_is_a_64_of_addresses_that_can_be_routed() {
        let prefix = |text: &str| text.parse::<Ipv6Setting>();
        let good = Ipv6Setting::Prefix("2001:db8:1:2::".parse().expect("an address"));
        assert_eq!(prefix("2001:db8:1:2::/64"), Ok(good));
        assert_eq!(prefix("2001:db8:1:2::"), Ok(good));
        assert_eq!(prefix("none"), Ok(Ipv6Setting::None));
        for wrong in ["fe80::/64", "2001:db8::1", "::", "ff02::", "10.0.0.0", "", "2001:db8::/48"] {
            assert!(prefix(wrong).is_err_and(|error| error.contains("/64")), "{wrong}");
        }
    }
}
