//! The verbs of a host, each as the control plane asks for it.
//!
//! A verb that needs the guest begins a call, which wakes the sandbox and holds it awake, does its work over the link or the
//! network, and lets the call go with its answer, or with the end of the stream that it answers with.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use api::boxes::Wiring;
use api::checkpoint::Checkpoint;
use api::drive::{AttachDrive, AttachVolume, CreateDrive, Drive, Volume};
use api::exec::{Exec, ExecRequest};
use api::file::{FileInfo, FileKind};
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
use tokio::io::{AsyncRead, AsyncReadExt, AsyncSeekExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{broadcast, mpsc};
use tokio_util::io::StreamReader;

use crate::clock::{Moment, rfc3339};
use crate::daemon::{Daemon, image_error};
use crate::drive_trouble;
use crate::drive_verbs::drive_uses;
use crate::exec;
use crate::exec::guest_error;
use crate::exec_names::ExecNames;
use crate::execs_kept;
use crate::forks::parts_of;
use crate::ground::FREE_BYTES_MIN;
use crate::guest::{
    EntryKind, ExecId, FailureCode, GuestError, GuestLink, Stat, Upload, WriteSpec,
};
use crate::images::Image;
use crate::loopback::Loopback;
use crate::manifest::{Manifest, Policy, State};
use crate::pool::{self, Kind};
use crate::promises::NoRoom;
use crate::record::Record;
use crate::sandbox::body::{Body, make_folder};
use crate::sandbox::work::chain;
use crate::sandbox::{Beginning, CallGuard, Handle, Ready, start};
use crate::settings::Files;
use crate::snapshots::SnapshotError;
use crate::template::Templates;
use crate::timeline::{self, Timeline};
use crate::usage::Used;

/// How long a connection to a guest's port may take to be answered at all.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Pause before a refused port is tried for the second time, which doubles from then on.
const PORT_RETRY_FIRST: Duration = Duration::from_millis(25);
/// Longest pause between two tries: a guest that is busy enough as it is has other things to do than to refuse.
const PORT_RETRY_PAUSE_MAX: Duration = Duration::from_millis(200);

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
        if let Ok(handle) = self.handle(&new.id) {
            handle.started().await?;
            return handle.view().await.map(|known| known.sandbox);
        }
        self.check_spending()?;
        if let Some(wiring) = &new.wiring {
            // The ready copy that was to become it is free again.
            self.ground.services.check(wiring).inspect_err(|_| self.pool.release(&new.id))?;
        }
        if let Some(snapshot) = new.snapshot.clone() {
            return self.create_from_snapshot(new, &snapshot).await;
        }
        let image = self.ground.image(&new.image).map_err(|error| image_error(&error))?;
        let mut policy = Policy::new(self.ground.settings.memory_tier.as_secs());
        policy.apply(&new.policy);
        policy.boxed.clone_from(&new.boxed);
        self.claim_checkpoints(&new.id, new.epoch, &new.policy).await?;
        let (drives, claim) = self.claim_all(&new.id, drive_uses(&new.drives), &new.volumes)?;
        let digest = image.id().as_str().to_owned();
        let size = (new.cpus, new.memory_mib);
        let manifest = |slot| Manifest {
            id: new.id.clone(),
            name: new.name.clone(),
            slot,
            epoch: new.epoch,
            link_key: new.link_key.clone(),
            image: new.image.clone(),
            image_digest: digest.clone(),
            cpus: size.0,
            memory_mib: size.1,
            drives: drives.clone(),
            env: new.env.clone(),
            labels: new.labels.clone(),
            policy: policy.clone(),
            created_at: Moment::now(),
            forked_from: None,
            life: 0,
            needs_identity: true,
            machine: None,
            woke_because: None,
            last_end: None,
            boots: 0,
            moved_to: None,
            used: Used::default(),
            box_use: None,
            note: None,
            wiring: new.wiring.clone(),
            ipv6: None,
            network_at_rest: None,
            state: State::Creating,
            since: Moment::now(),
        };
        let kind = Kind {
            image_digest: digest.clone(),
            cpus: new.cpus,
            memory_mib: new.memory_mib,
            drives: !drives.is_empty(),
        };
        let claimed = self.pool.claim(&new.id, &kind).await;
        if claimed.is_none() {
            self.make_room_for_template(&image, &kind).await;
        }
        let (body, record) = match claimed {
            Some(claimed) => pool::found(claimed, manifest)
                .await
                .map_err(|error| internal("its ready copy could not be claimed", &error))?,
            None => self.found(&new.id, manifest).await?,
        };
        let address = self.ground.subnet.address(body.slot.number());
        let wired = self.ground.services.wire(&new.id, address, new.wiring.clone()).await;
        let handle = self.begin(body, record, "created", "was made")?;
        claim.keep();
        if let Err(error) = wired {
            let error = internal("its names could not be wired", &error);
            return Err(unmade(&handle, error).await);
        }
        let started = handle.started().await;
        if let Err(error) = started {
            return Err(unmade(&handle, error).await);
        }
        handle.view().await.map(|known| known.sandbox)
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
        let told = |error| exec::command_error(&ready.link, exec, error);
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
        Ok(Answer { value: (info, Box::new(Held { inner: bytes, _guard: guard })), woke_ms })
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
        Ok(Answer { value: Box::new(Held { inner: bytes, _guard: guard }), woke_ms })
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

    /// Founds a sandbox: slot, folder, manifest that says "creating".
    pub(crate) async fn found(
        &self,
        id: &SandboxId,
        manifest: impl FnOnce(u32) -> Manifest,
    ) -> Result<(Body, Record), ApiError> {
        let no_room = || ApiError::new(Code::NoCapacity, "all addresses of this host are taken");
        let slot = self.ground.slots.take().ok_or_else(no_room)?;
        let files = Files::in_dir(self.ground.settings.sandboxes_dir().join(id.as_str()));
        let manifest = manifest(slot.number());
        let founded = async {
            make_folder(&files)?;
            Record::create(&files.manifest(), manifest).await.map_err(|error| error.source)
        };
        let record = founded.await.map_err(|error| {
            discard(&files);
            if error.kind() == io::ErrorKind::StorageFull {
                no_space("the host's disk is full")
            } else {
                internal("its folder could not be made", &error)
            }
        })?;
        let body = Body::new(files, slot).map_err(|error| internal("no randomness", &error))?;
        Ok((body, record))
    }

    /// Has ready copies of other kinds make room for a copy of this one's template, if that is there already. Whether there is
    /// room then the sandbox's first start finds out.
    async fn make_room_for_template(&self, image: &Image, kind: &Kind) {
        let ground = &self.ground;
        let Some(template) = Templates::find(ground, image, kind) else { return };
        let parts = template.files.saved_parts();
        let needed =
            crate::promises::bytes_to_copy_all(parts, ground.settings.sandboxes_dir()).await;
        pool::make_room_on_disk(ground, &self.pool, needed.saturating_add(FREE_BYTES_MIN)).await;
    }

    /// Makes a sandbox with the memory, disk and processes of a snapshot.
    async fn create_from_snapshot(&self, new: NewSandbox, name: &str) -> Result<Sandbox, ApiError> {
        let (note, parts) = self.snapshots.get(name).map_err(|error| match error {
            SnapshotError::Missing => {
                ApiError::unprocessable("snapshot", format!("there is no snapshot `{name}`"))
                    .hint("`dormouse snapshots list` shows what there is")
            }
            error => snapshot_error(&error),
        })?;
        let mut policy = Policy::new(self.ground.settings.memory_tier.as_secs());
        policy.apply(&new.policy);
        policy.boxed.clone_from(&new.boxed);
        self.claim_checkpoints(&new.id, new.epoch, &new.policy).await?;
        let mut env = note.of.env.clone();
        env.extend(new.env.clone());
        let manifest = |slot| Manifest {
            id: new.id.clone(),
            name: new.name.clone(),
            slot,
            epoch: new.epoch,
            link_key: new.link_key.clone(),
            env,
            labels: new.labels.clone(),
            policy,
            created_at: Moment::now(),
            life: 0,
            needs_identity: true,
            machine: None,
            woke_because: None,
            last_end: None,
            boots: 0,
            moved_to: None,
            used: Used::default(),
            box_use: None,
            note: None,
            wiring: new.wiring.clone(),
            ipv6: None,
            network_at_rest: None,
            state: State::Creating,
            since: Moment::now(),
            ..note.of.clone()
        };
        let images = note.of.copied_places().into_iter().map(|place| parts.drive(place));
        let copied = [parts.memory(), parts.state(), parts.disk()].into_iter().chain(images);
        let room = self.promise_copies(&copied.collect::<Vec<_>>(), 1).await?;
        let claim = self.claim_volumes(&new.id, &note.of.drives)?;
        let (body, record) = self.found(&new.id, manifest).await?;
        let files = body.files.clone();
        room.is_for(files.dir());
        let copied = async {
            let drives = note.of.copied_places().into_iter();
            let drives = drives.map(|place| (place, parts.drive(place))).collect();
            let copied = crate::sandbox::work::copy_parts(&parts, &files, drives);
            copied.await.map_err(io::Error::other)?;
            let saved = note.saved.clone();
            let change = record.change(|manifest| manifest.state = State::SleepingOnDisk(saved));
            change.await.map_err(io::Error::other)
        };
        if let Err(error) = copied.await {
            discard(&files);
            if self.snapshots.get(name).is_err() {
                let text = format!("the snapshot `{name}` was deleted while it was being copied");
                return Err(ApiError::unprocessable("snapshot", text));
            }
            if crate::sandbox::work::is_full(&error) {
                return Err(no_space("the host's disk has no room for a copy"));
            }
            return Err(internal("the snapshot could not be copied", &error));
        }
        drop(room);
        let text = format!("was made from the snapshot {name} of {}", note.of.name);
        let handle = self.begin(body, record, "created", &text)?;
        claim.keep();
        if let Err(error) = handle.started().await {
            return Err(unmade(&handle, error).await);
        }
        handle.view().await.map(|known| known.sandbox)
    }

    /// A connection to a port of a guest that is awake. A refused port is tried again for a while after a wake or start.
    pub(crate) async fn reach(
        &self,
        ready: &Ready,
        port: u16,
    ) -> Result<Box<dyn Duplex>, ApiError> {
        let patience = self.ground.settings.port_retry.saturating_sub(ready.awake_since.elapsed());
        connect(ready, port, patience).await
    }

    /// Starts the task of a founded sandbox.
    pub(crate) fn begin(
        &self,
        body: Body,
        record: Record,
        kind: &str,
        text: &str,
    ) -> Result<Handle, ApiError> {
        let id = record.with(|manifest| manifest.id.clone());
        let opened = Timeline::open(id.clone(), &body.files.timeline(), self.events.clone());
        let mut timeline =
            opened.map_err(|error| internal("its timeline could not be made", &error))?;
        timeline.add(kind, text, serde_json::Map::new());
        let ground = std::sync::Arc::clone(&self.ground);
        let handle = start(Beginning {
            ground,
            record,
            body,
            timeline,
            found: None,
            gone: self.gone.clone(),
        });
        self.sandboxes_mut().insert(id, handle.clone());
        Ok(handle)
    }
}

