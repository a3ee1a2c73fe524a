//! Files in the guest. Content is streamed in both directions under credit; nothing is held whole.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures_util::Stream as FuturesStream;
use tokio::io::{AsyncRead, AsyncReadExt};
use wire::{Entry, Reply, Request, Stat, WriteSpec};

use super::{
    channel::{ANSWER_LIMIT, Channel, Incoming},
    error::GuestError,
    link::GuestLink,
};

/// Bytes read at a time by [`Upload::copy_from`].
const COPY_CHUNK: usize = 64 * 1024;

impl GuestLink {
    /// Reads a file from `offset` on, `length` bytes or up to its end. Answers when it is open.
    pub async fn file_read(
        &self,
        path: impl AsRef<[u8]>,
        offset: u64,
        length: Option<u64>,
    ) -> Result<FileReader, GuestError> {
        let path = path.as_ref().to_vec();
        let mut channel = self.open(&Request::FileRead { path, offset, length })?;
        match self.within("file read", ANSWER_LIMIT, channel.reply()).await? {
            Reply::Stat(stat) => Ok(FileReader { stat, download: Download { channel } }),
            _ => Err(GuestError::BadAnswer { request: "file read" }),
        }
    }

    /// Writes a file. It appears, or replaces what is there, when [`Upload::finish`] returns; dropping the upload leaves no trace.
    pub fn file_write(&self, spec: WriteSpec) -> Result<Upload, GuestError> {
        Ok(Upload::new(self.open(&Request::FileWrite(spec))?))
    }

    /// What is at a path; a symbolic link is not followed.
    pub async fn file_stat(&self, path: impl AsRef<[u8]>) -> Result<Stat, GuestError> {
        let path = path.as_ref().to_vec();
        match self.ask(Request::FileStat { path }, Some(ANSWER_LIMIT)).await? {
            Reply::Stat(stat) => Ok(stat),
            _ => Err(GuestError::BadAnswer { request: "file stat" }),
        }
    }

    /// A directory's entries, sorted by name, in portions.
    pub fn file_list(&self, path: impl AsRef<[u8]>) -> Result<Listing, GuestError> {
        let path = path.as_ref().to_vec();
        Ok(Listing { channel: self.open(&Request::FileList { path })? })
    }

    /// Makes a directory; with `parents` also those on the way, and one that is there is no error.
    pub async fn file_mkdir(
        &self,
        path: impl AsRef<[u8]>,
        parents: bool,
    ) -> Result<(), GuestError> {
        let path = path.as_ref().to_vec();
        self.done("mkdir", Request::FileMkdir { path, parents }).await
    }

    /// Renames; replaces a file at `to`.
    pub async fn file_rename(
        &self,
        from: impl AsRef<[u8]>,
        to: impl AsRef<[u8]>,
    ) -> Result<(), GuestError> {
        let (from, to) = (from.as_ref().to_vec(), to.as_ref().to_vec());
        self.done("rename", Request::FileRename { from, to }).await
    }

    /// Removes a file or a directory, with `recursive` also what is in it. No time limit: a tree may be large.
    pub async fn file_remove(
        &self,
        path: impl AsRef<[u8]>,
        recursive: bool,
    ) -> Result<(), GuestError> {
        let path = path.as_ref().to_vec();
        match self.ask(Request::FileRemove { path, recursive }, None).await? {
            Reply::Done => Ok(()),
            _ => Err(GuestError::BadAnswer { request: "remove" }),
        }
    }

    /// A directory's content as a tar stream with names relative to it.
    pub fn tree_read(&self, path: impl AsRef<[u8]>) -> Result<Download, GuestError> {
        let path = path.as_ref().to_vec();
        Ok(Download { channel: self.open(&Request::TreeRead { path })? })
    }

