//! A host without machines: sandboxes are folders, commands are processes of this machine, ports are loopback ports.
//!
//! It counts what the control plane did (wakes, holds, creates), and can be told to fail or to wait.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use api::boxes::{BoxFreeze, BoxLife, BoxStatus};
use api::checkpoint::{Checkpoint, CheckpointStatus};
use api::drive::{
    AttachDrive, AttachVolume, CreateDrive, DRIVE_MIB_DEFAULT, Drive, SandboxDrive, Volume,
};
use api::exec::{Exec, ExecRequest, ExecStatus, Exit, Output};
use api::file::{FileInfo, FileKind};
use api::host::{
    Answer, Caller, Change, Connection, ConnectionRules, Hold, HoldKind, Host, Known, Log, NewFork,
    NewSandbox, OutputEvent, OutputFrom, SleepFor,
};
use api::sandbox::{AwakeReason, PolicyPatch, Sandbox, SleepTier, Status};
use api::snapshot::Snapshot;
use api::usage::Usage;
use api::{ApiError, Code, Event, SandboxId};
use async_trait::async_trait;
use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::sync::{broadcast, mpsc, watch};

/// What waking takes, as told.
pub(crate) const WOKE_MS: f64 = 12.5;
const AT: &str = "2026-11-30T10:15:30.123Z";

/// The fake host.
pub(crate) struct Fake {
    root: PathBuf,
    state: Mutex<BTreeMap<SandboxId, One>>,
    snapshots: Mutex<Vec<Snapshot>>,
    drives: Mutex<Vec<Drive>>,
    volumes: Mutex<Vec<Volume>>,
    /// One of another host that can be taken over.
    pub(crate) lost: Mutex<Option<Known>>,
    events: broadcast::Sender<Event>,
    /// Wakes and creates wait while this is false.
    pub(crate) gate: watch::Sender<bool>,
    /// What is waiting at the gate.
    pub(crate) waiting: watch::Sender<usize>,
    /// Holds that live.
    pub(crate) holds: Arc<watch::Sender<usize>>,
    /// Connections to awake ports.
    pub(crate) awake_connections: Arc<watch::Sender<usize>>,
    /// Creates and forks that reached the host.
    pub(crate) makes: AtomicUsize,
    /// The next create or fork fails with this.
    pub(crate) fail_make: Mutex<Option<ApiError>>,
    /// These cannot be put to sleep.
    pub(crate) fail_sleep: Mutex<BTreeMap<SandboxId, ApiError>>,
    sleeping_now: Mutex<usize>,
    /// Most that were being put to sleep at a time.
    pub(crate) sleeping_most: AtomicUsize,
    /// What each has used, GiB-seconds.
    pub(crate) gib_seconds: AtomicU64,
    /// The spending limit is reached, as the host was told.
    pub(crate) spending_reached: AtomicBool,
    /// Boxes that are kept frozen for want of credit, as the host was told.
    pub(crate) limited: Mutex<BTreeSet<SandboxId>>,
    /// What each box has used, seconds awake.
    pub(crate) awake_seconds: AtomicU64,
    /// It has a store of checkpoints.
    pub(crate) has_store: AtomicBool,
    /// Sandboxes that another host has taken over.
    moved: Mutex<BTreeSet<SandboxId>>,
    /// How often a refused port is tried again.
    pub(crate) port_retries: AtomicUsize,
}

struct One {
    known: Known,
    timeline: Vec<Event>,
    execs: Vec<Arc<Running>>,
}

struct Running {
    view: Exec,
    request: ExecRequest,
    out: [watch::Sender<Vec<u8>>; 2],
    exit: watch::Sender<Option<Exit>>,
    stdin: tokio::sync::Mutex<Option<tokio::process::ChildStdin>>,
}

impl Fake {
    /// A host over an empty folder.
    pub(crate) fn new(root: &Path) -> Arc<Self> {
        Arc::new(Self {
            root: root.to_owned(),
            state: Mutex::default(),
            snapshots: Mutex::default(),
            drives: Mutex::default(),
            volumes: Mutex::default(),
            lost: Mutex::default(),
            events: broadcast::channel(16).0,
            gate: watch::channel(true).0,
            waiting: watch::channel(0).0,
            holds: Arc::new(watch::channel(0).0),
            awake_connections: Arc::new(watch::channel(0).0),
            makes: AtomicUsize::new(0),
            fail_make: Mutex::new(None),
            fail_sleep: Mutex::default(),
            sleeping_now: Mutex::default(),
            sleeping_most: AtomicUsize::new(0),
            gib_seconds: AtomicU64::new(0),
            spending_reached: AtomicBool::new(false),
            limited: Mutex::default(),
            awake_seconds: AtomicU64::new(0),
            has_store: AtomicBool::new(false),
            moved: Mutex::default(),
            port_retries: AtomicUsize::new(0),
        })
    }

    /// Puts an entry into a timeline, as the host would.
    pub(crate) fn say(&self, id: &SandboxId, kind: &str, text: &str) {
        let mut state = self.state();
        let one = state.get_mut(id).unwrap();
        let event = Event {
            seq: one.timeline.last().map_or(1, |event| event.seq + 1),
            at: AT.into(),
            sandbox_id: id.clone(),
            kind: kind.into(),
            text: text.into(),
            data: serde_json::Map::new(),
        };
        one.timeline.push(event.clone());
        // Nobody may be watching.
        let _ = self.events.send(event);
    }

