//! Boxes as a client without a library sees them: JSON over the daemon's interface, and their URLs.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::lab::{LISTEN, Lab};
use crate::net::{self, Answer};
use crate::until;
use crate::wait::WAIT_MAX;

/// The size of a unit in tests.
pub const UNIT: [(&str, &str); 2] =
    [("DORMOUSE_BOX_UNIT_CPUS", "1"), ("DORMOUSE_BOX_UNIT_MEMORY_MIB", "512")];

/// A small HTTP server that counts requests in memory alone, and waits for nothing but requests. Argument: port.
pub const COUNTER: &str = "import sys, http.server as h\n\
    class C(h.BaseHTTPRequestHandler):\n\
    \x20   n = 0\n\
    \x20   def do_GET(self):\n\
    \x20       C.n += 1\n\
    \x20       import os\n\
    \x20       b = f'{C.n} {os.getpid()} {self.headers[\"Host\"]} {self.headers[\"X-Forwarded-Host\"]}'.encode()\n\
    \x20       self.send_response(200); self.send_header('Content-Length', str(len(b))); self.end_headers()\n\
    \x20       if self.command == 'GET': self.wfile.write(b)\n\
    \x20   do_HEAD = do_GET\n\
    \x20   def log_message(self, *a): pass\n\
    h.ThreadingHTTPServer(('0.0.0.0', int(sys.argv[1])), C).serve_forever(poll_interval=None)\n";

/// Starts the daemon anew with small boxes, and these settings.
#[track_caller]
pub fn set_up(lab: &mut Lab, settings: &[(&str, &str)]) {
    lab.stop_daemon();
    for (name, value) in UNIT.iter().chain(settings) {
        lab.daemon_env.push(((*name).to_owned(), (*value).to_owned()));
    }
    lab.start();
}

/// Calls the interface, and gives the status and the JSON of the answer.
#[track_caller]
pub fn call(lab: &Lab, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let answer = net::call(&lab.data().join("dormouse.sock"), method, path, &body)
        .unwrap_or_else(|error| panic!("{method} {path}: {error}"));
    let json = serde_json::from_str(&answer.body).unwrap_or(Value::Null);
    (answer.status, json)
}

/// As [`call`], which must succeed.
#[track_caller]
pub fn done(lab: &Lab, method: &str, path: &str, body: &Value) -> Value {
    let (status, answer) = call(lab, method, path, body);
    assert!(
        (200..300).contains(&status),
        "{method} {path}: {status} {answer}\n{}",
        lab.daemon_log()
    );
    answer
}

/// Starts a box.
#[track_caller]
pub fn start(lab: &Lab, spec: &Value) -> Value {
    done(lab, "POST", "/v1/boxes", spec)
}

/// What is told about a box.
#[track_caller]
pub fn view(lab: &Lab, id: &str) -> Value {
    done(lab, "GET", &format!("/v1/boxes/{id}"), &Value::Null)
}

/// Waits until a box has this status.
#[track_caller]
pub fn wait_status(lab: &Lab, id: &str, status: &str) -> Value {
    until(&format!("the box is {status}"), || {
        let view = view(lab, id);
        (view["status"] == status).then_some(view)
    })
}

/// Runs a line in a box and gives what it wrote, without the last line break; it must succeed.
#[track_caller]
pub fn sh(lab: &Lab, id: &str, line: &str) -> String {
    let ran = done(lab, "POST", &format!("/v1/boxes/{id}/exec"), &json!({ "command": line }));
    assert_eq!(ran["exitCode"], 0, "{line}: {ran}");
    ran["output"].as_str().expect("output").trim_end_matches('\n').to_owned()
}

/// Starts a counter on a port of a box, and waits until it listens.
#[track_caller]
pub fn serve_counter(lab: &Lab, id: &str, port: u16) {
    sh(lab, id, &format!("mkdir -p /work && cat > /work/counter.py <<'END'\n{COUNTER}END"));
    let line = format!("exec python3 /work/counter.py {port}");
    let path = format!("/v1/boxes/{id}/exec");
    done(lab, "POST", &path, &json!({ "command": line, "background": true }));
    let look = format!("until ss -ltnH 'sport = :{port}' | grep -q . ; do sleep 0.1 ; done");
    sh(lab, id, &look);
}

/// Asks a URL once, with these headers.
#[track_caller]
pub fn get(url: &str, method: &str, headers: &[(&str, &str)]) -> Answer {
    let (authority, server) = net::split_link(url);
    let mut stream = TcpStream::connect(server).expect("connected");
    stream.set_read_timeout(Some(WAIT_MAX)).expect("limit set");
    let mut head = format!("{method} / HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n");
    for (name, value) in headers {
        head.extend([name, ": ", value, "\r\n"]);
    }
    stream.write_all(format!("{head}\r\n").as_bytes()).expect("sent");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("answered");
    net::parse(&bytes).expect("an HTTP answer")
}

/// As a browser that opens a page.
pub const PAGE_LOAD: [(&str, &str); 2] =
    [("Sec-Fetch-Mode", "navigate"), ("Accept", "text/html,*/*;q=0.8")];

/// As [`call`], over the network with a key.
#[track_caller]
pub fn call_as(key: &str, method: &str, path: &str, body: &Value) -> (u16, Value) {
    call_for(key, None, method, path, body)
}

/// As [`call_as`], by an operator for an account.
#[track_caller]
pub fn call_for(
    key: &str,
    account: Option<&str>,
    method: &str,
    path: &str,
    body: &Value,
) -> (u16, Value) {
    let account =
        account.map(|account| format!("X-Dormouse-Account: {account}\r\n")).unwrap_or_default();
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let mut stream = TcpStream::connect(LISTEN).expect("connected");
    stream.set_read_timeout(Some(WAIT_MAX)).expect("limit set");
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {LISTEN}\r\nAuthorization: Bearer {key}\r\n{account}Content-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).expect("sent");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("answered");
    let answer = net::parse(&bytes).expect("an HTTP answer");
    (answer.status, serde_json::from_str(&answer.body).unwrap_or(Value::Null))
}
