//! Copying like `cp -r`, in both directions.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use expect_test::expect;

use crate::world::World;

async fn world() -> World {
    let world = World::new().await;
    world.ok(&["sandboxes", "create", "--name", "web"]).await;
    let here = world.local.path();
    fs::create_dir_all(here.join("counter/deep")).unwrap();
    fs::write(here.join("counter/server.py"), "print(1)\n").unwrap();
    fs::set_permissions(here.join("counter/server.py"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(here.join("counter/deep/ü b"), "x").unwrap();
    symlink("deep", here.join("counter/link")).unwrap();
    world
}

#[tokio::test]
async fn a_folder_lands_in_a_folder_under_its_own_name() {
    let world = world().await;
    world.ok(&["files", "put", "./counter", "web:/work"]).await;
    assert_eq!(world.ok(&["files", "cat", "web:/work/counter/server.py"]).await, "print(1)");
    assert_eq!(world.ok(&["files", "cat", "web:/work/counter/link/ü b"]).await, "x");
    assert!(
        world.ok(&["files", "stat", "web:/work/counter/server.py"]).await.starts_with("- 0755")
    );
    // Where nothing is, it becomes that.
    world.ok(&["files", "put", "counter/", "web:/work/new/name"]).await;
    assert_eq!(world.ok(&["files", "cat", "web:/work/new/name/server.py"]).await, "print(1)");
}

#[tokio::test]
async fn a_file_lands_in_a_folder_or_as_what_was_named() {
    let world = world().await;
    for (target, lands) in [
        ("web:/work", "web:/work/server.py"),
        ("web:/work/s.py", "web:/work/s.py"),
        ("web:/work/none/", "web:/work/none/server.py"),
    ] {
        world.ok(&["files", "put", "counter/server.py", target]).await;
        assert_eq!(world.ok(&["files", "cat", lands]).await, "print(1)", "{target}");
    }
    let fed = world.fed(&["files", "put", "-", "web:/work/stdin"], b"piped").await;
    assert!(fed.status.success());
    assert_eq!(world.ok(&["files", "cat", "web:/work/stdin"]).await, "piped");
}

#[tokio::test]
async fn folders_and_files_come_back() {
    let world = world().await;
    let here = world.local.path();
    world.ok(&["files", "put", "counter", "web:/work"]).await;
    fs::create_dir(here.join("out")).unwrap();
    world.ok(&["files", "get", "web:/work/counter", "out"]).await;
    assert_eq!(fs::read(here.join("out/counter/deep/ü b")).unwrap(), b"x");
    assert_eq!(
        fs::metadata(here.join("out/counter/server.py")).unwrap().permissions().mode() & 0o777,
        0o755
    );
    assert_eq!(fs::read_link(here.join("out/counter/link")).unwrap().to_str(), Some("deep"));
    world.ok(&["files", "get", "web:/work/counter", "fresh"]).await;
    assert!(here.join("fresh/server.py").exists());
    world.ok(&["files", "get", "web:/work/counter/server.py"]).await;
    assert_eq!(fs::read(here.join("server.py")).unwrap(), b"print(1)\n");
    assert_eq!(world.ok(&["files", "get", "web:/work/counter/server.py", "-"]).await, "print(1)");
}

#[tokio::test]
async fn what_is_there_is_written_into_as_cp_does() {
    let world = world().await;
    let here = world.local.path();
    world.ok(&["files", "put", "counter/server.py", "web:/work/s.py"]).await;
    let get = async |to: &str| world.ok(&["files", "get", "web:/work/s.py", to]).await;
    // A device stays one.
    get("/dev/null").await;
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
    // What is written into a pipe comes out of it.
    rustix::fs::mkfifoat(rustix::fs::CWD, here.join("pipe"), 0o600.into()).unwrap();
    let pipe = here.join("pipe");
    let reader = tokio::task::spawn_blocking(move || fs::read(pipe).unwrap());
    get("pipe").await;
    assert_eq!(reader.await.unwrap(), b"print(1)\n");
    assert!(!fs::metadata(here.join("pipe")).unwrap().is_file());
    // A link stays one, and what it leads to is written.
    fs::write(here.join("real"), "old").unwrap();
    symlink("real", here.join("link")).unwrap();
    get("link").await;
    assert_eq!(fs::read_link(here.join("link")).unwrap().to_str(), Some("real"));
    assert_eq!(fs::read(here.join("real")).unwrap(), b"print(1)\n");
    symlink("absent", here.join("dangling")).unwrap();
    let refused = world.run(&["files", "get", "web:/work/s.py", "dangling"]).await;
    assert!(refused.contains("`dangling` is a link that leads nowhere"), "{refused}");
    assert!(!here.join("absent").exists());
}

#[tokio::test]
async fn what_comes_back_makes_nobody_somebody_else() {
    let world = world().await;
    let here = world.local.path();
    world.ok(&["files", "put", "counter", "web:/work"]).await;
    world.ok(&["exec", "web", "--", "chmod", "6755", "/work/counter/server.py"]).await;
    world.ok(&["exec", "web", "--", "chmod", "3777", "/work/counter/deep"]).await;
    world.ok(&["files", "get", "web:/work/counter/server.py", "alone"]).await;
    world.ok(&["files", "get", "web:/work/counter", "fresh"]).await;
    let mode = |path: &str| fs::metadata(here.join(path)).unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode("alone"), mode("fresh/server.py"), mode("fresh/deep")), (0o755, 0o755, 0o777));
}

#[tokio::test]
async fn listing_moving_and_removing() {
    let world = world().await;
    world.ok(&["files", "put", "counter/server.py", "web:/work/a"]).await;
    world.ok(&["files", "mkdir", "web:/work/d/e"]).await;
    world.ok(&["files", "mv", "web:/work/a", "web:/work/d/b"]).await;
    world.ok(&["files", "mv", "web:/work/d/b", "/work/d/c"]).await;
    let list = world.ok(&["files", "ls", "web:/work/d"]).await;
    let names: Vec<&str> = list.lines().filter_map(|line| line.split_whitespace().last()).collect();
    assert_eq!(names, ["/work/d/c", "/work/d/e"]);
    world.ok(&["files", "rm", "web:/work/d"]).await;
    expect![[r#"
        --- stderr
        error: No such file or directory (os error 2)
        --- exit 1
    "#]]
    .assert_eq(&world.run(&["files", "cat", "web:/work/d/c"]).await);
    expect![[r#"
        --- stderr
        error: `nothing`: No such file or directory (os error 2)
        --- exit 1
    "#]]
    .assert_eq(&world.run(&["files", "put", "nothing", "web:/work"]).await);
    expect![[r#"
        --- stderr
        error: no sandbox has the id or name `nobody`
        hint: `GET /v1/sandboxes` or `dormouse sandboxes list` shows what there is
        --- exit 1
    "#]]
    .assert_eq(&world.run(&["files", "put", "counter", "nobody:/work"]).await);
    expect![[r#"
        --- stderr
        error: files move within one sandbox
        hint: `dormouse files get` and `put` copy between sandboxes
        --- exit 2
    "#]]
    .assert_eq(&world.run(&["files", "mv", "web:/a", "api:/a"]).await);
    expect![[r#"
        --- stderr
        error: `path`: contains `..`
        hint: an absolute path in the sandbox without `..`, such as `/work/file`
        --- exit 1
    "#]]
    .assert_eq(&world.run(&["files", "get", "web:/work/../../etc/passwd"]).await);
}
