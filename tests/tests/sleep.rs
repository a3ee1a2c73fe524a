//! Sleeping and waking, again and again, with nothing lost.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;

use e2e::lab::Lab;
use e2e::{isolated, net, proc, test_name, until};

/// Sleeps in each run; the long form asks for 200.
fn cycles() -> u32 {
    std::env::var("DORMOUSE_SOAK_CYCLES").ok().map_or(6, |text| text.parse().expect("a number"))
}

/// A server that echoes 64 bytes at a time and tells its process.
const ECHO: &str = r"
import os, socket
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(('0.0.0.0', 7000)); s.listen()
while True:
    c, _ = s.accept()
    if os.fork() == 0:
        while True:
            b = c.recv(64, socket.MSG_WAITALL)
            if not b: os._exit(0)
            start = open('/proc/self/stat').read().rsplit(')', 1)[1].split()[19]
            c.sendall(b + ('%d/%s' % (os.getpid(), start)).rjust(32).encode())
";

/// Sends bytes and returns who answered; the bytes must come back.
fn ask(stream: &mut TcpStream, bytes: &[u8; 64]) -> String {
    stream.write_all(bytes).expect("sent on the same connection");
    let mut answer = [0; 96];
    stream.read_exact(&mut answer).expect("answered on the same connection");
    assert_eq!(&answer[..64], bytes, "what came back");
    String::from_utf8_lossy(&answer[64..]).trim().to_owned()
}

#[derive(Debug, PartialEq, Eq)]
struct Footprint {
    qemus: usize,
    taps: Vec<String>,
    rules: String,
}

fn footprint(lab: &Lab) -> Footprint {
    Footprint {
        qemus: proc::qemus_below(&lab.data()).len(),
        taps: net::taps(),
        rules: net::rules(),
    }
}

#[test]
fn s07_nothing_is_lost_over_many_sleeps_in_both_tiers() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        let id = lab.view("web")["id"].clone();
        let link = lab.ok(&["link", "web", "7000"]);
        lab.write_file("web", "/work/echo.py", ECHO);
        lab.ok(&["exec", "web", "--background", "--", "python3", "/work/echo.py"]);
        let address = lab.view("web")["address"].as_str().expect("an address").to_owned();
        until("the echo server listens", || TcpStream::connect((address.as_str(), 7000)).ok());
        let mut stream = net::connect(&address, 7000);
        let first = ask(&mut stream, &[1; 64]);
        let before = footprint(lab);
        let open_before = proc::open_files(lab.daemon_pid());

        let mut expected = String::new();
        for cycle in 0..cycles() {
            let tier = if cycle % 2 == 0 { "memory" } else { "disk" };
            lab.ok(&["sandboxes", "sleep", "web", "--tier", tier]);
            let view = lab.view("web");
            assert_eq!(
                (&view["status"], &view["sleep_tier"]),
                (&"sleeping".into(), &tier.into()),
                "cycle {cycle}: {view}"
            );
            let mut bytes = [0; 64];
            rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
                .expect("random bytes");
            // The connection itself wakes it.
            assert_eq!(ask(&mut stream, &bytes), first, "cycle {cycle}: another process answered");
            lab.sh("web", &format!("echo {cycle} >> /work/lines"));
            expected.push_str(&cycle.to_string());
            expected.push('\n');
        }
        assert_eq!(lab.sh("web", "cat /work/lines"), expected.trim_end());
        assert_eq!(lab.view("web")["id"], id);
        assert_eq!(lab.ok(&["link", "web", "7000"]), link);

        let slept = lab.events("web", "slept");
        let of_tier =
            |tier: &str| slept.iter().filter(|event| event["data"]["tier"] == tier).count();
        assert_eq!(
            (of_tier("memory"), of_tier("disk")),
            (cycles().div_ceil(2) as usize, cycles() as usize / 2),
            "sleeps in the timeline"
        );
        let after = footprint(lab);
        println!("before {before:?}\nafter {after:?}");
        println!(
            "open files {open_before} -> {}, disk {} MiB",
            proc::open_files(lab.daemon_pid()),
            proc::disk_use(Path::new(&lab.data())) >> 20
        );
        assert_eq!(after, before, "processes, taps and rules");
        until("no descriptor leaks", || {
            (proc::open_files(lab.daemon_pid()) <= open_before + 2).then_some(())
        });
    });
}

