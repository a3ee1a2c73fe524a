//! Clones kept ready, so that a new sandbox is claimed and not made.
//!
//! A ready clone is a copy of a template that has been restored, given an address, and has run a command once, so that its
//! code is warm; then its programs were frozen and its process stopped. It costs no processor, and the memory of one sleeper.
//! Its folder lies among the sandboxes' and says that it is being created: so whatever ends the daemon, the next one undoes
//! it as it undoes any sandbox that was half made.
//!
//! ```text
//!   nothing ──make──▶ ready ──reserve──▶ reserved ──claim──▶ a sandbox asleep in memory, that has never lived
//!                       └──── room is needed, unwanted, died, not claimed in time ────▶ nothing
//! ```
//!
//! Who makes a sandbox asks for a clone's id first, and makes it under that id. Clones are made when nobody has made a
//! sandbox for a while, one at a time, only where there is room that nobody waits for; and they are the first to make room, in
//! memory and on the disk.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use api::SandboxId;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use vmm::Machine;

use crate::clock::Moment;
use crate::daemon::Daemon;
use crate::ground::{DiskRoom, FREE_BYTES_FOR_SPARE, FREE_BYTES_MIN, Ground};
use crate::guest::{Continuity, QuiesceOptions, WakeParams};
use crate::images::DEFAULT_NAME;
use crate::manifest::{Manifest, State};
use crate::record::Record;
use crate::sandbox::body::{
    Body, Shape, Told, identity_owed, ipv6_owed, machine_spec, make_folder, note_told,
};
use crate::sandbox::work::{WAKE_LIMIT, chain};
use crate::settings::Files;
use crate::turns::Urgency;
use crate::usage::Used;

/// Kinds of clones that are kept: that of the default image and size, and those asked for last.
const KINDS_MAX: usize = 2;

/// How long nobody must have made a sandbox before the next clone is made: whoever has one wants the processor himself.
const REFILL_AFTER: Duration = Duration::from_secs(2);

/// How long a reserved clone waits to be claimed: far longer than whoever reserved it takes to write that down. It is released
/// at once where it is not used; this is for who forgets.
const RESERVED_FOR: Duration = Duration::from_mins(10);

/// Time after a clone could not be made before the next is tried.
const RETRY_AFTER: Duration = Duration::from_mins(1);

/// How long the end of the daemon waits for a clone that is being made. Copying and restoring take some tenths of a second.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// How often is looked what is wanted, where nothing happens: images change.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// How long the command that warms a clone up may take, and its falling still.
const WARM_UP_LIMIT: Duration = Duration::from_mins(1);

/// What clones are copies of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) image_digest: String,
    pub(crate) cpus: u32,
    pub(crate) memory_mib: u32,
    /// It has places for drives; no clones of such a kind are made.
    pub(crate) drives: bool,
}

/// The ready clones of a host.
#[derive(Debug)]
pub(crate) struct Pool {
    /// How many of each kind are kept.
    size: usize,
    inner: Mutex<Inner>,
    /// Held while one is being made.
    making: tokio::sync::Mutex<()>,
    look: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    ready: Vec<ReadyClone>,
    /// What was asked for, newest first.
    asked: VecDeque<Kind>,
    last_asked: Option<Instant>,
    closed: bool,
}

/// A ready clone.
#[derive(Debug)]
struct ReadyClone {
    kind: Kind,
    claimed: Claimed,
    reserved: Option<Instant>,
    /// Makes room for others when asked to.
    yields: AbortHandle,
}

/// What becomes a sandbox.
#[derive(Debug)]
pub(crate) struct Claimed {
    pub(crate) id: SandboxId,
    pub(crate) body: Body,
    pub(crate) record: Record,
    /// When its process was stopped.
    pub(crate) stopped_at: Moment,
    /// Processor time its programs have used before it was anybody's, microseconds.
    cpu_usec: u64,
}

impl Pool {
    /// Keeps so many of each kind.
    pub(crate) fn new(size: usize) -> Self {
        Self {
            size,
            inner: Mutex::default(),
            making: tokio::sync::Mutex::default(),
            look: Notify::new(),
        }
    }

