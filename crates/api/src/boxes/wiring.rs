//! How a box's names are wired, as its host carries it out (T6-T11).

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::SandboxId;

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
