//! A sandbox's port on the network: its tap, and what the host does there in the guest's place while it sleeps.
//!
//! All QEMUs of a sandbox share the tap's one queue with the daemon. While the guest runs the daemon does not read. While it
//! sleeps the daemon does: what would wake the guest is kept, wakes it, and is given back to the queue when it runs again, so
//! that nothing is lost and nothing is answered by anybody but the guest.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmm::ProcessId;
use vmm::packet::{Probe, Verdict, Wake, classify};
use vmm::tap::{ActivityWatch, Frame, Injector, LinkSetup, Reader, Tap, set_up};

use crate::network::Subnet;

/// Ethernet's usual payload.
const MTU: u32 = 1500;

/// Packets that wait in a tap's queue while the guest sleeps (the kernel's default for taps).
const QUEUE_PACKETS: u32 = 1000;

/// Packets that are kept for a sleeper between its waking and its running. More come only from a flood; the oldest stay, as
/// they carry the beginning of what the guest must answer.
const HELD_MAX: usize = 512;

/// Segments without content that are remembered while it sleeps; more than that many connections at a time are rare, and
/// forgetting one only delays the answer to a probe by another probe.
const BARE_MAX: usize = 256;

/// A tap with all that is done at it.
#[derive(Debug)]
pub(crate) struct Port {
    tap: Tap,
    injector: Injector,
    activity: ActivityWatch,
    /// Only while the guest sleeps.
    reader: Option<Reader>,
    held: VecDeque<Frame>,
    /// Segments without content that came while it slept: peer, its port, the guest's port, sequence number.
    bare: VecDeque<(IpAddr, u16, u16, u32)>,
}

/// What has come for a sleeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// Something that the guest must see.
    Wake {
        /// Who sent it.
        peer: Option<IpAddr>,
        /// To which of the guest's ports.
        port: Option<u16>,
    },
    /// Nothing that matters.
    Nothing,
}

impl Port {
    /// The tap of a slot, made when missing, with its address and route.
    pub(crate) fn open(subnet: Subnet, slot: u32) -> io::Result<Self> {
        let name = subnet.tap(slot);
        let tap = Tap::create(&name).map_err(io::Error::other)?;
        Self::with(tap, subnet, slot)
    }

    /// The tap of a slot, shared with the living QEMU that holds it.
    pub(crate) fn shared_with(process: &ProcessId, subnet: Subnet, slot: u32) -> io::Result<Self> {
        let name = subnet.tap(slot);
        Self::with(Tap::take(process, &name).map_err(io::Error::other)?, subnet, slot)
    }

    fn with(tap: Tap, subnet: Subnet, slot: u32) -> io::Result<Self> {
        let setup = LinkSetup {
            gateway: subnet.gateway(),
            host_mac: crate::network::GATEWAY_MAC,
            guest: subnet.address(slot),
            guest_mac: subnet.mac(slot),
            mtu: MTU,
            queue_packets: QUEUE_PACKETS,
        };
        set_up(&tap, setup).map_err(io::Error::other)?;
        let injector = Injector::new(&tap).map_err(io::Error::other)?;
        let activity = ActivityWatch::new(&tap).map_err(io::Error::other)?;
        Ok(Self {
            tap,
            injector,
            activity,
            reader: None,
            held: VecDeque::new(),
            bare: VecDeque::new(),
        })
    }

    /// For QEMU.
    pub(crate) fn tap_fd(&self) -> Arc<OwnedFd> {
        self.tap.fd()
    }

    /// Whether anything that counts has crossed since the last question.
    pub(crate) fn activity(&self) -> bool {
        self.activity.drain().unwrap_or_else(|error| {
            tracing::warn!(tap = self.tap.name(), %error, "activity not seen");
            // Rather awake for nothing than asleep in the middle of something.
            true
        })
    }

    /// Waits for a packet to a sleeping guest. Cancel safe: a packet is either still in the queue or among the held.
    pub(crate) async fn arrival(&mut self) -> io::Result<Arrival> {
        if self.reader.is_none() {
            self.reader = Some(self.tap.reader().map_err(io::Error::other)?);
        }
        let Some(reader) = self.reader.as_mut() else { return Ok(Arrival::Nothing) };
        reader.readable().await?;
        let Some(frame) = reader.try_read()? else { return Ok(Arrival::Nothing) };
        let arrival = match classify(frame.ethernet()) {
            Verdict::Wake(wake) => {
                let (peer, port) = sender(wake);
                Arrival::Wake { peer, port }
            }
            Verdict::KeepaliveProbe(probe) => self.on_bare_segment(probe),
            Verdict::EchoRequest { peer } => Arrival::Wake { peer: Some(peer), port: None },
            Verdict::ArpRequest | Verdict::Ignore(_) => return Ok(Arrival::Nothing),
        };
        if self.held.len() < HELD_MAX {
            self.held.push_back(frame);
        }
        Ok(arrival)
    }

    /// A late acknowledgement wakes nobody. A segment that comes again is a keepalive probe that nobody has answered: left
    /// so, it would cut the connection.
    fn on_bare_segment(&mut self, probe: Probe) -> Arrival {
        let seen = (probe.peer, probe.peer_port, probe.port, probe.sequence);
        if self.bare.contains(&seen) {
            return Arrival::Wake { peer: Some(probe.peer), port: Some(probe.port) };
        }
        if self.bare.len() >= BARE_MAX {
            self.bare.pop_front();
        }
        self.bare.push_back(seen);
        Arrival::Nothing
    }

    /// The guest runs (or is about to): what was kept goes back to the queue, and the daemon reads no more.
    pub(crate) fn give_back(&mut self) {
        self.reader = None;
        self.bare.clear();
        for frame in self.held.drain(..) {
            if let Err(error) = self.injector.send(&frame) {
                // As good as lost on the wire: its sender sends it again.
                tracing::warn!(tap = self.tap.name(), %error, "packet not given back");
            }
        }
    }

    /// Removes the device.
    pub(crate) fn remove(&mut self) -> io::Result<()> {
        self.reader = None;
        match self.tap.clone().delete() {
            Ok(()) => Ok(()),
            // Gone already, by whatever hand.
            Err(error) if is_gone(&error.source) => Ok(()),
            Err(error) => Err(io::Error::other(error)),
        }
    }
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
}

fn sender(wake: Wake) -> (Option<IpAddr>, Option<u16>) {
    match wake {
        Wake::TcpSyn { peer, port } | Wake::TcpData { peer, port } | Wake::Udp { peer, port } => {
            (Some(peer), Some(port))
        }
        Wake::Other { peer, .. } => (Some(peer), None),
    }
}
