//! Sandboxes' own IPv6 addresses: who has which, and what is reached over them.

use e2e::far::{FAR_V6, Far, NEAR_V6};
use e2e::lab::Lab;
use e2e::{isolated, test_name, until};

/// Starts the daemon anew, so that guests reach the internet over IPv6.
fn with_outbound(lab: &mut Lab) {
    lab.stop_daemon();
    lab.daemon_env.push(("DORMOUSE_IPV6_OUTBOUND".to_owned(), "true".to_owned()));
    lab.start();
}

fn ipv6_of(lab: &Lab, name: &str) -> String {
    lab.view(name)["ipv6_address"].as_str().expect("an address").to_owned()
}

/// The global addresses of its card, as it sees them itself.
fn seen_inside(lab: &Lab, name: &str) -> String {
    let line = "ip -6 -o addr show dev eth0 scope global | awk '{print $4}'";
    lab.sh(name, line)
}

/// Says something to everybody who connects to port 9999.
const LISTEN: &str = "import socket\ns=socket.create_server(('::',9999),family=socket.AF_INET6)\n\
    while 1:\n c,a=s.accept(); c.sendall(b'b'); c.close()";

const FETCH: &str = "python3 -c 'import socket,sys; s=socket.create_connection((sys.argv[1],int(sys.argv[2])),timeout=3); print(s.recv(99).decode())'";

#[test]
fn s22_each_sandbox_has_an_ipv6_address_of_its_own_and_a_fork_another() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "a", "--sleep-after-seconds", "never"]);
        let a = ipv6_of(lab, "a");
        assert!(a.starts_with("fd"), "unique local: {a}");
        assert_eq!(seen_inside(lab, "a"), format!("{a}/128"));
        lab.ok(&["fork", "a", "--name", "b"]);
        let b = ipv6_of(lab, "b");
        assert_ne!(a, b);
        assert_eq!(seen_inside(lab, "b"), format!("{b}/128"), "its parent's is gone");
        assert_eq!(seen_inside(lab, "a"), format!("{a}/128"));
        // It stays, over everything.
        lab.ok(&["sandboxes", "sleep", "a", "--tier", "disk"]);
        lab.kill_daemon();
        lab.start();
        assert_eq!((ipv6_of(lab, "a"), seen_inside(lab, "a")), (a.clone(), format!("{a}/128")));
        lab.ok(&["sandboxes", "restart", "a"]);
        until("it has booted", || {
            let output = lab.run(&["exec", "a", "--", "true"]);
            output.status.success().then_some(())
        });
        assert_eq!(seen_inside(lab, "a"), format!("{a}/128"));
    });
}

#[test]
fn ipv6_reaches_the_internet_if_asked_for_and_nothing_else() {
    isolated(test_name!(), |lab| {
        for name in ["a", "b"] {
            lab.ok(&["sandboxes", "create", "--name", name, "--sleep-after-seconds", "never"]);
        }
        let mut far = Far::make();
        far.serve(&format!(
            "import socket\ns=socket.socket(socket.AF_INET6); s.bind(('{FAR_V6}',80)); s.listen()\n\
             while 1:\n c,a=s.accept(); c.sendall(('hello '+a[0]).encode()); c.close()"
        ));
        let fetch = |lab: &Lab, target: &str, port: &str| {
            lab.run(&["exec", "a", "--", "sh", "-c", &format!("{FETCH} {target} {port}")])
        };
        until("the far server is there", || {
            std::net::TcpStream::connect((FAR_V6, 80)).is_ok().then_some(())
        });
        let refused = fetch(lab, FAR_V6, "80");
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(said.contains("refused"), "at once, so that programs turn to IPv4: {said}");

        with_outbound(lab);
        let answer = fetch(lab, FAR_V6, "80");
        assert_eq!(
            String::from_utf8_lossy(&answer.stdout).trim(),
            format!("hello {NEAR_V6}"),
            "masqueraded as the host: {}",
            String::from_utf8_lossy(&answer.stderr)
        );
        let listener = std::net::TcpListener::bind("[::]:9999").expect("listens");
        let b = ipv6_of(lab, "b");
        lab.ok(&["exec", "b", "--background", "--", "python3", "-c", LISTEN]);
        until("b listens", || {
            std::net::TcpStream::connect((b.as_str(), 9999)).is_ok().then_some(())
        });
        let a = ipv6_of(lab, "a");
        let gateway = a.replace("::2", "::1");
        for target in [&gateway, NEAR_V6, &b, "fd00::1", "fe80::1%eth0", "64:ff9b::a00:1"] {
            let output = fetch(lab, target, "9999");
            assert_ne!(output.status.code(), Some(0), "a reached {target}");
        }
        drop(listener);
        // A guest that takes another's address reaches nobody.
        let spoof = format!(
            "ip -6 addr add {b}/128 dev eth0 nodad; python3 -c 'import socket; \
             s=socket.socket(socket.AF_INET6); s.settimeout(3); s.bind((\"{b}\",0)); s.connect((\"{FAR_V6}\",80))' || exit 9"
        );
        assert_ne!(lab.run(&["exec", "a", "--", "sh", "-c", &spoof]).status.code(), Some(0));
    });
}

/// Accepts, probes each second (three without an answer cut the connection), and says something after a while.
const PATIENT: &str = "import socket,time\ns=socket.socket(socket.AF_INET6); s.bind(('2001:db8:113::9',443)); s.listen()\n\
    c,a=s.accept()\nfor o,v in ((4,1),(5,1),(6,3)): c.setsockopt(6,o,v)\n\
    c.setsockopt(1,9,1)\ntime.sleep(15)\nc.sendall(b'at last')\ntime.sleep(100)";

#[test]
fn s02_an_outbound_connection_on_its_own_ipv6_address_does_not_count_and_goes_on() {
    isolated(test_name!(), |lab| {
        with_outbound(lab);
        let mut far = Far::make();
        far.serve(PATIENT);
        lab.ok(&["sandboxes", "create", "--name", "agent", "--sleep-after-seconds", "2"]);
        let connect = "import socket\ns=socket.create_connection(('2001:db8:113::9',443))\n\
             open('/work/heard','wb').write(s.recv(99))";
        lab.ok(&["exec", "agent", "--background", "--", "python3", "-c", connect]);
        lab.wait_status("agent", "sleeping");
        // Some ten probes later, which woke nobody.
        let woke =
            until("what the server says wakes it", || lab.events("agent", "woke").first().cloned());
        assert_eq!(woke["data"]["cause"], "packet", "{woke}");
        assert!(woke["data"]["slept_ms"].as_f64().expect("how long") > 5_000.0, "{woke}");
        until("it has heard it", || {
            (lab.sh("agent", "cat /work/heard 2>/dev/null || true") == "at last").then_some(())
        });
    });
}
