//! Local folders as tar streams, never held in memory.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use tokio::sync::mpsc;

use crate::client::Body;

/// Pieces between the thread that reads files and the connection.
const PIECES_MAX: usize = 8;
/// Set-user-id, set-group-id and sticky.
const SPECIAL_BITS: u32 = 0o7000;
/// Bytes of a piece.
const PIECE_BYTES: usize = 64 * 1024;

/// A folder's contents below `name` as the body of a request. What cannot be read breaks the request off.
pub(crate) fn pack(folder: PathBuf, name: String) -> Body {
    let (sender, receiver) = mpsc::channel(PIECES_MAX);
    tokio::task::spawn_blocking(move || {
        let out = io::BufWriter::with_capacity(PIECE_BYTES, Pieces(sender.clone()));
        if let Err(error) = write_tar(&folder, Path::new(&name), out) {
            // The receiver is gone when the request failed by itself, which says more.
            let _ = sender.blocking_send(Err(error));
        }
    });
    body(receiver)
}

/// Some files below a folder, and others with these bytes after them, as the body of a request. What cannot be read breaks the
/// request off.
pub(crate) fn pack_some(
    folder: PathBuf,
    names: Vec<String>,
    others: Vec<(String, Vec<u8>)>,
) -> Body {
    let (sender, receiver) = mpsc::channel(PIECES_MAX);
    tokio::task::spawn_blocking(move || {
        let out = io::BufWriter::with_capacity(PIECE_BYTES, Pieces(sender.clone()));
        if let Err(error) = write_some(&folder, &names, &others, out) {
            // The receiver is gone when the request failed by itself, which says more.
            let _ = sender.blocking_send(Err(error));
        }
    });
    body(receiver)
}

/// A stream as the body of a request.
pub(crate) fn stream(mut from: impl tokio::io::AsyncRead + Send + Unpin + 'static) -> Body {
    use tokio::io::AsyncReadExt;
    let (sender, receiver) = mpsc::channel(PIECES_MAX);
    tokio::spawn(async move {
        loop {
            let mut piece = bytes::BytesMut::with_capacity(PIECE_BYTES);
            let read = match from.read_buf(&mut piece).await {
                Ok(0) => return,
                Ok(_) => Ok(piece.freeze()),
                Err(error) => Err(error),
            };
            if sender.send(read).await.is_err() {
                return;
            }
        }
    });
    body(receiver)
}

/// Unpacks a tar stream into a folder, which is made. Entries that would leave it are refused.
pub(crate) async fn unpack(body: hyper::body::Incoming, folder: PathBuf) -> io::Result<()> {
    let reader = blocking(body);
    tokio::task::spawn_blocking(move || {
        fs::create_dir_all(&folder)?;
        let mut archive = archive(reader);
        archive.unpack(&folder)?;
        // To the very end, so that a stream that broke off after the last entry is noticed.
        io::copy(&mut archive.into_inner(), &mut io::sink())?;
        Ok(())
    })
    .await
    .map_err(io::Error::other)?
}

/// Unpacks a tar stream of a single file as the file of this name, whatever the entry is called. Folders above it are made; what was
/// there is written over.
pub(crate) async fn unpack_file(body: hyper::body::Incoming, target: PathBuf) -> io::Result<()> {
    let reader = blocking(body);
    tokio::task::spawn_blocking(move || write_file(archive(reader), &target))
        .await
        .map_err(io::Error::other)?
}

fn write_file<R: Read>(mut archive: tar::Archive<R>, target: &Path) -> io::Result<()> {
    let mut entries = archive.entries()?;
    let mut entry = entries.next().ok_or_else(|| io::Error::other("the archive is empty"))??;
    if !entry.header().entry_type().is_file() {
        return Err(io::Error::other("the archive is not that of a single file"));
    }
    if let Some(folder) = target.parent() {
        fs::create_dir_all(folder)?;
    }
    entry.unpack(target)?;
    if entries.next().is_some() {
        return Err(io::Error::other("the archive has more than a single file"));
    }
    io::copy(&mut archive.into_inner(), &mut io::sink())?;
    Ok(())
}

