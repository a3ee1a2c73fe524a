//! Terminals: started, looked at by several, typed to.

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{Error, Message};

use crate::client::World;

type Socket = WebSocketStream<TcpStream>;

async fn started(world: &World) -> String {
    world.sandbox("web").await;
    let answer = world.call("POST", "/v1/sandboxes/web/terminals", "{}").await;
    assert_eq!(answer.status, 201, "{:?}", answer.body);
    answer.value()["terminal_id"].as_str().unwrap().to_owned()
}

async fn attach(world: &World, terminal: &str, query: &str) -> Result<Socket, Error> {
    let url = format!("ws://localhost/v1/sandboxes/web/terminals/{terminal}/attach?{query}");
    let mut request = url.into_client_request().unwrap();
    let token = format!("Bearer {}", world.token).parse().unwrap();
    request.headers_mut().insert("authorization", token);
    tokio_tungstenite::client_async(request, world.connect().await).await.map(|(socket, _)| socket)
}

/// Reads until this much was shown; answers it with the text messages on the way.
async fn shown(socket: &mut Socket, until: &str) -> (String, Vec<Value>) {
    let (mut bytes, mut texts) = (Vec::new(), Vec::new());
    while !String::from_utf8_lossy(&bytes).contains(until) {
        match socket.next().await.expect("more comes").unwrap() {
            Message::Binary(more) => bytes.extend_from_slice(&more),
            Message::Text(text) => texts.push(serde_json::from_str(&text).unwrap()),
            other => panic!("{other:?}"),
        }
    }
    (String::from_utf8(bytes).unwrap(), texts)
}

/// The text messages up to the close.
async fn told(mut socket: Socket) -> Vec<Value> {
    let mut texts = Vec::new();
    while let Some(message) = socket.next().await {
        if let Message::Text(text) = message.unwrap() {
            texts.push(serde_json::from_str(&text).unwrap());
        }
    }
    texts
}

#[tokio::test]
async fn several_viewers_see_the_screen_and_what_each_types() {
    let world = World::new().await;
    let terminal = started(&world).await;
    let mut one = attach(&world, &terminal, "columns=100&rows=30").await.unwrap();
    one.send(Message::Binary("first\n".into())).await.unwrap();
    let (_, texts) = shown(&mut one, "first\n").await;
    assert_eq!(texts, [json!({"type": "screen", "columns": 80, "rows": 24})]);
    // Who comes later is shown what was there.
    let mut two = attach(&world, &terminal, "").await.unwrap();
    assert_eq!(shown(&mut two, "first\n").await.0, "first\n");
    two.send(Message::Binary("second\n".into())).await.unwrap();
    shown(&mut one, "second\n").await;
    shown(&mut two, "second\n").await;
    drop(two);
    one.send(Message::Text(r#"{"type": "size", "columns": 90, "rows": 20}"#.into())).await.unwrap();
    one.send(Message::Binary("\x04".into())).await.unwrap();
    assert_eq!(told(one).await, [json!({"type": "exit", "exit_code": 0, "timed_out": false})]);
    let path = format!("/v1/sandboxes/web/terminals/{terminal}");
    let view = world.call("GET", &path, "").await.value();
    assert_eq!((&view["status"], &view["exit"]["exit_code"]), (&json!("exited"), &json!(0)));
    let screen = world.call("GET", &format!("{path}/screen"), "").await.value();
    assert_eq!(screen["text"], "first\nsecond\n");
    let list = world.call("GET", "/v1/sandboxes/web/terminals", "").await.value();
    assert_eq!(list["terminals"][0]["terminal_id"], terminal);
}

/// More keys than may wait, for a program that says nothing meanwhile.
#[tokio::test]
async fn many_keys_reach_a_silent_program() {
    let world = World::new().await;
    world.sandbox("web").await;
    let silent = json!({"argv": ["cp", "/dev/stdin", "/work/typed"]}).to_string();
    let answer = world.call("POST", "/v1/sandboxes/web/terminals", silent).await;
    let terminal = answer.value()["terminal_id"].as_str().unwrap().to_owned();
    let mut socket = attach(&world, &terminal, "").await.unwrap();
    let keys: String = ('a'..='z').cycle().take(300).collect();
    for key in keys.chars() {
        socket.send(Message::Binary(key.to_string().into())).await.unwrap();
    }
    socket.send(Message::Binary("\x04".into())).await.unwrap();
    assert_eq!(told(socket).await.last().unwrap()["exit_code"], 0);
    let typed = world.call("GET", "/v1/sandboxes/web/files?path=/work/typed", "").await;
    assert_eq!(typed.body, keys);
}

#[tokio::test]
async fn one_is_resized_and_closed() {
    let world = World::new().await;
    let terminal = started(&world).await;
    let path = format!("/v1/sandboxes/web/terminals/{terminal}");
    let size = r#"{"columns": 120, "rows": 40}"#;
    let resized = world.call("POST", &format!("{path}/resize"), size).await.value();
    assert_eq!((&resized["columns"], &resized["rows"]), (&json!(120), &json!(40)));
    let socket = attach(&world, &terminal, "").await.unwrap();
    assert_eq!(world.call("DELETE", &path, "").await.status, 204);
    assert_eq!(told(socket).await.last().unwrap()["signal"], 9);
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    let world = World::new().await;
    let terminal = started(&world).await;
    let make = async |body: &str| {
        world.call("POST", "/v1/sandboxes/web/terminals", body.to_owned()).await.error()
    };
    for (body, error) in [
        (r#"{"columns": 501}"#, "400 invalid_request columns: `columns`: 501 is out of range"),
        (r#"{"rows": 1}"#, "400 invalid_request rows: `rows`: 1 is out of range"),
        (r#"{"term": "a b"}"#, "400 invalid_request term: `term`: not a kind of terminal"),
        (r#"{"argv": []}"#, "400 invalid_request argv: names no program"),
        (r#"{"cwd": "x"}"#, "400 invalid_request cwd: `cwd`: not absolute"),
    ] {
        assert_eq!(make(body).await, error);
    }
    let path = format!("/v1/sandboxes/web/terminals/{terminal}");
    let plain = world.call("GET", &format!("{path}/attach"), "").await.error();
    assert_eq!(plain, "426 upgrade_required Upgrade: this path is a WebSocket");
    for (query, status) in [("columns=10", 422), ("columns=1&rows=10", 400), ("x=1", 400)] {
        let Err(Error::Http(refused)) = attach(&world, &terminal, query).await else {
            panic!("attached with {query}")
        };
        assert_eq!(refused.status(), status);
    }
    let Err(Error::Http(refused)) = attach(&world, "99", "").await else {
        panic!("attached to nothing")
    };
    assert_eq!(refused.status(), 404);
    for (text, field) in [
        (r#"{"type": "size", "columns": 1, "rows": 5}"#, "columns"),
        (r#"{"type": "exit", "timed_out": false}"#, "type"),
        ("x", "body"),
    ] {
        let mut socket = attach(&world, &terminal, "").await.unwrap();
        socket.send(Message::Text(text.into())).await.unwrap();
        let last = told(socket).await.pop().unwrap();
        assert_eq!((&last["type"], &last["field"]), (&json!("error"), &json!(field)), "{last}");
    }
}
