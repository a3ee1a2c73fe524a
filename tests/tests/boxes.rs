//! Boxes: used, frozen, thawed, stopped for good, and brought back, on real guests.

use std::net::TcpStream;

use e2e::boxes::{
    self, PAGE_LOAD, call, done, get, serve_counter, set_up, sh, start, view, wait_status,
};
use e2e::{isolated, proc, test_name, until};
use serde_json::{Value, json};

fn id_of(box_: &Value) -> String {
    box_["id"].as_str().expect("an id").to_owned()
}

fn web_box(lab: &e2e::Lab) -> (String, String) {
    let services = json!([{ "name": "web.internal", "port": 8000, "web": true }, { "name": "api.internal", "port": 9000 }]);
    let started = start(lab, &json!({ "goal": "count", "services": services }));
    (id_of(&started), started["webUrl"].as_str().expect("a URL").to_owned())
}

#[test]
fn b01_b02_b04_b08_b16_b18_b19_b44_t18_a_box_freezes_and_a_page_load_thaws_it_with_nothing_lost() {
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "3"),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", "3"),
                ("DORMOUSE_BOX_PAGE_HOLD_MS", "30000"),
            ],
        );
        let (id, url) = web_box(lab);
        serve_counter(lab, &id, 8000);
        let first = get(&url, "GET", &[]);
        assert_eq!(first.status, 200, "{}", first.head);
        let words: Vec<&str> = first.body.split(' ').collect();
        assert_eq!(words[0], "1");
        assert_eq!(words[2], "127.0.0.1:8000", "T18: Host");
        assert!(url.contains(words[3]), "T18: X-Forwarded-Host");
        let frozen = wait_status(lab, &id, "frozen");
        assert_eq!(
            proc::qemus_below(&lab.data()),
            Vec::<i32>::new(),
            "a frozen box has no process"
        );
        assert!(frozen["stopsAt"].is_string() && frozen["freeze"].is_null(), "B25: {frozen}");

        // B19: nothing else thaws it, and nothing else is held.
        for (method, headers) in [
            ("GET", vec![]),
            ("GET", vec![("Sec-Fetch-Mode", "cors"), ("Accept", "text/html")]),
            ("POST", vec![("Sec-Fetch-Mode", "navigate")]),
            ("GET", vec![("Upgrade", "websocket"), ("Connection", "upgrade")]),
        ] {
            let answer = get(&url, method, &headers);
            assert_eq!(answer.status, 503, "{method} {headers:?}");
            assert_eq!(answer.body, r#"{"error":"box is frozen","status":"frozen"}"#);
        }
        // B4: telling about it is no use.
        done(lab, "GET", "/v1/boxes", &Value::Null);
        assert_eq!(view(lab, &id)["status"], "frozen");

        let thawed = get(&url, "GET", &PAGE_LOAD);
        assert_eq!(thawed.status, 200, "{}", thawed.body);
        let again: Vec<&str> = thawed.body.split(' ').collect();
        assert_eq!(
            (again[0], again[1]),
            ("2", words[1]),
            "the same process, the count in its memory"
        );
        assert_eq!(view(lab, &id)["webUrl"], url.as_str(), "B16: the same URL");
        let timeline = done(lab, "GET", &format!("/v1/boxes/{id}/events"), &Value::Null);
        let statuses: Vec<_> = timeline["events"]
            .as_array()
            .expect("B2")
            .iter()
            .map(|event| event["status"].clone())
            .collect();
        assert!(statuses.iter().any(|status| status == "frozen"), "{timeline}");
        // S-face and B-face do not know each other (B44).
        let answer = call(lab, "GET", &format!("/v1/sandboxes/{id}"), &Value::Null);
        assert_eq!(answer.0, 404, "{}", answer.1);
        assert_eq!(lab.json(&["sandboxes", "list"]), json!([]));
    });
}

#[test]
fn t17_a_url_on_which_nothing_listens_says_so_while_the_box_is_new() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        let (_, url) = web_box(lab);
        let asked = std::time::Instant::now();
        let answer = get(&url, "GET", &PAGE_LOAD);
        eprintln!("after {:?}: {} {}", asked.elapsed(), answer.head, answer.body);
        assert_eq!(answer.status, 502, "{} {}", answer.head, answer.body);
        assert!(answer.body.contains("nothing listens on port 8000"), "{}", answer.body);
    });
}

