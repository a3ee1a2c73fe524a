//! The task that sees a machine's end, and keeps its logs short.
//!
//! It outlives the [`super::Machine`], so that a child is reaped in any case.

use std::io;
use std::path::PathBuf;
use std::process::Child;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::Signal;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

use crate::exit::{Died, Exit, ExitCause, ExitWatch};
use crate::files::shorten_log;
use crate::process::Process;
use crate::qmp::{Seen, Shutdown};
use crate::spec::{CONSOLE_BYTES_KEPT, CONSOLE_BYTES_MAX, CONSOLE_TRIM_EVERY, Outlets};

/// How long to wait for QMP's last words after the process has ended. They are in the socket's buffer by then, so this is for our own task to read them.
const LAST_WORDS_MAX: Duration = Duration::from_millis(200);

/// What we did to end the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    Quit,
    Kill,
}

/// The machine's side of the watching task.
#[derive(Debug)]
pub(super) struct Watched {
    exit: watch::Receiver<Option<Exit>>,
    going: watch::Sender<bool>,
    told: Arc<Told>,
}

/// What the watching task is told meanwhile.
#[derive(Debug, Default)]
struct Told {
    asked: Mutex<Option<Asked>>,
    seen: Mutex<Option<watch::Receiver<Seen>>>,
}

impl Watched {
    /// Begins to watch. `child` if it is one of ours.
    pub(super) fn begin(
        process: &Process,
        child: Option<Child>,
        outlets: &Outlets,
        going: bool,
    ) -> io::Result<Self> {
        let pidfd = crate::pollable::readable(process.pidfd().try_clone()?)?;
        let (exit_sender, exit) = watch::channel(None);
        let (going_sender, going) = watch::channel(going);
        let told = Arc::new(Told::default());
        let watcher = Watcher {
            told: Arc::clone(&told),
            logs: [outlets.console.clone(), outlets.log.clone()],
            child,
        };
        tokio::spawn(async move {
            let exit = watcher.run(&pidfd, going).await;
            tracing::debug!(cause = ?exit.cause, "machine ended");
            exit_sender.send_replace(Some(exit));
        });
        Ok(Self { exit, going: going_sender, told })
    }

    pub(super) fn exit(&self) -> ExitWatch {
        ExitWatch::new(self.exit.clone())
    }

    /// Whether the guest runs: only then can its console grow.
    pub(super) fn set_going(&self, going: bool) {
        self.going.send_replace(going);
    }

    pub(super) fn asked(&self, asked: Asked) {
        *self.told.asked.lock().unwrap_or_else(PoisonError::into_inner) = Some(asked);
    }

    pub(super) fn listen_to(&self, seen: watch::Receiver<Seen>) {
        *self.told.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(seen);
    }
}

struct Watcher {
    told: Arc<Told>,
    logs: [PathBuf; 2],
    child: Option<Child>,
}

impl Watcher {
    async fn run(
        mut self,
        pidfd: &AsyncFd<std::os::fd::OwnedFd>,
        mut going: watch::Receiver<bool>,
    ) -> Exit {
        loop {
            let is_going = *going.borrow_and_update();
            self.shorten_logs().await;
            tokio::select! {
                ready = pidfd.readable() => {
                    if let Err(error) = ready {
                        // The runtime is going down, and with it everybody who could be told.
                        tracing::debug!(%error, "watching a process ended early");
                    }
                    break;
                }
                () = tokio::time::sleep(CONSOLE_TRIM_EVERY), if is_going => {}
                changed = going.changed() => {
                    if changed.is_err() {
                        // Nobody gives orders any more; what remains is to see the end.
                        drop(pidfd.readable().await);
                        break;
                    }
                }
            }
        }
        let status = self.reap();
        let seen = self.last_words().await;
        let asked = *self.told.asked.lock().unwrap_or_else(PoisonError::into_inner);
        Exit { cause: cause(seen, asked, status) }
    }

    async fn shorten_logs(&self) {
        let logs = self.logs.clone();
        let done = tokio::task::spawn_blocking(move || {
            logs.iter().try_for_each(|log| {
                shorten_log(log, CONSOLE_BYTES_MAX, CONSOLE_BYTES_KEPT).map(drop)
            })
        });
        // A log that cannot be cut is no reason to stop watching.
        if let Ok(Err(error)) = done.await {
            tracing::warn!(error = &error as &dyn std::error::Error, "log not cut");
        }
    }

    /// Reaps a child; it has ended, so this does not wait.
    fn reap(&mut self) -> Died {
        use std::os::unix::process::ExitStatusExt as _;
        let Some(child) = &mut self.child else { return Died::Unknown };
        match child.wait() {
            Ok(status) => status
                .code()
                .map(Died::Code)
                .or_else(|| status.signal().map(Died::Signal))
                .unwrap_or(Died::Unknown),
            Err(error) => {
                tracing::warn!(%error, "child not reaped");
                Died::Unknown
            }
        }
    }

    async fn last_words(&self) -> Seen {
        let seen = self.told.seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(mut seen) = seen else { return Seen::default() };
        // Too late or gone: what came until then counts.
        drop(tokio::time::timeout(LAST_WORDS_MAX, seen.wait_for(|seen| seen.closed)).await);
        *seen.borrow()
    }
}

/// What QEMU said goes before what we asked for (the guest may have been faster), and that before the exit status.
fn cause(seen: Seen, asked: Option<Asked>, status: Died) -> ExitCause {
    match (seen.shutdown, asked) {
        _ if seen.panicked => ExitCause::Panic,
        (Some(Shutdown::GuestPanic), _) => ExitCause::Panic,
        (Some(Shutdown::GuestShutdown), _) => ExitCause::Poweroff,
        (Some(Shutdown::GuestReset), _) => ExitCause::Reboot,
        (Some(Shutdown::Quit), _) | (_, Some(Asked::Quit)) => ExitCause::Quit,
        (_, Some(Asked::Kill)) => ExitCause::Killed,
        (Some(Shutdown::Other) | None, None) => ExitCause::Died(status),
    }
}

/// For a process that could not be watched.
pub(super) fn kill_and_reap(mut child: Child, process: Option<&Process>) {
    let killed = match process {
        Some(process) => process.signal(Signal::KILL),
        None => child.kill(),
    };
    if let Err(error) = killed.and_then(|()| child.wait().map(drop)) {
        tracing::warn!(%error, "child not reaped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_own_end_goes_before_our_order() {
        let seen = |shutdown| Seen { shutdown: Some(shutdown), ..Seen::default() };
        let crashed = Died::Signal(11);
        let cases = [
            (seen(Shutdown::GuestShutdown), Some(Asked::Quit), ExitCause::Poweroff),
            (seen(Shutdown::GuestReset), Some(Asked::Kill), ExitCause::Reboot),
            (seen(Shutdown::GuestPanic), None, ExitCause::Panic),
            (Seen { panicked: true, ..seen(Shutdown::GuestReset) }, None, ExitCause::Panic),
            (seen(Shutdown::Quit), None, ExitCause::Quit),
            (Seen::default(), Some(Asked::Quit), ExitCause::Quit),
            (Seen::default(), Some(Asked::Kill), ExitCause::Killed),
            (seen(Shutdown::Other), None, ExitCause::Died(crashed)),
            (Seen::default(), None, ExitCause::Died(crashed)),
        ];
        for (seen, asked, expected) in cases {
            assert_eq!(cause(seen, asked, crashed), expected, "{seen:?} {asked:?}");
        }
    }
}
