//! Boxes as clients of others see them: a browser, curl, Node's `fetch` and git, which know nothing of boxes, and the Inspector of the
//! Model Context Protocol. On real guests.

use std::path::Path;
use std::process::Command;

use e2e::boxes::{done, set_up, sh, start, view, wait_status};
use e2e::clients::{self, Browser, name_here, run};
use e2e::lab::{LISTEN, workspace};
use e2e::mcp::token;
use e2e::{Lab, isolated, net, test_name, until};
use serde_json::{Value, json};

/// The app's port, and that on which it comes up late.
const PORTS: [u16; 2] = [8000, 8001];

/// What everything but a page load is told of a frozen box (B19).
const FROZEN: &str = r#"{"error":"box is frozen","status":"frozen"}"#;

/// Starts a box with the app on the first port, and later, when `/work/go` is there, on the second. Its id, and the URLs of both.
fn app_box(lab: &Lab) -> (String, [String; 2]) {
    let services = json!([
        { "name": "web.internal", "port": PORTS[0], "web": true },
        { "name": "late.internal", "port": PORTS[1], "web": true },
    ]);
    let started = start(lab, &json!({ "goal": "serve", "services": services }));
    let id = started["id"].as_str().expect("an id").to_owned();
    let url = |at: usize| started["services"][at]["url"].as_str().expect("a URL").to_owned();
    let app = std::fs::read_to_string(workspace().join("tests/clients/app.py")).expect("the app");
    sh(lab, &id, &format!("cat > /work/app.py <<'END'\n{app}END"));
    sh(
        lab,
        &id,
        "cd /work && git init -q made && cd made && echo kept > file && git add file && \
         git -c user.name=x -c user.email=x@example.test commit -qm made && git clone -q --bare . ../repo.git",
    );
    let [now, late] = PORTS;
    for line in [
        format!("exec python3 /work/app.py {now}"),
        format!("until [ -e /work/go ]; do sleep 0.2; done; exec python3 /work/app.py {late}"),
    ] {
        let path = format!("/v1/boxes/{id}/exec");
        done(lab, "POST", &path, &json!({ "command": line, "background": true }));
    }
    sh(lab, &id, &format!("until ss -ltnH 'sport = :{now}' | grep -q . ; do sleep 0.1 ; done"));
    (id, [url(0), url(1)])
}

/// What the app answers its own page.
fn answered(proto: &str) -> Value {
    let body = json!({ "host": "127.0.0.1:8000", "proto": proto });
    json!({
        "fetch": { "status": 200, "kind": "application/json", "body": body },
        "post": 200, "image": 404, "events": "an event", "socket": "hello",
    })
}

/// Does something while a command runs in the box: it stays awake (B10).
fn awake<T>(lab: &Lab, id: &str, what: impl FnOnce() -> T) -> T {
    std::thread::scope(|scope| {
        let line = "touch /work/held; while [ -e /work/held ]; do sleep 0.1; done";
        let held = scope.spawn(|| sh(lab, id, line));
        sh(lab, id, "until [ -e /work/held ]; do sleep 0.1; done");
        let result = what();
        sh(lab, id, "rm /work/held");
        held.join().expect("the command ended");
        result
    })
}

