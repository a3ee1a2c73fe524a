//! How fast it is: each figure beside the same thing done by hand on the same guest, so that it holds on any machine.
//!
//! The measuring is a program of its own (`tests/src/bench`), run on what `cargo xtask up` installs. It prints its tables
//! and fails where a promise is missed.

use std::path::PathBuf;
use std::process::Command;

use crate::failure::{Failure, Result};
use crate::process::step;
use crate::{build, layout, process};

/// How programs are built: as a user has them.
const PROFILE: &str = "up";

/// How fast it is, each figure beside the same thing done by hand.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only groups of figures whose name contains one of these: wake, sleep, start, ready, copies,
    /// commands, timers, checkpoint, crowd, many
    filters: Vec<String>,
    /// Fewer repetitions and a shorter quiet time: for trying things out
    #[arg(long)]
    quick: bool,
    /// Repetitions of each measurement
    #[arg(long, value_name = "NUMBER")]
    rounds: Option<u32>,
    /// Seed of what is chosen at random, to repeat a run
    #[arg(long)]
    seed: Option<u64>,
    /// Put the tables into docs/specification.md
    #[arg(long)]
    write: bool,
    /// Write everything that was measured to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs `cargo xtask bench`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let programs = step("build the program and the guest agent", || build::build(PROFILE))?;
    let (bench, bare) = step("build the bench", || {
        let mut command = process::cargo();
        command.args(["build", "--locked", "--package", "e2e", "--bin", "bench"]);
        command.args(["--profile", PROFILE]);
        Ok((build::built(&mut command)?, build::build_for_guests("e2e", "--bin=bare")?))
    })?;
    step("image for tests", || build::test_image(&programs))?;
    let mut command = Command::new(bench);
    command.arg("--bare").arg(bare).args(&options.filters);
    if options.quick {
        command.arg("--quick");
    }
    if let Some(rounds) = options.rounds {
        command.arg("--rounds").arg(rounds.to_string());
    }
    if let Some(seed) = options.seed {
        command.arg("--seed").arg(seed.to_string());
    }
    if options.write {
        command.arg("--write").arg(layout::root().join("docs/specification.md"));
    }
    if let Some(json) = &options.json {
        command.arg("--json").arg(json);
    }
    command
        .env("DORMOUSE_BIN", &programs.dormouse)
        .env("DORMOUSE_IMAGES", layout::test_images())
        .env("DORMOUSE_TEMPLATES", layout::test_templates())
        .env("DORMOUSE_E2E", layout::test_root());
    let (ended_well, _) = process::listen(&mut command)?;
    if ended_well {
        Ok(())
    } else {
        Err(Failure::new("the bench failed, or a figure is missed; what it said stands above"))
    }
}
