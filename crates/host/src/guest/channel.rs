//! One channel: a request, its answers, bytes both ways under credit.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::mpsc;
use wire::{
    CHANNELS_MAX, Frame, FrameKind, MessageError, ReceiveWindow, Reply, Request, credit::WINDOW,
    frame::PAYLOAD_MAX,
};

use super::{
    error::GuestError,
    link::{GuestLink, Inner, LinkState},
};

/// How long a guest may take for an answer that needs no more than a look (a stat, a sample, a signal), counting only time
/// that it runs. Generous: under emulation on a busy machine a first answer takes some hundred milliseconds.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(15);

/// What comes on a channel.
#[derive(Debug)]
pub(super) enum Event {
    Data(Bytes),
    Message(Vec<u8>),
    Fin,
    Reset,
    StandsStill,
    Gone(String),
}

/// What a consumer gets.
#[derive(Debug)]
pub(super) enum Incoming {
    Data(Bytes),
    Reply(Reply),
}

/// The link's side of a channel.
#[derive(Debug)]
pub(super) struct Entry {
    events: mpsc::UnboundedSender<Event>,
    shared: Arc<Shared>,
    guest_ended: bool,
    host_ended: bool,
    /// Ends when the guest is made to stand still.
    impatient: bool,
}

#[derive(Debug)]
struct Shared {
    window: Mutex<ReceiveWindow>,
    sending: Mutex<Sending>,
}

#[derive(Debug)]
struct Sending {
    credit: u32,
    over: bool,
    waiting: Option<Waker>,
}

impl Entry {
    pub(super) fn window(&self) -> MutexGuard<'_, ReceiveWindow> {
        self.shared.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tell(&self, event: Event) {
        // A consumer that is gone has sent a reset; this crossed it.
        let _crossed = self.events.send(event);
    }

    pub(super) fn grant(&self, bytes: u32) -> Result<(), ()> {
        let mut sending = self.shared.sending();
        sending.credit =
            sending.credit.checked_add(bytes).filter(|&credit| credit <= WINDOW).ok_or(())?;
        sending.wake();
        Ok(())
    }

    /// The guest sends no more. True if the channel is over.
    pub(super) fn guest_ended(&mut self) -> bool {
        self.guest_ended = true;
        self.host_ended
    }

    pub(super) fn reset(&self) {
        self.tell(Event::Reset);
        self.shared.end_sending();
    }

    /// The guest is made to stand still: whoever waits impatiently is told.
    pub(super) fn stands_still(&self) {
        if self.impatient {
            self.tell(Event::StandsStill);
            self.shared.end_sending();
        }
    }

    pub(super) fn gone(&self, reason: &str) {
        self.tell(Event::Gone(reason.to_owned()));
        self.shared.end_sending();
    }
}

impl Shared {
    fn sending(&self) -> MutexGuard<'_, Sending> {
        self.sending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end_sending(&self) {
        let mut sending = self.sending();
        sending.over = true;
        sending.wake();
    }
}

impl Sending {
    fn wake(&mut self) {
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
    }
}

/// The consumer's side of a channel. Dropping it before its end resets it.
#[derive(Debug)]
pub(super) struct Channel {
    inner: Arc<Inner>,
    shared: Arc<Shared>,
    events: mpsc::UnboundedReceiver<Event>,
    id: u32,
    epoch: u64,
    request: &'static str,
    guest_ended: Option<Result<(), GuestError>>,
    host_ended: bool,
}

