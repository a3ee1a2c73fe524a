//! A whole session of an AI agent over the adapter: a box with two services, a project that is copied in and run, a page that a person
//! opens, a freeze, an agent that dies, and another one that goes on.
//!
//! What was called and answered stands in `docs/mcp-session.md`, without what differs from run to run; `DORMOUSE_BLESS=1` writes it
//! anew.

use std::fs;

use e2e::boxes::{PAGE_LOAD, get, set_up, view, wait_status};
use e2e::lab::workspace;
use e2e::mcp::Adapter;
use e2e::{isolated, proc, test_name, until};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Counts in memory alone.
const API: &str = "import http.server as h, json, os\n\
    class A(h.BaseHTTPRequestHandler):\n\
    \x20   n = 0\n\
    \x20   def do_GET(self):\n\
    \x20       A.n += 1\n\
    \x20       b = json.dumps({'count': A.n, 'pid': os.getpid()}).encode()\n\
    \x20       self.send_response(200); self.send_header('Content-Length', str(len(b))); self.end_headers(); self.wfile.write(b)\n\
    \x20   def log_message(self, *a): pass\n\
    h.ThreadingHTTPServer(('0.0.0.0', 9000), A).serve_forever(poll_interval=None)\n";

/// Shows what the other service says, by its name.
const WEB: &str = "import http.server as h, os, urllib.request\n\
    class W(h.BaseHTTPRequestHandler):\n\
    \x20   def do_GET(self):\n\
    \x20       api = urllib.request.urlopen('http://api.shop.internal/').read().decode()\n\
    \x20       b = f'<h1>Visits</h1><p>{api}</p><p>{os.getpid()}</p>'.encode()\n\
    \x20       self.send_response(200); self.send_header('Content-Type', 'text/html'); self.send_header('Content-Length', str(len(b)))\n\
    \x20       self.end_headers(); self.wfile.write(b)\n\
    \x20   def log_message(self, *a): pass\n\
    h.ThreadingHTTPServer(('127.0.0.1', 8080), W).serve_forever(poll_interval=None)\n";

/// What is written down of a session.
struct Transcript {
    text: String,
    id: String,
}

impl Transcript {
    fn says(&mut self, who: &str, what: &str) {
        let what = if self.id.is_empty() {
            what.to_owned()
        } else {
            what.replace(&self.id, "k3b5qj2m4x7a")
        };
        self.text.extend(["**", who, "** ", &what, "\n\n"]);
    }

    /// Calls a tool, and writes down these fields of the answer.
    fn call(
        &mut self,
        agent: &mut Adapter,
        tool: &str,
        arguments: &Value,
        fields: &[&str],
    ) -> Value {
        let answer = agent.done(tool, arguments);
        if self.id.is_empty()
            && let Some(id) = answer["id"].as_str()
        {
            id.clone_into(&mut self.id);
        }
        self.says("calls", &format!("`{tool}` `{arguments}`"));
        let told: Vec<String> =
            fields.iter().map(|field| format!("`{field}`: `{}`", answer[*field])).collect();
        if !told.is_empty() {
            self.says("gets", &told.join(", "));
        }
        answer
    }
}

