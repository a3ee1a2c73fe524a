//! Making run: created from a template, woken from memory or disk, booted from disk.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lifecycle::{FailureCode, Left, Report, Tier};
use vmm::Machine;
use vmm::machine::StartError;

use super::capture::MemoryToCome;
use super::settle::lost;
use super::{Failed, MOUNT_LIMIT, QUIESCE_LIMIT, Unanswered, WAKE_LIMIT, Worker, chain, failed};
use crate::clock::Moment;
use crate::drive_trouble;
use crate::fault;
use crate::ground::{FREE_BYTES_MIN, FREE_BYTES_TO_WAKE, free_bytes};
use crate::guest::{
    Continuity, LinkError, LinkState, QuiesceOptions, Step, StepOutcome, WakeError, WakeParams,
};
use crate::manifest::{DriveKind, Manifest, Saved, State};
use crate::sandbox::body::{
    Shape, Told, drive_image, identity_owed, ipv6_owed, machine_spec, mounts_owed, note_told,
};
use crate::template::{BOOT_LIMIT, BOOT_TRIES, boot_image};
use crate::turns::Turn;

impl Worker {
    /// The first start: copies the template (unless a fork's parent has given its copy already), then wakes it as somebody
    /// new.
    pub(super) async fn create(&mut self) -> Result<Report, Failed> {
        let fail = |error: &(dyn std::error::Error + 'static)| {
            failed(FailureCode::CreateFailed, Left::Lost, error)
        };
        let state = self.record.with(|manifest| manifest.state.clone());
        let mut copy = matches!(state, State::Creating | State::Failed { .. });
        if matches!(state, State::SleepingInMemory { .. }) {
            // A clone that lay ready.
            match self.wake(Tier::Memory).await {
                Ok(done) => return Ok(done),
                Err(failed) => {
                    tracing::warn!(sandbox = %self.id, error = failed.error, "a ready clone does not go on: it is copied anew");
                    self.end_quietly("the ready clone did not go on").await;
                    let files = &self.body.files;
                    for part in [files.memory(), files.state(), files.disk()] {
                        std::fs::remove_file(part).map_err(|error| fail(&error))?;
                    }
                    self.body.link =
                        crate::guest::GuestLink::random().map_err(|error| fail(&error))?;
                    self.body.network_told = false;
                    let undone = self.record.change(|manifest| manifest.state = State::Creating);
                    undone.await.map_err(|error| fail(&error))?;
                    copy = true;
                }
            }
        }
        if copy {
            self.check_room(FREE_BYTES_MIN, Left::Lost)?;
            if let Some(drives) = self.drives.take() {
                let noted = self.record.change(|manifest| manifest.drives = drives);
                noted.await.map_err(|error| fail(&error))?;
            }
            let of = self.record.get();
            let image =
                self.ground.image_by_digest(&of.image_digest).map_err(|error| fail(&error))?;
            let (cpus, memory_mib, drives) = (of.cpus, of.memory_mib, !of.drives.is_empty());
            let templates = &self.ground.templates;
            let template = templates.get(&self.ground, &image, cpus, memory_mib, drives).await;
            let template = template.map_err(|error| fail(&error))?;
            self.phases.mark("template");
            let copied = super::capture::begin_copy_parts(&template.files, &self.body.files).await;
            let memory = copied.map_err(|error| fail(&error))?;
            fault::point("create_copied");
            let about = template.about.clone();
            let noted = self.record.change(|manifest| {
                manifest.needs_identity = true;
                // What was used before it was a sandbox is not its own; all from then on is, also before the first sample.
                manifest.used.cpu_seen_usec = about.cpu_usec;
            });
            noted.await.map_err(|error| fail(&error))?;
            self.phases.mark("copy");
            let saved = Saved {
                slept_at: about.saved_at,
                timer_due: None,
                state: about.state,
                machine: about.machine,
                guest_version: about.guest_version,
            };
            // Until it runs it is being created: a daemon that dies leaves nothing of it.
            let first = self.go_on_from(saved, Some(memory)).await;
            return self.first_start(first).await;
        }
        let first = self.wake(Tier::Disk).await;
        self.first_start(first).await
    }

    async fn first_start(&mut self, first: Result<Report, Failed>) -> Result<Report, Failed> {
        match first {
            Err(failed) => {
                self.end_quietly("its first start failed").await;
                Err(Failed { left: Left::Lost, ..failed })
            }
            done => done,
        }
    }

    /// On from where it was.
    pub(super) async fn wake(&mut self, from: Tier) -> Result<Report, Failed> {
        match from {
            Tier::Memory => self.wake_from_memory().await,
            Tier::Disk | Tier::Store => self.wake_from_disk().await,
        }
    }

