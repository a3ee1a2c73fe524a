//! Carries out one order on one sandbox, and reports how it ended.
//!
//! An order has the [`Body`] while it works and hands it back with its [`Done`]. It knows nothing of idleness or of who
//! waits; all that matters here is the sequence of steps, and what there is of the sandbox wherever one of them fails.
//!
//! Points at which a daemon can be killed are named by [`crate::fault::point`], so that tests can kill it there.

mod boot;
mod capture;
mod checkpoint;
mod meet;
mod network;
mod room;
mod rouse;
mod settle;

pub(crate) use capture::{copy_parts, read_capture};
pub(in crate::sandbox) use settle::sync;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::SandboxId;
use lifecycle::{Attempt, FailureCode, Left, Order, Report, Work};
use serde_json::{Map, Value};
use tokio::sync::{mpsc, watch};

use super::Message;
use super::body::{Body, drive_images};
use crate::checkpoints::Taken;
use crate::ground::Ground;
use crate::manifest::DriveUse;
use crate::phases::Phases;
use crate::record::Record;
use crate::settings::Files;
use crate::turns::Place;

/// How long the guest may take to stand still: its own limit for freezing and some time to write everything to its disk.
pub(super) const QUIESCE_LIMIT: Duration = Duration::from_secs(20);

/// How long the guest may take to go on after a wake. Under emulation on a busy machine some 0.2 s are usual.
pub(crate) const WAKE_LIMIT: Duration = Duration::from_secs(20);

/// How long a guest may take that mounts drives: after a crash what is in their journals, of 64 MiB each, is read and written.
pub(crate) const MOUNT_LIMIT: Duration = Duration::from_mins(1);

/// How long the guest may take to say what it does.
pub(crate) const SAMPLE_LIMIT: Duration = Duration::from_secs(5);

/// Why the guest has not done what it was asked.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unanswered<E: std::error::Error + 'static> {
    /// It, or the link, says why.
    #[error(transparent)]
    Failed(#[from] E),
    /// Nobody waits for it any more.
    #[error("given up for a newer order")]
    Superseded,
    /// It says nothing.
    #[error("no answer within {SAMPLE_LIMIT:?}")]
    Silent,
}

/// What makes the pieces of an order's work one piece.
pub(crate) struct Worker {
    pub(crate) ground: Arc<Ground>,
    pub(crate) id: SandboxId,
    pub(crate) record: Record,
    pub(crate) body: Body,
    pub(crate) phases: Phases,
    pub(crate) signals: Signals,
    /// To the task whose order it is.
    pub(crate) messages: mpsc::UnboundedSender<Message>,
    /// Number of the life that a wake or boot begins.
    pub(crate) next_life: u64,
    /// Its place among those that are brought back from disk, taken when the order was given.
    pub(crate) place: Option<Place>,
    /// What it wakes for, in words.
    pub(crate) woke_because: Option<String>,
    /// Where a capture puts its copies.
    pub(crate) capture_to: Option<CaptureTo>,
    /// Drives that a boot gives it in place of those that it has.
    pub(crate) drives: Option<Vec<DriveUse>>,
}

/// Where a capture puts its copies.
#[derive(Clone, Debug)]
pub(crate) enum CaptureTo {
    /// Into new files, for a fork or a snapshot.
    Files(Files),
    /// Into the copy of the last checkpoint, which is brought up to date; what was taken is left in the cell.
    Shadow(Files, Arc<Mutex<Option<Taken>>>),
}

/// What may be said to an order while it works.
#[derive(Clone, Debug)]
pub(crate) struct Signals(watch::Receiver<Said>);

/// See [`Signals`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Said {
    /// Turn back if that is still possible ([`Work::Cancel`]).
    pub(crate) cancel: bool,
    /// A newer order waits: end soon, in whatever state is true.
    pub(crate) superseded: bool,
}

impl Signals {
    /// Both ends.
    pub(crate) fn new() -> (watch::Sender<Said>, Self) {
        let (say, heard) = watch::channel(Said::default());
        (say, Self(heard))
    }

    /// Whether to turn back.
    pub(super) fn cancelled(&self) -> bool {
        let said = *self.0.borrow();
        said.cancel || said.superseded
    }

    /// Waits until it is told to turn back.
    pub(super) async fn turned_back(&self) {
        let mut heard = self.0.clone();
        if heard.wait_for(|said| said.cancel || said.superseded).await.is_err() {
            // Whoever could say it is gone: nobody will.
            std::future::pending::<()>().await;
        }
    }

    /// Waits until a newer order waits.
    pub(super) async fn superseded(&self) {
        let mut heard = self.0.clone();
        if heard.wait_for(|said| said.superseded).await.is_err() {
            // Whoever could say it is gone: nobody will.
            std::future::pending::<()>().await;
        }
    }
}

