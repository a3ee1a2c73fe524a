//! A host with less memory than its sandboxes together.

use std::sync::atomic::{AtomicBool, Ordering};

use e2e::lab::Lab;
use e2e::{isolated, proc, test_name, until};

/// What each machine counts for: its size, and what QEMU takes.
const SEAT_MIB: u64 = 256 + 96;

/// Sandboxes, and for how many of them there is room; the long form asks for 40 and 10.
fn sizes() -> (usize, u64) {
    let number = |name: &str, default: u64| {
        std::env::var(name).ok().map_or(default, |text| text.parse().expect("a number"))
    };
    let sandboxes = number("DORMOUSE_SOAK_PRESSURE_SANDBOXES", 8);
    (usize::try_from(sandboxes).expect("a number"), number("DORMOUSE_SOAK_PRESSURE_ROOM", 3))
}

fn set_budget(lab: &mut Lab, machines: u64, wait_seconds: u64) {
    lab.stop_daemon();
    lab.daemon_env = vec![
        ("DORMOUSE_MEMORY_BUDGET_MIB".to_owned(), (machines * SEAT_MIB).to_string()),
        ("DORMOUSE_MEMORY_WAIT_SECONDS".to_owned(), wait_seconds.to_string()),
    ];
    lab.start();
}

fn create(lab: &Lab, name: &str, sleep_after: &str) {
    let args = ["--name", name, "--memory-mib", "256", "--sleep-after-seconds", sleep_after];
    lab.ok(&[&["sandboxes", "create"], args.as_slice()].concat());
}

#[test]
fn s09_more_sandboxes_than_memory_all_answer_in_turn_and_never_hold_more_than_the_budget() {
    isolated(test_name!(), |lab| {
        let (count, room) = sizes();
        // Enough for whoever is last in turn.
        set_budget(lab, room, 300);
        let data = lab.data();
        let over = AtomicBool::new(false);
        let busy = AtomicBool::new(true);
        std::thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                let mut most = 0;
                while busy.load(Ordering::Relaxed) {
                    let resident: u64 =
                        proc::qemus_below(&data).into_iter().map(proc::resident_mib).sum();
                    most = most.max(resident);
                    over.fetch_or(resident > room * SEAT_MIB, Ordering::Relaxed);
                    std::thread::yield_now();
                }
                most
            });
            let lab = &*lab;
            let names: Vec<_> = (0..count).map(|n| format!("p{n}")).collect();
            for name in &names {
                create(lab, name, "1");
                let fill = "head -c 60M /dev/urandom > /dev/shm/fill; sha256sum < /dev/shm/fill > /work/sum";
                lab.sh(name, fill);
            }
            for round in 0..2 {
                std::thread::scope(|all| {
                    for name in &names {
                        all.spawn(move || {
                            let line = "sha256sum < /dev/shm/fill | cmp - /work/sum && echo same";
                            assert_eq!(lab.sh(name, line).trim(), "same", "{name}");
                        });
                    }
                });
                println!("round {round}: all {count} answered");
            }
            busy.store(false, Ordering::Relaxed);
            let most = watcher.join().expect("it watched");
            println!("at most {most} MiB resident of a budget of {} MiB", room * SEAT_MIB);
            assert!(most > 0);
        });
        assert!(!over.load(Ordering::Relaxed), "more was resident than the budget");
        let demoted =
            (0..count).map(|n| lab.events(&format!("p{n}"), "demoted").len()).sum::<usize>();
        assert!(demoted >= count, "sleepers made room: {demoted} times");
        for n in 0..count {
            lab.ok(&["sandboxes", "delete", &format!("p{n}")]);
        }
        assert_eq!(proc::qemus_below(&data), Vec::<i32>::new());
    });
}

#[test]
fn s17_where_nobody_can_make_room_a_wake_is_refused_in_words_and_its_sandbox_sleeps_on() {
    isolated(test_name!(), |lab| {
        set_budget(lab, 2, 1);
        create(lab, "asleep", "never");
        lab.sh("asleep", "echo kept > /dev/shm/here");
        lab.ok(&["sandboxes", "sleep", "asleep", "--tier", "disk"]);
        create(lab, "one", "never");
        create(lab, "two", "never");
        let refused = lab.run(&["exec", "asleep", "--", "true"]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success());
        assert!(said.contains("memory budget of 704 MiB is taken"), "{said}");
        assert_eq!(lab.view("asleep")["status"], "sleeping");
        // One that is too large for any turn is told so at once, and leaves nothing behind.
        let args = ["sandboxes", "create", "--name", "huge", "--memory-mib", "1024"];
        let refused = lab.run(&args);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(said.contains("memory budget is 704 MiB"), "{said}");
        lab.ok(&["sandboxes", "delete", "one"]);
        assert_eq!(lab.sh("asleep", "cat /dev/shm/here").trim(), "kept");
        // A sleeper in memory makes room for it.
        lab.ok(&["sandboxes", "sleep", "asleep", "--tier", "disk"]);
        create(lab, "one", "never");
        lab.ok(&["sandboxes", "sleep", "two", "--tier", "memory"]);
        assert_eq!(lab.sh("asleep", "cat /dev/shm/here").trim(), "kept");
        until("it has moved to disk", || (lab.view("two")["sleep_tier"] == "disk").then_some(()));
    });
}
