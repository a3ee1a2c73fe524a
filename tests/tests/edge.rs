//! Connections that stay open through links and forwards, figures and bills, and emptying a host.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use e2e::lab::Lab;
use e2e::wait::WAIT_MAX;
use e2e::{isolated, net, proc, test_name, until};

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

/// Looks for so long that something stays as it is.
#[track_caller]
fn stays(what: &str, seconds: u64, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    until(what, || {
        assert!(holds(), "no longer: {what}");
        (begun.elapsed() >= Duration::from_secs(seconds)).then_some(())
    });
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
            assert_eq!(lab.events("web", "woke").len(), before + 1, "connecting wakes it");
            lab.wait_status("web", "sleeping");
            echoes(&mut stream, "and on");
            stream.get_ref().shutdown(std::net::Shutdown::Write).expect("shut");
            let mut rest = String::new();
            stream.read_to_string(&mut rest).expect("an end in order");
            assert_eq!(rest, "");
        }
    });
}

/// Counted where things happen, so that it outlives the daemon; asking wakes nothing.
#[test]
fn s23_what_is_used_is_counted_and_outlives_the_daemon() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        let usage = |lab: &Lab| lab.json(&["usage", "web"])["usage"].clone();
        let figure = |lab: &Lab, name: &str| usage(lab)[name].as_f64().expect("a number");
        until("awake for a while", || (figure(lab, "awake_seconds") > 2.0).then_some(()));
        until("its programs have computed", || {
            lab.sh("web", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done");
            (figure(lab, "cpu_seconds") > 0.2).then_some(())
        });
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "memory"]);
        until("asleep in memory for a while", || {
            (figure(lab, "asleep_memory_seconds") > 1.0).then_some(())
        });
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        let awake = figure(lab, "awake_seconds");
        lab.kill_daemon();
        lab.start();
        until("asleep on disk for a while", || {
            (figure(lab, "asleep_disk_seconds") > 1.0).then_some(())
        });
        let after = usage(lab);
        assert_eq!(after["awake_seconds"].as_f64(), Some(awake), "{after}");
        for name in ["cpu_seconds", "memory_gib_seconds", "state_gb_months"] {
            assert!(after[name].as_f64().is_some_and(|figure| figure > 0.0), "{name}: {after}");
        }
        assert!(after["state_bytes"].as_u64() > Some(10_000_000), "{after}");
        assert_eq!(lab.view("web")["status"], "sleeping");
        assert_eq!(lab.events("web", "woke").len(), 0);
        // A fork begins at nothing.
        lab.ok(&["fork", "web", "--name", "copy"]);
        let copy = lab.json(&["usage", "copy"])["usage"].clone();
        assert!(copy["asleep_memory_seconds"].as_f64() == Some(0.0), "{copy}");
        lab.ok(&["sandboxes", "delete", "web"]);
        let all = lab.json(&["usage"]);
        assert!(all["deleted"]["awake_seconds"].as_f64() >= Some(awake), "{all}");
    });
}

#[test]
fn s08_reading_figures_wakes_nothing_and_holds_nothing_awake() {
    isolated(test_name!(), |lab| {
        lab.stop_daemon();
        lab.daemon_env.push(("DORMOUSE_OPEN_METRICS".to_owned(), "true".to_owned()));
        lab.start();
        let address = lab.address();
        let metrics = || {
            let answer = net::http(address, "localhost", "/metrics").expect("answered");
            assert_eq!(answer.status, 200, "{}", answer.head);
            answer.body
        };
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "3"]);
        until("it sleeps although it is looked at all the time", || {
            metrics();
            (lab.view("web")["status"] == "sleeping").then_some(())
        });
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        stays("it sleeps on", 2, || {
            metrics().contains("dormouse_sandboxes{status=\"sleeping\",tier=\"disk\"} 1")
        });
        lab.sh("web", "true");
        let text = metrics();
        for line in [
            "dormouse_wakes_total{cause=\"call\",tier=\"disk\"} 1",
            "dormouse_sleeps_total{cause=\"idle\",tier=\"memory\"} 1",
            "dormouse_order_seconds_count{order=\"wake\"} 1",
            "dormouse_phase_seconds_count{order=\"wake\",phase=\"restore\"} 1",
            "dormouse_phase_seconds_count{order=\"demote\",phase=\"save\"} 1",
        ] {
            assert!(text.contains(line), "no `{line}` in\n{text}");
        }
    });
}

