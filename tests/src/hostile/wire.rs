//! Sends bytes as they are, and reads what comes.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// How long an answer may take; what is silent for so long waits for more.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// What came back.
#[derive(Clone, Debug, Default)]
pub struct Heard {
    /// Everything.
    pub bytes: Vec<u8>,
    /// Statuses of the answers, in order.
    pub statuses: Vec<u16>,
    /// The other side has ended the connection.
    pub ended: bool,
}

impl Heard {
    /// As a table's cell.
    pub fn told(&self) -> String {
        let mut told: Vec<String> = self.statuses.iter().map(u16::to_string).collect();
        if told.is_empty() {
            told.push("no answer".to_owned());
        }
        // Many alike are told once.
        let times = told.len();
        told.dedup();
        if told.len() == 1 && times > 1 {
            told[0] = format!("{times} × {}", told[0]);
        }
        told.push(if self.ended { "closed" } else { "open" }.to_owned());
        told.join(", ")
    }

    /// As text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// Bodies of answers that tell what is wrong name it.
    pub fn names(&self, word: &str) -> bool {
        self.text().contains(word)
    }
}

/// Sends these bytes, says that no more will come where `half`, and reads until the other side ends the connection, or is
/// silent after as many answers as are awaited.
#[track_caller]
pub fn exchange(server: SocketAddr, bytes: &[u8], half: bool, awaited: usize) -> Heard {
    let mut stream = TcpStream::connect(server).expect("the daemon takes connections");
    stream.set_nodelay(true).expect("no delay");
    stream.set_write_timeout(Some(ANSWER_MAX)).expect("limit set");
    let mut heard = Heard::default();
    let mut reader = stream.try_clone().expect("a second handle");
    std::thread::scope(|scope| {
        // Who refuses what he has not read yet ends the connection under the writer.
        scope.spawn(move || {
            let sent = stream.write_all(bytes);
            if half && sent.is_ok() {
                let _ = stream.shutdown(Shutdown::Write);
            }
        });
        read(&mut reader, awaited, &mut heard);
        // Ends the writer as well.
        let _ = reader.shutdown(Shutdown::Both);
    });
    heard
}

fn read(stream: &mut TcpStream, awaited: usize, heard: &mut Heard) {
    /// Silence after the last awaited answer that shows that nothing else comes.
    const QUIET: Duration = Duration::from_millis(300);
    let begun = Instant::now();
    loop {
        let enough = heard.statuses.len() >= awaited && awaited > 0;
        let limit = if enough { QUIET } else { ANSWER_MAX.saturating_sub(begun.elapsed()) };
        if limit.is_zero() {
            return;
        }
        stream.set_read_timeout(Some(limit)).expect("limit set");
        let mut piece = [0; 16 * 1024];
        match stream.read(&mut piece) {
            Ok(0) => {
                heard.ended = true;
                return;
            }
            Ok(read) => {
                heard.bytes.extend_from_slice(&piece[..read]);
                heard.statuses = statuses(&heard.bytes);
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return;
            }
            // A reset: it has ended, too.
            Err(_) => {
                heard.ended = true;
                return;
            }
        }
    }
}

/// Statuses of whole answers, and of what follows them.
fn statuses(bytes: &[u8]) -> Vec<u16> {
    let text: String = bytes.iter().copied().map(char::from).collect();
    let starts = text.match_indices("HTTP/1.").filter(|(at, _)| {
        // A status line, not a request that is told back in a body.
        text.get(at + 8..at + 13).is_some_and(|after| {
            after.starts_with(' ') && after[1..4].bytes().all(|byte| byte.is_ascii_digit())
        })
    });
    starts.filter_map(|(at, _)| text.get(at + 9..at + 12)?.parse().ok()).collect()
}

/// A connection on which somebody is slow.
#[derive(Debug)]
pub struct Slow {
    /// What it is called.
    pub name: String,
    stream: TcpStream,
    drip: u8,
    begun: Instant,
    /// After how long it was ended, and what was said then.
    pub ended: Option<(Duration, String)>,
    text: Vec<u8>,
}

impl Slow {
    /// Sends the beginning; further bytes come one at a time.
    #[track_caller]
    pub fn begin(name: String, server: SocketAddr, beginning: &str, drip: u8) -> Self {
        let mut stream = TcpStream::connect(server).expect("the daemon takes connections");
        stream.write_all(beginning.as_bytes()).expect("sent");
        stream.set_nonblocking(true).expect("set");
        Self { name, stream, drip, begun: Instant::now(), ended: None, text: Vec::new() }
    }

    /// One byte more, and a look whether it is over.
    pub fn go_on(&mut self) {
        if self.ended.is_some() {
            return;
        }
        let sent = if self.drip == 0 { Ok(0) } else { self.stream.write(&[self.drip]) };
        let mut piece = [0; 4096];
        let ended = match self.stream.read(&mut piece) {
            Ok(0) => true,
            Ok(read) => {
                self.text.extend_from_slice(&piece[..read]);
                false
            }
            Err(error) => error.kind() != ErrorKind::WouldBlock,
        };
        if ended || sent.is_err_and(|error| error.kind() != ErrorKind::WouldBlock) {
            let line = String::from_utf8_lossy(&self.text);
            let line = line.lines().next().unwrap_or("no answer").to_owned();
            self.ended = Some((self.begun.elapsed(), line));
        }
    }

    /// How long it has gone on so far.
    pub fn lasts(&self) -> Duration {
        self.begun.elapsed()
    }
}
