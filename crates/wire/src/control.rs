//! The link itself: meeting, going to sleep, waking up.

use serde::{Deserialize, Serialize};

use crate::Sockets;

/// Names one life of the host's end of a link: random, new whenever the host cannot go on where it was.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LinkId(pub [u8; 16]);

impl std::fmt::Debug for LinkId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LinkId({:032x})", u128::from_be_bytes(self.0))
    }
}

/// Versions of the protocol that a side speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionRange {
    /// The oldest.
    pub oldest: u16,
    /// The newest.
    pub newest: u16,
}

impl VersionRange {
    /// The version that two sides use: the newest that both speak, if there is one.
    pub fn agree(self, other: Self) -> Option<u16> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest.max(other.oldest)).then_some(newest)
    }
}

/// Host to guest, on channel 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToGuest {
    /// A host takes the link over: all channels of the one before are gone. Answered by [`ToHost::Hello`].
    Hello(HostHello),
    /// Stand still. Answered by [`ToHost::Quiesced`], the guest's last frame until [`ToGuest::Wake`].
    Quiesce(Quiesce),
    /// Go on, also if `Quiesce` has not been answered yet. Answered by [`ToHost::Woke`].
    Wake(Wake),
    /// Tell the programs on the awake socket that the guest sleeps soon. From version 2 on; not answered.
    SleepNotice(SleepNotice),
    /// As [`ToGuest::Wake`], and the card gets an IPv6 address, after everything else and before the user's programs go on.
    /// From version 2 on.
    WakeWithIpv6(Wake, Ipv6Network),
    /// As [`ToGuest::WakeWithIpv6`], with an IPv6 address or without, and drives are mounted before the user's programs go on.
    /// From version 4 on.
    WakeWithMounts(Wake, Option<Ipv6Network>, Vec<Mount>),
}

impl ToGuest {
    /// The first version of the protocol that has it.
    pub fn since(&self) -> u16 {
        match self {
            Self::Hello(_) | Self::Quiesce(_) | Self::Wake(_) => 1,
            Self::SleepNotice(_) => crate::HELD_SINCE,
            Self::WakeWithIpv6(..) => crate::NETWORK_SINCE,
            Self::WakeWithMounts(..) => crate::MOUNTS_SINCE,
        }
    }
}

/// Guest to host, on channel 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToHost {
    /// Answer to [`ToGuest::Hello`].
    Hello(GuestHello),
    /// Answer to [`ToGuest::Quiesce`].
    Quiesced(Quiesced),
    /// Answer to [`ToGuest::Wake`].
    Woke(Woke),
    /// What is held on the awake socket, told when a host is met and whenever it changes. From version 2 on.
    Held(Held),
    /// What is open on the network, told right before [`ToHost::Quiesced`], when the user's programs stand still. From version
    /// 2 on.
    Sockets(Sockets),
}

/// That a guest sleeps soon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SleepNotice {
    /// In how many milliseconds.
    pub in_ms: u32,
    /// Holds have reached their limit: raising or lowering one changes nothing any more.
    pub cap: bool,
}

/// What is held on the awake socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Held {
    /// Holds that are raised, over all connections.
    pub holds: u32,
    /// Connections to the socket: who can be told that the guest sleeps soon.
    pub connections: u32,
}

/// The first thing a host says. Its layout is the same in all versions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostHello {
    /// The new link.
    pub link: LinkId,
    /// What the host speaks.
    pub versions: VersionRange,
}

/// The answer to it. Its layout is the same in all versions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestHello {
    /// The link that is answered; anything else on the way is from an earlier life.
    pub link: LinkId,
    /// What the guest speaks.
    pub versions: VersionRange,
    /// The agent's version, for people.
    pub agent: String,
    /// Random per boot: another one means that the guest booted anew.
    pub boot: [u8; 16],
    /// The user's programs stand still and wait for [`ToGuest::Wake`].
    pub quiesced: bool,
}

/// How to stand still.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quiesce {
    /// Number of the attempt; comes back in the answer, so that a late answer is recognised.
    pub attempt: u64,
    /// Write everything to the disk.
    pub sync: bool,
    /// Drop clean caches, so that the memory image gets smaller.
    pub drop_caches: bool,
    /// How long freezing the user's programs may take, in milliseconds.
    pub freeze_limit_ms: u32,
}

