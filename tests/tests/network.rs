//! What guests reach, and who reaches them.

use std::io::Write;
use std::net::TcpListener;

use e2e::far::Far;
use e2e::lab::LISTEN_PROGRAM as LISTEN;
use e2e::{isolated, net, test_name};

/// Starts a server in this network namespace that says one line to everybody who connects.
fn say(address: &str, line: &'static str) {
    let listener = TcpListener::bind(address).expect("listens");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("accepted");
            stream.write_all(line.as_bytes()).expect("said");
        }
    });
}

const FETCH: &str = "python3 -c 'import socket,sys; s=socket.create_connection((sys.argv[1],int(sys.argv[2])),timeout=3); print(s.recv(99).decode())'";

#[test]
fn guests_reach_the_internet_and_nothing_else() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "a", "--sleep-after-seconds", "never"]);
        lab.ok(&["sandboxes", "create", "--name", "b", "--sleep-after-seconds", "never"]);
        let mut far = Far::make();
        far.serve(
            "import socket\ns=socket.socket(); s.bind(('203.0.113.9',80)); s.listen()\n\
             while 1:\n c,a=s.accept(); c.sendall(('hello '+a[0]).encode()); c.close()",
        );

        let answer = e2e::until("the far server answers", || {
            let output =
                lab.run(&["exec", "a", "--", "sh", "-c", &format!("{FETCH} 203.0.113.9 80")]);
            output
                .status
                .success()
                .then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        });
        assert_eq!(answer, "hello 203.0.113.1", "masqueraded as the host");

        // Not the host, on any of its addresses; not another sandbox; no private range.
        say("0.0.0.0:9999", "the host");
        let b = lab.view("b")["address"].as_str().expect("an address").to_owned();
        lab.ok(&["exec", "b", "--background", "--", "python3", "-c", LISTEN, "0.0.0.0", "9999"]);
        for target in
            ["10.118.0.1", "203.0.113.1", &b, "10.0.0.1", "192.168.0.1", "169.254.169.254"]
        {
            let output =
                lab.run(&["exec", "a", "--", "sh", "-c", &format!("{FETCH} {target} 9999")]);
            assert_ne!(output.status.code(), Some(0), "a reached {target}");
        }
        // A guest that takes another's address reaches nobody.
        let spoofed = lab.run(&[
            "exec",
            "a",
            "--",
            "sh",
            "-c",
            &format!("ip addr add {b}/32 dev eth0; ping -c1 -W2 -I {b} 203.0.113.9 || exit 9"),
        ]);
        assert_ne!(spoofed.status.code(), Some(0));
    });
}

#[test]
fn names_are_resolved_through_the_host() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "a", "--sleep-after-seconds", "never"]);
        assert_eq!(lab.sh("a", "cat /etc/resolv.conf | grep -c nameserver"), "1");
        assert!(lab.sh("a", "cat /etc/resolv.conf").contains("10.118.0.1"));
    });
}

#[test]
fn ports_on_loopback_are_reached_through_the_link() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "a", "--sleep-after-seconds", "never"]);
        lab.ok(&["exec", "a", "--background", "--", "python3", "-c", LISTEN, "127.0.0.1", "8000"]);
        let link = lab.ok(&["link", "a", "8000"]);
        e2e::until("the server answers", || {
            net::follow(&link).ok().filter(|answer| answer.status == 200)
        });
        let mut direct = std::net::TcpStream::connect((
            lab.view("a")["address"].as_str().expect("an address"),
            8000,
        ))
        .map_or_else(|error| error.kind().to_string(), |_| String::new());
        direct.make_ascii_lowercase();
        assert!(direct.contains("refused"), "only its loopback listens: {direct}");
    });
}

/// Accepts, and holds what it accepts without a word.
const SILENT: &str = "import socket\ns=socket.socket(); s.bind(('203.0.113.9',443)); s.listen()\nheld=[]\nwhile 1: held.append(s.accept())";

/// How long the program is silent; the long form asks for 180.
fn silent_seconds() -> u64 {
    let text = std::env::var("DORMOUSE_SOAK_SILENT_SECONDS").ok();
    text.map_or(10, |text| text.parse().expect("a number"))
}

#[test]
fn s02_a_silent_outbound_connection_keeps_it_awake_and_the_reason_is_named() {
    isolated(test_name!(), |lab| {
        let mut far = Far::make();
        far.serve(SILENT);
        lab.ok(&["sandboxes", "create", "--name", "agent", "--sleep-after-seconds", "2"]);
        let connect = "import socket; s=socket.create_connection(('203.0.113.9',443)); s.recv(1)";
        let exec = lab.json(&["exec", "agent", "--background", "--", "python3", "-c", connect]);
        // The same program without a connection, at the same time.
        let wait = "import threading; threading.Event().wait()";
        lab.ok(&["sandboxes", "create", "--name", "idle", "--sleep-after-seconds", "2"]);
        lab.ok(&["exec", "idle", "--background", "--", "python3", "-c", wait]);
        let begun = std::time::Instant::now();
        // Far longer than it would stay awake without.
        let seconds = silent_seconds();
        let limit = std::time::Duration::from_secs(seconds + 60);
        e2e::within(limit, "it was awake for so long", || {
            let view = lab.view("agent");
            assert_eq!(view["status"], "running", "{view}");
            (begun.elapsed().as_secs() >= seconds).then_some(())
        });
        assert_eq!(lab.events("agent", "slept").len(), 0);
        assert_eq!(lab.view("idle")["status"], "sleeping");
        let view = lab.view("agent");
        let reasons = view["awake_because"].as_array().cloned().unwrap_or_default();
        assert!(reasons.iter().any(|reason| reason["reason"] == "outbound_tcp"), "{view}");
        // Without it, it sleeps.
        let pid = exec["pid"].as_u64().expect("a process");
        lab.sh("agent", &format!("kill {pid}"));
        lab.wait_status("agent", "sleeping");
    });
}

#[test]
fn s02_packets_keep_it_awake() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "2"]);
        let address = lab.view("web")["address"].as_str().expect("an address").to_owned();
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").expect("a socket");
        let begun = std::time::Instant::now();
        e2e::until("packets came for 8 s", || {
            socket.send_to(b"x", (address.as_str(), 9)).expect("sent");
            let view = lab.view("web");
            assert_eq!(view["status"], "running", "{view}");
            (begun.elapsed().as_secs() >= 8).then_some(())
        });
        let view = lab.view("web");
        let reasons = view["awake_because"].as_array().cloned().unwrap_or_default();
        assert!(reasons.iter().any(|reason| reason["reason"] == "packets"), "{view}");
        lab.wait_status("web", "sleeping");
    });
}
