//! A host without room: on its disk, and in its memory budget.

use std::process::{Child, Stdio};

use e2e::filler::Filler;
use e2e::lab::{Lab, isolated_on_small_disk};
use e2e::witness::{Witness, nothing_leaks};
use e2e::{isolated, net, test_name, until};
use serde_json::Value;

/// A server that takes a connection and answers when there is the file /work/answer.
const SLOW: &str = r"
import os, socket, time
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(('0.0.0.0', 8000)); s.listen()
while True:
    c, _ = s.accept()
    c.recv(4096)
    while not os.path.exists('/work/answer'): time.sleep(0.1)
    c.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok')
";

fn begin(lab: &Lab, arguments: &[&str]) -> Child {
    let mut command = lab.command(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("`dormouse` starts")
}

/// Exit code and standard error of a command that ends by itself.
#[track_caller]
fn end(what: &str, mut child: Child) -> (Option<i32>, String) {
    until(what, || child.try_wait().expect("state of the command"));
    let output = child.wait_with_output().expect("its output");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The error of a command that must fail, as JSON.
#[track_caller]
fn refused(lab: &Lab, arguments: &[&str]) -> Value {
    let output = lab.run(&[&["--json"], arguments].concat());
    assert!(!output.status.success(), "{arguments:?} succeeds");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let json = text.lines().find_map(|line| serde_json::from_str(line).ok());
    json.or_else(|| serde_json::from_str(&text).ok())
        .unwrap_or_else(|| panic!("{arguments:?}: {text}"))
}

#[test]
fn s01_one_that_stands_still_on_a_full_disk_says_so_and_callers_are_told() {
    isolated_on_small_disk(test_name!(), 1800, |lab| {
        let mut witness = Witness::create_still(lab, "web");
        lab.write_file("web", "/work/slow.py", SLOW);
        lab.ok(&["exec", "web", "--background", "--", "python3", "/work/slow.py"]);
        let link = lab.ok(&["link", "web", "8000"]).trim().to_owned();
        let host = link.trim_start_matches("http://").trim_end_matches('/').to_owned();
        let (address, to) = (lab.address(), host.clone());
        let asked = std::thread::spawn(move || net::http(address, &to, "/"));
        let long = begin(lab, &["exec", "web", "--", "sh", "-c", "sleep 7000; true"]);
        until("both wait", || {
            let calls = lab.view("web")["awake_because"].to_string();
            (calls.contains("1 command waits") && calls.contains("1 request waits")).then_some(())
        });

        let filler = Filler::fill_but(lab, 40);
        let view = until("it says that it stands still", || {
            let view = lab.view("web");
            (view["waits_for"]["what"] == "disk").then_some(view)
        });
        println!("{}", view["waits_for"]);
        assert_eq!(view["status"], "running");
        assert_eq!(view["awake_because"][0]["reason"], "host_disk_full", "{view}");
        assert_eq!(view["will_sleep_at"], Value::Null);
        let since = view["waits_for"]["since"].as_str().expect("a time").to_owned();
        let why = lab.json(&["why", "web"]);
        assert!(why["summary"].as_str().expect("text").contains("stands still"), "{why}");
        let list = lab.ok(&["sandboxes", "list"]);
        assert!(list.contains("stands still (disk full)"), "{list}");

        // Who waits is told, and so is who comes.
        let (code, said) = end("the call ends", long);
        println!("exec that waited: {code:?} {said}");
        assert_eq!(code, Some(125));
        assert!(said.contains("stands still"), "{said}");
        let answer = asked.join().expect("no panic").expect("an answer");
        assert_eq!(answer.status, 507, "{answer:?}");
        assert!(answer.body.contains("no_space"), "{answer:?}");
        let answer = net::http(lab.address(), &host, "/").expect("an answer");
        assert_eq!(answer.status, 507, "{answer:?}");
        let local = lab.scratch().join("put").to_string_lossy().into_owned();
        for arguments in [
            &["exec", "web", "--", "true"][..],
            &["files", "put", &local, "web:/work/put"],
            &["files", "ls", "web:/work"],
            &["sandboxes", "sleep", "web"],
            &["sandboxes", "sleep", "web", "--tier", "disk"],
            &["sandboxes", "restart", "web"],
            &["fork", "web"],
            &["snapshots", "create", "web", "full"],
        ] {
            let error = refused(lab, arguments);
            assert_eq!(error["code"], "no_space", "{arguments:?}: {error}");
            assert_eq!(error["retryable"], true, "{arguments:?}: {error}");
        }
        let drained = lab.run(&["--json", "drain"]);
        let drained = String::from_utf8_lossy(&drained.stdout).into_owned();
        assert!(drained.contains("no_space"), "{drained}");

        // A daemon that starts meanwhile finds it so, and leaves it so.
        lab.kill_daemon();
        lab.start();
        until("it says so again", || {
            (lab.view("web")["waits_for"]["what"] == "disk").then_some(())
        });
        assert_eq!(refused(lab, &["exec", "web", "--", "true"])["code"], "no_space");
        assert_ne!(lab.view("web")["waits_for"]["since"], since.as_str());
        let log = lab.daemon_log();
        let lines: Vec<_> = log.lines().filter(|line| line.contains("disk")).collect();
        println!("the daemon's log about the disk: {lines:#?}");
        assert_eq!(lines.iter().filter(|line| line.contains("stands still")).count(), 1, "{log}");

        drop(filler);
        until("it goes on", || (lab.view("web")["waits_for"] == Value::Null).then_some(()));
        witness.check();
        assert_eq!(lab.sh("web", "pgrep -f '[s]leep 7000' | wc -l; touch /work/answer"), "2");
        let answer = net::http(lab.address(), &host, "/").expect("an answer");
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(lab.events("web", "halted").len(), 2);
        until("it has told that it goes on", || {
            (!lab.events("web", "resumed").is_empty()).then_some(())
        });
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        witness.check();
        lab.ok(&["sandboxes", "delete", "web"]);
        nothing_leaks(lab);
    });
}

#[test]
fn s07_a_guest_whose_writes_the_disk_refuses_says_so_goes_on_by_itself_and_loses_nothing() {
    isolated(test_name!(), |lab| {
        let mut witness = Witness::create_still(lab, "web");
        // Its disk alone lies on a file system of its own, which fills up while the host's own has room.
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        let id = lab.view("web")["id"].as_str().expect("an id").to_owned();
        let disk = lab.data().join("sandboxes").join(id).join("disk.qcow2");
        let small = lab.scratch().join("small");
        std::fs::create_dir(&small).expect("a folder");
        let at = small.to_string_lossy().into_owned();
        let mount =
            |options: &str| net::output("mount", &["-t", "tmpfs", "-o", options, "tmpfs", &at]);
        mount("size=96m,mode=711");
        std::fs::copy(&disk, small.join("disk")).expect("copied");
        std::fs::remove_file(&disk).expect("moved");
        std::os::unix::fs::symlink(small.join("disk"), &disk).expect("a link to it");
        let write = "for i in 1 2 3 4 5 6; do head -c 30M /dev/urandom | tee -a /work/big | sha256sum >> /work/sums; sync; done; \
             touch /work/written";
        lab.ok(&["exec", "web", "--background", "--", "sh", "-c", write]);
        let view = until("it says that it stands still", || {
            let view = lab.view("web");
            (view["waits_for"]["what"] == "disk").then_some(view)
        });
        println!("{}", view["waits_for"]);
        assert_eq!(refused(lab, &["exec", "web", "--", "true"])["code"], "no_space");
        assert_eq!(refused(lab, &["sandboxes", "sleep", "web"])["code"], "no_space");
        mount("remount,size=600m");
        until("it goes on", || (lab.view("web")["waits_for"] == Value::Null).then_some(()));
        witness.check();
        until("all is written", || {
            (!lab.sh("web", "ls /work/written 2>/dev/null || true").is_empty()).then_some(())
        });
        let whole = "i=0; while read -r sum _; do \
            test \"$(dd if=/work/big bs=30M skip=$i count=1 2>/dev/null | sha256sum | cut -d' ' -f1)\" = $sum || echo bad $i; \
            i=$((i+1)); done < /work/sums; echo all $i";
        assert_eq!(lab.sh("web", whole), "all 6");
        let log = lab.daemon_log();
        assert_eq!(log.lines().filter(|line| line.contains("stands still")).count(), 1, "{log}");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        witness.check();
        lab.ok(&["sandboxes", "delete", "web"]);
        net::output("umount", &[&at]);
    });
}

#[test]
fn s08_one_that_sleeps_in_memory_on_a_full_disk_is_refused_a_wake_and_sleeps_on() {
    isolated_on_small_disk(test_name!(), 1500, |lab| {
        let mut witness = Witness::create_still(lab, "web");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "memory"]);
        let filler = Filler::fill_but(lab, 40);
        until("the host has seen it", || {
            let output = lab.run(&["--json", "exec", "web", "--", "true"]);
            String::from_utf8_lossy(&output.stderr).contains("no_space").then_some(())
        });
        let halted = lab.view("web");
        assert!(
            halted["status"] == "sleeping" || halted["waits_for"]["what"] == "disk",
            "{halted}"
        );
        drop(filler);
        until("it goes on", || (lab.view("web")["waits_for"] == Value::Null).then_some(()));
        witness.check();
    });
}

