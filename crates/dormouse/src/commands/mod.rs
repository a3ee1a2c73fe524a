//! The commands that talk to the daemon, one file per subject.

pub(crate) mod events;
pub(crate) mod exec;
pub(crate) mod files;
pub(crate) mod images;
pub(crate) mod sandboxes;
