//! Links: requests to ports of sandboxes, whatever their bodies and whether the sandbox sleeps or not.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use control::EdgeLimits;
use futures_util::{SinkExt, StreamExt};
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::{Body, Frame, Incoming};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use crate::client::{Answer, World, send_over};

/// A server "in the sandbox": answers each request with what `answer` makes of it.
async fn server<F, A, B>(answer: F) -> u16
where
    F: Fn(Request<Incoming>) -> A + Clone + Send + 'static,
    A: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data = Bytes, Error = Infallible> + Send + Unpin + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let answer = answer.clone();
            let service = hyper::service::service_fn(move |request| {
                let answer = answer(request);
                async move { Ok::<_, Infallible>(answer.await) }
            });
            tokio::spawn(
                hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .with_upgrades(),
            );
        }
    });
    port
}

fn get(host: &str, path: &str) -> Request<Empty<Bytes>> {
    Request::builder().uri(path).header("host", host).body(Empty::new()).unwrap()
}

/// As a client asks that wants this form.
fn get_as(accept: &'static str, host: &str) -> Request<Empty<Bytes>> {
    let mut request = get(host, "/");
    request.headers_mut().insert("accept", hyper::header::HeaderValue::from_static(accept));
    request
}

/// As a program asks.
fn get_json(host: &str) -> Request<Empty<Bytes>> {
    get_as("application/json", host)
}

