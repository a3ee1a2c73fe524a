//! The one trait between the control plane and a host.
//!
//! A host owns the sandboxes on its machine: it decides when they sleep and wakes them as part of the verb that needs it.
//! The control plane never says "wake". In one process today, over a connection in a fleet; therefore every type here is
//! plain data or a byte stream.
//!
//! Errors are [`ApiError`]s already: a host knows best what to tell, and nothing of its inside may leak.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{broadcast, mpsc};

use crate::boxes::{BoxLife, BoxLimits, Wiring};
use crate::checkpoint::Checkpoint;
use crate::drive::{AttachDrive, AttachVolume, CreateDrive, Drive, Volume};
use crate::exec::{Exec, ExecRequest, Exit, Output};
use crate::file::FileInfo;
use crate::sandbox::{PolicyPatch, Sandbox, SleepTier};
use crate::snapshot::Snapshot;
use crate::usage::Usage;
use crate::{ApiError, Event, SandboxId};

/// What a host is told to make. Names are unique by the catalogue's care; a host only keeps them.
#[derive(Clone, Debug)]
pub struct NewSandbox {
    /// Chosen by the catalogue.
    pub id: SandboxId,
    /// Checked by the catalogue.
    pub name: String,
    /// Image name.
    pub image: String,
    /// Start from this snapshot, which then decides about image and size.
    pub snapshot: Option<String>,
    /// Virtual processors.
    pub cpus: u32,
    /// MiB.
    pub memory_mib: u32,
    /// Drives that it has, which nobody else has then.
    pub drives: Vec<AttachDrive>,
    /// Volumes that it has.
    pub volumes: Vec<AttachVolume>,
    /// Environment of every command.
    pub env: BTreeMap<String, String>,
    /// Free labels.
    pub labels: BTreeMap<String, String>,
    /// Settings of sleep; absent ones take the defaults.
    pub policy: PolicyPatch,
    /// It is a box: it follows these settings instead.
    pub boxed: Option<BoxLimits>,
    /// How its names are wired (T6).
    pub wiring: Option<Wiring>,
    /// Secret part of its URLs.
    pub link_key: String,
    /// Ownership count of the catalogue: a host refuses orders older than what it has seen.
    pub epoch: i64,
}

/// What decides whether a copy may stand for a sandbox that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Image name.
    pub image: String,
    /// Virtual processors.
    pub cpus: u32,
    /// MiB.
    pub memory_mib: u32,
}

/// A fork that a host is told to make; everything not named here is its parent's.
#[derive(Clone, Debug)]
pub struct NewFork {
    /// Chosen by the catalogue.
    pub id: SandboxId,
    /// Checked by the catalogue.
    pub name: String,
    /// Secret part of its URLs: its own.
    pub link_key: String,
    /// Ownership count.
    pub epoch: i64,
}

/// Changes to a sandbox.
#[derive(Clone, Debug, Default)]
pub struct Change {
    /// A new name.
    pub name: Option<String>,
    /// All labels anew.
    pub labels: Option<BTreeMap<String, String>>,
    /// Settings of sleep.
    pub policy: PolicyPatch,
    /// Of a box, after how long without use it is stopped for good, milliseconds ([`BoxLimits::idle_timeout_ms`]). Anything else
    /// has no such limit, and stays as it is.
    pub idle_timeout_ms: Option<Option<u64>>,
    /// What the control plane wants kept with it, also in its checkpoints: opaque to hosts, read by whoever takes it over. Of a box:
    /// what it is beyond its sandbox.
    pub note: Option<String>,
}

/// What a host remembers of a sandbox besides its public view: enough to rebuild a lost catalogue.
#[derive(Clone, Debug)]
pub struct Known {
    /// Public view.
    pub sandbox: Sandbox,
    /// Secret part of its URLs.
    pub link_key: String,
    /// Ownership count.
    pub epoch: i64,
    /// How long it has been asleep without a break, milliseconds, whatever wall clocks did; `None`: it is not asleep.
    pub asleep_ms: Option<u64>,
    /// It is a box.
    pub boxed: Option<BoxLife>,
    /// What the control plane has had kept with it ([`Change::note`]).
    pub note: Option<String>,
    /// It is being removed: nobody is told of it any more.
    pub going: bool,
}

/// An answer, and what it cost to wake the sandbox for it.
#[derive(Clone, Debug)]
pub struct Answer<T> {
    /// The answer.
    pub value: T,
    /// Milliseconds from the need to the running guest, where this request had to wait for a wake (its own or one
    /// already under way); `None`: it was awake.
    pub woke_ms: Option<f64>,
}

