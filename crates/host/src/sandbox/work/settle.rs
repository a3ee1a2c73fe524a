//! Putting to rest: to sleep in memory or on disk, from memory to disk, and away for good.

use std::path::{Path, PathBuf};

use lifecycle::{FailureCode, Left, Report, Tier};
use tokio::sync::oneshot;
use vmm::Machine;
use vmm::machine::GuestState;
use vmm::process::ProcessState;

use super::network::Look;
use super::{Failed, QUIESCE_LIMIT, SAMPLE_LIMIT, Unanswered, WAKE_LIMIT, Worker, chain, failed};

use crate::clock::Moment;
use crate::fault;
use crate::guest::{Continuity, LinkState, QuiesceOptions, WakeParams};
use crate::manifest::{Saved, State};
use crate::network::asleep::AtRest;
use crate::sandbox::Message;
use crate::settings::Files;

impl Worker {
    /// From running to asleep. Until the sleep is published, everything can be undone and is, on an error or when asked.
    pub(super) async fn suspend(&mut self, tier: Tier) -> Result<Report, Failed> {
        if self.body.machine.is_none() {
            return Err(lost("no machine"));
        }
        if self.body.link.state() != LinkState::Running {
            let error = "its guest agent does not answer".to_owned();
            return Err(Failed { code: FailureCode::AgentSilent, left: Left::Awake, error });
        }
        let on_disk = tier != Tier::Memory;
        // A guest that is told to write what the disk has no room for stands still until there is some. So it is not told.
        let room = self.check_room_to_sleep();
        if on_disk {
            room.as_ref().map_err(Clone::clone)?;
        }
        let early = async |part| if on_disk { self.write_early(part).await } else { Ok(()) };
        let flushed = async {
            let flushed = self.flush(room.is_ok()).await;
            (flushed, early(self.body.files.disk()).await)
        };
        // Together: so the guest has one turn for all answers, and gives them while it waits for its disk.
        let ((flushed, disk), memory, timer_due, mut look, ()) = tokio::join!(
            flushed,
            early(self.body.files.memory()),
            self.last_sample(),
            self.look_at_network(),
            self.body.link.note_execs()
        );
        self.phases.mark("look");
        if self.signals.cancelled() {
            return Ok(Report::BackAwake);
        }
        // It runs on as it did.
        disk.and(memory).map_err(|error| failed(FailureCode::SleepFailed, Left::Awake, &error))?;
        // Its drives are to be whole when it stands still, which takes a word of its own.
        let sync = room.is_ok() && (!flushed || self.has_drives());
        let options = QuiesceOptions { sync, drop_caches: false };
        let quiesced = self.body.link.quiesce(options, QUIESCE_LIMIT).await;
        if let Err(error) = quiesced {
            return self
                .back_awake(Some(failed(FailureCode::SleepFailed, Left::Awake, &error)))
                .await;
        }
        if let Some(look) = &mut look {
            look.programs_rest();
        }
        self.phases.mark("guest");
        if self.signals.cancelled() {
            return self.back_awake(None).await;
        }
        if on_disk {
            self.suspend_on_disk(timer_due, look).await
        } else {
            self.suspend_in_memory(timer_due, look).await
        }
    }

    async fn suspend_in_memory(
        &mut self,
        timer_due: Option<Moment>,
        look: Option<Look>,
    ) -> Result<Report, Failed> {
        let Some(machine) = self.body.machine.as_mut() else { return Err(lost("no machine")) };
        if let Err(error) = machine.stop_process().await {
            let failed = failed(FailureCode::SleepFailed, Left::Awake, &error);
            return self.back_awake(Some(failed)).await;
        }
        self.phases.mark("stop");
        let slept_at = Moment::now();
        self.machine_rests(look);
        let at_rest = self.at_rest();
        let published = self.record.change(|manifest| {
            manifest.network_at_rest = at_rest;
            manifest.state = State::SleepingInMemory { slept_at, timer_due };
            manifest.since = Moment::now();
        });
        if let Err(error) = published.await {
            let failed = failed(FailureCode::SleepFailed, Left::Awake, &error);
            return self.continue_and_back(failed).await;
        }
        self.phases.mark("publish");
        Ok(Report::Suspended { tier: Tier::Memory })
    }

    async fn suspend_on_disk(
        &mut self,
        timer_due: Option<Moment>,
        look: Option<Look>,
    ) -> Result<Report, Failed> {
        match self.save(timer_due, look).await {
            Ok(true) => Ok(Report::Suspended { tier: Tier::Disk }),
            Ok(false) => self.unpause_and_back(None).await,
            Err(failed) => self.unpause_and_back(Some(failed)).await,
        }
    }

