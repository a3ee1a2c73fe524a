//! The interface: what is refused and how, who may ask, and what a restart finds again.

use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::Ordering;

use api::host::{Host, NewSandbox};
use api::{Code, SandboxId};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::Request;
use hyper::body::Frame;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::client::{Answer, World, send_over};

#[tokio::test]
async fn create_list_get_exec_delete() {
    let world = World::new().await;
    let made = world.sandbox("web").await;
    assert_eq!(made.name, "web");
    let list = world.call("GET", "/v1/sandboxes", "").await.value();
    assert_eq!(list["sandboxes"][0]["id"], made.id.as_str());
    for path in ["/v1/sandboxes/web", &format!("/v1/sandboxes/{}", made.id)] {
        assert_eq!(world.call("GET", path, "").await.value()["name"], "web");
    }
    let body = r#"{"argv": ["sh", "-c", "echo out; echo err >&2; exit 3"]}"#;
    let result = world.call("POST", "/v1/sandboxes/web/execs", body).await;
    assert_eq!(result.status, 200);
    let result = result.value();
    let told = (&result["stdout"], &result["stderr"], &result["exit_code"]);
    assert_eq!(told, (&"out\n".into(), &"err\n".into(), &3.into()));
    assert_eq!(world.call("DELETE", "/v1/sandboxes/web", "").await.status, 204);
    let gone = world.call("GET", "/v1/sandboxes/web", "").await.error();
    assert_eq!(gone, "404 not_found: no sandbox has the id or name `web`");
}

