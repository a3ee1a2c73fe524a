//! What an operator does: figures, bills, lists, following events, emptying a host, several daemons.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::Command;

use e2e::lab::{LISTEN_PROGRAM, Lab};
use e2e::wait::{WAIT_MAX, stays};
use e2e::{isolated, net, proc, test_name, until};

#[test]
fn s22_lists_are_filtered_and_come_in_pages_and_wake_nothing() {
    isolated(test_name!(), |lab| {
        for (name, team) in [("a", "web"), ("b", "db"), ("c", "web")] {
            let label = format!("team={team}");
            let more = ["--label", &label, "--sleep-after-seconds", "never"];
            lab.ok(&[&["sandboxes", "create", "--name", name], &more[..]].concat());
        }
        lab.ok(&["sandboxes", "sleep", "a", "--tier", "disk"]);
        let names = |arguments: &[&str]| -> Vec<String> {
            let list = lab.json(&[&["sandboxes", "list"], arguments].concat());
            let list = list.as_array().expect("a list");
            list.iter().map(|one| one["name"].as_str().expect("a name").to_owned()).collect()
        };
        assert_eq!(names(&["--label", "team=web"]), ["a", "c"]);
        assert_eq!(names(&["--label", "team=web", "--status", "sleeping"]), ["a"]);
        assert_eq!(names(&["--label", "team", "--status", "running"]), ["b", "c"]);
        assert_eq!(names(&["--label", "team=none"]), Vec::<String>::new());
        let token = std::fs::read_to_string(lab.data().join("admin.token")).expect("the token");
        let mut seen = Vec::new();
        let mut cursor = String::new();
        loop {
            let path = format!("/v1/sandboxes?limit=1&label=team%3Dweb{cursor}");
            let answer = net::output(
                "curl",
                &[
                    "-sf",
                    "-H",
                    &format!("authorization: Bearer {}", token.trim()),
                    &format!("http://{}{path}", lab.address()),
                ],
            );
            let page: serde_json::Value = serde_json::from_str(&answer).expect("a page");
            let sandboxes = page["sandboxes"].as_array().expect("a list");
            assert!(sandboxes.len() <= 1, "{page}");
            seen.extend(sandboxes.iter().map(|one| one["name"].as_str().map(str::to_owned)));
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        assert_eq!(seen, [Some("a".to_owned()), Some("c".to_owned())]);
        assert_eq!(lab.view("a")["status"], "sleeping");
        assert_eq!(lab.events("a", "woke").len(), 0);
    });
}

/// What passes through the daemon is waited for; what guests compute need not be.
#[test]
fn the_daemon_goes_before_its_guests() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        let nice = |pid: i32| {
            let pid = rustix::process::Pid::from_raw(pid);
            rustix::process::getpriority_process(pid).expect("its priority")
        };
        // As far as this machine lets anybody.
        let allowed = std::process::Command::new("nice").args(["-n", "-5", "nice"]).output();
        let allowed = String::from_utf8(allowed.expect("`nice` starts").stdout).expect("text");
        assert_eq!(nice(lab.daemon_pid()).to_string(), allowed.trim());
        let qemus = proc::qemus_below(&lab.data());
        assert!(!qemus.is_empty());
        for qemu in qemus {
            assert_eq!(nice(qemu), 0);
        }
    });
}

/// As in a container that somebody's shell has entered: the session's leader has no process id there.
#[test]
fn it_starts_where_its_session_was_begun_outside_of_its_container() {
    isolated(test_name!(), |lab| {
        let in_the_way = lab.scratch().join("a-file");
        std::fs::write(&in_the_way, "").expect("written");
        let dormouse = lab.command(&[]);
        let output = std::process::Command::new("unshare")
            .args(["--pid", "--fork", "--mount-proc", "--kill-child"])
            .arg(dormouse.get_program())
            .args(["serve", "--listen", "127.0.0.1:0", "--data"])
            .arg(&in_the_way)
            .output()
            .expect("`unshare` starts");
        // It has come as far as its data folder, which is none.
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains("a-file") && !told.contains("panicked"), "{told}");
    });
}

