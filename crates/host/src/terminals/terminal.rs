//! One terminal: its screen, those who look at it, and what is still to be told to the guest.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::exec::{ExecStatus, Exit};
use api::terminal::{Terminal as View, TerminalEvent, TerminalScreen, TerminalSize};
use api::{ApiError, Code};
use bytes::Bytes;
use tokio::sync::{broadcast, mpsc};

use super::saved::{self, Saved};
use super::screen::Screen;
use crate::exec_names::ExecNames;
use crate::guest::{ExecId, GuestError, GuestLink, OutputChunk};

/// Pieces of output that a viewer may be behind; then it is given the whole screen instead.
const BEHIND_MAX: usize = 64;
/// Pieces on their way to one viewer.
const BACKLOG: usize = 4;

/// See the module.
pub(super) struct Terminal {
    pub(super) id: ExecId,
    pid: u32,
    command: String,
    file: PathBuf,
    state: Mutex<State>,
    told: broadcast::Sender<Told>,
    /// Whoever tells the guest the size holds this, so that the last told is the newest.
    telling_size: tokio::sync::Mutex<()>,
    /// Whoever writes the file.
    writing: Mutex<()>,
}

struct State {
    screen: Screen,
    /// The size that the guest has been told last.
    size_told: Option<TerminalSize>,
    end: Option<End>,
}

/// How it has ended.
#[derive(Clone, Copy)]
pub(super) enum End {
    Exit(Exit),
    /// With its machine.
    Lost,
}

#[derive(Clone)]
enum Told {
    Output(Bytes),
    Size(TerminalSize),
    End(End),
}

impl Terminal {
    /// A new one, whose program has that size already.
    pub(super) fn new(
        id: ExecId,
        pid: u32,
        command: String,
        size: TerminalSize,
        file: PathBuf,
    ) -> Self {
        Self {
            id,
            pid,
            command,
            file,
            state: Mutex::new(State {
                screen: Screen::new(size),
                size_told: Some(size),
                end: None,
            }),
            told: broadcast::channel(BEHIND_MAX).0,
            telling_size: tokio::sync::Mutex::default(),
            writing: Mutex::default(),
        }
    }

    /// One that an earlier daemon knew. What its guest was told last is not known.
    pub(super) fn found(saved: Saved, file: PathBuf) -> Self {
        let found = Self::new(ExecId(saved.id), saved.pid, saved.command, saved.size, file);
        {
            let mut state = found.state();
            state.screen = Screen::drawn(saved.size, &saved.drawing, saved.offset);
            state.size_told = None;
            state.end = saved.exit.map(End::Exit);
        }
        found
    }

    /// The same terminal in a copy of its sandbox, whose screen is to be drawn from all of its output.
    pub(super) fn copy(&self, file: PathBuf) -> Self {
        let (size, end) = {
            let state = self.state();
            (state.screen.size(), state.end)
        };
        let copy = Self::new(self.id, self.pid, self.command.clone(), size, file);
        copy.state().end = end;
        copy
    }

