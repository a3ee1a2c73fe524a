//! One virtual machine, one order at a time.
//!
//! This crate knows QEMU, its files and its tap, and nothing of sandboxes: it does not judge idleness, does not try again, and
//! has no opinion on what should happen next. Its caller gives one order ([`Machine`] takes `&mut self` for it) and gets
//! either the result with the time each phase took, or an error that names the step which failed.
//!
//! | module | what it is for |
//! | --- | --- |
//! | [`qemu`] | the installed QEMU: version, accelerator, digests, what a stored state must match |
//! | [`spec`] | what a machine is made of |
//! | [`machine`] | boot, restore, pause, save, quit, stop and continue the process, adopt |
//! | [`exit`] | how a machine ended |
//! | [`process`] | a process that is not only a number: identity, state, signals |
//! | [`qmp`] | QEMU's control protocol |
//! | [`state`] | the saved device state: checked, and moved on in time |
//! | [`files`] | sparse copies, overlays, durable writes |
//! | [`tap`] | the network device, what crosses it, what is put back |
//! | [`packet`] | what a frame for a sleeping machine means |
//!
//! Invariants, each with a test in `tests/`:
//!
//! 1. QEMU does not die with the process that started it; another one can adopt it ([`Machine::adopt`]).
//! 2. No descriptor reaches QEMU but those named in its command line.
//! 3. A restored machine stands still until [`Machine::cont`].
//! 4. A state that is damaged, or that another QEMU wrote, is refused before QEMU sees it.
//! 5. Two QMP commands never interleave, and an event that comes between them is not lost.

mod command;
mod descriptor;
pub mod exit;
pub mod files;
pub mod machine;
pub mod packet;
mod pollable;
pub mod process;
pub mod qemu;
pub mod qmp;
mod socket;
mod spawn;
pub mod spec;
pub mod state;
pub mod tap;

pub use exit::{Exit, ExitCause, ExitWatch};
pub use machine::Machine;
pub use process::ProcessId;
pub use qemu::{Fingerprint, Mismatch, Qemu};
pub use spec::{Account, BootImage, Disk, Drive, DriveAccess, MachineSpec, Network, Outlets};
