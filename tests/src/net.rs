//! The test's own network: taps, rules, HTTP by hand.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::wait::WAIT_MAX;

/// Makes a certificate for `localhost` and the links below it: the files of it and of its key.
#[track_caller]
pub fn certificate(folder: &Path) -> (String, String) {
    let file = |name| folder.join(name).to_string_lossy().into_owned();
    let (cert, key) = (file("cert.pem"), file("key.pem"));
    let names = "subjectAltName=DNS:localhost,DNS:*.box.localhost";
    let how = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj"];
    // As a server's own, which is trusted for itself.
    let what = ["/CN=localhost", "-addext", names, "-addext", "basicConstraints=critical,CA:FALSE"];
    output("openssl", &[&how[..], &what, &["-keyout", &key, "-out", &cert]].concat());
    (cert, key)
}

/// Names of the guests' taps in this network namespace.
pub fn taps() -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/proc/self/net/dev_snmp6") else { return taps_by_ip() };
    drop(entries);
    taps_by_ip()
}

fn taps_by_ip() -> Vec<String> {
    let listing = output("ip", &["-o", "link", "show"]);
    let mut taps: Vec<String> = listing
        .lines()
        .filter_map(|line| line.split(": ").nth(1))
        .map(|name| name.split('@').next().unwrap_or(name).to_owned())
        .filter(|name| name.starts_with("dmouse"))
        .collect();
    taps.sort();
    taps
}

/// The rules as text.
pub fn rules() -> String {
    output("nft", &["list", "ruleset"])
}

/// Standard output of a program that must succeed.
#[track_caller]
pub fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().expect("program starts");
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// An HTTP answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Head as text.
    pub head: String,
    /// Body as text.
    pub body: String,
}

impl Answer {
    /// Value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

/// Asks once with a fresh connection and no retries.
pub fn http(server: SocketAddr, host: &str, path: &str) -> std::io::Result<Answer> {
    ask(server, "GET", host, path)
}

/// As [`http`] with another method, and nothing in the request.
pub fn ask(server: SocketAddr, method: &str, host: &str, path: &str) -> std::io::Result<Answer> {
    let mut stream = TcpStream::connect(server)?;
    stream.set_read_timeout(Some(WAIT_MAX))?;
    stream.write_all(
        format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            .as_bytes(),
    )?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    parse(&bytes).ok_or_else(|| {
        std::io::Error::other(format!("no HTTP answer: {:?}", String::from_utf8_lossy(&bytes)))
    })
}

/// Calls the daemon's interface over its local socket, once, with a fresh connection and no retries.
pub fn call(socket: &Path, method: &str, path: &str, body: &str) -> std::io::Result<Answer> {
    let mut stream = std::os::unix::net::UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(WAIT_MAX))?;
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(format!("{head}{body}").as_bytes())?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    parse(&bytes).ok_or_else(|| {
        std::io::Error::other(format!("no HTTP answer: {:?}", String::from_utf8_lossy(&bytes)))
    })
}

/// Follows a link that `dormouse link` printed.
pub fn follow(link: &str) -> std::io::Result<Answer> {
    let (authority, server) = split_link(link);
    http(server, &authority, "/")
}

/// Host header and address of a link; every `*.localhost` is this machine.
#[track_caller]
pub fn split_link(link: &str) -> (String, SocketAddr) {
    let rest = link.trim().strip_prefix("http://").expect("an http link");
    let authority = rest.split('/').next().expect("a host");
    let port = authority.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).expect("a port");
    (authority.to_owned(), SocketAddr::from(([127, 0, 0, 1], port)))
}

/// Connects, with a bound.
#[track_caller]
pub fn connect(address: &str, port: u16) -> TcpStream {
    let address = SocketAddr::new(address.parse().expect("an address"), port);
    let stream = TcpStream::connect_timeout(&address, Duration::from_mins(1)).expect("connects");
    stream.set_read_timeout(Some(WAIT_MAX)).expect("time-out set");
    stream.set_nodelay(true).expect("no delay");
    stream
}

/// Pings an address; the answer must carry what was sent.
#[track_caller]
pub fn ping(address: &str, payload: &[u8]) {
    use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sockopt};
    let address: std::net::IpAddr = address.parse().expect("an address");
    let (family, protocol, request, reply) = if address.is_ipv4() {
        (AddressFamily::INET, ipproto::ICMP, 8, 0)
    } else {
        (AddressFamily::INET6, ipproto::ICMPV6, 128, 129)
    };
    let socket = rustix::net::socket(family, SocketType::RAW, Some(protocol)).expect("a socket");
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(WAIT_MAX)).expect("set");
    let to = SocketAddr::new(address, 0);
    rustix::net::connect(&socket, &to).expect("an address");
    let mut message = vec![request, 0, 0, 0, 0x12, 0x34, 0, 1];
    message.extend_from_slice(payload);
    // In IPv6 the kernel does this.
    if address.is_ipv4() {
        let words = message
            .chunks(2)
            .map(|pair| u32::from(pair[0]) << 8 | pair.get(1).copied().map_or(0, u32::from));
        let sum: u32 = words.sum();
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = !u16::try_from((sum & 0xffff) + (sum >> 16)).expect("folded");
        message[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    rustix::net::send(&socket, &message, SendFlags::empty()).expect("sent");
    loop {
        let mut answer = [0; 2048];
        let (length, _) =
            rustix::net::recv(&socket, &mut answer[..], rustix::net::RecvFlags::empty())
                .unwrap_or_else(|error| panic!("ping {address}: {error}"));
        // IPv4 comes with its head.
        let from = if address.is_ipv4() { usize::from(answer[0] & 0xf) * 4 } else { 0 };
        let answer = &answer[from..length];
        if answer[0] == reply {
            assert_eq!(answer[4..], message[4..], "the answer of {address}");
            return;
        }
    }
}

/// An answer from all the bytes of a connection.
pub(crate) fn parse(bytes: &[u8]) -> Option<Answer> {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { unchunk(body)? } else { body.to_owned() };
    Some(Answer { status, head: head.to_owned(), body })
}

fn unchunk(mut rest: &str) -> Option<String> {
    let mut body = String::new();
    loop {
        let (size, after) = rest.split_once("\r\n")?;
        let size = usize::from_str_radix(size.split(';').next()?.trim(), 16).ok()?;
        if size == 0 {
            return Some(body);
        }
        body.push_str(after.get(..size)?);
        rest = after.get(size..)?.strip_prefix("\r\n")?;
    }
}
