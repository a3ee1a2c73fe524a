//! What crosses Dormouse's outer and inner borders, as plain types.
//!
//! - [`sandbox`], [`exec`], [`terminal`], [`mod@file`], [`event`], [`usage`], [`drain`]: the bodies of the public HTTP interface. They are a promise:
//!   everything here is in the OpenAPI document, unknown fields are refused, durations carry their unit.
//! - [`boxes`]: a box, as its host knows it. [`account`]: to whom boxes belong; [`network`]: ranges of addresses.
//!   [`secret`]: what its boxes get.
//! - [`error`]: the one error body, and the codes that clients may rely on.
//! - [`host`]: the one trait between the control plane and a host (a machine that runs sandboxes). Waking happens at
//!   the host, as part of the verb that needs it; no verb only wakes.
//!
//! # Not here
//!
//! How a host does it, how a catalogue stores it. Nothing in this crate does I/O.
#![forbid(unsafe_code)]

pub mod account;
pub mod boxes;
pub mod checkpoint;
pub mod drain;
pub mod drive;
pub mod error;
pub mod event;
pub mod exec;
pub mod file;
pub mod host;
pub mod id;
pub mod network;
pub mod project;
pub mod sandbox;
pub mod secret;
pub mod snapshot;
pub mod terminal;
pub mod usage;

pub use error::{ApiError, Code};
pub use event::Event;
pub use id::SandboxId;
