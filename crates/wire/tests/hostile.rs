//! Whatever the other side sends, a reader neither panics, nor waits for bytes that need not come, nor allocates on its word.

use proptest::{collection::vec, prelude::*};
use wire::{
    Decoder, Frame, FrameKind, OutputChunk, Reply, Request, ToGuest, ToHost,
    frame::{HEADER_LEN, MAGIC, PAYLOAD_MAX, preamble},
};

fn frames() -> impl Strategy<Value = Vec<Frame>> {
    let kind = prop::sample::select(vec![
        FrameKind::Control,
        FrameKind::Open,
        FrameKind::Data,
        FrameKind::Message,
        FrameKind::Credit,
        FrameKind::Fin,
        FrameKind::Reset,
    ]);
    let frame = (kind, any::<u32>(), vec(any::<u8>(), 0..300))
        .prop_map(|(kind, channel, payload)| Frame { kind, channel, payload });
    vec(frame, 1..8)
}

fn bytes_of(frames: &[Frame]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for frame in frames {
        frame.write_to(&mut bytes).expect("small");
    }
    bytes
}

/// Feeds bytes in pieces of a length; gives all frames.
fn decode(bytes: &[u8], piece: usize) -> (Vec<Frame>, Decoder) {
    let mut decoder = Decoder::default();
    let mut frames = Vec::new();
    for piece in bytes.chunks(piece) {
        decoder.push(piece);
        frames.extend(std::iter::from_fn(|| decoder.next_frame()));
        assert!(decoder.pending() < HEADER_LEN + PAYLOAD_MAX, "holds more than one frame");
    }
    (frames, decoder)
}

/// Whether `part` is in `whole` in this order, perhaps with others between.
fn is_part(part: &[Frame], whole: &[Frame]) -> bool {
    let mut whole = whole.iter();
    part.iter().all(|frame| whole.any(|other| other == frame))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn frames_come_back_however_they_are_cut(frames in frames(), piece in 1_usize..100) {
        let (decoded, decoder) = decode(&bytes_of(&frames), piece);
        prop_assert_eq!(decoded, frames);
        prop_assert_eq!((decoder.pending(), decoder.skipped()), (0, 0));
    }

    #[test]
    fn garbage_costs_no_frame_around_it(
        before in frames(), after in frames(), garbage in vec(any::<u8>(), 0..500), piece in 1_usize..200,
    ) {
        let mut bytes = bytes_of(&before);
        bytes.extend(&garbage);
        bytes.extend(preamble());
        bytes.extend(bytes_of(&after));
        let (decoded, _) = decode(&bytes, piece);
        prop_assert!(decoded.starts_with(&before));
        prop_assert!(decoded.ends_with(&after));
    }

    #[test]
    fn a_flipped_bit_costs_its_frame_at_most(
        frames in frames(), place in any::<prop::sample::Index>(), bit in 0_u8..8, piece in 1_usize..200,
    ) {
        let mut bytes = bytes_of(&frames);
        let place = place.index(bytes.len());
        bytes[place] ^= 1 << bit;
        bytes.extend(preamble());
        let (decoded, decoder) = decode(&bytes, piece);
        prop_assert!(decoded.len() + 1 >= frames.len());
        prop_assert!(is_part(&decoded, &frames), "no frame is made up");
        prop_assert!(decoder.skipped() > 0);
    }

    #[test]
    fn a_cut_frame_costs_itself_at_most(
        frames in frames(), cut in any::<prop::sample::Index>(), after in frames(), piece in 1_usize..200,
    ) {
        let all = bytes_of(&frames);
        let cut = cut.index(all.len());
        let mut bytes = all[..cut].to_vec();
        let mut expected = decode(&bytes, piece).0;
        // The preamble is zeros: where no more than zeros were cut off, it makes the frame whole, as it was sent.
        if let Some(frame) = frames.get(expected.len()) {
            let end = bytes_of(&frames[..=expected.len()]).len();
            if all[cut..end].iter().all(|&byte| byte == 0) {
                expected.push(frame.clone());
            }
        }
        bytes.extend(preamble());
        bytes.extend(bytes_of(&after));
        let (decoded, _) = decode(&bytes, piece);
        prop_assert_eq!(decoded, [expected, after].concat());
    }

    #[test]
    fn zeros_that_were_cut_off_come_with_the_preamble(
        zeros in 1_usize..300, cut in any::<prop::sample::Index>(), after in frames(), piece in 1_usize..200,
    ) {
        let frame = Frame { kind: FrameKind::Control, channel: 0, payload: vec![0; zeros] };
        let mut bytes = bytes_of(std::slice::from_ref(&frame));
        bytes.truncate(HEADER_LEN + cut.index(zeros));
        bytes.extend(preamble());
        bytes.extend(bytes_of(&after));
        prop_assert_eq!(decode(&bytes, piece).0, [vec![frame], after].concat());
    }

    #[test]
    fn headers_made_to_mislead_do_not_hide_what_follows(
        header in vec(any::<u8>(), HEADER_LEN - 4), tail in vec(prop::sample::select(MAGIC.to_vec()), 0..50), after in frames(),
    ) {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(&header);
        bytes.extend(&tail);
        bytes.extend(preamble());
        bytes.extend(bytes_of(&after));
        let (decoded, _) = decode(&bytes, 64);
        prop_assert!(decoded.ends_with(&after));
    }

    #[test]
    fn messages_from_any_bytes_are_values_or_errors(payload in vec(any::<u8>(), 0..2000)) {
        // Nothing to compare with: it must return, and what it made must be writable again.
        if let Ok(message) = wire::decode::<ToGuest>(&payload) { wire::encode(&message).expect("fits"); }
        if let Ok(message) = wire::decode::<ToHost>(&payload) { wire::encode(&message).expect("fits"); }
        if let Ok(message) = wire::decode::<Request>(&payload) { wire::encode(&message).expect("fits"); }
        if let Ok(message) = wire::decode::<Reply>(&payload) { wire::encode(&message).expect("fits"); }
        if let Some(chunk) = OutputChunk::from_payload(&payload) { prop_assert_eq!(chunk.to_payload(), payload); }
    }
}