impl Ready {
    /// The answer of a call that has done all it wanted.
    fn answer<T>(self, value: T) -> Answer<T> {
        Answer { value, woke_ms: self.woke_ms }
    }
}

/// Connects over the network, else to the guest's loopback, and again while that may help.
async fn connect(
    ready: &Ready,
    port: u16,
    patience: Duration,
) -> Result<Box<dyn Duplex>, ApiError> {
    let address = SocketAddr::from((ready.address, port));
    let begun = Instant::now();
    let mut pause = PORT_RETRY_FIRST;
    loop {
        match tokio::time::timeout(CONNECT_LIMIT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "no delay not set");
                }
                return Ok(Box::new(stream));
            }
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Ok(Err(error)) => {
                tracing::debug!(%address, %error, "port not reached over the network");
            }
            Err(_) => tracing::debug!(%address, "port did not answer over the network"),
        }
        match ready.link.connect_port(port).await {
            Ok(stream) => return Ok(Box::new(Loopback::new(stream, ready.guard.flow()))),
            Err(GuestError::Failed(failure)) if failure.code == FailureCode::Refused => {}
            Err(error) => return Err(guest_error(error)),
        }
        if begun.elapsed() >= patience {
            let error = ApiError::new(
                Code::PortClosed,
                format!("nothing listens on port {port} in the sandbox"),
            );
            return Err(
                error.hint("start the server first; it may listen on any address, 127.0.0.1 too")
            );
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PORT_RETRY_PAUSE_MAX);
    }
}

