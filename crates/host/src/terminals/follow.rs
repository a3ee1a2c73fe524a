//! Following a terminal's output, over sleeps and new links, for as long as its program runs.
//!
//! Following holds nothing awake and wakes nothing: a guest that stands still prints nothing.

use std::sync::{Arc, Weak};
use std::time::Duration;

use api::{Event, SandboxId};
use futures_util::StreamExt;
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::time::Instant;

use super::terminal::{End, Terminal};
use crate::daemon::Daemon;
use crate::guest::{FailureCode, GuestError, GuestLink, OutputFrom, Which};
use crate::sandbox::Handle;

/// How long after something was shown the screen is written down: what is printed in one go is written once.
const SAVE_AFTER: Duration = Duration::from_millis(250);
/// How long after an error that no change of the sandbox explains it is tried again.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// Events after which nothing of an earlier boot is left.
const ENDS: [&str; 3] = ["sandbox.stopped", "sandbox.restarted", "sandbox.deleted"];

/// How one try ended.
enum Tried {
    End(End),
    /// The link has no guest for now.
    Gone,
    Failed(GuestError),
}

/// Follows to the end. `events`: those of all sandboxes, from before the terminal was known to run.
pub(super) async fn follow(
    terminal: Arc<Terminal>,
    sandbox: SandboxId,
    handle: Handle,
    mut events: broadcast::Receiver<Event>,
) {
    let end = loop {
        // Without a task there is no sandbox any more.
        let Ok(link) = handle.link().await else { break End::Lost };
        let mut states = link.watch_state();
        let pause = match once(&terminal, &link).await {
            Tried::End(end) => break end,
            Tried::Gone => None,
            Tried::Failed(error) => {
                tracing::warn!(%sandbox, terminal = %terminal.id, %error, "a terminal is not followed");
                Some(RETRY_AFTER)
            }
        };
        let ended = tokio::select! {
            ended = news(&mut events, &sandbox) => ended,
            _ = states.changed() => false,
            () = tokio::time::sleep(pause.unwrap_or_default()), if pause.is_some() => false,
        };
        if ended {
            break End::Lost;
        }
    };
    terminal.end(end);
    let write = move || match end {
        End::Exit(_) => terminal.save(),
        End::Lost => terminal.forget(),
    };
    if let Err(error) = tokio::task::spawn_blocking(write).await {
        tracing::error!(%sandbox, %error, "a terminal's end was not written");
    }
}

/// Forgets the terminals of sandboxes whose machine has ended, as its commands are forgotten: also those that had ended before.
/// For as long as the daemon lives.
pub(crate) async fn forget_the_lost(daemon: Weak<Daemon>, mut events: broadcast::Receiver<Event>) {
    loop {
        let event = match events.recv().await {
            Ok(event) => event,
            // What was missed stays in the list until the next restart.
            Err(RecvError::Lagged(_)) => continue,
            Err(RecvError::Closed) => return,
        };
        if !ENDS.contains(&&*event.kind) {
            continue;
        }
        let Some(daemon) = daemon.upgrade() else { return };
        let Ok(handle) = daemon.handle(&event.sandbox_id) else { continue };
        let Ok(link) = handle.link().await else { continue };
        // Of a machine that is gone nothing is of now.
        let boot =
            link.hello().filter(|_| event.kind == "sandbox.restarted").map(|hello| hello.boot);
        daemon.terminals.forget_ended(&event.sandbox_id, boot);
    }
}

/// Waits for something to happen to the sandbox. `true`: nothing that ran in it is left.
async fn news(events: &mut broadcast::Receiver<Event>, sandbox: &SandboxId) -> bool {
    loop {
        match events.recv().await {
            Ok(event) if event.sandbox_id == *sandbox => return ENDS.contains(&&*event.kind),
            Ok(_) => {}
            // Whatever was missed shows itself when it is tried again.
            Err(RecvError::Lagged(_)) => return false,
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}

async fn once(terminal: &Arc<Terminal>, link: &GuestLink) -> Tried {
    if let Err(error) = terminal.tell_size(link).await
        && !matches!(&error, GuestError::Failed(failure) if failure.code == FailureCode::Ended)
    {
        return tried(error);
    }
    let from = OutputFrom { stdout: terminal.offset(), stderr: 0 };
    let mut output = match link.exec_output(terminal.id, Which::Stdout, from, true) {
        Ok(output) => output,
        Err(error) => return tried(error),
    };
    let mut save_at: Option<Instant> = None;
    loop {
        tokio::select! {
            chunk = output.next() => match chunk {
                Some(Ok(chunk)) => {
                    terminal.show(chunk);
                    save_at.get_or_insert_with(|| Instant::now() + SAVE_AFTER);
                }
                Some(Err(error)) => return tried(error),
                None => break,
            },
            () = tokio::time::sleep_until(save_at.unwrap_or_else(Instant::now)), if save_at.is_some() => {
                save_at = None;
                let terminal = Arc::clone(terminal);
                if let Err(error) = tokio::task::spawn_blocking(move || terminal.save()).await {
                    tracing::error!(%error, "a terminal's screen was not written");
                }
            }
        }
    }
    match link.exec_wait(terminal.id).await {
        Ok(ended) => Tried::End(End::Exit(crate::exec::exit(ended))),
        Err(error) => tried(error),
    }
}

fn tried(error: GuestError) -> Tried {
    match error {
        GuestError::Gone { .. } | GuestError::Reset { .. } => Tried::Gone,
        GuestError::Failed(failure) if failure.code == FailureCode::UnknownExec => {
            Tried::End(End::Lost)
        }
        error => Tried::Failed(error),
    }
}
