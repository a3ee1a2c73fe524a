//! What is asked: the interface, the tools of agents, and a port of a sandbox.

use std::net::SocketAddr;

use serde_json::json;

use crate::mcp::{REVISION, meta};

/// Which of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `/v1/…`
    Api,
    /// `/mcp`
    Mcp,
    /// A port of a sandbox, through its link.
    Edge,
}

/// One of them, and how to ask it.
#[derive(Clone, Debug)]
pub struct Face {
    /// Which.
    pub kind: Kind,
    /// Where it listens.
    pub server: SocketAddr,
    /// The `Host` header.
    pub host: String,
    /// A token; empty where none is needed.
    pub token: String,
}

impl Face {
    /// Where a good request goes.
    pub fn path(&self) -> &'static str {
        match self.kind {
            Kind::Api => "/v1/sandboxes",
            Kind::Mcp => "/mcp",
            Kind::Edge => "/good",
        }
    }

    /// Headers without which nobody is let in, and those that a good request has besides.
    pub fn headers(&self) -> String {
        let mut headers = String::new();
        if !self.token.is_empty() {
            headers = format!("Authorization: Bearer {}\r\n", self.token);
        }
        if self.kind == Kind::Mcp {
            headers.push_str("Accept: application/json, text/event-stream\r\n");
            headers.push_str("Content-Type: application/json\r\nMcp-Method: tools/list\r\n");
            headers.extend(["MCP-Protocol-Version: ", REVISION, "\r\n"]);
        }
        headers
    }

    /// The beginning of a request: its line and the headers that it must have.
    pub fn head(&self, method: &str) -> String {
        let (path, host) = (self.path(), &self.host);
        format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\n{}", self.headers())
    }

    /// The body of a good request.
    pub fn good_body(&self) -> String {
        if self.kind != Kind::Mcp {
            return String::new();
        }
        json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": { "_meta": meta() } })
            .to_string()
    }

    /// A request that must be answered with 200, whatever came before it.
    pub fn good(&self) -> String {
        let body = self.good_body();
        if body.is_empty() {
            return format!("{}Connection: close\r\n\r\n", self.head("GET"));
        }
        format!(
            "{}Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            self.head("POST"),
            body.len()
        )
    }
}
