//! What the types cannot say: forms, ranges, and which fields go together. The document then promises what the checks in
//! [`validate`](crate::validate) and beside the handlers do, and a client that is made from it asks for nothing that is refused.
//!
//! What depends on what there is (a drive of that name, a time to come) is in no schema: it is answered with 422, not with 400.

use api::boxes::start::{AGENT_PORTS, SIZES};
use api::secret::SECRET_NAME_CHARS_MAX;
use serde_json::{Map, Value, json};

use crate::routes::CURSOR_MS_DIGITS_MAX;
use crate::validate::{LABEL_KEY_CHARS_MAX, LABEL_VALUE_CHARS_MAX, TERM_CHARS_MAX, TIMEOUT_MS_MAX};

/// A name of a sandbox, drive, volume or snapshot.
const NAME: &str = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$";
/// The name or the digest of an image.
const IMAGE: &str = "^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?|[0-9a-f]{64})$";
/// Text without NUL, which no argument, variable or file of Linux can hold.
const NO_NUL: &str = r"^[^\u0000]*$";
/// The same, and not blank.
const LINE: &str = r"^[^\u0000]*[^\s\u0000][^\u0000]*$";
/// Not blank, and no control characters.
const TITLE: &str = r"^[^\u0000-\u001f\u007f-\u009f]*[^\s\u0000-\u001f\u007f-\u009f][^\u0000-\u001f\u007f-\u009f]*$";
/// No control characters.
const LABEL: &str = r"^[^\u0000-\u001f\u007f-\u009f]*$";
/// The name of an environment variable.
const VARIABLE: &str = r"^[^=\u0000]+$";
/// A user's name or number in the guest.
const USER: &str = r"^[^\u0000-\u0020:]{1,63}$";
/// A conversation.
const AGENT: &str = "^[A-Za-z0-9_-]{1,64}$";
/// Visible characters, blanks between them.
const IDEMPOTENCY_KEY: &str = "^[!-~]([ -~]{0,253}[!-~])?$";
/// Permission bits in octal.
const MODE: &str = "^0?[0-7]{1,4}$";
/// An event's place in the stream of all.
const PLACE: &str = "^[0-9a-f]{8}-[0-9]{1,15}(-[0-9]{1,15})?$";
/// A signal's name or number.
const SIGNAL: &str = "^([1-9]|[1-5][0-9]|6[0-4]|(SIG)?(HUP|INT|QUIT|ILL|TRAP|ABRT|BUS|FPE|KILL|USR1|SEGV|USR2|PIPE|ALRM|TERM|STKFLT|CHLD|\
                      CONT|STOP|TSTP|TTIN|TTOU|URG|XCPU|XFSZ|VTALRM|PROF|WINCH|IO|PWR|SYS))$";
/// A host name, at least one label of which is no number.
const HOST_NAME: &str = "([a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?\\.){0,4}([0-9]{0,20}[a-z]([a-z0-9-]{0,20}[a-z0-9])?|[0-9]{1,20}-([a-z0-9-]{0,20}[a-z0-9]))(\\.[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?){0,4}";
/// A byte in decimal.
const BYTE: &str = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";

/// An absolute path without a step upwards, and without characters of this class: what [`validate::path`](crate::validate::path) lets
/// through.
fn path(without: &str) -> String {
    format!(
        r"^(/([^/.{without}][^/{without}]*|\.[^/.{without}][^/{without}]*|\.\.[^/{without}]+|\.)?)+$"
    )
}

/// Adds them to the document.
pub(super) fn constrain(document: &mut Value) {
    unsigned(document);
    for (schema, property, rule) in properties() {
        let place = &mut document["components"]["schemas"][schema]["properties"][property];
        merge(place, rule);
    }
    for (schema, rule) in together() {
        merge(&mut document["components"]["schemas"][schema], rule);
    }
    let operations =
        document["paths"].as_object_mut().into_iter().flat_map(|paths| paths.values_mut());
    for operation in operations.filter_map(Value::as_object_mut).flat_map(|path| path.values_mut())
    {
        let id = operation["operationId"].as_str().unwrap_or_default().to_owned();
        let parameters = operation.get_mut("parameters").and_then(Value::as_array_mut);
        for parameter in parameters.into_iter().flatten() {
            let name = parameter["name"].as_str().unwrap_or_default().to_owned();
            not_null(&mut parameter["schema"]);
            if let Some(rule) = parameter_rule(&id, &name) {
                merge(&mut parameter["schema"], rule);
            }
        }
        for response in operation["responses"].as_object_mut().into_iter().flat_map(Map::values_mut)
        {
            let stream = response.pointer_mut("/content/text~1event-stream");
            if let Some(stream) = stream {
                stream["schema"] = server_sent_event();
            }
        }
    }
}

