//! The host's wall clock is set by a day, on or back, under a daemon that lives, with sandboxes in every tier.
//!
//! Only the daemon is told so, by libfaketime: its wall clock is another, while the clocks that count since boot go on as they do
//! on a host whose clock is set. QEMU looks at the wall clock only where a guest boots.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use e2e::lab::Lab;
use e2e::wait::stays;
use e2e::{isolated, net, test_name, until};

/// What Debian's package `libfaketime` brings.
const LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

const DAY: f64 = 86_400.0;

/// After this long a guest's timer is due, seconds.
const TIMER: u64 = 45;

/// How late a program in a guest may be on a busy host, seconds; a day it is not.
const LATE_MAX: f64 = 15.0;

/// The daemon's wall clock.
struct Clock {
    file: PathBuf,
    ahead: f64,
}

impl Clock {
    /// Starts the daemon anew with a wall clock that can be set.
    fn of(lab: &mut Lab) -> Self {
        lab.stop_daemon();
        // The library leaves its files there when a daemon is killed.
        net::output("mount", &["-t", "tmpfs", "tmpfs", "/dev/shm"]);
        let mut clock = Self { file: lab.scratch().join("clock"), ahead: 0.0 };
        clock.set(0);
        let file = clock.file.to_string_lossy().into_owned();
        let settings = [
            ("LD_PRELOAD", LIBRARY),
            ("FAKETIME_TIMESTAMP_FILE", &*file),
            ("FAKETIME_NO_CACHE", "1"),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
            ("NO_FAKE_STAT", "1"),
            // It has given up the rights that the library would need.
            ("FAKETIME_SKIP_CMDS", "qemu-system-x86_64"),
        ];
        let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned()));
        lab.daemon_env.extend(settings);
        lab.start();
        clock
    }

    /// Sets it by so many days against this machine's.
    fn set(&mut self, days: i32) {
        self.ahead = f64::from(days) * DAY;
        let fresh = self.file.with_extension("new");
        std::fs::write(&fresh, format!("{days:+}d\n")).expect("written");
        std::fs::rename(&fresh, &self.file).expect("set");
    }

    /// What the daemon takes for now, seconds since 1970.
    fn now(&self) -> f64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.expect("after 1970").as_secs_f64() + self.ahead
    }

    /// How many seconds ago a time was that is told.
    fn age(&self, told: &serde_json::Value) -> f64 {
        let told = told.as_str().unwrap_or_else(|| panic!("a time: {told}"));
        let unix: f64 =
            net::output("date", &["-d", told, "+%s.%N"]).trim().parse().expect("a time");
        self.now() - unix
    }
}

/// All seconds that a sandbox was there, as they are counted for the bill.
fn counted(lab: &Lab, name: &str) -> f64 {
    let usage = lab.json(&["usage", name])["usage"].clone();
    let sums = ["awake_seconds", "asleep_memory_seconds", "asleep_disk_seconds", "off_seconds"];
    sums.iter().map(|sum| usage[sum].as_f64().unwrap_or_else(|| panic!("{sum}: {usage}"))).sum()
}

fn guest_clock(lab: &Lab, name: &str) -> f64 {
    lab.sh(name, "date +%s.%N").parse().expect("a time")
}

fn create(lab: &Lab, name: &str, more: &[&str]) {
    lab.ok(&[&["sandboxes", "create", "--name", name], more].concat());
}

