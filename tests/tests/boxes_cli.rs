//! Boxes by the command line, on real guests: what a person who looks after them does.

use std::process::Output;

use e2e::boxes::{done, set_up, start, view, wait_status};
use e2e::{Lab, isolated, proc, test_name, until};
use serde_json::{Value, json};

/// Exit code, standard output and standard error.
fn ran(lab: &Lab, arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = lab.run(arguments);
    let text = |bytes| String::from_utf8(bytes).expect("text");
    let (stdout, stderr) = (text(stdout), text(stderr));
    eprintln!("dormouse {arguments:?}: {status}\n{stdout}{stderr}");
    (status.code(), stdout, stderr)
}

/// Runs a command that must be refused with this exit code, and gives what it says.
#[track_caller]
fn refused(lab: &Lab, code: i32, arguments: &[&str]) -> String {
    let (exit, stdout, stderr) = ran(lab, arguments);
    assert_eq!(exit, Some(code), "dormouse {arguments:?}: {stdout}{stderr}");
    assert_eq!(stdout, "", "dormouse {arguments:?}");
    stderr
}

fn id_of(box_: &Value) -> String {
    box_["id"].as_str().expect("an id").to_owned()
}

fn events(lab: &Lab, id: &str) -> Value {
    done(lab, "GET", &format!("/v1/boxes/{id}/events"), &Value::Null)["events"].clone()
}

#[test]
fn b02_b04_b27_a_box_is_listed_told_about_stopped_and_restored_by_the_command_line() {
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "2"),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", "2"),
                ("DORMOUSE_BOX_STOP_AFTER_SECONDS", "15"),
            ],
        );
        let services = json!([{ "name": "web.internal", "port": 8000, "web": true }]);
        let goal = "The refund button books a refund; done when it works in the browser.";
        let spec = json!({ "name": "Refunds now", "goal": goal, "services": services });
        let started = start(lab, &spec);
        let id = id_of(&started);
        let name = "Refunds now";

        // Its exit code and output are the command's own, by name or by id.
        let write = "echo kept > /work/word; echo 'to stderr' >&2; echo \"$1\"; exit 3";
        let exec = ["boxes", "exec", name, "--", "sh", "-c", write, "sh", "it's $HOME"];
        let (code, stdout, _) = ran(lab, &exec);
        assert_eq!((code, stdout.as_str()), (Some(3), "to stderr\nit's $HOME\n"));

        wait_status(lab, &id, "frozen");
        // It is told a moment before it is written down.
        let before = until("its timeline says so", || {
            let events = events(lab, &id);
            (events.as_array()?.last()?["status"] == "frozen").then_some(events)
        });
        let listed = lab.ok(&["boxes", "list"]);
        let row = listed.lines().find(|line| line.starts_with(&id)).expect("its row");
        assert!(listed.starts_with("ID "), "{listed}");
        for part in ["Refunds now", "frozen", "last used", "away", "The refund button"] {
            assert!(row.contains(part), "{part}: {row}");
        }
        assert!(!row.contains("browser"), "the goal is cut: {row}");
        assert_eq!(lab.json(&["boxes", "list"])[0]["goal"], goal);
        let told = lab.ok(&["boxes", "get", name]);
        for part in ["frozen\n", &id, goal, "stops ", "web.internal:8000 to port 8000, http"] {
            assert!(told.contains(part), "{part}: {told}");
        }
        assert_eq!(lab.json(&["boxes", "get", &id])["status"], "frozen");
        let timeline = lab.ok(&["boxes", "timeline", &id]);
        assert!(timeline.starts_with(&format!("{id} (Refunds now) is frozen: ")), "{timeline}");
        let entries = before.as_array().expect("a timeline");
        assert_eq!(timeline.lines().count(), entries.len() + 2, "{timeline}");
        let last = timeline.lines().last().expect("an entry");
        let at = entries.last().expect("an entry")["at"].as_str().expect("a time");
        assert!(last.starts_with(&format!("{at}  frozen      ")), "{last}");
        assert_eq!(lab.json(&["boxes", "timeline", name]), before);
        assert_eq!(lab.ok(&["boxes", "link", name]).trim(), started["webUrl"]);
        // B4: none of this was use of it.
        assert_eq!(events(lab, &id), before, "nothing happened to it");
        assert_eq!(proc::qemus_below(&lab.data()), Vec::<i32>::new(), "nothing of it runs");

        let (code, _, stderr) = ran(lab, &["boxes", "wake", name]);
        assert_eq!(code, Some(0));
        assert!(stderr.starts_with(&format!("{id} (Refunds now) is ready")), "{stderr}");

        wait_status(lab, &id, "terminated");
        assert!(!lab.ok(&["boxes", "list"]).contains(&id));
        let listed = lab.ok(&["boxes", "list", "--all"]);
        assert!(listed.contains("terminated (restorable)"), "{listed}");
        let stderr = refused(lab, 125, &["boxes", "exec", name, "--", "true"]);
        assert!(
            stderr.contains(&format!("`dormouse boxes restore {id}` brings it back")),
            "{stderr}"
        );
        let (code, _, stderr) = ran(lab, &["boxes", "restore", name]);
        assert_eq!(code, Some(0));
        assert!(stderr.contains("is ready"), "{stderr}");
        assert_eq!(lab.ok(&["boxes", "exec", name, "--", "cat", "word"]), "kept\n");
        let (code, _, stderr) = ran(lab, &["boxes", "restore", name]);
        assert_eq!(code, Some(0));
        assert!(stderr.starts_with("note: it was not stopped: nothing was changed"), "{stderr}");

        // The others are stopped although one is not there.
        let stderr = refused(lab, 1, &["boxes", "stop", "no such box", &id]);
        assert!(stderr.contains("there is no box of the id or name `no such box`"), "{stderr}");
        assert!(stderr.contains(&format!("stopped {id} (Refunds now)")), "{stderr}");
        assert_eq!(view(lab, &id)["status"], "terminated");
        assert!(lab.ok(&["boxes", "get", name]).contains("stopped by a request"));
        let stderr = refused(lab, 1, &["boxes", "restore", &id]);
        assert!(stderr.contains("keeps no copy"), "{stderr}");
        // It may be asked for again.
        assert_eq!(lab.ok(&["boxes", "stop", &id]), "");
    });
}

