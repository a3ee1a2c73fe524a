//! From a request to a running process.

use std::{
    ffi::CStr,
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{fs::MetadataExt, process::CommandExt},
    },
    path::Path,
    process::{Command, Stdio},
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    process::{Gid, Pid, Signal, Uid},
    thread::{set_thread_gid, set_thread_groups, set_thread_uid},
};
use tokio::net::unix::pipe;
use wire::{ExecSpec, Failure, FailureCode, Program, Stdin, TerminalSpec};

use super::terminal::{self, Terminal};
use crate::{
    agent::Settings,
    cgroup::Cgroup,
    failure::{code_of, failure, invalid, io_failure},
    users::{self, User},
};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A process that runs, and what it is spoken with through.
pub(super) struct Started {
    pub(super) pid: u32,
    pub(super) streams: Streams,
}

/// Our ends of a process's standard streams.
pub(super) enum Streams {
    /// A pipe for each.
    Pipes { stdin: Option<pipe::Sender>, stdout: pipe::Receiver, stderr: pipe::Receiver },
    /// One terminal for all.
    Terminal(Terminal),
}

/// What is to be run, and on what.
pub(super) enum What<'a> {
    Piped(&'a ExecSpec),
    OnTerminal(&'a TerminalSpec),
}

impl What<'_> {
    pub(super) fn spec(&self) -> &ExecSpec {
        match self {
            Self::Piped(spec) => spec,
            Self::OnTerminal(spec) => &spec.exec,
        }
    }
}

/// What the child was doing when it failed; the exec itself if it said nothing.
#[derive(Clone, Copy)]
enum Stage {
    Cgroup = 1,
    User = 2,
    Cwd = 3,
    Terminal = 4,
}

pub(super) fn spawn(
    settings: &Settings,
    what: &What<'_>,
    cgroup: Option<&Cgroup>,
) -> Result<Started, Failure> {
    let spec = what.spec();
    let user = users::find(&settings.etc, spec.user.as_deref().unwrap_or("root"))?;
    let (program, mut command) = command(&spec.program)?;
    let term = match what {
        What::Piped(_) => None,
        What::OnTerminal(spec) => {
            terminal::check_term(&spec.term)?;
            Some(spec.term.as_str())
        }
    };
    environment(&mut command, &user, term, &spec.env)?;
    let cwd = match spec.cwd.as_deref() {
        Some(cwd) if !cwd.starts_with('/') => {
            return Err(invalid("cwd", format!("cwd must be an absolute path, not `{cwd}`")));
        }
        Some(cwd) => cwd,
        // A home that is not there (yet) must not keep a program from running.
        None if Path::new(&user.home).is_dir() => &user.home,
        None => "/",
    };
    let cwd_c = std::ffi::CString::new(cwd).map_err(|_| nul("cwd"))?;

    let pipes = "make its pipes";
    let (report, reporter) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|error| io_failure(&error.into(), "exec", pipes))?;
    let streams = match what {
        What::Piped(spec) => piped(&mut command, spec.stdin)?,
        What::OnTerminal(spec) => {
            let (terminal, theirs) = Terminal::open(spec.size, user.uid)?;
            let copy = || {
                let copy = theirs.try_clone();
                copy.map(Stdio::from).map_err(|error| io_failure(&error, "terminal", pipes))
            };
            command.stdin(copy()?).stdout(copy()?).stderr(Stdio::from(theirs));
            Streams::Terminal(terminal)
        }
    };

    let entry = cgroup.map(Cgroup::entry).transpose();
    let entry = entry.map_err(|error| io_failure(&error, "exec", "open its cgroup"))?;
    let on_terminal = matches!(streams, Streams::Terminal(_));
    let child = Child { entry, user: user.clone(), cwd: cwd_c, reporter, on_terminal };
    // SAFETY: `Child::prepare` runs in the forked child, where only async-signal-safe calls are sound: it makes raw system
    // calls through rustix, on values made before the fork, and neither allocates nor takes locks.
    #[expect(unsafe_code, reason = "entering a cgroup and changing user between fork and exec")]
    unsafe {
        command.pre_exec(move || child.prepare());
    }
    match command.spawn() {
        // Not waited for here: the reaper does.
        Ok(process) => Ok(Started { pid: process.id(), streams }),
        Err(error) => {
            // Our copy of the reporting end goes with the command.
            drop(command);
            Err(explain(&error, stage(&report), &program, cwd, &user))
        }
    }
}

/// Sends a signal to the process group of an exec's first process.
pub(super) fn signal_group(pid: u32, number: i32) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
    match Signal::from_named_raw(number) {
        Some(signal) => rustix::process::kill_process_group(pid, signal)?,
        None => return Err(Errno::INVAL.into()),
    }
    Ok(())
}

struct Child {
    entry: Option<OwnedFd>,
    user: User,
    cwd: std::ffi::CString,
    reporter: OwnedFd,
    on_terminal: bool,
}

impl Child {
    fn prepare(&self) -> io::Result<()> {
        if let Some(entry) = &self.entry {
            self.doing(Stage::Cgroup, rustix::io::write(entry, b"0").map(drop))?;
        }
        // Not fatal: a kernel without the file has no such protection to undo.
        let _absent = reset_oom_protection();
        self.doing(Stage::Cgroup, rustix::process::setpriority_process(None, 0))?;
        self.doing(Stage::Cgroup, rustix::process::setsid().map(drop))?;
        if self.on_terminal {
            // Standard input is the terminal already, and this process leads its session.
            let taken = rustix::process::ioctl_tiocsctty(rustix::stdio::stdin());
            self.doing(Stage::Terminal, taken)?;
        }
        self.doing(Stage::User, become_user(&self.user))?;
        self.doing(Stage::Cwd, rustix::process::chdir(&*self.cwd))
    }

