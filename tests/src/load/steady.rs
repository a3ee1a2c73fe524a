//! Requests at a steady rate over connections that stay open. Each asks for something else and must be answered with just that:
//! an answer that is another's would be seen.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::{CONNECTIONS, Target};
use crate::wait::WAIT_MAX;

/// Errors that are told; there should be none.
const ERRORS_MAX: usize = 20;

/// What came of it.
#[derive(Clone, Debug)]
pub struct Steady {
    /// Requests a second.
    pub rate: f64,
    /// How long.
    pub seconds: u64,
    /// How many were sent.
    pub requests: usize,
    /// What went wrong.
    pub errors: Vec<String>,
    /// How long each took, milliseconds, sorted.
    times_ms: Vec<f64>,
}

impl Steady {
    /// In which 99 of 100 were answered, milliseconds.
    pub fn p99_ms(&self) -> f64 {
        let at = self.times_ms.len() * 99 / 100;
        self.times_ms.get(at).copied().unwrap_or(f64::NAN)
    }
}

/// Asks at this rate, requests a second over all connections together, for so many seconds.
#[track_caller]
pub fn steady(target: &Target, rate: f64, seconds: u64) -> Steady {
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let every = Duration::from_secs_f64(CONNECTIONS as f64 / rate);
    let begun = Instant::now();
    let end = begun + Duration::from_secs(seconds);
    let mut all = Steady { rate, seconds, requests: 0, errors: Vec::new(), times_ms: Vec::new() };
    std::thread::scope(|scope| {
        let number = |n: usize| u32::try_from(n).expect("few");
        let threads: Vec<_> = (0..CONNECTIONS)
            .map(|n| {
                // Spread over the time between two of one connection.
                let first = begun + every * number(n) / number(CONNECTIONS);
                scope.spawn(move || connection(target, n, first, every, end))
            })
            .collect();
        for thread in threads {
            let (requests, errors, times) = thread.join().expect("a connection's thread");
            all.requests += requests;
            all.errors.extend(errors);
            all.times_ms.extend(times);
        }
    });
    all.times_ms.sort_by(f64::total_cmp);
    all
}

fn connection(
    target: &Target,
    number: usize,
    first: Instant,
    every: Duration,
    end: Instant,
) -> (usize, Vec<String>, Vec<f64>) {
    let (mut requests, mut errors, mut times) = (0, Vec::new(), Vec::new());
    let mut stream = None;
    let mut next = first;
    while next < end && errors.len() < ERRORS_MAX {
        // Until it is its turn.
        while let Some(left) =
            next.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
        {
            std::thread::park_timeout(left);
        }
        let path = format!("/steady/{number}/{requests}");
        requests += 1;
        let begun = Instant::now();
        let asked = ask(&mut stream, target, &path);
        if let Err(error) = asked {
            errors.push(format!("connection {number}, request {requests}: {error}"));
            stream = None;
        }
        times.push(begun.elapsed().as_secs_f64() * 1000.0);
        // One that is late does not make up for it.
        next = (next + every).max(Instant::now());
    }
    (requests, errors, times)
}

/// One request over the connection that is open, or over a new one.
fn ask(
    open: &mut Option<BufReader<TcpStream>>,
    target: &Target,
    path: &str,
) -> std::io::Result<()> {
    let stream = if let Some(stream) = open {
        stream
    } else {
        let stream = TcpStream::connect(target.server)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(WAIT_MAX))?;
        open.insert(BufReader::new(stream))
    };
    let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", target.host);
    stream.get_mut().write_all(request.as_bytes())?;
    let (mut head, mut length) = (String::new(), None);
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Err(std::io::Error::other(format!("ended within the head: {head:?}")));
        }
        if line == "\r\n" {
            break;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse::<usize>().ok();
        }
        head.push_str(&line);
    }
    let mut body = vec![0; length.unwrap_or_default()];
    stream.read_exact(&mut body)?;
    if !head.starts_with("HTTP/1.1 200 ") || body != path.as_bytes() {
        let body = String::from_utf8_lossy(&body);
        return Err(std::io::Error::other(format!("asked for {path}: {head:?} {body:?}")));
    }
    Ok(())
}
