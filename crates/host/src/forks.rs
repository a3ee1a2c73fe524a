//! Forks: copies of one moment of a sandbox, one or several. The parent is copied once; the others are copies of the first.
//!
//! All of them are made, or none, also when the daemon dies meanwhile ([`fork_sets`](crate::fork_sets)). They are founded first, so that what is lacking (addresses) shows before the parent stands still;
//! none is started before all are copied, so that no copy is of another moment.

use std::path::PathBuf;

use api::host::NewFork;
use api::sandbox::Sandbox;
use api::{ApiError, SandboxId};

use crate::clock::Moment;
use crate::daemon::Daemon;
use crate::fork_sets::ForkSet;
use crate::ground::{FREE_BYTES_MIN, Ground};
use crate::manifest::{Manifest, Policy, Saved, State, places_of};
use crate::pool;
use crate::promises::Promise;
use crate::record::Record;
use crate::sandbox::Handle;
use crate::sandbox::body::{Body, drive_images};
use crate::sandbox::work::{chain, copy_parts, is_full, read_capture};
use crate::usage::Used;
use crate::verbs::{discard, internal, no_room, no_space, unmade};
use crate::volumes::VolumeClaim;

/// A fork that has a folder, and nothing in it yet.
struct Founded {
    body: Body,
    record: Record,
}

impl Daemon {
    /// Makes these forks.
    pub(crate) async fn fork_all(
        &self,
        parent: &SandboxId,
        new: &[NewFork],
    ) -> Result<Vec<Sandbox>, ApiError> {
        let known: Vec<Handle> = new.iter().filter_map(|new| self.handle(&new.id).ok()).collect();
        if known.is_empty() {
            self.check_spending()?;
        }
        if known.len() == new.len() {
            return views(known).await;
        }
        // Left by a request that was cut off: they are of another moment.
        for handle in known {
            handle.delete().await?;
            self.sandboxes_mut().remove(handle.id());
        }
        let parent = self.handle(parent)?;
        let drives = parent.manifest().drives;
        let parts = parts_of(&self.ground, &parent);
        let mut room = self.promise_copies(&parts, new.len() as u64).await?;
        let claims = new.iter().map(|one| self.claim_volumes(&one.id, &drives));
        let claims = claims.collect::<Result<Vec<_>, _>>()?;
        let mut founded = Vec::new();
        for one in new {
            match self.found(&one.id, |slot| fork_of(&parent.manifest(), one, slot)).await {
                Ok((body, record)) => {
                    room.is_for(body.files.dir());
                    founded.push(Founded { body, record });
                }
                Err(error) => {
                    discard_all(&founded);
                    return Err(error);
                }
            }
        }
        let ids: Vec<SandboxId> = new.iter().map(|one| one.id.clone()).collect();
        let sets = self.ground.settings.fork_sets_dir();
        let made = async {
            let set = ForkSet::open(sets.clone(), ids.clone()).await;
            let set = set.map_err(|error| unpublished(&error))?;
            if let Err(error) = self.copy(&parent, &founded, &mut room).await {
                discard_all(&founded);
                close(set).await;
                return Err(error);
            }
            match set {
                Some(set) => set.close().await.map_err(|error| unpublished(&error)),
                None => Ok(()),
            }
        };
        if let Err(error) = made.await {
            discard_all(&founded);
            return Err(error);
        }
        drop(room);
        // From here on they are there, whatever happens to the daemon.
        crate::fault::point("forks_kept");
        let text = format!("is a fork of {}", parent.manifest().name);
        let mut handles = Vec::new();
        for Founded { body, record } in founded {
            handles.push(self.begin(body, record, "forked", &text)?);
        }
        claims.into_iter().for_each(VolumeClaim::keep);
        let started = handles.iter().map(Handle::started);
        let mut failed = futures_util::future::join_all(started).await.into_iter().zip(&handles);
        let failed = failed.find_map(|(started, handle)| Some((started.err()?, handle)));
        if let Some((error, handle)) = failed {
            // If the daemon dies in between, the next one undoes the rest.
            let set = match ForkSet::open(sets, ids).await {
                Ok(set) => set,
                Err(error) => {
                    tracing::warn!(error = chain(&error), "no note of forks that are undone");
                    None
                }
            };
            let error = unmade(handle, error).await;
            for other in handles.iter().filter(|other| other.id() != handle.id()) {
                other.delete().await?;
            }
            close(set).await;
            return Err(error);
        }
        for handle in &handles {
            self.terminals.copy(parent.id(), handle, &self.events);
        }
        views(handles).await
    }

