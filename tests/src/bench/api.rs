//! The daemon's interface over its local socket, without a program that would have to be started for each question.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::figure::Phase;
use crate::wait::WAIT_MAX;

/// Entries of a timeline that one question is answered with, at most.
const EVENTS_MAX: usize = 1000;

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Api {
    socket: PathBuf,
}

impl Api {
    pub(crate) fn of(lab: &crate::Lab) -> Self {
        Self { socket: lab.data().join("dormouse.sock") }
    }

    /// Asks, and takes nothing but success for an answer.
    #[track_caller]
    pub(crate) fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let mut stream = UnixStream::connect(&self.socket).expect("the daemon listens");
        stream.set_read_timeout(Some(WAIT_MAX)).expect("time-out set");
        let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
        let kind =
            format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all([head, kind, body].concat().as_bytes()).expect("request sent");
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).expect("an answer");
        let answer = crate::net::parse(&bytes);
        let answer = answer
            .unwrap_or_else(|| panic!("no HTTP answer: {:?}", String::from_utf8_lossy(&bytes)));
        assert!(
            (200..300).contains(&answer.status),
            "{method} {path}: {}\n{}",
            answer.head,
            answer.body
        );
        if answer.body.is_empty() {
            return Value::Null;
        }
        serde_json::from_str(&answer.body)
            .unwrap_or_else(|error| panic!("{method} {path}: {error}: {}", answer.body))
    }

    #[track_caller]
    pub(crate) fn get(&self, path: &str) -> Value {
        self.call("GET", path, &Value::Null)
    }

    /// What is no JSON.
    #[track_caller]
    pub(crate) fn text(&self, path: &str) -> String {
        let mut stream = UnixStream::connect(&self.socket).expect("the daemon listens");
        stream.set_read_timeout(Some(WAIT_MAX)).expect("time-out set");
        let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).expect("request sent");
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).expect("an answer");
        crate::net::parse(&bytes).filter(|answer| answer.status == 200).expect("an answer").body
    }

    /// Puts a sandbox to sleep in this tier.
    #[track_caller]
    pub(crate) fn sleep(&self, sandbox: &str, tier: &str) {
        let view =
            self.call("POST", &format!("/v1/sandboxes/{sandbox}/sleep"), &json!({ "tier": tier }));
        assert_eq!(
            (&view["status"], &view["sleep_tier"]),
            (&json!("sleeping"), &json!(tier)),
            "{view}"
        );
    }

    /// Runs `/bin/true` to its end.
    #[track_caller]
    pub(crate) fn exec_true(&self, sandbox: &str) {
        let result = self.call(
            "POST",
            &format!("/v1/sandboxes/{sandbox}/execs"),
            &json!({ "argv": ["/bin/true"] }),
        );
        assert_eq!(result["exit_code"], 0, "{result}");
    }

    #[track_caller]
    pub(crate) fn delete(&self, sandbox: &str) {
        self.call("DELETE", &format!("/v1/sandboxes/{sandbox}"), &Value::Null);
    }

    /// The URL of port 8000.
    #[track_caller]
    pub(crate) fn link(&self, sandbox: &str) -> String {
        let link = self.get(&format!("/v1/sandboxes/{sandbox}/links/8000"));
        link["url"].as_str().expect("a URL").to_owned()
    }

    /// All sandboxes, oldest first.
    #[track_caller]
    pub(crate) fn sandboxes(&self) -> Vec<Value> {
        let mut all = Vec::new();
        let mut cursor = String::new();
        loop {
            let page = self.get(&format!("/v1/sandboxes?limit=1000{cursor}"));
            all.extend(page["sandboxes"].as_array().expect("sandboxes").iter().cloned());
            let Some(next) = page["next_cursor"].as_str() else { return all };
            cursor = format!("&cursor={next}");
        }
    }

    /// The timeline of a sandbox.
    #[track_caller]
    pub(crate) fn events(&self, sandbox: &str) -> Vec<Value> {
        let mut all: Vec<Value> = Vec::new();
        loop {
            let after = all.last().map_or(0, |last| last["seq"].as_u64().expect("a number"));
            let page = self
                .get(&format!("/v1/sandboxes/{sandbox}/events?after={after}&limit={EVENTS_MAX}"));
            let events = page["events"].as_array().expect("events");
            if events.is_empty() {
                return all;
            }
            all.extend(events.iter().cloned());
        }
    }

    /// Phases of the newest event of this kind (without `sandbox.`), in milliseconds.
    #[track_caller]
    pub(crate) fn phases(&self, sandbox: &str, kind: &str) -> Vec<Phase> {
        let wanted = format!("sandbox.{kind}");
        let newest = self.events(sandbox).into_iter().rfind(|event| event["type"] == *wanted);
        let event = newest.unwrap_or_else(|| panic!("{sandbox} has no event `{kind}`"));
        let phases =
            event["data"]["phases_ms"].as_object().unwrap_or_else(|| panic!("no phases: {event}"));
        phases.iter().map(|(name, ms)| (name.clone(), ms.as_f64().expect("milliseconds"))).collect()
    }
}
