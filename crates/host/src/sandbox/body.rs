//! What a sandbox has in the world: its machine, its tap, its link to the guest agent.
//!
//! There is one body per sandbox, and it is with whoever works on it: at rest with the sandbox's task, during an order with
//! the order. Nobody shares it, so nothing about it is locked.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use api::SandboxId;
use vmm::{Account, Disk, Drive, DriveAccess, Machine, MachineSpec, Network, Outlets};

use crate::budget::Seat;
use crate::ground::Ground;
use crate::guest::{GuestLink, LinkError};
use crate::manifest::{DriveKind, DriveUse, Manifest};
use crate::network::GATEWAY_MAC;
use crate::record::Record;
use crate::settings::Files;
use crate::slots::Slot;
use crate::tap::Port;

/// Most threads of one QEMU: vcpus, workers of its block layer, the main loop.
const QEMU_THREADS_MAX: u64 = 96;

/// See the module.
#[derive(Debug)]
pub(crate) struct Body {
    pub(crate) files: Files,
    pub(crate) slot: Slot,
    /// The living machine: running, or stopped in memory.
    pub(crate) machine: Option<Machine>,
    /// Its room in memory, as long as there is a machine.
    pub(crate) seat: Option<Seat>,
    /// Its end of the network. `None` only before the first start and after the end.
    pub(crate) port: Option<Port>,
    pub(crate) link: GuestLink,
    /// The guest of a ready copy knows its addresses already, though not yet who it is.
    pub(crate) network_told: bool,
}

impl Body {
    /// A body without a machine.
    pub(crate) fn new(files: Files, slot: Slot) -> Result<Self, LinkError> {
        Ok(Self {
            files,
            slot,
            machine: None,
            seat: None,
            port: None,
            link: GuestLink::random()?,
            network_told: false,
        })
    }

    /// Makes the tap where there is none, or none any more.
    pub(crate) fn ensure_port(&mut self, ground: &Ground) -> std::io::Result<&mut Port> {
        match &mut self.port {
            Some(port) => port.ensure()?,
            None => self.port = Some(Port::open(ground.subnet, self.slot.number())?),
        }
        self.port.as_mut().ok_or_else(|| std::io::Error::other("no tap"))
    }

    /// Whether there is a machine that has not ended.
    pub(crate) fn is_alive(&self) -> bool {
        self.machine.as_ref().is_some_and(|machine| machine.exit_watch().exited_yet().is_none())
    }

    /// Gives back to the tap what came while the guest slept; nobody but the guest reads there from now on.
    pub(crate) fn give_back_held(&mut self) {
        if let Some(port) = &mut self.port {
            port.give_back();
        }
    }

    /// Ends the machine if there is one, and all that waits on its guest.
    pub(crate) async fn end_machine(&mut self, why: &str) -> Result<(), vmm::machine::OrderError> {
        self.link.lost(why);
        if let Some(mut machine) = self.machine.take() {
            machine.kill().await?;
        }
        self.seat = None;
        Ok(())
    }
}

/// Makes the folder of a sandbox; guests' accounts may pass through but not look around.
pub(crate) fn make_folder(files: &Files) -> std::io::Result<()> {
    std::fs::create_dir_all(files.dir())?;
    std::fs::set_permissions(files.dir(), Permissions::from_mode(0o711))
}

/// What a machine has besides its files and its network.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) cpus: u32,
    pub(crate) memory_mib: u32,
    /// `None`: it has no places for drives.
    pub(crate) drives: Option<Vec<Drive>>,
}

impl Shape {
    /// Of the machine of a sandbox with these files.
    pub(crate) fn of(ground: &Ground, manifest: &Manifest, files: &Files) -> Self {
        let drives = manifest.drives.iter().enumerate().map(|(place, drive)| Drive {
            image: drive_image(ground, files, place, drive),
            access: match (drive.kind, drive.read_only) {
                (DriveKind::Volume, _) => DriveAccess::Shared,
                (_, true) => DriveAccess::Read,
                (_, false) => DriveAccess::Write,
            },
        });
        Self {
            cpus: manifest.cpus,
            memory_mib: manifest.memory_mib,
            drives: (!manifest.drives.is_empty()).then(|| drives.collect()),
        }
    }
}

/// Where the disk of a sandbox's drive is.
pub(crate) fn drive_image(
    ground: &Ground,
    files: &Files,
    place: usize,
    drive: &DriveUse,
) -> PathBuf {
    match drive.kind {
        DriveKind::Drive => ground.drives.disk(&drive.name),
        DriveKind::Copy => files.drive(place),
        DriveKind::Volume => ground.volumes.disk(&drive.name),
    }
}

