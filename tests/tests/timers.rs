//! Clocks and timers over sleep.

use e2e::lab::LISTEN_PROGRAM as LISTEN;
use e2e::lab::Lab;
use e2e::{isolated, net, test_name, until};

/// Seconds since 1970, by this machine.
fn now() -> f64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .expect("after 1970")
        .as_secs_f64()
}

fn a_long_sleep_ends_on_waking(name: &str, tier: &'static str) {
    isolated(name, |lab| {
        // Timers neither wake it nor keep it awake where awake ports decide, so nothing but the request ends this sleep.
        lab.ok(&[
            "sandboxes",
            "create",
            "--name",
            "web",
            "--sleep-after-seconds",
            "never",
            "--awake-port",
            "9222",
        ]);
        lab.ok(&[
            "exec",
            "web",
            "--background",
            "--",
            "sh",
            "-c",
            "sleep 40; date +%s.%N > /work/end",
        ]);
        let begun = now();
        until("5 s have passed", || (now() - begun >= 5.0).then_some(()));
        lab.ok(&["sandboxes", "sleep", "web", "--tier", tier]);
        until("50 s have passed", || (now() - begun >= 50.0).then_some(()));
        let before = now();
        let guest: f64 = lab.sh("web", "date +%s.%N").parse().expect("a time");
        let after = now();
        assert!(
            guest > before - 0.1 && guest < after + 0.1,
            "wall clock: {before} {guest} {after}"
        );
        let end: f64 = until("the program has ended", || {
            lab.sh("web", "cat /work/end 2>/dev/null || true").parse().ok()
        });
        let woke = lab.events("web", "woke");
        assert_eq!(woke.len(), 1, "no other wake: {woke:?}");
        let slept_ms = woke[0]["data"]["slept_ms"].as_f64().expect("how long it slept");
        println!(
            "{tier}: asleep {slept_ms} ms; ended {:.3} s after the wake was asked for",
            end - before
        );
        assert!(slept_ms >= 35_000.0, "asleep for {slept_ms} ms");
        assert!(end > before - 0.1 && end < after + 5.0, "ended at {end}, woken at {before}");
    });
}

#[test]
fn s07_a_long_sleep_ends_on_waking_from_memory() {
    a_long_sleep_ends_on_waking(test_name!(), "memory");
}

#[test]
fn s07_a_long_sleep_ends_on_waking_from_disk() {
    a_long_sleep_ends_on_waking(test_name!(), "disk");
}

#[test]
fn s03_a_timer_fires_on_time_though_it_sleeps() {
    isolated(test_name!(), |lab| {
        for (tier, seconds) in [("memory", "300"), ("disk", "0")] {
            let name = format!("t-{tier}");
            let args = [
                "sandboxes",
                "create",
                "--name",
                &name,
                "--sleep-after-seconds",
                "2",
                "--memory-tier-seconds",
                seconds,
            ];
            lab.ok(&args);
            let begun = now();
            lab.ok(&[
                "exec",
                &name,
                "--background",
                "--",
                "sh",
                "-c",
                "sleep 20; date +%s.%N > /work/end",
            ]);
            let view = lab.wait_status(&name, "sleeping");
            assert_eq!(view["sleep_tier"], tier, "{view}");
            // Before it is told of: a reader may ask what a sleeper waits for.
            assert!(view["will_wake_at"].as_str() > view["since"].as_str(), "{view}");
            let why = lab.json(&["why", &name]);
            let summary = why["summary"].as_str().expect("text").to_owned();
            assert!(summary.contains("a timer of its own at"), "{summary}");
            let woke = until("it wakes by itself", || lab.events(&name, "woke").first().cloned());
            assert_eq!(woke["data"]["cause"], "timer", "{woke}");
            let end: f64 = until("the program has ended", || {
                lab.sh(&name, "cat /work/end 2>/dev/null || true").parse().ok()
            });
            let late = end - begun - 20.0;
            println!("{tier}: fired {late:.3} s after 20 s");
            assert!(late > -0.5 && late < 10.0, "{tier}: {late} s late");
            assert!(woke["data"]["slept_ms"].as_f64().expect("how long") > 5_000.0, "{woke}");
        }
    });
}

