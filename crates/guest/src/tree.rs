//! Directory trees as tar streams, in both directions, of any size: the archive is made and unpacked on a helper thread that
//! exchanges portions with the channel through a short queue, and never exists whole.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Component, Path, PathBuf},
};

use tar::{Archive, Builder, EntryType, Header};
use tokio::sync::mpsc;
use wire::{Failure, FailureCode, frame::PAYLOAD_MAX};

use crate::{
    channel::{Inbox, Outbox},
    failure::{failure, invalid, io_failure},
    files::{at, blocking, path},
};

/// Portions between the helper thread and the channel.
const QUEUE: usize = 4;
/// Directories within each other that are packed.
const DEPTH_MAX: usize = 256;

/// Types of file systems that hold nothing of their own, by statfs(2) and the kernel's `magic.h`.
const KERNELS: [u32; 16] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x1cd1,      // devpts
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0xcafe_4a11, // bpf
    0x1980_0202, // mqueue
    0x6165_676c, // pstore
    0xde5e_81e4, // efivarfs
    0x6265_6570, // configfs
    0x6573_5543, // fusectl
    0x4249_4e4d, // binfmt_misc
    0x6e73_6673, // nsfs
];

pub(crate) async fn read(outbox: &Outbox, of: Vec<u8>) -> Result<(), Failure> {
    let root = path("path", of)?;
    let (sender, mut portions) = mpsc::channel(QUEUE);
    let packing = tokio::spawn(blocking(move || pack(&root, sender)));
    while let Some(portion) = portions.recv().await {
        outbox.data(&portion).await;
    }
    packing.await.map_err(|error| failure(FailureCode::Io, None, error.to_string()))?
}

pub(crate) async fn write(inbox: &mut Inbox, to: Vec<u8>) -> Result<u64, Failure> {
    let target = path("path", to)?;
    let (sender, portions) = mpsc::channel(QUEUE);
    let unpacking = tokio::spawn(blocking(move || unpack(&target, portions)));
    let mut bytes = 0;
    while let Some(portion) = inbox.recv().await {
        bytes += portion.len() as u64;
        if sender.send(portion).await.is_err() {
            // It has failed, and says so below; or it has seen the archive's end and needs no more.
            break;
        }
    }
    // The thread must see the stream's end to end itself. Should this task be aborted instead, a half archive is an error there.
    if sender.send(Vec::new()).await.is_err() {
        while inbox.recv().await.is_some() {}
    }
    unpacking.await.map_err(|error| failure(FailureCode::Io, None, error.to_string()))??;
    Ok(bytes)
}

/// What the archive is written to. Fails when the channel is gone, which ends the packing.
struct ToChannel(mpsc::Sender<Vec<u8>>);

impl Write for ToChannel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(bytes.to_vec());
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn pack(root: &Path, sender: mpsc::Sender<Vec<u8>>) -> Result<(), Failure> {
    let metadata = fs::metadata(root).map_err(|error| at(&error, "read", root))?;
    if !metadata.is_dir() && !metadata.is_file() {
        let message = format!("{} is neither a directory nor a file", root.display());
        return Err(failure(FailureCode::NotADirectory, Some("path"), message));
    }
    if is_the_kernels(root)? {
        let message = format!("{} holds no files but the kernel's own", root.display());
        return Err(failure(FailureCode::NotADirectory, Some("path"), message));
    }
    let out = io::BufWriter::with_capacity(PAYLOAD_MAX, ToChannel(sender));
    let mut archive = Builder::new(out);
    if metadata.is_file() {
        pack_file(&mut archive, root, &metadata)?;
    } else {
        pack_folder(&mut archive, root, Path::new(""), 0)?;
    }
    let out = archive.into_inner().map_err(|error| at(&error, "pack", root))?;
    out.into_inner().map_err(|error| at(error.error(), "pack", root))?;
    Ok(())
}

/// The only entry of an archive: a file by its own name, also where the path is a link to it.
fn pack_file<W: Write>(
    archive: &mut Builder<W>,
    source: &Path,
    metadata: &fs::Metadata,
) -> Result<(), Failure> {
    let name = source.file_name().ok_or_else(|| {
        invalid("path", format!("{} does not end with a file's name", source.display()))
    })?;
    let file = File::open(source).map_err(|error| at(&error, "read", source))?;
    let mut header = Header::new_gnu();
    header.set_metadata(metadata);
    let exact = Exact { file, left: metadata.len() };
    archive.append_data(&mut header, name, exact).map_err(|error| at(&error, "pack", source))
}

fn pack_folder<W: Write>(
    archive: &mut Builder<W>,
    folder: &Path,
    name: &Path,
    depth: usize,
) -> Result<(), Failure> {
    if depth > DEPTH_MAX {
        let message = format!("{} is more than {DEPTH_MAX} directories deep", folder.display());
        return Err(failure(FailureCode::TooMany, Some("path"), message));
    }
    let device = fs::metadata(folder).map_err(|error| at(&error, "look at", folder))?.dev();
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| at(&error, "list", folder))? {
        names.push(entry.map_err(|error| at(&error, "list", folder))?.file_name());
    }
    names.sort();
    for entry in names {
        let source = folder.join(&entry);
        let name = name.join(&entry);
        let metadata = match fs::symlink_metadata(&source) {
            // Removed since it was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            metadata => metadata.map_err(|error| at(&error, "look at", &source))?,
        };
        let kind = metadata.file_type();
        let mut header = Header::new_gnu();
        header.set_metadata(&metadata);
        let packed = if kind.is_dir() {
            archive.append_data(&mut header, &name, io::empty())
        } else if kind.is_symlink() {
            fs::read_link(&source).and_then(|target| {
                header.set_size(0);
                archive.append_link(&mut header, &name, target)
            })
        } else if kind.is_file() {
            match File::open(&source) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => Err(error),
                Ok(file) => {
                    let exact = Exact { file, left: metadata.len() };
                    archive.append_data(&mut header, &name, exact)
                }
            }
        } else {
            // A tree of files has no use for somebody's sockets and devices.
            debug_assert!(kind.is_socket() || kind.is_fifo() || !kind.is_file());
            continue;
        };
        packed.map_err(|error| at(&error, "pack", &source))?;
        // Of what the kernel shows as files many cannot be read, and none is as long as it says.
        let mounted = kind.is_dir() && metadata.dev() != device;
        if kind.is_dir() && !(mounted && is_the_kernels(&source)?) {
            pack_folder(archive, &source, &name, depth + 1)?;
        }
    }
    Ok(())
}

