//! What a starting daemon makes of what an earlier one left, however that one ended.
//!
//! Two things tell the truth: the manifests, and the living QEMU processes (each names its sandbox's memory file in its command
//! line). From the two every sandbox gets a state that is not between:
//!
//! | manifest says | QEMU | then |
//! | --- | --- | --- |
//! | creating | any | undone: ended and removed (who asked was never told that it exists) |
//! | any, but it is one of several forks that a note says are not all there | any | undone ([`fork_sets`](crate::fork_sets)) |
//! | running | runs | taken up; it has noticed nothing |
//! | running | stands | a save or a copy was under way, or a wake had all but succeeded: it goes on |
//! | running | stopped | a sleep in memory had all but succeeded: it goes on |
//! | running | none | its memory is lost, and it says so: `machine_lost` |
//! | sleeping in memory | stopped | it sleeps |
//! | sleeping in memory | runs | a wake had begun: it goes on |
//! | sleeping in memory | none | lost |
//! | sleeping on disk | any | it sleeps. A process has saved and is not yet gone, or was being restored and has not run: ended |
//! | off, failed | any | as it says; a process is ended |
//! | deleting | any | finished |
//!
//! A folder without a manifest that can be read is moved to quarantine, never deleted.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{Event, SandboxId};
use lifecycle::{FailureCode, Recovered, SleepCause, Tier, Time};
use serde_json::Map;
use tokio::sync::{broadcast, mpsc};
use vmm::machine::{Adopted, GuestState};
use vmm::process::ProcessState;
use vmm::{Machine, ProcessId};

use crate::checkpoints::{self, Store};
use crate::clock::{self, Moment};
use crate::daemon::StartError;
use crate::fork_sets::Unfinished;
use crate::ground::Ground;
use crate::manifest::{self, Manifest, ManifestError, State};
use crate::network::asleep::AtRest;
use crate::record::Record;
use crate::sandbox::body::{Body, Shape, machine_spec};
use crate::sandbox::work::chain;
use crate::sandbox::{Beginning, Handle, start};
use crate::settings::Files;
use crate::slots::Slot;
use crate::tap::Port;
use crate::timeline::Timeline;

/// How long a tap is waited for that an ended process still holds. Some hundredths of a second were seen.
const TAP_WAIT: Duration = Duration::from_secs(5);

/// Time between two tries.
const TAP_LOOK: Duration = Duration::from_millis(20);

/// How long the kernel may take to end a killed process.
const END_LIMIT: Duration = Duration::from_secs(30);
/// How often is looked whether it has.
const END_LOOK_EVERY: Duration = Duration::from_millis(2);

/// Takes up every sandbox below the data folder.
pub(crate) async fn recover(
    ground: &Arc<Ground>,
    events: &broadcast::Sender<Event>,
    gone: &mpsc::UnboundedSender<SandboxId>,
) -> Result<HashMap<SandboxId, Handle>, StartError> {
    let dir = ground.settings.sandboxes_dir();
    let fail =
        |source| StartError::Folder { doing: "list", path: dir.display().to_string(), source };
    let mut handles = HashMap::new();
    let store = reachable_store(ground).await;
    let forks = ground.settings.fork_sets_dir();
    let unfinished = Unfinished::find(&forks).map_err(|source| StartError::Folder {
        doing: "list",
        path: forks.display().to_string(),
        source,
    })?;
    let mut undone = true;
    for entry in std::fs::read_dir(&dir).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        crate::daemon::close_files(&path);
        let files = Files::in_dir(&path);
        let manifest = match readable(&files) {
            Ok(manifest) if unfinished.has(&manifest.id) => {
                Manifest { state: State::Creating, ..manifest }
            }
            Ok(manifest) => unless_moved(ground, store.as_deref(), manifest).await,
            Err(error) => {
                quarantine(ground, &path, &error);
                continue;
            }
        };
        let id = manifest.id.clone();
        let is_unfinished = unfinished.has(&id);
        if manifest.state != State::Creating {
            ground.drives.settle(&id, &manifest.drives);
            ground.volumes.settle(&id, &manifest.drives);
        }
        let Some(slot) = ground.slots.claim(manifest.slot) else {
            quarantine(
                ground,
                &path,
                &format!("its slot {} is out of range or another's", manifest.slot),
            );
            continue;
        };
        match take_up(ground, events, gone, files, slot, manifest).await {
            Ok(Some(handle)) => {
                handles.insert(id, handle);
            }
            Ok(None) => {}
            Err(error) => {
                tracing::error!(sandbox = %id, error, "could not be taken up; its folder stays as it is");
                undone &= !is_unfinished;
            }
        }
    }
    // Otherwise the next start tries again.
    if undone && let Err(error) = unfinished.forget() {
        tracing::error!(error = chain(&error), "a note about forks that are undone stays");
    }
    remove_stray_taps(ground, &handles).await;
    Ok(handles)
}

