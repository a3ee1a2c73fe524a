//! One line from QEMU, parsed into a known value. Pure.
//!
//! QEMU runs a hostile guest and may have been taken over by it, so its lines are bounded and anything unexpected ends the
//! connection instead of being guessed at.

use serde::Deserialize;
use serde_json::Value;

use super::{Migration, Seen, Shutdown};

/// Longest line accepted. The longest answer we ask for (`query-status`, `query-migrate`) is below 4 KiB.
pub const LINE_BYTES_MAX: usize = 256 * 1024;

/// What a line says.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// The first line of a connection.
    Greeting,
    /// The answer to the command with this `id`.
    Reply {
        /// As sent; None if QEMU could not read the command.
        id: Option<u64>,
        /// What it returned, or QEMU's description of why not.
        result: Result<Value, String>,
    },
    /// Something happened.
    Event {
        /// Such as `SHUTDOWN`.
        name: String,
        /// Null if there is none.
        data: Value,
    },
}

/// A line that is not QMP.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// Not JSON, or not of the protocol's shape.
    #[error("parse a QMP line")]
    Json(#[source] serde_json::Error),
    /// JSON, but none of greeting, reply, event.
    #[error("QMP line is neither greeting, reply nor event")]
    Shape,
    /// Longer than [`LINE_BYTES_MAX`].
    #[error("QMP line exceeds {LINE_BYTES_MAX} bytes")]
    TooLong,
}

#[derive(Deserialize)]
struct Line {
    #[serde(rename = "QMP")]
    greeting: Option<Value>,
    event: Option<String>,
    #[serde(default)]
    data: Value,
    // `Some(Value::Null)` is an answer too, so the field's presence is what counts.
    #[serde(rename = "return", default, deserialize_with = "present")]
    returned: Option<Value>,
    error: Option<Fault>,
    id: Option<u64>,
}

#[derive(Deserialize)]
struct Fault {
    desc: String,
}

fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// Parses one line, with or without its line break.
pub fn parse(line: &[u8]) -> Result<Message, MessageError> {
    if line.len() > LINE_BYTES_MAX {
        return Err(MessageError::TooLong);
    }
    match serde_json::from_slice(line).map_err(MessageError::Json)? {
        Line { greeting: Some(_), .. } => Ok(Message::Greeting),
        Line { event: Some(name), data, .. } => Ok(Message::Event { name, data }),
        Line { returned: Some(value), id, .. } => Ok(Message::Reply { id, result: Ok(value) }),
        Line { error: Some(fault), id, .. } => Ok(Message::Reply { id, result: Err(fault.desc) }),
        _ => Err(MessageError::Shape),
    }
}

impl Seen {
    /// Adds what an event tells. Returns whether that was something new.
    pub(super) fn note(&mut self, name: &str, data: &Value) -> bool {
        let before = *self;
        match name {
            "SHUTDOWN" => self.shutdown = Some(shutdown(data["reason"].as_str())),
            "GUEST_PANICKED" => self.panicked = true,
            "MIGRATION" => {
                self.migration = Some(match data["status"].as_str() {
                    Some("completed") => Migration::Completed,
                    Some("failed" | "cancelled") => Migration::Failed,
                    _ => Migration::Underway,
                });
            }
            _ => {}
        }
        *self != before
    }
}

fn shutdown(reason: Option<&str>) -> Shutdown {
    match reason {
        Some("guest-shutdown") => Shutdown::GuestShutdown,
        Some("guest-reset") => Shutdown::GuestReset,
        Some("guest-panic") => Shutdown::GuestPanic,
        Some("host-qmp-quit") => Shutdown::Quit,
        _ => Shutdown::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::{Expect, expect};
    use proptest::prelude::*;

    fn check(line: &str, expected: &Expect) {
        let seen = match parse(line.as_bytes()) {
            Ok(message) => format!("{message:?}"),
            Err(error) => format!("refused: {error}"),
        };
        expected.assert_eq(&seen);
    }

    #[test]
    fn lines_as_qemu_writes_them() {
        check(
            r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian"}, "capabilities": ["oob"]}}"#,
            &expect!["Greeting"],
        );
        check(
            r#"{"return": {}, "id": 1}"#,
            &expect!["Reply { id: Some(1), result: Ok(Object {}) }"],
        );
        check(r#"{"return": null, "id": 2}"#, &expect!["Reply { id: Some(2), result: Ok(Null) }"]);
        check(
            r#"{"id": 7, "error": {"class": "GenericError", "desc": "State blocked by x"}}"#,
            &expect![[r#"Reply { id: Some(7), result: Err("State blocked by x") }"#]],
        );
        check(
            r#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-reset"}}"#,
            &expect![[
                r#"Event { name: "SHUTDOWN", data: Object {"guest": Bool(true), "reason": String("guest-reset")} }"#
            ]],
        );
        check(
            r#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "STOP"}"#,
            &expect![[r#"Event { name: "STOP", data: Null }"#]],
        );
    }

    #[test]
    fn lines_that_are_not_qmp_are_refused() {
        check("", &expect!["refused: parse a QMP line"]);
        check("[]", &expect!["refused: parse a QMP line"]);
        check("{}", &expect!["refused: QMP line is neither greeting, reply nor event"]);
        check(r#"{"return": {}, "id": "one"}"#, &expect!["refused: parse a QMP line"]);
        check(
            &format!(r#"{{"return": "{}"}}"#, "x".repeat(LINE_BYTES_MAX)),
            &expect!["refused: QMP line exceeds 262144 bytes"],
        );
        check(&"[".repeat(10_000), &expect!["refused: parse a QMP line"]);
    }

    #[test]
    fn later_events_do_not_hide_earlier_ones() {
        let mut seen = Seen::default();
        assert!(seen.note("GUEST_PANICKED", &serde_json::json!({"action": "pause"})));
        assert!(seen.note("SHUTDOWN", &serde_json::json!({"reason": "guest-panic"})));
        assert!(!seen.note("RTC_CHANGE", &Value::Null));
        assert!(seen.panicked && seen.shutdown == Some(Shutdown::GuestPanic));
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(line in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _: Result<Message, MessageError> = parse(&line);
        }
    }
}
