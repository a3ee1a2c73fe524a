//! Files of an image as the disk has them: whole, synced, hashed, and never half-published.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

use super::ImageError;

/// Beginning of the names of folders in which something is being built.
const BUILDING: &str = ".building-";

/// How much is read and hashed at once, in bytes: fits the second-level cache.
const CHUNK_BYTES: usize = 256 * 1024;

/// The images folder while one process builds in it.
///
/// The lock goes with the process, however it ends; what it left half-built is recognised by its name and
/// removed by the next builder, who knows by the lock that nobody works on it any more.
#[derive(Debug)]
pub(super) struct Workshop {
    dir: PathBuf,
    _lock: File,
}

impl Workshop {
    /// Makes the folder if need be, waits until no other process builds, and removes what a dead one left.
    pub(super) fn open(images: &Path) -> Result<Self, ImageError> {
        fs::create_dir_all(images).map_err(at("create folder", images))?;
        let dir = images.canonicalize().map_err(at("open folder", images))?;
        let path = dir.join(".lock");
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(at("open", &path))?;
        flock(&lock, FlockOperation::LockExclusive).map_err(|e| at("lock", &path)(e.into()))?;
        for entry in fs::read_dir(&dir).map_err(at("list", &dir))? {
            let entry = entry.map_err(at("list", &dir))?;
            if entry.file_name().to_string_lossy().starts_with(BUILDING) {
                fs::remove_dir_all(entry.path()).map_err(at("remove half-built", &entry.path()))?;
            }
        }
        Ok(Self { dir, _lock: lock })
    }

    /// The images folder, absolute.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// A new folder to build in; gone with the value unless published.
    pub(super) fn bench(&self, what: &str) -> Result<Bench, ImageError> {
        let path = self.dir.join(format!("{BUILDING}{what}-{}", std::process::id()));
        fs::create_dir(&path).map_err(at("create folder", &path))?;
        // QEMU runs without privileges and must reach the parts.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
            .map_err(at("set permissions of", &path))?;
        Ok(Bench { path, published: false })
    }

    /// Refuses to begin where what is to be built would not fit.
    pub(super) fn need_space(&self, needed: u64) -> Result<(), ImageError> {
        let stat =
            rustix::fs::statvfs(&self.dir).map_err(|e| at("look at", &self.dir)(e.into()))?;
        let available = stat.f_bavail.saturating_mul(stat.f_frsize);
        if available < needed {
            return Err(ImageError::NoSpace { dir: self.dir.clone(), available, needed });
        }
        Ok(())
    }

    /// Points `name` at the folder `to`, at once and for good.
    pub(super) fn point(&self, name: &str, to: &str) -> Result<(), ImageError> {
        let pointer = self.dir.join(name);
        match fs::read_link(&pointer) {
            Ok(target) if target == Path::new(to) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(at("read link", &pointer)(error)),
        }
        let bench = self.bench("pointer")?;
        let fresh = bench.path.join(name);
        symlink(to, &fresh).map_err(at("create link", &fresh))?;
        fs::rename(&fresh, &pointer).map_err(at("replace", &pointer))?;
        sync_folder(&self.dir)
    }
}

/// A folder in which something is being built.
#[derive(Debug)]
pub(super) struct Bench {
    path: PathBuf,
    published: bool,
}

