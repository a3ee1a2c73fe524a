//! Disks that are full, states that are damaged, machines that die.

use std::process::{Child, Stdio};

use e2e::filler::Filler;
use e2e::lab::Lab;
use e2e::witness::{Witness, nothing_leaks};
use e2e::{isolated, proc, test_name, until};

#[test]
fn s24_a_machine_killed_awake_is_lost_and_says_so() {
    isolated(test_name!(), |lab| {
        for tier in ["running", "memory"] {
            let name = format!("w-{tier}");
            Witness::create_still(lab, &name);
            lab.sh(&name, "echo kept > /work/kept; sync");
            if tier == "memory" {
                lab.ok(&["sandboxes", "sleep", &name, "--tier", "memory"]);
            }
            let qemu = *proc::qemus_below(&lab.data()).last().expect("a QEMU");
            proc::kill(qemu, rustix::process::Signal::KILL);
            let view = until("its loss is noticed", || {
                let view = lab.view(&name);
                (view["failure_code"] == "machine_lost").then_some(view)
            });
            assert_eq!(
                (&view["status"], &view["sleep_tier"]),
                (&"sleeping".into(), &"off".into()),
                "{view}"
            );
            // The next call boots it from its disk.
            assert_eq!(lab.sh(&name, "cat /work/kept"), "kept");
            lab.ok(&["sandboxes", "delete", &name]);
        }
        nothing_leaks(lab);
    });
}

#[test]
fn s16_a_machine_that_ends_by_itself_is_noticed_and_booted_by_the_next_call() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        for (number, (how, code)) in
            [("b", "reboot"), ("o", "poweroff"), ("c", "panic")].into_iter().enumerate()
        {
            lab.sh("web", &format!("echo {code} > /work/last; sync"));
            // The call that waited for the command is told that it was lost, never an exit code.
            let output = lab.run(&[
                "exec",
                "web",
                "--",
                "sh",
                "-c",
                &format!(
                    "echo 1 > /proc/sys/kernel/sysrq; echo {how} > /proc/sysrq-trigger; sleep 60"
                ),
            ]);
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(125), "{how}: {stderr}");
            assert!(stderr.contains("ended before"), "{how}: {stderr}");
            let stopped =
                until("its end is noticed", || lab.events("web", "stopped").get(number).cloned());
            println!("{code}: {stopped}");
            assert_eq!(lab.sh("web", "cat /work/last"), code);
        }
        let codes: Vec<_> = lab
            .events("web", "stopped")
            .iter()
            .map(|event| event["data"]["code"].clone())
            .collect();
        assert_eq!(codes, ["reboot", "poweroff", "panic"]);
    });
}

#[test]
fn s15_a_restart_boots_from_disk_and_keeps_what_was_written() {
    isolated(test_name!(), |lab| {
        let witness = Witness::create_still(lab, "web");
        lab.sh("web", "echo kept > /work/kept");
        let before = (lab.view("web")["id"].clone(), lab.ok(&["link", "web", "80"]));
        lab.ok(&["sandboxes", "restart", "web"]);
        assert_eq!(lab.sh("web", "cat /work/kept"), "kept");
        assert_eq!((lab.view("web")["id"].clone(), lab.ok(&["link", "web", "80"])), before);
        assert_eq!(lab.sh("web", "pgrep -f '[w]itness.py' || echo gone"), "gone", "{witness:?}");
        // Also of a sleeping one.
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        lab.ok(&["sandboxes", "restart", "web"]);
        assert_eq!(lab.sh("web", "hostname; cat /work/kept"), "web\nkept");
    });
}

#[test]
fn s17_a_damaged_state_fails_with_a_code_and_a_restart_cures_it() {
    isolated(test_name!(), |lab| {
        Witness::create_still(lab, "web");
        lab.sh("web", "echo kept > /work/kept");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        let id = lab.view("web")["id"].as_str().expect("an id").to_owned();
        let state = lab.data().join("sandboxes").join(&id).join("state");
        let mut bytes = std::fs::read(&state).expect("the state");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x40;
        std::fs::write(&state, bytes).expect("damaged");
        let output = lab.run(&["exec", "web", "--", "true"]);
        assert_eq!(output.status.code(), Some(125));
        let view = lab.view("web");
        assert_eq!(
            (&view["status"], &view["failure_code"]),
            (&"failed".into(), &"state_damaged".into()),
            "{view}"
        );
        lab.ok(&["sandboxes", "restart", "web"]);
        assert_eq!(lab.sh("web", "cat /work/kept"), "kept");
        let view = lab.view("web");
        assert_eq!(view["status"], "running", "{view}");
        // A second one is deleted in its failure.
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        std::fs::write(&state, b"nothing of the kind").expect("damaged");
        assert_eq!(lab.run(&["exec", "web", "--", "true"]).status.code(), Some(125));
        // By a daemon that has found it so.
        lab.kill_daemon();
        lab.start();
        lab.ok(&["sandboxes", "delete", "web"]);
        nothing_leaks(lab);
    });
}

