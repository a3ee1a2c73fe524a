//! What a sleeping machine would answer, made by the host in its place.
//!
//! Every function takes the frame that is answered and gives a whole frame back: addresses turned round, checksums set. `None`
//! means that this frame cannot be answered so (it is cut short, a fragment, has extension headers, or asks for no answer);
//! then the machine itself must see it, or nobody.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::Flow;

const ETHERNET: usize = 14;
const ICMP: u8 = 1;
const TCP: u8 = 6;
const ICMP_V6: u8 = 58;
/// Hops that an answer may take (as Linux).
const HOPS: u8 = 64;
/// Most of an IPv4 packet that an error quotes: with its heads the error has 576 bytes (RFC 1812).
const QUOTE_V4_MAX: usize = 576 - 20 - 8;
/// The same of IPv6: with its heads the error has 1280 bytes (RFC 4443).
const QUOTE_V6_MAX: usize = 1280 - 40 - 8;

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

/// The answer to a ping.
pub fn echo_reply(frame: &[u8]) -> Option<Vec<u8>> {
    let packet = Packet::parse(frame)?;
    let (request, reply) = if packet.is_v6() { (128, 129) } else { (8, 0) };
    // Type, code, checksum, identifier, sequence number.
    if packet.is_fragment || packet.content.len() < 8 || packet.content[..2] != [request, 0] {
        return None;
    }
    let mut content = packet.content.to_vec();
    content[..4].copy_from_slice(&[reply, 0, 0, 0]);
    packet.icmp(content)
}

/// What says that nobody has this datagram's port.
pub fn port_unreachable(frame: &[u8]) -> Option<Vec<u8>> {
    let packet = Packet::parse(frame)?;
    if packet.source.is_unspecified() || packet.source.is_multicast() {
        return None;
    }
    let (head, max) = if packet.is_v6() { ([1, 4], QUOTE_V6_MAX) } else { ([3, 3], QUOTE_V4_MAX) };
    let mut content = vec![head[0], head[1], 0, 0, 0, 0, 0, 0];
    content.extend_from_slice(&packet.whole[..packet.whole.len().min(max)]);
    packet.icmp(content)
}

/// What cuts a connection that the machine does not have (RFC 9293, 3.10.7.1); a segment that cuts one itself gets none.
pub fn reset(frame: &[u8]) -> Option<Vec<u8>> {
    let packet = Packet::parse(frame)?;
    let segment = packet.segment()?;
    if segment.flags & RST != 0 {
        return None;
    }
    let (flags, sequence, acknowledgement) = if segment.flags & ACK != 0 {
        (RST, segment.acknowledgement, 0)
    } else {
        let ends = u32::from(segment.flags & SYN != 0) + u32::from(segment.flags & FIN != 0);
        (RST | ACK, 0, segment.sequence.wrapping_add(segment.payload).wrapping_add(ends))
    };
    let flow = Flow { sequence, acknowledgement, window: 0, timestamp: None };
    packet.tcp(segment, flow, flags, 0)
}

/// A bare acknowledgement: what the machine says to a keepalive probe, or to anything outside its window.
pub fn acknowledgement(frame: &[u8], flow: Flow, echo: Option<u32>) -> Option<Vec<u8>> {
    let packet = Packet::parse(frame)?;
    let segment = packet.segment()?;
    packet.tcp(segment, flow, ACK, echo.unwrap_or(0))
}

/// Where a connection of this machine stands, if the frame is a bare acknowledgement that it sent: its end, its peer's, and
/// the flow.
pub fn flow_of(frame: &[u8]) -> Option<(SocketAddr, SocketAddr, Flow)> {
    let packet = Packet::parse(frame)?;
    let segment = packet.segment()?;
    if segment.flags & (FIN | SYN | RST | ACK) != ACK || segment.payload != 0 {
        return None;
    }
    let flow = Flow {
        sequence: segment.sequence,
        acknowledgement: segment.acknowledgement,
        window: segment.window,
        timestamp: segment.timestamp,
    };
    let local = SocketAddr::new(packet.source, segment.ports.0);
    Some((local, SocketAddr::new(packet.destination, segment.ports.1), flow))
}

/// A segment of `from` that `to` answers with a bare acknowledgement, whatever the connection's numbers are: it acknowledges
/// nothing, carries nothing and is out of the window. Of two whose sequence numbers differ by 2^31 at least one is.
pub fn question(
    macs: LinkEnds,
    from: SocketAddr,
    to: SocketAddr,
    sequence: u32,
) -> Option<Vec<u8>> {
    let flow = Flow { sequence, acknowledgement: sequence, window: 0, timestamp: None };
    let segment = tcp_bytes(from, to, flow, ACK, 0);
    let mut frame = Vec::with_capacity(ETHERNET + 60);
    frame.extend_from_slice(&macs.to);
    frame.extend_from_slice(&macs.from);
    wrap(frame, from.ip(), to.ip(), TCP, segment)
}