#[test]
fn b18_the_waking_page_comes_where_a_page_load_would_have_to_wait() {
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "2"),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", "2"),
                ("DORMOUSE_BOX_PAGE_HOLD_MS", "0"),
            ],
        );
        let (id, url) = web_box(lab);
        serve_counter(lab, &id, 8000);
        wait_status(lab, &id, "frozen");
        let headers = [PAGE_LOAD[0], PAGE_LOAD[1], ("Accept-Language", "ja,en;q=0.5")];
        let page = get(&url, "GET", &headers);
        assert_eq!(page.status, 503, "{}", page.head);
        assert_eq!(page.header("retry-after"), Some("3"));
        assert_eq!(page.header("cache-control"), Some("no-store"));
        assert!(
            page.body.contains("自動で再読み込み") && page.body.contains("http-equiv=\"refresh\""),
            "{}",
            page.body
        );
        // It goes on by itself: reloading is answered by the app.
        let answer = until("the app answers", || {
            let answer = get(&url, "GET", &PAGE_LOAD);
            (answer.status == 200).then_some(answer)
        });
        assert!(answer.body.starts_with("1 "), "{}", answer.body);
    });
}

#[test]
fn b21_b23_b27_b29_b30_t14_stopped_for_good_it_can_be_brought_back_as_it_was() {
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "2"),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", "2"),
                ("DORMOUSE_BOX_STOP_AFTER_SECONDS", "3"),
            ],
        );
        let (id, url) = web_box(lab);
        serve_counter(lab, &id, 8000);
        assert_eq!(get(&url, "GET", &[]).status, 200);
        let goal = view(lab, &id)["goal"].clone();
        let stopped = wait_status(lab, &id, "terminated");
        let reason = stopped["statusReason"].as_str().expect("B29");
        assert!(reason.starts_with("frozen and unused for"), "{reason}");
        assert!(
            stopped["restorableUntil"].is_string() && stopped["stopsAt"].is_null(),
            "{stopped}"
        );
        let answer = get(&url, "GET", &PAGE_LOAD);
        assert_eq!(
            (answer.status, answer.body.as_str()),
            (503, r#"{"error":"box is terminated","status":"terminated"}"#),
            "B21"
        );
        let (status, refused) =
            call(lab, "POST", &format!("/v1/boxes/{id}/exec"), &json!({ "command": "true" }));
        assert_eq!(status, 409, "{refused}");
        assert!(
            refused["hint"].as_str().expect("how to get it back").contains("\"restore\""),
            "{refused}"
        );
        // Also a daemon that was killed meanwhile knows.
        lab.kill_daemon();
        lab.start();
        assert_eq!(view(lab, &id)["status"], "terminated");

        // Of several who ask at once all get it.
        let restore = json!({ "restore": id, "goal": "go on" });
        let answers = std::thread::scope(|scope| {
            let asks = [(); 4].map(|()| scope.spawn(|| start(lab, &restore)));
            asks.map(|ask| ask.join().expect("an answer"))
        });
        for back in &answers {
            assert_eq!(
                (&back["id"], &back["status"], &back["goal"]),
                (&json!(id), &json!("ready"), &goal),
                "T14: its goal is its own"
            );
        }
        let did =
            |back: &&Value| back["next"].as_str().is_some_and(|next| next.contains("as it was"));
        let [back] = answers.iter().filter(did).collect::<Vec<_>>()[..] else {
            panic!("one brought it back: {answers:?}")
        };
        let answer = get(back["webUrl"].as_str().expect("its URL"), "GET", &[]);
        assert!(answer.body.starts_with("2 "), "its program and memory: {}", answer.body);
        // Stopped by somebody it keeps no copy.
        let path = format!("/v1/boxes/{id}");
        done(lab, "DELETE", &path, &Value::Null);
        let (status, refused) =
            call(lab, "POST", "/v1/boxes", &json!({ "restore": id, "goal": "x" }));
        assert_eq!(status, 409, "{refused}");
        let listed = done(lab, "GET", "/v1/boxes?all=1", &Value::Null);
        assert_eq!(listed["boxes"][0]["status"], "terminated", "B30: {listed}");
        assert_eq!(done(lab, "GET", "/v1/boxes", &Value::Null)["boxes"], json!([]));
    });
}

#[test]
fn b24_an_idle_timeout_and_what_it_says() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        let started = start(lab, &json!({ "goal": "x", "idleTimeoutMin": 20_000 }));
        assert_eq!(started["idleTimeoutMin"], 10_080);
        assert!(
            started["idleTimeoutNote"].as_str().expect("a note").contains("10080"),
            "{started}"
        );
    });
}

