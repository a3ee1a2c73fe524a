//! `sandbox_checkpoint`: copies of a box in the operator's object store, from which it goes on when its host is lost (S18).

use std::fmt::Write as _;

use api::boxes::view::BoxCheckpointView;
use api::checkpoint::EVERY_SECONDS_DEFAULT;
use rmcp::model::{JsonObject, Tool};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use super::Call;
use super::answer::Outcome;
use super::tool::{Does, about_a_box, read_about, tool};
use crate::boxes;
use crate::failure::Failure;

const CHECKPOINT: &str = "\
Has checkpoints of a box taken: while it is awake its memory, disk and processes are copied to the operator's object store each \
everySeconds seconds (1-600; 10 where it is left out; 0 turns them off and removes the copies), and once more when it freezes. Off by \
default. With them the box outlives the loss of its host: the operator has another host take it up from the newest copy, with the same \
id, key, services and running programs; what came after that copy is lost. Turn it on for what would be expensive to make again. Cost: \
each copy stops the programs for some tens of milliseconds and carries what has changed since the last one; the first carries \
everything, and may take minutes. It is set once for the box: then go on working, and before you rely on it look at sandbox_status \
until its checkpoint has lastAt and no error. Fails with checkpoints_unavailable where the operator has set no store; nothing has \
changed then, and sandbox_pull or sandbox_get is the way to keep what matters. It is no use of the box: it neither thaws nor holds it.";

/// How often.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct Setting {
    /// Seconds of being awake from the end of one checkpoint to the next: 1-600, or 0 for none. Default: 10.
    #[schemars(range(min = 0, max = 600))]
    every_seconds: Option<u64>,
}

pub(super) fn checkpoint_tool() -> Tool {
    about_a_box(tool::<Setting, BoxCheckpointView>(
        "sandbox_checkpoint",
        "Keep copies of a box",
        Does::Set,
        CHECKPOINT,
    ))
}

pub(super) async fn checkpoint(call: &Call, arguments: JsonObject) -> Result<Outcome, Failure> {
    // What models leave out they often give as null; here null is what it is over REST: none.
    let is_null = arguments.get("everySeconds") == Some(&Value::Null);
    let (id, setting): (String, Setting) = read_about(arguments)?;
    let every = match setting.every_seconds {
        Some(0) => None,
        None if is_null => None,
        every => Some(every.unwrap_or(EVERY_SECONDS_DEFAULT)),
    };
    let stands = boxes::set_checkpoint(&call.app, &call.who, &id, every).await?;
    Outcome::new(line(&stands), &stands)
}

/// How checkpoints stand, in a line.
pub(super) fn line(stands: &BoxCheckpointView) -> String {
    let Some(every) = stands.every_seconds else {
        return "No checkpoints are taken; those that there were are removed.".to_owned();
    };
    let mut text = format!("checkpoint each {every} s awake");
    match (&stands.last_at, stands.behind_seconds) {
        (Some(at), behind) => {
            let (behind, bytes) = (behind.unwrap_or(0), stands.stored_bytes);
            let _ = write!(text, "; the newest is of {at}, {behind} s behind, {bytes} bytes");
        }
        (None, _) => text.push_str("; none is complete yet: look at sandbox_status"),
    }
    if let Some(error) = &stands.error {
        let _ = write!(text, "; ERROR, none can be kept now: {error}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s19_how_checkpoints_stand_is_told_in_a_line() {
        let mut stands = BoxCheckpointView { every_seconds: Some(10), ..Default::default() };
        assert!(line(&stands).ends_with("none is complete yet: look at sandbox_status"));
        stands.last_at = Some("2026-12-01T12:00:00.000Z".to_owned());
        stands.behind_seconds = Some(4);
        stands.stored_bytes = 7;
        let expected = "checkpoint each 10 s awake; the newest is of 2026-12-01T12:00:00.000Z, 4 s behind, 7 bytes";
        assert_eq!(line(&stands), expected);
        stands.error = Some("the store is full".to_owned());
        assert_eq!(
            line(&stands),
            format!("{expected}; ERROR, none can be kept now: the store is full")
        );
        assert!(line(&BoxCheckpointView::default()).starts_with("No checkpoints"));
    }
}
