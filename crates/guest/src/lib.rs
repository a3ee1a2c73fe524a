//! The program in the guest: pid 1 and agent.
//!
//! It boots the guest ([`boot`]), speaks the protocol of the `wire` crate over a virtio-serial port ([`port`], [`link`]), runs
//! programs and keeps their output ([`exec`]), moves files, and makes the guest stand still and wake right
//! ([`quiesce`](agent), [`system`]).
//!
//! Two rules shape it:
//!
//! * **It runs on one thread and waits without a time-out while nothing happens.** The guest's timer list is how the host
//!   learns when to wake a sleeper; a timer of the agent's own in it would keep the sandbox awake.
//! * **It never waits for the host.** When nobody is attached, output goes on into its log, programs end and are reaped;
//!   only the writer of the port waits.
//!
//! The library exists so that all of it but booting can be tested in a process, over a socket.

pub mod agent;
mod awake;
pub mod boot;
mod cgroup;
mod channel;
pub mod drives;
mod exec;
mod failure;
mod files;
pub mod link;
mod loopback;
mod netlink;
pub mod port;
mod ports;
mod sample;
mod serve;
mod sockets;
pub mod system;
mod tree;
mod users;

pub use agent::{Agent, Settings};
