//! Forks: the same memory, lives of their own.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;

use e2e::{isolated, test_name, until};

/// Forks in each run; the long form asks for 20.
fn count() -> usize {
    std::env::var("DORMOUSE_SOAK_FORKS").ok().map_or(3, |text| text.parse().expect("a number"))
}

/// Draws random bytes and UUIDs in a loop, and notes the first that it draws after each change of its host name. Looked at
/// first: what it has drawn before it was copied is its parent's too.
const DRAWS: &str = r"
import os, uuid, time
name = ''
while True:
    now = open('/proc/sys/kernel/hostname').read().strip()
    drawn = os.urandom(16).hex() + ' ' + str(uuid.uuid4())
    if now != name:
        name = now
        open('/work/drawn.' + now, 'w').write(drawn)
    time.sleep(0.002)
";

const ECHO: &str = r"
import socket
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(('0.0.0.0', 7000)); s.listen()
c, _ = s.accept()
try:
    while True:
        b = c.recv(1)
        if not b: break
        c.sendall(b)
    open('/work/end', 'w').write('closed')
except OSError as e:
    open('/work/end', 'w').write(type(e).__name__)
";

#[test]
fn s22_forks_draw_other_random_numbers_and_are_somebody_else() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "parent", "--sleep-after-seconds", "never"]);
        lab.write_file("parent", "/work/draws.py", DRAWS);
        lab.write_file("parent", "/work/echo.py", ECHO);
        lab.ok(&["exec", "parent", "--background", "--", "python3", "/work/draws.py"]);
        lab.ok(&["exec", "parent", "--background", "--", "python3", "/work/echo.py"]);
        lab.sh("parent", "until test -e /work/drawn.parent; do sleep 0.1; done");
        let address = lab.view("parent")["address"].as_str().expect("an address").to_owned();
        let mut stream =
            until("the echo server listens", || TcpStream::connect((address.as_str(), 7000)).ok());
        stream.set_read_timeout(Some(e2e::wait::WAIT_MAX)).expect("time-out set");
        let mut echo = |byte: u8| {
            stream.write_all(&[byte]).expect("sent");
            let mut back = [0];
            stream.read_exact(&mut back).expect("echoed");
            assert_eq!(back[0], byte);
        };
        echo(1);

        let mut drawn = BTreeSet::new();
        let mut who: Vec<BTreeSet<String>> = vec![BTreeSet::new(); 4];
        for number in 0..count() {
            // Of a running parent and of sleeping ones in turn.
            match number % 3 {
                1 => drop(lab.ok(&["sandboxes", "sleep", "parent", "--tier", "disk"])),
                2 => drop(lab.ok(&["sandboxes", "sleep", "parent", "--tier", "memory"])),
                _ => {}
            }
            let name = format!("fork{number}");
            lab.ok(&["fork", "parent", "--name", &name]);
            let first = lab.sh(
                &name,
                &format!(
                    "until test -s /work/drawn.{name}; do sleep 0.1; done; cat /work/drawn.{name}"
                ),
            );
            for part in first.split(' ') {
                assert!(drawn.insert(part.to_owned()), "{name} drew {part}, as another did");
            }
            let facts = [
                "cat /etc/machine-id",
                "hostname",
                "cat /sys/class/net/eth0/address",
                "ip -4 -o addr show eth0 | awk '{print $4}'",
            ];
            for (set, fact) in who.iter_mut().zip(facts) {
                let value = lab.sh(&name, fact);
                assert!(!value.is_empty(), "{name}: {fact}");
                assert!(set.insert(value.clone()), "{name}: `{fact}` is {value}, as another's");
            }
            // Its copy of the parent's connection is gone; the parent's goes on.
            let end = lab.sh(&name, "until test -s /work/end; do sleep 0.1; done; cat /work/end");
            assert!(
                end.contains("Connection") || end == "closed" || end.contains("Timeout"),
                "{name}: {end}"
            );
            echo(u8::try_from(number).unwrap_or(7));
            // It would go on drawing, and leave the others no processor.
            lab.ok(&["sandboxes", "sleep", &name, "--tier", "memory"]);
        }
        assert_eq!(lab.sh("parent", "test -e /work/end && echo ended || echo goes on"), "goes on");
    });
}

/// Counts each millisecond, and writes down where it was when it first saw that its host name is another: a fork's moment.
const MOMENT: &str = r"
import time
n, was = 0, ''
while True:
    name = open('/proc/sys/kernel/hostname').read().strip()
    if name != was:
        open('/work/moment.' + name, 'w').write(str(n))
        was = name
    n += 1
    time.sleep(0.001)
";