#[test]
fn s03_a_timer_set_right_before_a_requested_sleep_fires_on_time() {
    isolated(test_name!(), |lab| {
        for tier in ["memory", "disk"] {
            let name = format!("t-{tier}");
            lab.ok(&["sandboxes", "create", "--name", &name]);
            let begun = now();
            lab.ok(&[
                "exec",
                &name,
                "--background",
                "--",
                "sh",
                "-c",
                "sleep 9; date +%s.%N > /work/end",
            ]);
            until("the timer is set", || {
                lab.sh(&name, "ps -o stat= -C sleep || true").starts_with('S').then_some(())
            });
            lab.ok(&["sandboxes", "sleep", &name, "--tier", tier]);
            let woke = until("it wakes by itself", || lab.events(&name, "woke").first().cloned());
            assert_eq!(woke["data"]["cause"], "timer", "{woke}");
            let end: f64 = until("the program has ended", || {
                lab.sh(&name, "cat /work/end 2>/dev/null || true").parse().ok()
            });
            let late = end - begun - 9.0;
            println!("{tier}: fired {late:.3} s after 9 s");
            assert!(late > -0.5 && late < 10.0, "{tier}: {late} s late");
        }
    });
}

#[test]
fn s08_a_request_that_woke_it_says_how_long_that_took() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web"]);
        lab.ok(&["exec", "web", "--background", "--", "python3", "-c", LISTEN, "0.0.0.0", "8000"]);
        let link = lab.ok(&["link", "web", "8000"]);
        until("the server listens", || {
            net::follow(&link).ok().filter(|answer| answer.status == 200)
        });
        lab.ok(&["sandboxes", "sleep", "web"]);
        let answer = net::follow(&link).expect("answered");
        let timing = answer.header("server-timing").unwrap_or_else(|| panic!("{answer:?}"));
        let ms: f64 = timing
            .split("wake;dur=")
            .nth(1)
            .expect("wake")
            .split([',', ';'])
            .next()
            .expect("ms")
            .parse()
            .expect("a number");
        assert!(ms > 0.0);
        let awake = net::follow(&link).expect("answered");
        assert_eq!(awake.header("server-timing"), None, "it was awake");
        let woke = lab.events("web", "woke");
        let phases = woke[0]["data"]["phases_ms"].as_object().expect("phases").clone();
        let sum: f64 = phases.values().filter_map(serde_json::Value::as_f64).sum();
        let total = woke[0]["data"]["total_ms"].as_f64().expect("total");
        assert!((sum - total).abs() < 0.1, "phases {phases:?} sum up to {total}");
        assert!(total <= ms, "the wake ({total} ms) is part of what the request waited ({ms} ms)");
    });
}

/// Seconds after its minute in which a job has certainly been done.
const SETTLED: f64 = 4.0;

/// Seconds after which it certainly sleeps, where no job is near: one that comes before is not counted on.
const SETTLED_ASLEEP: f64 = 20.0;

/// Jobs of the cron run and minutes between them; the long form asks for 10 and 2.
fn cron() -> (usize, u32) {
    let number = |name: &str, default: u32| {
        std::env::var(name).ok().map_or(default, |text| text.parse().expect("a number"))
    };
    let lines = number("DORMOUSE_SOAK_CRON_LINES", 1);
    (lines as usize, number("DORMOUSE_SOAK_CRON_MINUTES", 1))
}