/// What each machine counts for: its size, and what QEMU takes.
const SEAT_MIB: u64 = 256 + 96;

fn set_budget(lab: &mut Lab, machines: u64, wait_seconds: u64) {
    lab.stop_daemon();
    lab.daemon_env = vec![
        ("DORMOUSE_MEMORY_BUDGET_MIB".to_owned(), (machines * SEAT_MIB).to_string()),
        ("DORMOUSE_MEMORY_WAIT_SECONDS".to_owned(), wait_seconds.to_string()),
    ];
    lab.start();
}

fn create(lab: &Lab, name: &str) {
    let args = ["--name", name, "--memory-mib", "256", "--sleep-after-seconds", "never"];
    lab.ok(&[&["sandboxes", "create"], args.as_slice()].concat());
}

#[test]
fn s08_what_the_budget_never_has_room_for_is_refused_at_once_and_for_good() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "big", "--sleep-after-seconds", "never"]);
        lab.sh("big", "echo kept > /dev/shm/here");
        lab.ok(&["sandboxes", "sleep", "big", "--tier", "disk"]);
        lab.ok(&["snapshots", "create", "big", "stored"]);
        // Room for one of 256 MiB. Who waits does so for longer than a test may take.
        set_budget(lab, 1, 600);
        let log = lab.daemon_log();
        assert!(log.contains("no sandbox of the usual size (512 MiB) can run here"), "{log}");
        for arguments in
            [&["sandboxes", "create"][..], &["sandboxes", "create", "--snapshot", "stored"]]
        {
            let error = refused(lab, arguments);
            assert_eq!(
                (&error["code"], &error["field"]),
                (&"unprocessable".into(), &"memory_mib".into())
            );
            assert!(error["error"].as_str().expect("text").contains("352 MiB in all"), "{error}");
        }
        let error = refused(lab, &["exec", "big", "--", "true"]);
        assert_eq!((&error["code"], &error["retryable"]), (&"no_capacity".into(), &false.into()));
        assert!(error["error"].as_str().expect("text").contains("needs 608 MiB"), "{error}");
        let view = lab.view("big");
        assert_eq!((&view["status"], &view["sleep_tier"]), (&"sleeping".into(), &"disk".into()));
        set_budget(lab, 2, 600);
        assert_eq!(lab.sh("big", "cat /dev/shm/here"), "kept");
    });
}