/// The disks of a sandbox's drives and their places, without volumes.
pub(crate) fn drive_images(
    ground: &Ground,
    manifest: &Manifest,
    files: &Files,
) -> Vec<(usize, PathBuf)> {
    let image = |place| drive_image(ground, files, place, &manifest.drives[place]);
    manifest.copied_places().into_iter().map(|place| (place, image(place))).collect()
}

/// The machine of a sandbox.
pub(crate) fn machine_spec(
    ground: &Ground,
    id: &SandboxId,
    files: &Files,
    slot: u32,
    shape: Shape,
    root: PathBuf,
    tap: Arc<std::os::fd::OwnedFd>,
) -> MachineSpec {
    let uid = ground.settings.uid_base + slot;
    MachineSpec {
        label: format!("dormouse-{id}"),
        cpus: shape.cpus,
        memory_mib: shape.memory_mib,
        memory: files.memory(),
        disk: Some(Disk { overlay: files.disk(), base: root }),
        drives: shape.drives,
        network: Some(Network { tap, mac: ground.subnet.mac(slot) }),
        outlets: Outlets {
            sockets: files.dir().to_owned(),
            console: files.console(),
            log: files.qemu_log(),
        },
        account: Account { uid, gid: uid, threads_max: Some(QEMU_THREADS_MAX) },
    }
}

/// Who a guest shall be that has not been told yet (a copy, or one booted anew); `None`: it knows.
pub(crate) fn identity_owed(
    ground: &Ground,
    record: &Record,
    body: &Body,
) -> Result<Option<crate::guest::Identity>, getrandom::Error> {
    let (owed, name) = record.with(|manifest| (manifest.needs_identity, manifest.name.clone()));
    if !owed {
        return Ok(None);
    }
    let mut machine_id = [0; 16];
    getrandom::fill(&mut machine_id)?;
    let (subnet, slot) = (ground.subnet, body.slot.number());
    let network = (!body.network_told).then(|| crate::guest::Network {
        mac: subnet.mac(slot),
        address: subnet.address(slot).octets(),
        gateway: subnet.gateway().octets(),
        gateway_mac: GATEWAY_MAC,
        nameservers: vec![subnet.gateway().octets()],
    });
    Ok(Some(crate::guest::Identity { hostname: name, machine_id, network }))
}

/// The IPv6 address that a guest is still to be told: it knows none, another, or loses it with a new identity.
pub(crate) fn ipv6_owed(
    ground: &Ground,
    record: &Record,
    body: &Body,
) -> Option<crate::guest::Ipv6Network> {
    let (anew, told) = record.with(|manifest| (manifest.needs_identity, manifest.ipv6));
    let anew = anew && !body.network_told;
    let address = ground.subnet.ipv6(body.slot.number())?;
    let gateway = ground.subnet.gateway_ipv6()?;
    (anew || told != Some(address)).then(|| crate::guest::Ipv6Network {
        address: address.octets(),
        gateway: gateway.octets(),
        gateway_mac: GATEWAY_MAC,
    })
}

/// The drives that a guest is still to be told to mount: all of them, where it is new or a copy.
pub(crate) fn mounts_owed(record: &Record) -> Vec<crate::guest::Mount> {
    record.with(|manifest| {
        let owed = manifest.drives.iter().enumerate().filter(|_| manifest.needs_identity);
        owed.map(|(place, drive)| crate::guest::Mount {
            serial: vmm::spec::drive_serial(place),
            path: drive.path.clone().into_bytes(),
            read_only: drive.read_only,
        })
        .collect()
    })
}

/// What a guest was told of who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// Names and addresses; all earlier addresses are gone.
    WithNetwork,
    /// Names alone.
    NamesAlone,
}

impl Told {
    pub(crate) fn of(identity: &crate::guest::Identity) -> Self {
        if identity.network.is_some() { Self::WithNetwork } else { Self::NamesAlone }
    }
}

/// Notes what a guest was told: who it is, and the address that it has taken.
pub(crate) fn note_told(
    manifest: &mut crate::manifest::Manifest,
    identity: Option<Told>,
    ipv6: Option<crate::guest::Ipv6Network>,
    woke: &crate::guest::Woke,
) {
    let taken = woke.steps.iter().any(|report| {
        report.step == crate::guest::Step::Ipv6 && report.outcome == crate::guest::StepOutcome::Done
    });
    if let Some(told) = identity {
        manifest.needs_identity = false;
        if told == Told::WithNetwork {
            manifest.ipv6 = None;
        }
    }
    if let Some(ipv6) = ipv6.filter(|_| taken) {
        manifest.ipv6 = Some(ipv6.address.into());
    }
}