#[test]
fn s07_a_full_disk_costs_nothing_but_sleep() {
    e2e::lab::isolated_on_small_disk(test_name!(), 1500, |lab| {
        let mut witness = Witness::create_still(lab, "web");
        let filler = Filler::fill(lab);
        let output = lab.run(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        println!("sleep on a full disk: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(1));
        let view = lab.view("web");
        assert_eq!(view["status"], "running", "{view}");
        until("it stands still rather than die", || lab.events("web", "halted").last().cloned());
        drop(filler);
        witness.check();
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        // Asleep on a full disk it is refused a wake, and loses nothing.
        let filler = Filler::fill(lab);
        let output = lab.run(&["exec", "web", "--", "true"]);
        println!("wake on a full disk: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(125));
        let view = lab.view("web");
        assert_eq!(
            (&view["status"], &view["sleep_tier"]),
            (&"sleeping".into(), &"disk".into()),
            "{view}"
        );
        let output = lab.run(&["sandboxes", "create", "--name", "more"]);
        assert_eq!(output.status.code(), Some(1), "no room for another");
        drop(filler);
        witness.check();
        // And it can be deleted while the disk is full.
        let filler = Filler::fill(lab);
        lab.ok(&["sandboxes", "delete", "web"]);
        drop(filler);
        nothing_leaks(lab);
    });
}

#[test]
fn s24_copies_that_are_asked_for_at_once_leave_running_guests_their_room() {
    /// What is always left free, MiB: what is kept free for guests, without what those that run may write meanwhile.
    const LEFT_MIB: u64 = 200;

    e2e::lab::isolated_on_small_disk(test_name!(), 1800, |lab| {
        let names = ["a", "b", "c", "d"];
        let boots = names.map(|name| {
            let create = ["sandboxes", "create", "--name", name, "--memory-mib", "256"];
            lab.ok(&[&create[..], &["--sleep-after-seconds", "never"]].concat());
            lab.sh(name, "cat /proc/sys/kernel/random/boot_id")
        });
        let filler = Filler::fill_but(lab, 640);
        let mut asked = Vec::new();
        for round in ["1", "2"] {
            for name in names {
                asked.push([
                    "snapshots".into(),
                    "create".into(),
                    name.into(),
                    name.to_owned() + round,
                ]);
            }
            for name in ["e", "f", "g"] {
                let name = name.to_owned() + round;
                asked.push(["sandboxes".into(), "create".into(), "--name".into(), name]);
            }
        }
        let mut running: Vec<_> = asked
            .iter()
            .map(|asked| {
                let arguments: Vec<&str> = asked.iter().map(String::as_str).collect();
                let mut command = lab.command(&[&["--json"], &arguments[..]].concat());
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
                command.spawn().expect("`dormouse` starts")
            })
            .collect();
        let mut least = u64::MAX;
        until("all are answered", || {
            least = least.min(free_mib(lab));
            let ended = |child: &mut Child| child.try_wait().expect("its state").is_some();
            running.iter_mut().all(ended).then_some(())
        });
        let (mut made, mut refused) = (0, 0);
        for (asked, child) in asked.iter().zip(running) {
            let output = child.wait_with_output().expect("its output");
            let said = String::from_utf8_lossy(&output.stderr);
            if output.status.success() {
                made += 1;
            } else {
                assert!(said.contains("\"no_space\""), "{asked:?}: {said}");
                refused += 1;
            }
        }
        println!("{made} made, {refused} refused, {least} MiB were always free");
        assert!(made > 0 && refused > 0, "{made} made, {refused} refused");
        assert!(least >= LEFT_MIB, "{least} MiB were left");
        drop(filler);
        for (name, boot) in names.iter().zip(boots) {
            assert_eq!(lab.sh(name, "cat /proc/sys/kernel/random/boot_id"), boot, "{name}");
            assert!(lab.events(name, "stopped").is_empty(), "{name}");
            assert!(lab.events(name, "halted").is_empty(), "{name}");
        }
        // What was promised has been given back: one after the other, there is room for all.
        for name in names {
            lab.ok(&["snapshots", "create", name, &format!("{name}-after")]);
        }
    });
}

/// Free MiB under the data folder.
fn free_mib(lab: &Lab) -> u64 {
    let stat = rustix::fs::statvfs(lab.data()).expect("free space");
    (stat.f_bavail * stat.f_frsize) >> 20
}

#[test]
fn s07_qemu_killed_while_saving_or_loading_never_leaves_it_between() {
    isolated(test_name!(), |lab| {
        Witness::create_still(lab, "web");
        lab.sh("web", "echo kept > /work/kept; sync");
        for what in ["saving", "loading"] {
            if what == "loading" {
                lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
            }
            let arguments: &[&str] = if what == "saving" {
                &["sandboxes", "sleep", "web", "--tier", "disk"]
            } else {
                &["exec", "web", "--", "true"]
            };
            let mut asking = lab.command(arguments).spawn().expect("`dormouse` starts");
            let qemu = until("a QEMU is there", || proc::qemus_below(&lab.data()).first().copied());
            proc::kill(qemu, rustix::process::Signal::KILL);
            let ended = asking.wait().expect("it ends");
            let view = until("it has got somewhere", || {
                let view = lab.view("web");
                (view["status"] != "starting").then_some(view)
            });
            println!(
                "QEMU killed while {what}: the call ended with {ended}, the sandbox is {} ({})",
                view["status"], view["failure_code"]
            );
            assert_eq!(lab.sh("web", "cat /work/kept"), "kept");
        }
        lab.ok(&["sandboxes", "restart", "web"]);
        lab.ok(&["sandboxes", "delete", "web"]);
        nothing_leaks(lab);
    });
}

#[test]
fn s16_a_call_that_comes_as_the_machine_dies_is_served_or_told() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        for round in 0..3 {
            lab.sh("web", "true");
            let mut calls: Vec<_> = (0..8)
                .map(|_| {
                    let mut call = lab.command(&["exec", "web", "--", "true"]);
                    call.stderr(std::process::Stdio::null()).spawn().expect("`dormouse` starts")
                })
                .collect();
            let qemu = *proc::qemus_below(&lab.data()).first().expect("a QEMU");
            proc::kill(qemu, rustix::process::Signal::KILL);
            let ends: Vec<_> = calls
                .iter_mut()
                .map(|call| {
                    until("each call ends", || call.try_wait().expect("state of the call")).code()
                })
                .collect();
            println!("round {round}: calls ended with {ends:?}");
            assert!(ends.iter().all(|end| matches!(end, Some(0 | 125))), "{ends:?}");
        }
        lab.sh("web", "true");
    });
}

