//! Execs: programs that run at the host's wish, and what is kept of them.
//!
//! An exec lives here, apart from links and channels. One task per exec takes what the program prints into a log, so that
//! the program never waits for a reader; a reader comes and goes by offset. The result is kept after the end, for the
//! newest [`ENDED_KEPT`] of them.
//!
//! An exec has *ended* when its first process has: what that one left behind (`server &`) runs on in the exec's cgroup, may
//! still print into the log, and is killed by signal 9 to the exec.

mod output;
mod pump;
mod spawn;
mod terminal;

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::{fs::DirBuilderExt, process::ExitStatusExt},
    process::ExitStatus,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::process::{Pid, Signal, WaitOptions};
use tokio::{
    net::unix::pipe,
    signal::unix::{SignalKind, signal},
    sync::{oneshot, watch},
    time::Instant,
};
use wire::{
    Ended, ExecId, ExecInfo, ExecSpec, ExecState, Failure, FailureCode, Program, Stream,
    TerminalSize, TerminalSpec, exec::COMMAND_SHOWN_MAX,
};

pub(crate) use output::{Cursor, OutputLog};
use pump::Source;
use spawn::{Streams, What};
use terminal::Terminal;

use crate::{
    agent::Settings,
    cgroup::Cgroup,
    failure::{failure, io_failure},
};

/// Execs that may run at a time.
pub(crate) const RUNNING_MAX: usize = 512;
/// Ended execs whose result and output are kept; the oldest goes first. Bounds their disk to 256 × 64 MiB in the worst case.
pub(crate) const ENDED_KEPT: usize = 256;
/// Longest time limit of an exec: a year, in milliseconds.
pub(crate) const TIMEOUT_MAX_MS: u64 = 366 * 24 * 3_600_000;
/// All execs of this boot.
#[derive(Debug, Clone)]
pub(crate) struct Execs {
    table: Arc<Mutex<Table>>,
    cgroup: Option<Cgroup>,
    settings: Settings,
}

#[derive(Debug)]
struct Table {
    last: u64,
    execs: BTreeMap<ExecId, Arc<Exec>>,
    /// Ends of first processes, by process id.
    exits: BTreeMap<u32, oneshot::Sender<ExitStatus>>,
}

/// One exec.
#[derive(Debug)]
pub(crate) struct Exec {
    id: ExecId,
    pid: u32,
    name: Option<String>,
    command: String,
    started_ms: i64,
    deadline: Option<Instant>,
    /// None also once it is removed.
    cgroup: Mutex<Option<Cgroup>>,
    state: watch::Sender<ExecState>,
    pub(crate) log: Arc<Mutex<OutputLog>>,
    /// Goes up with each piece of output and with the end.
    pub(crate) changed: watch::Sender<u64>,
    pub(crate) stdin: tokio::sync::Mutex<Option<Input>>,
    /// Of one that runs on a terminal, until its end.
    terminal: Mutex<Option<Arc<Terminal>>>,
}

/// Our end of a program's standard input.
#[derive(Debug)]
pub(crate) enum Input {
    Pipe(pipe::Sender),
    Terminal(Arc<Terminal>),
}

impl Input {
    pub(crate) async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Pipe(pipe) => pipe.writable().await,
            Self::Terminal(terminal) => terminal.writable().await,
        }
    }

    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Pipe(pipe) => pipe.try_write(bytes),
            Self::Terminal(terminal) => terminal.try_write(bytes),
        }
    }
}

impl Execs {
    pub(crate) fn start(
        settings: &Settings,
        cgroup: Option<Cgroup>,
        boot: [u8; 16],
    ) -> io::Result<Self> {
        match fs::remove_dir_all(&settings.execs) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // What a program prints is nobody else's business.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&settings.execs)?;
        let salt = u32::from_le_bytes([boot[0], boot[1], boot[2], boot[3]]);
        let table =
            Table { last: u64::from(salt) << 32, execs: BTreeMap::new(), exits: BTreeMap::new() };
        let execs = Self { table: Arc::new(Mutex::new(table)), cgroup, settings: settings.clone() };
        let mut children = signal(SignalKind::child())?;
        let reaper = execs.clone();
        tokio::spawn(async move {
            while children.recv().await.is_some() {
                reaper.reap();
            }
        });
        Ok(execs)
    }