fn stepped(name: &str, days: i32) {
    isolated(name, |lab| {
        let mut clock = Clock::of(lab);
        let in_an_hour = net::output("date", &["-u", "-d", "1 hour", "+%FT%TZ"]);
        create(lab, "memory", &["--sleep-after-seconds", "never"]);
        create(lab, "disk", &["--sleep-after-seconds", "never"]);
        create(lab, "awake", &["--sleep-after-seconds", "600"]);
        create(lab, "off", &["--sleep-after-seconds", "never"]);
        let hour_idle = ["--sleep-after-seconds", "2", "--delete-after-idle-ms", "3600000"];
        create(lab, "idle", &[&hour_idle[..], &["--memory-tier-seconds", "20"]].concat());
        create(lab, "until", &["--expires-at", in_an_hour.trim(), "--sleep-after-seconds", "2"]);
        let down = "echo 1 > /proc/sys/kernel/sysrq; echo o > /proc/sysrq-trigger; sleep 60";
        lab.ok(&["exec", "off", "--background", "--", "sh", "-c", down]);
        lab.ok(&["sandboxes", "sleep", "memory", "--tier", "memory"]);
        lab.ok(&["sandboxes", "sleep", "disk", "--tier", "disk"]);
        until("it is off", || (lab.view("off")["sleep_tier"] == "off").then_some(()));
        let timers = [("timer-memory", "300", "memory"), ("timer-disk", "0", "disk")];
        for (name, seconds, _) in timers {
            create(lab, name, &["--sleep-after-seconds", "2", "--memory-tier-seconds", seconds]);
        }
        let mut begun = Vec::new();
        for (name, _, _) in timers {
            let line = format!(
                "up() {{ cut -d' ' -f1 /proc/uptime; }}; up > /work/begin; sleep {TIMER}; up > /work/end"
            );
            begun.push(Instant::now());
            lab.ok(&["exec", name, "--background", "--", "sh", "-c", &line]);
        }
        for (name, _, tier) in timers {
            assert_eq!(lab.wait_status(name, "sleeping")["sleep_tier"], tier);
        }
        let names = ["memory", "disk", "awake", "off", "idle", "timer-memory", "timer-disk"];
        let idle = (clock.age(&lab.wait_status("idle", "sleeping")["since"]), Instant::now());
        let before = names.map(|name| (Instant::now(), counted(lab, name)));

        clock.set(days);
        let set = Instant::now();
        // It is not asleep, so nothing but being told sets its clock.
        until("the clock of one that runs is set", || {
            ((guest_clock(lab, "awake") - clock.now()).abs() < 1.0).then_some(())
        });
        println!("{days:+} d: one that runs is set {:.1} s later", set.elapsed().as_secs_f64());
        stays("all is as it was", 5, || {
            let sleeps = |name, tier| {
                let view = lab.view(name);
                view["status"] == "sleeping" && view["sleep_tier"] == tier
            };
            sleeps("memory", "memory")
                && sleeps("disk", "disk")
                && sleeps("off", "off")
                && timers.iter().all(|(name, _, tier)| sleeps(name, tier))
                && lab.view("awake")["status"] == "running"
        });
        let age_max = set.elapsed().as_secs_f64() + 600.0;
        let told_well = |lab: &Lab| {
            for name in names {
                let view = lab.view(name);
                let age = clock.age(&view["since"]);
                assert!(age > -1.0 && age < age_max, "{name}: since {age} s: {view}");
                assert!(!lab.ok(&["why", name]).is_empty());
            }
            let due = until("it is quiet", || {
                let due = lab.view("awake")["will_sleep_at"].clone();
                due.is_string().then(|| -clock.age(&due))
            });
            assert!(due > 300.0 && due < 601.0, "will sleep in {due} s");
        };
        told_well(lab);
        // A daemon that starts now finds times of before.
        lab.kill_daemon();
        lab.start();
        told_well(lab);
        for (name, (at, before)) in names.iter().zip(before) {
            let (counted, passed) = (counted(lab, name) - before, at.elapsed().as_secs_f64());
            assert!((counted - passed).abs() < 3.0, "{name}: {counted} s for {passed} s");
        }
        let demoted = until("it is moved to disk", || {
            let view = lab.view("idle");
            assert_eq!(view["status"], "sleeping", "{view}");
            (view["sleep_tier"] == "disk").then(|| idle.0 + idle.1.elapsed().as_secs_f64())
        });
        assert!(demoted > 19.0 && demoted < 20.0 + 30.0, "after {demoted} s in memory");

        for ((name, _, _), begun) in timers.iter().zip(begun) {
            let woke = until("it wakes by itself", || lab.events(name, "woke").first().cloned());
            let after = begun.elapsed().as_secs_f64();
            assert_eq!(woke["data"]["cause"], "timer", "{woke}");
            let due = Duration::from_secs(TIMER).as_secs_f64();
            assert!(after > due - 1.0 && after < due + LATE_MAX, "{name}: after {after} s");
            let slept = woke["data"]["slept_ms"].as_f64().expect("how long") / 1000.0;
            assert!(slept < after, "{name}: asleep {slept} s of {after} s");
            let line = "echo $(cat /work/begin) $(cat /work/end)";
            let (begin, end) = until("the program has ended", || {
                let text = lab.sh(name, line);
                let (begin, end) = text.split_once(' ')?;
                Some((begin.parse::<f64>().expect("seconds"), end.parse::<f64>().expect("seconds")))
            });
            println!(
                "{days:+} d: {name} woke after {after:.1} s, its sleep lasted {:.1} s",
                end - begin
            );
            assert!(end - begin > due - 0.1 && end - begin < due + LATE_MAX, "{begin} {end}");
        }
        for name in ["memory", "disk", "idle", "timer-memory", "timer-disk", "off", "awake"] {
            let (earliest, guest) = (clock.now(), guest_clock(lab, name));
            assert!(guest > earliest - 0.5 && guest < clock.now() + 0.5, "{name}: {guest}");
        }
        // What is to be deleted at a time is so by the clock that tells it.
        let is_there = || {
            let list = lab.json(&["sandboxes", "list"]);
            list.as_array().expect("a list").iter().any(|one| one["name"] == "until")
        };
        if days > 0 {
            until("its time is over", || (!is_there()).then_some(()));
        } else {
            assert!(is_there());
        }

        // And when it is set right again, that is no more than another step.
        lab.ok(&["sandboxes", "sleep", "memory", "--tier", "memory"]);
        clock.set(0);
        told_well_again(lab, &clock);
    });
}

fn told_well_again(lab: &Lab, clock: &Clock) {
    for name in ["memory", "disk", "awake"] {
        until("its clock is right", || {
            ((guest_clock(lab, name) - clock.now()).abs() < 1.0).then_some(())
        });
        let age = clock.age(&lab.view(name)["since"]);
        assert!(age > -1.0 && age < DAY / 2.0, "{name}: since {age} s");
    }
}

#[test]
fn s03_s07_s21_s23_a_wall_clock_set_on_by_a_day_wakes_ends_and_costs_nothing() {
    stepped(test_name!(), 1);
}

#[test]
fn s03_s07_s21_s23_a_wall_clock_set_back_by_a_day_wakes_ends_and_costs_nothing() {
    stepped(test_name!(), -1);
}
