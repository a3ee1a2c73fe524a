//! Files and trees: any bytes, any size, whole or not at all.

use std::convert::Infallible;

use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::client::World;

#[tokio::test]
async fn files_are_written_read_listed_moved_and_removed() {
    let world = World::new().await;
    world.sandbox("web").await;
    let at = |path: &str| format!("/v1/sandboxes/web/files{path}");
    let bytes: Bytes = (0..=255).collect::<Vec<u8>>().into();
    let written =
        world.call("PUT", &at("?path=/work/a%20b/c&mode=0755"), bytes.clone()).await.value();
    assert_eq!(
        (&written["size"], &written["mode"], &written["kind"]),
        (&256.into(), &0o755.into(), &"file".into())
    );
    let read = world.call("GET", &at("?path=/work/a%20b/c"), "").await;
    assert_eq!((read.status, &read.body), (200, &bytes));
    assert_eq!(
        (read.header("dormouse-file-size"), read.header("dormouse-file-mode")),
        (Some("256"), Some("0755"))
    );
    let part = world.call("GET", &at("?path=/work/a%20b/c&offset=250&length=3"), "").await;
    assert_eq!(part.body, bytes.slice(250..253));
    assert_eq!(
        world.call("GET", &at("/stat?path=/work/a%20b"), "").await.value()["kind"],
        "directory"
    );
    assert_eq!(world.call("POST", &at("/mkdir"), r#"{"path": "/work/d"}"#).await.status, 200);
    let moved = world
        .call("POST", &at("/move"), r#"{"from": "/work/a b/c", "to": "/work/d/e"}"#)
        .await
        .value();
    assert_eq!(moved["path"], "/work/d/e");
    let list = world.call("GET", &at("/list?path=/work"), "").await.value();
    let names: Vec<&str> = list["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| file["path"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["/work/a b", "/work/d"]);
    assert_eq!(world.call("DELETE", &at("?path=/work/d"), "").await.status, 204);
    assert!(
        world.call("GET", &at("?path=/work/d/e"), "").await.error().starts_with("404 not_found")
    );
    assert!(
        world
            .call("GET", &at("/list?path=/work/none"), "")
            .await
            .error()
            .starts_with("404 not_found")
    );
}

#[tokio::test]
async fn trees_go_in_and_come_out_as_they_were() {
    let world = World::new().await;
    world.sandbox("web").await;
    let local = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(local.path().join("a/b")).unwrap();
    std::fs::write(local.path().join("a/b/c"), "deep").unwrap();
    let tar = std::process::Command::new("tar")
        .args(["-c", "-C"])
        .arg(local.path())
        .arg(".")
        .output()
        .unwrap();
    let put = world.call("PUT", "/v1/sandboxes/web/tree?path=/work/in", tar.stdout).await;
    assert_eq!(put.status, 204, "{:?}", put.body);
    let read = world.call("GET", "/v1/sandboxes/web/files?path=/work/in/a/b/c", "").await;
    assert_eq!(read.body, "deep");
    let out = world.call("GET", "/v1/sandboxes/web/tree?path=/work/in", "").await;
    assert_eq!(out.header("content-type"), Some("application/x-tar"));
    let file = local.path().join("out.tar");
    std::fs::write(&file, &out.body).unwrap();
    let list = std::process::Command::new("tar").arg("-tf").arg(file).output().unwrap();
    assert!(String::from_utf8(list.stdout).unwrap().lines().any(|line| line == "./a/b/c"));
    let bad = world
        .call("PUT", "/v1/sandboxes/web/tree?path=/work/in", "no tar at all".repeat(100))
        .await;
    assert_eq!(bad.error(), "400 invalid_request body: the body is no tar stream");
}

/// Far more than anything here may hold: counted on the way, not kept.
#[tokio::test]
async fn big_files_pass_through() {
    const PIECES: usize = 1024;
    const PIECE: usize = 64 * 1024;
    let world = World::new().await;
    world.sandbox("web").await;
    let piece = Bytes::from(vec![7; PIECE]);
    let pieces = futures_util::stream::iter(
        (0..PIECES).map(move |_| Ok::<_, Infallible>(Frame::data(piece.clone()))),
    );
    let request = world
        .request("PUT", "/v1/sandboxes/web/files?path=/work/big")
        .body(StreamBody::new(pieces))
        .unwrap();
    let written = world.send(request).await;
    assert_eq!(written.value()["size"], PIECES * PIECE);
    let request = world.request("GET", "/v1/sandboxes/web/files?path=/work/big");
    let mut body =
        world.open(request.body(http_body_util::Empty::<Bytes>::new()).unwrap()).await.into_body();
    let mut read = 0;
    while let Some(frame) = body.frame().await {
        let bytes = frame.unwrap().into_data().unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7));
        read += bytes.len();
    }
    assert_eq!(read, PIECES * PIECE);
}

#[tokio::test]
async fn a_file_that_breaks_off_leaves_the_old_one() {
    let world = World::new().await;
    world.sandbox("web").await;
    let path = "/v1/sandboxes/web/files?path=/work/a";
    world.call("PUT", path, "old").await;
    let mut stream = world.connect().await;
    let head = format!(
        "PUT {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\ncontent-length: 100\r\n\r\nhalf",
        world.token
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    // The server has dealt with it when it closes.
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).await.unwrap();
    assert_eq!(world.call("GET", path, "").await.body, "old");
    let list = world.call("GET", "/v1/sandboxes/web/files/list?path=/work", "").await.value();
    assert_eq!(list["files"].as_array().unwrap().len(), 1, "{list}");
}
