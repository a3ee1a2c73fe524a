//! A sandbox's port on the network: its tap, and what the host does there in the guest's place while it sleeps.
//!
//! All QEMUs of a sandbox share the tap's one queue with the daemon. While the guest runs the daemon does not read. While it
//! sleeps the daemon does: what would wake the guest is kept, wakes it, and is given back to the queue when it runs again, so
//! that nothing is lost and nothing is answered by anybody but the guest.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm::ProcessId;
use vmm::packet::Flow;
use vmm::packet::answer::LinkEnds;
use vmm::tap::{
    ActivityWatch, Ends, Frame, Injector, Ipv6Setup, LinkSetup, Reader, Tap, is_gone, set_up,
};

use crate::network::asleep::{Asleep, AtRest, Decision, Place};
use crate::network::{GATEWAY_MAC, Subnet};

/// Ethernet's usual payload.
const MTU: u32 = 1500;

/// Packets that wait in a tap's queue while the guest sleeps (the kernel's default for taps).
const QUEUE_PACKETS: u32 = 1000;

/// Packets that are kept for a sleeper between its waking and its running. More come only from a flood; the oldest stay, as
/// they carry the beginning of what the guest must answer.
const HELD_MAX: usize = 512;

/// How long after a failure a tap that was removed is tried to be made again.
const REMAKE_EVERY: Duration = Duration::from_secs(5);

/// Removes the device that an earlier daemon has left of a slot; none is fine.
pub(crate) fn remove_left(subnet: Subnet, slot: u32) -> io::Result<()> {
    match Tap::delete_named(&subnet.tap(slot)) {
        Ok(true) => {
            tracing::debug!(tap = subnet.tap(slot), "removed a tap that was left");
            Ok(())
        }
        Ok(false) => Ok(()),
        Err(error) if is_gone(&error.source) => Ok(()),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// A tap with all that is done at it.
#[derive(Debug)]
pub(crate) struct Port {
    subnet: Subnet,
    slot: u32,
    tap: Tap,
    injector: Injector,
    activity: ActivityWatch,
    /// Only while the guest sleeps.
    reader: Option<Reader>,
    held: VecDeque<Frame>,
    asleep: Asleep,
    /// Something came when the guest's programs stood still already and its kernel did not: they have not seen it.
    missed: bool,
    /// The machine, if there is one, holds another tap than this, one that was removed.
    remade: bool,
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
            host_mac: GATEWAY_MAC,
            guest: subnet.address(slot),
            guest_mac: subnet.mac(slot),
            mtu: MTU,
            queue_packets: QUEUE_PACKETS,
            ipv6: subnet
                .gateway_ipv6()
                .zip(subnet.ipv6(slot))
                .map(|(gateway, guest)| Ipv6Setup { gateway, guest }),
        };
        set_up(&tap, setup).map_err(io::Error::other)?;
        let injector = Injector::new(&tap).map_err(io::Error::other)?;
        let activity = ActivityWatch::new(&tap).map_err(io::Error::other)?;
        Ok(Self {
            subnet,
            slot,
            tap,
            injector,
            activity,
            reader: None,
            held: VecDeque::new(),
            asleep: Asleep::new(None),
            missed: false,
            remade: false,
        })
    }

    /// For a QEMU that is being started.
    pub(crate) fn tap_fd(&mut self) -> Arc<OwnedFd> {
        self.remade = false;
        self.tap.fd()
    }

    /// Whether the tap is there, and the one that the machine holds.
    pub(crate) fn is_whole(&self) -> bool {
        !self.remade && self.tap.exists()
    }

    /// Makes the tap anew where somebody has removed it.
    pub(crate) fn ensure(&mut self) -> io::Result<()> {
        if self.tap.exists() {
            return Ok(());
        }
        tracing::warn!(tap = self.tap.name(), "the tap was removed by somebody; it is made anew");
        let fresh = Self::open(self.subnet, self.slot)?;
        self.tap = fresh.tap;
        self.injector = fresh.injector;
        self.activity = fresh.activity;
        self.reader = None;
        self.remade = true;
        Ok(())
    }

    /// Whether anything that counts has crossed since the last question.
    pub(crate) fn activity(&self) -> bool {
        self.activity.drain().unwrap_or_else(|error| {
            tracing::warn!(tap = self.tap.name(), %error, "activity not seen");
            // Rather awake for nothing than asleep in the middle of something.
            true
        })
    }

    /// Watches on its own what crosses from now on.
    pub(crate) fn watch(&self) -> io::Result<ActivityWatch> {
        ActivityWatch::new(&self.tap).map_err(io::Error::other)
    }

    /// Asks the running guest's kernel where these connections stand; those that it does not answer for are missing.
    pub(crate) async fn flows(&self, connections: &[Ends]) -> HashMap<Ends, Flow> {
        let macs = LinkEnds { from: GATEWAY_MAC, to: self.subnet.mac(self.slot) };
        vmm::tap::flows(&self.tap, &self.injector, macs, connections).await.unwrap_or_else(
            |error| {
                tracing::debug!(%error, "connections not asked about");
                HashMap::new()
            },
        )
    }

    /// The guest has fallen asleep with this open. `missed`: something came that its programs have not seen.
    pub(crate) fn rest(&mut self, at_rest: Option<AtRest>, missed: bool) {
        self.asleep = Asleep::new(at_rest);
        self.missed = missed;
    }

    /// What it fell asleep with.
    pub(crate) fn at_rest(&self) -> Option<&AtRest> {
        self.asleep.at_rest()
    }

    /// Waits for a packet to a sleeping guest. Cancel safe: a packet is either still in the queue or among the held.
    pub(crate) async fn arrival(&mut self) -> io::Result<Arrival> {
        if std::mem::take(&mut self.missed) {
            return Ok(Arrival::Wake { peer: None, port: None });
        }
        match self.next().await {
            Err(error) if is_gone(&error) => {
                if let Err(error) = self.ensure() {
                    tracing::error!(tap = self.tap.name(), %error, "the tap cannot be made anew");
                    tokio::time::sleep(REMAKE_EVERY).await;
                }
                Ok(Arrival::Nothing)
            }
            arrival => arrival,
        }
    }

    async fn next(&mut self) -> io::Result<Arrival> {
        if self.reader.is_none() {
            self.reader = Some(self.tap.reader().map_err(|error| error.source)?);
        }
        let Some(reader) = self.reader.as_mut() else { return Ok(Arrival::Nothing) };
        reader.readable().await?;
        let Some(frame) = reader.try_read()? else { return Ok(Arrival::Nothing) };
        let place = Place {
            mac: self.subnet.mac(self.slot),
            address: self.subnet.address(self.slot),
            ipv6: self.subnet.ipv6(self.slot),
        };
        let arrival = match self.asleep.judge(frame.ethernet(), place, Instant::now()) {
            Decision::Wake { peer, port } => Arrival::Wake { peer, port },
            Decision::Keep => Arrival::Nothing,
            Decision::Drop => return Ok(Arrival::Nothing),
            Decision::Answer(answer) => {
                // As good as lost on the wire: whoever waits for it asks again.
                if let Err(error) = reader.write(&answer) {
                    tracing::debug!(tap = self.tap.name(), %error, "answer not sent");
                }
                return Ok(Arrival::Nothing);
            }
        };
        if self.held.len() < HELD_MAX {
            self.held.push_back(frame);
        }
        Ok(arrival)
    }

    /// The guest runs (or is about to): what was kept goes back to the queue, and the daemon reads no more.
    pub(crate) fn give_back(&mut self) {
        self.reader = None;
        self.rest(None, false);
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