    /// The id of a clone of this kind, which is nobody else's for a while. Notes that the kind is wanted.
    pub(crate) fn reserve(&self, kind: &Kind) -> Option<SandboxId> {
        let mut inner = self.inner();
        inner.asked.retain(|asked| asked != kind);
        inner.asked.push_front(kind.clone());
        inner.asked.truncate(KINDS_MAX);
        inner.last_asked = Some(Instant::now());
        self.look.notify_one();
        let found = inner.ready.iter_mut().find(|clone| {
            clone.kind == *kind && clone.reserved.is_none() && clone.claimed.body.is_alive()
        })?;
        found.reserved = Some(Instant::now());
        Some(found.claimed.id.clone())
    }

    /// How many lie ready.
    pub(crate) fn ready(&self) -> usize {
        self.inner().ready.iter().filter(|clone| clone.claimed.body.is_alive()).count()
    }

    /// A reserved clone is not used after all.
    pub(crate) fn release(&self, id: &SandboxId) {
        if let Some(clone) = self.inner().ready.iter_mut().find(|one| one.claimed.id == *id) {
            clone.reserved = None;
        }
    }

    /// The clone with this id, if there is one that is of this kind and lives. One that is of no use is removed: nothing lies
    /// under this id afterwards.
    pub(crate) async fn claim(&self, id: &SandboxId, kind: &Kind) -> Option<Claimed> {
        let clone = {
            let mut inner = self.inner();
            let at = inner.ready.iter().position(|clone| clone.claimed.id == *id)?;
            inner.last_asked = Some(Instant::now());
            inner.ready.swap_remove(at)
        };
        self.look.notify_one();
        if clone.kind != *kind || !clone.claimed.body.is_alive() {
            dissolve(clone).await;
            return None;
        }
        clone.yields.abort();
        Some(clone.claimed)
    }

    /// Ends all clones; no more are made.
    pub(crate) async fn close(&self) {
        self.inner().closed = true;
        // One that is being made is not left half made. If that takes long, the next daemon finds it.
        let made = tokio::time::timeout(CLOSE_LIMIT, self.making.lock()).await;
        if made.is_err() {
            tracing::warn!("a copy that was being made is left to the daemon's next start");
        }
        let all = std::mem::take(&mut self.inner().ready);
        for clone in all {
            dissolve(clone).await;
        }
    }

    async fn give_up(&self, id: &SandboxId, why: &'static str) {
        let found = {
            let mut inner = self.inner();
            let at = inner.ready.iter().position(|clone| clone.claimed.id == *id);
            at.map(|at| inner.ready.swap_remove(at))
        };
        if let Some(clone) = found {
            tracing::info!(clone = %id, why, "a ready clone is given up");
            dissolve(clone).await;
        }
    }

    /// Takes out one that nobody is about to claim, of the kind that is wanted least.
    fn spare(&self) -> Option<ReadyClone> {
        let mut inner = self.inner();
        let asked_at = |kind: &Kind| inner.asked.iter().position(|asked| asked == kind);
        let spare = (0..inner.ready.len()).filter(|at| inner.ready[*at].reserved.is_none());
        let at = spare.max_by_key(|at| asked_at(&inner.ready[*at].kind).unwrap_or(usize::MAX))?;
        Some(inner.ready.swap_remove(at))
    }

    /// Clones that are of no use any more, taken out.
    fn sort_out(&self, wanted: &[Kind]) -> Vec<ReadyClone> {
        let mut inner = self.inner();
        let mut kept: Vec<ReadyClone> = Vec::new();
        let mut out = Vec::new();
        for clone in std::mem::take(&mut inner.ready) {
            let same = kept.iter().filter(|other| other.kind == clone.kind).count();
            let late = clone.reserved.is_some_and(|at| at.elapsed() > RESERVED_FOR);
            let of_use = wanted.contains(&clone.kind) && same < self.size;
            let keep = clone.claimed.body.is_alive() && !late && of_use;
            // Whoever has reserved it is about to come.
            if keep || clone.reserved.is_some() && !late {
                kept.push(clone);
            } else {
                out.push(clone);
            }
        }
        inner.ready = kept;
        out
    }

    /// A kind of which there are too few.
    fn lacking(&self, wanted: &[Kind]) -> Option<Kind> {
        let inner = self.inner();
        let free = |kind: &&Kind| {
            inner.ready.iter().filter(|one| one.kind == **kind && one.reserved.is_none()).count()
        };
        wanted.iter().find(|kind| free(kind) < self.size).cloned()
    }

