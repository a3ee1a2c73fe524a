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
            ("PUT", "/checkpoint", json!({ "everySeconds": 1 })),
            ("PATCH", "", json!({ "name": "theirs" })),
            ("GET", "/execs", Value::Null),
            ("GET", "/execs/hnkainteaodl", Value::Null),
            ("GET", "/execs/hnkainteaodl/output", Value::Null),
            ("POST", "/execs/hnkainteaodl/signal", json!({ "signal": "TERM" })),
            ("POST", "/execs/hnkainteaodl/stdin?close=true", Value::Null),
            ("GET", "/files?path=/etc/passwd", Value::Null),
            ("PUT", "/files?path=/etc/passwd", Value::Null),
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
            "422 unprocessable services[0].fromBox: `services[0].fromBox`: there is no such box"
        );
        let back = world.with_key(key, "POST", "/v1/boxes", &json!({ "restore": id })).await;
        assert_eq!(back.error(), "404 not_found: there is no box of this id");
    }
    // An account with boxes stays; so does the default one.
    let refused = world.call("DELETE", "/v1/accounts/acme", "").await;
    assert_eq!(refused.error(), "409 in_use: the account `acme` has 1 box that has not ended");
    let hint = refused.value()["hint"].as_str().unwrap().to_owned();
    for way in ["dormouse --as-account acme boxes list", "dormouse --as-account acme boxes stop"] {
        assert!(hint.contains(way), "{hint}");
    }
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
            "422 unprocessable account: `account`: there is no such account",
        ),
    ] {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        assert_eq!(world.call(method, path, body).await.error(), expected);
    }
}

/// A world with an account `acme` on a plan, and its key.
async fn on_plan(plan: &str) -> (World, String) {
    let world = World::new().await;
    let body = json!({ "id": "acme", "plan": plan });
    assert_eq!(world.call("POST", "/v1/accounts", body.to_string()).await.status, 201);
    let (_, key) = world.key(json!({ "account": "acme" })).await;
    (world, key)
}