#[test]
fn a_boxs_commands_and_what_is_wrong_about_one_by_the_command_line() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        let id = id_of(&start(lab, &json!({ "name": "work" })));
        // More than one answer holds, and longer than one call waits.
        let long = lab.ok(&["boxes", "exec", &id, "--", "sh", "-c", "seq 1 250000"]);
        assert_eq!(long.lines().count(), 250_000);
        assert!(long.ends_with("\n250000\n"), "{}", &long[long.len() - 40..]);
        let line =
            "echo one; until test -e /work/go; do sleep 0.1; done; echo \"$A\"; kill -TERM $$";
        let exec =
            ["boxes", "exec", "work", "--background", "--env", "A=b c", "--", "sh", "-c", line];
        let exec_id = lab.ok(&exec).trim().to_owned();
        until("it is listed", || {
            lab.ok(&["boxes", "ps", "work"]).contains("/work/go").then_some(())
        });
        lab.ok(&["boxes", "exec", "work", "--", "touch", "/work/go"]);
        let (code, stdout, _) = ran(lab, &["boxes", "exec", "work", "--read", &exec_id]);
        assert_eq!((code, stdout.as_str()), (Some(128 + 15), "one\nb c\n"));
        let update = [
            "boxes",
            "update",
            "work",
            "--name",
            "job",
            "--goal",
            "it ends",
            "--idle-timeout",
            "30",
        ];
        lab.ok(&update);
        let seen = view(lab, &id);
        assert_eq!(
            (&seen["name"], &seen["goal"], &seen["idleTimeoutMin"]),
            (&json!("job"), &json!("it ends"), &json!(30))
        );
        assert!(refused(lab, 2, &["boxes", "update", "job"]).contains("--goal <TEXT>"));
        assert!(refused(lab, 1, &["boxes", "update", "job", "--name", " "]).contains("not blank"));
        lab.ok(&["boxes", "update", "job", "--name", "work"]);
        let sleeps = ["boxes", "exec", "work", "--background", "--", "sleep", "1000"];
        let sleeper = lab.ok(&sleeps).trim().to_owned();
        lab.ok(&["boxes", "kill", "work", &sleeper, "--signal", "INT"]);
        until("it is listed as ended", || {
            let listed = lab.ok(&["boxes", "execs", "work"]);
            let row = listed.lines().find(|line| line.starts_with(&sleeper)).expect("its row");
            assert!(row.ends_with("  sleep 1000"), "{row}");
            row.contains("signal 2").then_some(())
        });
        let (code, stdout, _) =
            ran(lab, &["--json", "boxes", "exec", "work", "--", "no-such-program"]);
        let told: Value = serde_json::from_str(&stdout).expect("JSON");
        assert_eq!((code, &told["exitCode"]), (Some(127), &json!(127)), "{told}");

        for (code, arguments, says) in [
            (1, &["boxes", "get", "nobody"][..], "there is no box of the id or name `nobody`"),
            (1, &["boxes", "timeline", "aaaaaaaaaaaa"], "there is no box of the id or name"),
            (1, &["boxes", "wake", "nobody"], "dormouse boxes list --all"),
            (1, &["boxes", "kill", "work", "nobody"], "no command `nobody`"),
            (1, &["boxes", "execs", "nobody"], "there is no box"),
            (1, &["boxes", "ps", ""], "there is no box"),
            (1, &["boxes", "link", "work", "shop"], "no service `shop`"),
            (1, &["boxes", "checkpoint", "work", "601"], "everySeconds"),
            (1, &["--as-account", "nobody", "boxes", "list"], "--as-account"),
            (125, &["boxes", "exec", "nobody", "--", "true"], "there is no box"),
            (125, &["boxes", "exec", "work", "--read", "nobody"], "no command `nobody`"),
            (125, &["boxes", "exec", "work", "--timeout", "0", "--", "true"], "--timeout"),
            (2, &["boxes", "exec", "work"], "COMMAND"),
            (2, &["boxes", "stop"], "BOX"),
            (2, &["boxes", "get"], "BOX"),
        ] {
            let stderr = refused(lab, code, arguments);
            assert!(stderr.contains(says), "dormouse {arguments:?}: {stderr}");
        }
        let error = refused(lab, 1, &["--json", "boxes", "get", "nobody"]);
        let error: Value = serde_json::from_str(&error).expect("JSON");
        assert_eq!(error["code"], "not_found");

        // Two of one name are told apart by their ids.
        let other = id_of(&start(lab, &json!({ "name": "work" })));
        let stderr = refused(lab, 1, &["boxes", "stop", "work"]);
        assert!(stderr.contains(&id) && stderr.contains(&other), "{stderr}");
        lab.ok(&["boxes", "stop", &id]);
        // One of them lives.
        lab.ok(&["boxes", "stop", "work"]);
        assert_eq!(view(lab, &other)["status"], "terminated");
    });
}

