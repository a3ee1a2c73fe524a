//! Connections to ports on a guest's loopback, whose bytes go through the guest agent and not over the network.
//!
//! What would be packets on the link, were the port on the guest's address, must count like packets (S2).

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::guest::PortStream;
use crate::sandbox::Flow;

/// Such a connection.
#[derive(Debug)]
pub(crate) struct Loopback {
    stream: PortStream,
    flow: Flow,
}

impl Loopback {
    pub(crate) fn new(stream: PortStream, flow: Flow) -> Self {
        Self { stream, flow }
    }
}

impl AsyncRead for Loopback {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            self.flow.bytes();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Loopback {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, buf))?;
        if written > 0 {
            self.flow.bytes();
        }
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