#[test]
fn s22_forks_of_one_moment_are_made_all_or_none() {
    isolated(test_name!(), |lab| {
        lab.ok(&["drives", "create", "data", "--size", "64"]);
        let parent = ["sandboxes", "create", "--name", "parent", "--memory-mib", "256"];
        lab.ok(
            &[&parent[..], &["--sleep-after-seconds", "never", "--drive", "data:/data"]].concat()
        );
        lab.write_file("parent", "/work/moment.py", MOMENT);
        lab.ok(&["exec", "parent", "--background", "--", "python3", "/work/moment.py"]);
        lab.sh("parent", "until test -e /work/moment.parent; do sleep 0.1; done");
        lab.sh("parent", "echo before >/data/x");
        let moments = |names: &[&str]| -> BTreeSet<String> {
            let read = |name: &&str| {
                let file = format!("/work/moment.{name}");
                lab.sh(name, &format!("until test -s {file}; do sleep 0.1; done; cat {file}"))
            };
            names.iter().map(read).collect()
        };

        let names = lab.ok(&["fork", "parent", "--name", "try", "--count", "3"]);
        assert_eq!(names, "try-1\ntry-2\ntry-3\n");
        let awake = moments(&["try-1", "try-2", "try-3"]);
        assert_eq!(awake.len(), 1, "one moment: {awake:?}");
        assert_eq!(lab.events("parent", "copied").len(), 1, "and one pause");
        for name in ["try-1", "try-2", "try-3"] {
            lab.sh(name, &format!("echo {name} >>/data/x"));
            assert_eq!(lab.sh(name, "cat /data/x; hostname"), format!("before\n{name}\n{name}"));
        }
        assert_eq!(lab.sh("parent", "cat /data/x"), "before");

        // Of a sleeping one, which sleeps on; without names.
        lab.ok(&["sandboxes", "sleep", "parent", "--tier", "disk"]);
        let forks = lab.json(&["fork", "parent", "--count", "2"]);
        let ids: Vec<&str> = forks
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(|fork| fork["id"].as_str())
            .collect();
        assert_eq!(ids.len(), 2);
        assert_eq!(lab.view("parent")["status"], "sleeping");
        let asleep = moments(&ids);
        assert_eq!(asleep.len(), 1, "{asleep:?}");
        assert_ne!(asleep, awake, "of another moment");

        // One name that is taken, or one copy that there is no room for: none is made.
        let before = lab.json(&["sandboxes", "list"]).as_array().map(Vec::len);
        let refused = |args: &[&str], with: &str| {
            let output = lab.run(args);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && said.contains(with), "{args:?}: {said}");
        };
        refused(&["fork", "try-1", "--name", "try", "--count", "4"], "the name `try-1` is taken");
        refused(&["fork", "try-1", "--count", "17"], "from 1 to 16");
        refused(&["fork", "try-1", "--count", "0"], "from 1 to 16");
        assert_eq!(lab.json(&["sandboxes", "list"]).as_array().map(Vec::len), before);
        assert_eq!(lab.ok(&["fork", "try-1", "--name", "more", "--count", "1"]), "more-1\n");
    });
}

#[test]
fn s22_forks_of_one_moment_are_all_there_or_none_when_the_daemon_dies() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "parent", "--memory-mib", "256"]);
        lab.sh("parent", "echo before >/work/x");
        lab.ok(&["sandboxes", "sleep", "parent", "--tier", "disk"]);
        let fork = |key: &'static str| {
            let count = ["fork", "parent", "--name", key, "--count", "3"];
            [&count[..], &["--idempotency-key", key]].concat()
        };
        let there = |lab: &e2e::Lab| -> Vec<String> {
            let all = lab.json(&["sandboxes", "list"]);
            let names = all.as_array().into_iter().flatten().map(|one| one["name"].as_str());
            names.flatten().map(str::to_owned).filter(|name| name != "parent").collect()
        };
        let die = |lab: &mut e2e::Lab, point: &str, key| {
            lab.stop_daemon();
            lab.daemon_env = vec![("DORMOUSE_FAULT".to_owned(), point.to_owned())];
            lab.start();
            assert!(!lab.run(&fork(key)).status.success(), "the daemon dies meanwhile");
            lab.reap_daemon();
            lab.daemon_env.clear();
            lab.start();
        };
        let sandboxes = lab.data().join("sandboxes");
        let folders = || std::fs::read_dir(&sandboxes).expect("sandboxes").count();
        for nth in 1..=3 {
            println!("{nth} of 3 are published");
            die(lab, &format!("fork_published:{nth}"), "none");
            assert_eq!(there(lab), Vec::<String>::new(), "{nth} of 3 were published");
            assert_eq!(folders(), 1);
        }
        // Nothing is left in the way of the same request.
        let made = lab.ok(&fork("none"));
        assert_eq!(made, "none-1\nnone-2\nnone-3\n");
        assert_eq!(lab.ok(&fork("none")), made);
        assert_eq!(there(lab).len(), 3);

        die(lab, "forks_kept", "all");
        let kept = there(lab);
        assert_eq!(kept.len(), 6, "{kept:?}");
        assert_eq!(lab.ok(&fork("all")), "all-1\nall-2\nall-3\n");
        assert_eq!(there(lab), kept, "those that were there");
        for name in kept {
            assert_eq!(lab.sh(&name, "cat /work/x; hostname"), format!("before\n{name}"));
        }
        let notes = std::fs::read_dir(lab.data().join("fork-sets")).expect("notes").count();
        assert_eq!(notes, 0);
        e2e::witness::nothing_leaks(lab);
    });
}
