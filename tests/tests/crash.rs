//! The daemon killed at the worst moments, and at any.

use std::process::Stdio;

use e2e::lab::Lab;
use e2e::witness::{Witness, nothing_leaks};
use e2e::{isolated, proc, test_name, until};

/// How often each point is tried; the long form asks for 5.
fn rounds() -> u32 {
    number("DORMOUSE_SOAK_CRASH_ROUNDS", 1)
}

/// Random kills; the long form asks for 50.
fn random_kills() -> u32 {
    number("DORMOUSE_SOAK_CRASH_RANDOM", 3)
}

/// Sandboxes that work meanwhile; the long form asks for 10.
fn sandboxes() -> u32 {
    number("DORMOUSE_SOAK_CRASH_SANDBOXES", 3)
}

fn number(name: &str, default: u32) -> u32 {
    std::env::var(name).ok().map_or(default, |text| text.parse().expect("a number"))
}

/// Brings the daemon to a point by doing what passes it, and sees it die there.
fn die_at(lab: &mut Lab, point: &str, action: &[&str]) {
    lab.stop_daemon();
    lab.daemon_env = vec![("DORMOUSE_FAULT".to_owned(), point.to_owned())];
    // It may pass the point by itself, before it answers: a sleeper has work of its own.
    lab.launch();
    let pid = lab.daemon_pid();
    until(&format!("the daemon dies at {point}"), || {
        let mut asking = lab
            .command(action)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("`dormouse` starts");
        // A client must see an end too, whatever it is.
        until("the client ends or the daemon does", || {
            (asking.try_wait().expect("state of the client").is_some() || !proc::alive(pid))
                .then_some(())
        });
        proc::kill(i32::try_from(asking.id()).expect("a pid"), rustix::process::Signal::TERM);
        asking.wait().expect("the client ends");
        (!proc::alive(pid)).then_some(())
    });
    lab.daemon_env.clear();
    lab.reap_daemon();
    lab.start();
}

fn all_are_well(lab: &Lab, witnesses: &mut [Witness]) {
    for witness in witnesses {
        let view = lab.view(witness.sandbox());
        let status = view["status"].as_str().unwrap_or_default().to_owned();
        assert!(status == "running" || status == "sleeping", "{view}");
        assert_eq!(view["failure_code"], serde_json::Value::Null, "{view}");
        witness.check();
    }
    nothing_leaks(lab);
}

#[test]
fn s24_no_memory_is_lost_when_the_daemon_dies_at_the_worst_moments() {
    isolated(test_name!(), |lab| {
        let mut witnesses: Vec<_> =
            (0..sandboxes()).map(|n| Witness::create(lab, &format!("w{n}"))).collect();
        for round in 0..rounds() {
            for point in ["saving", "saved_not_published", "published_qemu_alive"] {
                println!("round {round}: {point}");
                die_at(lab, point, &["sandboxes", "sleep", "w0", "--tier", "disk"]);
                all_are_well(lab, &mut witnesses);
            }
            for point in ["restoring", "restored_not_running"] {
                println!("round {round}: {point}");
                lab.ok(&["sandboxes", "sleep", "w1", "--tier", "disk"]);
                die_at(lab, point, &["exec", "w1", "--", "true"]);
                all_are_well(lab, &mut witnesses);
            }
            println!("round {round}: create_copied");
            die_at(
                lab,
                "create_copied",
                &["sandboxes", "create", "--name", "new", "--memory-mib", "256"],
            );
            all_are_well(lab, &mut witnesses);
            delete_if_there(lab, "new");
            println!("round {round}: fork_copied");
            die_at(lab, "fork_copied", &["fork", "w2", "--name", "child"]);
            all_are_well(lab, &mut witnesses);
            delete_if_there(lab, "child");
            println!("round {round}: deleting");
            lab.ok(&["sandboxes", "create", "--name", "old", "--memory-mib", "256"]);
            die_at(lab, "deleting", &["sandboxes", "delete", "old"]);
            // Whatever is still to be done, it is shown as nothing else.
            let names = lab.json(&["sandboxes", "list"]);
            assert!(!names.to_string().contains("\"old\""), "{names}");
            let output = lab.run(&["--json", "sandboxes", "get", "old"]);
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(told.contains("being_deleted") || told.contains("not_found"), "{told}");
            until("the deletion is finished", || {
                let output = lab.run(&["--json", "sandboxes", "get", "old"]);
                String::from_utf8_lossy(&output.stderr).contains("not_found").then_some(())
            });
            all_are_well(lab, &mut witnesses);
        }
        for witness in &witnesses {
            lab.ok(&["sandboxes", "delete", witness.sandbox()]);
        }
        nothing_leaks(lab);
    });
}

/// A creation that was cut off is finished or undone; either way the name can be had.
fn delete_if_there(lab: &Lab, name: &str) {
    if lab.run(&["sandboxes", "get", name]).status.success() {
        until(&format!("{name} has got somewhere"), || {
            (lab.view(name)["status"] != "starting").then_some(())
        });
        lab.ok(&["sandboxes", "delete", name]);
    }
    nothing_leaks(lab);
}

