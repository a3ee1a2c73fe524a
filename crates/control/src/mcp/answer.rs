//! What a tool answers: text for a model and the same as data; an error is a result too, which the model reads.

use api::{ApiError, SandboxId};
use rmcp::model::{CallToolResult, ContentBlock};
use serde::Serialize;
use serde_json::{Value, json};

use crate::failure::Failure;

/// What came of a call.
pub(super) struct Outcome {
    /// For a model that reads text.
    pub(super) text: String,
    /// The same as data.
    pub(super) data: Value,
    /// A box that the arguments could not name yet.
    pub(super) id: Option<SandboxId>,
}

impl Outcome {
    pub(super) fn new(text: impl Into<String>, data: &impl Serialize) -> Result<Self, Failure> {
        let data =
            serde_json::to_value(data).map_err(Failure::internal("write an answer as JSON"))?;
        Ok(Self { text: text.into(), data, id: None })
    }
}

/// As the protocol has it. Each warning is a line of its own at the end (B26), and stands in the data for clients that show nothing
/// else.
pub(super) fn result(result: Result<Outcome, Failure>, warnings: &[String]) -> CallToolResult {
    let warn = |text: &str| {
        let lines =
            std::iter::once(text.trim_end_matches('\n')).chain(warnings.iter().map(String::as_str));
        vec![ContentBlock::text(lines.collect::<Vec<_>>().join("\n"))]
    };
    match result {
        Ok(Outcome { text, mut data, .. }) => {
            if let Value::Object(fields) = &mut data
                && !warnings.is_empty()
            {
                fields.insert("idleWarnings".to_owned(), json!(warnings));
            }
            let mut result = CallToolResult::success(warn(&text));
            result.structured_content = Some(data);
            result
        }
        Err(failure) => CallToolResult::error(warn(&told(&failure.into_api_error()))),
    }
}

/// An error, as a model reads it.
fn told(error: &ApiError) -> String {
    let code = serde_json::to_value(error.code).unwrap_or_default();
    let mut text = format!("{} ({})", error.error, code.as_str().unwrap_or("error"));
    if let Some(hint) = &error.hint {
        text.push_str("\nWhat to do: ");
        text.push_str(hint);
    }
    text
}

#[cfg(test)]
mod tests {
    use api::Code;

    use super::*;

    fn text(result: &CallToolResult) -> String {
        serde_json::to_value(&result.content[0]).expect("JSON")["text"]
            .as_str()
            .expect("text")
            .to_owned()
    }

    #[test]
    fn b26_warnings_are_the_last_lines_of_every_result() {
        let warnings = ["box a: …".to_owned()];
        let done = result(Outcome::new("done\n", &json!({ "ok": true })), &warnings);
        assert_eq!(text(&done), "done\nbox a: …");
        assert_eq!(done.structured_content, Some(json!({ "ok": true, "idleWarnings": warnings })));
        let error = ApiError::new(Code::NotFound, "there is no box of this id").hint("look");
        let failed = result(Err(error.into()), &warnings);
        assert_eq!(failed.is_error, Some(true));
        assert_eq!(
            text(&failed),
            "there is no box of this id (not_found)\nWhat to do: look\nbox a: …"
        );
        let plain = result(Outcome::new("done", &json!({ "ok": true })), &[]);
        assert_eq!(plain.structured_content, Some(json!({ "ok": true })));
    }
}