#[test]
fn b16_b35_b37_an_agent_makes_something_dies_and_another_goes_on() {
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "4"),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", "4"),
                ("DORMOUSE_BOX_PAGE_HOLD_MS", "30000"),
                ("DORMOUSE_BOX_AGENT_SILENCE_SECONDS", "3"),
            ],
        );
        let project = lab.scratch().join("shop");
        fs::create_dir_all(project.join("node_modules")).expect("made");
        for (name, text) in [
            ("api.py", API),
            ("web.py", WEB),
            (".gitignore", "node_modules/\n"),
            ("node_modules/x.js", "no"),
        ] {
            fs::write(project.join(name), text).expect("written");
        }
        let goal =
            "A page that shows how often it was visited; done when it counts in the browser.";
        let mut said = Transcript { text: String::new(), id: String::new() };

        let mut first = Adapter::start(lab, &project, &[]);
        let services = json!([
            { "name": "api.shop.internal", "port": 80, "targetPort": 9000 },
            { "name": "shop.internal", "port": 8080, "web": true },
        ]);
        let started = said.call(
            &mut first,
            "sandbox_start",
            &json!({ "name": "Visits", "goal": goal, "services": services }),
            &["status", "vcpus", "memoryGb"],
        );
        let id = started["id"].as_str().expect("an id").to_owned();
        let url = started["webUrl"].as_str().expect("a URL").to_owned();
        said.call(&mut first, "sandbox_sync", &json!({ "id": id }), &["sent", "deleted", "to"]);
        for name in ["api", "web"] {
            let command = format!("exec python3 /work/{name}.py");
            said.call(
                &mut first,
                "sandbox_exec",
                &json!({ "id": id, "command": command, "background": true }),
                &["running"],
            );
        }
        let wait = "until ss -ltnH 'sport = :8080' | grep -q . && ss -ltnH 'sport = :9000' | grep -q . ; do sleep 0.1 ; done; curl -s http://api.shop.internal/ | cut -c1-11";
        said.call(
            &mut first,
            "sandbox_exec",
            &json!({ "id": id, "command": wait }),
            &["exitCode", "output"],
        );
        let page = get(&url, "GET", &PAGE_LOAD);
        assert_eq!(page.status, 200, "{}", page.body);
        assert!(page.body.contains("\"count\": 2"), "{}", page.body);
        said.says("A person", "opens `webUrl` and sees the page: count 2.");
        let processes = |page: &str| -> Vec<String> {
            let digits = page.split(|char: char| !char.is_ascii_digit());
            digits.filter(|word| word.len() >= 3).map(str::to_owned).collect()
        };
        let before = processes(&page.body);

        wait_status(lab, &id, "frozen");
        assert_eq!(
            proc::qemus_below(&lab.data()),
            Vec::<i32>::new(),
            "no process is left of a frozen box"
        );
        said.says(
            "The box",
            "is frozen after its quiet time; no process of it is left on the host.",
        );
        let page = get(&url, "GET", &PAGE_LOAD);
        assert!(page.body.contains("\"count\": 3"), "{}", page.body);
        assert_eq!(processes(&page.body), before, "the same processes");
        said.says("A person", "opens `webUrl` again: count 3, from the same processes.");

        proc::kill(first.pid(), Signal::KILL);
        drop(first);
        until("the conversation is gone", || {
            (view(lab, &id)["agent"]["state"] == "left").then_some(())
        });
        said.says(
            "The first agent",
            "is killed; three silent minutes later its conversation counts as left.",
        );

        let elsewhere = lab.scratch().join("elsewhere");
        fs::create_dir_all(&elsewhere).expect("made");
        let mut second = Adapter::start(lab, &elsewhere, &[]);
        let listed = second.done("sandbox_list", &json!({}));
        let found = listed["boxes"]
            .as_array()
            .expect("boxes")
            .iter()
            .find(|one| one["goal"] == goal)
            .expect("found by its goal");
        assert_eq!((&found["id"], &found["agent"]["state"]), (&json!(id), &json!("left")));
        said.says(
            "A second agent",
            &format!("calls `sandbox_list` and finds {id} by its goal, `agent.state`: `left`."),
        );
        said.call(
            &mut second,
            "sandbox_exec",
            &json!({ "id": id, "command": "curl -s http://api.shop.internal/ | cut -c1-11" }),
            &["exitCode", "output"],
        );
        let status = said.call(
            &mut second,
            "sandbox_status",
            &json!({ "id": id }),
            &["thisConversation", "status"],
        );
        assert_eq!(status["agent"]["state"], "working", "{status}");
        said.call(&mut second, "sandbox_stop", &json!({ "id": id }), &[]);
        assert_eq!(view(lab, &id)["status"], "terminated");
        second.close();

        let text = format!(
            "# A session over MCP\n\nTwo agents and a person, as a test has seen them (`tests/tests/agent.rs`), with short times; the id stands for any.\n\n{}",
            said.text.trim_end()
        ) + "\n";
        let path = workspace().join("docs/mcp-session.md");
        if std::env::var_os("DORMOUSE_BLESS").is_some() {
            fs::write(&path, &text).expect("written");
        }
        let stands = fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(
            stands, text,
            "docs/mcp-session.md is of another session: write it anew with DORMOUSE_BLESS=1"
        );
    });
}
