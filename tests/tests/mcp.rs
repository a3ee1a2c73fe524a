//! The tools of AI agents over the Model Context Protocol, on real guests.

use e2e::boxes::{call, done, set_up, start, view, wait_status};
use e2e::mcp::{Http, REVISION, messages, meta, post, text, token};
use e2e::{isolated, test_name};
use serde_json::{Value, json};

fn id_of(started: &Value) -> String {
    started["id"].as_str().expect("an id").to_owned()
}

#[test]
fn b36_b37_one_box_from_start_to_stop_with_the_tools_alone() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        let mut mcp = Http::new(lab);
        mcp.agent = Some("c-1".to_owned());
        let tools = mcp.request("tools/list", json!({}));
        let tools = tools[0]["result"]["tools"].as_array().expect("tools").clone();
        let names: Vec<&str> = tools.iter().filter_map(|tool| tool["name"].as_str()).collect();
        for name in [
            "sandbox_start",
            "sandbox_exec",
            "sandbox_get",
            "sandbox_status",
            "sandbox_checkpoint",
            "sandbox_stop",
        ] {
            assert!(names.contains(&name), "{names:?}");
        }
        assert_eq!(
            text(&mcp.tool("sandbox_list", json!({}))),
            "There is no box. sandbox_start makes one."
        );

        // T1: required, and an error that a model reads, not one of the protocol.
        for bad in [json!({}), json!({ "goal": "  " })] {
            let told = mcp.refused("sandbox_start", bad);
            assert!(told.starts_with("goal is required: "), "{told}");
            assert!(told.contains("Call sandbox_start again with goal set."), "{told}");
        }
        let told = mcp.refused("sandbox_start", json!({ "goal": "x", "sise": 2 }));
        assert!(told.contains("`sise`") && told.contains("services"), "{told}");

        let started = mcp.done(
            "sandbox_start",
            json!({
                "name": "Numbers", "goal": "g".repeat(600),
                "services": [{ "name": "web.internal", "port": 8000, "web": true }],
            }),
        );
        let id = id_of(&started);
        assert_eq!(started["goal"].as_str().map(str::len), Some(500), "T1: cut");
        assert_eq!((&started["status"], &started["arch"]), (&json!("ready"), &json!("amd64")));
        let next = started["next"].as_str().expect("next");
        assert!(next.contains("sandbox_sync") && next.contains("sandbox_exec"), "{next}");

        let ran =
            mcp.tool("sandbox_exec", json!({ "id": id, "command": "seq 3; echo no >&2; exit 4" }));
        assert_eq!(text(&ran), "1\n2\n3\nno\n[exit code 4]");
        assert_eq!(ran["structuredContent"]["exitCode"], 4);

        // Long output comes in parts.
        let line = "seq -w 20000 > /work/numbers && cat /work/numbers";
        let first = mcp.done("sandbox_exec", json!({ "id": id, "command": line }));
        assert_eq!(first["truncated"], true);
        let mut all = first["output"].as_str().expect("output").to_owned();
        assert!(all.len() <= 30_000, "{}", all.len());
        let mut offset = first["nextOffset"].clone();
        loop {
            let part = mcp.done(
                "sandbox_exec",
                json!({ "id": id, "execId": first["execId"], "offset": offset, "maxBytes": 100_000 }),
            );
            all.push_str(part["output"].as_str().expect("output"));
            offset = part["nextOffset"].clone();
            if part["truncated"] == false {
                break;
            }
        }
        let numbers: Vec<String> = (1..=20_000).map(|number| format!("{number:05}\n")).collect();
        assert_eq!(all, numbers.concat());
        let page = mcp.done(
            "sandbox_get",
            json!({ "id": id, "path": "/work/numbers", "offset": 60_000, "length": 12 }),
        );
        assert_eq!(page["content"], "10001\n10002\n");
        assert_eq!((&page["size"], &page["more"]), (&json!(120_000), &json!(true)));
        let told = mcp.refused("sandbox_get", json!({ "id": id, "path": "/bin/true" }));
        assert!(told.contains("is no text") && told.contains("sandbox_pull"), "{told}");
        let told = mcp.refused("sandbox_get", json!({ "id": id, "path": "/work/none" }));
        assert!(told.contains("(not_found)"), "{told}");

        // What is not waited for runs on.
        let background =
            json!({ "id": id, "command": "echo up; exec sleep 1000", "background": true });
        assert_eq!(mcp.done("sandbox_exec", background)["running"], true);
        let waits = json!({ "id": id, "command": "echo a; sleep 1000", "waitSec": 1 });
        let runs = mcp.tool("sandbox_exec", waits);
        assert!(
            text(&runs).starts_with("a\n[it runs; read on later: sandbox_exec {"),
            "{}",
            text(&runs)
        );
        let processes = mcp.done("sandbox_procs", json!({ "id": id }))["processes"].to_string();
        assert_eq!(processes.matches("sleep 1000").count(), 2, "{processes}");
        assert!(!processes.contains("ps -eo"), "not the listing itself: {processes}");

        let pull = mcp.done("sandbox_pull", json!({ "id": id }));
        let url = format!("http://127.0.0.1:8420/v1/boxes/{id}/tree?path=%2Fwork");
        assert_eq!((&pull["method"], &pull["url"]), (&json!("GET"), &json!(url)));
        let sync = mcp.done("sandbox_sync", json!({ "id": id }));
        assert_eq!((&sync["method"], &sync["url"]), (&json!("PUT"), &json!(url)));

        // B4: a word for the person is no use.
        let before = view(lab, &id)["lastUsedAt"].clone();
        mcp.done("sandbox_say", json!({ "id": id, "text": "Counted to 20000." }));
        mcp.done("sandbox_feedback", json!({ "id": id, "text": "counting could be quicker" }));
        let status = mcp.done("sandbox_status", json!({ "id": id }));
        assert_eq!(status["lastUsedAt"], before);
        assert_eq!(status["said"], "Counted to 20000.");
        assert_eq!(status["thisConversation"], true, "B37");
        assert_eq!(status["agent"]["state"], "working");
        assert!(lab.daemon_log().contains("counting could be quicker"), "{}", lab.daemon_log());

        // B36: a call without the header keeps the agent; another agent's call changes it.
        let nobody = Http::new(lab);
        nobody.done("sandbox_exec", json!({ "id": id, "command": "true" }));
        assert_eq!(mcp.done("sandbox_status", json!({ "id": id }))["thisConversation"], true);
        let mut other = Http::new(lab);
        other.agent = Some("c-2".to_owned());
        assert!(other.done("sandbox_status", json!({ "id": id }))["thisConversation"].is_null());
        other.done("sandbox_exec", json!({ "id": id, "command": "true" }));
        assert_eq!(other.done("sandbox_list", json!({}))["boxes"][0]["thisConversation"], true);
        assert!(mcp.done("sandbox_status", json!({ "id": id }))["thisConversation"].is_null());

        assert_eq!(mcp.done("sandbox_stop", json!({ "id": id }))["status"], "terminated");
        let told = mcp.refused("sandbox_exec", json!({ "id": id, "command": "true" }));
        assert!(
            told.contains("stopped by sandbox_stop") && told.contains("sandbox_start"),
            "{told}"
        );
        assert_eq!(mcp.done("sandbox_list", json!({}))["boxes"], json!([]));
        assert_eq!(mcp.done("sandbox_list", json!({ "all": true }))["boxes"][0]["id"], id.as_str());
    });
}

