//! What all sandboxes of a host stand on.

use std::path::Path;

use vmm::{Fingerprint, Qemu};

use crate::images::{self, Image, ImageError};
use crate::network::Subnet;
use crate::settings::Settings;
use crate::slots::Slots;
use crate::template::Templates;

/// Shared by every sandbox's task.
#[derive(Debug)]
pub(crate) struct Ground {
    pub(crate) settings: Settings,
    pub(crate) qemu: Qemu,
    /// Of QEMU itself; the parts about one machine in it mean nothing.
    pub(crate) fingerprint: Fingerprint,
    pub(crate) subnet: Subnet,
    pub(crate) slots: Slots,
    pub(crate) templates: Templates,
}

impl Ground {
    /// The image that a name stands for.
    pub(crate) fn image(&self, name: &str) -> Result<Image, ImageError> {
        let dir = self.settings.images_dir();
        if name == images::DEFAULT_NAME { images::find_default(&dir) } else { images::find(&dir, &name.parse()?) }
    }

    /// The image with this digest.
    pub(crate) fn image_by_digest(&self, digest: &str) -> Result<Image, ImageError> {
        images::find(&self.settings.images_dir(), &digest.parse()?)
    }
}

/// Least free space, bytes, for making something new: a guest that finds no room for a page of its memory dies of it.
pub(crate) const FREE_BYTES_MIN: u64 = 256 * 1024 * 1024;

/// Least free space, bytes, for letting a guest go on.
pub(crate) const FREE_BYTES_TO_WAKE: u64 = 32 * 1024 * 1024;

/// Free bytes of the file system below a path.
pub(crate) fn free_bytes(path: &Path) -> std::io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail * stat.f_frsize)
}
