//! What a frame for a sleeping machine means. Pure; the frames come from anybody on the network.
//!
//! [`answer`] makes what the machine would answer.

pub mod answer;

use std::net::{IpAddr, Ipv6Addr};

use serde::{Deserialize, Serialize};

/// What to do about a frame that was read from the tap of a sleeping machine, that is one sent *to* the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It matters to the guest: wake it and put the frame back ([`crate::tap::Injector`]).
    Wake(Wake),
    /// A bare TCP segment (only ACK set, at most one byte): a keepalive probe, or an acknowledgement or window update. Neither
    /// wakes; a probe is to be answered for the guest.
    KeepaliveProbe(Probe),
    /// A ping, to be answered for the guest.
    EchoRequest {
        /// Who asks.
        peer: IpAddr,
    },
    /// Somebody asks for the guest's link address. With the permanent neighbour entry nobody needs to.
    ArpRequest,
    /// The same in IPv6, asked of the one or of everybody.
    NeighbourSolicitation {
        /// Whose link address is asked for.
        target: Ipv6Addr,
    },
    /// Nothing that matters.
    Ignore(Ignored),
}

/// What would wake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// A new connection.
    TcpSyn {
        /// The guest's port.
        port: u16,
        /// Who.
        peer: IpAddr,
        /// Its port.
        peer_port: u16,
    },
    /// Data on a connection, or its end (FIN, RST).
    TcpData {
        /// The guest's port.
        port: u16,
        /// Who.
        peer: IpAddr,
        /// Its port.
        peer_port: u16,
        /// The connection is cut: nobody waits for an answer.
        reset: bool,
    },
    /// A datagram.
    Udp {
        /// The guest's port.
        port: u16,
        /// Who.
        peer: IpAddr,
    },
    /// Another protocol, or a part of a packet without the head that would tell.
    Other {
        /// The number in the IP header.
        protocol: u8,
        /// Who.
        peer: IpAddr,
    },
}

/// A bare TCP segment, with what an answer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    /// Who.
    pub peer: IpAddr,
    /// Its port.
    pub peer_port: u16,
    /// The guest's port.
    pub port: u16,
    /// Its sequence number. A probe has the guest's last acknowledgement less one.
    pub sequence: u32,
    /// Its acknowledgement number.
    pub acknowledgement: u32,
    /// Its timestamp value, if it has the option; the answer echoes it.
    pub timestamp: Option<u32>,
    /// Bytes of payload, 0 or 1.
    pub payload: u8,
}

/// Where a connection of the guest stands, as its kernel would say it in a bare acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flow {
    /// Sequence number of the next byte that it will send.
    pub sequence: u32,
    /// Sequence number of the next byte that it expects.
    pub acknowledgement: u32,
    /// The window as it is written into segments, not scaled.
    pub window: u16,
    /// Its last timestamp, if the connection has them.
    pub timestamp: Option<u32>,
}

/// Why a frame does not matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ignored {
    /// Link multicast or broadcast, or an IP group.
    Group,
    /// Neither IPv4, IPv6 nor an ARP request.
    Protocol,
    /// Neighbour discovery or group membership.
    Housekeeping,
    /// Cut short, or lengths that contradict each other: the guest would drop it.
    Malformed,
}

impl Verdict {
    /// Whether such a packet counts as use of the link while the machine is awake (the rule that [`crate::tap::ActivityWatch`] has in the kernel).
    pub fn is_activity(self) -> bool {
        matches!(self, Self::Wake(_) | Self::EchoRequest { .. })
    }
}

/// Judges an Ethernet frame (without virtio header). Looks at headers only, never beyond the frame, and takes the same short time for any.
pub fn classify(frame: &[u8]) -> Verdict {
    judge(frame).unwrap_or(Verdict::Ignore(Ignored::Malformed))
}

const ETHERNET: usize = 14;
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP_V6: u8 = 58;
/// Most extension headers that are looked through. Real packets have none to two.
const EXTENSIONS_MAX: usize = 8;

