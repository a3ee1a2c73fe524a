//! An S3 server on the loopback of the test's namespace, and ways to make it go away without losing what it has.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::lab::{Lab, workspace};
use crate::{net, until};

/// Where it listens.
const LISTEN: &str = "127.0.0.1:9000";

/// The bucket that it has.
pub const BUCKET: &str = "checkpoints";

/// The server; it and its objects, which are in memory, are gone when dropped.
#[derive(Debug)]
pub struct S3 {
    server: Child,
}

impl S3 {
    /// Starts it, once per test, with an empty bucket.
    #[track_caller]
    pub fn start(lab: &Lab) -> Self {
        let program = program();
        assert!(
            program.is_file(),
            "the S3 server of the tests, {}, is missing: `cargo xtask setup --tests` installs it",
            program.display()
        );
        let log = std::fs::File::create(lab.scratch().join("s3.log")).expect("log file");
        let address = address();
        let server = Command::new(program)
            .args(["-H", &address.ip().to_string(), "-p", &address.port().to_string()])
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("log file"))
            .stderr(log)
            .spawn()
            .expect("the S3 server starts");
        let s3 = Self { server };
        until("the S3 server answers", || net::http(address, LISTEN, "/").ok());
        let made = net::ask(address, "PUT", LISTEN, &format!("/{BUCKET}")).expect("an answer");
        assert_eq!(made.status, 200, "{made:?}");
        s3
    }

    /// What the daemon is told so that it keeps checkpoints in a folder of the bucket.
    pub fn settings(&self) -> Vec<(String, String)> {
        let store = format!("s3://{BUCKET}/hosts/one");
        let endpoint = format!("http://{LISTEN}");
        let pairs = [
            ("DORMOUSE_STORE", store.as_str()),
            ("AWS_ENDPOINT_URL", &endpoint),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            // A proxy of this machine is none in the test's namespace.
            ("NO_PROXY", "127.0.0.1"),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()
    }

    /// Paths of the objects below a path, as far as one answer tells them (1000).
    #[track_caller]
    pub fn objects(&self, below: &str) -> Vec<String> {
        let path = format!("/{BUCKET}?list-type=2&prefix=hosts/one/{below}");
        // The server stumbles over objects that are removed while it lists them.
        let answer = until("a list of objects", || {
            net::http(address(), LISTEN, &path).ok().filter(|answer| answer.status == 200)
        });
        let keys = answer.body.split("<Key>").skip(1);
        keys.filter_map(|rest| rest.split("</Key>").next()).map(str::to_owned).collect()
    }

    /// Refuses every connection from now on, also those that are there.
    pub fn goes_away(&self) {
        block("reject with tcp reset");
    }

    /// Says nothing any more, to nobody.
    pub fn falls_silent(&self) {
        block("drop");
    }

    /// Is there again.
    pub fn comes_back(&self) {
        net::output("nft", &["delete", "table", "ip", "s3away"]);
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        // Nothing more can be done about errors here.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn block(verdict: &str) {
    let port = address().port();
    let rules = format!(
        "add table ip s3away\n\
         add chain ip s3away in {{ type filter hook input priority -10; }}\n\
         add rule ip s3away in tcp dport {port} {verdict}"
    );
    for line in rules.lines() {
        net::output("nft", &[line]);
    }
}

fn address() -> SocketAddr {
    LISTEN.parse().expect("an address")
}

/// `DORMOUSE_S3_SERVER`, or where the set-up puts it.
fn program() -> PathBuf {
    std::env::var_os("DORMOUSE_S3_SERVER")
        .map_or_else(|| workspace().join("target/s3-server/bin/moto_server"), PathBuf::from)
}
