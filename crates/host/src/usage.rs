//! What a sandbox has used, for bills (S23): counted where its state changes, and kept in its manifest.
//!
//! Each change of the manifest first adds the time since the last one to the state that was. So the sums are as durable as the
//! state itself, a crash of the daemon loses none of them, and the timeline may forget its oldest entries.
//!
//! A stretch that began before the host was booted is counted for a sleeper on disk, by the wall clock; for one that ran or slept
//! in memory nothing is, since nobody knows when it ended. Rather too little than what was not used.

use std::os::unix::fs::MetadataExt;

use api::usage::{GB_BYTES, MONTH_SECONDS, Usage};
use serde::{Deserialize, Serialize};

use crate::clock::Moment;
use crate::manifest::State;
use crate::settings::Files;

/// Bytes of a block, as the file system counts those that a file takes.
const BLOCK_BYTES: u64 = 512;
/// Bytes of a MiB.
const MIB_BYTES: u64 = 1024 * 1024;

/// What was heard of a guest's count of processor time, since the daemon started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CpuHeard {
    /// The first count, microseconds.
    pub(crate) first_usec: u64,
    /// The newest one.
    pub(crate) newest_usec: u64,
}

/// Sums up to a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Used {
    /// Up to when; `None`: nothing is counted yet.
    pub until: Option<Moment>,
    /// Awake.
    pub awake_ms: u64,
    /// Asleep in memory.
    pub memory_ms: u64,
    /// Asleep on disk.
    pub disk_ms: u64,
    /// Off or failed.
    pub off_ms: u64,
    /// Processor time of its own programs.
    pub cpu_usec: u64,
    /// The guest's count up to which that goes; `None`: not heard of yet.
    pub cpu_seen_usec: Option<u64>,
    /// What it kept on disk while it was not awake: MiB times seconds.
    pub state_mib_seconds: u64,
    /// Less than a second of that, in MiB times milliseconds.
    pub state_rest: u64,
}

impl Used {
    /// The sums, gone on to now in a state that was all the while. `cpu`: the counts that were heard of; `kept`: bytes
    /// kept, asked only where they count.
    pub(crate) fn up_to_now(
        &self,
        state: &State,
        cpu: Option<CpuHeard>,
        kept: impl FnOnce() -> u64,
    ) -> Self {
        let now = Moment::now();
        let ms = self.until.as_ref().map_or(0, |until| stretch(until, &now, state));
        self.after(ms, now, state, cpu, kept)
    }

    fn after(
        &self,
        ms: u64,
        now: Moment,
        state: &State,
        cpu: Option<CpuHeard>,
        kept: impl FnOnce() -> u64,
    ) -> Self {
        let mut used = Self { until: Some(now), ..self.clone() };
        let is_kept = match state {
            State::Running => {
                used.awake_ms += ms;
                false
            }
            State::SleepingInMemory { .. } => {
                used.memory_ms += ms;
                true
            }
            State::SleepingOnDisk(_) => {
                used.disk_ms += ms;
                true
            }
            State::Off { .. } | State::Failed { .. } => {
                used.off_ms += ms;
                true
            }
            State::Creating | State::Deleting => false,
        };
        if is_kept && ms > 0 {
            let rest = (kept() / MIB_BYTES).saturating_mul(ms).saturating_add(used.state_rest);
            used.state_mib_seconds += rest / 1000;
            used.state_rest = rest % 1000;
        }
        if let Some(CpuHeard { first_usec, newest_usec }) = cpu {
            // What was used before the first count is not its own: a copy's count begins with its parent's.
            let seen = used.cpu_seen_usec.unwrap_or(first_usec);
            // One that shrinks is that of a new machine.
            used.cpu_usec += newest_usec.checked_sub(seen).unwrap_or(newest_usec);
            used.cpu_seen_usec = Some(newest_usec);
        }
        used
    }