    /// Forgets the entries of a timeline up to this one.
    pub(crate) fn forget(&self, id: &SandboxId, seq: u64) {
        self.state().get_mut(id).unwrap().timeline.retain(|event| event.seq > seq);
    }

    /// All ids.
    pub(crate) fn ids(&self) -> Vec<SandboxId> {
        self.state().keys().cloned().collect()
    }

    /// How many wakes a timeline has.
    pub(crate) fn wakes(&self, id: &SandboxId) -> usize {
        self.state()[id].timeline.iter().filter(|event| event.kind == "sandbox.woke").count()
    }

    fn state(&self) -> MutexGuard<'_, BTreeMap<SandboxId, One>> {
        self.state.lock().unwrap()
    }

    fn known(&self, id: &SandboxId) -> Result<Known, ApiError> {
        let state = self.state();
        state.get(id).map(|one| one.known.clone()).ok_or_else(|| {
            if self.moved.lock().unwrap().contains(id) {
                return ApiError::new(Code::SandboxMoved, "another host has taken it over");
            }
            ApiError::new(Code::NotFound, "no such sandbox")
        })
    }

    /// Another host has taken it over; whether anybody hears of it.
    pub(crate) fn move_away(&self, id: &SandboxId, told: bool) {
        if told {
            self.say(id, "sandbox.moved_away", "another host has taken it over");
        }
        self.moved.lock().unwrap().insert(id.clone());
        self.state().remove(id);
    }

    /// Makes a box something else than it is.
    pub(crate) fn set_life(&self, id: &SandboxId, change: impl FnOnce(&mut BoxLife)) {
        change(self.state().get_mut(id).unwrap().known.boxed.as_mut().unwrap());
    }

    /// It begins to remove this sandbox, and is not done yet.
    pub(crate) fn begin_to_delete(&self, id: &SandboxId) {
        self.state().get_mut(id).unwrap().known.going = true;
    }

    fn change(
        &self,
        id: &SandboxId,
        change: impl FnOnce(&mut Sandbox),
    ) -> Result<Sandbox, ApiError> {
        let mut state = self.state();
        let one =
            state.get_mut(id).ok_or_else(|| ApiError::new(Code::NotFound, "no such sandbox"))?;
        change(&mut one.known.sandbox);
        Ok(one.known.sandbox.clone())
    }

    async fn pass_gate(&self) {
        self.waiting.send_modify(|waiting| *waiting += 1);
        self.gate.subscribe().wait_for(|open| *open).await.unwrap();
        self.waiting.send_modify(|waiting| *waiting -= 1);
    }

    async fn wake(&self, id: &SandboxId, why: &str) -> Result<Option<f64>, ApiError> {
        if self.known(id)?.sandbox.status != Status::Sleeping {
            return Ok(None);
        }
        self.pass_gate().await;
        let mut woken = false;
        self.change(id, |sandbox| {
            if sandbox.status == Status::Sleeping {
                woken = true;
                awake(sandbox);
                sandbox.life += 1;
                sandbox.woke_because = Some(why.to_owned());
            }
        })?;
        if woken {
            self.say(id, "sandbox.woke", &format!("woken by {why}"));
        }
        Ok(Some(WOKE_MS))
    }

    async fn make(&self, known: Known, kind: &str) -> Result<Sandbox, ApiError> {
        self.makes.fetch_add(1, Ordering::SeqCst);
        self.pass_gate().await;
        if let Some(error) = self.fail_make.lock().unwrap().take() {
            return Err(error);
        }
        let sandbox = known.sandbox.clone();
        if !self.state().contains_key(&sandbox.id) {
            std::fs::create_dir_all(self.root.join(sandbox.id.as_str()).join("work"))
                .map_err(told)?;
            let one = One { known, timeline: Vec::new(), execs: Vec::new() };
            self.state().insert(sandbox.id.clone(), one);
            self.say(
                &sandbox.id,
                kind,
                if kind == "sandbox.moved" { "was moved here" } else { "made" },
            );
            self.say(&sandbox.id, "sandbox.running", "its guest runs");
        }
        Ok(sandbox)
    }

    fn path(&self, id: &SandboxId, path: &str) -> PathBuf {
        self.root.join(id.as_str()).join(path.trim_start_matches('/'))
    }

    fn exec(&self, id: &SandboxId, exec: &str) -> Result<Arc<Running>, ApiError> {
        let state = self.state();
        let one = state.get(id).ok_or_else(|| ApiError::new(Code::NotFound, "no such sandbox"))?;
        let found = one.execs.iter().find(|running| running.view.exec_id == exec);
        found
            .cloned()
            .ok_or_else(|| ApiError::new(Code::NotFound, format!("no command has the id `{exec}`")))
    }

    fn info(&self, id: &SandboxId, path: &str) -> Result<FileInfo, ApiError> {
        let meta = std::fs::symlink_metadata(self.path(id, path)).map_err(told)?;
        let kind = if meta.is_dir() { FileKind::Directory } else { FileKind::File };
        Ok(FileInfo {
            path: path.into(),
            kind,
            size: meta.len(),
            mode: meta.permissions().mode() & 0o7777,
            uid: meta.uid(),
            gid: meta.gid(),
            modified_at: AT.into(),
            target: None,
        })
    }
}

