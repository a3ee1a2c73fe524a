//! A box, as a person reads it. Names, goals and what its AI said are others' words: they are shown as plain text in one line.

use api::boxes::view::{AgentState, AgentView, BoxCheckpointView, BoxEvent, BoxView, ServiceView};
use api::boxes::{BoxFreeze, BoxStatus};

use crate::problem::Problem;
use crate::show;

/// Most characters of a name, of a reason and of a goal in the table.
const NAME_CHARS: usize = 24;
const WHY_CHARS: usize = 40;
const GOAL_CHARS: usize = 40;
/// Most characters of the name of an AI's program in the table.
const CLIENT_CHARS: usize = 20;

/// Boxes in a table, as they come.
pub(super) fn table(boxes: &[BoxView]) -> Result<(), Problem> {
    let rows: Vec<_> = boxes.iter().map(row).collect();
    show::table(&["ID", "NAME", "STATUS", "WHY", "AGENT", "GOAL"], &rows)
}

fn row(view: &BoxView) -> Vec<String> {
    let short = |text: &Option<String>, most| {
        text.as_deref().map(|text| show::short_plain(text, most)).unwrap_or_default()
    };
    let agent = view.agent.as_ref().map(|agent| {
        let client = short(&agent.client, CLIENT_CHARS);
        let state = agent_state(agent.state);
        if client.is_empty() { state.to_owned() } else { format!("{state} ({client})") }
    });
    vec![
        view.id.clone(),
        short(&view.name, NAME_CHARS),
        status(view),
        show::short_plain(&why(view), WHY_CHARS),
        agent.unwrap_or_default(),
        short(&view.goal, GOAL_CHARS),
    ]
}

/// Where in its life it is, and whether it could come back.
pub(super) fn status(view: &BoxView) -> String {
    let status = view.status.as_str();
    match view.restorable_until {
        Some(_) => format!("{status} (restorable)"),
        None => status.to_owned(),
    }
}

/// Why it is frozen or has ended; of one that is awake what holds it, or when it is frozen. Empty where there is nothing to say.
fn why(view: &BoxView) -> String {
    if let Some(reason) = &view.status_reason {
        return show::plain(reason);
    }
    match (&view.freeze, view.status) {
        (_, BoxStatus::Frozen) => format!("last used {}", show::age(&view.last_used_at)),
        (Some(BoxFreeze { blocked_by, .. }), _) if !blocked_by.is_empty() => {
            let kinds: Vec<_> = blocked_by.iter().map(|one| show::plain(&one.kind)).collect();
            format!("held by {}", kinds.join(", "))
        }
        (Some(BoxFreeze { at: Some(at), .. }), _) => format!("freezes {}", show::age(at)),
        _ => String::new(),
    }
}

/// Id, and name where it has one.
pub(super) fn called(view: &BoxView) -> String {
    match &view.name {
        Some(name) => format!("{} ({})", view.id, show::plain(name)),
        None => view.id.clone(),
    }
}

/// What it is and why, in a line.
pub(super) fn headline(view: &BoxView) -> String {
    let why = why(view);
    let why = if why.is_empty() { why } else { format!(": {why}") };
    format!("{} is {}{why}", called(view), status(view))
}

