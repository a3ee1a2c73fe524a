//! The commands that talk to the daemon, one file per subject.

pub(crate) mod accounts;
mod attached;
mod box_exec;
mod box_view;
pub(crate) mod boxes;
pub(crate) mod checkpoints;
pub(crate) mod drives;
pub(crate) mod events;
pub(crate) mod exec;
pub(crate) mod execs;
pub(crate) mod files;
pub(crate) mod forward;
pub(crate) mod images;
pub(crate) mod project;
mod sandbox_view;
pub(crate) mod sandboxes;
pub(crate) mod secrets;
pub(crate) mod shell;
pub(crate) mod snapshots;
pub(crate) mod usage;
pub(crate) mod volumes;

/// Exit code of a program that writes to a pipe which nobody reads: that of the signal for it.
const EXIT_NO_READER: i32 = 128 + 13;
