//! Commands, files, terminals and one-shot runs, on real guests.

use std::process::{Output, Stdio};

use e2e::lab::Lab;
use e2e::pty::Pty;
use e2e::{isolated, test_name, until};
use serde_json::Value;

/// How often it was woken.
fn wakes(lab: &Lab, sandbox: &str) -> usize {
    lab.events(sandbox, "woke").len()
}

fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

/// The number that `exec --background` prints.
fn background(lab: &Lab, sandbox: &str, line: &str) -> String {
    lab.ok(&["exec", sandbox, "--background", "--", "sh", "-c", line]).trim().to_owned()
}

/// What is told about one command.
fn listed(lab: &Lab, sandbox: &str, exec: &str) -> Value {
    let list = lab.json(&["execs", "list", sandbox]);
    let found = list.as_array().into_iter().flatten().find(|one| one["exec_id"] == exec);
    found.cloned().unwrap_or_else(|| panic!("no {exec} in {list}"))
}

/// Prints what is written into a pipe.
const ECHO: &str = r"
import os
os.mkfifo('/tmp/wait')
pipe = open(os.open('/tmp/wait', os.O_RDWR))
print('one', flush=True)
for line in pipe: print(line, end='', flush=True)
";

#[test]
fn s22_commands_are_listed_read_waited_for_and_signalled_over_sleeps_and_daemons() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        let ended = background(lab, "web", "echo done; echo bad >&2; exit 9");
        lab.write_file("web", "/work/echo.py", ECHO);
        let exec = background(lab, "web", "exec python3 /work/echo.py");
        until("it has printed", || (listed(lab, "web", &exec)["stdout_bytes"] == 4).then_some(()));
        until("the other has ended", || {
            (listed(lab, "web", &ended)["status"] == "exited").then_some(())
        });
        for (round, tier) in ["memory", "disk", "disk"].into_iter().enumerate() {
            lab.ok(&["sandboxes", "sleep", "web", "--tier", tier]);
            if round == 2 {
                lab.stop_daemon();
                lab.start();
            }
            let before = wakes(lab, "web");
            let asleep = listed(lab, "web", &exec);
            assert_eq!(asleep["status"], "running", "{asleep}");
            assert_eq!(asleep["stdout_bytes"], 4 + 5 * round, "{asleep}");
            assert_eq!(listed(lab, "web", &ended)["exit"]["exit_code"], 9);
            let output = lab.run(&["execs", "wait", "web", &ended]);
            assert_eq!(code(&output), Some(9), "of one that has ended nobody needs to be asked");
            assert_eq!(lab.view("web")["status"], "sleeping");
            assert_eq!(wakes(lab, "web"), before, "asking woke it");
            // Reading wakes: the output is in the guest.
            let from = lab.ok(&["execs", "output", "web", &exec, "--from-offset", "2"]);
            assert_eq!(from, "e\n".to_owned() + &"more\n".repeat(round));
            assert_eq!(wakes(lab, "web"), before + 1);
            lab.sh("web", "echo more > /tmp/wait");
            until("it goes on", || {
                (listed(lab, "web", &exec)["stdout_bytes"] == 4 + 5 * (round + 1)).then_some(())
            });
        }
        let followed = lab.command(&["execs", "output", "web", &exec, "--follow"]);
        let followed = { followed }.stdout(Stdio::piped()).spawn().expect("follows");
        let waited = lab.command(&["execs", "wait", "web", &exec]).spawn().expect("waits");
        lab.ok(&["execs", "kill", "web", &exec, "--signal", "TERM"]);
        assert_eq!(waited.wait_with_output().expect("ends").status.code(), Some(143));
        let followed = followed.wait_with_output().expect("ends");
        let followed = String::from_utf8(followed.stdout).expect("text");
        assert_eq!(followed, "one\nmore\nmore\nmore\n");
        let output = lab.ok(&["execs", "output", "web", &ended]);
        assert_eq!(output, "done\n");
        let stderr = lab.run(&["execs", "output", "web", &ended, "--stream", "stderr"]).stderr;
        assert_eq!(stderr, b"bad\n");
    });
}

