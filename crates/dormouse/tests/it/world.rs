//! A daemon of the test's own, and the program run against it.

use std::process::{Output, Stdio};
use std::sync::Arc;

use control::{Server, Settings};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};

use crate::fake::Fake;

pub(crate) struct World {
    pub(crate) fake: Arc<Fake>,
    /// Data folder of the control plane.
    pub(crate) data: TempDir,
    /// A folder for the test's files.
    pub(crate) local: TempDir,
    pub(crate) server: Option<Server>,
    _root: TempDir,
}

impl World {
    pub(crate) async fn new() -> Self {
        let (root, data, local) = (
            tempfile::tempdir().unwrap(),
            tempfile::tempdir().unwrap(),
            tempfile::tempdir().unwrap(),
        );
        let fake = Fake::new(root.path());
        let mut world = Self { fake, data, local, server: None, _root: root };
        world.start().await;
        world
    }

    pub(crate) async fn start(&mut self) {
        let settings = Settings {
            data: self.data.path().to_owned(),
            listen: "127.0.0.1:0".into(),
            domain: "localhost".into(),
            public_url: Some("http://localhost:8420".into()),
            edge: control::EdgeLimits::default(),
            boxes: control::BoxSettings::default(),
            tls: None,
            trusted_proxies: Vec::new(),
            open_metrics: false,
            follow_max: None,
        };
        self.server = Some(control::serve(Arc::clone(&self.fake) as _, settings).await.unwrap());
    }

    pub(crate) async fn stop(&mut self) {
        self.server.take().unwrap().stop().await;
    }

    /// The program, told where the daemon is, with nothing to read.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dormouse"));
        for name in ["DORMOUSE_SOCKET", "DORMOUSE_URL", "DORMOUSE_TOKEN", "DORMOUSE_IMAGES"] {
            command.env_remove(name);
        }
        command
            .args(arguments)
            .current_dir(self.local.path())
            .env("DORMOUSE_DATA", self.data.path());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    pub(crate) fn spawn(&self, arguments: &[&str]) -> Child {
        self.command(arguments).stdin(Stdio::piped()).spawn().unwrap()
    }

    pub(crate) async fn output(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().await.unwrap()
    }

    /// Runs it and gives it this to read.
    pub(crate) async fn fed(&self, arguments: &[&str], stdin: &[u8]) -> Output {
        let mut child = self.spawn(arguments);
        let mut pipe = child.stdin.take().unwrap();
        let stdin = stdin.to_owned();
        let feeder = tokio::spawn(async move { pipe.write_all(&stdin).await });
        let output = child.wait_with_output().await.unwrap();
        // A command may end before it has read everything.
        let _ = feeder.await.unwrap();
        output
    }

    /// Standard output, standard error and exit code, with what differs from run to run taken out.
    pub(crate) async fn run(&self, arguments: &[&str]) -> String {
        self.show(&self.output(arguments).await)
    }

    pub(crate) fn show(&self, output: &Output) -> String {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        let err = if err.is_empty() { err } else { format!("--- stderr\n{err}") };
        let mut shown = format!("{out}{err}--- exit {}\n", output.status.code().unwrap());
        shown = shown.replace(self.data.path().to_str().unwrap(), "<data>");
        // Ids come first where a name is shown, so an id can be told from other words of twelve letters.
        for id in self.ids() {
            shown = shown.replace(&id, "<sandbox-id>");
        }
        shown.lines().map(|line| without_ages(line) + "\n").collect()
    }

    /// Runs it, expects success, gives back standard output without the last line end.
    pub(crate) async fn ok(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments).await;
        assert!(output.status.success(), "{arguments:?}: {}", self.show(&output));
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    }

    fn ids(&self) -> Vec<String> {
        self.fake.ids().iter().map(ToString::to_string).collect()
    }
}

/// How long ago something was differs from run to run.
fn without_ages(line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let mut kept: Vec<&str> = Vec::new();
    for word in words {
        match word {
            "ago" | "ago)" | "ago)," => {
                // The number and the unit before it.
                kept.truncate(kept.len() - 2);
                kept.push(match word {
                    "ago" => "<age>",
                    "ago)" => "(<age>)",
                    _ => "(<age>),",
                });
            }
            word => kept.push(word),
        }
    }
    kept.join(" ")
}