/// Makes a sandbox that sleeps on disk, and another that takes all the room there is.
fn crowd(lab: &mut Lab, wait_seconds: u64) {
    set_budget(lab, 1, wait_seconds);
    create(lab, "asleep");
    lab.sh("asleep", "echo kept > /dev/shm/here");
    lab.ok(&["sandboxes", "sleep", "asleep", "--tier", "disk"]);
    create(lab, "awake");
}

#[test]
fn s15_a_restart_without_room_in_memory_is_refused_and_its_sandbox_sleeps_on() {
    isolated(test_name!(), |lab| {
        crowd(lab, 2);
        let error = refused(lab, &["sandboxes", "restart", "asleep"]);
        println!("{error}");
        assert_eq!((&error["code"], &error["retryable"]), (&"no_capacity".into(), &true.into()));
        let view = lab.view("asleep");
        assert_eq!((&view["status"], &view["sleep_tier"]), (&"sleeping".into(), &"disk".into()));
        // Two who come while there is none are served in turn as soon as there is some.
        set_budget(lab, 1, 300);
        let restarts = [(); 2].map(|()| begin(lab, &["sandboxes", "restart", "asleep"]));
        let waits = until("it waits for memory", || {
            let view = lab.view("asleep");
            (view["waits_for"]["what"] == "memory").then_some(view)
        });
        assert_eq!(waits["status"], "sleeping", "{waits}");
        // One that needs it meanwhile finds it as it was: the restart has the earlier place.
        lab.ok(&["sandboxes", "delete", "awake"]);
        for restart in restarts {
            let (code, said) = end("the restart ends", restart);
            assert_eq!(code, Some(0), "{said}");
        }
        assert_eq!(lab.sh("asleep", "ls /dev/shm | wc -l"), "0", "booted anew");
        assert_eq!(lab.events("asleep", "restarted").len(), 1);
    });
}

