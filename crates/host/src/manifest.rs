//! What a sandbox is and how it is, durable: `manifest.json` in its folder.
//!
//! Each sandbox's manifest is written by its own task alone, in one piece: a temporary file, synced, renamed over the old
//! one, the folder synced. The rename *is* the moment at which something is true. From the manifests and the living QEMU
//! processes alone a new daemon knows everything (see [`recovery`](crate::recovery)).
//!
//! # Invariants
//!
//! 1. `Sleeping` on disk is written only when memory, disk and device state have been synced.
//! 2. `Running` is written durably before a guest may run, because from then on its memory file changes. There is no
//!    older memory to go back to: a `Running` sandbox without a living QEMU has lost what ran, and says so (S24).

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use api::SandboxId;
use api::boxes::{BoxLimits, Wiring};
use api::sandbox::{PolicyPatch, SLEEP_AFTER_SECONDS_DEFAULT};
use lifecycle::StopCause;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use vmm::files::FileError;

use crate::clock::Moment;
use crate::network::asleep::AtRest;
use crate::usage::Used;

/// The format this build writes. It reads this one alone so far; a newer one is refused, not guessed at.
pub const FORMAT: u32 = 1;

/// A manifest larger than this is damage: names, labels and environment are bounded by the interface.
const BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Everything durable about a sandbox but its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Its id: also its folder's name.
    pub id: SandboxId,
    /// Its name; the catalogue sees to it that names are unique.
    pub name: String,
    /// Its place in the subnet, and among user ids.
    pub slot: u32,
    /// Ownership count of the catalogue.
    pub epoch: i64,
    /// Secret part of its URLs.
    pub link_key: String,
    /// Image name it was made from.
    pub image: String,
    /// That image's digest.
    pub image_digest: String,
    /// Virtual processors.
    pub cpus: u32,
    /// MiB.
    pub memory_mib: u32,
    /// Its drives, by their places in the machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drives: Vec<DriveUse>,
    /// Environment of every command.
    pub env: BTreeMap<String, String>,
    /// Free labels.
    pub labels: BTreeMap<String, String>,
    /// When and how it sleeps.
    pub policy: Policy,
    /// When it was made.
    pub created_at: Moment,
    /// What it is a fork of.
    pub forked_from: Option<SandboxId>,
    /// Goes up at each wake and boot.
    pub life: u64,
    /// It is a copy that has not yet been told who it is: its next wake gives it address, names and entropy of its own.
    pub needs_identity: bool,
    /// What the machine is that runs or sleeps in memory: a later daemon needs it to save it.
    pub machine: Option<vmm::Fingerprint>,
    /// Why it was woken last.
    pub woke_because: Option<String>,
    /// How its machine ended last, where that cost what ran (`machine_lost`, `reboot`, …); cleared by nothing but a
    /// newer end.
    pub last_end: Option<String>,
    /// How often it was booted from its disk after its machine had ended by itself.
    #[serde(default)]
    pub boots: u64,
    /// The host that has taken it over: here it runs no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved_to: Option<String>,
    /// What it has used up to the last change of this manifest.
    #[serde(default)]
    pub used: Used,
    /// Of a box: how it has been used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub box_use: Option<BoxUse>,
    /// Of a box: how its names are wired.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wiring: Option<Wiring>,
    /// What the control plane has had kept with it ([`api::host::Change::note`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// The IPv6 address that it has; `None`: none, or its agent is older than these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<std::net::Ipv6Addr>,
    /// What was open on its network when it fell asleep last; `None`: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) network_at_rest: Option<AtRest>,
    /// What it does.
    pub state: State,
    /// Since when.
    pub since: Moment,
}

/// A drive of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveUse {
    /// Its name.
    pub name: String,
    /// Where it is mounted in the guest.
    pub path: String,
    /// The guest cannot write it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// Whose it is.
    pub kind: DriveKind,
}

