//! The control plane over real sockets, with a host that has no machines.

mod accounts;
mod checkpoints;
pub(crate) mod client;
mod conformance;
mod contract;
mod edge;
mod events;
mod execs;
pub(crate) mod fake;
mod fake_terminals;
mod files;
mod idempotency;
mod rest;
mod system;
mod terminals;
