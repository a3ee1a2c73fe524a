//! The way to the daemon: calls of tools as messages of the protocol's present revision, and the rest of its interface.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::BytesMut;
use http_body_util::BodyExt;
use hyper::Response;
use hyper::body::Incoming;
use hyper::http::request::Builder;
use rmcp::model::{CallToolResult, ErrorCode, ProgressNotificationParam, ResultType};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::client::{Body, Client, cut, full, read_json};
use crate::problem::Problem;

/// The revision that is spoken to the daemon, whatever the client speaks.
const REVISION: &str = "2026-07-28";
/// Most bytes of one message.
const MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Nothing heard for so long on an open answer, the connection is dead: the daemon sends a sign of life every 15 s.
const SILENCE_MAX: Duration = Duration::from_mins(1);
/// Lines of progress on their way to the client; one that does not read them loses some.
const PROGRESS_MAX: usize = 16;

/// Why there is no result.
pub(super) enum Failed {
    /// The daemon calls it no request that it knows.
    Refused(ErrorData),
    /// The daemon says why, or it is not understood.
    Told(Problem),
    /// The connection could not be made, or broke: whether anything was done is not known.
    Cut(Problem),
}

impl From<Problem> for Failed {
    fn from(problem: Problem) -> Self {
        if problem.is_unreachable() { Self::Cut(problem) } else { Self::Told(problem) }
    }
}

/// The daemon, for one conversation.
pub(super) struct Upstream {
    client: Client,
    /// The conversation's id.
    pub(super) agent: String,
    can_wait_sec: u64,
    next: AtomicU64,
}

impl Upstream {
    pub(super) fn new(client: Client, agent: String, can_wait_sec: u64) -> Self {
        Self { client, agent, can_wait_sec, next: AtomicU64::new(1) }
    }

    /// The beginning of a request of this conversation.
    pub(super) fn request(&self, method: &str, path: &str) -> Builder {
        self.client.request(method, path).header("x-psbx-agent", &self.agent)
    }

    /// Sends a request to the interface.
    pub(super) async fn send(
        &self,
        request: Builder,
        body: Body,
    ) -> Result<Response<Incoming>, Problem> {
        self.client.send(request, body).await
    }

    /// A request to the interface with JSON that is answered with JSON.
    pub(super) async fn json<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, Problem> {
        let body = serde_json::to_vec(body)
            .map_err(|error| Problem::new(format!("cannot write the request: {error}")))?;
        let request = self.request(method, path).header("content-type", "application/json");
        read_json(self.send(request, full(body)).await?).await
    }