/// Counted where things happen, so that it outlives the daemon; asking wakes nothing.
#[test]
fn s23_a_spending_limit_puts_to_sleep_and_deletes_nothing() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        lab.write_file("web", "/work/listen.py", LISTEN_PROGRAM);
        let serve = ["exec", "web", "--background", "--", "python3", "/work/listen.py"];
        lab.ok(&[&serve[..], &["0.0.0.0", "8000"]].concat());
        let boot = "cat /proc/sys/kernel/random/boot_id";
        let booted = lab.sh("web", &format!("echo kept > /dev/shm/word; {boot}"));
        let link = lab.ok(&["link", "web", "8000"]);
        until("it answers", || net::follow(&link).ok().filter(|answer| answer.status == 200));
        let code = |lab: &Lab, arguments: &[&str]| {
            let output = lab.run(&[&["--json"], arguments].concat());
            assert!(!output.status.success(), "{arguments:?} succeeded");
            let error: serde_json::Value =
                serde_json::from_slice(&output.stderr).expect("an error as JSON");
            error["code"].as_str().expect("a code").to_owned()
        };

        // 512 MiB awake use half a GiB-second in each.
        let set = lab.json(&["project", "--spending-limit", "2"]);
        assert_eq!(set["spending"]["reached"], false, "what was used before does not count");
        lab.wait_status("web", "sleeping");
        let view = lab.view("web");
        assert_eq!(view["sleep_tier"], "disk", "{view}");
        assert_eq!(view["waits_for"]["what"], "spending", "{view}");
        assert_eq!(lab.events("web", "slept")[0]["data"]["cause"], "spending");
        assert!(lab.ok(&["why", "web"]).contains("spending limit"));
        assert_eq!(lab.json(&["project"])["spending"]["reached"], true);
        let everything: [&[&str]; 4] = [
            &["exec", "web", "--", "true"],
            &["sandboxes", "restart", "web"],
            &["sandboxes", "create", "--name", "more"],
            &["fork", "web", "--name", "more"],
        ];
        for arguments in everything {
            assert_eq!(code(lab, arguments), "spending_limit", "{arguments:?}");
        }
        assert_eq!(net::follow(&link).expect("an answer").status, 402);
        let address = view["address"].as_str().expect("an address").to_owned();
        assert!(
            net::output("sh", &["-c", &format!("ping -c1 -W1 {address} >&2; true")]).is_empty()
        );
        assert_eq!(lab.view("web")["status"], "sleeping");

        // A daemon that begins anew wakes nothing either.
        lab.kill_daemon();
        lab.start();
        assert_eq!(code(lab, &["exec", "web", "--", "true"]), "spending_limit");
        assert_eq!(lab.events("web", "woke").len(), 0);

        // With more to spend it goes on where it was.
        lab.ok(&["project", "--spending-limit", "1000000"]);
        assert_eq!(lab.sh("web", "cat /dev/shm/word"), "kept");
        until("it answers", || net::follow(&link).ok().filter(|answer| answer.status == 200));
        assert_eq!(lab.sh("web", boot), booted);
        assert!(lab.json(&["project"])["spending"]["memory_gib_seconds"].as_u64() >= Some(2));
        lab.ok(&["project", "--spending-limit", "none"]);
        assert!(lab.json(&["project"])["spending_limit"].is_null());
    });
}

