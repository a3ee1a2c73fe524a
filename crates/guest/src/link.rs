//! The guest's end of the link: one reader, one writer, and the table of channels.
//!
//! A handler's task is the channel: when the host resets the channel, or another host takes the link over, the task is
//! aborted, and whatever it held (a half-written file, a connection) is undone by being dropped. Execs are no handler's:
//! they live in [`Agent`].

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use tokio::{
    sync::{mpsc, watch},
    task::{AbortHandle, JoinHandle},
};
use wire::{
    CHANNELS_MAX, Decoder, FailureCode, Frame, FrameKind, GuestHello, Held, Ipv6Network, LinkId,
    Mount, Request, ToGuest, ToHost, Wake,
};

use crate::{
    agent::Agent,
    channel::{Inbox, Outbox, Shared},
    failure::failure,
    port::Transport,
    serve::{self, End},
    sockets,
};

/// Bytes read at a time, and bytes gathered into one write at least, if there are as many.
const CHUNK: usize = 64 * 1024;

/// Serves a transport until it ends, which a virtio-serial port never does.
///
/// # Errors
/// When the transport fails.
pub async fn serve<T: Transport>(agent: Arc<Agent>, transport: T) -> io::Result<()> {
    let transport = Arc::new(transport);
    let (frames, frame_queue) = mpsc::unbounded_channel();
    let (controls, control_queue) = mpsc::unbounded_channel();
    let epoch = Arc::new(AtomicU64::new(0));
    let out = Outgoing { frames, epoch: 0 };
    let writing = AbortOnDrop(tokio::spawn(write(
        Arc::clone(&transport),
        frame_queue,
        control_queue,
        agent.holds.watch(),
        Arc::clone(&epoch),
    )));
    let version = agent.settings.versions.newest;
    let mut link = Link {
        agent,
        id: None,
        epoch,
        out,
        controls,
        table: Arc::default(),
        quiescing: None,
        still: Arc::default(),
        version,
        tells_network: false,
    };
    let mut decoder = Decoder::default();
    let mut chunk = vec![0; CHUNK];
    loop {
        let read = transport.read(&mut chunk).await?;
        if read == 0 {
            link.forget();
            drop(writing);
            return Ok(());
        }
        decoder.push(&chunk[..read]);
        while let Some(frame) = decoder.next_frame() {
            link.handle(frame);
        }
    }
}

/// Where frames of channels go. Bounded by credit: no channel puts more than its window in.
#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    frames: mpsc::UnboundedSender<(u64, Frame)>,
    epoch: u64,
}

impl Outgoing {
    pub(crate) fn frame(&self, frame: Frame) {
        // Without a writer the whole link is over, and so is the caller.
        let _over = self.frames.send((self.epoch, frame));
    }
}

struct Link {
    agent: Arc<Agent>,
    id: Option<LinkId>,
    /// Goes up with each `Hello`; frames of an earlier one are dropped by the writer.
    epoch: Arc<AtomicU64>,
    out: Outgoing,
    controls: mpsc::UnboundedSender<Control>,
    table: Arc<Mutex<HashMap<u32, Entry>>>,
    quiescing: Option<AbortHandle>,
    /// `Quiesced` was said and nothing since: no frame of ours is half sent.
    still: Arc<AtomicBool>,
    /// The version that is spoken: until a host is met the newest that the agent speaks.
    version: u16,
    /// The host wants to know what is open on the network when the guest stands still.
    tells_network: bool,
}

struct Entry {
    shared: Arc<Shared>,
    /// None after the host's end.
    data: Option<mpsc::UnboundedSender<Vec<u8>>>,
    task: Option<AbortHandle>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

struct Control {
    bytes: Vec<u8>,
    hold: Option<bool>,
    /// A host was met that wants to be told what is held, or does not know how to hear it.
    tells_held: Option<bool>,
}

impl Link {
    fn handle(&mut self, frame: Frame) {
        match frame.kind {
            FrameKind::Control => match wire::decode::<ToGuest>(&frame.payload) {
                Ok(message) if self.has(message.since()) => self.control(message),
                Ok(_) => eprintln!("control message not understood: of a later version"),
                Err(error) => eprintln!("control message not understood: {error}"),
            },
            FrameKind::Open => self.open(&frame),
            FrameKind::Data => {
                let mut table = table(&self.table);
                let Some(entry) = table.get(&frame.channel) else { return };
                let within = entry.shared.window().receive(frame.payload.len()).is_ok();
                match &entry.data {
                    // A handler that has answered and gone takes no more; the host will see the answer and reset.
                    Some(data) if within => drop(data.send(frame.payload)),
                    _ => {
                        table.remove(&frame.channel);
                        self.out.frame(Frame::empty(FrameKind::Reset, frame.channel));
                    }
                }
            }
            FrameKind::Credit => {
                if let Some(entry) = table(&self.table).get(&frame.channel)
                    && let Some(bytes) = frame.credit_bytes()
                {
                    entry.shared.grant(bytes);
                }
            }
            FrameKind::Fin => {
                let mut table = table(&self.table);
                if let Some(entry) = table.get_mut(&frame.channel) {
                    entry.data = None;
                    if entry.task.is_none() {
                        table.remove(&frame.channel);
                    }
                }
            }
            FrameKind::Reset => drop(table(&self.table).remove(&frame.channel)),
            FrameKind::Message => {}
        }
    }