impl Fake {
    async fn fork_one(&self, parent: &SandboxId, new: NewFork) -> Result<Sandbox, ApiError> {
        let mut sandbox = self.known(parent)?.sandbox;
        sandbox.forked_from = Some(std::mem::replace(&mut sandbox.id, new.id));
        sandbox.name = new.name;
        awake(&mut sandbox);
        self.make(
            Known {
                sandbox,
                link_key: new.link_key,
                epoch: new.epoch,
                asleep_ms: None,
                boxed: None,
                note: None,
                going: false,
            },
            "sandbox.forked",
        )
        .await
    }
}

/// A box that has just been started.
fn fresh_box() -> BoxLife {
    BoxLife {
        status: BoxStatus::Ready,
        freeze: BoxFreeze::default(),
        last_used_unix_ms: 0,
        rests_since_unix_ms: None,
        stops_at_unix_ms: None,
        stopped_unix_ms: None,
        restorable_until_unix_ms: None,
        reason: None,
        boots: 0,
    }
}

fn attached(AttachDrive { name, path, read_only }: AttachDrive) -> SandboxDrive {
    SandboxDrive { name, path, read_only, copy: false }
}

struct FakeHold(Arc<watch::Sender<usize>>);
impl Hold for FakeHold {}
impl Drop for FakeHold {
    fn drop(&mut self) {
        self.0.send_modify(|holds| *holds -= 1);
    }
}

impl Drop for Fake {
    /// What its sandboxes still run ends with it.
    fn drop(&mut self) {
        for one in self.state().values() {
            for exec in &one.execs {
                kill(exec, 9);
            }
        }
    }
}

