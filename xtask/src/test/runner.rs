//! Runs the tests: with nextest where it is installed, with `cargo test` where it is not, the same tests either way.

use std::fs;
use std::process::{Command, Stdio};

use serde::Deserialize;

use super::report::{Report, read_junit, read_lines};
use crate::failure::{Context, Failure, Result};
use crate::{layout, process};

/// The crate whose tests run virtual machines.
const MACHINES: &str = "e2e";
/// How many of its tests run at once, as in `.config/nextest.toml`.
const MACHINES_THREADS: &str = "2";
/// nextest's profile for this.
const PROFILE: &str = "ci";

/// Which tests.
#[derive(Debug)]
pub(super) struct Selection<'a> {
    /// Parts of names, any of which makes a test run; none: all run.
    pub(super) filters: &'a [String],
    /// Crates; none: all.
    pub(super) packages: &'a [String],
}

impl Selection<'_> {
    /// Whether tests that run virtual machines may be among them.
    pub(super) fn has_machines(&self) -> bool {
        self.packages.is_empty() || self.packages.iter().any(|name| name == MACHINES)
    }
}

/// Runs them and reads the report.
pub(super) fn run(selection: &Selection<'_>, may_use_nextest: bool) -> Result<Report> {
    if may_use_nextest && has_nextest() { with_nextest(selection) } else { with_cargo(selection) }
}

fn has_nextest() -> bool {
    let mut command = process::cargo();
    command
        .args(["nextest", "--version"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn with_nextest(selection: &Selection<'_>) -> Result<Report> {
    let junit = layout::target().join("nextest").join(PROFILE).join("junit.xml");
    // One of an earlier run must not pass for this one's.
    if junit.try_exists().context(format!("look at {}", junit.display()))? {
        fs::remove_file(&junit).context(format!("remove {}", junit.display()))?;
    }
    let mut command = process::cargo();
    command.args(["nextest", "run", "--locked", "--profile", PROFILE]);
    packages(&mut command, selection);
    command.args(selection.filters);
    let (ended_well, said) = process::listen(with_environment(&mut command))?;

    let xml = match fs::read_to_string(&junit) {
        Ok(xml) => xml,
        Err(error) if ended_well => return Err(error).context(format!("read {}", junit.display())),
        Err(_) => {
            return Err(Failure::new(
                "the tests could not be built or started; what is wrong stands above",
            ));
        }
    };
    let mut report = Report { ended_well, ..Report::default() };
    report.extend(read_junit(&xml));
    report.closing.extend(
        said.lines().rfind(|line| line.trim_start().starts_with("Summary")).map(str::to_owned),
    );

    // nextest leaves out the examples in documentation.
    if selection.filters.is_empty() && selection.packages.is_empty() {
        let mut command = process::cargo();
        command.args(["test", "--locked", "--workspace", "--doc", "--no-fail-fast"]);
        let (ended_well, said) = process::listen(with_environment(&mut command))?;
        report.ended_well &= ended_well;
        report.extend(read_lines("doc", &said));
    }
    Ok(report)
}

fn with_cargo(selection: &Selection<'_>) -> Result<Report> {
    let names =
        if selection.packages.is_empty() { workspace()? } else { selection.packages.to_vec() };
    let mut report = Report { ended_well: true, ..Report::default() };
    // Crate by crate: that is how the lines are told apart.
    for name in names {
        let mut command = process::cargo();
        command.args(["test", "--locked", "--no-fail-fast", "--package", &name, "--"]);
        if name == MACHINES {
            command.args(["--test-threads", MACHINES_THREADS]);
        }
        command.args(selection.filters);
        let (ended_well, said) = process::listen(with_environment(&mut command))?;
        report.ended_well &= ended_well;
        report.extend(read_lines(&name, &said));
    }
    let outcome = if report.is_good() { "ok" } else { "FAILED" };
    report.closing.push(format!("test result: {outcome}. {}", report.count().replace(',', ";")));
    Ok(report)
}

fn packages(command: &mut Command, selection: &Selection<'_>) {
    if selection.packages.is_empty() {
        command.arg("--workspace");
    }
    for name in selection.packages {
        command.args(["--package", name]);
    }
}

/// Where tests find what was built for them.
fn with_environment(command: &mut Command) -> &mut Command {
    command
        .env("DORMOUSE_BIN", layout::target().join("debug").join(layout::PROGRAM))
        .env("DORMOUSE_IMAGES", layout::test_images())
        .env("DORMOUSE_TEMPLATES", layout::test_templates())
        .env("DORMOUSE_S3_SERVER", layout::s3_server().join("bin/moto_server"))
        .env("DORMOUSE_MCP_PYTHON", layout::mcp_client().join("bin/python"))
        .env("DORMOUSE_CLIENTS", layout::clients())
        .env("DORMOUSE_SCHEMATHESIS", layout::schemathesis().join("bin/schemathesis"))
        .env("DORMOUSE_E2E", layout::test_root())
        .env("DORMOUSE_TEST_IMAGE", layout::test_images().join("default"))
}

/// Names of all crates of the workspace, that with the machines last: it takes longest.
fn workspace() -> Result<Vec<String>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    #[derive(Deserialize)]
    struct Package {
        name: String,
    }
    let mut command = process::cargo();
    command.args(["metadata", "--locked", "--no-deps", "--format-version", "1"]);
    let metadata: Metadata =
        serde_json::from_str(&process::output(&mut command)?).context("read cargo's metadata")?;
    let mut names: Vec<_> = metadata.packages.into_iter().map(|package| package.name).collect();
    names.sort_by_key(|name| name == MACHINES);
    Ok(names)
}