    /// Copies the parent into the first, that into the others, and publishes them all.
    async fn copy(
        &self,
        parent: &Handle,
        founded: &[Founded],
        room: &mut Promise,
    ) -> Result<(), ApiError> {
        let Some((first, others)) = founded.split_first() else { return Ok(()) };
        let files = &first.body.files;
        parent.capture(files.clone()).await?;
        // Given other drives at the last moment, it was copied with those.
        let drives = parent.manifest().copied_drives();
        let saved = read_capture(files).map_err(|error| unpublished(&error))?;
        for (copied, other) in others.iter().enumerate() {
            let images: Vec<_> =
                places_of(&drives).into_iter().map(|place| (place, files.drive(place))).collect();
            let parts = images.iter().map(|(_, image)| image.clone());
            let parts = [files.memory(), files.state(), files.disk()].into_iter().chain(parts);
            // The parent may have grown since it was looked at.
            let left = &others[copied..];
            self.renew_for_copies(room, parts.collect(), left).await?;
            let copied = copy_parts(files, &other.body.files, images).await;
            copied.map_err(|error| unpublished(&error))?;
        }
        crate::fault::point("fork_copied");
        for one in founded {
            let (saved, drives) = (saved.clone(), drives.clone());
            let published = one.record.change(|manifest| publish(manifest, saved, drives)).await;
            published.map_err(|error| unpublished(&error))?;
            crate::fault::point("fork_published");
        }
        Ok(())
    }
}

impl Daemon {
    /// Promises room for so many copies of these files, or refuses them before running guests notice. Ready copies make room first.
    pub(crate) async fn promise_copies(
        &self,
        parts: &[PathBuf],
        count: u64,
    ) -> Result<Promise, ApiError> {
        let needed = bytes_of_copies(&self.ground, parts.to_vec(), count).await;
        self.promise_room(needed, &for_copies(count)).await
    }

    /// Promises room for so many bytes, or refuses them before running guests notice. Ready copies make room first. `what` they
    /// are for: "a copy".
    pub(crate) async fn promise_room(&self, bytes: u64, what: &str) -> Result<Promise, ApiError> {
        let wanted = bytes.saturating_add(FREE_BYTES_MIN);
        pool::make_room_on_disk(&self.ground, &self.pool, wanted).await;
        let promised = self.ground.room.promise(bytes, FREE_BYTES_MIN);
        promised.map_err(|error| no_room(what, &error))
    }

    /// Room for copies of these files, one for each of these forks, in place of what was promised before.
    async fn renew_for_copies(
        &self,
        room: &mut Promise,
        parts: Vec<PathBuf>,
        left: &[Founded],
    ) -> Result<(), ApiError> {
        let count = left.len() as u64;
        let needed = bytes_of_copies(&self.ground, parts, count).await;
        let renewed = room.renew(needed, FREE_BYTES_MIN);
        renewed.map_err(|error| no_room(&for_copies(count), &error))?;
        for one in left {
            room.is_for(one.body.files.dir());
        }
        Ok(())
    }
}

/// Bytes that so many copies of these files take.
async fn bytes_of_copies(ground: &Ground, parts: Vec<PathBuf>, count: u64) -> u64 {
    let dir = ground.settings.sandboxes_dir();
    crate::promises::bytes_to_copy_all(parts, dir).await.saturating_mul(count)
}

fn for_copies(count: u64) -> String {
    if count == 1 { "a copy".to_owned() } else { format!("{count} copies") }
}

fn unpublished(error: &(dyn std::error::Error + 'static)) -> ApiError {
    if is_full(error) {
        return no_space("the host's disk has no room for a copy");
    }
    internal("the fork could not be published", error)
}

/// Nothing is left of these forks. A note that stays names none that there are.
async fn close(set: Option<ForkSet>) {
    let Some(set) = set else { return };
    if let Err(error) = set.close().await {
        tracing::warn!(error = chain(&error), "a note of forks that are undone stays");
    }
}

/// What is copied of a sandbox.
pub(crate) fn parts_of(ground: &Ground, of: &Handle) -> Vec<PathBuf> {
    let files = of.files();
    let images = drive_images(ground, &of.manifest(), files).into_iter().map(|(_, image)| image);
    [files.memory(), files.disk()].into_iter().chain(images).collect()
}

fn fork_of(of: &Manifest, new: &NewFork, slot: u32) -> Manifest {
    Manifest {
        id: new.id.clone(),
        name: new.name.clone(),
        slot,
        epoch: new.epoch,
        link_key: new.link_key.clone(),
        created_at: Moment::now(),
        forked_from: Some(of.id.clone()),
        drives: of.copied_drives(),
        policy: Policy { checkpoint_seconds: None, ..of.policy.clone() },
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
        wiring: None,
        ipv6: None,
        network_at_rest: None,
        state: State::Creating,
        since: Moment::now(),
        ..of.clone()
    }
}

fn publish(manifest: &mut Manifest, saved: Saved, drives: Vec<crate::manifest::DriveUse>) {
    manifest.drives = drives;
    manifest.state = State::SleepingOnDisk(saved);
}

async fn views(handles: Vec<Handle>) -> Result<Vec<Sandbox>, ApiError> {
    let mut views = Vec::new();
    for handle in handles {
        handle.started().await?;
        views.push(handle.view().await?.sandbox);
    }
    Ok(views)
}

fn discard_all(founded: &[Founded]) {
    for one in founded {
        discard(&one.body.files);
    }
}