#[test]
fn t01_t03_t04_t05_t17_t19_what_a_start_answers() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        let services = json!([
            { "name": "db.internal", "port": 5432 },
            { "name": "web.internal", "port": 80, "targetPort": 8080, "web": true },
            { "name": "admin.internal", "port": 8090, "web": true },
        ]);
        let goal = "é".repeat(600);
        let started = start(
            lab,
            &json!({ "name": "Refunds", "goal": goal, "services": services, "toolchains": ["python"] }),
        );
        assert_eq!(started["goal"].as_str().expect("a goal").chars().count(), 500);
        for (field, expected) in [
            ("arch", json!("amd64")),
            ("startedFrom", json!("snapshot")),
            ("placement", json!("microvm")),
            ("status", json!("ready")),
            ("size", json!(1)),
            ("vcpus", json!(1)),
            ("memoryGb", json!(0.5)),
            ("name", json!("Refunds")),
        ] {
            assert_eq!(started[field], expected, "{field}");
        }
        let note = started["toolchainsNote"].as_str().expect("T4");
        assert!(note.contains("python3 (3.11, without pip and venv)"), "T4: {note}");
        let has = "python3 --version; for name in pip pip3 go node; do command -v $name; done; python3 -m venv /tmp/v > /tmp/told || echo no venv";
        let has = sh(lab, started["id"].as_str().expect("an id"), has);
        let (version, rest) = has.split_once('\n').expect("lines");
        assert!(version.starts_with("Python 3.11"), "T4: {has}");
        assert!(!rest.contains("/bin/") && rest.ends_with("no venv"), "T4: {has}");
        let scene = started["sceneUrl"].as_str().expect("a URL");
        let web = started["webUrl"].as_str().expect("a URL");
        assert!(web.contains("-8080.box.localhost"), "{web}");
        assert_eq!(started["services"][1]["url"], web);
        assert!(started["services"][0]["url"].is_null());
        // The key is the only guard: a wrong one is answered like a box that does not exist, a hidden port like none.
        let id = id_of(&started);
        let wrong = scene.replace(&id, "aaaaaaaaaaaa");
        let absent = get(&wrong, "GET", &[]);
        assert_eq!(absent.status, 404);
        let key = scene.split('-').nth(1).and_then(|rest| rest.split('.').next()).expect("a key");
        let bad_key = scene.replace(key, &"a".repeat(key.len()));
        let hidden = web.replace("-8080.", "-5432.");
        for url in [bad_key, hidden, web.replace("-8080.", "-8081.")] {
            let answer = get(&url, "GET", &[]);
            assert_eq!((answer.status, &answer.body), (404, &absent.body), "{url}");
        }
        let none = start(lab, &json!({}));
        let answer = get(none["sceneUrl"].as_str().expect("a URL"), "GET", &[]);
        assert_eq!(answer.status, 503, "no services");
        // T19
        for (body, field) in [
            (json!({ "siez": 1 }), "siez"),
            (json!({ "size": 3 }), "size"),
            (json!({ "services": [{ "name": "a b", "port": 1 }] }), "services[0].name"),
            (json!({ "services": [{ "name": "a", "port": 80 }] }), "services[0].port"),
            (
                json!({ "services": [{ "name": "a", "port": 1, "fromBox": "nobody" }] }),
                "services[0].fromBox",
            ),
            (json!({ "externalBaseUrl": "ftp://x" }), "externalBaseUrl"),
            (json!({ "waitForCapacitySec": 9999 }), "waitForCapacitySec"),
        ] {
            let (status, refused) = call(lab, "POST", "/v1/boxes", &body);
            // What is well formed and names what is not there is another thing than what is not.
            let expected = if field.ends_with("fromBox") { 422 } else { 400 };
            assert_eq!(status, expected, "{body}: {refused}");
            assert!(refused.to_string().contains(field), "{field}: {refused}");
        }
        assert_eq!(
            done(lab, "GET", "/v1/boxes", &Value::Null)["boxes"].as_array().expect("boxes").len(),
            2
        );
    });
}

#[test]
fn b06_b11_commands_in_fore_and_background() {
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "2"),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", "6"),
            ],
        );
        let id = id_of(&start(lab, &json!({ "goal": "x" })));
        // Longer than it takes to freeze without it.
        assert_eq!(sh(lab, &id, "sleep 5; echo done"), "done");
        let events = done(lab, "GET", &format!("/v1/boxes/{id}/events"), &Value::Null);
        assert!(!events.to_string().contains("frozen"), "B6: {events}");
        let path = format!("/v1/boxes/{id}/exec");
        // Waited for to its end, however much it writes; the rest is read on.
        let line = "seq 1 30000; sleep 1; exit 7";
        let much = done(lab, "POST", &path, &json!({ "command": line, "maxBytes": 1000 }));
        assert_eq!(
            (&much["running"], &much["exitCode"], &much["truncated"], &much["nextOffset"]),
            (&json!(false), &json!(7), &json!(true), &json!(1000)),
            "{much}"
        );
        let rest = json!({ "execId": much["execId"], "offset": 1000 });
        let rest = done(lab, "POST", &path, &rest);
        assert!(rest["output"].as_str().expect("output").ends_with("\n30000\n"), "{rest}");
        let begun = done(
            lab,
            "POST",
            &path,
            &json!({ "command": "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done", "background": true }),
        );
        let blocked = view(lab, &id);
        assert_eq!(blocked["freeze"]["blockedBy"][0]["kind"], "background", "at once: {blocked}");
        assert!(blocked["freeze"]["blockedBy"][0]["until"].is_string(), "B13: {blocked}");
        assert!(blocked["freeze"]["at"].is_string(), "B13: {blocked}");
        wait_status(lab, &id, "frozen");
        let more = json!({ "execId": begun["execId"], "offset": 0, "waitSec": 1 });
        let read = done(lab, "POST", &path, &more);
        assert_eq!(read["running"], true, "it goes on at the thaw: {read}");
        assert!(read["note"].as_str().expect("a note").contains("thawed"), "{read}");
        let lines: Vec<u64> = read["output"]
            .as_str()
            .expect("output")
            .lines()
            .map(|line| line.parse().expect("a number"))
            .collect();
        assert!(lines.windows(2).all(|pair| pair[1] == pair[0] + 1), "none is lost: {lines:?}");
        let procs = done(lab, "GET", &format!("/v1/boxes/{id}/procs"), &Value::Null);
        assert!(
            procs["processes"].as_array().expect("processes").iter().any(|one| one["command"]
                .as_str()
                .is_some_and(|command| command.contains("while :"))),
            "{procs}"
        );
    });
}

