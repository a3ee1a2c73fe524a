//! What the host answers for a sleeper, and what it wakes for.

use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use e2e::lab::{LISTEN_PROGRAM as LISTEN, Lab};
use e2e::wait::WAIT_MAX;
use e2e::{isolated, net, test_name, until, within};
use rustix::net::sockopt;

/// Answers each line with the same, on each connection; and each datagram. Arguments: port.
const ECHO: &str = r"
import socket, sys, threading
port = int(sys.argv[1])
def serve(c):
    while True:
        data = c.recv(4096)
        if not data: break
        c.sendall(data)
    c.close()
def datagrams():
    u = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); u.bind(('::', port))
    while True:
        data, who = u.recvfrom(4096)
        u.sendto(data, who)
threading.Thread(target=datagrams, daemon=True).start()
s = socket.create_server(('::', port), family=socket.AF_INET6, dualstack_ipv6=True)
while True:
    c, _ = s.accept()
    threading.Thread(target=serve, args=(c,), daemon=True).start()
";

/// A sandbox with that program on port 7007, and a server on port 9000 that only the sandbox itself reaches.
#[track_caller]
fn echo_sandbox(lab: &Lab, name: &str) -> String {
    lab.ok(&["sandboxes", "create", "--name", name, "--sleep-after-seconds", "never"]);
    lab.write_file(name, "/work/echo.py", ECHO);
    lab.ok(&["exec", name, "--background", "--", "python3", "/work/echo.py", "7007"]);
    lab.ok(&["exec", name, "--background", "--", "python3", "-c", LISTEN, "127.0.0.1", "9000"]);
    let address = lab.view(name)["address"].as_str().expect("an address").to_owned();
    until("both servers listen", || {
        let listening = lab.sh(name, "cat /proc/net/tcp /proc/net/tcp6 /proc/net/udp6");
        // 7007 twice, and 9000.
        let there = listening.matches(":1B5F").count() >= 2 && listening.contains(":2328");
        there.then_some(())
    });
    address
}

/// Its IPv6 address.
#[track_caller]
fn ipv6_of(lab: &Lab, name: &str) -> String {
    lab.view(name)["ipv6_address"].as_str().expect("an address").to_owned()
}

#[track_caller]
fn put_to_sleep(lab: &Lab, name: &str, tier: &str) {
    lab.ok(&["sandboxes", "sleep", name, "--tier", tier]);
    assert_eq!(lab.view(name)["sleep_tier"], tier);
}

/// It sleeps, and has been woken so many times.
#[track_caller]
fn sleeps(lab: &Lab, name: &str, wakes: usize) {
    let view = lab.view(name);
    assert_eq!(view["status"], "sleeping", "{view}\n{:?}", lab.events(name, ""));
    assert_eq!(lab.events(name, "woke").len(), wakes, "{:?}", lab.events(name, "woke"));
}

/// It has been woken so many times; the guest goes on a moment before that is told.
#[track_caller]
fn woken(lab: &Lab, name: &str, wakes: usize) {
    until("its waking is told", || (lab.events(name, "woke").len() >= wakes).then_some(()));
    assert_eq!(lab.events(name, "woke").len(), wakes, "{:?}", lab.events(name, ""));
}

#[track_caller]
fn echoes(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).expect("sent");
    let mut answer = vec![0; text.len()];
    stream.read_exact(&mut answer).expect("answered");
    assert_eq!(answer, text.as_bytes());
}

/// What closed ports and pings get, of a sleeper as of one that is awake.
#[track_caller]
fn strangers_are_turned_away(address: &str) {
    for port in [7008, 9000] {
        let target = std::net::SocketAddr::new(address.parse().expect("an address"), port);
        let error = TcpStream::connect_timeout(&target, Duration::from_secs(20))
            .expect_err("nobody listens there");
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "port {port}");
    }
    let any = if address.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
    let socket = UdpSocket::bind(any).expect("a socket");
    socket.connect((address, 7008)).expect("an address");
    socket.set_read_timeout(Some(Duration::from_secs(20))).expect("time-out set");
    socket.send(b"anybody?").expect("sent");
    let error = socket.recv(&mut [0; 9]).expect_err("nobody listens there");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "port unreachable");
    net::ping(address, b"");
    net::ping(address, &[7; 301]);
}