/// Sends bytes as they are and reads until the connection ends.
async fn raw(world: &World, text: &str) -> String {
    let mut stream = world.connect().await;
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

/// Answers with what it was asked, head and all.
async fn mirror(request: Request<Incoming>) -> Response<Full<Bytes>> {
    let mut text = format!("{} {}\n", request.method(), request.uri());
    let mut headers: Vec<_> = request.headers().iter().collect();
    headers.sort_by_key(|(name, _)| name.as_str().to_owned());
    for (name, value) in headers {
        text = format!("{text}{name}: {}\n", value.to_str().unwrap());
    }
    let body = request.into_body().collect().await.unwrap().to_bytes();
    text.push_str(std::str::from_utf8(&body).unwrap());
    Response::builder()
        .header("connection", "x-secret")
        .header("x-secret", "1")
        .body(Full::new(text.into()))
        .unwrap()
}

#[tokio::test]
async fn requests_reach_the_port_as_its_own() {
    let world = World::new().await;
    world.sandbox("web").await;
    let port = server(mirror).await;
    let host = world.link("web", port).await;
    let request = Request::builder()
        .method("POST")
        .uri("/a/b?c=d")
        .header("host", &host)
        .header("x-forwarded-for", "6.6.6.6")
        .header("connection", "keep-alive, x-mine")
        .header("x-mine", "1")
        .header("x-keep", "yes")
        .body(Full::new(Bytes::from("body")))
        .unwrap();
    let answer = world.send(request).await;
    assert_eq!(answer.status, 200);
    assert_eq!((answer.header("x-secret"), answer.header("server-timing")), (None, None));
    let text = String::from_utf8(answer.body.to_vec()).unwrap();
    let want = format!(
        "POST /a/b?c=d\ncontent-length: 4\nhost: 127.0.0.1:{port}\nx-forwarded-for: 127.0.0.1\n\
         x-forwarded-host: {host}\nx-forwarded-proto: http\nx-keep: yes\nbody"
    );
    assert_eq!(text, want);
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();
}

#[tokio::test]
async fn wrong_keys_look_like_nothing_is_there() {
    let world = World::new().await;
    world.sandbox("web").await;
    let port = server(mirror).await;
    let host = world.link("web", port).await;
    let (label, rest) = host.split_once('.').unwrap();
    let parts: Vec<&str> = label.split('-').collect();
    let (id, key) = (parts[0], parts[1]);
    let wrong_key = format!("{}{}", if key.starts_with('a') { "b" } else { "a" }, &key[1..]);
    let mut bodies = std::collections::BTreeSet::new();
    for label in [
        format!("{id}-{wrong_key}-{port}"),
        format!("aaaaaaaaaaaa-{key}-{port}"),
        format!("web-{key}-{port}"),
        format!("{id}-{key}-{port}-1"),
        format!("{id}--{port}"),
        "nothing".to_owned(),
        String::new(),
    ] {
        let answer = world.send(get(&format!("{label}.{rest}"), "/")).await;
        assert_eq!(answer.status, 404, "{label}");
        bodies.insert(answer.body);
    }
    assert_eq!(bodies.len(), 1, "the answers differ: {bodies:?}");
    // The interface is not behind a link, nor a link behind the interface.
    assert_eq!(
        world.send(get(&host, "/v1/health")).await.value_text(),
        format!(
            "GET /v1/health\nhost: 127.0.0.1:{port}\nx-forwarded-for: 127.0.0.1\nx-forwarded-host: {host}\nx-forwarded-proto: http\n"
        )
    );
    // Capitals, a final dot and an absolute request line name the same host.
    assert_eq!(world.send(get(&host.to_uppercase(), "/")).await.status, 200);
    let (name, outside) = host.rsplit_once(':').unwrap();
    assert_eq!(world.send(get(&format!("{name}.:{outside}"), "/")).await.status, 200);
    assert_eq!(world.send(get("localhost", &format!("http://{host}/"))).await.status, 200);
}

#[tokio::test]
async fn s08_a_request_to_a_sleeping_sandbox_is_held_and_answered() {
    let world = World::new().await;
    let web = world.sandbox("web").await;
    let port = server(mirror).await;
    let host = world.link("web", port).await;
    world.call("POST", "/v1/sandboxes/web/sleep", "").await;
    world.fake.gate.send_replace(false);
    let mut asked = Vec::new();
    for _ in 0..5 {
        let (connection, request) = (world.connect().await, get(&host, "/"));
        asked.push(tokio::spawn(async move {
            Answer::read(send_over(connection, request).await).await
        }));
    }
    world.fake.waiting.subscribe().wait_for(|waiting| *waiting == 5).await.unwrap();
    assert!(asked.iter().all(|task| !task.is_finished()));
    world.fake.gate.send_replace(true);
    for answer in asked {
        let answer = answer.await.unwrap();
        assert_eq!((answer.status, answer.header("server-timing")), (200, Some("wake;dur=12.5")));
    }
    assert_eq!(world.fake.wakes(&web.id), 1);
}

#[tokio::test]
async fn a_client_that_goes_away_lets_go() {
    let world = World::new().await;
    world.sandbox("web").await;
    let (asked, mut reached) = mpsc::channel::<()>(1);
    // Never answers; tells when it was asked and when the connection has ended.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let ended = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut buffer = [0; 1024];
        assert!(stream.read(&mut buffer).await.unwrap() > 0);
        asked.send(()).await.unwrap();
        // The end may come as a reset.
        while stream.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
    });
    let host = world.link("web", port).await;
    let mut stream = world.connect().await;
    stream.write_all(format!("GET / HTTP/1.1\r\nhost: {host}\r\n\r\n").as_bytes()).await.unwrap();
    reached.recv().await.unwrap();
    assert_eq!(*world.fake.holds.borrow(), 1);
    drop(stream);
    ended.await.unwrap();
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();
}

#[tokio::test]
async fn closed_ports_and_servers_that_break_off() {
    let world = World::new().await;
    world.sandbox("web").await;
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let answer = world.send(get_json(&world.link("web", closed).await)).await;
    assert_eq!(answer.error(), format!("502 port_closed: nothing listens on port {closed}"));

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        for reply in ["", "SSH-2.0-OpenSSH_9.2\r\n"] {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut buffer = [0; 1024];
            assert!(stream.read(&mut buffer).await.unwrap() > 0);
            stream.write_all(reply.as_bytes()).await.unwrap();
        }
    });
    let host = world.link("web", port).await;
    for _ in 0..2 {
        let answer = world.send(get_json(&host)).await;
        let want = format!(
            "502 bad_answer: what listens on port {port} in the sandbox broke off before it had answered"
        );
        assert_eq!(answer.error(), want);
    }
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();
}

