//! Packets for tests: real ones, and real ones with a few bytes changed.

use proptest::prelude::*;

/// A TCP segment from 10.0.0.1 (or fd00::1) port 40000 to the guest's port 8000.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Segment {
    pub(crate) flags: u8,
    pub(crate) payload: usize,
    pub(crate) timestamp: Option<u32>,
}

pub(crate) fn ip_v4(protocol: u8, fragment: u16, content: &[u8]) -> Vec<u8> {
    let mut frame = ethernet(0x0800);
    let length = u16::try_from(20 + content.len()).unwrap();
    frame.extend_from_slice(&[0x45, 0]);
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(&[0, 0]);
    frame.extend_from_slice(&fragment.to_be_bytes());
    frame.extend_from_slice(&[64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend_from_slice(content);
    frame
}

pub(crate) fn ip_v6(protocol: u8, content: &[u8]) -> Vec<u8> {
    let mut frame = ethernet(0x86dd);
    let length = u16::try_from(content.len()).unwrap();
    frame.extend_from_slice(&[0x60, 0, 0, 0]);
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(&[protocol, 64]);
    for last in [1, 2] {
        frame.extend_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
    }
    frame.extend_from_slice(content);
    frame
}

pub(crate) fn tcp_v4(segment: Segment) -> Vec<u8> {
    ip_v4(6, 0, &tcp(segment))
}

pub(crate) fn tcp_v6(segment: Segment) -> Vec<u8> {
    ip_v6(6, &tcp(segment))
}

pub(crate) fn udp_v4(port: u16) -> Vec<u8> {
    let [high, low] = port.to_be_bytes();
    ip_v4(17, 0, &[0x9c, 0x40, high, low, 0, 12, 0, 0, 1, 2, 3, 4])
}

/// A neighbour solicitation for fd00::2, asked of its group or of itself.
pub(crate) fn solicitation(of_group: bool) -> Vec<u8> {
    let mut content = vec![135, 0, 0, 0, 0, 0, 0, 0, 0xfd, 0, 0, 0, 0, 0, 0, 0];
    content.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 2]);
    content.extend_from_slice(&[1, 1, 0x52, 0x54, 0, 0, 0, 1]);
    let mut frame = ip_v6(58, &content);
    frame[21] = 255;
    if of_group {
        frame[..6].copy_from_slice(&[0x33, 0x33, 0xff, 0, 0, 2]);
        frame[38..54].copy_from_slice(&[0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 2]);
    }
    frame
}

pub(crate) fn arp(operation: u8) -> Vec<u8> {
    let mut frame = ethernet(0x0806);
    frame[..6].fill(0xff);
    frame.extend_from_slice(&[0, 1, 8, 0, 6, 4, 0, operation]);
    frame.extend_from_slice(&[0; 20]);
    frame
}

/// Any of the above with any flags and sizes, and up to three bytes changed.
pub(crate) fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    let change = (0_usize..80, any::<u8>());
    (any_whole_frame(), proptest::collection::vec(change, 0..3)).prop_map(|(mut frame, changes)| {
        for (at, byte) in changes {
            if let Some(old) = frame.get_mut(at) {
                *old = byte;
            }
        }
        frame
    })
}

/// Any of the above as its sender made it.
pub(crate) fn any_whole_frame() -> impl Strategy<Value = Vec<u8>> {
    let segment = (any::<u8>(), 0_usize..4, any::<Option<u32>>());
    let segment =
        segment.prop_map(|(flags, payload, timestamp)| Segment { flags, payload, timestamp });
    prop_oneof![
        4 => segment.clone().prop_map(tcp_v4),
        2 => segment.prop_map(tcp_v6),
        1 => any::<u16>().prop_map(udp_v4),
        1 => any::<u8>().prop_map(|kind| ip_v6(58, &[kind, 0, 0, 0, 0, 0, 0, 0])),
        1 => any::<u8>().prop_map(|kind| ip_v4(1, 0, &[kind, 0, 0, 0, 0, 0, 0, 0])),
        1 => (1_u8..3).prop_map(arp),
        1 => any::<bool>().prop_map(solicitation),
        1 => (0_u16..0x2000).prop_map(|fragment| ip_v4(6, fragment | 0x2000, &tcp(Segment::default()))),
    ]
}

fn ethernet(kind: u16) -> Vec<u8> {
    let mut frame = vec![0x52, 0x54, 0, 0, 0, 2, 0x52, 0x54, 0, 0, 0, 1];
    frame.extend_from_slice(&kind.to_be_bytes());
    frame
}

fn tcp(segment: Segment) -> Vec<u8> {
    let mut bytes = vec![
        0x9c,
        0x40,
        0x1f,
        0x40,
        0,
        0,
        0x03,
        0xe8,
        0,
        0,
        0x07,
        0xd0,
        0x50,
        segment.flags,
        0,
        64,
        0,
        0,
        0,
        0,
    ];
    if let Some(value) = segment.timestamp {
        bytes[12] = 0x80;
        bytes.extend_from_slice(&[1, 1, 8, 10]);
        bytes.extend_from_slice(&value.to_be_bytes());
        bytes.extend_from_slice(&[0; 4]);
    }
    bytes.resize(bytes.len() + segment.payload, b'x');
    bytes
}
