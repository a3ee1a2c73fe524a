//! What is told about a sandbox.

use std::net::Ipv4Addr;

use api::drive::{AttachVolume, SandboxDrive};
use api::host::Known;
use api::sandbox::{AwakeReason, Sandbox, SleepTier, Status};
use lifecycle::Time;

use crate::clock::{self, boot_to_unix_ms, rfc3339};
use crate::manifest::{DriveKind, Manifest};

/// The public view of a sandbox at this moment.
pub(crate) fn known(
    core: &lifecycle::Sandbox,
    manifest: &Manifest,
    address: Ipv4Addr,
    life: u64,
    failure: Option<&str>,
) -> Known {
    let now = Time::from_millis(clock::since_boot_ms());
    let time = |time: Time| rfc3339(boot_to_unix_ms(time.as_millis()));
    let awake_because = core.awake_because(now).into_iter().map(|reason| AwakeReason {
        reason: reason.reason.as_str().to_owned(),
        text: reason.text(),
        until: reason.until.map(time),
    });
    let sandbox = Sandbox {
        id: manifest.id.clone(),
        name: manifest.name.clone(),
        status: match core.status() {
            lifecycle::Status::Starting => Status::Starting,
            lifecycle::Status::Running => Status::Running,
            lifecycle::Status::Sleeping => Status::Sleeping,
            // One that is being removed is on its way out of every list; until then it is of no use.
            lifecycle::Status::Failed
            | lifecycle::Status::Deleting
            | lifecycle::Status::Deleted => Status::Failed,
        },
        sleep_tier: core.sleep_tier().map(|tier| match tier {
            lifecycle::SleepTier::Memory => SleepTier::Memory,
            lifecycle::SleepTier::Disk => SleepTier::Disk,
            lifecycle::SleepTier::Store => SleepTier::Store,
            lifecycle::SleepTier::Off => SleepTier::Off,
        }),
        awake_because: awake_because.collect(),
        // The task adds it, where there is any.
        waits_for: None,
        will_sleep_at: core.will_sleep_at(now).map(time),
        since: rfc3339(manifest.since.unix_ms_now()),
        woke_because: manifest.woke_because.clone(),
        failure: core.failure_code().and(failure).map(str::to_owned),
        failure_code: core.failure_code().map(|code| code.as_str().to_owned()),
        image: manifest.image.clone(),
        cpus: manifest.cpus,
        memory_mib: manifest.memory_mib,
        address: address.to_string(),
        ipv6_address: manifest.ipv6.map(|address| address.to_string()),
        life,
        created_at: rfc3339(manifest.created_at.unix_ms),
        forked_from: manifest.forked_from.clone(),
        drives: drives(manifest),
        volumes: volumes(manifest),
        env: manifest.env.clone(),
        labels: manifest.labels.clone(),
        sleep_after_seconds: manifest.policy.sleep_after_seconds,
        memory_tier_seconds: manifest.policy.memory_tier_seconds,
        awake_ports: manifest.policy.awake_ports.clone(),
        awake_connections: core.calls(lifecycle::CallKind::AwakeConnection),
        connection_idle_seconds: manifest.policy.connection_idle_seconds,
        sleep_hold_max_ms: manifest.policy.sleep_hold_max_ms,
        sleep_notice_ms: manifest.policy.sleep_notice_ms,
        delete_after_idle_ms: manifest.policy.delete_after_idle_ms,
        expires_at: manifest.policy.expires_at.clone(),
        // The task adds it, where there is any.
        checkpoint: None,
    };
    Known {
        sandbox,
        link_key: manifest.link_key.clone(),
        epoch: manifest.epoch,
        asleep_ms: asleep_ms(core, manifest),
    }
}

fn drives(manifest: &Manifest) -> Vec<SandboxDrive> {
    let drives = manifest.drives.iter().filter(|drive| drive.kind != DriveKind::Volume);
    let drives = drives.map(|drive| SandboxDrive {
        name: drive.name.clone(),
        path: drive.path.clone(),
        read_only: drive.read_only,
        copy: drive.kind == DriveKind::Copy,
    });
    drives.collect()
}

fn volumes(manifest: &Manifest) -> Vec<AttachVolume> {
    let volumes = manifest.drives.iter().filter(|drive| drive.kind == DriveKind::Volume);
    let volumes =
        volumes.map(|volume| AttachVolume { name: volume.name.clone(), path: volume.path.clone() });
    volumes.collect()
}

/// How long it has been asleep without a break.
pub(crate) fn asleep_ms(core: &lifecycle::Sandbox, manifest: &Manifest) -> Option<u64> {
    (core.status() == lifecycle::Status::Sleeping)
        .then(|| u64::try_from(manifest.since.elapsed().as_millis()).unwrap_or(u64::MAX))
}

/// The settings as the state machine knows them.
pub(crate) fn policy(policy: &crate::manifest::Policy) -> lifecycle::Policy {
    lifecycle::Policy {
        sleep_after_ms: policy.sleep_after_seconds.map(|seconds| seconds.saturating_mul(1000)),
        tiers: match policy.memory_tier_seconds {
            0 => lifecycle::Tiers::Disk,
            seconds => {
                lifecycle::Tiers::MemoryThenDisk { memory_tier_ms: seconds.saturating_mul(1000) }
            }
        },
        awake_ports: !policy.awake_ports.is_empty(),
        sleep_hold_max_ms: policy.sleep_hold_max_ms,
        sleep_notice_ms: policy.sleep_notice_ms,
    }
}
