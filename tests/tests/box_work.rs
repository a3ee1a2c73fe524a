//! Work in boxes over the interface: commands that are found again, signals, standard input, single files, and a box's name and goal.

use e2e::boxes::{call, done, set_up, sh, start, view, wait_status};
use e2e::{Lab, isolated, net, test_name, until};
use serde_json::{Value, json};

fn started(lab: &Lab, spec: &Value) -> String {
    start(lab, spec)["id"].as_str().expect("an id").to_owned()
}

/// Sends plain bytes, and gives the status and the JSON of the answer.
fn send(lab: &Lab, method: &str, path: &str, body: &str) -> (u16, Value) {
    let answer =
        net::call(&lab.data().join("dormouse.sock"), method, path, body).expect("answered");
    (answer.status, serde_json::from_str(&answer.body).unwrap_or(Value::Null))
}

#[test]
fn b04_b15_commands_of_a_box_are_found_signalled_and_fed() {
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "3"),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", "3"),
            ],
        );
        let id = started(lab, &json!({ "goal": "work" }));
        let path = |rest: &str| format!("/v1/boxes/{id}/{rest}");
        let begin = |request: Value| {
            let begun = done(lab, "POST", &path("exec"), &request);
            begun["execId"].as_str().expect("an id").to_owned()
        };
        let reads = begin(json!({
            "command": "cat > /work/got; exec sleep 1000", "background": true, "openStdin": true,
        }));
        let fed =
            send(lab, "POST", &path(&format!("execs/{reads}/stdin?close=true")), "two\nlines\n");
        assert_eq!(fed, (200, json!({ "ok": true })));
        sh(lab, &id, "until grep -q lines /work/got; do sleep 0.05; done");
        let fails = begin(json!({ "command": "echo no; exit 3" }));
        // Its listing of processes is no command of anybody's.
        done(lab, "GET", &path("procs"), &Value::Null);

        let listed = done(lab, "GET", &path("execs"), &Value::Null);
        let of = |listed: &Value, exec: &str| {
            let execs = listed["execs"].as_array().expect("commands").clone();
            assert!(
                execs.iter().all(|one| !one["command"].as_str().expect("text").contains("ps -eo")),
                "{listed}"
            );
            execs.into_iter().find(|one| one["execId"] == exec).expect("listed")
        };
        let failed = of(&listed, &fails);
        assert_eq!(
            (&failed["command"], &failed["running"], &failed["exitCode"], &failed["outputBytes"]),
            (&json!("echo no; exit 3"), &json!(false), &json!(3), &json!(3))
        );
        assert_eq!(of(&listed, &reads)["running"], true);

        // Its output is read in parts, the end of it too.
        let output = |exec: &str, query: &str| {
            let path = path(&format!("execs/{exec}/output?{query}"));
            net::call(&lab.data().join("dormouse.sock"), "GET", &path, "").expect("answered")
        };
        let part = output(&fails, "offset=1");
        assert_eq!((part.status, part.body.as_str()), (200, "o\n"), "{part:?}");
        assert_eq!(
            (part.header("dormouse-offset"), part.header("dormouse-next-offset")),
            (Some("1"), Some("3")),
            "{part:?}"
        );
        assert_eq!(output(&fails, "follow=true").body, "no\n");
        for (query, status, field) in [
            ("offset=4", 422, "offset"),
            ("offset=-1", 400, "offset"),
            ("follow=maybe", 400, "follow"),
            ("stream=stderr", 400, "stream"),
        ] {
            let refused = output(&fails, query);
            let error: Value = serde_json::from_str(&refused.body).expect("JSON");
            assert_eq!((refused.status, &error["field"]), (status, &json!(field)), "{error}");
        }

        // Told of a frozen one without thawing it.
        wait_status(lab, &id, "frozen");
        assert_eq!(of(&done(lab, "GET", &path("execs"), &Value::Null), &reads)["running"], true);
        let one = done(lab, "GET", &path(&format!("execs/{fails}")), &Value::Null);
        assert_eq!(one, failed);
        assert_eq!(view(lab, &id)["status"], "frozen", "B4");

        // Output is in the box, so reading it thaws it.
        assert_eq!(output(&fails, "offset=0").body, "no\n");
        assert_eq!(view(lab, &id)["status"], "ready", "B15");
        wait_status(lab, &id, "frozen");

        // A signal is use, and thaws it.
        let signal = path(&format!("execs/{reads}/signal"));
        done(lab, "POST", &signal, &json!({ "signal": "INT" }));
        let ended = until("it has ended", || {
            let one = done(lab, "GET", &path(&format!("execs/{reads}")), &Value::Null);
            (one["running"] == false).then_some(one)
        });
        assert_eq!((&ended["signal"], &ended["exitCode"]), (&json!(2), &Value::Null), "{ended}");

        for (method, at, body, status, field) in [
            ("POST", signal.as_str(), json!({ "signal": "SIGNIFICANT" }), 400, "signal"),
            ("POST", signal.as_str(), json!({ "sig": "INT" }), 400, "sig"),
            (
                "POST",
                &path("exec"),
                json!({ "command": "cat", "openStdin": true }),
                400,
                "openStdin",
            ),
            ("GET", &path("execs/nosuchcommand"), Value::Null, 404, ""),
            ("GET", &path("execs/nosuchcommand/output"), Value::Null, 404, ""),
            ("POST", &path("execs/nosuchcommand/signal"), json!({ "signal": "INT" }), 404, ""),
            ("POST", &path(&format!("execs/{fails}/stdin")), json!("x"), 409, ""),
            ("GET", "/v1/boxes/nosuchboxaaa/execs", Value::Null, 404, ""),
        ] {
            let (said, error) = call(lab, method, at, &body);
            assert_eq!(said, status, "{method} {at}: {error}");
            assert_eq!(error["field"].as_str().unwrap_or_default(), field, "{error}");
        }
        done(lab, "DELETE", &format!("/v1/boxes/{id}"), &Value::Null);
        assert_eq!(call(lab, "GET", &path("execs"), &Value::Null).0, 409);
    });
}

