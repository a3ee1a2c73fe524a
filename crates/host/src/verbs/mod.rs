//! The verbs of a host, each as the control plane asks for it.
//!
//! A verb that needs the guest begins a call, which wakes the sandbox and holds it awake, does its work over the link or the
//! network, and lets the call go with its answer, or with the end of the stream that it answers with.

mod create;
mod drives;
mod errors;
mod files;
mod reach;
mod volumes;

use std::io;
use std::time::Duration;

use api::boxes::Wiring;
use api::checkpoint::Checkpoint;
use api::drive::{AttachDrive, AttachVolume, CreateDrive, Drive, Volume};
use api::exec::{Exec, ExecRequest};
use api::file::FileInfo;
use api::host::{
    Answer, Caller, Change, Connection, ConnectionRules, Duplex, Hold, HoldKind, Host, Known, Log,
    NewFork, NewSandbox, OutputEvent, OutputFrom, SleepFor,
};
use api::sandbox::{Sandbox, SleepTier};
use api::snapshot::Snapshot;
use api::usage::Usage;
use api::{ApiError, Code, Event, SandboxId};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use lifecycle::{Call, CallKind};
use tokio::io::AsyncRead;
use tokio::sync::{broadcast, mpsc};
use tokio_util::io::StreamReader;

use crate::daemon::Daemon;
use crate::exec;
use crate::exec::guest_error;
use crate::exec_names::ExecNames;
use crate::execs_kept;
use crate::forks::parts_of;
use crate::guest::{ExecId, GuestLink, WriteSpec};
use crate::manifest::Manifest;
use crate::pool::Kind;
use crate::sandbox::{CallGuard, Ready};
use crate::timeline;

pub(crate) use self::create::{discard, unmade};
use self::errors::snapshot_error;
pub(crate) use self::errors::{internal, no_room, no_space};
use self::files::{Held, file_info, stat, tail, upload};

/// Entries of a folder that one list answers with.
const LIST_MAX: usize = 100_000;

#[async_trait]
impl Host for Daemon {
    fn name(&self) -> &str {
        &self.ground.settings.name
    }

    async fn list(&self) -> Vec<Known> {
        let views = self.handles().into_iter().map(|handle| async move { handle.view().await });
        // One that goes away meanwhile is not in the list.
        futures_util::future::join_all(views).await.into_iter().flatten().collect()
    }

    async fn view(&self, id: &SandboxId) -> Result<Known, ApiError> {
        let viewed = self.handle(id)?.view().await;
        // Its end may not be noted yet.
        viewed.map_err(|error| if error.code == Code::NotFound { self.unknown(id) } else { error })
    }

    fn reserve(&self, kind: &api::host::Kind) -> Option<SandboxId> {
        let image = self.ground.image(&kind.image).ok()?;
        self.pool.reserve(&Kind {
            image_digest: image.id().as_str().to_owned(),
            cpus: kind.cpus,
            memory_mib: kind.memory_mib,
            drives: false,
        })
    }

    fn ready_copies(&self) -> usize {
        self.pool.ready()
    }

    fn release(&self, id: &SandboxId) {
        self.pool.release(id);
    }

    async fn close(&self) {
        self.pool.close().await;
    }

    async fn create(&self, new: NewSandbox) -> Result<Sandbox, ApiError> {
        self.create_new(new).await
    }

    async fn fork(&self, parent: &SandboxId, new: Vec<NewFork>) -> Result<Vec<Sandbox>, ApiError> {
        self.fork_all(parent, &new).await
    }