#[test]
fn s23_what_is_used_is_counted_and_outlives_the_daemon() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        let usage = |lab: &Lab| lab.json(&["usage", "web"])["usage"].clone();
        let figure = |lab: &Lab, name: &str| usage(lab)[name].as_f64().expect("a number");
        // From its first second on, and of what it was made of nothing is counted.
        lab.sh("web", "i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "memory"]);
        let first = usage(lab);
        assert!(first["cpu_seconds"].as_f64() > Some(0.1), "{first}");
        assert!(first["cpu_seconds"].as_f64() < first["awake_seconds"].as_f64(), "{first}");
        assert_eq!(first["asleep_disk_seconds"].as_f64(), Some(0.0), "{first}");
        lab.sh("web", "true");
        until("awake for a while", || (figure(lab, "awake_seconds") > 2.0).then_some(()));
        until("its programs have computed", || {
            lab.sh("web", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done");
            (figure(lab, "cpu_seconds") > 0.2).then_some(())
        });
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "memory"]);
        until("asleep in memory for a while", || {
            (figure(lab, "asleep_memory_seconds") > 1.0).then_some(())
        });
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        let awake = figure(lab, "awake_seconds");
        lab.kill_daemon();
        lab.start();
        until("asleep on disk for a while", || {
            (figure(lab, "asleep_disk_seconds") > 1.0).then_some(())
        });
        let after = usage(lab);
        assert_eq!(after["awake_seconds"].as_f64(), Some(awake), "{after}");
        for name in ["cpu_seconds", "memory_gib_seconds", "state_gb_months"] {
            assert!(after[name].as_f64().is_some_and(|figure| figure > 0.0), "{name}: {after}");
        }
        assert!(after["state_bytes"].as_u64() > Some(10_000_000), "{after}");
        assert_eq!(lab.view("web")["status"], "sleeping");
        assert_eq!(lab.events("web", "woke").len(), 1, "the one from above");
        // A fork begins at nothing.
        lab.ok(&["fork", "web", "--name", "copy"]);
        let copy = lab.json(&["usage", "copy"])["usage"].clone();
        for name in ["asleep_memory_seconds", "asleep_disk_seconds"] {
            assert!(copy[name].as_f64() == Some(0.0), "{copy}");
        }
        lab.ok(&["sandboxes", "delete", "web"]);
        let all = lab.json(&["usage"]);
        assert!(all["deleted"]["awake_seconds"].as_f64() >= Some(awake), "{all}");
    });
}

#[test]
fn s08_reading_figures_wakes_nothing_and_holds_nothing_awake() {
    isolated(test_name!(), |lab| {
        lab.stop_daemon();
        lab.daemon_env.push(("DORMOUSE_OPEN_METRICS".to_owned(), "true".to_owned()));
        lab.start();
        let address = lab.address();
        let metrics = || {
            let answer = net::http(address, "localhost", "/metrics").expect("answered");
            assert_eq!(answer.status, 200, "{}", answer.head);
            answer.body
        };
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "3"]);
        until("it sleeps although it is looked at all the time", || {
            metrics();
            (lab.view("web")["status"] == "sleeping").then_some(())
        });
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        stays("it sleeps on", 2, || {
            metrics().contains("dormouse_sandboxes{status=\"sleeping\",tier=\"disk\"} 1")
        });
        lab.sh("web", "true");
        let text = metrics();
        for line in [
            "dormouse_wakes_total{cause=\"call\",tier=\"disk\"} 1",
            "dormouse_sleeps_total{cause=\"idle\",tier=\"memory\"} 1",
            "dormouse_order_seconds_count{order=\"wake\"} 1",
            "dormouse_phase_seconds_count{order=\"wake\",phase=\"restore\"} 1",
            "dormouse_phase_seconds_count{order=\"demote\",phase=\"save\"} 1",
        ] {
            assert!(text.contains(line), "no `{line}` in\n{text}");
        }
    });
}

/// Before a host goes down everything is put to sleep on disk, whatever it did; a new daemon finds it there, memory and all.
/// Some wake just then, and one looks at something all the time: none of them is left behind.
#[test]
fn s24_a_host_that_goes_down_leaves_no_machine_behind_whatever_wakes() {
    isolated(test_name!(), |lab| {
        for name in ["a", "b", "c"] {
            lab.ok(&["sandboxes", "create", "--name", name, "--sleep-after-seconds", "1"]);
            let look = "import time\nwhile True: time.sleep(0.3)";
            lab.ok(&["exec", name, "--background", "--", "python3", "-c", look]);
        }
        for wakes in ["a", "b", "c"] {
            lab.ok(&["exec", wakes, "--", "true"]);
            assert!(lab.run(&["drain", "--stop"]).status.success());
            lab.reap_daemon();
            assert_eq!(proc::qemus_below(&lab.data()), Vec::<i32>::new(), "{wakes}");
            lab.start();
            assert_eq!(lab.sh(wakes, "pgrep -c python3"), "1");
        }
    });
}