    /// Starts a program. Runs from fork to exec without giving up the thread: the reaper must not see the end of a process
    /// that is not in the table yet.
    pub(crate) fn run(&self, spec: &ExecSpec) -> Result<(ExecId, u32), Failure> {
        self.begin(&What::Piped(spec))
    }

    /// As [`run`](Self::run), on a terminal of its own.
    pub(crate) fn run_on_terminal(&self, spec: &TerminalSpec) -> Result<(ExecId, u32), Failure> {
        self.begin(&What::OnTerminal(spec))
    }

    fn begin(&self, what: &What<'_>) -> Result<(ExecId, u32), Failure> {
        let spec = what.spec();
        let id = {
            let mut table = self.table();
            if table.exits.len() >= RUNNING_MAX {
                let message = format!("more than {RUNNING_MAX} execs run already");
                return Err(failure(FailureCode::TooMany, None, message));
            }
            table.last += 1;
            ExecId(table.last)
        };
        if spec.timeout_ms.is_some_and(|ms| ms == 0 || ms > TIMEOUT_MAX_MS) {
            let message = format!("timeout_ms must be from 1 to {TIMEOUT_MAX_MS}");
            return Err(failure(FailureCode::Invalid, Some("timeout_ms"), message));
        }
        let cgroup = match &self.cgroup {
            Some(cgroup) => {
                let child = cgroup.child(&format!("exec-{id}"));
                let child = child.map_err(|error| io_failure(&error, "exec", "make its cgroup"))?;
                // Root in the guest may have frozen either, and may have made the child before us: the process would enter
                // it between fork and exec and stand there, and this program, which waits for the exec, with it.
                for cgroup in [cgroup, &child] {
                    let thawed = cgroup.thaw();
                    thawed.map_err(|error| io_failure(&error, "exec", "thaw its cgroup"))?;
                }
                Some(child)
            }
            None => None,
        };
        let started = match spawn::spawn(&self.settings, what, cgroup.as_ref()) {
            Ok(started) => started,
            Err(failure) => {
                if let Some(cgroup) = cgroup {
                    cgroup.remove_if_empty();
                }
                return Err(failure);
            }
        };
        let pid = started.pid;
        let (stdin, terminal, sources) = match started.streams {
            Streams::Pipes { stdin, stdout, stderr } => (
                stdin.map(Input::Pipe),
                None,
                [Source::pipe(stdout, Stream::Stdout), Source::pipe(stderr, Stream::Stderr)],
            ),
            Streams::Terminal(terminal) => {
                let terminal = Arc::new(terminal);
                let sources = [Source::terminal(Arc::clone(&terminal)), Source::none()];
                (Some(Input::Terminal(Arc::clone(&terminal))), Some(terminal), sources)
            }
        };
        let deadline = spec.timeout_ms.map(|ms| Instant::now() + Duration::from_millis(ms));
        let exec = Arc::new(Exec {
            id,
            pid,
            command: shown(&spec.program),
            name: spec.name.clone(),
            started_ms: now_ms(),
            deadline,
            cgroup: Mutex::new(cgroup),
            state: watch::Sender::new(ExecState::Running),
            log: Arc::new(Mutex::new(OutputLog::new(self.settings.execs.join(id.to_string())))),
            changed: watch::Sender::new(0),
            stdin: tokio::sync::Mutex::new(stdin),
            terminal: Mutex::new(terminal),
        });
        let (exit, exited) = oneshot::channel();
        {
            let mut table = self.table();
            table.execs.insert(id, Arc::clone(&exec));
            table.exits.insert(pid, exit);
        }
        let execs = self.clone();
        tokio::spawn(async move {
            exec.pump(sources, exited, &execs).await;
        });
        Ok((id, pid))
    }

