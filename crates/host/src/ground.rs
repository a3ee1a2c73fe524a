//! What all sandboxes of a host stand on.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use vmm::{Account, Disk, Fingerprint, MachineSpec, Network, Outlets, Qemu};

use crate::budget::Budget;
use crate::checkpoints::{self, Store};
use crate::drives::Drives;
use crate::images::{self, Image, ImageError};
use crate::network::Subnet;
use crate::promises::Promises;
use crate::sandbox::work::chain;
use crate::services::Services;
use crate::settings::Settings;
use crate::slots::Slots;
use crate::template::Templates;
use crate::turns::Turns;
use crate::volumes::Volumes;

/// Shared by every sandbox's task.
#[derive(Debug)]
pub(crate) struct Ground {
    pub(crate) settings: Settings,
    pub(crate) qemu: Qemu,
    /// Emulators that are not installed any more, by their folders' names.
    pub(crate) replaced: Mutex<HashMap<String, Arc<Qemu>>>,
    /// Stands for a tap where only the shape of a machine is wanted.
    pub(crate) no_tap: std::sync::Arc<std::os::fd::OwnedFd>,
    pub(crate) subnet: Subnet,
    pub(crate) slots: Slots,
    /// Names in boxes.
    pub(crate) services: Arc<Services>,
    pub(crate) templates: Templates,
    /// Disks that outlive sandboxes.
    pub(crate) drives: Arc<Drives>,
    /// Files that many share.
    pub(crate) volumes: Arc<Volumes>,
    /// Room on the disk that is promised to copies.
    pub(crate) room: Promises,
    /// Room in memory.
    pub(crate) budget: Budget,
    /// Turns for bringing machines back from disk.
    pub(crate) restores: Turns,
    /// Where checkpoints are kept.
    pub(crate) store: Option<Arc<Store>>,
    /// Who this host is there.
    pub(crate) host: checkpoints::Host,
    /// Whether the project's spending limit is reached (S23).
    pub(crate) spending: watch::Sender<bool>,
    /// Whether the disk is so full that running guests must stand still.
    pub(crate) disk_low: watch::Receiver<bool>,
    /// Whether the disk has room for what nobody has asked for yet.
    pub(crate) disk_room: watch::Receiver<DiskRoom>,
}

/// How much room the disk has for what nobody has asked for yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DiskRoom {
    /// [`FREE_BYTES_FOR_SPARE`] and more.
    Enough,
    /// What is there may stay, no more is made.
    Little,
    /// Less than [`FREE_BYTES_MIN`]: whoever wants something made needs that himself.
    None,
}

impl DiskRoom {
    fn of(free: u64) -> Self {
        match free {
            FREE_BYTES_FOR_SPARE.. => Self::Enough,
            FREE_BYTES_MIN.. => Self::Little,
            _ => Self::None,
        }
    }
}

impl Ground {
    /// What a state of a sandbox of this size, with places for drives or without, saved here and now, depends on.
    pub(crate) fn fingerprint(&self, cpus: u32, memory_mib: u32, drives: bool) -> Fingerprint {
        let nowhere = std::path::PathBuf::from("/nonexistent");
        self.qemu.fingerprint(&MachineSpec {
            label: "any".to_owned(),
            cpus,
            memory_mib,
            memory: nowhere.clone(),
            disk: Some(Disk { overlay: nowhere.clone(), base: nowhere.clone() }),
            drives: drives.then(Vec::new),
            network: Some(Network {
                tap: std::sync::Arc::clone(&self.no_tap),
                mac: [2, 0, 0, 0, 0, 1],
            }),
            outlets: Outlets { sockets: nowhere.clone(), console: nowhere.clone(), log: nowhere },
            account: Account::ROOT,
        })
    }

    /// The image that a name stands for.
    pub(crate) fn image(&self, name: &str) -> Result<Image, ImageError> {
        let dir = self.settings.images_dir();
        if name == images::DEFAULT_NAME {
            images::find_default(&dir)
        } else {
            images::find(&dir, &name.parse()?)
        }
    }

