//! From its own disk, anew: what was in memory is lost, what was written stays (S15).

use std::sync::Arc;

use lifecycle::{FailureCode, Left, Report};
use vmm::Machine;

use super::{Failed, QUIESCE_LIMIT, Unanswered, Worker, chain, failed};
use crate::clock::Moment;
use crate::ground::FREE_BYTES_TO_WAKE;
use crate::guest::{Continuity, GuestLink, LinkState, QuiesceOptions};
use crate::manifest::{DriveKind, Manifest, State};
use crate::sandbox::body::{Shape, machine_spec};
use crate::template::{BOOT_LIMIT, BOOT_TRIES, boot_image};
use crate::turns::Urgency;

impl Worker {
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
        self.take_seat(Urgency::Call, manifest.memory_mib, Left::Lost).await?;
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
            self.body.link = GuestLink::random().map_err(|error| fail(&error))?;
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
            if matches!(error, Unanswered::Superseded) {
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
}
