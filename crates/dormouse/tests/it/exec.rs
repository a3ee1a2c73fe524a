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
        --- exit 1
    "#]]
    .assert_eq(&run(&["/no/such/program"]).await);
    expect![[r#"
        --- stderr
        error: no sandbox has the id or name `nobody`
        hint: `GET /v1/sandboxes` or `dormouse sandboxes list` shows what there is
        --- exit 1
    "#]]
    .assert_eq(&world.run(&["exec", "nobody", "--", "true"]).await);
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
}
