//! Checkpoints in an object store, and sandboxes that another host takes up from there (S18-S20, S24).

use std::path::PathBuf;

use e2e::boxes;
use e2e::filler::Filler;
use e2e::lab::{Lab, isolated_on_small_disk};
use e2e::mcp::{self, Http};
use e2e::s3::S3;
use e2e::{isolated, proc, test_name, until};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Counts requests in memory; tells its number, and keeps what is told to keep.
const COUNTER: &str = r"
import http.server, os
n = 0
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global n
        n += 1
        self.send_response(200); self.end_headers()
        self.wfile.write(b'%d' % n)
    def log_message(self, *a): pass
http.server.HTTPServer(('0.0.0.0', 8000), H).serve_forever(poll_interval=None)
";

/// Keeps 300 MiB of noise, and makes as much of it new as it is told in MiB.
const NOISE: &str = r"
import http.server, os
M = 1 << 20
kept = bytearray(300 * M)
def fill(mib):
    for at in range(mib):
        kept[at * M:(at + 1) * M] = os.urandom(M)
fill(300)
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        fill(int(self.path.strip('/') or 0))
        self.send_response(200); self.end_headers()
        self.wfile.write(b'done')
    def log_message(self, *a): pass
http.server.HTTPServer(('0.0.0.0', 8000), H).serve_forever(poll_interval=None)
";

fn store_of(lab: &Lab) -> PathBuf {
    let store = lab.scratch().join("store");
    std::fs::create_dir_all(&store).expect("folder");
    store
}

/// Has the daemon keep checkpoints in this folder.
fn use_store(lab: &mut Lab, store: &std::path::Path) {
    lab.daemon_env.push(("DORMOUSE_STORE".to_owned(), format!("file://{}", store.display())));
}

/// Another host: its own data folder, addresses and port, the same store.
fn another_host(store: &std::path::Path) -> Lab {
    another_host_with(|other| use_store(other, store))
}

fn another_host_with(use_store: impl FnOnce(&mut Lab)) -> Lab {
    let mut other = Lab::new("otherhost");
    "127.0.0.1:8421".clone_into(&mut other.listen);
    other.daemon_env.push(("DORMOUSE_SUBNET".to_owned(), "10.214.0.0".to_owned()));
    use_store(&mut other);
    other.start();
    other
}

/// Everything of it is gone at once: the daemon and its machines.
fn lose_host(lab: &mut Lab, daemon_died: bool) {
    if daemon_died {
        lab.reap_daemon();
    } else {
        lab.kill_daemon();
    }
    for pid in proc::qemus_below(&lab.data()) {
        proc::kill(pid, Signal::KILL);
        until("its machine is gone", || (!proc::alive(pid)).then_some(()));
    }
}

fn restart_with(lab: &mut Lab, store: &std::path::Path) {
    lab.stop_daemon();
    use_store(lab, store);
    lab.start();
}

fn ask(lab: &Lab, sandbox: &str) -> u32 {
    ask_path(lab, sandbox, "").parse().expect("a number")
}

fn ask_path(lab: &Lab, sandbox: &str, path: &str) -> String {
    let link = lab.ok(&["link", sandbox, "8000"]);
    until("it answers", || {
        let (host, server) = e2e::net::split_link(link.trim());
        let answer = e2e::net::http(server, &host, &format!("/{path}")).ok()?;
        (answer.status == 200).then_some(answer.body)
    })
}

fn counter(lab: &Lab, sandbox: &str, more: &[&str]) {
    let create = ["sandboxes", "create", "--name", sandbox, "--sleep-after-seconds", "never"];
    lab.ok(&[&create, more].concat());
    lab.write_file(sandbox, "/work/counter.py", COUNTER);
    lab.ok(&["exec", sandbox, "--background", "--", "python3", "/work/counter.py"]);
}

fn last_at(lab: &Lab, sandbox: &str) -> Option<String> {
    lab.view(sandbox)["checkpoint"]["last_at"].as_str().map(str::to_owned)
}

/// Waits for so many checkpoints from now on. The second one was begun after now.
fn wait_checkpoints(lab: &Lab, sandbox: &str, count: u32) -> String {
    let mut last = last_at(lab, sandbox);
    for _ in 0..count {
        last = Some(until("a checkpoint", || {
            let newer = last_at(lab, sandbox);
            (newer != last).then_some(newer?)
        }));
    }
    last.expect("one at least")
}

fn refused(lab: &Lab, args: &[&str]) -> Value {
    let output = lab.run(&[&["--json"], args].concat());
    assert!(!output.status.success(), "{args:?} succeeded");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{args:?}: {error}: {said}"))
}

