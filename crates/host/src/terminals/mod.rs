//! The terminals of this host's sandboxes.
//!
//! ```text
//!  guest: program ─▶ pty ─▶ log of the exec, by offset        (outlives links, sleeps and daemons)
//!                              │ follow
//!  host:                    screen ─▶ viewers, each a drawing of it and then what comes
//!                              └───▶ file, for a daemon that starts while the sandbox sleeps
//! ```
//!
//! The guest is the source of everything and keeps it; the screen here is made of that, and is what a viewer is shown,
//! awake or asleep. Looking neither wakes a sandbox nor holds it awake; typing is a call, which wakes it.

mod follow;
mod saved;
mod screen;
mod terminal;

pub(crate) use self::follow::forget_the_lost;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::exec::ExecRequest;
use api::host::Answer;
use api::terminal::{
    TERM_DEFAULT, Terminal as View, TerminalEvent, TerminalHost, TerminalRequest, TerminalScreen,
    TerminalSize,
};
use api::{ApiError, Code, Event, SandboxId};
use async_trait::async_trait;
use bytes::Bytes;
use lifecycle::{Call, CallKind};
use tokio::sync::{broadcast, mpsc};

use self::terminal::Terminal;
use crate::daemon::Daemon;
use crate::exec::{self, guest_error};
use crate::exec_names::{ExecNames, is_of};
use crate::guest::{ExecId, Failure, FailureCode, GuestError, TerminalSpec};
use crate::manifest::State;
use crate::sandbox::{Handle, Ready};

/// Terminals that may run in one sandbox at a time. Each has an emulator here, and a channel of its guest's link.
const RUNNING_MAX: usize = 16;
/// Ended ones whose screen is kept, of one sandbox.
const ENDED_KEPT: usize = 16;
/// How long what was typed may keep a sandbox awake while its program does not take it.
const INPUT_HOLD_MAX: Duration = Duration::from_secs(2);
/// How long a program whose terminal is hung up may take to end, before everything that it started is killed.
const HANG_UP_TIME: Duration = Duration::from_secs(5);

/// What a terminal runs for whoever asks for none.
const LOGIN: [&str; 3] =
    ["/bin/sh", "-c", "[ -x /bin/bash ] && exec /bin/bash --login; exec /bin/sh -l"];

/// All terminals of this host.
#[derive(Default)]
pub(crate) struct Terminals {
    table: Mutex<HashMap<SandboxId, BTreeMap<ExecId, Arc<Terminal>>>>,
}

impl Terminals {
    /// Takes up what an earlier daemon knew of these sandboxes.
    pub(crate) fn recover(&self, handles: &[Handle], events: &broadcast::Sender<Event>) {
        for handle in handles {
            let folder = folder(handle);
            let is_off =
                handle.record().with(|manifest| matches!(manifest.state, State::Off { .. }));
            for saved in saved::read(&folder) {
                let file = saved::file(&folder, saved.id);
                let found = Terminal::found(saved, file);
                if is_off {
                    found.forget();
                } else {
                    self.add(handle, found, events);
                }
            }
        }
    }

    /// Forgets those that have ended and are of another boot than this; `None`: of any.
    fn forget_ended(&self, id: &SandboxId, boot: Option<[u8; 16]>) {
        let mut table = self.table();
        let Some(of_one) = table.get_mut(id) else { return };
        of_one.retain(|exec, terminal| {
            let is_of_now = boot.is_some_and(|boot| is_of(*exec, boot));
            let stays = is_of_now || !terminal.has_ended();
            if !stays {
                terminal.forget();
            }
            stays
        });
    }

    /// Those of a sandbox that was copied, for the copy: the same programs run in both.
    pub(crate) fn copy(&self, from: &SandboxId, to: &Handle, events: &broadcast::Sender<Event>) {
        for terminal in self.of(from) {
            let file = saved::file(&folder(to), terminal.id.0);
            self.add(to, terminal.copy(file), events);
        }
    }

    /// Forgets those of a sandbox that is gone.
    pub(crate) fn remove(&self, id: &SandboxId) {
        self.table().remove(id);
    }

