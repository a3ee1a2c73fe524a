//! Frames: how messages and bytes are cut on the link, and how a reader finds its way again after damage.
//!
//! ```text
//! 0      4     5      8        12      16     20
//! magic  kind  0 0 0  channel  length  crc32  payload …      all numbers little-endian
//! ```
//!
//! The CRC covers bytes 4–15 and the payload. A reader that meets anything else skips *one* byte and looks for the next
//! magic, so a half frame never swallows the whole ones behind it. What it cannot know is that a half frame will never be
//! completed; so whoever takes over a link in an unknown state first sends [`preamble`]: zeros as long as the largest
//! frame, which complete the half frame, fail its CRC and are skipped.

/// First bytes of each frame.
pub const MAGIC: [u8; 4] = *b"\xd0DM1";
/// Bytes before the payload.
pub const HEADER_LEN: usize = 20;
/// Largest payload in bytes. Larger than that gains no throughput on a virtio-serial port, whose driver writes 32 KiB at a time.
pub const PAYLOAD_MAX: usize = 64 * 1024;

/// What a frame carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// [`ToGuest`](crate::ToGuest) or [`ToHost`](crate::ToHost), on channel 0.
    Control = 1,
    /// Host to guest: a [`Request`](crate::Request) that opens this channel.
    Open = 2,
    /// Plain bytes; counts against the receiver's window.
    Data = 3,
    /// Guest to host: a [`Reply`](crate::Reply); counts against the receiver's window.
    Message = 4,
    /// A little-endian `u32`: so many more bytes may be sent.
    Credit = 5,
    /// The sender sends no more on this channel; empty.
    Fin = 6,
    /// The channel is over in both directions, whatever was under way; empty.
    Reset = 7,
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Control,
            2 => Self::Open,
            3 => Self::Data,
            4 => Self::Message,
            5 => Self::Credit,
            6 => Self::Fin,
            7 => Self::Reset,
            _ => return None,
        })
    }
}

/// One frame.
#[derive(Clone, PartialEq, Eq)]
pub struct Frame {
    /// What it carries.
    pub kind: FrameKind,
    /// The channel it belongs to; 0 for control.
    pub channel: u32,
    /// At most [`PAYLOAD_MAX`] bytes.
    pub payload: Vec<u8>,
}

impl std::fmt::Debug for Frame {
    /// Says how long the payload is, never what is in it: it is a user's data or fresh entropy.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Frame({:?} ch{} {}B)", self.kind, self.channel, self.payload.len())
    }
}

/// Why a frame could not be written.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("payload of {bytes} bytes is over the frame limit of {PAYLOAD_MAX} bytes")]
pub struct FrameError {
    /// The payload's length in bytes.
    pub bytes: usize,
}

impl Frame {
    /// A frame without payload ([`FrameKind::Fin`], [`FrameKind::Reset`]).
    pub fn empty(kind: FrameKind, channel: u32) -> Self {
        Self { kind, channel, payload: Vec::new() }
    }

    /// A grant of `bytes` more.
    pub fn credit(channel: u32, bytes: u32) -> Self {
        Self { kind: FrameKind::Credit, channel, payload: bytes.to_le_bytes().to_vec() }
    }

    /// The number in a [`FrameKind::Credit`] frame, if it is well formed.
    pub fn credit_bytes(&self) -> Option<u32> {
        Some(u32::from_le_bytes(self.payload.as_slice().try_into().ok()?))
    }

    /// Appends the frame's bytes to `out`.
    ///
    /// # Errors
    /// When the payload is over [`PAYLOAD_MAX`]; nothing is appended then.
    pub fn write_to(&self, out: &mut Vec<u8>) -> Result<(), FrameError> {
        let length = u32::try_from(self.payload.len())
            .ok()
            .filter(|&length| length as usize <= PAYLOAD_MAX)
            .ok_or(FrameError { bytes: self.payload.len() })?;
        let mut covered = [0; 12];
        covered[0] = self.kind as u8;
        covered[4..8].copy_from_slice(&self.channel.to_le_bytes());
        covered[8..12].copy_from_slice(&length.to_le_bytes());
        out.reserve(HEADER_LEN + self.payload.len());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&covered);
        out.extend_from_slice(&checksum(&covered, &self.payload).to_le_bytes());
        out.extend_from_slice(&self.payload);
        Ok(())
    }
}

/// Zeros that complete and thereby end any half frame in the other side's decoder.
pub fn preamble() -> Vec<u8> {
    vec![0; HEADER_LEN + PAYLOAD_MAX]
}

/// Cuts a stream of bytes into frames.
///
/// Holds at most one frame and the bytes of one [`push`](Self::push); gives its memory back whenever it is empty, since
/// a daemon holds one of these per running sandbox.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
    skipped: u64,
}

impl Decoder {
    /// Adds bytes that were read. Take all frames out with [`next_frame`](Self::next_frame) before pushing more.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame, or none until more bytes come.
    pub fn next_frame(&mut self) -> Option<Frame> {
        loop {
            let rest = &self.buffer[self.start..];
            match look(rest) {
                Look::Frame { kind, channel, end } => {
                    let frame = Frame { kind, channel, payload: rest[HEADER_LEN..end].to_vec() };
                    self.start += end;
                    self.tidy();
                    return Some(frame);
                }
                Look::More => {
                    self.tidy();
                    return None;
                }
                Look::Skip(bytes) => {
                    self.start += bytes;
                    self.skipped += bytes as u64;
                }
            }
        }
    }

