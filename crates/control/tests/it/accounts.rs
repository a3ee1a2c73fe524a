//! Accounts and keys: who sees what (B43).

use serde_json::{Value, json};

use crate::client::{Answer, World};

impl World {
    /// One request with another key.
    async fn with_key(&self, key: &str, method: &str, path: &str, body: &Value) -> Answer {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let request = hyper::Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("authorization", format!("Bearer {key}"));
        self.send(request.body(http_body_util::Full::new(bytes::Bytes::from(body))).unwrap()).await
    }

    async fn account(&self, id: &str) -> Answer {
        self.call("POST", "/v1/accounts", json!({ "id": id }).to_string()).await
    }

    /// Id and text of a new key.
    async fn key(&self, body: Value) -> (String, String) {
        let made = self.call("POST", "/v1/keys", body.to_string()).await;
        assert_eq!(made.status, 201, "{:?}", made.body);
        let made = made.value();
        let text = |field: &str| made[field].as_str().unwrap().to_owned();
        (text("id"), text("key"))
    }
}

#[tokio::test]
async fn b43_a_key_opens_what_its_scope_says_until_it_is_revoked() {
    let mut world = World::new().await;
    assert_eq!(world.account("acme").await.status, 201);
    let (id, key) = world.key(json!({ "account": "acme", "label": "CI" })).await;
    for path in ["/v1/boxes", "/v1/health"] {
        let answer = world.with_key(&key, "GET", path, &Value::Null).await;
        assert_eq!(answer.status, 200, "{path}: {:?}", answer.body);
    }
    for (method, path) in [
        ("GET", "/v1/sandboxes"),
        ("GET", "/v1/accounts"),
        ("POST", "/v1/keys"),
        ("GET", "/metrics"),
        ("GET", "/v1/no-such-path"),
    ] {
        let answer = world.with_key(&key, method, path, &Value::Null).await;
        assert_eq!(answer.error(), "403 forbidden: this key opens the boxes of its account only");
    }
    let beat = world.with_key(&key, "POST", "/v1/agents/a-1/heartbeat", &Value::Null).await;
    assert_eq!(beat.value(), json!({ "ok": true }));

    // Nothing tells it again, and nothing keeps it.
    let list = world.call("GET", "/v1/keys", "").await;
    let keys = list.value()["keys"].as_array().unwrap().clone();
    assert_eq!(keys.len(), 2, "{keys:?}");
    assert_eq!((&keys[0]["id"], &keys[0]["scope"]), (&json!("admin"), &json!("admin")));
    assert_eq!(keys[1]["id"], json!(id));
    assert_eq!(keys[1]["label"], json!("CI"));
    assert!(!String::from_utf8_lossy(&list.body).contains(&key));
    for file in std::fs::read_dir(world.data.path()).unwrap() {
        let path = file.unwrap().path();
        let bytes = std::fs::read(&path).unwrap_or_default();
        let found = bytes.windows(key.len()).any(|part| part == key.as_bytes());
        assert!(!found, "{} holds a key", path.display());
    }

    world.restart().await;
    assert_eq!(world.with_key(&key, "GET", "/v1/boxes", &Value::Null).await.status, 200);
    assert_eq!(world.call("DELETE", &format!("/v1/keys/{id}"), "").await.status, 204);
    let refused = world.with_key(&key, "GET", "/v1/boxes", &Value::Null).await;
    assert_eq!(refused.error(), "401 unauthorized: the token is not known");
    let again = world.call("DELETE", &format!("/v1/keys/{id}"), "").await;
    assert_eq!(again.error(), "404 not_found: there is no key of this id");
}