/// Whose a sandbox's drive is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriveKind {
    /// A drive with a life of its own, which no other sandbox has meanwhile.
    Drive,
    /// A copy among the sandbox's own files ([`Files::drive`](crate::settings::Files::drive)).
    Copy,
    /// A volume, which many have and nobody writes.
    Volume,
}

impl Manifest {
    /// What its living machine is, or the one that must go on from its saved memory.
    pub(crate) fn machine_needed(&self) -> Option<vmm::Fingerprint> {
        match &self.state {
            State::SleepingOnDisk(saved) | State::Failed { saved: Some(saved), .. } => {
                Some(saved.machine.clone())
            }
            _ => self.machine.clone(),
        }
    }

    /// The drives as those of a copy of this sandbox: copies.
    pub(crate) fn copied_drives(&self) -> Vec<DriveUse> {
        let copy = |drive: &DriveUse| match drive.kind {
            DriveKind::Drive | DriveKind::Copy => {
                DriveUse { kind: DriveKind::Copy, ..drive.clone() }
            }
            DriveKind::Volume => drive.clone(),
        };
        self.drives.iter().map(copy).collect()
    }

    /// The places of its drives, without those of volumes: what a copy of it has to have too.
    pub(crate) fn copied_places(&self) -> Vec<usize> {
        places_of(&self.drives)
    }

    /// Whether it has volumes.
    pub(crate) fn has_volumes(&self) -> bool {
        self.drives.iter().any(|drive| drive.kind == DriveKind::Volume)
    }
}

/// The places of drives, without those of volumes.
pub(crate) fn places_of(drives: &[DriveUse]) -> Vec<usize> {
    let drives = drives.iter().enumerate();
    drives.filter(|(_, drive)| drive.kind != DriveKind::Volume).map(|(place, _)| place).collect()
}

/// What a sandbox does, as far as a new daemon must know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum State {
    /// Its files are being made: undone by a new daemon.
    Creating,
    /// Its guest runs, or is about to: see invariant 2.
    Running,
    /// Its QEMU process is stopped.
    SleepingInMemory {
        /// When it stopped.
        slept_at: Moment,
        /// When its next timer is due, on the same clocks.
        timer_due: Option<Moment>,
    },
    /// Device state and memory are on disk and no process is needed.
    SleepingOnDisk(Saved),
    /// Its machine ended; the next need boots it from disk.
    Off {
        /// `reboot`, `poweroff`, `panic`, `machine_lost`.
        code: String,
    },
    /// It could not be started.
    Failed {
        /// For programs.
        code: String,
        /// For people.
        text: String,
        /// Its memory, if it is still stored: it could not be woken.
        saved: Option<Saved>,
    },
    /// Being removed: finished by a new daemon.
    Deleting,
}

/// A published sleep on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// When the guest stopped.
    pub slept_at: Moment,
    /// When its next timer is due, on the same clocks.
    pub timer_due: Option<Moment>,
    /// Size and digest of the state file.
    pub state: vmm::state::StateMark,
    /// What must be the same to load it: QEMU, firmware, processor model, devices, TSC rate.
    pub machine: vmm::Fingerprint,
    /// Version of the guest agent in the memory.
    pub guest_version: String,
}

/// The settings of sleep, complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// `None`: never by itself.
    pub sleep_after_seconds: Option<u64>,
    /// Then on to disk; 0: straight to disk.
    pub memory_tier_seconds: u64,
    /// Ports whose upgraded connections keep it awake.
    pub awake_ports: Vec<u16>,
    /// Seconds without a byte after which a connection is closed; `None`: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection_idle_seconds: Option<u64>,
    /// How long holds alone keep it awake.
    pub sleep_hold_max_ms: u64,
    /// Notice before an idle sleep.
    pub sleep_notice_ms: Option<u64>,
    /// How long it may sleep before it is deleted; `None`: the project's setting.
    #[serde(default)]
    pub delete_after_idle_ms: Option<u64>,
    /// When it is deleted whatever it does, RFC 3339.
    #[serde(default)]
    pub expires_at: Option<String>,
    /// While awake it is kept in the object store each so many seconds; `None`: it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_seconds: Option<u64>,
    /// It is a box, and follows these settings instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boxed: Option<BoxLimits>,
}

