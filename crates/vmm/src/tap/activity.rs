//! Whether anything that counts has crossed the tap.
//!
//! While the machine runs its packets go from the kernel to QEMU and back without us. A packet socket with a filter in the kernel notes
//! those that count, and keeps one byte of one or two of them: once its small buffer is full the kernel drops further ones, which costs next to nothing.

use std::os::fd::OwnedFd;

use rustix::net::{RecvFlags, recv};

use super::{Tap, TapError, sys};

/// Notes unicast IP packets of either direction; not bare TCP segments (acknowledgements, keepalive probes and their answers), neighbour discovery and group membership: the
/// packets for which [`crate::packet::Verdict::is_activity`] holds.
#[derive(Debug)]
pub struct ActivityWatch {
    /// Only not there while it is dropped.
    socket: Option<OwnedFd>,
    name: String,
}

/// Most packets taken in one call. The buffer holds a few at most; the limit is there so that a flood cannot hold us.
const DRAIN_MAX: usize = 64;

impl ActivityWatch {
    /// On this tap, from now on.
    pub fn new(tap: &Tap) -> Result<Self, TapError> {
        let fail = |source| TapError::new("watch", tap.name(), source);
        let socket = sys::packet_socket(tap.index(), Some(&filter())).map_err(fail)?;
        // The kernel makes the least it allows of it (2304 bytes), and always takes a packet into an empty buffer.
        rustix::net::sockopt::set_socket_recv_buffer_size(&socket, 0)
            .map_err(|errno| fail(errno.into()))?;
        Ok(Self { socket: Some(socket), name: tap.name().to_owned() })
    }

    /// Whether there was any since the last call.
    pub fn drain(&self) -> Result<bool, TapError> {
        let mut seen = false;
        let Some(socket) = &self.socket else { return Ok(false) };
        for _ in 0..DRAIN_MAX {
            let mut byte = [0];
            match recv(socket, &mut byte[..], RecvFlags::DONTWAIT) {
                Ok(_) => seen = true,
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(TapError::new("watch", &self.name, errno)),
            }
        }
        Ok(seen)
    }
}

impl Drop for ActivityWatch {
    fn drop(&mut self) {
        if let Some(socket) = self.socket.take() {
            sys::close_later(socket);
        }
    }
}

/// Bytes kept of a packet that counts.
const SNAP_BYTES: u32 = 1;

/// The rule as a filter. It looks at the same fields as [`crate::packet::classify`]; a packet whose lengths contradict each other may count here and not there.
fn filter() -> Vec<libc::sock_filter> {
    use Go::{Accept, Next, Reject, To};
    use libc::{
        BPF_ABS, BPF_ADD, BPF_ALU, BPF_AND, BPF_B, BPF_H, BPF_IND, BPF_JEQ, BPF_JGE, BPF_JGT,
        BPF_JMP, BPF_JSET, BPF_K,
    };
    use libc::{BPF_LD, BPF_LDX, BPF_MISC, BPF_MSH, BPF_RSH, BPF_SUB, BPF_TAX, BPF_X};
    const IP_V6: &str = "IPv6";
    const TCP_V6: &str = "TCP over IPv6";
    let (byte_at, half_at) = (BPF_LD | BPF_B | BPF_ABS, BPF_LD | BPF_H | BPF_ABS);
    let byte_at_x = BPF_LD | BPF_B | BPF_IND;
    let (and, shift_right, add_x, subtract_x) = (
        BPF_ALU | BPF_AND | BPF_K,
        BPF_ALU | BPF_RSH | BPF_K,
        BPF_ALU | BPF_ADD | BPF_X,
        BPF_ALU | BPF_SUB | BPF_X,
    );
    let to_x = BPF_MISC | BPF_TAX;
    let (equal, greater, at_least, any_bit) = (
        BPF_JMP | BPF_JEQ | BPF_K,
        BPF_JMP | BPF_JGT | BPF_K,
        BPF_JMP | BPF_JGE | BPF_K,
        BPF_JMP | BPF_JSET | BPF_K,
    );
    let mut program = Program::default();
    // Link groups.
    program.step(byte_at, 0);
    program.test(any_bit, 1, Reject, Next);
    program.step(half_at, 12);
    program.test(equal, 0x86dd, To(IP_V6), Next);
    program.test(equal, 0x0800, Next, Reject);
    // IPv4: no group, no broadcast; a later fragment has no TCP head to look at.
    program.step(byte_at, 30);
    program.test(at_least, 224, Reject, Next);
    program.step(byte_at, 23);
    program.test(equal, 6, Next, Accept);
    program.step(half_at, 20);
    program.test(any_bit, 0x1fff, Accept, Next);
    // X becomes the IP head's length, then that of both heads; A what remains of the packet's.
    program.step(BPF_LDX | BPF_B | BPF_MSH, 14);
    program.step(byte_at_x, 14 + 13);
    program.step(and, 0x3f);
    program.test(equal, 0x10, Next, Accept);
    program.step(byte_at_x, 14 + 12);
    program.step(and, 0xf0);
    program.step(shift_right, 2);
    program.step(add_x, 0);
    program.step(to_x, 0);
    program.step(half_at, 16);
    program.step(subtract_x, 0);
    program.test(greater, 1, Accept, Reject);
    // IPv6: no group; of ICMPv6 not the housekeeping (130 to 137, 143).
    program.mark(IP_V6);
    program.step(byte_at, 38);
    program.test(equal, 0xff, Reject, Next);
    program.step(byte_at, 20);
    program.test(equal, 6, To(TCP_V6), Next);
    program.test(equal, 58, Next, Accept);
    program.step(byte_at, 54);
    program.test(equal, 143, Reject, Next);
    program.test(at_least, 130, Next, Accept);
    program.test(greater, 137, Accept, Reject);
    program.mark(TCP_V6);
    program.step(byte_at, 54 + 13);
    program.step(and, 0x3f);
    program.test(equal, 0x10, Next, Accept);
    program.step(byte_at, 54 + 12);
    program.step(and, 0xf0);
    program.step(shift_right, 2);
    program.step(to_x, 0);
    program.step(half_at, 18);
    program.step(subtract_x, 0);
    program.test(greater, 1, Accept, Reject);
    program.assemble()
}

