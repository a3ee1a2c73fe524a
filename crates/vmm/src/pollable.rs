//! Waiting for a descriptor to become readable, in the runtime.
#![expect(unsafe_code, reason = "tokio's registration trusts that the descriptor stays the same")]

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor for reading. Call within a runtime. The registration ends with the value.
pub(crate) fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    registered(fd, Interest::READABLE)
}

/// As [`readable`], for something else or more.
pub(crate) fn registered(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is one valid, open descriptor from its making to its drop, and the `AsyncFd` owns it for its whole life; nothing
    // here closes or replaces what it refers to.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(Into::into)
}
