//! A terminal of an exec: the pair of devices, and how the agent's end is read, filled and resized.
//!
//! The agent holds the master. The program has the other end as its controlling terminal and standard streams, so what it
//! prints, and what the line discipline echoes, comes out of the master as one stream. When the last process that has
//! the terminal open is gone, reading fails with `EIO`, which is its end.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use rustix::{
    fs::{Gid, Mode, Uid},
    io::Errno,
    pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt},
    termios::Winsize,
};
use tokio::io::{Interest, unix::AsyncFd};
use wire::{Failure, FailureCode, TerminalSize};

use crate::failure::{failure, io_failure};

/// Most columns or rows of a terminal. More than any screen has, and few enough that whoever draws it can hold it.
pub(crate) const SIDE_MAX: u16 = 500;
/// Fewest columns or rows: with less, full-screen programs and emulators misbehave.
pub(crate) const SIDE_MIN: u16 = 2;
/// Longest name of a kind of terminal, in bytes; the longest in terminfo has 30 or so.
pub(crate) const TERM_MAX: usize = 64;
/// The group that owns terminals, as Debian and the mount of `/dev/pts` have it.
const TTY_GROUP: u32 = 5;

/// Hang a terminal up (`asm-generic/ioctls.h`).
const TIOCVHANGUP: libc::c_ulong = 0x5437;

/// The agent's end.
#[derive(Debug)]
pub(crate) struct Terminal {
    master: AsyncFd<OwnedFd>,
}

impl Terminal {
    /// Opens a pair; answers with the program's end, which belongs to `owner`.
    pub(super) fn open(size: TerminalSize, owner: u32) -> Result<(Self, OwnedFd), Failure> {
        check(size)?;
        let made = || -> io::Result<(Self, OwnedFd)> {
            let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
            let master = openpt(flags)?;
            unlockpt(&master)?;
            let theirs = ioctl_tiocgptpeer(&master, flags)?;
            // Who may not own it can still use it: in tests the agent is nobody special.
            let owned = rustix::fs::fchown(
                &theirs,
                Some(Uid::from_raw(owner)),
                Some(Gid::from_raw(TTY_GROUP)),
            );
            if let Err(error) = owned
                && error != Errno::PERM
            {
                return Err(error.into());
            }
            if owned.is_ok() {
                rustix::fs::fchmod(&theirs, Mode::RUSR | Mode::WUSR | Mode::WGRP)?;
            }
            rustix::termios::tcsetwinsize(&master, winsize(size))?;
            rustix::io::ioctl_fionbio(&master, true)?;
            let interest = Interest::READABLE | Interest::WRITABLE;
            // SAFETY: an `OwnedFd` owns its descriptor: it stays open and the same until the `AsyncFd`, which never gives
            // it out, is dropped.
            #[expect(unsafe_code, reason = "registering a descriptor with the runtime")]
            let master = unsafe { AsyncFd::register_with_interest(master, interest)? };
            Ok((Self { master }, theirs))
        };
        made().map_err(|error| io_failure(&error, "terminal", "make its terminal"))
    }

    /// Changes the size; the kernel tells the foreground programs.
    pub(super) fn resize(&self, size: TerminalSize) -> Result<(), Failure> {
        check(size)?;
        rustix::termios::tcsetwinsize(self.master.get_ref(), winsize(size))
            .map_err(|error| io_failure(&error.into(), "size", "change the terminal's size"))
    }

    /// Hangs it up, as when the line is cut: its session is told, and whoever reads from it or writes to it gets an end or an
    /// error. A mere signal may come just before a program waits for the next key, and then it waits on.
    pub(crate) fn hang_up(&self) -> io::Result<()> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let theirs = ioctl_tiocgptpeer(self.master.get_ref(), flags)?;
        // SAFETY: the descriptor is open for the duration of the call, and this request takes no argument.
        #[expect(unsafe_code, reason = "the one request of terminals that rustix has not")]
        let result = unsafe { libc::ioctl(theirs.as_raw_fd(), TIOCVHANGUP) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Waits until something can be read, or its end has come.
    pub(super) async fn readable(&self) -> io::Result<()> {
        // Not cleared here: `try_read` does so when it finds nothing.
        self.master.readable().await.map(|mut ready| ready.retain_ready())
    }

    /// Waits until something can be written.
    pub(crate) async fn writable(&self) -> io::Result<()> {
        self.master.writable().await.map(|mut ready| ready.retain_ready())
    }

    /// Reads what is there: 0 at the end, `WouldBlock` when there is nothing for now.
    pub(super) fn try_read(&self, into: &mut [u8]) -> io::Result<usize> {
        Self::ended(self.master.try_io(Interest::READABLE, |master| read(master, &mut *into)))
    }

    /// As [`try_read`](Self::try_read), but asks the kernel at once. What a program printed reaches this end a moment later,
    /// and when it has exited the runtime may not have been told yet that there is more.
    pub(super) fn read_now(&self, into: &mut [u8]) -> io::Result<usize> {
        Self::ended(read(self.master.get_ref(), into))
    }

    fn ended(read: io::Result<usize>) -> io::Result<usize> {
        match read {
            Err(error) if error.raw_os_error() == Some(Errno::IO.raw_os_error()) => Ok(0),
            read => read,
        }
    }

    /// Writes some of it, `WouldBlock` when the program has not taken what was written before.
    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.master.try_io(Interest::WRITABLE, |master| {
            rustix::io::write(master.as_fd(), bytes).map_err(io::Error::from)
        })
    }
}

fn read(master: &OwnedFd, into: &mut [u8]) -> io::Result<usize> {
    rustix::io::read(master.as_fd(), into).map_err(io::Error::from)
}

/// Checks the name of a kind of terminal.
pub(super) fn check_term(term: &str) -> Result<(), Failure> {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_+.".contains(&byte);
    if term.is_empty() || term.len() > TERM_MAX || !term.bytes().all(known) {
        let message =
            format!("term must be 1 to {TERM_MAX} letters, digits, `-`, `_`, `+` and `.`");
        return Err(failure(FailureCode::Invalid, Some("term"), message));
    }
    Ok(())
}

fn check(size: TerminalSize) -> Result<(), Failure> {
    let sides = SIDE_MIN..=SIDE_MAX;
    if sides.contains(&size.columns) && sides.contains(&size.rows) {
        return Ok(());
    }
    let message = format!("columns and rows must be from {SIDE_MIN} to {SIDE_MAX}");
    Err(failure(FailureCode::Invalid, Some("size"), message))
}

fn winsize(size: TerminalSize) -> Winsize {
    Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 }
}