#[tokio::test]
async fn errors_are_told_in_the_form_the_client_reads() {
    let world = World::new().await;
    world.sandbox("web").await;
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let host = world.link("web", closed).await;
    let ask = async |accept: &'static str| world.send(get_as(accept, &host)).await;
    let browser = ask("text/html,application/xhtml+xml,*/*;q=0.8").await;
    assert_eq!(browser.header("content-type"), Some("text/html; charset=utf-8"));
    let sentence = format!("nothing listens on port {closed}");
    assert!(browser.value_text().contains(&format!("<h1>{sentence}</h1>")), "{:?}", browser.body);
    let curl = ask("*/*").await;
    assert_eq!(curl.value_text(), format!("{sentence} (port_closed)\n"));
    let program = ask("application/json").await;
    assert_eq!(program.error(), format!("502 port_closed: {sentence}"));
    for answer in [browser, curl, program] {
        assert_eq!(answer.status, 502);
        assert!(answer.body.ends_with(b"\n"), "{:?}", answer.body);
        assert_eq!(answer.header("x-request-id").map(str::len), Some(16));
        assert_eq!(answer.header("cache-control"), Some("no-store"));
    }
}

/// Two hosts would let a proxy before us and us disagree on whose request it is.
#[tokio::test]
async fn a_request_has_one_host() {
    let world = World::new().await;
    world.sandbox("web").await;
    let port = server(mirror).await;
    let host = world.link("web", port).await;
    for (head, why) in [
        (format!("Host: {host}\r\nHost: {host}\r\n"), "there is more than one `Host` header"),
        (format!("Host: localhost\r\nHost: {host}\r\n"), "there is more than one `Host` header"),
        (String::new(), "there is no `Host` header"),
    ] {
        let text = format!("GET /v1/health HTTP/1.1\r\n{head}Connection: close\r\n\r\n");
        let answer = raw(&world, &text).await;
        assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains(why), "{answer}");
    }
    assert!(raw(&world, "GET /v1/health HTTP/1.0\r\n\r\n").await.starts_with("HTTP/1.0 200 "));
}

/// The client's fault is not told as the server's.
#[tokio::test]
async fn a_body_that_breaks_off_is_the_clients_fault() {
    let world = World::new().await;
    world.sandbox("web").await;
    let port = server(mirror).await;
    let host = world.link("web", port).await;
    let text = format!(
        "POST / HTTP/1.1\r\nHost: {host}\r\nAccept: application/json\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n"
    );
    let answer = raw(&world, &text).await;
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(answer.contains("the body broke off before its end"), "{answer}");
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();
}

/// Takes connections and never says a word.
async fn silent_server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let mut open = Vec::new();
        loop {
            open.push(listener.accept().await.unwrap());
        }
    });
    port
}

#[tokio::test]
async fn a_silent_server_is_not_waited_for_for_ever() {
    let limits = EdgeLimits { answer: Duration::from_millis(300), ..EdgeLimits::default() };
    let world = World::with(limits).await;
    world.sandbox("web").await;
    let port = silent_server().await;
    let host = world.link("web", port).await;
    let answer = world.send(get_json(&host)).await;
    let want =
        format!("504 timeout: what listens on port {port} in the sandbox was silent for 0 s");
    assert_eq!(answer.error(), want);
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();

    // While the request still comes the server is not silent: it listens.
    let port = server(mirror).await;
    let host = world.link("web", port).await;
    let pieces = futures_util::stream::unfold(0, |number| async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        (number < 8).then(|| (Ok::<_, Infallible>(Frame::data(Bytes::from("x"))), number + 1))
    });
    let request = Request::builder()
        .method("POST")
        .uri("/")
        .header("host", host)
        .body(StreamBody::new(Box::pin(pieces)))
        .unwrap();
    let answer = world.send(request).await;
    assert_eq!(answer.status, 200);
    assert!(answer.value_text().ends_with("xxxxxxxx"), "{:?}", answer.body);
}

/// An answer that begins and does not go on is cut, and lets go of the sandbox; also where its client does not read.
#[tokio::test]
async fn an_answer_that_stops_flowing_is_cut() {
    let limits = EdgeLimits { idle: Duration::from_millis(300), ..EdgeLimits::default() };
    let world = World::with(limits).await;
    world.sandbox("web").await;
    let port = server(|_| async {
        let pieces = futures_util::stream::iter([Ok::<_, Infallible>(Frame::data("one".into()))]);
        Response::new(StreamBody::new(pieces.chain(futures_util::stream::pending())))
    })
    .await;
    let host = world.link("web", port).await;
    let mut body = world.open(get(&host, "/")).await.into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "one");
    assert!(body.frame().await.unwrap().is_err(), "a cut answer must not look whole");
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();

    let endless = server(|_| async {
        let piece = Bytes::from(vec![b'x'; 1 << 20]);
        let piece = move || Ok::<_, Infallible>(Frame::data(piece.clone()));
        Response::new(StreamBody::new(futures_util::stream::iter(std::iter::repeat_with(piece))))
    })
    .await;
    let host = world.link("web", endless).await;
    let _unread = world.open(get(&host, "/")).await;
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();
}

