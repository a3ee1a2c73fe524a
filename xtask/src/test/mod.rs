//! Everything CI runs, in the order in which it finds faults soonest; at the end the table of rules and how it went.

mod emulator;
mod report;
mod rules;
mod runner;

use std::fs;
use std::path::PathBuf;

use crate::failure::{Context, Failure, Result};
use crate::process::step;
use crate::{build, check, layout, setup};

use report::Report;

/// Everything CI runs: the check, all tests, and the table of rules.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only tests whose name contains one of these
    filters: Vec<String>,
    /// Run only the tests of this crate; may be given several times
    #[arg(long, short)]
    package: Vec<String>,
    /// Leave out what is checked without running anything
    #[arg(long)]
    no_check: bool,
    /// Use `cargo test` although cargo-nextest is installed
    #[arg(long)]
    no_nextest: bool,
    /// Run them with another QEMU, unpacked below this folder (`dpkg -x`), as if it were installed; needs root's rights
    #[arg(long, value_name = "DIR")]
    qemu: Option<PathBuf>,
}

/// Runs `cargo xtask test`.
pub(crate) fn run(options: &Options) -> Result<()> {
    step("packages of the machine", || setup::run(&setup::Options::for_tests()))?;
    if let Some(tree) = &options.qemu
        && !emulator::is_in_place(tree)?
    {
        return Ok(());
    }
    // A failed check does not keep the tests from saying what else is wrong.
    let checked = if options.no_check { Ok(()) } else { check::run(&check::Options::default()) };

    let selection = runner::Selection { filters: &options.filters, packages: &options.package };
    if selection.has_machines() {
        let programs = step("build the program and the guest agent", || build::build("dev"))?;
        step("image for tests", || build::test_image(&programs))?;
    }
    let report = step("tests", || runner::run(&selection, !options.no_nextest));
    finish(checked, &report?)
}

/// Writes the table of rules and says how it all went: the runner's closing lines last.
fn finish(checked: Result<()>, report: &Report) -> Result<()> {
    let path = layout::root().join("docs/specification.md");
    let specification = fs::read_to_string(&path).context(format!("read {}", path.display()))?;
    let rules = rules::of(&specification, report);
    let path = layout::target().join("rules.md");
    fs::create_dir_all(layout::target()).context("create the target folder")?;
    fs::write(&path, rules.table()).context(format!("write {}", path.display()))?;
    println!("{}", rules.summary());
    println!("rules: the table is {}\n", path.display());
    if let Err(failure) = &checked {
        println!("{failure}\n");
    }
    for name in report.failed() {
        println!("failed: {name}");
    }
    for line in &report.closing {
        println!("{line}");
    }
    println!("{}", report.count());

    match (checked, report.is_good()) {
        (Ok(()), true) => Ok(()),
        (Err(failure), true) => Err(failure),
        (Ok(()), false) => Err(Failure::new("tests failed")),
        (Err(failure), false) => Err(Failure::new(format!("tests failed, and {failure}"))),
    }
}
