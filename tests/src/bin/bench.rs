//! How fast it is: each figure beside the same thing done by hand (see [`e2e::bench`]).
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use e2e::bench::{self, Options};

fn main() -> ExitCode {
    bench::run(&Options::parse())
}