/// A machine that ends says no word on its connections: whoever waits on one is told at once.
#[tokio::test]
async fn the_end_of_a_machine_ends_what_is_connected_to_it() {
    let world = World::new().await;
    let web = world.sandbox("web").await;
    let port = silent_server().await;
    let host = world.link("web", port).await;
    let asked = tokio::spawn({
        let (connection, request) = (world.connect().await, get_json(&host));
        async move { Answer::read(send_over(connection, request).await).await }
    });
    world.fake.holds.subscribe().wait_for(|holds| *holds == 1).await.unwrap();
    // Said again until it is heard: the request may not have been passed on yet.
    while !asked.is_finished() {
        world.fake.say(&web.id, "sandbox.stopped", "rebooted");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let want = format!(
        "502 bad_answer: the sandbox's machine ended before what listens on port {port} had answered"
    );
    assert_eq!(asked.await.unwrap().error(), want);
}

/// An event stream that is open and silent is nothing that anybody waits for.
#[tokio::test]
async fn s02_an_open_event_stream_holds_nothing_awake() {
    let world = World::new().await;
    world.sandbox("web").await;
    let port = server(|_| async {
        let first = Ok::<_, Infallible>(Frame::data(Bytes::from("data: 1\n\n")));
        let first = futures_util::stream::iter([first]);
        let body = StreamBody::new(first.chain(futures_util::stream::pending()));
        let kind = "text/event-stream; charset=utf-8";
        Response::builder().header("content-type", kind).body(body).unwrap()
    })
    .await;
    let host = world.link("web", port).await;
    let mut body = world.open(get(&host, "/")).await.into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "data: 1\n\n");
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();
    drop(body);

    // On an awake port it is a connection like any other.
    world.call("PATCH", "/v1/sandboxes/web", format!(r#"{{"awake_ports": [{port}]}}"#)).await;
    let body = world.open(get(&host, "/")).await.into_body();
    world.fake.awake_connections.subscribe().wait_for(|open| *open == 1).await.unwrap();
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();
    drop(body);
    world.fake.awake_connections.subscribe().wait_for(|open| *open == 0).await.unwrap();
}

#[tokio::test]
async fn bodies_stream_both_ways_and_hold_until_their_end() {
    let world = World::new().await;
    world.sandbox("web").await;
    // Echoes each piece as it comes.
    let port = server(|request: Request<Incoming>| async move {
        let pieces = request
            .into_body()
            .into_data_stream()
            .map(|piece| Ok::<_, Infallible>(Frame::data(piece.unwrap())));
        Response::new(StreamBody::new(pieces))
    })
    .await;
    let host = world.link("web", port).await;
    let (feed, pieces) = mpsc::channel::<Bytes>(1);
    let pieces = futures_util::stream::unfold(pieces, |mut pieces| async move {
        let piece = pieces.recv().await?;
        Some((Ok::<_, Infallible>(Frame::data(piece)), pieces))
    });
    let request = Request::builder()
        .method("POST")
        .uri("/")
        .header("host", host)
        .body(StreamBody::new(Box::pin(pieces)));
    let mut body = world.open(request.unwrap()).await.into_body();
    for piece in ["one", "two"] {
        feed.send(piece.into()).await.unwrap();
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), piece);
    }
    assert_eq!(*world.fake.holds.borrow(), 1);
    let big = Bytes::from(vec![b'x'; 1 << 20]);
    let feeder = tokio::spawn(async move {
        for _ in 0..64 {
            feed.send(big.clone()).await.unwrap();
        }
    });
    let mut read = 0;
    while let Some(frame) = body.frame().await {
        read += frame.unwrap().into_data().unwrap().len();
    }
    feeder.await.unwrap();
    assert_eq!(read, 64 << 20);
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();
}

