//! The daemon of one machine: all its sandboxes, and what they stand on.

use std::collections::HashMap;
use std::fs::{File, Permissions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use api::{ApiError, Code, Event, SandboxId};
use tokio::net::TcpListener;
use tokio::sync::{broadcast, mpsc};
use vmm::Qemu;
use vmm::qemu::{DiscoverError, Known, Places};

use crate::budget::Budget;
use crate::checkpoints::{self, Store, StoreError, StoreUrlError};
use crate::drives::Drives;
use crate::execs_kept;
use crate::ground::{Ground, watch_disk};
use crate::network::dns::Dns;
use crate::network::{Network, Subnet, SubnetHold, SubnetTaken};
use crate::passage;
use crate::pool::{self, Pool};
use crate::promises::Promises;
use crate::recovery;
use crate::sandbox::Handle;
use crate::sandbox::work::{chain, without_paths};
use crate::services::{self, Services};
use crate::settings::Settings;
use crate::slots::Slots;
use crate::snapshots::Snapshots;
use crate::template::Templates;
use crate::terminals::{Terminals, forget_the_lost};
use crate::timeline::WATCH_BACKLOG;
use crate::turns::Turns;
use crate::volumes::Volumes;

/// How long a daemon that starts waits for one that is ending: as long as the child of a loaded machine takes to become
/// another program, and no longer than whoever starts a second one by mistake likes to wait.
const LOCK_WAIT: Duration = Duration::from_secs(3);

/// Time between two looks at the lock.
const LOCK_LOOK: Duration = Duration::from_millis(20);

/// Why a daemon does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The data folder.
    #[error("{doing} {path}")]
    Folder {
        /// What was being done.
        doing: &'static str,
        /// Where.
        path: String,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The data folder is somebody else's.
    #[error(
        "the folder {} is not empty and no data folder of Dormouse's: it is left as it is; choose another, or an empty one",
        folder.display()
    )]
    NotOurs {
        /// The folder.
        folder: PathBuf,
    },
    /// Another daemon works on the data folder.
    #[error("another daemon works in {folder}{}", by(*pid))]
    Taken {
        /// The data folder.
        folder: String,
        /// The other daemon, if it could write its number down.
        pid: Option<u32>,
    },
    /// QEMU could not get to its files.
    #[error(
        "QEMU runs as an account of its own and cannot enter the folder {} (mode {mode:04o}) on the way to {}; \
         `chmod o+x` it, or choose a folder elsewhere",
        folder.display(), path.display()
    )]
    Closed {
        /// The folder that others may not enter.
        folder: PathBuf,
        /// Its mode.
        mode: u32,
        /// Where QEMU must get to.
        path: PathBuf,
    },
    /// Another daemon uses the subnet.
    #[error(transparent)]
    Subnet(#[from] SubnetTaken),
    /// No usable QEMU.
    #[error("no usable QEMU")]
    Qemu(#[from] DiscoverError),
    /// The setting of the object store.
    #[error(transparent)]
    Store(#[from] StoreUrlError),
    /// The store is there, and no good as one.
    #[error("the store `{url}` cannot be used: {reason}")]
    StoreUnfit {
        /// Its address.
        url: String,
        /// What it does not do.
        reason: String,
    },
    /// The network.
    #[error("set up the guests' network")]
    Network(#[source] io::Error),
}

/// The daemon of one machine. Ending it leaves guests running; the next one takes them up again.
pub struct Daemon {
    pub(crate) ground: Arc<Ground>,
    pub(crate) network: Network,
    pub(crate) events: broadcast::Sender<Event>,
    pub(crate) gone: mpsc::UnboundedSender<SandboxId>,
    pub(crate) terminals: Terminals,
    pub(crate) snapshots: Snapshots,
    pub(crate) pool: Arc<Pool>,
    sandboxes: RwLock<HashMap<SandboxId, Handle>>,
    _dns: Option<Dns>,
    _subnet: SubnetHold,
    _lock: File,
}

impl Daemon {
    /// Starts over a data folder. That *is* recovery: whatever an earlier daemon left is taken up, finished or undone.
    pub async fn start(settings: Settings) -> Result<Arc<Self>, StartError> {
        prepare_folders(&settings)?;
        let lock = hold(&settings.data).await?;
        look_for_passage(&settings)?;
        // From here on nothing that is made is for anybody else: guests' memory, disks and settings hold secrets. What QEMU's
        // accounts must read they are given one by one.
        rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
        close_files(&settings.data);
        let subnet = Subnet::new(settings.subnet);
        let subnet_hold = SubnetHold::take(subnet).await?;
        note_subnet(&settings)?;
        let qemu = discover(&settings).await?;
        tracing::info!(
            version = %qemu.version(),
            accelerator = %qemu.accelerator(),
            tsc_khz = qemu.tsc_khz(),
            "QEMU found"
        );
        let prefix = crate::network::ipv6::prefix(settings.ipv6, &settings.data)
            .map_err(StartError::Network)?;
        let network = Network::set_up(subnet.with_ipv6(prefix), settings.ipv6_outbound)
            .await
            .map_err(StartError::Network)?;
        let subnet = network.subnet();
        // Without a name server guests still work; something else may hold the port.
        let services = Arc::new(Services::new(subnet));
        let dns = match Dns::start(subnet.gateway(), Arc::clone(&services)).await {
            Ok(dns) => Some(dns),
            Err(error) => {
                tracing::error!(%error, "guests have no name server");
                None
            }
        };
        let names = TcpListener::bind((subnet.gateway(), services::PORT)).await;
        let names = names.map_err(StartError::Network)?;
        let store = open_store(&settings).await?;
        let host = host_name(&settings)?;
        let no_tap = Arc::new(File::open("/dev/null").map_err(StartError::Network)?.into());
        let (disk_low, disk_room) = watch_disk(settings.sandboxes_dir());
        let room = Promises::new(settings.sandboxes_dir());
        let budget = Budget::new(settings.memory_budget_mib);
        let dir = settings.drives_dir();
        let drives = Arc::new(Drives::open(dir.clone()).map_err(fail("tidy folder", &dir))?);
        let dir = settings.volumes_dir();
        let volumes =
            Arc::new(Volumes::open(dir.clone(), room.clone()).map_err(fail("tidy folder", &dir))?);
        let ground = Arc::new(Ground {
            drives,
            volumes,
            room,
            spending: tokio::sync::watch::Sender::new(false),
            disk_low,
            disk_room,
            settings,
            qemu,
            replaced: std::sync::Mutex::default(),
            no_tap,
            subnet,
            slots: Slots::default(),
            services,
            templates: Templates::default(),
            budget,
            restores: Turns::new(),
            store,
            host,
        });
        keep_qemu(&ground).await;
        let (events, _) = broadcast::channel(WATCH_BACKLOG);
        let (gone, mut gone_inbox) = mpsc::unbounded_channel();
        let found = recovery::recover(&ground, &events, &gone).await?;
        let terminals = Terminals::default();
        let dir = ground.settings.snapshots_dir();
        let snapshots = Snapshots::open(dir.clone()).map_err(fail("tidy folder", &dir))?;
        terminals.recover(&found.values().cloned().collect::<Vec<_>>(), &events);
        if let Some(needed) = emulators_needed(&ground, &found, &snapshots) {
            discard_emulators(&ground, &needed);
        } else {
            tracing::debug!("not all is known that may need a replaced QEMU: all are kept");
        }
        let sandboxes = RwLock::new(found);
        let pool = Arc::new(Pool::new(ground.settings.pool));
        let daemon = Arc::new(Self {
            ground,
            network,
            events,
            gone,
            terminals,
            snapshots,
            pool,
            sandboxes,
            _dns: dns,
            _subnet: subnet_hold,
            _lock: lock,
        });
        let weak = Arc::downgrade(&daemon);
        tokio::spawn(execs_kept::keep(weak.clone(), daemon.events.subscribe()));
        tokio::spawn(pool::keep(weak.clone()));
        tokio::spawn(services::serve(weak.clone(), names, daemon.events.subscribe()));
        tokio::spawn(forget_the_lost(weak.clone(), daemon.events.subscribe()));
        tokio::spawn(async move {
            while let Some(id) = gone_inbox.recv().await {
                let Some(daemon) = weak.upgrade() else { return };
                daemon.sandboxes_mut().remove(&id);
                daemon.terminals.remove(&id);
            }
        });
        daemon.warn();
        Ok(daemon)
    }

    /// Says what will keep every sandbox from being made, before anybody makes one.
    fn warn(&self) {
        let name = crate::images::DEFAULT_NAME;
        if let Err(error) = self.ground.image(name) {
            tracing::warn!(
                error = chain(&error),
                "no sandbox can be made yet: there is no guest image `{name}`; `dormouse images build` makes it"
            );
        }
        let memory_mib = api::sandbox::MEMORY_MIB_DEFAULT;
        if let Err(error) = self.ground.budget.check(memory_mib) {
            tracing::warn!("no sandbox of the usual size ({memory_mib} MiB) can run here: {error}");
        }
    }

    /// Makes the template of the default image and size, so that the first sandbox does not wait for it.
    pub async fn prepare_template(&self) -> Result<(), ApiError> {
        let image =
            self.ground.image(crate::images::DEFAULT_NAME).map_err(|error| image_error(&error))?;
        let memory_mib = api::sandbox::MEMORY_MIB_DEFAULT;
        let made = self.ground.templates.get(&self.ground, &image, 1, memory_mib, false).await;
        made.map(drop).map_err(|error| {
            tracing::error!(error = chain(&error), "no template");
            ApiError::new(
                Code::Internal,
                format!("the template could not be made: {}", without_paths(&chain(&error))),
            )
        })
    }

    /// Refuses to make anything that would be awake while the project's spending limit is reached (S23).
    pub(crate) fn check_spending(&self) -> Result<(), ApiError> {
        if *self.ground.spending.borrow() { Err(crate::sandbox::spending_error()) } else { Ok(()) }
    }

    /// A sandbox's handle.
    pub(crate) fn handle(&self, id: &SandboxId) -> Result<Handle, ApiError> {
        let sandboxes = self.sandboxes.read().unwrap_or_else(PoisonError::into_inner);
        sandboxes.get(id).cloned().ok_or_else(|| self.unknown(id))
    }

    /// There is no such sandbox here, or none any more.
    pub(crate) fn unknown(&self, id: &SandboxId) -> ApiError {
        if self.ground.settings.moved_dir().join(id.as_str()).exists() {
            let text = format!("another host has taken over the sandbox `{id}`");
            return ApiError::new(Code::SandboxMoved, text)
                .hint("ask that host; what it had here is kept below `moved` in the data folder");
        }
        ApiError::new(Code::NotFound, format!("there is no sandbox `{id}`"))
    }

    /// All handles, in no order.
    pub(crate) fn handles(&self) -> Vec<Handle> {
        self.sandboxes.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    pub(crate) fn sandboxes_mut(
        &self,
    ) -> std::sync::RwLockWriteGuard<'_, HashMap<SandboxId, Handle>> {
        self.sandboxes.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rules and addresses that this daemon has put up.
    pub fn network(&self) -> &Network {
        &self.network
    }
}

/// An image that cannot be used, for a client.
pub(crate) fn image_error(error: &crate::images::ImageError) -> ApiError {
    tracing::debug!(error = chain(error), "an image cannot be used");
    ApiError::unprocessable("image", without_paths(&chain(error)))
        .hint("`dormouse images build` makes the default image")
}

/// The object store, where one is set. One that is not there now may come: who wants checkpoints meanwhile is told.
async fn open_store(settings: &Settings) -> Result<Option<Arc<Store>>, StartError> {
    let Some(url) = &settings.store else { return Ok(None) };
    let store = Store::new(url)?;
    match store.found().await {
        Ok(()) => tracing::info!(url, "the store of checkpoints is there"),
        // It will not be another one later.
        Err(error @ StoreError::Unconditional) => {
            return Err(StartError::StoreUnfit { url: url.clone(), reason: error.to_string() });
        }
        Err(error) => tracing::error!(url, error = chain(&error), "no checkpoints for now"),
    }
    Ok(Some(Arc::new(store)))
}

/// Who this host is among those that share a store: a random name, drawn once.
fn host_name(settings: &Settings) -> Result<checkpoints::Host, StartError> {
    let path = settings.data.join("host.id");
    let id = match std::fs::read_to_string(&path) {
        Ok(id) => id.trim().to_owned(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let mut random = [0; 16];
            getrandom::fill(&mut random)
                .map_err(|error| fail("draw", &path)(io::Error::other(error)))?;
            let id = crate::manifest::hex(&random);
            vmm::files::replace(&path, id.as_bytes())
                .map_err(|error| fail("write", &path)(error.source))?;
            id
        }
        Err(error) => return Err(fail("read", &path)(error)),
    };
    let name = format!("{} ({})", settings.name, id.get(..8).unwrap_or(&id));
    Ok(checkpoints::Host { id, name })
}

/// Makes the folders.
fn prepare_folders(settings: &Settings) -> Result<(), StartError> {
    if is_anothers(&settings.data).map_err(fail("look into", &settings.data))? {
        return Err(StartError::NotOurs { folder: settings.data.clone() });
    }
    for dir in [&settings.data, &settings.sandboxes_dir(), &settings.templates_dir()] {
        let is_new = !dir.exists();
        std::fs::create_dir_all(dir).map_err(fail("make folder", dir))?;
        // Guests' accounts pass through to their own files, and see nothing on the way. What was there outside of the data
        // folder is left as it is.
        if is_new || dir.starts_with(&settings.data) {
            std::fs::set_permissions(dir, Permissions::from_mode(0o711))
                .map_err(fail("set permissions of", dir))?;
        }
    }
    Ok(())
}

/// What lies in a data folder, or may lie in one that is still to become one.
const IN_DATA: [&str; 14] = [
    "dormouse.db",
    "daemon.lock",
    "daemon.log",
    "daemon.process",
    "admin.token",
    "host.id",
    "qemu.json",
    "sandboxes",
    "templates",
    "snapshots",
    "drives",
    "emulators",
    "images",
    "lost+found",
];

/// Whether there is something in a folder, and nothing of a data folder.
fn is_anothers(dir: &Path) -> io::Result<bool> {
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        entries => entries?,
    };
    let mut is_empty = true;
    for entry in entries {
        if IN_DATA
            .iter()
            .any(|known| entry.as_ref().is_ok_and(|entry| entry.file_name() == **known))
        {
            return Ok(false);
        }
        is_empty = false;
    }
    Ok(!is_empty)
}

/// Takes note of the subnet for who tidies up after the last daemon: each that was used has a line.
fn note_subnet(settings: &Settings) -> Result<(), StartError> {
    let path = settings.data.join("subnets");
    let line = settings.subnet.to_string();
    let known = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        known => known.map_err(fail("read", &path))?,
    };
    if known.lines().any(|one| one == line) {
        return Ok(());
    }
    vmm::files::replace(&path, format!("{known}{line}\n").as_bytes())
        .map_err(|error| fail("write", &path)(error.source))
}

/// Takes the files in a folder away from other accounts, which earlier versions left readable. Folders stay as they are: guests'
/// accounts pass through.
pub(crate) fn close_files(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(metadata) = entry.metadata() else { continue };
        let mode = metadata.permissions().mode();
        if !metadata.is_file() || mode.trailing_zeros() >= 6 {
            continue;
        }
        let closed = Permissions::from_mode(mode & 0o700);
        if let Err(error) = std::fs::set_permissions(entry.path(), closed) {
            tracing::warn!(path = %entry.path().display(), %error, "others may read this file");
        }
    }
}

/// Looks whether guests' accounts can get to all that their QEMUs open.
fn look_for_passage(settings: &Settings) -> Result<(), StartError> {
    for path in [settings.sandboxes_dir(), settings.images_dir(), settings.templates_dir()] {
        match passage::closed_to_others(&path) {
            Ok(None) => {}
            Ok(Some(closed)) => {
                let passage::Closed { folder, mode } = closed;
                return Err(StartError::Closed { folder, mode, path });
            }
            Err(error) => return Err(fail("look for the way to", &path)(error)),
        }
    }
    Ok(())
}

/// Holds the data folder against a second daemon. A daemon that has just ended may have left a child that is yet to become
/// another program and holds the lock so long; a daemon that goes on does so for good.
async fn hold(data: &Path) -> Result<File, StartError> {
    let path = data.join("daemon.lock");
    let mut lock = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(fail("make", &path))?;
    let begun = Instant::now();
    loop {
        match lock.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if begun.elapsed() < LOCK_WAIT => {
                tokio::time::sleep(LOCK_LOOK).await;
            }
            Err(TryLockError::WouldBlock) => {
                let mut text = String::new();
                let read = lock.read_to_string(&mut text).ok();
                let pid = read.and_then(|_| text.trim().parse().ok());
                return Err(StartError::Taken { folder: data.display().to_string(), pid });
            }
            Err(TryLockError::Error(source)) => return Err(fail("lock", &path)(source)),
        }
    }
    lock.set_len(0)
        .and_then(|()| writeln!(lock, "{}", std::process::id()))
        .map_err(fail("write", &path))?;
    Ok(lock)
}

