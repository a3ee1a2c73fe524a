//! `dormouse mcp`, the adapter for AI clients that talk over standard streams, with real guests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use e2e::boxes::{done, set_up, sh, view};
use e2e::lab::{LISTEN, workspace};
use e2e::lossy::{Loss, Lossy};
use e2e::mcp::{Adapter, token};
use e2e::{Lab, isolated, proc, test_name, until};
use rustix::process::Signal;
use serde_json::{Value, json};

/// The Python of the protocol's own library: `DORMOUSE_MCP_PYTHON`, or where `cargo xtask setup --tests` puts it.
fn python() -> PathBuf {
    let python = std::env::var_os("DORMOUSE_MCP_PYTHON")
        .map_or_else(|| workspace().join("target/mcp-client/bin/python"), PathBuf::from);
    assert!(
        python.is_file(),
        "{} is missing: `cargo xtask setup --tests` installs it",
        python.display()
    );
    python
}

fn all_text(result: &Value) -> String {
    let blocks = result["content"].as_array().expect("content");
    let texts: Vec<&str> = blocks.iter().filter_map(|block| block["text"].as_str()).collect();
    texts.join("\n")
}

fn id_of(started: &Value) -> String {
    started["id"].as_str().expect("an id").to_owned()
}

fn agent_state(lab: &Lab, id: &str) -> String {
    view(lab, id)["agent"]["state"].as_str().expect("a state").to_owned()
}

fn write(folder: &Path, name: &str, text: &str) {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().expect("a folder")).expect("made");
    fs::write(path, text).expect("written");
}

#[test]
fn b35_signs_of_life_from_the_first_call_and_a_last_word() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[("DORMOUSE_BOX_AGENT_SILENCE_SECONDS", "4")]);
        let folder = lab.scratch().to_owned();
        let mut ids = Vec::new();
        for end in [None, Some(Signal::TERM), Some(Signal::INT), Some(Signal::HUP)] {
            let mut adapter = Adapter::start(lab, &folder, &[]);
            let list = adapter.send("tools/list", json!({}));
            let tools = adapter.answer(list).0["result"]["tools"].clone();
            assert_eq!(tools[0]["name"], "sandbox_start", "{tools}");
            let id = id_of(&adapter.done("sandbox_start", &json!({ "goal": "live" })));
            // The heartbeat is sent beside the call.
            let known = until("a sign of life", || {
                let agent = view(lab, &id)["agent"].clone();
                agent["client"].is_string().then_some(agent)
            });
            assert_eq!((&known["client"], &known["state"]), (&json!("e2e"), &json!("working")));
            match end {
                None => adapter.close(),
                Some(signal) => {
                    proc::kill(adapter.pid(), signal);
                    adapter.wait();
                }
            }
            // At once, and not for its silence.
            assert_eq!(agent_state(lab, &id), "left", "{end:?}");
            ids.push(id);
        }
        // One that is killed says nothing, and is gone after its silence.
        let mut adapter = Adapter::start(lab, &folder, &[]);
        let id = id_of(&adapter.done("sandbox_start", &json!({ "goal": "live" })));
        until("a sign of life", || view(lab, &id)["agent"]["client"].as_str().map(str::to_owned));
        proc::kill(adapter.pid(), Signal::KILL);
        assert_eq!(agent_state(lab, &id), "working");
        until("it is gone", || (agent_state(lab, &id) == "left").then_some(()));
        ids.push(id);
        for id in ids {
            done(lab, "DELETE", &format!("/v1/boxes/{id}"), &Value::Null);
        }
    });
}