#[test]
fn a_drained_host_has_no_machine_and_loses_nothing() {
    isolated(test_name!(), |lab| {
        for name in ["run", "mem", "disk"] {
            lab.ok(&["sandboxes", "create", "--name", name, "--sleep-after-seconds", "never"]);
            let program = "import time\nwhile True: time.sleep(1000)";
            lab.ok(&["exec", name, "-b", "--", "python3", "-c", program]);
        }
        lab.ok(&["sandboxes", "sleep", "mem", "--tier", "memory"]);
        lab.ok(&["sandboxes", "sleep", "disk", "--tier", "disk"]);
        let report = lab.json(&["drain", "--stop"]);
        assert_eq!((&report["slept"], &report["left"]), (&2.into(), &serde_json::json!([])));
        lab.reap_daemon();
        assert_eq!(proc::qemus_below(&lab.data()), Vec::<i32>::new());
        lab.start();
        for name in ["run", "mem", "disk"] {
            let view = lab.view(name);
            assert_eq!(
                (&view["status"], &view["sleep_tier"]),
                (&"sleeping".into(), &"disk".into())
            );
            let slept = lab.events(name, "sleeping");
            let cause = slept.last().map(|event| event["data"]["cause"].clone());
            assert_eq!(cause, Some(if name == "run" { "drain" } else { "asked" }.into()), "{name}");
            assert_eq!(lab.sh(name, "pgrep -cf 'time.sleep.1000' || true"), "2", "{name}");
        }
    });
}

/// Starts a second daemon over another folder and answers what it said when it had ended.
fn refused(lab: &Lab, data: &std::path::Path, more: &[&str]) -> String {
    let output = lab
        .command(&[&["serve", "--listen", "127.0.0.1:0"], more].concat())
        .env("DORMOUSE_DATA", data)
        .output()
        .expect("`dormouse` starts");
    assert!(!output.status.success(), "it started");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_daemon_that_cannot_work_says_what_is_in_its_way() {
    isolated(test_name!(), |lab| {
        use std::os::unix::fs::PermissionsExt;
        let home = lab.scratch().join("home");
        std::fs::create_dir(&home).expect("a folder");
        std::fs::set_permissions(&home, std::fs::Permissions::from_mode(0o700)).expect("closed");
        let text = refused(lab, &home.join("data"), &["--subnet", "10.119.0.0"]);
        assert!(text.contains(&format!("{} (mode 0700)", home.display())), "{text}");

        let other = lab.scratch().join("other");
        let text = refused(lab, &other, &[]);
        let pid = lab.daemon_pid();
        assert!(text.contains(&format!("another daemon (process {pid})")), "{text}");
        assert!(text.contains("10.118.0.1") && text.contains("--subnet 10.119.0.0"), "{text}");
    });
}

/// A folder deeper than a socket's address is long, and a subnet of its own beside another daemon's.
#[test]
fn two_daemons_work_side_by_side_each_on_its_subnet_at_any_depth() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "first"]);
        let deep = lab.scratch().join("d".repeat(100)).join("data");
        let log = std::fs::File::create(lab.scratch().join("second.log")).expect("a log");
        let mut second = lab
            .command(&["serve", "--listen", "127.0.0.1:8421", "--subnet", "10.119.0.0"])
            .env("DORMOUSE_DATA", &deep)
            .stderr(log)
            .spawn()
            .expect("`dormouse` starts");
        let ask = |arguments: &[&str]| {
            let output = lab.command(arguments).env("DORMOUSE_DATA", &deep).output();
            output.expect("`dormouse` starts")
        };
        until("the second answers", || {
            assert!(second.try_wait().expect("its state").is_none(), "the second ended");
            ask(&["sandboxes", "list"]).status.success().then_some(())
        });
        let made = ask(&["sandboxes", "create", "--name", "second"]);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let there = ask(&["exec", "second", "--", "getent", "hosts", "localhost"]);
        assert!(there.status.success(), "{}", String::from_utf8_lossy(&there.stderr));
        let view = String::from_utf8(ask(&["sandboxes", "get", "second"]).stdout).expect("text");
        assert!(view.contains("10.119.0.2"), "{view}");
        // Neither has taken away what is the other's.
        assert_eq!(lab.sh("first", "echo there"), "there");
        assert!(lab.view("first")["address"] == "10.118.0.2", "{}", lab.view("first"));
        assert!(ask(&["sandboxes", "delete", "second"]).status.success());
        assert!(ask(&["drain", "--stop"]).status.success());
        assert!(second.wait().expect("it ends").success());
        assert_eq!(lab.sh("first", "echo there"), "there");
    });
}

