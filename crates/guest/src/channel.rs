//! The guest's side of a channel: what the host sends, what is sent to it, under credit.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Poll, Waker},
};

use tokio::sync::mpsc;
use wire::{Failure, Frame, FrameKind, ReceiveWindow, Reply, credit::WINDOW, frame::PAYLOAD_MAX};

use crate::link::Outgoing;

/// What is shared between the link's table and the handler.
#[derive(Debug)]
pub(crate) struct Shared {
    window: Mutex<ReceiveWindow>,
    sending: Mutex<Sending>,
}

#[derive(Debug)]
struct Sending {
    credit: u32,
    waiting: Option<Waker>,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            window: Mutex::default(),
            sending: Mutex::new(Sending { credit: WINDOW, waiting: None }),
        }
    }
}

impl Shared {
    pub(crate) fn window(&self) -> MutexGuard<'_, ReceiveWindow> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds credit; a grant past the window is cut to it.
    pub(crate) fn grant(&self, bytes: u32) {
        let mut sending = self.sending();
        sending.credit = sending.credit.saturating_add(bytes).min(WINDOW);
        if let Some(waker) = sending.waiting.take() {
            waker.wake();
        }
    }

    fn sending(&self) -> MutexGuard<'_, Sending> {
        self.sending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the host sends on a channel.
#[derive(Debug)]
pub(crate) struct Inbox {
    pub(crate) id: u32,
    pub(crate) shared: Arc<Shared>,
    pub(crate) data: mpsc::UnboundedReceiver<Vec<u8>>,
    pub(crate) out: Outgoing,
}

impl Inbox {
    /// The next bytes; none at the host's end.
    pub(crate) async fn recv(&mut self) -> Option<Vec<u8>> {
        let bytes = self.data.recv().await?;
        let grant = self.shared.window().take(bytes.len());
        if let Some(grant) = grant {
            self.out.frame(Frame::credit(self.id, grant));
        }
        Some(bytes)
    }
}

/// What is sent to the host on a channel.
#[derive(Debug)]
pub(crate) struct Outbox {
    pub(crate) id: u32,
    pub(crate) shared: Arc<Shared>,
    pub(crate) out: Outgoing,
}

impl Outbox {
    /// Sends bytes, in as many frames as it takes, waiting for credit.
    pub(crate) async fn data(&self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let sent = self.reserve(1, bytes.len().min(PAYLOAD_MAX)).await;
            let payload = bytes[..sent].to_vec();
            self.out.frame(Frame { kind: FrameKind::Data, channel: self.id, payload });
            bytes = &bytes[sent..];
        }
    }

    /// Sends one `Data` frame that must stay whole.
    pub(crate) async fn whole(&self, payload: Vec<u8>) {
        self.reserve(payload.len(), payload.len()).await;
        self.out.frame(Frame { kind: FrameKind::Data, channel: self.id, payload });
    }

    /// Sends an answer.
    pub(crate) async fn reply(&self, reply: &Reply) {
        let payload = match wire::encode(reply) {
            Ok(payload) => payload,
            // Replies are built within the limit; a text that is too long is the only way past it.
            Err(error) => {
                eprintln!("reply on channel {}: {error}", self.id);
                return;
            }
        };
        self.reserve(payload.len(), payload.len()).await;
        self.out.frame(Frame { kind: FrameKind::Message, channel: self.id, payload });
    }

    /// Sends the end of this direction.
    pub(crate) fn fin(&self) {
        self.out.frame(Frame::empty(FrameKind::Fin, self.id));
    }

    /// Sends a failure.
    pub(crate) async fn fail(&self, failure: Failure) {
        self.reply(&Reply::Failed(failure)).await;
    }

    /// Waits until at least `least` bytes may be sent, and takes up to `most`.
    async fn reserve(&self, least: usize, most: usize) -> usize {
        std::future::poll_fn(|cx| {
            let mut sending = self.shared.sending();
            let credit = sending.credit as usize;
            if credit < least {
                sending.waiting = Some(cx.waker().clone());
                return Poll::Pending;
            }
            let bytes = credit.min(most);
            sending.credit -= u32::try_from(bytes).unwrap_or(u32::MAX);
            Poll::Ready(bytes)
        })
        .await
    }
}