    async fn wake_from_memory(&mut self) -> Result<Report, Failed> {
        if *self.ground.disk_low.borrow() {
            // It would be made to stand still at once, and whoever waits for it with it.
            let error = "the host's disk is nearly full".to_owned();
            return Err(Failed { code: FailureCode::DiskFull, left: Left::Asleep, error });
        }
        if self.body.port.as_ref().is_some_and(|port| !port.is_whole()) {
            // The machine holds a tap that somebody has removed. Only another machine can be given a new one.
            if self.demote().await? != Report::Demoted {
                let error = "its move to disk, for a new tap, was given up".to_owned();
                return Err(Failed { code: FailureCode::WakeFailed, left: Left::Asleep, error });
            }
            self.phases.mark("demote");
            return self.wake_from_disk().await;
        }
        self.body.give_back_held();
        let Some(machine) = self.body.machine.as_mut() else { return Err(lost("no machine")) };
        if let Err(error) = machine.continue_process().await {
            return Err(lost(&chain(&error)));
        }
        self.phases.mark("continue");
        // A daemon that found this sleeper has no link yet.
        if self.body.link.state() == LinkState::Detached {
            self.attach(Continuity::Clean, WAKE_LIMIT).await?;
        }
        let woke = self.go_on().await?;
        // Not awaited: from memory there is no older memory that a crash could bring back, the living process decides.
        let (record, id, life) = (self.record.clone(), self.id.clone(), self.next_life);
        let because = self.woke_because.clone();
        tokio::spawn(async move {
            let noted = record.change(|manifest| {
                manifest.life = life;
                manifest.woke_because = because;
                // A sleep or an end may have been noted since.
                if matches!(manifest.state, State::SleepingInMemory { .. }) {
                    manifest.state = State::Running;
                    manifest.since = Moment::now();
                }
            });
            if let Err(error) = noted.await {
                tracing::warn!(sandbox = %id, error = chain(&error), "wake from memory not noted");
            }
        });
        Ok(woke)
    }

    async fn wake_from_disk(&mut self) -> Result<Report, Failed> {
        let State::SleepingOnDisk(saved) = self.record.with(|manifest| manifest.state.clone())
        else {
            return Err(lost("there is no saved memory"));
        };
        self.go_on_from(saved, None).await
    }

    /// From a saved state, whose memory may still be on its way.
    async fn go_on_from(
        &mut self,
        saved: Saved,
        memory: Option<MemoryToCome>,
    ) -> Result<Report, Failed> {
        let fail = |error: &(dyn std::error::Error + 'static)| {
            failed(FailureCode::WakeFailed, Left::Asleep, error)
        };
        let before = self.record.get();
        self.check_room(FREE_BYTES_TO_WAKE, Left::Asleep)?;
        let image =
            self.ground.image_by_digest(&before.image_digest).map_err(|error| fail(&error))?;
        self.check_drives(&before, Left::Asleep)?;
        let turn = self.take_turn(before.memory_mib).await?;
        self.phases.mark("turn");
        let ground = Arc::clone(&self.ground);
        let tap = self.body.ensure_port(&ground).map_err(|error| fail(&error))?.tap_fd();
        let slot = self.body.slot.number();
        let shape = Shape::of(&ground, &before, &self.body.files);
        let spec =
            machine_spec(&ground, &self.id, &self.body.files, slot, shape, image.root(), tap);
        let qemu = ground.qemu_for(&saved.machine);
        if let Err(mismatch) = saved.machine.compatible(&qemu.fingerprint(&spec)) {
            return Err(failed(FailureCode::SnapshotMismatch, Left::Asleep, &mismatch));
        }
        let state = self.body.files.state();
        let slept = saved.slept_at.elapsed();
        let memory = async {
            match memory {
                // The task panics or is cancelled only when the daemon goes down.
                Some(copied) => {
                    copied.await.unwrap_or_else(|gone| std::panic::resume_unwind(gone.into_panic()))
                }
                None => Ok(()),
            }
        };
        fault::point("restoring");
        let restored = Machine::restore_when(
            &qemu,
            &spec,
            &state,
            &saved.state,
            &saved.machine,
            slept,
            memory,
        )
        .await;
        let mut machine = match restored {
            Ok(machine) => machine,
            Err(error) if is_damage(&error) => {
                return Err(failed(FailureCode::StateDamaged, Left::Asleep, &error));
            }
            Err(error) => return Err(fail(&error)),
        };
        self.phases.mark("restore");
        // Between load and run: from here on there is no older memory (see the manifest's second invariant).
        let (life, because) = (self.next_life, self.woke_because.clone());
        let fingerprint = saved.machine.clone();
        let ipv6 = ground.subnet.ipv6(slot);
        let noted = self.record.change(move |manifest| {
            // It will be told, before anybody can ask for it.
            if manifest.needs_identity {
                manifest.ipv6 = ipv6;
            }
            manifest.state = State::Running;
            manifest.machine = Some(fingerprint);
            manifest.life = life;
            manifest.since = Moment::now();
            manifest.woke_because = because;
        });
        if let Err(error) = noted.await {
            // It has not run: it sleeps as before.
            if let Err(error) = machine.kill().await {
                tracing::error!(sandbox = %self.id, error = chain(&error), "QEMU could not be killed");
            }
            return Err(fail(&error));
        }
        self.phases.mark("publish");
        fault::point("restored_not_running");
        self.body.machine = Some(machine);
        let Some(machine) = self.body.machine.as_mut() else { return Err(lost("no machine")) };
        if let Err(error) = machine.cont().await {
            // Whether the guest ran nobody knows: there is no way back.
            self.end_quietly("it could not be continued").await;
            return Err(lost(&chain(&error)));
        }
        self.phases.mark("cont");
        self.body.give_back_held();
        let continuity = if self.body.link.state() == LinkState::Parked {
            Continuity::Resumed
        } else {
            Continuity::Clean
        };
        self.attach(continuity, WAKE_LIMIT).await?;
        let woke = self.go_on().await;
        drop(turn);
        woke
    }

