//! Everything that is checked without running the product: one command, which is also the first step of CI.
//!
//! All checks run even when an early one fails, so that one run shows everything there is to mend.

mod edges;
mod openapi;
mod tidy;

use crate::failure::{Failure, Result};
use crate::process::{self, step};

/// Everything that is checked without running the product.
#[derive(clap::Args, Default)]
pub(crate) struct Options {
    /// Bring files up to date that are made from the code, instead of failing on them
    #[arg(long)]
    bless: bool,
    /// Only these checks: fmt, tidy, edges, clippy, docs, openapi
    #[arg(value_name = "CHECK")]
    only: Vec<String>,
}

/// Runs `cargo xtask check`.
pub(crate) fn run(options: &Options) -> Result<()> {
    type Check = fn(bool) -> Result<()>;
    // Quick ones first.
    let checks: [(&str, Check); 6] = [
        ("fmt", |_| process::run(process::cargo().args(["fmt", "--all", "--check"]))),
        ("tidy", |_| tidy::run()),
        ("edges", |_| edges::run()),
        ("clippy", |_| clippy()),
        ("docs", |_| docs()),
        ("openapi", openapi::run),
    ];
    if let Some(unknown) =
        options.only.iter().find(|name| !checks.iter().any(|(check, _)| check == *name))
    {
        let names: Vec<_> = checks.iter().map(|(name, _)| *name).collect();
        return Err(Failure::new(format!("no check `{unknown}`: there are {}", names.join(", "))));
    }
    let mut failed = Vec::new();
    for (name, check) in checks {
        if !options.only.is_empty() && !options.only.iter().any(|only| only == name) {
            continue;
        }
        if let Err(failure) = step(&format!("check {name}"), || check(options.bless)) {
            eprintln!("{failure}");
            failed.push(name);
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(Failure::new(format!("failed checks: {}", failed.join(", "))))
    }
}

fn clippy() -> Result<()> {
    let mut command = process::cargo();
    command.args([
        "clippy",
        "--locked",
        "--workspace",
        "--all-targets",
        "--quiet",
        "--",
        "--deny",
        "warnings",
    ]);
    process::run(&mut command)
}

fn docs() -> Result<()> {
    let mut command = process::cargo();
    command
        .args(["doc", "--locked", "--workspace", "--no-deps", "--quiet"])
        .env("RUSTDOCFLAGS", "-Dwarnings");
    process::run(&mut command)
}