#[test]
fn an_account_with_boxes_is_deleted_by_what_its_refusal_says() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        lab.ok(&["accounts", "create", "acme"]);
        let mine = id_of(&start(lab, &json!({ "name": "mine" })));
        let key = lab.ok(&["keys", "create", "--account", "acme"]);
        let spec = json!({ "name": "theirs" });
        let (status, theirs) = e2e::boxes::call_as(key.trim(), "POST", "/v1/boxes", &spec);
        assert_eq!(status, 201, "{theirs}");
        let id = id_of(&theirs);

        let usage = lab.ok(&["usage"]);
        for name in [format!("{mine} (mine) "), format!("{id} (theirs) ")] {
            assert!(usage.contains(&name), "{name}: {usage}");
        }
        assert_eq!(lab.json(&["boxes", "list"]).as_array().map(Vec::len), Some(1));
        let stderr = refused(lab, 1, &["accounts", "delete", "acme"]);
        assert!(stderr.contains("`acme` has 1 box that has not ended"), "{stderr}");
        let said = |command: &str| assert!(stderr.contains(command), "{command}: {stderr}");
        said("`dormouse --as-account acme boxes list --all`");
        said("`dormouse --as-account acme boxes stop BOX`");
        let listed = lab.json(&["--as-account", "acme", "boxes", "list", "--all"]);
        assert_eq!(listed[0]["id"], theirs["id"]);
        lab.ok(&["--as-account", "acme", "boxes", "stop", "theirs"]);
        lab.ok(&["accounts", "delete", "acme"]);
        assert_eq!(view(lab, &mine)["status"], "ready");
    });
}