#[test]
fn s22_a_commands_exit_code_is_its_own_and_dormouse_has_125_to_127() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        let run = |argv: &[&str]| lab.run(&[&["exec", "web", "--"], argv].concat());
        for (argv, expected) in [
            (&["sh", "-c", "exit 42"][..], 42),
            (&["sh", "-c", "kill -KILL $$"], 137),
            (&["no-such-program"], 127),
            (&["/no/such/program"], 127),
            (&["/etc/passwd"], 126),
            (&["/etc"], 126),
        ] {
            let output = run(argv);
            assert_eq!(code(&output), Some(expected), "{argv:?}: {output:?}");
        }
        assert_eq!(code(&lab.run(&["exec", "nobody", "--", "true"])), Some(125));
        assert_eq!(code(&lab.run(&["exec", "web", "--cwd", "/none", "--", "true"])), Some(125));
        assert_eq!(code(&lab.run(&["exec", "web", "--bad-option", "--", "true"])), Some(125));
        // A reader that has seen enough ends the command in the guest.
        let piped = "set -o pipefail; \"$0\" exec web -- yes | head -1";
        let output = std::process::Command::new("bash")
            .args(["-c", piped])
            .arg(lab.program())
            .envs(lab.env())
            .stdin(Stdio::null())
            .output()
            .expect("bash starts");
        assert_eq!((code(&output), output.stdout.as_slice()), (Some(141), &b"y\n"[..]));
        assert_eq!(lab.sh("web", "ps -eo comm= | grep -c '^yes$' || true"), "0");
    });
}

#[test]
fn arguments_and_environment_may_be_as_long_as_linux_takes_them() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        let long = "x".repeat(130_000);
        let count = "printf '%s' \"$A$1\" | wc -c";
        let env = format!("A={long}");
        let argv = ["exec", "web", "--env", &env, "--", "sh", "-c", count, "sh", &long];
        assert_eq!(lab.ok(&argv), "260000\n");
        let longer = "x".repeat(131_071 + 1);
        // This machine's own limit is the same, so it must not pass through an argument here.
        let body = serde_json::json!({"argv": ["echo", longer]}).to_string();
        let local = lab.scratch().join("body.json");
        std::fs::write(&local, body).expect("written");
        let token = std::fs::read_to_string(lab.data().join("admin.token")).expect("token");
        let answer = e2e::net::output(
            "curl",
            &[
                "-s",
                "-H",
                &format!("Authorization: Bearer {}", token.trim()),
                "--data-binary",
                &format!("@{}", local.display()),
                &format!("http://{}/v1/sandboxes/web/execs", lab.address()),
            ],
        );
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        assert_eq!(
            (&answer["code"], &answer["field"]),
            (&"invalid_request".into(), &"argv[1]".into())
        );
    });
}

#[test]
fn files_put_replaces_no_device() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        lab.sh("web", "mkfifo /tmp/pipe; ln -s /dev/null /tmp/null");
        let local = lab.scratch().join("put");
        std::fs::write(&local, "text").expect("written");
        for target in ["/dev/null", "/tmp/pipe", "/tmp/null"] {
            let output =
                lab.run(&["files", "put", &local.to_string_lossy(), &format!("web:{target}")]);
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(code(&output), Some(1), "{target}: {stderr}");
            assert!(stderr.contains("is a device, pipe or socket"), "{target}: {stderr}");
        }
        assert_eq!(
            lab.sh("web", "stat -Lc %F /dev/null /tmp/pipe | tr '\\n' ,"),
            "character special file,fifo,"
        );
    });
}

#[test]
fn s22_a_one_shot_run_leaves_nothing_unless_asked() {
    isolated(test_name!(), |lab| {
        let output = lab.run(&["run", "--", "sh", "-c", "hostname; echo bad >&2; exit 7"]);
        assert_eq!((code(&output), output.stderr.as_slice()), (Some(7), &b"bad\n"[..]));
        assert_eq!(lab.json(&["sandboxes", "list"]), Value::Array(vec![]));
        assert_eq!(code(&lab.run(&["run", "--", "no-such-program"])), Some(127));
        assert_eq!(lab.json(&["sandboxes", "list"]), Value::Array(vec![]));
        let kept = lab.run(&["run", "--keep", "--", "sh", "-c", "echo kept > /work/file"]);
        let note = String::from_utf8(kept.stderr.clone()).expect("text");
        assert_eq!(code(&kept), Some(0), "{note}");
        let name = note.split('`').nth(1).expect("a name").to_owned();
        assert_eq!(lab.sh(&name, "cat /work/file"), "kept");
    });
}

/// The only terminal of a sandbox.
fn terminal(lab: &Lab, sandbox: &str) -> Value {
    let list = lab.json(&["terminals", "list", sandbox]);
    assert_eq!(list.as_array().map(Vec::len), Some(1), "{list}");
    list[0].clone()
}

