//! The Model Context Protocol at `/mcp`: the box face as tools, for AI agents.
//!
//! Over HTTP, on the listener of everything else and behind the same guard. Requests of the present revision stand for themselves;
//! those of older ones begin with `initialize` and get no session: nothing is kept between two requests, so that a restart of the
//! daemon cuts no conversation.
//!
//! - [`tool`]: how a tool is described, and what it is called with.
//! - [`answer`]: what it answers: text for a model, the same as data, and errors as results that the model reads.
//! - [`start`], [`exec`], [`files`], [`look`], [`say`], [`wire`], [`secrets`], [`checkpoint`]: the tools.
//! - [`warnings`]: the lines that warn of boxes that are about to be stopped (B26).
//! - [`envelope`]: whether what comes is a message at all.
//! - [`hosts`]: by which names it may be called.
//!
//! # Not here
//!
//! What the tools do: that is [`crate::boxes`]. What needs the caller's files, `dormouse mcp` does on the caller's machine.

mod answer;
mod checkpoint;
mod envelope;
mod exec;
mod files;
mod hosts;
mod look;
mod say;
mod secrets;
mod start;
mod tool;
mod warnings;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderMap;
use axum::http::request::Parts;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ErrorCode, Implementation, JsonObject,
    ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::{Peer, RequestContext};
use rmcp::transport::streamable_http_server::session::never::NeverSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, RoleServer, ServerHandler};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::App;
use crate::boxes::Who;
use crate::failure::Failure;

pub(crate) use hosts::Hosts;

use answer::Outcome;
use warnings::Named;

/// Where it is.
pub(crate) const PATH: &str = "/mcp";
/// How long the client can wait for one call, seconds, as it says.
const WAITS_HEADER: &str = "x-psbx-can-wait-sec";
/// How long a client can wait that does not say (T15).
const WAITS_DEFAULT: Duration = Duration::from_secs(25);
/// The longest that a client can say: as long as any call waits.
const WAITS_SEC_MAX: u64 = 3_600;
/// Most bytes of a request: arguments are lines and small files at most.
const REQUEST_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Lines of progress between a call and its client; one that does not read them loses some.
const PROGRESS_MAX: usize = 16;

/// What a model is told of all tools together.
pub const INSTRUCTIONS: &str = "\
Sandboxes (\"boxes\") for running and testing code: Linux machines of their own with root, a /work folder, Docker-like names for their \
services and URLs that a person can open. sandbox_start makes one in about a second; sandbox_sync copies your project into /work; \
sandbox_exec runs commands; sandbox_get reads files; sandbox_stop ends it. A box that nobody uses is frozen after 10 minutes with \
everything kept, costs nothing while frozen, and thaws by itself at the next call: there is no need to stop one between two steps. \
A box is lost with the machine that it runs on, unless sandbox_checkpoint has copies of it kept elsewhere.";

/// Answers with our tools.
pub(crate) fn handler(app: &App) -> Handler {
    Handler { app: app.clone(), tools: Arc::new(tools()), named: Arc::new(Named::default()) }
}

/// The service, with whatever answers requests.
pub(crate) fn service<H: ServerHandler + Clone>(
    app: &App,
    hosts: Hosts,
    handler: H,
) -> hosts::Guarded<StreamableHttpService<H, NeverSessionManager>> {
    let config = StreamableHttpServerConfig::default()
        // Ours says what is wrong and what to set.
        .disable_allowed_hosts()
        .with_legacy_session_mode(false)
        .with_max_request_body_bytes(REQUEST_BYTES_MAX)
        .with_cancellation_token(app.stop().child_token());
    let service = StreamableHttpService::new(move || Ok(handler.clone()), Arc::default(), config);
    hosts::Guarded::new(service, hosts)
}

/// All tools, in the order in which they are told.
fn tools() -> Vec<Tool> {
    vec![
        start::start_tool(),
        exec::exec_tool(),
        files::sync_tool(),
        files::get_tool(),
        files::pull_tool(),
        exec::procs_tool(),
        wire::wire_tool(),
        secrets::secrets_tool(),
        checkpoint::checkpoint_tool(),
        look::status_tool(),
        look::list_tool(),
        say::say_tool(),
        say::feedback_tool(),
        start::stop_tool(),
    ]
}

/// Answers one client's requests.
#[derive(Clone)]
pub(crate) struct Handler {
    app: App,
    tools: Arc<Vec<Tool>>,
    named: Arc<Named>,
}

/// One call of a tool.
struct Call {
    app: App,
    who: Who,
    headers: HeaderMap,
    /// By which name and port the client has reached us.
    host: String,
    /// How long the client can wait for it.
    waits: Duration,
    /// Fires when the client is gone.
    gone: CancellationToken,
    progress: mpsc::Sender<String>,
}

