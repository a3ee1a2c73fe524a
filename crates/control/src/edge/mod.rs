//! The edge: ports of sandboxes at `<id>-<key>[-<port>].box.<domain>`, on the same listener as everything else.
//!
//! A request to a sleeping sandbox is held while it wakes, and answered. The key is the only guard of a link: a wrong one
//! is answered exactly like a sandbox that does not exist, and takes as long to compare.
//!
//! A request holds its sandbox awake until its answer has been passed on. What stays open after that, a WebSocket or an event
//! stream, does so only on a port of `awake_ports`; elsewhere it is the bytes that count ([`stream`]).
//!
//! # Not here
//!
//! Which ports keep a sandbox awake, and how a port is reached: the host decides ([`api::host::Host::connect`]).

mod activity;
mod body;
mod boxes;
mod bursts;
mod headers;
mod limits;
mod machines;
mod peer;
mod pool;
mod proxy;
mod refusal;
mod stream;

use std::net::IpAddr;
use std::sync::Arc;

use api::account::ACCOUNT_DEFAULT;
use axum::http::{Request, Uri, header};
use subtle::ConstantTimeEq;

use crate::App;
use crate::boxes::BoxRecord;
use crate::catalogue::{Entry, Face};
use crate::make::KEY_CHARS;

pub(crate) use bursts::Bursts;
pub(crate) use headers::upgrade;
pub use limits::{ANSWER_TIME_DEFAULT, EDGE_SECONDS_RANGE, EdgeLimits, IDLE_TIME_DEFAULT};
pub(crate) use machines::Machines;
pub(crate) use peer::Proxies;
pub(crate) use pool::{Pool, Quiet};
pub(crate) use proxy::{connect, handle};
pub(crate) use stream::Conversation;

/// The port of a link without one.
const PORT_DEFAULT: u16 = 80;

/// How links look.
pub(crate) struct Links {
    /// `http` or `https`.
    scheme: &'static str,
    /// `.box.<domain>`
    suffix: String,
    /// `:8420`, or nothing for the scheme's own port.
    port: String,
}

impl Links {
    /// `None`: the public URL is not `http(s)://host[:port]`.
    pub(crate) fn new(
        domain: &str,
        public_url: Option<&str>,
        scheme: &'static str,
        listen_port: u16,
    ) -> Option<Self> {
        let suffix = format!(".box.{}", domain.to_ascii_lowercase());
        let Some(url) = public_url else {
            return Some(Self { scheme, suffix, port: format!(":{listen_port}") });
        };
        let url: Uri = url.parse().ok()?;
        let scheme = match url.scheme_str()? {
            "http" => "http",
            "https" => "https",
            _ => return None,
        };
        if !matches!(url.path(), "" | "/") || url.query().is_some() {
            return None;
        }
        let port = url.port_u16().map_or_else(String::new, |port| format!(":{port}"));
        Some(Self { scheme, suffix, port })
    }

    /// The URL of a port.
    pub(crate) fn url(&self, entry: &Entry, port: u16) -> String {
        let Self { scheme, suffix, port: outside } = self;
        format!("{scheme}://{}-{}-{port}{suffix}{outside}/", entry.id, entry.link_key)
    }

    /// The URL of a box: of its first service, or of the one that listens on this port (T17).
    pub(crate) fn box_url(&self, id: &api::SandboxId, key: &str, port: Option<u16>) -> String {
        let Self { scheme, suffix, port: outside } = self;
        let port = port.map_or_else(String::new, |port| format!("-{port}"));
        format!("{scheme}://{id}-{key}{port}{suffix}{outside}/")
    }

    pub(crate) fn scheme(&self) -> &'static str {
        self.scheme
    }
}

/// What a host name below `box.<domain>` names.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// The host name and port as the client wrote them.
    pub(crate) written: String,
    /// `None`: the name has not the form of a link.
    pub(crate) label: Option<Label>,
}

/// A link's parts.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Label {
    id: String,
    key: String,
    /// `None`: it has none.
    pub(crate) port: Option<u16>,
}

impl Label {
    /// The port of a sandbox.
    pub(crate) fn sandbox_port(&self) -> u16 {
        self.port.unwrap_or(PORT_DEFAULT)
    }
}