#[test]
fn s08_a_closed_port_and_a_ping_are_answered_asleep_and_an_open_one_wakes() {
    isolated(test_name!(), |lab| {
        let address = echo_sandbox(lab, "web");
        let ipv6 = ipv6_of(lab, "web");
        // As the guest itself does it.
        strangers_are_turned_away(&address);
        strangers_are_turned_away(&ipv6);
        let mut wakes = 0;
        for tier in ["memory", "disk"] {
            put_to_sleep(lab, "web", tier);
            strangers_are_turned_away(&address);
            strangers_are_turned_away(&ipv6);
            sleeps(lab, "web", wakes);
            // A new connection to an open one.
            let mut stream = net::connect(&address, 7007);
            echoes(&mut stream, "first");
            wakes += 1;
            let woke = lab.events("web", "woke");
            assert_eq!((woke.len(), &woke[wakes - 1]["data"]["cause"]), (wakes, &"packet".into()));
            drop(stream);

            put_to_sleep(lab, "web", tier);
            let mut stream = net::connect(&ipv6, 7007);
            echoes(&mut stream, "over IPv6");
            wakes += 1;
            woken(lab, "web", wakes);
            drop(stream);

            put_to_sleep(lab, "web", tier);
            // A datagram to an open one.
            let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
            socket.connect((address.as_str(), 7007)).expect("an address");
            socket.set_read_timeout(Some(Duration::from_mins(1))).expect("time-out set");
            socket.send(b"hello").expect("sent");
            let mut answer = [0; 9];
            assert_eq!(socket.recv(&mut answer).expect("answered"), 5, "{tier}");
            wakes += 1;
            woken(lab, "web", wakes);
        }
        // What a new daemon knows of a sleeper it knows from the manifest.
        for tier in ["memory", "disk"] {
            put_to_sleep(lab, "web", tier);
            lab.kill_daemon();
            lab.start();
            strangers_are_turned_away(&address);
            strangers_are_turned_away(&ipv6);
            sleeps(lab, "web", wakes);
            let mut stream = net::connect(&ipv6, 7007);
            echoes(&mut stream, "after a new daemon");
            wakes += 1;
        }
    });
}

/// Counts what crosses between the guests and this machine's own stack, to and from this port.
fn count_segments(port: u16) {
    let rules = format!(
        "table inet count {{\n\
           counter probes {{}}\n counter answers {{}}\n\
           chain out {{ type filter hook output priority 300; oifname \"dmouse*\" tcp dport {port} counter name probes; }}\n\
           chain in {{ type filter hook input priority -300; iifname \"dmouse*\" tcp sport {port} counter name answers; }}\n\
         }}"
    );
    net::output("nft", &[&rules]);
}