fn by(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
}

fn fail(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StartError + use<> {
    let path = path.display().to_string();
    move |source| StartError::Folder { doing, path, source }
}

/// Keeps a copy of the installed QEMU, for what is saved under it. Without, all goes on until it is replaced.
async fn keep_qemu(ground: &Arc<Ground>) {
    let copied = Arc::clone(ground);
    let kept = tokio::task::spawn_blocking(move || {
        let name = vmm::qemu::kept_name(&copied.fingerprint(1, 128, false));
        copied.qemu.keep(&copied.settings.emulators_dir(), &name)
    });
    match kept.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::error!(
                error = chain(&error),
                "QEMU is not kept: what sleeps now needs it, and will not wake once it is replaced"
            );
        }
        Err(error) => tracing::error!(%error, "QEMU is not kept"),
    }
}

/// What the machines were that somebody may go on from; `None`: not all that is there could be looked at.
fn emulators_needed(
    ground: &Ground,
    found: &HashMap<SandboxId, Handle>,
    snapshots: &Snapshots,
) -> Option<Vec<vmm::Fingerprint>> {
    let folders = std::fs::read_dir(ground.settings.sandboxes_dir()).ok()?.count();
    if folders != found.len() {
        return None;
    }
    let awake_or_asleep = found.values().filter_map(|handle| handle.manifest().machine_needed());
    Some(awake_or_asleep.chain(snapshots.machines().ok()?).collect())
}

