//! Long runs that try to break a promise, by name. Each is an end-to-end test in its long form.
//!
//! A soak is the same code as the short test in CI, told by `DORMOUSE_SOAK=1` to do it as often as was promised, so
//! that the two cannot drift apart. Its output is passed through; its end is the task's exit status.

use std::time::Instant;

use crate::failure::{Failure, Result};
use crate::process::step;
use crate::{build, layout, process};

/// Says to a test that it is to run in its long form.
const LONG_FORM: &str = "DORMOUSE_SOAK";

/// One of them.
struct Soak {
    /// As it is called on the command line.
    name: &'static str,
    /// What it tries.
    about: &'static str,
    /// The test program in `tests/tests`.
    program: &'static str,
    /// The test in it.
    test: &'static str,
}

/// All of them.
const SOAKS: &[Soak] = &[];

/// Long runs that try to break a promise.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Which; without a name they are listed
    name: Option<String>,
    /// Seed of what is chosen at random, to repeat a run
    #[arg(long)]
    seed: Option<u64>,
}

/// Runs `cargo xtask soak`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let Some(name) = &options.name else {
        for soak in SOAKS {
            println!("{:16} {}", soak.name, soak.about);
        }
        return Ok(());
    };
    let soak = SOAKS.iter().find(|soak| soak.name == name).ok_or_else(|| {
        let names: Vec<_> = SOAKS.iter().map(|soak| soak.name).collect();
        Failure::new(format!("no soak `{name}`: there are {}", names.join(", ")))
    })?;
    let programs = step("build the program and the guest agent", || build::build("dev"))?;
    step("image for tests", || build::test_image(&programs))?;
    let begun = Instant::now();
    let mut command = process::cargo();
    command.args(["test", "--locked", "--package", "e2e", "--test", soak.program, "--"]);
    command.args(["--exact", soak.test, "--nocapture", "--test-threads=1"]);
    command
        .env(LONG_FORM, "1")
        .env("DORMOUSE_BIN", &programs.dormouse)
        .env("DORMOUSE_IMAGES", layout::test_images())
        .env("DORMOUSE_TEMPLATES", layout::test_templates());
    command.envs(options.seed.map(|seed| ("DORMOUSE_SEED", seed.to_string())));
    let (ended_well, said) = process::listen(&mut command)?;
    eprintln!("    soak {name}: {:.0} s", begun.elapsed().as_secs_f64());
    // A name that fits no test makes cargo succeed with nothing done.
    if !said.contains("1 passed") && ended_well {
        return Err(Failure::new(format!("`{}` has no test `{}`", soak.program, soak.test)));
    }
    if ended_well { Ok(()) } else { Err(Failure::new(format!("soak {name} failed"))) }
}