#[test]
fn s03_cron_does_its_jobs_on_time_while_it_sleeps_in_between() {
    isolated(test_name!(), |lab| {
        let (lines, minutes) = cron();
        lab.ok(&["sandboxes", "create", "--name", "jobs", "--sleep-after-seconds", "5"]);
        let job = format!("*/{minutes} * * * * root date +\\%s.\\%N >> /work/times\n");
        lab.write_file("jobs", "/etc/cron.d/times", &job);
        lab.sh("jobs", "chmod 644 /etc/cron.d/times; touch /work/times");
        lab.ok(&["exec", "jobs", "--background", "--", "cron", "-f"]);
        let began = now();
        let whole = |seconds: f64| std::time::Duration::from_secs_f64(seconds).as_secs();
        // Nobody touches it meanwhile: its timeline says when a job should have been done.
        let limit = std::time::Duration::from_secs(u64::from(minutes) * 60 * (lines as u64 + 2));
        let step = u64::from(minutes) * 60;
        let jobs = |from: f64, to: f64| (whole(to) / step).saturating_sub(whole(from) / step);
        e2e::within(limit, "its jobs are due and it sleeps again", || {
            let asleep = lab.view("jobs")["status"] == "sleeping";
            (asleep && jobs(began + SETTLED_ASLEEP, now() - SETTLED) >= lines as u64).then_some(())
        });
        let ended = now();
        let woke = lab.events("jobs", "woke");
        assert!(woke.iter().all(|woke| woke["data"]["cause"] == "timer"), "{woke:?}");
        let slept_ms: f64 = woke.iter().filter_map(|woke| woke["data"]["slept_ms"].as_f64()).sum();
        let share = slept_ms / 1000.0 / (ended - began);
        let times = lab.sh("jobs", "cat /work/times");
        // Cron itself waits for the first second after the minute, and then for what was left of a second when it began.
        let late: Vec<f64> = times
            .lines()
            .map(|line| line.parse::<f64>().expect("a time") % (f64::from(minutes) * 60.0) - 1.0)
            .collect();
        println!("{} jobs, late by {late:.3?} s; asleep {:.0} %", late.len(), share * 100.0);
        assert_eq!(late.len() as u64, jobs(began, ended), "{times}");
        assert!(woke.len() >= lines, "it slept between its jobs");
        if lines >= 10 {
            assert!(late.iter().all(|late| *late <= 2.0), "{late:?}");
            assert!(share >= 0.75, "asleep {:.0} % of the time", share * 100.0);
        }
    });
}

#[test]
fn s21_one_that_sleeps_for_long_enough_is_deleted_and_so_is_one_whose_time_is_over() {
    isolated(test_name!(), |lab| {
        let quiet = ["--sleep-after-seconds", "2"];
        let create = |name: &str, settings: &[&str]| {
            let args: Vec<_> =
                ["sandboxes", "create", "--name", name].iter().chain(settings).copied().collect();
            lab.ok(&args);
        };
        create("brief", &[quiet[0], quiet[1], "--delete-after-idle-ms", "3000"]);
        create("kept", &[quiet[0], quiet[1]]);
        create("awake", &["--sleep-after-seconds", "never", "--delete-after-idle-ms", "1"]);
        let end = net::output("date", &["-u", "-d", "20 seconds", "+%FT%TZ"]);
        create("timed", &["--sleep-after-seconds", "never", "--expires-at", end.trim()]);
        let names = |lab: &Lab| -> Vec<String> {
            let list = lab.json(&["sandboxes", "list"]);
            let all = list.as_array().cloned().expect("a list");
            all.iter().map(|one| one["name"].as_str().unwrap_or_default().to_owned()).collect()
        };
        until("both are gone", || (names(lab) == ["kept", "awake"]).then_some(()));
        assert_eq!(lab.view("kept")["status"], "sleeping");
        assert_eq!(lab.view("awake")["status"], "running");
        // What it used is not forgotten with it.
        let deleted = lab.json(&["usage"])["deleted"].clone();
        assert!(deleted["awake_seconds"].as_f64() > Some(2.0), "{deleted}");
        assert!(deleted["asleep_memory_seconds"].as_f64() > Some(2.0), "{deleted}");
        // What is deleted leaves nothing behind, and its name is free.
        create("brief", &[]);
        // The project's setting is for those that say nothing; it outlasts the daemon.
        lab.ok(&["project", "--delete-after-idle-days", "30"]);
        lab.kill_daemon();
        lab.start();
        assert_eq!(lab.json(&["project"])["delete_after_idle_days"], 30);
        assert!(lab.ok(&["project"]).contains("after 30 days"));
        let refused = lab.run(&["project", "--delete-after-idle-days", "0"]);
        assert!(!refused.status.success());
        assert!(String::from_utf8_lossy(&refused.stderr).contains("delete_after_idle_days"));
        assert_eq!(lab.view("kept")["status"], "sleeping");
    });
}
