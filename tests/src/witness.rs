//! A program in a guest that would notice if its memory were lost, old or damaged.
//!
//! It draws a nonce and some megabytes of random content at its start, counts, and answers on port 7000
//! with the nonce, the count, and whether the content still has its checksum. Somebody who asks it twice knows whether it is
//! the same process with a memory that only ever went forward.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::lab::Lab;
use crate::{net, until};

const PROGRAM: &str = r"
import hashlib, os, socket, sys, threading, time
content = bytearray(os.urandom(4 << 20)); sum = hashlib.sha256(content).hexdigest()
nonce = os.urandom(8).hex(); count = 0
def tick():
    global count
    while True:
        count += 1
        time.sleep(0.05)
if sys.argv[1] == 'ticks': threading.Thread(target=tick, daemon=True).start()
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(('0.0.0.0', 7000)); s.listen()
while True:
    c, _ = s.accept()
    count += 1
    ok = hashlib.sha256(content).hexdigest() == sum
    c.sendall(('%s %d %s\n' % (nonce, count, ok)).encode())
    c.close()
";

/// What a witness said last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Witness {
    sandbox: String,
    address: String,
    nonce: String,
    count: u64,
}

impl Witness {
    /// Makes a sandbox with a witness in it, whose timer wakes it from every sleep at once.
    #[track_caller]
    pub fn create(lab: &Lab, sandbox: &str) -> Self {
        Self::begin(lab, sandbox, "ticks")
    }

    /// The same, but it counts only when it is asked, so that it sleeps until then.
    #[track_caller]
    pub fn create_still(lab: &Lab, sandbox: &str) -> Self {
        Self::begin(lab, sandbox, "still")
    }

    #[track_caller]
    fn begin(lab: &Lab, sandbox: &str, how: &str) -> Self {
        lab.ok(&[
            "sandboxes",
            "create",
            "--name",
            sandbox,
            "--sleep-after-seconds",
            "never",
            "--memory-mib",
            "256",
        ]);
        lab.write_file(sandbox, "/work/witness.py", PROGRAM);
        lab.ok(&["exec", sandbox, "--background", "--", "python3", "/work/witness.py", how]);
        let address = lab.view(sandbox)["address"].as_str().expect("an address").to_owned();
        let (nonce, count) = until("the witness listens", || ask(&address));
        Self { sandbox: sandbox.to_owned(), address, nonce, count }
    }

    /// The sandbox's name.
    pub fn sandbox(&self) -> &str {
        &self.sandbox
    }

    /// Asks again (which wakes it): the same process must answer, with a memory that went forward.
    #[track_caller]
    pub fn check(&mut self) {
        let (nonce, count) =
            until(&format!("the witness in {} answers", self.sandbox), || ask(&self.address));
        assert_eq!(nonce, self.nonce, "{}: another process answered", self.sandbox);
        assert!(
            count > self.count,
            "{}: an older memory answered: {count} after {}",
            self.sandbox,
            self.count
        );
        self.count = count;
    }
}

fn ask(address: &str) -> Option<(String, u64)> {
    let address = format!("{address}:7000").parse().ok()?;
    let mut stream =
        TcpStream::connect_timeout(&address, std::time::Duration::from_secs(30)).ok()?;
    stream.set_read_timeout(Some(std::time::Duration::from_mins(1))).ok()?;
    stream.flush().ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let mut words = text.split_whitespace();
    let (nonce, count, whole) =
        (words.next()?.to_owned(), words.next()?.parse().ok()?, words.next()?);
    assert_eq!(whole, "True", "the witness's memory is damaged");
    Some((nonce, count))
}

/// Every sandbox has one tap and, unless it sleeps on disk or is off, one QEMU; nothing else is left.
#[track_caller]
pub fn nothing_leaks(lab: &Lab) {
    until("one tap per sandbox and one QEMU per machine", || {
        let list = lab.json(&["sandboxes", "list"]);
        let list = list.as_array().cloned().unwrap_or_default();
        let with_machine = list
            .iter()
            .filter(|sandbox| sandbox["status"] == "running" || sandbox["sleep_tier"] == "memory")
            .count();
        let qemus = crate::proc::qemus_below(&lab.data()).len();
        let taps = net::taps().len();
        (qemus == with_machine && taps == list.len()).then_some(())
    });
}
