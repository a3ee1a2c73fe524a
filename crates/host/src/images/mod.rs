//! Guest images: what a machine is booted from, once, to make a template.
//!
//! An image is a folder named after its content and never changed again:
//!
//! ```text
//! <images>/<digest>/vmlinuz        Debian's cloud kernel, as it comes (bzImage: every QEMU boots it)
//! <images>/<digest>/initrd         the guest agent as /init, and the kernel modules it loads
//! <images>/<digest>/root.ext4      the root file system: sparse, read-only, backing file of every overlay
//! <images>/<digest>/manifest.json  what the parts are and where they came from
//! <images>/default -> <digest>     the image used when nobody names one
//! <images>/.cache/                 kernel and root file system by their inputs; hard-linked into images
//! ```
//!
//! # Invariants
//!
//! 1. A folder with a digest for a name is whole: it is built under another name, synced, then renamed.
//! 2. A folder is never changed or deleted here. Names that are unknown are left alone, also while building.
//! 3. The same inputs give the same digest. A new guest agent makes a new digest which shares the other
//!    parts with the old image, in well under a second and without the network.
//!
//! # Not here
//!
//! Booting. Which machine is made of an image, and the template snapshot, are the business of templates.

mod apt;
mod build;
pub(crate) mod commands;
mod cpio;
mod disk;
mod error;
mod kernel;
mod manifest;
mod modules;
mod rootfs;

pub use build::{BuildOptions, DEFAULT_PACKAGES, build};
pub(crate) use disk::trim;
pub use error::ImageError;
pub use manifest::{FORMAT, GuestAgent, Kernel, Manifest, Part, Parts};

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Name of the pointer to the image used when nobody names one.
pub const DEFAULT_NAME: &str = "default";

/// File name of the kernel within an image.
pub const KERNEL_FILE: &str = "vmlinuz";
/// File name of the initial RAM disk within an image.
pub const INITRD_FILE: &str = "initrd";
/// File name of the root file system within an image.
pub const ROOT_FILE: &str = "root.ext4";
/// File name of the manifest within an image.
pub const MANIFEST_FILE: &str = "manifest.json";

/// Digest of an image: 64 lower-case hexadecimal digits, the SHA-256 over the digests of its parts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ImageId(String);

impl ImageId {
    /// The digest as it stands in the folder's name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ImageId {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self, ImageError> {
        let is_digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if text.len() == 64 && text.bytes().all(is_digit) {
            Ok(Self(text.to_owned()))
        } else {
            Err(ImageError::BadId { text: text.chars().take(80).collect() })
        }
    }
}

/// A published image: its folder has been opened, its manifest read, its parts found at their full size.
#[derive(Clone, Debug)]
pub struct Image {
    id: ImageId,
    dir: PathBuf,
    manifest: Manifest,
}

impl Image {
    /// Opens the image in `dir`.
    ///
    /// Reads the manifest and looks that each part is there with its size; [`Image::verify`] reads them too.
    ///
    /// # Errors
    ///
    /// The manifest cannot be read, is of a newer format, or does not match the folder's name or parts.
    pub fn open(dir: &Path) -> Result<Self, ImageError> {
        let dir = dir.canonicalize().map_err(|source| ImageError::Io {
            doing: "open image",
            path: dir.to_owned(),
            source,
        })?;
        let manifest = Manifest::read(&dir.join(MANIFEST_FILE))?;
        let id = manifest.id();
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        if name != id.as_str() {
            return Err(ImageError::Damaged {
                dir: dir.clone(),
                what: format!("its manifest describes image {id}"),
            });
        }
        for (file, part) in manifest.parts.by_file() {
            let path = dir.join(file);
            let bytes = std::fs::metadata(&path)
                .map_err(|source| ImageError::Io { doing: "look at", path, source })?
                .len();
            if bytes != part.bytes {
                return Err(ImageError::Damaged {
                    dir: dir.clone(),
                    what: format!("`{file}` has {bytes} bytes, its manifest says {}", part.bytes),
                });
            }
        }
        Ok(Self { id, dir, manifest })
    }

    /// Reads every part and compares it with its digest. Takes seconds: for `doctor`, not for a start.
    ///
    /// # Errors
    ///
    /// A part cannot be read or is not what was built.
    pub fn verify(&self) -> Result<(), ImageError> {
        for (file, part) in self.manifest.parts.by_file() {
            if disk::sha256(&self.dir.join(file))? != part.sha256 {
                return Err(ImageError::Damaged {
                    dir: self.dir.clone(),
                    what: format!("`{file}` is not the file that was built"),
                });
            }
        }
        Ok(())
    }

    /// Its digest.
    pub fn id(&self) -> &ImageId {
        &self.id
    }

    /// Its folder, absolute and without links.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What it was made of.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The kernel: a bzImage.
    pub fn kernel(&self) -> PathBuf {
        self.dir.join(KERNEL_FILE)
    }

    /// The initial RAM disk.
    pub fn initrd(&self) -> PathBuf {
        self.dir.join(INITRD_FILE)
    }

    /// The root file system: a raw ext4 disk, never to be opened for writing.
    pub fn root(&self) -> PathBuf {
        self.dir.join(ROOT_FILE)
    }
}

/// Opens the default image below `images`, or says how to build one.
///
/// # Errors
///
/// [`ImageError::NoDefault`] where none was built yet; otherwise as [`Image::open`].
pub fn find_default(images: &Path) -> Result<Image, ImageError> {
    let pointer = images.join(DEFAULT_NAME);
    match std::fs::symlink_metadata(&pointer) {
        Ok(_) => Image::open(&pointer),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => {
            Err(ImageError::NoDefault { images: images.to_owned() })
        }
        Err(source) => Err(ImageError::Io { doing: "look at", path: pointer, source }),
    }
}

/// Opens the image with this digest below `images`.
///
/// # Errors
///
/// As [`Image::open`].
pub fn find(images: &Path, id: &ImageId) -> Result<Image, ImageError> {
    Image::open(&images.join(id.as_str()))
}

/// Digests of all images below `images`, in order of their digests. Other names are passed over.
///
/// # Errors
///
/// The folder cannot be read. A folder that does not exist holds no images.
pub fn list(images: &Path) -> Result<Vec<ImageId>, ImageError> {
    let failed =
        |source| ImageError::Io { doing: "list images in", path: images.to_owned(), source };
    let entries = match std::fs::read_dir(images) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut ids = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        ids.extend(entry.file_name().to_string_lossy().parse::<ImageId>().ok());
    }
    ids.sort();
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_64_lower_case_hexadecimal_digits() {
        let good = "0123456789abcdef".repeat(4);
        assert_eq!(good.parse::<ImageId>().unwrap().as_str(), good);
        for bad in ["", "..", "default", &good[1..], &good.to_uppercase(), &format!("{good}0")] {
            let error = bad.parse::<ImageId>().unwrap_err().to_string();
            assert!(error.contains("64 hexadecimal digits"), "{error}");
        }
    }

    #[test]
    fn without_images_there_is_no_default_and_the_error_says_how_to_make_one() {
        let dir = std::env::temp_dir().join("dormouse-no-images-here");
        assert!(list(&dir).unwrap().is_empty());
        let error = find_default(&dir).unwrap_err();
        assert!(matches!(error, ImageError::NoDefault { .. }));
        assert!(error.to_string().contains("dormouse images build"), "{error}");
    }
}