    /// From its own disk, anew.
    pub(super) async fn boot(&mut self) -> Result<Report, Failed> {
        let fail = |error: &(dyn std::error::Error + 'static)| {
            failed(FailureCode::BootFailed, Left::Lost, error)
        };
        self.end_in_order().await;
        // It keeps its room: others wait for some.
        let seat = self.body.seat.take();
        self.body.end_machine("the sandbox is booted anew").await.map_err(|error| fail(&error))?;
        self.body.seat = seat;
        self.phases.mark("end");
        self.check_room(FREE_BYTES_TO_WAKE, Left::Lost)?;
        let mut manifest = self.record.get();
        if let Some(drives) = self.drives.take() {
            manifest.drives = drives;
        }
        self.take_seat(manifest.memory_mib, Left::Lost).await?;
        let image =
            self.ground.image_by_digest(&manifest.image_digest).map_err(|error| fail(&error))?;
        let ground = Arc::clone(&self.ground);
        let tap = self.body.ensure_port(&ground).map_err(|error| fail(&error))?.tap_fd();
        self.check_drives(&manifest, Left::Lost)?;
        let shape = Shape::of(&ground, &manifest, &self.body.files);
        let slot = self.body.slot.number();
        let spec =
            machine_spec(&ground, &self.id, &self.body.files, slot, shape, image.root(), tap);
        // What was in memory is lost from here on, so it must not be found by a later daemon.
        let (life, because) = (self.next_life, self.woke_because.clone());
        let qemu = ground.qemu_now();
        let fingerprint = qemu.fingerprint(&spec);
        let ipv6 = ground.subnet.ipv6(slot);
        let drives = manifest.drives.clone();
        self.record.begin_cpu().await.map_err(|error| fail(&error))?;
        let noted = self.record.change(move |manifest| {
            manifest.drives = drives;
            manifest.ipv6 = ipv6;
            manifest.state = State::Running;
            manifest.machine = Some(fingerprint);
            manifest.needs_identity = true;
            manifest.life = life;
            manifest.since = Moment::now();
            manifest.woke_because = because;
        });
        noted.await.map_err(|error| fail(&error))?;
        self.remove_old_copies(&manifest);
        for attempt in 1..=BOOT_TRIES {
            self.body.link = crate::guest::GuestLink::random().map_err(|error| fail(&error))?;
            self.body.network_told = false;
            let machine = Machine::boot(&qemu, &spec, &boot_image(&ground, &image)).await;
            self.body.machine = Some(machine.map_err(|error| fail(&error))?);
            self.phases.mark("spawn");
            match self.attach(Continuity::Unknown, BOOT_LIMIT).await {
                Ok(()) => {
                    let woke = self.go_on().await;
                    if woke.is_err() {
                        self.end_quietly("it did not go on after its boot").await;
                    }
                    return woke.map_err(|failed| Failed { left: Left::Lost, ..failed });
                }
                Err(failed) => {
                    let alive = self.body.is_alive();
                    self.end_quietly("its boot stayed silent").await;
                    let superseded = self.signals.cancelled();
                    if attempt == BOOT_TRIES || superseded || !alive {
                        return Err(Failed {
                            code: FailureCode::BootFailed,
                            left: Left::Lost,
                            ..failed
                        });
                    }
                    tracing::warn!(sandbox = %self.id, attempt, error = failed.error, "boot stayed silent; trying again");
                }
            }
        }
        Err(Failed {
            code: FailureCode::BootFailed,
            left: Left::Lost,
            error: "no boot was tried".to_owned(),
        })
    }