impl ServerHandler for Handler {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("dormouse", env!("CARGO_PKG_VERSION")))
            .with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(self.tools.to_vec()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let name = request.name;
        if !self.tools.iter().any(|tool| tool.name == name) {
            let text = format!("there is no tool `{name}`");
            return Err(ErrorData::new(ErrorCode::INVALID_PARAMS, text, None));
        }
        let parts = context.extensions.get::<Parts>();
        let who = parts.and_then(|parts| Who::of(parts).ok());
        let (Some(parts), Some(who)) = (parts, who) else {
            let text = "nobody said for whom this is asked";
            return Err(ErrorData::new(ErrorCode::INVALID_REQUEST, text, None));
        };
        let headers = parts.headers.clone();
        let (progress, lines) = mpsc::channel(PROGRESS_MAX);
        let token = context.meta.get_progress_token();
        let telling = tell(context.peer.clone(), token, lines);
        let call = Call {
            app: self.app.clone(),
            who: who.clone(),
            waits: waits(&headers),
            host: hosts::written(&parts.uri, &headers).unwrap_or("localhost").to_owned(),
            headers,
            gone: context.ct.clone(),
            progress,
        };
        let arguments = request.arguments.unwrap_or_default();
        let mut boxes = named_in(&arguments);
        // Lines of progress are told before the answer.
        let (result, ()) = tokio::join!(dispatch(call, &name, arguments), telling);
        if let Ok(outcome) = &result {
            boxes.extend(outcome.id.clone());
        }
        let warnings = warnings::of(&self.app, &self.named, &who, boxes).await;
        Ok(answer::result(result, &warnings).into())
    }
}

async fn dispatch(call: Call, name: &str, arguments: JsonObject) -> Result<Outcome, Failure> {
    let gone = call.gone.clone();
    let work = async {
        match name {
            "sandbox_start" => start::start(call, arguments).await,
            "sandbox_stop" => start::stop(call, arguments).await,
            "sandbox_exec" => exec::exec(&call, arguments).await,
            "sandbox_procs" => exec::procs(&call, arguments).await,
            "sandbox_secrets" => secrets::secrets(&call, arguments).await,
            "sandbox_checkpoint" => checkpoint::checkpoint(&call, arguments).await,
            "sandbox_wire" => wire::wire(&call, arguments).await,
            "sandbox_get" => files::get(&call, arguments).await,
            "sandbox_pull" => files::pull(&call, arguments).await,
            "sandbox_sync" => files::sync(&call, arguments).await,
            "sandbox_status" => look::status(&call, arguments).await,
            "sandbox_list" => look::list(&call, arguments).await,
            "sandbox_say" => say::say(&call, arguments).await,
            "sandbox_feedback" => say::feedback(&call, arguments).await,
            _ => Err(api::ApiError::new(api::Code::NotFound, "there is no such tool").into()),
        }
    };
    gone.run_until_cancelled(work).await.unwrap_or_else(|| {
        // Nobody reads it.
        Err(api::ApiError::new(api::Code::Timeout, "the client has gone").into())
    })
}

/// The boxes that the arguments name.
fn named_in(arguments: &JsonObject) -> Vec<api::SandboxId> {
    ["id", "restore"]
        .iter()
        .filter_map(|field| arguments.get(*field)?.as_str()?.parse().ok())
        .collect()
}

fn waits(headers: &HeaderMap) -> Duration {
    let said = headers.get(WAITS_HEADER).and_then(|value| value.to_str().ok()?.parse().ok());
    said.map_or(WAITS_DEFAULT, |seconds: u64| Duration::from_secs(seconds.min(WAITS_SEC_MAX)))
}

/// Passes lines of progress on, until there are no more; to a client that does not want them: nothing.
async fn tell(
    peer: Peer<RoleServer>,
    token: Option<rmcp::model::ProgressToken>,
    mut lines: mpsc::Receiver<String>,
) {
    let mut count = 0.0;
    while let Some(line) = lines.recv().await {
        let Some(token) = token.clone() else { continue };
        count += 1.0;
        let param = rmcp::model::ProgressNotificationParam::new(token, count).with_message(line);
        if let Err(error) = peer.notify_progress(param).await {
            tracing::debug!(error = %error, "a client does not take progress");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t15_how_long_a_client_can_wait() {
        let said = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(WAITS_HEADER, text.parse().expect("a value"));
            waits(&headers).as_secs()
        };
        assert_eq!(waits(&HeaderMap::new()), WAITS_DEFAULT);
        assert_eq!((said("3"), said("0"), said("99999"), said("soon")), (3, 0, 3_600, 25));
    }

    #[test]
    fn every_tool_says_what_it_is() {
        let tools = tools();
        for tool in &tools {
            let hints = tool.annotations.as_ref().expect("annotations");
            assert!(tool.name.starts_with("sandbox_"), "{}", tool.name);
            assert!(tool.title.is_some() && tool.description.is_some(), "{}", tool.name);
            assert!(hints.read_only_hint.is_some(), "{}", tool.name);
            assert_eq!(tool.input_schema["type"], "object", "{}", tool.name);
            let fields = tool.input_schema["properties"].as_object().expect("properties");
            for (name, field) in fields {
                assert!(field["description"].is_string(), "{}: {name}", tool.name);
            }
            let output = tool.output_schema.as_ref().expect("an output schema");
            for schema in [&tool.input_schema, output] {
                let text = serde_json::to_string(schema).expect("JSON");
                for rusts in ["\"null\"", "\"uint"] {
                    assert!(!text.contains(rusts), "{}: {rusts} in {text}", tool.name);
                }
            }
        }
        let start = &tools[0];
        let service = &start.input_schema["$defs"]["ServiceSpec"]["properties"];
        for port in ["port", "targetPort", "fromPort"] {
            assert_eq!(service[port]["minimum"], 1, "{port}");
            assert_eq!(service[port]["maximum"], 65_535, "{port}");
        }
        assert_eq!(start.input_schema["properties"]["size"]["minimum"], 1);
        assert_eq!(start.input_schema["required"], serde_json::json!(["goal"]), "T1");
        let text = start.description.as_deref().expect("a description");
        for rule in ["frozen after 10 minutes", "24 hours", "restore", "idleTimeoutMin"] {
            assert!(text.contains(rule), "{rule}");
        }
    }
}