/// Numbers of 64 bits here have no sign.
fn unsigned(place: &mut Value) {
    match place {
        Value::Array(items) => items.iter_mut().for_each(unsigned),
        Value::Object(fields) => {
            let wide = fields.get("format").is_some_and(|format| *format == "int64");
            if wide
                && fields.get("minimum").is_some_and(|least| *least == 0)
                && !fields.contains_key("maximum")
            {
                fields.insert("format".to_owned(), json!("uint64"));
                fields.insert("maximum".to_owned(), json!(u64::MAX));
            }
            fields.values_mut().for_each(unsigned);
        }
        _ => {}
    }
}

/// A parameter is there or not: in a path, query or header there is no null.
fn not_null(schema: &mut Value) {
    if let Some(kinds) = schema["type"].as_array() {
        let kinds: Vec<Value> = kinds.iter().filter(|kind| **kind != "null").cloned().collect();
        if let [one] = kinds.as_slice() {
            schema["type"] = one.clone();
        }
    }
}

/// Sets the rule's keywords, one by one; those that are null are taken away.
fn merge(place: &mut Value, rule: Value) {
    let Value::Object(rule) = rule else { return };
    for (keyword, value) in rule {
        match (value, place.as_object_mut()) {
            (Value::Null, Some(place)) => drop(place.remove(&keyword)),
            (value, _) => place[keyword.as_str()] = value,
        }
    }
}

/// One event of a stream.
fn server_sent_event() -> Value {
    json!({
        "type": "object",
        "description": "Each event of the stream",
        "required": ["id", "event", "data"],
        "properties": {
            "id": { "type": "string", "description": "For `Last-Event-ID`" },
            "event": { "type": "string", "description": "The kind, such as `sandbox.woke`" },
            "data": {
                "type": "string",
                "description": "The entry as JSON",
                "contentMediaType": "application/json",
            },
        },
    })
}

