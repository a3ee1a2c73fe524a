//! One HTTP request, with the moment of its first byte.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::net::{Answer, parse};
use crate::wait::WAIT_MAX;

/// Where a request goes, and under which name.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) server: SocketAddr,
    pub(crate) host: String,
}

impl Target {
    /// A port of a guest, without anybody between.
    pub(crate) fn direct(address: &str, port: u16) -> Self {
        let server = SocketAddr::new(address.parse().expect("an address"), port);
        Self { server, host: server.to_string() }
    }

    /// A link, through the edge.
    pub(crate) fn link(url: &str) -> Self {
        let (host, server) = crate::net::split_link(url);
        Self { server, host }
    }

    /// Asks for `/` over a new connection: how long until the first byte of the answer came, and the answer.
    #[track_caller]
    pub(crate) fn ask(&self) -> (Duration, Answer) {
        let begun = Instant::now();
        let stream = TcpStream::connect_timeout(&self.server, WAIT_MAX).expect("connects");
        let stream = self.send(stream);
        answer(stream, begun)
    }

    /// Asks the counter, which counts when it is heard (see [`counted`]).
    #[track_caller]
    pub(crate) fn send(&self, mut stream: TcpStream) -> TcpStream {
        stream.set_nodelay(true).expect("no delay");
        stream.set_read_timeout(Some(WAIT_MAX)).expect("time-out set");
        let request = format!("GET / HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.host);
        stream.write_all(request.as_bytes()).expect("request sent");
        stream
    }

    /// As [`ask`](Self::ask), of the counter: the answer must be a number.
    #[track_caller]
    pub(crate) fn count(&self) -> (Duration, u64) {
        let (took, answer) = self.ask();
        (
            took,
            answer.body.trim().parse().unwrap_or_else(|_| panic!("not a count: {:?}", answer.body)),
        )
    }
}

/// The answer to a count that was asked for over this connection.
#[track_caller]
pub(crate) fn counted(stream: TcpStream) {
    let (_, answer) = answer(stream, Instant::now());
    assert!(answer.body.trim().parse::<u64>().is_ok(), "not a count: {:?}", answer.body);
}

#[track_caller]
fn answer(mut stream: TcpStream, begun: Instant) -> (Duration, Answer) {
    let mut bytes = vec![0; 4096];
    let first = stream.read(&mut bytes).expect("an answer");
    let took = begun.elapsed();
    bytes.truncate(first);
    stream.read_to_end(&mut bytes).expect("the whole answer");
    let answer = parse(&bytes)
        .unwrap_or_else(|| panic!("no HTTP answer: {:?}", String::from_utf8_lossy(&bytes)));
    assert_eq!(answer.status, 200, "{}\n{}", answer.head, answer.body);
    (took, answer)
}