    pub(super) fn view(&self, names: ExecNames) -> View {
        let state = self.state();
        let TerminalSize { columns, rows } = state.screen.size();
        let exit = match state.end {
            Some(End::Exit(exit)) => Some(exit),
            Some(End::Lost) | None => None,
        };
        View {
            terminal_id: names.name(self.id),
            pid: self.pid,
            status: if state.end.is_some() { ExecStatus::Exited } else { ExecStatus::Running },
            command: self.command.clone(),
            columns,
            rows,
            viewers: u32::try_from(self.told.receiver_count()).unwrap_or(u32::MAX),
            exit,
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.state().end.is_some()
    }

    /// It went with its machine: a later boot knows nothing of it.
    pub(super) fn is_lost(&self) -> bool {
        matches!(self.state().end, Some(End::Lost))
    }

    pub(super) fn text(&self) -> TerminalScreen {
        self.state().screen.text()
    }

    /// Position of the next byte of output that is to be shown.
    pub(super) fn offset(&self) -> u64 {
        self.state().screen.offset
    }

    /// Output that has come.
    pub(super) fn show(&self, chunk: OutputChunk) {
        // Told under the lock, as is everything: who joins sees the screen, and then exactly what it has not.
        let mut state = self.state();
        state.screen.show(chunk.offset, &chunk.bytes);
        self.tell(Told::Output(chunk.bytes.into()));
    }

    /// The end, once.
    pub(super) fn end(&self, end: End) {
        let mut state = self.state();
        if state.end.is_none() {
            state.end = Some(end);
            self.tell(Told::End(end));
        }
    }

    /// Changes the size of the screen; [`tell_size`](Self::tell_size) tells the guest.
    pub(super) fn resize(&self, size: TerminalSize) {
        let mut state = self.state();
        if state.screen.size() != size {
            state.screen.resize(size);
            self.tell(Told::Size(size));
        }
    }

    /// Tells the guest the size, until it knows the newest. Waits while the guest stands still.
    pub(super) async fn tell_size(&self, link: &GuestLink) -> Result<(), GuestError> {
        let _one = self.telling_size.lock().await;
        loop {
            let size = {
                let state = self.state();
                let size = state.screen.size();
                if state.size_told == Some(size) || state.end.is_some() {
                    return Ok(());
                }
                size
            };
            let TerminalSize { columns, rows } = size;
            link.terminal_resize(self.id, wire::TerminalSize { columns, rows }).await?;
            self.state().size_told = Some(size);
        }
    }

    /// Whether somebody tells the guest the size already, and will tell it the newest.
    pub(super) fn size_is_being_told(&self) -> bool {
        self.telling_size.try_lock().is_err()
    }

    /// The screen, and from then on everything.
    pub(super) fn watch(self: &Arc<Self>) -> mpsc::Receiver<Result<TerminalEvent, ApiError>> {
        let (sender, receiver) = mpsc::channel(BACKLOG);
        let terminal = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                // Also when it is joined again, having been too slow.
                let (screen, mut told, end) = {
                    let state = terminal.state();
                    let drawing = Bytes::from(state.screen.draw());
                    let screen = TerminalEvent::Screen(state.screen.size(), drawing);
                    (screen, terminal.told.subscribe(), state.end)
                };
                if sender.send(Ok(screen)).await.is_err() {
                    return;
                }
                if let Some(end) = end {
                    return drop(sender.send(last(end)).await);
                }
                loop {
                    let news = tokio::select! {
                        news = told.recv() => news,
                        () = sender.closed() => return,
                    };
                    let event = match news {
                        Ok(Told::Output(bytes)) => TerminalEvent::Output(bytes),
                        Ok(Told::Size(size)) => TerminalEvent::Size(size),
                        Ok(Told::End(end)) => return drop(sender.send(last(end)).await),
                        Err(broadcast::error::RecvError::Lagged(_)) => break,
                        Err(broadcast::error::RecvError::Closed) => return,
                    };
                    if sender.send(Ok(event)).await.is_err() {
                        return;
                    }
                }
            }
        });
        receiver
    }

    /// Writes it down. Blocks.
    pub(super) fn save(&self) {
        let _one = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let saved = {
            let state = self.state();
            Saved {
                id: self.id.0,
                pid: self.pid,
                command: self.command.clone(),
                size: state.screen.size(),
                offset: state.screen.offset,
                drawing: state.screen.draw(),
                exit: match state.end {
                    Some(End::Exit(exit)) => Some(exit),
                    Some(End::Lost) | None => None,
                },
            }
        };
        if let Err(error) = saved::write(&self.file, &saved) {
            // A later daemon shows an older screen until the sandbox wakes.
            tracing::debug!(file = %self.file.display(), %error, "a terminal's screen was not written");
        }
    }

    /// Removes what was written down.
    pub(super) fn forget(&self) {
        let _one = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = std::fs::remove_file(&self.file)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::debug!(file = %self.file.display(), %error, "a terminal's screen was not removed");
        }
    }

    fn tell(&self, told: Told) {
        // Nobody may be looking.
        let _ = self.told.send(told);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn last(end: End) -> Result<TerminalEvent, ApiError> {
    match end {
        End::Exit(exit) => Ok(TerminalEvent::Exit(exit)),
        End::Lost => Err(ApiError::new(
            Code::CommandLost,
            "the sandbox's machine ended, and the terminal with it",
        )),
    }
}