/// Everything a person asks about one, most important first; lines without the last line break.
pub(super) fn describe(view: &BoxView) -> String {
    let mut lines = Lines(Vec::new());
    lines.option("name", view.name.as_deref());
    lines.add("id", &view.id);
    lines.add("status", &status(view));
    lines.option("why", view.status_reason.as_deref());
    if let Some(freeze) = &view.freeze {
        for blocker in &freeze.blocked_by {
            let until = blocker.until.as_deref().map(|at| format!(", until {}", show::time(at)));
            lines.add("awake", &format!("held by {}{}", blocker.kind, until.unwrap_or_default()));
        }
        if let Some(at) = &freeze.at {
            lines.add("freezes", &format!("at {}, unless something uses it", show::time(at)));
        }
    }
    lines.time("stops", view.stops_at.as_deref(), ", for good, unless something uses it");
    lines.option("warning", view.warning.as_deref());
    lines.option(
        "restorable",
        view.restorable_until.as_deref().map(|at| format!("until {}", show::time(at))).as_deref(),
    );
    lines.time("ended", view.ended_at.as_deref(), "");
    lines.option("goal", view.goal.as_deref());
    lines.option("agent", view.agent.as_ref().map(agent).as_deref());
    lines.option("said last", view.said.as_deref());
    lines.time("used", Some(&view.last_used_at), "");
    // Of one that has ended no URL leads anywhere.
    if view.ended_at.is_none() {
        lines.add("url", view.web_url.as_ref().unwrap_or(&view.scene_url));
        lines.option("opens", view.box_url_access.as_deref());
    }
    for one in &view.services {
        lines.add("service", &service(one));
        lines.option("", one.warning.as_deref());
    }
    lines.option("external", view.external_base_url.as_deref());
    if !view.secrets.is_empty() {
        lines.add("secrets", &view.secrets.join(", "));
    }
    if let Some(status) = &view.checkpoint {
        lines.add("checkpoints", &checkpoint(status));
        lines.option("", status.error.as_deref());
    }
    lines.add("size", &format!("{} ({} cpu, {} GiB)", view.size, view.vcpus, view.memory_gb));
    if view.idle_timeout_min > 0 {
        lines.add("idle limit", &show::seconds(view.idle_timeout_min.saturating_mul(60)));
    }
    lines.time("created", Some(&view.created_at), "");
    lines.0.join("\n")
}

/// Lines with a label before each.
struct Lines(Vec<String>);

impl Lines {
    fn add(&mut self, label: &str, text: &str) {
        self.0.push(format!("{label:<12}{}", show::plain(text)));
    }

    fn option(&mut self, label: &str, text: Option<&str>) {
        if let Some(text) = text {
            self.add(label, text);
        }
    }

    fn time(&mut self, label: &str, at: Option<&str>, more: &str) {
        if let Some(at) = at {
            self.add(label, &format!("{}{more}", show::time(at)));
        }
    }
}

fn agent(agent: &AgentView) -> String {
    let client = agent.client.as_deref().map(|client| format!("{client}, ")).unwrap_or_default();
    format!("{client}{}, used it {} ago", agent_state(agent.state), show::seconds(agent.idle_sec))
}

fn agent_state(state: AgentState) -> &'static str {
    match state {
        AgentState::Working => "working",
        AgentState::Away => "away",
        AgentState::Idle => "idle",
        AgentState::Left => "left",
    }
}

fn service(service: &ServiceView) -> String {
    let mut text = format!("{}:{}", service.name, service.port);
    let target = match (&service.from_box, service.from_port) {
        (Some(there), Some(port)) => format!("port {port} of box {there}"),
        (Some(there), None) => format!("box {there}"),
        (None, _) if service.mode == "external" => "the external base".to_owned(),
        (None, _) => format!("port {}", service.target_port),
    };
    text = format!("{text} to {target}");
    match &service.url {
        Some(url) => format!("{text}, {url}"),
        None => text,
    }
}

/// How its checkpoints stand.
pub(super) fn checkpoint(checkpoint: &BoxCheckpointView) -> String {
    let every = checkpoint.every_seconds.map_or_else(
        || "off".to_owned(),
        |seconds| format!("each {} awake", show::seconds(seconds)),
    );
    match (&checkpoint.last_at, checkpoint.behind_seconds) {
        (Some(at), Some(behind)) => {
            let size = show::size(checkpoint.stored_bytes);
            format!("{every}; last at {}, {} behind, {size}", show::time(at), show::seconds(behind))
        }
        _ if checkpoint.every_seconds.is_some() => format!("{every}; none yet"),
        _ => every,
    }
}

/// An entry of the timeline: time, state, why.
pub(super) fn event(event: &BoxEvent) -> String {
    let text = match &event.said {
        Some(said) => format!("{}: {said}", event.reason),
        None => event.reason.clone(),
    };
    format!("{}  {:<11} {}", event.at, event.status.as_str(), show::plain(&text))
}