/// Link addresses of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkEnds {
    /// Who sends it.
    pub from: [u8; 6],
    /// To whom.
    pub to: [u8; 6],
}

/// The answer to an ARP request for `address`, if it asks for that.
pub fn arp_reply(frame: &[u8], address: std::net::Ipv4Addr, mac: [u8; 6]) -> Option<Vec<u8>> {
    // Ethernet and IPv4, six and four bytes, a request; then sender's link and network address, target's.
    let request: &[u8; 28] = frame.get(ETHERNET..)?.first_chunk()?;
    let asked = request[..8] == [0, 1, 8, 0, 6, 4, 0, 1] && request[24..] == address.octets();
    if !asked {
        return None;
    }
    let mut answer = turned(frame, Some(mac))?;
    answer.extend_from_slice(&[8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
    answer.extend_from_slice(&mac);
    answer.extend_from_slice(&address.octets());
    answer.extend_from_slice(&request[8..18]);
    Some(answer)
}

/// The answer to a neighbour solicitation for `address`, if it asks for that and says who asks.
pub fn neighbour_advertisement(frame: &[u8], address: Ipv6Addr, mac: [u8; 6]) -> Option<Vec<u8>> {
    let packet = Packet::parse(frame)?;
    let target = packet.content.get(8..24)?;
    if !packet.is_v6() || target != address.octets() || packet.source.is_unspecified() {
        return None;
    }
    // Solicited, and overrides what is remembered.
    let mut content = vec![136, 0, 0, 0, 0x60, 0, 0, 0];
    content.extend_from_slice(&address.octets());
    content.extend_from_slice(&[2, 1]);
    content.extend_from_slice(&mac);
    let sum = checksum(pseudo(address.into(), packet.source, ICMP_V6, content.len()), &content);
    content[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut answer = turned(frame, Some(mac))?;
    answer = wrap(answer, address.into(), packet.source, ICMP_V6, content)?;
    // No router may have passed it on.
    answer[ETHERNET + 7] = 255;
    Some(answer)
}

/// An IP packet with nothing between its head and what it carries.
#[derive(Debug)]
struct Packet<'a> {
    frame: &'a [u8],
    /// Head and content, without padding.
    whole: &'a [u8],
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    /// It is a part of a longer one.
    is_fragment: bool,
    content: &'a [u8],
}

/// Of a TCP segment what answers need.
#[derive(Debug, Clone, Copy)]
struct Segment {
    /// From, to.
    ports: (u16, u16),
    sequence: u32,
    acknowledgement: u32,
    flags: u8,
    window: u16,
    timestamp: Option<u32>,
    payload: u32,
}

impl<'a> Packet<'a> {
    fn parse(frame: &'a [u8]) -> Option<Self> {
        let packet = frame.get(ETHERNET..)?;
        match frame.get(12..14)? {
            [0x08, 0x00] => {
                let head: &[u8; 20] = packet.first_chunk()?;
                let head_bytes = usize::from(head[0] & 0xf) * 4;
                let whole = packet.get(..usize::from(be16(packet, 2)?))?;
                (head[0] >> 4 == 4 && head_bytes >= 20).then_some(())?;
                Some(Self {
                    frame,
                    whole,
                    source: IpAddr::from(*head[12..].first_chunk::<4>()?),
                    destination: IpAddr::from(*head[16..].first_chunk::<4>()?),
                    protocol: head[9],
                    // More follow, or some came before.
                    is_fragment: be16(packet, 6)? & 0x3fff != 0,
                    content: whole.get(head_bytes..)?,
                })
            }
            [0x86, 0xdd] => {
                let head: &[u8; 40] = packet.first_chunk()?;
                let whole = packet.get(..40 + usize::from(be16(packet, 4)?))?;
                (head[0] >> 4 == 6).then_some(())?;
                Some(Self {
                    frame,
                    whole,
                    source: IpAddr::from(*head[8..].first_chunk::<16>()?),
                    destination: IpAddr::from(*head[24..].first_chunk::<16>()?),
                    protocol: head[6],
                    is_fragment: false,
                    content: whole.get(40..)?,
                })
            }
            _ => None,
        }
    }

    fn is_v6(&self) -> bool {
        self.source.is_ipv6()
    }

    fn segment(&self) -> Option<Segment> {
        let head: &[u8; 20] = self.content.first_chunk()?;
        let head_bytes = usize::from(head[12] >> 4) * 4;
        let options = self.content.get(20..head_bytes)?;
        let payload = u32::try_from(self.content.len() - head_bytes).ok()?;
        (self.protocol == TCP && !self.is_fragment).then_some(Segment {
            ports: (be16(head, 0)?, be16(head, 2)?),
            sequence: super::be32(head, 4)?,
            acknowledgement: super::be32(head, 8)?,
            flags: head[13],
            window: be16(head, 14)?,
            timestamp: super::timestamp(options),
            payload,
        })
    }

    /// The answering segment.
    fn tcp(&self, asked: Segment, flow: Flow, flags: u8, echo: u32) -> Option<Vec<u8>> {
        let from = SocketAddr::new(self.destination, asked.ports.1);
        let to = SocketAddr::new(self.source, asked.ports.0);
        self.back(TCP, tcp_bytes(from, to, flow, flags, echo))
    }

    /// The answering ICMP message, whose checksum is still zero.
    fn icmp(&self, mut content: Vec<u8>) -> Option<Vec<u8>> {
        let (protocol, start) = if self.is_v6() {
            (ICMP_V6, pseudo(self.destination, self.source, ICMP_V6, content.len()))
        } else {
            (ICMP, 0)
        };
        let sum = checksum(start, &content);
        content[2..4].copy_from_slice(&sum.to_be_bytes());
        self.back(protocol, content)
    }

    fn back(&self, protocol: u8, content: Vec<u8>) -> Option<Vec<u8>> {
        wrap(turned(self.frame, None)?, self.destination, self.source, protocol, content)
    }
}

/// The link addresses of an answer: those of the question, turned round; `from` where the question went to a group.
fn turned(frame: &[u8], from: Option<[u8; 6]>) -> Option<Vec<u8>> {
    let (to, asked) = (frame.get(6..12)?, frame.get(..6)?);
    let mut answer = to.to_vec();
    answer.extend_from_slice(from.as_ref().map_or(asked, |mac| &mac[..]));
    Some(answer)
}

/// Puts the IP head before the content, behind the link addresses.
fn wrap(
    mut frame: Vec<u8>,
    from: IpAddr,
    to: IpAddr,
    protocol: u8,
    content: Vec<u8>,
) -> Option<Vec<u8>> {
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let length = u16::try_from(20 + content.len()).ok()?.to_be_bytes();
            // No identification is needed of what may not be cut into fragments.
            let mut head = vec![0x45, 0, length[0], length[1], 0, 0, 0x40, 0, HOPS, protocol, 0, 0];
            head.extend_from_slice(&from.octets());
            head.extend_from_slice(&to.octets());
            let sum = checksum(0, &head);
            head[10..12].copy_from_slice(&sum.to_be_bytes());
            frame.extend_from_slice(&[0x08, 0x00]);
            frame.extend(head);
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let length = u16::try_from(content.len()).ok()?.to_be_bytes();
            frame.extend_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0, length[0], length[1]]);
            frame.extend_from_slice(&[protocol, HOPS]);
            frame.extend_from_slice(&from.octets());
            frame.extend_from_slice(&to.octets());
        }
        _ => return None,
    }
    frame.extend(content);
    Some(frame)
}

