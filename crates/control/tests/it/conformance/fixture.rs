//! What the protocol's conformance suite calls: tools, resources and prompts of names and contents that it fixes.
//!
//! Nothing of it says anything about us; what it is called through does.

use std::borrow::Cow;

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ClientCapabilities,
    CompleteRequestParams, CompleteResult, GetPromptRequestParams, GetPromptResponse,
    GetPromptResult, InputRequiredResult, JsonObject, ListPromptsResult,
    ListResourceTemplatesResult, ListResourcesResult, ListToolsResult, PaginatedRequestParams,
    ProgressNotificationParam, ReadResourceRequestParams, ReadResourceResponse, ReadResourceResult,
    ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// A picture of one pixel.
const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==";
/// A sound of no length.
const WAV: &str = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA=";

/// Answers the suite.
#[derive(Clone)]
pub(super) struct Fixture;

type Context = RequestContext<RoleServer>;

impl ServerHandler for Fixture {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder();
        let capabilities = capabilities.enable_tools().enable_resources().enable_prompts();
        ServerConfig::new(capabilities.enable_completions().build())
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: Context,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(tools()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        tools().into_iter().find(|tool| tool.name == name)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: Context,
    ) -> Result<CallToolResponse, ErrorData> {
        let asked = Asked {
            responses: request.input_responses.unwrap_or_default(),
            state: request.request_state,
            capabilities: context.client_capabilities().unwrap_or_default(),
        };
        if let Some(content) = content(&request.name) {
            return complete(json!({ "content": content }));
        }
        match &*request.name {
            "test_error_handling" => complete(json!({
                "isError": true,
                "content": [text("This tool intentionally returns an error for testing")],
            })),
            "test_tool_with_progress" => {
                if let Some(token) = context.meta.get_progress_token() {
                    for done in [0.0, 50.0, 100.0] {
                        let step = ProgressNotificationParam::new(token.clone(), done);
                        let told = context.peer.notify_progress(step.with_total(100.0)).await;
                        told.map_err(|error| ErrorData::internal_error(error.to_string(), None))?;
                    }
                }
                complete(json!({ "content": [text("done")] }))
            }
            "test_missing_capability" if asked.capabilities.sampling.is_none() => {
                let needed = serde_json::from_value(json!({ "sampling": {} }))
                    .map_err(|error| ErrorData::internal_error(error.to_string(), None))?;
                Err(ErrorData::missing_required_client_capability(needed))
            }
            "test_missing_capability" => complete(json!({ "content": [text("done")] })),
            name => match asked.rounds(name)? {
                Round::Unknown => Err(ErrorData::invalid_params("no such tool", None)),
                Round::Needs(needs) => Ok(needs.into()),
                Round::Done(said) => complete(json!({ "content": [text(&said)] })),
            },
        }
    }

    async fn list_resources(
        &self,
        _: Option<PaginatedRequestParams>,
        _: Context,
    ) -> Result<ListResourcesResult, ErrorData> {
        parse(json!({ "resources": [
            { "uri": "test://static-text", "name": "text", "description": "text", "mimeType": "text/plain" },
            { "uri": "test://static-binary", "name": "picture", "description": "a picture", "mimeType": "image/png" },
        ] }))
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: Context,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        parse(json!({ "resourceTemplates": [
            { "uriTemplate": "test://template/{id}/data", "name": "data", "description": "of an id", "mimeType": "application/json" },
        ] }))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _: Context,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let uri = request.uri;
        let id = || uri.strip_prefix("test://template/")?.strip_suffix("/data");
        let content = match (&*uri, id()) {
            ("test://static-text", _) => {
                json!({ "mimeType": "text/plain", "text": "This is the content of the static text resource." })
            }
            ("test://static-binary", _) => json!({ "mimeType": "image/png", "blob": PNG }),
            (_, Some(id)) => {
                let data = format!("Data for ID: {id}");
                let data = json!({ "id": id, "templateTest": true, "data": data }).to_string();
                json!({ "mimeType": "application/json", "text": data })
            }
            _ => {
                let data = json!({ "uri": uri });
                return Err(ErrorData::resource_not_found("no such resource", Some(data)));
            }
        };
        let mut content = content;
        content["uri"] = json!(uri);
        Ok(parse::<ReadResourceResult>(json!({ "contents": [content] }))?.into())
    }