/// The store, if it answers now. If it does not, nobody can tell whose a sandbox is, and it is taken for this host's.
async fn reachable_store(ground: &Ground) -> Option<Arc<Store>> {
    let store = ground.store.clone()?;
    match store.is_there().await {
        Ok(()) => Some(store),
        Err(error) => {
            tracing::error!(
                error = chain(&error),
                "the store does not say which sandboxes another host has taken over"
            );
            None
        }
    }
}

/// One that another host has taken over meanwhile is ended here.
async fn unless_moved(ground: &Ground, store: Option<&Store>, mut manifest: Manifest) -> Manifest {
    let Some(store) = store.filter(|_| manifest.policy.checkpoint_seconds.is_some()) else {
        return manifest;
    };
    match checkpoints::lost_to(store, &ground.host, &manifest.id, manifest.epoch).await {
        Ok(None) => {}
        Ok(Some(owner)) => {
            tracing::error!(sandbox = %manifest.id, name = manifest.name, owner = owner.host, since = owner.since,
                "another host has taken it over: it is not run here any more, its files are kept below `moved`");
            manifest.moved_to = Some(owner.host);
            manifest.state = State::Deleting;
        }
        Err(error) => {
            tracing::error!(sandbox = %manifest.id, error = chain(&error), "whose it is is not known");
        }
    }
    manifest
}

fn readable(files: &Files) -> Result<Manifest, String> {
    let name = files.dir().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let manifest =
        manifest::read(&files.manifest()).map_err(|error: ManifestError| chain(&error))?;
    if manifest.id.as_str() == name {
        Ok(manifest)
    } else {
        Err(format!("its manifest is that of `{}`", manifest.id))
    }
}

async fn take_up(
    ground: &Arc<Ground>,
    events: &broadcast::Sender<Event>,
    gone: &mpsc::UnboundedSender<SandboxId>,
    files: Files,
    slot: Slot,
    manifest: Manifest,
) -> Result<Option<Handle>, String> {
    let id = manifest.id.clone();
    let record = Record::existing(&files.manifest(), manifest);
    let mut body = Body::new(files, slot).map_err(|error| chain(&error))?;
    let found = Finder { ground, record: &record, body: &mut body, id: &id }.find().await?;
    let Some(found) = found else {
        undo(&mut body, &id)?;
        return Ok(None);
    };
    let address = ground.subnet.address(body.slot.number());
    let wiring = record.with(|manifest| manifest.wiring.clone());
    if let Err(error) = ground.services.wire(&id, address, wiring).await {
        tracing::error!(sandbox = %id, %error, "its names are not wired");
    }
    let mut timeline = Timeline::open(id.clone(), &body.files.timeline(), events.clone())
        .map_err(|error| error.to_string())?;
    let text = match found {
        Recovered::Running => "the daemon was restarted; it ran on",
        Recovered::Asleep { .. } => "the daemon was restarted; it slept on",
        Recovered::Off { .. } => "the daemon was restarted; its machine is gone",
        Recovered::Failed { .. } => "the daemon was restarted; it has failed before",
        Recovered::Unstarted | Recovered::Unbooted => {
            "the daemon was restarted; its start begins anew"
        }
        Recovered::Deleting => "the daemon was restarted; its deletion is finished",
    };
    timeline.add("adopted", text, Map::new());
    let last_death =
        record.with(|manifest| manifest.last_end.as_deref().map(crate::sandbox::death_of));
    let beginning = Beginning {
        ground: Arc::clone(ground),
        record,
        body,
        timeline,
        found: Some((found, last_death)),
        gone: gone.clone(),
    };
    Ok(Some(start(beginning)))
}