    /// The emulator that a machine with this fingerprint needs: the installed one, or one that was replaced. Where there is none
    /// it is the installed one all the same, and the fingerprint says why it does not fit. May block for some tenths of a second
    /// the first time.
    pub(crate) fn qemu_for(&self, fingerprint: &Fingerprint) -> Arc<Qemu> {
        let name = vmm::qemu::kept_name(fingerprint);
        let installed = name == vmm::qemu::kept_name(&self.fingerprint(1, 128, false));
        if installed && self.qemu.is_unchanged() {
            return Arc::new(self.qemu.clone());
        }
        let mut replaced = self.replaced.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = replaced.get(&name) {
            return Arc::clone(known);
        }
        match self.qemu.kept(&self.settings.emulators_dir(), fingerprint) {
            Ok(Some(found)) => {
                tracing::info!(version = %found.version(), folder = name, "a replaced QEMU is used");
                let found = Arc::new(found);
                replaced.insert(name, Arc::clone(&found));
                return found;
            }
            Ok(None) => {}
            Err(error) => tracing::error!(error = chain(&error), "a replaced QEMU cannot be used"),
        }
        Arc::new(self.qemu.clone())
    }

    /// The emulator for machines that begin anew: the installed one as it was when the daemon began.
    pub(crate) fn qemu_now(&self) -> Arc<Qemu> {
        self.qemu_for(&self.fingerprint(1, 128, false))
    }

    /// The image with this digest.
    pub(crate) fn image_by_digest(&self, digest: &str) -> Result<Image, ImageError> {
        images::find(&self.settings.images_dir(), &digest.parse()?)
    }
}

/// Least free space, bytes, for making something new: a guest that finds no room for a page of its memory dies of it.
pub(crate) const FREE_BYTES_MIN: u64 = 256 * 1024 * 1024;

/// Least free space, bytes, for making what nobody has asked for yet: afterwards somebody can still be made what he asks for.
pub(crate) const FREE_BYTES_FOR_SPARE: u64 = 2 * FREE_BYTES_MIN;

/// Least free space, bytes, for letting a guest go on.
pub(crate) const FREE_BYTES_TO_WAKE: u64 = 128 * 1024 * 1024;

/// Below so many free bytes running guests are made to stand still: one that touches a new page of its memory and finds no
/// room for it on the disk would die.
pub(crate) const FREE_BYTES_TO_RUN: u64 = 64 * 1024 * 1024;

/// How often the disk is looked at. A disk of 300 MB/s fills what is kept free in about that time.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Watches the free space of the data folder. The first tells whether running guests must stand still. Ends with the last
/// receiver of that.
pub(crate) fn watch_disk(
    dir: std::path::PathBuf,
) -> (watch::Receiver<bool>, watch::Receiver<DiskRoom>) {
    // Known from the start: what a daemon finds standing still must not be let go on for a moment.
    let first = free_bytes(&dir).unwrap_or(u64::MAX);
    let (low, seen) = watch::channel(first < FREE_BYTES_TO_RUN);
    let (room, room_seen) = watch::channel(DiskRoom::of(first));
    tokio::spawn(async move {
        while !low.is_closed() {
            match free_bytes(&dir) {
                Ok(free) => {
                    // Not on and off around one number.
                    let limit = if *low.borrow() { FREE_BYTES_TO_WAKE } else { FREE_BYTES_TO_RUN };
                    let is_low = free < limit;
                    low.send_if_modified(|was| std::mem::replace(was, is_low) != is_low);
                    let now = DiskRoom::of(free);
                    room.send_if_modified(|was| std::mem::replace(was, now) != now);
                }
                Err(error) => tracing::warn!(%error, dir = %dir.display(), "free space not known"),
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    });
    (seen, room_seen)
}

/// Least free space, bytes, for putting a guest to sleep on disk: what it has not yet written, and its state.
pub(crate) const FREE_BYTES_TO_SLEEP: u64 = 16 * 1024 * 1024;

/// Free bytes of the file system below a path.
pub(crate) fn free_bytes(path: &Path) -> std::io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail * stat.f_frsize)
}
