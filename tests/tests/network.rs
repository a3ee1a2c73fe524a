//! What guests reach, and who reaches them.

use std::io::Write;
use std::net::TcpListener;

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
        // "The internet" is another namespace behind a link with a public-looking address (TEST-NET-3).
        net::output("ip", &["link", "add", "wan", "type", "veth", "peer", "name", "far"]);
        let far = std::process::Command::new("unshare")
            .args(["--net", "sleep", "600"])
            .spawn()
            .expect("a namespace");
        let pid = far.id().to_string();
        e2e::until("the namespace is there", || {
            let own = std::fs::read_link("/proc/self/ns/net").ok()?;
            let other = std::fs::read_link(format!("/proc/{pid}/ns/net")).ok()?;
            (own != other).then_some(())
        });
        net::output("ip", &["link", "set", "far", "netns", &pid]);
        net::output("ip", &["addr", "add", "203.0.113.1/24", "dev", "wan"]);
        net::output("ip", &["link", "set", "wan", "up"]);
        let inside = |arguments: &[&str]| {
            net::output("nsenter", &[&["--net", "--target", &pid, "--"], arguments].concat())
        };
        inside(&["ip", "addr", "add", "203.0.113.9/24", "dev", "far"]);
        inside(&["ip", "link", "set", "far", "up"]);
        let server = "import socket\ns=socket.socket(); s.bind(('203.0.113.9',80)); s.listen()\nwhile 1:\n c,a=s.accept(); c.sendall(('hello '+a[0]).encode()); c.close()";
        let mut serving = std::process::Command::new("nsenter")
            .args(["--net", "--target", &pid, "--", "python3", "-c", server])
            .spawn()
            .expect("a server");

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

        serving.kill().expect("ends");
        serving.wait().expect("gone");
        let mut far = far;
        far.kill().expect("ends");
        far.wait().expect("gone");
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
