//! Emulators that were replaced, kept for what was saved under them.
//!
//! A saved state can be loaded by the very emulator that wrote it and no other. An upgrade of the host replaces that, so a copy
//! is kept of everything the emulator loads besides the system's libraries: itself, its firmware, and the modules with its
//! accelerators, which it takes only from its own build.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::discover::{FIRMWARE, modified_ns};
use super::{DiscoverError, Fingerprint, Known, Places, Qemu};
use crate::files::{FileError, sync_folder};

/// The emulator's name in its folder.
const BINARY: &str = "qemu-system-x86_64";

/// What microvm loads to boot a kernel; a restored machine does not need it.
const BOOT_ROM: &str = "linuxboot_dma.bin";

/// Where distributions keep modules, seen from the emulator's folder.
const MODULE_FOLDERS: [&str; 3] =
    ["../lib/x86_64-linux-gnu/qemu", "../lib64/qemu-kvm", "../lib/qemu"];

/// Modules with accelerators begin with this.
const ACCELERATOR: &str = "accel-";

/// Characters of each digest in a folder's name.
const NAME_CHARS: usize = 16;

/// The folder of an emulator among those kept.
pub fn kept_name(fingerprint: &Fingerprint) -> String {
    let short = |digest: &str| digest.get(..NAME_CHARS).unwrap_or(digest).to_owned();
    format!("{}-{}", short(&fingerprint.binary_sha256), short(&fingerprint.firmware_sha256))
}

impl Qemu {
    /// Whether the files that were looked at are still the same. An upgrade replaces them under a living daemon.
    pub fn is_unchanged(&self) -> bool {
        self.known.digests.iter().all(|(path, known)| {
            fs::metadata(path)
                .and_then(|now| Ok((now.len(), modified_ns(&now)?)))
                .is_ok_and(|now| now == (known.size, known.modified_ns))
        })
    }

    /// Copies it to its folder below `kept`, unless it is there. Blocking; some 20 MB.
    pub fn keep(&self, kept: &Path, name: &str) -> Result<(), FileError> {
        let folder = kept.join(name);
        if folder.exists() {
            return Ok(());
        }
        let fresh = kept.join(format!(".new-{name}"));
        match fs::remove_dir_all(&fresh) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(FileError::new("clear", &fresh, error));
            }
            _ => {}
        }
        fs::create_dir_all(&fresh).map_err(|error| FileError::new("make folder", &fresh, error))?;
        // Guests' accounts run it.
        for folder in [kept, &fresh] {
            fs::set_permissions(folder, Permissions::from_mode(0o755))
                .map_err(|error| FileError::new("set permissions of", folder, error))?;
        }
        copy(&self.binary, &fresh.join(BINARY), 0o755)?;
        copy(&self.firmware, &fresh.join(FIRMWARE), 0o644)?;
        let rom = self.firmware.with_file_name(BOOT_ROM);
        let roms = [rom, PathBuf::from("/usr/share/qemu").join(BOOT_ROM)];
        if let Some(rom) = roms.iter().find(|rom| rom.is_file()) {
            copy(rom, &fresh.join(BOOT_ROM), 0o644)?;
        }
        for module in self.accelerator_modules() {
            copy(&module, &fresh.join(module.file_name().unwrap_or_default()), 0o644)?;
        }
        fs::rename(&fresh, &folder).map_err(|error| FileError::new("rename to", &folder, error))?;
        sync_folder(kept)
    }

    /// The emulator with this fingerprint among those kept; `None`: it was not kept, or is not what it was.
    pub fn kept(
        &self,
        kept: &Path,
        fingerprint: &Fingerprint,
    ) -> Result<Option<Self>, DiscoverError> {
        let folder = kept.join(kept_name(fingerprint));
        let binary = folder.join(BINARY);
        if !binary.is_file() {
            return Ok(None);
        }
        let places = Places {
            binary: Some(binary),
            image_tool: Some(self.image_tool.clone()),
            data_dirs: vec![folder.clone()],
        };
        let known = Known { tsc: self.known.tsc.clone(), ..Known::default() };
        let mut found = Self::discover(&places, known)?;
        found.modules = Some(folder);
        let same = (&found.binary_digest, &found.firmware_digest)
            == (&fingerprint.binary_sha256, &fingerprint.firmware_sha256);
        Ok(same.then_some(found))
    }

    fn accelerator_modules(&self) -> Vec<PathBuf> {
        let beside = self.binary.parent().unwrap_or(Path::new("/"));
        let system = Path::new("/usr/bin");
        let folders =
            [beside, system].into_iter().flat_map(|bin| MODULE_FOLDERS.map(|to| bin.join(to)));
        for folder in self.modules.clone().into_iter().chain(folders) {
            let Ok(entries) = fs::read_dir(&folder) else { continue };
            let modules = entries.flatten().map(|entry| entry.path()).filter(|path| {
                path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(ACCELERATOR))
            });
            let modules: Vec<_> = modules.collect();
            if !modules.is_empty() {
                return modules;
            }
        }
        // Built in.
        Vec::new()
    }
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<(), FileError> {
    fs::copy(from, to).map_err(|error| FileError::new("copy to", to, error))?;
    fs::set_permissions(to, Permissions::from_mode(mode))
        .map_err(|error| FileError::new("set permissions of", to, error))?;
    File::open(to)
        .and_then(|file| file.sync_all())
        .map_err(|error| FileError::new("sync", to, error))
}