struct Finder<'a> {
    ground: &'a Ground,
    record: &'a Record,
    body: &'a mut Body,
    id: &'a SandboxId,
}

impl Finder<'_> {
    /// What there is of it; `None`: it is to be undone. A machine that cannot be taken up is of no use to anybody: it is ended,
    /// and lost.
    async fn find(mut self) -> Result<Option<Recovered>, String> {
        let manifest = self.record.get();
        match self.find_by_state().await {
            Err(error) => {
                tracing::error!(sandbox = %self.id, error, "could not be taken up");
                let process = self.process(&manifest)?;
                self.end(process).await?;
                self.lost().await.map(Some)
            }
            found => found,
        }
    }

    async fn find_by_state(&mut self) -> Result<Option<Recovered>, String> {
        let manifest = self.record.get();
        let process = self.process(&manifest)?;
        match manifest.state.clone() {
            State::Creating => {
                self.end(process).await?;
                Ok(None)
            }
            State::Running => self.find_running(manifest, process).await.map(Some),
            State::SleepingInMemory { slept_at, timer_due } => {
                let Some(process) = process else { return self.lost().await.map(Some) };
                match self.adopt(&manifest, &process).await? {
                    Some(Adopted::Stopped) => {
                        self.rest(manifest.network_at_rest);
                        Ok(Some(Recovered::Asleep {
                            tier: Tier::Memory,
                            since: slept_at.time(),
                            cause: SleepCause::Idle,
                            timer_due: timer_due.as_ref().map(due),
                        }))
                    }
                    Some(Adopted::Going(_)) => self.go_on().await.map(Some),
                    None => self.lost().await.map(Some),
                }
            }
            State::SleepingOnDisk(saved) => {
                self.end(process).await?;
                self.listen().await;
                self.rest(manifest.network_at_rest);
                Ok(Some(Recovered::Asleep {
                    tier: Tier::Disk,
                    since: saved.slept_at.time(),
                    cause: SleepCause::Idle,
                    timer_due: saved.timer_due.as_ref().map(due),
                }))
            }
            State::Off { code } => {
                self.end(process).await?;
                let since = manifest.since.time();
                Ok(Some(Recovered::Off { death: crate::sandbox::death_of(&code), since }))
            }
            State::Failed { code, saved, .. } => {
                self.end(process).await?;
                let since = manifest.since.time();
                let has_run = manifest.life > 0;
                Ok(Some(Recovered::Failed {
                    code: failure_of(&code),
                    since,
                    has_run,
                    saved: saved.is_some(),
                }))
            }
            State::Deleting => {
                self.adopt_to_end(process).await;
                Ok(Some(Recovered::Deleting))
            }
        }
    }

    async fn find_running(
        &mut self,
        manifest: Manifest,
        process: Option<ProcessId>,
    ) -> Result<Recovered, String> {
        let Some(process) = process else { return self.lost().await };
        match self.adopt(&manifest, &process).await? {
            None | Some(Adopted::Going(GuestState::Ended)) => self.lost().await,
            Some(Adopted::Stopped) => {
                let Some(machine) = self.body.machine.as_mut() else { return self.lost().await };
                machine.continue_process().await.map_err(|error| chain(&error))?;
                self.unpause().await
            }
            // Of a guest whose state was not loaded, nothing says that it may run.
            Some(Adopted::Going(GuestState::AwaitingState)) => {
                self.end(Some(process)).await?;
                self.lost().await
            }
            Some(Adopted::Going(_)) => self.unpause().await,
        }
    }

    /// Lets a paused guest go on; harmless on one that runs. On a disk that is nearly full it stands on: its task lets it go on.
    async fn unpause(&mut self) -> Result<Recovered, String> {
        if *self.ground.disk_low.borrow() {
            return self.go_on().await;
        }
        let Some(machine) = self.body.machine.as_mut() else { return self.lost().await };
        machine.cont().await.map_err(|error| chain(&error))?;
        self.go_on().await
    }

    /// It runs. Its agent is met by its own task, so that a guest that does not answer keeps nobody else waiting.
    async fn go_on(&mut self) -> Result<Recovered, String> {
        self.note(|manifest| manifest.state = State::Running).await;
        Ok(Recovered::Running)
    }

    /// Its machine is gone and with it its memory.
    async fn lost(&mut self) -> Result<Recovered, String> {
        self.listen().await;
        let code = "machine_lost";
        self.note(|manifest| {
            manifest.state = State::Off { code: code.to_owned() };
            manifest.since = Moment::now();
            manifest.last_end = Some(code.to_owned());
        })
        .await;
        Ok(Recovered::Off { death: lifecycle::Death::Killed, since: clock::now() })
    }

    async fn note(&self, change: impl FnOnce(&mut Manifest)) {
        if let Err(error) = self.record.change(change).await {
            tracing::error!(sandbox = %self.id, error = chain(&error), "manifest not written");
        }
    }

    /// The QEMU that has this sandbox's memory, if it lives.
    fn process(&self, manifest: &Manifest) -> Result<Option<ProcessId>, String> {
        let argument = vmm::Qemu::memory_argument(&self.spec(manifest)?);
        let found = ProcessId::find(&argument).map_err(|error| error.to_string())?;
        Ok(found.into_iter().next())
    }

    fn spec(&self, manifest: &Manifest) -> Result<vmm::MachineSpec, String> {
        let nothing = std::fs::File::open("/dev/null").map_err(|error| error.to_string())?;
        let shape = Shape::of(self.ground, manifest, &self.body.files);
        let slot = self.body.slot.number();
        let root = std::path::PathBuf::from("/nonexistent");
        Ok(machine_spec(
            self.ground,
            self.id,
            &self.body.files,
            slot,
            shape,
            root,
            Arc::new(nothing.into()),
        ))
    }

    /// Takes up a machine and its tap. `None`: it has ended meanwhile.
    async fn adopt(
        &mut self,
        manifest: &Manifest,
        process: &ProcessId,
    ) -> Result<Option<Adopted>, String> {
        let Some(fingerprint) = manifest.machine.clone() else {
            return Err("its manifest names no machine".to_owned());
        };
        let outlets = self.spec(manifest)?.outlets;
        let (machine, adopted) = match Machine::adopt(process, &outlets, &fingerprint).await {
            Ok(adopted) => adopted,
            Err(error) => {
                tracing::warn!(sandbox = %self.id, error = chain(&error), "machine not taken up");
                self.kill(process).await;
                return Ok(None);
            }
        };
        self.body.machine = Some(machine);
        self.body.seat = Some(self.ground.budget.seat_of_living(manifest.memory_mib));
        match Port::shared_with(process, self.ground.subnet, self.body.slot.number()) {
            Ok(port) => self.body.port = Some(port),
            Err(error) => {
                tracing::error!(sandbox = %self.id, %error, "tap not shared; it cannot be woken by packets");
            }
        }
        Ok(Some(adopted))
    }

    /// A machine that is of no use any more.
    async fn end(&mut self, process: Option<ProcessId>) -> Result<(), String> {
        self.body.machine = None;
        self.body.seat = None;
        if let Some(process) = process {
            self.kill(&process).await;
        }
        Ok(())
    }

    async fn kill(&mut self, process: &ProcessId) {
        if let Err(error) = end_process(process).await {
            tracing::error!(sandbox = %self.id, %error, "QEMU could not be killed");
        }
    }

    /// A deletion ends the machine itself, where it can be taken up.
    async fn adopt_to_end(&mut self, process: Option<ProcessId>) {
        if let Some(process) = process {
            self.kill(&process).await;
        }
        self.listen().await;
    }

    /// It sleeps on, and this is what it sleeps with.
    fn rest(&mut self, at_rest: Option<AtRest>) {
        if let Some(port) = &mut self.body.port {
            port.rest(at_rest, false);
        }
    }

    /// Opens the tap of one whose machine does not hold it. A process that has ended a moment ago may hold it a little longer:
    /// the kernel takes it apart after it has told its end.
    async fn listen(&mut self) {
        let begun = Instant::now();
        loop {
            match self.body.ensure_port(self.ground).map(drop) {
                Ok(()) => return,
                Err(error) if begun.elapsed() >= TAP_WAIT => {
                    tracing::error!(sandbox = %self.id, error = chain(&error), "no tap; it cannot be woken by packets");
                    return;
                }
                Err(_) => tokio::time::sleep(TAP_LOOK).await,
            }
        }
    }
}