/// The URL of a service, given as `NAME` or `NAME:PORT`; without, the one that people open.
pub(super) fn url(view: &BoxView, given: Option<&str>) -> Result<String, Problem> {
    let Some(given) = given else {
        return Ok(view.web_url.clone().unwrap_or_else(|| view.scene_url.clone()));
    };
    let mut with_url = view.services.iter().filter_map(|one| Some((one, one.url.as_ref()?)));
    let is_meant =
        |one: &ServiceView| one.name == given || format!("{}:{}", one.name, one.port) == given;
    let mut meant = with_url.clone().filter(|(one, _)| is_meant(one));
    match (meant.next(), meant.next()) {
        (Some((_, url)), None) => Ok(url.clone()),
        (first, _) => {
            let (id, given) = (&view.id, show::plain(given));
            let text = match first {
                None => format!("box {id} has no service `{given}` with a URL"),
                Some(_) => format!("box {id} has several services `{given}` with a URL"),
            };
            let names: Vec<_> =
                with_url.by_ref().map(|(one, _)| format!("{}:{}", one.name, one.port)).collect();
            Err(Problem::new(text).hint(if names.is_empty() {
                "none of its services has one; without a name the box's own is printed".to_owned()
            } else {
                format!("those that have one: {}", names.join(", "))
            }))
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// A box that is awake, with these fields besides.
    fn box_with(more: &Value) -> BoxView {
        let mut box_ = json!({
            "id": "k3b5qj2m4x7a", "status": "ready", "arch": "amd64", "placement": "microvm", "startedFrom": "snapshot",
            "size": 1, "vcpus": 2, "memoryGb": 8.0, "sceneUrl": "http://k3-key.box.localhost:8420/", "services": [],
            "secrets": [], "toolchains": [], "idleTimeoutMin": 0,
            "lastUsedAt": "2020-01-01T00:00:00.000Z", "createdAt": "2020-01-01T00:00:00.000Z",
        });
        for (field, value) in more.as_object().unwrap() {
            box_[field] = value.clone();
        }
        serde_json::from_value(box_).unwrap()
    }

    /// A box that is awake.
    pub(in super::super) fn example() -> BoxView {
        box_with(&json!({}))
    }

    /// The rest of the line with this label.
    fn line(text: &str, label: &str) -> Option<String> {
        let begins = format!("{label:<12}");
        text.lines().find_map(|line| line.strip_prefix(&begins)).map(str::to_owned)
    }

    #[test]
    fn a_row_says_why_it_is_frozen_or_awake() {
        let goal = "The refund button books a refund; done when it works in the browser.";
        let frozen = row(&box_with(&json!({
            "status": "frozen", "name": "Refunds", "goal": goal,
            "agent": { "state": "away", "idleSec": 900, "client": "claude-code" },
        })));
        assert_eq!(frozen[..3], ["k3b5qj2m4x7a", "Refunds", "frozen"]);
        assert!(frozen[3].starts_with("last used "), "{frozen:?}");
        assert_eq!(frozen[4], "away (claude-code)");
        assert_eq!(frozen[5], "The refund button books a refund; done…");
        let reason = "the account has no credit: it stays frozen and keeps everything";
        let frozen = row(&box_with(&json!({ "status": "frozen", "statusReason": reason })));
        assert_eq!(frozen[3], "the account has no credit: it stays fro…");
        let held = json!({ "blockedBy": [{ "kind": "background" }, { "kind": "link" }] });
        assert_eq!(row(&box_with(&json!({ "freeze": held })))[3], "held by background, link");
        let quiet = json!({ "at": "2020-01-01T00:00:00Z", "blockedBy": [] });
        assert!(row(&box_with(&json!({ "freeze": quiet })))[3].starts_with("freezes "));
        let stopped = row(&box_with(&json!({
            "status": "terminated", "statusReason": "frozen and unused for 24 hours", "restorableUntil": "2020-01-02T00:00:00Z",
        })));
        assert_eq!(stopped[2..4], ["terminated (restorable)", "frozen and unused for 24 hours"]);
        assert_eq!(row(&example())[3..], ["", "", ""]);
    }

    #[test]
    fn what_its_ai_wrote_cannot_touch_the_terminal() {
        let view = box_with(&json!({
            "name": "a\u{1b}]0;b", "goal": "g\nid          fake", "said": "done\r\u{1b}[2J",
            "agent": { "state": "working", "idleSec": 1, "client": "x\u{9b}31m" },
        }));
        let shown = [row(&view).concat(), describe(&view).replace('\n', ""), headline(&view)];
        for text in shown {
            assert!(!text.contains(char::is_control), "{text:?}");
        }
        assert_eq!(line(&describe(&view), "id").as_deref(), Some("k3b5qj2m4x7a"));
        let said = BoxEvent {
            at: "2026-12-01T12:00:00.000Z".to_owned(),
            status: BoxStatus::Ready,
            reason: "its AI says so".to_owned(),
            said: Some("one\u{1b}[2J\ntwo".to_owned()),
        };
        assert_eq!(
            event(&said),
            "2026-12-01T12:00:00.000Z  ready       its AI says so: one [2J two"
        );
    }

    #[test]
    fn everything_about_one() {
        let text = describe(&box_with(&json!({
            "name": "Refunds", "goal": "It works.", "webUrl": "http://web/",
            "freeze": { "at": "2020-01-01T00:10:00Z", "blockedBy": [{ "kind": "url", "until": "2020-01-01T02:00:00Z" }] },
            "stopsAt": "2020-01-02T00:10:00.000Z", "warning": "box k3b5qj2m4x7a: soon",
            "agent": { "state": "working", "idleSec": 12, "client": "claude-code" },
            "services": [
                { "name": "shop.internal", "port": 80, "targetPort": 8080, "web": true, "mode": "box", "url": "http://web/" },
                { "name": "db", "port": 5432, "targetPort": 5432, "web": false, "mode": "link", "fromBox": "aaaaaaaaaaaa", "fromPort": 5433, "warning": "it has ended" },
                { "name": "pay", "port": 443, "targetPort": 443, "web": false, "mode": "external" },
            ],
            "secrets": ["A", "B"], "idleTimeoutMin": 90,
            "checkpoint": { "everySeconds": 10, "storedBytes": 0, "error": "the store is away" },
        })));
        let is = |label: &str, want: &str| {
            let line = line(&text, label).unwrap_or_else(|| panic!("no {label}: {text}"));
            assert!(line.starts_with(want), "{label}: {line}");
        };
        is("name", "Refunds");
        is("status", "ready");
        is("awake", "held by url, until 2020-01-01T02:00:00Z (");
        is("freezes", "at 2020-01-01T00:10:00Z (");
        is("stops", "2020-01-02T00:10:00Z (");
        is("agent", "claude-code, working, used it 12 s ago");
        is("url", "http://web/");
        is("service", "shop.internal:80 to port 8080, http://web/");
        assert!(
            text.contains("db:5432 to port 5433 of box aaaaaaaaaaaa\n            it has ended\n"),
            "{text}"
        );
        assert!(text.contains("pay:443 to the external base\n"), "{text}");
        is("secrets", "A, B");
        is("checkpoints", "each 10 s awake; none yet");
        is("size", "1 (2 cpu, 8 GiB)");
        is("idle limit", "90 min");
        assert_eq!(line(&text, "restorable"), None);
        assert_eq!(headline(&example()), "k3b5qj2m4x7a is ready");
        let ended = describe(&box_with(
            &json!({ "status": "terminated", "endedAt": "2020-01-01T00:00:00Z" }),
        ));
        assert_eq!(line(&ended, "url"), None, "{ended}");
    }

    #[test]
    fn urls_of_services() {
        let service = |name: &str, port: u16, url: Option<&str>| json!({ "name": name, "port": port, "targetPort": port, "web": url.is_some(), "mode": "box", "url": url });
        let view = box_with(&json!({
            "webUrl": "http://web/",
            "services": [service("a", 80, Some("http://a/")), service("b", 1, Some("http://b1/")), service("b", 2, Some("http://b2/")), service("c", 3, None)],
        }));
        let told = |given| url(&view, given).unwrap();
        assert_eq!(
            (told(None), told(Some("a"))),
            ("http://web/".to_owned(), "http://a/".to_owned())
        );
        assert_eq!(told(Some("b:2")), "http://b2/");
        for (given, text) in
            [("b", "several services `b`"), ("c", "no service `c`"), ("x", "no service `x`")]
        {
            let refused = url(&view, Some(given)).unwrap_err().sentence();
            assert!(refused.contains(text) && refused.contains("a:80, b:1, b:2"), "{refused}");
        }
        assert_eq!(url(&example(), None).unwrap(), "http://k3-key.box.localhost:8420/");
        assert!(
            url(&example(), Some("a")).unwrap_err().sentence().contains("none of its services")
        );
    }
}