    fn control(&mut self, message: ToGuest) {
        match message {
            ToGuest::Hello(hello) => {
                self.forget();
                self.id = Some(hello.link);
                let quiesced = self.agent.quiesced();
                let answer = GuestHello {
                    link: hello.link,
                    versions: self.agent.settings.versions,
                    agent: env!("CARGO_PKG_VERSION").to_owned(),
                    boot: self.agent.boot(),
                    quiesced,
                };
                // A half frame of ours may be on its way to a host that never saw its beginning, and may end in bytes that
                // look like the beginning of another.
                let still = self.still.load(Ordering::Relaxed);
                let mut bytes = if still { Vec::new() } else { wire::frame::preamble() };
                append_control(&mut bytes, &ToHost::Hello(answer));
                // Without one that both speak the host goes its way.
                let agreed = self.agent.settings.versions.agree(hello.versions);
                self.version = agreed.unwrap_or(self.agent.settings.versions.oldest);
                let tells_held = Some(self.has(wire::HELD_SINCE));
                self.tells_network = self.has(wire::NETWORK_SINCE);
                self.say(Control { bytes, hold: Some(quiesced), tells_held });
            }
            ToGuest::Quiesce(quiesce) => {
                if let Some(earlier) = self.quiescing.take() {
                    earlier.abort();
                }
                let agent = Arc::clone(&self.agent);
                let controls = self.controls.clone();
                let still = Arc::clone(&self.still);
                let tells_network = self.tells_network;
                let task = tokio::spawn(async move {
                    let quiesced = agent.quiesce(quiesce).await;
                    let mut bytes = Vec::new();
                    if tells_network {
                        // Not before: a program may have begun to listen while it was being frozen.
                        match sockets::look(&agent.settings.proc) {
                            Ok(sockets) => append_control(&mut bytes, &ToHost::Sockets(sockets)),
                            Err(error) => eprintln!("look at the sockets: {error}"),
                        }
                    }
                    append_control(&mut bytes, &ToHost::Quiesced(quiesced));
                    still.store(true, Ordering::Relaxed);
                    let _over =
                        controls.send(Control { bytes, hold: Some(true), tells_held: None });
                });
                self.quiescing = Some(task.abort_handle());
            }
            ToGuest::Wake(wake) => self.wake(&wake, None, &[]),
            ToGuest::WakeWithIpv6(wake, ipv6) => self.wake(&wake, Some(&ipv6), &[]),
            ToGuest::WakeWithMounts(wake, ipv6, mounts) => {
                self.wake(&wake, ipv6.as_ref(), &mounts);
            }
            ToGuest::SleepNotice(notice) => self.agent.holds.tell(notice),
        }
    }

    /// Whether the version that is spoken has what came with this one. What it has not is not understood, as it would not be by an
    /// agent of that version: a host that keeps to the version never sees it.
    fn has(&self, since: u16) -> bool {
        self.version >= since
    }

    fn wake(&mut self, wake: &Wake, ipv6: Option<&Ipv6Network>, mounts: &[Mount]) {
        if self.id != Some(wake.link) {
            // A host that resumes what it never had. Its wait ends by its limit.
            eprintln!("wake for another link: {:?}", wake.link);
            return;
        }
        // What it writes to the disk in the background does no harm.
        if let Some(quiescing) = self.quiescing.take() {
            quiescing.abort();
        }
        self.still.store(false, Ordering::Relaxed);
        let woke = self.agent.wake(wake, ipv6, mounts);
        let hold = (!woke.running).then_some(true).or(Some(false));
        let mut bytes = Vec::new();
        append_control(&mut bytes, &ToHost::Woke(woke));
        self.say(Control { bytes, hold, tells_held: None });
    }