/// The command that a name means in the guest of now.
fn exec_of(names: ExecNames, exec_id: &str, link: &GuestLink) -> Result<ExecId, ApiError> {
    let boot = link.hello().map(|hello| hello.boot);
    names.in_boot(exec_id, boot).ok_or_else(|| exec::unknown_exec(exec_id))
}

async fn stat(link: &GuestLink, path: &str) -> Result<FileInfo, ApiError> {
    let stat = link.file_stat(path).await.map_err(guest_error)?;
    Ok(file_info(path, &stat))
}

fn file_info(path: &str, stat: &Stat) -> FileInfo {
    FileInfo {
        path: path.to_owned(),
        kind: match stat.kind {
            EntryKind::File => FileKind::File,
            EntryKind::Directory => FileKind::Directory,
            EntryKind::Symlink => FileKind::Symlink,
            EntryKind::Other => FileKind::Other,
        },
        size: stat.size,
        mode: stat.mode,
        uid: stat.uid,
        gid: stat.gid,
        modified_at: rfc3339(u64::try_from(stat.modified_ms).unwrap_or(0)),
        target: stat.target.as_ref().map(|target| String::from_utf8_lossy(target).into_owned()),
    }
}

/// Sends a whole stream to the guest. A client that breaks off leaves nothing behind: the upload is not finished.
async fn upload(
    upload: Result<Upload, GuestError>,
    body: Box<dyn AsyncRead + Send + Unpin>,
) -> Result<(), ApiError> {
    let mut upload = upload.map_err(guest_error)?;
    match upload.copy_from(body).await {
        Ok(sent) => sent.map_err(guest_error)?,
        Err(error) => {
            return Err(ApiError::invalid("body", format!("the body broke off: {error}")));
        }
    }
    upload.finish().await.map(drop).map_err(guest_error)
}