impl GuestLink {
    /// Opens a channel. While the guest stands still the request waits for it to go on.
    pub(super) fn open(&self, request: &Request) -> Result<Channel, GuestError> {
        let payload = wire::encode(request).map_err(|error| match error {
            MessageError::TooLarge { bytes, max } => GuestError::TooLarge { bytes, max },
            MessageError::Encode(_) | MessageError::Decode(_) => {
                GuestError::BadAnswer { request: name(request) }
            }
        })?;
        let host_ended = !request.host_sends();
        let (sender, events) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            window: Mutex::default(),
            sending: Mutex::new(Sending { credit: WINDOW, over: false, waiting: None }),
        });
        let mut core = self.inner.core();
        if self.state() == LinkState::Detached {
            let reason = core.gone.clone().unwrap_or_else(|| "never attached".into());
            return Err(GuestError::Gone { reason });
        }
        if self.impatient && *self.inner.stands_still.borrow() {
            return Err(GuestError::StandsStill);
        }
        if core.channels.len() >= CHANNELS_MAX {
            return Err(GuestError::Busy);
        }
        let id = loop {
            core.channel_last = core.channel_last.wrapping_add(1).max(1);
            if !core.channels.contains_key(&core.channel_last) {
                break core.channel_last;
            }
        };
        let entry = Entry {
            events: sender,
            shared: Arc::clone(&shared),
            guest_ended: false,
            host_ended,
            impatient: self.impatient,
        };
        core.channels.insert(id, entry);
        let epoch = core.epoch;
        let channel = Channel {
            inner: Arc::clone(&self.inner),
            shared,
            events,
            id,
            epoch,
            request: name(request),
            guest_ended: None,
            host_ended,
        };
        // Under the lock, so that frames are queued in the order of channel numbers.
        channel.send(Frame { kind: FrameKind::Open, channel: id, payload });
        Ok(channel)
    }

    /// Asks something that has one answer.
    pub(super) async fn ask(
        &self,
        request: Request,
        limit: Option<Duration>,
    ) -> Result<Reply, GuestError> {
        let asked = async { self.open_any(&request).await?.reply().await };
        match limit {
            Some(limit) => self.within(name(&request), limit, asked).await,
            None => asked.await,
        }
    }

    /// As [`open`](Self::open), for a request of any length that the agent can take.
    async fn open_any(&self, request: &Request) -> Result<Channel, GuestError> {
        let too_large = |bytes, max| GuestError::TooLarge { bytes, max };
        let encoded = match self.open(request) {
            Err(GuestError::TooLarge { .. }) => {
                wire::encode_long(request).map_err(|error| match error {
                    MessageError::TooLarge { bytes, max } => too_large(bytes, max),
                    MessageError::Encode(_) | MessageError::Decode(_) => {
                        GuestError::BadAnswer { request: name(request) }
                    }
                })?
            }
            opened => return opened,
        };
        if !self.speaks(wire::LONG_REQUESTS_SINCE) {
            return Err(too_large(encoded.len(), PAYLOAD_MAX));
        }
        // Below its own limit, so it fits.
        let bytes = u32::try_from(encoded.len()).unwrap_or(u32::MAX);
        let mut channel = self.open(&Request::Long { bytes })?;
        let mut rest = encoded.as_slice();
        while !rest.is_empty() {
            let sent = std::future::poll_fn(|cx| channel.poll_reserve(cx, rest.len())).await;
            match sent {
                Ok(sent) => {
                    channel.send_reserved(&rest[..sent]);
                    rest = &rest[sent..];
                }
                // The guest ended the channel; what it said before says why.
                Err(_) => return Ok(channel),
            }
        }
        channel.finish();
        Ok(channel)
    }

    /// Whether the guest's agent and we both speak this version.
    pub(super) fn speaks(&self, version: u16) -> bool {
        let hello = self.hello();
        let agreed = hello.and_then(|hello| wire::VERSIONS.agree(hello.versions));
        agreed.is_some_and(|agreed| agreed >= version)
    }

    /// Bounds something by a time that counts only while the guest runs.
    pub(super) async fn within<T>(
        &self,
        request: &'static str,
        limit: Duration,
        work: impl Future<Output = Result<T, GuestError>>,
    ) -> Result<T, GuestError> {
        let mut states = self.watch_state();
        let mut work = std::pin::pin!(work);
        loop {
            states.mark_unchanged();
            let runs = *states.borrow() == LinkState::Running;
            tokio::select! {
                biased;
                result = &mut work => return result,
                // Each change begins the time anew: a guest that was woken in between may take the whole of it.
                _ = states.changed() => {}
                () = tokio::time::sleep(limit), if runs => {
                    return Err(GuestError::TimedOut { request, limit });
                }
            }
        }
    }
}