/// The guest stands still, and this is its last frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quiesced {
    /// The attempt that is answered.
    pub attempt: u64,
    /// All of the user's programs are frozen. False: some could not be frozen within the limit and run on.
    pub frozen: bool,
    /// Microseconds for freezing.
    pub freeze_us: u64,
    /// Microseconds for writing to disk and dropping caches.
    pub flush_us: u64,
}

/// How to wake.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wake {
    /// The link; must be the one of the last `Hello`.
    pub link: LinkId,
    /// Number of the attempt; comes back in the answer.
    pub attempt: u64,
    /// The host's wall clock just before sending, in nanoseconds since 1970; `None`: leave the clock alone.
    pub realtime_ns: Option<i64>,
    /// Fresh random bytes for the guest's generator, [`ENTROPY_LEN`]; empty: none.
    pub entropy: Vec<u8>,
    /// A new identity, for a fork or a clone of a template.
    pub identity: Option<Identity>,
    /// This guest is a copy of another that may still run: connections of the old address are cut, and if the random
    /// generator cannot be reseeded the user's programs stay frozen.
    pub fork: bool,
}

impl std::fmt::Debug for Wake {
    /// Without the entropy.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wake")
            .field("link", &self.link)
            .field("attempt", &self.attempt)
            .field("realtime_ns", &self.realtime_ns)
            .field("entropy_len", &self.entropy.len())
            .field("identity", &self.identity)
            .field("fork", &self.fork)
            .finish()
    }
}

/// Bytes of entropy that a host gives at each wake: twice what the kernel's generator holds.
pub const ENTROPY_LEN: usize = 64;

/// Who a guest is on its network and to its programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Host name, 1–63 letters, digits and hyphens.
    pub hostname: String,
    /// Content of `/etc/machine-id`.
    pub machine_id: [u8; 16],
    /// The network card; `None`: leave the network alone.
    pub network: Option<Network>,
}

/// A point-to-point network: one address, one gateway, nothing else on the link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Hardware address of the guest's card.
    pub mac: [u8; 6],
    /// The guest's IPv4 address.
    pub address: [u8; 4],
    /// The gateway's IPv4 address.
    pub gateway: [u8; 4],
    /// The gateway's hardware address, kept as a permanent neighbour, so that no ARP is needed.
    pub gateway_mac: [u8; 6],
    /// Name servers, at most 3 (the resolver of the C library reads no more).
    pub nameservers: Vec<[u8; 4]>,
}

/// A guest's IPv6, beside its IPv4 on the same card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ipv6Network {
    /// The guest's address.
    pub address: [u8; 16],
    /// The gateway's address, to which everything else is sent.
    pub gateway: [u8; 16],
    /// The gateway's hardware address, kept as a permanent neighbour, so that no neighbour discovery is needed.
    pub gateway_mac: [u8; 6],
}

/// A drive to be mounted. One that is mounted already, from a wake before or by the guest that this is a copy of, stays as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Serial number of the disk, 1–20 characters.
    pub serial: String,
    /// Absolute path of the folder, which is made if it is not there.
    pub path: Vec<u8>,
    /// Not to be written.
    pub read_only: bool,
}

/// What happens at a wake, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// The wall clock.
    Clock,
    /// The kernel's random generator.
    Entropy,
    /// Host name, machine id, `/etc/hosts`.
    Identity,
    /// A fork's copies of its parent's connections, cut while the card is down so that the parent's peers hear nothing.
    Connections,
    /// Card, address, routes, neighbour, name servers.
    Network,
    /// The user's programs go on.
    Thaw,
    /// The IPv6 address and its routes, before the programs go on. Only in answer to [`ToGuest::WakeWithIpv6`] and
    /// [`ToGuest::WakeWithMounts`].
    Ipv6,
    /// Drives are mounted, before the programs go on. Only in answer to [`ToGuest::WakeWithMounts`].
    Mounts,
}

/// How a step went.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StepOutcome {
    /// It was done.
    Done,
    /// It was not asked for, or there was nothing to do.
    Skipped,
    /// It failed.
    Failed(String),
}

/// One step of a wake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepReport {
    /// Which.
    pub step: Step,
    /// How long it took, in microseconds.
    pub micros: u64,
    /// How it went.
    pub outcome: StepOutcome,
}

/// The guest is awake, unless a step that may not fail did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Woke {
    /// The attempt that is answered.
    pub attempt: u64,
    /// The user's programs run.
    pub running: bool,
    /// What the wall clock was moved by, in nanoseconds.
    pub clock_step_ns: i64,
    /// The steps in their order.
    pub steps: Vec<StepReport>,
}