/// Before a host goes down everything is put to sleep on disk, whatever it did; a new daemon finds it there, memory and all.
#[test]
fn a_drained_host_has_no_machine_and_loses_nothing() {
    isolated(test_name!(), |lab| {
        for name in ["run", "mem", "disk"] {
            lab.ok(&["sandboxes", "create", "--name", name, "--sleep-after-seconds", "never"]);
            let program = "import time\nwhile True: time.sleep(1000)";
            lab.ok(&["exec", name, "-b", "--", "python3", "-c", program]);
        }
        lab.ok(&["sandboxes", "sleep", "mem", "--tier", "memory"]);
        lab.ok(&["sandboxes", "sleep", "disk", "--tier", "disk"]);
        let report = lab.json(&["drain", "--stop"]);
        assert_eq!((&report["slept"], &report["left"]), (&2.into(), &serde_json::json!([])));
        lab.reap_daemon();
        assert_eq!(proc::qemus_below(&lab.data()), Vec::<i32>::new());
        lab.start();
        for name in ["run", "mem", "disk"] {
            let view = lab.view(name);
            assert_eq!(
                (&view["status"], &view["sleep_tier"]),
                (&"sleeping".into(), &"disk".into())
            );
            let slept = lab.events(name, "sleeping");
            let cause = slept.last().map(|event| event["data"]["cause"].clone());
            assert_eq!(cause, Some(if name == "run" { "drain" } else { "asked" }.into()), "{name}");
            assert_eq!(lab.sh(name, "pgrep -cf 'time.sleep.1000' || true"), "2", "{name}");
        }
    });
}

/// Starts a second daemon over another folder and answers what it said when it had ended.
fn refused(lab: &Lab, data: &std::path::Path, more: &[&str]) -> String {
    let output = lab
        .command(&[&["serve", "--listen", "127.0.0.1:0"], more].concat())
        .env("DORMOUSE_DATA", data)
        .output()
        .expect("`dormouse` starts");
    assert!(!output.status.success(), "it started");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_daemon_that_cannot_work_says_what_is_in_its_way() {
    isolated(test_name!(), |lab| {
        use std::os::unix::fs::PermissionsExt;
        let home = lab.scratch().join("home");
        std::fs::create_dir(&home).expect("a folder");
        std::fs::set_permissions(&home, std::fs::Permissions::from_mode(0o700)).expect("closed");
        let text = refused(lab, &home.join("data"), &["--subnet", "10.119.0.0"]);
        assert!(text.contains(&format!("{} (mode 0700)", home.display())), "{text}");

        let other = lab.scratch().join("other");
        let text = refused(lab, &other, &[]);
        let pid = lab.daemon_pid();
        assert!(text.contains(&format!("another daemon (process {pid})")), "{text}");
        assert!(text.contains("10.118.0.1") && text.contains("--subnet 10.119.0.0"), "{text}");
    });
}

/// A folder deeper than a socket's address is long, and a subnet of its own beside another daemon's.
#[test]
fn two_daemons_work_side_by_side_each_on_its_subnet_at_any_depth() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "first"]);
        let deep = lab.scratch().join("d".repeat(100)).join("data");
        let log = std::fs::File::create(lab.scratch().join("second.log")).expect("a log");
        let mut second = lab
            .command(&["serve", "--listen", "127.0.0.1:8421", "--subnet", "10.119.0.0"])
            .env("DORMOUSE_DATA", &deep)
            .stderr(log)
            .spawn()
            .expect("`dormouse` starts");
        let ask = |arguments: &[&str]| {
            let output = lab.command(arguments).env("DORMOUSE_DATA", &deep).output();
            output.expect("`dormouse` starts")
        };
        until("the second answers", || {
            assert!(second.try_wait().expect("its state").is_none(), "the second ended");
            ask(&["sandboxes", "list"]).status.success().then_some(())
        });
        let made = ask(&["sandboxes", "create", "--name", "second"]);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let there = ask(&["exec", "second", "--", "getent", "hosts", "localhost"]);
        assert!(there.status.success(), "{}", String::from_utf8_lossy(&there.stderr));
        let view = String::from_utf8(ask(&["sandboxes", "get", "second"]).stdout).expect("text");
        assert!(view.contains("10.119.0.2"), "{view}");
        // Neither has taken away what is the other's.
        assert_eq!(lab.sh("first", "echo there"), "there");
        assert!(lab.view("first")["address"] == "10.118.0.2", "{}", lab.view("first"));
        assert!(ask(&["sandboxes", "delete", "second"]).status.success());
        assert!(ask(&["drain", "--stop"]).status.success());
        assert!(second.wait().expect("it ends").success());
        assert_eq!(lab.sh("first", "echo there"), "there");
    });
}