    /// How long until the next clone may be made.
    fn quiet_in(&self) -> Duration {
        let last = self.inner().last_asked;
        last.map_or(Duration::ZERO, |at| REFILL_AFTER.saturating_sub(at.elapsed()))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Nothing under this lock can leave it half changed.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps a daemon's pool filled for as long as there is the daemon.
pub(crate) async fn keep(daemon: Weak<Daemon>) {
    let mut told: Option<String> = None;
    // The same again and again tells nothing new.
    let mut is_news = move |why: Option<&str>| {
        let is_news = told.as_deref() != why;
        told = why.map(str::to_owned);
        is_news
    };
    loop {
        let Some(strong) = daemon.upgrade() else { return };
        let (ground, pool) = (Arc::clone(&strong.ground), Arc::clone(&strong.pool));
        drop(strong);
        if pool.size == 0 || pool.inner().closed {
            return;
        }
        let mut room = ground.disk_room.clone();
        room.mark_unchanged();
        if *room.borrow() == DiskRoom::None {
            make_room_on_disk(&ground, &pool, FREE_BYTES_MIN).await;
        }
        let wanted = wanted(&ground, &pool);
        for clone in pool.sort_out(&wanted) {
            dissolve(clone).await;
        }
        let mut pause = LOOK_EVERY;
        let quiet_in = pool.quiet_in();
        if let Some(kind) = pool.lacking(&wanted) {
            if quiet_in.is_zero() {
                let making = pool.making.lock().await;
                if pool.inner().closed {
                    return;
                }
                let made = make(&ground, &kind).await;
                match made {
                    Ok(Made::Clone(claimed)) => {
                        is_news(None);
                        admit(&ground, &pool, kind, *claimed).await;
                        continue;
                    }
                    Ok(Made::NoRoom(why)) => {
                        if is_news(Some(&why)) {
                            tracing::info!(
                                "no clone is ready, and a sandbox is copied when it is wanted: {why}"
                            );
                        }
                    }
                    Err(error) => {
                        if is_news(Some(&error)) {
                            tracing::warn!(
                                error,
                                "no clone is ready: a sandbox is copied when it is wanted"
                            );
                        }
                        drop(making);
                        tokio::time::sleep(RETRY_AFTER).await;
                        continue;
                    }
                }
            } else {
                pause = quiet_in;
            }
        }
        tokio::select! {
            () = pool.look.notified() => {}
            // Its sender lives as long as the ground does.
            Ok(()) = room.changed() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Of what clones are kept, most wanted first.
fn wanted(ground: &Ground, pool: &Pool) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = pool.inner().asked.iter().cloned().collect();
    // Without a default image nobody can make a sandbox of it either.
    if let Ok(image) = ground.image(DEFAULT_NAME) {
        let kind = Kind {
            image_digest: image.id().as_str().to_owned(),
            cpus: 1,
            memory_mib: api::sandbox::MEMORY_MIB_DEFAULT,
            drives: false,
        };
        if !kinds.contains(&kind) {
            kinds.truncate(KINDS_MAX - 1);
            kinds.push(kind);
        }
    }
    kinds
}

async fn admit(ground: &Arc<Ground>, pool: &Arc<Pool>, kind: Kind, claimed: Claimed) {
    let id = claimed.id.clone();
    // Before all sleepers: nobody misses a clone. Moments count from the host's start, so none is as early as this.
    let offer = ground.budget.offer(0, kind.memory_mib);
    let (yielding, whose) = (Arc::clone(pool), id.clone());
    let yields = tokio::spawn(async move {
        offer.asked().await;
        // A task of its own: this one ends with the clone.
        tokio::spawn(async move { yielding.give_up(&whose, "its memory is needed").await });
    });
    tracing::debug!(clone = %id, ?kind, "a clone is ready");
    let clone = ReadyClone { kind, claimed, reserved: None, yields: yields.abort_handle() };
    let late = {
        let mut inner = pool.inner();
        if inner.closed {
            Some(clone)
        } else {
            inner.ready.push(clone);
            None
        }
    };
    if let Some(clone) = late {
        dissolve(clone).await;
    }
}

/// Gives clones up, one after the other, until so many bytes are free on the disk and promised to nobody.
pub(crate) async fn make_room_on_disk(ground: &Ground, pool: &Pool, bytes: u64) {
    let mut waited = false;
    while ground.room.free().is_ok_and(|free| free < bytes) {
        let Some(clone) = pool.spare() else {
            if waited {
                return;
            }
            // One that is being made was promised room, and gives way as soon as it is whole.
            drop(pool.making.lock().await);
            waited = true;
            continue;
        };
        let wanted = bytes >> 20;
        tracing::info!(clone = %clone.claimed.id, "a ready clone is given up: less than {wanted} MiB are free on the disk");
        dissolve(clone).await;
    }
}

/// What came of making one.
enum Made {
    Clone(Box<Claimed>),
    /// There is no room now that nobody waits for.
    NoRoom(String),
}

/// Makes one.
async fn make(ground: &Ground, kind: &Kind) -> Result<Made, String> {
    let free = ground.room.free().map_err(|error| error.to_string())?;
    if free < FREE_BYTES_FOR_SPARE || *ground.disk_low.borrow() {
        let least = FREE_BYTES_FOR_SPARE >> 20;
        return Ok(Made::NoRoom(format!("less than {least} MiB are free on the disk")));
    }
    let Some(seat) = ground.budget.seat_if_free(kind.memory_mib) else {
        return Ok(Made::NoRoom("the memory budget has no room that nobody needs".to_owned()));
    };
    let Some(slot) = ground.slots.take() else {
        return Ok(Made::NoRoom("all addresses of this host are taken".to_owned()));
    };
    let mut random = [0; api::id::ID_CHARS];
    getrandom::fill(&mut random).map_err(|error| error.to_string())?;
    let id = SandboxId::from_random(random);
    let files = Files::in_dir(ground.settings.sandboxes_dir().join(id.as_str()));
    make_folder(&files).map_err(|error| chain(&error))?;
    let manifest = Manifest::unmade(id.clone(), slot.number(), kind);
    let record = Record::create(&files.manifest(), manifest).await;
    let record = record.map_err(|error| chain(&error))?;
    let mut body = Body::new(files, slot).map_err(|error| chain(&error))?;
    body.seat = Some(seat);
    match ready(ground, kind, &id, &record, &mut body).await {
        Ok((stopped_at, cpu_usec)) => {
            Ok(Made::Clone(Box::new(Claimed { id, body, record, stopped_at, cpu_usec })))
        }
        Err(error) => {
            take_apart(&id, &mut body).await;
            Err(error)
        }
    }
}

/// Copies, restores, warms up, stops.
async fn ready(
    ground: &Ground,
    kind: &Kind,
    id: &SandboxId,
    record: &Record,
    body: &mut Body,
) -> Result<(Moment, u64), String> {
    let image = ground.image_by_digest(&kind.image_digest).map_err(|error| chain(&error))?;
    let template =
        ground.templates.get(ground, &image, kind.cpus, kind.memory_mib, kind.drives).await;
    let template = template.map_err(|error| chain(&error))?;
    let dir = ground.settings.sandboxes_dir();
    let bytes = crate::promises::bytes_to_copy_all(template.files.saved_parts(), dir).await;
    let room = ground.room.promise(bytes, FREE_BYTES_MIN).map_err(|error| chain(&error))?;
    room.is_for(body.files.dir());
    let copied = crate::sandbox::work::copy_parts(&template.files, &body.files, Vec::new()).await;
    copied.map_err(|error| chain(&error))?;
    drop(room);
    let tap = body.ensure_port(ground).map_err(|error| error.to_string())?.tap_fd();
    let slot = body.slot.number();
    let shape = Shape { cpus: kind.cpus, memory_mib: kind.memory_mib, drives: None };
    let spec = machine_spec(ground, id, &body.files, slot, shape, image.root(), tap);
    let turn = ground.restores.stand_in_line(Urgency::Call, Instant::now()).turn().await;
    let about = &template.about;
    let slept = about.saved_at.elapsed();
    let state = body.files.state();
    let restored =
        Machine::restore(&ground.qemu_now(), &spec, &state, &about.state, &about.machine, slept)
            .await;
    let machine = body.machine.insert(restored.map_err(|error| chain(&error))?);
    machine.cont().await.map_err(|error| chain(&error))?;
    let socket = machine.guest_stream().map_err(|error| chain(&error))?;
    let met = body.link.attach(socket, Continuity::Clean, WAKE_LIMIT).await;
    met.map_err(|error| chain(&error))?;
    let who = identity_owed(ground, record, body).map_err(|error| error.to_string())?;
    let params = WakeParams { fork: true, identity: who };
    let ipv6 = ipv6_owed(ground, record, body);
    let woke = body.link.wake_with(params, ipv6, Vec::new(), WAKE_LIMIT).await;
    let woke = woke.map_err(|error| chain(&error))?;
    // Names it gets when it is claimed; its addresses stay its own.
    body.network_told = true;
    crate::exec::run_to_end(&body.link, "true", WARM_UP_LIMIT)
        .await
        .map_err(|error| chain(&error))?;
    let used = body.link.sample().await.map_err(|error| chain(&error))?;
    let options = QuiesceOptions { sync: true, drop_caches: false };
    body.link.quiesce(options, WARM_UP_LIMIT).await.map_err(|error| chain(&error))?;
    let machine = body.machine.as_mut().ok_or("no machine")?;
    machine.stop_process().await.map_err(|error| chain(&error))?;
    drop(turn);
    let fingerprint = machine.fingerprint().clone();
    let noted = record.change(|manifest| {
        manifest.machine = Some(fingerprint);
        note_told(manifest, Some(Told::WithNetwork), ipv6, &woke);
    });
    let noted = noted.await;
    noted.map_err(|error| chain(&error))?;
    Ok((Moment::now(), used.cpu_usec))
}

/// Makes a claimed clone what it shall be: a sandbox that sleeps in memory and has never lived.
pub(crate) async fn found(
    claimed: Claimed,
    manifest: impl FnOnce(u32) -> Manifest,
) -> Result<(Body, Record), vmm::files::FileError> {
    let Claimed { id, mut body, record, stopped_at, cpu_usec } = claimed;
    let (machine, ipv6) = record.with(|unmade| (unmade.machine.clone(), unmade.ipv6));
    let wanted = Manifest {
        machine,
        ipv6,
        state: State::SleepingInMemory { slept_at: stopped_at, timer_due: None },
        used: Used { cpu_seen_usec: Some(cpu_usec), ..Used::default() },
        ..manifest(body.slot.number())
    };
    if let Err(error) = record.change(|manifest| *manifest = wanted).await {
        take_apart(&id, &mut body).await;
        return Err(error);
    }
    Ok((body, record))
}

async fn dissolve(clone: ReadyClone) {
    clone.yields.abort();
    let Claimed { id, mut body, .. } = clone.claimed;
    take_apart(&id, &mut body).await;
}

/// Nothing is left of a clone. What cannot be removed the daemon's next start finds: it says that it was being created.
pub(crate) async fn take_apart(id: &SandboxId, body: &mut Body) {
    if let Err(error) = body.end_machine("the ready clone is not needed").await {
        tracing::error!(clone = %id, error = chain(&error), "QEMU of a ready clone could not be killed");
        return;
    }
    if let Some(mut port) = body.port.take()
        && let Err(error) = port.remove()
    {
        tracing::error!(clone = %id, error = chain(&error), "tap of a ready clone not removed");
    }
    let dir = body.files.dir().to_owned();
    let removed = tokio::task::spawn_blocking(move || std::fs::remove_dir_all(dir)).await;
    match removed {
        Ok(Err(error)) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::error!(clone = %id, error = chain(&error), "folder of a ready clone not removed");
        }
        Ok(_) => {}
        Err(error) => tracing::error!(clone = %id, %error, "folder of a ready clone not removed"),
    }
}

impl Manifest {
    /// What stands in the folder of a clone that nobody has asked for yet: it is being created, so a new daemon undoes it.
    fn unmade(id: SandboxId, slot: u32, kind: &Kind) -> Self {
        Self {
            name: "ready".to_owned(),
            slot,
            epoch: 0,
            link_key: String::new(),
            image: kind.image_digest.clone(),
            image_digest: kind.image_digest.clone(),
            cpus: kind.cpus,
            memory_mib: kind.memory_mib,
            drives: Vec::new(),
            env: std::collections::BTreeMap::new(),
            labels: std::collections::BTreeMap::new(),
            policy: crate::manifest::Policy::new(0),
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
            wiring: None,
            ipv6: None,
            network_at_rest: None,
            state: State::Creating,
            since: Moment::now(),
            id,
        }
    }
}
