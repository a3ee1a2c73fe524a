//! Sandboxes: what is asked for and what is told about one.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::SandboxId;
use crate::checkpoint::{CheckpointSetting, CheckpointStatus};
use crate::drive::{AttachDrive, AttachVolume, SandboxDrive};

/// Seconds of quiet after which a sandbox sleeps, unless it says otherwise.
pub const SLEEP_AFTER_SECONDS_DEFAULT: u64 = 30;
/// The longest quiet time that may be asked for: a year.
pub const SLEEP_AFTER_SECONDS_MAX: u64 = 31_536_000;
/// Memory of a sandbox, MiB, unless it says otherwise.
pub const MEMORY_MIB_DEFAULT: u32 = 512;
/// Most ports that may hold a sandbox awake.
pub const AWAKE_PORTS_MAX: usize = 16;
/// Least and most memory of a sandbox, MiB.
pub const MEMORY_MIB_RANGE: std::ops::RangeInclusive<u32> = 256..=16_384;
/// Least and most virtual processors.
pub const CPUS_RANGE: std::ops::RangeInclusive<u32> = 1..=8;
/// Least and most seconds of silence after which a connection may be closed.
pub const CONNECTION_IDLE_SECONDS_RANGE: std::ops::RangeInclusive<u64> = 1..=86_400;
/// The longest that holds alone may keep a sandbox awake, milliseconds.
pub const SLEEP_HOLD_MAX_MS_MAX: u64 = 900_000;
/// The longest that a sandbox may sleep before it is deleted for it: ten years, milliseconds.
pub const DELETE_AFTER_IDLE_MS_MAX: u64 = 315_360_000_000;
/// The longest notice before a sleep, milliseconds.
pub const SLEEP_NOTICE_MS_MAX: u64 = 60_000;
/// Most characters of a name: it is a DNS label in the guest's host name.
pub const NAME_CHARS_MAX: usize = 63;
/// Most labels of a sandbox.
pub const LABELS_MAX: usize = 64;
/// Most bytes of an environment, names and values together: the kernel's limit for one `exec` is 2 MiB with the
/// arguments.
pub const ENV_BYTES_MAX: usize = 512 * 1024;

