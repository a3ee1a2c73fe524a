//! The control plane over real sockets, with a host that has no machines.

mod client;
mod fake;
mod rest;