#[tokio::test]
async fn web_sockets_pass_and_do_not_hold() {
    let world = World::new().await;
    world.sandbox("web").await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let echo = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut socket = tokio_tungstenite::accept_async(stream).await.unwrap();
        while let Some(Ok(message)) = socket.next().await {
            if message.is_close() {
                break;
            }
            socket.send(message).await.unwrap();
        }
    });
    let host = world.link("web", port).await;
    world.call("POST", "/v1/sandboxes/web/sleep", "").await;
    let request = format!("ws://{host}/socket").into_client_request().unwrap();
    let (mut socket, answer) =
        tokio_tungstenite::client_async(request, world.connect().await).await.unwrap();
    assert_eq!(answer.headers()["server-timing"], "wake;dur=12.5");
    for size in [0, 1, 70_000] {
        let message = Message::Binary(vec![9; size].into());
        socket.send(message.clone()).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap(), message);
    }
    // Held while its client sends and for a moment after, not for being open.
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();
    // Asleep again, open all the while: the next message is a need of its own.
    world.call("POST", "/v1/sandboxes/web/sleep", "").await;
    let message = Message::Binary(b"still there".to_vec().into());
    socket.send(message.clone()).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), message);
    assert_eq!(world.fake.wakes(&world.fake.ids()[0]), 2);
    socket.close(None).await.unwrap();
    echo.await.unwrap();
}

/// A WebSocket server that echoes.
async fn echo_server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let mut socket = tokio_tungstenite::accept_async(stream).await.unwrap();
                while let Some(Ok(message)) = socket.next().await {
                    if !message.is_close() && !message.is_ping() {
                        socket.send(message).await.unwrap();
                    }
                }
            });
        }
    });
    port
}

#[tokio::test]
async fn s04_connections_to_awake_ports_are_counted_while_they_are_open() {
    let world = World::new().await;
    world.sandbox("web").await;
    let port = echo_server().await;
    let host = world.link("web", port).await;
    let open = async || {
        let request = format!("ws://{host}/").into_client_request().unwrap();
        tokio_tungstenite::client_async(request, world.connect().await).await.unwrap().0
    };
    let counted = async |wanted: usize| {
        let mut open = world.fake.awake_connections.subscribe();
        open.wait_for(|open| *open == wanted).await.unwrap();
    };
    let (first, second) = (open().await, open().await);
    // Open before the setting: it takes effect at once, both ways.
    let set = async |ports: &str| {
        let body = format!(r#"{{"awake_ports": {ports}}}"#);
        assert_eq!(world.call("PATCH", "/v1/sandboxes/web", body).await.status, 200);
    };
    set(&format!("[9, {port}]")).await;
    counted(2).await;
    set("[9]").await;
    counted(0).await;
    set(&format!("[{port}]")).await;
    counted(2).await;
    drop(first);
    counted(1).await;
    // A connection whose machine has ended is none.
    let id = world.fake.ids()[0].clone();
    world.fake.say(&id, "sandbox.stopped", "rebooted");
    counted(0).await;
    drop(second);
}

#[tokio::test]
async fn s04_a_connection_on_which_nothing_flows_is_closed() {
    let world = World::new().await;
    world.sandbox("web").await;
    let port = echo_server().await;
    let host = world.link("web", port).await;
    let body = r#"{"connection_idle_seconds": 1}"#;
    assert_eq!(world.call("PATCH", "/v1/sandboxes/web", body).await.status, 200);
    let request = format!("ws://{host}/").into_client_request().unwrap();
    let mut socket =
        tokio_tungstenite::client_async(request, world.connect().await).await.unwrap().0;
    let begun = std::time::Instant::now();
    // Bytes in either direction put it off.
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_millis(400)).await;
        socket.send(Message::Ping(Bytes::new())).await.unwrap();
        assert!(socket.next().await.unwrap().is_ok());
    }
    assert!(socket.next().await.is_none_or(|message| message.is_err()), "it was not closed");
    let lasted = begun.elapsed();
    assert!(lasted > Duration::from_millis(2500), "closed after {lasted:?}");
}

#[tokio::test]
async fn an_upgrade_that_is_refused_is_an_ordinary_answer() {
    let world = World::new().await;
    world.sandbox("web").await;
    let port = server(mirror).await;
    let host = world.link("web", port).await;
    let request = Request::builder()
        .uri("/")
        .header("host", &host)
        .header("connection", "Upgrade")
        .header("upgrade", "websocket")
        .body(Empty::<Bytes>::new())
        .unwrap();
    let text = world.send(request).await.value_text();
    assert!(
        text.contains("connection: upgrade\n") && text.contains("upgrade: websocket\n"),
        "{text}"
    );
}

