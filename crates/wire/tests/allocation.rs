//! What a message claims is not allocated. Alone in its process, so that its memory can be measured.

use proptest::{collection::vec, prelude::*};
use wire::{Reply, Request};

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn a_claimed_length_is_not_allocated(variant in 0_u8..20, claim in any::<u64>(), rest in vec(any::<u8>(), 0..20)) {
        // A sequence of up to 2^64 elements, in as many bytes as a varint takes.
        let mut payload = vec![variant];
        let mut claim = claim;
        while claim >= 0x80 {
            payload.push(claim.to_le_bytes()[0] | 0x80);
            claim >>= 7;
        }
        payload.push(claim.to_le_bytes()[0]);
        payload.extend(rest);
        let before = peak();
        drop(wire::decode::<Reply>(&payload));
        drop(wire::decode::<Request>(&payload));
        prop_assert!(peak() - before < 8 * 1024 * 1024, "allocated on a claim");
    }
}

/// The most memory that this process ever had, in bytes.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find(|line| line.starts_with("VmPeak:")).expect("VmPeak");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).expect("number") * 1024
}
