//! What is told about a sandbox.

use std::net::Ipv4Addr;

use api::boxes::{BoxBlocker, BoxFreeze, BoxLife, BoxLimits, BoxStatus};
use api::drive::{AttachVolume, SandboxDrive};
use api::host::Known;
use api::sandbox::{AwakeReason, Sandbox, SleepTier, Status};
use lifecycle::{Activity, BoxPolicy, Death, Phase, SleepCause, Start, Time};

use super::story;
use crate::clock::{self, rfc3339, unix_ms_of};
use crate::manifest::{DriveKind, Manifest};

/// The public view of a sandbox at this moment.
pub(crate) fn known(
    core: &lifecycle::Sandbox,
    manifest: &Manifest,
    address: Ipv4Addr,
    life: u64,
    failure: Option<&str>,
) -> Known {
    let now = clock::now();
    let time = |time: Time| rfc3339(unix_ms_of(time));
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
            // One that is being removed is in no list; one that could not be removed is of no use.
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
        will_wake_at: core.will_wake_at().map(time),
        since: rfc3339(manifest.since.unix_ms_now()),
        // The task adds it.
        woke_because: None,
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
        boxed: manifest.policy.boxed.is_some().then(|| box_life(core, manifest, now)),
        note: manifest.note.clone(),
        // One that another host has taken over is put aside, not deleted, and its row stays.
        going: core.is_going() && manifest.moved_to.is_none(),
    }
}

/// What is told of a box.
fn box_life(core: &lifecycle::Sandbox, manifest: &Manifest, now: Time) -> BoxLife {
    let freeze = core.freeze(now);
    let blocked_by = freeze.blocked_by.iter().map(|blocked| BoxBlocker {
        kind: blocked.by.as_str().to_owned(),
        until: blocked.until.map(|until| rfc3339(unix_ms_of(until))),
    });
    BoxLife {
        status: box_status(core),
        freeze: BoxFreeze {
            at: freeze.at.map(|at| rfc3339(unix_ms_of(at))),
            blocked_by: blocked_by.collect(),
        },
        last_used_unix_ms: unix_ms_of(core.uses().last_used),
        rests_since_unix_ms: core.rests_since().map(unix_ms_of),
        stops_at_unix_ms: core.stops_at(now).map(unix_ms_of),
        stopped_unix_ms: core.stopped().map(|stopped| unix_ms_of(stopped.at)),
        restorable_until_unix_ms: core.restorable_until().map(unix_ms_of),
        reason: box_reason(core),
        boots: manifest.boots,
    }
}

fn box_status(core: &lifecycle::Sandbox) -> BoxStatus {
    match core.phase() {
        Phase::Deleting { .. } => BoxStatus::Stopping,
        Phase::Deleted => BoxStatus::Terminated,
        _ if core.stopped().is_some() => BoxStatus::Terminated,
        Phase::Starting { how: Start::Create, .. } => BoxStatus::Claimed,
        Phase::Failed { .. } => BoxStatus::Interrupted,
        _ if core.goes_on(Activity::Takeover) => BoxStatus::Takeover,
        // Powered off it stays ready (B44): the next acting call boots it.
        Phase::Starting { how: Start::Boot, .. }
        | Phase::Running { .. }
        | Phase::CapturingAwake { .. }
        | Phase::Suspending { .. }
        | Phase::Off { .. } => BoxStatus::Ready,
        Phase::Asleep { .. }
        | Phase::Demoting { .. }
        | Phase::CapturingAsleep { .. }
        | Phase::Waking { .. } => BoxStatus::Frozen,
    }
}

fn box_reason(core: &lifecycle::Sandbox) -> Option<String> {
    if let Some(stopped) = core.stopped() {
        return Some(story::stopped(stopped.cause, stopped.unused_ms));
    }
    if let Some(code) = core.failure_code() {
        return Some(match code {
            lifecycle::FailureCode::MachineLost => {
                "its machine was lost, and the processes that ran in it; it boots from its disk"
                    .to_owned()
            }
            code => format!("it failed ({})", code.as_str()),
        });
    }
    if let Some(death) = core.last_death() {
        return Some(death_reason(death));
    }
    asleep_reason(core).map(str::to_owned)
}

/// Why it sleeps, where that is not for want of use.
fn asleep_reason(core: &lifecycle::Sandbox) -> Option<&'static str> {
    if core.status() != lifecycle::Status::Sleeping {
        return None;
    }
    if core.is_withheld() {
        return Some(
            "a limit on spending is reached: it stays frozen and keeps everything until the limit is raised or the month is over",
        );
    }
    match core.last_sleep()?.cause {
        SleepCause::Shutdown | SleepCause::Drain => Some(
            "its host was emptied, as before it goes down; the next call that acts on it thaws it",
        ),
        SleepCause::Asked => {
            Some("somebody put it to sleep by hand; the next call that acts on it thaws it")
        }
        SleepCause::Spending => {
            Some("a limit on spending was reached; the next call that acts on it thaws it")
        }
        SleepCause::Idle | SleepCause::HoldCap | SleepCause::IdleTimeout => None,
    }
}

fn death_reason(death: Death) -> String {
    match death {
        Death::Poweroff => {
            "it powered itself off: its processes are lost, what was on its disk is there"
                .to_owned()
        }
        Death::Reboot => {
            "it rebooted itself: its processes are lost, what was on its disk is there".to_owned()
        }
        Death::Panic | Death::Killed => {
            "its machine ended: its processes are lost, what was on its disk is there".to_owned()
        }
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
    if let Some(limits) = &policy.boxed {
        return lifecycle::Policy::of_box(box_policy(limits));
    }
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
        boxed: None,
    }
}

fn box_policy(limits: &BoxLimits) -> BoxPolicy {
    BoxPolicy {
        freeze_after_ms: limits.freeze_after_ms,
        url_window_ms: limits.url_window_ms,
        background_window_ms: limits.background_window_ms,
        recording_window_ms: limits.recording_window_ms,
        stop_after_ms: limits.stop_after_ms,
        idle_timeout_ms: limits.idle_timeout_ms,
        keep_copy_ms: limits.keep_copy_ms,
    }
}
