//! Files: one request each. File system calls block, so they run on the runtime's helper threads, a portion at a time.

use std::{
    ffi::OsStr,
    fs::{self, DirBuilder, File, Metadata, Permissions},
    io::{self, Read, Seek, Write},
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

use rustix::fs::OFlags;
use wire::{
    Entry, EntryKind, Failure, FailureCode, Reply, Stat, WriteSpec, files::ENTRIES_PER_MESSAGE,
    frame::PAYLOAD_MAX,
};

use crate::{
    channel::{Inbox, Outbox},
    failure::{failure, invalid, io_failure},
};

/// Bytes read from a file at a time.
const READ_CHUNK: usize = PAYLOAD_MAX;
/// Bytes of entries in one message; the rest of a frame is for the last entry, whose name and target are at most 255 and 4,096 bytes.
const ENTRIES_BYTES: usize = PAYLOAD_MAX - 8 * 1024;
/// Longest path, as the kernel has it.
const PATH_MAX: usize = 4096;

/// Checks a path of a request.
pub(crate) fn path(field: &str, bytes: Vec<u8>) -> Result<PathBuf, Failure> {
    let shown = String::from_utf8_lossy(&bytes).into_owned();
    if !bytes.starts_with(b"/") {
        return Err(invalid(field, format!("{field} must be an absolute path, not `{shown}`")));
    }
    if bytes.contains(&0) {
        return Err(invalid(field, format!("{field} must not hold a NUL byte")));
    }
    if bytes.len() >= PATH_MAX {
        return Err(invalid(field, format!("{field} is longer than {PATH_MAX} bytes")));
    }
    Ok(PathBuf::from(std::ffi::OsString::from_vec(bytes)))
}

/// Runs blocking work on a helper thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(failure(FailureCode::Io, None, format!("helper thread: {error}"))),
    }
}

pub(crate) async fn read(
    outbox: &Outbox,
    from: Vec<u8>,
    offset: u64,
    length: Option<u64>,
) -> Result<(), Failure> {
    let from = path("path", from)?;
    let (mut file, stat) = blocking(move || {
        // NONBLOCK: opening a pipe nobody writes to must not hang; it changes nothing for a regular file.
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
        let open = fs::File::options().read(true).custom_flags(flags).open(&from);
        let mut file = open.map_err(|error| at(&error, "open", &from))?;
        let metadata = file.metadata().map_err(|error| at(&error, "look at", &from))?;
        if metadata.is_dir() {
            let message = format!("{} is a directory", from.display());
            return Err(failure(FailureCode::IsADirectory, Some("path"), message));
        }
        if !metadata.is_file() {
            return Err(invalid("path", format!("{} is no regular file", from.display())));
        }
        file.seek(io::SeekFrom::Start(offset)).map_err(|error| at(&error, "seek in", &from))?;
        Ok((file, stat_of(&metadata, None)))
    })
    .await?;
    outbox.reply(&Reply::Stat(stat)).await;
    let mut left = length.unwrap_or(u64::MAX);
    while left > 0 {
        let want = usize::try_from(left).unwrap_or(usize::MAX).min(READ_CHUNK);
        let (back, chunk) = blocking(move || {
            let mut chunk = vec![0; want];
            let read = file.read(&mut chunk);
            let read = read.map_err(|error| io_failure(&error, "path", "read the file"))?;
            chunk.truncate(read);
            Ok((file, chunk))
        })
        .await?;
        file = back;
        if chunk.is_empty() {
            break;
        }
        left -= chunk.len() as u64;
        outbox.data(&chunk).await;
    }
    Ok(())
}

/// A file on its way to its name; removed when dropped before.
struct Temporary {
    file: File,
    path: PathBuf,
    target: PathBuf,
    done: bool,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.done
            && let Err(error) = fs::remove_file(&self.path)
        {
            eprintln!("remove {}: {error}", self.path.display());
        }
    }
}

pub(crate) async fn write(inbox: &mut Inbox, spec: WriteSpec) -> Result<u64, Failure> {
    let to = path("path", spec.path)?;
    let (mode, parents) = (spec.mode, spec.parents);
    if mode.is_some_and(|mode| mode > 0o7777) {
        return Err(invalid("mode", "mode must be at most 0o7777"));
    }
    let target = to.clone();
    let mut temporary = blocking(move || begin(&target, parents)).await?;
    let mut written = 0;
    while let Some(chunk) = inbox.recv().await {
        written += chunk.len() as u64;
        let target = to.clone();
        temporary = blocking(move || {
            temporary.file.write_all(&chunk).map_err(|error| at(&error, "write", &target))?;
            Ok(temporary)
        })
        .await?;
    }
    blocking(move || finish(temporary, &to, mode)).await?;
    Ok(written)
}

fn begin(to: &Path, parents: bool) -> Result<Temporary, Failure> {
    if to.is_dir() {
        let message = format!("{} is a directory", to.display());
        return Err(failure(FailureCode::IsADirectory, Some("path"), message));
    }
    if to.file_name().is_none() {
        return Err(invalid("path", format!("{} names no file", to.display())));
    }
    // Renaming over it would put a file where programs expect a device or a pipe.
    if fs::metadata(to).is_ok_and(|there| !there.is_file()) {
        let message = format!("{} is a device, pipe or socket", to.display());
        return Err(invalid("path", message + ", which is not replaced; write to it by a command"));
    }
    // A symbolic link is written through, as if the file had been written in place.
    let target = fs::canonicalize(to).unwrap_or_else(|_| to.to_owned());
    let folder = target.parent().unwrap_or(Path::new("/"));
    if parents {
        fs::create_dir_all(folder).map_err(|error| at(&error, "make", folder))?;
    }
    // Beside its target, so that the rename stays within one file system; random, because one may be left by a machine
    // that died.
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random[..], rustix::rand::GetRandomFlags::empty())
        .map_err(|error| at(&error.into(), "write", to))?;
    let path = folder.join(format!(".dormouse-{:016x}", u64::from_ne_bytes(random)));
    let file = File::options().write(true).create_new(true).mode(0o600).open(&path);
    let file = file.map_err(|error| at(&error, "write", to))?;
    Ok(Temporary { file, path, target, done: false })
}