fn id_of(started: &Answer) -> api::SandboxId {
    assert_eq!(started.status, 201, "{:?}", started.body);
    started.value()["id"].as_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn b42_two_starts_at_once_do_not_both_take_the_last_place() {
    let (world, key) = on_plan("free").await;
    for _ in 0..2 {
        id_of(&world.with_key(&key, "POST", "/v1/boxes", &Value::Null).await);
    }
    world.fake.gate.send_replace(false);
    let mut waiting = world.fake.waiting.subscribe();
    let starts = async {
        let start = || world.with_key(&key, "POST", "/v1/boxes", &Value::Null);
        let (one, two, three) = tokio::join!(start(), start(), start());
        let mut answers = [one.status, two.status, three.status];
        answers.sort_unstable();
        answers
    };
    let open = async {
        waiting.wait_for(|waiting| *waiting > 0).await.unwrap();
        world.fake.gate.send_replace(true);
    };
    let (answers, ()) = tokio::join!(starts, open);
    assert_eq!(answers, [201, 429, 429]);
    assert_eq!(world.fake.ids().len(), 3);
    // Nothing of the refused ones is left: neither rows, nor what an idempotency key begins.
    let list = world.with_key(&key, "GET", "/v1/boxes?all=1", &Value::Null).await.value();
    assert_eq!(list["boxes"].as_array().unwrap().len(), 3);
}

#[tokio::test]
async fn s23_a_frozen_box_names_the_limit_and_figures_are_for_the_operator() {
    use std::sync::atomic::Ordering;

    let world = World::new().await;
    world.account("acme").await;
    let (_, acme) = world.key(json!({ "account": "acme" })).await;
    let limit = r#"{"spending_limit": {"memory_gib_seconds": 7200}}"#;
    world.call("PATCH", "/v1/project", limit).await.value();
    let mut ids = Vec::new();
    for key in [&world.token, &acme] {
        let id = id_of(&world.with_key(key, "POST", "/v1/boxes", &Value::Null).await);
        world.fake.set_life(&id, |life| {
            life.status = api::boxes::BoxStatus::Frozen;
            life.reason = Some("a limit on spending is reached".to_owned());
        });
        ids.push(id);
    }
    world.fake.gib_seconds.store(4000, Ordering::SeqCst);
    let spending = world.call("GET", "/v1/project", "").await.value()["spending"].clone();
    assert_eq!(spending["reached"], true, "{spending}");
    let month = spending["month"].as_str().unwrap();
    let limit =
        format!("a limit on spending is reached, the project's for the month {month} (UTC)");
    let why = async |key: &str, id: &api::SandboxId| {
        let told = world.with_key(key, "GET", &format!("/v1/boxes/{id}"), &Value::Null).await;
        told.value()["statusReason"].as_str().unwrap().to_owned()
    };
    let mine = why(&world.token, &ids[0]).await;
    let figures =
        ": 2.0 GiB-hours of memory awake, of which 2.2 GiB-hours are used; it stays frozen";
    assert!(mine.starts_with(&format!("{limit}{figures}")), "{mine}");
    let theirs = why(&acme, &ids[1]).await;
    assert!(theirs.starts_with(&format!("{limit}; it stays frozen")), "{theirs}");

    // What the account lacks itself goes before, and without a limit the host's word stands.
    world.call("PUT", "/v1/accounts/acme/credit", r#"{"credit": 0}"#).await.value();
    assert!(why(&acme, &ids[1]).await.starts_with("the account has no credit: "));
    world.call("PATCH", "/v1/project", r#"{"spending_limit": null}"#).await.value();
    assert_eq!(why(&world.token, &ids[0]).await, "a limit on spending is reached");
}

#[tokio::test]
async fn b42_frozen_boxes_count_and_ended_ones_do_not() {
    let (world, key) = on_plan("free").await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(id_of(&world.with_key(&key, "POST", "/v1/boxes", &Value::Null).await));
    }
    world.fake.set_life(&ids[1], |life| {
        life.status = api::boxes::BoxStatus::Frozen;
        life.stops_at_unix_ms = Some(1_790_856_000_000);
    });
    let refused = world.with_key(&key, "POST", "/v1/boxes", &Value::Null).await;
    let told = refused.error();
    assert!(
        told.starts_with(
            "429 plan_limit: plan free allows 3 boxes at once and 3 are running or frozen; 1 of them frozen."
        ),
        "{told}"
    );
    assert!(told.contains(&format!("the idle rules stop box {} first", ids[1])), "{told}");
    assert!(told.ends_with("No box was created by this call."), "{told}");

    // T14: one that was stopped for idleness has no place any more, and needs one to come back.
    world.fake.set_life(&ids[1], |life| {
        life.status = api::boxes::BoxStatus::Terminated;
        life.stopped_unix_ms = Some(1_790_856_000_000);
    });
    ids.push(id_of(&world.with_key(&key, "POST", "/v1/boxes", &Value::Null).await));
    let restore = json!({ "restore": ids[1] });
    let refused = world.with_key(&key, "POST", "/v1/boxes", &restore).await;
    let told = refused.error();
    assert!(told.starts_with("429 plan_limit: plan free allows 3"), "{told}");
    let path = format!("/v1/boxes/{}", ids[0]);
    assert_eq!(world.with_key(&key, "DELETE", &path, &Value::Null).await.status, 204);
    id_of(&world.with_key(&key, "POST", "/v1/boxes", &restore).await);
    let refused = world.with_key(&key, "POST", "/v1/boxes", &Value::Null).await;
    assert_eq!(refused.status, 429);
    // A larger plan takes one more; the default account has none.
    world.call("PATCH", "/v1/accounts/acme", r#"{"plan": "pro"}"#).await;
    id_of(&world.with_key(&key, "POST", "/v1/boxes", &Value::Null).await);
    id_of(&world.with_key(&world.token, "POST", "/v1/boxes", &Value::Null).await);
}

#[tokio::test]
async fn b42_a_repeated_start_at_the_limit_is_answered_with_its_box() {
    let (world, key) = on_plan("free").await;
    let start = || async {
        let request = hyper::Request::post("/v1/boxes")
            .header("host", "localhost")
            .header("authorization", format!("Bearer {key}"))
            .header("idempotency-key", "box-1");
        world.send(request.body(http_body_util::Full::new(bytes::Bytes::new())).unwrap()).await
    };
    let first = id_of(&start().await);
    for _ in 0..2 {
        id_of(&world.with_key(&key, "POST", "/v1/boxes", &Value::Null).await);
    }
    let again = start().await;
    assert_eq!(id_of(&again), first);
    assert_eq!(again.header("idempotency-replayed"), Some("true"));
    // The same key of another account is another key.
    let request = world.request("POST", "/v1/boxes").header("idempotency-key", "box-1");
    let other =
        world.send(request.body(http_body_util::Full::new(bytes::Bytes::new())).unwrap()).await;
    assert_ne!(id_of(&other), first);
}

#[tokio::test]
async fn t13_secrets_are_kept_encrypted_and_given_to_the_commands_of_a_box_alone() {
    const VALUE: &str = "correct horse battery";
    let mut world = World::new().await;
    world.account("acme").await;
    let (_, key) = world.key(json!({ "account": "acme" })).await;
    let value = json!({ "value": VALUE });
    let put = world.with_key(&key, "PUT", "/v1/secrets/API_TOKEN", &value).await;
    assert_eq!(put.value()["name"], json!("API_TOKEN"));
    let list = world.with_key(&key, "GET", "/v1/secrets", &Value::Null).await;
    assert_eq!(list.value()["secrets"][0]["name"], json!("API_TOKEN"));
    // Another account has none of it.
    assert_eq!(world.call("GET", "/v1/secrets", "").await.value(), json!({ "secrets": [] }));
    let body = json!({ "secrets": ["API_TOKEN"] });
    let other = world.call("POST", "/v1/boxes", body.to_string()).await;
    assert_eq!(
        other.error(),
        "422 unprocessable secrets: `secrets`: no secret is stored under `API_TOKEN`"
    );
    let unknown = json!({ "secrets": ["API_TOKEN", "NOT_HERE", "NOR_HERE"] });
    assert_eq!(
        world.with_key(&key, "POST", "/v1/boxes", &unknown).await.error(),
        "422 unprocessable secrets: `secrets`: no secret is stored under `NOT_HERE`, `NOR_HERE`"
    );

    world.restart().await;
    let started = world.with_key(&key, "POST", "/v1/boxes", &body).await;
    let id = id_of(&started);
    assert_eq!(started.value()["secrets"], json!(["API_TOKEN"]));
    let exec = format!("/v1/boxes/{id}/exec");
    let print = json!({ "command": "printf %s \"$API_TOKEN\"" });
    let ran = world.with_key(&key, "POST", &exec, &print).await.value();
    assert_eq!(ran["output"], json!(VALUE));
    // Nothing else tells it, and nothing keeps it as it is.
    for path in
        [format!("/v1/boxes/{id}"), "/v1/secrets".to_owned(), format!("/v1/boxes/{id}/events")]
    {
        let answer = world.with_key(&key, "GET", &path, &Value::Null).await;
        assert!(!String::from_utf8_lossy(&answer.body).contains(VALUE), "{path}");
    }
    for file in std::fs::read_dir(world.data.path()).unwrap() {
        let path = file.unwrap().path();
        let bytes = std::fs::read(&path).unwrap_or_default();
        let found = bytes.windows(VALUE.len()).any(|part| part == VALUE.as_bytes());
        assert!(!found, "{} holds a secret", path.display());
    }
    let file = world.data.path().join("secrets.key");
    let mode = std::os::unix::fs::PermissionsExt::mode(&file.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);

    // A new value holds from the next command on; one that is deleted is told of.
    world.with_key(&key, "PUT", "/v1/secrets/API_TOKEN", &json!({ "value": "new" })).await;
    let ran = world.with_key(&key, "POST", &exec, &print).await.value();
    assert_eq!(ran["output"], json!("new"));
    world.with_key(&key, "PUT", "/v1/secrets/SECOND", &json!({ "value": "2" })).await;
    let add = format!("/v1/boxes/{id}/secrets");
    let missing = world.with_key(&key, "POST", &add, &json!({ "add": ["THIRD"] })).await;
    assert_eq!(missing.error(), "422 unprocessable add: `add`: no secret is stored under `THIRD`");
    let added =
        world.with_key(&key, "POST", &add, &json!({ "add": ["SECOND", "API_TOKEN"] })).await;
    assert_eq!(added.value(), json!({ "secrets": ["API_TOKEN", "SECOND"] }));
    let both = json!({ "command": "printf %s-%s \"$API_TOKEN\" \"$SECOND\"" });
    let ran = world.with_key(&key, "POST", &exec, &both).await.value();
    assert_eq!(ran["output"], json!("new-2"));
    let path = "/v1/secrets/API_TOKEN";
    assert_eq!(world.with_key(&key, "DELETE", path, &Value::Null).await.status, 204);
    let ran = world.with_key(&key, "POST", &exec, &both).await.value();
    assert_eq!(ran["output"], json!("-2"));
    let note = ran["note"].as_str().unwrap();
    assert!(note.contains("API_TOKEN"), "{note}");

    // Another key opens none: whoever replaced it is told what to do.
    std::fs::remove_file(&file).unwrap();
    world.restart().await;
    let ran = world.with_key(&key, "POST", &exec, &both).await;
    assert_eq!(ran.error(), "422 cannot_start: the secret `SECOND` cannot be opened any more");
}

#[tokio::test]
async fn b14_waiting_calls_are_told_when_credit_runs_out_and_go_on_with_more() {
    let world = World::new().await;
    let body = json!({ "id": "acme", "credit": 100 });
    assert_eq!(world.call("POST", "/v1/accounts", body.to_string()).await.status, 201);
    let (_, key) = world.key(json!({ "account": "acme" })).await;
    let id = id_of(&world.with_key(&key, "POST", "/v1/boxes", &json!({ "size": 4 })).await);
    let exec = format!("/v1/boxes/{id}/exec");
    let ran = world.with_key(&key, "POST", &exec, &json!({ "command": "true" })).await;
    assert_eq!(ran.status, 200);
    // A box of size 4 uses four units a second.
    world.fake.awake_seconds.store(24, std::sync::atomic::Ordering::SeqCst);
    let waits = json!({ "command": "sleep 600" });
    let told = world.with_key(&key, "POST", &exec, &waits).await;
    assert_eq!(told.error(), "402 spending_limit: the account has no credit left");
    assert!(world.fake.limited.lock().unwrap().contains(&id));
    assert_eq!(world.call("GET", "/v1/accounts/acme", "").await.value()["credit"], json!(0));
    for body in [Value::Null, json!({ "size": 1 })] {
        let refused = world.with_key(&key, "POST", "/v1/boxes", &body).await;
        assert_eq!(refused.error(), "402 spending_limit: the account has no credit left");
    }
    let path = "/v1/accounts/acme/credit";
    assert_eq!(world.call("PUT", path, r#"{"credit": 50}"#).await.value()["credit"], json!(50));
    assert!(world.fake.limited.lock().unwrap().is_empty());
    let ran = world.with_key(&key, "POST", &exec, &json!({ "command": "true" })).await;
    assert_eq!(ran.status, 200);
    // What is paid is not paid again; without a meter nothing is.
    assert_eq!(world.call("GET", "/v1/accounts/acme", "").await.value()["credit"], json!(50));
    world.call("PUT", path, r#"{"credit": null}"#).await;
    world.fake.awake_seconds.store(1000, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(world.call("PUT", path, r#"{"credit": 9}"#).await.value()["credit"], json!(9));
    let stopped = world.with_key(&key, "DELETE", &format!("/v1/boxes/{id}"), &Value::Null).await;
    assert_eq!(stopped.status, 204);
}

/// Of two accounts neither is the one that is meant: a proxy may add its own, and look at the other.
#[tokio::test]
async fn b43_an_operator_names_one_account_or_none() {
    let world = World::new().await;
    for account in ["acme", "other"] {
        assert_eq!(world.account(account).await.status, 201);
    }
    for (values, said) in [
        (&["acme"][..], None),
        (&["acme", "other"], Some("x-dormouse-account")),
        (&["acme", "acme"], Some("x-dormouse-account")),
        (&["default", "acme"], Some("x-dormouse-account")),
    ] {
        let mut request = world.request("GET", "/v1/boxes");
        for value in values {
            request = request.header("X-Dormouse-Account", *value);
        }
        let body = http_body_util::Full::new(bytes::Bytes::new());
        let answer = world.send(request.body(body).unwrap()).await;
        match said {
            None => assert_eq!(answer.status, 200, "{values:?}: {:?}", answer.body),
            Some(field) => {
                let refused = answer.value();
                assert_eq!((answer.status, &refused["field"]), (400, &json!(field)), "{values:?}");
                assert_eq!(refused["code"], "invalid_request");
            }
        }
    }
}
