//! One socket's reader and writer.
//!
//! The writer stops at a frame's end when it is told to hold, so that after `Quiesce` nothing of ours is under way. The
//! reader sorts what comes into the channels; it never waits for a consumer, because credit bounds what can come.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use tokio::{
    io::AsyncWriteExt,
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
};
use wire::{Decoder, Frame, FrameKind, ToGuest, ToHost};

use super::{
    channel::Event,
    link::{Connection, Inner, LinkState, Phase},
};

/// Bytes gathered from waiting frames into one write, about: enough that small frames share a system call.
const WRITE_BATCH: usize = 64 * 1024;

/// Bytes read at a time.
const READ_CHUNK: usize = 64 * 1024;

/// Something that goes out before all channel frames, and what the writer does afterwards.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) bytes: Vec<u8>,
    pub(super) then: Then,
}

/// Whether frames of channels go out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// As before.
    Stay,
    /// Not until told.
    Hold,
    /// From now on.
    Go,
}

impl Control {
    pub(super) fn message(message: &ToGuest, then: Then) -> Self {
        let mut bytes = Vec::new();
        // Control messages have a bounded size: the largest part is a host name that is checked where it is made.
        if let Ok(payload) = wire::encode(message) {
            let frame = Frame { kind: FrameKind::Control, channel: 0, payload };
            if let Err(error) = frame.write_to(&mut bytes) {
                tracing::error!(%error, "control message not sent");
            }
        } else {
            tracing::error!("control message not sent: too large");
        }
        Self { bytes, then }
    }
}

/// Starts both tasks. The writer holds channel frames until told to go.
pub(super) fn start(
    inner: &Arc<Inner>,
    socket: UnixStream,
    epoch: u64,
    phase: Phase,
) -> Connection {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let (reader, writer) = socket.into_split();
    let (control, controls) = mpsc::unbounded_channel();
    let read = tokio::spawn(read(Arc::clone(inner), reader, phase, number));
    let write = tokio::spawn(write(Arc::clone(inner), writer, controls, epoch));
    Connection { control, tasks: [read.abort_handle(), write.abort_handle()], number }
}

async fn write(
    inner: Arc<Inner>,
    mut socket: OwnedWriteHalf,
    mut controls: mpsc::UnboundedReceiver<Control>,
    epoch: u64,
) {
    let mut queue = Arc::clone(&inner.queue).lock_owned().await;
    let mut hold = true;
    loop {
        let mut bytes = Vec::new();
        tokio::select! {
            biased;
            control = controls.recv() => {
                let Some(control) = control else { return };
                hold = match control.then {
                    Then::Stay => hold,
                    Then::Hold => true,
                    Then::Go => false,
                };
                bytes = control.bytes;
            }
            Some((of, frame)) = queue.recv(), if !hold => {
                append(&mut bytes, epoch, of, &frame);
                while bytes.len() < WRITE_BATCH
                    && let Ok((of, frame)) = queue.try_recv()
                {
                    append(&mut bytes, epoch, of, &frame);
                }
            }
        }
        // A failed write means that the socket is gone; the reader sees its end and decides what that means.
        if let Err(error) = socket.write_all(&bytes).await {
            tracing::debug!(%error, "guest socket no longer takes data");
            return;
        }
    }
}

fn append(bytes: &mut Vec<u8>, epoch: u64, of: u64, frame: &Frame) {
    if of != epoch {
        return;
    }
    if let Err(error) = frame.write_to(bytes) {
        tracing::error!(%error, "channel frame not sent");
    }
}

async fn read(inner: Arc<Inner>, socket: OwnedReadHalf, mut phase: Phase, number: u64) {
    let mut decoder = Decoder::default();
    let reason = loop {
        // Waiting holds no buffer: a thousand quiet guests must cost nothing.
        if let Err(error) = socket.readable().await {
            break format!("guest socket failed: {error}");
        }
        let mut chunk = Vec::with_capacity(READ_CHUNK);
        match socket.try_read_buf(&mut chunk) {
            Ok(0) => break "guest socket ended".to_owned(),
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(error) => break format!("guest socket failed: {error}"),
        }
        decoder.push(&chunk);
        let mut wrong = None;
        while let Some(frame) = decoder.next_frame() {
            if let Err(Violation(what)) = sort(&inner, frame, &mut phase, number) {
                wrong = Some(what);
                break;
            }
        }
        if let Some(what) = wrong {
            tracing::warn!(what, "guest broke the protocol");
            break format!("guest broke the protocol: {what}");
        }
    };
    ended(&inner, number, &reason);
}

