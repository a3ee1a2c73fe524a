//! How a tool is described, and reading what it is called with.

use std::sync::Arc;

use api::ApiError;
use rmcp::handler::server::tool::schema_for_input;
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// What a tool does to a box.
#[derive(Clone, Copy)]
pub(super) enum Does {
    /// Nothing: it tells.
    Tell,
    /// It adds; the same call again adds again.
    Add,
    /// It may change anything.
    Change,
    /// It sets something: what was set before is gone, and setting it again changes nothing.
    Set,
    /// What it ends is gone; ending it again changes nothing.
    End,
}

/// A tool that takes `I` and answers `O`.
pub(super) fn tool<I: JsonSchema + 'static, O: JsonSchema + 'static>(
    name: &'static str,
    title: &'static str,
    does: Does,
    description: &'static str,
) -> Tool {
    let (read_only, destructive, idempotent) = match does {
        Does::Tell => (true, false, true),
        Does::Add => (false, false, false),
        Does::Change => (false, true, false),
        Does::Set | Does::End => (false, true, true),
    };
    let hints = ToolAnnotations::with_title(title)
        .read_only(read_only)
        .destructive(destructive)
        .idempotent(idempotent)
        .open_world(false);
    let input = schema_for_input::<I>().expect("arguments are an object");
    let mut tool = Tool::new(name, description, input)
        .with_title(title)
        .with_annotations(hints)
        .with_output_schema::<O>();
    tool.input_schema = portable(&tool.input_schema);
    tool.output_schema = tool.output_schema.as_ref().map(portable);
    tool
}

/// A schema as every client understands it: what may be left out is left out, not null, and each value has one type. Rust's sizes of
/// integers are no formats that others know; what may be given stands in the descriptions and bounds.
fn portable(schema: &Arc<JsonObject>) -> Arc<JsonObject> {
    let mut schema = Value::Object(JsonObject::clone(schema));
    simplify(&mut schema);
    match schema {
        Value::Object(schema) => Arc::new(schema),
        _ => unreachable!("an object stays one"),
    }
}

fn simplify(schema: &mut Value) {
    match schema {
        Value::Array(schemas) => schemas.iter_mut().for_each(simplify),
        Value::Object(fields) => {
            if let Some(Value::Array(types)) = fields.get_mut("type") {
                types.retain(|one| one != "null");
                if let [one] = types.as_slice() {
                    let one = one.clone();
                    fields.insert("type".to_owned(), one);
                }
            }
            if let Some(Value::Array(ways)) = fields.get_mut("anyOf") {
                ways.retain(|way| way.get("type").is_none_or(|kind| kind != "null"));
                if let [Value::Object(only)] = ways.as_slice() {
                    let only = only.clone();
                    fields.remove("anyOf");
                    fields.extend(only);
                }
            }
            let is_rusts = |format: &Value| {
                format
                    .as_str()
                    .is_some_and(|format| format.starts_with("uint") || format.starts_with("int"))
            };
            if fields.get("format").is_some_and(is_rusts) {
                fields.remove("format");
            }
            if fields.get("default").is_some_and(Value::is_null) {
                fields.remove("default");
            }
            fields.values_mut().for_each(simplify);
        }
        _ => {}
    }
}

/// Leaves the words out of what a tool answers: a box is described once, in the answer of `sandbox_status`. All tools are read by models
/// before the first call of one.
pub(super) fn described_elsewhere(mut tool: Tool) -> Tool {
    tool.output_schema = tool.output_schema.map(|schema| {
        let mut schema = JsonObject::clone(&schema);
        schema.values_mut().for_each(leave_out_words);
        Arc::new(schema)
    });
    tool
}

fn leave_out_words(schema: &mut Value) {
    match schema {
        Value::Array(schemas) => schemas.iter_mut().for_each(leave_out_words),
        Value::Object(fields) => {
            // What is not a text is a field of that name.
            fields.retain(|name, value| name != "description" || !value.is_string());
            fields.values_mut().for_each(leave_out_words);
        }
        _ => {}
    }
}

/// Adds `id` to what a tool takes, which names the box that it is about.
pub(super) fn about_a_box(mut tool: Tool) -> Tool {
    let mut input = JsonObject::clone(&tool.input_schema);
    let mut fields = JsonObject::new();
    let id = json!({ "type": "string", "description": "Id of the box, as sandbox_start and sandbox_list tell it." });
    fields.insert("id".to_owned(), id);
    if let Some(Value::Object(others)) = input.remove("properties") {
        fields.extend(others);
    }
    input.insert("properties".to_owned(), Value::Object(fields));
    require(&mut input, "id");
    tool.input_schema = Arc::new(input);
    tool
}

