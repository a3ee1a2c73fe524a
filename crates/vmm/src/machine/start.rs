//! From files to a QEMU that answers: boot and restore.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;

use super::watch::{Watched, kill_and_reap};
use super::{Machine, OrderError};
use crate::command::{Numbers, Start, arguments};
use crate::exit::Exit;
use crate::files::{FileError, log_tail};
use crate::process::Process;
use crate::qemu::{Fingerprint, Mismatch, Qemu};
use crate::qmp::{Qmp, QmpError};
use crate::socket;
use crate::spawn::{Given, spawn};
use crate::spec::{BootImage, DriveAccess, GUEST_SOCKET, InvalidSpec, MachineSpec, QMP_SOCKET};
use crate::state::{self, ClockAdvance, StateError, StateMark, Stream};

/// How long QEMU may take to load a state. 2 ms were measured.
const LOAD_MAX: Duration = Duration::from_secs(30);
/// Bytes of QEMU's own words that go into an error.
const LOG_TAIL_BYTES: u64 = 2048;

/// How long each step of a start took. They follow one another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Started {
    /// State read and checked, files and sockets made.
    pub prepare: Duration,
    /// Fork and exec.
    pub spawn: Duration,
    /// Until QEMU answered.
    pub ready: Duration,
    /// Clock moved on and state loaded (zero for a boot).
    pub load: Duration,
}

impl Started {
    /// What has passed since the start and is in none of the steps yet.
    fn rest_of(self, since: Instant) -> Duration {
        since.elapsed().saturating_sub(self.prepare + self.spawn + self.ready + self.load)
    }
}

