//! Boxes: sandboxes for AI agents and the people who watch them, with another policy (B44) and more around them.
//!
//! - [`start`]: what a box shall be, and what is answered when it has been started.
//! - [`view`]: what is told about one.
//! - [`act`]: what is done with one.
//! - [`host`]: what its host decides by.
//! - [`wiring`]: how its names are wired, as its host carries it out.
//!
//! Names are `camelCase` on this face.

pub mod act;
pub mod host;
pub mod start;
pub mod view;
pub mod wiring;

pub use host::{BoxBlocker, BoxFreeze, BoxLife, BoxLimits, BoxStatus};
pub use wiring::Wiring;
