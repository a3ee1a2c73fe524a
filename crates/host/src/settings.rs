//! What an operator may set, and where things lie in the data folder.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a sandbox sleeps in memory before it moves to disk, unless it says otherwise: five minutes. Most wakes of
/// an interactive day come sooner, and then cost a millisecond or two.
pub const MEMORY_TIER_DEFAULT: Duration = Duration::from_mins(5);

/// How long a refused port is tried again after a start or a wake.
pub const PORT_RETRY_DEFAULT: Duration = Duration::from_secs(10);

/// Ready clones of each kind: whoever makes one sandbox after the other waits for copies, but the first of a while does not.
pub const POOL_DEFAULT: usize = 1;

/// Most ready clones of each kind: each takes the memory of a sleeper.
pub const POOL_MAX: usize = 16;

/// Accounts of one subnet: as many as it has addresses.
const UIDS_PER_SUBNET: u32 = 1 << 16;

/// Settings of the daemon of one machine.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The data folder; made when missing.
    pub data: PathBuf,
    /// Where images are; default `<data>/images`.
    pub images: Option<PathBuf>,
    /// Where templates are; default `<data>/templates`. May be shared between daemons of one machine.
    pub templates: Option<PathBuf>,
    /// The QEMU to use; default `qemu-system-x86_64` from `PATH`.
    pub qemu: Option<PathBuf>,
    /// Name of this host in the catalogue.
    pub name: String,
    /// The first address of the /16 from which sandboxes get theirs. `.0.1` is the gateway's.
    pub subnet: Ipv4Addr,
    /// Where sandboxes get their IPv6 addresses from.
    pub ipv6: crate::network::ipv6::Ipv6Setting,
    /// Whether sandboxes reach the internet over IPv6 too; the host then forwards it.
    pub ipv6_outbound: bool,
    /// First user id for guests' QEMU processes: the sandbox in slot n runs as this plus n, so no two share one.
    pub uid_base: u32,
    /// How long a sandbox sleeps in memory before it moves to disk.
    pub memory_tier: Duration,
    /// How long a refused port is tried again after a start or a wake.
    pub port_retry: Duration,
    /// How much memory guests and their QEMUs may hold resident, MiB; `None`: as much as there is.
    pub memory_budget_mib: Option<u64>,
    /// How long a machine waits for room in memory before it is refused.
    pub memory_wait: Duration,
    /// How many clones of each kind of sandbox that is asked for are kept ready; 0: none, and each is copied when it is wanted.
    pub pool: usize,
    /// The object store in which checkpoints are kept, `file:///…` or `s3://…`; `None`: there are none.
    pub store: Option<String>,
}

impl Settings {
    /// The defaults over this data folder.
    pub fn new(data: impl Into<PathBuf>) -> Self {
        Self {
            data: data.into(),
            images: None,
            templates: None,
            qemu: None,
            name: "local".to_owned(),
            subnet: crate::network::SUBNET_DEFAULT,
            ipv6: crate::network::ipv6::Ipv6Setting::Own,
            ipv6_outbound: false,
            uid_base: 1_880_000_000,
            memory_tier: MEMORY_TIER_DEFAULT,
            port_retry: PORT_RETRY_DEFAULT,
            memory_budget_mib: None,
            memory_wait: crate::budget::WAIT_DEFAULT,
            pool: POOL_DEFAULT,
            store: None,
        }
    }

    /// Takes another subnet, and accounts that no daemon on the default one gives to its guests' QEMUs.
    pub fn use_subnet(&mut self, subnet: Ipv4Addr) {
        self.subnet = subnet;
        self.uid_base += UIDS_PER_SUBNET * accounts_of(subnet);
    }

    /// Folder of images.
    pub fn images_dir(&self) -> PathBuf {
        self.images.clone().unwrap_or_else(|| self.data.join("images"))
    }

    /// Folder of templates.
    pub fn templates_dir(&self) -> PathBuf {
        self.templates.clone().unwrap_or_else(|| self.data.join("templates"))
    }

    /// Folder of sandboxes.
    pub fn sandboxes_dir(&self) -> PathBuf {
        self.data.join("sandboxes")
    }

    /// Folder of emulators that sleepers need, replaced on the host since.
    pub fn emulators_dir(&self) -> PathBuf {
        self.data.join("emulators")
    }

    /// Folder of snapshots.
    pub fn snapshots_dir(&self) -> PathBuf {
        self.data.join("snapshots")
    }

    /// Folder of notes about forks that are there all or none.
    pub fn fork_sets_dir(&self) -> PathBuf {
        self.data.join("fork-sets")
    }