/// A TCP head without payload.
fn tcp_bytes(from: SocketAddr, to: SocketAddr, flow: Flow, flags: u8, echo: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(32);
    bytes.extend_from_slice(&from.port().to_be_bytes());
    bytes.extend_from_slice(&to.port().to_be_bytes());
    bytes.extend_from_slice(&flow.sequence.to_be_bytes());
    bytes.extend_from_slice(&flow.acknowledgement.to_be_bytes());
    let words = if flow.timestamp.is_some() { 8 } else { 5 };
    bytes.extend_from_slice(&[words << 4, flags]);
    bytes.extend_from_slice(&flow.window.to_be_bytes());
    bytes.extend_from_slice(&[0; 4]);
    if let Some(timestamp) = flow.timestamp {
        bytes.extend_from_slice(&[1, 1, 8, 10]);
        bytes.extend_from_slice(&timestamp.to_be_bytes());
        bytes.extend_from_slice(&echo.to_be_bytes());
    }
    let sum = checksum(pseudo(from.ip(), to.ip(), TCP, bytes.len()), &bytes);
    bytes[16..18].copy_from_slice(&sum.to_be_bytes());
    bytes
}

/// The sum over what a checksum covers of the IP head.
fn pseudo(from: IpAddr, to: IpAddr, protocol: u8, length: usize) -> u64 {
    let sum = |address: IpAddr| match address {
        IpAddr::V4(address) => words(&address.octets()),
        IpAddr::V6(address) => words(&address.octets()),
    };
    sum(from) + sum(to) + u64::from(protocol) + length as u64
}

