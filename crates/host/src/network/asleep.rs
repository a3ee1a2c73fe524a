//! What becomes of a packet for a sleeping sandbox: answered in its place, or it wakes.
//!
//! The guest tells what is open on its network when it is about to sleep; nothing about that changes while it sleeps. So the
//! host knows what its kernel would do with a packet. Where only the kernel would answer, the host does, and nothing wakes:
//!
//! | packet | open, connected | not |
//! | --- | --- | --- |
//! | SYN | wakes | refused: RST |
//! | data, end (FIN) or cut (RST) of a connection | wakes | RST; a RST is dropped |
//! | keepalive probe | acknowledged | RST |
//! | acknowledgement, window update | kept for the guest | RST |
//! | datagram | wakes | port unreachable |
//! | ping, ARP, neighbour solicitation | answered | |
//! | anything else for it | wakes | |
//!
//! A FIN and a RST wake because a program may wait on that connection for what will not come: to go on sleeping would leave it
//! waiting. Where the guest did not tell (an older agent, packets that came while it fell asleep, forwarding or rewriting of
//! packets in it), everything wakes but what is answered whatever is open.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vmm::packet::{Flow, Probe, Verdict, Wake, answer, classify};

/// Segments without content that are remembered of connections whose state nobody knows; more than that many at a time are
/// rare, and forgetting one only delays the answer to a probe by another probe.
const BARE_MAX: usize = 256;

/// How often one connection's probes are answered at most: as often as Linux does. Two ends that take each other's
/// acknowledgements for probes must not go on for ever.
const SAME_ANSWER_AFTER: Duration = Duration::from_millis(500);

/// Answers to strangers (refusals, pings) per second; further ones are dropped, as a busy machine drops them. A flood must not
/// cost the daemon more than its reading.
const ANSWERS_PER_SECOND: u32 = 200;

/// What was open on a guest's network when it fell asleep. Kept in the manifest, for the next daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AtRest {
    /// Ports that somebody listens on, as seen from outside.
    pub(crate) open: Vec<OpenPort>,
    /// Its TCP connections.
    pub(crate) connections: Vec<Connected>,
}

/// A port that takes connections or datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OpenPort {
    pub(crate) udp: bool,
    pub(crate) port: u16,
    /// Taken over IPv4.
    pub(crate) v4: bool,
    /// Taken over IPv6.
    pub(crate) v6: bool,
}

/// A TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Connected {
    pub(crate) port: u16,
    pub(crate) peer: SocketAddr,
    /// Where it stands; `None`: not known, or it is about to begin or end.
    pub(crate) flow: Option<Flow>,
}

impl AtRest {
    /// From what the guest told and what its kernel answered. `None`: nothing follows from it.
    pub(crate) fn of(
        sockets: &wire::Sockets,
        flows: &HashMap<(SocketAddr, SocketAddr), Flow>,
    ) -> Option<Self> {
        let open = sockets.listeners.iter().map(|listener| OpenPort {
            udp: listener.transport == wire::Transport::Udp,
            port: listener.port,
            v4: listener.address.is_ipv4()
                || listener.address.is_unspecified() && !listener.v6_only,
            v6: listener.address.is_ipv6(),
        });
        let connections = sockets.connections.iter().map(|connection| Connected {
            port: connection.local.port(),
            peer: connection.peer,
            flow: flows
                .get(&(connection.local, connection.peer))
                .copied()
                .filter(|_| connection.stands),
        });
        sockets.whole.then(|| Self { open: open.collect(), connections: connections.collect() })
    }

    fn is_open(&self, udp: bool, port: u16, peer: IpAddr) -> bool {
        self.open.iter().any(|open| {
            open.udp == udp && open.port == port && if peer.is_ipv4() { open.v4 } else { open.v6 }
        })
    }

    fn connection(&self, port: u16, peer: IpAddr, peer_port: u16) -> Option<&Connected> {
        let peer = SocketAddr::new(peer, peer_port);
        self.connections.iter().find(|one| one.port == port && one.peer == peer)
    }
}

/// Whose packets they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) mac: [u8; 6],
    pub(crate) address: Ipv4Addr,
    pub(crate) ipv6: Option<Ipv6Addr>,
}