    /// Folder of drives.
    pub fn drives_dir(&self) -> PathBuf {
        self.data.join("drives")
    }

    /// Folder of volumes.
    pub fn volumes_dir(&self) -> PathBuf {
        self.data.join("volumes")
    }

    /// Where sandboxes go that another host has taken over: their files are kept for a person to look at.
    pub fn moved_dir(&self) -> PathBuf {
        self.data.join("moved")
    }

    /// Where things go that nobody knows: they are kept for a person to look at, never deleted.
    pub fn quarantine_dir(&self) -> PathBuf {
        self.data.join("quarantine")
    }
}

/// Which block of accounts a subnet has; 0 is that of the default. Each private subnet, and of others nearly each, has its own:
/// there are fewer blocks than subnets.
fn accounts_of(subnet: Ipv4Addr) -> u32 {
    let [a, b, _, _] = subnet.octets();
    let [default_a, default_b, _, _] = crate::network::SUBNET_DEFAULT.octets();
    let b = u32::from(b);
    match a {
        _ if (a, b) == (default_a, u32::from(default_b)) => 0,
        10 => 1 + b,
        172 if (16..32).contains(&b) => 257 + (b - 16),
        192 if b == 168 => 273,
        100 if (64..128).contains(&b) => 274 + (b - 64),
        _ => OTHERS_FROM + (u32::from(a) * 256 + b) % OTHERS,
    }
}

/// Blocks of accounts for subnets that are not private, and how many: so that the last account is below 2^32.
const OTHERS_FROM: u32 = 1024;
const OTHERS: u32 = 35_000;

/// The files of one sandbox (or of a template, which has the same parts).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    dir: PathBuf,
}

impl Files {
    /// Files below this folder.
    pub fn in_dir(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// The folder itself.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What it is and how it is: the one file that decides.
    pub fn manifest(&self) -> PathBuf {
        self.dir.join("manifest.json")
    }

    /// The guest's memory, mapped by its QEMU.
    pub fn memory(&self) -> PathBuf {
        self.dir.join("memory")
    }

    /// State of the virtual devices while it sleeps on disk.
    pub fn state(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// Its own blocks of the root disk, over the image's.
    pub fn disk(&self) -> PathBuf {
        self.dir.join("disk.qcow2")
    }

    /// Memory, devices and disk: what one without drives goes on from.
    #[must_use]
    pub fn saved_parts(&self) -> Vec<PathBuf> {
        vec![self.memory(), self.state(), self.disk()]
    }

    /// Its own copy of the drive in this place, counted from 0.
    pub fn drive(&self, place: usize) -> PathBuf {
        self.dir.join(format!("drive-{place}"))
    }

    /// QEMU's messages.
    pub fn qemu_log(&self) -> PathBuf {
        self.dir.join("qemu.log")
    }

    /// Serial console of the guest.
    pub fn console(&self) -> PathBuf {
        self.dir.join("console.log")
    }

    /// What the daemon logged about it.
    pub fn daemon_log(&self) -> PathBuf {
        self.dir.join("daemon.log")
    }

    /// What happened to it.
    pub fn timeline(&self) -> PathBuf {
        self.dir.join("events.jsonl")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_private_subnets_share_accounts_and_none_are_beyond_what_there_are() {
        let tens = (0..=255).map(|b| (10, b));
        let others =
            (16..32).map(|b| (172, b)).chain([(192, 168)]).chain((64..128).map(|b| (100, b)));
        let mut seen = std::collections::BTreeSet::new();
        for (a, b) in tens.chain(others) {
            let mut settings = Settings::new("/nowhere");
            settings.use_subnet(Ipv4Addr::new(a, b, 0, 0));
            assert!(seen.insert(settings.uid_base), "{a}.{b} shares accounts");
        }
        for (a, b) in [(11, 118), (172, 118), (223, 255), (136, 184), (1, 1)] {
            let mut settings = Settings::new("/nowhere");
            settings.use_subnet(Ipv4Addr::new(a, b, 0, 0));
            assert!(seen.insert(settings.uid_base), "{a}.{b} shares accounts");
            assert!(settings.uid_base.checked_add(UIDS_PER_SUBNET).is_some());
        }
        // As it always was: what runs keeps its account.
        let mut settings = Settings::new("/nowhere");
        settings.use_subnet(Ipv4Addr::new(10, 119, 0, 0));
        assert_eq!(settings.uid_base, 1_880_000_000 + 120 * UIDS_PER_SUBNET);
    }
}