/// Schema, property, and what is true of it besides.
fn properties() -> Vec<(&'static str, &'static str, Value)> {
    let pattern = |pattern: &str| json!({ "pattern": pattern });
    let text = |pattern: &str| json!({ "type": "string", "pattern": pattern });
    let name = || json!({ "pattern": NAME });
    let path_in_guest = || json!({ "pattern": path(r"\u0000") });
    let mount = || json!({ "pattern": path(r"\u0000-\u001f\u007f-\u009f") });
    let env = || {
        json!({
            "propertyNames": { "type": "string", "pattern": VARIABLE },
            "additionalProperties": { "type": "string", "pattern": NO_NUL },
        })
    };
    let label_key = format!("^[A-Za-z0-9_./-]{{1,{LABEL_KEY_CHARS_MAX}}}$");
    let label_value = format!(r"^[^,\u0000-\u001f\u007f-\u009f]{{0,{LABEL_VALUE_CHARS_MAX}}}$");
    let labels = || {
        json!({
            "maxProperties": api::sandbox::LABELS_MAX,
            "propertyNames": { "type": "string", "pattern": label_key },
            "additionalProperties": { "type": "string", "pattern": label_value },
        })
    };
    let argv = || {
        json!({
            "minItems": 1,
            "prefixItems": [{ "type": "string", "minLength": 1, "pattern": NO_NUL }],
            "items": { "type": "string", "pattern": NO_NUL },
        })
    };
    let ports = || {
        json!({
            "uniqueItems": true,
            "items": { "type": "integer", "format": "int32", "minimum": 1, "maximum": u16::MAX },
        })
    };
    let term = format!("^[A-Za-z0-9_+.-]{{1,{TERM_CHARS_MAX}}}$");
    let octets = [
        format!(r"10(\.{BYTE}){{3}}"),
        format!(r"172\.(1[6-9]|2[0-9]|3[01])(\.{BYTE}){{2}}"),
        format!(r"192\.168(\.{BYTE}){{2}}"),
        format!(r"100\.(6[4-9]|[7-9][0-9]|1[01][0-9]|12[0-7])(\.{BYTE}){{2}}"),
    ];
    // One way to write each range: the bits that are not fixed are zero.
    let ranges = r"10\.0\.0\.0/8|172\.16\.0\.0/12|192\.168\.0\.0/16|100\.64\.0\.0/10";
    let octets = octets.join("|");
    let service = json!({
        "pattern": format!("^({HOST_NAME}|({octets})(/32)?|{ranges})$"),
        "not": { "enum": ["localhost"] },
    });
    let base = format!(
        "^https?://({HOST_NAME}|{BYTE}(\\.{BYTE}){{3}})(:[1-9][0-9]{{0,3}})?(/[A-Za-z0-9._~-]+)*/?$"
    );
    let network = format!(
        "^({BYTE}(\\.{BYTE}){{3}}(/(3[0-2]|[12]?[0-9]))?|([0-9a-f]{{1,4}}:){{7}}[0-9a-f]{{1,4}}(/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))?|([0-9a-f]{{1,4}}:){{1,6}}:(/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))?)$"
    );
    vec![
        ("CreateSandbox", "image", pattern(IMAGE)),
        ("CreateSandbox", "snapshot", name()),
        ("CreateSandbox", "env", env()),
        ("CreateSandbox", "labels", labels()),
        ("CreateSandbox", "awake_ports", ports()),
        ("UpdateSandbox", "labels", labels()),
        ("UpdateSandbox", "awake_ports", ports()),
        ("AttachDrive", "name", name()),
        ("AttachDrive", "path", mount()),
        ("AttachVolume", "name", name()),
        ("AttachVolume", "path", mount()),
        (
            "SleepRequest",
            "tier",
            json!({ "oneOf": null, "type": ["string", "null"], "enum": ["memory", "disk", null],
                "description": "`memory` or `disk`; default what its settings say" }),
        ),
        ("ExecRequest", "argv", argv()),
        ("ExecRequest", "command", pattern(LINE)),
        ("ExecRequest", "cwd", path_in_guest()),
        ("ExecRequest", "env", env()),
        ("ExecRequest", "user", pattern(USER)),
        ("ExecRequest", "timeout_ms", json!({ "minimum": 1, "maximum": TIMEOUT_MS_MAX })),
        ("TerminalRequest", "argv", argv()),
        ("TerminalRequest", "command", pattern(LINE)),
        ("TerminalRequest", "cwd", path_in_guest()),
        ("TerminalRequest", "env", env()),
        ("TerminalRequest", "user", pattern(USER)),
        ("TerminalRequest", "term", pattern(&term)),
        ("SignalRequest", "signal", pattern(SIGNAL)),
        ("MkdirRequest", "path", path_in_guest()),
        ("MoveRequest", "from", path_in_guest()),
        ("MoveRequest", "to", path_in_guest()),
        ("BoxExec", "command", pattern(LINE)),
        ("BoxExec", "cwd", path_in_guest()),
        ("BoxExec", "env", env()),
        ("BoxWire", "mode", json!({ "enum": ["box", "external"] })),
        ("BoxSecrets", "add", json!({ "items": text(&variable()) })),
        ("StartBox", "name", pattern(TITLE)),
        ("UpdateBox", "name", pattern(TITLE)),
        ("StartBox", "externalBaseUrl", pattern(&base)),
        ("StartBox", "secrets", json!({ "items": text(&variable()) })),
        ("StartBox", "toolchains", json!({ "maxItems": crate::boxes::NAMES_MAX })),
        ("StartBox", "size", json!({ "enum": sizes() })),
        ("ServiceSpec", "name", service),
        ("ServiceSpec", "targetPort", json!({ "not": { "enum": AGENT_PORTS } })),
        ("CreateKey", "label", pattern(LABEL)),
        ("PutSecret", "value", pattern(NO_NUL)),
        ("CreateAccount", "urlAllow", json!({ "items": text(&network) })),
        ("UpdateAccount", "urlAllow", json!({ "items": text(&network) })),
    ]
}

/// The sizes that there are, and null for the smallest.
fn sizes() -> Vec<Value> {
    SIZES.iter().map(|size| json!(size)).chain([Value::Null]).collect()
}

/// The name of a secret.
fn variable() -> String {
    format!("^[A-Za-z_][A-Za-z0-9_]{{0,{}}}$", SECRET_NAME_CHARS_MAX - 1)
}

