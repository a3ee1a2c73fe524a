//! The control plane: REST, edge and catalogue, over any [`api::host::Host`].
//!
//! One listener serves both faces, told apart by the request's host name: names below `box.<domain>` are ports of
//! sandboxes ([`edge`]), all others are the interface under `/v1` ([`routes`]) and the tools of AI clients at `/mcp` ([`mcp`]). A Unix socket serves the interface to
//! whoever may open it.
//!
//! # Invariants
//!
//! 1. A sandbox's row is in the catalogue before its host hears of it ([`make`]).
//! 2. Nothing here wakes a sandbox by itself: verbs that need one wake it at its host.
//! 3. Bodies of files, trees, outputs and edge requests pass through; only JSON is held, up to
//!    [`input::JSON_BYTES_MAX`].
//! 4. A host's data is never deleted because the catalogue does not know it ([`reconcile`]).
//!
//! # Not here
//!
//! When a sandbox sleeps, and how: its host decides.
#![forbid(unsafe_code)]

mod accounts;
mod answer;
mod auth;
mod boxes;
mod catalogue;
mod clear;
mod credit;
mod drain;
mod edge;
mod failure;
mod input;
mod journal;
mod make;
mod mcp;
mod metrics;
mod openapi;
mod reconcile;
mod retire;
mod routes;
mod secrets;
mod server;
mod socket;
mod spending;
mod tls;
mod validate;

use std::path::PathBuf;
use std::sync::Arc;

use api::host::Host;
use api::network::Network;
use tokio_util::sync::CancellationToken;

pub use auth::ADMIN_TOKEN_FILE;
pub use boxes::BoxSettings;
pub use catalogue::OpenError;
pub use drain::{drain, leave};
pub use edge::{ANSWER_TIME_DEFAULT, EDGE_SECONDS_RANGE, EdgeLimits, IDLE_TIME_DEFAULT};
pub use failure::Failure;
pub use mcp::INSTRUCTIONS as MCP_INSTRUCTIONS;
pub use openapi::document as openapi;
pub use server::{ServeError, Server, serve, serve_handler};
pub use socket::SocketPath;
pub use tls::{TlsError, TlsFiles};

/// File in the data folder on which the interface listens for local programs.
pub const SOCKET_FILE: &str = "dormouse.sock";

/// How the control plane is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Folder of the catalogue, the first token and the socket.
    pub data: PathBuf,
    /// Address of the listener, such as `127.0.0.1:8420`; port 0 takes any free one.
    pub listen: String,
    /// Sandboxes' ports are at `<id>-<key>-<port>.box.<domain>`.
    pub domain: String,
    /// How this listener is reached from outside, such as `https://dormouse.example`; default `http://<domain>:<port>`.
    pub public_url: Option<String>,
    /// How long the edge waits for a sandbox's server.
    pub edge: EdgeLimits,
    /// How boxes are set up.
    pub boxes: BoxSettings,
    /// Serve TLS alone, with this certificate; `None`: plain HTTP.
    pub tls: Option<TlsFiles>,
    /// Proxies whose `X-Forwarded-For` is believed.
    pub trusted_proxies: Vec<Network>,
    /// `GET /metrics` needs no token.
    pub open_metrics: bool,
    /// How long one answer follows the output of a command; `None`: until the command ends.
    pub follow_max: Option<std::time::Duration>,
}

/// What every request needs. Cheap to clone.
#[derive(Clone)]
pub(crate) struct App(Arc<Inner>);

struct Inner {
    host: Arc<dyn Host>,
    catalogue: catalogue::Catalogue,
    accounts: accounts::Accounts,
    credit: credit::Credit,
    spending: spending::Seen,
    tokens: auth::Tokens,
    secrets: secrets::Secrets,
    making: make::Making,
    boxes: boxes::Boxes,
    links: edge::Links,
    edge: EdgeLimits,
    proxies: edge::Proxies,
    machines: edge::Machines,
    pool: edge::Pool,
    bursts: edge::Bursts,
    journal: journal::Journal,
    metrics: metrics::Metrics,
    open_metrics: bool,
    follow_max: Option<std::time::Duration>,
    leave: CancellationToken,
    stop: CancellationToken,
}

impl App {
    fn host(&self) -> &Arc<dyn Host> {
        &self.0.host
    }

    fn catalogue(&self) -> &catalogue::Catalogue {
        &self.0.catalogue
    }

    fn accounts(&self) -> &accounts::Accounts {
        &self.0.accounts
    }

    fn credit(&self) -> &credit::Credit {
        &self.0.credit
    }

    fn spending(&self) -> &spending::Seen {
        &self.0.spending
    }

    fn tokens(&self) -> &auth::Tokens {
        &self.0.tokens
    }

    fn secrets(&self) -> &secrets::Secrets {
        &self.0.secrets
    }

    fn making(&self) -> &make::Making {
        &self.0.making
    }

    fn boxes(&self) -> &boxes::Boxes {
        &self.0.boxes
    }

    fn links(&self) -> &edge::Links {
        &self.0.links
    }

    fn edge(&self) -> &EdgeLimits {
        &self.0.edge
    }

    fn proxies(&self) -> &edge::Proxies {
        &self.0.proxies
    }

    fn machines(&self) -> &edge::Machines {
        &self.0.machines
    }

    fn pool(&self) -> &edge::Pool {
        &self.0.pool
    }

    fn bursts(&self) -> &edge::Bursts {
        &self.0.bursts
    }

    fn metrics(&self) -> &metrics::Metrics {
        &self.0.metrics
    }

    fn follow_max(&self) -> Option<std::time::Duration> {
        self.0.follow_max
    }

    fn open_metrics(&self) -> bool {
        self.0.open_metrics
    }

    /// Fires when somebody asked for the daemon's end.
    fn leave(&self) -> &CancellationToken {
        &self.0.leave
    }

    fn journal(&self) -> &journal::Journal {
        &self.0.journal
    }

    /// Fires when the server stops: endless streams end then.
    fn stop(&self) -> &CancellationToken {
        &self.0.stop
    }
}