#[test]
fn s22_a_terminal_goes_on_over_sleep_with_its_screen_and_the_next_key_wakes_it() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "2"]);
        let mut shell = Pty::start(&lab.command(&["shell", "web"]), 100, 30);
        shell.types("stty size; echo begin-$((6*7)); export MARK=kept\r");
        shell.shows("30 100");
        shell.shows("begin-42");
        let id = terminal(lab, "web")["terminal_id"].as_str().expect("an id").to_owned();
        // Nobody types: it sleeps though it is looked at.
        lab.wait_status("web", "sleeping");
        let before = wakes(lab, "web");
        let screen = lab.ok(&["terminals", "screen", "web", &id]);
        assert!(screen.contains("begin-42"), "{screen}");
        // A second one joins while it sleeps, with a screen of another size, and sees what was there.
        let mut second = Pty::start(&lab.command(&["shell", "web", "--attach", &id]), 90, 25);
        second.shows("begin-42");
        until("two look at it", || (terminal(lab, "web")["viewers"] == 2).then_some(()));
        assert_eq!(lab.view("web")["status"], "sleeping", "looking and resizing wake nothing");
        assert_eq!(wakes(lab, "web"), before);
        // The next key wakes it; its programs know the size that was asked for last before they answer.
        second.types("stty size; echo $MARK-$((7*7))\r");
        second.shows("25 90");
        second.shows("kept-49");
        shell.shows("kept-49");
        assert_eq!(wakes(lab, "web"), before + 1);
        let woke = lab.events("web", "woke").pop().expect("it woke");
        assert!(woke["text"].as_str().is_some_and(|text| text.contains("key press")), "{woke}");
        // One leaves, and it goes on.
        second.types("\r~.");
        assert_eq!(second.ends(), Some(0));
        assert_eq!(terminal(lab, "web")["status"], "running");
        shell.types("exit 5\r");
        assert_eq!(shell.ends(), Some(5));
        assert_eq!(terminal(lab, "web")["exit"]["exit_code"], 5);
        lab.wait_status("web", "sleeping");
    });
}

#[test]
fn s22_a_terminal_outlasts_the_daemon_and_sleep_on_disk() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        let mut shell = Pty::start(&lab.command(&["shell", "web", "--", "bash", "--norc"]), 80, 24);
        shell.types("N=11; echo first-$((N*N))\r");
        shell.shows("first-121");
        let id = terminal(lab, "web")["terminal_id"].as_str().expect("an id").to_owned();
        // A daemon that dies while it is awake: the viewer comes back by itself.
        lab.kill_daemon();
        lab.start();
        until("it is looked at again", || (terminal(lab, "web")["viewers"] == 1).then_some(()));
        shell.types("echo second-$((N*N*N))\r");
        shell.shows("second-1331");
        // One that starts while it sleeps on disk knows the screen.
        until("the screen is written down", || {
            let file = lab.data().join("sandboxes").join(lab.view("web")["id"].as_str()?);
            let files = std::fs::read_dir(file.join("terminals")).ok()?;
            let mut texts =
                files.flatten().filter_map(|file| std::fs::read_to_string(file.path()).ok());
            texts.find(|text| text.contains("second-1331"))
        });
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        lab.stop_daemon();
        lab.start();
        let before = wakes(lab, "web");
        let screen = lab.ok(&["terminals", "screen", "web", &id]);
        assert!(screen.contains("first-121") && screen.contains("second-1331"), "{screen}");
        until("it is looked at again", || (terminal(lab, "web")["viewers"] == 1).then_some(()));
        assert_eq!(lab.view("web")["status"], "sleeping");
        shell.resizes(120, 40);
        until("it has the new size", || (terminal(lab, "web")["columns"] == 120).then_some(()));
        assert_eq!(
            (lab.view("web")["status"].clone(), wakes(lab, "web")),
            ("sleeping".into(), before)
        );
        shell.types("stty size; echo third-$((N+N))\r");
        shell.shows("40 120");
        shell.shows("third-22");
        let woke = lab.events("web", "woke").pop().expect("it was woken");
        assert_eq!(woke["data"]["cause"], "terminal", "{woke}");
        // A fork has the same terminal, and its own life.
        lab.ok(&["fork", "web", "--name", "copy"]);
        let copied = until("the fork's screen is drawn", || {
            let screen = lab.ok(&["terminals", "screen", "copy", &id]);
            screen.contains("third-22").then_some(screen)
        });
        assert!(copied.contains("first-121"), "{copied}");
        let mut fork = Pty::start(&lab.command(&["shell", "copy", "--attach", &id]), 80, 24);
        fork.types("echo fork-$((N+1))\r");
        fork.shows("fork-12");
        let screen = lab.ok(&["terminals", "screen", "web", &id]);
        assert!(!screen.contains("fork-"), "{screen}");
        lab.ok(&["terminals", "close", "copy", &id]);
        assert_eq!(fork.ends(), Some(129), "it was hung up");
        // A restart ends it, and says so; it is forgotten, and so is one that had ended before.
        let mut ended = Pty::start(&lab.command(&["shell", "web", "--", "true"]), 80, 24);
        assert_eq!(ended.ends(), Some(0));
        lab.ok(&["sandboxes", "restart", "web"]);
        assert_eq!(shell.ends(), Some(125));
        until("both are forgotten", || {
            (lab.json(&["terminals", "list", "web"]) == Value::Array(vec![])).then_some(())
        });
        lab.kill_daemon();
        lab.start();
        assert_eq!(lab.json(&["terminals", "list", "web"]), Value::Array(vec![]));
        // So does a deletion.
        let mut shell = Pty::start(&lab.command(&["shell", "web"]), 80, 24);
        until("it is looked at", || {
            (lab.json(&["terminals", "list", "web"])[0]["viewers"] == 1).then_some(())
        });
        lab.ok(&["sandboxes", "delete", "web"]);
        assert_eq!(shell.ends(), Some(125));
    });
}