/// What an ordinary user may not look at is not reported as lacking.
#[test]
fn doctor_as_an_ordinary_user_says_what_it_may_not_look_at() {
    isolated(test_name!(), |lab| {
        let program = lab.scratch().join("dormouse");
        std::fs::copy(lab.program(), &program).expect("a copy where anybody may run it");
        let doctor = |data: &std::path::Path, user: &[&str]| {
            let output = Command::new("setpriv")
                .args(user)
                .arg(&program)
                .args(["doctor", "--json"])
                .envs(lab.env())
                .env("DORMOUSE_DATA", data)
                .output()
                .expect("`setpriv` (util-linux) starts");
            let findings: Vec<serde_json::Value> =
                serde_json::from_slice(&output.stdout).expect("findings");
            let states: std::collections::BTreeMap<String, (String, String)> = findings
                .iter()
                .map(|finding| {
                    let field = |name: &str| finding[name].as_str().unwrap_or_default().to_owned();
                    (field("check"), (field("state"), field("text")))
                })
                .collect();
            states
        };
        let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
        let states = doctor(&lab.data(), &nobody);
        for check in ["user", "daemon"] {
            assert_eq!(states[check].0, "unknown", "{check}: {states:?}");
        }
        let missing: Vec<_> = states.iter().filter(|(_, found)| found.0 == "missing").collect();
        assert!(missing.is_empty(), "{missing:?}");
        let states = doctor(&lab.data(), &[]);
        assert!(states.values().all(|found| found.0 != "unknown"), "{states:?}");

        let home = lab.scratch().join("home");
        std::fs::create_dir(&home).expect("a folder");
        let closed = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(&home, closed).expect("closed");
        let (state, text) = doctor(&home.join("data"), &[])["way"].clone();
        assert_eq!(state, "missing");
        assert!(text.contains(&format!("{} (mode 0700)", home.display())), "{text}");
    });
}

/// A stream of events lives on while nothing happens, says so, goes on after a cut, and holds nothing awake.
#[test]
fn s08_following_events_holds_nothing_awake_and_goes_on_after_a_cut() {
    isolated(test_name!(), |lab| {
        let token = std::fs::read_to_string(lab.data().join("admin.token")).expect("the token");
        let address = lab.address();
        let follow = |last: Option<&str>| {
            let mut stream = TcpStream::connect(address).expect("connected");
            stream.set_read_timeout(Some(WAIT_MAX)).expect("time-out set");
            let last = last.map_or(String::new(), |last| format!("Last-Event-ID: {last}\r\n"));
            let token = token.trim();
            let head = format!(
                "GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n{last}\r\n"
            );
            stream.write_all(head.as_bytes()).expect("sent");
            BufReader::new(stream)
        };
        let next = |stream: &mut BufReader<TcpStream>, begins: &str| {
            until(&format!("a line `{begins}…`"), || {
                let mut line = String::new();
                assert!(stream.read_line(&mut line).expect("a line") > 0, "the stream ended");
                line.strip_prefix(begins).map(|rest| rest.trim().to_owned())
            })
        };
        let mut stream = follow(None);
        next(&mut stream, "content-type: text/event-stream");
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "2"]);
        let first = next(&mut stream, "id: ");
        assert_eq!(next(&mut stream, "event: "), "sandbox.created");
        lab.wait_status("web", "sleeping");
        next(&mut stream, ":");
        assert_eq!(lab.view("web")["status"], "sleeping");
        drop(stream);
        let mut stream = follow(Some(&first));
        let mut seen = Vec::new();
        while seen.last().is_none_or(|kind| kind != "sandbox.slept") {
            seen.push(next(&mut stream, "event: "));
        }
        assert_eq!(seen[0], "sandbox.starting", "{seen:?}");
        assert_eq!(lab.events("web", "woke").len(), 0);
        // Another daemon goes on from the timelines: what is of the same moment may come again, nothing is left out.
        lab.stop_daemon();
        lab.start();
        let mut stream = follow(Some(&first));
        let mut again = Vec::new();
        while again.last().is_none_or(|kind| kind != "sandbox.adopted") {
            again.push(next(&mut stream, "event: "));
        }
        let missing = seen.iter().find(|kind| !again.contains(kind));
        assert_eq!(missing, None, "{again:?} after {seen:?}");
        // A place that does not say when it was is one that nobody knows any more.
        let (earlier, _) = first.rsplit_once('-').expect("with its time");
        let mut stream = follow(Some(earlier));
        assert_eq!(next(&mut stream, "event: "), "events.lost");
    });
}
