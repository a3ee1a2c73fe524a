//! Commands: waited for, in the background, read by offset, attached to.

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{Error, Message};

use crate::client::World;

async fn background(world: &World, body: &Value) -> String {
    let mut body = body.clone();
    body["background"] = true.into();
    let answer = world.call("POST", "/v1/sandboxes/web/execs", body.to_string()).await;
    assert_eq!(answer.status, 201, "{:?}", answer.body);
    answer.value()["exec_id"].as_str().unwrap().to_owned()
}

async fn ended(world: &World, exec: &str) -> Value {
    let path = format!("/v1/sandboxes/web/execs/{exec}/output?follow=true");
    world.call("GET", &path, "").await;
    world.call("GET", &format!("/v1/sandboxes/web/execs/{exec}"), "").await.value()
}

async fn attach(
    world: &World,
    exec: &str,
    query: &str,
) -> Result<WebSocketStream<TcpStream>, Error> {
    let url = format!("ws://localhost/v1/sandboxes/web/execs/{exec}/attach?{query}");
    let mut request = url.into_client_request().unwrap();
    request
        .headers_mut()
        .insert("authorization", format!("Bearer {}", world.token).parse().unwrap());
    tokio_tungstenite::client_async(request, world.connect().await).await.map(|(socket, _)| socket)
}

/// All that an attached client is told: standard output, standard error, text messages but those about input.
async fn told(mut socket: WebSocketStream<TcpStream>) -> (String, String, Vec<Value>) {
    let (mut out, mut err, mut texts) = (Vec::new(), Vec::new(), Vec::new());
    while let Some(message) = socket.next().await {
        match message.unwrap() {
            Message::Binary(bytes) if bytes[0] == 1 => out.extend_from_slice(&bytes[1..]),
            Message::Binary(bytes) if bytes[0] == 2 => err.extend_from_slice(&bytes[1..]),
            Message::Text(text) => {
                let value: Value = serde_json::from_str(&text).unwrap();
                if value["type"] != "stdin_taken" {
                    texts.push(value);
                }
            }
            Message::Close(_) => {}
            other => panic!("{other:?}"),
        }
    }
    (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap(), texts)
}