/// What to do with a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The guest must see it, at once.
    Wake {
        /// Who sent it.
        peer: Option<IpAddr>,
        /// To which of the guest's ports.
        port: Option<u16>,
    },
    /// Send this in its place.
    Answer(Vec<u8>),
    /// The guest sees it when it wakes for something else.
    Keep,
    /// It matters to nobody.
    Drop,
}

/// Decides for one sleeper.
#[derive(Debug)]
pub(crate) struct Asleep {
    at_rest: Option<AtRest>,
    /// Of connections whose state is not known: peer, its port, the guest's port, sequence number.
    bare: VecDeque<(IpAddr, u16, u16, u32)>,
    answered: HashMap<(IpAddr, u16, u16), Instant>,
    /// The second that is counted, and answers in it.
    strangers: Option<(Instant, u32)>,
}

impl Asleep {
    /// For a guest that told this.
    pub(crate) fn new(at_rest: Option<AtRest>) -> Self {
        Self { at_rest, bare: VecDeque::new(), answered: HashMap::new(), strangers: None }
    }

    /// What it told.
    pub(crate) fn at_rest(&self) -> Option<&AtRest> {
        self.at_rest.as_ref()
    }

    /// Judges one frame.
    pub(crate) fn judge(&mut self, frame: &[u8], place: Place, now: Instant) -> Decision {
        match classify(frame) {
            Verdict::Wake(wake) => self.judge_wake(wake, frame, now),
            Verdict::KeepaliveProbe(probe) => self.judge_bare(probe, frame, now),
            Verdict::EchoRequest { peer } => match answer::echo_reply(frame) {
                Some(answer) => self.tell_stranger(Some(answer), now),
                // Parts of a longer one are put together by the guest.
                None => Decision::Wake { peer: Some(peer), port: None },
            },
            Verdict::ArpRequest => {
                self.tell_stranger(answer::arp_reply(frame, place.address, place.mac), now)
            }
            Verdict::NeighbourSolicitation { target } if place.ipv6 == Some(target) => {
                self.tell_stranger(answer::neighbour_advertisement(frame, target, place.mac), now)
            }
            Verdict::NeighbourSolicitation { .. } | Verdict::Ignore(_) => Decision::Drop,
        }
    }

    fn judge_wake(&mut self, wake: Wake, frame: &[u8], now: Instant) -> Decision {
        let needs = |peer, port| Decision::Wake { peer: Some(peer), port };
        let Some(at_rest) = &self.at_rest else {
            return match wake {
                Wake::TcpSyn { port, peer, .. }
                | Wake::TcpData { port, peer, .. }
                | Wake::Udp { port, peer } => needs(peer, Some(port)),
                Wake::Other { peer, .. } => needs(peer, None),
            };
        };
        match wake {
            Wake::TcpSyn { port, peer, peer_port } => {
                if at_rest.is_open(false, port, peer)
                    || at_rest.connection(port, peer, peer_port).is_some()
                {
                    return needs(peer, Some(port));
                }
                self.tell_stranger(answer::reset(frame), now)
            }
            Wake::TcpData { port, peer, peer_port, .. } => {
                if at_rest.connection(port, peer, peer_port).is_some() {
                    return needs(peer, Some(port));
                }
                // None where it is a RST itself.
                self.tell_stranger(answer::reset(frame), now)
            }
            Wake::Udp { port, peer } => {
                if at_rest.is_open(true, port, peer) {
                    return needs(peer, Some(port));
                }
                self.tell_stranger(answer::port_unreachable(frame), now)
            }
            Wake::Other { peer, .. } => needs(peer, None),
        }
    }

    fn judge_bare(&mut self, probe: Probe, frame: &[u8], now: Instant) -> Decision {
        let connection = self
            .at_rest
            .as_ref()
            .map(|at_rest| at_rest.connection(probe.port, probe.peer, probe.peer_port).copied());
        match connection {
            Some(None) => self.tell_stranger(answer::reset(frame), now),
            Some(Some(Connected { flow: Some(flow), .. })) => {
                self.judge_in_flow(probe, flow, frame, now)
            }
            Some(Some(Connected { flow: None, .. })) | None => self.judge_unknown(probe),
        }
    }

