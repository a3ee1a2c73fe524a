//! The verbs about checkpoints: who may have them, which there are, and taking up a sandbox whose host is lost.

use std::sync::Arc;

use api::checkpoint::Checkpoint;
use api::host::Known;
use api::sandbox::PolicyPatch;
use api::{ApiError, Code, SandboxId};
use lifecycle::{Call, CallKind, Recovered, SleepCause, Tier};
use serde_json::{Map, json};

use crate::checkpoints::{self, Found, List, Store, StoreError};
use crate::clock::{Moment, rfc3339};
use crate::daemon::Daemon;
use crate::manifest::{BoxUse, DriveKind, Manifest, State};
use crate::sandbox::work::{chain, without_paths};
use crate::sandbox::{Beginning, Handle, start};
use crate::timeline::Timeline;
use crate::verbs::{discard, internal};

/// How often a checkpoint is looked for anew when its owner has replaced it while it was read.
const READS_MAX: u32 = 3;

impl Daemon {
    /// Makes sure that checkpoints of this sandbox, if they are asked for, can be kept and are this host's to keep (S20).
    pub(crate) async fn claim_checkpoints(
        &self,
        id: &SandboxId,
        epoch: i64,
        asked: &PolicyPatch,
    ) -> Result<(), ApiError> {
        let Some(Some(_)) = asked.checkpoint else { return Ok(()) };
        let store = self.store()?;
        let claimed = checkpoints::claim(&store, &self.ground.host, id, epoch).await;
        claimed.map_err(|error| store_error(&error))
    }

    /// The newest checkpoint of each sandbox in the store.
    pub(crate) async fn list_checkpoints(&self) -> Result<Vec<Checkpoint>, ApiError> {
        let found =
            checkpoints::list(&*self.store()?).await.map_err(|error| store_error(&error))?;
        Ok(found.into_iter().map(|found| self.told(found)).collect())
    }

