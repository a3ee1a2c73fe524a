//! What the end-to-end tests share: a lab with a daemon of its own, in a network namespace of its own.
//!
//! Each test runs the real binary with real guests. It re-executes itself under `unshare --net` first, so that guests'
//! addresses, taps and rules never touch the machine's network, and two tests never meet. Images and templates are made
//! once and shared (`DORMOUSE_IMAGES`, `DORMOUSE_TEMPLATES`), everything else is the test's own and goes with it.
//!
//! Tests wait for states, never for times; each wait has a bound that only a hang reaches.
#![forbid(unsafe_code)]

pub mod bench;
pub mod boxes;
pub mod clients;
pub mod far;
pub mod filler;
pub mod hostile;
pub mod lab;
pub mod load;
pub mod lossy;
pub mod mcp;
pub mod net;
pub mod proc;
pub mod pty;
pub mod s3;
pub mod wait;
pub mod witness;

pub use lab::{Lab, isolated};
pub use wait::{until, within};

/// The path of the test function in which it stands, as the test runner names it.
#[macro_export]
macro_rules! test_name {
    () => {{
        fn here() {}
        let full = std::any::type_name_of_val(&here);
        full.trim_end_matches("::here").split_once("::").map_or(full, |(_, path)| path)
    }};
}