#[tokio::test]
async fn b43_a_box_of_another_account_is_as_one_that_does_not_exist() {
    let world = World::new().await;
    world.account("acme").await;
    world.account("other").await;
    let (_, acme) = world.key(json!({ "account": "acme" })).await;
    let (_, other) = world.key(json!({ "account": "other" })).await;
    let started = world.with_key(&acme, "POST", "/v1/boxes", &json!({ "goal": "mine" })).await;
    assert_eq!(started.status, 201, "{:?}", started.body);
    let id = started.value()["id"].as_str().unwrap().to_owned();
    assert_eq!(
        world.with_key(&acme, "GET", "/v1/boxes", &Value::Null).await.value()["boxes"][0]["id"],
        json!(id)
    );
    // Neither does the operator's own account see it among its own.
    for key in [&other, &world.token] {
        let list = world.with_key(key, "GET", "/v1/boxes", &Value::Null).await.value();
        assert_eq!(list, json!({ "boxes": [] }));
        for (method, path, body) in [
            ("GET", "", Value::Null),
            ("DELETE", "", Value::Null),
            ("POST", "/wake", Value::Null),
            ("GET", "/events", Value::Null),
            ("GET", "/procs", Value::Null),
            ("POST", "/exec", json!({ "command": "true" })),
            ("POST", "/wire", json!({ "service": "x", "mode": "box" })),
            ("GET", "/files?path=/etc/passwd", Value::Null),
            ("GET", "/tree?path=/work", Value::Null),
            ("PUT", "/tree?path=/work", Value::Null),
        ] {
            let there = world.with_key(key, method, &format!("/v1/boxes/{id}{path}"), &body).await;
            let nowhere =
                world.with_key(key, method, &format!("/v1/boxes/aaaaaaaaaaaa{path}"), &body).await;
            assert_eq!(there.error(), "404 not_found: there is no box of this id", "{path}");
            assert_eq!(there.body, nowhere.body, "{method} {path}");
        }
        let services = json!([{ "name": "db", "port": 1, "fromBox": id }]);
        let link = world.with_key(key, "POST", "/v1/boxes", &json!({ "services": services })).await;
        assert_eq!(
            link.error(),
            "400 invalid_request services[0].fromBox: `services[0].fromBox`: there is no such box"
        );
        let back = world.with_key(key, "POST", "/v1/boxes", &json!({ "restore": id })).await;
        assert_eq!(back.error(), "404 not_found: there is no box of this id");
    }
    // An account with boxes stays; so does the default one.
    let refused = world.call("DELETE", "/v1/accounts/acme", "").await;
    assert_eq!(refused.error(), "409 in_use: the account `acme` has 1 boxes that have not ended");
    let refused = world.call("DELETE", "/v1/accounts/default", "").await;
    assert_eq!(refused.error(), "409 in_use: the default account cannot be deleted");
    let stopped = world.with_key(&acme, "DELETE", &format!("/v1/boxes/{id}"), &Value::Null).await;
    assert_eq!(stopped.status, 204);
    assert_eq!(world.call("DELETE", "/v1/accounts/acme", "").await.status, 204);
    let gone = world.with_key(&acme, "GET", "/v1/boxes", &Value::Null).await;
    assert_eq!(gone.error(), "401 unauthorized: the token is not known");
}

#[tokio::test]
async fn accounts_are_made_changed_and_kept() {
    let mut world = World::new().await;
    let body = json!({ "id": "acme", "plan": "pro", "credit": 10, "urlAllow": ["192.0.2.0/24"] });
    let made = world.call("POST", "/v1/accounts", body.to_string()).await;
    assert_eq!(made.status, 201);
    assert_eq!(made.value()["urlAllow"], json!(["192.0.2.0/24"]));
    assert_eq!(
        world.account("acme").await.error(),
        "409 name_taken id: there is an account `acme`"
    );
    let path = "/v1/accounts/acme";
    let changed = world.call("PATCH", path, r#"{"plan": null}"#).await.value();
    assert_eq!((&changed["plan"], &changed["credit"]), (&Value::Null, &json!(10)));
    let changed = world.call("PUT", &format!("{path}/credit"), r#"{"credit": 77}"#).await.value();
    assert_eq!(changed["credit"], json!(77));
    world.restart().await;
    assert_eq!(world.call("GET", path, "").await.value(), changed);
    let list = world.call("GET", "/v1/accounts", "").await.value();
    let ids: Vec<_> = list["accounts"].as_array().unwrap().iter().map(|one| &one["id"]).collect();
    assert_eq!(ids, [&json!("acme"), &json!("default")]);
    for (method, path, body, expected) in [
        (
            "POST",
            "/v1/accounts",
            json!({ "id": "No" }),
            "400 invalid_request id: `id` is no id of an account",
        ),
        (
            "PATCH",
            path,
            json!({ "urlAllow": [] }),
            "400 invalid_request urlAllow: `urlAllow`: 0 ranges of addresses",
        ),
        (
            "PUT",
            "/v1/accounts/acme/credit",
            json!({ "credit": 31_536_000_000_001_u64 }),
            "400 invalid_request credit: `credit`: 31536000000001 is out of range",
        ),
        (
            "GET",
            "/v1/accounts/nobody",
            Value::Null,
            "404 not_found: there is no account of this id",
        ),
        (
            "POST",
            "/v1/keys",
            json!({ "account": "nobody" }),
            "400 invalid_request account: `account`: there is no such account",
        ),
    ] {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        assert_eq!(world.call(method, path, body).await.error(), expected);
    }
}
