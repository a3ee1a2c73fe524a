//! `sandbox_status` and `sandbox_list`: neither is use of a box (B4).

use std::fmt::Write as _;

use api::boxes::view::{AgentState, BoxList, BoxView};
use rmcp::model::{JsonObject, Tool};
use schemars::JsonSchema;
use serde::Deserialize;

use super::Call;
use super::answer::Outcome;
use super::tool::{Does, Nothing, about_a_box, described_elsewhere, read, read_about, tool};
use crate::boxes;
use crate::failure::Failure;

const STATUS: &str = "\
Tells about one box: what it is for (goal), whether it is awake or frozen and why, when it will be frozen and stopped if nobody uses it \
(freeze, stopsAt), its services and URLs, how its checkpoints stand (checkpoint; absent where there are none), and which conversation uses it (agent; thisConversation: yours). Costs nothing: it is no use \
of the box, does not thaw it and does not put off its stop. For one that the idle rules stopped, restorableUntil says how long \
sandbox_start {restore} can bring it back.";

pub(super) fn status_tool() -> Tool {
    about_a_box(tool::<Nothing, BoxView>("sandbox_status", "Tell about a box", Does::Tell, STATUS))
}

pub(super) async fn status(call: &Call, arguments: JsonObject) -> Result<Outcome, Failure> {
    let (id, Nothing {}) = read_about(arguments)?;
    let view = boxes::status(&call.app, &call.who, &id).await?;
    Outcome::new(details(&view), &view)
}

const LIST: &str = "\
Lists the boxes of your account with goal, state, URLs and the conversation that uses each, oldest first. Look here before you start \
one for work that another conversation began: an agent that is left or idle will not go on with its box, and you can. all: true also \
lists those that ended within the last week, with restorableUntil for those that can be brought back. Costs nothing, and is no use of \
any box.";

/// Which boxes.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Which {
    /// Also those that ended within the last week. Default: only those that live.
    all: bool,
}

pub(super) fn list_tool() -> Tool {
    described_elsewhere(tool::<Which, BoxList>("sandbox_list", "List boxes", Does::Tell, LIST))
}

pub(super) async fn list(call: &Call, arguments: JsonObject) -> Result<Outcome, Failure> {
    let Which { all } = read(arguments)?;
    let list = boxes::list(&call.app, &call.who, all).await;
    let lines: Vec<String> = list.boxes.iter().map(line).collect();
    let text = if lines.is_empty() {
        "There is no box. sandbox_start makes one.".to_owned()
    } else {
        lines.join("\n")
    };
    Outcome::new(text, &list)
}

/// A box in a line.
pub(super) fn line(view: &BoxView) -> String {
    let mut text = format!("Box {} is {}", view.id, view.status.as_str());
    if let Some(name) = &view.name {
        let _ = write!(text, ": {name}");
    }
    let lives = view.agent.is_some();
    if let Some(url) = view.web_url.as_ref().filter(|_| lives) {
        let _ = write!(text, "; a person opens {url}");
    }
    if let Some(agent) = &view.agent {
        let _ = write!(text, "; {}", agent_words(agent.state, view.this_conversation));
    }
    if let Some(until) = &view.restorable_until {
        let _ = write!(text, "; can be brought back until {until}");
    }
    if let Some(goal) = &view.goal {
        let _ = write!(text, "; goal: {goal}");
    }
    text
}

fn agent_words(state: AgentState, is_mine: bool) -> &'static str {
    match (is_mine, state) {
        (true, _) => "used by this conversation",
        (false, AgentState::Working) => "another conversation works with it",
        (false, AgentState::Away) => "another conversation is open, and does something else",
        (false, AgentState::Idle) => "unused for an hour or more",
        (false, AgentState::Left) => "the conversation that used it has ended",
    }
}

fn details(view: &BoxView) -> String {
    let mut text = line(view);
    if let Some(reason) = &view.status_reason {
        let _ = write!(text, "\nwhy {}: {reason}", view.status.as_str());
    }
    let _ = write!(text, "\nlast used {}", view.last_used_at);
    if let Some(freeze) = &view.freeze {
        let held: Vec<&str> = freeze.blocked_by.iter().map(|one| one.kind.as_str()).collect();
        if let Some(at) = &freeze.at {
            let _ = write!(text, "; frozen at {at} if nothing uses it");
        }
        if !held.is_empty() {
            let _ = write!(text, "; held awake by {}", held.join(", "));
        }
    }
    if let Some(at) = &view.stops_at {
        let _ = write!(text, "; stopped for good at {at} if nothing uses it");
    }
    if let Some(checkpoint) = &view.checkpoint {
        let _ = write!(text, "\n{}", super::checkpoint::line(checkpoint));
    }
    for service in &view.services {
        let _ = write!(
            text,
            "\nservice {}:{} -> port {} ({})",
            service.name, service.port, service.target_port, service.mode
        );
        if let Some(url) = &service.url {
            let _ = write!(text, " {url}");
        }
        if let Some(warning) = &service.warning {
            let _ = write!(text, "\n  {warning}");
        }
    }
    if let Some(said) = &view.said {
        let _ = write!(text, "\nsaid last: {said}");
    }
    text
}