#[test]
fn s18_a_host_without_room_takes_nothing_up_and_does_so_later() {
    isolated_on_small_disk(test_name!(), 1500, |lab| {
        let store = store_of(lab);
        restart_with(lab, &store);
        let mut lost = another_host(&store);
        counter(&lost, "web", &["--checkpoint", "1"]);
        assert_eq!(ask(&lost, "web"), 1);
        let id = lost.view("web")["id"].as_str().expect("an id").to_owned();
        wait_checkpoints(&lost, "web", 2);
        lose_host(&mut lost, false);

        // Beside the least that is left to running guests.
        let filler = Filler::fill_but(lab, 256 + 30);
        let error = refused(lab, &["checkpoints", "restore", &id]);
        assert_eq!((&error["code"], &error["retryable"]), (&"no_space".into(), &true.into()));
        assert!(error["error"].as_str().expect("text").contains("for the checkpoint"), "{error}");
        let folders = std::fs::read_dir(lab.data().join("sandboxes")).expect("listed").count();
        assert_eq!(folders, 0, "nothing of it is left");
        drop(filler);
        lab.ok(&["checkpoints", "restore", &id]);
        assert_eq!(ask(lab, "web"), 2);
        lab.ok(&["sandboxes", "delete", "web"]);
        lost.start();
        lost.tear_down();
    });
}

#[test]
fn s18_a_sandbox_whose_host_is_lost_goes_on_at_another_from_its_checkpoint() {
    isolated(test_name!(), |lab| {
        let store = store_of(lab);
        restart_with(lab, &store);
        counter(lab, "web", &["--checkpoint", "1", "--env", "A=1", "--label", "team=x"]);
        lab.sh("web", "echo written > /work/file");
        assert_eq!([ask(lab, "web"), ask(lab, "web"), ask(lab, "web")], [1, 2, 3]);
        let id = lab.view("web")["id"].as_str().expect("an id").to_owned();
        let seen = wait_checkpoints(lab, "web", 2);
        assert_eq!(ask(lab, "web"), 4);
        lose_host(lab, false);

        let mut other = another_host(&store);
        let listed = other.json(&["checkpoints", "list"]);
        assert_eq!(
            (&listed[0]["id"], &listed[0]["here"]),
            (&Value::from(id.as_str()), &Value::from(false))
        );
        let taken_at = listed[0]["taken_at"].as_str().expect("a time").to_owned();
        assert!(taken_at >= seen, "{taken_at} is older than {seen}");
        other.ok(&["checkpoints", "restore", &id]);
        let view = other.view("web");
        assert_eq!(
            (&view["id"], &view["status"]),
            (&Value::from(id.as_str()), &Value::from("running"))
        );
        assert!(
            view["address"].as_str().is_some_and(|address| address.starts_with("10.214.")),
            "{view}"
        );
        assert_eq!(view["labels"]["team"], "x");
        let counted = ask(&other, "web");
        assert!(counted == 4 || counted == 5, "goes on from the checkpoint, not from {counted}");
        assert_eq!(ask(&other, "web"), counted + 1);
        assert_eq!(other.sh("web", "cat /work/file; echo $A; hostname"), "written\n1\nweb");
        let moved = other.events("web", "moved");
        assert_eq!(moved.len(), 1);
        assert_eq!(moved[0]["data"]["with_processes"], true);
        assert_eq!(moved[0]["data"]["taken_at"], taken_at.as_str(), "and says from when");

        // There it is kept on, and what its first host left goes.
        wait_checkpoints(&other, "web", 1);
        assert_eq!(other.json(&["checkpoints", "list"])[0]["here"], true);
        assert_eq!(refused(&other, &["checkpoints", "restore", &id])["code"], "exists");
        until("what the first host kept is removed", || {
            (!store.join(&id).join("00000001/latest").exists()).then_some(())
        });

        // Its first host comes back: it is not run there a second time, and its files are kept.
        lab.start();
        until("it is put aside", || {
            lab.data().join("moved").join(&id).join("memory").exists().then_some(())
        });
        assert_eq!(proc::qemus_below(&lab.data()), Vec::<i32>::new());
        assert_eq!(refused(lab, &["sandboxes", "get", "web"])["code"], "sandbox_moved");
        assert_eq!(refused(lab, &["exec", "web", "--", "true"])["code"], "sandbox_moved");
        assert_eq!(ask(&other, "web"), counted + 2);
        lab.ok(&["sandboxes", "delete", "web"]);

        // A deleted sandbox is not found in the store any more.
        other.ok(&["sandboxes", "delete", "web"]);
        until("its checkpoint is gone", || {
            other.json(&["checkpoints", "list"]).as_array().is_some_and(Vec::is_empty).then_some(())
        });
        assert_eq!(refused(&other, &["checkpoints", "restore", &id])["code"], "not_found");
        other.tear_down();
    });
}

#[test]
fn s18_a_host_that_lives_gives_up_what_another_has_taken_over() {
    isolated(test_name!(), |lab| {
        let store = store_of(lab);
        restart_with(lab, &store);
        counter(lab, "web", &["--checkpoint", "1"]);
        let id = lab.view("web")["id"].as_str().expect("an id").to_owned();
        ask(lab, "web");
        wait_checkpoints(lab, "web", 2);
        let mut other = another_host(&store);
        other.ok(&["checkpoints", "restore", &id]);
        until("its first host has given it up", || {
            let listed = lab.json(&["sandboxes", "list"]);
            listed.as_array().is_some_and(Vec::is_empty).then_some(())
        });
        assert_eq!(proc::qemus_below(&lab.data()), Vec::<i32>::new());
        assert!(lab.data().join("moved").join(&id).join("disk.qcow2").exists());
        assert!(ask(&other, "web") >= 2);
        wait_checkpoints(&other, "web", 1);
        other.ok(&["sandboxes", "delete", "web"]);
        other.tear_down();
    });
}