#[test]
fn s08_a_wait_for_memory_is_told_and_waited_once_and_a_snapshot_does_not_need_any() {
    isolated(test_name!(), |lab| {
        crowd(lab, 8);
        create_second_sleeper(lab);
        let begun = std::time::Instant::now();
        let first = begin(lab, &["--json", "exec", "asleep", "--", "true"]);
        let view = until("it waits for memory", || {
            let view = lab.view("asleep");
            (view["waits_for"]["what"] == "memory").then_some(view)
        });
        assert_eq!(view["waits_for"]["position"], 1, "{view}");
        let second = begin(lab, &["--json", "exec", "other", "--", "true"]);
        let view = until("the other waits too", || {
            let view = lab.view("other");
            (view["waits_for"]["what"] == "memory").then_some(view)
        });
        assert_eq!(view["waits_for"]["position"], 2, "{view}");
        let why = lab.json(&["why", "other"]);
        println!("{}", why["summary"]);
        assert!(why["summary"].as_str().expect("text").contains("waits for room"), "{why}");
        let snapshot = begin(lab, &["snapshots", "create", "asleep", "stored"]);
        let (code, said) = end("the first call ends", first);
        let took = begun.elapsed().as_secs_f64();
        println!("refused after {took:.1} s: {said}");
        assert_eq!(code, Some(125), "{said}");
        assert!(said.contains("no_capacity"), "{said}");
        assert!((7.0..14.0).contains(&took), "waited {took} s");
        let (code, said) = end("the snapshot ends", snapshot);
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(lab.view("asleep")["sleep_tier"], "disk");
        end("the second call ends", second);
        lab.ok(&["sandboxes", "delete", "awake"]);
        assert_eq!(lab.sh("asleep", "cat /dev/shm/here"), "kept");
        lab.ok(&["sandboxes", "sleep", "asleep", "--tier", "disk"]);
        lab.ok(&["sandboxes", "create", "--name", "copy", "--snapshot", "stored"]);
        assert_eq!(lab.sh("copy", "cat /dev/shm/here"), "kept");
        lab.ok(&["snapshots", "delete", "stored"]);
    });
}

/// One more that sleeps on disk, made while the one that takes all room sleeps too.
fn create_second_sleeper(lab: &Lab) {
    lab.ok(&["sandboxes", "sleep", "awake", "--tier", "disk"]);
    create(lab, "other");
    lab.ok(&["sandboxes", "sleep", "other", "--tier", "disk"]);
    lab.sh("awake", "true");
}

#[test]
fn s22_forks_that_the_disk_has_no_room_for_are_refused_before_anybody_notices() {
    isolated_on_small_disk(test_name!(), 1500, |lab| {
        let mut witness = Witness::create_still(lab, "parent");
        let id = lab.view("parent")["id"].as_str().expect("an id").to_owned();
        let mib = e2e::proc::disk_use(&lab.data().join("sandboxes").join(&id)) >> 20;
        let free = 256 + mib + mib / 2;
        let filler = Filler::fill_but(lab, free);
        println!("a copy takes {mib} MiB, {free} are free");
        let folders = || std::fs::read_dir(lab.data().join("sandboxes")).expect("listed").count();
        for _ in 0..2 {
            let error = refused(lab, &["fork", "parent", "--name", "x", "--count", "4"]);
            println!("{error}");
            assert_eq!((&error["code"], &error["retryable"]), (&"no_space".into(), &true.into()));
            assert!(error["error"].as_str().expect("text").contains("for 4 copies"), "{error}");
            assert_eq!(folders(), 1);
            // Awake it did not stand still for it, and asleep it is not touched.
            assert!(lab.events("parent", "copied").is_empty());
            assert!(lab.events("parent", "halted").is_empty());
            lab.ok(&["sandboxes", "sleep", "parent", "--tier", "disk"]);
        }
        lab.ok(&["fork", "parent", "--name", "x", "--count", "1"]);
        let error = refused(lab, &["snapshots", "create", "parent", "kept"]);
        assert_eq!(error["code"], "no_space", "{error}");
        assert!(lab.events("x-1", "halted").is_empty());
        witness.check();
        drop(filler);
        lab.ok(&["snapshots", "create", "parent", "kept"]);
    });
}