    /// From asleep in memory to asleep on disk. Its guest's programs stay frozen all the while.
    pub(super) async fn demote(&mut self) -> Result<Report, Failed> {
        let timer_due = self.record.with(|manifest| match &manifest.state {
            State::SleepingInMemory { timer_due, .. } => timer_due.clone(),
            _ => None,
        });
        if self.signals.cancelled() {
            return Ok(Report::StillInMemory);
        }
        let look = self.look_at_sleeper();
        let Some(machine) = self.body.machine.as_mut() else { return Err(lost("no machine")) };
        if let Err(error) = machine.continue_process().await {
            return Err(failed(FailureCode::SleepFailed, Left::Asleep, &error));
        }
        let result = self.save(timer_due, look).await;
        match result {
            Ok(true) => Ok(Report::Demoted),
            Ok(false) => self.back_in_memory(None).await,
            Err(failed) => self.back_in_memory(Some(failed)).await,
        }
    }

    /// Pauses, saves, syncs, publishes, lets QEMU go. `false`: turned back before publishing; the machine is paused then, as
    /// after an error.
    async fn save(
        &mut self,
        timer_due: Option<Moment>,
        look: Option<Look>,
    ) -> Result<bool, Failed> {
        let fail = |error: &(dyn std::error::Error + 'static)| {
            failed(FailureCode::SleepFailed, Left::Awake, error)
        };
        let Some(machine) = self.body.machine.as_mut() else { return Err(lost("no machine")) };
        machine.pause().await.map_err(|error| fail(&error))?;
        let slept_at = Moment::now();
        self.phases.mark("pause");
        self.machine_rests(look);
        let at_rest = self.at_rest();
        let mut disks = vec![self.body.files.disk()];
        disks.extend(self.drive_images().into_iter().map(|(_, image)| image));
        let Some(machine) = self.body.machine.as_mut() else { return Err(lost("no machine")) };
        fault::point("saving");
        let state_file = self.body.files.state();
        // Nothing runs that would change it; what QEMU itself may write on the way is little, and is written below.
        let early = tokio::spawn(sync(self.body.files.memory()));
        let (mark, state) = machine.give_state().await.map_err(|error| fail(&error))?;
        self.phases.mark("save");
        // Not before: the disks change until the state is given, when QEMU lets go of them. Together: a disk that is told to
        // write everything does so for all of them at once.
        let memory = async {
            early.await.map_err(std::io::Error::other)??;
            sync(self.body.files.memory()).await
        };
        let (written, memory, disks) = tokio::join!(
            vmm::machine::write_state(state_file, state),
            memory,
            futures_util::future::try_join_all(disks.into_iter().map(sync))
        );
        written.map_err(|error| fail(&error))?;
        memory.and(disks.map(drop)).map_err(|error| fail(&error))?;
        self.phases.mark("sync");
        if self.signals.cancelled() {
            return Ok(false);
        }
        fault::point("saved_not_published");
        let guest_version = self.body.link.hello().map(|hello| hello.agent).unwrap_or_default();
        let fingerprint = machine.fingerprint().clone();
        let published = self.record.change(|manifest| {
            let demoted = matches!(manifest.state, State::SleepingInMemory { .. });
            manifest.network_at_rest = at_rest;
            manifest.state = State::SleepingOnDisk(Saved {
                slept_at,
                timer_due,
                state: mark,
                machine: fingerprint,
                guest_version,
            });
            // On from memory to disk it has slept since it fell asleep.
            if !demoted {
                manifest.since = Moment::now();
            }
        });
        published.await.map_err(|error| fail(&error))?;
        self.phases.mark("publish");
        fault::point("published_qemu_alive");
        // From here on it sleeps, whatever happens to the process.
        if let Err(error) = self.body.link.detach() {
            tracing::debug!(sandbox = %self.id, %error, "link not parked");
        }
        if let Some(mut machine) = self.body.machine.take()
            && let Err(error) = machine.quit().await
        {
            tracing::warn!(sandbox = %self.id, error = chain(&error), "QEMU did not quit by itself");
            if let Err(error) = machine.kill().await {
                tracing::error!(sandbox = %self.id, error = chain(&error), "QEMU could not be killed");
            }
        }
        self.phases.mark("quit");
        Ok(true)
    }

    fn at_rest(&self) -> Option<AtRest> {
        self.body.port.as_ref().and_then(|port| port.at_rest().cloned())
    }