#[test]
fn s18_a_half_written_checkpoint_is_never_used() {
    isolated(test_name!(), |lab| {
        let store = store_of(lab);
        restart_with(lab, &store);
        let mut other = another_host(&store);
        for point in ["checkpoint_carried:2", "checkpoint_listed:2"] {
            lab.stop_daemon();
            lab.daemon_env.retain(|(name, _)| name != "DORMOUSE_FAULT");
            lab.daemon_env.push(("DORMOUSE_FAULT".to_owned(), point.to_owned()));
            lab.start();
            counter(lab, "web", &[]);
            assert_eq!(ask(lab, "web"), 1);
            let id = lab.view("web")["id"].as_str().expect("an id").to_owned();
            lab.ok(&["sandboxes", "update", "web", "--checkpoint", "3"]);
            let first = wait_checkpoints(lab, "web", 1);
            let daemon = lab.daemon_pid();
            until("the daemon dies over its second checkpoint", || {
                (!proc::alive(daemon)).then_some(())
            });
            lose_host(lab, true);
            other.ok(&["checkpoints", "restore", &id]);
            let moved = other.events("web", "moved");
            assert_eq!(moved[0]["data"]["taken_at"], first.as_str(), "{point}: the complete one");
            assert_eq!(ask(&other, "web"), 2, "{point}");
            other.ok(&["sandboxes", "delete", "web"]);
            lab.daemon_env.retain(|(name, _)| name != "DORMOUSE_FAULT");
            lab.start();
            until("it is put aside", || lab.data().join("moved").join(&id).exists().then_some(()));
            lab.ok(&["sandboxes", "delete", "web"]);
        }
        other.tear_down();
    });
}

#[test]
fn s18_checkpoints_hold_nobody_awake_and_a_sleeper_is_kept_as_it_sleeps() {
    isolated(test_name!(), |lab| {
        let store = store_of(lab);
        restart_with(lab, &store);
        lab.ok(&[
            "sandboxes",
            "create",
            "--name",
            "web",
            "--sleep-after-seconds",
            "6",
            "--memory-tier-seconds",
            "0",
            "--checkpoint",
            "1",
        ]);
        wait_checkpoints(lab, "web", 2);
        lab.wait_status("web", "sleeping");
        let view = until("the sleep is kept", || {
            let view = lab.view("web");
            (view["checkpoint"]["behind_seconds"] == 0).then_some(view)
        });
        assert_eq!(
            (&view["status"], &view["sleep_tier"]),
            (&Value::from("sleeping"), &Value::from("disk"))
        );
        assert_eq!(lab.events("web", "woke").len(), 0, "nobody woke it for that");
        assert_eq!(lab.events("web", "copied").len(), 0, "and nobody is told of each");
        let last = last_at(lab, "web");

        // A daemon that begins anew knows what is kept.
        lab.kill_daemon();
        lab.start();
        until("what is kept is known", || (last_at(lab, "web") == last).then_some(()));
        assert_eq!(lab.view("web")["checkpoint"]["behind_seconds"], 0);

        let id = lab.view("web")["id"].as_str().expect("an id").to_owned();
        lab.sh("web", "echo awake > /dev/shm/word");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        until("the second sleep is kept", || {
            let view = lab.view("web");
            (view["checkpoint"]["behind_seconds"] == 0 && last_at(lab, "web") != last).then_some(())
        });
        lose_host(lab, false);
        let mut other = another_host(&store);
        other.ok(&["checkpoints", "restore", &id]);
        assert_eq!(other.view("web")["status"], "sleeping", "it slept and sleeps on");
        assert_eq!(other.sh("web", "cat /dev/shm/word"), "awake");
        lab.start();
        until("it is put aside", || lab.data().join("moved").join(&id).exists().then_some(()));
        other.ok(&["sandboxes", "delete", "web"]);
        other.tear_down();
    });
}

