//! What is kept of a box: what it was started as, who works with it, and how it ended.

use api::SandboxId;
use api::boxes::BoxStatus;
use api::boxes::start::{ServiceSpec, StartBox};
use api::boxes::view::BoxEvent;
use serde::{Deserialize, Serialize};

use super::AgentId;

/// A box, beyond its sandbox. Stored as JSON: fields may be added, with a default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BoxRecord {
    /// Also its sandbox's.
    pub(crate) id: SandboxId,
    /// Whose it is.
    pub(crate) account: String,
    /// What it was started as, with everything checked and completed.
    pub(crate) spec: StartBox,
    /// Units (T3).
    pub(crate) size: u32,
    /// Virtual processors.
    pub(crate) cpus: u32,
    /// Memory, MiB.
    pub(crate) memory_mib: u32,
    /// Secret part of its URLs; also in the catalogue while it lives.
    pub(crate) key: String,
    /// Names of services that are in external mode, by their place in the specification.
    #[serde(default)]
    pub(crate) external: Vec<usize>,
    /// The conversation that used it last (B36).
    #[serde(default)]
    pub(crate) agent: Option<AgentId>,
    /// When it was asked for, milliseconds since 1970.
    pub(crate) created_ms: i64,
    /// When it was used last, as far as was known when it ended.
    #[serde(default)]
    pub(crate) last_used_ms: i64,
    /// Its changes of state, oldest first (B2).
    #[serde(default)]
    pub(crate) timeline: Vec<BoxEvent>,
    /// Why the rules of idleness stopped it, while its copy is kept.
    #[serde(default)]
    pub(crate) stop_reason: Option<String>,
    /// How many of its boots after an end by itself somebody who runs commands in it has been told of.
    #[serde(default)]
    pub(crate) boots_told: u64,
    /// It has ended: nothing of its sandbox is left.
    #[serde(default)]
    pub(crate) ended: Option<Ended>,
}

/// How a box ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ended {
    /// `terminated` or `interrupted`.
    pub(crate) status: BoxStatus,
    /// Why, in words.
    pub(crate) reason: String,
    /// Milliseconds since 1970.
    pub(crate) at_ms: i64,
}

/// Most changes of state that are kept of a box: weeks of freezing and thawing. The oldest go first.
const TIMELINE_MAX: usize = 2_000;

impl BoxRecord {
    /// Notes a change of state.
    pub(crate) fn note(&mut self, event: BoxEvent) {
        if self.timeline.len() >= TIMELINE_MAX {
            self.timeline.remove(0);
        }
        self.timeline.push(event);
    }

    /// Whether a service, by its place, is reached at `externalBaseUrl`.
    pub(crate) fn is_external(&self, place: usize) -> bool {
        self.external.contains(&place)
    }

    /// Whether the rules of idleness have stopped it, and it could be brought back.
    pub(crate) fn is_stopped(&self) -> bool {
        self.timeline.last().is_some_and(|event| event.status == BoxStatus::Terminated)
    }

    /// Its services, with their places.
    pub(crate) fn services(&self) -> impl Iterator<Item = (usize, &ServiceSpec)> {
        self.spec.services.iter().enumerate()
    }
}

#[cfg(test)]
impl BoxRecord {
    /// One for tests.
    pub(crate) fn example() -> Self {
        Self {
            id: "k3b5qj2m4x7a".parse().expect("an id"),
            account: "default".to_owned(),
            spec: StartBox::default(),
            size: 1,
            cpus: 1,
            memory_mib: 512,
            key: "key".to_owned(),
            external: Vec::new(),
            agent: None,
            created_ms: 1,
            last_used_ms: 1,
            timeline: Vec::new(),
            stop_reason: None,
            boots_told: 0,
            ended: None,
        }
    }
}