/// The settings of sleep stand in the bodies that set them, one beside the other: `flatten` would let unknown fields
/// through. One list makes them all, so that they cannot come apart.
macro_rules! with_policy {
    ($(#[$outer:meta])* pub struct $name:ident { $($own:tt)* }) => {
        $(#[$outer])*
        pub struct $name {
            $($own)*
            /// Seconds of quiet before it sleeps (1-31536000); null: never. Default 30.
            #[serde(default, deserialize_with = "some_option", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<u64>, minimum = 1, maximum = 31_536_000, example = 30)]
            pub sleep_after_seconds: Option<Option<u64>>,
            /// How long it sleeps in memory before it moves to disk, seconds (0: straight to disk; at most 31536000);
            /// default the host's setting.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(maximum = 31_536_000)]
            pub memory_tier_seconds: Option<u64>,
            /// Ports whose upgraded connections keep it awake, at most 16.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(max_items = 16)]
            pub awake_ports: Option<Vec<u16>>,
            /// After so many seconds without a byte in either direction a connection through a link or forward is closed
            /// (1-86400); null: never.
            #[serde(default, deserialize_with = "some_option", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<u64>, minimum = 1, maximum = 86_400)]
            pub connection_idle_seconds: Option<Option<u64>>,
            /// How long holds alone may keep it awake, milliseconds (0-900000); default 30000.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(maximum = 900_000)]
            pub sleep_hold_max_ms: Option<u64>,
            /// How long before an idle sleep the holders are told, milliseconds (1-60000); null: not told.
            #[serde(default, deserialize_with = "some_option", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<u64>, minimum = 1, maximum = 60_000)]
            pub sleep_notice_ms: Option<Option<u64>>,
            /// How long it may sleep before it is deleted, milliseconds (1-315360000000); null: the project's setting.
            #[serde(default, deserialize_with = "some_option", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<u64>, minimum = 1, maximum = 315_360_000_000_i64)]
            pub delete_after_idle_ms: Option<Option<u64>>,
            /// When it is deleted whatever it does, RFC 3339; null: never.
            #[serde(default, deserialize_with = "some_option", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<String>, format = DateTime, example = "2030-01-31T18:00:00Z")]
            pub expires_at: Option<Option<String>>,
            /// Keep it in the object store while it is awake, so that another host can take it up; null: off (the default).
            #[serde(default, deserialize_with = "some_option", skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<CheckpointSetting>)]
            pub checkpoint: Option<Option<CheckpointSetting>>,
        }

        impl $name {
            /// The settings of sleep alone.
            pub fn policy(&self) -> PolicyPatch {
                PolicyPatch {
                    sleep_after_seconds: self.sleep_after_seconds,
                    memory_tier_seconds: self.memory_tier_seconds,
                    awake_ports: self.awake_ports.clone(),
                    connection_idle_seconds: self.connection_idle_seconds,
                    sleep_hold_max_ms: self.sleep_hold_max_ms,
                    sleep_notice_ms: self.sleep_notice_ms,
                    delete_after_idle_ms: self.delete_after_idle_ms,
                    expires_at: self.expires_at.clone(),
                    checkpoint: self.checkpoint,
                }
            }
        }
    };
}

with_policy! {
    /// What a new sandbox shall be. Everything may be left out.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
    #[serde(deny_unknown_fields)]
    #[schema(example = json!({"name": "web", "sleep_after_seconds": 5, "env": {"MODE": "demo"}}))]
    pub struct CreateSandbox {
        /// 1-63 characters of a-z, 0-9 and `-`, not at the ends; unique. Default: its id.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        #[schema(example = "web", min_length = 1, max_length = 63, pattern = "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
        pub name: Option<String>,
        /// Image to start from: `default` (the default), or the digest of one that was built.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        pub image: Option<String>,
        /// Snapshot to start from, with its memory and processes: instead of an image, and of the snapshot's own size.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        #[schema(example = "ready")]
        pub snapshot: Option<String>,
        /// Virtual processors, 1-8; default 1.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        #[schema(minimum = 1, maximum = 8)]
        pub cpus: Option<u32>,
        /// Memory, 256-16384 MiB; default 512.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        #[schema(minimum = 256, maximum = 16_384)]
        pub memory_mib: Option<u32>,
        /// Drives that it shall have, at most 8; no other sandbox has them then. They stay when it is deleted.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        #[schema(max_items = 8)]
        pub drives: Vec<AttachDrive>,
        /// Volumes that it shall have; with the drives at most 8. It has no checkpoints then.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        #[schema(max_items = 8)]
        pub volumes: Vec<AttachVolume>,
        /// Environment of every command. Fixed at the command's start.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        pub env: BTreeMap<String, String>,
        /// Free labels, at most 64.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        pub labels: BTreeMap<String, String>,
    }
}

with_policy! {
    /// Changes of a sandbox; what is absent stays as it is.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
    #[serde(deny_unknown_fields)]
    #[schema(example = json!({"sleep_after_seconds": 300}))]
    pub struct UpdateSandbox {
        /// A new name.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        #[schema(min_length = 1, max_length = 63, pattern = "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
        pub name: Option<String>,
        /// Replaces all labels.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        pub labels: Option<BTreeMap<String, String>>,
    }
}

/// The settings of sleep, as a host is told them; absent ones stay as they are (at create: the defaults).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyPatch {
    /// Seconds of quiet before it sleeps; `Some(None)`: never.
    #[serde(default, deserialize_with = "some_option", skip_serializing_if = "Option::is_none")]
    pub sleep_after_seconds: Option<Option<u64>>,
    /// How long it sleeps in memory before it moves to disk, seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_tier_seconds: Option<u64>,
    /// Ports whose upgraded connections keep it awake.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub awake_ports: Option<Vec<u16>>,
    /// Seconds without a byte after which a connection is closed; `Some(None)`: never.
    #[serde(default, deserialize_with = "some_option", skip_serializing_if = "Option::is_none")]
    pub connection_idle_seconds: Option<Option<u64>>,
    /// How long holds alone may keep it awake, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sleep_hold_max_ms: Option<u64>,
    /// How long before an idle sleep the holders are told, milliseconds; `Some(None)`: not told.
    #[serde(default, deserialize_with = "some_option", skip_serializing_if = "Option::is_none")]
    pub sleep_notice_ms: Option<Option<u64>>,
    /// How long it may sleep before it is deleted, milliseconds; `Some(None)`: the project's setting.
    #[serde(default, deserialize_with = "some_option", skip_serializing_if = "Option::is_none")]
    pub delete_after_idle_ms: Option<Option<u64>>,
    /// When it is deleted whatever it does, RFC 3339; `Some(None)`: never.
    #[serde(default, deserialize_with = "some_option", skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Option<String>>,
    /// Checkpoints; `Some(None)`: none.
    #[serde(default, deserialize_with = "some_option", skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<Option<CheckpointSetting>>,
}

/// A fork, or several of one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"name": "try", "count": 3}))]
pub struct ForkRequest {
    /// Name of the fork; default: its id. With `count` they are called `<name>-1`, `<name>-2` and so on.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(min_length = 1, max_length = 63, pattern = "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
    pub name: Option<String>,
    /// So many forks of one and the same moment, 1-16; all of them are made, or none. The answer is then `{"forks": [...]}`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(minimum = 1, maximum = 16)]
    pub count: Option<u32>,
}

/// Most forks of one moment: each takes its memory anew, and the parent's host must have room for all of them.
pub const FORKS_MAX: u32 = 16;

/// Forks of one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ForkList {
    /// The forks, in the order of their names.
    pub forks: Vec<Sandbox>,
}