/// What an ordinary user may not look at is not reported as lacking.
#[test]
fn doctor_as_an_ordinary_user_says_what_it_may_not_look_at() {
    isolated(test_name!(), |lab| {
        let program = lab.scratch().join("dormouse");
        std::fs::copy(lab.program(), &program).expect("a copy where anybody may run it");
        let doctor = |data: &std::path::Path, user: &[&str]| {
            let output = Command::new("setpriv")
                .args(user)
                .arg(&program)
                .args(["doctor", "--json"])
                .envs(lab.env())
                .env("DORMOUSE_DATA", data)
                .output()
                .expect("`setpriv` (util-linux) starts");
            let findings: Vec<serde_json::Value> =
                serde_json::from_slice(&output.stdout).expect("findings");
            let states: std::collections::BTreeMap<String, (String, String)> = findings
                .iter()
                .map(|finding| {
                    let field = |name: &str| finding[name].as_str().unwrap_or_default().to_owned();
                    (field("check"), (field("state"), field("text")))
                })
                .collect();
            states
        };
        let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
        let states = doctor(&lab.data(), &nobody);
        for check in ["user", "daemon"] {
            assert_eq!(states[check].0, "unknown", "{check}: {states:?}");
        }
        let missing: Vec<_> = states.iter().filter(|(_, found)| found.0 == "missing").collect();
        assert!(missing.is_empty(), "{missing:?}");
        let states = doctor(&lab.data(), &[]);
        assert!(states.values().all(|found| found.0 != "unknown"), "{states:?}");

        let home = lab.scratch().join("home");
        std::fs::create_dir(&home).expect("a folder");
        let closed = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(&home, closed).expect("closed");
        let (state, text) = doctor(&home.join("data"), &[])["way"].clone();
        assert_eq!(state, "missing");
        assert!(text.contains(&format!("{} (mode 0700)", home.display())), "{text}");
    });
}

/// A stream of events lives on while nothing happens, says so, goes on after a cut, and holds nothing awake.
#[test]
fn s08_following_events_holds_nothing_awake_and_goes_on_after_a_cut() {
    isolated(test_name!(), |lab| {
        let token = std::fs::read_to_string(lab.data().join("admin.token")).expect("the token");
        let address = lab.address();
        let follow = |last: Option<&str>| {
            let mut stream = TcpStream::connect(address).expect("connected");
            stream.set_read_timeout(Some(WAIT_MAX)).expect("time-out set");
            let last = last.map_or(String::new(), |last| format!("Last-Event-ID: {last}\r\n"));
            let token = token.trim();
            let head = format!(
                "GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n{last}\r\n"
            );
            stream.write_all(head.as_bytes()).expect("sent");
            BufReader::new(stream)
        };
        let next = |stream: &mut BufReader<TcpStream>, begins: &str| {
            until(&format!("a line `{begins}…`"), || {
                let mut line = String::new();
                assert!(stream.read_line(&mut line).expect("a line") > 0, "the stream ended");
                line.strip_prefix(begins).map(|rest| rest.trim().to_owned())
            })
        };
        let mut stream = follow(None);
        next(&mut stream, "content-type: text/event-stream");
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "2"]);
        let first = next(&mut stream, "id: ");
        assert_eq!(next(&mut stream, "event: "), "sandbox.created");
        lab.wait_status("web", "sleeping");
        next(&mut stream, ":");
        assert_eq!(lab.view("web")["status"], "sleeping");
        drop(stream);
        let mut stream = follow(Some(&first));
        let mut seen = Vec::new();
        while seen.last().is_none_or(|kind| kind != "sandbox.slept") {
            seen.push(next(&mut stream, "event: "));
        }
        assert_eq!(seen[0], "sandbox.starting", "{seen:?}");
        assert_eq!(lab.events("web", "woke").len(), 0);
        // Another daemon knows nothing of that place, and says so.
        lab.stop_daemon();
        lab.start();
        let mut stream = follow(Some(&first));
        assert_eq!(next(&mut stream, "event: "), "events.lost");
    });
}