/// What curl gets: status, kind, body.
fn curl(lab: &Lab, arguments: &[&str], url: &str) -> (String, String) {
    let told = ["-sS", "-w", "\n%{http_code} %{content_type}"];
    let output = run(lab, "curl", &[&told, arguments, &[url]].concat());
    assert!(output.status.success(), "curl: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    let (body, told) = text.rsplit_once('\n').expect("what was asked for");
    (told.to_owned(), body.to_owned())
}

fn fetch(lab: &Lab, url: &str) -> Value {
    let output = clients::node(lab, "fetch.mjs").arg(url).output().expect("Node.js starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn clone(lab: &Lab, url: &str, into: &Path) -> Result<(), String> {
    let into = into.to_str().expect("a path");
    let output = run(lab, "git", &["clone", "--quiet", &format!("{url}repo.git"), into]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(said) }
}

#[test]
fn b09_b15_b16_b18_b19_t17_t18_clients_of_others_at_a_box_that_is_awake_and_frozen() {
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "3"),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", "3"),
            ],
        );
        let (id, [url, late]) = app_box(lab);
        let names = [&url, &late].map(|url| net::split_link(url).0.replace(":8420", ""));
        name_here(lab, &names.each_ref().map(String::as_str));
        let api = format!("{url}api");

        // Awake, the app answers everybody.
        awake(lab, &id, || {
            let json = r#"{"host": "127.0.0.1:8000", "proto": "http"}"#;
            assert_eq!(curl(lab, &[], &api), ("200 application/json".into(), json.into()));
            let posted = curl(lab, &["--data", "a=b"], &url);
            assert_eq!(posted, ("200 text/plain".into(), "a=b".into()));
            let fetched = json!({ "status": 200, "kind": "application/json", "body": json });
            assert_eq!(fetch(lab, &api), fetched);
            let cloned = lab.scratch().join("cloned");
            clone(lab, &url, &cloned).expect("git clones");
            assert_eq!(std::fs::read_to_string(cloned.join("file")).expect("there"), "kept\n");
        });

        // Frozen, programs are told so, and thaw nothing.
        wait_status(lab, &id, "frozen");
        let told = ("503 application/json".to_owned(), FROZEN.to_owned());
        for arguments in [&[][..], &["--data", "a=b"], &["--http1.0"], &["--head"]] {
            let (status, body) = curl(lab, arguments, &api);
            assert_eq!(status, told.0, "{arguments:?}");
            assert!(arguments == ["--head"] || body == told.1, "{arguments:?}: {body}");
        }
        let fetched = json!({ "status": 503, "kind": "application/json", "body": FROZEN });
        assert_eq!(fetch(lab, &api), fetched);
        let refused = clone(lab, &url, &lab.scratch().join("not-cloned")).expect_err("frozen");
        assert!(refused.contains("The requested URL returned error: 503"), "{refused}");
        assert_eq!(view(lab, &id)["status"], "frozen");

        // A browser ends on the app's page, with whatever it has to see before.
        let mut browser = Browser::start(lab);
        let host = |url: &str| json!([net::split_link(url).0]);
        browser.tell(&json!({ "do": "open", "url": url, "title": "The app" }));
        let (opened, before) = browser.wait("opened");
        assert_eq!(
            (&opened["text"], &opened["status"], &opened["hosts"]),
            (&json!("The app"), &json!(200), &host(&url)),
            "{before:?}"
        );
        assert_eq!(opened["errors"], json!([]), "{before:?}");
        awake(lab, &id, || {
            browser.tell(&json!({ "do": "use" }));
            let used = browser.wait("used").0;
            assert_eq!(used, answered("http"));
        });

        // What its page does by itself neither thaws the box nor is held.
        wait_status(lab, &id, "frozen");
        browser.tell(&json!({ "do": "use" }));
        let used = browser.wait("used").0;
        let body = json!({ "error": "box is frozen", "status": "frozen" });
        let expected = json!({
            "fetch": { "status": 503, "kind": "application/json", "body": body },
            "post": 503, "image": 503, "events": "error", "socket": "error",
        });
        assert_eq!(used, expected);
        assert_eq!(view(lab, &id)["status"], "frozen");

        // An app that comes up late: until then the waking page stands there, then the app, without anybody's doing.
        browser.tell(&json!({ "do": "open", "url": late, "title": "The app" }));
        // More than a connection is tried for after a thaw.
        for nth in 1..=4 {
            let (title, _) = browser.wait("page");
            assert_eq!(title, "Waking this box…", "page {nth}");
        }
        sh(lab, &id, "touch /work/go");
        let (opened, before) = browser.wait("opened");
        assert_eq!(
            (&opened["text"], &opened["status"], &opened["hosts"]),
            (&json!("The app"), &json!(200), &host(&late)),
            "{before:?}"
        );
        assert_eq!(opened["errors"], json!([]), "{before:?}");
        browser.close();
    });
}