/// What a link leads to.
pub(crate) enum Target {
    /// A port of a sandbox.
    Sandbox(Entry),
    /// A box, perhaps one that has ended.
    Box(Arc<BoxRecord>),
}

/// Whether a request is for a sandbox's port; `None`: it is for the interface.
pub(crate) fn address<B>(app: &App, request: &Request<B>) -> Option<Address> {
    // An absolute request line beats the header (RFC 9112, 3.2.2).
    let written = match request.uri().authority() {
        Some(authority) => authority.as_str(),
        None => request.headers().get(header::HOST)?.to_str().ok()?,
    };
    let name = written
        .rsplit_once(':')
        .map_or(written, |(name, _)| name)
        .trim_end_matches('.')
        .to_ascii_lowercase();
    let label = name.strip_suffix(&app.links().suffix)?;
    Some(Address { written: written.to_owned(), label: parse_label(label) })
}

/// A sleep is being asked for, of one sandbox or of all: what only outlasts requests and what clients have sent ends now, so that it
/// does not wake who sleeps by then. While the answer lives nothing of the kind begins.
pub(crate) fn quieten(app: &App, id: Option<&api::SandboxId>) -> Quiet {
    let quiet = app.pool().quieten(id);
    app.bursts().end(id);
    quiet
}

/// What a link leads to, if its key is right and whoever asks may open it: others cannot tell it from none (T20).
pub(crate) fn find(app: &App, label: &Label, peer: Option<IpAddr>) -> Option<Target> {
    let id = label.id.parse::<api::SandboxId>().ok();
    // A name may read like an id; links go by ids alone.
    let entry = id.as_ref().and_then(|id| app.catalogue().find(id.as_str()));
    let entry = entry.filter(|entry| entry.id.as_str() == label.id && entry.face == Face::Sandbox);
    let record = id.as_ref().and_then(|id| app.boxes().record(id));
    // Compared in any case, so that the time does not say whether it exists.
    let nobody = "\0".repeat(KEY_CHARS);
    let key = match (&entry, &record) {
        (Some(entry), _) => &entry.link_key,
        (None, Some(record)) => &record.key,
        (None, None) => &nobody,
    };
    let right = bool::from(key.as_bytes().ct_eq(label.key.as_bytes()));
    // Looked at in any case, too.
    let account = record.as_ref().map_or(ACCOUNT_DEFAULT, |record| record.account.as_str());
    let open = app.accounts().opens_to(account, peer) || record.is_none();
    let target = entry.map(Target::Sandbox);
    let target = target.or_else(|| record.map(Target::Box));
    target.filter(|_| right & open)
}

fn parse_label(label: &str) -> Option<Label> {
    let mut parts = label.split('-');
    let (id, key) = (parts.next()?.to_owned(), parts.next()?.to_owned());
    let port = match parts.next() {
        // One way to write each port: no sign, no leading zero.
        Some(port) if !port.starts_with(['0', '+']) => Some(port.parse().ok()?),
        Some(_) => return None,
        None => None,
    };
    parts.next().is_none().then_some(Label { id, key, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_read_in_one_way_only() {
        let label = |text: &str| parse_label(text).map(|label| (label.id, label.key, label.port));
        assert_eq!(label("abc-key-8000"), Some(("abc".into(), "key".into(), Some(8000))));
        assert_eq!(label("abc-key"), Some(("abc".into(), "key".into(), None)));
        assert_eq!(parse_label("abc-key").map(|label| label.sandbox_port()), Some(80));
        for bad in [
            "abc",
            "abc-key-",
            "abc-key-0",
            "abc-key-080",
            "abc-key-+80",
            "abc-key-65536",
            "abc-key-80-1",
        ] {
            assert_eq!(label(bad), None, "{bad}");
        }
    }

    #[test]
    fn public_urls() {
        let port = |url| {
            Links::new("example.test", url, "http", 8420).map(|links| (links.scheme, links.port))
        };
        assert_eq!(port(None), Some(("http", ":8420".into())));
        assert_eq!(port(Some("https://example.test")), Some(("https", String::new())));
        assert_eq!(port(Some("http://example.test:81/")), Some(("http", ":81".into())));
        for bad in [
            "example.test",
            "ftp://example.test",
            "http://example.test/x",
            "http://example.test/?q",
            "",
        ] {
            assert_eq!(port(Some(bad)), None, "{bad}");
        }
    }
}
