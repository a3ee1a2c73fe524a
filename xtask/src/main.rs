//! Everything a person or CI runs on this repository, so that there is one way to do each thing.
//!
//! `cargo xtask up` takes a machine with nothing but Rust to a running daemon with a first sandbox; `cargo xtask test`
//! is exactly what CI runs. Programs are started, never libraries linked: this one must compile in seconds, before
//! anything else has been built.
#![forbid(unsafe_code)]

mod bench;
mod build;
mod check;
mod daemon;
mod down;
mod failure;
mod layout;
mod mutants;
mod process;
mod setup;
mod soak;
mod test;
mod up;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about, disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Take this machine from nothing to a running daemon and a first sandbox
    Up(up::Options),
    /// Undo what `up` did to this machine; keep the sandboxes unless told otherwise
    Down(down::Options),
    /// Install the Debian packages that are missing, and nothing else
    Setup(setup::Options),
    /// Build the program and the guest agent and put them side by side
    Build(build::Options),
    /// Everything that is checked without running the product
    Check(check::Options),
    /// Everything CI runs: the check, all tests, and the table of rules
    Test(test::Options),
    /// Plant known faults one at a time and see that a test notices each
    Mutants(mutants::Options),
    /// Long runs that try to break a promise
    Soak(soak::Options),
    /// How fast it is, each figure beside the same thing done by hand
    Bench(bench::Options),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().task {
        Task::Up(options) => up::run(&options),
        Task::Down(options) => down::run(&options),
        Task::Setup(options) => setup::run(&options),
        Task::Build(options) => build::run(&options),
        Task::Check(options) => check::run(&options),
        Task::Test(options) => test::run(&options),
        Task::Mutants(options) => mutants::run(&options),
        Task::Soak(options) => soak::run(&options),
        Task::Bench(options) => bench::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}