#[async_trait]
impl Host for Fake {
    fn name(&self) -> &'static str {
        "here"
    }

    async fn list(&self) -> Vec<Known> {
        self.state().values().map(|one| one.known.clone()).collect()
    }

    async fn view(&self, id: &SandboxId) -> Result<Known, ApiError> {
        self.known(id)
    }

    async fn create(&self, new: NewSandbox) -> Result<Sandbox, ApiError> {
        let mut sandbox = Sandbox {
            id: new.id,
            name: new.name,
            status: Status::Running,
            sleep_tier: None,
            awake_because: Vec::new(),
            waits_for: None,
            will_sleep_at: None,
            will_wake_at: None,
            since: AT.into(),
            woke_because: None,
            failure: None,
            failure_code: None,
            image: new.image,
            cpus: new.cpus,
            memory_mib: new.memory_mib,
            address: "10.0.0.2".into(),
            ipv6_address: None,
            life: 1,
            created_at: AT.into(),
            forked_from: None,
            drives: new.drives.into_iter().map(attached).collect(),
            volumes: new.volumes,
            env: new.env,
            labels: new.labels,
            sleep_after_seconds: Some(30),
            memory_tier_seconds: 300,
            awake_ports: Vec::new(),
            awake_connections: 0,
            connection_idle_seconds: None,
            sleep_hold_max_ms: 30_000,
            sleep_notice_ms: None,
            delete_after_idle_ms: None,
            expires_at: None,
            checkpoint: None,
        };
        awake(&mut sandbox);
        set_policy(&mut sandbox, new.policy);
        self.make(
            Known {
                sandbox,
                link_key: new.link_key,
                epoch: new.epoch,
                asleep_ms: None,
                boxed: new.boxed.map(|_| fresh_box()),
                note: None,
                going: false,
            },
            "sandbox.created",
        )
        .await
    }

    async fn fork(&self, parent: &SandboxId, new: Vec<NewFork>) -> Result<Vec<Sandbox>, ApiError> {
        let mut forks = Vec::new();
        for new in new {
            match self.fork_one(parent, new).await {
                Ok(fork) => forks.push(fork),
                Err(error) => {
                    for fork in forks {
                        self.delete(&fork.id).await?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(forks)
    }

    async fn update(&self, id: &SandboxId, change: Change) -> Result<Sandbox, ApiError> {
        self.known(id)?;
        if matches!(change.policy.checkpoint, Some(Some(_)))
            && !self.has_store.load(Ordering::SeqCst)
        {
            let text = "this host has no store in which checkpoints are kept";
            return Err(ApiError::new(Code::CheckpointsUnavailable, text)
                .hint("start the daemon with `--store file:///…`"));
        }
        if let Some(note) = change.note {
            self.state().get_mut(id).unwrap().known.note = Some(note);
        }
        self.change(id, |sandbox| {
            if let Some(checkpoint) = change.policy.checkpoint {
                sandbox.checkpoint = checkpoint.map(|setting| CheckpointStatus {
                    every_seconds: setting.every_seconds,
                    last_at: None,
                    behind_seconds: None,
                    stored_bytes: 0,
                    changed_bytes: None,
                    carried_bytes: None,
                    pause_ms: None,
                    error: None,
                });
            }
            if let Some(name) = change.name {
                sandbox.name = name;
            }
            if let Some(labels) = change.labels {
                sandbox.labels = labels;
            }
            set_policy(sandbox, change.policy);
        })
    }

    async fn usage(&self, id: &SandboxId) -> Result<Usage, ApiError> {
        self.known(id)?;
        let whole = u32::try_from(self.gib_seconds.load(Ordering::SeqCst)).unwrap();
        let memory_gib_seconds = f64::from(whole);
        let awake = u32::try_from(self.awake_seconds.load(Ordering::SeqCst)).unwrap();
        let awake_seconds = 1.5 + f64::from(awake);
        Ok(Usage { awake_seconds, memory_gib_seconds, state_bytes: 10, ..Usage::default() })
    }

    fn leave(&self) {}

    fn limit_spending(&self, reached: bool) {
        self.spending_reached.store(reached, Ordering::SeqCst);
    }

    fn limit_box(&self, id: &SandboxId, reached: bool) {
        let mut limited = self.limited.lock().unwrap();
        if reached {
            limited.insert(id.clone());
        } else {
            limited.remove(id);
        }
    }

    fn external(&self, _: &SandboxId) -> Result<Box<dyn api::host::Duplex>, ApiError> {
        Err(ApiError::new(Code::PortClosed, "this box has no external base"))
    }

    async fn wire(&self, id: &SandboxId, _: api::boxes::Wiring) -> Result<(), ApiError> {
        self.known(id).map(drop)
    }

    async fn restore(&self, id: &SandboxId) -> Result<(), ApiError> {
        self.known(id)?;
        self.pass_gate().await;
        self.set_life(id, |life| *life = fresh_box());
        Ok(())
    }

    async fn sleep(
        &self,
        id: &SandboxId,
        tier: Option<SleepTier>,
        why: SleepFor,
    ) -> Result<Sandbox, ApiError> {
        if let Some(error) = self.fail_sleep.lock().unwrap().get(id) {
            return Err(error.clone());
        }
        *self.sleeping_now.lock().unwrap() += 1;
        let most = *self.sleeping_now.lock().unwrap();
        self.sleeping_most.fetch_max(most, Ordering::SeqCst);
        tokio::task::yield_now().await;
        *self.sleeping_now.lock().unwrap() -= 1;
        let sandbox = self.change(id, |sandbox| {
            sandbox.status = Status::Sleeping;
            sandbox.sleep_tier = Some(tier.unwrap_or(SleepTier::Memory));
            sandbox.awake_because.clear();
            sandbox.will_sleep_at = None;
            sandbox.will_wake_at = Some(AT.into());
        })?;
        self.say(id, "sandbox.slept", if why == SleepFor::Drain { "drained" } else { "asked for" });
        Ok(sandbox)
    }

    async fn restart(
        &self,
        id: &SandboxId,
        drives: Option<Vec<AttachDrive>>,
        volumes: Option<Vec<AttachVolume>>,
    ) -> Result<Sandbox, ApiError> {
        let sandbox = self.change(id, |sandbox| {
            awake(sandbox);
            if let Some(volumes) = volumes {
                sandbox.volumes = volumes;
            }
            if let Some(drives) = drives {
                sandbox.drives = drives.into_iter().map(attached).collect();
            }
            sandbox.life += 1;
        })?;
        self.say(id, "sandbox.restarted", "booted from disk");
        let execs = std::mem::take(&mut self.state().get_mut(id).unwrap().execs);
        for exec in execs {
            kill(&exec, 9);
        }
        Ok(sandbox)
    }

    async fn delete(&self, id: &SandboxId) -> Result<(), ApiError> {
        if self.known(id).is_err() {
            return Ok(());
        }
        self.say(id, "sandbox.deleted", "gone");
        let one = self.state().remove(id).unwrap();
        for exec in &one.execs {
            kill(exec, 9);
        }
        std::fs::remove_dir_all(self.root.join(id.as_str())).map_err(told)
    }

    async fn checkpoints(&self) -> Result<Vec<Checkpoint>, ApiError> {
        Ok(Vec::new())
    }

    async fn checkpoint_restore(&self, id: &SandboxId) -> Result<Known, ApiError> {
        let taken = self.lost.lock().unwrap().take().filter(|known| known.sandbox.id == *id);
        let known = taken.ok_or_else(|| {
            ApiError::new(Code::NotFound, format!("the store has no checkpoint of `{id}`"))
        })?;
        self.make(known.clone(), "sandbox.moved").await?;
        Ok(known)
    }

    async fn snapshot_take(&self, id: &SandboxId, name: &str) -> Result<Snapshot, ApiError> {
        let of = self.known(id)?.sandbox;
        let snapshot = Snapshot {
            name: name.to_owned(),
            of: of.id,
            of_name: of.name,
            taken_at: "2026-11-30T10:15:30.123Z".to_owned(),
            image: of.image,
            cpus: of.cpus,
            memory_mib: of.memory_mib,
            stored_bytes: 4096,
        };
        let mut snapshots = self.snapshots.lock().unwrap();
        if snapshots.iter().any(|other| other.name == name) {
            return Err(ApiError::new(Code::NameTaken, "a snapshot of this name is there already"));
        }
        snapshots.push(snapshot.clone());
        Ok(snapshot)
    }

    async fn drive_create(&self, new: CreateDrive) -> Result<Drive, ApiError> {
        let drive = Drive {
            name: new.name,
            size_mib: new.size_mib.unwrap_or(DRIVE_MIB_DEFAULT),
            stored_bytes: 0,
            created_at: AT.into(),
            attached_to: None,
        };
        let mut drives = self.drives.lock().expect("not poisoned");
        if drives.iter().any(|other| other.name == drive.name) {
            return Err(ApiError::new(Code::NameTaken, "there is one"));
        }
        drives.push(drive.clone());
        Ok(drive)
    }

    async fn drives(&self) -> Result<Vec<Drive>, ApiError> {
        Ok(self.drives.lock().expect("not poisoned").clone())
    }

    async fn drive_view(&self, name: &str) -> Result<Drive, ApiError> {
        let drives = self.drives.lock().expect("not poisoned");
        let found = drives.iter().find(|drive| drive.name == name).cloned();
        found.ok_or_else(|| ApiError::new(Code::NotFound, "there is none"))
    }

    async fn drive_delete(&self, name: &str) -> Result<(), ApiError> {
        self.drive_view(name).await?;
        self.drives.lock().expect("not poisoned").retain(|drive| drive.name != name);
        Ok(())
    }

    async fn volume_create(
        &self,
        name: &str,
        mut archive: Box<dyn AsyncRead + Send + Unpin>,
    ) -> Result<Volume, ApiError> {
        let mut bytes = Vec::new();
        let read = tokio::io::AsyncReadExt::read_to_end(&mut archive, &mut bytes).await;
        read.map_err(|error| ApiError::invalid("body", error.to_string()))?;
        let volume = Volume {
            name: name.to_owned(),
            entries: 1,
            content_bytes: bytes.len() as u64,
            stored_bytes: 0,
            created_at: AT.into(),
            attached_to: Vec::new(),
        };
        self.volumes.lock().expect("not poisoned").push(volume.clone());
        Ok(volume)
    }

    async fn volumes(&self) -> Result<Vec<Volume>, ApiError> {
        Ok(self.volumes.lock().expect("not poisoned").clone())
    }

    async fn volume_view(&self, name: &str) -> Result<Volume, ApiError> {
        let volumes = self.volumes.lock().expect("not poisoned");
        let found = volumes.iter().find(|volume| volume.name == name).cloned();
        found.ok_or_else(|| ApiError::new(Code::NotFound, "there is none"))
    }

    async fn volume_delete(&self, name: &str) -> Result<(), ApiError> {
        self.volume_view(name).await?;
        self.volumes.lock().expect("not poisoned").retain(|volume| volume.name != name);
        Ok(())
    }

    async fn snapshots(&self) -> Result<Vec<Snapshot>, ApiError> {
        Ok(self.snapshots.lock().unwrap().clone())
    }

    async fn snapshot_view(&self, name: &str) -> Result<Snapshot, ApiError> {
        let snapshots = self.snapshots.lock().unwrap();
        let found = snapshots.iter().find(|snapshot| snapshot.name == name).cloned();
        found.ok_or_else(|| ApiError::new(Code::NotFound, "there is no snapshot of this name"))
    }

    async fn snapshot_delete(&self, name: &str) -> Result<(), ApiError> {
        self.snapshot_view(name).await?;
        self.snapshots.lock().unwrap().retain(|snapshot| snapshot.name != name);
        Ok(())
    }

    async fn delete_idle(&self, id: &SandboxId, _least_ms: u64) -> Result<bool, ApiError> {
        // It does not measure how long it has been asleep, so nobody asks for this.
        Err(ApiError::new(Code::Internal, format!("`{id}` has slept for an unknown time")))
    }

    async fn events(
        &self,
        id: &SandboxId,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Event>, ApiError> {
        self.known(id)?;
        Ok(self.state()[id]
            .timeline
            .iter()
            .filter(|event| event.seq > after)
            .take(limit)
            .cloned()
            .collect())
    }

    fn watch(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    async fn log(&self, id: &SandboxId, log: Log, max_bytes: u64) -> Result<Bytes, ApiError> {
        self.known(id)?;
        let text = match log {
            Log::Console => "Linux version 6.12\n",
            Log::Daemon => "sandbox moved\n",
        };
        Ok(Bytes::from(
            text[text.len().saturating_sub(usize::try_from(max_bytes).unwrap())..].to_owned(),
        ))
    }

    async fn hold(
        &self,
        id: &SandboxId,
        kind: HoldKind,
        caller: Caller,
    ) -> Result<Answer<Box<dyn Hold>>, ApiError> {
        let woke_ms = self.wake(id, &caller.what).await?;
        let count = match kind {
            HoldKind::Request | HoldKind::Tool | HoldKind::Link => &self.holds,
            HoldKind::AwakeConnection => &self.awake_connections,
        };
        count.send_modify(|holds| *holds += 1);
        Ok(Answer { value: Box::new(FakeHold(Arc::clone(count))), woke_ms })
    }

    fn connection_rules(&self, id: &SandboxId, port: u16) -> Result<ConnectionRules, ApiError> {
        let sandbox = self.known(id)?.sandbox;
        Ok(ConnectionRules {
            keeps_awake: sandbox.awake_ports.contains(&port),
            idle: sandbox.connection_idle_seconds.map(std::time::Duration::from_secs),
        })
    }

    async fn connect(
        &self,
        id: &SandboxId,
        port: u16,
        caller: Caller,
    ) -> Result<Answer<Connection>, ApiError> {
        let woke_ms = self.wake(id, &caller.what).await?;
        let life = self.known(id)?.sandbox.life;
        let mut left = self.port_retries.load(Ordering::SeqCst);
        loop {
            match tokio::net::TcpStream::connect(("127.0.0.1", port)).await {
                Ok(stream) => {
                    return Ok(Answer {
                        value: Connection { stream: Box::new(stream), life },
                        woke_ms,
                    });
                }
                Err(_) if left > 0 => {
                    left -= 1;
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
                Err(_) => {
                    return Err(ApiError::new(
                        Code::PortClosed,
                        format!("nothing listens on port {port}"),
                    ));
                }
            }
        }
    }

    async fn exec_start(
        &self,
        id: &SandboxId,
        request: ExecRequest,
    ) -> Result<Answer<Exec>, ApiError> {
        let woke_ms = self.wake(id, "exec").await?;
        let argv = match (&request.argv, &request.command) {
            (Some(argv), _) => argv.clone(),
            (None, line) => vec!["sh".into(), "-c".into(), line.clone().unwrap()],
        };
        // What would be absolute in a guest is below its folder here.
        let argv: Vec<String> = argv
            .into_iter()
            .map(|arg| {
                if arg.starts_with("/work") {
                    self.path(id, &arg).display().to_string()
                } else {
                    arg
                }
            })
            .collect();
        let mut command = tokio::process::Command::new(&argv[0]);
        let cwd = self.path(id, request.cwd.as_deref().unwrap_or("/work"));
        command
            .args(&argv[1..])
            .current_dir(cwd)
            .envs(&self.known(id)?.sandbox.env)
            .envs(&request.env)
            .process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| {
            let absent = error.kind() == std::io::ErrorKind::NotFound;
            let code = if absent { Code::ProgramNotFound } else { Code::CannotStart };
            ApiError::new(code, format!("cannot start: {error}"))
        })?;
        let mut stdin = child.stdin.take();
        if let Some(text) = &request.stdin {
            stdin.as_mut().unwrap().write_all(text.as_bytes()).await.map_err(told)?;
        }
        if !request.open_stdin {
            stdin = None;
        }
        let mut state = self.state();
        let one = state.get_mut(id).unwrap();
        let view = Exec {
            exec_id: (one.execs.len() + 1).to_string(),
            pid: child.id().unwrap(),
            status: ExecStatus::Running,
            command: argv.join(" "),
            exit: None,
            stdout_bytes: 0,
            stderr_bytes: 0,
        };
        let running = Arc::new(Running {
            view: view.clone(),
            request,
            out: [watch::channel(Vec::new()).0, watch::channel(Vec::new()).0],
            exit: watch::channel(None).0,
            stdin: tokio::sync::Mutex::new(stdin),
        });
        one.execs.push(Arc::clone(&running));
        drop(state);
        let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        tokio::spawn(async move {
            let time = running
                .request
                .timeout_ms
                .map_or(std::time::Duration::MAX, std::time::Duration::from_millis);
            let work = async {
                tokio::join!(pump(stdout, &running.out[0]), pump(stderr, &running.out[1]));
                child.wait().await.unwrap()
            };
            tokio::pin!(work);
            let in_time = tokio::time::timeout(time, work.as_mut()).await;
            let timed_out = in_time.is_err();
            let status = if let Ok(status) = in_time {
                status
            } else {
                kill(&running, 9);
                work.await
            };
            running.exit.send_replace(Some(Exit {
                exit_code: status.code(),
                signal: status.signal(),
                timed_out,
            }));
        });
        Ok(Answer { value: view, woke_ms })
    }

    async fn exec_list(&self, id: &SandboxId) -> Result<Answer<Vec<Exec>>, ApiError> {
        self.known(id)?;
        Ok(Answer {
            value: self.state()[id].execs.iter().map(|running| view(running)).collect(),
            woke_ms: None,
        })
    }

    async fn exec_view(&self, id: &SandboxId, exec_id: &str) -> Result<Answer<Exec>, ApiError> {
        Ok(Answer { value: view(&*self.exec(id, exec_id)?), woke_ms: None })
    }

    async fn exec_output(
        &self,
        id: &SandboxId,
        exec_id: &str,
        from: OutputFrom,
    ) -> Result<Answer<mpsc::Receiver<Result<OutputEvent, ApiError>>>, ApiError> {
        let running = self.exec(id, exec_id)?;
        let (sender, receiver) = mpsc::channel(4);
        let hold = from.hold.then(|| {
            self.holds.send_modify(|holds| *holds += 1);
            FakeHold(Arc::clone(&self.holds))
        });
        tokio::spawn(async move {
            let _hold = hold;
            let streams = [(Output::Stdout, from.stdout), (Output::Stderr, from.stderr)];
            let mut next = streams.map(|(_, from)| from.map(|from| usize::try_from(from).unwrap()));
            let mut exit = running.exit.subscribe();
            let mut out = [running.out[0].subscribe(), running.out[1].subscribe()];
            loop {
                let ended = *exit.borrow_and_update();
                for (index, (stream, _)) in streams.into_iter().enumerate() {
                    let Some(position) = next[index] else { continue };
                    let new =
                        out[index].borrow_and_update().get(position..).unwrap_or_default().to_vec();
                    if new.is_empty() {
                        continue;
                    }
                    next[index] = Some(position + new.len());
                    let event =
                        OutputEvent::Data { stream, offset: position as u64, bytes: new.into() };
                    if sender.send(Ok(event)).await.is_err() {
                        return;
                    }
                }
                match ended {
                    Some(exit) => return drop(sender.send(Ok(OutputEvent::Exit(exit))).await),
                    None if !from.follow => return,
                    None => {}
                }
                let [one, two] = &mut out;
                tokio::select! {
                    _ = one.changed() => {}
                    _ = two.changed() => {}
                    _ = exit.changed() => {}
                    () = sender.closed() => return,
                }
            }
        });
        Ok(Answer { value: receiver, woke_ms: None })
    }

    async fn exec_stdin(
        &self,
        id: &SandboxId,
        exec_id: &str,
        bytes: Bytes,
        close: bool,
    ) -> Result<Answer<()>, ApiError> {
        let running = self.exec(id, exec_id)?;
        let mut stdin = running.stdin.lock().await;
        let Some(pipe) = stdin.as_mut() else {
            return Err(ApiError::new(Code::CommandLost, "its standard input is closed"));
        };
        pipe.write_all(&bytes).await.map_err(told)?;
        if close {
            *stdin = None;
        }
        Ok(Answer { value: (), woke_ms: None })
    }

    async fn exec_signal(
        &self,
        id: &SandboxId,
        exec_id: &str,
        signal: i32,
    ) -> Result<Answer<()>, ApiError> {
        kill(&*self.exec(id, exec_id)?, signal);
        Ok(Answer { value: (), woke_ms: None })
    }

    async fn file_read(
        &self,
        id: &SandboxId,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<Answer<(FileInfo, Box<dyn AsyncRead + Send + Unpin>)>, ApiError> {
        let woke_ms = self.wake(id, "file read").await?;
        let info = self.info(id, path)?;
        let mut file = std::fs::File::open(self.path(id, path)).map_err(told)?;
        file.seek(SeekFrom::Start(offset)).map_err(told)?;
        let reader = tokio::fs::File::from_std(file).take(length.unwrap_or(u64::MAX));
        Ok(Answer { value: (info, Box::new(reader)), woke_ms })
    }

    async fn file_write(
        &self,
        id: &SandboxId,
        path: &str,
        mode: Option<u32>,
        mut body: Box<dyn AsyncRead + Send + Unpin>,
    ) -> Result<Answer<FileInfo>, ApiError> {
        let woke_ms = self.wake(id, "file write").await?;
        let target = self.path(id, path);
        std::fs::create_dir_all(target.parent().unwrap()).map_err(told)?;
        let draft = target.with_extension("draft");
        let mut file = tokio::fs::File::create(&draft).await.map_err(told)?;
        let copied = tokio::io::copy(&mut body, &mut file).await;
        file.flush().await.map_err(told)?;
        if let Err(error) = copied {
            std::fs::remove_file(&draft).map_err(told)?;
            return Err(told(error));
        }
        std::fs::set_permissions(&draft, std::fs::Permissions::from_mode(mode.unwrap_or(0o644)))
            .map_err(told)?;
        std::fs::rename(&draft, &target).map_err(told)?;
        Ok(Answer { value: self.info(id, path)?, woke_ms })
    }

    async fn file_stat(&self, id: &SandboxId, path: &str) -> Result<Answer<FileInfo>, ApiError> {
        Ok(Answer { woke_ms: self.wake(id, "file stat").await?, value: self.info(id, path)? })
    }

    async fn file_list(
        &self,
        id: &SandboxId,
        path: &str,
    ) -> Result<Answer<Vec<FileInfo>>, ApiError> {
        let mut names: Vec<String> = std::fs::read_dir(self.path(id, path))
            .map_err(told)?
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let path = path.trim_end_matches('/');
        let files = names
            .iter()
            .map(|name| self.info(id, &format!("{path}/{name}")))
            .collect::<Result<_, _>>()?;
        Ok(Answer { value: files, woke_ms: None })
    }

    async fn file_mkdir(&self, id: &SandboxId, path: &str) -> Result<Answer<FileInfo>, ApiError> {
        std::fs::create_dir_all(self.path(id, path)).map_err(told)?;
        Ok(Answer { value: self.info(id, path)?, woke_ms: None })
    }

    async fn file_move(
        &self,
        id: &SandboxId,
        from: &str,
        to: &str,
    ) -> Result<Answer<FileInfo>, ApiError> {
        std::fs::rename(self.path(id, from), self.path(id, to)).map_err(told)?;
        Ok(Answer { value: self.info(id, to)?, woke_ms: None })
    }

    async fn file_remove(&self, id: &SandboxId, path: &str) -> Result<Answer<()>, ApiError> {
        let path = self.path(id, path);
        let removed =
            if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
        removed.map_err(told)?;
        Ok(Answer { value: (), woke_ms: None })
    }

    async fn tree_read(
        &self,
        id: &SandboxId,
        path: &str,
    ) -> Result<Answer<Box<dyn AsyncRead + Send + Unpin>>, ApiError> {
        let woke_ms = self.wake(id, "tree read").await?;
        let path = self.path(id, path);
        let (folder, what) = if path.is_dir() {
            (path.clone(), ".".to_owned())
        } else {
            (
                path.parent().unwrap().to_owned(),
                path.file_name().unwrap().to_str().unwrap().to_owned(),
            )
        };
        std::fs::metadata(&path).map_err(told)?;
        let mut tar = tokio::process::Command::new("tar")
            .args(["-c", "-C"])
            .arg(folder)
            .arg(what)
            .stdout(Stdio::piped())
            .spawn()
            .map_err(told)?;
        let stdout = tar.stdout.take().unwrap();
        tokio::spawn(async move { tar.wait().await });
        Ok(Answer { value: Box::new(stdout), woke_ms })
    }

    async fn tree_write(
        &self,
        id: &SandboxId,
        path: &str,
        mut body: Box<dyn AsyncRead + Send + Unpin>,
    ) -> Result<Answer<()>, ApiError> {
        let woke_ms = self.wake(id, "tree write").await?;
        let folder = self.path(id, path);
        std::fs::create_dir_all(&folder).map_err(told)?;
        let mut tar = tokio::process::Command::new("tar")
            .args(["-x", "--no-same-owner", "-C"])
            .arg(folder)
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(told)?;
        let mut stdin = tar.stdin.take().unwrap();
        let copied = tokio::io::copy(&mut body, &mut stdin).await;
        drop(stdin);
        let status = tar.wait().await.map_err(told)?;
        copied.map_err(told)?;
        if status.success() {
            Ok(Answer { value: (), woke_ms })
        } else {
            Err(ApiError::invalid("body", "the body is no tar stream"))
        }
    }
}

fn awake(sandbox: &mut Sandbox) {
    sandbox.status = Status::Running;
    sandbox.sleep_tier = None;
    sandbox.awake_because = vec![AwakeReason {
        reason: "quiet".into(),
        text: "something ran in it".into(),
        until: Some(AT.into()),
    }];
    sandbox.will_sleep_at = Some(AT.into());
    sandbox.will_wake_at = None;
}

fn set_policy(sandbox: &mut Sandbox, policy: PolicyPatch) {
    if let Some(seconds) = policy.sleep_after_seconds {
        sandbox.sleep_after_seconds = seconds;
    }
    if let Some(seconds) = policy.memory_tier_seconds {
        sandbox.memory_tier_seconds = seconds;
    }
    if let Some(ports) = policy.awake_ports {
        sandbox.awake_ports = ports;
    }
    if let Some(seconds) = policy.connection_idle_seconds {
        sandbox.connection_idle_seconds = seconds;
    }
    if let Some(ms) = policy.sleep_hold_max_ms {
        sandbox.sleep_hold_max_ms = ms;
    }
    if let Some(ms) = policy.sleep_notice_ms {
        sandbox.sleep_notice_ms = ms;
    }
    if let Some(ms) = policy.delete_after_idle_ms {
        sandbox.delete_after_idle_ms = ms;
    }
    if let Some(at) = policy.expires_at {
        sandbox.expires_at = at;
    }
}

fn view(running: &Running) -> Exec {
    let exit = *running.exit.borrow();
    Exec {
        status: if exit.is_some() { ExecStatus::Exited } else { ExecStatus::Running },
        exit,
        stdout_bytes: running.out[0].borrow().len() as u64,
        stderr_bytes: running.out[1].borrow().len() as u64,
        ..running.view.clone()
    }
}

async fn pump(mut from: impl AsyncRead + Unpin, to: &watch::Sender<Vec<u8>>) {
    let mut buffer = vec![0; 8192];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        to.send_modify(|all| all.extend_from_slice(&buffer[..read]));
    }
}

fn kill(running: &Running, signal: i32) {
    let pid = rustix::process::Pid::from_raw(running.view.pid.cast_signed()).unwrap();
    let signal = rustix::process::Signal::from_named_raw(signal).unwrap();
    if running.exit.borrow().is_none() {
        // It may have ended in between.
        let _ = rustix::process::kill_process_group(pid, signal);
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn told(error: std::io::Error) -> ApiError {
    let code = match error.kind() {
        std::io::ErrorKind::NotFound => Code::NotFound,
        std::io::ErrorKind::IsADirectory | std::io::ErrorKind::NotADirectory => Code::WrongFileType,
        _ => Code::Internal,
    };
    ApiError::new(code, error.to_string())
}
