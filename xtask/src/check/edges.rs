//! Which crate may know of which: the walls of the workspace, as a table.
//!
//! A crate exists because the other side differs in trust, build or promise. An edge that appears by accident takes
//! that away, so each is written down here, and each that is written down must exist.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::failure::{Context, Failure, Result};
use crate::process;

/// What a crate may depend on.
struct Rule {
    name: &'static str,
    /// Crates of this workspace.
    ours: &'static [&'static str],
    /// Crates of others, for crates that decide without touching the world; `None`: whatever it needs.
    others: Option<&'static [&'static str]>,
}

const fn rule(name: &'static str, ours: &'static [&'static str]) -> Rule {
    Rule { name, ours, others: None }
}

const fn pure(name: &'static str, others: &'static [&'static str]) -> Rule {
    Rule { name, ours: &[], others: Some(others) }
}

/// Every crate of the workspace.
const RULES: &[Rule] = &[
    pure("lifecycle", &["thiserror"]),
    pure("wire", &["crc32fast", "postcard", "serde", "thiserror"]),
    rule("api", &[]),
    rule("vmm", &[]),
    rule("guest", &["wire"]),
    rule("host", &["api", "lifecycle", "vmm", "wire"]),
    rule("control", &["api"]),
    rule("dormouse", &["api", "control", "host"]),
    // Tests see what a user sees.
    rule("e2e", &["api"]),
    rule("xtask", &[]),
];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
    /// Where a crate of this workspace lies.
    path: Option<String>,
}

/// Compares the workspace with the table.
pub(super) fn run() -> Result<()> {
    let mut command = process::cargo();
    command.args(["metadata", "--locked", "--no-deps", "--format-version", "1"]);
    let metadata: Metadata =
        serde_json::from_str(&process::output(&mut command)?).context("read cargo's metadata")?;
    let wrong = compare(RULES, &metadata);
    if wrong.is_empty() { Ok(()) } else { Err(Failure::new(wrong.join("\n"))) }
}

fn compare(rules: &[Rule], metadata: &Metadata) -> Vec<String> {
    let mut wrong = Vec::new();
    let packages: BTreeMap<_, _> =
        metadata.packages.iter().map(|package| (package.name.as_str(), package)).collect();
    for rule in rules {
        let Some(package) = packages.get(rule.name) else {
            wrong
                .push(format!("`{}` is in the table of edges but not in the workspace", rule.name));
            continue;
        };
        // What only its tests use may be anything.
        let used = || {
            package
                .dependencies
                .iter()
                .filter(|dependency| dependency.kind.as_deref() != Some("dev"))
        };
        let ours: BTreeSet<_> =
            used().filter(|d| d.path.is_some()).map(|d| d.name.as_str()).collect();
        let allowed: BTreeSet<_> = rule.ours.iter().copied().collect();
        for name in ours.difference(&allowed) {
            wrong.push(format!("`{}` must not depend on `{name}`", rule.name));
        }
        for name in allowed.difference(&ours) {
            wrong.push(format!(
                "`{}` does not depend on `{name}`: take the edge out of the table",
                rule.name
            ));
        }
        let Some(others) = rule.others else { continue };
        for dependency in used().filter(|dependency| dependency.path.is_none()) {
            if !others.contains(&dependency.name.as_str()) {
                wrong.push(format!(
                    "`{}` is pure and must not depend on `{}`",
                    rule.name, dependency.name
                ));
            }
        }
    }
    for name in packages.keys() {
        if !rules.iter().any(|rule| rule.name == *name) {
            wrong.push(format!(
                "`{name}` is not in the table of edges: say there what it may depend on"
            ));
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_to_leave_the_table_is_noticed() {
        let rules =
            [pure("core", &["thiserror"]), rule("shell", &["core", "gone"]), rule("absent", &[])];
        let text = r#"{"packages": [
            {"name": "core", "dependencies": [
                {"name": "thiserror", "kind": null, "path": null},
                {"name": "tokio", "kind": null, "path": null},
                {"name": "proptest", "kind": "dev", "path": null},
                {"name": "shell", "kind": null, "path": "/shell"}]},
            {"name": "shell", "dependencies": [
                {"name": "tokio", "kind": null, "path": null},
                {"name": "core", "kind": null, "path": "/core"}]},
            {"name": "stranger", "dependencies": []}]}"#;
        let metadata = serde_json::from_str(text).unwrap();
        assert_eq!(
            compare(&rules, &metadata),
            [
                "`core` must not depend on `shell`",
                "`core` is pure and must not depend on `tokio`",
                "`shell` does not depend on `gone`: take the edge out of the table",
                "`absent` is in the table of edges but not in the workspace",
                "`stranger` is not in the table of edges: say there what it may depend on",
            ]
        );
    }
}