    async fn snapshot_take(&self, id: &SandboxId, name: &str) -> Result<Snapshot, ApiError> {
        let handle = self.handle(id)?;
        let room = self.promise_copies(&parts_of(&self.ground, &handle), 1).await?;
        let draft = self.snapshots.draft(id, name).map_err(|error| snapshot_error(&error))?;
        room.is_for(draft.dir());
        let taken = async {
            handle.capture(draft.clone()).await?;
            let of = handle.manifest();
            let of = Manifest { drives: of.copied_drives(), ..of };
            let saved = crate::sandbox::work::read_capture(&draft)
                .map_err(|error| internal("the snapshot's copy could not be read", &error))?;
            self.snapshots.publish(&draft, name, of, saved).map_err(|error| snapshot_error(&error))
        };
        let taken = taken.await;
        if taken.is_err() {
            discard(&draft);
        }
        drop(room);
        taken
    }

    async fn snapshots(&self) -> Result<Vec<Snapshot>, ApiError> {
        self.snapshots.list().map_err(|error| snapshot_error(&error))
    }

    async fn snapshot_view(&self, name: &str) -> Result<Snapshot, ApiError> {
        self.snapshots.view(name).map_err(|error| snapshot_error(&error))
    }

    async fn snapshot_delete(&self, name: &str) -> Result<(), ApiError> {
        self.snapshots.delete(name).map_err(|error| snapshot_error(&error))
    }

    async fn drive_create(&self, new: CreateDrive) -> Result<Drive, ApiError> {
        self.make_drive(new).await
    }

    async fn drives(&self) -> Result<Vec<Drive>, ApiError> {
        self.all_drives()
    }

    async fn drive_view(&self, name: &str) -> Result<Drive, ApiError> {
        self.one_drive(name)
    }

    async fn drive_delete(&self, name: &str) -> Result<(), ApiError> {
        self.remove_drive(name)
    }

    async fn volume_create(
        &self,
        name: &str,
        archive: Box<dyn AsyncRead + Send + Unpin>,
    ) -> Result<Volume, ApiError> {
        self.make_volume(name, archive).await
    }

    async fn volumes(&self) -> Result<Vec<Volume>, ApiError> {
        self.all_volumes()
    }

    async fn volume_view(&self, name: &str) -> Result<Volume, ApiError> {
        self.one_volume(name)
    }

    async fn volume_delete(&self, name: &str) -> Result<(), ApiError> {
        self.remove_volume(name)
    }

    async fn checkpoints(&self) -> Result<Vec<Checkpoint>, ApiError> {
        self.list_checkpoints().await
    }

    async fn checkpoint_restore(&self, id: &SandboxId) -> Result<Known, ApiError> {
        self.restore_checkpoint(id).await
    }

    async fn update(&self, id: &SandboxId, change: Change) -> Result<Sandbox, ApiError> {
        let handle = self.handle(id)?;
        let epoch = handle.record().with(|manifest| manifest.epoch);
        self.claim_checkpoints(id, epoch, &change.policy).await?;
        handle.update(change).await?;
        handle.view().await.map(|known| known.sandbox)
    }

    fn leave(&self) {
        for handle in self.handles() {
            handle.leave();
        }
    }

    fn limit_spending(&self, reached: bool) {
        self.ground.spending.send_if_modified(|was| std::mem::replace(was, reached) != reached);
    }

    fn limit_box(&self, id: &SandboxId, reached: bool) {
        if let Ok(handle) = self.handle(id) {
            handle.limit(reached);
        }
    }

    fn external(&self, id: &SandboxId) -> Result<Box<dyn Duplex>, ApiError> {
        let connection = self.ground.services.external(self.handle(id)?.address);
        let connection = connection
            .ok_or_else(|| ApiError::new(Code::PortClosed, "this box has no external base"))?;
        Ok(Box::new(connection))
    }

    async fn wire(&self, id: &SandboxId, wiring: Wiring) -> Result<(), ApiError> {
        let handle = self.handle(id)?;
        self.ground.services.check(&wiring)?;
        let kept = wiring.clone();
        let changed = handle.record().change(move |manifest| manifest.wiring = Some(kept)).await;
        changed.map_err(|error| internal("its wiring could not be stored", &error))?;
        let ways = crate::services::loopback(&wiring);
        let wired = self.ground.services.wire(id, handle.address, Some(wiring)).await;
        wired.map_err(|error| internal("its names could not be wired", &error))?;
        let ready = handle.call(Call::of(CallKind::Tool), "its wiring").await?;
        ready.link.lead_loopback(&ways).await.map_err(guest_error)?;
        Ok(())
    }