    async fn list_prompts(
        &self,
        _: Option<PaginatedRequestParams>,
        _: Context,
    ) -> Result<ListPromptsResult, ErrorData> {
        let argument = |name| json!({ "name": name, "description": "one", "required": true });
        parse(json!({ "prompts": [
            { "name": "test_simple_prompt", "description": "a prompt" },
            { "name": "test_prompt_with_arguments", "description": "a prompt", "arguments": [argument("arg1"), argument("arg2")] },
            { "name": "test_prompt_with_embedded_resource", "description": "a prompt", "arguments": [argument("resourceUri")] },
            { "name": "test_prompt_with_image", "description": "a prompt" },
            { "name": "test_input_required_result_prompt", "description": "a prompt" },
        ] }))
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        _: Context,
    ) -> Result<GetPromptResponse, ErrorData> {
        let arguments = request.arguments.unwrap_or_default();
        let argument = |name: &str| arguments.get(name).and_then(Value::as_str).unwrap_or_default();
        let contents = match &*request.name {
            "test_simple_prompt" => vec![text("This is a simple prompt for testing.")],
            "test_prompt_with_arguments" => {
                let (one, two) = (argument("arg1"), argument("arg2"));
                vec![text(&format!("Prompt with arguments: arg1='{one}', arg2='{two}'"))]
            }
            "test_prompt_with_embedded_resource" => vec![
                json!({ "type": "resource", "resource": {
                    "uri": argument("resourceUri"), "mimeType": "text/plain", "text": "Embedded resource content for testing.",
                } }),
                text("Please process the embedded resource above."),
            ],
            "test_prompt_with_image" => vec![image(), text("Please analyze the image above.")],
            "test_input_required_result_prompt" => {
                let responses = request.input_responses.unwrap_or_default();
                let Some(context) = entered(&responses, "user_context", "context") else {
                    let ask = form("What context should the prompt use?", "context", "string");
                    return Ok(needs(&json!({ "user_context": ask }), None)?.into());
                };
                vec![text(&format!("In this context: {context}"))]
            }
            _ => return Err(ErrorData::invalid_params("no such prompt", None)),
        };
        let message = |content| json!({ "role": "user", "content": content });
        let messages: Vec<Value> = contents.into_iter().map(message).collect();
        Ok(parse::<GetPromptResult>(json!({ "messages": messages }))?.into())
    }

    async fn complete(
        &self,
        _: CompleteRequestParams,
        _: Context,
    ) -> Result<CompleteResult, ErrorData> {
        parse(
            json!({ "completion": { "values": ["paris", "park"], "total": 2, "hasMore": false } }),
        )
    }
}