/// Whether a path lies in one of the file systems through which the kernel shows itself, such as `/proc`.
fn is_the_kernels(path: &Path) -> Result<bool, Failure> {
    let found = rustix::fs::statfs(path).map_err(|error| at(&error.into(), "look at", path))?;
    Ok(u32::try_from(found.f_type).is_ok_and(|kind| KERNELS.contains(&kind)))
}

/// A file as long as its header said, whatever it does meanwhile: cut, or filled up with zeros.
struct Exact {
    file: File,
    left: u64,
}

impl Read for Exact {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(into.len());
        let into = &mut into[..most];
        let read = match self.file.read(into)? {
            0 => {
                into.fill(0);
                most
            }
            read => read,
        };
        self.left -= read as u64;
        Ok(read)
    }
}

/// What the archive is read from: an empty portion is its end.
struct FromChannel {
    portions: mpsc::Receiver<Vec<u8>>,
    portion: Vec<u8>,
    taken: usize,
    over: bool,
}

impl Read for FromChannel {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.taken == self.portion.len() {
            if self.over {
                return Ok(0);
            }
            // No end and no more portions: the upload was given up.
            let portion = self.portions.blocking_recv().ok_or(io::ErrorKind::ConnectionAborted)?;
            self.over = portion.is_empty();
            self.portion = portion;
            self.taken = 0;
        }
        let rest = &self.portion[self.taken..];
        let bytes = rest.len().min(into.len());
        into[..bytes].copy_from_slice(&rest[..bytes]);
        self.taken += bytes;
        Ok(bytes)
    }
}

fn unpack(target: &Path, portions: mpsc::Receiver<Vec<u8>>) -> Result<(), Failure> {
    fs::create_dir_all(target).map_err(|error| at(&error, "make", target))?;
    let from = FromChannel { portions, portion: Vec::new(), taken: 0, over: false };
    let mut archive = Archive::new(from);
    archive.set_preserve_permissions(true);
    archive.set_overwrite(true);
    let damaged = |error: io::Error| {
        let message = format!("the archive is damaged: {error}");
        failure(FailureCode::BadArchive, Some("body"), message)
    };
    // Directories get their permissions last: one that may not be written to must still be filled.
    let mut folders: Vec<(PathBuf, u32)> = Vec::new();
    for entry in archive.entries().map_err(damaged)? {
        let mut entry = entry.map_err(damaged)?;
        let name = entry.path().map_err(damaged)?.into_owned();
        inside(&name)?;
        let shown = name.display().to_string();
        match entry.header().entry_type() {
            EntryType::Directory => {
                let mode = entry.header().mode().map_err(damaged)?;
                folders.push((target.join(&name), mode & 0o7777));
                entry.set_mask(0o077);
            }
            EntryType::Link => {
                let linked = entry.link_name().map_err(damaged)?;
                inside(linked.as_deref().unwrap_or(Path::new("/")))?;
            }
            EntryType::Regular
            | EntryType::Continuous
            | EntryType::GNUSparse
            | EntryType::Symlink => {}
            other => {
                let message = format!(
                    "the archive's entry `{shown}` is a {other:?}; only files, directories and links are taken"
                );
                return Err(failure(FailureCode::BadArchive, Some("body"), message));
            }
        }
        // Goes no way that leads out of the target by a symbolic link that is there or came before in the archive.
        match entry.unpack_in(target) {
            Ok(true) => {}
            Ok(false) => return Err(outside(&shown)),
            Err(error) => return Err(unpack_failure(&error, &shown)),
        }
    }
    for (folder, mode) in folders.into_iter().rev() {
        use std::os::unix::fs::PermissionsExt;
        let metadata =
            fs::symlink_metadata(&folder).map_err(|error| at(&error, "make", &folder))?;
        if metadata.is_dir() {
            fs::set_permissions(&folder, fs::Permissions::from_mode(mode))
                .map_err(|error| at(&error, "set permissions of", &folder))?;
        }
    }
    Ok(())
}

/// A name in the archive must stay below the target.
fn inside(name: &Path) -> Result<(), Failure> {
    let stays = name
        .components()
        .all(|component| matches!(component, Component::Normal(_) | Component::CurDir));
    if stays { Ok(()) } else { Err(outside(&name.display().to_string())) }
}

fn outside(name: &str) -> Failure {
    let message = format!("the archive's entry `{name}` would be written outside of the target");
    failure(FailureCode::OutsideTree, Some("body"), message)
}

fn unpack_failure(error: &io::Error, name: &str) -> Failure {
    // The tar crate wraps the kernel's error in texts of its own.
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(found) = source {
        if let Some(kernel) = found.downcast_ref::<io::Error>()
            && kernel.raw_os_error().is_some()
        {
            return io_failure(kernel, "body", &format!("unpack `{name}`"));
        }
        source = found.source();
    }
    if error.to_string().contains("outside of destination") {
        return outside(name);
    }
    invalid("body", format!("unpack `{name}`: {error}"))
}