#[test]
fn s19_a_store_that_fails_leaves_the_sandbox_running_and_is_told() {
    isolated(test_name!(), |lab| {
        let store = store_of(lab);
        e2e::net::output(
            "mount",
            &["-t", "tmpfs", "-o", "size=400m", "tmpfs", &store.to_string_lossy()],
        );
        restart_with(lab, &store);
        counter(lab, "web", &["--checkpoint", "1"]);
        let status = |lab: &Lab| lab.view("web")["checkpoint"].clone();
        assert_eq!(status(lab)["every_seconds"], 1);
        let first = wait_checkpoints(lab, "web", 1);
        let told = status(lab);
        assert!(told["stored_bytes"].as_u64().is_some_and(|bytes| bytes > 1 << 20), "{told}");
        assert!(told["behind_seconds"].is_u64() && told["error"].is_null(), "{told}");

        // Away.
        let mark = store.join("dormouse-store.json");
        let aside = store.join("aside");
        std::fs::rename(&mark, &aside).expect("moved");
        let error = until("the error is told", || status(lab)["error"].as_str().map(str::to_owned));
        assert!(error.contains("not there"), "{error}");
        assert_eq!(ask(lab, "web"), 1, "it runs on");
        assert_eq!(lab.events("web", "checkpoint_failed").len(), 1);
        std::fs::rename(&aside, &mark).expect("moved back");
        until("all is well again", || status(lab)["error"].is_null().then_some(()));
        assert!(last_at(lab, "web").is_some_and(|last| last > first));

        // Full.
        let ballast = store.join("ballast");
        let filled = std::process::Command::new("dd")
            .args(["if=/dev/zero", "bs=1M", &format!("of={}", ballast.display())])
            .output()
            .expect("dd starts");
        assert!(!filled.status.success(), "the store has no end");
        lab.sh("web", "head -c 8000000 /dev/urandom > /dev/shm/noise");
        let error = until("the error is told", || status(lab)["error"].as_str().map(str::to_owned));
        assert!(error.contains("full"), "{error}");
        assert_eq!(ask(lab, "web"), 2, "it runs on");
        std::fs::remove_file(&ballast).expect("removed");
        until("all is well again", || status(lab)["error"].is_null().then_some(()));

        // What could not be carried then was carried later: the newest one is whole.
        let sum = lab.sh("web", "sha256sum < /dev/shm/noise");
        wait_checkpoints(lab, "web", 1);
        let id = lab.view("web")["id"].as_str().expect("an id").to_owned();
        lose_host(lab, false);
        let mut other = another_host(&store);
        other.ok(&["checkpoints", "restore", &id]);
        assert_eq!(other.sh("web", "sha256sum < /dev/shm/noise"), sum);
        // Off: the store has nothing of it any more but whose it is.
        other.ok(&["sandboxes", "update", "web", "--checkpoint", "off"]);
        assert!(other.view("web")["checkpoint"].is_null());
        until("nothing is left in the store", || {
            (proc::disk_use(&store.join(&id)) < 65536).then_some(())
        });
        // And on again: all of it anew.
        other.ok(&["sandboxes", "update", "web", "--checkpoint", "1"]);
        wait_checkpoints(&other, "web", 1);
        assert_eq!(other.view("web")["checkpoint"]["error"], Value::Null);
        lab.start();
        until("it is put aside", || lab.data().join("moved").join(&id).exists().then_some(()));
        other.ok(&["sandboxes", "delete", "web"]);
        other.tear_down();
        // Else its folder cannot be removed.
        e2e::net::output("umount", &["-l", &store.to_string_lossy()]);
    });
}

/// One test: whatever the store is, it takes a while until all of a sandbox lies there.
#[test]
fn s18_through_a_bucket_and_s19_which_goes_away_and_comes_back() {
    isolated(test_name!(), |lab| {
        let s3 = S3::start(lab);
        lab.stop_daemon();
        lab.daemon_env.extend(s3.settings());
        lab.start();
        counter(lab, "web", &["--checkpoint", "1"]);
        let id = lab.view("web")["id"].as_str().expect("an id").to_owned();
        let mut last = wait_checkpoints(lab, "web", 1);
        assert_eq!(s3.objects(&format!("{id}/owner/")).len(), 1);
        let error = |lab: &Lab| lab.view("web")["checkpoint"]["error"].as_str().map(str::to_owned);
        for (away, says) in
            [(S3::goes_away as fn(&S3), "cannot be reached"), (S3::falls_silent, "does not answer")]
        {
            away(&s3);
            let told = until("the error is told", || error(lab));
            assert!(told.contains(says), "{told}");
            ask(lab, "web");
            let create = ["sandboxes", "create", "--name", "more", "--checkpoint", "on"];
            let none = refused(lab, &create);
            assert_eq!(
                (&none["code"], &none["retryable"]),
                (&Value::from("no_capacity"), &Value::from(true)),
                "{none}"
            );
            s3.comes_back();
            until("all is well again", || error(lab).is_none().then_some(()));
            last = until("and goes on", || last_at(lab, "web").filter(|newer| *newer > last));
        }
        assert_eq!(lab.events("web", "checkpoint_failed").len(), 2);
        assert_eq!(lab.events("web", "checkpoints_resumed").len(), 2);

        // What could not be carried then was carried later: the newest one is whole.
        let noise = "head -c 1000000 /dev/urandom | tee /dev/shm/noise | sha256sum";
        let sum = lab.sh("web", noise);
        wait_checkpoints(lab, "web", 2);
        lose_host(lab, false);
        // A store that is away when its host starts is no reason not to start.
        s3.goes_away();
        let mut other = another_host_with(|other| other.daemon_env.extend(s3.settings()));
        let none = refused(&other, &["checkpoints", "restore", &id]);
        assert_eq!(none["code"], "no_capacity", "{none}");
        s3.comes_back();
        assert_eq!(other.json(&["checkpoints", "list"])[0]["id"], id.as_str());
        other.ok(&["checkpoints", "restore", &id]);
        assert_eq!(ask(&other, "web"), 3, "goes on from the checkpoint");
        assert_eq!(other.sh("web", "sha256sum < /dev/shm/noise"), sum);
        assert_eq!(other.events("web", "moved")[0]["data"]["with_processes"], true);

        // There it is kept on, and what its first host left goes; that one learns that it is not its own any more.
        wait_checkpoints(&other, "web", 1);
        until("what the first host kept is removed", || {
            s3.objects(&format!("{id}/00000001/")).is_empty().then_some(())
        });
        lab.start();
        until("it is put aside", || lab.data().join("moved").join(&id).exists().then_some(()));
        assert_eq!(refused(lab, &["exec", "web", "--", "true"])["code"], "sandbox_moved");
        assert_eq!(ask(&other, "web"), 4);

        // A deleted sandbox leaves whose it was, and nothing else.
        other.ok(&["sandboxes", "delete", "web"]);
        until("its checkpoint is gone", || {
            other.json(&["checkpoints", "list"]).as_array().is_some_and(Vec::is_empty).then_some(())
        });
        until("and all of it", || {
            s3.objects(&id).iter().all(|path| path.contains("/owner/")).then_some(())
        });
        other.tear_down();
    });
}