#[test]
fn files_go_in_and_out_and_only_what_changed() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        let project = lab.scratch().join("project");
        write(&project, "app/main.py", "print('one')\n");
        write(&project, "app/it's odd name", "x");
        write(&project, "-dash", "d");
        write(&project, "old/deep/file", "old");
        write(&project, "link-or-file", "file");
        write(&project, ".gitignore", "node_modules/\n*.log\n");
        write(&project, "node_modules/big.js", "no");
        write(&project, "a.log", "no");
        write(&project, ".git/config", "no");
        let mut adapter = Adapter::start(lab, &project, &[]);
        let id = id_of(&adapter.done("sandbox_start", &json!({ "goal": "sync" })));
        let first = adapter.done("sandbox_sync", &json!({ "id": id }));
        assert_eq!(
            (&first["sent"], &first["deleted"], &first["to"]),
            (&json!(6), &json!(0), &json!("/work"))
        );
        let there =
            sh(lab, &id, "cd /work && find . -type f -not -path './.sbx/*' | LC_ALL=C sort");
        assert_eq!(
            there,
            "./-dash\n./.gitignore\n./app/it's odd name\n./app/main.py\n./link-or-file\n./old/deep/file"
        );
        assert_eq!(sh(lab, &id, "python3 /work/app/main.py"), "one");
        let none = adapter.done("sandbox_sync", &json!({ "id": id }));
        assert_eq!((&none["sent"], &none["unchanged"]), (&json!(0), &json!(6)));

        // Changed here; deleted here; changed and removed there; made there; a file that became a link, a folder that became a file.
        write(&project, "app/main.py", "print('two')\n");
        fs::remove_dir_all(project.join("old")).expect("removed");
        write(&project, "old", "a file now");
        fs::remove_file(project.join("link-or-file")).expect("removed");
        std::os::unix::fs::symlink("app/main.py", project.join("link-or-file")).expect("linked");
        sh(
            lab,
            &id,
            "cd /work && echo theirs > -dash && rm 'app/it'\\''s odd name' && echo made > app/made.out",
        );
        let again = adapter.done("sandbox_sync", &json!({ "id": id }));
        assert_eq!(
            (&again["sent"], &again["deleted"], &again["unchanged"]),
            (&json!(5), &json!(1), &json!(1)),
            "{again}"
        );
        let lines = "cd /work && cat ./-dash app/it* old app/made.out && readlink link-or-file && python3 app/main.py";
        assert_eq!(sh(lab, &id, lines), "dxa file nowmade\napp/main.py\ntwo");

        // Out again, with what the box made.
        let out = lab.scratch().join("out");
        let pulled =
            adapter.done("sandbox_pull", &json!({ "id": id, "path": "/work/app", "to": out }));
        assert_eq!(pulled["path"], "/work/app");
        assert_eq!(fs::read_to_string(out.join("made.out")).expect("there"), "made\n");

        // A single file: as that file, over one that is there, into a folder, and as a folder that has nothing else.
        sh(lab, &id, "mkdir -p /work/one && printf one > /work/one/one && chmod 750 /work/one/one");
        for (path, to, there) in [
            ("/work/one/one", "new/as.txt", "new/as.txt"),
            ("/work/app/made.out", "new/as.txt", "new/as.txt"),
            ("/work/one/one", "new", "new/one"),
            ("/work/one/one", "fresh/", "fresh/one"),
            ("/work/one", "folder", "folder/one"),
        ] {
            let to = format!("{}/{to}", out.display());
            adapter.done("sandbox_pull", &json!({ "id": id, "path": path, "to": to }));
            let expected = if path.ends_with("made.out") { "made\n" } else { "one" };
            let there = fs::read_to_string(out.join(there)).expect(there);
            assert_eq!(there, expected, "{path} to {to}");
        }
        let mode = fs::metadata(out.join("new/one")).expect("there").permissions();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o750);
        let none = json!({ "id": id, "path": "/work/none", "to": out.join("none") });
        let none = all_text(&adapter.tool("sandbox_pull", &none));
        assert!(none.contains("/work/none") && !none.contains("/work/none/."), "{none}");

        // What is wrong is said, and is an error that a model reads.
        let wrong = adapter.tool("sandbox_sync", &json!({ "id": id, "from": "no/such" }));
        assert!(all_text(&wrong).contains("is not a folder of this machine"), "{wrong}");
        let none = adapter.tool("sandbox_sync", &json!({ "id": "nosuchbox" }));
        assert_eq!(none["isError"], true);
        assert!(all_text(&none).contains("there is no box of this id (not_found)"), "{none}");
        adapter.done("sandbox_stop", &json!({ "id": id }));
        adapter.close();
    });
}

#[test]
fn t15_the_client_says_how_long_it_can_wait_and_b26_the_adapter_passes_warnings_on() {
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "1"),
                ("DORMOUSE_BOX_STOP_AFTER_SECONDS", "1200"),
            ],
        );
        let folder = lab.scratch().join("empty");
        fs::create_dir_all(&folder).expect("made");
        let mut adapter = Adapter::start(lab, &folder, &[("PSBX_TOOL_TIMEOUT_SEC", "8")]);
        let id = id_of(&adapter.done("sandbox_start", &json!({ "goal": "wait" })));
        // A quarter of eight seconds.
        let runs = adapter.done("sandbox_exec", &json!({ "id": id, "command": "sleep 600" }));
        assert_eq!(runs["running"], true);
        done(lab, "POST", &format!("/v1/boxes/{id}/exec"), &json!({ "command": "pkill sleep" }));
        let other = id_of(&adapter.done("sandbox_start", &json!({ "goal": "other" })));
        e2e::boxes::wait_status(lab, &id, "frozen");
        let synced = adapter.tool("sandbox_sync", &json!({ "id": other }));
        let text = all_text(&synced);
        let warns = format!("box {id}: the idle rules stop it for good at ");
        assert!(text.lines().any(|line| line.starts_with(&warns)), "{text}");
        let told = synced["structuredContent"]["idleWarnings"].to_string();
        assert!(told.contains(&warns), "{synced}");
        let listed = adapter.tool("sandbox_list", &json!({}));
        assert!(all_text(&listed).contains(&warns), "{listed}");
        for id in [id, other] {
            adapter.done("sandbox_stop", &json!({ "id": id }));
        }
        adapter.close();
    });
}