impl Channel {
    pub(super) fn request(&self) -> &'static str {
        self.request
    }

    /// The next thing that comes; none at the guest's end.
    pub(super) fn poll_recv(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Incoming>, GuestError>> {
        if let Some(end) = &self.guest_ended {
            return Poll::Ready(end.clone().map(|()| None));
        }
        let end = match ready!(self.events.poll_recv(cx)) {
            Some(Event::Data(bytes)) => {
                self.took(bytes.len());
                return Poll::Ready(Ok(Some(Incoming::Data(bytes))));
            }
            Some(Event::Message(payload)) => {
                self.took(payload.len());
                match wire::decode::<Reply>(&payload) {
                    Ok(Reply::Failed(failure)) => Err(GuestError::Failed(failure)),
                    Ok(reply) => return Poll::Ready(Ok(Some(Incoming::Reply(reply)))),
                    Err(_) => Err(GuestError::BadAnswer { request: self.request }),
                }
            }
            Some(Event::Fin) => Ok(()),
            Some(Event::Reset) => Err(GuestError::Reset { request: self.request }),
            Some(Event::StandsStill) => Err(GuestError::StandsStill),
            Some(Event::Gone(reason)) => Err(GuestError::Gone { reason }),
            None => Err(GuestError::Gone { reason: "link is gone".into() }),
        };
        self.guest_ended = Some(end.clone());
        Poll::Ready(end.map(|()| None))
    }

    pub(super) async fn recv(&mut self) -> Result<Option<Incoming>, GuestError> {
        std::future::poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// The next thing, which must be a reply.
    pub(super) async fn reply(&mut self) -> Result<Reply, GuestError> {
        match self.recv().await? {
            Some(Incoming::Reply(reply)) => Ok(reply),
            Some(Incoming::Data(_)) | None => Err(GuestError::BadAnswer { request: self.request }),
        }
    }

    /// How many of `want` bytes may be sent now; waits until it is at least one. They count as sent.
    pub(super) fn poll_reserve(
        &mut self,
        cx: &mut Context<'_>,
        want: usize,
    ) -> Poll<Result<usize, GuestError>> {
        let mut sending = self.shared.sending();
        if sending.over || self.host_ended {
            return Poll::Ready(Err(GuestError::Reset { request: self.request }));
        }
        let bytes = sending.credit.min(u32::try_from(want.min(PAYLOAD_MAX)).unwrap_or(u32::MAX));
        if bytes == 0 {
            sending.waiting = Some(cx.waker().clone());
            return Poll::Pending;
        }
        sending.credit -= bytes;
        Poll::Ready(Ok(bytes as usize))
    }

    /// Sends bytes that were reserved.
    pub(super) fn send_reserved(&self, bytes: &[u8]) {
        self.send(Frame { kind: FrameKind::Data, channel: self.id, payload: bytes.to_vec() });
    }

    /// Nobody waits on it any more: it goes on with the guest, whatever happens to that.
    pub(super) fn be_patient(&self) {
        let mut core = self.inner.core();
        if core.epoch == self.epoch
            && let Some(entry) = core.channels.get_mut(&self.id)
        {
            entry.impatient = false;
        }
    }

    /// Sends no more.
    pub(super) fn finish(&mut self) {
        if self.host_ended {
            return;
        }
        self.host_ended = true;
        let mut core = self.inner.core();
        if core.epoch != self.epoch {
            return;
        }
        let Some(entry) = core.channels.get_mut(&self.id) else { return };
        entry.host_ended = true;
        if entry.guest_ended {
            core.channels.remove(&self.id);
        }
        self.send(Frame::empty(FrameKind::Fin, self.id));
    }

    fn took(&self, bytes: usize) {
        let grant = self.shared.window.lock().unwrap_or_else(PoisonError::into_inner).take(bytes);
        if let Some(grant) = grant {
            self.send(Frame::credit(self.id, grant));
        }
    }

    fn send(&self, frame: Frame) {
        // The queue lives as long as the link.
        let _never = self.inner.outbound.send((self.epoch, frame));
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let mut core = self.inner.core();
        if core.epoch != self.epoch {
            return;
        }
        if core.channels.remove(&self.id).is_some() {
            self.send(Frame::empty(FrameKind::Reset, self.id));
        }
    }
}

fn name(request: &Request) -> &'static str {
    match request {
        Request::Ping => "ping",
        Request::Sample => "sample",
        Request::ExecStart(_) => "exec start",
        Request::ExecWait(_) => "exec wait",
        Request::ExecOutput { .. } => "exec output",
        Request::ExecStdin { .. } => "exec stdin",
        Request::ExecSignal { .. } => "exec signal",
        Request::ExecList => "exec list",
        Request::FileRead { .. } => "file read",
        Request::FileWrite(_) => "file write",
        Request::FileStat { .. } => "file stat",
        Request::FileList { .. } => "file list",
        Request::FileMkdir { .. } => "mkdir",
        Request::FileRename { .. } => "rename",
        Request::FileRemove { .. } => "remove",
        Request::TreeRead { .. } => "tree read",
        Request::TreeWrite { .. } => "tree write",
        Request::Connect { .. } => "connect port",
        Request::Long { .. } => "long request",
        Request::TerminalStart(_) => "terminal start",
        Request::TerminalResize { .. } => "terminal resize",
        Request::Sockets => "sockets",
        Request::Flush => "flush",
        Request::Loopback(_) => "loopback",
    }
}
