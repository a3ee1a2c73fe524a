//! A terminal with a program on it, as a person has one: for what behaves otherwise without.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::until;
use crate::wait::WAIT_MAX;

/// See the module.
#[derive(Debug)]
pub struct Pty {
    master: File,
    child: Child,
    /// What was printed and not yet asked for.
    shown: String,
}

impl Pty {
    /// Starts a program on a terminal of this size.
    #[track_caller]
    pub fn start(command: &Command, columns: u16, rows: u16) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).expect("a terminal");
        unlockpt(&master).expect("unlocked");
        let theirs = ioctl_tiocgptpeer(&master, flags).expect("its other end");
        tcsetwinsize(&master, winsize(columns, rows)).expect("a size");
        rustix::io::ioctl_fionbio(&master, true).expect("does not block");
        // So that it is the program's controlling terminal, which tells it of a new size.
        let mut on_it = Command::new("setsid");
        on_it.args(["--ctty", "--wait"]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => on_it.env(name, value),
                None => on_it.env_remove(name),
            };
        }
        if let Some(folder) = command.get_current_dir() {
            on_it.current_dir(folder);
        }
        let copy = |end: &OwnedFd| Stdio::from(end.try_clone().expect("a copy"));
        on_it.stdin(copy(&theirs)).stdout(copy(&theirs)).stderr(copy(&theirs));
        let child = on_it.spawn().expect("`setsid` (util-linux) starts");
        Self { master: File::from(master), child, shown: String::new() }
    }

    /// Types.
    #[track_caller]
    pub fn types(&mut self, keys: &str) {
        let mut rest = keys.as_bytes();
        until("the terminal takes what is typed", || {
            match self.master.write(rest) {
                Ok(typed) => rest = &rest[typed..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => panic!("type {keys:?}: {error}"),
            }
            rest.is_empty().then_some(())
        });
    }

    /// Waits until this is printed; what comes after it is for the next.
    #[track_caller]
    pub fn shows(&mut self, text: &str) {
        let begun = Instant::now();
        let end = until(&format!("`{text}` on the terminal"), || {
            self.read();
            // Before `until` gives up, which does not know what came instead.
            let late = begun.elapsed() > WAIT_MAX.mul_f32(0.9);
            assert!(!late, "`{text}` did not come; what came: {:?}", self.shown);
            self.shown.find(text).map(|at| at + text.len())
        });
        self.shown.drain(..end);
    }

    /// Changes the size of the terminal.
    #[track_caller]
    pub fn resizes(&mut self, columns: u16, rows: u16) {
        tcsetwinsize(&self.master, winsize(columns, rows)).expect("a new size");
    }

    /// Waits for the program's end; its exit code.
    #[track_caller]
    pub fn ends(&mut self) -> Option<i32> {
        until("the program on the terminal ends", || {
            // Somebody must take what it prints, or it waits for that.
            self.read();
            self.child.try_wait().expect("its state")
        })
        .code()
    }

    fn read(&mut self) {
        let mut chunk = [0; 16 * 1024];
        loop {
            match self.master.read(&mut chunk) {
                Ok(read @ 1..) => self.shown.push_str(&String::from_utf8_lossy(&chunk[..read])),
                // Nothing for now; or `EIO`: nobody is at the other end any more.
                Ok(0) | Err(_) => return,
            }
        }
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        // It may have ended; a terminal that goes hangs up what is left.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn winsize(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}