/// The answer to a conversation's call.
fn as_agent(lab: &e2e::Lab, agent: &str, method: &str, path: &str, body: &str) -> Value {
    use std::io::{Read, Write};
    let socket = lab.data().join("dormouse.sock");
    let mut stream = std::os::unix::net::UnixStream::connect(socket).expect("connected");
    let length = body.len();
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: localhost\r\nX-Psbx-Agent: {agent}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}").expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("answered");
    let body = text.split_once("\r\n\r\n").expect("a body").1;
    serde_json::from_str(body).expect("JSON")
}

#[test]
fn b35_b37_conversations() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[("DORMOUSE_BOX_AGENT_SILENCE_SECONDS", "2")]);
        let (status, refused) = call(lab, "POST", "/v1/agents/a%20b/heartbeat", &json!({}));
        assert_eq!(
            (status, &refused["error"]),
            (400, &json!("agent id: letters, digits, - and _ only, at most 64"))
        );
        let beat = || done(lab, "POST", "/v1/agents/c-1/heartbeat", &json!({ "client": "tester" }));
        assert_eq!(beat(), json!({ "ok": true }));
        let with_agent =
            |method: &str, path: &str, body: &str| as_agent(lab, "c-1", method, path, body);
        let id = id_of(&with_agent("POST", "/v1/boxes", r#"{"goal":"x"}"#));
        let path = format!("/v1/boxes/{id}");
        let mine = with_agent("GET", &path, "");
        assert_eq!(
            (&mine["agent"]["state"], &mine["thisConversation"]),
            (&json!("working"), &json!(true)),
            "{mine}"
        );
        assert_eq!(mine["agent"]["client"], "tester");
        assert!(view(lab, &id)["thisConversation"].is_null());
        done(lab, "POST", "/v1/agents/c-1/leave", &Value::Null);
        assert_eq!(view(lab, &id)["agent"]["state"], "left");
        beat();
        assert_eq!(view(lab, &id)["agent"]["state"], "working", "a heartbeat after a leave: back");
        until("it has been silent for too long", || {
            (view(lab, &id)["agent"]["state"] == "left").then_some(())
        });
        // A call without the header keeps the one before (B36).
        sh(lab, &id, "true");
        assert_eq!(view(lab, &id)["agent"]["state"], "left");
    });
}

/// Who waits for a command when the box ends by itself is told that it is lost, and has it booted at once; who comes next, that it was;
/// and so is everybody else who has used it.
#[test]
fn b44_a_box_that_ended_under_a_command_tells_each_once_that_it_was_booted() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        let id = id_of(&start(lab, &json!({ "goal": "x" })));
        let path = format!("/v1/boxes/{id}/exec");
        let exec = |command: &str| call(lab, "POST", &path, &json!({ "command": command }));
        let other = || as_agent(lab, "c-2", "POST", &path, r#"{"command":"true"}"#);
        assert_eq!(other()["note"], Value::Null);
        for how in ["c", "o"] {
            let (status, lost) = exec(&format!(
                "echo 1 > /proc/sys/kernel/sysrq; echo {how} > /proc/sysrq-trigger; sleep 60"
            ));
            assert_eq!((status, &lost["code"]), (409, &json!("command_lost")), "{lost}");
            // Reading its processes tells nobody.
            done(lab, "GET", &format!("/v1/boxes/{id}/procs"), &Value::Null);
            let (status, next) = exec("true");
            let note = next["note"].as_str().unwrap_or_default().to_owned();
            assert_eq!(status, 200, "{next}");
            assert!(note.contains("was booted from its disk"), "{how}: {next}");
            assert_eq!(exec("true").1["note"], Value::Null, "it is told once");
            let told = other();
            assert_eq!(told["note"], json!(note), "each who has used it: {told}");
            assert_eq!(other()["note"], Value::Null);
        }
    });
}

