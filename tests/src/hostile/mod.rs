//! Requests as no honest client sends them, byte by byte, and what comes back.

mod cases;
mod faces;
mod wire;

pub use cases::{Case, Want, everywhere, json};
pub use faces::{Face, Kind};
pub use wire::{Heard, Slow, exchange};

/// A server in a guest that writes down what arrives. Argument: port.
pub const SERVER: &str = include_str!("server.py");