    /// As it is told.
    pub(crate) fn told(&self, memory_mib: u32, state_bytes: u64) -> Usage {
        let gb_seconds = seconds(self.state_mib_seconds * 1000) * as_f64(MIB_BYTES) / GB_BYTES;
        Usage {
            awake_seconds: seconds(self.awake_ms),
            asleep_memory_seconds: seconds(self.memory_ms),
            asleep_disk_seconds: seconds(self.disk_ms),
            off_seconds: seconds(self.off_ms),
            cpu_seconds: seconds(self.cpu_usec) / 1000.0,
            memory_gib_seconds: seconds(self.awake_ms) * f64::from(memory_mib) / 1024.0,
            state_bytes,
            state_gb_months: gb_seconds / MONTH_SECONDS,
        }
    }
}

/// Bytes that a sandbox takes on the host's disk.
pub(crate) fn kept_bytes(files: &Files) -> u64 {
    [files.memory(), files.disk(), files.state()]
        .iter()
        // One that is not there takes nothing.
        .filter_map(|path| path.metadata().ok())
        .map(|meta| meta.blocks() * BLOCK_BYTES)
        .sum()
}

/// How long a stretch counts, milliseconds.
fn stretch(from: &Moment, to: &Moment, state: &State) -> u64 {
    if from.boot_id == to.boot_id {
        return to.boot_ms.saturating_sub(from.boot_ms);
    }
    match state {
        State::Running | State::SleepingInMemory { .. } => 0,
        State::Creating
        | State::SleepingOnDisk(_)
        | State::Off { .. }
        | State::Failed { .. }
        | State::Deleting => to.unix_ms.saturating_sub(from.unix_ms),
    }
}

fn seconds(ms: u64) -> f64 {
    as_f64(ms) / 1000.0
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a bill of centuries is still exact to the millisecond"
)]
fn as_f64(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(boot_id: &str, boot_ms: u64, unix_ms: u64) -> Moment {
        Moment { boot_ms, boot_id: boot_id.to_owned(), unix_ms }
    }

    fn off() -> State {
        State::Off { code: "poweroff".to_owned() }
    }

    fn step(used: &Used, state: &State, now: Moment, newest: Option<u64>) -> Used {
        let cpu = newest.map(|newest_usec| CpuHeard { first_usec: 700, newest_usec });
        let ms = used.until.as_ref().map_or(0, |until| stretch(until, &now, state));
        used.after(ms, now, state, cpu, || 512 * MIB_BYTES)
    }

    #[test]
    fn s23_each_stretch_counts_for_the_state_that_was() {
        let begun = step(&Used::default(), &State::Creating, at("a", 100, 0), None);
        assert_eq!((begun.awake_ms, begun.off_ms), (0, 0));
        let ran = step(&begun, &State::Running, at("a", 5_100, 5_000), Some(700));
        let ran = step(&ran, &State::Running, at("a", 6_100, 6_000), Some(250_700));
        assert_eq!((ran.awake_ms, ran.cpu_usec, ran.state_mib_seconds), (6_000, 250_000, 0));
        let slept = step(&ran, &off(), at("a", 8_600, 9_000), None);
        assert_eq!((slept.off_ms, slept.state_mib_seconds, slept.state_rest), (2_500, 1_280, 0));
        let told = slept.told(512, 7);
        assert_eq!((told.awake_seconds, told.memory_gib_seconds, told.state_bytes), (6.0, 3.0, 7));
        assert!((told.state_gb_months * MONTH_SECONDS - 1.342_177_28).abs() < 1e-9, "{told:?}");
    }

    #[test]
    fn s23_a_new_machines_processor_time_is_counted_from_zero() {
        let used = step(&Used::default(), &State::Running, at("a", 0, 0), Some(700));
        let used = step(&used, &State::Running, at("a", 1, 0), Some(900));
        let used = step(&used, &State::Running, at("a", 2, 0), Some(50));
        assert_eq!(used.cpu_usec, 250);
    }

    #[test]
    fn s23_what_nobody_saw_running_is_not_counted_as_awake() {
        let ran = step(&Used::default(), &State::Running, at("a", 1_000, 0), None);
        let booted = step(&ran, &State::Running, at("b", 50, 3_600_000), None);
        assert_eq!(booted.awake_ms, 0);
        let off = step(&booted, &off(), at("c", 50, 7_200_000), None);
        assert_eq!(off.off_ms, 3_600_000);
    }
}