    /// Has a living guest write everything to its disk first (S15: what was written stays). One that cannot is ended all the
    /// same: a restart is the cure of a guest that does not answer.
    pub(super) async fn end_in_order(&mut self) {
        if !self.body.is_alive() || self.body.link.state() != LinkState::Running {
            return;
        }
        let options = QuiesceOptions { sync: true, drop_caches: false };
        if let Err(error) =
            self.unless_superseded(self.body.link.quiesce(options, QUIESCE_LIMIT)).await
        {
            if matches!(error, super::Unanswered::Superseded) {
                tracing::debug!(sandbox = %self.id, "a restart is given up for a newer order");
            } else {
                tracing::warn!(sandbox = %self.id, error = chain(&error), "a guest is restarted that could not write to its disk first");
            }
            return;
        }
        if let Some(machine) = self.body.machine.as_mut()
            && let Err(error) = machine.pause().await
        {
            tracing::warn!(sandbox = %self.id, error = chain(&error), "a machine is ended that would not pause first");
        }
    }

    /// Meets the guest agent of the running machine.
    pub(super) async fn attach(
        &mut self,
        continuity: Continuity,
        limit: Duration,
    ) -> Result<(), Failed> {
        let silent =
            |error: String| Failed { code: FailureCode::AgentSilent, left: Left::Awake, error };
        let Some(machine) = self.body.machine.as_mut() else { return Err(lost("no machine")) };
        let socket = machine.guest_stream().map_err(|error| silent(chain(&error)))?;
        let exit = machine.exit_watch();
        let met = tokio::select! {
            met = self.body.link.attach(socket, continuity, limit) => met.map(drop).map_err(|error| silent(chain(&error))),
            end = async { let mut exit = exit; exit.exited().await } => Err(lost(&format!("its machine ended: {:?}", end.cause))),
            () = self.signals.superseded() => Err(silent("given up for a newer order".to_owned())),
        };
        self.phases.mark("attach");
        met
    }

    /// Clock, entropy, identity, then the guest's programs; from then on it is another life.
    async fn go_on(&mut self) -> Result<Report, Failed> {
        let who = identity_owed(&self.ground, &self.record, &self.body);
        let who = who.map_err(|error| failed(FailureCode::AgentSilent, Left::Awake, &error))?;
        let told = who.as_ref().map(Told::of);
        let ipv6 = ipv6_owed(&self.ground, &self.record, &self.body);
        let mounts = mounts_owed(&self.record);
        let (limit, has_drives) =
            if mounts.is_empty() { (WAKE_LIMIT, false) } else { (MOUNT_LIMIT, true) };
        let params = WakeParams { fork: who.is_some(), identity: who };
        let asked = self.body.link.wake_with(params, ipv6, mounts, limit);
        let woke = self.unless_superseded(asked).await;
        self.phases.mark("guest");
        let woke = woke.map_err(|error| {
            if !(has_drives && is_about_drives(&error)) {
                return failed(FailureCode::AgentSilent, Left::Awake, &error);
            }
            let said = chain(&error);
            let drives = self.record.with(|manifest| manifest.drives.clone());
            let error = drive_trouble::explain(&said, &drives).unwrap_or(said);
            Failed { code: FailureCode::DriveUnusable, left: Left::Awake, error }
        })?;
        for step in &woke.steps {
            if let crate::guest::StepOutcome::Failed(why) = &step.outcome {
                tracing::warn!(sandbox = %self.id, step = ?step.step, why, "a step of the wake failed");
            }
        }
        self.lead_loopback().await;
        if told.is_some() || ipv6.is_some() {
            let record = self.record.clone();
            let id = self.id.clone();
            // Not awaited: told twice it is the same identity.
            tokio::spawn(async move {
                let noted = record.change(|manifest| note_told(manifest, told, ipv6, &woke));
                if let Err(error) = noted.await {
                    tracing::warn!(sandbox = %id, error = chain(&error), "identity not noted");
                }
            });
        }
        Ok(Report::Ready)
    }