/// xorshift64*: enough to choose moments, and the same ones again for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % end
    }
}

#[test]
fn s24_no_memory_is_lost_when_the_daemon_dies_at_any_moment() {
    isolated(test_name!(), |lab| {
        let seed = std::env::var("DORMOUSE_SOAK_SEED")
            .ok()
            .map_or(20_261_130, |text| text.parse().expect("a number"));
        println!("seed {seed}");
        let mut random = Random(seed);
        let mut witnesses: Vec<_> =
            (0..sandboxes()).map(|n| Witness::create(lab, &format!("w{n}"))).collect();
        for kill in 0..random_kills() {
            let actions: Vec<_> = (0..4)
                .map(|_| {
                    let name = format!("w{}", random.below(u64::from(sandboxes())));
                    let arguments = match random.below(4) {
                        0 => vec!["sandboxes", "sleep", &name, "--tier", "disk"],
                        1 => vec!["sandboxes", "sleep", &name, "--tier", "memory"],
                        _ => vec!["exec", &name, "--", "true"],
                    };
                    lab.command(&arguments)
                        .stdout(Stdio::null())
                        .stderr(Stdio::null())
                        .spawn()
                        .expect("`dormouse` starts")
                })
                .collect();
            let after = std::time::Duration::from_micros(random.below(300_000));
            println!("kill {kill} after {after:?}");
            let begun = std::time::Instant::now();
            until("the moment has come", || (begun.elapsed() >= after).then_some(()));
            lab.kill_daemon();
            for mut action in actions {
                proc::kill(
                    i32::try_from(action.id()).expect("a pid"),
                    rustix::process::Signal::TERM,
                );
                action.wait().expect("the client ends");
            }
            lab.start();
            all_are_well(lab, &mut witnesses);
        }
        for witness in &witnesses {
            lab.ok(&["sandboxes", "delete", witness.sandbox()]);
        }
        nothing_leaks(lab);
    });
}

#[test]
fn s07_connections_to_its_own_address_and_output_outlast_the_daemon() {
    isolated(test_name!(), |lab| {
        let mut witness = Witness::create(lab, "web");
        // A command's output is read on by its offset by the same client.
        let script = "for i in 1 2 3 4 5 6 7 8; do echo line $i; sleep 1; done";
        let reading = lab
            .command(&["exec", "web", "--", "sh", "-c", script])
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        until("the command runs", || lab.ok(&["ps", "web"]).contains("for i in").then_some(()));
        lab.kill_daemon();
        witness.check();
        lab.start();
        witness.check();
        let output = reading.wait_with_output().expect("ends");
        let text = String::from_utf8_lossy(&output.stdout);
        let expected: Vec<String> = (1..=8).map(|i| format!("line {i}")).collect();
        assert_eq!(text.lines().collect::<Vec<_>>(), expected, "nothing missing, nothing twice");
        assert_eq!(output.status.code(), Some(0));
    });
}

#[test]
fn an_unknown_folder_is_kept_and_everything_else_goes_on() {
    isolated(test_name!(), |lab| {
        let mut witness = Witness::create(lab, "web");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        lab.stop_daemon();
        let unknown = lab.data().join("sandboxes/abcdefghijkl");
        std::fs::create_dir(&unknown).expect("a folder");
        std::fs::write(unknown.join("precious"), "bytes").expect("a file");
        std::fs::write(unknown.join("manifest.json"), "{\"format\": 99}").expect("a file");
        lab.start();
        let kept: Vec<_> = std::fs::read_dir(lab.data().join("quarantine"))
            .expect("quarantine")
            .flatten()
            .collect();
        assert_eq!(kept.len(), 1);
        assert_eq!(
            std::fs::read_to_string(kept[0].path().join("precious")).expect("kept"),
            "bytes"
        );
        witness.check();
    });
}

#[test]
fn a_second_daemon_is_refused_and_a_late_child_of_the_first_is_waited_for() {
    isolated(test_name!(), |lab| {
        let second = lab.run(&["serve", "--listen", "127.0.0.1:7099"]);
        let said = String::from_utf8_lossy(&second.stderr);
        assert!(!second.status.success(), "{said}");
        assert!(said.contains("another daemon works in"), "{said}");
        assert!(said.contains(&format!("process {}", lab.daemon_pid())), "{said}");
        lab.stop_daemon();
        // As a child of the daemon would, that had no time to become another program before it ended.
        let lock = std::fs::File::open(lab.data().join("daemon.lock")).expect("the lock");
        lock.try_lock().expect("nobody holds it");
        lab.launch();
        until("the new daemon looks at the lock", || {
            proc::has_open(lab.daemon_pid(), &lab.data().join("daemon.lock")).then_some(())
        });
        lock.unlock().expect("let go");
        lab.wait_ready();
    });
}