/// Requires a field.
pub(super) fn requiring(mut tool: Tool, field: &str) -> Tool {
    let mut input = JsonObject::clone(&tool.input_schema);
    require(&mut input, field);
    tool.input_schema = Arc::new(input);
    tool
}

fn require(input: &mut JsonObject, field: &str) {
    let required = input.entry("required").or_insert_with(|| json!([]));
    if let Value::Array(names) = required
        && !names.iter().any(|name| name == field)
    {
        names.insert(0, field.into());
    }
}

/// Reads arguments.
pub(super) fn read<T: DeserializeOwned>(arguments: JsonObject) -> Result<T, ApiError> {
    let mut arguments = Value::Object(arguments);
    leave_out_nulls(&mut arguments);
    crate::input::read_object("the call", arguments)
}

/// Reads the box that a call is about, and its other arguments.
pub(super) fn read_about<T: DeserializeOwned>(
    mut arguments: JsonObject,
) -> Result<(String, T), ApiError> {
    let id = match arguments.remove("id") {
        Some(Value::String(id)) => id,
        given => {
            let text = if given.is_some() { "`id` is not a string" } else { "`id` is missing" };
            return Err(ApiError::invalid("id", text).hint(
                "the id of a box, as sandbox_start told it; sandbox_list shows those that there are",
            ));
        }
    };
    Ok((id, read(arguments)?))
}

/// Models give `null` for what they leave out.
fn leave_out_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(leave_out_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(leave_out_nulls),
        _ => {}
    }
}

/// No arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Nothing {}

#[cfg(test)]
mod tests {
    use api::boxes::act::BoxExec;

    use super::*;

    fn object(value: Value) -> JsonObject {
        let Value::Object(object) = value else { panic!("an object") };
        object
    }

    #[test]
    fn what_is_wrong_with_a_call_is_named() {
        let field = |value: Value| {
            let error = read_about::<BoxExec>(object(value)).expect_err("refused");
            (error.field.unwrap_or_default(), error.error)
        };
        assert_eq!(field(json!({ "command": "ls" })).0, "id");
        assert_eq!(field(json!({ "id": 7 })).0, "id");
        let (name, text) = field(json!({ "id": "x", "cmd": "ls" }));
        assert_eq!(
            (name.as_str(), text.as_str()),
            ("cmd", "the call has a field that is not known: `cmd`")
        );
        assert_eq!(field(json!({ "id": "x", "command": ["ls"] })).0, "command");
    }

    #[test]
    fn what_models_write_is_understood() {
        let call = json!({ "id": "x", "command": "ls", "cwd": null, "waitSec": 5.0 });
        let (id, request) = read_about::<BoxExec>(object(call)).expect("read");
        assert_eq!((id.as_str(), request.cwd, request.wait_sec), ("x", None, Some(5)));
    }

    #[test]
    fn schemas_are_such_as_every_client_understands() {
        let mut schema = json!({ "properties": {
            "a": { "type": ["integer", "null"], "format": "uint64", "default": null, "minimum": 1 },
            "b": { "anyOf": [{ "$ref": "#/$defs/B" }, { "type": "null" }], "description": "b" },
            "format": { "type": "string", "format": "date-time" },
        } });
        simplify(&mut schema);
        let expected = json!({ "properties": {
            "a": { "type": "integer", "minimum": 1 },
            "b": { "$ref": "#/$defs/B", "description": "b" },
            "format": { "type": "string", "format": "date-time" },
        } });
        assert_eq!(schema, expected);
    }

    #[test]
    fn a_schema_without_words_has_all_of_its_fields() {
        let mut schema = json!({ "properties": {
            "description": { "type": "string", "description": "words" },
            "many": { "items": { "anyOf": [{ "const": "a", "description": "words" }] } },
        } });
        leave_out_words(&mut schema);
        let expected = json!({ "properties": {
            "description": { "type": "string" },
            "many": { "items": { "anyOf": [{ "const": "a" }] } },
        } });
        assert_eq!(schema, expected);
    }

    #[test]
    fn the_box_comes_first_and_is_required() {
        let tool = about_a_box(tool::<BoxExec, BoxExec>("x", "X", Does::Change, "does"));
        let fields = tool.input_schema["properties"].as_object().expect("fields");
        assert_eq!(fields.keys().next().map(String::as_str), Some("id"));
        assert_eq!(tool.input_schema["required"], json!(["id"]));
        assert_eq!(tool.input_schema["additionalProperties"], json!(false));
    }
}
