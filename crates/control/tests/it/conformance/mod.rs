//! The protocol's own conformance suite, in two versions, against our listener, guard and service, with what the suite calls behind
//! them ([`fixture`]).
//!
//! The suite sends no token: it comes over the local socket, whose users need none.

mod fixture;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, UnixStream};

use crate::client::settings;
use crate::fake::Fake;
use fixture::Fixture;

/// How long a run of the suite may take; it takes seconds.
const RUN_TIME_MAX: Duration = Duration::from_secs(100);

/// The folder of npm's packages: `DORMOUSE_CLIENTS`, or where `cargo xtask setup --tests` puts them.
fn clients() -> PathBuf {
    let folder = std::env::var_os("DORMOUSE_CLIENTS").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/clients"),
        PathBuf::from,
    );
    assert!(
        folder.join("node_modules").is_dir(),
        "{} is missing: `cargo xtask setup --tests` installs it",
        folder.display()
    );
    folder
}

/// Runs one version of the suite, of which the scenarios in the file `expected`, and no others, must fail, and at least so many pass.
async fn run(package: &str, arguments: &[&str], expected: &str, least: usize) {
    let (root, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let fake = Fake::new(root.path());
    let server = control::serve_handler(fake, settings(&data), Fixture).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    let socket = Arc::new(server.socket().to_owned());
    let way = tokio::spawn(async move {
        loop {
            let (mut outside, _) = listener.accept().await.unwrap();
            let socket = Arc::clone(&socket);
            tokio::spawn(async move {
                let mut inside = UnixStream::connect(&*socket).await.unwrap();
                // Whoever goes first ends it.
                let _ = tokio::io::copy_bidirectional(&mut outside, &mut inside).await;
            });
        }
    });

    let clients = clients();
    let expected =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/conformance").join(expected);
    let mut suite = tokio::process::Command::new(clients.join("node"));
    suite.arg(clients.join("node_modules").join(package).join("dist/index.js"));
    suite.args(["server", "--url", &url, "--expected-failures"]).arg(&expected).args(arguments);
    suite.arg("--output-dir").arg(root.path().join("results"));
    suite.current_dir(root.path()).env("NO_PROXY", "*").stdin(Stdio::null()).kill_on_drop(true);
    let ran = tokio::time::timeout(RUN_TIME_MAX, suite.output()).await.expect("it ends").unwrap();
    let (said, wrong) =
        (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    println!("{said}");
    assert!(ran.status.success(), "{said}\n{wrong}");
    let passed = said.lines().filter(|line| line.starts_with('✓')).count();
    assert!(passed >= least, "{passed} scenarios have passed: {said}\n{wrong}");
    way.abort();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_conformance_suite_of_the_revisions_with_a_handshake() {
    run("@modelcontextprotocol/conformance", &[], "expected-2025-11-25.yml", 21).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_conformance_suite_of_the_present_revision() {
    // What it requires; extensions run too, and do not count.
    let required = ["--requirements", "2026-07-28"];
    run("conformance-next", &required, "expected-2026-07-28.yml", 40).await;
}