#[test]
fn b44_packets_do_not_thaw_a_box() {
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "2"),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", "2"),
            ],
        );
        let (id, _) = web_box(lab);
        serve_counter(lab, &id, 8000);
        let address = sh(lab, &id, "ip -4 -o addr show eth0 | awk '{print $4}' | cut -d/ -f1");
        wait_status(lab, &id, "frozen");
        let target = (address.as_str(), 8000);
        let before = view(lab, &id);
        let connecting = std::thread::spawn({
            let target = (address.clone(), 8000);
            move || {
                let address = std::net::ToSocketAddrs::to_socket_addrs(&target)
                    .expect("an address")
                    .next()
                    .expect("one");
                TcpStream::connect_timeout(&address, std::time::Duration::from_secs(3)).is_ok()
            }
        });
        let connected = connecting.join().expect("tried");
        assert!(!connected, "{target:?} was answered");
        let after = view(lab, &id);
        assert_eq!(
            (&after["status"], &after["lastUsedAt"]),
            (&json!("frozen"), &before["lastUsedAt"])
        );
    });
}

#[test]
fn b03_b15_stop_works_on_a_frozen_box_and_wake_is_use() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "2")]);
        let id = id_of(&start(lab, &json!({ "goal": "x" })));
        let frozen = wait_status(lab, &id, "frozen");
        let woken = done(lab, "POST", &format!("/v1/boxes/{id}/wake"), &Value::Null);
        assert_eq!(woken["status"], "ready");
        assert!(woken["lastUsedAt"].as_str() > frozen["lastUsedAt"].as_str(), "{woken}");
        wait_status(lab, &id, "frozen");
        done(lab, "DELETE", &format!("/v1/boxes/{id}"), &Value::Null);
        let ended = boxes::view(lab, &id);
        assert_eq!(
            (&ended["status"], &ended["statusReason"]),
            (&json!("terminated"), &json!("stopped by a request"))
        );
    });
}

#[test]
fn b02_a_box_that_was_frozen_for_its_host_says_why() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        let id = id_of(&start(lab, &json!({ "goal": "x" })));
        let why = |lab: &e2e::Lab| {
            let view = wait_status(lab, &id, "frozen");
            view["statusReason"].as_str().expect("why").to_owned()
        };
        lab.ok(&["drain"]);
        assert!(why(lab).contains("its host was emptied"), "{}", why(lab));
        // It is written down a moment after the status says so.
        until("its timeline says why", || {
            let events = done(lab, "GET", &format!("/v1/boxes/{id}/events"), &Value::Null);
            let last = events["events"].as_array()?.last()?.clone();
            (last["reason"] == "sleeps on disk: the host is being emptied").then_some(())
        });
        // Thawed it is as any other, and so when it freezes for want of use.
        boxes::sh(lab, &id, "true");
        assert_eq!(boxes::view(lab, &id)["statusReason"], Value::Null);
        lab.ok(&["project", "--spending-limit", "1"]);
        let limit = "a limit on spending is reached, the project's for the month ";
        assert!(why(lab).starts_with(limit), "{}", why(lab));
        let figures = "(UTC): 1 GiB-second of memory awake, of which ";
        assert!(why(lab).contains(figures), "{}", why(lab));
        lab.ok(&["project", "--spending-limit", "none"]);
        boxes::sh(lab, &id, "true");
        done(lab, "DELETE", &format!("/v1/boxes/{id}"), &Value::Null);
    });
}

/// How long without activity freezes a box here; the long form asks for ten seconds.
fn freeze_seconds() -> u64 {
    std::env::var("DORMOUSE_SOAK_FREEZE_SECONDS")
        .ok()
        .map_or(3, |text| text.parse().expect("a number"))
}

/// Seconds from one RFC 3339 time to another of the same day.
fn seconds_between(from: &str, to: &str) -> f64 {
    let seconds = |text: &str| {
        let time = text.split('T').nth(1).expect("a time").trim_end_matches('Z');
        let parts: Vec<f64> = time.split(':').map(|part| part.parse().expect("a number")).collect();
        parts[0] * 3600.0 + parts[1] * 60.0 + parts[2]
    };
    let passed = seconds(to) - seconds(from);
    // Over midnight.
    if passed < -3600.0 { passed + 86_400.0 } else { passed }
}