#[tokio::test]
async fn bad_input_is_named_and_changes_nothing() {
    let world = World::new().await;
    world.sandbox("web").await;
    let check = async |method: &str, path: &str, body: &str, want: &str| {
        assert_eq!(
            world.call(method, path, body.to_owned()).await.error(),
            want,
            "{method} {path} {body}"
        );
    };
    let create = "/v1/sandboxes";
    check("POST", create, "{", "400 invalid_request body: the body is no JSON: EOF while parsing an object at line 1 column 1").await;
    check("POST", create, "[]", "400 invalid_request body: the body is not a JSON object").await;
    check(
        "POST",
        create,
        r#"{"nmae": "x"}"#,
        "400 invalid_request nmae: the body has a field that is not known: `nmae`",
    )
    .await;
    check("POST", create, r#"{"sleep_after_seconds": "5"}"#, r#"400 invalid_request sleep_after_seconds: `sleep_after_seconds`: invalid type: string "5""#).await;
    check(
        "POST",
        create,
        r#"{"sleep_after_seconds": 0}"#,
        "400 invalid_request sleep_after_seconds: `sleep_after_seconds`: 0 is out of range",
    )
    .await;
    check("POST", create, r#"{"name": "../etc"}"#, "400 invalid_request name: `name`: not a name")
        .await;
    check("POST", create, r#"{"name": "web"}"#, "409 name_taken name: the name `web` is taken")
        .await;
    check(
        "GET",
        "/v1/sandboxes?limit=x",
        "",
        "400 invalid_request limit: `limit`: invalid digit found in string",
    )
    .await;
    check(
        "GET",
        "/v1/sandboxes?limit=0",
        "",
        "400 invalid_request limit: `limit`: 0 is out of range",
    )
    .await;
    check(
        "GET",
        "/v1/sandboxes?page=2",
        "",
        "400 invalid_request page: the query has a field that is not known: `page`",
    )
    .await;
    check(
        "GET",
        "/v1/sandboxes?status=asleep",
        "",
        "400 invalid_request status: `status`: unknown variant `asleep`",
    )
    .await;
    check("GET", "/v1/sandboxes?cursor=%00", "", "400 invalid_request cursor: not a cursor").await;
    check(
        "PATCH",
        "/v1/sandboxes/web",
        r#"{"cpus": 2}"#,
        "400 invalid_request cpus: the body has a field that is not known: `cpus`",
    )
    .await;
    check(
        "POST",
        "/v1/sandboxes/web/sleep",
        r#"{"tier": "off"}"#,
        "400 invalid_request tier: cannot be asked for",
    )
    .await;
    check(
        "GET",
        "/v1/sandboxes/nobody",
        "",
        "404 not_found: no sandbox has the id or name `nobody`",
    )
    .await;
    check("GET", "/v1/sandboxes/%2e%2e%2fetc", "", "404 not_found: no sandbox has this id or name")
        .await;
    check("GET", "/v1/sandboxes/%ff", "", "404 not_found: no such path").await;
    check("GET", "/v1/sandboxes/web/links/0", "", "400 invalid_request port: not a port").await;
    check(
        "GET",
        "/v1/sandboxes/web/logs?kind=kernel",
        "",
        "400 invalid_request kind: `kind`: unknown variant `kernel`",
    )
    .await;
    check("GET", "/v1/nothing", "", "404 not_found: no such path").await;
    check("GET", "/", "", "404 not_found: no such path").await;
    check("PUT", create, "{}", "405 method_not_allowed: this path does not have this method").await;
    check(
        "POST",
        "/v1/sandboxes/web/execs",
        "{}",
        "400 invalid_request argv: there is nothing to run",
    )
    .await;
    check("GET", "/v1/sandboxes/web/execs/7", "", "404 not_found: no command has the id `7`").await;
    check("GET", "/v1/sandboxes/web/execs/a%2fb", "", "404 not_found: no command has this id")
        .await;
    check(
        "GET",
        "/v1/sandboxes/web/files?path=work",
        "",
        "400 invalid_request path: `path`: not absolute",
    )
    .await;
    check(
        "GET",
        "/v1/sandboxes/web/files",
        "",
        "400 invalid_request path: the query lacks the field `path`",
    )
    .await;
    check(
        "DELETE",
        "/v1/sandboxes/web/files?path=/",
        "",
        "422 unprocessable path: `path`: the whole disk cannot be removed",
    )
    .await;
    check(
        "PUT",
        "/v1/sandboxes/web/files?path=/work/a&mode=rw",
        "",
        "400 invalid_request mode: `mode`: no permission bits",
    )
    .await;
    check(
        "PUT",
        "/v1/sandboxes/web/tree?path=/work/../..",
        "",
        "400 invalid_request path: `path`: contains `..`",
    )
    .await;

    let allowed = world.call("PUT", create, "{}").await;
    assert_eq!(allowed.header("allow"), Some("POST,GET,HEAD"));
    assert_eq!(world.fake.makes.load(Ordering::SeqCst), 1, "a refused request reached the host");
    let list = world.call("GET", "/v1/sandboxes", "").await.value();
    assert_eq!(list["sandboxes"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn bodies_over_the_limit_are_refused_with_and_without_their_length() {
    let world = World::new().await;
    let big = Bytes::from(vec![b' '; 1024 * 1024 + 1]);
    let want = "413 too_large body: the body is over 1048576 bytes";
    assert_eq!(world.call("POST", "/v1/sandboxes", big.clone()).await.error(), want);
    let pieces = futures_util::stream::iter(
        (0..=16).map(move |_| Ok::<_, std::io::Error>(Frame::data(big.slice(..65_536)))),
    );
    let request = world.request("POST", "/v1/sandboxes").body(StreamBody::new(pieces)).unwrap();
    assert_eq!(world.send(request).await.error(), want);
    assert_eq!(world.fake.makes.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_request_that_breaks_off_makes_nothing() {
    let world = World::new().await;
    let mut stream = world.connect().await;
    let head = format!(
        "POST /v1/sandboxes HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\ncontent-length: 15\r\n\r\n",
        world.token
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(br#"{"name": "#).await.unwrap();
    stream.shutdown().await.unwrap();
    // The server has dealt with it when it closes.
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).await.unwrap();
    assert_eq!(world.fake.makes.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_head_over_the_limit_is_refused() {
    let world = World::new().await;
    let request = world
        .request("GET", "/v1/sandboxes")
        .header("x-big", "x".repeat(140_000))
        .body(Full::new(Bytes::new()));
    assert_eq!(world.open(request.unwrap()).await.status(), 431);
    let mut request = world.request("GET", "/v1/sandboxes");
    for number in 0..100 {
        request = request.header(format!("x-{number}"), "x");
    }
    assert_eq!(world.open(request.body(Full::new(Bytes::new())).unwrap()).await.status(), 431);
}

#[tokio::test]
async fn only_holders_of_the_token_and_of_the_socket_get_in() {
    let world = World::new().await;
    let with = async |path: &str, authorization: Option<&str>| {
        let mut request = Request::builder().uri(path).header("host", "localhost");
        if let Some(value) = authorization {
            request = request.header("authorization", value);
        }
        world.send(request.body(Full::new(Bytes::new())).unwrap()).await
    };
    let good = format!("Bearer {}", world.token);
    assert_eq!(with("/v1/sandboxes", Some(&good)).await.status, 200);
    assert_eq!(with("/v1/sandboxes", Some(&good.replace("Bearer", "bearer"))).await.status, 200);
    let bad = good.clone() + "0";
    for (path, value) in [
        ("/v1/sandboxes", None),
        ("/v1/sandboxes", Some("Basic eA==")),
        ("/v1/sandboxes", Some(bad.as_str())),
        ("/v1/sandboxes", Some("Bearer ")),
        ("/v1/nothing", None),
    ] {
        let answer = with(path, value).await;
        assert!(
            answer.error().starts_with("401 unauthorized: "),
            "{path} {value:?}: {}",
            answer.error()
        );
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
    }
    assert_eq!(with("/v1/health", None).await.value()["status"], "ok");
    assert_eq!(with("/v1/openapi.json", None).await.value()["openapi"], "3.1.0");

    let socket = world.data.path().join(control::SOCKET_FILE);
    let mode =
        |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&socket), 0o600);
    assert_eq!(mode(&world.data.path().join(control::ADMIN_TOKEN_FILE)), 0o600);
    let stream = tokio::net::UnixStream::connect(socket).await.unwrap();
    let request = Request::builder()
        .uri("/v1/sandboxes")
        .header("host", "x")
        .body(Full::new(Bytes::new()))
        .unwrap();
    assert_eq!(send_over(stream, request).await.status(), 200);
}

#[tokio::test]
async fn the_token_is_kept_only_as_a_hash_and_lasts_over_restarts() {
    let mut world = World::new().await;
    world.restart().await;
    assert_eq!(world.call("GET", "/v1/sandboxes", "").await.status, 200);
    for file in ["dormouse.db", "dormouse.db-wal"] {
        let bytes = std::fs::read(world.data.path().join(file)).unwrap_or_default();
        let found = bytes.windows(world.token.len()).any(|part| part == world.token.as_bytes());
        assert!(!found, "the token stands in {file}");
    }
}

#[tokio::test]
async fn lists_are_filtered_and_paged() {
    let world = World::new().await;
    for name in ["a", "b", "c", "d"] {
        let label = if name == "b" { r#"{"team": "x", "b": ""}"# } else { r#"{"team": "y"}"# };
        let body = format!(r#"{{"name": "{name}", "labels": {label}}}"#);
        assert_eq!(world.call("POST", "/v1/sandboxes", body).await.status, 201);
    }
    world.call("POST", "/v1/sandboxes/c/sleep", "").await;
    let names = async |query: &str| {
        let page = world.call("GET", &format!("/v1/sandboxes{query}"), "").await.value();
        let names: Vec<String> = page["sandboxes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["name"].as_str().unwrap().to_owned())
            .collect();
        (names.join(""), page["next_cursor"].as_str().map(str::to_owned))
    };
    assert_eq!(names("").await, ("abcd".into(), None));
    assert_eq!(names("?name=b").await.0, "b");
    assert_eq!(names("?status=sleeping").await.0, "c");
    assert_eq!(names("?label=team%3Dy").await.0, "acd");
    assert_eq!(names("?label=team%3Dx,b").await.0, "b");
    assert_eq!(names("?label=nothing").await.0, "");
    let (first, cursor) = names("?limit=3").await;
    assert_eq!(first, "abc");
    let cursor = cursor.unwrap();
    world.call("DELETE", "/v1/sandboxes/c", "").await;
    assert_eq!(names(&format!("?limit=3&cursor={cursor}")).await, ("d".into(), None));
}

#[tokio::test]
async fn s06_policy_is_changed_and_null_means_never() {
    let world = World::new().await;
    world.sandbox("web").await;
    let changed = world
        .call("PATCH", "/v1/sandboxes/web", r#"{"name": "api", "sleep_after_seconds": null}"#)
        .await
        .value();
    assert_eq!(
        (&changed["name"], &changed["sleep_after_seconds"]),
        (&"api".into(), &serde_json::Value::Null)
    );
    assert_eq!(world.call("GET", "/v1/sandboxes/web", "").await.status, 404);
    world.sandbox("web").await;
    let taken = world.call("PATCH", "/v1/sandboxes/api", r#"{"name": "web"}"#).await.error();
    assert_eq!(taken, "409 name_taken name: the name `web` is taken");
    let own = world
        .call("PATCH", "/v1/sandboxes/api", r#"{"name": "api", "sleep_after_seconds": 300.0}"#)
        .await
        .value();
    assert_eq!(own["sleep_after_seconds"], 300);
}

#[tokio::test]
async fn a_name_may_look_like_an_id_but_not_like_anothers() {
    let world = World::new().await;
    let first = world.sandbox("web").await;
    let taken = world.call("POST", "/v1/sandboxes", format!(r#"{{"name": "{}"}}"#, first.id)).await;
    assert!(taken.error().starts_with("409 name_taken"), "{}", taken.error());
    let made = world.sandbox("abcdefghijkl").await;
    assert_eq!(
        world.call("GET", "/v1/sandboxes/abcdefghijkl", "").await.value()["id"],
        made.id.as_str()
    );
}

#[tokio::test]
async fn s08_reading_and_listing_wake_nothing_and_what_woke_says_how_long() {
    let world = World::new().await;
    let web = world.sandbox("web").await;
    world.call("POST", "/v1/sandboxes/web/sleep", r#"{"tier": "disk"}"#).await;
    for path in
        ["", "/web", "/web/events", "/web/why", "/web/logs", "/web/links/80", "?status=sleeping"]
    {
        let answer = world.call("GET", &format!("/v1/sandboxes{path}"), "").await;
        assert_eq!((answer.status, answer.header("server-timing")), (200, None), "{path}");
    }
    assert_eq!(world.fake.wakes(&web.id), 0);
    let woke = world.call("POST", "/v1/sandboxes/web/execs", r#"{"command": "true"}"#).await;
    assert_eq!((woke.status, woke.header("server-timing")), (200, Some("wake;dur=12.5")));
    let again = world.call("POST", "/v1/sandboxes/web/execs", r#"{"command": "true"}"#).await;
    assert_eq!((again.status, again.header("server-timing")), (200, None));
    assert_eq!(world.fake.wakes(&web.id), 1);
}

#[tokio::test]
async fn every_answer_has_a_request_id_of_its_own() {
    let world = World::new().await;
    let one = world.call("GET", "/v1/health", "").await;
    let other = world.call("GET", "/v1/nothing", "").await;
    assert_eq!(one.header("x-request-id").map(str::len), Some(16));
    assert_ne!(one.header("x-request-id"), other.header("x-request-id"));
}

#[tokio::test]
async fn a_restart_finds_everything_again() {
    let mut world = World::new().await;
    let web = world.sandbox("web").await;
    let link = world.link("web", 8000).await;
    world.restart().await;
    assert_eq!(world.call("GET", "/v1/sandboxes/web", "").await.value()["id"], web.id.as_str());
    assert_eq!(
        world.link("web", 8000).await.split(':').next(),
        link.split(':').next(),
        "the URL's key stays"
    );
}

#[tokio::test]
async fn what_a_host_has_and_the_catalogue_lost_is_entered_again() {
    let mut world = World::new().await;
    world.sandbox("web").await;
    let lost: SandboxId = "lostlostlost".parse().unwrap();
    let new = |id: &SandboxId, name: &str| NewSandbox {
        id: id.clone(),
        name: name.into(),
        snapshot: None,
        image: "default".into(),
        cpus: 1,
        memory_mib: 512,
        drives: Vec::new(),
        volumes: Vec::new(),
        env: std::collections::BTreeMap::new(),
        labels: std::collections::BTreeMap::new(),
        boxed: None,
        wiring: None,
        policy: api::sandbox::PolicyPatch::default(),
        link_key: "keykeykeykeykeykeyke".into(),
        epoch: 1,
    };
    world.fake.create(new(&lost, "db")).await.unwrap();
    let same_name: SandboxId = "samesamesame".parse().unwrap();
    world.fake.create(new(&same_name, "web")).await.unwrap();
    world.restart().await;
    assert_eq!(world.call("GET", "/v1/sandboxes/db", "").await.value()["id"], lost.as_str());
    assert!(world.link("db", 80).await.starts_with("lostlostlost-keykeykeykeykeykeyke-80."));
    let renamed = world.call("GET", "/v1/sandboxes/samesamesame", "").await.value();
    assert_eq!(
        renamed["name"], "samesamesame",
        "its name was taken, and its host knows the new one"
    );
}

#[tokio::test]
async fn a_sandbox_that_its_host_lost_can_be_deleted() {
    let mut world = World::new().await;
    let web = world.sandbox("web").await;
    world.fake.delete(&web.id).await.unwrap();
    world.restart().await;
    assert_eq!(world.call("GET", "/v1/sandboxes/web", "").await.status, 404);
    assert_eq!(world.call("DELETE", "/v1/sandboxes/web", "").await.status, 204);
    world.sandbox("web").await;
}

#[tokio::test]
async fn s21_one_that_is_being_deleted_is_in_no_list_and_goes_after_a_restart() {
    let mut world = World::new().await;
    let (web, kept) = (world.sandbox("web").await, world.sandbox("kept").await);
    world.fake.begin_to_delete(&web.id);
    let list = world.call("GET", "/v1/sandboxes", "").await.value();
    assert_eq!(list["sandboxes"].as_array().map(Vec::len), Some(1));
    assert_eq!(list["sandboxes"][0]["id"], kept.id.as_str());
    for path in ["/v1/sandboxes/web", "/v1/sandboxes/web/why", "/v1/sandboxes/web/usage"] {
        let told = world.call("GET", path, "").await.error();
        assert_eq!(told, "409 being_deleted: the sandbox is being deleted", "{path}");
    }
    // Only its host has noted that: the catalogue could not.
    world.restart().await;
    while world.call("GET", "/v1/sandboxes/web", "").await.status != 404 {
        tokio::task::yield_now().await;
    }
    assert_eq!(world.fake.list().await.len(), 1);
    world.sandbox("web").await;
}

#[tokio::test]
async fn a_create_that_fails_leaves_nothing() {
    let world = World::new().await;
    *world.fake.fail_make.lock().unwrap() =
        Some(api::ApiError::new(Code::NoCapacity, "the host is full"));
    let refused = world.call("POST", "/v1/sandboxes", r#"{"name": "web"}"#).await;
    assert_eq!(refused.error(), "503 no_capacity: the host is full");
    assert_eq!(refused.value()["retryable"], true);
    assert_eq!(world.call("GET", "/v1/sandboxes/web", "").await.status, 404);
    world.sandbox("web").await;
}

#[tokio::test]
async fn a_client_that_goes_away_does_not_stop_what_it_asked_for() {
    let world = World::new().await;
    world.fake.gate.send_replace(false);
    let request = world
        .request("POST", "/v1/sandboxes")
        .body(Full::new(Bytes::from(r#"{"name": "web"}"#)))
        .unwrap();
    let (mut sender, wire) =
        hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(world.connect().await))
            .await
            .unwrap();
    let wire = tokio::spawn(wire);
    let asked = tokio::spawn(async move { sender.send_request(request).await.map(drop) });
    world.fake.waiting.subscribe().wait_for(|waiting| *waiting == 1).await.unwrap();
    asked.abort();
    wire.abort();
    world.fake.gate.send_replace(true);
    // The next of this name is refused once the first is there, and in between as well.
    let taken = world.call("POST", "/v1/sandboxes", r#"{"name": "web"}"#).await;
    assert_eq!(taken.error(), "409 name_taken name: the name `web` is taken");
    world.fake.waiting.subscribe().wait_for(|waiting| *waiting == 0).await.unwrap();
    assert_eq!(world.fake.ids().len(), 1);
}

#[tokio::test]
async fn a_second_daemon_on_the_same_folder_is_refused() {
    let world = World::new().await;
    let settings = control::Settings {
        data: world.data.path().to_owned(),
        listen: "127.0.0.1:0".into(),
        domain: "localhost".into(),
        public_url: None,
        edge: control::EdgeLimits::default(),
        boxes: control::BoxSettings::default(),
        tls: None,
        trusted_proxies: Vec::new(),
        open_metrics: false,
        follow_max: None,
    };
    let Err(error) = control::serve(std::sync::Arc::clone(&world.fake) as _, settings).await else {
        panic!("two daemons on one folder");
    };
    assert!(error.to_string().starts_with("listen on the local socket"), "{error}");
    assert_eq!(world.call("GET", "/v1/sandboxes", "").await.status, 200);
}

#[tokio::test]
async fn stopping_lets_requests_end_and_cuts_endless_streams() {
    let mut world = World::new().await;
    world.sandbox("web").await;
    let stream =
        world.open(world.request("GET", "/v1/events").body(Full::new(Bytes::new())).unwrap()).await;
    world.fake.gate.send_replace(false);
    let slow =
        world.request("POST", "/v1/sandboxes/web/fork").body(Full::new(Bytes::new())).unwrap();
    let connection = world.connect().await;
    let slow = tokio::spawn(async move { Answer::read(send_over(connection, slow).await).await });
    world.fake.waiting.subscribe().wait_for(|waiting| *waiting == 1).await.unwrap();
    let server = world.server.take().unwrap();
    let stop = tokio::spawn(server.stop());
    let rest = stream.into_body().collect().await;
    assert!(rest.is_ok(), "the stream is ended, not broken: {rest:?}");
    world.fake.gate.send_replace(true);
    assert_eq!(slow.await.unwrap().status, 201);
    stop.await.unwrap();
}

#[tokio::test]
async fn s21_when_one_is_deleted_by_itself_can_be_set_for_one_and_for_all() {
    let world = World::new().await;
    world.sandbox("web").await;
    let set = |body: &'static str| world.call("PATCH", "/v1/sandboxes/web", body);
    assert_eq!(
        set(r#"{"delete_after_idle_ms": 5000}"#).await.value()["delete_after_idle_ms"],
        5000
    );
    let unset = set(r#"{"delete_after_idle_ms": null}"#).await.value();
    assert_eq!(unset["delete_after_idle_ms"], serde_json::Value::Null);
    let at = "2100-01-31T18:00:00Z";
    assert_eq!(set(r#"{"expires_at": "2100-01-31T18:00:00Z"}"#).await.value()["expires_at"], at);
    for (body, field) in [
        (r#"{"delete_after_idle_ms": 0}"#, "delete_after_idle_ms"),
        (r#"{"expires_at": "tomorrow"}"#, "expires_at"),
    ] {
        let refused = set(body).await.error();
        assert!(refused.starts_with(&format!("400 invalid_request {field}: ")), "{refused}");
    }
    let passed = set(r#"{"expires_at": "2001-01-31T18:00:00Z"}"#).await.error();
    assert_eq!(passed, "422 unprocessable expires_at: `expires_at`: this time has passed");
    let project = |method, body| world.call(method, "/v1/project", body);
    assert_eq!(project("GET", "").await.value()["delete_after_idle_days"], serde_json::Value::Null);
    let changed = project("PATCH", r#"{"delete_after_idle_days": 30}"#).await;
    assert_eq!(changed.value()["delete_after_idle_days"], 30);
    assert_eq!(project("PATCH", "{}").await.value()["delete_after_idle_days"], 30);
    let refused = project("PATCH", r#"{"delete_after_idle_days": 3651}"#).await.error();
    assert!(refused.starts_with("400 invalid_request delete_after_idle_days: "), "{refused}");
}

#[tokio::test]
async fn s23_a_spending_limit_is_set_told_and_passed_on() {
    let world = World::new().await;
    world.sandbox("web").await;
    let used = |gib_seconds| world.fake.gib_seconds.store(gib_seconds, Ordering::SeqCst);
    let reached = || world.fake.spending_reached.load(Ordering::SeqCst);
    let project = |method, body| world.call(method, "/v1/project", body);
    let none = project("GET", "").await.value();
    assert_eq!(none["spending_limit"], serde_json::Value::Null);
    assert!(none.get("spending").is_none(), "{none}");

    // What was used before the limit was set is not spent.
    used(1000);
    let limit = r#"{"spending_limit": {"memory_gib_seconds": 50}}"#;
    let set = project("PATCH", limit).await.value();
    assert_eq!(set["spending_limit"]["memory_gib_seconds"], 50);
    assert_eq!(set["spending"]["memory_gib_seconds"], 0);
    assert!(!reached());
    used(1049);
    assert_eq!(project("GET", "").await.value()["spending"]["reached"], false);
    assert!(!reached());
    used(1050);
    let told = project("GET", "").await.value();
    assert_eq!(told["spending"]["memory_gib_seconds"], 50);
    assert_eq!(told["spending"]["reached"], true);
    assert!(reached());
    // Another setting leaves it as it is; what is used stays used where it is raised.
    project("PATCH", r#"{"delete_after_idle_days": 3}"#).await.value();
    assert!(reached());
    let more = r#"{"spending_limit": {"memory_gib_seconds": 51}}"#;
    let raised = project("PATCH", more).await.value();
    assert_eq!(raised["spending"]["memory_gib_seconds"], 50);
    assert_eq!(raised["delete_after_idle_days"], 3);
    assert!(!reached());
    let off = project("PATCH", r#"{"spending_limit": null}"#).await.value();
    assert_eq!(off["spending_limit"], serde_json::Value::Null);
    assert!(!reached());

    for wrong in ["0", "31536000000001"] {
        let body = format!(r#"{{"spending_limit": {{"memory_gib_seconds": {wrong}}}}}"#);
        let refused = world.call("PATCH", "/v1/project", body).await.error();
        let field = "400 invalid_request spending_limit.memory_gib_seconds: ";
        assert!(refused.starts_with(field), "{refused}");
    }
    let refused = project("PATCH", r#"{"spending_limit": {"euros": 5}}"#).await.error();
    assert!(refused.starts_with("400 invalid_request "), "{refused}");
}

#[tokio::test]
async fn s18_a_sandbox_that_was_taken_over_is_in_the_catalogue() {
    let world = World::new().await;
    let made = world.sandbox("web").await;
    let known = world.fake.view(&made.id).await.unwrap();
    let restore = format!("/v1/checkpoints/{}/restore", made.id);
    assert_eq!(world.call("DELETE", "/v1/sandboxes/web", "").await.status, 204);
    let none = format!("404 not_found: the store has no checkpoint of `{}`", made.id);
    assert_eq!(world.call("POST", &restore, "").await.error(), none);
    assert_eq!(
        world.call("POST", "/v1/checkpoints/web/restore", "").await.error(),
        "404 not_found: there is no checkpoint of this id"
    );
    *world.fake.lost.lock().unwrap() = Some(known);
    let taken = world.call("POST", &restore, "").await;
    assert_eq!(taken.status, 201);
    assert_eq!(world.call("GET", "/v1/sandboxes/web", "").await.value()["id"], made.id.as_str());
    let list = world.call("GET", "/v1/checkpoints", "").await.value();
    assert_eq!(list["checkpoints"], serde_json::json!([]));
}