#[test]
fn s22_a_terminal_belongs_to_its_user_and_has_what_terminals_have() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        let line = "set -eu; tty; stat -c %U:%G:%a $(tty); echo to-the-tty > /dev/tty; \
                    stty -echo; stty echo; test -t 0 -a -t 1 -a -t 2; id -un; \
                    ps -o tpgid= -p $$ | tr -d ' ' | grep -qx $$; echo all-fine";
        let argv = ["shell", "web", "--user", "nobody", "--", "sh", "-c", line];
        let mut shell = Pty::start(&lab.command(&argv), 80, 24);
        for shown in ["/dev/pts/", "nobody:tty:620", "to-the-tty", "nobody", "all-fine"] {
            shell.shows(shown);
        }
        assert_eq!(shell.ends(), Some(0));
        // Ctrl-C interrupts what runs in the foreground, and Ctrl-D ends the shell.
        let mut shell = Pty::start(&lab.command(&["shell", "web"]), 80, 24);
        shell.types("N=7; sleep 1000; echo after-$((N*N))\r");
        until("it sleeps", || (lab.sh("web", "pgrep -xc sleep || true") == "1").then_some(()));
        shell.types("\x03");
        shell.types("echo interrupted-$((N*6))\r");
        shell.shows("interrupted-42");
        // At the prompt: before, the end that Ctrl-D says might be whose that has ended already.
        shell.shows("# ");
        shell.types("\x04");
        assert_eq!(shell.ends(), Some(0));
        let absent = lab.run(&["shell", "web", "--", "true"]);
        assert_eq!(code(&absent), Some(125), "without a terminal there is none");
    });
}

/// How many lines are typed, each while the sandbox falls asleep.
const TYPED_LINES: u32 = 24;

#[test]
fn s07_nothing_typed_is_lost_whenever_it_falls_asleep() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        let argv = ["shell", "web", "--", "sh", "-c", "stty -echo; echo ready; cat > /work/typed"];
        let mut shell = Pty::start(&lab.command(&argv), 80, 24);
        shell.shows("ready");
        let mut typed = String::new();
        for number in 0..TYPED_LINES {
            let tier = if number % 2 == 0 { "memory" } else { "disk" };
            let asked = lab.command(&["sandboxes", "sleep", "web", "--tier", tier]);
            let mut asked = { asked }.stderr(Stdio::null()).spawn().expect("asks");
            // A key after the other, all the while: some before it sleeps, some during, some after.
            for key in format!("line {number} of many, and a good deal longer than needed").chars()
            {
                typed.push(key);
                shell.types(&key.to_string());
            }
            typed.push('\n');
            shell.types("\r");
            // A key that came first may have kept it awake, or woken it at once.
            until("it is answered", || asked.try_wait().expect("its state"));
        }
        shell.types("\x04");
        assert_eq!(shell.ends(), Some(0));
        assert_eq!(lab.ok(&["files", "cat", "web:/work/typed"]), typed);
        assert!(!lab.events("web", "slept").is_empty(), "it slept at all");
    });
}