    /// Leads ports of a box's own loopback to its services. A box is of use without it, so that is no reason not to go on.
    async fn lead_loopback(&self) {
        let ways = self.record.with(|manifest| {
            manifest.wiring.as_ref().map(crate::services::loopback).unwrap_or_default()
        });
        match self.unless_superseded(self.body.link.lead_loopback(&ways)).await {
            Ok(true) => {}
            Ok(false) => {
                tracing::info!(sandbox = %self.id, "its guest agent is too old to lead localhost to its services");
            }
            Err(error) => error.log(&self.id, "its localhost is not led to its services"),
        }
    }

    /// Removes copies of drives that it has no more.
    fn remove_old_copies(&self, manifest: &Manifest) {
        for place in 0..vmm::spec::DRIVE_PLACES {
            let drive = manifest.drives.get(place);
            if drive.is_some_and(|drive| drive.kind == DriveKind::Copy) {
                continue;
            }
            match std::fs::remove_file(self.body.files.drive(place)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    tracing::warn!(sandbox = %self.id, place, %error, "an old copy of a drive is left");
                }
                _ => {}
            }
        }
    }

    /// Whether the disks of its drives are there.
    fn check_drives(&self, manifest: &Manifest, left: Left) -> Result<(), Failed> {
        let mut drives = manifest.drives.iter().enumerate();
        let missing = drives.find(|(place, drive)| {
            !drive_image(&self.ground, &self.body.files, *place, drive).exists()
        });
        let Some((_, drive)) = missing else { return Ok(()) };
        let error = drive_trouble::gone(drive);
        Err(Failed { code: FailureCode::DriveUnusable, left, error })
    }

    /// Waits for room in memory and then for a turn to be brought back from disk, each in order of arrival.
    async fn take_turn(&mut self, memory_mib: u32) -> Result<Turn, Failed> {
        let mut place = self.place.take();
        if self.body.seat.is_none() {
            self.body.seat = self.ground.budget.seat_if_free(memory_mib);
        }
        if self.body.seat.is_none() {
            // Others may have its turn meanwhile.
            drop(place.take());
            self.take_seat(memory_mib, Left::Asleep).await?;
        }
        let place = place.unwrap_or_else(|| self.ground.restores.stand_in_line(Instant::now()));
        let turn = self.unless_superseded(async { Ok::<_, Infallible>(place.turn().await) }).await;
        turn.map_err(|error| failed(FailureCode::WakeFailed, Left::Asleep, &error))
    }

    /// Waits for room in memory, in order of arrival.
    async fn take_seat(&mut self, memory_mib: u32, left: Left) -> Result<(), Failed> {
        if self.body.seat.is_some() {
            return Ok(());
        }
        let seat =
            self.ground.budget.seat(Some(&self.id), memory_mib, self.ground.settings.memory_wait);
        let seat = self.unless_superseded(seat).await;
        let error = match seat {
            Ok(seat) => {
                self.body.seat = Some(seat);
                self.phases.mark("room");
                return Ok(());
            }
            Err(error) => chain(&error),
        };
        Err(Failed { code: FailureCode::NoCapacity, left, error })
    }

    /// Refuses when the disk has less than this left: a guest that finds no room for a page of its memory dies of it.
    pub(super) fn check_room(&self, bytes: u64, left: Left) -> Result<(), Failed> {
        let dir = self.ground.settings.sandboxes_dir();
        let free =
            free_bytes(&dir).map_err(|error| failed(FailureCode::NoCapacity, left, &error))?;
        if free < bytes {
            let error = format!("{} MiB are free on the disk, {} needed", free >> 20, bytes >> 20);
            return Err(Failed { code: FailureCode::DiskFull, left, error });
        }
        Ok(())
    }

    /// Ends a machine that is of no use; what cannot be ended is logged, and found by the next start of the daemon.
    pub(super) async fn end_quietly(&mut self, why: &str) {
        if let Err(error) = self.body.end_machine(why).await {
            tracing::error!(sandbox = %self.id, error = chain(&error), "QEMU could not be killed");
        }
    }
}

/// Whether drives were what the guest could not do.
fn is_about_drives(error: &Unanswered<WakeError>) -> bool {
    match error {
        Unanswered::Failed(WakeError::NotRunning(woke)) => woke.steps.iter().any(|report| {
            report.step == Step::Mounts && matches!(report.outcome, StepOutcome::Failed(_))
        }),
        Unanswered::Failed(WakeError::Link(LinkError::NoDrives)) => true,
        _ => false,
    }
}

/// Whether the state itself is at fault, so that trying again is of no use.
fn is_damage(error: &StartError) -> bool {
    matches!(
        error,
        StartError::State(_) | StartError::MemorySize { .. } | StartError::Refused { .. }
    )
}
