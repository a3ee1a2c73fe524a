//! Clients that others wrote, as they are: a browser, curl, git, Node's `fetch`.
//!
//! Those of npm lie where `cargo xtask setup --tests` has put them, in the versions of `tests/clients/package-lock.json`.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::mpsc;

use serde_json::Value;

use crate::Lab;
use crate::lab::workspace;
use crate::wait::WAIT_MAX;

/// The folder of npm's packages: `DORMOUSE_CLIENTS`, or where `cargo xtask setup --tests` puts them.
#[track_caller]
pub fn folder() -> PathBuf {
    let folder = std::env::var_os("DORMOUSE_CLIENTS")
        .map_or_else(|| workspace().join("target/clients"), PathBuf::from);
    assert!(
        folder.join("node_modules").is_dir(),
        "{} is missing: `cargo xtask setup --tests` installs it",
        folder.display()
    );
    folder
}

/// One of the tests' own scripts, or a program, for Node.js.
#[track_caller]
pub fn node(lab: &Lab, script: &str) -> Command {
    let folder = folder();
    let mut command = Command::new(folder.join("node"));
    // A package's program, or a script beside the list of packages.
    let script = if script.starts_with("node_modules/") {
        folder.join(script)
    } else {
        workspace().join("tests/clients").join(script)
    };
    command.arg(script).env("DORMOUSE_CLIENTS", folder);
    at_home(lab, &mut command);
    command
}

/// What a program keeps for its user goes into the test's own folder; nothing of this machine's user changes what it does.
fn at_home(lab: &Lab, command: &mut Command) {
    let scratch = lab.scratch();
    command.env("HOME", scratch).env("XDG_CONFIG_HOME", scratch.join("config"));
    command.env("NO_PROXY", "*").env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_TERMINAL_PROMPT", "0");
    command.current_dir(scratch).stdin(Stdio::null());
}

/// Runs a program of this machine to its end, whatever it is.
#[track_caller]
pub fn run(lab: &Lab, program: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(arguments);
    at_home(lab, &mut command);
    command.output().unwrap_or_else(|error| {
        panic!("{program}: {error}; `cargo xtask setup --tests` installs it")
    })
}

/// Lets all programs of this test find these names at this machine. curl and browsers know by themselves that everything below
/// `localhost` is here, the C library does not.
#[track_caller]
pub fn name_here(lab: &Lab, names: &[&str]) {
    let file = lab.scratch().join("hosts");
    let line = format!("127.0.0.1 localhost {}\n", names.join(" "));
    std::fs::write(&file, line).expect("written");
    // The test has a mount namespace of its own.
    crate::net::output("mount", &["--bind", &file.to_string_lossy(), "/etc/hosts"]);
}

/// A browser with one tab, as `tests/clients/browser.mjs` tells it.
#[derive(Debug)]
pub struct Browser {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: mpsc::Receiver<Value>,
}

impl Browser {
    /// Starts it.
    #[track_caller]
    pub fn start(lab: &Lab) -> Self {
        let mut command = node(lab, "browser.mjs");
        command.env("CHROMIUM", "/usr/bin/chromium").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("Node.js starts");
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().expect("its output"));
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let line = serde_json::from_str(&line)
                    .unwrap_or_else(|error| panic!("no JSON ({error}): {line}"));
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, stdin, lines }
    }

    /// Tells it what to do.
    #[track_caller]
    pub fn tell(&mut self, what: &Value) {
        let stdin = self.stdin.as_mut().expect("its input is open");
        stdin.write_all(format!("{what}\n").as_bytes()).expect("written");
    }

    /// Waits until it tells this, and gives it; also what it has told before.
    #[track_caller]
    pub fn wait(&mut self, what: &str) -> (Value, Vec<Value>) {
        let mut before = Vec::new();
        loop {
            let line = self
                .lines
                .recv_timeout(WAIT_MAX)
                .unwrap_or_else(|error| panic!("{error}: no `{what}` after {before:?}"));
            if !line[what].is_null() {
                return (line[what].clone(), before);
            }
            before.push(line);
        }
    }

    /// Closes it; it must end well.
    #[track_caller]
    pub fn close(mut self) {
        self.stdin = None;
        let child = &mut self.child;
        let status = crate::until("the browser ends", || child.try_wait().expect("its state"));
        assert!(status.success(), "the browser ended with {status}");
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Gone already, mostly.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
