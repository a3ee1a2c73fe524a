//! The interface against its own document: schemathesis makes requests from `docs/openapi.json`, good and bad, and looks at what each
//! operation answers, on a daemon with real guests. Every operation, every check and every phase (examples, limits of each field, random
//! requests, sequences in which one operation uses what another has made); nothing is left out, and one failure is too many.
//!
//! `POST /v1/drain` with `stop` ends the daemon, as it should. It is started again then, as systemd would, and has kept everything.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use e2e::boxes::call;
use e2e::lab::{LISTEN, workspace};
use e2e::mcp::token;
use e2e::{Lab, isolated, net, test_name, within};
use serde_json::Value;

/// Random requests for each operation, beside those that examples and limits of fields make; `DORMOUSE_SOAK_FUZZ_EXAMPLES` says more.
const EXAMPLES: u32 = 2;
/// What is chosen at random is the same each time, unless `DORMOUSE_SOAK_SEED` says otherwise.
const SEED: u32 = 7;
/// The longest that a run with [`EXAMPLES`] takes: it is two minutes on two processors that emulate each guest.
const TIME_MAX: Duration = Duration::from_mins(8);
/// Small sandboxes, for it makes many and looks into few; and what follows has an end.
const SMALL: [(&str, &str); 3] = [
    ("DORMOUSE_BOX_UNIT_CPUS", "1"),
    ("DORMOUSE_BOX_UNIT_MEMORY_MIB", "256"),
    // A command that never ends is followed, too.
    ("DORMOUSE_FOLLOW_SECONDS", "5"),
];
/// What it does one after the other.
const PHASES: [&str; 4] = ["Examples", "Coverage", "Fuzzing", "Stateful"];

/// A number from the environment, or the default.
fn number(variable: &str, default: u32) -> u32 {
    let Ok(text) = std::env::var(variable) else { return default };
    text.parse().unwrap_or_else(|_| panic!("{variable}: `{text}` is no number"))
}

/// `DORMOUSE_SCHEMATHESIS`, or where the set-up puts it.
fn program() -> PathBuf {
    let program = std::env::var_os("DORMOUSE_SCHEMATHESIS")
        .map_or_else(|| workspace().join("target/schemathesis/bin/schemathesis"), PathBuf::from);
    assert!(
        program.is_file(),
        "{} is missing: `cargo xtask setup --tests` installs it",
        program.display()
    );
    program
}

/// A run, which ends with the test.
struct Run(Child);

