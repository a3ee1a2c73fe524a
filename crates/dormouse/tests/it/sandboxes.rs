//! Making, listing, changing and deleting; explanations; what is said when something is wrong.

use expect_test::{Expect, expect};

use crate::world::World;

async fn check(world: &World, arguments: &[&str], want: Expect) {
    want.assert_eq(&world.run(arguments).await);
}

#[tokio::test]
async fn the_life_of_a_sandbox() {
    let world = World::new().await;
    check(
        &world,
        &[
            "sandboxes",
            "create",
            "--name",
            "web",
            "--sleep-after-seconds",
            "5",
            "--label",
            "team=a",
        ],
        expect![[r#"
        web
        --- exit 0
    "#]],
    )
    .await;
    check(
        &world,
        &["sandboxes", "list"],
        expect![[r#"
        NAME  ID            STATUS   MEMORY   CREATED
        web   <sandbox-id>  running  512 MiB  <age>
        --- exit 0
    "#]],
    )
    .await;
    check(
        &world,
        &["sandboxes", "get", "web"],
        expect![[r#"
            name        web
            id          <sandbox-id>
            status      running since 2026-11-30T10:15:30Z (<age>)
            awake       something ran in it, until 2026-11-30T10:15:30Z (<age>)
            sleeps      at 2026-11-30T10:15:30Z (<age>), after 5 s of quiet
            how         in memory for 5 min, then on disk
            image       default
            size        1 cpu, 512 MiB
            address     10.0.0.2
            life        1
            created     2026-11-30T10:15:30Z (<age>)
            labels      team=a
            --- exit 0
        "#]],
    )
    .await;
    check(
        &world,
        &["sandboxes", "sleep", "web", "--tier", "disk"],
        expect![[r#"
        --- stderr
        web: sleeping (disk)
        --- exit 0
    "#]],
    )
    .await;
    check(
        &world,
        &["sandboxes", "list", "--status", "sleeping", "--label", "team=a"],
        expect![[r#"
        NAME  ID            STATUS           MEMORY   CREATED
        web   <sandbox-id>  sleeping (disk)  512 MiB  <age>
        --- exit 0
    "#]],
    )
    .await;
    check(
        &world,
        &["sandboxes", "list", "--label", "team=b"],
        expect![[r#"
        NAME  ID  STATUS  MEMORY  CREATED
        --- exit 0
    "#]],
    )
    .await;
    check(
        &world,
        &["why", "web"],
        expect![[r#"
            `web` sleeps on disk since 2026-11-30T10:15:30.123Z; anything that needs it wakes it, at the latest a timer of its own at 2026-11-30T10:15:30.123Z
            slept 1×, woken 0×

            2026-11-30T10:15:30.123Z  created    made
            2026-11-30T10:15:30.123Z  running    its guest runs
            2026-11-30T10:15:30.123Z  slept      asked for
            --- exit 0
        "#]],
    )
    .await;
    check(
        &world,
        &["sandboxes", "update", "web", "--sleep-after-seconds", "never", "--name", "api"],
        expect![[r#"
            name        api
            id          <sandbox-id>
            status      sleeping (disk) since 2026-11-30T10:15:30Z (<age>)
            wakes       for a timer of its own at 2026-11-30T10:15:30Z (<age>), or when it is needed
            sleeps      never by itself
            how         in memory for 5 min, then on disk
            image       default
            size        1 cpu, 512 MiB
            address     10.0.0.2
            life        1
            created     2026-11-30T10:15:30Z (<age>)
            labels      team=a
            --- exit 0
        "#]],
    )
    .await;
    check(
        &world,
        &[
            "sandboxes",
            "update",
            "api",
            "--no-labels",
            "--awake-port",
            "9222",
            "--sleep-notice-ms",
            "2000",
            "--connection-idle-seconds",
            "60",
            "--delete-after-idle-ms",
            "3600000",
        ],
        expect![[r#"
            name        api
            id          <sandbox-id>
            status      sleeping (disk) since 2026-11-30T10:15:30Z (<age>)
            wakes       for a timer of its own at 2026-11-30T10:15:30Z (<age>), or when it is needed
            sleeps      never by itself
            how         in memory for 5 min, then on disk
            notice      2 s before it sleeps
            connections closed after 60 s without a byte
            deleted     when it has slept for 60 min
            awake ports 9222 (0 connections)
            image       default
            size        1 cpu, 512 MiB
            address     10.0.0.2
            life        1
            created     2026-11-30T10:15:30Z (<age>)
            --- exit 0
        "#]],
    )
    .await;
    let cleared = world.run(&["sandboxes", "update", "api", "--no-awake-ports"]).await;
    assert!(!cleared.contains("awake ports") && cleared.contains("notice"), "{cleared}");
    check(
        &world,
        &["fork", "api", "--name", "api2"],
        expect![[r#"
        api2
        --- exit 0
    "#]],
    )
    .await;
    check(
        &world,
        &["sandboxes", "restart", "api"],
        expect![[r#"
        --- stderr
        api: running
        --- exit 0
    "#]],
    )
    .await;
    check(
        &world,
        &["events", "api2"],
        expect![[r#"
        2026-11-30T10:15:30.123Z  forked     made
        2026-11-30T10:15:30.123Z  running    its guest runs
        --- exit 0
    "#]],
    )
    .await;
    check(
        &world,
        &["logs", "api"],
        expect![[r#"
        Linux version 6.12
        --- exit 0
    "#]],
    )
    .await;
    check(
        &world,
        &["logs", "api", "--daemon"],
        expect![[r#"
        sandbox moved
        --- exit 0
    "#]],
    )
    .await;
    check(
        &world,
        &["sandboxes", "delete", "api", "nobody", "api2"],
        expect![[r#"
        --- stderr
        deleted api
        error: no sandbox has the id or name `nobody`
        hint: `GET /v1/sandboxes` or `dormouse sandboxes list` shows what there is
        deleted api2
        --- exit 1
    "#]],
    )
    .await;
    check(
        &world,
        &["sandboxes", "list"],
        expect![[r#"
        NAME  ID  STATUS  MEMORY  CREATED
        --- exit 0
    "#]],
    )
    .await;
}

#[tokio::test]
async fn an_answer_of_an_earlier_request_is_said_to_be_one() {
    let world = World::new().await;
    let create = ["sandboxes", "create", "--name", "web", "--idempotency-key", "k"];
    world.ok(&create).await;
    world.ok(&["sandboxes", "delete", "web"]).await;
    check(
        &world,
        &create,
        expect![[r#"
        web
        --- stderr
        note: made by an earlier request with this key; it may have been changed or deleted since
        --- exit 0
    "#]],
    )
    .await;
    assert_eq!(world.ok(&["--json", "sandboxes", "list"]).await, "[]");
}

#[tokio::test]
async fn what_is_wrong_is_said_with_what_to_do() {
    let mut world = World::new().await;
    world.ok(&["sandboxes", "create", "--name", "web"]).await;
    check(
        &world,
        &["sandboxes", "create", "--name", "web"],
        expect![[r#"
        --- stderr
        error: the name `web` is taken
        hint: choose another name, or delete or rename the sandbox that has it
        --- exit 1
    "#]],
    )
    .await;
    check(
        &world,
        &["sandboxes", "create", "--name", "Web"],
        expect![[r#"
        --- stderr
        error: `name`: not a name
        hint: 1-63 characters of a-z, 0-9 and `-`, not at the ends
        --- exit 1
    "#]],
    )
    .await;
    check(
        &world,
        &["sandboxes", "create", "--memory-mib", "1"],
        expect![[r#"
        --- stderr
        error: `memory_mib`: 1 is out of range
        hint: from 256 to 16384
        --- exit 1
    "#]],
    )
    .await;
    check(
        &world,
        &["sandboxes", "get", "nobody"],
        expect![[r#"
        --- stderr
        error: no sandbox has the id or name `nobody`
        hint: `GET /v1/sandboxes` or `dormouse sandboxes list` shows what there is
        --- exit 1
    "#]],
    )
    .await;
    check(&world, &["sandboxes", "get", "nobody", "--json"], expect![[r#"
        --- stderr
        {"error":"no sandbox has the id or name `nobody`","code":"not_found","hint":"`GET /v1/sandboxes` or `dormouse sandboxes list` shows what there is","retryable":false}
        --- exit 1
    "#]]).await;
    check(
        &world,
        &["sandboxes", "update", "web"],
        expect![[r#"
        --- stderr
        error: there is nothing to change
        hint: such as `--sleep-after-seconds 300`
        --- exit 2
    "#]],
    )
    .await;
    check(&world, &["sandboxes", "update", "web", "--sleep-after-seconds", "soon"], expect![[r#"
        --- stderr
        error: invalid value 'soon' for '--sleep-after-seconds <SECONDS|never>': a whole number or `never`

        For more information, try '--help'.
        --- exit 2
    "#]]).await;
    check(
        &world,
        &["link", "web", "0"],
        expect![[r#"
            --- stderr
            error: invalid value '0' for '<PORT>': a port is a whole number from 1 to 65535

            For more information, try '--help'.
            --- exit 2
        "#]],
    )
    .await;
    check(
        &world,
        &["files", "ls", "web"],
        expect![[r#"
        --- stderr
        error: invalid value 'web' for '<REMOTE>': not `NAME:/PATH` (the path is absolute)

        For more information, try '--help'.
        --- exit 2
    "#]],
    )
    .await;
    check(
        &world,
        &["exec", "web"],
        expect![[r#"
            --- stderr
            error: the following required arguments were not provided:
              <COMMAND>...

            Usage: dormouse exec --data <DIR> <NAME> -- <COMMAND>...

            For more information, try '--help'.
            --- exit 125
        "#]],
    )
    .await;
    check(
        &world,
        &["--url", "http://127.0.0.1:1", "sandboxes", "list"],
        expect![[r#"
        --- stderr
        error: a token is needed with a URL
        hint: set `DORMOUSE_TOKEN`; the first one is in `admin.token` in the daemon's data folder
        --- exit 2
    "#]],
    )
    .await;
    check(
        &world,
        &["--url", "ftp://x", "--token", "x", "sandboxes", "list"],
        expect![[r#"
        --- stderr
        error: `ftp://x` is not a URL of a daemon
        hint: such as `http://localhost:8420` or `https://dormouse.example`
        --- exit 2
    "#]],
    )
    .await;
    world.stop().await;
    check(&world, &["sandboxes", "list"], expect![[r#"
        --- stderr
        error: cannot reach the daemon at <data>/dormouse.sock: No such file or directory (os error 2)
        hint: is `dormouse serve` running? `--data` or `DORMOUSE_DATA` says where its data folder is
        --- exit 1
    "#]]).await;
}

#[tokio::test]
async fn a_link_prints_the_url_and_nothing_else() {
    let world = World::new().await;
    world.ok(&["sandboxes", "create", "--name", "web"]).await;
    let url = world.ok(&["link", "web", "8000"]).await;
    let label = url.strip_prefix("http://").unwrap().strip_suffix(".box.localhost:8420/").unwrap();
    let parts: Vec<&str> = label.split('-').collect();
    assert_eq!((parts[0].len(), parts[1].len(), parts[2]), (12, 20, "8000"), "{url}");
}

#[tokio::test]
async fn json_is_what_the_interface_says() {
    let world = World::new().await;
    let made: serde_json::Value =
        serde_json::from_str(&world.ok(&["--json", "sandboxes", "create", "--name", "web"]).await)
            .unwrap();
    assert_eq!(made["status"], "running");
    let list: serde_json::Value =
        serde_json::from_str(&world.ok(&["sandboxes", "list", "--json"]).await).unwrap();
    assert_eq!(list[0]["id"], made["id"]);
    let why: serde_json::Value =
        serde_json::from_str(&world.ok(&["why", "web", "--json"]).await).unwrap();
    assert_eq!(why["timeline"][0]["type"], "sandbox.created");
    let events = world.ok(&["events", "web", "--json"]).await;
    assert_eq!(
        events.lines().filter(|line| serde_json::from_str::<api::Event>(line).is_ok()).count(),
        2
    );
}

#[tokio::test]
async fn over_the_network_a_token_is_needed() {
    let world = World::new().await;
    let url = format!("http://{}", world.server.as_ref().unwrap().address());
    let token = std::fs::read_to_string(world.data.path().join("admin.token")).unwrap();
    world
        .ok(&["--url", &url, "--token", token.trim(), "sandboxes", "create", "--name", "web"])
        .await;
    let output = world
        .ok(&["--url", &url, "--token", token.trim(), "exec", "web", "--", "echo", "hello"])
        .await;
    assert_eq!(output, "hello");
    check(&world, &["--url", &url, "--token", "wrong", "sandboxes", "list"], expect![[r#"
        --- stderr
        error: the token is not known
        hint: send `Authorization: Bearer <token>`; the first token is in `admin.token` in the data folder
        --- exit 1
    "#]]).await;
}

#[tokio::test]
async fn followed_events_go_on_over_a_restart_of_the_daemon_and_end_with_the_sandbox() {
    use tokio::io::{AsyncBufReadExt, BufReader};
    let mut world = World::new().await;
    world.ok(&["sandboxes", "create", "--name", "web"]).await;
    let mut child = world.spawn(&["events", "web", "--follow"]);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = async || lines.next_line().await.unwrap();
    assert!(next().await.unwrap().contains("created"));
    assert!(next().await.unwrap().contains("running"));
    world.stop().await;
    world.start().await;
    world.ok(&["sandboxes", "sleep", "web"]).await;
    assert!(next().await.unwrap().contains("slept"));
    world.ok(&["sandboxes", "delete", "web"]).await;
    assert!(next().await.unwrap().contains("deleted"));
    assert_eq!(next().await, None);
    assert!(child.wait().await.unwrap().success());
}

#[tokio::test]
async fn the_document_and_completions_need_no_daemon() {
    let mut world = World::new().await;
    world.stop().await;
    assert_eq!(world.ok(&["openapi"]).await, control::openapi().trim_end());
    assert!(world.ok(&["completions", "bash"]).await.contains("_dormouse"));
    let help = world.ok(&["--help"]).await;
    assert!(help.contains("Exit codes:") && help.contains("the command's own"), "{help}");
}
