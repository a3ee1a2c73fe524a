//! `dormouse mcp`: the tools of `/mcp` for AI clients that talk over standard streams, with what only a program on the caller's machine
//! can do.
//!
//! It passes calls on to the daemon, and adds:
//!
//! - [`sync`] and [`pull`]: files of this machine go into a box, and out of it.
//! - [`conversation`]: that the conversation is there, and when it has ended (B35).
//! - [`start`]: a box whose start was cut off is found again (T16).
//!
//! [`upstream`] is the way to the daemon: over its local socket, or over the network with a token, as everywhere in this program.
//! Standard output is the protocol's alone.

mod conversation;
mod files;
mod outcome;
mod pull;
mod start;
mod sync;
mod upstream;

use std::path::PathBuf;
use std::sync::Arc;

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, Implementation, JsonObject,
    ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler, ServiceExt};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::McpArgs;
use crate::client::Client;
use crate::problem::Problem;

use conversation::Conversation;
use outcome::{failed, with_last_line};
use start::Starts;
use upstream::{Failed, Upstream};

/// Serves one client, until its end of the conversation is closed or a signal says so.
pub(crate) async fn serve(client: Client, arguments: &McpArgs) -> Result<i32, Problem> {
    let listen = |kind| {
        signal(kind).map_err(|error| Problem::new(format!("cannot listen for signals: {error}")))
    };
    let (mut terminate, mut interrupt, mut hang_up) = (
        listen(SignalKind::terminate())?,
        listen(SignalKind::interrupt())?,
        listen(SignalKind::hangup())?,
    );
    let folder = std::env::current_dir()
        .map_err(|error| Problem::new(format!("there is no current folder: {error}")))?;
    let agent = conversation::draw_id()?;
    let upstream = Arc::new(Upstream::new(client, agent, can_wait_sec(arguments.tool_timeout_sec)));
    let conversation = Arc::new(Conversation::new(Arc::clone(&upstream)));
    let adapter = Adapter(Arc::new(Inner {
        upstream,
        conversation: Arc::clone(&conversation),
        starts: Arc::default(),
        folder,
    }));
    let talk = async {
        let service = adapter
            .serve(rmcp::transport::stdio())
            .await
            .map_err(|error| Problem::new(format!("the conversation did not begin: {error}")))?;
        service
            .waiting()
            .await
            .map_err(|error| Problem::new(format!("the conversation broke: {error}")))
    };
    let result = tokio::select! {
        ended = talk => ended.map(|_| 0),
        _ = terminate.recv() => Ok(0),
        _ = interrupt.recv() => Ok(0),
        _ = hang_up.recv() => Ok(0),
    };
    conversation.leave().await;
    result
}

/// How long a call may wait at the daemon, of the time after which the client gives it up: the rest is for thawing or starting a box,
/// and for the way. 25 of 60 seconds.
fn can_wait_sec(tool_timeout_sec: u64) -> u64 {
    /// For everything else that a call does.
    const MARGIN_SEC: u64 = 35;
    tool_timeout_sec.saturating_sub(MARGIN_SEC).max(tool_timeout_sec / 4)
}

#[derive(Clone)]
struct Adapter(Arc<Inner>);

struct Inner {
    upstream: Arc<Upstream>,
    conversation: Arc<Conversation>,
    starts: Arc<Starts>,
    /// From where relative paths of this machine count.
    folder: PathBuf,
}

impl ServerHandler for Adapter {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("dormouse", env!("CARGO_PKG_VERSION")))
            .with_instructions(control::MCP_INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let listed = self.0.upstream.call("tools/list", json!({}), None, &|_| {}).await;
        let listed = listed.map_err(|failed| match failed {
            Failed::Refused(error) => error,
            Failed::Cut(problem) | Failed::Told(problem) => {
                ErrorData::internal_error(problem.sentence(), None)
            }
        })?;
        let mut tools: ListToolsResult = serde_json::from_value(listed).map_err(|error| {
            ErrorData::internal_error(
                format!("the daemon's tools are not understood: {error}"),
                None,
            )
        })?;
        for tool in &mut tools.tools {
            match &*tool.name {
                sync::NAME => *tool = sync::tool(),
                pull::NAME => *tool = pull::tool(),
                _ => {}
            }
        }
        Ok(ListToolsResult::with_all_items(tools.tools))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let client = context.client_info().map(|client| client.name);
        self.0.conversation.begin(client.as_deref());
        let arguments = request.arguments.unwrap_or_default();
        self.0.starts.forget_named(&arguments);
        let result = match &*request.name {
            start::NAME => start::start(&self.0, arguments, &context).await?,
            name => {
                let gone = context.ct.clone();
                let work = self.0.call(name, arguments, &context);
                let result = gone.run_until_cancelled(work).await.unwrap_or_else(|| {
                    // Nobody reads it.
                    Ok(failed(&Problem::new("the call was taken back")))
                })?;
                match self.0.starts.sentence() {
                    Some(sentence) => with_last_line(result, "notes", &sentence),
                    None => result,
                }
            }
        };
        Ok(result.into())
    }
}

impl Inner {
    async fn call(
        &self,
        name: &str,
        arguments: JsonObject,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        match name {
            sync::NAME => Ok(self.local(sync::sync(self, arguments).await).await),
            pull::NAME => Ok(self.local(pull::pull(self, arguments).await).await),
            _ => {
                let params = json!({ "name": name, "arguments": arguments });
                let passed = self.upstream.call_tool(params, None, context).await;
                match passed {
                    Ok(result) => Ok(result),
                    Err(Failed::Refused(error)) => Err(error),
                    Err(Failed::Cut(problem) | Failed::Told(problem)) => Ok(failed(&problem)),
                }
            }
        }
    }

    /// What was done here, with the warnings that the daemon adds to what is done there (B26).
    async fn local(&self, done: Result<(String, Value), Problem>) -> CallToolResult {
        let result = match done {
            Ok((text, data)) => outcome::done(text, data),
            Err(problem) => failed(&problem),
        };
        let look = json!({ "name": "sandbox_list", "arguments": {} });
        // Without them the result is as good as before.
        let listed =
            self.upstream.call("tools/call", look, None, &|_| {}).await.unwrap_or_default();
        let warnings = listed["structuredContent"]["idleWarnings"].as_array();
        let lines = warnings.into_iter().flatten().filter_map(Value::as_str);
        lines.fold(result, |result, line| with_last_line(result, "idleWarnings", line))
    }
}

#[cfg(test)]
mod tests {
    use super::can_wait_sec;

    #[test]
    fn t15_how_long_a_call_can_wait() {
        let waits = [5, 20, 60, 120, 3_600].map(can_wait_sec);
        assert_eq!(waits, [1, 5, 25, 85, 3_565]);
    }
}