/// The internet checksum (RFC 1071), going on from a sum.
fn checksum(start: u64, bytes: &[u8]) -> u16 {
    let mut sum = start + words(bytes);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // It fits by now.
    !u16::try_from(sum).unwrap_or_default()
}

fn words(bytes: &[u8]) -> u64 {
    let word = |pair: &[u8]| match *pair {
        [high, low] => u64::from(u16::from_be_bytes([high, low])),
        [high] => u64::from(high) << 8,
        _ => 0,
    };
    bytes.chunks(2).map(word).sum()
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    super::be16(bytes, at)
}

#[cfg(test)]
mod tests {
    use super::super::samples::{self, Segment as Sample};
    use super::super::{Verdict, classify};
    use super::*;
    use proptest::prelude::*;

    /// Whether all checksums of a frame are right: over itself, a sum that contains its own checksum is zero.
    fn sums_are_right(frame: &[u8]) -> bool {
        let Some(packet) = Packet::parse(frame) else { return false };
        let head = if packet.is_v6() { 0 } else { checksum(0, &packet.whole[..20]) };
        let start = match packet.protocol {
            ICMP => 0,
            protocol => pseudo(packet.source, packet.destination, protocol, packet.content.len()),
        };
        head == 0 && checksum(start, packet.content) == 0
    }