    /// Lets the guest's programs go on after a sleep that was given up.
    async fn back_awake(&mut self, why: Option<Failed>) -> Result<Report, Failed> {
        if let Some(machine) = self.body.machine.as_mut()
            && matches!(machine.guest_state().await, Ok(GuestState::DiskError))
        {
            // It goes on by itself when there is room again: the sandbox's task sees to that.
            let error = "the host's disk is full, and the guest waits to write".to_owned();
            return Err(Failed { code: FailureCode::DiskFull, left: Left::Awake, error });
        }
        let params = WakeParams { identity: None, fork: false };
        if let Err(error) = self.unless_superseded(self.body.link.wake(params, WAKE_LIMIT)).await {
            error.log(&self.id, "a sleep given up");
            let alive = self.body.is_alive();
            if !alive {
                return Err(lost(&chain(&error)));
            }
        }
        self.phases.mark("back");
        match why {
            Some(failed) => Err(failed),
            None => Ok(Report::BackAwake),
        }
    }

    /// As [`back_awake`](Self::back_awake), from a paused machine.
    async fn unpause_and_back(&mut self, why: Option<Failed>) -> Result<Report, Failed> {
        let Some(machine) = self.body.machine.as_mut() else { return Err(lost("no machine")) };
        if let Err(error) = machine.cont().await {
            let error = chain(&error);
            if let Err(error) = self.body.end_machine(&error).await {
                tracing::error!(sandbox = %self.id, error = chain(&error), "QEMU could not be killed");
            }
            return Err(lost(&error));
        }
        self.back_awake(why).await
    }

    /// As [`back_awake`](Self::back_awake), from a stopped process.
    async fn continue_and_back(&mut self, why: Failed) -> Result<Report, Failed> {
        let Some(machine) = self.body.machine.as_mut() else { return Err(lost("no machine")) };
        if let Err(error) = machine.continue_process().await {
            return Err(lost(&chain(&error)));
        }
        self.back_awake(Some(why)).await
    }

    /// After a demotion that was given up: on from the pause, then stopped again; programs were frozen all the time.
    async fn back_in_memory(&mut self, why: Option<Failed>) -> Result<Report, Failed> {
        let Some(machine) = self.body.machine.as_mut() else { return Err(lost("no machine")) };
        let mut back = machine.cont().await;
        if back.is_ok() {
            back = machine.stop_process().await;
        }
        if let Err(error) = back {
            let error = chain(&error);
            if let Err(error) = self.body.end_machine(&error).await {
                tracing::error!(sandbox = %self.id, error = chain(&error), "QEMU could not be killed");
            }
            return Err(lost(&error));
        }
        match why {
            Some(failed) => Err(Failed { left: Left::Asleep, ..failed }),
            None => Ok(Report::StillInMemory),
        }
    }

    /// Has the guest write to its disk, in both tiers: a machine that is lost asleep, or restarted, boots from what was written.
    /// Whether it did.
    pub(super) async fn flush(&self, room: bool) -> bool {
        if !room {
            return false;
        }
        let flushed = tokio::select! {
            flushed = self.body.link.flush(QUIESCE_LIMIT) => flushed,
            () = self.signals.turned_back() => return false,
        };
        flushed.unwrap_or_else(|error| {
            tracing::debug!(sandbox = %self.id, %error, "not flushed before sleep");
            false
        })
    }

    /// Has what a part of the sandbox has so far written to the host's disk while the guest still runs: the less is left for the time
    /// in which it stands still. Whoever needs the sandbox meanwhile does not wait for that.
    ///
    /// An error counts: what could not be written is told once, and whoever writes again would not hear of it (fsync(2)).
    async fn write_early(&self, part: PathBuf) -> std::io::Result<()> {
        tokio::select! {
            written = sync(part) => written,
            () = self.signals.turned_back() => Ok(()),
        }
    }

    /// What the guest does at last, as it says itself: told to the state machine before anything else happens, so that what
    /// began in the last moment counts. Gives when its next timer is due. A guest that does not answer is found out by what
    /// follows.
    async fn last_sample(&self) -> Option<Moment> {
        let now = Moment::now();
        // By the wall: the link's own limit counts only while the guest runs.
        let sample =
            tokio::time::timeout(SAMPLE_LIMIT, self.unless_superseded(self.body.link.sample()))
                .await;
        let sample = match sample.unwrap_or(Err(Unanswered::Silent)) {
            Ok(sample) => sample,
            Err(error) => {
                tracing::debug!(sandbox = %self.id, %error, "no sample before sleep");
                return None;
            }
        };
        let due = sample.timer_due_ms.map(|ms| Moment {
            boot_ms: now.boot_ms.saturating_add(ms),
            unix_ms: now.unix_ms.saturating_add(ms),
            boot_id: now.boot_id,
        });
        let (heard, taken) = oneshot::channel();
        if self.messages.send(Message::LastSample { sample, heard }).is_ok() {
            // An error means that the task is gone, and with it everybody to whom this matters.
            let _ = taken.await;
        }
        due
    }

    pub(super) fn has_drives(&self) -> bool {
        self.record.with(|manifest| !manifest.copied_places().is_empty())
    }

