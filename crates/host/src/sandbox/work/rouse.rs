//! Making run: created from a template, woken from memory or disk.

use std::sync::Arc;

use lifecycle::{FailureCode, Left, Report, Tier};
use vmm::Machine;
use vmm::machine::StartError;

use super::capture::MemoryToCome;
use super::room::no_room;
use super::settle::lost;
use super::{Failed, WAKE_LIMIT, Worker, chain, failed};
use crate::clock::Moment;
use crate::fault;
use crate::ground::{FREE_BYTES_MIN, FREE_BYTES_TO_WAKE};
use crate::guest::{Continuity, GuestLink, LinkState};
use crate::manifest::{Saved, State};
use crate::sandbox::body::{Shape, machine_spec};
use crate::template::TemplateError;

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
                    self.body.link = GuestLink::random().map_err(|error| fail(&error))?;
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
            let template = template.map_err(|error| match error {
                TemplateError::Disk(error) => no_room(&error, Left::Lost),
                error => fail(&error),
            })?;
            self.phases.mark("template");
            let room = self.promise_copies(template.files.saved_parts(), Left::Lost).await?;
            room.is_for(self.body.files.dir());
            let copied =
                super::capture::begin_copy_parts(&template.files, &self.body.files, room).await;
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

    /// Ends a machine that is of no use; what cannot be ended is logged, and found by the next start of the daemon.
    pub(super) async fn end_quietly(&mut self, why: &str) {
        if let Err(error) = self.body.end_machine(why).await {
            tracing::error!(sandbox = %self.id, error = chain(&error), "QEMU could not be killed");
        }
    }
}

/// Whether the state itself is at fault, so that trying again is of no use.
fn is_damage(error: &StartError) -> bool {
    matches!(
        error,
        StartError::State(_) | StartError::MemorySize { .. } | StartError::Refused { .. }
    )
}