    fn doing(&self, stage: Stage, result: Result<(), Errno>) -> io::Result<()> {
        result.map_err(|error| {
            // If this fails too, the error is told without its stage.
            let _untold = rustix::io::write(&self.reporter, &[stage as u8]);
            error.into()
        })
    }
}

/// The agent is protected from the kernel's out-of-memory killer; its children must not inherit that.
fn reset_oom_protection() -> Result<(), Errno> {
    const FILE: &CStr = c"/proc/self/oom_score_adj";
    let file = rustix::fs::open(FILE, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, b"0").map(drop)
}

fn become_user(user: &User) -> Result<(), Errno> {
    const GROUPS: usize = 257;
    let mut groups = [Gid::ROOT; GROUPS];
    let count = user.groups.len().min(GROUPS);
    for (to, from) in groups.iter_mut().zip(&user.groups) {
        *to = Gid::from_raw(*from);
    }
    set_thread_groups(&groups[..count])?;
    set_thread_gid(Gid::from_raw(user.gid))?;
    set_thread_uid(Uid::from_raw(user.uid))
}

fn command(program: &Program) -> Result<(String, Command), Failure> {
    match program {
        Program::Argv(argv) => {
            let Some((name, arguments)) = argv.split_first().filter(|(name, _)| !name.is_empty())
            else {
                return Err(invalid("argv", "argv must begin with the name of a program"));
            };
            if argv.iter().any(|argument| argument.contains('\0')) {
                return Err(nul("argv"));
            }
            let mut command = Command::new(name);
            command.args(arguments);
            Ok((name.clone(), command))
        }
        Program::Shell(line) => {
            if line.contains('\0') {
                return Err(nul("shell"));
            }
            let bash = fs::metadata("/bin/bash").is_ok_and(|bash| bash.mode() & 0o111 != 0);
            let shell = if bash { "/bin/bash" } else { "/bin/sh" };
            let mut command = Command::new(shell);
            command.arg("-c").arg(line);
            Ok((shell.to_owned(), command))
        }
    }
}

fn environment(
    command: &mut Command,
    user: &User,
    term: Option<&str>,
    env: &[(String, String)],
) -> Result<(), Failure> {
    command.env_clear();
    command.envs([
        ("PATH", PATH),
        ("HOME", &user.home),
        ("USER", &user.name),
        ("LOGNAME", &user.name),
        ("SHELL", &user.shell),
        ("LANG", "C.UTF-8"),
    ]);
    command.envs(term.map(|term| ("TERM", term)));
    for (name, value) in env {
        if name.is_empty() || name.contains(['=', '\0']) {
            let message = format!("env has the name `{}`", name.escape_debug());
            return Err(invalid("env", message + "; a name is not empty and has no `=` or NUL"));
        }
        if value.contains('\0') {
            return Err(nul("env"));
        }
        command.env(name, value);
    }
    Ok(())
}

/// Gives the command pipes, and us their other ends.
fn piped(command: &mut Command, stdin: Stdin) -> Result<Streams, Failure> {
    let failed = |error: io::Error| io_failure(&error, "stdin", "make its pipes");
    let (stdout, stdout_theirs) = output_pipe()?;
    let (stderr, stderr_theirs) = output_pipe()?;
    command.stdout(Stdio::from(stdout_theirs)).stderr(Stdio::from(stderr_theirs));
    let stdin = match stdin {
        Stdin::Null => {
            command.stdin(Stdio::null());
            None
        }
        Stdin::Pipe => {
            let (sender, receiver) = pipe::pipe().map_err(failed)?;
            command.stdin(Stdio::from(receiver.into_blocking_fd().map_err(failed)?));
            Some(sender)
        }
    };
    Ok(Streams::Pipes { stdin, stdout, stderr })
}

fn output_pipe() -> Result<(pipe::Receiver, OwnedFd), Failure> {
    let made = pipe::pipe().and_then(|(sender, receiver)| {
        // The program's end must block as programs expect.
        Ok((receiver, sender.into_blocking_fd()?))
    });
    made.map_err(|error| io_failure(&error, "exec", "make its pipes"))
}

fn stage(report: &OwnedFd) -> Option<u8> {
    let report: BorrowedFd<'_> = report.as_fd();
    let mut byte = [0];
    match rustix::io::read(report, &mut byte) {
        Ok(1) => Some(byte[0]),
        _ => None,
    }
}

fn explain(error: &io::Error, stage: Option<u8>, program: &str, cwd: &str, user: &User) -> Failure {
    let told = |field: &str, doing: String| io_failure(error, field, &doing);
    match stage {
        Some(stage) if stage == Stage::Cgroup as u8 => told("exec", "set up the process".into()),
        Some(stage) if stage == Stage::User as u8 => {
            told("user", format!("become the user `{}`", user.name))
        }
        Some(stage) if stage == Stage::Cwd as u8 => {
            Failure { code: FailureCode::BadCwd, ..told("cwd", format!("enter `{cwd}`")) }
        }
        Some(stage) if stage == Stage::Terminal as u8 => {
            told("terminal", "take its terminal".into())
        }
        _ if error.raw_os_error() == Some(Errno::TOOBIG.raw_os_error()) => {
            told("argv", "pass arguments and environment".into())
        }
        _ => {
            let mut failed = told("program", format!("run `{program}`"));
            if error.raw_os_error().map(code_of) == Some(FailureCode::NotADirectory) {
                failed.code = FailureCode::NotFound;
            }
            failed
        }
    }
}

fn nul(field: &str) -> Failure {
    failure(FailureCode::Invalid, Some(field), format!("{field} must not hold a NUL byte"))
}
