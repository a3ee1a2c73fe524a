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
    /// Who has been told of its boots after an end by itself.
    #[serde(flatten)]
    pub(crate) told: BootsTold,
    /// It has ended: nothing of its sandbox is left.
    #[serde(default)]
    pub(crate) ended: Option<Ended>,
}

/// Which of a box's boots after an end by itself those who run commands in it have been told of: what each of them ran in it is
/// lost by one, so each is told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BootsTold {
    /// Somebody was told of so many.
    #[serde(default, rename = "boots_told")]
    by_somebody: u64,
    /// Each who has used the box, the one last who came last; callers that are no conversation are one.
    #[serde(default, rename = "boots_told_to", skip_serializing_if = "Vec::is_empty")]
    each: Vec<(Option<AgentId>, u64)>,
}

/// Most who are told of a box's boots each for himself. Beyond that who came first is told what nobody has been told.
const TOLD_MAX: usize = 16;

impl BootsTold {
    /// All of so many have been told; to whom is not known.
    pub(crate) fn of(boots: u64) -> Self {
        Self { by_somebody: boots, each: Vec::new() }
    }

    /// How many this one knows of. Whoever is new to the box knows what anybody does: he has lost nothing by them.
    pub(crate) fn to(&self, agent: Option<&AgentId>) -> u64 {
        let known = self.each.iter().find(|(who, _)| who.as_ref() == agent);
        known.map_or(self.by_somebody, |(_, boots)| *boots)
    }

    /// Whether this one has used the box.
    pub(crate) fn knows(&self, agent: Option<&AgentId>) -> bool {
        self.each.iter().any(|(who, _)| who.as_ref() == agent)
    }

    /// This one uses the box, and has been told of so many of its boots.
    pub(crate) fn tell(&mut self, agent: Option<&AgentId>, boots: u64) {
        self.by_somebody = self.by_somebody.max(boots);
        if let Some((_, told)) = self.each.iter_mut().find(|(who, _)| who.as_ref() == agent) {
            *told = boots.max(*told);
            return;
        }
        if self.each.len() >= TOLD_MAX {
            self.each.remove(0);
        }
        self.each.push((agent.cloned(), boots));
    }
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
            told: BootsTold::default(),
            ended: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_who_has_used_it_is_told_of_a_boot() {
        let agent = |text: &str| text.parse::<AgentId>().expect("an agent");
        let (one, other, new) = (agent("one-agent"), agent("other-agent"), agent("new-agent"));
        let mut told = BootsTold::default();
        told.tell(Some(&one), 0);
        told.tell(None, 0);
        told.tell(Some(&one), 1);
        assert_eq!((told.to(Some(&one)), told.to(None)), (1, 0), "told to one only");
        assert_eq!(told.to(Some(&other)), 1, "new to the box: it has lost nothing");
        told.tell(Some(&one), 0);
        assert_eq!(told.to(Some(&one)), 1, "an older word does not take it back");
        for number in 0..TOLD_MAX {
            told.tell(Some(&agent(&format!("agent-number-{number}"))), 1);
        }
        assert!(!told.knows(None) && told.each.len() == TOLD_MAX);
        assert_eq!(told.to(Some(&new)), 1);
    }

    #[test]
    fn a_record_of_before_keeps_what_was_told() {
        let mut written = serde_json::to_value(BoxRecord::example()).expect("written");
        written["boots_told"] = 2.into();
        let read: BoxRecord = serde_json::from_value(written).expect("read");
        assert_eq!((read.told.to(None), read.told.knows(None)), (2, false));
    }
}