fn finish(mut temporary: Temporary, to: &Path, mode: Option<u32>) -> Result<(), Failure> {
    // What is replaced passes its owner and permissions on.
    let replaced = fs::metadata(&temporary.target).ok();
    let mode = mode.or(replaced.as_ref().map(|old| old.mode() & 0o7777)).unwrap_or(0o644);
    let failed = |error: io::Error| at(&error, "write", to);
    if let Some(old) = &replaced {
        std::os::unix::fs::fchown(&temporary.file, Some(old.uid()), Some(old.gid()))
            .map_err(failed)?;
    }
    temporary.file.set_permissions(Permissions::from_mode(mode)).map_err(failed)?;
    fs::rename(&temporary.path, &temporary.target).map_err(failed)?;
    temporary.done = true;
    Ok(())
}

pub(crate) async fn stat(of: Vec<u8>) -> Result<Stat, Failure> {
    let of = path("path", of)?;
    blocking(move || {
        let metadata = fs::symlink_metadata(&of).map_err(|error| at(&error, "look at", &of))?;
        Ok(stat_of(&metadata, Some(&of)))
    })
    .await
}

pub(crate) async fn list(outbox: &Outbox, of: Vec<u8>) -> Result<(), Failure> {
    let of = path("path", of)?;
    let folder = of.clone();
    let names = blocking(move || {
        let entries = fs::read_dir(&folder).map_err(|error| at(&error, "list", &folder))?;
        let mut names = Vec::new();
        for entry in entries {
            names.push(entry.map_err(|error| at(&error, "list", &folder))?.file_name());
        }
        names.sort();
        Ok(names)
    })
    .await?;
    let mut names = names.into_iter().peekable();
    while names.peek().is_some() {
        let folder = of.clone();
        let (back, entries) = blocking(move || {
            let mut entries = Vec::new();
            let mut bytes = 0;
            while entries.len() < ENTRIES_PER_MESSAGE
                && bytes < ENTRIES_BYTES
                && let Some(name) = names.next()
            {
                let path = folder.join(&name);
                // Removed since it was listed.
                let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
                let stat = stat_of(&metadata, Some(&path));
                bytes += name.len() + stat.target.as_ref().map_or(0, Vec::len) + 64;
                entries.push(Entry { name: name.into_vec(), stat });
            }
            Ok((names, entries))
        })
        .await?;
        names = back;
        outbox.reply(&Reply::Entries(entries)).await;
    }
    Ok(())
}

pub(crate) async fn mkdir(of: Vec<u8>, parents: bool) -> Result<(), Failure> {
    let of = path("path", of)?;
    blocking(move || {
        let mut builder = DirBuilder::new();
        builder.recursive(parents).mode(0o755);
        builder.create(&of).map_err(|error| at(&error, "make", &of))
    })
    .await
}

pub(crate) async fn rename(from: Vec<u8>, to: Vec<u8>) -> Result<(), Failure> {
    let (from, to) = (path("from", from)?, path("to", to)?);
    blocking(move || {
        let doing = format!("rename {} to {}", from.display(), to.display());
        let field = if fs::symlink_metadata(&from).is_err() { "from" } else { "to" };
        fs::rename(&from, &to).map_err(|error| io_failure(&error, field, &doing))
    })
    .await
}

pub(crate) async fn remove(of: Vec<u8>, recursive: bool) -> Result<(), Failure> {
    let of = path("path", of)?;
    if of.parent().is_none() {
        return Err(invalid("path", "the root directory cannot be removed"));
    }
    blocking(move || {
        let metadata = fs::symlink_metadata(&of).map_err(|error| at(&error, "remove", &of))?;
        let removed = match (metadata.is_dir(), recursive) {
            (true, true) => fs::remove_dir_all(&of),
            (true, false) => fs::remove_dir(&of),
            (false, _) => fs::remove_file(&of),
        };
        removed.map_err(|error| at(&error, "remove", &of))
    })
    .await
}

fn stat_of(metadata: &Metadata, link: Option<&Path>) -> Stat {
    let kind = metadata.file_type();
    let kind = if kind.is_file() {
        EntryKind::File
    } else if kind.is_dir() {
        EntryKind::Directory
    } else if kind.is_symlink() {
        EntryKind::Symlink
    } else {
        debug_assert!(
            kind.is_fifo() || kind.is_socket() || kind.is_char_device() || kind.is_block_device()
        );
        EntryKind::Other
    };
    let target = link
        .filter(|_| kind == EntryKind::Symlink)
        .and_then(|link| fs::read_link(link).ok())
        .map(|target| OsStr::as_bytes(target.as_os_str()).to_vec());
    let modified_ms = metadata.mtime().saturating_mul(1000) + metadata.mtime_nsec() / 1_000_000;
    Stat {
        kind,
        size: metadata.len(),
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        gid: metadata.gid(),
        modified_ms,
        target,
    }
}

pub(crate) fn at(error: &io::Error, doing: &str, path: &Path) -> Failure {
    io_failure(error, "path", &format!("{doing} {}", path.display()))
}
