//! Connections that stay open through links and forwards.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use e2e::lab::Lab;
use e2e::wait::{WAIT_MAX, stays};
use e2e::{boxes, isolated, net, test_name, until};
use serde_json::json;

/// A server that waits for nothing but its connections. `/echo` changes to a protocol that says everything back, `/events` is
/// an event stream that tells whenever somebody asks for `/poke`; what does not begin with `GET` is echoed. Arguments: address,
/// port.
const SERVER: &str = r#"
import socket, sys, threading
listeners = []
def serve(c):
    head = b""
    while b"\r\n\r\n" not in head:
        more = c.recv(4096)
        if not more: return
        head += more
        if not head.startswith(b"GET"[:len(head)]): break
    if head.startswith(b"GET /events"):
        c.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: hello\n\n")
        listeners.append(c)
        return
    if head.startswith(b"GET /poke"):
        for l in listeners: l.sendall(b"data: poked\n\n")
        c.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        return c.close()
    if head.startswith(b"GET"):
        c.sendall(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n")
    else:
        c.sendall(head)
    while True:
        data = c.recv(4096)
        if not data: break
        c.sendall(data)
    c.close()
s = socket.create_server((sys.argv[1], int(sys.argv[2])))
while True:
    threading.Thread(target=serve, args=(s.accept()[0],)).start()
"#;

/// A sandbox with [`SERVER`] on an address and port of its own.
fn serving(lab: &Lab, name: &str, address: &str, port: &str, more: &[&str]) -> String {
    let create = ["sandboxes", "create", "--name", name, "--sleep-after-seconds", "2"];
    lab.ok(&[&create, more].concat());
    serve(lab, name, address, port);
    lab.ok(&["link", name, port]).trim().to_owned()
}

fn serve(lab: &Lab, name: &str, address: &str, port: &str) {
    lab.write_file(name, "/work/server.py", SERVER);
    lab.ok(&["exec", name, "-b", "--", "python3", "/work/server.py", address, port]);
}

/// Sends a request and reads the head of its answer.
fn open(link: &str, path: &str, more: &str) -> BufReader<TcpStream> {
    let (authority, server) = net::split_link(link);
    let mut stream = TcpStream::connect(server).expect("connected");
    stream.set_read_timeout(Some(WAIT_MAX)).expect("time-out set");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {authority}\r\n{more}\r\n").expect("sent");
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        assert!(stream.read_line(&mut line).expect("a head") > 0, "no answer to {path}");
        assert!(!line.starts_with("HTTP/1.1 5"), "{line}");
    }
    stream
}

fn open_echo(link: &str) -> BufReader<TcpStream> {
    open(link, "/echo", "Connection: Upgrade\r\nUpgrade: echo\r\n")
}

#[track_caller]
fn echoes(stream: &mut BufReader<TcpStream>, text: &str) {
    stream.get_mut().write_all(text.as_bytes()).expect("sent");
    let mut back = vec![0; text.len()];
    stream.read_exact(&mut back).expect("echoed");
    assert_eq!(String::from_utf8_lossy(&back), text);
}

/// Silent it keeps nothing awake, whether the server is on the network or on the loopback; the next byte wakes it, from either
/// tier, and comes back over the same connection.
#[test]
fn s02_an_open_connection_lets_it_sleep_and_its_next_byte_wakes_it() {
    isolated(test_name!(), |lab| {
        for (name, address, port) in [("net", "0.0.0.0", "8000"), ("own", "127.0.0.1", "8001")] {
            let link = serving(lab, name, address, port, &[]);
            let mut stream = open_echo(&link);
            echoes(&mut stream, "first");
            let mut wakes = 0;
            for tier in ["memory", "disk"] {
                lab.wait_status(name, "sleeping");
                lab.ok(&["sandboxes", "sleep", name, "--tier", tier]);
                let before = lab.events(name, "woke").len();
                echoes(&mut stream, tier);
                wakes += 1;
                let woke = lab.events(name, "woke");
                assert_eq!(woke.len(), before + 1, "{name}, {tier}: {woke:?}");
                let text = woke.last().expect("it woke")["text"].as_str().expect("text").to_owned();
                assert!(text.contains(port), "what woke it is not told: {text}");
            }
            assert_eq!(wakes, 2);
        }
    });
}