    /// As a packet was recorded on a link, byte for byte: a ping of 10.0.0.2 by 10.0.0.1 with eight bytes.
    const PING: &str = "525400000002525400000001080045000024a1b240004001 \
                        85230a0000010a0000020800 4d5212340001 6162636465666768";

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16);
        digits.chunks(2).map(|pair| byte(pair).unwrap()).collect()
    }

    #[test]
    fn s08_a_ping_is_answered_with_what_it_carries() {
        let ping = hex(PING);
        let answer = echo_reply(&ping).unwrap();
        assert!(sums_are_right(&answer));
        assert_eq!(answer[..12], hex("525400000001525400000002"));
        assert_eq!(answer[26..34], [10, 0, 0, 2, 10, 0, 0, 1]);
        assert_eq!(answer[34..36], [0, 0]);
        assert_eq!(answer[38..], ping[38..]);
        let v6 = samples::ip_v6(58, &[128, 0, 9, 9, 1, 2, 3, 4, 5, 6, 7]);
        let answer = echo_reply(&v6).unwrap();
        assert!(sums_are_right(&answer));
        assert_eq!((answer[54], &answer[58..]), (129, &v6[58..]));
        // A part of a longer one, one that is cut short, an answer.
        let mut part = ping.clone();
        part[20] |= 0x20;
        assert_eq!(echo_reply(&part), None);
        assert_eq!(echo_reply(&ping[..36]), None);
        assert_eq!(echo_reply(&answer), None);
    }

    #[test]
    fn s08_a_closed_port_refuses_as_a_kernel_does() {
        let syn = samples::tcp_v4(Sample { flags: SYN, ..Sample::default() });
        let answer = reset(&syn).unwrap();
        assert!(sums_are_right(&answer));
        let packet = Packet::parse(&answer).unwrap();
        let segment = packet.segment().unwrap();
        assert_eq!(segment.ports, (8000, 40000));
        assert_eq!(
            (segment.flags, segment.sequence, segment.acknowledgement, segment.window),
            (RST | ACK, 0, 1001, 0)
        );
        // What acknowledges something is cut at what it acknowledges.
        let data = samples::tcp_v6(Sample { flags: ACK | 8, payload: 3, ..Sample::default() });
        let answer = reset(&data).unwrap();
        assert!(sums_are_right(&answer));
        let segment = Packet::parse(&answer).unwrap().segment().unwrap();
        assert_eq!((segment.flags, segment.sequence), (RST, 2000));
        let cut = samples::tcp_v4(Sample { flags: RST, ..Sample::default() });
        assert_eq!(reset(&cut), None, "never answered, or two would cut each other for ever");

        let datagram = samples::udp_v4(9);
        let answer = port_unreachable(&datagram).unwrap();
        assert!(sums_are_right(&answer));
        assert_eq!(answer[34..36], [3, 3]);
        assert_eq!(answer[42..], datagram[14..], "the packet at fault");
        let long = samples::ip_v6(17, &[7; 1400]);
        let answer = port_unreachable(&long).unwrap();
        assert!(sums_are_right(&answer));
        assert_eq!((answer[54], answer[55], answer.len()), (1, 4, 14 + 1280));
    }

    #[test]
    fn s07_a_keepalive_probe_is_answered_with_where_the_connection_stands() {
        let flow = Flow {
            sequence: 2000,
            acknowledgement: 1001,
            window: 501,
            timestamp: Some(0xaabb_ccdd),
        };
        for make in [samples::tcp_v4, samples::tcp_v6] {
            let probe = make(Sample { flags: ACK, timestamp: Some(77), ..Sample::default() });
            let answer = acknowledgement(&probe, flow, Some(77)).unwrap();
            assert!(sums_are_right(&answer));
            let (local, peer, found) = flow_of(&answer).unwrap();
            assert_eq!((local.port(), peer.port(), found), (8000, 40000, flow));
            assert_eq!(answer[answer.len() - 4..], 77_u32.to_be_bytes());
        }
        let plain = Flow { timestamp: None, ..flow };
        let probe = samples::tcp_v4(Sample { flags: ACK, ..Sample::default() });
        let answer = acknowledgement(&probe, plain, None).unwrap();
        assert!(sums_are_right(&answer));
        assert_eq!(flow_of(&answer).unwrap().2, plain);
    }

    #[test]
    fn a_question_is_a_bare_acknowledgement() {
        let macs = LinkEnds { from: [2; 6], to: [4; 6] };
        for (from, to) in [("10.0.0.1:1", "10.0.0.2:2"), ("[fd00::1]:1", "[fd00::2]:2")] {
            let frame = question(macs, from.parse().unwrap(), to.parse().unwrap(), 5).unwrap();
            assert!(sums_are_right(&frame));
            assert!(matches!(classify(&frame), Verdict::KeepaliveProbe(_)), "does not count");
            let (asks, asked, _) = flow_of(&frame).unwrap();
            assert_eq!((asks.to_string().as_str(), asked.to_string().as_str()), (from, to));
        }
        assert_eq!(
            question(macs, "10.0.0.1:1".parse().unwrap(), "[fd00::2]:2".parse().unwrap(), 5),
            None
        );
    }

    #[test]
    fn neighbours_are_answered() {
        let mac = [6, 0, 0, 0, 0, 2];
        let address = "fd00::2".parse().unwrap();
        for of_group in [true, false] {
            let asked = samples::solicitation(of_group);
            let answer = neighbour_advertisement(&asked, address, mac).unwrap();
            assert!(sums_are_right(&answer));
            assert_eq!((&answer[6..12], answer[21], answer[54]), (&mac[..], 255, 136));
            assert_eq!(answer[80..], mac);
            let other = "fd00::3".parse().unwrap();
            assert_eq!(neighbour_advertisement(&asked, other, mac), None);
        }
        let mut asked = samples::arp(1);
        asked[38..42].copy_from_slice(&[10, 0, 0, 2]);
        let answer = arp_reply(&asked, [10, 0, 0, 2].into(), mac).unwrap();
        assert_eq!(
            (answer[21], &answer[22..28], &answer[28..32]),
            (2, &mac[..], &[10, 0, 0, 2][..])
        );
        assert_eq!(arp_reply(&asked, [10, 0, 0, 3].into(), mac), None);
        assert_eq!(arp_reply(&asked[..40], [10, 0, 0, 2].into(), mac), None);
    }

    proptest! {
        /// Nothing that comes in makes a bad frame, or breaks off.
        #[test]
        fn whatever_is_answered_has_right_sums(frame in samples::any_frame(), cut in 0_usize..200) {
            let flow = Flow { sequence: 1, acknowledgement: 2, window: 3, timestamp: Some(4) };
            for frame in [&frame[..], &frame[..frame.len().min(cut)]] {
                let answers = [
                    echo_reply(frame),
                    port_unreachable(frame),
                    reset(frame),
                    acknowledgement(frame, flow, Some(9)),
                    neighbour_advertisement(frame, "fd00::2".parse().unwrap(), [1; 6]),
                ];
                for answer in answers.iter().flatten() {
                    prop_assert!(sums_are_right(answer), "{:02x?}", answer);
                }
                arp_reply(frame, [10, 0, 0, 2].into(), [1; 6]);
                flow_of(frame);
            }
        }
    }
}