#[test]
fn s20_without_a_store_checkpoints_are_refused() {
    isolated(test_name!(), |lab| {
        let create = ["sandboxes", "create", "--name", "web", "--checkpoint", "on"];
        assert_eq!(refused(lab, &create)["code"], "checkpoints_unavailable");
        assert_eq!(lab.json(&["sandboxes", "list"]).as_array().map(Vec::len), Some(0));
        lab.ok(&["sandboxes", "create", "--name", "plain"]);
        assert!(lab.view("plain")["checkpoint"].is_null());
        let update = ["sandboxes", "update", "plain", "--checkpoint", "on"];
        assert_eq!(refused(lab, &update)["code"], "checkpoints_unavailable");
        assert_eq!(refused(lab, &["checkpoints", "list"])["code"], "checkpoints_unavailable");
        let wrong = refused(lab, &["sandboxes", "update", "plain", "--checkpoint", "601"]);
        assert_eq!(wrong["field"], "checkpoint.every_seconds");

        // A store that is not there now: later perhaps.
        let away = lab.scratch().join("away");
        restart_with(lab, &away);
        let silent = refused(lab, &create);
        assert_eq!(
            (&silent["code"], &silent["retryable"]),
            (&Value::from("no_capacity"), &Value::from(true))
        );
        std::fs::create_dir(&away).expect("made");
        lab.stop_daemon();
        lab.start();
        lab.ok(&create);
        assert_eq!(lab.view("web")["checkpoint"]["every_seconds"], 10);
        lab.ok(&["sandboxes", "update", "plain", "--checkpoint", "20"]);
        assert_eq!(lab.view("plain")["checkpoint"]["every_seconds"], 20);
    });
}

#[test]
fn s18_only_what_changed_is_carried() {
    isolated(test_name!(), |lab| {
        let store = store_of(lab);
        restart_with(lab, &store);
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        lab.write_file("web", "/work/noise.py", NOISE);
        lab.ok(&["exec", "web", "--background", "--", "python3", "/work/noise.py"]);
        ask_path(lab, "web", "0");
        lab.ok(&["sandboxes", "update", "web", "--checkpoint", "600"]);
        // Each change of the setting to one second has one taken; then none are for ten minutes. One that had begun once more
        // in between ends with the daemon.
        for mib in [0, 5, 256] {
            lab.kill_daemon();
            lab.start();
            ask_path(lab, "web", &mib.to_string());
            assert_eq!(lab.view("web")["checkpoint"]["changed_bytes"], Value::Null);
            let last = last_at(lab, "web");
            lab.ok(&["sandboxes", "update", "web", "--checkpoint", "1"]);
            let view = until("a checkpoint", || {
                let view = lab.view("web");
                let at = view["checkpoint"]["last_at"].as_str().map(str::to_owned);
                (at.is_some() && at != last).then_some(view["checkpoint"].clone())
            });
            lab.ok(&["sandboxes", "update", "web", "--checkpoint", "600"]);
            let number = |field: &str| view[field].as_u64().unwrap_or_default();
            let (changed, carried) = (number("changed_bytes"), number("carried_bytes"));
            println!(
                "checkpoint of 512 MiB, {mib} MiB made new: {} MiB differed, {} MiB carried, {} ms pause, {} MiB stored",
                changed >> 20,
                carried >> 20,
                number("pause_ms"),
                number("stored_bytes") >> 20
            );
            assert!(changed >= mib << 20, "{view}");
            // Small changes here and there carry their neighbours along, in pieces of 64 KiB: some MiB for a guest's own doings.
            let (at_most, own) = (changed + changed / 5, 16 << 20);
            assert!(carried <= at_most + own, "{view}");
        }
    });
}