/// Kills a process and waits for its end. The process is opened first and looked at afterwards, so that a number that was used
/// again hits nobody else.
async fn end_process(process: &ProcessId) -> std::io::Result<()> {
    let Some(pid) = i32::try_from(process.pid).ok().and_then(rustix::process::Pid::from_raw) else {
        return Ok(());
    };
    let pidfd = match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    if process.state() == ProcessState::Dead {
        return Ok(());
    }
    rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL)?;
    let killed = Instant::now();
    // Not ours to wait for: a state is all that is known of another's child, and a zombie counts as ended.
    while process.state() != ProcessState::Dead {
        if killed.elapsed() > END_LIMIT {
            let error = format!("it did not end within {END_LIMIT:?}");
            return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, error));
        }
        tokio::time::sleep(END_LOOK_EVERY).await;
    }
    Ok(())
}

/// Removes what a creation or copy that was cut off has left.
fn undo(body: &mut Body, id: &SandboxId) -> Result<(), String> {
    tracing::info!(sandbox = %id, "an unfinished creation is undone");
    if let Some(port) = body.port.as_mut() {
        port.remove().map_err(|error| error.to_string())?;
    }
    std::fs::remove_dir_all(body.files.dir()).map_err(|error| error.to_string())
}

/// Taps of ours that belong to no sandbox: those of undone creations and of templates that were being made.
async fn remove_stray_taps(ground: &Ground, handles: &HashMap<SandboxId, Handle>) {
    let mut kept = Vec::new();
    for handle in handles.values() {
        kept.push(handle.tap_name(ground.subnet));
    }
    match crate::network::remove_taps_except(ground.subnet, &kept).await {
        Ok(0) => {}
        Ok(count) => tracing::info!(count, "taps without a sandbox removed"),
        Err(error) => tracing::error!(%error, "taps without a sandbox not removed"),
    }
}

