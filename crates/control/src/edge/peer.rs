//! Who asks: the address at the other end of the connection, or, where that is a trusted proxy, the one for which it speaks (T20).

use std::net::{IpAddr, SocketAddr};

use api::network::Network;
use axum::http::HeaderMap;

use crate::server::Peer;

const FORWARDED_FOR: &str = "x-forwarded-for";

/// The proxies that are believed.
pub(crate) struct Proxies(pub(crate) Vec<Network>);

impl Proxies {
    /// Who asks; `None`: somebody on this machine, over the local socket.
    ///
    /// Each proxy appends whom it was asked by to `X-Forwarded-For`. Read from the end, the first that is no trusted proxy is the
    /// one that asks: what stands before it he may have made up.
    pub(super) fn peer(&self, peer: Peer, headers: &HeaderMap) -> Option<SocketAddr> {
        let Peer::Tcp(near) = peer else { return None };
        if !self.trusts(near.ip()) {
            return Some(near);
        }
        let mut known = near;
        let values = headers.get_all(FORWARDED_FOR).iter().rev();
        for value in values {
            // What cannot be read was not written by a proxy: the last one that is known is the one that asks.
            let Ok(text) = value.to_str() else { return Some(known) };
            for entry in text.rsplit(',') {
                let Some(address) = read(entry.trim()) else { return Some(known) };
                known = SocketAddr::new(address, 0);
                if !self.trusts(address) {
                    return Some(known);
                }
            }
        }
        Some(known)
    }

    fn trusts(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(address))
    }
}

/// An address, with or without a port.
fn read(text: &str) -> Option<IpAddr> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let address = bare.parse().or_else(|_| text.parse().map(|socket: SocketAddr| socket.ip()));
    address.ok().map(|address: IpAddr| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn peer(near: &str, forwarded: &[&str]) -> String {
        let proxies = Proxies(vec!["10.0.0.0/8".parse().unwrap(), "::1".parse().unwrap()]);
        let mut headers = HeaderMap::new();
        for value in forwarded {
            headers.append(FORWARDED_FOR, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        let near = Peer::Tcp(SocketAddr::new(near.parse().unwrap(), 7));
        proxies.peer(near, &headers).expect("over the network").ip().to_string()
    }

    #[test]
    fn t20_forwarded_addresses_count_only_from_trusted_proxies() {
        for (near, forwarded, expected) in [
            // Not trusted: believed in nothing.
            ("192.0.2.1", vec!["203.0.113.9"], "192.0.2.1"),
            ("192.0.2.1", vec![], "192.0.2.1"),
            ("10.0.0.1", vec![], "10.0.0.1"),
            ("10.0.0.1", vec!["203.0.113.9"], "203.0.113.9"),
            ("::ffff:10.0.0.1", vec!["203.0.113.9"], "203.0.113.9"),
            ("::1", vec!["2001:db8::5"], "2001:db8::5"),
            // The right-most that is no proxy: what stands before it the client made up.
            ("10.0.0.1", vec!["192.0.2.66, 203.0.113.9, 10.0.0.2"], "203.0.113.9"),
            ("10.0.0.1", vec!["192.0.2.66", "203.0.113.9", "10.0.0.2"], "203.0.113.9"),
            ("10.0.0.1", vec!["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
            ("10.0.0.1", vec!["203.0.113.9:4711"], "203.0.113.9"),
            ("10.0.0.1", vec!["[2001:db8::5]:4711"], "2001:db8::5"),
            ("10.0.0.1", vec!["[2001:db8::5]"], "2001:db8::5"),
            ("10.0.0.1", vec!["203.0.113.9, unknown"], "10.0.0.1"),
            ("10.0.0.1", vec!["203.0.113.9, unknown, 10.0.0.2"], "10.0.0.2"),
            ("10.0.0.1", vec!["203.0.113.9,"], "10.0.0.1"),
        ] {
            assert_eq!(peer(near, &forwarded), expected, "{near} {forwarded:?}");
        }
    }

    #[test]
    fn whoever_may_open_the_local_socket_has_no_address() {
        assert_eq!(Proxies(Vec::new()).peer(Peer::Local, &HeaderMap::new()), None);
    }
}