    /// Calls a tool, and passes its progress on to whoever asked.
    pub(super) async fn call_tool(
        &self,
        params: Value,
        key: Option<&str>,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, Failed> {
        let (lines, mut told) = mpsc::channel::<Value>(PROGRESS_MAX);
        let token = context.meta.get_progress_token();
        let peer = context.peer.clone();
        let telling = async move {
            while let Some(line) = told.recv().await {
                let (Some(token), Some(progress)) = (token.clone(), line["progress"].as_f64())
                else {
                    continue;
                };
                let mut param = ProgressNotificationParam::new(token, progress);
                param.total = line["total"].as_f64();
                param.message = line["message"].as_str().map(str::to_owned);
                // A client that does not take it does without.
                let _ = peer.notify_progress(param).await;
            }
        };
        let calling = async move {
            let pass = move |line: Value| {
                // Full: the client does not read them, and loses some.
                let _ = lines.try_send(line);
            };
            self.call("tools/call", params, key, &pass).await
        };
        let (result, ()) = tokio::join!(calling, telling);
        let mut result: CallToolResult = serde_json::from_value(result?).map_err(|error| {
            Failed::Told(Problem::new(format!("the daemon's answer is not understood: {error}")))
        })?;
        // Of the present revision; the library takes it out again for older clients.
        result.result_type = Some(ResultType::COMPLETE);
        Ok(result)
    }

    /// One request of the protocol and its result.
    pub(super) async fn call(
        &self,
        method: &str,
        mut params: Value,
        key: Option<&str>,
        progress: &(dyn Fn(Value) + Send + Sync),
    ) -> Result<Value, Failed> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        params["_meta"] = json!({
            "io.modelcontextprotocol/protocolVersion": REVISION,
            "io.modelcontextprotocol/clientInfo": { "name": "dormouse-mcp", "version": env!("CARGO_PKG_VERSION") },
            "io.modelcontextprotocol/clientCapabilities": {},
            "progressToken": id,
        });
        let mut request = self
            .request("POST", "/mcp")
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream")
            .header("mcp-protocol-version", REVISION)
            .header("mcp-method", method)
            .header("x-psbx-can-wait-sec", self.can_wait_sec);
        if let Some(name) = params["name"].as_str() {
            if !name.bytes().all(|byte| byte.is_ascii_graphic()) {
                let error =
                    ErrorData::new(ErrorCode::INVALID_PARAMS, "there is no such tool", None);
                return Err(Failed::Refused(error));
            }
            request = request.header("mcp-name", name);
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let body = json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params });
        let response = self.send(request, full(body.to_string())).await?;
        let is_stream = response
            .headers()
            .get("content-type")
            .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        let mut messages =
            Messages { body: response.into_body(), read: BytesMut::new(), is_stream };
        while let Some(message) = messages.next().await? {
            let message: Value = serde_json::from_slice(&message).map_err(|error| {
                Failed::Told(Problem::new(format!(
                    "the daemon's answer is not understood: {error}"
                )))
            })?;
            if message["method"] == "notifications/progress" {
                progress(message["params"].clone());
            } else if message["id"] == id && message["error"].is_object() {
                let error = serde_json::from_value(message["error"].clone()).map_err(|error| {
                    Problem::new(format!("the daemon's answer is not understood: {error}"))
                })?;
                return Err(Failed::Refused(error));
            } else if message["id"] == id {
                return Ok(message["result"].clone());
            }
        }
        Err(Failed::Cut(Problem::unreachable(
            "the connection to the daemon broke before its answer",
        )))
    }
}

/// The messages in the body of an answer: one, or a stream of events.
struct Messages {
    body: Incoming,
    read: BytesMut,
    is_stream: bool,
}

impl Messages {
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Problem> {
        loop {
            if self.is_stream
                && let Some(data) = take_event(&mut self.read)
            {
                return Ok(Some(data));
            }
            let frame =
                tokio::time::timeout(SILENCE_MAX, self.body.frame()).await.map_err(|_| {
                    let seconds = SILENCE_MAX.as_secs();
                    Problem::unreachable(format!("the daemon was silent for {seconds} s"))
                })?;
            let Some(frame) = frame else {
                let rest = self.read.split().to_vec();
                return Ok(Some(rest).filter(|rest| !self.is_stream && !rest.is_empty()));
            };
            if let Ok(data) = frame.map_err(cut)?.into_data() {
                self.read.extend_from_slice(&data);
            }
            if self.read.len() > MESSAGE_BYTES_MAX {
                return Err(Problem::new(format!("the answer has over {MESSAGE_BYTES_MAX} bytes")));
            }
        }
    }
}

/// Takes the data of the next whole event that has any (one ends with an empty line; its data may stand on several).
fn take_event(read: &mut BytesMut) -> Option<Vec<u8>> {
    loop {
        let line_end = |from: usize| read[from..].iter().position(|byte| *byte == b'\n');
        let (mut at, mut data) = (0, Vec::new());
        loop {
            let end = at + line_end(at)?;
            let line = read[at..end].strip_suffix(b"\r").unwrap_or(&read[at..end]);
            at = end + 1;
            if line.is_empty() {
                break;
            }
            if let Some(value) = line.strip_prefix(b"data:") {
                if !data.is_empty() {
                    data.push(b'\n');
                }
                data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
            }
        }
        let _ = read.split_to(at);
        if !data.is_empty() {
            return Some(data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_any_pieces() {
        let stream = b": sign of life\n\nid: 0\nretry: 3000\ndata:\n\ndata: {\"a\":\ndata: 1}\r\n\r\ndata:{}\n\n";
        for piece in [1, 3, stream.len()] {
            let (mut read, mut found) = (BytesMut::new(), Vec::new());
            for bytes in stream.chunks(piece) {
                read.extend_from_slice(bytes);
                while let Some(data) = take_event(&mut read) {
                    found.push(String::from_utf8(data).expect("text"));
                }
            }
            assert_eq!(found, ["{\"a\":\n1}", "{}"], "pieces of {piece}");
            assert!(read.is_empty());
        }
    }
}
