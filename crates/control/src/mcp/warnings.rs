//! From half an hour before the idle rules stop a box, every result of a conversation that used or named it says so (B26).

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError};

use api::SandboxId;

use crate::App;
use crate::boxes::{self, AgentId, Who};

/// Most conversations whose boxes are remembered; then all are forgotten, but for the boxes that each used last.
const CONVERSATIONS_MAX: usize = 4_096;
/// Most boxes that are remembered of one.
const BOXES_MAX: usize = 64;

/// The boxes that conversations have named, since the daemon's start. Which one a box was used by last is kept with the box.
#[derive(Default)]
pub(super) struct Named(Mutex<HashMap<AgentId, BTreeSet<SandboxId>>>);

impl Named {
    /// Adds boxes to those of a conversation, and gives them all.
    fn add(&self, agent: &AgentId, boxes: Vec<SandboxId>) -> BTreeSet<SandboxId> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= CONVERSATIONS_MAX && !all.contains_key(agent) {
            all.clear();
        }
        let known = all.entry(agent.clone()).or_default();
        for id in boxes {
            if known.len() >= BOXES_MAX {
                known.pop_first();
            }
            known.insert(id);
        }
        known.clone()
    }
}

/// The lines that a result ends with.
pub(super) async fn of(
    app: &App,
    named: &Named,
    who: &Who,
    in_this_call: Vec<SandboxId>,
) -> Vec<String> {
    let mut ids = match &who.agent {
        Some(agent) => named.add(agent, in_this_call),
        None => in_this_call.into_iter().collect(),
    };
    if who.agent.is_some() {
        let used = app.boxes().of_account(&who.account).into_iter();
        ids.extend(used.filter(|box_| box_.agent == who.agent).map(|box_| box_.id.clone()));
    }
    let mut lines = Vec::new();
    for id in ids {
        // One that is gone, or not theirs, warns of nothing.
        if let Ok(view) = boxes::status(app, who, id.as_str()).await {
            lines.extend(view.warning);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b26_a_conversation_is_told_of_each_box_that_it_named() {
        let named = Named::default();
        let agent = |text: &str| text.parse::<AgentId>().expect("an agent");
        let box_ = |text: &str| text.parse::<SandboxId>().expect("an id");
        let (first, second) = (box_("k3b5qj2m4x7a"), box_("a3b5qj2m4x7a"));
        named.add(&agent("a"), vec![first.clone()]);
        assert_eq!(named.add(&agent("b"), vec![]), BTreeSet::new());
        assert_eq!(named.add(&agent("a"), vec![second.clone()]), BTreeSet::from([first, second]));
    }
}