    fn add(
        &self,
        handle: &Handle,
        terminal: Terminal,
        events: &broadcast::Sender<Event>,
    ) -> Arc<Terminal> {
        let terminal = Arc::new(terminal);
        let mut table = self.table();
        let of_one = table.entry(handle.id().clone()).or_default();
        of_one.insert(terminal.id, Arc::clone(&terminal));
        let ended: Vec<ExecId> =
            of_one.values().filter(|one| one.has_ended()).map(|one| one.id).collect();
        for id in &ended[..ended.len().saturating_sub(ENDED_KEPT)] {
            if let Some(forgotten) = of_one.remove(id) {
                forgotten.forget();
            }
        }
        drop(table);
        if !terminal.has_ended() {
            tokio::spawn(follow::follow(
                Arc::clone(&terminal),
                handle.id().clone(),
                handle.clone(),
                events.subscribe(),
            ));
        }
        terminal
    }

    fn of(&self, id: &SandboxId) -> Vec<Arc<Terminal>> {
        let table = self.table();
        let of_one = table.get(id).into_iter().flat_map(BTreeMap::values);
        of_one.filter(|one| !one.is_lost()).cloned().collect()
    }

    fn find(
        &self,
        id: &SandboxId,
        names: ExecNames,
        text: &str,
    ) -> Result<Arc<Terminal>, ApiError> {
        let unknown = || {
            ApiError::new(Code::NotFound, format!("the sandbox has no terminal `{text}`"))
                .hint("terminals of an earlier boot, and old ones that have ended, are forgotten")
        };
        let table = self.table();
        let of_one = table.get(id).ok_or_else(unknown)?;
        let meant = names.meant(text);
        let found = meant.iter().find_map(|exec| of_one.get(exec)).cloned();
        found.filter(|one| !one.is_lost()).ok_or_else(unknown)
    }

    fn table(&self) -> MutexGuard<'_, HashMap<SandboxId, BTreeMap<ExecId, Arc<Terminal>>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl TerminalHost for Daemon {
    async fn terminal_start(
        &self,
        id: &SandboxId,
        request: TerminalRequest,
    ) -> Result<Answer<View>, ApiError> {
        let size = TerminalSize {
            columns: request.columns.unwrap_or(TerminalSize::default().columns),
            rows: request.rows.unwrap_or(TerminalSize::default().rows),
        };
        let (run, command) = program(&request);
        // Checked before anybody is woken for nothing.
        exec::spec(&run, &BTreeMap::new())?;
        let handle = self.handle(id)?;
        let running = self.terminals.of(id).iter().filter(|one| !one.has_ended()).count();
        if running >= RUNNING_MAX {
            let text = format!("{running} terminals run in this sandbox already");
            return Err(ApiError::new(Code::NoCapacity, text).hint("close one"));
        }
        let _turn = handle.turn_to_start().await;
        let ready = handle.call(Call::of(CallKind::Terminal), "a terminal").await?;
        let mut spec = TerminalSpec {
            exec: exec::spec(&run, &ready.env)?,
            term: request.term.unwrap_or_else(|| TERM_DEFAULT.to_owned()),
            size: wire::TerminalSize { columns: size.columns, rows: size.rows },
        };
        let asked = spec.exec.cwd.is_some();
        if !asked {
            spec.exec.cwd = Some(exec::CWD_DEFAULT.to_owned());
        }
        let mut started = ready.link.terminal_start(spec.clone()).await;
        if !asked
            && let Err(GuestError::Failed(Failure { code: FailureCode::BadCwd, .. })) = &started
        {
            spec.exec.cwd = None;
            started = ready.link.terminal_start(spec).await;
        }
        let started = started.map_err(guest_error).map_err(exec::start_error)?;
        let file = saved::file(&folder(&handle), started.id.0);
        let terminal = Terminal::new(started.id, started.pid, command, size, file);
        let terminal = self.terminals.add(&handle, terminal, &self.events);
        save(&terminal);
        Ok(Answer { value: terminal.view(handle.exec_names()), woke_ms: ready.woke_ms })
    }

    async fn terminal_list(&self, id: &SandboxId) -> Result<Vec<View>, ApiError> {
        let names = self.handle(id)?.exec_names();
        Ok(self.terminals.of(id).iter().map(|terminal| terminal.view(names)).collect())
    }

    async fn terminal_view(&self, id: &SandboxId, terminal: &str) -> Result<View, ApiError> {
        Ok(self.terminal(id, terminal)?.view(self.handle(id)?.exec_names()))
    }

    async fn terminal_screen(
        &self,
        id: &SandboxId,
        terminal: &str,
    ) -> Result<TerminalScreen, ApiError> {
        Ok(self.terminal(id, terminal)?.text())
    }