impl Answer {
    fn value_text(&self) -> String {
        String::from_utf8(self.body.to_vec()).unwrap()
    }
}

/// A server that speaks HTTP/1.0 (Python's own does) and marks the end of its body by closing its connection: the client's
/// connection is kept, and the body has an end that can be told from a broken one.
#[tokio::test]
async fn an_old_server_does_not_end_the_clients_connection() {
    let world = World::new().await;
    world.sandbox("web").await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            stream.write_all(b"HTTP/1.0 200 OK\r\nServer: old\r\n\r\nhello").await.unwrap();
        }
    });
    let host = world.link("web", port).await;
    let (mut sender, wire) =
        hyper::client::conn::http1::handshake(TokioIo::new(world.connect().await)).await.unwrap();
    tokio::spawn(wire);
    for _ in 0..2 {
        sender.ready().await.unwrap();
        let response = sender.send_request(get(&host, "/")).await.unwrap();
        assert_eq!(response.version(), hyper::Version::HTTP_11);
        let answer = Answer::read(response).await;
        assert_eq!((answer.status, &answer.body[..]), (200, &b"hello"[..]));
        assert_eq!(answer.header("transfer-encoding"), Some("chunked"));
    }
}

/// Connections of clients are kept, and requests on one may go to different sandboxes.
#[tokio::test]
async fn one_connection_serves_many_requests() {
    let world = World::new().await;
    world.sandbox("web").await;
    let port = server(|request: Request<Incoming>| async move {
        Response::new(Full::new(Bytes::from(request.uri().path().to_owned())))
    })
    .await;
    let host = world.link("web", port).await;
    let (mut sender, wire) =
        hyper::client::conn::http1::handshake(TokioIo::new(world.connect().await)).await.unwrap();
    tokio::spawn(wire);
    for (host, path, status) in
        [(host.as_str(), "/1", 200), ("localhost", "/v1/health", 200), (&host, "/2", 200)]
    {
        sender.ready().await.unwrap();
        let answer = Answer::read(sender.send_request(get(host, path)).await.unwrap()).await;
        assert_eq!(answer.status, status, "{path}");
    }
    let _: SocketAddr = world.address;
}

/// A server that tells its connections apart: each answer is the number of the connection and of the request on it. `/wait`
/// is answered when told; `/leave` ends the connection without an answer, unless it is the first request on it.
struct Numbering {
    port: u16,
    connections: watch::Receiver<usize>,
    ended: watch::Receiver<usize>,
    go_on: watch::Sender<bool>,
}

async fn numbering() -> Numbering {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (count, connections) = watch::channel(0);
    let (count_ended, ended) = watch::channel(0);
    let (go_on, may_go_on) = watch::channel(false);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            count.send_modify(|count| *count += 1);
            let (number, mut may_go_on, ended) =
                (*count.borrow(), may_go_on.clone(), count_ended.clone());
            tokio::spawn(async move {
                let mut stream = tokio::io::BufReader::new(stream);
                let mut requests = 0;
                'requests: loop {
                    let (mut path, mut line) = (String::new(), String::new());
                    loop {
                        line.clear();
                        if !stream.read_line(&mut line).await.is_ok_and(|read| read > 0) {
                            break 'requests;
                        }
                        if path.is_empty() {
                            path.push_str(line.split(' ').nth(1).unwrap());
                        }
                        if line == "\r\n" {
                            break;
                        }
                    }
                    requests += 1;
                    match path.as_str() {
                        "/wait" => drop(may_go_on.wait_for(|go_on| *go_on).await.unwrap()),
                        "/leave" if requests > 1 => break,
                        _ => {}
                    }
                    let body = format!("{number}.{requests}");
                    let answer =
                        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                    stream.get_mut().write_all(answer.as_bytes()).await.unwrap();
                }
                ended.send_modify(|ended| *ended += 1);
            });
        }
    });
    Numbering { port, connections, ended, go_on }
}

