//! Sandboxes whose guest agent is older than the daemon: made long ago, and asleep since.
//!
//! The agents here are of today, in images that have them speak an older version of the protocol and understand nothing of the
//! later ones; so every word between the two is of that version.
//!
//! With `DORMOUSE_OLDER_GUEST` the test of version 1 takes an agent that was really built then, a static program:
//! `cargo build -p guest --release --target x86_64-unknown-linux-gnu` with `RUSTFLAGS='-C target-feature=+crt-static'` in a work tree of
//! a commit of before version 2.

use std::net::TcpStream;

use e2e::lab::{LISTEN_PROGRAM, Lab};
use e2e::pty::Pty;
use e2e::{isolated, net, test_name, until};

/// Builds an image with an agent of such a version, or finds it, and gives its digest.
fn image(lab: &Lab, version: u16) -> String {
    let settings = lab.env();
    let images = &settings.iter().find(|(name, _)| name == "DORMOUSE_IMAGES").expect("images").1;
    let build = ["images", "build", "--keep-default", "--images", images];
    let older = std::env::var("DORMOUSE_OLDER_GUEST").ok().filter(|_| version == 1);
    let number = version.to_string();
    let agent = match &older {
        Some(path) => ["--guest", path],
        None => ["--protocol-max", &number],
    };
    lab.ok(&[&build[..], &agent].concat()).trim().to_owned()
}

/// The code with which something is refused, and the sentence.
#[track_caller]
fn refused(lab: &Lab, arguments: &[&str]) -> (String, String) {
    let output = lab.run(&[&["--json"], arguments].concat());
    assert!(!output.status.success(), "{arguments:?} was done");
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find(|line| line.starts_with('{'));
    let line = line.unwrap_or_else(|| panic!("no error as JSON: {text}"));
    let error: serde_json::Value = serde_json::from_str(line).expect("an error");
    let word = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
    (word("code"), word("error"))
}

fn memory(lab: &Lab, name: &str) -> String {
    lab.sh(name, "cat /dev/shm/memory; cat /proc/sys/kernel/random/boot_id")
}

/// What every version does.
fn does_what_sandboxes_do(lab: &mut Lab, image: &str) {
    let create = ["sandboxes", "create", "--image", image, "--sleep-after-seconds", "never"];
    for name in ["disk", "memory"] {
        lab.ok(&[&create[..], &["--name", name]].concat());
        lab.sh(
            name,
            "head -c 8 /dev/urandom | od -An -tx1 > /dev/shm/memory; echo kept > /work/file",
        );
    }
    lab.ok(&[
        "exec",
        "disk",
        "--background",
        "--",
        "python3",
        "-c",
        LISTEN_PROGRAM,
        "0.0.0.0",
        "8000",
    ]);
    let link = lab.ok(&["link", "disk", "8000"]);
    until("the server listens", || net::follow(&link).ok().filter(|answer| answer.status == 200));
    let before = ["disk", "memory"].map(|name| memory(lab, name));

    // In every tier, over a daemon that comes later.
    for (name, tier) in [("disk", "disk"), ("memory", "memory")] {
        lab.ok(&["sandboxes", "sleep", name, "--tier", tier]);
        assert_eq!(lab.view(name)["sleep_tier"], tier);
    }
    lab.kill_daemon();
    lab.start();
    assert_eq!(net::follow(&link).expect("answered").status, 200, "a request wakes it");
    for (name, before) in ["disk", "memory"].iter().zip(&before) {
        assert_eq!(memory(lab, name), *before, "{name}");
        for tier in ["memory", "disk"] {
            lab.ok(&["sandboxes", "sleep", name, "--tier", tier]);
            assert_eq!(memory(lab, name), *before, "{name} after {tier}");
        }
        let (here, guest) = (now(), lab.sh(name, "date +%s"));
        assert!((guest.parse::<f64>().expect("a time") - here).abs() < 5.0, "{guest} at {here}");
    }
    // Copies of one that runs, of one that sleeps, and of a snapshot are somebody else.
    lab.ok(&["fork", "memory", "--name", "of-awake"]);
    lab.ok(&["sandboxes", "sleep", "disk", "--tier", "disk"]);
    lab.ok(&["fork", "disk", "--name", "of-asleep"]);
    lab.ok(&["snapshots", "create", "disk", "kept"]);
    lab.ok(&["sandboxes", "create", "--name", "of-snapshot", "--snapshot", "kept"]);
    for (name, before) in
        [("of-awake", &before[1]), ("of-asleep", &before[0]), ("of-snapshot", &before[0])]
    {
        assert_eq!(memory(lab, name), *before, "{name}");
        assert_eq!(lab.sh(name, "hostname"), name);
        let address = lab.view(name)["address"].as_str().expect("an address").to_owned();
        assert!(lab.sh(name, "ip -4 -o addr show").contains(&format!(" {address}/32")), "{name}");
    }
    for name in ["of-awake", "of-asleep", "of-snapshot", "disk"] {
        lab.ok(&["sandboxes", "delete", name]);
    }
    lab.ok(&["snapshots", "delete", "kept"]);
    // What was written is there when its memory is gone.
    lab.ok(&["sandboxes", "restart", "memory"]);
    assert_eq!(lab.sh("memory", "cat /work/file; ls /dev/shm"), "kept");
    wake_for_their_timers(lab, image);
    // A hold counts, as soon as the next look tells of it.
    let hold = "import socket, time; s = socket.socket(socket.AF_UNIX); s.connect('/run/sbx/awake'); s.send(b'+'); time.sleep(600)";
    lab.ok(&["exec", "memory", "--background", "--", "python3", "-c", hold]);
    lab.ok(&["sandboxes", "update", "memory", "--sleep-after-seconds", "30"]);
    until("it says that it is held", || {
        lab.ok(&["why", "memory"]).contains("holds it awake").then_some(())
    });
}

