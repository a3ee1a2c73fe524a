//! What crosses a guest's link, seen from the side: when a request went in and when its answer began to come out.
//!
//! That tells the guest's part of an answer from everybody else's, without asking anybody.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, eth, recv, socket_with};

use super::stage::COUNTER_PORT;

/// How often the watcher looks whether it may stop.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
/// As much of a frame as is looked at: headers.
const FRAME_BYTES: usize = 256;

/// Watches all links of this network namespace, in a thread of its own, until it is asked what it saw.
pub(crate) struct Wire {
    enough: Arc<AtomicBool>,
    watcher: JoinHandle<Vec<(Instant, Segment)>>,
}

/// A TCP segment to or from the port of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    guest: Ipv4Addr,
    to_guest: bool,
    opens: bool,
    has_content: bool,
}

impl Wire {
    #[track_caller]
    pub(crate) fn watch() -> Self {
        let socket = socket_with(
            AddressFamily::PACKET,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(eth::ALL),
        );
        let socket = socket.expect("a socket that sees frames");
        let enough = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&enough);
        let watcher = std::thread::spawn(move || {
            let (mut seen, mut frame) = (Vec::new(), [0; FRAME_BYTES]);
            loop {
                let ready = poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&LOOK));
                let now = Instant::now();
                if ready.expect("waited") == 0 {
                    // Only when all that has come is seen.
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    continue;
                }
                let (length, _) = recv(&socket, &mut frame, RecvFlags::empty()).expect("a frame");
                seen.extend(segment(&frame[..length]).map(|segment| (now, segment)));
            }
            seen
        });
        Self { enough, watcher }
    }

    /// From the opening of the last connection to a guest's counter to the first byte that came from there.
    #[track_caller]
    pub(crate) fn answered(self, guest: &str) -> Duration {
        self.enough.store(true, Ordering::Relaxed);
        let seen = self.watcher.join().expect("the watcher ends");
        let guest: Ipv4Addr = guest.parse().expect("an address");
        let of_guest: Vec<_> = seen.iter().filter(|(_, segment)| segment.guest == guest).collect();
        let opened = of_guest
            .iter()
            .rposition(|(_, segment)| segment.to_guest && segment.opens)
            .expect("a connection");
        let mut after = of_guest[opened..].iter();
        let answer =
            after.find(|(_, segment)| !segment.to_guest && segment.has_content).expect("an answer");
        answer.0 - of_guest[opened].0
    }
}

/// Reads a frame: Ethernet, IPv4, TCP, and nothing else.
fn segment(frame: &[u8]) -> Option<Segment> {
    let ip = frame.strip_prefix(frame.first_chunk::<12>()?)?.strip_prefix(&[8, 0])?;
    let head = usize::from(ip.first()? & 15) * 4;
    let total = usize::from(u16::from_be_bytes([*ip.get(2)?, *ip.get(3)?]));
    let tcp = ip.get(head..)?;
    if *ip.get(9)? != 6 || tcp.len() < 14 {
        return None;
    }
    let port = |at: usize| u16::from_be_bytes([tcp[at], tcp[at + 1]]);
    let to_guest = port(2) == COUNTER_PORT;
    if !to_guest && port(0) != COUNTER_PORT {
        return None;
    }
    let address = ip.get(if to_guest { 16..20 } else { 12..16 })?;
    let (syn, ack) = (tcp[13] & 2 != 0, tcp[13] & 16 != 0);
    Some(Segment {
        guest: Ipv4Addr::new(address[0], address[1], address[2], address[3]),
        to_guest,
        opens: syn && !ack,
        has_content: total > head + usize::from(tcp[12] >> 4) * 4,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame from 10.118.0.1:40000 to 10.118.0.2:8000 with these flags and so many bytes of content.
    fn frame(flags: u8, content: u8) -> Vec<u8> {
        let mut frame = vec![6, 0x64, 10, 118, 0, 2, 2, 0x64, 0x6d, 0, 0, 1, 8, 0];
        frame.extend([
            0x45,
            0,
            0,
            40 + content,
            0,
            0,
            0,
            0,
            64,
            6,
            0,
            0,
            10,
            118,
            0,
            1,
            10,
            118,
            0,
            2,
        ]);
        frame.extend([
            0x9c, 0x40, 0x1f, 0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, flags, 0, 0, 0, 0, 0, 0,
        ]);
        frame.extend(std::iter::repeat_n(b'x', content.into()));
        frame
    }

    #[test]
    fn a_connections_opening_is_told_from_its_content() {
        let guest = Ipv4Addr::new(10, 118, 0, 2);
        let open = Segment { guest, to_guest: true, opens: true, has_content: false };
        assert_eq!(segment(&frame(2, 0)), Some(open));
        assert_eq!(
            segment(&frame(0x18, 9)),
            Some(Segment { opens: false, has_content: true, ..open })
        );
        assert_eq!(segment(&frame(0x10, 0)), Some(Segment { opens: false, ..open }));
        for cut in 0..48 {
            assert_eq!(segment(&frame(2, 0)[..cut]), None, "{cut}");
        }
    }
}
