//! The commands of a sandbox, told without waking it or keeping it awake, also by a daemon that starts while it sleeps.
//!
//! A guest lists its commands just before it stands still, and from then on nothing about them changes. The list stays with
//! the link; it is written down as well, for the next daemon. It is an aid: where there is none, the question wakes.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Weak;

use api::exec::Exec;
use api::sandbox::{SleepTier, Status};
use api::{ApiError, Event};
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::{Receiver, error::RecvError};

use crate::daemon::Daemon;
use crate::exec;
use crate::sandbox::Handle;
use crate::sandbox::work::SAMPLE_LIMIT;

/// Largest list that is read: as many commands as a guest keeps, each with as long a line as is told.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

#[derive(Serialize, Deserialize)]
struct Kept {
    /// The life whose commands these are: the next wake begins another, and may change everything.
    life: u64,
    execs: Vec<Exec>,
}

/// The commands of a sandbox, if they can be told without disturbing it. Whoever looks at it all the time must not keep it
/// from its sleep.
pub(crate) async fn undisturbed(handle: &Handle) -> Result<Option<Vec<Exec>>, ApiError> {
    // One that falls asleep while it is asked is then asked as a sleeper.
    for _ in 0..2 {
        let sandbox = handle.view().await?.sandbox;
        match (sandbox.status, sandbox.sleep_tier) {
            (Status::Sleeping, Some(SleepTier::Off)) => return Ok(Some(Vec::new())),
            (Status::Sleeping, _) => return of_sleeper(handle).await,
            (Status::Starting | Status::Failed, _) => return Ok(None),
            (Status::Running, _) => {}
        }
        let link = handle.link().await?;
        if let Ok(Ok(execs)) = tokio::time::timeout(SAMPLE_LIMIT, link.exec_list()).await {
            return Ok(Some(exec::asked_for(&execs, handle.exec_names()).collect()));
        }
    }
    Ok(None)
}

async fn of_sleeper(handle: &Handle) -> Result<Option<Vec<Exec>>, ApiError> {
    if let Some(seen) = handle.link().await?.execs_seen() {
        return Ok(Some(exec::asked_for(&seen, handle.exec_names()).collect()));
    }
    let (file, life) = (file(handle), handle.manifest().life);
    let read = tokio::task::spawn_blocking(move || {
        let small = std::fs::metadata(&file).is_ok_and(|meta| meta.len() <= FILE_BYTES_MAX);
        let bytes = if small { std::fs::read(&file).ok()? } else { return None };
        serde_json::from_slice::<Kept>(&bytes).ok()
    });
    // What cannot be read is as good as not there.
    let kept = read.await.ok().flatten();
    Ok(kept.filter(|kept| kept.life == life).map(|kept| kept.execs))
}

/// Writes down the commands of each sandbox that falls asleep, for as long as the daemon lives.
pub(crate) async fn keep(daemon: Weak<Daemon>, mut events: Receiver<Event>) {
    loop {
        let event = match events.recv().await {
            Ok(event) => event,
            // One that was missed is asked when somebody wants to know.
            Err(RecvError::Lagged(_)) => continue,
            Err(RecvError::Closed) => return,
        };
        if event.kind != "sandbox.slept" {
            continue;
        }
        let Some(daemon) = daemon.upgrade() else { return };
        let Ok(handle) = daemon.handle(&event.sandbox_id) else { continue };
        let Ok(link) = handle.link().await else { continue };
        let Some(seen) = link.execs_seen() else { continue };
        let execs = exec::asked_for(&seen, handle.exec_names()).collect();
        let kept = Kept { life: handle.manifest().life, execs };
        let file = file(&handle);
        let written = tokio::task::spawn_blocking(move || {
            let draft = file.with_extension("new");
            // Guests' accounts may pass through the folder.
            let mut options = std::fs::File::options();
            let mut out =
                options.create(true).truncate(true).write(true).mode(0o600).open(&draft)?;
            out.write_all(&serde_json::to_vec(&kept).map_err(std::io::Error::other)?)?;
            std::fs::rename(&draft, &file)
        });
        if let Ok(Err(error)) = written.await {
            tracing::debug!(sandbox = %event.sandbox_id, %error, "its commands were not written down");
        }
    }
}

fn file(handle: &Handle) -> PathBuf {
    handle.files().dir().join("execs.json")
}