    fn open(&mut self, frame: &Frame) {
        let id = frame.channel;
        let (data, inbox) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared::default());
        let inbox = Inbox { id, shared: Arc::clone(&shared), data: inbox, out: self.out.clone() };
        let outbox = Outbox { id, shared: Arc::clone(&shared), out: self.out.clone() };
        let mut entries = table(&self.table);
        if entries.contains_key(&id) || id == 0 {
            self.out.frame(Frame::empty(FrameKind::Reset, id));
            return;
        }
        let full = entries.len() >= CHANNELS_MAX;
        let request = wire::decode::<Request>(&frame.payload);
        let known = request.as_ref().is_ok_and(|request| self.has(request.since()));
        let host_sends = request.as_ref().is_ok_and(Request::host_sends);
        let agent = Arc::clone(&self.agent);
        let out = self.out.clone();
        let table_ = Arc::clone(&self.table);
        let task = async move {
            let end = match request {
                _ if full => {
                    let message = format!("more than {CHANNELS_MAX} channels at once");
                    outbox.fail(failure(FailureCode::TooMany, None, message)).await;
                    End::Fin
                }
                Ok(_) if !known => {
                    let message = "request of a later version of the protocol".to_owned();
                    outbox.fail(failure(FailureCode::Unsupported, None, message)).await;
                    End::Fin
                }
                Ok(request) => serve::request(&agent, request, inbox, &outbox).await,
                Err(error) => {
                    let message = format!("request not understood by this agent: {error}");
                    outbox.fail(failure(FailureCode::Unsupported, None, message)).await;
                    End::Fin
                }
            };
            let mut entries = table(&table_);
            let Some(entry) = entries.get_mut(&id) else { return };
            entry.task = None;
            match end {
                End::Fin | End::Sent => {
                    if end == End::Fin {
                        out.frame(Frame::empty(FrameKind::Fin, id));
                    }
                    if entry.data.is_none() {
                        entries.remove(&id);
                    }
                }
                End::Reset => {
                    out.frame(Frame::empty(FrameKind::Reset, id));
                    entries.remove(&id);
                }
            }
        };
        // The task takes the table's lock only at its end, so it finds its entry even if it runs at once.
        let task = tokio::spawn(task);
        let data = host_sends.then_some(data);
        entries.insert(id, Entry { shared, data, task: Some(task.abort_handle()) });
    }

    /// Drops all channels.
    fn forget(&mut self) {
        self.out.epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(quiescing) = self.quiescing.take() {
            quiescing.abort();
        }
        table(&self.table).clear();
    }

    fn say(&self, control: Control) {
        let _over = self.controls.send(control);
    }
}

fn table(table: &Mutex<HashMap<u32, Entry>>) -> MutexGuard<'_, HashMap<u32, Entry>> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

fn append_control(bytes: &mut Vec<u8>, message: &ToHost) {
    let written = wire::encode(message)
        .map(|payload| Frame { kind: FrameKind::Control, channel: 0, payload }.write_to(bytes));
    match written {
        Ok(Ok(())) => {}
        Ok(Err(error)) => eprintln!("control message not sent: {error}"),
        Err(error) => eprintln!("control message not sent: {error}"),
    }
}

/// Writes control messages first, then frames of channels unless held. A host that is not there holds this task only.
async fn write<T: Transport>(
    transport: Arc<T>,
    mut frames: mpsc::UnboundedReceiver<(u64, Frame)>,
    mut controls: mpsc::UnboundedReceiver<Control>,
    mut held: watch::Receiver<Held>,
    epoch: Arc<AtomicU64>,
) {
    let mut hold = true;
    let mut tells_held = false;
    loop {
        let mut bytes = Vec::new();
        tokio::select! {
            biased;
            control = controls.recv() => {
                let Some(control) = control else { return };
                bytes = control.bytes;
                hold = control.hold.unwrap_or(hold);
                if let Some(tells) = control.tells_held {
                    tells_held = tells;
                    held.mark_changed();
                }
            }
            // The sender lives as long as the agent. What changes while the guest stands still is told when it goes on.
            Ok(()) = held.changed(), if tells_held && !hold => {
                append_control(&mut bytes, &ToHost::Held(*held.borrow_and_update()));
            }
            Some((of, frame)) = frames.recv(), if !hold => {
                let now = epoch.load(Ordering::Relaxed);
                append(&mut bytes, now, of, &frame);
                while bytes.len() < CHUNK
                    && let Ok((of, frame)) = frames.try_recv()
                {
                    append(&mut bytes, now, of, &frame);
                }
            }
        }
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            match transport.write(rest).await {
                Ok(written) => rest = &rest[written..],
                Err(error) => {
                    eprintln!("write to host: {error}");
                    return;
                }
            }
        }
    }
}

fn append(bytes: &mut Vec<u8>, now: u64, of: u64, frame: &Frame) {
    if of == now
        && let Err(error) = frame.write_to(bytes)
    {
        eprintln!("frame not sent: {error}");
    }
}

struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