/// What a client has just sent over a connection that stays open has been served.
#[test]
fn s05_a_sleep_asked_for_right_after_a_clients_byte_lasts() {
    isolated(test_name!(), |lab| {
        let link = serving(lab, "web", "0.0.0.0", "8000", &[]);
        let mut stream = open_echo(&link);
        for tier in ["memory", "disk", "memory"] {
            echoes(&mut stream, "sent");
            let before = lab.events("web", "woke").len();
            let asked =
                boxes::done(lab, "POST", "/v1/sandboxes/web/sleep", &json!({ "tier": tier }));
            assert_eq!(asked["status"], "sleeping", "{asked}");
            assert_eq!(lab.sh("web", "echo here"), "here");
            let woke = lab.events("web", "woke");
            assert_eq!(woke.len(), before + 1, "{tier}: {woke:?}");
            let text = woke.last().expect("it woke")["text"].as_str().expect("text").to_owned();
            assert!(text.contains("a command"), "{tier}: something else woke it: {text}");
        }
    });
}

/// What a busy port keeps open for its next request is nobody's request: who asks for a sleep then gets one that lasts.
#[test]
fn s05_a_sleep_asked_for_right_after_a_busy_port_lasts() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        lab.write_file("web", "/work/counter.py", boxes::COUNTER);
        lab.ok(&["exec", "web", "-b", "--", "python3", "/work/counter.py", "8000"]);
        let link = lab.ok(&["link", "web", "8000"]).trim().to_owned();
        let answers = || net::follow(&link).is_ok_and(|answer| answer.status == 200);
        until("the counter listens", || answers().then_some(()));
        for tier in ["memory", "disk", "memory"] {
            let before = lab.events("web", "woke").len();
            let mut requests = 0;
            let mut since = Instant::now();
            while requests < 40 {
                assert!(answers(), "not answered");
                requests += 1;
                // A busy machine may take longer; then the port was not.
                if since.elapsed() > Duration::from_millis(900) {
                    (requests, since) = (0, Instant::now());
                }
            }
            let (code, asked) =
                boxes::call(lab, "POST", "/v1/sandboxes/web/sleep", &json!({ "tier": tier }));
            let timer = asked["error"].as_str().is_some_and(|text| text.contains("timer"));
            assert!(code == 200 || timer, "{code} {asked}");
            assert_eq!(lab.sh("web", "echo here"), "here");
            // Threads of the server that wait for each other do so with timers, which may be due just then; nothing else may wake it.
            for woke in lab.events("web", "woke").into_iter().skip(before) {
                let text = woke["text"].as_str().expect("text");
                let by = ["a command", "a timer of its own"];
                assert!(by.iter().any(|by| text.contains(by)), "{tier}: something else: {text}");
            }
        }
    });
}

#[test]
fn s02_an_open_event_stream_lets_it_sleep_and_goes_on() {
    isolated(test_name!(), |lab| {
        let link = serving(lab, "web", "0.0.0.0", "8000", &[]);
        let mut events = open(&link, "/events", "");
        let mut seen = String::new();
        until("the first event", || {
            let mut line = String::new();
            events.read_line(&mut line).expect("a line");
            seen.push_str(&line);
            seen.contains("data: hello").then_some(())
        });
        lab.wait_status("web", "sleeping");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        stays("it sleeps although the stream is open", 3, || {
            lab.view("web")["status"] == "sleeping"
        });
        open(&link, "/poke", "Connection: close\r\n");
        until("the next event", || {
            let mut line = String::new();
            events.read_line(&mut line).expect("a line");
            line.contains("data: poked").then_some(())
        });
    });
}

#[test]
fn s04_a_connection_to_an_awake_port_keeps_it_awake_and_is_counted() {
    isolated(test_name!(), |lab| {
        let link = serving(lab, "web", "0.0.0.0", "9222", &["--awake-port", "9222"]);
        let mut first = open_echo(&link);
        let second = open_echo(&link);
        let connections = || lab.view("web")["awake_connections"].as_u64().expect("a number");
        assert_eq!(connections(), 2);
        stays("it stays awake", 6, || lab.view("web")["status"] == "running");
        let reasons = lab.view("web")["awake_because"].to_string();
        assert!(reasons.contains("2 connections to awake ports"), "{reasons}");
        drop(second);
        until("one is left", || (connections() == 1).then_some(()));
        echoes(&mut first, "still");
        // No longer an awake port: it is open and silent, and that keeps nothing awake.
        lab.ok(&["sandboxes", "update", "web", "--awake-port", "6080"]);
        until("none counts", || (connections() == 0).then_some(()));
        lab.wait_status("web", "sleeping");
        echoes(&mut first, "woken");
    });
}