    fn judge_in_flow(&mut self, probe: Probe, flow: Flow, frame: &[u8], now: Instant) -> Decision {
        if probe.sequence == flow.acknowledgement {
            return match probe.payload {
                // It acknowledges something or tells of its window.
                0 => Decision::Keep,
                // The next byte.
                _ => Decision::Wake { peer: Some(probe.peer), port: Some(probe.port) },
            };
        }
        let key = (probe.peer, probe.peer_port, probe.port);
        let lately = self
            .answered
            .get(&key)
            .is_some_and(|at| now.saturating_duration_since(*at) < SAME_ANSWER_AFTER);
        if lately {
            return Decision::Drop;
        }
        // As many as there are connections.
        self.answered.insert(key, now);
        match answer::acknowledgement(frame, flow, probe.timestamp) {
            Some(answer) => Decision::Answer(answer),
            None => Decision::Wake { peer: Some(probe.peer), port: Some(probe.port) },
        }
    }

    /// A late acknowledgement wakes nobody. A segment that comes again is a keepalive probe that nobody has answered: left
    /// so, it would cut the connection.
    fn judge_unknown(&mut self, probe: Probe) -> Decision {
        let seen = (probe.peer, probe.peer_port, probe.port, probe.sequence);
        if self.bare.contains(&seen) {
            return Decision::Wake { peer: Some(probe.peer), port: Some(probe.port) };
        }
        if self.bare.len() >= BARE_MAX {
            self.bare.pop_front();
        }
        self.bare.push_back(seen);
        Decision::Keep
    }