#[test]
fn s18_drives_come_along_and_the_host_that_lost_them_keeps_its_files() {
    isolated(test_name!(), |lab| {
        let store = store_of(lab);
        restart_with(lab, &store);
        lab.ok(&["drives", "create", "data", "--size", "256"]);
        counter(lab, "web", &["--checkpoint", "1", "--drive", "data:/data"]);
        // The open file is in memory, what it has written on the drive: both from one moment.
        let script = "i=0; while true; do i=$((i+1)); echo $i; echo $i >/work/last; sleep 0.05; done >/data/log";
        lab.ok(&["exec", "web", "--background", "--", "sh", "-c", script]);
        let id = lab.view("web")["id"].as_str().expect("an id").to_owned();
        wait_checkpoints(lab, "web", 3);
        lose_host(lab, false);

        let mut other = another_host(&store);
        other.ok(&["drives", "create", "data", "--size", "64"]);
        let taken = refused(&other, &["checkpoints", "restore", &id]);
        assert_eq!(taken["code"], "name_taken", "{taken}");
        other.ok(&["drives", "delete", "data"]);
        other.ok(&["checkpoints", "restore", &id]);
        let drive = other.json(&["drives", "get", "data"]);
        assert_eq!(
            (&drive["size_mib"], &drive["attached_to"]["name"]),
            (&256.into(), &"web".into())
        );
        // Not one line is missing or there twice, from before to after.
        let log = until("it writes on", || {
            let log = other.sh("web", "cat /data/log");
            let lines: Vec<u32> = log.lines().map(|line| line.parse().expect("a number")).collect();
            let last: u32 = other.sh("web", "cat /work/last").parse().ok()?;
            (last > 20 && lines.len() > 20).then_some(lines)
        });
        let all: Vec<u32> = (1..=u32::try_from(log.len()).expect("few")).collect();
        assert_eq!(log, all);
        other.sh("web", "kill %1 2>/dev/null; echo there >/data/there");
        other.ok(&["sandboxes", "delete", "web"]);
        other.ok(&["sandboxes", "create", "--name", "next", "--drive", "data:/data"]);
        assert_eq!(other.sh("next", "cat /data/there"), "there");

        // The lost host comes back: neither the sandbox nor the drive is its own any more.
        lab.start();
        until("it has given it up", || {
            (lab.run(&["sandboxes", "get", "web"]).status.code() == Some(1)).then_some(())
        });
        until("and the drive with it", || {
            (lab.json(&["drives", "list"]).as_array().map(Vec::len) == Some(0)).then_some(())
        });
        assert!(lab.data().join("moved").join(&id).join("drive-data/disk").exists());
        other.tear_down();
    });
}

#[test]
fn s19_a_sandbox_with_volumes_has_no_checkpoints_and_says_so() {
    isolated(test_name!(), |lab| {
        let store = store_of(lab);
        restart_with(lab, &store);
        let folder = lab.scratch().join("files");
        std::fs::create_dir_all(&folder).expect("made");
        lab.ok(&["volumes", "create", "files", &folder.to_string_lossy()]);
        counter(lab, "web", &["--checkpoint", "1", "--volume", "files:/files"]);
        let error = until("it says why there is none", || {
            lab.view("web")["checkpoint"]["error"].as_str().map(str::to_owned)
        });
        assert_eq!(error, "no checkpoints are taken of a sandbox with volumes");
        assert_eq!(lab.view("web")["checkpoint"]["last_at"], Value::Null);
        assert!(!lab.events("web", "checkpoint_failed").is_empty());
        assert_eq!(ask(lab, "web"), 1, "it runs on");
        lab.ok(&["sandboxes", "restart", "web", "--no-volumes"]);
        wait_checkpoints(lab, "web", 1);
        assert_eq!(lab.view("web")["checkpoint"]["error"], Value::Null);
    });
}

fn set_checkpoint(lab: &Lab, id: &str, body: &Value) -> (u16, Value) {
    boxes::call(lab, "PUT", &format!("/v1/boxes/{id}/checkpoint"), body)
}

/// Waits for so many checkpoints of a box from now on. The second one was begun after now.
fn wait_box_checkpoints(lab: &Lab, id: &str, count: u32) -> String {
    let last_at = || boxes::view(lab, id)["checkpoint"]["lastAt"].as_str().map(str::to_owned);
    let mut last = last_at();
    for _ in 0..count {
        last = Some(until("a checkpoint", || {
            let newer = last_at();
            (newer != last).then_some(newer?)
        }));
    }
    last.expect("one at least")
}

/// The count and the process that a counter tells.
fn counted(answer: &str) -> (u32, &str) {
    let mut words = answer.split(' ');
    let count = words.next().and_then(|count| count.parse().ok());
    let count = count.unwrap_or_else(|| panic!("no count: {answer}"));
    (count, words.next().expect("a process"))
}