#[test]
fn s04_cpu_and_timers_neither_keep_it_awake_nor_wake_it() {
    isolated(test_name!(), |lab| {
        let link = serving(lab, "web", "0.0.0.0", "9222", &["--awake-port", "9222"]);
        lab.ok(&["exec", "web", "-b", "--", "sh", "-c", "while :; do :; done"]);
        lab.ok(&["exec", "web", "-b", "--", "sh", "-c", "while :; do sleep 1; done"]);
        let stream = open_echo(&link);
        drop(stream);
        lab.wait_status("web", "sleeping");
        stays("it sleeps on", 5, || lab.view("web")["status"] == "sleeping");
        assert_eq!(lab.events("web", "woke").len(), 0, "{:?}", lab.events("web", ""));
    });
}

#[test]
fn s04_a_connection_on_which_nothing_flows_is_closed() {
    isolated(test_name!(), |lab| {
        let more = ["--awake-port", "9222", "--connection-idle-seconds", "3"];
        let link = serving(lab, "web", "0.0.0.0", "9222", &more);
        let mut stream = open_echo(&link);
        echoes(&mut stream, "first");
        let begun = Instant::now();
        let mut rest = Vec::new();
        // Its end may come as a reset.
        let _ = stream.read_to_end(&mut rest);
        let lasted = begun.elapsed();
        assert!(rest.is_empty() && lasted >= Duration::from_secs(3), "{lasted:?}: {rest:?}");
        lab.wait_status("web", "sleeping");
        assert_eq!(lab.view("web")["awake_connections"], 0);
    });
}

/// A client whose machine is gone says no word any more: found by probes, also while bytes are on their way to it.
#[test]
fn s04_a_client_that_vanished_is_found_within_about_a_minute() {
    isolated(test_name!(), |lab| {
        let link = serving(lab, "web", "0.0.0.0", "9222", &["--awake-port", "9222"]);
        let stream = open_echo(&link);
        let mut busy = open_echo(&link);
        echoes(&mut busy, "there");
        assert_eq!(lab.view("web")["awake_connections"], 2);
        let port = |stream: &BufReader<TcpStream>| {
            stream.get_ref().local_addr().expect("an address").port().to_string()
        };
        // The bytes that its server says back wait for ever for a word that they came.
        busy.get_mut().write_all(b"lost").expect("sent");
        net::output("nft", &["add", "table", "inet", "vanish"]);
        let chain = "{ type filter hook input priority -10; policy accept; }";
        net::output("nft", &["add", "chain", "inet", "vanish", "in", chain]);
        for port in [port(&stream), port(&busy)] {
            for side in ["sport", "dport"] {
                let rule = ["add", "rule", "inet", "vanish", "in", "tcp", side, &port, "drop"];
                net::output("nft", &rule);
            }
        }
        lab.sh("web", "true");
        let begun = Instant::now();
        until("both are found", || (lab.view("web")["awake_connections"] == 0).then_some(()));
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(90), "found after {took:?}");
        lab.wait_status("web", "sleeping");
        net::output("nft", &["delete", "table", "inet", "vanish"]);
    });
}

/// `dormouse forward` until dropped.
struct Forward {
    program: Child,
    address: String,
}

impl Forward {
    fn start(lab: &Lab, name: &str, ports: &str) -> Self {
        let mut program = lab
            .command(&["forward", name, ports])
            .stderr(Stdio::piped())
            .spawn()
            .expect("`dormouse` starts");
        let mut line = String::new();
        let stderr = program.stderr.take().expect("piped");
        BufReader::new(stderr).read_line(&mut line).expect("a line");
        let address = line.split(' ').next().expect("an address").to_owned();
        Self { program, address }
    }

    fn connect(&self) -> BufReader<TcpStream> {
        let stream = TcpStream::connect(&self.address).expect("connected");
        stream.set_read_timeout(Some(WAIT_MAX)).expect("time-out set");
        BufReader::new(stream)
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

#[test]
fn s08_a_forwarded_connection_wakes_it_and_goes_on_after_sleep() {
    isolated(test_name!(), |lab| {
        serving(lab, "web", "127.0.0.1", "5432", &[]);
        let forward = Forward::start(lab, "web", "5432:0");
        for tier in ["memory", "disk"] {
            lab.ok(&["sandboxes", "sleep", "web", "--tier", tier]);
            let before = lab.events("web", "woke").len();
            let mut stream = forward.connect();
            echoes(&mut stream, "hello");
            until("connecting has woken it", || {
                (lab.events("web", "woke").len() > before).then_some(())
            });
            lab.wait_status("web", "sleeping");
            echoes(&mut stream, "and on");
            stream.get_ref().shutdown(std::net::Shutdown::Write).expect("shut");
            let mut rest = String::new();
            stream.read_to_string(&mut rest).expect("an end in order");
            assert_eq!(rest, "");
        }
    });
}