fn counted(which: &str) -> u64 {
    let text = net::output("nft", &["list", "counter", "inet", "count", which]);
    let packets = text.split("packets ").nth(1).and_then(|rest| rest.split(' ').next());
    packets.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

/// How often a client probes, and how long the connection is idle in each tier: `DORMOUSE_SOAK_PROBE_SECONDS`,
/// `DORMOUSE_SOAK_IDLE_SECONDS`.
fn idleness() -> (u64, u64) {
    let number = |name: &str, default| {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
    };
    (number("DORMOUSE_SOAK_PROBE_SECONDS", 1), number("DORMOUSE_SOAK_IDLE_SECONDS", 12))
}

/// Connects with keepalive probes: three without an answer cut the connection.
#[track_caller]
fn connect_with_probes(address: &str, every: Duration) -> TcpStream {
    let stream = net::connect(address, 7007);
    sockopt::set_tcp_keepidle(&stream, every).expect("set");
    sockopt::set_tcp_keepintvl(&stream, every).expect("set");
    sockopt::set_tcp_keepcnt(&stream, 3).expect("set");
    sockopt::set_socket_keepalive(&stream, true).expect("set");
    stream
}

#[test]
fn s07_keepalive_probes_are_answered_asleep_and_data_wakes() {
    isolated(test_name!(), |lab| {
        let (probe_seconds, idle_seconds) = idleness();
        let address = echo_sandbox(lab, "web");
        let ipv6 = ipv6_of(lab, "web");
        count_segments(7007);
        for (wakes, tier) in ["memory", "disk"].into_iter().enumerate() {
            let mut clients: Vec<_> = [&address, &ipv6, &ipv6]
                .iter()
                .map(|address| connect_with_probes(address, Duration::from_secs(probe_seconds)))
                .collect();
            for client in &mut clients {
                echoes(client, "before");
            }
            put_to_sleep(lab, "web", tier);
            let before = (counted("probes"), counted("answers"));
            let begun = Instant::now();
            let limit = Duration::from_secs(2 * idle_seconds) + WAIT_MAX;
            within(limit, "the connections were idle for long", || {
                (begun.elapsed().as_secs() >= idle_seconds).then_some(())
            });
            let (probes, answers) = (counted("probes") - before.0, counted("answers") - before.1);
            println!("{tier}: idle {idle_seconds} s, {probes} probes, {answers} answers");
            // The kernel counts each from the answer to the last: some are a little late.
            let due = idle_seconds / probe_seconds;
            let expected = 3 * (due - 2 - due / 20);
            assert!(probes >= expected, "{probes} probes, not {expected}");
            // One may be on its way.
            assert!(answers + 3 >= probes, "{probes} probes and {answers} answers");
            sleeps(lab, "web", wakes);
            // The next byte is answered, on each of them, in one wake.
            for client in &mut clients {
                echoes(client, "x");
            }
            woken(lab, "web", wakes + 1);
        }
    });
}

#[test]
fn s07_a_new_daemon_answers_keepalive_probes_too() {
    isolated(test_name!(), |lab| {
        let address = echo_sandbox(lab, "web");
        let mut client = connect_with_probes(&address, Duration::from_secs(1));
        echoes(&mut client, "before");
        for (wakes, tier) in ["memory", "disk"].into_iter().enumerate() {
            put_to_sleep(lab, "web", tier);
            lab.kill_daemon();
            lab.start();
            count_segments(7007);
            until("five probes were answered", || (counted("answers") >= 5).then_some(()));
            sleeps(lab, "web", wakes);
            net::output("nft", &["delete", "table", "inet", "count"]);
            echoes(&mut client, "data");
            woken(lab, "web", wakes + 1);
        }
    });
}

#[test]
fn s08_the_end_of_a_connection_wakes() {
    isolated(test_name!(), |lab| {
        let address = echo_sandbox(lab, "web");
        for (wakes, tier) in ["memory", "disk"].into_iter().enumerate() {
            let mut client = net::connect(&address, 7007);
            echoes(&mut client, "before");
            put_to_sleep(lab, "web", tier);
            client.shutdown(std::net::Shutdown::Write).expect("shut down");
            let mut rest = Vec::new();
            client.read_to_end(&mut rest).expect("the program has seen the end and closed");
            woken(lab, "web", wakes + 1);
        }
    });
}

#[test]
fn s08_a_tap_that_was_removed_is_made_anew() {
    isolated(test_name!(), |lab| {
        let address = echo_sandbox(lab, "web");
        let mut wakes = 0;
        for tier in ["memory", "disk"] {
            put_to_sleep(lab, "web", tier);
            let tap = net::taps().pop().expect("its tap");
            net::output("ip", &["link", "delete", &tap]);
            until("its tap is there again", || net::taps().contains(&tap).then_some(()));
            sleeps(lab, "web", wakes);
            let mut client =
                until("it is reached again", || TcpStream::connect((address.as_str(), 7007)).ok());
            echoes(&mut client, "over a new tap");
            wakes += 1;
            woken(lab, "web", wakes);
        }
        // Removed while it runs: it has no network until its next wake.
        let tap = net::taps().pop().expect("its tap");
        net::output("ip", &["link", "delete", &tap]);
        put_to_sleep(lab, "web", "memory");
        let mut client =
            until("it is reached again", || TcpStream::connect((address.as_str(), 7007)).ok());
        echoes(&mut client, "over a new tap");
    });
}
