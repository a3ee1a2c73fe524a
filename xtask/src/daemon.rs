//! The daemon as `up` starts it and `down` ends it: detached, with a log and a record of which process it is.
//!
//! The record holds the process's id and start time. An id alone comes back into use for something else one day, and
//! then `down` would end a stranger.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::failure::{Context, Failure, Result};
use crate::layout::PROGRAM;

/// How long the daemon may take until it answers: it looks at every sandbox there is first.
const READY_LIMIT: Duration = Duration::from_mins(2);
/// How long it may take to end after it was asked to: running guests are put to sleep first.
const END_LIMIT: Duration = Duration::from_mins(5);
/// How often it is looked at meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long one question to it may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// How many of its last lines are shown when it ends by itself.
const LAST_LINES: usize = 20;

/// The daemon over one data folder.
#[derive(Debug)]
pub(crate) struct Daemon {
    data: PathBuf,
}

/// A process, told apart from a later one with the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) id: u32,
    /// Clock ticks since boot, field 22 of `/proc/<id>/stat`.
    start: u64,
}

impl Daemon {
    pub(crate) fn over(data: &Path) -> Self {
        Self { data: data.to_owned() }
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.data.join("daemon.log")
    }

    fn record(&self) -> PathBuf {
        self.data.join("daemon.process")
    }

    /// The daemon that was started here, if it still runs.
    pub(crate) fn running(&self) -> Option<Process> {
        let text = fs::read_to_string(self.record()).ok()?;
        let mut words = text.split_whitespace();
        let recorded =
            Process { id: words.next()?.parse().ok()?, start: words.next()?.parse().ok()? };
        let name = fs::read_link(format!("/proc/{}/exe", recorded.id)).ok()?;
        // A program that was replaced meanwhile shows as `dormouse (deleted)`.
        let is_ours = name.file_name()?.to_string_lossy().starts_with(PROGRAM);
        (is_ours && Process::with_id(recorded.id) == Some(recorded)).then_some(recorded)
    }

    /// Whether it runs another program than the one that is installed now.
    pub(crate) fn is_outdated(process: Process) -> bool {
        fs::read_link(format!("/proc/{}/exe", process.id))
            .is_ok_and(|path| path.to_string_lossy().ends_with(" (deleted)"))
    }

    /// Where a running one listens, as it was told; `None`: it was not, or nobody may look.
    pub(crate) fn listens(process: Process) -> Option<String> {
        let line = fs::read(format!("/proc/{}/cmdline", process.id)).ok()?;
        listen_of(&String::from_utf8_lossy(&line))
    }

    /// Starts it, detached from this terminal, and waits until it answers.
    pub(crate) fn start(&self, program: &Path, listen: &str) -> Result<()> {
        fs::create_dir_all(&self.data).context(format!("create {}", self.data.display()))?;
        let log = File::options().create(true).append(true).open(self.log());
        let log = log.context(format!("open {}", self.log().display()))?;
        let from = log.metadata().context("look at the log")?.len();
        let err = log.try_clone().context("share the log")?;
        // A session of its own: closing this terminal does not end it.
        let mut child = Command::new("setsid")
            .arg(program)
            .args(["serve", "--listen", listen, "--data"])
            .arg(&self.data)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(err)
            .spawn()
            .context("start the daemon through `setsid` (package util-linux)")?;
        let process = Process::with_id(child.id())
            .ok_or_else(|| Failure::new("the daemon ended before it could be looked at"))?;
        fs::write(self.record(), format!("{} {}\n", process.id, process.start))
            .context(format!("write {}", self.record().display()))?;

        let begun = Instant::now();
        loop {
            if let Some(status) = child.try_wait().context("look at the daemon")? {
                return Err(Failure::new(format!(
                    "the daemon ended ({status}):\n{}",
                    self.last_words(from)
                )));
            }
            if answers(listen) {
                return Ok(());
            }
            if begun.elapsed() > READY_LIMIT {
                return Err(Failure::new(format!(
                    "the daemon gives no answer at {listen} after {} s; its log is {}",
                    READY_LIMIT.as_secs(),
                    self.log().display()
                )));
            }
            thread::park_timeout(LOOK_EVERY);
        }
    }

    /// Asks it to end and waits until it has.
    pub(crate) fn end(&self, process: Process) -> Result<()> {
        // The shell's own `kill`: the program of that name is in a package that may be missing.
        let mut command = Command::new("sh");
        command.args(["-c", &format!("kill -TERM {}", process.id)]);
        crate::process::run(&mut command)?;
        let begun = Instant::now();
        while Process::with_id(process.id) == Some(process) {
            if begun.elapsed() > END_LIMIT {
                return Err(Failure::new(format!(
                    "the daemon (process {}) has not ended {} s after it was asked to; its log is {}",
                    process.id,
                    END_LIMIT.as_secs(),
                    self.log().display()
                )));
            }
            thread::park_timeout(LOOK_EVERY);
        }
        match fs::remove_file(self.record()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).context(format!("remove {}", self.record().display()))
            }
            _ => Ok(()),
        }
    }

    /// What it wrote to its log from this offset on, shortened to the last lines.
    fn last_words(&self, from: u64) -> String {
        let text = fs::read(self.log()).unwrap_or_default();
        let from = usize::try_from(from).unwrap_or_default().min(text.len());
        let text = String::from_utf8_lossy(&text[from..]);
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
    }
}

/// The address on a command line, whose words end with a NUL each.
fn listen_of(line: &str) -> Option<String> {
    let mut words = line.split('\0');
    while let Some(word) = words.next() {
        match word.strip_prefix("--listen") {
            Some("") => return words.next().map(str::to_owned),
            Some(rest) => return rest.strip_prefix('=').map(str::to_owned),
            None => {}
        }
    }
    None
}

impl Process {
    /// The process that has this id now. One that has ended but was not waited for counts as gone.
    fn with_id(id: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        // The second field is the name in brackets, with whatever in it.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        if fields.next()? == "Z" {
            return None;
        }
        Some(Self { id, start: fields.nth(18)?.parse().ok()? })
    }
}

/// Whether the daemon answers that it is well.
fn answers(listen: &str) -> bool {
    let ask = || -> std::io::Result<bool> {
        let address = listen.to_socket_addrs()?.next().ok_or(std::io::ErrorKind::InvalidInput)?;
        let mut stream = TcpStream::connect_timeout(&address, ANSWER_LIMIT)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        stream.write_all(
            b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        )?;
        let mut head = [0; 12];
        stream.read_exact(&mut head)?;
        Ok(&head == b"HTTP/1.1 200")
    };
    ask().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_process_on_record_is_taken_for_the_daemon() {
        let me = std::process::id();
        let own = Process::with_id(me).expect("this process runs");
        assert_eq!(Process::with_id(me), Some(own));
        assert_eq!(Process::with_id(u32::MAX), None);

        let folder = std::env::temp_dir().join(format!("dormouse-xtask-{me}"));
        fs::create_dir_all(&folder).unwrap();
        let daemon = Daemon::over(&folder);
        assert_eq!(daemon.running(), None);
        // This test is no `dormouse`, so even a right record does not name a daemon.
        fs::write(daemon.record(), format!("{me} {}", own.start)).unwrap();
        assert_eq!(daemon.running(), None);
        fs::remove_dir_all(&folder).unwrap();
    }
}