#[test]
fn b15_a_frozen_box_thaws_for_a_tool_and_b26_results_warn_before_it_is_stopped() {
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "2"),
                // Far enough not to happen, and within the half hour of which results warn.
                ("DORMOUSE_BOX_STOP_AFTER_SECONDS", "1200"),
            ],
        );
        let mut mcp = Http::new(lab);
        mcp.agent = Some("c-1".to_owned());
        let id = id_of(&mcp.done("sandbox_start", json!({ "goal": "warn" })));
        mcp.done("sandbox_exec", json!({ "id": id, "command": "echo kept > /run/kept" }));
        wait_status(lab, &id, "frozen");
        // Naming it for a line, and for its state, thaws nothing.
        let listed = mcp.tool("sandbox_list", json!({}));
        let lines = text(&listed);
        let warning = lines.lines().last().expect("a line");
        let begins = format!("box {id}: the idle rules stop it for good at ");
        assert!(warning.starts_with(&begins), "{lines}");
        assert!(
            warning.ends_with("unless something uses it before then, and /work goes with it."),
            "{lines}"
        );
        assert_eq!(listed["structuredContent"]["idleWarnings"], json!([warning]));
        // Errors end with it too; another conversation is told of what it names alone.
        let told = mcp.refused("sandbox_status", json!({ "id": "nosuchbox" }));
        assert!(told.lines().last().expect("a line").starts_with(&begins), "{told}");
        let mut other = Http::new(lab);
        other.agent = Some("c-2".to_owned());
        assert!(
            other.tool("sandbox_list", json!({}))["structuredContent"]["idleWarnings"].is_null()
        );
        let named = other.tool("sandbox_status", json!({ "id": id }));
        assert_eq!(named["structuredContent"]["status"], "frozen");
        assert!(text(&named).contains(&begins));
        assert!(text(&other.tool("sandbox_list", json!({}))).contains(&begins), "named before");

        let thawed = mcp.done("sandbox_exec", json!({ "id": id, "command": "cat /run/kept" }));
        assert_eq!(thawed["output"], "kept\n");
        let note = thawed["note"].as_str().expect("a note");
        assert!(note.contains("was frozen and has been thawed"), "{note}");
    });
}

