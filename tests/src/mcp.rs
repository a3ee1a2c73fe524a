//! The Model Context Protocol by hand: over HTTP, and over the adapter's standard streams.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;

use serde_json::{Value, json};

use crate::lab::{LISTEN, Lab};
use crate::net::{self, Answer};
use crate::wait::WAIT_MAX;

/// The present revision.
pub const REVISION: &str = "2026-07-28";

/// What each request of the present revision carries.
pub fn meta() -> Value {
    json!({
        "io.modelcontextprotocol/protocolVersion": REVISION,
        "io.modelcontextprotocol/clientInfo": { "name": "e2e", "version": "1" },
        "io.modelcontextprotocol/clientCapabilities": {},
    })
}

/// The first token of the daemon.
#[track_caller]
pub fn token(lab: &Lab) -> String {
    let file = lab.data().join("admin.token");
    std::fs::read_to_string(file).expect("the token").trim().to_owned()
}

/// Posts to `/mcp` over TCP, with these headers and no others but those that every client sends.
#[track_caller]
pub fn post(headers: &[(&str, &str)], body: &Value) -> Answer {
    let body = body.to_string();
    let mut head = format!(
        "POST /mcp HTTP/1.1\r\nContent-Type: application/json\r\nAccept: application/json, text/event-stream\r\n\
         Content-Length: {}\r\nConnection: close\r\n",
        body.len()
    );
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        head.extend(["Host: ", LISTEN, "\r\n"]);
    }
    for (name, value) in headers {
        head.extend([name, ": ", value, "\r\n"]);
    }
    let mut stream = TcpStream::connect(LISTEN).expect("connected");
    stream.set_read_timeout(Some(WAIT_MAX)).expect("limit set");
    stream.write_all(format!("{head}\r\n{body}").as_bytes()).expect("sent");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("answered");
    net::parse(&bytes).expect("an HTTP answer")
}

/// The messages in an answer, which is JSON or a stream of events.
pub fn messages(answer: &Answer) -> Vec<Value> {
    if let Ok(one) = serde_json::from_str(&answer.body) {
        return vec![one];
    }
    let data = answer.body.lines().filter_map(|line| line.strip_prefix("data:"));
    data.filter_map(|data| serde_json::from_str(data).ok()).collect()
}

/// One conversation over HTTP, in the present revision.
#[derive(Debug)]
pub struct Http {
    authorization: String,
    /// Sent as `X-Psbx-Agent`.
    pub agent: Option<String>,
    /// Further headers.
    pub headers: Vec<(String, String)>,
}

impl Http {
    /// With the daemon's token.
    #[track_caller]
    pub fn new(lab: &Lab) -> Self {
        Self::with_key(&token(lab))
    }

    /// With another key.
    pub fn with_key(key: &str) -> Self {
        Self { authorization: format!("Bearer {key}"), agent: None, headers: Vec::new() }
    }