    fn tell_stranger(&mut self, answer: Option<Vec<u8>>, now: Instant) -> Decision {
        let Some(answer) = answer else { return Decision::Drop };
        let (since, count) = match self.strangers {
            Some((since, count)) if now.saturating_duration_since(since).as_secs() < 1 => {
                (since, count)
            }
            _ => (now, 0),
        };
        if count >= ANSWERS_PER_SECOND {
            return Decision::Drop;
        }
        self.strangers = Some((since, count + 1));
        Decision::Answer(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 118, 0, 2)), 8000);
    const PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 118, 0, 1)), 40_000);
    const PLACE: Place = Place {
        mac: [6; 6],
        address: Ipv4Addr::new(10, 118, 0, 2),
        ipv6: Some(Ipv6Addr::LOCALHOST),
    };
    const FLOW: Flow = Flow { sequence: 2000, acknowledgement: 1001, window: 500, timestamp: None };

    fn at_rest() -> AtRest {
        let listener = |transport, address: &str, port, v6_only| wire::Listener {
            transport,
            address: address.parse().expect("an address"),
            port,
            v6_only,
        };
        let (tcp, udp) = (wire::Transport::Tcp, wire::Transport::Udp);
        let sockets = wire::Sockets {
            whole: true,
            unread: false,
            listeners: vec![
                listener(tcp, "::", 80, false),
                listener(tcp, "0.0.0.0", 81, false),
                listener(tcp, "::", 82, true),
                listener(tcp, "fd00::2", 83, false),
                listener(udp, "10.118.0.2", 53, false),
            ],
            connections: vec![wire::Connection { local: GUEST, peer: PEER, stands: true }],
        };
        AtRest::of(&sockets, &HashMap::from([((GUEST, PEER), FLOW)])).expect("whole")
    }

    /// A bare segment of the peer. Made as a question to the guest, which is one.
    fn bare(from: SocketAddr, sequence: u32) -> Vec<u8> {
        let macs = answer::LinkEnds { from: [2; 6], to: [6; 6] };
        answer::question(macs, from, GUEST, sequence).expect("one family")
    }

    fn with_flags(mut frame: Vec<u8>, flags: u8) -> Vec<u8> {
        frame[14 + 20 + 13] = flags;
        frame
    }

    fn wakes(decision: &Decision) -> bool {
        matches!(decision, Decision::Wake { .. })
    }

    #[test]
    fn s08_ports_are_open_over_the_families_they_take() {
        let at_rest = at_rest();
        let (v4, v6) = (PEER.ip(), IpAddr::from(Ipv6Addr::LOCALHOST));
        let open = |udp, port| (at_rest.is_open(udp, port, v4), at_rest.is_open(udp, port, v6));
        assert_eq!(open(false, 80), (true, true));
        assert_eq!(open(false, 81), (true, false));
        assert_eq!(open(false, 82), (false, true));
        assert_eq!(open(false, 83), (false, true));
        assert_eq!(open(false, 84), (false, false));
        assert_eq!(open(true, 53), (true, false));
        assert_eq!(open(false, 53), (false, false));
    }

    #[test]
    fn s07_a_probe_is_answered_and_the_next_byte_wakes() {
        let mut asleep = Asleep::new(Some(at_rest()));
        let now = Instant::now();
        let probe = bare(PEER, 1000);
        let Decision::Answer(answer) = asleep.judge(&probe, PLACE, now) else {
            panic!("a probe is answered")
        };
        let (local, peer, flow) = answer::flow_of(&answer).expect("an acknowledgement");
        assert_eq!((local, peer, flow), (GUEST, PEER, FLOW));
        assert_eq!(asleep.judge(&probe, PLACE, now), Decision::Drop, "not twice at once");
        let later = now + SAME_ANSWER_AFTER;
        assert!(matches!(asleep.judge(&probe, PLACE, later), Decision::Answer(_)));
        assert_eq!(asleep.judge(&bare(PEER, 1001), PLACE, later), Decision::Keep, "no probe");
        for flags in [0x18, 0x11, 0x04] {
            // Data or an end: a length does not matter to these.
            let segment = with_flags(bare(PEER, 1001), flags);
            assert!(wakes(&asleep.judge(&segment, PLACE, later)), "flags {flags:#x}");
        }
    }

    #[test]
    fn s08_a_connection_that_the_guest_does_not_have_is_cut_without_waking() {
        let mut asleep = Asleep::new(Some(at_rest()));
        let stranger = SocketAddr::new(PEER.ip(), 40_001);
        let now = Instant::now();
        for flags in [0x10, 0x18, 0x11, 0x02, 0x12] {
            let segment = with_flags(bare(stranger, 1000), flags);
            let Decision::Answer(answer) = asleep.judge(&segment, PLACE, now) else {
                panic!("flags {flags:#x}")
            };
            assert_eq!(answer[14 + 20 + 13] & 0x04, 0x04, "cut");
        }
        let reset = with_flags(bare(stranger, 1000), 0x04);
        assert_eq!(asleep.judge(&reset, PLACE, now), Decision::Drop);
    }

    #[test]
    fn s08_of_a_guest_that_did_not_tell_everything_wakes() {
        let mut asleep = Asleep::new(None);
        let now = Instant::now();
        for flags in [0x02, 0x18, 0x11, 0x04] {
            assert!(wakes(&asleep.judge(&with_flags(bare(PEER, 1), flags), PLACE, now)));
        }
        // An acknowledgement may be late; the same again is a probe.
        assert_eq!(asleep.judge(&bare(PEER, 7), PLACE, now), Decision::Keep);
        assert_eq!(asleep.judge(&bare(PEER, 8), PLACE, now), Decision::Keep);
        assert!(wakes(&asleep.judge(&bare(PEER, 7), PLACE, now)));
        let told = wire::Sockets { whole: false, ..wire::Sockets::default() };
        assert_eq!(AtRest::of(&told, &HashMap::new()), None);
    }

    #[test]
    fn s08_a_flood_is_answered_only_so_often() {
        let mut asleep = Asleep::new(Some(at_rest()));
        let now = Instant::now();
        let syn = with_flags(bare(PEER, 1), 0x02);
        let mut closed = syn.clone();
        closed[14 + 20 + 3] = 99;
        let mut answered =
            |now| (0..1000).filter(|_| asleep.judge(&closed, PLACE, now) != Decision::Drop).count();
        assert_eq!(answered(now), ANSWERS_PER_SECOND as usize);
        assert_eq!(answered(now + Duration::from_secs(1)), ANSWERS_PER_SECOND as usize);
    }
}
