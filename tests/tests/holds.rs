//! Programs in a sandbox that hold it awake, and are told before it sleeps.

use e2e::lab::{Lab, workspace};
use e2e::{isolated, test_name, until};
use serde_json::Value;

/// Connects, says what it is told to, and keeps what it hears in a file of its name.
const LISTENER: &str = r"
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect('/run/sbx/awake')
s.sendall(sys.argv[2].encode())
with open('/work/' + sys.argv[1], 'w', buffering=1) as heard:
    for line in s.makefile('r'):
        heard.write(line)
        if line.startswith('sleep') and 'answers' in sys.argv[1]:
            s.sendall(b'+')
";

fn create(lab: &Lab, name: &str, settings: &[&str]) {
    let mut args = vec!["sandboxes", "create", "--name", name, "--sleep-after-seconds", "2"];
    args.extend(settings);
    lab.ok(&args);
    lab.write_file(name, "/work/listener.py", LISTENER);
}

/// Starts a program that is connected as soon as this returns, unless it says nothing.
fn listen(lab: &Lab, sandbox: &str, name: &str, says: &str) {
    lab.ok(&["exec", sandbox, "--background", "--", "python3", "/work/listener.py", name, says]);
    until("it is connected", || {
        let said = lab.sh(sandbox, &format!("grep -m1 -s held /work/{name} || true"));
        (!said.is_empty()).then_some(())
    });
}

/// What it heard. A call that comes between a notice and the sleep puts the sleep off, and so there may be a second notice.
fn heard(lab: &Lab, sandbox: &str, name: &str) -> Vec<String> {
    let text = lab.sh(sandbox, &format!("cat /work/{name}"));
    let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
    lines.dedup();
    lines
}

/// Waits until nothing but holds keeps it awake; gives the sentence and until when.
fn only_held(lab: &Lab, sandbox: &str) -> (String, Value) {
    until("only holds keep it awake", || {
        let view = lab.view(sandbox);
        let because = view["awake_because"].as_array().cloned().unwrap_or_default();
        let [one] = because.as_slice() else { return None };
        (one["reason"] == "held")
            .then(|| (one["text"].as_str().unwrap_or_default().to_owned(), one["until"].clone()))
    })
}

fn sleeps(lab: &Lab, sandbox: &str) -> usize {
    lab.events(sandbox, "slept").len()
}

/// Waits for a sleep after so many, and gives why it slept.
fn next_sleep(lab: &Lab, sandbox: &str, after: usize) -> Value {
    until("it sleeps", || lab.events(sandbox, "slept").get(after).cloned())["data"]["cause"].clone()
}

#[test]
fn s10_a_hold_keeps_it_awake_and_ends_with_its_holder() {
    isolated(test_name!(), |lab| {
        create(lab, "web", &["--sleep-hold-max-ms", "900000"]);
        listen(lab, "web", "one", "++");
        listen(lab, "web", "two", "+");
        assert_eq!(heard(lab, "web", "one"), ["held 1 1", "held 2 2"]);
        assert_eq!(heard(lab, "web", "two"), ["held 1 3"]);
        let (text, until_when) = only_held(lab, "web");
        assert_eq!(text, "its guest holds it awake (3 holds)");
        assert!(until_when.is_string(), "until its limit: {until_when}");
        let any = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/sbx/awake'); s.sendall(b'+?-'); print(s.makefile().readline())";
        let said = lab.ok(&["exec", "web", "--user", "nobody", "--", "python3", "-c", any]);
        assert_eq!(said.trim(), "held 1 4", "any user may");
        lab.sh("web", "pkill -9 -f '[l]istener.py'");
        let view = lab.wait_status("web", "sleeping");
        assert_eq!(view["awake_because"], serde_json::json!([]), "{view}");
        assert_eq!(next_sleep(lab, "web", 0), "idle");
    });
}