/// Keeps the sandbox awake while somebody reads.
struct Held<R> {
    inner: R,
    _guard: CallGuard,
}

impl<R: AsyncRead + Unpin> AsyncRead for Held<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

/// The end of a file; nothing where there is none.
async fn tail(path: PathBuf, max_bytes: u64) -> io::Result<Bytes> {
    let mut file = match tokio::fs::File::open(&path).await {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Bytes::new()),
        Err(error) => return Err(error),
    };
    let length = file.metadata().await?.len();
    file.seek(io::SeekFrom::Start(length.saturating_sub(max_bytes))).await?;
    let mut bytes = Vec::new();
    file.take(max_bytes).read_to_end(&mut bytes).await?;
    Ok(bytes.into())
}

/// Removes a sandbox whose first start did not succeed: who asked is told that there is none, so there must be none.
pub(crate) async fn unmade(handle: &Handle, error: ApiError) -> ApiError {
    let seen = handle.view().await.ok().map(|known| known.sandbox);
    let drives = handle.manifest().drives;
    if let Err(error) = handle.delete().await {
        return error;
    }
    let Some(failure) = seen.as_ref().and_then(|sandbox| sandbox.failure.clone()) else {
        return error;
    };
    let text = format!("the sandbox could not be made: {failure}");
    match seen.and_then(|sandbox| sandbox.failure_code).as_deref() {
        Some("no_capacity") => ApiError::new(Code::NoCapacity, text),
        Some("disk_full") => no_space(text),
        Some("drive_unusable") => drive_trouble::error(text, &drives),
        _ => ApiError::new(Code::Internal, text),
    }
}

/// Removes the folder of a sandbox that never was.
pub(crate) fn discard(files: &Files) {
    if let Err(error) = std::fs::remove_dir_all(files.dir())
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::error!(dir = %files.dir().display(), %error, "folder of an unmade sandbox not removed");
    }
}

fn snapshot_error(error: &SnapshotError) -> ApiError {
    match error {
        SnapshotError::Missing => ApiError::new(Code::NotFound, error.to_string())
            .hint("`dormouse snapshots list` shows what there is"),
        SnapshotError::Taken => ApiError {
            field: Some("name".to_owned()),
            ..ApiError::new(Code::NameTaken, error.to_string())
        },
        SnapshotError::File(_, source) if source.kind() == io::ErrorKind::StorageFull => {
            no_space("the host's disk is full")
        }
        SnapshotError::Format(_) | SnapshotError::File(..) => {
            internal("the snapshot cannot be used", error)
        }
    }
}

/// The host's disk has no room: later it may have some.
pub(crate) fn no_space(text: impl Into<String>) -> ApiError {
    let mut error = ApiError::new(Code::NoSpace, text);
    error.retryable = true;
    error.hint("make room on the host: `dormouse doctor` tells how much is free")
}

/// What this is for would leave too little beside what is promised to others.
pub(crate) fn no_room(what: &str, error: &NoRoom) -> ApiError {
    match error {
        NoRoom::Unknown(source) => internal("free space is not known", source),
        NoRoom::Short { .. } => {
            no_space(format!("the host's disk has no room for {what}: {error}"))
        }
    }
}

/// A fault of ours: the client learns that it is one, the log what it is.
pub(crate) fn internal(text: &str, error: &(dyn std::error::Error + 'static)) -> ApiError {
    tracing::error!(error = chain(error), "{text}");
    ApiError::new(Code::Internal, text)
}