fn archive<R: Read>(reader: R) -> tar::Archive<R> {
    let mut archive = tar::Archive::new(reader);
    archive.set_preserve_permissions(true);
    // Without the bits that let whoever runs a file be somebody else: a sandbox has no say in that here.
    archive.set_mask(SPECIAL_BITS);
    archive
}

/// A body to be read by a thread of its own.
fn blocking(body: hyper::body::Incoming) -> impl Read + Send + 'static {
    let pieces = http_body_util::BodyDataStream::new(body);
    let pieces = futures_util::TryStreamExt::map_err(pieces, io::Error::other);
    tokio_util::io::SyncIoBridge::new(tokio_util::io::StreamReader::new(pieces))
}

fn body(receiver: mpsc::Receiver<io::Result<Bytes>>) -> Body {
    let frames = futures_util::stream::unfold(receiver, |mut receiver| async move {
        let piece = receiver.recv().await?;
        Some((piece.map(Frame::data), receiver))
    });
    StreamBody::new(frames).boxed_unsync()
}

fn write_tar(folder: &Path, name: &Path, out: impl Write) -> io::Result<()> {
    let mut tar = tar::Builder::new(out);
    add(&mut tar, folder, name)?;
    tar.into_inner()?.flush()
}

fn write_some(
    folder: &Path,
    names: &[String],
    others: &[(String, Vec<u8>)],
    out: impl Write,
) -> io::Result<()> {
    let mut tar = tar::Builder::new(out);
    for name in names {
        add(&mut tar, &folder.join(name), Path::new(name))?;
    }
    for (name, bytes) in others {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(bytes.len() as u64);
        tar.append_data(&mut header, name, bytes.as_slice())?;
    }
    tar.into_inner()?.flush()
}

fn add<W: Write>(tar: &mut tar::Builder<W>, local: &Path, name: &Path) -> io::Result<()> {
    let at =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", local.display()));
    let meta = fs::symlink_metadata(local).map_err(at)?;
    let mut header = tar::Header::new_gnu();
    // Like `cp -r`: what is made belongs to the one who makes it, and that is the guest's root.
    header.set_uid(0);
    header.set_gid(0);
    header.set_mode(meta.permissions().mode() & 0o7777);
    header.set_mtime(meta.mtime().try_into().unwrap_or(0));
    header.set_size(0);
    if meta.is_dir() {
        header.set_entry_type(tar::EntryType::Directory);
        tar.append_data(&mut header, name, io::empty()).map_err(at)?;
        let mut names: Vec<_> = fs::read_dir(local)
            .map_err(at)?
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect::<io::Result<_>>()
            .map_err(at)?;
        names.sort();
        return names.iter().try_for_each(|child| add(tar, &local.join(child), &name.join(child)));
    }
    if meta.is_symlink() {
        header.set_entry_type(tar::EntryType::Symlink);
        return tar.append_link(&mut header, name, fs::read_link(local).map_err(at)?).map_err(at);
    }
    if !meta.is_file() {
        return Err(at(io::Error::other("not a file, folder or link")));
    }
    header.set_entry_type(tar::EntryType::Regular);
    header.set_size(meta.len());
    // A file that grows meanwhile is cut at the size that was announced; one that shrinks breaks the copy off.
    let mut exact = Exact { file: File::open(local).map_err(at)?, left: meta.len() };
    tar.append_data(&mut header, name, &mut exact).map_err(at)
}

/// Exactly as many bytes as announced, or an error.
struct Exact {
    file: File,
    left: u64,
}

impl Read for Exact {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        match self.file.read(&mut buffer[..most])? {
            0 => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "became shorter while it was read",
            )),
            read => {
                self.left -= read as u64;
                Ok(read)
            }
        }
    }
}

/// Writes into the channel.
struct Pieces(mpsc::Sender<io::Result<Bytes>>);

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Ok(Bytes::copy_from_slice(bytes)));
        sent.map_err(|_| io::Error::new(io::ErrorKind::BrokenPipe, "the request has ended"))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
