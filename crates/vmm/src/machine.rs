//! One machine and the orders that can be given to it.
//!
//! ```text
//!                boot                     restore
//!                  |                         |
//!                  v      pause              v
//!               running ---------------> standing --save_state--> standing
//!                  ^  <---------------       |
//!                  |         cont            | quit
//!     stop_process |                         v
//!                  v                       ended    (kill, the guest itself or a crash lead there from everywhere)
//!               stopped (SIGSTOP; takes no QMP order)
//! ```
//!
//! - Orders take `&mut self`: there is one at a time. None is tried again here, each has a limit, each says how long it took.
//! - QEMU goes on when a [`Machine`] is dropped; only [`Machine::quit`] and [`Machine::kill`] end it. Another `Machine` for the
//!   same process is had by [`Machine::adopt`], in this daemon or a later one.
//! - A child of ours is reaped as soon as it ends, whether the `Machine` is still there or not.
//!
//! What is not here: when to do any of it, and what becomes of the files.

mod adopt;
mod save;
mod start;
mod watch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

pub use adopt::{AdoptError, Adopted};
pub use save::{SaveError, Saved, write_state};
pub use start::{StartError, Started};

use crate::exit::{Exit, ExitWatch};
use crate::process::{Process, ProcessId, ProcessState};
use crate::qemu::Fingerprint;
use crate::qmp::{Qmp, QmpError};
use crate::spec::{GUEST_SOCKET, Outlets, QMP_SOCKET};
use watch::{Asked, Watched};

/// How long `stop` may take: QEMU waits for the guest's disk writes that are under way and flushes them.
const PAUSE_MAX: Duration = Duration::from_mins(1);
/// How long `quit` may take: QEMU flushes and closes the disk. Then it is killed.
const QUIT_MAX: Duration = Duration::from_secs(30);
/// How long the kernel may take to end a killed process. Longer means that it hangs in a disk that does not answer.
const KILL_MAX: Duration = Duration::from_secs(30);
/// How long to wait for the end of a process whose connection has ended, before saying that only the connection has.
const EXPLAIN_MAX: Duration = Duration::from_millis(500);

/// A machine that has been started or adopted.
#[derive(Debug)]
pub struct Machine {
    process: Arc<Process>,
    outlets: Outlets,
    /// None only for a machine that was adopted while its process was stopped.
    qmp: Option<Qmp>,
    watched: Watched,
    fingerprint: Fingerprint,
    started: Started,
}

/// What the guest does, by QEMU's word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestState {
    /// It runs.
    Running,
    /// It stands: paused, or restored and not yet let go, or saved.
    Standing,
    /// QEMU waits for a state that was never (wholly) given: of no use any more.
    AwaitingState,
    /// QEMU stopped it because the host's disk is full or broken; `cont` tries the write again.
    DiskError,
    /// It has ended, and QEMU is about to.
    Ended,
    /// Something else; QEMU's word for it.
    Other(String),
}

