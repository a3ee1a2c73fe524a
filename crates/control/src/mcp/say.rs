//! `sandbox_say` and `sandbox_feedback`: words for people. Neither is use of a box (B4).

use api::ApiError;
use api::boxes::view::Done;
use rmcp::model::{JsonObject, Tool};
use schemars::JsonSchema;
use serde::Deserialize;

use super::Call;
use super::answer::Outcome;
use super::tool::{Does, about_a_box, read, read_about, tool};
use crate::boxes;
use crate::failure::Failure;

/// Most characters of a line for the person.
const LINE_CHARS_MAX: usize = 500;
/// Most characters of a word to the operator.
const FEEDBACK_CHARS_MAX: usize = 4_000;

const SAY: &str = "\
Leaves a line for the person on a box's card and in its timeline: what you are doing, what works, what you wait for. In the language \
the person reads, at most 500 characters. Costs nothing and is no use of the box: it neither thaws it nor keeps it awake.";

/// A line for the person.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Say {
    /// The line, 1-500 characters.
    text: String,
}

pub(super) fn say_tool() -> Tool {
    about_a_box(tool::<Say, Done>("sandbox_say", "Say something to the person", Does::Add, SAY))
}

pub(super) async fn say(call: &Call, arguments: JsonObject) -> Result<Outcome, Failure> {
    let (id, Say { text }) = read_about(arguments)?;
    let text = within("text", &text, LINE_CHARS_MAX)?;
    boxes::say(&call.app, &call.who, &id, text).await?;
    Outcome::new("The person sees it on the box's card and in its timeline.", &Done { ok: true })
}

const FEEDBACK: &str = "\
Tells whoever runs this service what did not work or what is missing in these tools. It is written to the service's log; nobody \
answers. Costs nothing.";

/// A word to the operator.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Feedback {
    /// What you met and what you expected, 1-4000 characters. No secrets.
    text: String,
    /// The box that it is about.
    id: Option<String>,
}

pub(super) fn feedback_tool() -> Tool {
    tool::<Feedback, Done>("sandbox_feedback", "Give feedback", Does::Add, FEEDBACK)
}

pub(super) async fn feedback(call: &Call, arguments: JsonObject) -> Result<Outcome, Failure> {
    let Feedback { text, id } = read(arguments)?;
    let text = within("text", &text, FEEDBACK_CHARS_MAX)?;
    if let Some(id) = &id {
        boxes::status(&call.app, &call.who, id).await?;
    }
    let agent = call.who.agent.as_ref().map(ToString::to_string);
    tracing::info!(text, id, agent, "feedback from an AI client");
    Outcome::new("Thank you. It stands in the service's log.", &Done { ok: true })
}

fn within<'a>(field: &str, text: &'a str, most: usize) -> Result<&'a str, ApiError> {
    let text = text.trim();
    let count = text.chars().count();
    // Other conversations read it among other lines.
    if field == "text" && most == LINE_CHARS_MAX && text.chars().any(char::is_control) {
        let error =
            ApiError::invalid(field, "`text` has a line break or another control character");
        return Err(error.hint("one line of text"));
    }
    if (1..=most).contains(&count) {
        return Ok(text);
    }
    Err(ApiError::invalid(field, format!("`{field}`: {count} characters"))
        .hint(format!("1-{most} characters")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_a_length() {
        assert_eq!(within("text", " a ", 3).expect("fits"), "a");
        for bad in ["", "  ", "abcd"] {
            assert_eq!(within("text", bad, 3).expect_err("refused").field.as_deref(), Some("text"));
        }
    }
}
