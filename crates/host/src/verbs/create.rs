//! Making sandboxes: founded, filled from a template or snapshot, started for the first time, and undone where that fails.

use std::io;

use api::host::NewSandbox;
use api::sandbox::Sandbox;
use api::{ApiError, Code, SandboxId};

use super::drives::drive_uses;
use super::errors::{internal, no_space, snapshot_error};
use crate::clock::Moment;
use crate::daemon::{Daemon, image_error};
use crate::drive_trouble;
use crate::ground::FREE_BYTES_MIN;
use crate::images::Image;
use crate::manifest::{Manifest, Policy, State};
use crate::pool::{self, Kind};
use crate::record::Record;
use crate::sandbox::body::{Body, make_folder};
use crate::sandbox::{Beginning, Handle, start};
use crate::settings::Files;
use crate::snapshots::SnapshotError;
use crate::template::Templates;
use crate::timeline::Timeline;
use crate::usage::Used;

impl Daemon {
    /// Makes a sandbox from its image's template, a ready copy of that, or a snapshot. One that is there already is answered as it
    /// is: who asks twice, as after a lost answer, means one.
    pub(super) async fn create_new(&self, new: NewSandbox) -> Result<Sandbox, ApiError> {
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
        self.check_size(new.memory_mib).inspect_err(|_| self.pool.release(&new.id))?;
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
        self.check_size(note.of.memory_mib)?;
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

    /// Refuses one that could never have room in memory, before anybody waits for it.
    fn check_size(&self, memory_mib: u32) -> Result<(), ApiError> {
        self.ground.budget.check(memory_mib).map_err(|error| {
            ApiError::unprocessable("memory_mib", format!("it can never run here: {error}")).hint(
                "ask for less memory, or start the daemon with a larger `--memory-budget-mib`",
            )
        })
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
