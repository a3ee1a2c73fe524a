//! Commands: bytes pass through as they are, exit codes are the command's own, and a restart of the daemon is not noticed.

use expect_test::expect;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::world::World;

async fn world() -> World {
    let world = World::new().await;
    world.ok(&["sandboxes", "create", "--name", "web"]).await;
    world
}

#[tokio::test]
async fn output_and_exit_code_are_the_commands_own() {
    let world = world().await;
    let run = async |argv: &[&str]| world.run(&[&["exec", "web", "--"], argv].concat()).await;
    expect![[r#"
        out
        --- stderr
        err
        --- exit 7
    "#]]
    .assert_eq(&run(&["sh", "-c", "echo out; echo err >&2; exit 7"]).await);
    expect![[r#"
        --- exit 143
    "#]]
    .assert_eq(&run(&["sh", "-c", "kill -TERM $$"]).await);
    expect![[r#"
        --- stderr
        error: cannot start: No such file or directory (os error 2)
        --- exit 127
    "#]]
    .assert_eq(&run(&["/no/such/program"]).await);
    expect![[r#"
        --- stderr
        error: cannot start: Permission denied (os error 13)
        --- exit 126
    "#]]
    .assert_eq(&run(&["/etc/passwd"]).await);
    expect![[r#"
        --- stderr
        error: no sandbox has the id or name `nobody`
        hint: `GET /v1/sandboxes` or `dormouse sandboxes list` shows what there is
        --- exit 125
    "#]]
    .assert_eq(&world.run(&["exec", "nobody", "--", "true"]).await);
    for wrong in [&["exec", "web"][..], &["exec", "web", "--timeout", "0", "--", "true"]] {
        assert_eq!(world.output(wrong).await.status.code(), Some(125), "{wrong:?}");
    }
    assert_eq!(world.output(&["sandboxes", "get"]).await.status.code(), Some(2));
    expect![[r#"
        --- stderr
        note: the command was killed when its time-out ran out
        --- exit 137
    "#]]
    .assert_eq(&world.run(&["exec", "web", "--timeout", "0.05", "--", "sleep", "1000"]).await);
    expect![[r#"
        b c
        --- exit 0
    "#]]
    .assert_eq(
        &world
            .run(&["exec", "web", "--env", "A=b c", "--cwd", "/", "--", "sh", "-c", "echo $A"])
            .await,
    );
    let json: serde_json::Value =
        serde_json::from_str(&world.ok(&["exec", "web", "--json", "--", "echo", "hi"]).await)
            .unwrap();
    assert_eq!((&json["stdout"], &json["exit_code"]), (&"hi\n".into(), &0.into()));
}

#[tokio::test]
async fn bytes_pass_both_ways_unchanged() {
    let world = world().await;
    let bytes: Vec<u8> = (0..3_000_000_u32)
        .map(|number| number.wrapping_mul(2_654_435_761).to_be_bytes()[0])
        .collect();
    let output = world.fed(&["exec", "web", "--", "cat"], &bytes).await;
    assert!(output.status.success());
    assert!(output.stdout == bytes, "{} bytes came back", output.stdout.len());
    // A command that does not read all of it ends all the same.
    let output = world.fed(&["exec", "web", "--", "head", "-c", "3"], &bytes).await;
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &bytes[..3]));
}

#[tokio::test]
async fn in_the_background_it_prints_the_number() {
    let world = world().await;
    assert_eq!(world.ok(&["exec", "web", "--background", "--", "sleep", "1000"]).await, "1");
    let ps = world.ok(&["ps", "web"]).await;
    let mut words = ps.lines().nth(1).unwrap().split_whitespace();
    assert_eq!((words.next(), words.nth(1)), (Some("1"), Some("running")), "{ps}");
}

#[tokio::test]
async fn commands_are_listed_read_waited_for_and_signalled_by_number() {
    let world = world().await;
    let line = "echo one; echo err >&2; read line; echo two; exit 5";
    let mut child = world.spawn(&["exec", "web", "--", "sh", "-c", line]);
    // Its number is the first.
    let mut one = [0; 4];
    child.stdout.as_mut().unwrap().read_exact(&mut one).await.unwrap();
    let list = world.ok(&["execs", "list", "web"]).await;
    let mut words = list.lines().nth(1).unwrap().split_whitespace();
    assert_eq!((words.next(), words.nth(1)), (Some("1"), Some("running")), "{list}");
    expect![[r#"
        one
        --- stderr
        err
        --- exit 0
    "#]]
    .assert_eq(&world.run(&["execs", "output", "web", "1"]).await);
    assert_eq!(world.ok(&["execs", "output", "web", "1", "--from-offset", "2"]).await, "e");
    expect![[r#"
        {"stream":"stderr","offset":0,"next_offset":4,"text":"err\n"}
        --- exit 0
    "#]]
    .assert_eq(&world.run(&["execs", "output", "web", "1", "--stream", "stderr", "--json"]).await);
    let following = world.spawn(&["execs", "output", "web", "1", "--follow", "--from-offset", "0"]);
    let waiting = world.spawn(&["execs", "wait", "web", "1"]);
    child.stdin.take().unwrap().write_all(b"go\n").await.unwrap();
    let followed = following.wait_with_output().await.unwrap();
    assert_eq!((followed.status.code(), followed.stdout.as_slice()), (Some(0), &b"one\ntwo\n"[..]));
    let waited = waiting.wait_with_output().await.unwrap();
    assert_eq!((waited.status.code(), waited.stdout.as_slice()), (Some(5), &b""[..]));
    assert_eq!(child.wait().await.unwrap().code(), Some(5));
    assert_eq!(world.output(&["execs", "wait", "web", "1"]).await.status.code(), Some(5));

    assert_eq!(world.ok(&["exec", "web", "--background", "--", "sleep", "1000"]).await, "2");
    world.ok(&["execs", "kill", "web", "2", "--signal", "INT"]).await;
    assert_eq!(world.output(&["execs", "wait", "web", "2"]).await.status.code(), Some(130));
    assert_eq!(world.output(&["execs", "wait", "web", "99"]).await.status.code(), Some(125));
    let bad = world.run(&["execs", "kill", "web", "1", "--signal", "NOPE"]).await;
    assert!(bad.starts_with("--- stderr\nerror: `signal`: not a signal"), "{bad}");
}

/// What `head -c 2` does to whoever writes to it.
async fn cut(world: &World, arguments: &[&str]) -> std::process::Output {
    let mut child = world.spawn(arguments);
    let mut out = child.stdout.take().unwrap();
    let mut first = [0; 2];
    out.read_exact(&mut first).await.unwrap();
    drop(out);
    child.wait_with_output().await.unwrap()
}

#[tokio::test]
async fn a_command_whose_output_nobody_reads_ends() {
    let world = world().await;
    let cut_yes = cut(&world, &["exec", "web", "--", "yes"]).await;
    assert_eq!((cut_yes.status.code(), cut_yes.stderr.as_slice()), (Some(141), &b""[..]));
    // Also one that does not care.
    let stubborn = "trap '' PIPE; while :; do echo y 2>/dev/null; done";
    assert_eq!(
        cut(&world, &["exec", "web", "--", "sh", "-c", stubborn]).await.status.code(),
        Some(141)
    );
    let list = world.ok(&["execs", "list", "web"]).await;
    let states: Vec<&str> =
        list.lines().skip(1).map(|line| line.split_whitespace().nth(2).unwrap()).collect();
    assert_eq!(states, ["signal", "signal"], "{list}");
    for quiet in [&["completions", "bash"][..], &["openapi"]] {
        let ended = cut(&world, quiet).await;
        assert_eq!(
            (ended.status.code(), ended.stderr.as_slice()),
            (Some(0), &b""[..]),
            "{quiet:?}"
        );
    }
}

#[tokio::test]
async fn an_interrupt_reaches_the_command() {
    let world = world().await;
    let line = "trap 'echo caught; exit 5' INT; echo ready; while :; do read x || sleep 0.01; done";
    let mut child = world.spawn(&["exec", "web", "--", "bash", "-c", line]);
    let mut out = child.stdout.take().unwrap();
    let mut ready = [0; 6];
    out.read_exact(&mut ready).await.unwrap();
    let pid = Pid::from_raw(child.id().unwrap().cast_signed()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let mut rest = String::new();
    out.read_to_string(&mut rest).await.unwrap();
    assert_eq!((rest.as_str(), child.wait().await.unwrap().code()), ("caught\n", Some(5)));
}

#[tokio::test]
async fn a_restart_of_the_daemon_loses_and_repeats_nothing() {
    let mut world = world().await;
    let mut child = world.spawn(&[
        "exec",
        "web",
        "--",
        "sh",
        "-c",
        "echo one; read line; echo two $line; exit 3",
    ]);
    let mut out = child.stdout.take().unwrap();
    let mut one = [0; 4];
    out.read_exact(&mut one).await.unwrap();
    world.stop().await;
    world.start().await;
    child.stdin.take().unwrap().write_all(b"more\n").await.unwrap();
    let output = child.wait_with_output().await.unwrap();
    let mut rest = String::new();
    out.read_to_string(&mut rest).await.unwrap();
    assert_eq!((&one, rest.as_str(), output.status.code()), (b"one\n", "two more\n", Some(3)));
    assert!(String::from_utf8(output.stderr).unwrap().contains("note: connected again"));
}

#[tokio::test]
async fn run_makes_a_sandbox_and_deletes_it() {
    let world = World::new().await;
    expect![[r#"
        b
        --- exit 4
    "#]]
    .assert_eq(&world.run(&["run", "--env", "A=b", "--", "sh", "-c", "echo $A; exit 4"]).await);
    assert_eq!(world.ok(&["sandboxes", "list", "--json"]).await, "[]");
    // What cannot be run leaves nothing either, and what makes no sense makes nothing.
    assert_eq!(world.output(&["run", "--", "/no/such"]).await.status.code(), Some(127));
    assert_eq!(
        world.output(&["run", "--timeout", "-1", "--", "true"]).await.status.code(),
        Some(125)
    );
    assert_eq!(world.ok(&["sandboxes", "list", "--json"]).await, "[]");
    let kept = world.output(&["run", "--keep", "--", "sh", "-c", "exit 3"]).await;
    let note = String::from_utf8(kept.stderr).unwrap();
    let name = note.split('`').nth(1).unwrap();
    assert_eq!((kept.status.code(), note.ends_with("is kept\n")), (Some(3), true), "{note}");
    assert!(world.ok(&["execs", "list", name]).await.contains("exit 3"));
}

#[tokio::test]
async fn terminals_are_listed_read_and_closed_and_a_shell_needs_one() {
    let world = world().await;
    expect![[r#"
        --- stderr
        error: standard input and output are no terminal
        hint: `dormouse exec` runs commands without one
        --- exit 125
    "#]]
    .assert_eq(&world.run(&["shell", "web"]).await);
    assert_eq!(world.ok(&["exec", "web", "--background", "--", "echo", "shown"]).await, "1");
    assert_eq!(world.output(&["execs", "wait", "web", "1"]).await.status.code(), Some(0));
    // The fake host takes every command for a terminal.
    let list = world.ok(&["terminals", "list", "web"]).await;
    assert!(list.lines().nth(1).unwrap().ends_with("80x24  0        echo shown"), "{list}");
    assert_eq!(world.ok(&["terminals", "screen", "web", "1"]).await, "shown");
    world.ok(&["terminals", "close", "web", "1"]).await;
    let none = world.run(&["terminals", "screen", "web", "9"]).await;
    assert!(none.contains("no command has the id `9`"), "{none}");
}
