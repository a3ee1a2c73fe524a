//! TCP ports on the guest's loopback.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use wire::{Reply, Request};

use super::{
    channel::{ANSWER_LIMIT, Channel, Incoming},
    error::GuestError,
    link::GuestLink,
};

impl GuestLink {
    /// Connects to `127.0.0.1:port` in the guest.
    ///
    /// # Errors
    /// [`GuestError::Failed`] with `refused` when nobody listens.
    pub async fn connect_port(&self, port: u16) -> Result<PortStream, GuestError> {
        let mut channel = self.open(&Request::Connect { port })?;
        match self.within("connect port", ANSWER_LIMIT, channel.reply()).await? {
            Reply::Connected => {
                // As a connection over the network would: its end is left to those who use it.
                channel.be_patient();
                Ok(PortStream { channel, rest: Bytes::new() })
            }
            _ => Err(GuestError::BadAnswer { request: "connect port" }),
        }
    }
}

/// A connection into the guest. Shutting down the write half is a half close; dropping it closes both.
#[derive(Debug)]
pub struct PortStream {
    channel: Channel,
    rest: Bytes,
}

impl AsyncRead for PortStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.rest.is_empty() {
            match ready!(self.channel.poll_recv(cx))? {
                None => return Poll::Ready(Ok(())),
                Some(Incoming::Data(bytes)) => self.rest = bytes,
                Some(Incoming::Reply(_)) => {
                    return Poll::Ready(Err(
                        GuestError::BadAnswer { request: "connect port" }.into()
                    ));
                }
            }
        }
        let bytes = self.rest.len().min(buf.remaining());
        buf.put_slice(&self.rest[..bytes]);
        self.rest.advance(bytes);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PortStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        if buf.is_empty() {
            return Poll::Ready(Ok(0));
        }
        match ready!(self.channel.poll_reserve(cx, buf.len())) {
            Ok(bytes) => {
                self.channel.send_reserved(&buf[..bytes]);
                Poll::Ready(Ok(bytes))
            }
            Err(error) => Poll::Ready(Err(io::Error::new(io::ErrorKind::BrokenPipe, error))),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Frames are on their way as soon as they are queued.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.channel.finish();
        Poll::Ready(Ok(()))
    }
}