    async fn terminal_attach(
        &self,
        id: &SandboxId,
        terminal: &str,
    ) -> Result<mpsc::Receiver<Result<TerminalEvent, ApiError>>, ApiError> {
        Ok(self.terminal(id, terminal)?.watch())
    }

    async fn terminal_input(
        &self,
        id: &SandboxId,
        terminal: &str,
        bytes: Bytes,
    ) -> Result<Answer<()>, ApiError> {
        let terminal = self.terminal(id, terminal)?;
        let handle = self.handle(id)?;
        let ready = handle.call(Call::of(CallKind::Terminal), "a key press in a terminal").await?;
        let Ready { link, guard, woke_ms, .. } = ready;
        let typed = async {
            // Before what was typed: its program must find the right size when it answers. One that cannot be told has ended.
            if let Err(error) = terminal.tell_size(&link).await {
                tracing::debug!(%error, "a terminal's size was not told");
            }
            let mut stdin = link.exec_stdin(terminal.id, false)?;
            stdin.write(&bytes).await?;
            stdin.finish().await.map(drop)
        };
        tokio::pin!(typed);
        let in_time = tokio::time::timeout(INPUT_HOLD_MAX, &mut typed).await;
        drop(guard);
        let typed = if let Ok(typed) = in_time { typed } else { typed.await };
        typed.map_err(guest_error)?;
        Ok(Answer { value: (), woke_ms })
    }

    async fn terminal_resize(
        &self,
        id: &SandboxId,
        terminal: &str,
        size: TerminalSize,
    ) -> Result<View, ApiError> {
        let terminal = self.terminal(id, terminal)?;
        let link = self.handle(id)?.link().await?;
        terminal.resize(size);
        save(&terminal);
        if !terminal.size_is_being_told() {
            let terminal = Arc::clone(&terminal);
            tokio::spawn(async move {
                // Without a guest it is told when there is one again.
                if let Err(error) = terminal.tell_size(&link).await {
                    tracing::debug!(%error, "a terminal's size was not told");
                }
            });
        }
        Ok(terminal.view(self.handle(id)?.exec_names()))
    }

    async fn terminal_close(&self, id: &SandboxId, terminal: &str) -> Result<Answer<()>, ApiError> {
        let terminal = self.terminal(id, terminal)?;
        if terminal.has_ended() {
            return Ok(Answer { value: (), woke_ms: None });
        }
        let handle = self.handle(id)?;
        let ready = handle.call(Call::of(CallKind::Terminal), "the end of a terminal").await?;
        let hang_up = ready.link.exec_stdin(terminal.id, true).map_err(guest_error)?;
        match hang_up.finish().await {
            Err(GuestError::Failed(failure))
                if matches!(failure.code, FailureCode::Ended | FailureCode::StdinClosed) => {}
            result => drop(result.map_err(guest_error)?),
        }
        // Whatever is left then has had its time.
        let _late = tokio::time::timeout(HANG_UP_TIME, ready.link.exec_wait(terminal.id)).await;
        let kill = rustix::process::Signal::KILL.as_raw();
        ready.link.exec_signal(terminal.id, kill).await.map_err(guest_error)?;
        Ok(Answer { value: (), woke_ms: ready.woke_ms })
    }
}

impl Daemon {
    fn terminal(&self, id: &SandboxId, text: &str) -> Result<Arc<Terminal>, ApiError> {
        self.terminals.find(id, self.handle(id)?.exec_names(), text)
    }
}

/// What to run, and what it is called.
fn program(request: &TerminalRequest) -> (ExecRequest, String) {
    let mut run = ExecRequest {
        argv: request.argv.clone(),
        command: request.command.clone(),
        cwd: request.cwd.clone(),
        env: request.env.clone(),
        user: request.user.clone(),
        ..ExecRequest::default()
    };
    let command = match (&run.argv, &run.command) {
        (Some(argv), _) => argv.join(" "),
        (None, Some(line)) => line.clone(),
        (None, None) => {
            run.argv = Some(LOGIN.map(str::to_owned).to_vec());
            "login shell".to_owned()
        }
    };
    (run, command)
}

fn folder(handle: &Handle) -> PathBuf {
    let dir: &Path = handle.files().dir();
    dir.join("terminals")
}

fn save(terminal: &Arc<Terminal>) {
    let terminal = Arc::clone(terminal);
    tokio::task::spawn_blocking(move || terminal.save());
}
