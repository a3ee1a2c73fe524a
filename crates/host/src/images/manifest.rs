//! What an image says of itself, on disk for as long as a template made from it lives.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{INITRD_FILE, ImageError, ImageId, KERNEL_FILE, ROOT_FILE, disk};

/// Format of the manifest; goes up when an older version could misread it.
pub const FORMAT: u32 = 1;

/// Largest manifest that is read, in bytes. A hundred packages make some 4 KiB.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// What an image is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`] of the version that wrote it.
    pub format: u32,
    /// When it was built, RFC 3339 in UTC. Not part of the digest.
    pub created_at: String,
    /// The kernel.
    pub kernel: Kernel,
    /// The guest agent in the initial RAM disk.
    pub guest: GuestAgent,
    /// The three files.
    pub parts: Parts,
    /// Debian packages of the root file system, as `name=version`, in order.
    pub packages: Vec<String>,
}

/// Which kernel an image boots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// As `uname -r` says it in the guest.
    pub release: String,
    /// The Debian package, as `name=version`.
    pub package: String,
    /// Modules in the initial RAM disk, in the order in which they are loaded.
    pub modules: Vec<String>,
}

/// Which guest agent an image boots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestAgent {
    /// Version of the program.
    pub version: String,
    /// SHA-256 of the program, in hexadecimal.
    pub sha256: String,
    /// The newest version of the guest protocol that it speaks, where it is not to speak all that it knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol_max: Option<u16>,
}

/// The files of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parts {
    /// The kernel.
    pub vmlinuz: Part,
    /// The initial RAM disk.
    pub initrd: Part,
    /// The root file system.
    pub root: Part,
}

impl Parts {
    /// Each part with its file name within the image.
    pub fn by_file(&self) -> [(&'static str, &Part); 3] {
        [(KERNEL_FILE, &self.vmlinuz), (INITRD_FILE, &self.initrd), (ROOT_FILE, &self.root)]
    }
}

/// One file of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// SHA-256 over the whole file, holes read as zeros, in hexadecimal.
    pub sha256: String,
    /// Length in bytes, holes included.
    pub bytes: u64,
}

impl Manifest {
    /// Reads the manifest at `path`.
    ///
    /// # Errors
    ///
    /// It cannot be read, is no manifest, or is newer than this program.
    pub fn read(path: &Path) -> Result<Self, ImageError> {
        /// Read first, so that a newer format is named rather than called broken.
        #[derive(Deserialize)]
        struct Header {
            format: u32,
        }

        let text = disk::read_limited(path, MANIFEST_BYTES_MAX)?;
        let broken = |source| ImageError::Manifest { path: path.to_owned(), source };
        let Header { format } = serde_json::from_slice(&text).map_err(broken)?;
        if format > FORMAT {
            return Err(ImageError::TooNew {
                path: path.to_owned(),
                found: format,
                newest: FORMAT,
            });
        }
        serde_json::from_slice(&text).map_err(broken)
    }

    /// The digest that these parts give.
    pub fn id(&self) -> ImageId {
        let mut text = String::from("dormouse image 1\n");
        for (file, part) in self.parts.by_file() {
            text.push_str(&part.sha256);
            text.push_str("  ");
            text.push_str(file);
            text.push('\n');
        }
        ImageId(disk::sha256_of(text.as_bytes()))
    }
}
