//! Which headers cross the edge, and what they say on the other side.

use std::net::SocketAddr;

use axum::http::header::{
    CONNECTION, EXPECT, HOST, HeaderName, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use axum::http::{HeaderMap, HeaderValue};

/// Headers that speak about one connection only (RFC 9110, 7.6.1).
const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    // Answered here: the body is asked for as soon as it is passed on.
    EXPECT,
];

/// What the request looked like from outside.
pub(super) struct Outside<'a> {
    pub(super) host: &'a str,
    pub(super) scheme: &'static str,
    pub(super) peer: Option<SocketAddr>,
}

/// The protocol that a request or answer wants to change to.
pub(crate) fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = connection_options(headers).any(|option| option.eq_ignore_ascii_case("upgrade"));
    if asked { headers.get(UPGRADE).cloned() } else { None }
}

/// Takes away what speaks about one connection, and keeps the wish to change protocols, which goes through.
pub(super) fn pass(headers: &mut HeaderMap, upgrade: Option<HeaderValue>) {
    let named: Vec<HeaderName> = connection_options(headers)
        .filter_map(|option| HeaderName::try_from(option).ok())
        .collect();
    for name in HOP_BY_HOP.iter().chain(&named) {
        headers.remove(name);
    }
    if let Some(protocol) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol);
    }
}

/// What the server in the sandbox sees: itself as `Host`, and in `X-Forwarded-*` how it was reached. What the client sent
/// under those names is not believed.
pub(super) fn forward(headers: &mut HeaderMap, port: u16, outside: &Outside<'_>) {
    let text = |text: String| HeaderValue::try_from(text).ok();
    let set = [
        (HOST, text(format!("127.0.0.1:{port}"))),
        (HeaderName::from_static("x-forwarded-host"), text(outside.host.to_owned())),
        (
            HeaderName::from_static("x-forwarded-proto"),
            Some(HeaderValue::from_static(outside.scheme)),
        ),
        (
            HeaderName::from_static("x-forwarded-for"),
            outside.peer.and_then(|peer| text(peer.ip().to_string())),
        ),
        (HeaderName::from_static("forwarded"), None),
    ];
    for (name, value) in set {
        match value {
            Some(value) => drop(headers.insert(name, value)),
            None => drop(headers.remove(name)),
        }
    }
}

fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        list.iter()
            .map(|(k, v)| (HeaderName::from_static(k), HeaderValue::from_static(v)))
            .collect()
    }

    #[test]
    fn what_speaks_about_one_connection_stays() {
        let mut map = headers(&[
            ("connection", "close, X-Private"),
            ("x-private", "1"),
            ("keep-alive", "5"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("accept", "*/*"),
        ]);
        let wish = upgrade(&map);
        assert_eq!(wish, None, "`Upgrade` without `Connection: upgrade` is no wish");
        pass(&mut map, wish);
        assert_eq!(map, headers(&[("accept", "*/*")]));
    }

    #[test]
    fn a_change_of_protocol_goes_through() {
        let mut map = headers(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]);
        let wish = upgrade(&map);
        pass(&mut map, wish);
        assert_eq!(map, headers(&[("connection", "upgrade"), ("upgrade", "websocket")]));
    }

    #[test]
    fn forwarded_headers_of_the_client_are_not_believed() {
        let mut map =
            headers(&[("host", "x"), ("x-forwarded-for", "6.6.6.6"), ("forwarded", "for=6.6.6.6")]);
        let peer = Some("127.0.0.9:5".parse().unwrap());
        forward(&mut map, 8000, &Outside { host: "a.box.localhost", scheme: "http", peer });
        let want = headers(&[
            ("host", "127.0.0.1:8000"),
            ("x-forwarded-host", "a.box.localhost"),
            ("x-forwarded-proto", "http"),
            ("x-forwarded-for", "127.0.0.9"),
        ]);
        assert_eq!(map, want);
    }
}
