//! Copying a sandbox, for a fork: memory, devices and disk of one moment.

use std::path::PathBuf;

use lifecycle::{CaptureOf, FailureCode, Left, Report};
use vmm::Machine;

use super::settle::lost;
use super::{CaptureTo, Failed, QUIESCE_LIMIT, WAKE_LIMIT, Worker, chain, failed};
use crate::guest::{LinkState, QuiesceOptions, WakeParams};
use crate::manifest::{Saved, State};
use crate::promises::Promise;
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
        copied.map(|()| Report::Captured).map_err(|failed| self.why_not_captured(failed))
    }

    /// Where it was the machine that ended, that is what is told, and not what could not be done any more.
    fn why_not_captured(&self, failed: Failed) -> Failed {
        if failed.code != FailureCode::CaptureFailed || failed.left != Left::Awake {
            return failed;
        }
        let code = if self.body.machine.as_ref().is_none_or(Machine::has_ended) {
            FailureCode::MachineLost
        } else if self.body.link.state() == LinkState::Detached {
            FailureCode::AgentSilent
        } else {
            return failed;
        };
        Failed { code, ..failed }
    }

    async fn capture_asleep(&mut self, to: &Files) -> Result<(), Failed> {
        let State::SleepingOnDisk(saved) = self.record.with(|manifest| manifest.state.clone())
        else {
            return Err(lost("there is no saved memory"));
        };
        let copied = copy_parts(&self.body.files, to, self.drive_images()).await;
        copied.map_err(|error| {
            let is_gone = error.source.kind() == std::io::ErrorKind::NotFound;
            let missing = is_gone && self.body.files.saved_parts().contains(&error.path);
            let code = if missing { FailureCode::StateDamaged } else { FailureCode::CaptureFailed };
            failed(code, Left::Asleep, &error)
        })?;
        note_capture(to, &saved)
            .map_err(|error| failed(FailureCode::CaptureFailed, Left::Asleep, &error))?;
        self.phases.mark("copy");
        Ok(())
    }

    /// Most is copied while the guest runs; while it stands, what has changed meanwhile.
    async fn capture_awake(&mut self, to: &Files) -> Result<(), Failed> {
        let fail = |error: &(dyn std::error::Error + 'static)| {
            failed(FailureCode::CaptureFailed, Left::Awake, error)
        };
        let flushed = self.flush(true).await;
        self.phases.mark("flush");
        let copied = copy_memory_and_disks(&self.body.files, to, self.drive_images()).await;
        copied.map_err(|error| fail(&error))?;
        self.phases.mark("early");
        // Its drives are to be whole without their memory, which takes a word of its own.
        let sync = !flushed || self.has_drives();
        let options = QuiesceOptions { sync, drop_caches: false };
        let still = self.unless_superseded(self.body.link.quiesce(options, QUIESCE_LIMIT)).await;
        self.phases.mark("guest");
        let copied = match still {
            Ok(_) => self.compare_paused(to).await,
            Err(error) => Err(fail(&error)),
        };
        let params = WakeParams { identity: None, fork: false };
        if let Err(error) = self.unless_superseded(self.body.link.wake(params, WAKE_LIMIT)).await {
            tracing::error!(sandbox = %self.id, error = chain(&error), "guest does not go on after a copy");
        }
        self.phases.mark("back");
        let (saved, _) = copied?;
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

/// A memory whose content is still being copied.
pub(super) type MemoryToCome = tokio::task::JoinHandle<Result<(), vmm::files::FileError>>;

/// As [`copy_parts`], without drives, but answers when all is there save the memory's content, which takes longest. Its room is
/// promised until that is there too.
pub(super) async fn begin_copy_parts(
    from: &Files,
    to: &Files,
    room: Promise,
) -> Result<MemoryToCome, vmm::files::FileError> {
    copy(vec![(from.state(), to.state()), (from.disk(), to.disk())]).await?;
    let memory = vmm::files::Copying::begin(&from.memory(), &to.memory())?;
    Ok(tokio::task::spawn_blocking(move || {
        let copied = memory.finish().map(drop);
        drop(room);
        copied
    }))
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