/// The socket is over. A guest that stands still is being saved; any other is dead.
fn ended(inner: &Inner, number: u64, reason: &str) {
    {
        let mut core = inner.core();
        if core.connection.as_ref().is_none_or(|connection| connection.number != number) {
            return;
        }
        if *inner.state.borrow() == LinkState::Quiesced {
            core.connection = None;
            inner.state.send_replace(LinkState::Parked);
            return;
        }
    }
    inner.lose(reason);
}

struct Violation(&'static str);

fn sort(inner: &Inner, frame: Frame, phase: &mut Phase, number: u64) -> Result<(), Violation> {
    let mut core = inner.core();
    if core.connection.as_ref().is_none_or(|connection| connection.number != number) {
        return Ok(());
    }
    if *phase == Phase::Greeting {
        if frame.kind == FrameKind::Control
            && let Ok(ToHost::Hello(hello)) = wire::decode(&frame.payload)
            && hello.link == inner.id()
        {
            *phase = Phase::Met;
            if let Some(answer) = core.answers.hello.take() {
                let _gave_up = answer.send(hello);
            }
        }
        return Ok(());
    }
    if frame.kind == FrameKind::Control {
        match wire::decode(&frame.payload) {
            Ok(ToHost::Hello(_)) => return Err(Violation("hello out of turn")),
            Ok(ToHost::Quiesced(quiesced)) => {
                // An answer to an attempt that was given up is no news: a wake is on its way.
                if let Some((_, answer)) =
                    core.answers.quiesced.take_if(|(attempt, _)| *attempt == quiesced.attempt)
                {
                    inner.state.send_replace(LinkState::Quiesced);
                    let _gave_up = answer.send(quiesced);
                }
            }
            Ok(ToHost::Woke(woke)) => {
                if let Some((_, answer)) =
                    core.answers.woke.take_if(|(attempt, _)| *attempt == woke.attempt)
                {
                    if woke.running
                        && let Some(connection) = &core.connection
                    {
                        let go = Control { bytes: Vec::new(), then: Then::Go };
                        let _ended = connection.control.send(go);
                        inner.state.send_replace(LinkState::Running);
                    }
                    let _gave_up = answer.send(woke);
                }
            }
            Ok(ToHost::Held(held)) => drop(inner.held.send_replace(held)),
            Ok(ToHost::Sockets(sockets)) => core.sockets = Some(sockets),
            Err(_) => return Err(Violation("unreadable control message")),
        }
        return Ok(());
    }
    // A frame for a channel that we closed a moment ago is normal.
    let Some(entry) = core.channels.get_mut(&frame.channel) else { return Ok(()) };
    match frame.kind {
        FrameKind::Data | FrameKind::Message => {
            let received = entry.window().receive(frame.payload.len());
            received.map_err(|_| Violation("more data than credit"))?;
            entry.tell(match frame.kind {
                FrameKind::Data => Event::Data(Bytes::from(frame.payload)),
                _ => Event::Message(frame.payload),
            });
        }
        FrameKind::Credit => {
            let granted = frame.credit_bytes().ok_or(Violation("malformed credit"))?;
            entry.grant(granted).map_err(|()| Violation("more credit than the window"))?;
        }
        FrameKind::Fin => {
            entry.tell(Event::Fin);
            if entry.guest_ended() {
                core.channels.remove(&frame.channel);
            }
        }
        FrameKind::Reset => {
            if let Some(entry) = core.channels.remove(&frame.channel) {
                entry.reset();
            }
        }
        FrameKind::Open => return Err(Violation("guest opened a channel")),
        FrameKind::Control => {}
    }
    Ok(())
}