/// How a box has been used (B3-B5), and whether it was stopped for good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoxUse {
    /// The latest of its uses.
    pub last_used: Moment,
    /// The latest request through one of its URLs.
    pub url_at: Option<Moment>,
    /// When and why it was stopped for good.
    pub stopped: Option<BoxStopped>,
}

/// That a box was stopped for good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoxStopped {
    /// When.
    pub at: Moment,
    /// Because `idleTimeoutMin` was over, not for having been frozen for long.
    pub idle_timeout: bool,
    /// How long it had not been used, in milliseconds.
    pub unused_ms: u64,
}

impl BoxUse {
    /// As the state machine knows it.
    pub(crate) fn of(uses: &lifecycle::Uses) -> Self {
        Self {
            last_used: Moment::at(uses.last_used),
            url_at: uses.url_at.map(Moment::at),
            stopped: uses.stopped.map(|stopped| BoxStopped {
                at: Moment::at(stopped.at),
                idle_timeout: stopped.cause == StopCause::IdleTimeout,
                unused_ms: stopped.unused_ms,
            }),
        }
    }

    /// For the state machine.
    pub(crate) fn uses(&self) -> lifecycle::Uses {
        lifecycle::Uses {
            last_used: self.last_used.time(),
            url_at: self.url_at.as_ref().map(Moment::time),
            stopped: self.stopped.as_ref().map(|stopped| lifecycle::Stopped {
                at: stopped.at.time(),
                cause: if stopped.idle_timeout {
                    StopCause::IdleTimeout
                } else {
                    StopCause::FrozenUnused
                },
                unused_ms: stopped.unused_ms,
            }),
        }
    }
}

impl Policy {
    /// Defaults, with the host's setting for the memory tier.
    pub fn new(memory_tier_seconds: u64) -> Self {
        Self {
            sleep_after_seconds: Some(SLEEP_AFTER_SECONDS_DEFAULT),
            memory_tier_seconds,
            awake_ports: Vec::new(),
            connection_idle_seconds: None,
            sleep_hold_max_ms: 30_000,
            sleep_notice_ms: None,
            delete_after_idle_ms: None,
            expires_at: None,
            checkpoint_seconds: None,
            boxed: None,
        }
    }

    /// Changes what the patch names.
    pub fn apply(&mut self, patch: &PolicyPatch) {
        if let Some(seconds) = patch.sleep_after_seconds {
            self.sleep_after_seconds = seconds;
        }
        if let Some(seconds) = patch.memory_tier_seconds {
            self.memory_tier_seconds = seconds;
        }
        if let Some(ports) = &patch.awake_ports {
            self.awake_ports.clone_from(ports);
        }
        if let Some(seconds) = patch.connection_idle_seconds {
            self.connection_idle_seconds = seconds;
        }
        if let Some(ms) = patch.sleep_hold_max_ms {
            self.sleep_hold_max_ms = ms;
        }
        if let Some(ms) = patch.sleep_notice_ms {
            self.sleep_notice_ms = ms;
        }
        if let Some(ms) = patch.delete_after_idle_ms {
            self.delete_after_idle_ms = ms;
        }
        if let Some(at) = &patch.expires_at {
            self.expires_at.clone_from(at);
        }
        if let Some(checkpoint) = patch.checkpoint {
            self.checkpoint_seconds = checkpoint.map(|checkpoint| checkpoint.every_seconds);
        }
    }
}