fn wake_for_their_timers(lab: &Lab, image: &str) {
    let both = [("t-memory", "300"), ("t-disk", "0")];
    for (name, seconds) in both {
        let settings = ["--sleep-after-seconds", "2", "--memory-tier-seconds", seconds];
        let create = ["sandboxes", "create", "--name", name, "--image", image];
        lab.ok(&[&create[..], &settings].concat());
        let line = "sleep 12; echo done > /work/end";
        lab.ok(&["exec", name, "--background", "--", "sh", "-c", line]);
    }
    for (name, _) in both {
        let woke = until("it wakes by itself", || lab.events(name, "woke").first().cloned());
        assert_eq!(woke["data"]["cause"], "timer", "{woke}");
        let ended = || (lab.sh(name, "cat /work/end || true") == "done").then_some(());
        until("its program ends", ended);
        lab.ok(&["sandboxes", "delete", name]);
    }
}

fn now() -> f64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.expect("after 1970").as_secs_f64()
}

/// What version 2 has brought.
fn lacks_what_came_with_2(lab: &Lab) {
    let mut shell = Pty::start(&lab.command(&["shell", "memory"]), 80, 24);
    shell.shows("guest agent is older than terminals");
    assert_ne!(shell.ends(), Some(0));
    let long = "x".repeat(70_000);
    let (code, said) = refused(lab, &["exec", "memory", "--", "echo", &long]);
    assert_eq!(code, "too_large", "{said}");
    assert!(said.contains("the guest agent takes 65536"), "{said}");
    let view = lab.view("memory");
    assert!(view["ipv6_address"].is_null(), "{view}");
    // What its kernel would answer nobody knows, so it is asked.
    lab.ok(&["sandboxes", "sleep", "memory"]);
    let address = view["address"].as_str().expect("an address");
    let refused = TcpStream::connect((address, 81)).expect_err("nobody listens");
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    lab.wait_status("memory", "running");
    let woke = lab.events("memory", "woke");
    assert_eq!(woke.last().map(|woke| &woke["data"]["cause"]), Some(&"packet".into()), "{woke:?}");
}

/// What version 2 has brought is there.
fn has_what_came_with_2(lab: &Lab) {
    let view = lab.view("memory");
    let (address, ipv6) = (view["address"].as_str(), view["ipv6_address"].as_str());
    let ipv6 = ipv6.expect("an IPv6 address");
    assert!(lab.sh("memory", "ip -6 -o addr show").contains(ipv6), "{ipv6}");
    let mut shell = Pty::start(&lab.command(&["shell", "memory", "--", "bash", "--norc"]), 80, 24);
    shell.types("echo $((6 * 7))\n");
    shell.shows("42");
    shell.types("exit 7\n");
    assert_eq!(shell.ends(), Some(7));
    let long = "x".repeat(70_000);
    assert_eq!(lab.ok(&["exec", "memory", "--", "echo", &long]).trim().len(), long.len());
    lab.ok(&["sandboxes", "sleep", "memory"]);
    let refused =
        TcpStream::connect((address.expect("an address"), 81)).expect_err("nobody listens");
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    assert_eq!(lab.view("memory")["status"], "sleeping", "it is answered for");
}

/// What version 4 has brought.
fn lacks_drives(lab: &Lab, image: &str) {
    lab.ok(&["drives", "create", "data", "--size", "64M"]);
    let with_drive = ["sandboxes", "create", "--name", "driven", "--drive", "data:/data"];
    let (code, said) = refused(lab, &[&with_drive[..], &["--image", image]].concat());
    assert_eq!(code, "drive_unusable", "{said}");
    assert!(said.contains("its guest agent is older than drives"), "{said}");
    let left = lab.json(&["drives", "get", "data"]);
    assert!(left["attached_to"].is_null(), "{left}");
    // It is for whoever can have it.
    lab.ok(&with_drive);
    lab.ok(&["sandboxes", "delete", "driven"]);
}

fn of_version(name: &str, version: u16) {
    isolated(name, |lab| {
        let image = image(lab, version);
        does_what_sandboxes_do(lab, &image);
        if version < 2 {
            lacks_what_came_with_2(lab);
        } else {
            has_what_came_with_2(lab);
        }
        if version < 4 {
            lacks_drives(lab, &image);
        }
    });
}

#[test]
fn s07_s08_s22_a_sandbox_with_an_agent_of_protocol_1_sleeps_wakes_and_says_what_it_lacks() {
    of_version(test_name!(), 1);
}

#[test]
fn s07_s08_s22_a_sandbox_with_an_agent_of_protocol_2_sleeps_wakes_and_says_what_it_lacks() {
    of_version(test_name!(), 2);
}

#[test]
fn s07_s08_s22_a_sandbox_with_an_agent_of_protocol_3_sleeps_wakes_and_says_what_it_lacks() {
    of_version(test_name!(), 3);
}

#[test]
fn s07_s08_s22_a_sandbox_with_an_agent_of_protocol_4_sleeps_and_wakes() {
    of_version(test_name!(), 4);
}
