//! Copying a sandbox, for a fork: memory, devices and disk of one moment.

use std::path::PathBuf;

use lifecycle::{CaptureOf, FailureCode, Left, Report};

use super::settle::lost;
use super::{CaptureTo, Failed, QUIESCE_LIMIT, WAKE_LIMIT, Worker, chain, failed};
use crate::clock::Moment;
use crate::guest::{QuiesceOptions, WakeParams};
use crate::manifest::{Saved, State};
use crate::sandbox::body::drive_images;
use crate::settings::Files;

impl Worker {
    /// Copies into `capture_to`, and leaves the source as it was, whatever happens.
    pub(super) async fn capture(&mut self, of: CaptureOf) -> Result<Report, Failed> {
        let left = match of {
            CaptureOf::Awake => Left::Awake,
            CaptureOf::AsleepOnDisk => Left::Asleep,
        };
        let Some(to) = self.capture_to.take() else {
            return Err(Failed {
                code: FailureCode::CaptureFailed,
                left,
                error: "nowhere to copy to".to_owned(),
            });
        };
        let copied = match (of, to) {
            (CaptureOf::Awake, CaptureTo::Files(to)) => self.capture_awake(&to).await,
            (CaptureOf::AsleepOnDisk, CaptureTo::Files(to)) => self.capture_asleep(&to).await,
            (CaptureOf::Awake, CaptureTo::Shadow(to, taken)) => {
                self.checkpoint_awake(&to, &taken).await
            }
            (CaptureOf::AsleepOnDisk, CaptureTo::Shadow(to, taken)) => {
                self.checkpoint_asleep(&to, &taken).await
            }
        };
        copied.map(|()| Report::Captured)
    }

    async fn capture_asleep(&mut self, to: &Files) -> Result<(), Failed> {
        let State::SleepingOnDisk(saved) = self.record.with(|manifest| manifest.state.clone())
        else {
            return Err(lost("there is no saved memory"));
        };
        let copied = copy_parts(&self.body.files, to, self.drive_images()).await;
        copied.map_err(|error| failed(FailureCode::CaptureFailed, Left::Asleep, &error))?;
        note_capture(to, &saved)
            .map_err(|error| failed(FailureCode::CaptureFailed, Left::Asleep, &error))?;
        self.phases.mark("copy");
        Ok(())
    }

    async fn capture_awake(&mut self, to: &Files) -> Result<(), Failed> {
        let options = QuiesceOptions { sync: true, drop_caches: false };
        let still = self.unless_superseded(self.body.link.quiesce(options, QUIESCE_LIMIT)).await;
        self.phases.mark("guest");
        let copied = match still {
            Ok(_) => self.copy_paused(to).await,
            Err(error) => Err(failed(FailureCode::CaptureFailed, Left::Awake, &error)),
        };
        let params = WakeParams { identity: None, fork: false };
        if let Err(error) = self.unless_superseded(self.body.link.wake(params, WAKE_LIMIT)).await {
            error.log(&self.id, "a copy");
        }
        self.phases.mark("back");
        copied
    }

    /// Pauses, saves the devices, copies, and lets the guest go on.
    async fn copy_paused(&mut self, to: &Files) -> Result<(), Failed> {
        let fail = |error: &(dyn std::error::Error + 'static)| {
            failed(FailureCode::CaptureFailed, Left::Awake, error)
        };
        let Some(machine) = self.body.machine.as_mut() else { return Err(lost("no machine")) };
        machine.pause().await.map_err(|error| fail(&error))?;
        self.phases.mark("pause");
        let slept_at = Moment::now();
        let saved = machine.save_state(&to.state()).await;
        self.phases.mark("save");
        let copied = match &saved {
            Ok(_) => {
                let drives = self
                    .record
                    .with(|manifest| drive_images(&self.ground, manifest, &self.body.files));
                let copied = copy_memory_and_disks(&self.body.files, to, drives).await;
                copied.map_err(|error| fail(&error))
            }
            Err(error) => Err(fail(error)),
        };
        self.phases.mark("copy");
        machine.cont().await.map_err(|error| lost(&chain(&error)))?;
        self.phases.mark("cont");
        copied?;
        let saved = saved.map_err(|error| fail(&error))?;
        let guest_version = self.body.link.hello().map(|hello| hello.agent).unwrap_or_default();
        let machine = machine.fingerprint().clone();
        let saved = Saved { slept_at, timer_due: None, state: saved.mark, machine, guest_version };
        note_capture(to, &saved).map_err(|error| fail(&error))
    }
}

/// Name of the file beside a copy that says what was copied.
const NOTE: &str = "captured.json";

/// Says what was copied.
fn note_capture(to: &Files, saved: &Saved) -> Result<(), vmm::files::FileError> {
    let text = serde_json::to_vec(saved).expect("a saved state has a JSON form");
    vmm::files::replace(&to.dir().join(NOTE), &text)
}

/// What was copied, as the copy says itself.
pub(crate) fn read_capture(to: &Files) -> std::io::Result<Saved> {
    let path = to.dir().join(NOTE);
    let saved = serde_json::from_slice(&std::fs::read(&path)?)?;
    std::fs::remove_file(&path)?;
    Ok(saved)
}

/// Copies memory, devices, disk, and these drives into their places, keeping holes.
pub(crate) async fn copy_parts(
    from: &Files,
    to: &Files,
    drives: Vec<(usize, PathBuf)>,
) -> Result<(), vmm::files::FileError> {
    let mut pairs =
        vec![(from.memory(), to.memory()), (from.state(), to.state()), (from.disk(), to.disk())];
    pairs.extend(drives.into_iter().map(|(place, image)| (image, to.drive(place))));
    copy(pairs).await
}

async fn copy_memory_and_disks(
    from: &Files,
    to: &Files,
    drives: Vec<(usize, PathBuf)>,
) -> Result<(), vmm::files::FileError> {
    let mut pairs = vec![(from.memory(), to.memory()), (from.disk(), to.disk())];
    pairs.extend(drives.into_iter().map(|(place, image)| (image, to.drive(place))));
    copy(pairs).await
}

async fn copy(pairs: Vec<(PathBuf, PathBuf)>) -> Result<(), vmm::files::FileError> {
    let copied = tokio::task::spawn_blocking(move || {
        for (from, to) in pairs {
            vmm::files::copy_sparse(&from, &to)?;
        }
        Ok(())
    });
    // The task panics or is cancelled only when the daemon goes down.
    copied.await.unwrap_or_else(|gone| std::panic::resume_unwind(gone.into_panic()))
}