/// An order's end.
pub(crate) struct Done {
    pub(crate) attempt: Attempt,
    pub(crate) report: Report,
    pub(crate) body: Body,
    /// Phases and other facts for the timeline.
    pub(crate) data: Map<String, Value>,
    /// What went wrong, for the log and for `failure`.
    pub(crate) error: Option<String>,
}

/// A step that failed, and what it left.
#[derive(Clone, Debug)]
pub(crate) struct Failed {
    pub(crate) code: FailureCode,
    pub(crate) left: Left,
    pub(crate) error: String,
}

impl<E: std::error::Error + 'static> Unanswered<E> {
    /// Logs that the guest does not go on. Where a newer order waits that is its business, and no fault.
    pub(super) fn log(&self, sandbox: &SandboxId, after: &'static str) {
        let error = chain(self);
        if matches!(self, Self::Superseded) {
            tracing::debug!(%sandbox, error, "guest does not go on after {after}");
        } else {
            tracing::error!(%sandbox, error, "guest does not go on after {after}");
        }
    }
}

impl Worker {
    /// Asks the guest, but no longer than until a newer order waits: a guest that does not answer must not be able to put off
    /// its own end.
    pub(super) async fn unless_superseded<T, E: std::error::Error + 'static>(
        &self,
        asked: impl Future<Output = Result<T, E>>,
    ) -> Result<T, Unanswered<E>> {
        tokio::select! {
            answer = asked => Ok(answer?),
            () = self.signals.superseded() => Err(Unanswered::Superseded),
        }
    }

    /// The disks of its drives, and their places.
    pub(super) fn drive_images(&self) -> Vec<(usize, PathBuf)> {
        self.record.with(|manifest| drive_images(&self.ground, manifest, &self.body.files))
    }

    /// Does what the order says.
    pub(crate) async fn carry_out(mut self, order: Order) -> Done {
        let result = match order.work {
            Work::Create => self.create().await,
            Work::Boot => self.boot().await,
            Work::Suspend { tier } => self.suspend(tier).await,
            Work::Demote => self.demote().await,
            Work::Wake { from } => self.wake(from).await,
            Work::Capture { of, .. } => self.capture(of).await,
            Work::Destroy => self.destroy().await,
            // Remarks on running orders; the sandbox's task passes them on itself.
            Work::Cancel | Work::Sample | Work::Notice { .. } => {
                unreachable!("not work of its own")
            }
        };
        let mut data = self.phases.to_data();
        let (report, error) = match result {
            Ok(report) => (report, None),
            Err(failed) => {
                data.insert("error".to_owned(), without_paths(&failed.error).into());
                (Report::Failed { code: failed.code, left: failed.left }, Some(failed.error))
            }
        };
        Done { attempt: order.attempt, report, body: self.body, data, error }
    }
}

/// The text of an error and all its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}

/// A text about the host for people who may not know what lies where on it: of a path only the last part is left. The log
/// has all of it.
pub(crate) fn without_paths(text: &str) -> String {
    let is_end = |character: char| character.is_whitespace() || "\"'`,;:()".contains(character);
    let mut left = String::with_capacity(text.len());
    for piece in text.split_inclusive(is_end) {
        let (word, end) = match piece.char_indices().next_back() {
            Some((at, last)) if is_end(last) => piece.split_at(at),
            _ => (piece, ""),
        };
        let name = word.strip_prefix('/').and_then(|rest| rest.rsplit_once('/'));
        left.push_str(name.map_or(word, |(_, name)| name));
        left.push_str(end);
    }
    left
}

/// Turns an error into a failed step: a full disk is told apart wherever it shows.
pub(super) fn failed(
    code: FailureCode,
    left: Left,
    error: &(dyn std::error::Error + 'static),
) -> Failed {
    let code = if is_full(error) { FailureCode::DiskFull } else { code };
    Failed { code, left, error: chain(error) }
}

/// Whether a full disk is somewhere among the causes.
pub(crate) fn is_full(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        if matches!(kind, Some(std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded))
        {
            return true;
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_are_told_no_paths_of_the_host() {
        for (said, told) in [
            (
                "write /var/lib/dormouse/sandboxes/k3vq7mzt2abc/state: No space left on device (os error 28)",
                "write state: No space left on device (os error 28)",
            ),
            ("open `/srv/data/x y`", "open `x y`"),
            ("connect to qmp.sock: 3/4 tries", "connect to qmp.sock: 3/4 tries"),
            ("a/b and / and /tmp", "a/b and / and /tmp"),
            ("", ""),
        ] {
            assert_eq!(without_paths(said), told);
        }
    }
}
