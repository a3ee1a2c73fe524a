//! Taking a checkpoint: the copy of the last one is brought up to date with what the sandbox is now. What differed is told,
//! and carried to the store afterwards, when the guest runs again.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use lifecycle::{FailureCode, Left};
use vmm::files::{Compared, FileError};

use super::settle::{lost, sync};
use super::{Failed, QUIESCE_LIMIT, WAKE_LIMIT, Worker, chain, failed};
use crate::checkpoints::{STATE, Taken};
use crate::clock::Moment;
use crate::guest::{QuiesceOptions, WakeParams};
use crate::manifest::{Saved, State};
use crate::promises::Promise;
use crate::settings::Files;

/// Threads that compare memory while the guest stands: more do not read faster than memory gives.
const COMPARING_THREADS: usize = 4;

impl Worker {
    /// From a running guest. It notices a pause: first everything is compared while it runs, then only little is left.
    pub(super) async fn checkpoint_awake(
        &mut self,
        shadow: &Files,
        taken: &Mutex<Option<Taken>>,
    ) -> Result<(), Failed> {
        let fail = |error: &(dyn std::error::Error + 'static)| {
            failed(FailureCode::CaptureFailed, Left::Awake, error)
        };
        let room = self.make_shadow(shadow, Left::Awake)?;
        let early = self.compare_parts(shadow).await.map_err(|error| fail(&error))?;
        drop(room);
        self.phases.mark("compare");
        // QEMU flushes its disk while the guest stands: what lies before it in the file system's queue goes out now.
        let mut queued = vec![shadow.memory(), shadow.disk(), self.body.files.disk()];
        for (place, image) in self.drive_images() {
            queued.extend([shadow.drive(place), image]);
        }
        for path in queued {
            sync(path).await.map_err(|error| fail(&error))?;
        }
        self.phases.mark("sync");
        // Nothing is written to its disk for this: what is in its memory stays there.
        let options = QuiesceOptions { sync: false, drop_caches: false };
        let still = self.unless_superseded(self.body.link.quiesce(options, QUIESCE_LIMIT)).await;
        let stands = Instant::now();
        self.phases.mark("guest");
        let compared = match still {
            Ok(_) => self.compare_paused(shadow).await,
            Err(error) => Err(fail(&error)),
        };
        let params = WakeParams { identity: None, fork: false };
        if let Err(error) = self.unless_superseded(self.body.link.wake(params, WAKE_LIMIT)).await {
            error.log(&self.id, "a checkpoint");
        }
        let pause_ms = u64::try_from(stands.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.phases.mark("back");
        let (saved, mut differed) = compared?;
        for (all, early) in differed.iter_mut().zip(early) {
            all.pieces.extend(early.pieces);
            all.bytes += early.bytes;
        }
        self.leave(taken, saved, differed, pause_ms);
        Ok(())
    }

    /// Of one that sleeps on disk. Its guest does not notice.
    pub(super) async fn checkpoint_asleep(
        &mut self,
        shadow: &Files,
        taken: &Mutex<Option<Taken>>,
    ) -> Result<(), Failed> {
        let fail = |error: &(dyn std::error::Error + 'static)| {
            failed(FailureCode::CaptureFailed, Left::Asleep, error)
        };
        let State::SleepingOnDisk(saved) = self.record.with(|manifest| manifest.state.clone())
        else {
            return Err(lost("there is no saved memory"));
        };
        let room = self.make_shadow(shadow, Left::Asleep)?;
        let mut differed = self.compare_parts(shadow).await.map_err(|error| fail(&error))?;
        let state = compare(self.body.files.state(), shadow.state(), 1).await;
        differed[STATE] = state.map_err(|error| fail(&error))?;
        drop(room);
        self.phases.mark("compare");
        self.leave(taken, saved, differed, 0);
        Ok(())
    }

    /// Pauses, saves the devices, compares and copies, and lets the machine go on.
    pub(super) async fn compare_paused(
        &mut self,
        shadow: &Files,
    ) -> Result<(Saved, Vec<Compared>), Failed> {
        let fail = |error: &(dyn std::error::Error + 'static)| {
            failed(FailureCode::CaptureFailed, Left::Awake, error)
        };
        let files = self.body.files.clone();
        let drives = self.drive_images();
        let Some(machine) = self.body.machine.as_mut() else { return Err(lost("no machine")) };
        machine.pause().await.map_err(|error| fail(&error))?;
        self.phases.mark("pause");
        let slept_at = Moment::now();
        // The memory changes no more; the disk does until the state is saved, when QEMU lets go of it.
        // Nothing here waits for the disk: what is copied is written back in its own time.
        let (saved, memory) = tokio::join!(
            machine.give_state(),
            compare(files.memory(), shadow.memory(), COMPARING_THREADS)
        );
        let disks = match &saved {
            Ok(_) => compare_disks(&files, shadow, drives).await.map_err(|error| fail(&error)),
            Err(error) => Err(fail(error)),
        };
        self.phases.mark("copy");
        machine.cont().await.map_err(|error| lost(&chain(&error)))?;
        self.phases.mark("cont");
        let (saved, memory) =
            (saved.map_err(|error| fail(&error))?, memory.map_err(|error| fail(&error))?);
        let (mark, state) = saved;
        let mut differed = disks?;
        differed.insert(0, memory);
        // The device state is looked at as a whole when it is carried.
        differed.insert(STATE, Compared::default());
        let machine = machine.fingerprint().clone();
        tokio::fs::write(shadow.state(), state).await.map_err(|error| fail(&error))?;
        let guest_version = self.body.link.hello().map(|hello| hello.agent).unwrap_or_default();
        let saved = Saved { slept_at, timer_due: None, state: mark, machine, guest_version };
        Ok((saved, differed))
    }

    /// The folder of the copy, and room for what the first one writes.
    fn make_shadow(&self, shadow: &Files, left: Left) -> Result<Option<Promise>, Failed> {
        let fail = |error: &(dyn std::error::Error + 'static)| {
            failed(FailureCode::CaptureFailed, left, error)
        };
        let is_first = !shadow.memory().exists();
        let room = if is_first {
            let files = &self.body.files;
            let drives = self.drive_images().into_iter().map(|(_, image)| image);
            let parts = [files.memory(), files.disk()].into_iter().chain(drives);
            let bytes = parts.map(|path| vmm::files::allocated_bytes(&path).unwrap_or(0)).sum();
            Some(self.promise(bytes, left)?)
        } else {
            None
        };
        std::fs::create_dir_all(shadow.dir()).map_err(|error| fail(&error))?;
        Ok(room)
    }

    /// As [`PARTS`](crate::checkpoints), and its drives; without the device state.
    async fn compare_parts(&self, shadow: &Files) -> Result<Vec<Compared>, FileError> {
        let files = &self.body.files;
        let memory = compare(files.memory(), shadow.memory(), COMPARING_THREADS).await?;
        let mut differed = compare_disks(files, shadow, self.drive_images()).await?;
        differed.insert(0, memory);
        differed.insert(STATE, Compared::default());
        Ok(differed)
    }

    fn leave(
        &self,
        taken: &Mutex<Option<Taken>>,
        saved: Saved,
        differed: Vec<Compared>,
        pause_ms: u64,
    ) {
        let of = self.record.get();
        let asleep = matches!(of.state, State::SleepingOnDisk(_));
        *taken.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Taken { of, saved, asleep, differed, pause_ms });
    }
}

/// The disk, then the drives in their places.
async fn compare_disks(
    files: &Files,
    shadow: &Files,
    drives: Vec<(usize, PathBuf)>,
) -> Result<Vec<Compared>, FileError> {
    let mut differed = vec![compare(files.disk(), shadow.disk(), 1).await?];
    for (place, image) in drives {
        differed.push(compare(image, shadow.drive(place), 1).await?);
    }
    Ok(differed)
}

/// Blocking work on another thread.
async fn compare(from: PathBuf, to: PathBuf, threads: usize) -> Result<Compared, FileError> {
    let compared =
        tokio::task::spawn_blocking(move || vmm::files::bring_up_to_date(&from, &to, threads));
    // The task panics or is cancelled only when the daemon goes down.
    compared.await.unwrap_or_else(|gone| std::panic::resume_unwind(gone.into_panic()))
}