    pub(crate) fn find(&self, id: ExecId) -> Result<Arc<Exec>, Failure> {
        self.table().execs.get(&id).cloned().ok_or_else(|| {
            let message = format!(
                "there is no exec {id} (any more); the newest {ENDED_KEPT} ended ones are kept"
            );
            failure(FailureCode::UnknownExec, Some("id"), message)
        })
    }

    pub(crate) fn list(&self) -> Vec<ExecInfo> {
        self.table().execs.values().map(|exec| exec.info()).collect()
    }

    pub(crate) fn running(&self) -> u32 {
        u32::try_from(self.table().exits.len()).unwrap_or(u32::MAX)
    }

    /// The earliest time limit of a running exec.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let table = self.table();
        table.execs.values().filter(|exec| exec.runs()).filter_map(|exec| exec.deadline).min()
    }

    /// Takes the ends of all processes that ended.
    fn reap(&self) {
        if self.settings.reap_all {
            // Also orphans: nobody else waits for them.
            while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
                self.reaped(pid, status.as_raw());
            }
        } else {
            let pids: Vec<u32> = self.table().exits.keys().copied().collect();
            for pid in pids {
                let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { continue };
                if let Ok(Some((pid, status))) =
                    rustix::process::waitpid(Some(pid), WaitOptions::NOHANG)
                {
                    self.reaped(pid, status.as_raw());
                }
            }
        }
        self.tidy();
    }

    fn reaped(&self, pid: Pid, status: i32) {
        let exit = self.table().exits.remove(&pid.as_raw_nonzero().get().unsigned_abs());
        if let Some(exit) = exit {
            // The exec's task lives until it has this.
            let _never = exit.send(ExitStatus::from_raw(status));
        }
    }

    /// Forgets the oldest ended execs over the number kept, and removes cgroups that became empty.
    fn tidy(&self) {
        let mut table = self.table();
        let ended: Vec<ExecId> =
            table.execs.values().filter(|exec| !exec.runs()).map(|exec| exec.id).collect();
        for id in &ended[..ended.len().saturating_sub(ENDED_KEPT)] {
            if let Some(exec) = table.execs.remove(id) {
                exec.log().discard();
            }
        }
        for exec in table.execs.values().filter(|exec| !exec.runs()) {
            exec.remove_cgroup();
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Exec {
    pub(crate) fn runs(&self) -> bool {
        *self.state.borrow() == ExecState::Running
    }

    pub(crate) fn ended(&self) -> Option<Ended> {
        match *self.state.borrow() {
            ExecState::Running => None,
            ExecState::Ended(ended) => Some(ended),
        }
    }

    pub(crate) async fn wait(&self) -> ExecState {
        let mut state = self.state.subscribe();
        let ended = state.wait_for(|state| *state != ExecState::Running).await;
        // The sender is this exec's own, so there is always an end to see.
        ended.map_or(ExecState::Running, |state| *state)
    }

    /// Sends a signal to its process group; 9 kills all that it started, also what left the group.
    pub(crate) fn signal(&self, number: i32) -> Result<(), Failure> {
        if !(1..=64).contains(&number) {
            let message = format!("signal must be from 1 to 64, not {number}");
            return Err(failure(FailureCode::Invalid, Some("signal"), message));
        }
        if number == Signal::KILL.as_raw() {
            return self
                .kill()
                .map_err(|error| io_failure(&error, "signal", &format!("kill exec {}", self.id)));
        }
        // Once reaped, its number may be another's.
        if !self.runs() {
            let message = format!("exec {} has ended", self.id);
            return Err(failure(FailureCode::Ended, Some("id"), message));
        }
        spawn::signal_group(self.pid, number).map_err(|error| {
            io_failure(&error, "signal", &format!("signal {number} to exec {}", self.id))
        })
    }

    /// Changes the size of its terminal.
    pub(crate) fn resize(&self, size: TerminalSize) -> Result<(), Failure> {
        match &*self.terminal() {
            _ if !self.runs() => {
                let message = format!("exec {} has ended", self.id);
                Err(failure(FailureCode::Ended, Some("id"), message))
            }
            Some(terminal) => terminal.resize(size),
            None => {
                let message = format!("exec {} does not run on a terminal", self.id);
                Err(failure(FailureCode::Invalid, Some("id"), message))
            }
        }
    }

    fn kill(&self) -> io::Result<()> {
        match &*self.cgroup() {
            Some(cgroup) => cgroup.kill(),
            None if self.runs() => spawn::signal_group(self.pid, Signal::KILL.as_raw()),
            None => Ok(()),
        }
    }

    /// Removes its cgroup if its last process has gone.
    fn remove_cgroup(&self) {
        self.cgroup().take_if(|cgroup| cgroup.remove_if_empty());
    }

    fn terminal(&self) -> MutexGuard<'_, Option<Arc<Terminal>>> {
        self.terminal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cgroup(&self) -> MutexGuard<'_, Option<Cgroup>> {
        self.cgroup.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn info(&self) -> ExecInfo {
        let log = self.log();
        ExecInfo {
            id: self.id,
            pid: self.pid,
            name: self.name.clone(),
            command: self.command.clone(),
            started_ms: self.started_ms,
            state: *self.state.borrow(),
            output_start: log.start(),
            output_end: log.end(),
        }
    }

    pub(crate) fn log(&self) -> MutexGuard<'_, OutputLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn append(&self, stream: Stream, bytes: &[u8]) {
        self.log().append(stream, bytes);
        self.changed.send_modify(|version| *version += 1);
    }
}

fn shown(program: &Program) -> String {
    let mut command = match program {
        Program::Shell(line) => line.clone(),
        Program::Argv(argv) => argv.join(" "),
    };
    if command.len() > COMMAND_SHOWN_MAX {
        let cut = (0..=COMMAND_SHOWN_MAX).rev().find(|&at| command.is_char_boundary(at));
        command.truncate(cut.unwrap_or(0));
    }
    command
}

fn now_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(folder: &std::path::Path) -> Settings {
        Settings {
            cgroup: None,
            execs: folder.join("exec"),
            awake_socket: None,
            reap_all: false,
            proc: "/proc".into(),
            etc: "/etc".into(),
            versions: wire::VERSIONS,
        }
    }

    /// Files stand for the kernel's: what matters is what is written to them before the program is started.
    #[tokio::test]
    async fn a_cgroup_that_the_guest_froze_is_thawed_before_a_program_enters_it() {
        let folder = tempfile::tempdir().unwrap();
        let user = folder.path().join("user");
        let child = user.join(format!("exec-{}", ExecId(1)));
        fs::create_dir_all(&child).unwrap();
        fs::write(child.join("cgroup.procs"), "").unwrap();
        let freezers = [&user, &child].map(|cgroup| cgroup.join("cgroup.freeze"));
        for freezer in &freezers {
            fs::write(freezer, "1").unwrap();
        }
        let cgroup = Cgroup::make(user).unwrap();
        let execs = Execs::start(&settings(folder.path()), Some(cgroup), [0; 16]).unwrap();
        let (id, _) = execs.run(&ExecSpec::argv(["true"])).unwrap();
        assert_eq!(id, ExecId(1));
        assert_eq!(fs::read_to_string(child.join("cgroup.procs")).unwrap(), "0");
        for freezer in freezers {
            assert_eq!(fs::read_to_string(&freezer).unwrap(), "0", "{}", freezer.display());
        }
    }
}