#[test]
fn s22_a_guest_that_stops_answering_can_be_restarted_and_deleted() {
    isolated(test_name!(), |lab| {
        for what in ["restart", "delete"] {
            lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
            // Root stops everything in the guest, its agent too, as far as it can.
            let freeze = "(sleep 1; while :; do echo 1 > /sys/fs/cgroup/user/cgroup.freeze; done) & kill -STOP 1";
            lab.ok(&["exec", "web", "--background", "--", "sh", "-c", freeze]);
            let mut stuck =
                lab.command(&["exec", "web", "--", "true"]).spawn().expect("`dormouse` starts");
            let mut sleeping =
                lab.command(&["sandboxes", "sleep", "web"]).spawn().expect("`dormouse` starts");
            let mut ending =
                lab.command(&["sandboxes", what, "web"]).spawn().expect("`dormouse` starts");
            let ended =
                until(&format!("{what} ends"), || ending.try_wait().expect("state of the call"));
            assert!(ended.success(), "{what}: {ended}");
            for call in [&mut stuck, &mut sleeping] {
                until("the calls under way end", || call.try_wait().expect("state of the call"));
            }
            if what == "restart" {
                assert_eq!(lab.sh("web", "echo well"), "well");
                lab.ok(&["sandboxes", "delete", "web"]);
            }
        }
        nothing_leaks(lab);
    });
}