/// None: malformed.
fn judge(frame: &[u8]) -> Option<Verdict> {
    let (ethernet, payload) = frame.split_at_checked(ETHERNET)?;
    match be16(ethernet, 12)? {
        // Asked of everybody, so before the group is looked at. Operation 1 is the question.
        0x0806 => Some(match be16(payload, 6)? {
            1 => Verdict::ArpRequest,
            _ => Verdict::Ignore(Ignored::Housekeeping),
        }),
        // Asked of a group, mostly.
        0x86dd if let Some(target) = solicited(payload) => {
            Some(Verdict::NeighbourSolicitation { target })
        }
        _ if ethernet[0] & 1 == 1 => Some(Verdict::Ignore(Ignored::Group)),
        0x0800 => ip_v4(payload),
        0x86dd => ip_v6(payload),
        _ => Some(Verdict::Ignore(Ignored::Protocol)),
    }
}

fn ip_v4(packet: &[u8]) -> Option<Verdict> {
    let head: &[u8; 20] = packet.first_chunk()?;
    let head_bytes = usize::from(head[0] & 0xf) * 4;
    if head[0] >> 4 != 4 || head_bytes < 20 {
        return None;
    }
    let peer = IpAddr::from(<[u8; 4]>::try_from(&head[12..16]).ok()?);
    // 224.0.0.0/4 are groups, above are reserved addresses and broadcast.
    if head[16] >= 224 {
        return Some(Verdict::Ignore(Ignored::Group));
    }
    // Ethernet pads short frames, so the packet's own length counts.
    let content = packet.get(head_bytes..usize::from(be16(packet, 2)?))?;
    let is_later_fragment = be16(packet, 6)? & 0x1fff != 0;
    match head[9] {
        protocol if is_later_fragment => Some(Verdict::Wake(Wake::Other { protocol, peer })),
        ICMP if *content.first()? == 8 => Some(Verdict::EchoRequest { peer }),
        protocol => transport(protocol, peer, content),
    }
}

/// The target of a neighbour solicitation. Those have no extension headers, and a hop limit that no router lets through.
fn solicited(packet: &[u8]) -> Option<Ipv6Addr> {
    let head: &[u8; 40] = packet.first_chunk()?;
    let content = packet.get(40..40 + usize::from(be16(packet, 4)?))?;
    let is_solicitation = head[0] >> 4 == 6
        && head[6] == ICMP_V6
        && head[7] == 255
        && *content.first()? == 135
        && content.get(1) == Some(&0);
    let target = content.get(8..)?.first_chunk::<16>()?;
    is_solicitation.then(|| Ipv6Addr::from(*target))
}

fn ip_v6(packet: &[u8]) -> Option<Verdict> {
    let head: &[u8; 40] = packet.first_chunk()?;
    if head[0] >> 4 != 6 {
        return None;
    }
    let peer = IpAddr::from(<[u8; 16]>::try_from(&head[8..24]).ok()?);
    if head[24] == 0xff {
        return Some(Verdict::Ignore(Ignored::Group));
    }
    let mut content = packet.get(40..40 + usize::from(be16(packet, 4)?))?;
    let mut protocol = head[6];
    for _ in 0..EXTENSIONS_MAX {
        match protocol {
            // Hop-by-hop, routing, destination: next header, length in units of 8 beyond the first.
            0 | 43 | 60 => {
                let length = 8 + usize::from(*content.get(1)?) * 8;
                protocol = *content.first()?;
                content = content.get(length..)?;
            }
            44 => {
                let is_later_fragment = be16(content, 2)? >> 3 != 0;
                protocol = *content.first()?;
                content = content.get(8..)?;
                if is_later_fragment {
                    return Some(Verdict::Wake(Wake::Other { protocol, peer }));
                }
            }
            ICMP_V6 => {
                return Some(match *content.first()? {
                    128 => Verdict::EchoRequest { peer },
                    // Group membership, routers and neighbours.
                    130..=137 | 143 => Verdict::Ignore(Ignored::Housekeeping),
                    _ => Verdict::Wake(Wake::Other { protocol, peer }),
                });
            }
            _ => return transport(protocol, peer, content),
        }
    }
    Some(Verdict::Wake(Wake::Other { protocol, peer }))
}

