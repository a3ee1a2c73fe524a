//! Checkpoints of boxes over REST and MCP, and the box that a daemon makes of what it takes over.

use std::sync::atomic::Ordering;

use api::SandboxId;
use bytes::Bytes;
use http_body_util::Full;
use serde_json::{Value, json};

use crate::client::{Answer, World};

impl World {
    async fn start_box(&self, spec: Value) -> (SandboxId, Value) {
        let answer = self.call("POST", "/v1/boxes", spec.to_string()).await;
        assert_eq!(answer.status, 201, "{:?}", answer.body);
        let started = answer.value();
        (started["id"].as_str().unwrap().parse().unwrap(), started)
    }

    async fn checkpoint(&self, id: &SandboxId, body: impl ToString) -> Answer {
        self.call("PUT", &format!("/v1/boxes/{id}/checkpoint"), body.to_string()).await
    }

    async fn box_view(&self, id: &SandboxId) -> Value {
        self.call("GET", &format!("/v1/boxes/{id}"), "").await.value()
    }

    async fn tool(&self, name: &str, arguments: Value) -> Value {
        let meta = json!({
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": { "name": "it", "version": "1" },
            "io.modelcontextprotocol/clientCapabilities": {},
        });
        let body = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call",
            "params": { "name": name, "arguments": arguments, "_meta": meta } });
        let request = self
            .request("POST", "/mcp")
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream")
            .header("mcp-protocol-version", "2026-07-28")
            .header("mcp-method", "tools/call")
            .header("mcp-name", name);
        let answer =
            self.send(request.body(Full::new(Bytes::from(body.to_string()))).unwrap()).await;
        let text = String::from_utf8_lossy(&answer.body);
        let line = text.lines().find_map(|line| {
            let message: Value =
                serde_json::from_str(line.strip_prefix("data:").unwrap_or(line)).ok()?;
            message["result"].is_object().then(|| message["result"].clone())
        });
        line.unwrap_or_else(|| panic!("{name}: {text}"))
    }

    /// Waits until what is told of a box is so.
    async fn wait_box(&self, id: &SandboxId, is_so: impl Fn(&Value) -> bool) -> Value {
        let looked = async {
            loop {
                let view = self.box_view(id).await;
                if is_so(&view) {
                    return view;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(30), looked).await.expect("in time")
    }
}

#[tokio::test]
async fn s18_s19_s20_checkpoints_of_a_box_are_set_told_and_refused_by_name() {
    let world = World::new().await;
    let (id, started) = world.start_box(json!({ "goal": "count" })).await;
    assert!(started.get("checkpoint").is_none(), "off by default: {started}");

    // S20: no store.
    let none = world.checkpoint(&id, "").await;
    let hint = none.value()["hint"].clone();
    assert_eq!(
        none.error(),
        "409 checkpoints_unavailable: this host has no store in which checkpoints are kept"
    );
    assert!(hint.as_str().unwrap().contains("--store"), "{hint}");
    world.fake.has_store.store(true, Ordering::SeqCst);

    for (body, told) in [
        (r#"{"everySeconds": 0}"#, "400 invalid_request everySeconds: `everySeconds`: 0 is out"),
        (r#"{"everySeconds": 601}"#, "400 invalid_request everySeconds: `everySeconds`: 601 is"),
        (r#"{"everySeconds": "10"}"#, "400 invalid_request everySeconds: "),
        (r#"{"everySeconds": 1.5}"#, "400 invalid_request everySeconds: "),
        (r#"{"every_seconds": 10}"#, "400 invalid_request every_seconds: "),
        ("[]", "400 invalid_request body: "),
    ] {
        let refused = world.checkpoint(&id, body).await.error();
        assert!(refused.starts_with(told), "{body}: {refused}");
    }
    assert!(world.box_view(&id).await.get("checkpoint").is_none(), "nothing was changed");

    let before = world.box_view(&id).await;
    let set = |body: &'static str| world.checkpoint(&id, body);
    assert_eq!(set("").await.value(), json!({ "everySeconds": 10, "storedBytes": 0 }));
    let set_to = set(r#"{"everySeconds": 600}"#).await.value();
    assert_eq!(set_to, json!({ "everySeconds": 600, "storedBytes": 0 }));
    let view = world.box_view(&id).await;
    assert_eq!(view["checkpoint"], set_to);
    assert_eq!(view["lastUsedAt"], before["lastUsedAt"], "it is no use of the box");
    assert_eq!(set(r#"{"everySeconds": null}"#).await.value(), json!({ "storedBytes": 0 }));
    assert!(world.box_view(&id).await.get("checkpoint").is_none());

    // The same as a tool.
    let at = |every: Value| json!({ "id": id, "everySeconds": every });
    let on = world.tool("sandbox_checkpoint", json!({ "id": id })).await;
    assert_eq!(on["structuredContent"], json!({ "everySeconds": 10, "storedBytes": 0 }), "{on}");
    let text = on["content"][0]["text"].as_str().unwrap();
    assert_eq!(text, "checkpoint each 10 s awake; none is complete yet: look at sandbox_status");
    let status = world.tool("sandbox_status", json!({ "id": id })).await;
    assert_eq!(status["structuredContent"]["checkpoint"]["everySeconds"], 10);
    assert!(status["content"][0]["text"].as_str().unwrap().contains("checkpoint each 10 s"));
    for off in [Value::Null, json!(0)] {
        world.tool("sandbox_checkpoint", at(json!(5))).await;
        let off = world.tool("sandbox_checkpoint", at(off)).await;
        assert_eq!(off["structuredContent"], json!({ "storedBytes": 0 }), "{off}");
    }
    world.fake.has_store.store(false, Ordering::SeqCst);
    for (every, told) in
        [(json!(601), "601 is out of range"), (json!(1), "checkpoints_unavailable")]
    {
        let refused = world.tool("sandbox_checkpoint", at(every)).await;
        assert_eq!(refused["isError"], true);
        let text = refused["content"][0]["text"].as_str().unwrap().to_owned();
        assert!(text.contains(told), "{text}");
    }

    // One that is stopped, or has ended, has nothing to copy.
    world.fake.set_life(&id, |life| life.stopped_unix_ms = Some(1));
    let refused = world.checkpoint(&id, "").await.error();
    assert!(refused.starts_with("409 box_stopped: "), "{refused}");
    world.call("DELETE", &format!("/v1/boxes/{id}"), "").await;
    assert!(world.checkpoint(&id, "").await.error().starts_with("409 box_stopped: "));
}

fn spec() -> Value {
    json!({
        "goal": "count", "name": "Numbers", "size": 2, "secrets": ["API_TOKEN"], "externalBaseUrl": "http://10.1.1.1",
        "services": [{ "name": "web.internal", "port": 8000, "web": true }, { "name": "db.internal", "port": 5432 }],
    })
}

const FIELDS: [&str; 8] =
    ["id", "name", "goal", "size", "services", "webUrl", "secrets", "createdAt"];

#[tokio::test]
async fn s18_a_box_that_is_taken_over_is_the_same_box() {
    let first = World::new().await;
    first.fake.has_store.store(true, Ordering::SeqCst);
    first.call("PUT", "/v1/secrets/API_TOKEN", r#"{"value": "x"}"#).await;
    first.call("PUT", "/v1/secrets/MORE", r#"{"value": "y"}"#).await;
    let (id, _) = first.start_box(spec()).await;
    let note = async || first.fake_note(&id).await;
    assert_eq!(note().await, None, "nothing goes along where there are none");
    first.checkpoint(&id, "").await.value();
    let at_first = note().await.expect("a note");

    // What is changed later goes along.
    let wire = json!({ "service": "web.internal", "mode": "box" }).to_string();
    assert_eq!(first.call("POST", &format!("/v1/boxes/{id}/wire"), wire).await.status, 200);
    let wired = note().await.expect("a note");
    assert_ne!(wired, at_first);
    let more = r#"{"add": ["MORE"]}"#;
    assert_eq!(first.call("POST", &format!("/v1/boxes/{id}/secrets"), more).await.status, 200);
    assert_ne!(note().await, Some(wired));
    let was = first.box_view(&id).await;
    let modes = |view: &Value| {
        let services = view["services"].as_array().unwrap().clone();
        services.iter().map(|one| one["mode"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(modes(&was), ["box", "external"]);

    // Its host is lost; another one, which knows nothing of it, takes it up.
    let known = first.known(&id).await;
    let other = World::new().await;
    *other.fake.lost.lock().unwrap() = Some(known.clone());
    let restore = format!("/v1/checkpoints/{id}/restore");
    assert_eq!(other.call("POST", &restore, "").await.status, 201);
    let is = other.box_view(&id).await;
    let url = |view: &Value| view["webUrl"].as_str().unwrap().split('.').next().unwrap().to_owned();
    assert_eq!(url(&is), url(&was), "the key");
    for field in FIELDS.into_iter().filter(|field| !["webUrl", "services"].contains(field)) {
        assert_eq!(is[field], was[field], "{field}");
    }
    assert_eq!(modes(&is), modes(&was));
    assert_eq!((&is["status"], &is["checkpoint"]), (&json!("ready"), &was["checkpoint"]));
    let events = other.call("GET", &format!("/v1/boxes/{id}/events"), "").await.value();
    let moved = &events["events"][0];
    assert_eq!((&moved["status"], &moved["reason"]), (&json!("ready"), &json!("was moved here")));
    assert_eq!(other.call("GET", &format!("/v1/sandboxes/{id}"), "").await.status, 404, "B44");
    let acted = other.call("POST", &format!("/v1/boxes/{id}/wake"), "").await;
    assert_eq!(acted.status, 200, "{:?}", acted.body);

    // Its first host finds out: whoever asks there is told where it is, and it does not live there any more.
    first.fake.move_away(&id, true);
    let gone = first.wait_box(&id, |view| view["status"] == "interrupted").await;
    let why = gone["statusReason"].as_str().unwrap();
    assert!(why.starts_with("another host has taken it over"), "{why}");
    for (method, path) in [("POST", "wake"), ("PUT", "checkpoint")] {
        let refused = first.call(method, &format!("/v1/boxes/{id}/{path}"), "").await.error();
        assert!(refused.starts_with("409 sandbox_moved: "), "{path}: {refused}");
    }
    assert_eq!(first.call("DELETE", &format!("/v1/boxes/{id}"), "").await.status, 204);

    // And it may come back.
    *first.fake.lost.lock().unwrap() = Some(known);
    assert_eq!(first.call("POST", &restore, "").await.status, 201);
    let back = first.box_view(&id).await;
    assert_eq!((&back["status"], &back["endedAt"]), (&json!("ready"), &Value::Null), "{back}");
}

#[tokio::test]
async fn s18_a_moved_box_of_an_account_that_is_not_known_is_the_default_accounts() {
    let first = World::new().await;
    first.fake.has_store.store(true, Ordering::SeqCst);
    let made = first.call("POST", "/v1/accounts", r#"{"id": "acme"}"#).await;
    assert_eq!(made.status, 201);
    let for_acme = async |method: &str, path: &str, body: Value| {
        let request = first.request(method, path).header("x-dormouse-account", "acme");
        first.send(request.body(Full::new(Bytes::from(body.to_string()))).unwrap()).await
    };
    for_acme("PUT", "/v1/secrets/API_TOKEN", json!({ "value": "x" })).await;
    let started = for_acme("POST", "/v1/boxes", spec()).await.value();
    let id: SandboxId = started["id"].as_str().unwrap().parse().unwrap();
    let set = for_acme("PUT", &format!("/v1/boxes/{id}/checkpoint"), json!({})).await;
    assert_eq!(set.status, 200, "{:?}", set.body);
    let known = first.known(&id).await;

    let other = World::new().await;
    *other.fake.lost.lock().unwrap() = Some(known.clone());
    let restore = format!("/v1/checkpoints/{id}/restore");
    assert_eq!(other.call("POST", &restore, "").await.status, 201);
    let view = other.box_view(&id).await;
    assert_eq!((&view["goal"], &view["secrets"]), (&json!("count"), &json!([])));
    let events = other.call("GET", &format!("/v1/boxes/{id}/events"), "").await.value();
    let why = events["events"][0]["reason"].as_str().unwrap();
    assert!(why.contains("no account `acme` here") && why.contains("API_TOKEN"), "{why}");

    // A daemon that knows the account gives the box to it, and a checkpoint of older days has no note.
    let third = World::new().await;
    third.call("POST", "/v1/accounts", r#"{"id": "acme"}"#).await;
    *third.fake.lost.lock().unwrap() = Some(known.clone());
    assert_eq!(third.call("POST", &restore, "").await.status, 201);
    assert_eq!(third.call("GET", &format!("/v1/boxes/{id}"), "").await.status, 404);
    let fourth = World::new().await;
    *fourth.fake.lost.lock().unwrap() = Some(api::host::Known { note: None, ..known });
    assert_eq!(fourth.call("POST", &restore, "").await.status, 201);
    let view = fourth.box_view(&id).await;
    assert_eq!((&view["status"], &view["services"]), (&json!("ready"), &json!([])));
}

#[tokio::test]
async fn s18_a_box_whose_daemon_ended_while_it_took_it_over_is_entered_at_the_next_start() {
    let first = World::new().await;
    first.fake.has_store.store(true, Ordering::SeqCst);
    let (id, _) = first.start_box(json!({ "goal": "count" })).await;
    first.checkpoint(&id, "").await.value();
    let mut other = World::new().await;
    *other.fake.lost.lock().unwrap() = Some(first.known(&id).await);
    // Its host has it, and nothing else was done.
    api::host::Host::checkpoint_restore(&*other.fake, &id).await.unwrap();
    assert_eq!(other.call("GET", &format!("/v1/boxes/{id}"), "").await.status, 404);
    other.restart().await;
    let view = other.box_view(&id).await;
    assert_eq!((&view["status"], &view["goal"]), (&json!("ready"), &json!("count")));
    let events = other.call("GET", &format!("/v1/boxes/{id}/events"), "").await.value();
    assert_eq!(events["events"][0]["reason"], "was moved here");
    // And no second time.
    other.restart().await;
    let again = other.call("GET", &format!("/v1/boxes/{id}/events"), "").await.value();
    assert_eq!(again, events);
}

#[tokio::test]
async fn s18_a_daemon_that_comes_back_learns_that_its_box_was_taken_over() {
    let mut world = World::new().await;
    let (id, _) = world.start_box(json!({ "goal": "count" })).await;
    world.fake.move_away(&id, false);
    world.restart().await;
    let view = world.box_view(&id).await;
    assert_eq!(view["status"], "interrupted");
    let why = view["statusReason"].as_str().unwrap();
    assert!(why.starts_with("another host has taken it over"), "{why}");
    let listed = world.call("GET", "/v1/boxes", "").await.value();
    assert_eq!(listed["boxes"][0]["status"], "interrupted", "{listed}");
}

impl World {
    async fn known(&self, id: &SandboxId) -> api::host::Known {
        api::host::Host::view(&*self.fake, id).await.unwrap()
    }

    async fn fake_note(&self, id: &SandboxId) -> Option<String> {
        self.known(id).await.note
    }
}
