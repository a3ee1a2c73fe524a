//! Results of tools as the protocol has them.

use rmcp::model::{CallToolResult, ContentBlock};
use serde_json::{Value, json};

use crate::problem::Problem;

/// Something was done.
pub(super) fn done(text: String, data: Value) -> CallToolResult {
    let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
    result.structured_content = Some(data);
    result
}

/// It was not; the model reads why.
pub(super) fn failed(problem: &Problem) -> CallToolResult {
    CallToolResult::error(vec![ContentBlock::text(problem.sentence())])
}

/// Adds a line at the end of the text, and to this field of the data for clients that show nothing else.
pub(super) fn with_last_line(
    mut result: CallToolResult,
    field: &str,
    line: &str,
) -> CallToolResult {
    result.content.push(ContentBlock::text(line));
    if let Some(Value::Object(fields)) = &mut result.structured_content {
        let notes = fields.entry(field).or_insert_with(|| json!([]));
        if let Value::Array(notes) = notes {
            notes.push(line.into());
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_added_where_each_client_looks() {
        let result = with_last_line(done("did".into(), json!({ "ok": true })), "notes", "more");
        let result =
            serde_json::to_value(with_last_line(result, "notes", "and more")).expect("JSON");
        assert_eq!(result["content"][2]["text"], "and more");
        assert_eq!(
            result["structuredContent"],
            json!({ "ok": true, "notes": ["more", "and more"] })
        );
        let failed = failed(&Problem::new("no").hint("try"));
        assert_eq!(failed.is_error, Some(true));
    }
}