#[test]
fn b41_t15_t19_a_start_waits_for_room_as_long_as_the_client_can_and_tells_progress() {
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[("DORMOUSE_MEMORY_BUDGET_MIB", "700"), ("DORMOUSE_MEMORY_WAIT_SECONDS", "1")],
        );
        let mut mcp = Http::new(lab);
        // For what there will never be room nobody waits.
        let large = json!({ "goal": "wait", "size": 2, "waitForCapacitySec": 1800 });
        let told = mcp.refused("sandbox_start", large);
        assert!(told.starts_with("it can never run here: "), "{told}");
        let (status, refused) = call(lab, "POST", "/v1/boxes", &json!({ "size": 2 }));
        assert_eq!((status, &refused["field"]), (422, &json!("size")), "{refused}");
        let first = start(lab, &json!({ "goal": "takes the room there is" }));
        let told = mcp.refused("sandbox_start", json!({ "goal": "wait" }));
        assert!(told.starts_with("no box capacity right now: "), "{told}");
        assert!(told.contains("No box was created by this call."), "{told}");
        assert!(told.contains("in about 5 minutes"), "{told}");
        let (status, refused) = call(lab, "POST", "/v1/boxes", &json!({ "goal": "wait" }));
        assert_eq!((status, &refused["code"]), (503, &json!("no_capacity")), "{refused}");
        assert!(refused["error"].as_str().is_some_and(|said| told.starts_with(said)), "{refused}");
        let wait = json!({ "goal": "wait", "waitForCapacitySec": 1800 });
        // The client can wait for one more try.
        mcp.headers = vec![("X-Psbx-Can-Wait-Sec".to_owned(), "20".to_owned())];
        let told = mcp.request("tools/call", json!({ "name": "sandbox_start", "arguments": wait }));
        let (last, before) = told.split_last().expect("messages");
        assert_eq!(before.len(), 1, "{told:?}");
        assert_eq!(before[0]["params"]["progressToken"], "p1");
        let line = before[0]["params"]["message"].as_str().expect("a line");
        assert!(line.starts_with("No room for the box yet: "), "{line}");
        assert!(line.ends_with("of 20s; trying again in 15s."), "{line}");
        let error = text(&last["result"]);
        assert!(error.contains("and gave up: nothing became free."), "{error}");
        let id = first["id"].as_str().expect("an id");
        done(lab, "DELETE", &format!("/v1/boxes/{id}"), &Value::Null);
    });
}