/// Moves a folder aside that nobody can make sense of.
fn quarantine(ground: &Ground, path: &Path, why: &str) {
    let dir = ground.settings.quarantine_dir();
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let to = dir.join(format!("{name}-{}", clock::unix_ms()));
    let moved = std::fs::create_dir_all(&dir).and_then(|()| std::fs::rename(path, &to));
    match moved {
        Ok(()) => {
            tracing::error!(from = %path.display(), to = %to.display(), why, "moved to quarantine");
        }
        Err(error) => {
            tracing::error!(path = %path.display(), why, %error, "could not be moved to quarantine");
        }
    }
}

fn due(moment: &Moment) -> Time {
    let left = moment.unix_ms.saturating_sub(clock::unix_ms());
    if moment.boot_id == Moment::now().boot_id { moment.time() } else { clock::now().plus_ms(left) }
}

fn failure_of(code: &str) -> FailureCode {
    use FailureCode as Code;
    let all = [
        Code::CreateFailed,
        Code::BootFailed,
        Code::SleepFailed,
        Code::WakeFailed,
        Code::SnapshotMismatch,
        Code::StateDamaged,
        Code::DiskFull,
        Code::NoCapacity,
        Code::AgentSilent,
        Code::CaptureFailed,
        Code::DestroyFailed,
        Code::MachineLost,
        Code::DriveUnusable,
    ];
    // A code of a newer build: that it failed is what counts.
    all.into_iter().find(|known| known.as_str() == code).unwrap_or(Code::BootFailed)
}