async fn asked(world: &World, method: &str, host: &str, path: &str) -> String {
    let request = Request::builder().method(method).uri(path).header("host", host);
    let answer = world.send(request.body(Empty::<Bytes>::new()).unwrap()).await;
    assert_eq!(answer.status, 200, "{method} {path}");
    String::from_utf8(answer.body.to_vec()).unwrap()
}

/// Many at a time share connections, and none is open when the last has been answered.
#[tokio::test]
async fn s02_connections_are_shared_while_there_are_requests_and_end_with_the_last() {
    let world = World::new().await;
    world.sandbox("web").await;
    let mut server = numbering().await;
    let host = world.link("web", server.port).await;
    for number in 1..=2 {
        assert_eq!(asked(&world, "GET", &host, "/").await, format!("{number}.1"), "alone");
        server.ended.wait_for(|ended| *ended == number).await.unwrap();
    }
    let (waits, asks) = (asked(&world, "GET", &host, "/wait"), async {
        server.connections.wait_for(|count| *count == 3).await.unwrap();
        for request in 1..=5 {
            assert_eq!(asked(&world, "GET", &host, "/").await, format!("4.{request}"));
        }
        // Never what may not be sent twice.
        assert_eq!(asked(&world, "POST", &host, "/").await, "5.1");
        assert_eq!(asked(&world, "HEAD", &host, "/").await, "");
        assert_eq!(*server.connections.borrow(), 5);
        server.go_on.send(true).unwrap();
    });
    let (waited, ()) = tokio::join!(waits, asks);
    assert_eq!(waited, "3.1");
    server.ended.wait_for(|ended| *ended == 5).await.unwrap();
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();
}

/// A connection that ends in the moment in which it is used again costs nobody his answer.
#[tokio::test]
async fn a_shared_connection_that_ends_costs_no_answer() {
    let world = World::new().await;
    world.sandbox("web").await;
    let mut server = numbering().await;
    let host = world.link("web", server.port).await;
    let (waits, asks) = (asked(&world, "GET", &host, "/wait"), async {
        server.connections.wait_for(|count| *count == 1).await.unwrap();
        assert_eq!(asked(&world, "GET", &host, "/").await, "2.1");
        assert_eq!(asked(&world, "GET", &host, "/leave").await, "3.1");
        assert_eq!(asked(&world, "GET", &host, "/").await, "3.2");
        server.go_on.send(true).unwrap();
    });
    tokio::join!(waits, asks);
}

/// A port that is asked all the time keeps its connections over the gaps, and lets go of everything a moment after the last.
#[tokio::test]
async fn s02_a_busy_port_keeps_its_connections_over_short_gaps_and_not_longer() {
    let world = World::new().await;
    world.sandbox("web").await;
    let mut server = numbering().await;
    let host = world.link("web", server.port).await;
    let mut shared = 0;
    // One after the other: at first each has a connection of its own.
    for _ in 0..200 {
        let answer = asked(&world, "GET", &host, "/").await;
        shared = answer.split_once('.').unwrap().1.parse().unwrap();
        if shared >= 5 {
            break;
        }
    }
    assert!(shared >= 5, "no connection was used five times");
    let opened = *server.connections.borrow();
    server.ended.wait_for(|ended| *ended == opened).await.unwrap();
    world.fake.holds.subscribe().wait_for(|holds| *holds == 0).await.unwrap();
}

/// `TRACE` would tell a page what its browser sends besides, and `CONNECT` asks for a proxy: no server in a sandbox hears of them.
#[tokio::test]
async fn t19_trace_and_connect_are_refused_at_a_link() {
    let world = World::new().await;
    world.sandbox("web").await;
    let server = numbering().await;
    let host = world.link("web", server.port).await;
    for (method, path) in [("TRACE", "/"), ("TRACE", "/there?x=1"), ("CONNECT", &host)] {
        let request = Request::builder().method(method).uri(path).header("host", &host);
        let answer = world.send(request.body(Empty::<Bytes>::new()).unwrap()).await;
        assert_eq!(answer.status, 405, "{method}: {:?}", answer.body);
        let said = String::from_utf8_lossy(&answer.body);
        assert!(said.contains("method_not_allowed"), "{method}: {said}");
    }
    assert_eq!(*server.connections.borrow(), 0);
    assert_eq!(asked(&world, "OPTIONS", &host, "/").await, "1.1", "others are passed on");
}