    /// All messages that come for a request, the answer last.
    #[track_caller]
    pub fn request(&self, method: &str, mut params: Value) -> Vec<Value> {
        let mut meta = meta();
        meta["progressToken"] = json!("p1");
        params["_meta"] = meta;
        let name = params["name"].as_str().map(str::to_owned);
        let mut headers = vec![
            ("Authorization", self.authorization.as_str()),
            ("MCP-Protocol-Version", REVISION),
            ("Mcp-Method", method),
        ];
        headers.extend(name.as_deref().map(|name| ("Mcp-Name", name)));
        headers.extend(self.agent.as_deref().map(|agent| ("X-Psbx-Agent", agent)));
        headers.extend(self.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        let body = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        let answer = post(&headers, &body);
        assert_eq!(answer.status, 200, "{method}: {answer:?}");
        messages(&answer)
    }

    /// The result of a tool, error or not.
    #[track_caller]
    pub fn tool(&self, name: &str, arguments: Value) -> Value {
        let mut params = json!({ "name": name });
        params["arguments"] = arguments;
        let messages = self.request("tools/call", params);
        let last = messages.last().unwrap_or_else(|| panic!("{name}: no answer"));
        assert!(last["result"].is_object(), "{name}: {last}");
        last["result"].clone()
    }

    /// The data of a tool, which must succeed.
    #[track_caller]
    pub fn done(&self, name: &str, arguments: Value) -> Value {
        let result = self.tool(name, arguments);
        assert_ne!(result["isError"], true, "{name}: {result}");
        result["structuredContent"].clone()
    }

    /// The text of a tool, which must fail.
    #[track_caller]
    pub fn refused(&self, name: &str, arguments: Value) -> String {
        let result = self.tool(name, arguments);
        assert_eq!(result["isError"], true, "{name}: {result}");
        text(&result)
    }
}

/// The text of a result.
#[track_caller]
pub fn text(result: &Value) -> String {
    result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text: {result}")).to_owned()
}

/// `dormouse mcp`, and its client at the other end of its standard streams.
#[derive(Debug)]
pub struct Adapter {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: mpsc::Receiver<Value>,
    next: u64,
}

impl Adapter {
    /// Starts it in a folder, with this environment besides the lab's.
    #[track_caller]
    pub fn start(lab: &Lab, folder: &std::path::Path, env: &[(&str, &str)]) -> Self {
        let mut command: Command = lab.command(&["mcp"]);
        command.current_dir(folder).envs(env.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("`dormouse mcp` starts");
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().expect("its output"));
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let message = serde_json::from_str(&line)
                    .unwrap_or_else(|error| panic!("no JSON ({error}): {line}"));
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        Self { child, stdin, lines, next: 1 }
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a process id")
    }

    fn write(&mut self, message: &Value) {
        let stdin = self.stdin.as_mut().expect("its input is open");
        stdin.write_all(format!("{message}\n").as_bytes()).expect("written");
    }

    /// Sends a request and gives its id.
    #[track_caller]
    pub fn send(&mut self, method: &str, mut params: Value) -> u64 {
        let id = self.next;
        self.next += 1;
        let mut meta = meta();
        meta["progressToken"] = json!(id);
        params["_meta"] = meta;
        self.write(&json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params }));
        id
    }

    /// Takes a request back.
    #[track_caller]
    pub fn cancel(&mut self, id: u64) {
        let params = json!({ "requestId": id, "reason": "interrupted" });
        self.write(
            &json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": params }),
        );
    }

    /// The answer to a request, and what was told before it.
    #[track_caller]
    pub fn answer(&mut self, id: u64) -> (Value, Vec<Value>) {
        let mut before = Vec::new();
        loop {
            let message = self.lines.recv_timeout(WAIT_MAX).expect("an answer of the adapter");
            if message["id"] == id {
                return (message, before);
            }
            before.push(message);
        }
    }

    /// The result of a tool, error or not.
    #[track_caller]
    pub fn tool(&mut self, name: &str, arguments: &Value) -> Value {
        let id = self.send("tools/call", json!({ "name": name, "arguments": arguments }));
        let answer = self.answer(id).0;
        assert!(answer["result"].is_object(), "{name}: {answer}");
        answer["result"].clone()
    }

    /// The data of a tool, which must succeed.
    #[track_caller]
    pub fn done(&mut self, name: &str, arguments: &Value) -> Value {
        let result = self.tool(name, arguments);
        assert_ne!(result["isError"], true, "{name}: {result}");
        result["structuredContent"].clone()
    }

    /// Closes its input and waits for its end.
    #[track_caller]
    pub fn close(&mut self) {
        self.stdin = None;
        self.wait();
    }

    /// Waits for its end, which must be a good one.
    #[track_caller]
    pub fn wait(&mut self) {
        let child = &mut self.child;
        let status = crate::until("the adapter ends", || child.try_wait().expect("its state"));
        assert!(status.success(), "the adapter ended with {status}");
    }
}

impl Drop for Adapter {
    fn drop(&mut self) {
        // Gone already, mostly.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
