//! Writing a standing machine's state to a file.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::AsyncReadExt as _;

use super::{Machine, OrderError};
use crate::files::FileError;
use crate::state::{STATE_BYTES_MAX, StateMark, Stream, StreamError};

/// How long QEMU may take to give its state. 3 to 5 ms were measured.
const SAVE_MAX: Duration = Duration::from_secs(30);

/// What was saved, and how long each step took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// For the manifest.
    pub mark: StateMark,
    /// QEMU gave its state, and it was checked.
    pub state: Duration,
    /// Written and synced.
    pub sync: Duration,
}

/// A state that was not saved. The machine stands as before; [`Machine::cont`] lets it go on.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// QEMU did not do it.
    #[error(transparent)]
    Order(#[from] OrderError),
    /// QEMU began and gave up.
    #[error("qemu failed to give its state")]
    Failed,
    /// The pipe to QEMU broke.
    #[error("read the state from qemu")]
    Read(#[source] io::Error),
    /// More than a state can have.
    #[error("state exceeds {STATE_BYTES_MAX} bytes")]
    TooLarge,
    /// QEMU wrote what we could not restore.
    #[error("qemu's state is not one we can restore")]
    Stream(#[from] StreamError),
    /// It could not be written. See [`FileError::is_full`].
    #[error(transparent)]
    File(#[from] FileError),
    /// The daemon is shutting down.
    #[error("interrupted")]
    Interrupted,
}

impl Machine {
    /// Saves the state of a standing machine (after [`Machine::pause`]) to `path`, synced. An old file is
    /// overwritten, so write to a new name and rename. The memory is not in it: that is the memory file,
    /// which the caller syncs as it needs.
    ///
    /// Afterwards, also after an error, the machine still stands: quit, or go on with [`Machine::cont`]. QEMU
    /// gives its state once: a second save is refused until the machine has gone on.
    pub async fn save_state(&mut self, path: &Path) -> Result<Saved, SaveError> {
        let since = Instant::now();
        let (mark, bytes) = self.give_state().await?;
        let state = since.elapsed();
        write_state(path.to_owned(), bytes).await?;
        Ok(Saved { mark, state, sync: since.elapsed().saturating_sub(state) })
    }

    /// As [`save_state`](Self::save_state), into memory: for a caller who must not wait for a disk meanwhile.
    pub async fn give_state(&mut self) -> Result<(StateMark, Vec<u8>), SaveError> {
        self.agree_on_migration().await?;
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(|errno| SaveError::Read(errno.into()))?;
        rustix::io::ioctl_fionbio(&reader, true).map_err(|errno| SaveError::Read(errno.into()))?;
        let reader =
            tokio::net::unix::pipe::Receiver::from_owned_fd(reader).map_err(SaveError::Read)?;
        let qmp = self.qmp()?;
        let given = qmp.give_fd("state", writer).await;
        self.explained(given).await?;
        // Read from the start: QEMU may hold the lock under which it answers while it waits for room in the pipe.
        let mut bytes = Vec::new();
        {
            let mut taken = reader.take(STATE_BYTES_MAX + 1);
            let read = tokio::time::timeout(SAVE_MAX, taken.read_to_end(&mut bytes));
            let begun = qmp.run("migrate", json!({ "uri": "fd:state" }));
            let (mut read, mut begun) = (std::pin::pin!(read), std::pin::pin!(begun));
            // QEMU closes its end when it is done or has failed, and then says which. If it never began, it never closes.
            let read = tokio::select! {
                biased;
                begun = &mut begun => {
                    self.explained(begun).await?;
                    read.await
                }
                read = &mut read => {
                    self.explained(begun.await).await?;
                    read
                }
            };
            read.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
                .map_err(SaveError::Read)?;
        }
        if bytes.len() as u64 > STATE_BYTES_MAX {
            return Err(SaveError::TooLarge);
        }
        let ended = qmp.migration_ended("migrate", SAVE_MAX).await;
        if !self.explained(ended).await? {
            return Err(SaveError::Failed);
        }
        Stream::parse(&bytes)?;
        Ok((StateMark::of(&bytes), bytes))
    }
}

/// Writes a state that a machine [gave](Machine::give_state) to a file, synced; an old file is overwritten.
pub async fn write_state(path: PathBuf, state: Vec<u8>) -> Result<(), SaveError> {
    let written = tokio::task::spawn_blocking(move || write(&path, &state)).await;
    Ok(written.map_err(|_| SaveError::Interrupted)??)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let opened =
        std::fs::File::options().create(true).truncate(true).write(true).mode(0o600).open(path);
    let mut file = opened.map_err(|error| FileError::new("create", path, error))?;
    file.write_all(bytes).map_err(|error| FileError::new("write", path, error))?;
    file.sync_data().map_err(|error| FileError::new("sync", path, error))
}
