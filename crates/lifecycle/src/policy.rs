//! When a sandbox may sleep, and how deep: the settings.
//!
//! Only values that the API has accepted come here; this crate does not check them again, and every value of every
//! field has a meaning.

use crate::boxed::BoxPolicy;

/// The settings of the sandbox face (S-rules), or of the box face.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How long everything must be quiet before it sleeps, in milliseconds; `None`: it sleeps only when asked (S2, S6).
    pub sleep_after_ms: Option<u64>,
    /// How deep it sleeps.
    pub tiers: Tiers,
    /// `awake_ports` are set (S4): connections to them, requests and calls alone decide. Its CPU, timers, packets,
    /// outbound connections and holds neither keep it awake nor wake it.
    pub awake_ports: bool,
    /// How long holds alone may keep it awake, in milliseconds (S12); 0 ignores holds.
    pub sleep_hold_max_ms: u64,
    /// How long before it sleeps for idleness programs in it are told, in milliseconds (S13).
    pub sleep_notice_ms: Option<u64>,
    /// It is a box: these settings hold instead of all others (B44). It always sleeps on disk.
    pub boxed: Option<BoxPolicy>,
}

impl Policy {
    /// Of a box.
    pub fn of_box(policy: BoxPolicy) -> Self {
        Self { tiers: Tiers::Disk, boxed: Some(policy), ..Self::default() }
    }

    /// Whether its timers, packets and holds wake it and keep it awake.
    pub(crate) fn is_open(&self) -> bool {
        !self.awake_ports && self.boxed.is_none()
    }
}

/// How deep a sandbox sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tiers {
    /// In memory first, then on disk.
    MemoryThenDisk {
        /// How long in memory, in milliseconds (`memory_tier_ms`).
        memory_tier_ms: u64,
    },
    /// On disk at once: never only in memory, so that a power cut costs a sleeper nothing.
    Disk,
}

impl Default for Policy {
    /// The defaults of the sandbox face: 30 s of quiet, five minutes in memory, holds of up to 30 s, no notice.
    fn default() -> Self {
        Self {
            sleep_after_ms: Some(30_000),
            tiers: Tiers::MemoryThenDisk { memory_tier_ms: 300_000 },
            awake_ports: false,
            sleep_hold_max_ms: 30_000,
            sleep_notice_ms: None,
            boxed: None,
        }
    }
}
