//! README's tour, word for word.

use std::process::{Command, Stdio};

use e2e::lab::Lab;
use e2e::{isolated, test_name};

/// The first block of shell after the heading "Tour".
fn tour() -> String {
    let readme =
        std::fs::read_to_string(e2e::lab::workspace().join("README.md")).expect("README.md");
    let after = readme.split_once("\n## Tour").expect("README has a tour").1;
    let block = after.split_once("```sh\n").expect("the tour has a block of shell").1;
    block.split_once("```").expect("the block ends").0.to_owned()
}

/// What stands before each block that is run here.
const MARK: &str = "<!-- Run by an end-to-end test, word for word. -->\n```sh\n";

/// The blocks after the tour, in their order.
fn blocks_after_the_tour() -> String {
    let readme =
        std::fs::read_to_string(e2e::lab::workspace().join("README.md")).expect("README.md");
    let blocks = readme.split(MARK).skip(2);
    blocks.map(|block| block.split_once("```").expect("the block ends").0).collect()
}

/// Runs a script as a person would paste it; answers what it printed.
fn run(lab: &Lab, script: &str) -> String {
    let bin = lab.program();
    let path = format!(
        "{}:{}",
        bin.parent().expect("a folder").display(),
        std::env::var("PATH").expect("PATH")
    );
    let output = Command::new("timeout")
        .args(["300", "bash", "-c", script])
        .envs(lab.env())
        .env("PATH", path)
        .current_dir(e2e::lab::workspace())
        .stdin(Stdio::null())
        .output()
        .expect("bash starts");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{stdout}\n--- stderr ---\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "the tour failed: {}", output.status);
    stdout
}

/// What the counter has answered: lines of digits.
fn counts(stdout: &str) -> Vec<&str> {
    stdout
        .lines()
        .filter(|line| !line.is_empty() && line.bytes().all(|byte| byte.is_ascii_digit()))
        .collect()
}

#[test]
fn readme_tour_word_for_word() {
    isolated(test_name!(), |lab| {
        let stdout = run(lab, &tour());
        assert_eq!(counts(&stdout), ["1", "2", "3", "3"], "what the counter answered");
        assert!(stdout.contains("running"), "it was running");
    });
}

#[test]
fn readme_tour_with_the_five_quiet_seconds_that_it_speaks_of() {
    isolated(test_name!(), |lab| {
        let get = "dormouse sandboxes get web";
        let wait = format!("{get}\nuntil {get} | grep -q sleeping; do :; done\n{get}");
        let stdout = run(lab, &tour().replacen(get, &wait, 1));
        assert_eq!(counts(&stdout), ["1", "2", "3", "3"], "what the counter answered");
        assert!(stdout.contains("sleeping (memory)"), "it slept, and how is told");
        assert!(stdout.contains("port 8000"), "the timeline names what woke it");
    });
}

#[test]
fn readme_blocks_after_the_tour_word_for_word() {
    isolated(test_name!(), |lab| {
        let blocks = blocks_after_the_tour();
        assert!(
            blocks.contains("snapshots create") && blocks.contains("volumes create"),
            "{blocks}"
        );
        let stdout = run(lab, &format!("set -eu\n{blocks}"));
        for said in ["began\nended\n", "kept\n", "counter\n"] {
            assert!(stdout.contains(said), "not `{said}`: {stdout}");
        }
        lab.ok(&["snapshots", "delete", "ready"]);
        lab.ok(&["drives", "delete", "data"]);
        lab.ok(&["volumes", "delete", "examples"]);
    });
}
