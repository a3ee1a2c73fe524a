//! The one place through which a sandbox's manifest changes.
//!
//! A change is first made durable, then believed: when the disk refuses, memory still says what the disk says. On a full
//! disk one change must still be possible, the one that takes note of a wake or a deletion; therefore each sandbox keeps a
//! spare file, which gives way when space runs out and comes back when there is some.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use api::usage::Usage;
use vmm::files::FileError;

use crate::manifest::{self, Manifest, State};
use crate::settings::Files;
use crate::usage::{self, CpuHeard, Used};

/// Bytes kept aside for a manifest on a full disk: several times what one takes with its folder entry.
const SPARE_BYTES: usize = 64 * 1024;

/// A sandbox's manifest in memory and on disk. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Record(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    spare: PathBuf,
    /// What stands on disk.
    now: Mutex<Manifest>,
    /// The counts of the guest's own programs' processor time that were heard of.
    cpu: Mutex<Option<CpuHeard>>,
    /// Held while writing: one change at a time.
    writing: tokio::sync::Mutex<()>,
}

impl Record {
    /// A manifest that stands on disk already.
    pub(crate) fn existing(path: &Path, manifest: Manifest) -> Self {
        let spare = path.with_file_name("spare");
        Self(Arc::new(Inner {
            path: path.to_owned(),
            spare,
            now: Mutex::new(manifest),
            cpu: Mutex::new(None),
            writing: tokio::sync::Mutex::new(()),
        }))
    }

    /// Writes a new one.
    pub(crate) async fn create(path: &Path, manifest: Manifest) -> Result<Self, FileError> {
        let record = Self::existing(path, manifest);
        record.change(|_| {}).await?;
        Ok(record)
    }

    /// A copy of the manifest as it stands.
    pub(crate) fn get(&self) -> Manifest {
        self.now().clone()
    }

    /// Reads something of it.
    pub(crate) fn with<T>(&self, read: impl FnOnce(&Manifest) -> T) -> T {
        read(&self.now())
    }

    /// Changes it durably. On an error nothing has changed.
    pub(crate) async fn change(&self, change: impl FnOnce(&mut Manifest)) -> Result<(), FileError> {
        let _one_at_a_time = self.0.writing.lock().await;
        let mut next = self.get();
        let before = counted_as(&next);
        change(&mut next);
        let inner = Arc::clone(&self.0);
        let written = tokio::task::spawn_blocking(move || {
            // Up to now it was what it was before.
            next.used = inner.used(&next, &before);
            inner.write(&next).map(|()| next)
        });
        let written = written.await;
        // The task panics or is cancelled only when the daemon goes down.
        let next = written.unwrap_or_else(|gone| std::panic::resume_unwind(gone.into_panic()))?;
        *self.now() = next;
        Ok(())
    }

    /// Its guest says how much processor time its own programs have used, in microseconds of a count that only grows.
    pub(crate) fn note_cpu(&self, usec: u64) {
        let mut heard = self.0.cpu.lock().unwrap_or_else(PoisonError::into_inner);
        heard.get_or_insert(CpuHeard { first_usec: usec, newest_usec: usec }).newest_usec = usec;
    }

    /// A new machine begins, whose guest counts from zero: what was used in the one before is added up first.
    pub(crate) async fn begin_cpu(&self) -> Result<(), FileError> {
        self.change(|_| {}).await?;
        self.note_cpu(0);
        Ok(())
    }

    /// What it has used up to now. Looks at files.
    pub(crate) fn usage(&self) -> Usage {
        let now = self.get();
        let used = self.0.used(&now, &counted_as(&now));
        used.told(now.memory_mib, usage::kept_bytes(&self.0.files()))
    }

    fn now(&self) -> std::sync::MutexGuard<'_, Manifest> {
        // Nothing that can panic happens under the lock.
        self.0.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a stretch counts as. One that never ran is still being made: that its memory lies ready meanwhile is no sleep.
fn counted_as(manifest: &Manifest) -> State {
    match &manifest.state {
        State::SleepingOnDisk(_) | State::SleepingInMemory { .. } if manifest.life == 0 => {
            State::Creating
        }
        state => state.clone(),
    }
}

impl Inner {
    fn files(&self) -> Files {
        Files::in_dir(self.path.parent().unwrap_or(Path::new("/")))
    }

    /// What is used up to now by one that was in this state since it was last counted.
    fn used(&self, manifest: &Manifest, state: &State) -> Used {
        let cpu = *self.cpu.lock().unwrap_or_else(PoisonError::into_inner);
        manifest.used.up_to_now(state, cpu, || usage::kept_bytes(&self.files()))
    }

    fn write(&self, next: &Manifest) -> Result<(), FileError> {
        match manifest::write(&self.path, next) {
            Err(error) if error.is_full() => {
                tracing::warn!(path = %self.path.display(), "disk full: the spare gives way for the manifest");
                if std::fs::remove_file(&self.spare).is_err() {
                    return Err(error);
                }
                manifest::write(&self.path, next)
            }
            Err(error) => Err(error),
            Ok(()) => {
                self.keep_spare();
                Ok(())
            }
        }
    }

    /// Without room for a spare there is none; then it is missing only if the disk stays full.
    fn keep_spare(&self) {
        if !self.spare.exists()
            && let Err(error) = std::fs::write(&self.spare, vec![b'.'; SPARE_BYTES])
        {
            tracing::warn!(path = %self.spare.display(), %error, "no spare for a full disk");
            let _ = std::fs::remove_file(&self.spare);
        }
    }
}