#[test]
fn s02_an_idle_sandbox_sleeps_and_s06_a_new_setting_takes_effect_at_once() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        assert_eq!(lab.view("web")["awake_because"][0]["reason"], "never_sleeps");
        lab.ok(&["sandboxes", "update", "web", "--sleep-after-seconds", "2"]);
        let view = lab.wait_status("web", "sleeping");
        assert_eq!(view["sleep_tier"], "memory");
        // It wakes for a command, and the setting is still there.
        assert_eq!(lab.sh("web", "echo awake"), "awake");
        assert_eq!(lab.view("web")["sleep_after_seconds"], 2);
        lab.wait_status("web", "sleeping");
    });
}

#[test]
fn s02_a_silent_command_that_is_waited_for_keeps_it_awake() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "1"]);
        assert_eq!(lab.sh("web", "sleep 6; echo done"), "done");
        let slept_meanwhile = lab.events("web", "slept").len();
        assert_eq!(slept_meanwhile, 0, "{:?}", lab.events("web", ""));
        lab.wait_status("web", "sleeping");
    });
}

#[test]
fn s02_computing_keeps_it_awake_and_the_reason_is_named() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "1"]);
        lab.ok(&[
            "exec",
            "web",
            "--background",
            "--",
            "sh",
            "-c",
            "while ! test -e /work/stop; do :; done",
        ]);
        until("the reason is its computing", || {
            let view = lab.view("web");
            assert_eq!(view["status"], "running", "{view}");
            let reasons = view["awake_because"].as_array().cloned().unwrap_or_default();
            reasons.iter().any(|reason| reason["reason"] == "cpu").then_some(())
        });
        lab.sh("web", "touch /work/stop");
        lab.wait_status("web", "sleeping");
    });
}

#[test]
fn s05_sleeps_when_asked_and_s09_says_how() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web"]);
        for tier in ["memory", "disk"] {
            lab.ok(&["sandboxes", "sleep", "web", "--tier", tier]);
            let view = lab.view("web");
            assert_eq!(view["status"], "sleeping", "{view}");
            assert_eq!(view["sleep_tier"], tier, "{view}");
            assert_eq!(proc::qemus_below(&lab.data()).len(), usize::from(tier == "memory"));
            lab.sh("web", "true");
        }
        // From memory to disk when asked, without waking.
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "memory"]);
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        assert_eq!(lab.view("web")["sleep_tier"], "disk");
        assert_eq!(lab.events("web", "woke").len(), 2, "it was not woken for that");
        lab.sh("web", "true");
        // From memory on to disk, by itself, without waking.
        lab.ok(&["sandboxes", "update", "web", "--memory-tier-seconds", "1"]);
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "memory"]);
        until("it moves to disk", || (lab.view("web")["sleep_tier"] == "disk").then_some(()));
        assert_eq!(lab.events("web", "woke").len(), 3, "it was not woken for that");
        assert_eq!(proc::qemus_below(&lab.data()), Vec::<i32>::new());
    });
}

#[test]
fn s02_a_client_that_vanished_does_not_keep_it_awake() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "2"]);
        let mut waiting = lab
            .command(&["exec", "web", "--", "sleep", "1000"])
            .spawn()
            .expect("`dormouse` starts");
        until("a call waits on it", || {
            let reasons = lab.view("web")["awake_because"].as_array().cloned().unwrap_or_default();
            reasons.iter().any(|reason| reason["reason"] == "calls").then_some(())
        });
        proc::kill(i32::try_from(waiting.id()).expect("a pid"), rustix::process::Signal::KILL);
        waiting.wait().expect("gone");
        lab.wait_status("web", "sleeping");
    });
}