#[test]
fn s18_s20_a_box_whose_host_is_lost_is_the_same_box_at_another() {
    isolated(test_name!(), |lab| {
        let store = store_of(lab);
        boxes::set_up(lab, &[]);
        let services = json!([
            { "name": "web.internal", "port": 8000, "web": true },
            { "name": "api.internal", "port": 80, "targetPort": 8000 },
        ]);
        let spec = json!({ "name": "Numbers", "goal": "count", "services": services });
        let started = boxes::start(lab, &spec);
        let id = started["id"].as_str().expect("an id").to_owned();
        let (status, refused) = set_checkpoint(lab, &id, &Value::Null);
        assert_eq!((status, &refused["code"]), (409, &json!("checkpoints_unavailable")));
        assert!(refused["hint"].as_str().is_some_and(|hint| hint.contains("--store")), "{refused}");
        let told = Http::new(lab).refused("sandbox_checkpoint", json!({ "id": id }));
        assert!(told.contains("checkpoints_unavailable") && told.contains("--store"), "{told}");
        assert!(boxes::view(lab, &id)["checkpoint"].is_null());

        restart_with(lab, &store);
        boxes::serve_counter(lab, &id, 8000);
        let before = boxes::view(lab, &id);
        let (status, stands) = set_checkpoint(lab, &id, &json!({ "everySeconds": 1 }));
        assert_eq!((status, &stands["everySeconds"]), (200, &json!(1)), "{stands}");
        wait_box_checkpoints(lab, &id, 1);
        let on = Http::new(lab).tool("sandbox_checkpoint", json!({ "id": id, "everySeconds": 2 }));
        let data = &on["structuredContent"];
        assert_eq!(data["everySeconds"], 2, "{on}");
        assert!(data["lastAt"].is_string() && data["behindSeconds"].is_u64(), "{on}");
        assert!(data["storedBytes"].as_u64().is_some_and(|bytes| bytes > 1 << 20), "{on}");
        assert!(mcp::text(&on).starts_with("checkpoint each 2 s awake; the newest is of "), "{on}");
        let status = Http::new(lab).tool("sandbox_status", json!({ "id": id }));
        assert_eq!(status["structuredContent"]["checkpoint"]["everySeconds"], 2, "{status}");
        assert!(mcp::text(&status).contains("\ncheckpoint each 2 s awake"), "{status}");
        let was = boxes::view(lab, &id);
        assert_eq!(was["lastUsedAt"], before["lastUsedAt"], "it is no use of the box");

        let url = was["webUrl"].as_str().expect("a URL").to_owned();
        let answer = boxes::get(&url, "GET", &[]).body;
        let (count, process) = counted(&answer);
        wait_box_checkpoints(lab, &id, 2);
        lose_host(lab, false);

        let mut other = another_host(&store);
        other.ok(&["checkpoints", "restore", &id]);
        let is = boxes::view(&other, &id);
        for field in ["id", "name", "goal", "status", "size", "vcpus", "memoryGb", "createdAt"] {
            assert_eq!(is[field], was[field], "{field}");
        }
        let there = is["webUrl"].as_str().expect("a URL").to_owned();
        let label = |url: &str| url.split('.').next().map(str::to_owned);
        assert_eq!(label(&there), label(&url), "the same key");
        let answer = until("its URL answers", || {
            let answer = boxes::get(&there, "GET", &[]);
            (answer.status == 200).then_some(answer.body)
        });
        assert_eq!(counted(&answer), (count + 1, process), "the same process goes on");
        for (url, n) in [("http://api.internal/", 2), ("http://web.internal:8000/", 3)] {
            let answer = boxes::sh(&other, &id, &format!("curl -s -m 20 {url}"));
            assert_eq!(counted(&answer), (count + n, process), "{url}: {answer}");
        }
        let path = format!("/v1/boxes/{id}/events");
        let events = boxes::done(&other, "GET", &path, &Value::Null);
        let moved = &events["events"][0];
        let why = moved["reason"].as_str().expect("a reason");
        assert!(why.starts_with("was moved here from "), "{events}");
        assert_eq!(boxes::call(&other, "GET", &format!("/v1/sandboxes/{id}"), &Value::Null).0, 404);
        wait_box_checkpoints(&other, &id, 1);

        // Its first host comes back: it is not run there a second time.
        lab.start();
        let gone = boxes::wait_status(lab, &id, "interrupted");
        let why = gone["statusReason"].as_str().expect("a reason");
        assert!(why.starts_with("another host has taken it over"), "{gone}");
        let path = format!("/v1/boxes/{id}/events");
        let events = boxes::done(lab, "GET", &path, &Value::Null);
        let last = events["events"].as_array().and_then(|events| events.last()).expect("events");
        assert_eq!((&last["status"], &last["reason"]), (&json!("interrupted"), &json!(why)));
        until("it is put aside", || {
            lab.data().join("moved").join(&id).join("memory").exists().then_some(())
        });
        assert_eq!(proc::qemus_below(&lab.data()), Vec::<i32>::new());
        let path = format!("/v1/boxes/{id}/exec");
        let (status, refused) = boxes::call(lab, "POST", &path, &json!({ "command": "true" }));
        assert_eq!((status, &refused["code"]), (409, &json!("sandbox_moved")), "{refused}");
        let answer = boxes::sh(&other, &id, "curl -s -m 20 http://api.internal/");
        assert_eq!(counted(&answer), (count + 4, process));
        boxes::done(lab, "DELETE", &format!("/v1/boxes/{id}"), &Value::Null);
        boxes::done(&other, "DELETE", &format!("/v1/boxes/{id}"), &Value::Null);
        until("its checkpoint is gone", || {
            other.json(&["checkpoints", "list"]).as_array().is_some_and(Vec::is_empty).then_some(())
        });
        other.tear_down();
    });
}