impl Drop for Run {
    fn drop(&mut self) {
        // Nothing more can be done about errors here.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(lab: &Lab, document: &std::path::Path, examples: u32) -> Run {
    let said = File::create(lab.scratch().join("schemathesis.txt")).expect("a file");
    let mut command = Command::new(program());
    command.arg("--config-file").arg(workspace().join("tests/schemathesis.toml"));
    command.arg("run").arg(document).args(["--url", &format!("http://{LISTEN}")]);
    command.args(["--header", &format!("Authorization: Bearer {}", token(lab))]);
    command.args(["--max-examples", &examples.to_string()]);
    command.args(["--seed", &number("DORMOUSE_SOAK_SEED", SEED).to_string()]);
    command.args(["--checks", "all", "--continue-on-failure", "--no-color"]);
    command.args(["--generation-database", "none"]);
    // The first sandbox of a size has a machine booted, in as many seconds as it takes where that is emulated.
    command.args(["--max-response-time", "60"]);
    command
        .env("SCHEMATHESIS_HOOKS", "fuzz_media")
        .env("PYTHONPATH", workspace().join("tests/src"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("PYTHONUTF8", "1")
        // A proxy of this machine is none in the test's namespace.
        .env("NO_PROXY", "127.0.0.1")
        .current_dir(lab.scratch())
        .stdin(Stdio::null())
        .stdout(said.try_clone().expect("a file"))
        .stderr(said);
    Run(command.spawn().expect("schemathesis starts"))
}

/// Waits for its end, and starts the daemon again whenever that has ended in order. Gives how it ended, and how often that was.
fn supervise(lab: &mut Lab, run: &mut Run, limit: Duration) -> (ExitStatus, u32) {
    let mut restarts = 0;
    let ended = within(limit, "the end of schemathesis", || {
        if lab.has_ended_in_order() {
            lab.start();
            restarts += 1;
        }
        run.0.try_wait().expect("its state")
    });
    (ended, restarts)
}

#[test]
fn every_operation_keeps_what_the_document_promises() {
    isolated(test_name!(), |lab| {
        lab.stop_daemon();
        lab.daemon_env.extend(SMALL.map(|(name, value)| (name.to_owned(), value.to_owned())));
        lab.start();
        let answer = net::http(lab.address(), LISTEN, "/v1/openapi.json").expect("an answer");
        let document = lab.scratch().join("openapi.json");
        std::fs::write(&document, &answer.body).expect("written");
        let examples = number("DORMOUSE_SOAK_FUZZ_EXAMPLES", EXAMPLES);
        let mut run = start(lab, &document, examples);
        let limit = TIME_MAX * examples.div_ceil(EXAMPLES);
        let (ended, restarts) = supervise(lab, &mut run, limit);
        let said = std::fs::read_to_string(lab.scratch().join("schemathesis.txt")).expect("read");
        assert!(ended.success(), "{ended}\n{said}");
        println!(
            "{}\nthe daemon was told to end, and started again, {restarts} times",
            summary(&said)
        );
        // It was all of it.
        let paths: Value = serde_json::from_str(&answer.body).expect("JSON");
        let paths = paths["paths"].as_object().expect("paths");
        let operations: usize =
            paths.values().map(|path| path.as_object().map_or(0, serde_json::Map::len)).sum();
        for part in
            [format!("Selected: {operations}/{operations}"), format!("Tested: {operations}")]
        {
            assert!(said.contains(&part), "not `{part}`:\n{said}");
        }
        for phase in PHASES {
            assert!(said.contains(&format!("✅ {phase}")), "not all of `{phase}`:\n{said}");
        }
        assert!(restarts > 0, "nothing ended the daemon, which one operation does:\n{said}");
        let mut logs = String::new();
        for entry in std::fs::read_dir(lab.scratch()).expect("the folder") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|kind| kind == "log") {
                logs += &std::fs::read_to_string(path).expect("a log");
            }
        }
        assert!(!logs.contains("panicked at"), "a fault inside:\n{logs}");
    });
}

/// What comes to light only when the guest begins to pack is an answer too, and no stream that breaks off.
#[test]
fn a_tree_of_what_is_neither_folder_nor_file_is_refused_before_it_begins() {
    isolated(test_name!(), |lab| {
        lab.json(&["sandboxes", "create", "--name", "web"]);
        lab.sh(
            "web",
            "touch /work/file && ln -s file /work/link && mkdir /work/folder && mkfifo /work/pipe",
        );
        for (path, expected) in [
            ("/work/pipe", 409),
            ("/dev/null", 409),
            ("/work/file/.", 409),
            ("/proc", 409),
            ("/work/file", 200),
            ("/work/link", 200),
            ("/work/folder", 200),
        ] {
            let (status, answer) =
                call(lab, "GET", &format!("/v1/sandboxes/web/tree?path={path}"), &Value::Null);
            assert_eq!(status, expected, "{path}: {answer}");
            if expected == 409 {
                assert_eq!(answer["code"], "wrong_file_type", "{path}: {answer}");
            }
        }

        // What the kernel shows of itself is left out of what is around it, files of other file systems are not.
        let to = lab.scratch().join("all").to_string_lossy().into_owned();
        lab.sh(
            "web",
            "cd /work/folder && mkdir proc other && mount -t proc proc proc && mount -t tmpfs none other && echo kept > other/file",
        );
        lab.ok(&["files", "get", "web:/work/folder", &to]);
        let read = |path: &str| std::fs::read_to_string(Path::new(&to).join(path));
        assert_eq!(read("other/file").expect("copied"), "kept\n");
        let proc = std::fs::read_dir(Path::new(&to).join("proc")).expect("the folder itself");
        assert_eq!(proc.count(), 0);
    });
}

/// The last part of what it said.
fn summary(said: &str) -> &str {
    said.rfind("SUMMARY").map_or(said, |at| &said[at..])
}