#[tokio::test]
async fn s22_results_say_how_a_command_ended() {
    let world = World::new().await;
    world.sandbox("web").await;
    let run = async |body: Value| {
        world.call("POST", "/v1/sandboxes/web/execs", body.to_string()).await.value()
    };
    let cat = run(json!({"argv": ["cat"], "stdin": "hello"})).await;
    assert_eq!(
        (&cat["stdout"], &cat["exit_code"], &cat["truncated"]),
        (&json!("hello"), &json!(0), &json!(false))
    );
    let killed = run(json!({"command": "kill -KILL $$"})).await;
    assert_eq!((&killed["signal"], killed.get("exit_code")), (&json!(9), None));
    let slow = run(json!({"argv": ["sleep", "1000"], "timeout_ms": 50})).await;
    assert_eq!((&slow["timed_out"], &slow["signal"]), (&json!(true), &json!(9)));
    let bytes = run(json!({"command": "printf '\\377\\0x'"})).await;
    assert_eq!(
        (&bytes["stdout"], &bytes["stdout_base64"]),
        (&json!("\u{fffd}\0x"), &json!("/wB4"))
    );
    let big = run(json!({"command": "head -c 1048577 /dev/zero; echo end >&2"})).await;
    assert_eq!(
        (big["stdout"].as_str().unwrap().len(), &big["truncated"]),
        (1_048_576, &json!(true))
    );
    assert_eq!(big["stderr"], "end\n");
    let env = run(json!({"command": "echo $A", "env": {"A": "b"}})).await;
    assert_eq!(env["stdout"], "b\n");
    let absent =
        world.call("POST", "/v1/sandboxes/web/execs", r#"{"argv": ["/no/such/program"]}"#).await;
    assert!(absent.error().starts_with("422 program_not_found"), "{}", absent.error());
}

#[tokio::test]
async fn output_is_read_by_offset() {
    let world = World::new().await;
    world.sandbox("web").await;
    let exec = background(&world, &json!({"command": "printf 0123456789; echo no >&2"})).await;
    let view = ended(&world, &exec).await;
    assert_eq!(
        (&view["status"], &view["stdout_bytes"], &view["stderr_bytes"]),
        (&"exited".into(), &10.into(), &3.into())
    );
    let read = async |query: &str| {
        let answer =
            world.call("GET", &format!("/v1/sandboxes/web/execs/{exec}/output?{query}"), "").await;
        let headers = (
            answer.header("dormouse-offset").map(str::to_owned),
            answer.header("dormouse-next-offset").map(str::to_owned),
        );
        (String::from_utf8(answer.body.to_vec()).unwrap(), headers)
    };
    let number = |text: &str| Some(text.to_owned());
    assert_eq!(read("").await, ("0123456789".into(), (number("0"), number("10"))));
    assert_eq!(read("offset=4").await, ("456789".into(), (number("4"), number("10"))));
    assert_eq!(read("offset=10").await, (String::new(), (number("10"), number("10"))));
    assert_eq!(read("stream=stderr&follow=true").await, ("no\n".into(), (number("0"), None)));
    let beyond =
        world.call("GET", &format!("/v1/sandboxes/web/execs/{exec}/output?offset=11"), "").await;
    assert_eq!(beyond.error(), "422 unprocessable offset: `offset`: 11 is out of range");
    let list = world.call("GET", "/v1/sandboxes/web/execs", "").await.value();
    assert_eq!(list["execs"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn output_is_followed_while_it_is_written() {
    let world = World::new().await;
    world.sandbox("web").await;
    let exec = background(&world, &json!({"argv": ["cat"], "open_stdin": true})).await;
    let path = format!("/v1/sandboxes/web/execs/{exec}");
    let request = world
        .request("GET", &format!("{path}/output?follow=true"))
        .body(Full::new(Bytes::new()))
        .unwrap();
    let mut body = world.open(request).await.into_body();
    for line in ["one\n", "two\n"] {
        assert_eq!(world.call("POST", &format!("{path}/stdin"), line).await.status, 204);
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), line);
    }
    assert_eq!(world.call("POST", &format!("{path}/stdin?close=true"), "").await.status, 204);
    assert!(body.frame().await.is_none());
    assert_eq!(ended(&world, &exec).await["exit"]["exit_code"], 0);
}

#[tokio::test]
async fn signals_reach_the_command() {
    let world = World::new().await;
    world.sandbox("web").await;
    let exec = background(&world, &json!({"argv": ["sleep", "1000"]})).await;
    let path = format!("/v1/sandboxes/web/execs/{exec}/signal");
    let bad = world.call("POST", &path, r#"{"signal": "NOPE"}"#).await.error();
    assert_eq!(bad, "400 invalid_request signal: `signal`: not a signal");
    assert_eq!(world.call("POST", &path, r#"{"signal": "SIGTERM"}"#).await.status, 204);
    assert_eq!(ended(&world, &exec).await["exit"]["signal"], 15);
}

#[tokio::test]
async fn attached_both_streams_come_and_the_end() {
    let world = World::new().await;
    world.sandbox("web").await;
    let exec =
        background(&world, &json!({"command": "cat; echo e >&2; exit 7", "open_stdin": true}))
            .await;
    let mut socket = attach(&world, &exec, "hold=true").await.unwrap();
    world.fake.holds.subscribe().wait_for(|holds| *holds == 1).await.unwrap();
    socket.send(Message::Binary(b"\0hello ".to_vec().into())).await.unwrap();
    socket.send(Message::Binary(b"\0world".to_vec().into())).await.unwrap();
    socket.send(Message::Text(r#"{"type": "close_stdin"}"#.into())).await.unwrap();
    let (out, err, texts) = told(socket).await;
    assert_eq!((out.as_str(), err.as_str()), ("hello world", "e\n"));
    assert_eq!(texts, [json!({"type": "exit", "exit_code": 7, "timed_out": false})]);
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();
}

#[tokio::test]
async fn a_cut_attachment_goes_on_where_it_was() {
    let world = World::new().await;
    world.sandbox("web").await;
    let exec = background(
        &world,
        &json!({"command": "printf 01234; cat; printf 56789", "open_stdin": true}),
    )
    .await;
    let mut socket = attach(&world, &exec, "").await.unwrap();
    let mut received = 0;
    while received < 5 {
        if let Message::Binary(bytes) = socket.next().await.unwrap().unwrap() {
            received += bytes.len() - 1;
        }
    }
    drop(socket);
    let mut socket = attach(&world, &exec, "stdout=5").await.unwrap();
    socket.send(Message::Text(r#"{"type": "close_stdin"}"#.into())).await.unwrap();
    let (out, _, texts) = told(socket).await;
    assert_eq!((out.as_str(), &texts[0]["exit_code"]), ("56789", &json!(0)));
}

#[tokio::test]
async fn attached_signals_and_bad_messages() {
    let world = World::new().await;
    world.sandbox("web").await;
    let exec = background(&world, &json!({"argv": ["sleep", "1000"]})).await;
    for (message, field) in [
        (Message::Text(r#"{"type": "signal", "signal": "NOPE"}"#.into()), "signal"),
        (Message::Text("x".into()), "body"),
        (Message::Text(r#"{"type": "exit", "timed_out": false}"#.into()), "type"),
        (Message::Binary(b"\x01x".to_vec().into()), "message"),
    ] {
        let mut socket = attach(&world, &exec, "").await.unwrap();
        socket.send(message).await.unwrap();
        let (_, _, texts) = told(socket).await;
        assert_eq!(
            (&texts[0]["type"], &texts[0]["field"]),
            (&json!("error"), &json!(field)),
            "{texts:?}"
        );
    }
    let mut socket = attach(&world, &exec, "").await.unwrap();
    socket.send(Message::Text(r#"{"type": "signal", "signal": "INT"}"#.into())).await.unwrap();
    assert_eq!(told(socket).await.2[0]["signal"], 2);

    let Err(Error::Http(refused)) = attach(&world, "99", "").await else {
        panic!("attached to nothing")
    };
    assert_eq!(refused.status(), 404);
    let plain =
        world.call("GET", &format!("/v1/sandboxes/web/execs/{exec}/attach"), "").await.error();
    assert_eq!(plain, "426 upgrade_required Upgrade: this path is a WebSocket");
}

#[tokio::test]
async fn s02_a_call_that_waits_holds_and_one_that_is_gone_does_not() {
    let world = World::new().await;
    world.sandbox("web").await;
    let body = r#"{"argv": ["sleep", "1000"]}"#;
    let request = world
        .request("POST", "/v1/sandboxes/web/execs")
        .body(Full::new(Bytes::from(body)))
        .unwrap();
    let (mut sender, wire) =
        hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(world.connect().await))
            .await
            .unwrap();
    let wire = tokio::spawn(wire);
    let asked = tokio::spawn(async move { sender.send_request(request).await.map(drop) });
    world.fake.holds.subscribe().wait_for(|holds| *holds == 1).await.unwrap();
    asked.abort();
    wire.abort();
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();
    let list = world.call("GET", "/v1/sandboxes/web/execs", "").await.value();
    assert_eq!(list["execs"][0]["status"], "running", "the command runs on");
}