impl<T> Answer<T> {
    /// The same with another value.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Answer<U> {
        Answer { value: f(self.value), woke_ms: self.woke_ms }
    }
}

/// Why somebody connects to a port; shown as the cause of a wake, and decides what counts as activity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Such as `request through the link to port 8000` or `exec`.
    pub what: String,
    /// Who asks, where known.
    pub peer: Option<SocketAddr>,
}

/// A byte stream in both directions. Dropping it closes it.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// Keeps the sandbox awake while it lives (a call that waits on it). Dropped: the call has ended.
#[async_trait]
pub trait Hold: Send + Sync {
    /// Ends when the sandbox, though awake, has been made to stand still by its host for as long as a caller is let wait:
    /// with what he is to be told. Where that does not happen it never ends.
    async fn stands_still(&self) -> ApiError {
        std::future::pending().await
    }
}

/// Why a sandbox is put to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SleepFor {
    /// Somebody asked for this one (S5).
    Asked,
    /// The whole host is being emptied.
    Drain,
}

/// What a [`Hold`] counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldKind {
    /// A request in progress, or bytes of a client on their way.
    Request,
    /// A connection that is open on a port of `awake_ports` (S4): counted as `awake_connections`.
    AwakeConnection,
    /// A call that acts on a box, or a page load that thaws it: use from its start to its end (B3, B6).
    Tool,
    /// A connection from another box, while that is awake: use, too, and it holds the box awake (B10).
    Link,
}

/// How a connection that stays open is treated, as the settings are now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionRules {
    /// Its port is one of `awake_ports`: it is to be held as [`HoldKind::AwakeConnection`].
    pub keeps_awake: bool,
    /// After so long without a byte in either direction it is to be closed; `None`: never.
    pub idle: Option<std::time::Duration>,
}

/// A connection to a port of a sandbox.
pub struct Connection {
    /// The bytes.
    pub stream: Box<dyn Duplex>,
    /// The life it belongs to: a pooled connection of another life must not be used again.
    pub life: u64,
}

/// A piece of a command's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputEvent {
    /// Bytes of one stream, starting at this offset of that stream.
    Data {
        /// Which.
        stream: Output,
        /// Position of the first byte.
        offset: u64,
        /// The bytes.
        bytes: Bytes,
    },
    /// The command has ended and all of its output was told.
    Exit(Exit),
}

/// Where to begin reading a command's output.
#[derive(Clone, Copy, Debug, Default)]
pub struct OutputFrom {
    /// Position in standard output; `None`: leave that stream out.
    pub stdout: Option<u64>,
    /// Position in standard error; `None`: leave that stream out.
    pub stderr: Option<u64>,
    /// Go on until the command has ended (else: what is there now).
    pub follow: bool,
    /// The caller waits for the command's result: keeps the sandbox awake (S2).
    pub hold: bool,
}

/// A log of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Log {
    /// Serial console of the guest (kernel, guest agent).
    Console,
    /// What the daemon logged about it.
    Daemon,
}