/// What a fork is answered with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(untagged)]
pub enum Forked {
    /// With `count`.
    Many(ForkList),
    /// Without.
    One(Box<Sandbox>),
}

/// A restart.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"drives": [{"name": "data", "path": "/data"}]}))]
pub struct RestartRequest {
    /// Drives that it shall have from now on, at most 8, in place of those that it has; `[]`: none. Copies that a fork has are
    /// deleted then. Absent: it keeps what it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 8)]
    pub drives: Option<Vec<AttachDrive>>,
    /// Volumes that it shall have from now on, in place of those that it has; `[]`: none. Absent: it keeps what it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 8)]
    pub volumes: Option<Vec<AttachVolume>>,
}

/// Puts to sleep.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SleepRequest {
    /// `memory` or `disk`; default what its settings say.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tier: Option<SleepTier>,
}

/// Status of a sandbox (S1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Being made or booted.
    Starting,
    /// Awake.
    Running,
    /// Asleep; wakes by itself when needed.
    Sleeping,
    /// Could not be started; `failure_code` says why. Restart or delete it.
    Failed,
}

/// How a sleeping one sleeps (S9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SleepTier {
    /// Its process is stopped, its memory resident: wakes in a millisecond or two.
    Memory,
    /// Memory and devices are on the host's disk, no process: wakes in some tens of milliseconds.
    Disk,
    /// Memory and devices are in the object store.
    Store,
    /// It powered itself off, or died; the next call boots it from its disk.
    Off,
}

/// What a host lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Lack {
    /// Room on its disk: a sandbox that runs stands still meanwhile.
    Disk,
    /// Room in its memory budget: one that is to wake or to boot waits for its turn.
    Memory,
    /// More to spend: the project's spending limit is reached, and nothing wakes it until that is raised or the month ends.
    Spending,
}

/// What a sandbox waits for. It goes on by itself when there is some.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"what": "memory", "since": "2026-11-30T10:15:30.123Z", "position": 2,
    "text": "waits for room in the host's memory budget, as number 2"}))]
pub struct WaitsFor {
    /// What is lacking: `disk`, `memory` or `spending`.
    pub what: Lack,
    /// Since when it waits, RFC 3339.
    pub since: String,
    /// Its place among all that wait for memory; 1 is next.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(minimum = 1)]
    pub position: Option<u64>,
    /// For people.
    pub text: String,
}

/// One reason why a sandbox is awake.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct AwakeReason {
    /// For programs: `never_sleeps`, `just_woke`, `calls`, `call_ended`, `cpu`, `packets`, `outbound_tcp`, `timer`, `held`,
    /// `noticed`, `no_sample`, `sleep_failed`, `capturing`, `host_disk_full` (it stands still, see `waits_for`),
    /// `falling_asleep`. The list grows.
    #[schema(example = "cpu")]
    pub reason: String,
    /// For people.
    pub text: String,
    /// When this reason ends by itself, RFC 3339, where that is known.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub until: Option<String>,
}