    /// Takes up a sandbox from its newest checkpoint, with processes and all.
    pub(crate) async fn restore_checkpoint(&self, id: &SandboxId) -> Result<Known, ApiError> {
        let store = self.store()?;
        self.check_spending()?;
        if self.handle(id).is_ok() {
            let error =
                ApiError::new(Code::Exists, format!("this host has the sandbox `{id}` already"));
            return Err(error.hint("it is as it is; a checkpoint is for when its host is lost"));
        }
        let (found, list) = newest(&store, id).await?;
        self.check_fit(&list)?;
        self.check_drives_free(id, &list)?;
        let room = self.promise_room(list.bytes(), "the checkpoint").await?;
        let epoch = found.owned_epoch + 1;
        let manifest = |slot| Manifest {
            slot,
            epoch,
            needs_identity: true,
            machine: None,
            moved_to: None,
            woke_because: None,
            last_end: None,
            // A box that was awake has been used just now: it is not stopped for the time for which it had no host.
            box_use: match &list.of.box_use {
                Some(uses) if !list.asleep => {
                    Some(BoxUse { last_used: Moment::now(), ..uses.clone() })
                }
                uses => uses.clone(),
            },
            state: State::Creating,
            since: Moment::now(),
            ..list.of.clone()
        };
        let (mut body, record) = self.found(id, manifest).await?;
        let files = body.files.clone();
        room.is_for(files.dir());
        // Claimed only when all of it is here: until then its owner, if it lives, has it.
        let fetched = async {
            let fetched = self.fetch(&store, found, list.clone(), &files).await?;
            let claimed = checkpoints::claim(&store, &self.ground.host, id, epoch).await;
            claimed.map(|()| fetched).map_err(|error| store_error(&error))
        };
        let (found, list) = match fetched.await {
            Ok(fetched) => fetched,
            Err(error) => {
                discard(&files);
                return Err(error);
            }
        };
        drop(room);
        // What is its own from now on is in place before anything says that it is there.
        for (place, drive) in list.of.drives.iter().enumerate() {
            if drive.kind != DriveKind::Drive {
                continue;
            }
            let adopted = self.ground.drives.adopt(&drive.name, &files.drive(place), id);
            if let Err(error) = adopted {
                discard(&files);
                return Err(self.drive_error("name", &drive.name, &error));
            }
        }
        self.ground.drives.settle(id, &list.of.drives);
        let saved = list.saved.clone();
        let slept_at = saved.slept_at.clone();
        let timer_due = saved.timer_due.clone();
        let change = record.change(|manifest| {
            manifest.since = slept_at.clone();
            manifest.state = State::SleepingOnDisk(saved);
        });
        if let Err(error) = change.await {
            discard(&files);
            self.ground.drives.settle(id, &[]);
            return Err(internal("the sandbox could not be written", &error));
        }
        let address = self.ground.subnet.address(body.slot.number());
        if let Err(error) = self.ground.services.wire(id, address, list.of.wiring.clone()).await {
            tracing::error!(sandbox = %id, %error, "its names are not wired");
        }
        // Asleep it is woken by packets too.
        if let Err(error) = body.ensure_port(&self.ground) {
            tracing::error!(sandbox = %id, %error, "no tap; it cannot be woken by packets");
        }
        let opened = Timeline::open(id.clone(), &files.timeline(), self.events.clone());
        let mut timeline =
            opened.map_err(|error| internal("its timeline could not be made", &error))?;
        let at = rfc3339(slept_at.unix_ms);
        let mut data = Map::new();
        data.insert("with_processes".to_owned(), json!(true));
        data.insert("from_host".to_owned(), json!(found.latest.host));
        data.insert("taken_at".to_owned(), json!(at));
        data.insert("behind_seconds".to_owned(), json!(slept_at.elapsed().as_secs()));
        let text = format!(
            "was moved here from {}, processes and all, as it was at {at}",
            found.latest.host
        );
        timeline.add("moved", text, data);
        let asleep = Recovered::Asleep {
            tier: Tier::Disk,
            since: slept_at.time(),
            cause: SleepCause::Idle,
            timer_due: timer_due.map(|due| due.time()),
        };
        let handle = start(Beginning {
            ground: Arc::clone(&self.ground),
            record,
            body,
            timeline,
            found: Some((asleep, None)),
            gone: self.gone.clone(),
        });
        self.sandboxes_mut().insert(id.clone(), handle.clone());
        if !list.asleep {
            go_on(&handle).await?;
        }
        handle.view().await
    }

    fn store(&self) -> Result<Arc<Store>, ApiError> {
        self.ground.store.clone().ok_or_else(|| {
            let text = "this host has no store in which checkpoints are kept";
            ApiError::new(Code::CheckpointsUnavailable, text)
                .hint("start the daemon with `--store file:///…`")
        })
    }

    /// Whether what was saved there can be loaded here.
    fn check_fit(&self, list: &List) -> Result<(), ApiError> {
        let of = &list.of;
        let unfit = |why: String| {
            ApiError::new(Code::CheckpointUnusable, format!("this host cannot take it up: {why}"))
        };
        self.ground.image_by_digest(&of.image_digest).map_err(|error| {
            unfit(format!(
                "it has not the image {} ({})",
                of.image_digest,
                without_paths(&chain(&error))
            ))
            .hint("copy the image's folder from a host that has it")
        })?;
        let here = self.ground.fingerprint(of.cpus, of.memory_mib, !of.drives.is_empty());
        list.saved.machine.compatible(&here).map_err(|mismatch| {
            unfit(chain(&mismatch)).hint("use a host with the same QEMU and processor")
        })
    }

    /// Whether the names of its drives can be had here.
    fn check_drives_free(&self, id: &SandboxId, list: &List) -> Result<(), ApiError> {
        let own = list.of.drives.iter().filter(|drive| drive.kind == DriveKind::Drive);
        for drive in own {
            let free = self.ground.drives.can_adopt(&drive.name, id);
            free.map_err(|error| self.drive_error("name", &drive.name, &error))?;
        }
        Ok(())
    }