#[test]
fn t17_t18_b18_a_browser_over_https_with_http2_and_web_sockets() {
    isolated(test_name!(), |lab| {
        let (cert, key) = net::certificate(lab.scratch());
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "3"),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", "3"),
            ],
        );
        lab.stop_daemon();
        let tls = [("DORMOUSE_TLS_CERT", cert), ("DORMOUSE_TLS_KEY", key)];
        lab.daemon_env.extend(tls.map(|(name, value)| (name.to_owned(), value)));
        lab.launch();
        let socket = lab.data().join("dormouse.sock");
        until("the daemon answers", || net::call(&socket, "GET", "/v1/health", "").ok());
        let (id, [url, _]) = app_box(lab);
        let host = url.strip_prefix("https://").expect("over TLS").trim_end_matches('/');
        wait_status(lab, &id, "frozen");
        let mut browser = Browser::start(lab);
        browser.tell(&json!({ "do": "open", "url": url, "title": "The app" }));
        let (opened, before) = browser.wait("opened");
        let expected = json!({
            "text": "The app", "status": 200, "protocol": "h2", "hosts": [host], "errors": [],
        });
        assert_eq!(opened, expected, "{before:?}");
        awake(lab, &id, || {
            browser.tell(&json!({ "do": "use" }));
            assert_eq!(browser.wait("used").0, answered("https"));
        });
        browser.close();
    });
}

/// The protocol's Inspector, as its command line: what it prints as JSON.
fn inspect(lab: &Lab, way: &[&str], arguments: &[&str]) -> (Value, String) {
    const PROGRAM: &str =
        "node_modules/@modelcontextprotocol/inspector/clients/launcher/build/index.js";
    let mut inspector: Command = clients::node(lab, PROGRAM);
    inspector.arg("--cli").args(way).args(arguments).args(["--format", "json"]);
    let output = inspector.output().expect("Node.js starts");
    let (seen, said) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{way:?} {arguments:?}: {}\n{seen}\n{said}", output.status);
    let json: Value = serde_json::from_str(&seen).unwrap_or_else(|error| panic!("{error}: {seen}"));
    (json["result"].clone(), said.into_owned())
}

#[test]
fn the_inspector_finds_no_fault_in_the_tools_and_calls_them() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        let url = format!("http://{LISTEN}/mcp");
        let authorization = format!("Authorization: Bearer {}", token(lab));
        let program = lab.program();
        let socket = format!("DORMOUSE_SOCKET={}", lab.data().join("dormouse.sock").display());
        let http = |era| vec![url.as_str(), "--header", &authorization, "--protocol-era", era];
        let stdio = |era| {
            let program = program.to_str().expect("a path");
            vec![program, "mcp", "-e", &socket, "--protocol-era", era]
        };
        let mut lists = Vec::new();
        for way in [http("legacy"), http("modern"), stdio("legacy"), stdio("modern")] {
            let (list, said) = inspect(lab, &way, &["--method", "tools/list", "--strict"]);
            let tools = list["tools"].as_array().unwrap_or_else(|| panic!("{list}\n{said}"));
            let names: Vec<_> = tools.iter().map(|tool| tool["name"].clone()).collect();
            assert!(names.len() >= 13, "{way:?}: {names:?}");
            assert_eq!(said.trim(), "", "{way:?}: nothing to say about their schemas");
            lists.push(names);
        }
        assert!(lists.iter().all(|names| *names == lists[0]), "everywhere the same: {lists:?}");

        let call = |way: &[&str], tool: &str, arguments: &Value| {
            let arguments = arguments.to_string();
            let call = ["--method", "tools/call", "--tool-name", tool, "--tool-args-json"];
            let result = inspect(lab, way, &[&call, &[arguments.as_str()][..]].concat()).0;
            assert_ne!(result["isError"], true, "{tool}: {result}");
            result
        };
        let goal = json!({ "goal": "be inspected" });
        let started = call(&http("modern"), "sandbox_start", &goal);
        let id = &started["structuredContent"]["id"];
        let line = json!({ "id": id, "command": "echo $((6 * 7))" });
        for way in [http("legacy"), stdio("modern")] {
            let ran = call(&way, "sandbox_exec", &line);
            assert_eq!(ran["content"][0]["text"], "42\n[exit code 0]", "{way:?}");
        }
        let stopped = call(&stdio("legacy"), "sandbox_stop", &json!({ "id": id }));
        assert_eq!(stopped["structuredContent"]["status"], "terminated");
    });
}