/// When a box froze the last time, as its timeline says.
fn frozen_at(lab: &e2e::Lab, id: &str) -> String {
    // What happened is written down a moment after the status says so.
    until("its freezing stands in its timeline", || {
        let timeline = done(lab, "GET", &format!("/v1/boxes/{id}/events"), &Value::Null);
        let last = timeline["events"].as_array()?.last()?.clone();
        (last["status"] == "frozen").then(|| last["at"].as_str().map(str::to_owned))?
    })
}

#[test]
fn b08_b13_each_kind_of_activity_holds_a_box_and_not_longer() {
    isolated(test_name!(), |lab| {
        let freeze = freeze_seconds();
        let [freeze_after, background, url] =
            [freeze, freeze * 2, freeze * 3].map(|n| n.to_string());
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", &freeze_after),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", &background),
                ("DORMOUSE_BOX_URL_WINDOW_SECONDS", &url),
            ],
        );
        let mut table = vec![
            "| rule | what held it | told as | frozen after its last use, s | expected, s |"
                .to_owned(),
            "| --- | --- | --- | --- | --- |".to_owned(),
        ];
        let mut row = |rule: &str, what: &str, told: &str, seen: f64, expected: f64| {
            table.push(format!("| {rule} | {what} | {told} | {seen:.1} | {expected:.1} |"));
            assert!(
                seen >= expected - 0.5,
                "{rule}: frozen {seen:.1} s after its last use, not {expected:.1}"
            );
        };
        let kinds = |lab: &e2e::Lab, id: &str| {
            let view = view(lab, id);
            let blocked = view["freeze"]["blockedBy"].as_array().cloned().unwrap_or_default();
            blocked
                .iter()
                .map(|one| one["kind"].as_str().expect("a kind").to_owned())
                .collect::<Vec<_>>()
        };
        let quiet = f64::from(u32::try_from(freeze).expect("small"));

        // B8: nothing but its last use.
        let (id, url) = web_box(lab);
        sh(lab, &id, "true");
        let used =
            wait_status(lab, &id, "frozen")["lastUsedAt"].as_str().expect("a time").to_owned();
        row("B8", "nothing", "", seconds_between(&used, &frozen_at(lab, &id)), quiet);

        // B6, B10: a command in the foreground, for longer than it takes to freeze.
        let line = format!("sleep {}", freeze + 2);
        let running = std::thread::scope(|scope| {
            let call = scope.spawn(|| sh(lab, &id, &line));
            let told = until("it is told", || {
                Some(kinds(lab, &id)).filter(|kinds| kinds.contains(&"foreground".to_owned()))
            });
            call.join().expect("it ran");
            told
        });
        let used =
            wait_status(lab, &id, "frozen")["lastUsedAt"].as_str().expect("a time").to_owned();
        row(
            "B10",
            "a foreground command",
            &running.join(", "),
            seconds_between(&used, &frozen_at(lab, &id)),
            quiet,
        );

        // B11: commands in the background, until so long after the last use.
        serve_counter(lab, &id, 8000);
        let told = until("it is told", || {
            Some(kinds(lab, &id)).filter(|kinds| kinds.contains(&"background".to_owned()))
        });
        let used =
            wait_status(lab, &id, "frozen")["lastUsedAt"].as_str().expect("a time").to_owned();
        row(
            "B11",
            "a background command",
            &told.join(", "),
            seconds_between(&used, &frozen_at(lab, &id)),
            quiet * 2.0,
        );

        // B9: requests through its URL, until so long after the last use, even in the middle of something.
        done(lab, "POST", &format!("/v1/boxes/{id}/wake"), &Value::Null);
        let mut told = Vec::new();
        until("requests do not hold it any more", || {
            let answer = get(&url, "GET", &[]);
            if answer.status == 200 {
                told.extend(kinds(lab, &id));
                return None;
            }
            assert!(answer.body.contains("box is frozen"), "{}", answer.body);
            Some(())
        });
        assert!(told.contains(&"url".to_owned()), "{told:?}");
        let used =
            wait_status(lab, &id, "frozen")["lastUsedAt"].as_str().expect("a time").to_owned();
        row(
            "B9",
            "requests all the time",
            "background, url",
            seconds_between(&used, &frozen_at(lab, &id)),
            quiet * 3.0,
        );
        println!("{}", table.join("\n"));
    });
}

/// Answers `/` with half of a page, `/events` with an event each time it is asked on port 8001, and says nothing more.
const HALVES: &str = "import http.server as h, threading\n\
    go = threading.Semaphore(0)\n\
    class C(h.BaseHTTPRequestHandler):\n\
    \x20   def do_GET(self):\n\
    \x20       kind = 'text/event-stream' if self.path == '/events' else 'text/plain'\n\
    \x20       self.send_response(200); self.send_header('Content-Type', kind)\n\
    \x20       if self.path != '/events': self.send_header('Content-Length', '8')\n\
    \x20       self.end_headers(); self.wfile.write(b'half'); self.wfile.flush()\n\
    \x20       go.acquire(); self.wfile.write(b'rest'); self.wfile.flush()\n\
    class G(h.BaseHTTPRequestHandler):\n\
    \x20   def do_GET(self):\n\
    \x20       go.release(); go.release(); self.send_response(204); self.end_headers()\n\
    for port, served in ((8000, C), (9000, G)):\n\
    \x20   server = h.ThreadingHTTPServer(('0.0.0.0', port), served)\n\
    \x20   threading.Thread(target=lambda server=server: server.serve_forever(poll_interval=None)).start()\n";