/// An order that was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum OrderError {
    /// The machine has ended.
    #[error("machine has ended: {0:?}")]
    Ended(Exit),
    /// Its process is stopped; [`Machine::continue_process`] first.
    #[error("machine's process is stopped")]
    Stopped,
    /// QEMU did not do it.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// A signal had no effect.
    #[error("{doing} the process")]
    Signal {
        /// "stop", "continue", "kill".
        doing: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A socket could not be reached.
    #[error("connect to {name}")]
    Socket {
        /// Its file's name.
        name: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl Machine {
    /// Its process; to be stored, for [`Machine::adopt`].
    pub fn process(&self) -> &ProcessId {
        self.process.id()
    }

    /// Its sockets and logs.
    pub fn outlets(&self) -> &Outlets {
        &self.outlets
    }

    /// What a state that it saves will depend on. For a restored machine that is what its state depended on.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// How long its start took. All zero for an adopted machine.
    pub fn started(&self) -> Started {
        self.started
    }

    /// How it ended, if it has.
    pub fn exit(&self) -> Option<Exit> {
        self.watched.exit().exited_yet()
    }

    /// Tells when it ends.
    pub fn exit_watch(&self) -> ExitWatch {
        self.watched.exit()
    }

    /// Whether the process is stopped by a signal, ended, or neither.
    pub fn process_state(&self) -> ProcessState {
        self.process.state()
    }

    /// What the guest does.
    pub async fn guest_state(&mut self) -> Result<GuestState, OrderError> {
        let answer = self.command("query-status", Value::Null).await?;
        Ok(match answer["status"].as_str().unwrap_or_default() {
            "running" => GuestState::Running,
            "paused" | "prelaunch" | "postmigrate" | "finish-migrate" | "suspended" => {
                GuestState::Standing
            }
            "inmigrate" => GuestState::AwaitingState,
            "io-error" => GuestState::DiskError,
            "shutdown" | "guest-panicked" | "internal-error" => GuestState::Ended,
            other => GuestState::Other(other.to_owned()),
        })
    }

    /// Lets the guest go on, after a restore, a pause or a save. A running guest runs on.
    pub async fn cont(&mut self) -> Result<Duration, OrderError> {
        let since = Instant::now();
        self.command("cont", Value::Null).await?;
        self.watched.set_going(true);
        Ok(since.elapsed())
    }

    /// Makes the guest stand. Its disk writes are finished and flushed when this returns.
    pub async fn pause(&mut self) -> Result<Duration, OrderError> {
        let since = Instant::now();
        self.qmp()?;
        let done = self.qmp()?.run_within("stop", Value::Null, PAUSE_MAX).await;
        self.explained(done).await?;
        self.watched.set_going(false);
        Ok(since.elapsed())
    }

    /// Ends QEMU in order: the disk is flushed and closed. The guest notices nothing, it is simply no more; pause and save first
    /// if it shall go on later. Kills if QEMU does not end within 30 s.
    pub async fn quit(&mut self) -> Result<Exit, OrderError> {
        let qmp = self.qmp()?;
        self.watched.asked(Asked::Quit);
        match qmp.run("quit", Value::Null).await {
            // QEMU may be gone before its answer is.
            Ok(_) | Err(QmpError::Closed { .. }) => {}
            Err(error) => tracing::warn!(
                error = &error as &dyn std::error::Error,
                "qemu would not quit, will be killed"
            ),
        }
        match tokio::time::timeout(QUIT_MAX, self.watched.exit().exited()).await {
            Ok(exit) => Ok(exit),
            Err(_) => self.kill().await,
        }
    }

    /// Ends QEMU at once, in whatever state; disk writes that QEMU has not made are lost.
    pub async fn kill(&mut self) -> Result<Exit, OrderError> {
        let fail = |source| OrderError::Signal { doing: "kill", source };
        self.watched.asked(Asked::Kill);
        match self.process.signal(Signal::KILL) {
            Ok(()) => {}
            // It has ended by itself.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(error) => return Err(fail(error)),
        }
        tokio::time::timeout(KILL_MAX, self.watched.exit().exited()).await.map_err(|_| {
            fail(std::io::Error::new(
                std::io::ErrorKind::TimedOut,
                format!("it did not end within {KILL_MAX:?}"),
            ))
        })
    }

    /// Stops the process where it is (SIGSTOP); returns when every thread of it stands. The guest's clock goes on.
    pub async fn stop_process(&mut self) -> Result<Duration, OrderError> {
        let since = Instant::now();
        self.not_ended()?;
        self.process.stop().await.map_err(|source| OrderError::Signal { doing: "stop", source })?;
        self.watched.set_going(false);
        Ok(since.elapsed())
    }

    /// Lets a stopped process go on (SIGCONT). One that is not stopped goes on as before.
    #[expect(
        clippy::unused_async,
        reason = "an order like the others, which may have to wait one day"
    )]
    pub async fn continue_process(&mut self) -> Result<Duration, OrderError> {
        let since = Instant::now();
        self.not_ended()?;
        self.process
            .signal(Signal::CONT)
            .map_err(|source| OrderError::Signal { doing: "continue", source })?;
        if self.qmp.is_none() {
            // Greets in the background: nobody who waits for the guest has to wait for that.
            self.qmp = Some(self.connect_qmp()?);
        }
        self.watched.set_going(true);
        Ok(since.elapsed())
    }

    /// Connects to the port of the guest agent. QEMU serves one connection at a time: a second one waits, connected and silent,
    /// until the first is closed. What the guest writes while nobody is connected waits in the guest.
    pub fn guest_stream(&self) -> Result<tokio::net::UnixStream, OrderError> {
        let connected = crate::socket::connect(&self.outlets.sockets, GUEST_SOCKET);
        connected.map_err(|source| OrderError::Socket { name: GUEST_SOCKET, source })
    }

    fn connect_qmp(&self) -> Result<Qmp, OrderError> {
        let connected = crate::socket::connect(&self.outlets.sockets, QMP_SOCKET);
        let qmp =
            Qmp::open(connected.map_err(|source| OrderError::Socket { name: QMP_SOCKET, source })?);
        self.watched.listen_to(qmp.seen());
        Ok(qmp)
    }

    /// Whether its process is known to have ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.not_ended().is_err()
    }

    fn not_ended(&self) -> Result<(), OrderError> {
        self.watched.exit().exited_yet().map_or(Ok(()), |exit| Err(OrderError::Ended(exit)))
    }

    /// The connection, if the machine can answer now.
    fn qmp(&self) -> Result<&Qmp, OrderError> {
        self.not_ended()?;
        match &self.qmp {
            Some(qmp) if self.process.state() != ProcessState::Stopped => Ok(qmp),
            _ => Err(OrderError::Stopped),
        }
    }

    async fn command(&self, command: &'static str, arguments: Value) -> Result<Value, OrderError> {
        let done = self.qmp()?.run(command, arguments).await;
        self.explained(done).await
    }

    /// A connection that ended usually means that the process did: then that is the error.
    async fn explained<T>(&self, done: Result<T, QmpError>) -> Result<T, OrderError> {
        match done {
            Err(QmpError::Closed { command }) => {
                match tokio::time::timeout(EXPLAIN_MAX, self.watched.exit().exited()).await {
                    Ok(exit) => Err(OrderError::Ended(exit)),
                    Err(_) => Err(QmpError::Closed { command }.into()),
                }
            }
            other => Ok(other?),
        }
    }
}