#[test]
fn who_may_call_and_in_which_revisions() {
    isolated(test_name!(), |lab| {
        let authorization = format!("Bearer {}", token(lab));
        let auth = ("Authorization", authorization.as_str());
        let list = |meta: Value| json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": { "_meta": meta } });
        let modern = [auth, ("MCP-Protocol-Version", REVISION), ("Mcp-Method", "tools/list")];
        assert_eq!(post(&modern, &list(meta())).status, 200);
        // The same guard as everywhere, and our own names alone.
        let stranger = post(&modern[1..], &list(meta()));
        assert_eq!(stranger.status, 401);
        assert_eq!(stranger.header("www-authenticate"), Some("Bearer"));
        let rebound = [&modern[..], &[("Host", "evil.test:8420")]].concat();
        assert_eq!(post(&rebound, &list(meta())).status, 403);

        // Older clients shake hands first.
        let hello = json!({ "jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
            "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": { "name": "old", "version": "1" } } });
        let answer = post(&[auth], &hello);
        assert_eq!(answer.status, 200, "{answer:?}");
        let result = messages(&answer)[0]["result"].clone();
        assert_eq!(result["protocolVersion"], "2025-06-18");
        assert_eq!(result["serverInfo"]["name"], "dormouse");
        assert!(result["instructions"].as_str().expect("words").contains("sandbox_start"));
        let old = [auth, ("MCP-Protocol-Version", "2025-06-18")];
        let ready = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
        assert_eq!(post(&old, &ready).status, 202);
        let answer = post(&old, &json!({ "jsonrpc": "2.0", "id": 2, "method": "tools/list" }));
        let result = messages(&answer)[0]["result"].clone();
        assert_eq!(result["tools"][0]["name"], "sandbox_start");
        assert!(result["resultType"].is_null(), "of a later revision: {result}");
        // A tool that is none is an error of the protocol.
        let none = json!({ "jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": { "name": "none" } });
        assert_eq!(messages(&post(&old, &none))[0]["error"]["code"], -32602);
        let nonsense = post(&old, &json!([1, 2])).status;
        assert!((400..500).contains(&nonsense), "{nonsense}");
    });
}

#[test]
fn b43_a_key_of_another_account_sees_none_of_these_boxes_nor_their_warnings() {
    isolated(test_name!(), |lab| {
        // A warning from the start on.
        set_up(lab, &[("DORMOUSE_BOX_STOP_AFTER_SECONDS", "600")]);
        lab.ok(&["accounts", "create", "others"]);
        let key = lab.ok(&["keys", "create", "--account", "others"]);
        let mut mine = Http::new(lab);
        // Both say that they are the same conversation, and send the same key for their start.
        mine.agent = Some("c-1".to_owned());
        mine.headers = vec![("Idempotency-Key".to_owned(), "k-1".to_owned())];
        let mut theirs = Http::with_key(key.lines().last().expect("a key").trim());
        theirs.agent.clone_from(&mine.agent);
        theirs.headers.clone_from(&mine.headers);
        let id = id_of(&mine.done("sandbox_start", json!({ "goal": "mine" })));
        let warns = format!("box {id}: the idle rules stop it");
        assert!(text(&mine.tool("sandbox_list", json!({}))).contains(&warns));
        for (tool, arguments) in [
            ("sandbox_status", json!({ "id": id })),
            ("sandbox_exec", json!({ "id": id, "command": "true" })),
            ("sandbox_get", json!({ "id": id, "path": "/etc/hostname" })),
            ("sandbox_pull", json!({ "id": id })),
            ("sandbox_sync", json!({ "id": id })),
            ("sandbox_procs", json!({ "id": id })),
            ("sandbox_checkpoint", json!({ "id": id })),
            ("sandbox_say", json!({ "id": id, "text": "hello" })),
            ("sandbox_feedback", json!({ "id": id, "text": "hello" })),
            ("sandbox_stop", json!({ "id": id })),
            ("sandbox_start", json!({ "restore": id, "goal": "theirs" })),
        ] {
            let told = theirs.refused(tool, arguments);
            assert!(told.starts_with("there is no box of this id (not_found)"), "{tool}: {told}");
            assert!(!told.contains(&warns), "{tool}: {told}");
        }
        assert_eq!(theirs.done("sandbox_list", json!({ "all": true }))["boxes"], json!([]));
        let own = id_of(&theirs.done("sandbox_start", json!({ "goal": "mine" })));
        assert_ne!(own, id);
        assert!(!text(&theirs.tool("sandbox_list", json!({}))).contains(&warns));
        assert_eq!(mine.done("sandbox_status", json!({ "id": id }))["status"], "ready");
        theirs.done("sandbox_stop", json!({ "id": own }));
    });
}