/// Names and what they are called with.
fn tools() -> Vec<Tool> {
    let plain = [
        "test_simple_text",
        "test_image_content",
        "test_audio_content",
        "test_embedded_resource",
        "test_multiple_content_types",
        "test_error_handling",
        "test_tool_with_progress",
        "test_logging_tool",
        "test_missing_capability",
        "test_streaming_elicitation",
        "test_input_required_result_elicitation",
        "test_input_required_result_sampling",
        "test_input_required_result_list_roots",
        "test_input_required_result_request_state",
        "test_input_required_result_multiple_inputs",
        "test_input_required_result_multi_round",
        "test_input_required_result_tampered_state",
        "test_input_required_result_capabilities",
    ];
    let nothing = json!({ "type": "object", "properties": {} });
    let with_header = json!({ "type": "object", "properties": { "value": { "type": "string", "x-mcp-header": "Value" } } });
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": { "address": {
            "$anchor": "addressDef", "type": "object",
            "properties": { "street": { "type": "string" }, "city": { "type": "string" } },
        } },
        "properties": {
            "name": { "type": "string" }, "address": { "$ref": "#/$defs/address" },
            "contactMethod": { "type": "string", "enum": ["phone", "email"] },
            "phone": { "type": "string" }, "email": { "type": "string" },
        },
        "allOf": [{ "anyOf": [{ "required": ["phone"] }, { "required": ["email"] }] }],
        "if": { "properties": { "contactMethod": { "const": "phone" } }, "required": ["contactMethod"] },
        "then": { "required": ["phone"] },
        "else": { "required": ["email"] },
        "additionalProperties": false,
    });
    let plain = plain.into_iter().map(|name| (name, &nothing));
    let all = plain.chain([("test_headers", &with_header), ("json_schema_2020_12_tool", &schema)]);
    all.map(|(name, schema)| {
        let schema: JsonObject = schema.as_object().cloned().unwrap_or_default();
        Tool::new(Cow::Borrowed(name), Cow::Borrowed("one of the suite's"), schema)
    })
    .collect()
}

/// What the tools answer that always answer the same.
fn content(tool: &str) -> Option<Value> {
    let resource = |uri: &str, kind: &str, text: &str| json!({ "type": "resource", "resource": { "uri": uri, "mimeType": kind, "text": text } });
    Some(match tool {
        "test_simple_text" => json!([text("This is a simple text response for testing.")]),
        "test_image_content" => json!([image()]),
        "test_audio_content" => {
            json!([{ "type": "audio", "data": WAV, "mimeType": "audio/wav" }])
        }
        "test_embedded_resource" => {
            let text = "This is an embedded resource content.";
            json!([resource("test://embedded-resource", "text/plain", text)])
        }
        "test_multiple_content_types" => {
            let data = json!({ "test": "data", "value": 123 }).to_string();
            json!([
                text("Multiple content types test:"),
                image(),
                resource("test://mixed-content-resource", "application/json", &data)
            ])
        }
        "test_headers" | "test_logging_tool" | "json_schema_2020_12_tool" => json!([text("done")]),
        _ => return None,
    })
}

/// What a tool that asks the client for something was called with.
struct Asked {
    responses: std::collections::BTreeMap<String, Value>,
    state: Option<String>,
    capabilities: ClientCapabilities,
}

/// What such a tool does next.
enum Round {
    Unknown,
    Needs(InputRequiredResult),
    Done(String),
}