#[test]
fn b04_b15_a_file_of_a_box_is_written_and_its_name_and_goal_are_changed() {
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "2"),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", "2"),
            ],
        );
        let id = started(lab, &json!({ "goal": "work", "name": "first" }));
        let path = format!("/v1/boxes/{id}");
        wait_status(lab, &id, "frozen");
        let changed = done(lab, "PATCH", &path, &json!({ "name": "shop", "goal": "two\nlines" }));
        assert_eq!(
            (&changed["name"], &changed["goal"], &changed["status"]),
            (&json!("shop"), &json!("two lines"), &json!("frozen")),
            "B4: {changed}"
        );
        let changed = done(lab, "PATCH", &path, &json!({ "goal": null }));
        assert_eq!((&changed["name"], &changed["goal"]), (&json!("shop"), &Value::Null));
        lab.kill_daemon();
        lab.start();
        assert_eq!(view(lab, &id)["name"], "shop", "kept");
        for (body, field) in [
            (json!({ "name": "" }), "name"),
            (json!({ "name": "two\nlines" }), "name"),
            (json!({ "size": 2 }), "size"),
            (json!({ "idleTimeoutMin": -1 }), "idleTimeoutMin"),
            (json!({ "idleTimeoutMin": "1" }), "idleTimeoutMin"),
        ] {
            let (status, error) = call(lab, "PATCH", &path, &body);
            assert_eq!((status, &error["field"]), (400, &json!(field)), "{error}");
        }

        // How long it may be unused counts from its last use, which this is not.
        let idle = |lab: &Lab, minutes: Value| {
            let changed = done(lab, "PATCH", &path, &json!({ "idleTimeoutMin": minutes }));
            assert_eq!((&changed["status"], &changed["name"]), (&json!("frozen"), &json!("shop")));
            changed
        };
        let before = idle(lab, Value::Null);
        assert_eq!(before["idleTimeoutMin"], 0);
        let after = idle(lab, json!(20_000));
        assert_eq!(after["idleTimeoutMin"], 10_080, "B24");
        assert_eq!(after["lastUsedAt"], before["lastUsedAt"], "B4");
        assert!(after["stopsAt"].as_str() > before["stopsAt"].as_str(), "{after}");
        lab.kill_daemon();
        lab.start();
        let kept = view(lab, &id);
        assert_eq!(kept["idleTimeoutMin"], 10_080, "kept");
        assert!(kept["stopsAt"].as_str() > before["stopsAt"].as_str(), "kept: {kept}");
        let back = idle(lab, json!(0));
        assert_eq!(back["idleTimeoutMin"], 0);
        assert!(back["stopsAt"].as_str() < kept["stopsAt"].as_str(), "{back}");

        let file = format!("{path}/files?path=/work/new/run.sh&mode=0755");
        let (status, written) = send(lab, "PUT", &file, "#!/bin/sh\necho written\n");
        assert_eq!((status, &written["size"]), (200, &json!(23)), "{written}");
        assert_eq!(sh(lab, &id, "/work/new/run.sh"), "written");
        let wrong = format!("{path}/files?path=work");
        assert_eq!(send(lab, "PUT", &wrong, "x").1["field"], "path");
        let wrong = format!("{path}/files?path=/work/x&mode=9");
        assert_eq!(send(lab, "PUT", &wrong, "x").1["field"], "mode");
        let folder = format!("{path}/files?path=/work/new");
        assert_eq!(send(lab, "PUT", &folder, "x").0, 409);
    });
}
