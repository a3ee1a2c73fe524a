//! How fast it is, each figure as a ratio to the same thing done by hand: same run, same guest, same request, same syncs.
//!
//! Absolute times depend on the processor, and under emulation mostly on it; ratios hold on any machine. Ours and by hand
//! take turns, and who begins takes turns too, so that whatever else the machine does meets both. What is shown is the median.
//!
//! | module | what it is for |
//! | --- | --- |
//! | `stage` | a daemon, a sandbox with a counter in it, and the same guest's image for doing it by hand |
//! | `hand`, `qmp` | doing it by hand: QEMU's own command line and control protocol, nothing of ours |
//! | `api`, `request`, `wire` | asking, with the moments at which things happened |
//! | `wake`, `sleep`, `start`, `ready`, `copies`, `commands`, `timers`, `checkpoint`, `crowd`, `sleepers` | the figures |
//! | `figure`, `report`, `conditions` | numbers, their table, and what they were measured on |

pub(crate) mod api;
mod checkpoint;
mod commands;
mod conditions;
mod copies;
mod crowd;
mod figure;
mod hand;
mod qmp;
mod ready;
mod report;
mod request;
mod sleep;
pub(crate) mod sleepers;
mod stage;
mod start;
mod timers;
mod wake;
mod wire;

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use conditions::Conditions;
use figure::Figure;
use stage::Stage;

/// Set in the program that runs in its own network namespace.
const INSIDE: &str = "DORMOUSE_BENCH_INSIDE";

/// Repetitions of each measurement, unless told otherwise.
const ROUNDS: usize = 7;
/// The same for `--quick`.
const ROUNDS_QUICK: usize = 3;

/// How fast it is, each figure beside the same thing done by hand.
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "bench")]
pub struct Options {
    /// Only groups of figures whose name contains one of these: wake, sleep, start, ready, copies,
    /// commands, timers, checkpoint, crowd, many
    filters: Vec<String>,
    /// Fewer repetitions and a shorter quiet time: for trying things out
    #[arg(long)]
    quick: bool,
    /// Repetitions of each measurement
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Sleeping sandboxes on one host
    #[arg(long, value_name = "NUMBER", default_value_t = sleepers::SLEEPERS, value_parser = clap::value_parser!(u32).range(10..=20_000))]
    sleepers: u32,
    /// Seed of what is chosen at random, to repeat a run
    #[arg(long, default_value_t = 20_261_130)]
    seed: u64,
    /// The server for doing it by hand, linked statically
    #[arg(long, value_name = "PROGRAM", env = "DORMOUSE_BENCH_BARE")]
    bare: PathBuf,
    /// Put the tables into this document, between its marks
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Write everything that was measured to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Options {
    fn rounds(&self) -> usize {
        match self.rounds {
            Some(rounds) => rounds as usize,
            None if self.quick => ROUNDS_QUICK,
            None => ROUNDS,
        }
    }

    fn wants(&self, group: &str) -> bool {
        self.filters.is_empty() || self.filters.iter().any(|filter| group.contains(filter.as_str()))
    }
}

/// Measures a group of figures.
type Measure = fn(&mut Stage<'_>) -> Vec<Figure>;

/// Figures that need the stage, by the name of their group.
const ON_STAGE: [(&str, Measure); 5] = [
    ("wake", wake::figures),
    ("sleep", sleep::figures),
    ("start", start::figures),
    ("copies", copies::figures),
    ("commands", commands::figures),
];

/// Measures a group of figures in a daemon of its own.
type MeasureAlone = fn(&Options) -> Vec<Figure>;

/// Figures that set their own stage.
const ALONE: [(&str, MeasureAlone); 5] = [
    ("ready", ready::figures),
    ("timers", timers::figures),
    ("checkpoint", checkpoint::figures),
    ("crowd", crowd::figures),
    ("many", sleepers::figures),
];

/// Measures, prints the tables, and says whether every promise was kept.
pub fn run(options: &Options) -> ExitCode {
    if std::env::var_os(INSIDE).is_none() {
        return in_a_namespace();
    }
    crate::net::output("ip", &["link", "set", "lo", "up"]);
    let groups = ON_STAGE.map(|(name, _)| name);
    let all = [groups.as_slice(), &ALONE.map(|(name, _)| name)].concat();
    if !all.iter().any(|group| options.wants(group)) {
        eprintln!("no group of figures has such a name; there are: {}", all.join(", "));
        return ExitCode::FAILURE;
    }
    let mut conditions = Conditions::begin(options);
    let mut figures = Vec::new();
    if groups.into_iter().any(|group| options.wants(group)) {
        let mut lab = crate::Lab::new("bench");
        lab.start();
        let mut stage = Stage::set(&mut lab, options);
        conditions.meet_guest(&stage);
        for (name, measure) in ON_STAGE {
            if options.wants(name) {
                figures.extend(measure(&mut stage));
            }
        }
        stage.clear();
        lab.tear_down();
    }
    for (name, measure) in ALONE {
        if options.wants(name) {
            figures.extend(measure(options));
        }
    }
    conditions.end();
    report::publish(options, &conditions, &figures)
}

/// Runs this program again where its guests' addresses, taps and rules meet nobody's.
fn in_a_namespace() -> ExitCode {
    let itself = std::env::current_exe().expect("path of this program");
    let status = Command::new("unshare")
        .args(["--net", "--"])
        .arg(itself)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, "1")
        .stdin(Stdio::null())
        .status()
        .expect("`unshare` (util-linux) starts");
    if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