#[test]
fn t16_a_start_whose_answer_is_lost_makes_one_box_and_says_which() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        let way = Lossy::open("\"sandbox_start\"");
        let (url, token) = (way.url(), token(lab));
        let env = [("DORMOUSE_URL", url.as_str()), ("DORMOUSE_TOKEN", token.as_str())];
        let mut adapter = Adapter::start(lab, lab.scratch(), &env);
        let boxes = || {
            done(lab, "GET", "/v1/boxes", &Value::Null)["boxes"].as_array().expect("a list").clone()
        };

        // The connection breaks: the answer tells the box all the same.
        way.lose(Loss::Answer);
        let cut = adapter.tool("sandbox_start", &json!({ "name": "cut", "goal": "g" }));
        assert!(
            all_text(&cut).starts_with(
                "The connection broke before the answer came, but the box was started."
            ),
            "{cut}"
        );
        let first = id_of(&cut["structuredContent"]);
        assert_eq!(boxes().len(), 1);
        assert_eq!(boxes()[0]["id"], first.as_str());

        // The call is taken back: the next results tell of the box, and the same start gets it.
        way.lose(Loss::Silence);
        let spec = json!({ "name": "kept", "goal": " as it was " });
        let call =
            adapter.send("tools/call", json!({ "name": "sandbox_start", "arguments": spec }));
        let second = until("the box is started", || {
            boxes().iter().find(|one| one["name"] == "kept" && one["status"] == "ready").map(id_of)
        });
        adapter.cancel(call);
        way.lose(Loss::None);
        let listed = until("results tell of it", || {
            let text = all_text(&adapter.tool("sandbox_list", &json!({})));
            text.contains("interrupted sandbox_start").then_some(text)
        });
        let last = listed.lines().last().expect("a line");
        assert!(last.contains(&format!("has started box {second} (\"kept\")")), "{listed}");
        let other = adapter.done("sandbox_start", &json!({ "name": "other", "goal": "g" }));
        assert_ne!(id_of(&other), second);
        let again = adapter.tool("sandbox_start", &spec);
        assert!(all_text(&again).contains("your interrupted sandbox_start"), "{again}");
        assert_eq!(id_of(&again["structuredContent"]), second);
        assert_eq!(again["structuredContent"]["goal"], "as it was");
        assert_eq!(boxes().len(), 3);
        let quiet = all_text(&adapter.tool("sandbox_list", &json!({})));
        assert!(!quiet.contains("interrupted"), "{quiet}");
        // Once more starts another.
        assert_ne!(id_of(&adapter.done("sandbox_start", &spec)), second);
        assert_eq!(boxes().len(), 4);

        // Nothing came to the daemon: that is said, and the same call does it.
        way.lose(Loss::Request);
        let lost = json!({ "name": "lost", "goal": "g" });
        let none = adapter.tool("sandbox_start", &lost);
        assert_eq!(none["isError"], true);
        let text = all_text(&none);
        assert!(
            text.contains("no box of this name and goal was started")
                && text.contains("call sandbox_start again"),
            "{text}"
        );
        way.lose(Loss::None);
        adapter.done("sandbox_start", &lost);
        assert_eq!(boxes().len(), 5);
        adapter.close();
    });
}

#[test]
fn a_client_that_others_wrote_over_http_and_stdio_in_both_modes() {
    isolated(test_name!(), |lab| {
        // Room for one box.
        set_up(
            lab,
            &[("DORMOUSE_MEMORY_BUDGET_MIB", "800"), ("DORMOUSE_MEMORY_WAIT_SECONDS", "1")],
        );
        let project = lab.scratch().join("project");
        write(&project, "a.txt", "a");
        let url = format!("http://{LISTEN}/mcp");
        let (program, token) = (lab.program(), token(lab));
        let program = program.to_str().expect("a path");
        for (mode, way) in [
            ("auto", vec![url.as_str()]),
            ("legacy", vec![url.as_str()]),
            ("auto", vec!["stdio", program, "mcp"]),
            ("legacy", vec!["stdio", program, "mcp"]),
        ] {
            let mut client = Command::new(python());
            client.arg(workspace().join("tests/src/mcp_client.py")).arg(mode).args(&way);
            client.envs(lab.env()).env("TOKEN", &token).env("NO_PROXY", "127.0.0.1");
            if way[0] == "stdio" {
                client.env("SYNC", &project);
            }
            let output = client.output().expect("Python starts");
            let (seen, said) =
                (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success(), "{mode} {way:?}: {said}\n{}", lab.daemon_log());
            let seen: Value = serde_json::from_str(&seen).expect("what it saw");
            let revision = if mode == "auto" { "2026-07-28" } else { "2025-11-25" };
            assert_eq!(
                (&seen["server"], &seen["revision"]),
                (&json!("dormouse"), &json!(revision))
            );
            assert_eq!(seen["required"], json!(["goal"]));
            assert_eq!(seen["ran"], "42\n[exit code 0]");
            assert_eq!(seen["unknown_tool"], -32602);
            assert_eq!(seen["progress"].as_array().map(Vec::len), Some(1), "{seen}");
            let full = seen["full"].as_str().expect("words");
            assert!(full.starts_with("no box capacity right now: "), "{full}");
            if way[0] == "stdio" {
                assert_eq!(seen["sent"], 1);
            }
        }
    });
}