/// What is told about a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Sandbox {
    /// Its id.
    pub id: SandboxId,
    /// Its name.
    pub name: String,
    /// What it does.
    pub status: Status,
    /// How it sleeps, when it does.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sleep_tier: Option<SleepTier>,
    /// Why it is awake, when it is.
    pub awake_because: Vec<AwakeReason>,
    /// What it waits for that its host lacks; absent when it waits for nothing.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub waits_for: Option<WaitsFor>,
    /// When it will sleep if nothing changes, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub will_sleep_at: Option<String>,
    /// When a sleeping one is woken for a timer of its own, if nothing wakes it earlier, RFC 3339: 0.4 s before the timer is due.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub will_wake_at: Option<String>,
    /// Since when it is in this status, RFC 3339.
    pub since: String,
    /// Why it was woken last.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub woke_because: Option<String>,
    /// Why it could not start, for people.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub failure: Option<String>,
    /// Why it could not start or how its machine ended: `machine_lost`, `wake_failed`, `state_damaged`, …
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub failure_code: Option<String>,
    /// The image it was made from.
    pub image: String,
    /// Virtual processors.
    pub cpus: u32,
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Its own address, reachable from its host.
    pub address: String,
    /// Its own IPv6 address, reachable from its host.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ipv6_address: Option<String>,
    /// Goes up at each wake and boot.
    pub life: u64,
    /// When it was made, RFC 3339.
    pub created_at: String,
    /// What it is a fork of.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub forked_from: Option<SandboxId>,
    /// Its drives.
    #[serde(default)]
    pub drives: Vec<SandboxDrive>,
    /// Its volumes.
    #[serde(default)]
    pub volumes: Vec<AttachVolume>,
    /// Environment of every command.
    pub env: BTreeMap<String, String>,
    /// Free labels.
    pub labels: BTreeMap<String, String>,
    /// Seconds of quiet before it sleeps; null: never.
    pub sleep_after_seconds: Option<u64>,
    /// How long it sleeps in memory before it moves to disk, seconds.
    pub memory_tier_seconds: u64,
    /// Ports whose upgraded connections keep it awake.
    pub awake_ports: Vec<u16>,
    /// How many connections are open on those ports.
    #[serde(default)]
    pub awake_connections: u32,
    /// Seconds without a byte after which a connection is closed; null: never.
    #[serde(default)]
    pub connection_idle_seconds: Option<u64>,
    /// How long holds alone may keep it awake, milliseconds.
    pub sleep_hold_max_ms: u64,
    /// How long before an idle sleep the holders are told, milliseconds.
    pub sleep_notice_ms: Option<u64>,
    /// How long it may sleep before it is deleted, milliseconds; null: the project's setting.
    pub delete_after_idle_ms: Option<u64>,
    /// When it is deleted whatever it does, RFC 3339; null: never.
    pub expires_at: Option<String>,
    /// How its checkpoints stand; null: there are none.
    #[serde(default)]
    pub checkpoint: Option<CheckpointStatus>,
}

/// A URL of a port of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Link {
    /// Open this.
    #[schema(example = "http://k3vq7mzt2abc-q5t…-8000.box.localhost:8420/")]
    pub url: String,
    /// The port in the sandbox.
    pub port: u16,
}

/// One page of sandboxes, oldest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct SandboxPage {
    /// The sandboxes.
    pub sandboxes: Vec<Sandbox>,
    /// Give this as `cursor` for the next page; absent on the last one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub next_cursor: Option<String>,
}

/// Why a sandbox is awake or asleep, and what happened to it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Why {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// One sentence for a person: what it does and why.
    #[schema(
        example = "`web` sleeps in memory since 2026-11-30T10:15:30.123Z; anything that needs it wakes it"
    )]
    pub summary: String,
    /// How often it was woken, over all the timeline that is kept.
    pub wakes: u64,
    /// How often it fell asleep, over all the timeline that is kept.
    pub sleeps: u64,
    /// The newest entries of its timeline, oldest first, at most 100.
    pub timeline: Vec<crate::Event>,
}

/// Tells a field that is null from one that is absent.
#[expect(clippy::option_option, reason = "absent, null and a value are three different wishes")]
pub(crate) fn some_option<'de, T, D>(deserializer: D) -> Result<Option<Option<T>>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Option::<T>::deserialize(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_is_not_absent() {
        let absent: UpdateSandbox = serde_json::from_str("{}").unwrap();
        let null: UpdateSandbox = serde_json::from_str(r#"{"sleep_after_seconds": null}"#).unwrap();
        assert_eq!((absent.sleep_after_seconds, null.sleep_after_seconds), (None, Some(None)));
        assert_eq!(serde_json::to_string(&null).unwrap(), r#"{"sleep_after_seconds":null}"#);
    }

    #[test]
    fn unknown_fields_are_refused() {
        let error =
            serde_json::from_str::<CreateSandbox>(r#"{"sleep_after": 5}"#).unwrap_err().to_string();
        assert!(error.contains("unknown field `sleep_after`"), "{error}");
    }
}
