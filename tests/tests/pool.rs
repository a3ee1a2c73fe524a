//! Copies that lie ready: a new sandbox is claimed, and nobody sees what nobody has asked for.

use std::fs;

use e2e::filler::Filler;
use e2e::lab::{Lab, POOL, isolated_on_small_disk};
use e2e::{isolated, proc, test_name, until};
use rustix::process::Signal;

/// What each machine of the usual size counts for: its memory, and what QEMU takes.
const SEAT_MIB: u64 = 512 + 96;

fn with_pool(lab: &mut Lab, more: &[(&str, String)]) {
    lab.stop_daemon();
    lab.daemon_env = vec![
        (POOL.to_owned(), "1".to_owned()),
        ("DORMOUSE_OPEN_METRICS".to_owned(), "true".to_owned()),
    ];
    lab.daemon_env.extend(more.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
    lab.start();
}

/// The stopped machine that is nobody's, when there is one.
#[track_caller]
fn ready(lab: &Lab, others: &[i32]) -> i32 {
    let clones = |number: usize| format!("dormouse_ready_copies {number}\n");
    until("a clone is ready", || {
        let metrics = e2e::net::http(lab.address(), "localhost", "/metrics").ok()?.body;
        assert!(metrics.contains("dormouse_ready_copies "), "{metrics}");
        if metrics.contains(&clones(0)) {
            return None;
        }
        let pids = proc::qemus_below(&lab.data());
        pids.into_iter().find(|pid| !others.contains(pid) && is_stopped(*pid))
    })
}

fn is_stopped(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

fn create(lab: &Lab, name: &str) -> i32 {
    let before = proc::qemus_below(&lab.data());
    lab.ok(&["sandboxes", "create", "--name", name, "--sleep-after-seconds", "never"]);
    let address = lab.view(name)["id"].as_str().expect("an id").to_owned();
    let folder = lab.data().join("sandboxes").join(address);
    let [pid] = proc::qemus_below(&folder)[..] else { panic!("{name} has not one QEMU") };
    println!(
        "{name}: QEMU {pid}, which was {}there before",
        if before.contains(&pid) { "" } else { "not " }
    );
    pid
}

/// What must differ between any two sandboxes.
fn who(lab: &Lab, name: &str) -> Vec<String> {
    let line = "cat /etc/machine-id /sys/class/net/eth0/address; hostname; head -c 16 /dev/urandom | od -An -tx1";
    let facts: Vec<String> = lab.sh(name, line).lines().map(str::to_owned).collect();
    assert_eq!(facts.len(), 4, "{facts:?}");
    assert_eq!(facts[2], name);
    facts
}

#[test]
fn s22_a_new_sandbox_is_claimed_from_those_that_lie_ready() {
    isolated(test_name!(), |lab| {
        with_pool(lab, &[]);
        let first = ready(lab, &[]);
        assert_eq!(lab.json(&["sandboxes", "list"]), serde_json::json!([]), "nobody has made any");
        let a = create(lab, "a");
        assert_eq!(a, first, "it was there already");
        let created = lab.events("a", "created");
        assert_eq!(created.len(), 1);
        let facts_a = who(lab, "a");

        // One that is not made costs no clone.
        let second = ready(lab, &[a]);
        let refused = lab.run(&["sandboxes", "create", "--name", "a"]);
        assert!(!refused.status.success(), "the name is taken");
        let b = create(lab, "b");
        assert_eq!(b, second, "what was reserved for the refused one");
        for (one, other) in facts_a.iter().zip(who(lab, "b")) {
            assert_ne!(*one, other);
        }

        // A sandbox like any other: it sleeps, wakes, forks and boots anew.
        lab.sh("b", "echo kept > /dev/shm/memory; echo kept > /work/disk");
        for tier in ["disk", "memory"] {
            lab.ok(&["sandboxes", "sleep", "b", "--tier", tier]);
            assert_eq!(lab.sh("b", "cat /dev/shm/memory").trim(), "kept");
        }
        lab.ok(&["sandboxes", "restart", "b"]);
        assert_eq!(lab.sh("b", "cat /work/disk; hostname"), "kept\nb");

        // Another size has none ready, and is made all the same; it is kept ready from then on.
        let args = ["sandboxes", "create", "--name", "small", "--memory-mib", "256"];
        lab.ok(&args);
        who(lab, "small");
        let _: i32 = until("both kinds lie ready", || {
            let pids = proc::qemus_below(&lab.data());
            let stopped = pids.into_iter().filter(|pid| is_stopped(*pid)).count();
            (stopped == 2).then_some(0)
        });
    });
}

#[test]
fn s24_a_clone_that_died_or_whose_daemon_died_costs_nothing() {
    isolated(test_name!(), |lab| {
        with_pool(lab, &[]);
        let first = ready(lab, &[]);
        let a = create(lab, "a");
        assert_eq!(a, first);
        lab.sh("a", "echo kept > /dev/shm/memory");
        let second = ready(lab, &[a]);
        proc::kill(second, Signal::KILL);
        let b = create(lab, "b");
        who(lab, "b");

        let third = ready(lab, &[a, b]);
        lab.kill_daemon();
        lab.start();
        until("the clone of the daemon that died is undone", || {
            (!proc::alive(third)).then_some(())
        });
        assert_eq!(lab.sh("a", "cat /dev/shm/memory").trim(), "kept");
        assert_eq!(lab.json(&["sandboxes", "list"]).as_array().map(Vec::len), Some(2));
    });
}

#[test]
fn s24_clones_are_the_first_to_make_room() {
    isolated(test_name!(), |lab| {
        with_pool(lab, &[("DORMOUSE_MEMORY_BUDGET_MIB", (2 * SEAT_MIB).to_string())]);
        let first = ready(lab, &[]);
        let a = create(lab, "a");
        assert_eq!(a, first);
        let second = ready(lab, &[a]);
        // Another kind: the clone cannot become it, and gives its place up.
        lab.ok(&["sandboxes", "create", "--name", "b", "--cpus", "2"]);
        assert!(!proc::alive(second), "the clone made room");
        who(lab, "b");
        assert_eq!(lab.events("a", "slept").len(), 0, "and nobody else had to");
    });
}

#[test]
fn s24_clones_are_the_first_to_make_room_on_the_disk() {
    isolated_on_small_disk(test_name!(), 1500, |lab| {
        with_pool(lab, &[]);
        let first = ready(lab, &[]);
        // Little is left, and what is there may stay.
        let some = Filler::fill_but(lab, 400);
        let a = create(lab, "a");
        assert_eq!(a, first);
        until("it is said why there is no other", || {
            lab.daemon_log().contains("less than 512 MiB are free on the disk").then_some(())
        });
        assert_eq!(proc::qemus_below(&lab.data()), [a]);
        drop(some);

        let second = ready(lab, &[a]);
        let most = Filler::fill_but(lab, 200);
        until("the clone makes room", || (!proc::alive(second)).then_some(()));
        until("and its files are gone", || {
            let folders = fs::read_dir(lab.data().join("sandboxes")).expect("sandboxes").count();
            (folders == 1).then_some(())
        });
        let log = lab.daemon_log();
        assert!(log.contains("is given up: less than 256 MiB are free on the disk"), "{log}");
        assert_eq!(lab.view("a")["waits_for"], serde_json::Value::Null, "and nobody stood still");
        assert!(lab.events("a", "halted").is_empty());
        drop(most);
        let third = ready(lab, &[a]);
        assert_eq!(create(lab, "b"), third);
    });
}