    async fn restore(&self, id: &SandboxId) -> Result<(), ApiError> {
        self.handle(id)?.restore().await
    }

    async fn usage(&self, id: &SandboxId) -> Result<Usage, ApiError> {
        let record = self.handle(id)?.record().clone();
        let used = tokio::task::spawn_blocking(move || record.usage()).await;
        used.map_err(|error| internal("its usage could not be read", &error))
    }

    async fn sleep(
        &self,
        id: &SandboxId,
        tier: Option<SleepTier>,
        why: SleepFor,
    ) -> Result<Sandbox, ApiError> {
        if matches!(tier, Some(SleepTier::Store | SleepTier::Off)) {
            return Err(ApiError::invalid("tier", "`tier` must be `memory` or `disk`"));
        }
        let handle = self.handle(id)?;
        let cause = match why {
            SleepFor::Asked => lifecycle::SleepCause::Asked,
            SleepFor::Drain => lifecycle::SleepCause::Drain,
        };
        handle.sleep(tier, cause).await?;
        handle.view().await.map(|known| known.sandbox)
    }

    async fn restart(
        &self,
        id: &SandboxId,
        drives: Option<Vec<AttachDrive>>,
        volumes: Option<Vec<AttachVolume>>,
    ) -> Result<Sandbox, ApiError> {
        let handle = self.handle(id)?;
        if drives.is_none() && volumes.is_none() {
            handle.restart().await?;
        } else {
            self.restart_with(&handle, drives, volumes).await?;
        }
        handle.view().await.map(|known| known.sandbox)
    }

    async fn delete(&self, id: &SandboxId) -> Result<(), ApiError> {
        let Ok(handle) = self.handle(id) else { return Ok(()) };
        handle.delete().await?;
        self.sandboxes_mut().remove(id);
        self.terminals.remove(id);
        Ok(())
    }

    async fn delete_idle(&self, id: &SandboxId, asleep_at_least_ms: u64) -> Result<bool, ApiError> {
        let Ok(handle) = self.handle(id) else { return Ok(true) };
        let deleted = handle.delete_idle(asleep_at_least_ms).await?;
        if deleted {
            self.sandboxes_mut().remove(id);
            self.terminals.remove(id);
        }
        Ok(deleted)
    }

