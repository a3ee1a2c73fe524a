//! README's tour, word for word.

use std::process::{Command, Stdio};

use e2e::{isolated, test_name};

/// The first block of shell after the heading "Tour".
fn tour() -> String {
    let readme =
        std::fs::read_to_string(e2e::lab::workspace().join("README.md")).expect("README.md");
    let after = readme.split_once("\n## Tour").expect("README has a tour").1;
    let block = after.split_once("```sh\n").expect("the tour has a block of shell").1;
    block.split_once("```").expect("the block ends").0.to_owned()
}

#[test]
fn readme_tour_word_for_word() {
    isolated(test_name!(), |lab| {
        let bin = lab.program();
        let path = format!(
            "{}:{}",
            bin.parent().expect("a folder").display(),
            std::env::var("PATH").expect("PATH")
        );
        // Between the lines the README lets five quiet seconds pass; the script waits for the state instead.
        let script = format!("set -eu\n{}", tour().replace(
            "dormouse sandboxes get web",
            "dormouse sandboxes get web\nuntil dormouse sandboxes get web | grep -q sleeping; do :; done\ndormouse sandboxes get web",
        ));
        let output = Command::new("timeout")
            .args(["300", "bash", "-c", &script])
            .envs(lab.env())
            .env("PATH", path)
            .current_dir(e2e::lab::workspace())
            .stdin(Stdio::null())
            .output()
            .expect("bash starts");
        let stdout = String::from_utf8_lossy(&output.stdout);
        let stderr = String::from_utf8_lossy(&output.stderr);
        println!("{stdout}\n--- stderr ---\n{stderr}");
        assert!(output.status.success(), "the tour failed: {}", output.status);
        let counts: Vec<&str> = stdout
            .lines()
            .filter(|line| !line.is_empty() && line.bytes().all(|b| b.is_ascii_digit()))
            .collect();
        assert_eq!(counts, ["1", "2", "3", "3"], "what the counter answered");
        assert!(stdout.contains("running"), "it was running once");
        assert!(stdout.contains("sleeping"), "it slept once");
        assert!(stdout.contains("port 8000"), "the timeline names what woke it");
    });
}
