//! Where a running guest's connections stand: its kernel is asked, connection by connection.
//!
//! A segment out of a connection's window is answered by the kernel with a bare acknowledgement, and that says all: the next
//! byte it sends, the next it expects, window and timestamp. The peer hears it too and makes nothing of it. So nobody has to
//! listen all the time, and no program in the guest is asked.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{RecvFlags, recv};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

use super::{Frame, Injector, Tap, TapError, sys};
use crate::packet::Flow;
use crate::packet::answer::{LinkEnds, flow_of, question};

/// A connection by its two ends: the guest's, its peer's.
pub type Ends = (SocketAddr, SocketAddr);

/// Most connections that are asked about; it bounds what is sent at once to well below what a tap's queue holds.
pub const ASKED_MAX: usize = 256;

/// Linux answers such segments of one connection no more often than each 500 ms, so one that has just answered somebody's
/// keepalive probe is asked again after that.
const ASK_AGAIN: Duration = Duration::from_millis(520);

/// How long the second answer may take.
const ANSWER_LIMIT: Duration = Duration::from_millis(150);

/// Asks a running guest where these connections stand (the first [`ASKED_MAX`]). Usually a few milliseconds, at most 0.7 s; a
/// connection without an answer is not in the result. Cancel safe.
pub async fn flows(
    tap: &Tap,
    injector: &Injector,
    macs: LinkEnds,
    connections: &[Ends],
) -> Result<HashMap<Ends, Flow>, TapError> {
    let mut open: Vec<Ends> = connections.iter().copied().take(ASKED_MAX).collect();
    let mut found = HashMap::new();
    if open.is_empty() {
        return Ok(found);
    }
    let fail = |source| TapError::new("listen on", tap.name(), source);
    let socket = sys::packet_socket(tap.index(), Some(&filter())).map_err(fail)?;
    let socket = Hearing(Some(crate::pollable::readable(socket).map_err(fail)?));
    for limit in [ASK_AGAIN, ANSWER_LIMIT] {
        for &(local, peer) in &open {
            // Out of the window is one of the two at least.
            for sequence in [0x1000_0000, 0x9000_0000] {
                if let Some(frame) = question(macs, peer, local, sequence) {
                    injector.send(&Frame::of(&frame))?;
                }
            }
        }
        let until = Instant::now() + limit;
        while !open.is_empty() {
            let Ok(heard) = tokio::time::timeout_at(until, hear(&socket)).await else { break };
            let frame = heard.map_err(fail)?;
            // What the guest sends comes from its card; the questions are heard as well.
            if frame.get(6..12) == Some(&macs.to[..])
                && let Some((local, peer, flow)) = flow_of(&frame)
                && let Some(at) = open.iter().position(|ends| *ends == (local, peer))
            {
                open.swap_remove(at);
                found.insert((local, peer), flow);
            }
        }
        if open.is_empty() {
            break;
        }
    }
    Ok(found)
}

/// Bytes of a frame that are looked at: all heads of a segment without payload.
const SNAP_BYTES: u32 = 160;

/// A packet socket that is closed elsewhere, where nobody waits for it.
struct Hearing(Option<AsyncFd<OwnedFd>>);

impl Drop for Hearing {
    fn drop(&mut self) {
        if let Some(socket) = self.0.take() {
            sys::close_later(socket.into_inner());
        }
    }
}

async fn hear(socket: &Hearing) -> std::io::Result<Vec<u8>> {
    let Some(socket) = &socket.0 else { return std::future::pending().await };
    socket
        .async_io(Interest::READABLE, |socket| {
            let mut space = vec![0; SNAP_BYTES as usize];
            let (length, _) = recv(socket, &mut space[..], RecvFlags::DONTWAIT)?;
            space.truncate(length);
            Ok(space)
        })
        .await
}

/// TCP over IPv4 or IPv6, of either direction.
fn filter() -> [libc::sock_filter; 8] {
    use libc::{BPF_ABS, BPF_B, BPF_H, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET};
    #[expect(clippy::cast_possible_truncation, reason = "codes are below 256")]
    let step = |code: u32, k, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    [
        step(BPF_LD | BPF_H | BPF_ABS, 12, 0, 0),
        step(BPF_JMP | BPF_JEQ | BPF_K, 0x86dd, 2, 0),
        // Byte 23 of IPv4; anything else has something else there, or is passed for nothing.
        step(BPF_LD | BPF_B | BPF_ABS, 23, 0, 0),
        step(BPF_JMP | BPF_JEQ | BPF_K, 6, 2, 3),
        step(BPF_LD | BPF_B | BPF_ABS, 20, 0, 0),
        step(BPF_JMP | BPF_JEQ | BPF_K, 6, 0, 1),
        step(BPF_RET | BPF_K, SNAP_BYTES, 0, 0),
        step(BPF_RET | BPF_K, 0, 0, 0),
    ]
}
