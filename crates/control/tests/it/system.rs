//! The service itself: figures, bills, emptying the host; and ports forwarded as bytes.

use std::sync::atomic::Ordering;

use api::{ApiError, Code};
use bytes::Bytes;
use http_body_util::{Empty, Full};
use hyper::Request;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::client::World;

fn value<'a>(text: &'a str, line: &str) -> &'a str {
    let found = text.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("no `{line}` in\n{text}"))
}

#[tokio::test]
async fn figures_are_counted_from_what_happened_and_need_a_token() {
    let world = World::new().await;
    world.sandbox("web").await;
    world.sandbox("api").await;
    world.call("POST", "/v1/sandboxes/web/sleep", r#"{"tier": "disk"}"#).await;
    world.call("GET", "/v1/sandboxes/none", "").await;
    let host = world.link("web", 1).await;
    let request = Request::builder().uri("/").header("host", host).body(Empty::<Bytes>::new());
    assert_eq!(world.send(request.unwrap()).await.status, 502);

    let nobody = Request::builder().uri("/metrics").header("host", "localhost");
    let nobody = world.send(nobody.body(Full::new(Bytes::new())).unwrap()).await;
    assert_eq!(nobody.status, 401);

    let wakes = world.fake.wakes(&world.fake.ids()[0]) + world.fake.wakes(&world.fake.ids()[1]);
    let answer = world.call("GET", "/metrics", "").await;
    assert_eq!(answer.status, 200);
    assert!(answer.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    let text = String::from_utf8(answer.body.to_vec()).unwrap();
    assert!(text.ends_with("# EOF\n"), "{text}");
    for (line, want) in [
        (r#"dormouse_sandboxes{status="running",tier=""}"#, "2"),
        (r#"dormouse_sandboxes{status="sleeping",tier="disk"}"#, "0"),
        (r#"dormouse_starts_total{order="create"}"#, "2"),
        (r#"dormouse_errors_total{face="api",code="not_found"}"#, "1"),
        (r#"dormouse_errors_total{face="api",code="unauthorized"}"#, "1"),
        (r#"dormouse_errors_total{face="edge",code="port_closed"}"#, "1"),
        (r#"dormouse_answers_total{face="api",status="201"}"#, "2"),
        ("dormouse_edge_answer_seconds_count", "1"),
        ("dormouse_awake_seconds_total", "3.0"),
        ("dormouse_state_bytes", "20"),
    ] {
        assert_eq!(value(&text, line), want, "{line}\n{text}");
    }
    let after = world.fake.wakes(&world.fake.ids()[0]) + world.fake.wakes(&world.fake.ids()[1]);
    assert_eq!(wakes, after, "reading woke something");
}

#[tokio::test]
async fn s23_what_a_deleted_sandbox_had_used_stays_in_the_sum() {
    let mut world = World::new().await;
    world.sandbox("web").await;
    world.sandbox("api").await;
    let one = world.call("GET", "/v1/sandboxes/web/usage", "").await.value();
    assert_eq!((&one["name"], &one["usage"]["awake_seconds"]), (&"web".into(), &1.5.into()));
    world.call("DELETE", "/v1/sandboxes/web", "").await;
    // As durable as the deletion.
    world.restart().await;
    let all = world.call("GET", "/v1/usage", "").await.value();
    assert_eq!(all["sandboxes"].as_array().unwrap().len(), 1);
    assert_eq!(all["sandboxes"][0]["name"], "api");
    assert_eq!(all["deleted"]["awake_seconds"], 1.5);
    assert_eq!(all["total"]["awake_seconds"], 3.0);
    assert_eq!(all["total"]["state_bytes"], 10, "what was deleted keeps nothing");
}

#[tokio::test]
async fn s23_boxes_are_told_with_their_names() {
    let world = World::new().await;
    world.sandbox("web").await;
    let mut ids = Vec::new();
    for spec in [serde_json::json!({ "name": "Refunds, mended" }), serde_json::json!({})] {
        let started = world.call("POST", "/v1/boxes", spec.to_string()).await.value();
        ids.push(started["id"].clone());
    }
    let all = world.call("GET", "/v1/usage", "").await.value();
    let told = all["sandboxes"].as_array().unwrap().iter();
    let told: Vec<_> = told.map(|one| (&one["name"], &one["box_name"])).collect();
    let (none, name) = (serde_json::Value::Null, "Refunds, mended".into());
    assert_eq!(told, [(&"web".into(), &none), (&ids[0], &name), (&ids[1], &none)]);
}

#[tokio::test]
async fn a_drain_puts_all_to_sleep_on_disk_a_few_at_a_time() {
    let world = World::new().await;
    for number in 0..12 {
        world.sandbox(&format!("s{number}")).await;
    }
    world.call("POST", "/v1/sandboxes/s0/sleep", r#"{"tier": "memory"}"#).await;
    world.call("POST", "/v1/sandboxes/s1/sleep", r#"{"tier": "disk"}"#).await;
    let stuck = world.sandbox("stuck").await;
    let error = ApiError::new(Code::NoSpace, "the host's disk has no room for its sleep");
    world.fake.fail_sleep.lock().unwrap().insert(stuck.id.clone(), error);
    let report = world.call("POST", "/v1/drain", "").await.value();
    assert_eq!(report["slept"], 11, "all but the one that slept on disk already");
    assert_eq!(report["left"][0]["name"], "stuck");
    assert_eq!(report["left"][0]["error"]["code"], "no_space");
    let most = world.fake.sleeping_most.load(Ordering::SeqCst);
    assert!((2..=4).contains(&most), "{most} at a time");
    let list = world.call("GET", "/v1/sandboxes?status=sleeping", "").await.value();
    let list = list["sandboxes"].as_array().unwrap();
    assert_eq!(list.len(), 12);
    assert!(list.iter().all(|sandbox| sandbox["sleep_tier"] == "disk"), "{list:?}");
    assert_eq!(world.call("GET", "/v1/health", "").await.status, 200, "it goes on");
}

#[tokio::test]
async fn a_drain_may_end_the_daemon() {
    let mut world = World::new().await;
    world.sandbox("web").await;
    let server = world.server.take().unwrap();
    let answer = world.call("POST", "/v1/drain", r#"{"stop": true}"#).await;
    assert_eq!(answer.value()["slept"], 1);
    server.asked_to_leave().await;
    server.stop().await;
}

#[tokio::test]
async fn s08_a_forwarded_port_is_bytes_both_ways_and_each_side_ends_for_itself() {
    let world = World::new().await;
    let web = world.sandbox("web").await;
    world.call("POST", "/v1/sandboxes/web/sleep", "").await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    // Reads to the end, then answers.
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            stream.write_all(format!("got {text}").as_bytes()).await.unwrap();
        }
    });
    let path = format!("/v1/sandboxes/web/forward/{port}");
    let request =
        world.request("GET", &path).header("connection", "upgrade").header("upgrade", "tcp");
    let response = world.open(request.body(Full::new(Bytes::new())).unwrap()).await;
    assert_eq!(response.status(), 101);
    assert_eq!(response.headers()["server-timing"], "wake;dur=12.5");
    let mut stream = TokioIo::new(hyper::upgrade::on(response).await.unwrap());
    let mut holds = world.fake.holds.subscribe();
    stream.write_all(b"one ").await.unwrap();
    stream.flush().await.unwrap();
    holds.wait_for(|holds| *holds == 1).await.unwrap();
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();
    // Open and silent it let it sleep; what comes now wakes it.
    world.call("POST", "/v1/sandboxes/web/sleep", "").await;
    stream.write_all(b"two").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    assert_eq!(text, "got one two");
    assert_eq!(world.fake.wakes(&web.id), 2);

    let plain = world.call("GET", &path, "").await.error();
    let want = "426 upgrade_required Upgrade: this path is a connection, not a document";
    assert_eq!(plain, want);
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let path = format!("/v1/sandboxes/web/forward/{closed}");
    let request =
        world.request("GET", &path).header("connection", "upgrade").header("upgrade", "tcp");
    let refused = world.send(request.body(Full::new(Bytes::new())).unwrap()).await.error();
    assert_eq!(refused, format!("502 port_closed: nothing listens on port {closed}"));
}