#[test]
fn s12_holds_alone_keep_it_awake_for_so_long_and_are_there_after_waking() {
    isolated(test_name!(), |lab| {
        create(lab, "web", &["--sleep-hold-max-ms", "3000", "--memory-tier-seconds", "0"]);
        listen(lab, "web", "one", "+");
        let before = sleeps(lab, "web");
        assert_eq!(next_sleep(lab, "web", before), "hold_cap");
        let view = lab.wait_status("web", "sleeping");
        assert_eq!(view["sleep_tier"], "disk", "{view}");
        // Reading its log wakes it; the hold is still there and counts anew.
        assert_eq!(heard(lab, "web", "one"), ["held 1 1"]);
        only_held(lab, "web");
        let before = sleeps(lab, "web");
        assert_eq!(next_sleep(lab, "web", before), "hold_cap");
        // 0 ignores holds.
        lab.ok(&["sandboxes", "update", "web", "--sleep-hold-max-ms", "0"]);
        lab.sh("web", "true");
        assert_eq!(next_sleep(lab, "web", before + 1), "idle");
    });
}

#[test]
fn s13_who_is_connected_is_told_and_may_answer_with_a_hold() {
    isolated(test_name!(), |lab| {
        create(lab, "web", &["--sleep-notice-ms", "1500", "--sleep-hold-max-ms", "4000"]);
        listen(lab, "web", "listens", "?");
        let before = sleeps(lab, "web");
        assert_eq!(next_sleep(lab, "web", before), "idle");
        assert_eq!(heard(lab, "web", "listens"), ["held 0 0", "sleep 1500"]);
        // This one answers with a hold, which keeps it awake until its limit, of which it is told too.
        listen(lab, "web", "answers", "?");
        let before = sleeps(lab, "web");
        assert_eq!(next_sleep(lab, "web", before), "hold_cap");
        let lines = heard(lab, "web", "answers");
        assert_eq!(lines[..3], ["held 0 0", "sleep 1500", "held 1 1"], "{lines:?}");
        assert_eq!(lines[3], "sleep 1500 cap", "{lines:?}");
        // One that is asked for is not announced.
        let told = until("its second hold is answered", || {
            let lines = heard(lab, "web", "answers");
            (lines.last()? == "held 2 2").then_some(lines)
        });
        lab.ok(&["sandboxes", "sleep", "web"]);
        assert_eq!(heard(lab, "web", "answers"), told);
    });
}

#[test]
fn s14_a_hold_of_the_last_moment_counts_from_the_next_waking() {
    isolated(test_name!(), |lab| {
        for tier in ["memory", "disk"] {
            let name = format!("h-{tier}");
            create(lab, &name, &["--sleep-hold-max-ms", "900000"]);
            // Begun, and perhaps not yet connected when it falls asleep.
            let args =
                ["exec", &name, "--background", "--", "python3", "/work/listener.py", "one", "+"];
            lab.ok(&args);
            lab.ok(&["sandboxes", "sleep", &name, "--tier", tier]);
            lab.sh(&name, "true");
            only_held(lab, &name);
            lab.ok(&["sandboxes", "delete", &name]);
        }
    });
}

#[test]
fn s10_the_examples_hold_it_awake() {
    isolated(test_name!(), |lab| {
        create(lab, "web", &["--sleep-hold-max-ms", "900000"]);
        let examples = workspace().join("examples/awake");
        let go = lab.scratch().join("hold");
        let built = std::process::Command::new("go")
            .args(["build", "-o"])
            .args([&go, &examples.join("hold.go")])
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", "-mod=mod")
            .env("GOCACHE", lab.scratch().join("go-cache"))
            .output()
            .expect("`go` is there: `cargo xtask setup` installs it");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        lab.ok(&["files", "put", go.to_str().expect("a path"), "web:/work/hold"]);
        let python = examples.join("hold.py");
        lab.ok(&["files", "put", python.to_str().expect("a path"), "web:/work/hold.py"]);
        for program in ["python3 /work/hold.py", "/work/hold"] {
            let line = format!("exec {program} sh -c 'touch /work/runs; exec sleep 100000'");
            lab.ok(&["exec", "web", "--background", "--", "sh", "-c", &line]);
            let (text, _) = only_held(lab, "web");
            assert_eq!(text, "its guest holds it awake (1 hold)", "{program}");
            lab.sh("web", "test -e /work/runs && rm /work/runs && pkill -x sleep");
            let before = sleeps(lab, "web");
            assert_eq!(next_sleep(lab, "web", before), "idle");
        }
    });
}