/// Where a test leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Go {
    Next,
    Accept,
    Reject,
    To(&'static str),
}

/// Instructions whose jumps are still names.
#[derive(Debug, Default)]
struct Program {
    steps: Vec<(u32, u32, Go, Go)>,
    marks: Vec<(&'static str, usize)>,
}

impl Program {
    fn step(&mut self, code: u32, value: u32) {
        self.test(code, value, Go::Next, Go::Next);
    }

    fn test(&mut self, code: u32, value: u32, yes: Go, no: Go) {
        self.steps.push((code, value, yes, no));
    }

    fn mark(&mut self, name: &'static str) {
        self.marks.push((name, self.steps.len()));
    }

    fn assemble(mut self) -> Vec<libc::sock_filter> {
        let accept = self.steps.len();
        self.step(libc::BPF_RET | libc::BPF_K, SNAP_BYTES);
        self.step(libc::BPF_RET | libc::BPF_K, 0);
        let place = |at: usize, go| match go {
            Go::Next => at + 1,
            Go::Accept => accept,
            Go::Reject => accept + 1,
            Go::To(name) => self
                .marks
                .iter()
                .find(|(mark, _)| *mark == name)
                .map_or(accept, |(_, place)| *place),
        };
        #[expect(
            clippy::cast_possible_truncation,
            reason = "codes and jumps of this short program are below 256"
        )]
        let assemble =
            |(at, &(code, k, yes, no)): (usize, &(u32, u32, Go, Go))| libc::sock_filter {
                code: code as u16,
                jt: (place(at, yes) - at - 1) as u8,
                jf: (place(at, no) - at - 1) as u8,
                k,
            };
        self.steps.iter().enumerate().map(assemble).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::samples;
    use crate::packet::{Verdict, classify};
    use proptest::prelude::*;

    /// What the kernel does with a filter (`Documentation/networking/filter.rst`), as far as ours goes. None: it read beyond the packet, which rejects.
    fn run(program: &[libc::sock_filter], packet: &[u8]) -> Option<u32> {
        let (mut a, mut x, mut at) = (0_u32, 0_u32, 0_usize);
        let byte = |at: u32| packet.get(at as usize).copied().map(u32::from);
        loop {
            let libc::sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            let jump = |yes: bool| usize::from(if yes { jt } else { jf });
            match code {
                0x30 => a = byte(k)?,
                0x28 => a = byte(k)? << 8 | byte(k + 1)?,
                0x50 => a = byte(x + k)?,
                0xb1 => x = (byte(k)? & 0xf) * 4,
                0x54 => a &= k,
                0x74 => a >>= k,
                0x0c => a = a.wrapping_add(x),
                0x1c => a = a.wrapping_sub(x),
                0x07 => x = a,
                0x15 => at += jump(a == k),
                0x25 => at += jump(a > k),
                0x35 => at += jump(a >= k),
                0x45 => at += jump(a & k != 0),
                0x06 => return Some(k),
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    proptest! {
        /// The list that keeps a machine awake is the list that wakes it.
        #[test]
        fn s02_the_filter_and_the_classifier_agree(frame in samples::any_whole_frame()) {
            let counts = run(&filter(), &frame).is_some_and(|kept| kept > 0);
            prop_assert_eq!(counts, classify(&frame).is_activity(), "{:?}", classify(&frame));
        }

        /// However malformed: what is judged to matter counts.
        #[test]
        fn what_wakes_counts(frame in samples::any_frame()) {
            let counts = run(&filter(), &frame).is_some_and(|kept| kept > 0);
            let verdict = classify(&frame);
            // The filter does not look through extension headers, nor at versions and lengths.
            prop_assert!(counts || !matches!(verdict, Verdict::Wake(_)), "{:?} of {:02x?}", verdict, frame);
        }
    }
}