/// Why a manifest could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// There is none.
    #[error("no manifest")]
    Missing,
    /// The file system refused.
    #[error("read the manifest")]
    Read(#[source] io::Error),
    /// Written by a newer build.
    #[error("the manifest has format {found}, this build reads {FORMAT}")]
    TooNew {
        /// What it says.
        found: u64,
    },
    /// It is not what was written.
    #[error("the manifest is damaged: {0}")]
    Damaged(String),
}

/// Reads a manifest and verifies it.
pub fn read(path: &Path) -> Result<Manifest, ManifestError> {
    let length = match std::fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(ManifestError::Missing);
        }
        Err(error) => return Err(ManifestError::Read(error)),
    };
    if length > BYTES_MAX {
        return Err(ManifestError::Damaged(format!("{length} bytes long")));
    }
    let bytes = std::fs::read(path).map_err(ManifestError::Read)?;
    let mut envelope: Value = serde_json::from_slice(&bytes)
        .map_err(|error| ManifestError::Damaged(error.to_string()))?;
    let format = envelope["format"]
        .as_u64()
        .ok_or_else(|| ManifestError::Damaged("no format".to_owned()))?;
    if format != u64::from(FORMAT) {
        return Err(ManifestError::TooNew { found: format });
    }
    let body = envelope["sandbox"].take();
    if envelope["sha256"].as_str() != Some(&checksum(&body)) {
        return Err(ManifestError::Damaged("checksum differs".to_owned()));
    }
    serde_json::from_value(body).map_err(|error| ManifestError::Damaged(error.to_string()))
}

/// Publishes a manifest durably; it has been published when this returns, and will outlast a power cut. Blocking.
pub fn write(path: &Path, manifest: &Manifest) -> Result<(), FileError> {
    // Maps with text keys and plain values always have a JSON form.
    let body = serde_json::to_value(manifest).expect("a manifest has a JSON form");
    let envelope =
        serde_json::json!({ "format": FORMAT, "sha256": checksum(&body), "sandbox": body });
    vmm::files::replace(path, format!("{envelope:#}\n").as_bytes())
}

/// Hex SHA-256 of a value as compact JSON.
fn checksum(value: &Value) -> String {
    hex(&Sha256::digest(value.to_string().as_bytes()))
}

/// Lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn sample() -> Manifest {
        Manifest {
            id: SandboxId::from_random([3; 12]),
            name: "web".to_owned(),
            slot: 2,
            epoch: 1,
            link_key: "k".to_owned(),
            image: "default".to_owned(),
            image_digest: "d".to_owned(),
            cpus: 1,
            memory_mib: 512,
            drives: Vec::new(),
            env: BTreeMap::new(),
            labels: BTreeMap::new(),
            policy: Policy::new(300),
            created_at: Moment::now(),
            forked_from: None,
            life: 1,
            needs_identity: false,
            machine: None,
            woke_because: None,
            last_end: None,
            boots: 0,
            moved_to: None,
            used: Used::default(),
            box_use: None,
            note: None,
            wiring: None,
            ipv6: None,
            network_at_rest: None,
            state: State::Off { code: "poweroff".to_owned() },
            since: Moment::now(),
        }
    }

    #[test]
    fn what_was_written_is_read_and_damage_is_refused() {
        let dir = tempfile::tempdir().expect("temp folder");
        let path = dir.path().join("manifest.json");
        assert!(matches!(read(&path), Err(ManifestError::Missing)));
        write(&path, &sample()).expect("written");
        assert_eq!(read(&path).expect("read").name, "web");
        let text = std::fs::read_to_string(&path).expect("text");
        std::fs::write(&path, text.replace("\"web\"", "\"wed\"")).expect("damaged");
        assert!(matches!(read(&path), Err(ManifestError::Damaged(_))));
        std::fs::write(&path, text.replace("\"format\": 1", "\"format\": 2")).expect("newer");
        assert!(matches!(read(&path), Err(ManifestError::TooNew { found: 2 })));
        std::fs::write(&path, &text[..text.len() / 2]).expect("torn");
        assert!(matches!(read(&path), Err(ManifestError::Damaged(_))));
    }
}