    async fn events(
        &self,
        id: &SandboxId,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Event>, ApiError> {
        let path = self.handle(id)?.files().timeline();
        let read = tokio::task::spawn_blocking(move || timeline::read(&path, after, limit)).await;
        read.map_err(io::Error::other)
            .and_then(|read| read)
            .map_err(|error| internal("its events could not be read", &error))
    }

    fn watch(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    async fn log(&self, id: &SandboxId, log: Log, max_bytes: u64) -> Result<Bytes, ApiError> {
        let handle = self.handle(id)?;
        let unread = |error: io::Error| internal("its log could not be read", &error);
        let files = handle.files();
        match log {
            Log::Console => tail(files.console(), max_bytes).await.map_err(unread),
            Log::Daemon => {
                // QEMU's own words, which are few, belong to what the daemon did.
                let daemon = tail(files.daemon_log(), max_bytes).await.map_err(unread)?;
                let qemu = tail(files.qemu_log(), max_bytes.saturating_sub(daemon.len() as u64))
                    .await
                    .map_err(unread)?;
                Ok([daemon, qemu].concat().into())
            }
        }
    }

    async fn hold(
        &self,
        id: &SandboxId,
        kind: HoldKind,
        caller: Caller,
    ) -> Result<Answer<Box<dyn Hold>>, ApiError> {
        let kind = match kind {
            HoldKind::Request => CallKind::EdgeRequest,
            HoldKind::AwakeConnection => CallKind::AwakeConnection,
            HoldKind::Tool => CallKind::Tool,
            HoldKind::Link => CallKind::Link,
        };
        let ready = self.handle(id)?.call(Call::of(kind), caller.what).await?;
        Ok(Answer { woke_ms: ready.woke_ms, value: Box::new(ready.guard) })
    }

    fn connection_rules(&self, id: &SandboxId, port: u16) -> Result<ConnectionRules, ApiError> {
        Ok(self.handle(id)?.record().with(|manifest| ConnectionRules {
            keeps_awake: manifest.policy.awake_ports.contains(&port),
            idle: manifest.policy.connection_idle_seconds.map(Duration::from_secs),
        }))
    }

    async fn connect(
        &self,
        id: &SandboxId,
        port: u16,
        caller: Caller,
    ) -> Result<Answer<Connection>, ApiError> {
        let ready =
            self.handle(id)?.call(Call::to_port(CallKind::EdgeRequest, port), caller.what).await?;
        let stream = self.reach(&ready, port).await?;
        Ok(Answer { woke_ms: ready.woke_ms, value: Connection { stream, life: ready.life } })
    }

    async fn exec_start(
        &self,
        id: &SandboxId,
        request: ExecRequest,
    ) -> Result<Answer<Exec>, ApiError> {
        // Checked before anybody is woken for nothing.
        exec::spec(&request, &std::collections::BTreeMap::new())?;
        let handle = self.handle(id)?;
        let _turn = handle.turn_to_start().await;
        // Starting is a short call; waiting for the result is one of its own.
        let ready = handle.call(Call::of(CallKind::Api), "a command").await?;
        let started = exec::start(&ready.link, handle.exec_names(), &request, &ready.env)
            .await
            .map_err(exec::start_error)?;
        // Of one that is waited for the call tells.
        if request.background {
            handle.command_started();
        }
        Ok(ready.answer(started))
    }

    async fn exec_list(&self, id: &SandboxId) -> Result<Answer<Vec<Exec>>, ApiError> {
        let handle = self.handle(id)?;
        if let Some(execs) = execs_kept::undisturbed(&handle).await? {
            return Ok(Answer { value: execs, woke_ms: None });
        }
        let ready = self.call(id, CallKind::Api, "a list of its commands").await?;
        let execs = ready.link.exec_list().await.map_err(guest_error)?;
        Ok(ready.answer(exec::asked_for(&execs, handle.exec_names()).collect()))
    }

    async fn exec_view(&self, id: &SandboxId, exec_id: &str) -> Result<Answer<Exec>, ApiError> {
        let handle = self.handle(id)?;
        let names = handle.exec_names();
        let meant = names.meant(exec_id);
        if meant.is_empty() {
            return Err(exec::unknown_exec(exec_id));
        }
        if let Some(execs) = execs_kept::undisturbed(&handle).await? {
            // Written down by an earlier version they may have another name.
            let is_it =
                |exec: &Exec| names.meant(&exec.exec_id).iter().any(|id| meant.contains(id));
            let found = execs.into_iter().find(is_it);
            let found = found.ok_or_else(|| exec::unknown_exec(exec_id))?;
            return Ok(Answer { value: found, woke_ms: None });
        }
        let ready = self.call(id, CallKind::Api, "a question about a command").await?;
        let execs = ready.link.exec_list().await.map_err(guest_error)?;
        let found = execs.iter().find(|info| meant.contains(&info.id));
        let found = found.map(|info| exec::exec(info, names));
        found.map(|found| ready.answer(found)).ok_or_else(|| exec::unknown_exec(exec_id))
    }

    async fn exec_output(
        &self,
        id: &SandboxId,
        exec_id: &str,
        from: OutputFrom,
    ) -> Result<Answer<mpsc::Receiver<Result<OutputEvent, ApiError>>>, ApiError> {
        let names = self.exec_names(id, exec_id)?;
        let kind = if from.hold { CallKind::Exec } else { CallKind::Api };
        let ready = self.call(id, kind, "a command's output").await?;
        let exec = exec_of(names, exec_id, &ready.link)?;
        let Ready { link, guard, woke_ms, .. } = ready;
        // An open output stream alone does not hold it awake (S2); whoever waits for the result does.
        let guard: Option<CallGuard> = from.hold.then_some(guard);
        let link = if from.hold { link } else { link.patient() };
        let receiver = exec::output(link, exec, from, guard)?;
        Ok(Answer { value: receiver, woke_ms })
    }

    async fn exec_stdin(
        &self,
        id: &SandboxId,
        exec_id: &str,
        bytes: Bytes,
        close: bool,
    ) -> Result<Answer<()>, ApiError> {
        let names = self.exec_names(id, exec_id)?;
        let ready = self.call(id, CallKind::Api, "input for a command").await?;
        let exec = exec_of(names, exec_id, &ready.link)?;
        let told = |error| exec::stdin_error(&ready.link, exec, exec_id, error);
        let mut stdin = ready.link.exec_stdin(exec, close).map_err(told)?;
        stdin.write(&bytes).await.map_err(told)?;
        stdin.finish().await.map_err(told)?;
        Ok(ready.answer(()))
    }

    async fn exec_signal(
        &self,
        id: &SandboxId,
        exec_id: &str,
        signal: i32,
    ) -> Result<Answer<()>, ApiError> {
        let names = self.exec_names(id, exec_id)?;
        let ready = self.call(id, CallKind::Api, "a signal for a command").await?;
        let exec = exec_of(names, exec_id, &ready.link)?;
        let told = |error| exec::command_error(&ready.link, exec, error);
        ready.link.exec_signal(exec, signal).await.map_err(told)?;
        Ok(ready.answer(()))
    }

    async fn file_read(
        &self,
        id: &SandboxId,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<Answer<(FileInfo, Box<dyn AsyncRead + Send + Unpin>)>, ApiError> {
        let ready = self.call(id, CallKind::Files, "a file read").await?;
        let file = ready.link.file_read(path, offset, length).await.map_err(guest_error)?;
        let info = file_info(path, &file.stat);
        let bytes = StreamReader::new(file.download.map_err(io::Error::from));
        let Ready { guard, woke_ms, .. } = ready;
        Ok(Answer { value: (info, Box::new(Held::new(bytes, guard))), woke_ms })
    }

    async fn file_write(
        &self,
        id: &SandboxId,
        path: &str,
        mode: Option<u32>,
        body: Box<dyn AsyncRead + Send + Unpin>,
    ) -> Result<Answer<FileInfo>, ApiError> {
        let ready = self.call(id, CallKind::Files, "a file write").await?;
        let spec = WriteSpec { path: path.as_bytes().to_vec(), mode, parents: true };
        upload(ready.link.file_write(spec), body).await?;
        let stat = ready.link.file_stat(path).await.map_err(guest_error)?;
        Ok(ready.answer(file_info(path, &stat)))
    }

    async fn file_stat(&self, id: &SandboxId, path: &str) -> Result<Answer<FileInfo>, ApiError> {
        let ready = self.call(id, CallKind::Files, "a look at a file").await?;
        let info = stat(&ready.link, path).await?;
        Ok(ready.answer(info))
    }

    async fn file_list(
        &self,
        id: &SandboxId,
        path: &str,
    ) -> Result<Answer<Vec<FileInfo>>, ApiError> {
        let ready = self.call(id, CallKind::Files, "a list of files").await?;
        let mut listing = ready.link.file_list(path).map_err(guest_error)?;
        let mut files = Vec::new();
        while let Some(entries) = listing.next().await {
            for entry in entries.map_err(guest_error)? {
                if files.len() >= LIST_MAX {
                    let error = ApiError::new(
                        Code::TooLarge,
                        format!("the folder has more than {LIST_MAX} entries"),
                    );
                    return Err(error.hint("list it with a command, such as `ls | head`"));
                }
                let name = String::from_utf8_lossy(&entry.name);
                files.push(file_info(
                    &format!("{}/{name}", path.trim_end_matches('/')),
                    &entry.stat,
                ));
            }
        }
        Ok(ready.answer(files))
    }

    async fn file_mkdir(&self, id: &SandboxId, path: &str) -> Result<Answer<FileInfo>, ApiError> {
        let ready = self.call(id, CallKind::Files, "a new folder").await?;
        ready.link.file_mkdir(path, true).await.map_err(guest_error)?;
        let info = stat(&ready.link, path).await?;
        Ok(ready.answer(info))
    }

    async fn file_move(
        &self,
        id: &SandboxId,
        from: &str,
        to: &str,
    ) -> Result<Answer<FileInfo>, ApiError> {
        let ready = self.call(id, CallKind::Files, "a file's move").await?;
        ready.link.file_rename(from, to).await.map_err(guest_error)?;
        let info = stat(&ready.link, to).await?;
        Ok(ready.answer(info))
    }

    async fn file_remove(&self, id: &SandboxId, path: &str) -> Result<Answer<()>, ApiError> {
        let ready = self.call(id, CallKind::Files, "a file's removal").await?;
        ready.link.file_remove(path, true).await.map_err(guest_error)?;
        Ok(ready.answer(()))
    }

    async fn tree_read(
        &self,
        id: &SandboxId,
        path: &str,
    ) -> Result<Answer<Box<dyn AsyncRead + Send + Unpin>>, ApiError> {
        let ready = self.call(id, CallKind::Files, "a copy of its files").await?;
        // Asked first, so that a path that does not exist is an answer and not a broken stream.
        stat(&ready.link, path).await?;
        let mut download = ready.link.tree_read(path).map_err(guest_error)?;
        // And its first piece, so that what is no folder is one too.
        let first = download.try_next().await.map_err(guest_error)?;
        let download = stream::iter(first.map(Ok)).chain(download);
        let bytes = StreamReader::new(download.map_err(io::Error::from));
        let Ready { guard, woke_ms, .. } = ready;
        Ok(Answer { value: Box::new(Held::new(bytes, guard)), woke_ms })
    }

    async fn tree_write(
        &self,
        id: &SandboxId,
        path: &str,
        body: Box<dyn AsyncRead + Send + Unpin>,
    ) -> Result<Answer<()>, ApiError> {
        let ready = self.call(id, CallKind::Files, "files copied into it").await?;
        upload(ready.link.tree_write(path), body).await?;
        Ok(ready.answer(()))
    }
}

impl Daemon {
    /// How a sandbox calls its commands. What can be the name of none is refused before anybody is woken for it.
    fn exec_names(&self, id: &SandboxId, exec_id: &str) -> Result<ExecNames, ApiError> {
        let names = self.handle(id)?.exec_names();
        if names.meant(exec_id).is_empty() {
            return Err(exec::unknown_exec(exec_id));
        }
        Ok(names)
    }

    async fn call(&self, id: &SandboxId, kind: CallKind, what: &str) -> Result<Ready, ApiError> {
        self.handle(id)?.call(Call::of(kind), what).await
    }
}

impl Ready {
    /// The answer of a call that has done all it wanted.
    fn answer<T>(self, value: T) -> Answer<T> {
        Answer { value, woke_ms: self.woke_ms }
    }
}

/// The command that a name means in the guest of now.
fn exec_of(names: ExecNames, exec_id: &str, link: &GuestLink) -> Result<ExecId, ApiError> {
    let boot = link.hello().map(|hello| hello.boot);
    names.in_boot(exec_id, boot).ok_or_else(|| exec::unknown_exec(exec_id))
}