#[test]
fn b09_b19_a_freeze_cuts_an_answer_that_is_half_there_and_an_event_stream_outlives_it() {
    use std::io::{Read, Write};
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "2"),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", "2"),
                ("DORMOUSE_BOX_URL_WINDOW_SECONDS", "2"),
            ],
        );
        let (id, url) = web_box(lab);
        sh(lab, &id, &format!("cat > /work/halves.py <<'END'\n{HALVES}END"));
        let exec = format!("/v1/boxes/{id}/exec");
        done(
            lab,
            "POST",
            &exec,
            &json!({ "command": "exec python3 /work/halves.py", "background": true }),
        );
        sh(lab, &id, "until ss -ltnH 'sport = :9000' | grep -q . ; do sleep 0.1 ; done");
        let open = |path: &str| {
            let (authority, server) = e2e::net::split_link(&url);
            let mut stream = TcpStream::connect(server).expect("connected");
            stream.set_read_timeout(Some(e2e::wait::WAIT_MAX)).expect("limit set");
            let head =
                format!("GET {path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
            stream.write_all(head.as_bytes()).expect("sent");
            stream
        };
        let read_to = |stream: &mut TcpStream, text: &str| {
            let mut seen = Vec::new();
            while !String::from_utf8_lossy(&seen).contains(text) {
                let mut byte = [0];
                stream.read_exact(&mut byte).expect("more");
                seen.push(byte[0]);
            }
        };
        let (mut page, mut events) = (open("/"), open("/events"));
        read_to(&mut page, "half");
        read_to(&mut events, "half");
        wait_status(lab, &id, "frozen");
        let mut rest = Vec::new();
        // Ended in order or not: it is over.
        let _ended = page.read_to_end(&mut rest).map_err(|error| {
            assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "it hangs");
        });
        assert!(!String::from_utf8_lossy(&rest).contains("rest"));
        assert_eq!(view(lab, &id)["status"], "frozen", "its end thaws nothing");
        sh(lab, &id, "curl -s http://127.0.0.1:9000/");
        read_to(&mut events, "rest");
    });
}

#[test]
fn b01_b21_b32_a_box_that_its_host_has_lost_is_interrupted() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        let (lost, url) = web_box(lab);
        let (kept, _) = web_box(lab);
        let name = sh(lab, &kept, "hostname");
        lab.kill_daemon();
        // The host comes back without it: its folder is gone, and with it what the machine was made of.
        let machine = proc::qemus_below(&lab.data().join("sandboxes").join(&lost));
        for pid in machine {
            proc::kill(pid, rustix::process::Signal::KILL);
        }
        std::fs::remove_dir_all(lab.data().join("sandboxes").join(&lost)).expect("removed");
        lab.start();
        let seen = view(lab, &lost);
        assert_eq!(seen["status"], "interrupted", "{seen}");
        let why = seen["statusReason"].as_str().expect("a reason");
        assert!(why.contains("its host does not have it"), "{why}");
        let listed = done(lab, "GET", "/v1/boxes", &Value::Null);
        assert_eq!(listed["boxes"].as_array().expect("boxes").len(), 2, "{listed}");
        for (method, path, body) in [
            ("POST", "exec", json!({ "command": "true" })),
            ("POST", "wake", Value::Null),
            ("GET", "procs", Value::Null),
        ] {
            let (status, refused) = call(lab, method, &format!("/v1/boxes/{lost}/{path}"), &body);
            assert_eq!(status, 409, "{path}: {refused}");
            let said = refused["error"].as_str().expect("an error");
            assert!(said.contains("is interrupted: its host is gone"), "{said}");
            assert!(
                refused["hint"].as_str().expect("a hint").contains("sandbox_start"),
                "{refused}"
            );
        }
        let answer = get(&url, "GET", &PAGE_LOAD);
        assert_eq!(answer.status, 503, "{}", answer.head);
        assert_eq!(answer.body, r#"{"error":"box is interrupted","status":"interrupted"}"#);
        // Nothing happened to the other one; this one can be stopped, and makes room for another.
        assert_eq!(sh(lab, &kept, "hostname"), name);
        done(lab, "DELETE", &format!("/v1/boxes/{lost}"), &Value::Null);
        assert_eq!(view(lab, &lost)["status"], "terminated");
    });
}