/// Removes emulators that nothing needs any more.
fn discard_emulators(ground: &Ground, needed: &[vmm::Fingerprint]) {
    let dir = ground.settings.emulators_dir();
    let mut kept: Vec<String> = needed.iter().map(vmm::qemu::kept_name).collect();
    kept.push(vmm::qemu::kept_name(&ground.fingerprint(1, 128, false)));
    for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if kept.contains(&name) {
            continue;
        }
        match std::fs::remove_dir_all(entry.path()) {
            Ok(()) => {
                tracing::info!(emulator = name, "a replaced QEMU that nobody needs is removed");
            }
            Err(error) => tracing::warn!(emulator = name, %error, "a replaced QEMU is not removed"),
        }
    }
}

/// Looks at the installed QEMU, with what was found out before.
async fn discover(settings: &Settings) -> Result<Qemu, StartError> {
    let path = settings.data.join("qemu.json");
    let known: Known = match std::fs::read(&path) {
        // Only a cache: what cannot be read is found out anew.
        Ok(text) => serde_json::from_slice(&text).unwrap_or_default(),
        Err(_) => Known::default(),
    };
    let places = Places { binary: settings.qemu.clone(), ..Places::default() };
    let before = known.clone();
    let qemu = tokio::task::spawn_blocking(move || Qemu::discover(&places, known)).await;
    let qemu = qemu.unwrap_or_else(|gone| std::panic::resume_unwind(gone.into_panic()))?;
    if *qemu.known() != before {
        let text = serde_json::to_vec_pretty(qemu.known()).map_err(io::Error::from);
        let fail = |source| StartError::Folder {
            doing: "write",
            path: path.display().to_string(),
            source,
        };
        let text = text.map_err(fail)?;
        if let Err(error) = vmm::files::replace(&path, &text) {
            tracing::warn!(error = chain(&error), "what is known of QEMU was not kept");
        }
    }
    Ok(qemu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_somebody_elses_is_left_as_it_is() {
        let folder = tempfile::tempdir().expect("temp dir");
        let data = folder.path().join("data");
        std::fs::create_dir(&data).expect("made");
        std::fs::set_permissions(&data, Permissions::from_mode(0o750)).expect("permissions");
        std::fs::write(data.join("letter.txt"), "dear").expect("written");
        let error = prepare_folders(&Settings::new(&data)).expect_err("not ours");
        assert!(matches!(error, StartError::NotOurs { .. }), "{error}");
        let mode = |dir: &Path| dir.metadata().expect("there").permissions().mode() & 0o7777;
        assert_eq!(mode(&data), 0o750);
        assert!(!data.join("sandboxes").exists());
        // With something of ours in it, or empty, or with nothing but what a file system puts there, it is taken.
        std::fs::create_dir(data.join("images")).expect("made");
        prepare_folders(&Settings::new(&data)).expect("taken");
        assert_eq!(mode(&data), 0o711);
        let disk = folder.path().join("disk");
        std::fs::create_dir_all(disk.join("lost+found")).expect("made");
        let elsewhere = folder.path().join("elsewhere");
        std::fs::create_dir(&elsewhere).expect("made");
        std::fs::set_permissions(&elsewhere, Permissions::from_mode(0o755)).expect("permissions");
        let settings = Settings { templates: Some(elsewhere.clone()), ..Settings::new(&disk) };
        prepare_folders(&settings).expect("taken");
        assert_eq!((mode(&disk), mode(&elsewhere)), (0o711, 0o755));
    }
}
