//! The machine's network device on the host's side.
//!
//! The daemon makes the tap, keeps it persistent (it survives the daemon), and passes its descriptor to each QEMU in turn. All of them have
//! the same open file, hence the same queue: what arrives while no QEMU reads waits there.

mod activity;
mod device;
mod flows;
mod injector;
mod link;
mod reader;
mod sys;

pub use crate::descriptor::TakeError;
pub use activity::ActivityWatch;
pub use device::{Tap, TapError};
pub use flows::{ASKED_MAX, Ends, flows};
pub use injector::Injector;
pub use link::{Ipv6Setup, LinkSetup, set_up};
pub use reader::{Frame, Reader, is_gone};
