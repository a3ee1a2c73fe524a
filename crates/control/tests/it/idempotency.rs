//! One request, one sandbox.

use std::sync::atomic::Ordering;

use api::Code;
use api::host::Host;
use bytes::Bytes;
use http_body_util::Full;

use crate::client::{Answer, World, send_over};

fn request(world: &World, path: &str, key: &str, body: &str) -> hyper::Request<Full<Bytes>> {
    let request = world.request("POST", path).header("idempotency-key", key);
    request.body(Full::new(Bytes::from(body.to_owned()))).unwrap()
}

async fn create(world: &World, key: &str, body: &str) -> Answer {
    world.send(request(world, "/v1/sandboxes", key, body)).await
}

#[tokio::test]
async fn the_same_request_gets_the_same_answer() {
    let mut world = World::new().await;
    let first = create(&world, "k1", r#"{"name": "web", "cpus": 1}"#).await;
    assert_eq!((first.status, first.header("idempotency-replayed")), (201, None));
    // Laid out otherwise, it is the same request.
    let again = create(&world, "k1", r#"{ "cpus": 1.0, "name": "web" }"#).await;
    assert_eq!((again.status, again.header("idempotency-replayed")), (201, Some("true")));
    assert_eq!(first.value(), again.value());
    world.restart().await;
    assert_eq!(create(&world, "k1", r#"{"name": "web", "cpus": 1}"#).await.value(), first.value());
    assert_eq!(world.fake.makes.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn another_request_with_the_same_key_is_refused() {
    let world = World::new().await;
    create(&world, "k1", r#"{"name": "web"}"#).await;
    let want = "409 idempotency_mismatch: the idempotency key belongs to another request";
    assert_eq!(create(&world, "k1", r#"{"name": "web2"}"#).await.error(), want);
    let fork =
        world.send(request(&world, "/v1/sandboxes/web/fork", "k1", r#"{"name": "web"}"#)).await;
    assert_eq!(fork.error(), want);
    let bad = create(&world, "", "{}").await.error();
    assert!(bad.starts_with("400 invalid_request Idempotency-Key"), "{bad}");
}

#[tokio::test]
async fn forks_too() {
    let world = World::new().await;
    world.sandbox("web").await;
    let fork = async || {
        world.send(request(&world, "/v1/sandboxes/web/fork", "f1", r#"{"name": "web2"}"#)).await
    };
    let (first, again) = (fork().await, fork().await);
    assert_eq!((first.status, again.status), (201, 201));
    assert_eq!(first.value(), again.value());
    assert_eq!(world.fake.makes.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_repeated_request_waits_for_the_first() {
    let world = World::new().await;
    world.fake.gate.send_replace(false);
    let mut asked = Vec::new();
    for _ in 0..5 {
        let (connection, request) =
            (world.connect().await, request(&world, "/v1/sandboxes", "k1", "{}"));
        asked.push(tokio::spawn(async move {
            Answer::read(send_over(connection, request).await).await
        }));
    }
    world.fake.waiting.subscribe().wait_for(|waiting| *waiting == 1).await.unwrap();
    world.fake.gate.send_replace(true);
    let mut ids = std::collections::BTreeSet::new();
    for answer in asked {
        let answer = answer.await.unwrap();
        assert_eq!(answer.status, 201);
        ids.insert(answer.value()["id"].to_string());
    }
    assert_eq!((ids.len(), world.fake.makes.load(Ordering::SeqCst)), (1, 1));
}

#[tokio::test]
async fn a_failed_request_may_be_made_again() {
    let world = World::new().await;
    *world.fake.fail_make.lock().unwrap() =
        Some(api::ApiError::new(Code::NoCapacity, "the host is full"));
    assert_eq!(create(&world, "k1", r#"{"name": "web"}"#).await.status, 503);
    assert_eq!(create(&world, "k1", r#"{"name": "web"}"#).await.status, 201);
}

#[tokio::test]
async fn after_deletion_the_answer_is_still_the_old_one() {
    let world = World::new().await;
    let first = create(&world, "k1", r#"{"name": "web"}"#).await;
    world.call("DELETE", "/v1/sandboxes/web", "").await;
    // A late retry of a request that was answered must not make a sandbox that nobody expects.
    assert_eq!(create(&world, "k1", r#"{"name": "web"}"#).await.value(), first.value());
    assert_eq!(world.fake.list().await.len(), 0);
}

/// The daemon dies after the host was told and before the answer was written down.
#[tokio::test]
async fn a_crash_in_between_makes_one_sandbox() {
    for host_had_begun in [true, false] {
        let mut world = World::new().await;
        world.fake.gate.send_replace(false);
        let (connection, asked) =
            (world.connect().await, request(&world, "/v1/sandboxes", "k1", r#"{"name": "web"}"#));
        let asked = tokio::spawn(send_over(connection, asked));
        world.fake.waiting.subscribe().wait_for(|waiting| *waiting == 1).await.unwrap();
        let copy = left_by_a_kill(&world);
        asked.abort();
        if host_had_begun {
            // The host goes on with what it was told, and has it in the end.
            world.fake.gate.send_replace(true);
            world.fake.waiting.subscribe().wait_for(|waiting| *waiting == 0).await.unwrap();
            let mut list = world.fake.list().await;
            while list.is_empty() {
                tokio::task::yield_now().await;
                list = world.fake.list().await;
            }
            world.server.take().unwrap().stop().await;
        } else {
            let failed = api::ApiError::new(Code::Internal, "the process is gone");
            *world.fake.fail_make.lock().unwrap() = Some(failed);
            world.fake.gate.send_replace(true);
            world.server.take().unwrap().stop().await;
            assert_eq!(world.fake.list().await.len(), 0);
        }
        start_over(&mut world, copy).await;
        let again = create(&world, "k1", r#"{"name": "web"}"#).await;
        assert_eq!(again.status, 201, "{:?}", again.body);
        let all = world.fake.list().await;
        assert_eq!(all.len(), 1);
        assert_eq!(again.value()["id"], all[0].sandbox.id.as_str());
        assert_eq!(create(&world, "k1", r#"{"name": "web"}"#).await.value(), again.value());
    }
}

/// What a killed daemon leaves: a copy of its folder at this moment.
fn left_by_a_kill(world: &World) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(world.data.path()).unwrap() {
        let file = file.unwrap();
        if file.file_type().unwrap().is_file() {
            std::fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
        }
    }
    copy
}

async fn start_over(world: &mut World, data: tempfile::TempDir) {
    world.data = data;
    let server =
        crate::client::start(&world.fake, &world.data, control::EdgeLimits::default()).await;
    world.address = server.address();
    world.server = Some(server);
}

/// The daemon dies when the host has all forks and nobody was told; then one is deleted, and the request comes again.
#[tokio::test]
async fn s22_a_late_repetition_deletes_no_forks_that_are_in_use() {
    let mut world = World::new().await;
    world.sandbox("web").await;
    world.fake.gate.send_replace(false);
    let (path, body) = ("/v1/sandboxes/web/fork", r#"{"name": "try", "count": 3}"#);
    let (connection, asked) = (world.connect().await, request(&world, path, "f1", body));
    let asked = tokio::spawn(send_over(connection, asked));
    world.fake.waiting.subscribe().wait_for(|waiting| *waiting == 1).await.unwrap();
    let copy = left_by_a_kill(&world);
    asked.abort();
    world.fake.gate.send_replace(true);
    while world.fake.list().await.len() < 4 {
        tokio::task::yield_now().await;
    }
    world.server.take().unwrap().stop().await;
    start_over(&mut world, copy).await;

    let names = |answer: &Answer| -> Vec<String> {
        let forks = answer.value()["forks"].as_array().expect("a list").clone();
        forks.iter().filter_map(|fork| fork["name"].as_str().map(str::to_owned)).collect()
    };
    world.call("DELETE", "/v1/sandboxes/try-2", "").await;
    for _ in 0..2 {
        let again = world.send(request(&world, path, "f1", body)).await;
        assert_eq!(again.status, 201, "{:?}", again.body);
        assert_eq!(names(&again), ["try-1", "try-3"]);
        assert_eq!(world.fake.list().await.len(), 3);
    }
    assert_eq!(world.fake.makes.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn several_forks_are_one_request() {
    let mut world = World::new().await;
    world.sandbox("web").await;
    let body = r#"{"name": "try", "count": 3}"#;
    let path = "/v1/sandboxes/web/fork";
    let first = world.send(request(&world, path, "f1", body)).await;
    assert_eq!(first.status, 201);
    let names: Vec<_> = first.value()["forks"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|fork| fork["name"].as_str().expect("a name").to_owned())
        .collect();
    assert_eq!(names, ["try-1", "try-2", "try-3"]);
    let list = world.call("GET", "/v1/sandboxes", "").await.value();
    let listed = list["sandboxes"].as_array().expect("a list").iter();
    let listed: Vec<_> = listed.map(|one| one["name"].as_str().expect("a name")).collect();
    assert_eq!(listed, ["web", "try-1", "try-2", "try-3"], "in the order in which they were made");
    let again = world.send(request(&world, path, "f1", body)).await;
    assert_eq!((again.status, again.header("idempotency-replayed")), (201, Some("true")));
    assert_eq!(again.value(), first.value());
    world.restart().await;
    assert_eq!(world.send(request(&world, path, "f1", body)).await.value(), first.value());
    assert_eq!(world.fake.makes.load(Ordering::SeqCst), 4);
    let other = world.send(request(&world, path, "f1", r#"{"name": "try", "count": 2}"#)).await;
    assert!(other.error().starts_with("409 idempotency_mismatch"), "{}", other.error());
    // One name is taken: none is made, and what was free before is free again.
    let taken = world.send(request(&world, path, "f2", r#"{"name": "try", "count": 4}"#)).await;
    assert_eq!(taken.error().split(':').next(), Some("409 name_taken name"));
    assert_eq!(world.fake.makes.load(Ordering::SeqCst), 4);
    for (count, name) in [(0, "x"), (17, "x"), (10, &"x".repeat(61))] {
        let body = format!(r#"{{"name": "{name}", "count": {count}}}"#);
        let refused = world.send(request(&world, path, "f3", &body)).await;
        assert_eq!(refused.status, 400, "{body}");
    }
    let free = world.send(request(&world, path, "f4", r#"{"name": "try-4"}"#)).await;
    assert_eq!((free.status, free.value()["name"].as_str()), (201, Some("try-4")));
}