/// A machine that did not start. Nothing is left running.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A field cannot be.
    #[error("machine is not valid")]
    Spec(#[from] InvalidSpec),
    /// The state is another QEMU's or machine's.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    /// The stored state must not be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// One of its files could not be made ready.
    #[error(transparent)]
    File(#[from] FileError),
    /// A memory file of another size cannot be this machine's.
    #[error("memory file has {found} bytes, expected {expected}")]
    MemorySize {
        /// Its size.
        found: u64,
        /// The machine's memory.
        expected: u64,
    },
    /// A socket could not be made.
    #[error("listen on {name}")]
    Socket {
        /// Its file's name.
        name: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// QEMU could not be started.
    #[error("start qemu")]
    Spawn(#[source] io::Error),
    /// QEMU ended before it was ready.
    #[error("qemu ended at its start ({exit:?}): {log}")]
    Ended {
        /// How.
        exit: Exit,
        /// Its last words.
        log: String,
    },
    /// QEMU did not load the state.
    #[error("qemu refused the state: {log}")]
    Refused {
        /// Its last words.
        log: String,
    },
    /// QEMU did not answer, or not as it should.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The daemon is shutting down.
    #[error("interrupted")]
    Interrupted,
}

impl Machine {
    /// Starts a machine from a kernel. Makes the memory file anew. Returns when QEMU answers; the kernel has then begun to run.
    pub async fn boot(
        qemu: &Qemu,
        spec: &MachineSpec,
        image: &BootImage,
    ) -> Result<Self, StartError> {
        spec.validate()?;
        image.validate()?;
        let since = Instant::now();
        let launch = Launch {
            qemu: qemu.clone(),
            spec: spec.clone(),
            image: Some(image.clone()),
            fingerprint: qemu.fingerprint(spec),
        };
        let machine = launch.run().await?;
        let answered = machine.command("query-status", Value::Null).await.map(drop);
        let (mut machine, ()) = machine.or_end(answered, spec).await?;
        machine.started.ready = machine.started.rest_of(since);
        Ok(machine)
    }

    /// Starts a machine from its memory file and a saved state. The state is checked: `saved` must agree with this QEMU and machine, its bytes with
    /// `mark`, its form with what QEMU writes. Its clock is moved on by `slept` and what has passed since this call until the state is loaded.
    ///
    /// The guest stands until [`Machine::cont`]; time between the two is lost to its monotonic clock (1 to 2 ms if nothing is done in between).
    /// If this fails the memory file is as it was: nothing has run.
    pub async fn restore(
        qemu: &Qemu,
        spec: &MachineSpec,
        state: &Path,
        mark: &StateMark,
        saved: &Fingerprint,
        slept: Duration,
    ) -> Result<Self, StartError> {
        Self::restore_when(qemu, spec, state, mark, saved, slept, std::future::ready(Ok(()))).await
    }

    /// As [`restore`](Self::restore), of a memory file that has its length and gets its content meanwhile: QEMU is started beside
    /// that, and loads the state when `memory` says that all is there.
    pub async fn restore_when(
        qemu: &Qemu,
        spec: &MachineSpec,
        state: &Path,
        mark: &StateMark,
        saved: &Fingerprint,
        slept: Duration,
        memory: impl Future<Output = Result<(), FileError>>,
    ) -> Result<Self, StartError> {
        spec.validate()?;
        saved.compatible(&qemu.fingerprint(spec))?;
        let since = Instant::now();
        let bytes = state::read_checked(state, mark)?;
        Stream::parse(&bytes)
            .map_err(|source| StateError::Stream { path: state.to_owned(), source })?;
        let read = since.elapsed();

        // The guest keeps the TSC rate that it was booted with, so its state does too.
        let launch = Launch {
            qemu: qemu.clone(),
            spec: spec.clone(),
            image: None,
            fingerprint: saved.clone(),
        };
        let mut machine = launch.run().await?;
        machine.started.prepare += read;
        let agreed = machine.agree_on_migration().await;
        let (mut machine, ()) = machine.or_end(agreed, spec).await?;
        machine.started.ready = machine.started.rest_of(since);

        if let Err(error) = memory.await {
            // What QEMU has to say is not why.
            let _log = machine.end_and_tell(spec).await;
            return Err(error.into());
        }
        let by = ClockAdvance { slept, guest_tsc_khz: saved.tsc_khz };
        let loaded = machine.load(bytes, by, since).await;
        let (mut machine, loaded) = machine.or_end(loaded, spec).await?;
        if loaded {
            machine.started.load = machine.started.rest_of(since);
            return Ok(machine);
        }
        let log = machine.end_and_tell(spec).await;
        Err(StartError::Refused { log })
    }

    /// Memory stays in its file; progress comes as events.
    pub(super) async fn agree_on_migration(&self) -> Result<(), OrderError> {
        let capabilities =
            ["x-ignore-shared", "events"].map(|name| json!({ "capability": name, "state": true }));
        self.command("migrate-set-capabilities", json!({ "capabilities": capabilities }))
            .await
            .map(drop)
    }

    /// True if QEMU took the state.
    async fn load(
        &self,
        mut bytes: Vec<u8>,
        by: ClockAdvance,
        since: Instant,
    ) -> Result<bool, OrderError> {
        let qmp = self.qmp()?;
        let (reader, writer) =
            pipe().map_err(|source| OrderError::Socket { name: "state pipe", source })?;
        let given = qmp.give_fd("state", reader).await;
        self.explained(given).await?;
        let by = ClockAdvance { slept: by.slept + since.elapsed(), ..by };
        // It was parsed before, and nothing has changed it since.
        if let Err(error) = state::advance(&mut bytes, by) {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "state checked before cannot be moved on"
            );
            return Ok(false);
        }
        let feed = tokio::spawn(feed(writer, bytes));
        let begun = qmp.run("migrate-incoming", json!({ "uri": "fd:state" })).await;
        self.explained(begun).await?;
        let ended = qmp.migration_ended("migrate-incoming", LOAD_MAX).await;
        feed.abort();
        self.explained(ended).await
    }

    /// Passes a success on; ends the machine on an error.
    async fn or_end<T>(
        self,
        result: Result<T, OrderError>,
        spec: &MachineSpec,
    ) -> Result<(Self, T), StartError> {
        let error = match result {
            Ok(value) => return Ok((self, value)),
            Err(error) => error,
        };
        let log = self.end_and_tell(spec).await;
        Err(match error {
            OrderError::Ended(exit) => StartError::Ended { exit, log },
            OrderError::Qmp(error) => StartError::Qmp(error),
            OrderError::Signal { source, .. } | OrderError::Socket { source, .. } => {
                StartError::Spawn(source)
            }
            OrderError::Stopped => {
                StartError::Spawn(io::Error::other("someone stopped the process"))
            }
        })
    }

    async fn end_and_tell(mut self, spec: &MachineSpec) -> String {
        if let Err(error) = self.kill().await {
            tracing::error!(error = &error as &dyn std::error::Error, "qemu left behind");
        }
        log_tail(&spec.outlets.log, LOG_TAIL_BYTES)
    }
}

/// All that a start needs, owned, so that its blocking part can run aside.
struct Launch {
    qemu: Qemu,
    spec: MachineSpec,
    /// None: a restore.
    image: Option<BootImage>,
    fingerprint: Fingerprint,
}

impl Launch {
    async fn run(self) -> Result<Machine, StartError> {
        let fingerprint = self.fingerprint.clone();
        let outlets = self.spec.outlets.clone();
        // Fork and exec of a big daemon, and opening files on a busy disk, take milliseconds.
        let blocking = tokio::task::spawn_blocking(move || self.spawn());
        let (child, started) = blocking.await.map_err(|_| StartError::Interrupted)??;
        let process = match Process::of_child(child.id()) {
            Ok(process) => process,
            Err(error) => {
                kill_and_reap(child, None);
                return Err(StartError::Spawn(error));
            }
        };
        let watched =
            Watched::begin(&process, Some(child), &outlets, true).map_err(StartError::Spawn)?;
        let mut machine = Machine {
            process: Arc::new(process),
            outlets,
            qmp: None,
            watched,
            fingerprint,
            started,
        };
        match socket::connect(&machine.outlets.sockets, QMP_SOCKET) {
            Ok(stream) => {
                let qmp = Qmp::open(stream);
                machine.watched.listen_to(qmp.seen());
                machine.qmp = Some(qmp);
                Ok(machine)
            }
            Err(source) => {
                if let Err(error) = machine.kill().await {
                    tracing::error!(error = &error as &dyn std::error::Error, "qemu left behind");
                }
                Err(StartError::Socket { name: QMP_SOCKET, source })
            }
        }
    }

    fn spawn(self) -> Result<(Child, Started), StartError> {
        let since = Instant::now();
        let spec = &self.spec;
        let log = append_to(&spec.outlets.log)?;
        own(&append_to(&spec.outlets.console)?, spec, &spec.outlets.console)?;
        self.memory()?;
        if let Some(disk) = &spec.disk {
            let overlay = File::open(&disk.overlay)
                .map_err(|error| FileError::new("open", &disk.overlay, error))?;
            own(&overlay, spec, &disk.overlay)?;
        }
        for drive in spec.drives.iter().flatten() {
            let image = File::open(&drive.image)
                .map_err(|error| FileError::new("open", &drive.image, error))?;
            if drive.access != DriveAccess::Shared {
                own(&image, spec, &drive.image)?;
            }
        }
        let listen = |name| {
            socket::listen(&spec.outlets.sockets, name)
                .map_err(|source| StartError::Socket { name, source })
        };
        let (qmp, guest) = (listen(QMP_SOCKET)?, listen(GUEST_SOCKET)?);
        let tap = spec.network.as_ref().map(crate::Network::fd);
        let numbers = Numbers {
            qmp: qmp.as_raw_fd(),
            guest: guest.as_raw_fd(),
            tap: tap.map(|tap| tap.as_raw_fd()),
        };
        let start = self.image.as_ref().map_or(Start::Incoming, Start::Boot);
        let mut command = Command::new(&self.qemu.binary);
        // Nothing of the daemon's.
        command.env_clear();
        command.args(arguments(&self.qemu, spec, numbers, start));
        if let Some(modules) = &self.qemu.modules {
            command.env("QEMU_MODULE_DIR", modules);
        }
        let prepare = since.elapsed();
        let fds = [qmp.as_fd(), guest.as_fd()].into_iter().chain(tap).collect();
        let child =
            spawn(command, Given { log, fds, account: spec.account }).map_err(StartError::Spawn)?;
        Ok((
            child,
            Started {
                prepare,
                spawn: since.elapsed().saturating_sub(prepare),
                ..Started::default()
            },
        ))
    }

    /// A boot begins with memory that is all zero; a restore with exactly what was saved.
    fn memory(&self) -> Result<(), StartError> {
        let (path, expected) = (&self.spec.memory, self.spec.memory_bytes());
        let mut options = File::options();
        options.read(true).write(true);
        if self.image.is_some() {
            options.create(true).truncate(true);
        }
        let file = options.open(path).map_err(|error| FileError::new("open", path, error))?;
        if self.image.is_some() {
            file.set_len(expected).map_err(|error| FileError::new("set size of", path, error))?;
        }
        let found = file.metadata().map_err(|error| FileError::new("look at", path, error))?.len();
        if found != expected {
            return Err(StartError::MemorySize { found, expected });
        }
        own(&file, &self.spec, path)?;
        Ok(())
    }
}

fn append_to(path: &Path) -> Result<File, FileError> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let opened = File::options().create(true).append(true).mode(0o600).open(path);
    opened.map_err(|error| FileError::new("open", path, error))
}

/// Gives a file to the machine's account.
fn own(file: &File, spec: &MachineSpec, path: &Path) -> Result<(), FileError> {
    if spec.account.uid == 0 {
        return Ok(());
    }
    std::os::unix::fs::fchown(file, Some(spec.account.uid), Some(spec.account.gid))
        .map_err(|error| FileError::new("give to the machine's account", path, error))
}

/// A pipe whose writing end is ours. A pipe rather than a file: QEMU means to give up `fd:` for files.
fn pipe() -> io::Result<(OwnedFd, tokio::net::unix::pipe::Sender)> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&writer, true)?;
    Ok((reader, tokio::net::unix::pipe::Sender::from_owned_fd(writer)?))
}

/// Writes the state and closes the pipe. QEMU's own verdict is what counts, so an error here is only told.
async fn feed(mut writer: tokio::net::unix::pipe::Sender, bytes: Vec<u8>) {
    if let Err(error) = writer.write_all(&bytes).await {
        tracing::debug!(%error, "state not read to its end");
    }
}