/// One machine that runs sandboxes.
///
/// Verbs that need the guest wake it, wait for it and hold it awake while they run. Those marked *asleep is fine* neither
/// wake nor hold.
#[async_trait]
pub trait Host: crate::terminal::TerminalHost + Send + Sync + 'static {
    /// Name of this host in the catalogue.
    fn name(&self) -> &str;

    /// All sandboxes of this host. Asleep is fine.
    async fn list(&self) -> Vec<Known>;

    /// One sandbox. Asleep is fine.
    async fn view(&self, id: &SandboxId) -> Result<Known, ApiError>;

    /// The id under which one of this kind is made fastest, if there is such: a copy lies ready there, for some seconds. Whoever
    /// makes another under it, or none, loses nothing but time.
    fn reserve(&self, _kind: &Kind) -> Option<SandboxId> {
        None
    }

    /// How many copies lie ready to be claimed.
    fn ready_copies(&self) -> usize {
        0
    }

    /// The id of [`reserve`](Self::reserve) is not used after all.
    fn release(&self, _id: &SandboxId) {}

    /// The host goes away: what it keeps for speed alone is given up. Sandboxes stay as they are.
    async fn close(&self) {}

    /// Makes one and answers when its guest runs. Repeating it with the same id answers the same sandbox.
    async fn create(&self, new: NewSandbox) -> Result<Sandbox, ApiError>;

    /// Copies one with memory, disk and processes, once for each, all of the same moment; the parent goes on or sleeps on (asleep
    /// is fine). All of them are made, or none. Repeating it with the same ids answers the same sandboxes.
    async fn fork(&self, parent: &SandboxId, new: Vec<NewFork>) -> Result<Vec<Sandbox>, ApiError>;

    /// Keeps a copy with memory, disk and processes under a name; it goes on, or sleeps on (asleep is fine).
    async fn snapshot_take(&self, id: &SandboxId, name: &str) -> Result<Snapshot, ApiError>;

    /// All snapshots of this host, oldest first.
    async fn snapshots(&self) -> Result<Vec<Snapshot>, ApiError>;

    /// One snapshot.
    async fn snapshot_view(&self, name: &str) -> Result<Snapshot, ApiError>;

    /// Removes a snapshot. What was made from it does not need it.
    async fn snapshot_delete(&self, name: &str) -> Result<(), ApiError>;

    /// Makes a drive, empty.
    async fn drive_create(&self, new: CreateDrive) -> Result<Drive, ApiError>;

    /// All drives of this host, by name.
    async fn drives(&self) -> Result<Vec<Drive>, ApiError>;

    /// One drive.
    async fn drive_view(&self, name: &str) -> Result<Drive, ApiError>;

    /// Removes a drive that no sandbox has.
    async fn drive_delete(&self, name: &str) -> Result<(), ApiError>;

    /// Makes a volume of the files in a tar stream.
    async fn volume_create(
        &self,
        name: &str,
        archive: Box<dyn AsyncRead + Send + Unpin>,
    ) -> Result<Volume, ApiError>;

    /// All volumes of this host, by name.
    async fn volumes(&self) -> Result<Vec<Volume>, ApiError>;

    /// One volume.
    async fn volume_view(&self, name: &str) -> Result<Volume, ApiError>;

    /// Removes a volume that no sandbox and no snapshot has.
    async fn volume_delete(&self, name: &str) -> Result<(), ApiError>;

    /// The newest checkpoint of each sandbox in the host's store, oldest first; whoever's they are.
    async fn checkpoints(&self) -> Result<Vec<Checkpoint>, ApiError>;

    /// Takes over a sandbox from its newest checkpoint, with id, name, settings, disk, memory and processes. Whoever owned it
    /// finds out and gives it up.
    async fn checkpoint_restore(&self, id: &SandboxId) -> Result<Known, ApiError>;

    /// Changes settings; takes effect at once. Asleep is fine.
    async fn update(&self, id: &SandboxId, change: Change) -> Result<Sandbox, ApiError>;

    /// Puts it to sleep now; answers when it sleeps (a request may wake it again at once).
    async fn sleep(
        &self,
        id: &SandboxId,
        tier: Option<SleepTier>,
        why: SleepFor,
    ) -> Result<Sandbox, ApiError>;

    /// The project's spending limit is reached, or is not any more (S23). Until it is not, all sandboxes are put to sleep, and
    /// none is made or woken.
    fn limit_spending(&self, reached: bool);

    /// The host goes down: all sandboxes are put to sleep on disk, and from now on nothing wakes them, not even a timer of their
    /// own. There is no way back but another start.
    fn leave(&self);

    /// The account of a box has no credit, or has some again (B14). Until then it is frozen, whatever holds it, and nothing thaws it.
    /// One that the host does not have: nothing.
    fn limit_box(&self, id: &SandboxId, reached: bool);

    /// A connection to the external base of a box, as its programs have it through a name in external mode (T17).
    fn external(&self, id: &SandboxId) -> Result<Box<dyn Duplex>, ApiError>;

    /// Wires the names of a box anew; what went another way than now ends. Asleep is fine.
    async fn wire(&self, id: &SandboxId, wiring: Wiring) -> Result<(), ApiError>;

    /// Brings back a box that the rules of idleness have stopped, as it was when it froze (B27); answers when it runs.
    async fn restore(&self, id: &SandboxId) -> Result<(), ApiError>;

    /// What it has used since it was made. Asleep is fine.
    async fn usage(&self, id: &SandboxId) -> Result<Usage, ApiError>;

    /// Boots it anew from its disk; with these drives and these volumes from now on, where some are given.
    async fn restart(
        &self,
        id: &SandboxId,
        drives: Option<Vec<AttachDrive>>,
        volumes: Option<Vec<AttachVolume>>,
    ) -> Result<Sandbox, ApiError>;

    /// Removes it and all it kept; answers when it is gone. Gone already: fine.
    async fn delete(&self, id: &SandboxId) -> Result<(), ApiError>;

    /// Removes it if it is asleep now and has been for so long, as [`delete`](Self::delete) does. `false`: it is not.
    async fn delete_idle(&self, id: &SandboxId, asleep_at_least_ms: u64) -> Result<bool, ApiError>;

    /// Its timeline after `after`, oldest first, at most `limit`. Asleep is fine.
    async fn events(
        &self,
        id: &SandboxId,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Event>, ApiError>;

    /// Events of all sandboxes as they happen. A slow reader is told that it lost some and reads `events` again.
    fn watch(&self) -> broadcast::Receiver<Event>;

    /// The end of a log, at most `max_bytes`. Asleep is fine.
    async fn log(&self, id: &SandboxId, log: Log, max_bytes: u64) -> Result<Bytes, ApiError>;

    /// Keeps it awake while somebody waits on it (an edge request in progress), or is connected to it.
    async fn hold(
        &self,
        id: &SandboxId,
        kind: HoldKind,
        caller: Caller,
    ) -> Result<Answer<Box<dyn Hold>>, ApiError>;

    /// How an open connection to this port is treated. Asleep is fine.
    fn connection_rules(&self, id: &SandboxId, port: u16) -> Result<ConnectionRules, ApiError>;

    /// Connects to a TCP port in the guest, on its address or on its loopback. A refused port is retried for a while
    /// after a wake or start.
    async fn connect(
        &self,
        id: &SandboxId,
        port: u16,
        caller: Caller,
    ) -> Result<Answer<Connection>, ApiError>;

    /// Starts a command.
    async fn exec_start(
        &self,
        id: &SandboxId,
        request: ExecRequest,
    ) -> Result<Answer<Exec>, ApiError>;

    /// Commands of the present life, newest last. Asleep is fine where the host knows them, which it does but for one that
    /// slept before the daemon's last crash.
    async fn exec_list(&self, id: &SandboxId) -> Result<Answer<Vec<Exec>>, ApiError>;

    /// One command. Asleep as [`exec_list`](Self::exec_list).
    async fn exec_view(&self, id: &SandboxId, exec_id: &str) -> Result<Answer<Exec>, ApiError>;

    /// Output from given positions; the channel closes after the last event, with an error in place if it was cut
    /// (`command_lost`).
    async fn exec_output(
        &self,
        id: &SandboxId,
        exec_id: &str,
        from: OutputFrom,
    ) -> Result<Answer<mpsc::Receiver<Result<OutputEvent, ApiError>>>, ApiError>;

    /// Writes to standard input; `close` ends it after these bytes.
    async fn exec_stdin(
        &self,
        id: &SandboxId,
        exec_id: &str,
        bytes: Bytes,
        close: bool,
    ) -> Result<Answer<()>, ApiError>;

    /// Sends a signal to the whole process group.
    async fn exec_signal(
        &self,
        id: &SandboxId,
        exec_id: &str,
        signal: i32,
    ) -> Result<Answer<()>, ApiError>;

    /// Reads a file from `offset`, at most `length` bytes.
    async fn file_read(
        &self,
        id: &SandboxId,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<Answer<(FileInfo, Box<dyn AsyncRead + Send + Unpin>)>, ApiError>;

    /// Writes a whole file from a stream; the old one is there until the new one is complete. Missing folders are made.
    async fn file_write(
        &self,
        id: &SandboxId,
        path: &str,
        mode: Option<u32>,
        body: Box<dyn AsyncRead + Send + Unpin>,
    ) -> Result<Answer<FileInfo>, ApiError>;

    /// What a path is (links not followed).
    async fn file_stat(&self, id: &SandboxId, path: &str) -> Result<Answer<FileInfo>, ApiError>;

    /// What a folder holds, by name.
    async fn file_list(
        &self,
        id: &SandboxId,
        path: &str,
    ) -> Result<Answer<Vec<FileInfo>>, ApiError>;

    /// Makes a folder and those above it.
    async fn file_mkdir(&self, id: &SandboxId, path: &str) -> Result<Answer<FileInfo>, ApiError>;

    /// Moves or renames.
    async fn file_move(
        &self,
        id: &SandboxId,
        from: &str,
        to: &str,
    ) -> Result<Answer<FileInfo>, ApiError>;

    /// Removes a file, or a folder with all that is in it.
    async fn file_remove(&self, id: &SandboxId, path: &str) -> Result<Answer<()>, ApiError>;

    /// A folder (or file) as a tar stream with paths relative to it.
    async fn tree_read(
        &self,
        id: &SandboxId,
        path: &str,
    ) -> Result<Answer<Box<dyn AsyncRead + Send + Unpin>>, ApiError>;

    /// Unpacks a tar stream below a folder, which is made. Entries that would leave it are refused.
    async fn tree_write(
        &self,
        id: &SandboxId,
        path: &str,
        body: Box<dyn AsyncRead + Send + Unpin>,
    ) -> Result<Answer<()>, ApiError>;
}