    /// Has a running guest write what it has for its drives, and leave them as if they had been unmounted. Asleep it has done so.
    async fn leave_drives(&mut self) {
        let runs = |machine: &Machine| machine.process_state() == ProcessState::Going;
        if !self.has_drives() || !self.body.machine.as_ref().is_some_and(runs) {
            return;
        }
        if self.body.link.state() == LinkState::Detached
            && let Err(failed) = self.attach(Continuity::Unknown, WAKE_LIMIT).await
        {
            tracing::warn!(sandbox = %self.id, error = failed.error, "a guest with drives is ended without being asked");
            return;
        }
        self.end_in_order().await;
    }

    /// Ends the machine and removes all that belongs to the sandbox.
    pub(super) async fn destroy(&mut self) -> Result<Report, Failed> {
        let fail = |error: &(dyn std::error::Error + 'static)| {
            failed(FailureCode::DestroyFailed, Left::Lost, error)
        };
        // Its drives stay: what it has written must be on them before anything says that it is gone.
        self.leave_drives().await;
        let noted = self.record.change(|manifest| {
            manifest.state = State::Deleting;
            manifest.since = Moment::now();
        });
        if let Err(error) = noted.await {
            // A full disk must not keep anything from being deleted; a daemon killed now begins the deletion anew when asked.
            tracing::warn!(sandbox = %self.id, error = chain(&error), "deletion not noted");
        }
        self.body.end_machine("the sandbox is deleted").await.map_err(|error| fail(&error))?;
        fault::point("deleting");
        match self.body.port.take() {
            Some(mut port) => {
                if let Err(error) = port.remove() {
                    self.body.port = Some(port);
                    return Err(fail(&error));
                }
            }
            // A daemon that found it failed or off has not taken up the tap that it had.
            None => {
                crate::tap::remove_left(self.ground.subnet, self.body.slot.number())
                    .map_err(|error| fail(&error))?;
            }
        }
        let address = self.ground.subnet.address(self.body.slot.number());
        if let Err(error) = self.ground.services.wire(&self.id, address, None).await {
            // Whoever has the address next has no such names, or his own in their place.
            tracing::error!(sandbox = %self.id, %error, "its names are wired on");
        }
        let dir = self.body.files.dir().to_owned();
        if self.record.with(|manifest| manifest.moved_to.is_some()) {
            let to = self.ground.settings.moved_dir().join(self.id.as_str());
            set_aside(&dir, &to).map_err(|error| fail(&error))?;
            self.ground.drives.set_aside(&self.id, &to).map_err(|error| fail(&error))?;
            self.ground.drives.settle(&self.id, &[]);
            self.ground.volumes.settle(&self.id, &[]);
            return Ok(Report::Destroyed);
        }
        let removed = tokio::task::spawn_blocking(move || remove_all(&dir));
        removed.await.map_err(|error| fail(&error))?.map_err(|error| fail(&error))?;
        self.ground.drives.settle(&self.id, &[]);
        self.ground.volumes.settle(&self.id, &[]);
        self.phases.mark("remove");
        Ok(Report::Destroyed)
    }
}

/// How often a folder is emptied before it counts as one that cannot be removed.
const REMOVE_TRIES: usize = 5;

/// Removes a folder with all that is in it; gone already is fine. A last line of a log may come into it meanwhile: then it is emptied
/// again.
fn remove_all(dir: &Path) -> std::io::Result<()> {
    for _ in 1..REMOVE_TRIES {
        match std::fs::remove_dir_all(dir) {
            Err(error) if error.kind() == std::io::ErrorKind::DirectoryNotEmpty => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            result => return result,
        }
    }
    std::fs::remove_dir_all(dir)
}

/// Moves the folder of a sandbox that is another host's now to where it is kept, in place of one kept there before.
fn set_aside(dir: &Path, to: &Path) -> std::io::Result<()> {
    if to.exists() {
        std::fs::rename(to, to.with_extension(crate::clock::unix_ms().to_string()))?;
    }
    std::fs::create_dir_all(to.parent().unwrap_or(to))?;
    // What was copied for the store is there.
    match std::fs::remove_dir_all(crate::checkpoints::shadow_of(&Files::in_dir(dir)).dir()) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::fs::rename(dir, to)
}

/// Writes a file's content to the disk. Blocking work on another thread.
pub(in crate::sandbox) async fn sync(path: PathBuf) -> std::io::Result<()> {
    let synced = tokio::task::spawn_blocking(move || std::fs::File::open(&path)?.sync_data());
    synced.await.map_err(std::io::Error::other)?
}

pub(super) fn lost(error: &str) -> Failed {
    Failed { code: FailureCode::MachineLost, left: Left::Lost, error: error.to_owned() }
}