    /// Brings the files here. The old owner, if it lives, may replace the checkpoint meanwhile: then the newer one is brought.
    async fn fetch(
        &self,
        store: &Arc<Store>,
        mut found: Found,
        mut list: List,
        files: &crate::settings::Files,
    ) -> Result<(Found, List), ApiError> {
        let mut reads = 1;
        loop {
            match checkpoints::fetch(store, &found, &list, files).await {
                Ok(()) => return Ok((found, list)),
                Err(StoreError::Missing) if reads < READS_MAX => reads += 1,
                Err(error) => return Err(store_error(&error)),
            }
            for path in checkpoints::part_files(&list.of, files) {
                match std::fs::remove_file(&path) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(internal("what was fetched could not be removed", &error));
                    }
                    _ => {}
                }
            }
            (found, list) = newest(store, &found.latest.id).await?;
        }
    }

    fn told(&self, found: Found) -> Checkpoint {
        let latest = found.latest;
        Checkpoint {
            here: self.handle(&latest.id).is_ok(),
            id: latest.id,
            name: latest.name,
            host: latest.host,
            taken_at: rfc3339(latest.taken_at.unix_ms),
            asleep: latest.asleep,
            image: latest.image,
            cpus: latest.cpus,
            memory_mib: latest.memory_mib,
            stored_bytes: latest.stored_bytes,
        }
    }
}

/// It was awake when its checkpoint was taken, so it goes on.
async fn go_on(handle: &Handle) -> Result<(), ApiError> {
    handle.call(Call::of(CallKind::Api), "its move to this host").await.map(drop)
}

async fn newest(store: &Arc<Store>, id: &SandboxId) -> Result<(Found, List), ApiError> {
    store.is_there().await.map_err(|error| store_error(&error))?;
    let mut reads = 1;
    loop {
        let found = checkpoints::find(store, id).await.map_err(|error| store_error(&error))?;
        let found = found.ok_or_else(|| {
            ApiError::new(Code::NotFound, format!("the store has no checkpoint of `{id}`"))
                .hint("`dormouse checkpoints list` shows what there is")
        })?;
        match checkpoints::read_list(store, &found).await {
            Ok(list) => return Ok((found, list)),
            // Replaced in between.
            Err(StoreError::Missing) if reads < READS_MAX => reads += 1,
            Err(error) => return Err(store_error(&error)),
        }
    }
}

/// For clients (S20).
fn store_error(error: &StoreError) -> ApiError {
    let none = |text: &str| {
        ApiError::new(Code::NoCapacity, format!("checkpoints cannot be kept now: {text}"))
    };
    match error {
        StoreError::Absent | StoreError::Silent | StoreError::Full | StoreError::Unconditional => {
            none(&without_paths(&error.to_string()))
        }
        StoreError::Unreachable(_) | StoreError::Denied(_) => {
            tracing::error!(error = chain(error), "the store of checkpoints");
            none(&without_paths(&error.to_string()))
        }
        StoreError::Missing | StoreError::Taken | StoreError::Failed(_) => {
            tracing::error!(error = chain(error), "the store of checkpoints");
            none("the store fails; the daemon's log says how")
        }
        StoreError::Lost(_) => {
            ApiError::new(Code::SandboxMoved, error.to_string()).hint("ask that host")
        }
        StoreError::Damaged(what) => {
            ApiError::new(Code::CheckpointUnusable, format!("the checkpoint is damaged: {what}"))
        }
        StoreError::Local(source) if source.kind() == std::io::ErrorKind::StorageFull => {
            ApiError::new(Code::NoSpace, "the host's disk is full")
        }
        StoreError::Local(_) => internal("the checkpoint's files", error),
    }
}