/// Schema, and which of its fields go together or exclude each other.
fn together() -> Vec<(&'static str, Value)> {
    let nil = || json!({ "type": "null" });
    let none = || json!({ "maxItems": 0 });
    let never = || json!({ "const": false });
    let longest = |most: u32| json!({ "maxLength": most });
    vec![
        (
            "CreateSandbox",
            json!({ "anyOf": [
                { "properties": { "snapshot": nil() } },
                { "properties": { "image": nil(), "cpus": nil(), "memory_mib": nil(), "drives": none(), "volumes": none() } },
            ] }),
        ),
        (
            // The longest of their names ends in `-16`.
            "ForkRequest",
            json!({ "anyOf": [
                { "properties": { "count": nil() } },
                { "properties": { "name": nil() } },
                { "properties": { "count": { "maximum": 9 }, "name": longest(61) } },
                { "properties": { "name": longest(60) } },
            ] }),
        ),
        (
            "ExecRequest",
            json!({
                "oneOf": [
                    { "required": ["argv"], "properties": { "argv": { "type": "array" }, "command": nil() } },
                    { "required": ["command"], "properties": { "command": { "type": "string" }, "argv": nil() } },
                ],
                "anyOf": [
                    { "properties": { "open_stdin": never() } },
                    { "required": ["background"], "properties": { "background": { "const": true }, "stdin": nil() } },
                ],
            }),
        ),
        (
            "TerminalRequest",
            json!({ "anyOf": [
                { "properties": { "argv": nil() } },
                { "properties": { "command": nil() } },
            ] }),
        ),
        (
            "BoxExec",
            json!({ "oneOf": [
                {
                    "required": ["command"],
                    "properties": { "command": { "type": "string" }, "execId": nil(), "offset": nil() },
                    "anyOf": [
                        { "properties": { "openStdin": never() } },
                        { "required": ["background"], "properties": { "background": { "const": true } } },
                    ],
                },
                {
                    "required": ["execId"],
                    "properties": {
                        "execId": { "type": "string" }, "command": nil(), "background": never(), "openStdin": never(),
                    },
                },
            ] }),
        ),
        (
            "ServiceSpec",
            json!({ "anyOf": [
                {
                    "required": ["fromBox"],
                    "properties": {
                        "fromBox": { "type": "string" }, "targetPort": nil(), "web": never(),
                        "name": { "pattern": format!("^{HOST_NAME}$") },
                    },
                },
                {
                    "required": ["targetPort"],
                    "properties": { "fromBox": nil(), "fromPort": nil(), "targetPort": { "type": "integer" } },
                },
                { "properties": { "fromBox": nil(), "fromPort": nil(), "port": { "not": { "enum": AGENT_PORTS } } } },
            ] }),
        ),
    ]
}

/// What is true of a parameter of an operation.
fn parameter_rule(operation: &str, name: &str) -> Option<Value> {
    Some(match (operation, name) {
        (_, "path") => json!({ "pattern": path(r"\u0000") }),
        (_, "port") => json!({ "minimum": 1, "maximum": u16::MAX }),
        (_, "Idempotency-Key") => json!({ "pattern": IDEMPOTENCY_KEY }),
        ("agent_heartbeat" | "agent_leave", "id") => json!({ "pattern": AGENT }),
        ("write_file" | "box_put", "mode") => json!({ "pattern": MODE }),
        ("follow_events", "after") => json!({ "pattern": PLACE }),
        ("list_sandboxes", "cursor") => {
            json!({ "pattern": format!("^[0-9]{{1,{CURSOR_MS_DIGITS_MAX}}}-[a-z2-7]{{12}}$") })
        }
        ("put_secret" | "delete_secret", "name") => json!({ "pattern": variable() }),
        ("create_volume", "name") => json!({ "pattern": NAME }),
        ("attach_terminal", "columns" | "rows") => {
            let range = api::terminal::TERMINAL_SIDE_RANGE;
            json!({ "minimum": range.start(), "maximum": range.end() })
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use api::sandbox::CreateSandbox;

    use super::*;

    fn document() -> Value {
        serde_json::from_str(&super::super::document()).unwrap()
    }

    /// A rule of a property that is called otherwise now would make one that no type has.
    #[test]
    fn each_rule_is_of_a_property_that_is_there() {
        let document = document();
        for (schema, property, _) in properties() {
            let place = &document["components"]["schemas"][schema]["properties"][property];
            assert!(place["type"].is_string() || place["type"].is_array(), "{schema}.{property}");
        }
        for (schema, _) in together() {
            assert!(document["components"]["schemas"][schema]["type"].is_string(), "{schema}");
        }
    }

    #[test]
    fn no_parameter_can_be_null() {
        let document = document();
        for (path, item) in document["paths"].as_object().unwrap() {
            for operation in item.as_object().unwrap().values() {
                for parameter in operation["parameters"].as_array().into_iter().flatten() {
                    let kind = &parameter["schema"]["type"];
                    assert!(!kind.is_array(), "{path}: {}", parameter["name"]);
                }
            }
        }
    }

    /// The signals of the pattern are those that there are.
    #[test]
    fn the_pattern_of_signals_names_each() {
        let names =
            SIGNAL.split_once("(HUP").and_then(|(_, rest)| rest.strip_suffix("))$")).unwrap();
        let names: Vec<_> = format!("HUP{names}").split('|').map(str::to_owned).collect();
        assert_eq!(names.len(), 31);
        for (place, name) in names.iter().enumerate() {
            let number = i32::try_from(place).unwrap() + 1;
            assert_eq!(api::exec::signal_number(name), Some(number), "{name}");
        }
    }

    /// The examples in the document are what the checks let through.
    #[test]
    fn the_example_of_a_sandbox_is_one() {
        let document = document();
        let example = document["components"]["schemas"]["CreateSandbox"]["example"].clone();
        let request: CreateSandbox = serde_json::from_value(example).unwrap();
        crate::validate::create(&request).unwrap();
    }
}