impl Bench {
    /// Where to build.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Syncs the folder, whose files are synced already, and gives it its final name.
    pub(super) fn publish(mut self, to: &Path) -> Result<(), ImageError> {
        sync_folder(&self.path)?;
        fs::rename(&self.path, to).map_err(at("publish", to))?;
        self.published = true;
        match to.parent() {
            Some(parent) => sync_folder(parent),
            None => Ok(()),
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if !self.published
            && let Err(error) = fs::remove_dir_all(&self.path)
        {
            // The next builder removes it; nothing is lost but room.
            tracing::warn!(path = %self.path.display(), %error, "half-built image not removed");
        }
    }
}

/// For `map_err`: a file operation's failure with what was being done, and to which file.
pub(super) fn at(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> ImageError + use<> {
    let path = path.to_owned();
    move |source| ImageError::Io { doing, path: path.clone(), source }
}

/// Writes a new file that nobody may change, and syncs it.
pub(super) fn write_new(path: &Path, content: &[u8]) -> Result<(), ImageError> {
    let mut file = File::options()
        .create_new(true)
        .write(true)
        .mode(0o444)
        .open(path)
        .map_err(at("create", path))?;
    file.write_all(content).and_then(|()| file.sync_all()).map_err(at("write", path))
}

/// Makes a file that another program wrote durable and read-only.
pub(super) fn seal(path: &Path) -> Result<(), ImageError> {
    let file = File::open(path).map_err(at("open", path))?;
    file.set_permissions(fs::Permissions::from_mode(0o444))
        .and_then(|()| file.sync_all())
        .map_err(at("sync", path))
}

/// Gives back room that was set aside for a sparse file but holds nothing.
pub(crate) fn trim(path: &Path) -> Result<(), ImageError> {
    use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
    let punch = || -> io::Result<()> {
        let file = File::options().write(true).open(path)?;
        let length = file.metadata()?.len();
        let mut done = 0;
        while done < length {
            let hole = seek(&file, SeekFrom::Hole(done))?;
            let data = match seek(&file, SeekFrom::Data(hole)) {
                Ok(offset) => offset,
                Err(rustix::io::Errno::NXIO) => length,
                Err(error) => return Err(error.into()),
            };
            if data > hole {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                match fallocate(&file, flags, hole, data - hole) {
                    // A file system without holes has none to give back.
                    Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            done = data.max(hole);
        }
        Ok(())
    };
    punch().map_err(at("trim", path))
}

/// Syncs a folder: the names in it.
pub(super) fn sync_folder(path: &Path) -> Result<(), ImageError> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(at("sync folder", path))
}

/// Reads a file that must not be larger than `limit` bytes.
pub(super) fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, ImageError> {
    let file = File::open(path).map_err(at("open", path))?;
    let mut content = Vec::new();
    file.take(limit + 1).read_to_end(&mut content).map_err(at("read", path))?;
    if content.len() as u64 > limit {
        let error = io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {limit} bytes"));
        return Err(at("read", path)(error));
    }
    Ok(content)
}

/// SHA-256 of a file in hexadecimal; holes count as zeros without being read.
pub(super) fn sha256(path: &Path) -> Result<String, ImageError> {
    let hash = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        let (zeros, mut chunk) = (vec![0; CHUNK_BYTES], vec![0; CHUNK_BYTES]);
        let mut hasher = Sha256::new();
        let mut done = 0;
        while done < length {
            // Past the last data there is no such place: the rest is a hole.
            let data = match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(done)) {
                Ok(offset) => offset,
                Err(rustix::io::Errno::NXIO) => length,
                Err(error) => return Err(error.into()),
            };
            while done < data {
                let step = usize::try_from(data - done).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
                hasher.update(&zeros[..step]);
                done += step as u64;
            }
            let hole = if data < length {
                rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(data))?
            } else {
                length
            };
            file.seek(SeekFrom::Start(done))?;
            while done < hole {
                let step = usize::try_from(hole - done).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
                file.read_exact(&mut chunk[..step])?;
                hasher.update(&chunk[..step]);
                done += step as u64;
            }
        }
        Ok(hexadecimal(&hasher.finalize()))
    };
    hash().map_err(at("read", path))
}

/// SHA-256 of bytes in hexadecimal.
pub(super) fn sha256_of(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_hashes_as_zeros_wherever_it_is() {
        let dir = tempfile::tempdir().unwrap();
        for (name, data_at, length) in
            [("begin", 0, 1 << 21), ("middle", 1 << 20, 3 << 20), ("none", 0, 3)]
        {
            let path = dir.path().join(name);
            let mut file = File::create(&path).unwrap();
            file.set_len(length).unwrap();
            file.seek(SeekFrom::Start(data_at)).unwrap();
            file.write_all(b"abc").unwrap();
            trim(&path).unwrap();
            assert_eq!(file.metadata().unwrap().len(), length.max(3), "{name}");
            assert_eq!(sha256(&path).unwrap(), sha256_of(&fs::read(&path).unwrap()), "{name}");
        }
        let empty = dir.path().join("empty");
        File::create(&empty).unwrap().set_len(1 << 20).unwrap();
        trim(&empty).unwrap();
        assert_eq!(sha256(&empty).unwrap(), sha256_of(&vec![0; 1 << 20]));
    }

    #[test]
    fn what_a_dead_builder_left_goes_and_everything_unknown_stays() {
        let dir = tempfile::tempdir().unwrap();
        for name in [".building-image-1", "my-own", ".cache", "0123"] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("f"), "").unwrap();
        }
        let workshop = Workshop::open(dir.path()).unwrap();
        assert!(!dir.path().join(".building-image-1").exists());
        for name in ["my-own", ".cache", "0123"] {
            assert!(dir.path().join(name).join("f").exists(), "{name}");
        }
        assert!(workshop.need_space(1).is_ok());
        let error = workshop.need_space(u64::MAX).unwrap_err().to_string();
        assert!(error.contains("MiB free"), "{error}");
    }

    #[test]
    fn a_pointer_is_replaced_in_one_step() {
        let dir = tempfile::tempdir().unwrap();
        let workshop = Workshop::open(dir.path()).unwrap();
        for target in ["one", "one", "two"] {
            workshop.point("default", target).unwrap();
            assert_eq!(fs::read_link(dir.path().join("default")).unwrap(), Path::new(target));
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "the pointer and the lock");
    }
}