fn transport(protocol: u8, peer: IpAddr, content: &[u8]) -> Option<Verdict> {
    match protocol {
        TCP => tcp(peer, content),
        UDP => {
            let head: &[u8; 8] = content.first_chunk()?;
            Some(Verdict::Wake(Wake::Udp { port: be16(head, 2)?, peer }))
        }
        protocol => Some(Verdict::Wake(Wake::Other { protocol, peer })),
    }
}

fn tcp(peer: IpAddr, segment: &[u8]) -> Option<Verdict> {
    const SYN: u8 = 0x02;
    const RST: u8 = 0x04;
    const ACK: u8 = 0x10;
    /// All flags but the two of congestion notification.
    const FLAGS: u8 = 0x3f;
    let head: &[u8; 20] = segment.first_chunk()?;
    let head_bytes = usize::from(head[12] >> 4) * 4;
    if head_bytes < 20 {
        return None;
    }
    let (options, payload) = (segment.get(20..head_bytes)?, segment.get(head_bytes..)?);
    let (peer_port, port) = (be16(head, 0)?, be16(head, 2)?);
    Some(match (head[13] & FLAGS, payload.len()) {
        (ACK, 0 | 1) => Verdict::KeepaliveProbe(Probe {
            peer,
            peer_port,
            port,
            sequence: be32(head, 4)?,
            acknowledgement: be32(head, 8)?,
            timestamp: timestamp(options),
            payload: u8::from(!payload.is_empty()),
        }),
        (flags, _) if flags & (SYN | ACK | RST) == SYN => {
            Verdict::Wake(Wake::TcpSyn { port, peer, peer_port })
        }
        (flags, _) => {
            let reset = flags & RST != 0;
            Verdict::Wake(Wake::TcpData { port, peer, peer_port, reset })
        }
    })
}

