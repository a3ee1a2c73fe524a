//! What the document promises and the answers keep: cases that requests made from the document have found.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use serde_json::{Value, json};

use crate::client::{Answer, Sse, World, settings};

impl World {
    async fn with_header(&self, method: &str, path: &str, name: &str, value: &str) -> Answer {
        let request = self.request(method, path).header(name, value);
        self.send(request.body(Full::new(Bytes::new())).unwrap()).await
    }
}

/// Whoever revoked the key that he asks with would lock himself out, a program in a loop as well as a person.
#[tokio::test]
async fn a_key_does_not_revoke_itself_and_another_does() {
    let world = World::new().await;
    let refused = world.call("DELETE", "/v1/keys/admin", "").await;
    assert_eq!(refused.error(), "409 in_use: this is the key that the request came with");
    let made = world.call("POST", "/v1/keys", r#"{"scope": "admin"}"#).await.value();
    let request = hyper::Request::builder()
        .method("DELETE")
        .uri("/v1/keys/admin")
        .header("host", "localhost")
        .header("authorization", format!("Bearer {}", made["key"].as_str().unwrap()));
    let revoked = world.send(request.body(Full::new(Bytes::new())).unwrap()).await;
    assert_eq!(revoked.status, 204);
    assert_eq!(world.call("GET", "/v1/keys", "").await.status, 401);
}

#[tokio::test]
async fn a_path_that_is_a_connection_says_which() {
    let world = World::new().await;
    world.sandbox("web").await;
    let exec =
        world.call("POST", "/v1/sandboxes/web/execs", r#"{"command": "x", "background": true}"#);
    let exec = exec.await.value()["exec_id"].as_str().unwrap().to_owned();
    let paths = [
        (format!("/v1/sandboxes/web/execs/{exec}/attach"), "websocket"),
        ("/v1/sandboxes/web/forward/80".to_owned(), "tcp"),
    ];
    for (path, protocol) in paths {
        let answer = world.call("GET", &path, "").await;
        assert_eq!((answer.status, answer.header("upgrade")), (426, Some(protocol)), "{path}");
        assert_eq!(answer.value()["code"], "upgrade_required");
    }
    // What else is wrong is said first.
    let wrong = world.call("GET", "/v1/sandboxes/web/terminals/abc/attach?rows=501", "").await;
    assert_eq!(wrong.error(), "400 invalid_request rows: `rows`: 501 is out of range");
    let half = world.call("GET", "/v1/sandboxes/web/terminals/abc/attach?rows=50", "").await;
    assert_eq!(
        half.error(),
        "422 unprocessable columns: `columns`: `columns` and `rows` go together"
    );
}

/// A browser's `EventSource` never tries again after a refusal.
#[tokio::test]
async fn a_stream_goes_on_from_an_unknown_place_and_says_what_is_missing() {
    let world = World::new().await;
    let request = world.request("GET", "/v1/events").header("last-event-id", "of another server");
    let mut events = Sse::new(world.open(request.body(Full::new(Bytes::new())).unwrap()).await);
    let (_, kind, data) = events.next_raw().await.unwrap();
    assert_eq!((kind.as_str(), &data["missing"]), ("events.lost", &Value::Null));
    let web = world.sandbox("web").await;
    assert_eq!(events.next().await.unwrap().1.sandbox_id, web.id);
    // What is beaten is looked at all the same.
    let wrong = world.with_header("GET", "/v1/events?after=", "last-event-id", "x").await;
    assert_eq!(wrong.error(), "400 invalid_request after: not the id of an event of this stream");
}

/// One way to write each thing: what the document's patterns refuse is refused here.
#[tokio::test]
async fn what_the_patterns_refuse_is_refused() {
    let world = World::new().await;
    world.sandbox("web").await;
    for (method, path, body, field) in [
        ("GET", "/v1/sandboxes?cursor=%2B5-abcdefghijkl", "", "cursor"),
        ("GET", "/v1/sandboxes?cursor=1234567890123456-abcdefghijkl", "", "cursor"),
        ("PUT", "/v1/sandboxes/web/files?path=/a&mode=%2B644", "x", "mode"),
        ("PUT", "/v1/sandboxes/web/files?path=/a&mode=000644", "x", "mode"),
        ("POST", "/v1/sandboxes/web/execs/a/signal", r#"{"signal": "+15"}"#, "signal"),
        ("POST", "/v1/sandboxes/web/execs/a/signal", r#"{"signal": "015"}"#, "signal"),
    ] {
        let error = world.call(method, path, body).await.error();
        assert!(error.starts_with(&format!("400 invalid_request {field}: ")), "{path}: {error}");
    }
    let tab = world.with_header("POST", "/v1/sandboxes", "idempotency-key", "a\tb").await.error();
    assert!(tab.starts_with("400 invalid_request Idempotency-Key: "), "{tab}");
}

/// Pages follow one another by a cursor of the form that the document has.
#[tokio::test]
async fn a_cursor_has_the_form_that_the_document_says() {
    let world = World::new().await;
    let (one, two) = (world.sandbox("one").await, world.sandbox("two").await);
    let page = world.call("GET", "/v1/sandboxes?limit=1", "").await.value();
    assert_eq!(page["sandboxes"][0]["id"], json!(one.id));
    let cursor = page["next_cursor"].as_str().unwrap();
    let (ms, id) = cursor.split_once('-').unwrap();
    assert!(ms.bytes().all(|byte| byte.is_ascii_digit()) && id == one.id.as_str(), "{cursor}");
    let page = world.call("GET", &format!("/v1/sandboxes?cursor={cursor}"), "").await.value();
    assert_eq!(page["sandboxes"][0]["id"], json!(two.id));
}

/// 255 characters of any script are a label's value, as the document says; and nothing at all changes nothing.
#[tokio::test]
async fn lengths_are_counted_in_characters_and_a_change_may_be_empty() {
    let world = World::new().await;
    world.sandbox("web").await;
    for (length, status) in [(255, 200), (256, 400)] {
        let body = json!({ "labels": { "a": "ü".repeat(length) } }).to_string();
        assert_eq!(world.call("PATCH", "/v1/sandboxes/web", body).await.status, status);
    }
    for path in ["/v1/sandboxes/web", "/v1/project", "/v1/accounts/default"] {
        assert_eq!(world.call("PATCH", path, "").await.status, 200, "{path}");
    }
}

/// What is well formed, and cannot be for what there is or is not, is another thing than a malformed request.
#[tokio::test]
async fn what_no_schema_can_say_is_unprocessable() {
    let world = World::new().await;
    let twice = json!([{ "name": "a", "path": "/a" }, { "name": "a", "path": "/b" }]);
    let one_path = json!([{ "name": "a", "path": "/a" }, { "name": "b", "path": "/a" }]);
    let many: Vec<_> =
        (0..5).map(|n| json!({ "name": format!("d{n}"), "path": format!("/d{n}") })).collect();
    for (body, field) in [
        (json!({ "drives": twice }), "drives[1].name"),
        (json!({ "drives": one_path }), "drives[1].path"),
        (json!({ "drives": [{ "name": "a", "path": "/proc/x" }] }), "drives[0].path"),
        (json!({ "drives": many, "volumes": many }), "drives"),
        (json!({ "expires_at": "2001-01-31T18:00:00Z" }), "expires_at"),
    ] {
        let error = world.call("POST", "/v1/sandboxes", body.to_string()).await.error();
        assert!(error.starts_with(&format!("422 unprocessable {field}: ")), "{body}: {error}");
    }
    let loops = json!({ "externalBaseUrl": "http://127.0.0.1:8420" }).to_string();
    let error = world.call("POST", "/v1/boxes", loops).await.error();
    assert!(error.starts_with("422 unprocessable externalBaseUrl: "), "{error}");
}

/// A command that never ends is followed no longer than its host lets one answer follow, and nothing is broken off.
#[tokio::test]
async fn what_follows_a_command_has_an_end_where_the_host_says_so() {
    let mut world = World::new().await;
    world.sandbox("web").await;
    world.server.take().unwrap().stop().await;
    let follow_max = Some(Duration::from_millis(200));
    let settings = control::Settings { follow_max, ..settings(&world.data) };
    let server = control::serve(Arc::clone(&world.fake) as _, settings).await.unwrap();
    world.address = server.address();
    world.server = Some(server);
    let body = r#"{"argv": ["cat"], "background": true, "open_stdin": true}"#;
    let exec = world.call("POST", "/v1/sandboxes/web/execs", body).await.value();
    let path = format!("/v1/sandboxes/web/execs/{}", exec["exec_id"].as_str().unwrap());
    assert_eq!(world.call("POST", &format!("{path}/stdin"), "line").await.status, 204);
    let followed = world.call("GET", &format!("{path}/output?follow=true"), "").await;
    assert_eq!((followed.status, &followed.body[..]), (200, &b"line"[..]));
    assert_eq!(world.call("GET", &path, "").await.value()["status"], "running");
    assert_eq!(world.call("POST", &format!("{path}/stdin?close=true"), "").await.status, 204);
}

/// A method that a path does not have is refused with those that it has, whichever it is.
#[tokio::test]
async fn each_method_that_is_not_there_is_answered_with_those_that_are() {
    let world = World::new().await;
    for method in ["TRACE", "PUT"] {
        let answer = world.call(method, "/v1/usage", "").await;
        assert_eq!((answer.status, answer.header("allow")), (405, Some("GET,HEAD")), "{method}");
    }
}