#[test]
fn s18_s19_a_frozen_box_is_kept_as_it_is_and_comes_to_another_host_frozen() {
    isolated(test_name!(), |lab| {
        let store = store_of(lab);
        use_store(lab, &store);
        boxes::set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "3"),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", "3"),
            ],
        );
        let services = json!([{ "name": "web.internal", "port": 8000, "web": true }]);
        let started = boxes::start(lab, &json!({ "goal": "count", "services": services }));
        let id = started["id"].as_str().expect("an id").to_owned();
        boxes::serve_counter(lab, &id, 8000);
        let answer = boxes::sh(lab, &id, "curl -s -m 20 http://web.internal:8000/");
        let (count, process) = counted(&answer);
        let frozen = boxes::wait_status(lab, &id, "frozen");
        let (status, stands) = set_checkpoint(lab, &id, &json!({}));
        assert_eq!((status, &stands["everySeconds"]), (200, &json!(10)), "{stands}");
        let kept = until("what is frozen is kept", || {
            let view = boxes::view(lab, &id);
            (view["checkpoint"]["behindSeconds"] == 0).then_some(view)
        });
        for field in ["status", "lastUsedAt", "stopsAt"] {
            assert_eq!(kept[field], frozen[field], "{field}");
        }
        assert_eq!(proc::qemus_below(&lab.data()), Vec::<i32>::new(), "nobody thawed it for that");
        lose_host(lab, false);
        let mut other = another_host(&store);
        other.ok(&["checkpoints", "restore", &id]);
        let is = boxes::view(&other, &id);
        for field in ["status", "goal"] {
            assert_eq!(is[field], frozen[field], "{field}");
        }
        assert_eq!(proc::qemus_below(&other.data()), Vec::<i32>::new(), "it is frozen on");
        let answer = boxes::sh(&other, &id, "curl -s -m 20 http://web.internal:8000/");
        assert_eq!(counted(&answer), (count + 1, process), "and thaws as it was");
        lab.start();
        boxes::wait_status(lab, &id, "interrupted");
        boxes::done(&other, "DELETE", &format!("/v1/boxes/{id}"), &Value::Null);
        other.tear_down();
    });
}

#[test]
fn s18_a_host_that_lives_gives_up_a_box_which_goes_on_elsewhere_wired_as_it_was() {
    isolated(test_name!(), |lab| {
        let store = store_of(lab);
        use_store(lab, &store);
        boxes::set_up(lab, &[]);
        let services = json!([
            { "name": "web.internal", "port": 8000, "web": true },
            { "name": "far.internal", "port": 9000 },
        ]);
        let base = "http://203.0.113.5:8088";
        let spec = json!({ "goal": "count", "services": services, "externalBaseUrl": base });
        let started = boxes::start(lab, &spec);
        let id = started["id"].as_str().expect("an id").to_owned();
        set_checkpoint(lab, &id, &json!({ "everySeconds": 1 }));
        wait_box_checkpoints(lab, &id, 1);
        // Later than its checkpoints were turned on.
        let wire = json!({ "service": "web.internal", "mode": "box" });
        boxes::done(lab, "POST", &format!("/v1/boxes/{id}/wire"), &wire);
        boxes::serve_counter(lab, &id, 8000);
        let was = boxes::view(lab, &id);
        wait_box_checkpoints(lab, &id, 2);

        let mut other = another_host(&store);
        other.ok(&["checkpoints", "restore", &id]);
        let gone = boxes::wait_status(lab, &id, "interrupted");
        let why = gone["statusReason"].as_str().expect("a reason");
        assert!(why.starts_with("another host has taken it over"), "{gone}");
        until("its machine is ended", || proc::qemus_below(&lab.data()).is_empty().then_some(()));
        let is = boxes::view(&other, &id);
        assert_eq!(is["externalBaseUrl"], base);
        let modes = |view: &Value| {
            let services = view["services"].as_array().expect("services").clone();
            services.iter().map(|service| service["mode"].clone()).collect::<Vec<_>>()
        };
        assert_eq!((modes(&is), modes(&was)), (vec![json!("box"), json!("external")], modes(&is)));
        let answer = boxes::sh(&other, &id, "curl -s -m 20 http://web.internal:8000/");
        assert_eq!(counted(&answer).0, 1, "{answer}");
        boxes::done(&other, "DELETE", &format!("/v1/boxes/{id}"), &Value::Null);
        other.tear_down();
    });
}