    /// Unpacks a tar stream into a directory, which is made if missing. An entry that would leave it is refused with
    /// `outside_tree`; what was unpacked before stays.
    pub fn tree_write(&self, path: impl AsRef<[u8]>) -> Result<Upload, GuestError> {
        let path = path.as_ref().to_vec();
        Ok(Upload::new(self.open(&Request::TreeWrite { path })?))
    }

    async fn done(&self, name: &'static str, request: Request) -> Result<(), GuestError> {
        match self.ask(request, Some(ANSWER_LIMIT)).await? {
            Reply::Done => Ok(()),
            _ => Err(GuestError::BadAnswer { request: name }),
        }
    }
}

/// Bytes from the guest, as a stream of portions. Dropping it ends the reading.
#[derive(Debug)]
pub struct Download {
    channel: Channel,
}

impl FuturesStream for Download {
    type Item = Result<Bytes, GuestError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let request = self.channel.request();
        Poll::Ready(match ready!(self.channel.poll_recv(cx)) {
            Ok(None) => None,
            Ok(Some(Incoming::Data(bytes))) => Some(Ok(bytes)),
            Ok(Some(Incoming::Reply(_))) => Some(Err(GuestError::BadAnswer { request })),
            Err(error) => Some(Err(error)),
        })
    }
}

/// An open file: what it is, and its content as a stream.
#[derive(Debug)]
pub struct FileReader {
    /// What the file is. Its size may change while it is read.
    pub stat: Stat,
    /// The bytes asked for.
    pub download: Download,
}

/// A directory's entries.
#[derive(Debug)]
pub struct Listing {
    channel: Channel,
}

impl FuturesStream for Listing {
    type Item = Result<Vec<Entry>, GuestError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(match ready!(self.channel.poll_recv(cx)) {
            Ok(None) => None,
            Ok(Some(Incoming::Reply(Reply::Entries(entries)))) => Some(Ok(entries)),
            Ok(Some(_)) => Some(Err(GuestError::BadAnswer { request: "file list" })),
            Err(error) => Some(Err(error)),
        })
    }
}

/// Bytes to the guest: a file, a tar stream, or a program's standard input.
#[derive(Debug)]
pub struct Upload {
    channel: Channel,
}

impl Upload {
    pub(super) fn new(channel: Channel) -> Self {
        Self { channel }
    }

    /// Sends bytes; waits while the guest has not taken what was sent before.
    ///
    /// # Errors
    /// Also when the guest failed on bytes sent earlier (a full disk): the upload is over then.
    pub async fn write(&mut self, mut bytes: &[u8]) -> Result<(), GuestError> {
        while !bytes.is_empty() {
            let channel = &mut self.channel;
            let sent = std::future::poll_fn(|cx| {
                // The guest speaks before our end only to say that it failed.
                match channel.poll_recv(cx) {
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Ready(Ok(_)) => {
                        let request = channel.request();
                        return Poll::Ready(Err(GuestError::BadAnswer { request }));
                    }
                    Poll::Pending => {}
                }
                channel.poll_reserve(cx, bytes.len())
            })
            .await?;
            self.channel.send_reserved(&bytes[..sent]);
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Sends all that a reader gives.
    ///
    /// # Errors
    /// The outer error is the reader's, the inner the guest's.
    pub async fn copy_from(
        &mut self,
        mut from: impl AsyncRead + Unpin,
    ) -> std::io::Result<Result<(), GuestError>> {
        let mut chunk = vec![0; COPY_CHUNK];
        loop {
            let read = from.read(&mut chunk).await?;
            if read == 0 {
                return Ok(Ok(()));
            }
            if let Err(error) = self.write(&chunk[..read]).await {
                return Ok(Err(error));
            }
        }
    }

    /// Says that this was all, and waits until the guest has done its part. Gives the number of bytes that it took.
    pub async fn finish(mut self) -> Result<u64, GuestError> {
        self.channel.finish();
        match self.channel.reply().await? {
            Reply::Written { bytes } => Ok(bytes),
            _ => Err(GuestError::BadAnswer { request: self.channel.request() }),
        }
    }
}