    /// Bytes skipped so far because they belonged to no whole frame. Zero on a healthy link.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Bytes held that are not yet a whole frame.
    pub fn pending(&self) -> usize {
        self.buffer.len() - self.start
    }

    fn tidy(&mut self) {
        if self.start == self.buffer.len() {
            self.buffer = Vec::new();
            self.start = 0;
        }
    }
}

enum Look {
    Frame { kind: FrameKind, channel: u32, end: usize },
    More,
    Skip(usize),
}

fn look(rest: &[u8]) -> Look {
    let Some(found) = rest.iter().position(|&byte| byte == MAGIC[0]) else {
        return if rest.is_empty() { Look::More } else { Look::Skip(rest.len()) };
    };
    if found > 0 {
        return Look::Skip(found);
    }
    // Each field is judged as soon as it is there: garbage must not make us wait for bytes that never come.
    let known = rest.len().min(MAGIC.len());
    if rest[..known] != MAGIC[..known] {
        return Look::Skip(1);
    }
    let Some(header) = rest.first_chunk::<HEADER_LEN>() else { return Look::More };
    let Some(kind) = FrameKind::from_byte(header[4]) else { return Look::Skip(1) };
    let channel = le_u32(header, 8);
    let length = le_u32(header, 12) as usize;
    if header[5..8] != [0; 3] || length > PAYLOAD_MAX {
        return Look::Skip(1);
    }
    let end = HEADER_LEN + length;
    let Some(payload) = rest.get(HEADER_LEN..end) else { return Look::More };
    if checksum(&header[4..16], payload) != le_u32(header, 16) {
        return Look::Skip(1);
    }
    Look::Frame { kind, channel, end }
}

fn checksum(covered: &[u8], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(covered);
    hasher.update(payload);
    hasher.finalize()
}

fn le_u32(header: &[u8; HEADER_LEN], at: usize) -> u32 {
    u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(payload: &[u8]) -> Frame {
        Frame { kind: FrameKind::Data, channel: 7, payload: payload.to_vec() }
    }

    fn bytes(frame: &Frame) -> Vec<u8> {
        let mut out = Vec::new();
        frame.write_to(&mut out).expect("small");
        out
    }

    fn all(decoder: &mut Decoder) -> Vec<Frame> {
        std::iter::from_fn(|| decoder.next_frame()).collect()
    }

    #[test]
    fn the_bytes_of_a_frame_are_as_documented() {
        let bytes = bytes(&frame(b"hi"));
        assert_eq!(&bytes[..16], b"\xd0DM1\x03\0\0\0\x07\0\0\0\x02\0\0\0");
        assert_eq!(&bytes[20..], b"hi");
        assert_eq!(bytes.len(), HEADER_LEN + 2);
    }

    #[test]
    fn a_payload_over_the_limit_is_refused_and_one_at_the_limit_passes() {
        let mut out = Vec::new();
        assert_eq!(
            frame(&vec![1; PAYLOAD_MAX + 1]).write_to(&mut out),
            Err(FrameError { bytes: PAYLOAD_MAX + 1 })
        );
        assert!(out.is_empty());
        let largest = frame(&vec![1; PAYLOAD_MAX]);
        let mut decoder = Decoder::default();
        decoder.push(&bytes(&largest));
        assert_eq!(all(&mut decoder), [largest]);
        assert_eq!(decoder.pending(), 0);
    }

    #[test]
    fn a_length_over_the_limit_is_skipped_at_once_and_not_waited_for() {
        let mut bad = bytes(&frame(b"x"));
        bad[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        let mut decoder = Decoder::default();
        decoder.push(&bad);
        decoder.push(&bytes(&frame(b"next")));
        assert_eq!(all(&mut decoder), [frame(b"next")]);
        assert_eq!(decoder.skipped(), bad.len() as u64);
    }

    #[test]
    fn a_half_frame_is_ended_by_the_preamble_and_costs_nothing_behind_it() {
        let half = bytes(&frame(&[0x55; 5000]));
        for cut in [1, 3, 4, 19, 20, 21, 4000, half.len() - 1] {
            let mut decoder = Decoder::default();
            decoder.push(&half[..cut]);
            assert_eq!(all(&mut decoder), []);
            decoder.push(&preamble());
            decoder.push(&bytes(&frame(b"hello")));
            assert_eq!(all(&mut decoder), [frame(b"hello")], "cut at {cut}");
        }
    }

    #[test]
    fn whole_frames_swallowed_by_a_half_one_are_found_again() {
        let mut decoder = Decoder::default();
        decoder.push(&bytes(&frame(&[1; 300]))[..100]);
        let mut expected = Vec::new();
        for n in 0..20_u8 {
            decoder.push(&bytes(&frame(&[n; 30])));
            expected.push(frame(&[n; 30]));
        }
        assert_eq!(all(&mut decoder), expected);
    }
}
