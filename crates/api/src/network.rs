//! A range of addresses, such as `192.0.2.0/24`: who may open URLs, and which proxies are believed.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Addresses that begin alike, IPv4 or IPv6. One address alone is a range too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, example = "192.0.2.0/24")]
pub struct Network((IpAddr, u8));

/// The text is no range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no range of addresses, such as `192.0.2.0/24`, `2001:db8::/32` or `192.0.2.7`")]
pub struct NotANetwork(String);

impl Network {
    /// Whether an address is in it. One of IPv4 that is written as IPv6 is meant as what it is.
    pub fn contains(&self, address: IpAddr) -> bool {
        let Self((first, bits)) = *self;
        match (first, address.to_canonical()) {
            (IpAddr::V4(first), IpAddr::V4(address)) => {
                same(u32::from(first).into(), u32::from(address).into(), 32 - bits)
            }
            (IpAddr::V6(first), IpAddr::V6(address)) => {
                same(first.into(), address.into(), 128 - bits)
            }
            _ => false,
        }
    }
}

/// Whether two addresses are the same without their last bits.
fn same(first: u128, other: u128, without: u8) -> bool {
    (first ^ other).checked_shr(without.into()).unwrap_or(0) == 0
}

impl FromStr for Network {
    type Err = NotANetwork;

    fn from_str(text: &str) -> Result<Self, NotANetwork> {
        let wrong = || NotANetwork(text.to_owned());
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let first: IpAddr = address.parse().map_err(|_| wrong())?;
        let most = if first.is_ipv4() { 32 } else { 128 };
        let bits = match bits {
            // One way to write each number: no sign, no leading zero.
            Some(bits) if bits.starts_with('+') || bits.len() > 1 && bits.starts_with('0') => {
                return Err(wrong());
            }
            Some(bits) => bits.parse().ok().filter(|bits| *bits <= most).ok_or_else(wrong)?,
            None => most,
        };
        Ok(Self((first, bits)))
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self((first, bits)) = self;
        write!(f, "{first}/{bits}")
    }
}

impl TryFrom<String> for Network {
    type Error = NotANetwork;

    fn try_from(text: String) -> Result<Self, NotANetwork> {
        text.parse()
    }
}

impl From<Network> for String {
    fn from(network: Network) -> Self {
        network.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t20_addresses_are_in_the_ranges_that_begin_like_them() {
        for (network, address, expected) in [
            ("192.0.2.0/24", "192.0.2.255", true),
            ("192.0.2.0/24", "192.0.3.0", false),
            ("192.0.2.7", "192.0.2.7", true),
            ("192.0.2.7", "192.0.2.6", false),
            ("0.0.0.0/0", "203.0.113.9", true),
            ("0.0.0.0/0", "2001:db8::1", false),
            ("::/0", "2001:db8::1", true),
            ("2001:db8::/32", "2001:db8:ffff::1", true),
            ("2001:db8::/32", "2001:db9::1", false),
            ("192.0.2.0/24", "::ffff:192.0.2.9", true),
            ("192.0.2.130/25", "192.0.2.200", true),
        ] {
            let parsed: Network = network.parse().expect(network);
            assert_eq!(parsed.contains(address.parse().unwrap()), expected, "{network} {address}");
        }
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for bad in ["", "x", "192.0.2.0/33", "192.0.2.0/", "192.0.2.0/+8", "192.0.2.0/08", "::/129"]
        {
            assert!(bad.parse::<Network>().is_err(), "{bad}");
        }
        assert_eq!("192.0.2.7".parse::<Network>().unwrap().to_string(), "192.0.2.7/32");
    }
}
