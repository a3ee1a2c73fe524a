//! How fast it is: each figure beside the same thing done by hand on the same guest, so that it holds on any machine.
//!
//! The measuring is an end-to-end test like any other (`tests/tests/bench.rs`), run on release builds. It prints the
//! table and fails where a ratio is missed.

use crate::failure::{Failure, Result};
use crate::process::step;
use crate::{build, layout, process};

/// How fast it is, each figure beside the same thing done by hand.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only figures whose name contains one of these
    filters: Vec<String>,
}

/// Runs `cargo xtask bench`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let programs = step("build the program and the guest agent", || build::build("release"))?;
    step("image for tests", || build::test_image(&programs))?;
    let mut command = process::cargo();
    command.args(["test", "--locked", "--release", "--package", "e2e", "--test", "bench", "--"]);
    // One at a time: they measure.
    command.args(["--nocapture", "--test-threads=1"]).args(&options.filters);
    command
        .env("DORMOUSE_BENCH", "1")
        .env("DORMOUSE_BIN", &programs.dormouse)
        .env("DORMOUSE_IMAGES", layout::test_images())
        .env("DORMOUSE_TEMPLATES", layout::test_templates());
    let (ended_well, said) = process::listen(&mut command)?;
    if ended_well && said.contains(" 0 passed") && !said.contains("1 passed") {
        return Err(Failure::new("no figure has such a name"));
    }
    if ended_well {
        Ok(())
    } else {
        Err(Failure::new("a figure is missed; the table stands above"))
    }
}
