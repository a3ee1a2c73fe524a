//! Files of a guest: what is said of one, and streams of them in both directions.

use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};

use api::ApiError;
use api::file::{FileInfo, FileKind};
use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncSeekExt, ReadBuf};

use crate::clock::rfc3339;
use crate::exec::guest_error;
use crate::guest::{EntryKind, GuestError, GuestLink, Stat, Upload};
use crate::sandbox::CallGuard;

pub(super) async fn stat(link: &GuestLink, path: &str) -> Result<FileInfo, ApiError> {
    let stat = link.file_stat(path).await.map_err(guest_error)?;
    Ok(file_info(path, &stat))
}

pub(super) fn file_info(path: &str, stat: &Stat) -> FileInfo {
    FileInfo {
        path: path.to_owned(),
        kind: match stat.kind {
            EntryKind::File => FileKind::File,
            EntryKind::Directory => FileKind::Directory,
            EntryKind::Symlink => FileKind::Symlink,
            EntryKind::Other => FileKind::Other,
        },
        size: stat.size,
        mode: stat.mode,
        uid: stat.uid,
        gid: stat.gid,
        modified_at: rfc3339(u64::try_from(stat.modified_ms).unwrap_or(0)),
        target: stat.target.as_ref().map(|target| String::from_utf8_lossy(target).into_owned()),
    }
}

/// Sends a whole stream to the guest. A client that breaks off leaves nothing behind: the upload is not finished.
pub(super) async fn upload(
    upload: Result<Upload, GuestError>,
    body: Box<dyn AsyncRead + Send + Unpin>,
) -> Result<(), ApiError> {
    let mut upload = upload.map_err(guest_error)?;
    match upload.copy_from(body).await {
        Ok(sent) => sent.map_err(guest_error)?,
        Err(error) => {
            return Err(ApiError::invalid("body", format!("the body broke off: {error}")));
        }
    }
    upload.finish().await.map(drop).map_err(guest_error)
}

/// Keeps the sandbox awake while somebody reads.
pub(super) struct Held<R> {
    inner: R,
    _guard: CallGuard,
}

impl<R> Held<R> {
    /// The guard is dropped with it.
    pub(super) fn new(inner: R, guard: CallGuard) -> Self {
        Self { inner, _guard: guard }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Held<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

/// The end of a file; nothing where there is none.
pub(super) async fn tail(path: PathBuf, max_bytes: u64) -> io::Result<Bytes> {
    let mut file = match tokio::fs::File::open(&path).await {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Bytes::new()),
        Err(error) => return Err(error),
    };
    let length = file.metadata().await?.len();
    file.seek(io::SeekFrom::Start(length.saturating_sub(max_bytes))).await?;
    let mut bytes = Vec::new();
    file.take(max_bytes).read_to_end(&mut bytes).await?;
    Ok(bytes.into())
}