/// When idle rules stop a box, what they say before, and how long its copy is kept. As the soak `box-ends`, with ten seconds
/// instead of ten minutes, also with a limit of its own, which is counted in minutes.
#[test]
fn b23_b24_b25_b26_b27_when_a_box_is_stopped_for_good_and_what_is_said_of_it() {
    isolated(test_name!(), |lab| {
        let freeze = freeze_seconds();
        let [freeze_after, stop_after, keep_copy] =
            [freeze, freeze * 2, freeze].map(|n| n.to_string());
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", &freeze_after),
                ("DORMOUSE_BOX_STOP_AFTER_SECONDS", &stop_after),
                ("DORMOUSE_BOX_KEEP_COPY_SECONDS", &keep_copy),
            ],
        );
        let seconds = f64::from(u32::try_from(freeze).expect("small"));
        let mut table = vec![
            "| rule | from | to | seen, s | expected, s |".to_owned(),
            "| --- | --- | --- | --- | --- |".to_owned(),
        ];
        let mut row = |rule: &str, between: [(&str, &str); 2], expected: f64| {
            let [(from, at), (to, until)] = between;
            let seen = seconds_between(at, until);
            table.push(format!("| {rule} | {from} | {to} | {seen:.1} | {expected:.1} |"));
            // Never too early; how late depends on the machine.
            assert!(
                seen >= expected - 0.5,
                "{rule}: {to} {seen:.1} s after {from}, not {expected:.1}"
            );
        };
        let text =
            |value: &Value| value.as_str().unwrap_or_else(|| panic!("no text: {value}")).to_owned();

        let limited = (freeze >= 10)
            .then(|| id_of(&start(lab, &json!({ "goal": "a limit", "idleTimeoutMin": 1 }))));
        let id = id_of(&start(lab, &json!({ "goal": "ends" })));
        sh(lab, &id, "true");
        let awake = view(lab, &id);
        let (freezes, stops) = (text(&awake["freeze"]["at"]), text(&awake["stopsAt"]));
        row("B25", [("`freeze.at` while awake", &freezes), ("`stopsAt`", &stops)], seconds * 2.0);
        let told = e2e::mcp::Http::new(lab).tool("sandbox_status", json!({ "id": id }));
        let told = e2e::mcp::text(&told);
        let line = told.lines().last().expect("a last line");
        assert!(
            line.starts_with(&format!("box {id}: the idle rules stop it for good at ")),
            "{told}"
        );
        assert!(
            line.ends_with("unless something uses it before then, and /work goes with it."),
            "{told}"
        );
        let asked = view(lab, &id);
        row(
            "B26",
            [("`stopsAt` before sandbox_status", &stops), ("after it", &text(&asked["stopsAt"]))],
            0.0,
        );
        assert_eq!(asked["stopsAt"], stops.as_str(), "B26: telling puts nothing off");

        let frozen = frozen_at(lab, &id);
        let said = text(&view(lab, &id)["stopsAt"]);
        let ended = wait_status(lab, &id, "terminated");
        let stopped = until("its end stands in its timeline", || {
            let timeline = done(lab, "GET", &format!("/v1/boxes/{id}/events"), &Value::Null);
            let last = timeline["events"].as_array()?.last()?.clone();
            (last["status"] == "terminated").then(|| text(&last["at"]))
        });
        row("B23", [("its freezing", &frozen), ("its end", &stopped)], seconds * 2.0);
        row("B25", [("`stopsAt` while frozen", &said), ("its end", &stopped)], 0.0);
        let restorable = text(&ended["restorableUntil"]);
        row("B27", [("its end", &stopped), ("`restorableUntil`", &restorable)], seconds);
        until("its copy is gone", || view(lab, &id)["restorableUntil"].is_null().then_some(()));
        let (status, refused) =
            call(lab, "POST", "/v1/boxes", &json!({ "restore": id, "goal": "x" }));
        assert_eq!(status, 409, "{refused}");

        if let Some(limited) = limited {
            let ended = wait_status(lab, &limited, "terminated");
            let reason = text(&ended["statusReason"]);
            assert!(
                reason.starts_with("unused for") && reason.contains("over idleTimeoutMin"),
                "{reason}"
            );
            let timeline = done(lab, "GET", &format!("/v1/boxes/{limited}/events"), &Value::Null);
            let last = timeline["events"].as_array().and_then(|all| all.last()).expect("an end");
            row(
                "B24",
                [("its last use", &text(&ended["lastUsedAt"])), ("its end", &text(&last["at"]))],
                60.0,
            );
            until("its copy is gone as well", || {
                view(lab, &limited)["restorableUntil"].is_null().then_some(())
            });
        }
        println!("{}", table.join("\n"));
    });
}