/// The value of the timestamp option. Options that make no sense have none.
fn timestamp(mut options: &[u8]) -> Option<u32> {
    loop {
        match *options {
            [0, ..] | [] => return None,
            [1, ref rest @ ..] => options = rest,
            [8, 10, a, b, c, d, ..] => return Some(u32::from_be_bytes([a, b, c, d])),
            [_, length, ..] if length >= 2 => options = options.get(usize::from(length)..)?,
            _ => return None,
        }
    }
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
pub(crate) mod samples;

#[cfg(test)]
mod tests {
    use super::samples::{self, Segment};
    use super::*;
    use expect_test::{Expect, expect};
    use proptest::prelude::*;

    fn check(frame: &[u8], expected: &Expect) {
        expected.assert_eq(&format!("{:?}", classify(frame)));
    }

    #[test]
    fn s08_what_wakes() {
        let tcp =
            |flags, payload| samples::tcp_v4(Segment { flags, payload, ..Segment::default() });
        check(
            &tcp(0x02, 0),
            &expect!["Wake(TcpSyn { port: 8000, peer: 10.0.0.1, peer_port: 40000 })"],
        );
        // With congestion notification asked for.
        check(
            &tcp(0xc2, 0),
            &expect!["Wake(TcpSyn { port: 8000, peer: 10.0.0.1, peer_port: 40000 })"],
        );
        check(
            &tcp(0x12, 0),
            &expect![
                "Wake(TcpData { port: 8000, peer: 10.0.0.1, peer_port: 40000, reset: false })"
            ],
        );
        check(
            &tcp(0x18, 1),
            &expect![
                "Wake(TcpData { port: 8000, peer: 10.0.0.1, peer_port: 40000, reset: false })"
            ],
        );
        check(
            &tcp(0x10, 2),
            &expect![
                "Wake(TcpData { port: 8000, peer: 10.0.0.1, peer_port: 40000, reset: false })"
            ],
        );
        check(
            &tcp(0x11, 0),
            &expect![
                "Wake(TcpData { port: 8000, peer: 10.0.0.1, peer_port: 40000, reset: false })"
            ],
        );
        check(
            &tcp(0x04, 0),
            &expect!["Wake(TcpData { port: 8000, peer: 10.0.0.1, peer_port: 40000, reset: true })"],
        );
        check(&samples::udp_v4(53), &expect!["Wake(Udp { port: 53, peer: 10.0.0.1 })"]);
        check(
            &samples::tcp_v6(Segment { flags: 0x02, ..Segment::default() }),
            &expect!["Wake(TcpSyn { port: 8000, peer: fd00::1, peer_port: 40000 })"],
        );
        check(
            &samples::ip_v4(132, 0, &[0; 12]),
            &expect!["Wake(Other { protocol: 132, peer: 10.0.0.1 })"],
        );
        check(
            &samples::ip_v4(TCP, 0x0010, &[0; 3]),
            &expect!["Wake(Other { protocol: 6, peer: 10.0.0.1 })"],
        );
    }

    #[test]
    fn s08_what_does_not_wake() {
        check(&samples::ip_v4(ICMP, 0, &[8, 0, 0, 0]), &expect!["EchoRequest { peer: 10.0.0.1 }"]);
        check(&samples::ip_v6(ICMP_V6, &[128, 0, 0, 0]), &expect!["EchoRequest { peer: fd00::1 }"]);
        check(&samples::ip_v6(ICMP_V6, &[135, 0, 0, 0]), &expect!["Ignore(Housekeeping)"]);
        check(&samples::solicitation(true), &expect!["NeighbourSolicitation { target: fd00::2 }"]);
        check(&samples::solicitation(false), &expect!["NeighbourSolicitation { target: fd00::2 }"]);
        check(&samples::arp(1), &expect!["ArpRequest"]);
        check(&samples::arp(2), &expect!["Ignore(Housekeeping)"]);
        let mut group = samples::udp_v4(5353);
        group[..6].copy_from_slice(&[1, 0, 0x5e, 0, 0, 0xfb]);
        check(&group, &expect!["Ignore(Group)"]);
        let mut unicast_frame_to_a_group = samples::udp_v4(5353);
        unicast_frame_to_a_group[30] = 224;
        check(&unicast_frame_to_a_group, &expect!["Ignore(Group)"]);
        check(&[0x52; 60], &expect!["Ignore(Protocol)"]);
        check(&[], &expect!["Ignore(Malformed)"]);
        check(&samples::ip_v4(TCP, 0, &[0; 19]), &expect!["Ignore(Malformed)"]);
    }

    #[test]
    fn a_keepalive_probe_has_what_its_answer_needs() {
        let probe = Segment { flags: 0x10, timestamp: Some(77), ..Segment::default() };
        check(
            &samples::tcp_v4(probe),
            &expect![
                "KeepaliveProbe(Probe { peer: 10.0.0.1, peer_port: 40000, port: 8000, sequence: 1000, acknowledgement: 2000, timestamp: Some(77), payload: 0 })"
            ],
        );
        let mut padded = samples::tcp_v4(Segment { flags: 0x10, payload: 1, ..Segment::default() });
        padded.resize(60, 0);
        check(
            &padded,
            &expect![
                "KeepaliveProbe(Probe { peer: 10.0.0.1, peer_port: 40000, port: 8000, sequence: 1000, acknowledgement: 2000, timestamp: None, payload: 1 })"
            ],
        );
    }

    #[test]
    fn options_that_never_end_are_none() {
        assert_eq!(timestamp(&[1, 1, 8, 10, 0, 0, 1, 0, 0, 0, 0, 0]), Some(256));
        for options in [
            &[][..],
            &[0, 8, 10, 1, 1, 1, 1],
            &[3, 0],
            &[3, 1],
            &[3],
            &[8, 10, 1],
            &[5, 200, 1],
            &[1; 40],
        ] {
            assert_eq!(timestamp(options), None, "{options:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_judged(frame in proptest::collection::vec(any::<u8>(), 0..200)) {
            classify(&frame);
        }

        /// Starting from real packets reaches deeper than noise does.
        #[test]
        fn any_change_to_a_real_packet_is_judged(frame in samples::any_frame(), cut in 0_usize..200) {
            classify(&frame[..frame.len().min(cut)]);
            classify(&frame);
        }
    }
}