impl Asked {
    fn rounds(&self, tool: &str) -> Result<Round, ErrorData> {
        let name = form("What is your name?", "name", "string");
        let confirm = json!({ "confirm": form("Please confirm", "ok", "boolean") });
        let question = |text: &str| {
            let content = json!({ "type": "text", "text": text });
            json!({ "method": "sampling/createMessage", "params": {
                "messages": [{ "role": "user", "content": content }], "maxTokens": 100,
            } })
        };
        let roots = json!({ "method": "roots/list", "params": {} });
        let responses = &self.responses;
        let needs = |requests: &Value, state: Option<&str>| {
            Ok(Round::Needs(needs(requests, state.map(sealed))?))
        };
        match tool {
            "test_input_required_result_elicitation" | "test_streaming_elicitation" => {
                match entered(responses, "user_name", "name") {
                    Some(name) => Ok(Round::Done(format!("Hello, {name}!"))),
                    None => needs(&json!({ "user_name": name }), None),
                }
            }
            "test_input_required_result_sampling" => {
                let ask = json!({ "capital_question": question("What is the capital of France?") });
                match responses.get("capital_question") {
                    Some(answer) => Ok(Round::Done(answer["content"]["text"].to_string())),
                    None => needs(&ask, None),
                }
            }
            "test_input_required_result_list_roots" => match responses.get("client_roots") {
                Some(answer) => Ok(Round::Done(answer["roots"].to_string())),
                None => needs(&json!({ "client_roots": roots }), None),
            },
            "test_input_required_result_request_state"
            | "test_input_required_result_tampered_state" => match self.state()? {
                Some(_) if responses.contains_key("confirm") => Ok(Round::Done("state-ok".into())),
                _ => needs(&confirm, Some("1")),
            },
            "test_input_required_result_multiple_inputs" => {
                let all = json!({ "user_name": name, "greeting": question("Generate a greeting"), "client_roots": roots });
                let known = all.as_object().into_iter().flatten();
                let has_all = known.into_iter().all(|(key, _)| responses.contains_key(key));
                match self.state()? {
                    Some(_) if has_all => Ok(Round::Done("all are there".into())),
                    _ => needs(&all, Some("1")),
                }
            }
            "test_input_required_result_multi_round" => match self.state()?.as_deref() {
                Some("1") if responses.contains_key("step1") => {
                    let color = form("Step 2: What is your favorite color?", "color", "string");
                    needs(&json!({ "step2": color }), Some("2"))
                }
                Some("2") if responses.contains_key("step2") => Ok(Round::Done("done".into())),
                _ => {
                    let name = form("Step 1: What is your name?", "name", "string");
                    needs(&json!({ "step1": name }), Some("1"))
                }
            },
            "test_input_required_result_capabilities" => {
                let mut requests = json!({});
                if self.capabilities.elicitation.is_some() {
                    requests["user_name"] = name;
                }
                if self.capabilities.sampling.is_some() {
                    requests["greeting"] = question("Generate a greeting");
                }
                needs(&requests, None)
            }
            _ => Ok(Round::Unknown),
        }
    }

    /// The state that came back, if it is ours.
    fn state(&self) -> Result<Option<String>, ErrorData> {
        let Some(state) = &self.state else { return Ok(None) };
        match state.split_once('.') {
            Some((plain, _)) if sealed(plain) == *state => Ok(Some(plain.to_owned())),
            _ => Err(ErrorData::invalid_params("this state is not what was given", None)),
        }
    }
}

/// A state that nobody else can make.
fn sealed(state: &str) -> String {
    let seal = Sha256::digest(format!("only the suite's server knows {state}"));
    format!("{state}.{}", seal.iter().map(|byte| char::from(b'a' + byte % 26)).collect::<String>())
}

/// What a person has entered into a field of a form.
fn entered<'a>(
    responses: &'a std::collections::BTreeMap<String, Value>,
    form: &str,
    field: &str,
) -> Option<&'a str> {
    responses.get(form)?.get("content")?.get(field)?.as_str()
}

fn form(message: &str, field: &str, kind: &str) -> Value {
    let schema =
        json!({ "type": "object", "properties": { field: { "type": kind } }, "required": [field] });
    json!({ "method": "elicitation/create", "params": { "message": message, "requestedSchema": schema } })
}

fn needs(requests: &Value, state: Option<String>) -> Result<InputRequiredResult, ErrorData> {
    let mut result = json!({ "resultType": "input_required", "inputRequests": requests });
    if let Some(state) = state {
        result["requestState"] = json!(state);
    }
    parse(result)
}

fn text(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

fn image() -> Value {
    json!({ "type": "image", "data": PNG, "mimeType": "image/png" })
}

fn complete(result: Value) -> Result<CallToolResponse, ErrorData> {
    Ok(parse::<CallToolResult>(result)?.into())
}

/// A result written as JSON, as the suite describes it.
fn parse<T: DeserializeOwned>(mut result: Value) -> Result<T, ErrorData> {
    // Older revisions do not know it; it is taken away for their clients.
    if result["resultType"].is_null() {
        result["resultType"] = json!("complete");
    }
    serde_json::from_value(result)
        .map_err(|error| ErrorData::internal_error(error.to_string(), None))
}
