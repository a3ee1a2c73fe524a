//! A process that is not only a number.
//!
//! A pid is used again; a pidfd is not. So a process to be adopted is named by pid, start time and the host's boot, opened as a
//! pidfd, and compared *after* that: from then on signals and the notice of its end go through the pidfd.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// Names one process for good: to be stored, and given to [`crate::Machine::adopt`] later.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// The pid.
    pub pid: u32,
    /// When it started, in clock ticks since the host's boot (field 22 of `/proc/<pid>/stat`).
    pub start_ticks: u64,
    /// The host's boot (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
}

/// The state letter of `/proc/<pid>/stat`, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    /// Running, sleeping, waiting for a disk: it goes on by itself.
    Going,
    /// Stopped by a signal.
    Stopped,
    /// Ended, perhaps not reaped.
    Dead,
}

/// Why a [`ProcessId`] could not be taken up.
#[derive(Debug, thiserror::Error)]
pub enum NoProcess {
    /// It has ended, or its number belongs to another process now.
    #[error("process {pid} has ended")]
    Ended {
        /// The pid.
        pid: u32,
    },
    /// The system would not say.
    #[error("look at process {pid}")]
    Look {
        /// The pid.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// How long a SIGSTOP may take until every thread stands. A thread in the middle of disk I/O stops after it.
const STOP_MAX: Duration = Duration::from_secs(2);
/// How long to wait between two looks at the threads. Stopping takes some 100 µs.
const STOP_LOOK_EVERY: Duration = Duration::from_micros(200);

/// A live process, held by pidfd.
#[derive(Debug)]
pub(crate) struct Process {
    id: ProcessId,
    pidfd: OwnedFd,
}

impl ProcessId {
    /// Processes of this host whose command line has `argument` as one of its arguments.
    ///
    /// For a daemon that was killed between starting a machine and writing down which process it is: search for [`crate::Qemu::memory_argument`].
    pub fn find(argument: &str) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
            else {
                continue;
            };
            // A process may end while we look: it is then none of those we want.
            let Ok(line) = std::fs::read(format!("/proc/{pid}/cmdline")) else { continue };
            if line.split(|&byte| byte == 0).any(|one| one == argument.as_bytes())
                && let Ok(stat) = Stat::read(pid)
                && stat.state != ProcessState::Dead
            {
                found.push(Self { pid, start_ticks: stat.start_ticks, boot_id: boot_id()? });
            }
        }
        Ok(found)
    }

    /// Its state now.
    pub fn state(&self) -> ProcessState {
        match Stat::read(self.pid) {
            Ok(stat)
                if stat.start_ticks == self.start_ticks
                    && boot_id().is_ok_and(|boot| boot == self.boot_id) =>
            {
                stat.state
            }
            _ => ProcessState::Dead,
        }
    }
}

impl Process {
    /// Takes up the process that a child of ours is; it cannot be reaped meanwhile, so the number is right.
    pub(crate) fn of_child(pid: u32) -> io::Result<Self> {
        let pidfd = open(pid)?;
        let id = ProcessId { pid, start_ticks: Stat::read(pid)?.start_ticks, boot_id: boot_id()? };
        Ok(Self { id, pidfd })
    }

    /// Takes up a process by its stored name.
    pub(crate) fn find(id: &ProcessId) -> Result<Self, NoProcess> {
        let look = |source| NoProcess::Look { pid: id.pid, source };
        let ended = NoProcess::Ended { pid: id.pid };
        if boot_id().map_err(look)? != id.boot_id {
            return Err(ended);
        }
        let pidfd = match open(id.pid) {
            Ok(opened) => opened,
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Err(ended),
            Err(error) => return Err(look(error)),
        };
        match Stat::read(id.pid) {
            Ok(stat) if stat.start_ticks == id.start_ticks && stat.state != ProcessState::Dead => {
                Ok(Self { id: id.clone(), pidfd })
            }
            Ok(_) => Err(ended),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(ended),
            Err(error) => Err(look(error)),
        }
    }

    pub(crate) fn id(&self) -> &ProcessId {
        &self.id
    }

    pub(crate) fn pidfd(&self) -> &OwnedFd {
        &self.pidfd
    }

    pub(crate) fn state(&self) -> ProcessState {
        Stat::read(self.id.pid).map_or(ProcessState::Dead, |stat| stat.state)
    }

    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(pidfd_send_signal(&self.pidfd, signal)?)
    }

    /// SIGSTOP, and waits until every thread stands. If one does not within [`STOP_MAX`], all go on and the error is `TimedOut`.
    pub(crate) async fn stop(&self) -> io::Result<()> {
        self.signal(Signal::STOP)?;
        let since = Instant::now();
        while !self.all_threads_stand()? {
            if since.elapsed() > STOP_MAX {
                self.signal(Signal::CONT)?;
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("a thread did not stop within {STOP_MAX:?}"),
                ));
            }
            tokio::time::sleep(STOP_LOOK_EVERY).await;
        }
        Ok(())
    }

    /// The main thread's state alone proves nothing: each virtual processor is a thread of its own.
    fn all_threads_stand(&self) -> io::Result<bool> {
        let pid = self.id.pid;
        for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            match Stat::at(&entry?.path().join("stat")) {
                Ok(stat) if stat.state == ProcessState::Going => return Ok(false),
                Ok(_) => {}
                // The thread ended between the listing and the look.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(self.state() == ProcessState::Stopped)
    }
}

fn open(pid: u32) -> io::Result<OwnedFd> {
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let raw = raw.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
    Ok(pidfd_open(raw, PidfdFlags::NONBLOCK)?)
}

/// The host's boot id.
pub fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

struct Stat {
    state: ProcessState,
    start_ticks: u64,
}

impl Stat {
    fn read(pid: u32) -> io::Result<Self> {
        Self::at(Path::new(&format!("/proc/{pid}/stat")))
    }

    fn at(path: &Path) -> io::Result<Self> {
        let text = std::fs::read_to_string(path)?;
        Self::parse(&text).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("unexpected {}", path.display()))
        })
    }

    /// The name, in brackets, may hold anything, brackets and blanks included: fields count from the last bracket.
    fn parse(text: &str) -> Option<Self> {
        let mut fields = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace();
        let state = match fields.next()? {
            "T" => ProcessState::Stopped,
            "Z" | "X" => ProcessState::Dead,
            _ => ProcessState::Going,
        };
        // Field 3 was the state; field 22 is the start time.
        let start_ticks = fields.nth(18)?.parse().ok()?;
        Some(Self { state, start_ticks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_does_not_shift_the_fields() {
        let text = "42 (a) T 1 (b)) T 1 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 123456 9 9";
        let stat = Stat::parse(text).unwrap();
        assert_eq!((stat.state, stat.start_ticks), (ProcessState::Stopped, 123_456));
        assert!(Stat::parse("42 (a").is_none());
        assert!(Stat::parse("42 (a) R 1 2").is_none());
    }

    #[test]
    fn another_start_time_or_boot_is_another_process() {
        let own = Process::of_child(std::process::id()).unwrap().id().clone();
        assert_eq!(Process::find(&own).unwrap().id(), &own);
        assert_eq!(own.state(), ProcessState::Going);
        let earlier = ProcessId { start_ticks: own.start_ticks - 1, ..own.clone() };
        assert!(matches!(Process::find(&earlier), Err(NoProcess::Ended { .. })));
        let before_reboot = ProcessId { boot_id: "other".into(), ..own };
        assert!(matches!(Process::find(&before_reboot), Err(NoProcess::Ended { .. })));
        assert_eq!(before_reboot.state(), ProcessState::Dead);
    }

    #[test]
    fn a_zombie_has_ended() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let id = Process::of_child(child.id()).unwrap().id().clone();
        // WNOWAIT: waits for the end and leaves the zombie.
        let options =
            rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        rustix::process::waitid(rustix::process::WaitId::Pid(pid), options).unwrap();
        assert!(matches!(Process::find(&id), Err(NoProcess::Ended { .. })));
        child.wait().unwrap();
    }
}
