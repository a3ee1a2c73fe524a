//! Long runs that try to break a promise, by name. Each is an end-to-end test in its long form.
//!
//! A soak is the same code as the short test in CI, told by its environment to do it as often as was promised, so that
//! the two cannot drift apart. Its output is passed through; its end is the task's exit status.

use std::time::Instant;

use crate::failure::{Failure, Result};
use crate::process::step;
use crate::{build, layout, process};

/// Seed of what is chosen at random.
const SEED: &str = "DORMOUSE_SOAK_SEED";

/// Those that are held to times, and so run what a user has instead of what is quick to build.
const HELD_TO_TIMES: [&str; 1] = ["edge-load"];

/// One of them.
struct Soak {
    /// As it is called on the command line.
    name: &'static str,
    /// What it tries.
    about: &'static str,
    /// The package of the test program.
    package: &'static str,
    /// The test program: in `tests/tests`, or in the `tests` of its crate.
    program: &'static str,
    /// What the names of its tests contain.
    tests: &'static str,
    /// Says to the tests how often they are to do it.
    environment: &'static [(&'static str, &'static str)],
}

/// All of them.
const SOAKS: &[Soak] = &[
    Soak {
        name: "tour",
        about: "the tour of the README, word for word",
        package: "e2e",
        program: "tour",
        tests: "readme_tour_word_for_word",
        environment: &[],
    },
    Soak {
        name: "cycles",
        about: "200 sleeps and wakes in both tiers over one connection: nothing is lost, nothing left behind",
        package: "e2e",
        program: "sleep",
        tests: "s07_nothing_is_lost_over_many_sleeps",
        environment: &[("DORMOUSE_SOAK_CYCLES", "200")],
    },
    Soak {
        name: "cron",
        about: "20 minutes of cron in a sandbox that sleeps after 5 s: ten jobs, each at most 1 s late, asleep most of the time",
        package: "e2e",
        program: "timers",
        tests: "s03_cron",
        environment: &[("DORMOUSE_SOAK_CRON_LINES", "10"), ("DORMOUSE_SOAK_CRON_MINUTES", "2")],
    },
    Soak {
        name: "silent",
        about: "a program silent for three minutes on a connection is never put to sleep; without the connection it is",
        package: "e2e",
        program: "network",
        tests: "s02_a_silent_outbound",
        environment: &[("DORMOUSE_SOAK_SILENT_SECONDS", "180")],
    },
    Soak {
        name: "poller",
        about: "everything is read for two minutes: it sleeps on time and sleeps on",
        package: "e2e",
        program: "wake",
        tests: "s08_who_reads_everything",
        environment: &[("DORMOUSE_SOAK_POLL_SECONDS", "120")],
    },
    Soak {
        name: "load",
        about: "1,000 sleeps under commands, a terminal, copies and requests that race with them: nothing lost, nothing refused",
        package: "e2e",
        program: "load",
        tests: "",
        environment: &[("DORMOUSE_SOAK_LOAD_CYCLES", "1000")],
    },
    Soak {
        name: "crash",
        about: "the daemon killed five times at each of its worst moments, and 50 times at any, over ten sandboxes",
        package: "e2e",
        program: "crash",
        tests: "",
        environment: &[
            ("DORMOUSE_SOAK_CRASH_ROUNDS", "5"),
            ("DORMOUSE_SOAK_CRASH_RANDOM", "50"),
            ("DORMOUSE_SOAK_CRASH_SANDBOXES", "10"),
        ],
    },
    Soak {
        name: "herd",
        about: "50 requests at once to a sleeper: 50 answers, one wake",
        package: "e2e",
        program: "wake",
        tests: "s08_fifty_requests_at_once",
        environment: &[],
    },
    Soak {
        name: "clock",
        about: "a long sleep in a guest ends on waking, in both tiers, with the wall clock right",
        package: "e2e",
        program: "timers",
        tests: "s07_a_long_sleep_ends_on_waking",
        environment: &[],
    },
    Soak {
        name: "forks",
        about: "20 forks of a program that draws random numbers: all differ, the parent is untouched",
        package: "e2e",
        program: "forks",
        tests: "",
        environment: &[("DORMOUSE_SOAK_FORKS", "20")],
    },
    Soak {
        name: "pressure",
        about: "40 sandboxes with room for 10 in memory: all answer in turn, and never is more resident than the budget",
        package: "e2e",
        program: "memory",
        tests: "",
        environment: &[
            ("DORMOUSE_SOAK_PRESSURE_SANDBOXES", "40"),
            ("DORMOUSE_SOAK_PRESSURE_ROOM", "10"),
        ],
    },
    Soak {
        name: "box-kinds",
        about: "each kind of activity holds a box from being frozen, and not longer; with ten seconds instead of ten minutes",
        package: "e2e",
        program: "boxes",
        tests: "b08_b13_each_kind_of_activity",
        environment: &[("DORMOUSE_SOAK_FREEZE_SECONDS", "10")],
    },
    Soak {
        name: "box-ends",
        about: "when the idle rules stop a box for good, what is said before, and how long its copy is kept; with ten seconds instead of ten minutes",
        package: "e2e",
        program: "boxes",
        tests: "b23_b24_b25_b26_b27",
        environment: &[("DORMOUSE_SOAK_FREEZE_SECONDS", "10")],
    },
    Soak {
        name: "agent",
        about: "two agents over the adapter and a person: a box is made, frozen, thawed, left and continued",
        package: "e2e",
        program: "agent",
        tests: "b16_b35_b37_an_agent",
        environment: &[],
    },
    Soak {
        name: "edge-load",
        about: "32 connections through the edge, beside nginx in front of the same port: as fast, and a minute without an error",
        package: "e2e",
        program: "edge_load",
        tests: "t17_no_request_of_a_load",
        environment: &[
            ("DORMOUSE_SOAK_EDGE_ROUNDS", "5"),
            ("DORMOUSE_SOAK_EDGE_SECONDS", "10"),
            ("DORMOUSE_SOAK_EDGE_STEADY_SECONDS", "60"),
            ("DORMOUSE_SOAK_EDGE_SLEEPERS", "150"),
            ("DORMOUSE_SOAK_EDGE_BOXES", "50"),
        ],
    },
    Soak {
        name: "hostile",
        about: "wrong, huge, half, slow and smuggled requests to the interface, the tools and a link: what comes back, as a table",
        package: "e2e",
        program: "hostile",
        tests: "t19_hostile_requests",
        environment: &[("DORMOUSE_SOAK_SILENT_CONNECTIONS", "4000")],
    },
    Soak {
        name: "box-days",
        about: "10,000 simulated days of 100 boxes with random use: none frozen while held, none stopped early or unwarned",
        package: "lifecycle",
        program: "life",
        tests: "b23_b24_b26_days_of_boxes",
        environment: &[("DORMOUSE_BOX_DAYS", "10000"), ("DORMOUSE_BOXES", "100")],
    },
    Soak {
        name: "fuzz",
        about: "the whole interface against its document, by schemathesis: 50 random requests for each operation, and sequences of them",
        package: "e2e",
        program: "fuzz",
        tests: "every_operation_keeps_what_the_document_promises",
        environment: &[("DORMOUSE_SOAK_FUZZ_EXAMPLES", "50")],
    },
    Soak {
        name: "network",
        about: "connections over IPv4 and IPv6, idle for ten minutes in each tier, a keepalive probe each 5 s: all answered, no wake",
        package: "e2e",
        program: "asleep_network",
        tests: "s07_keepalive_probes_are_answered",
        environment: &[("DORMOUSE_SOAK_PROBE_SECONDS", "5"), ("DORMOUSE_SOAK_IDLE_SECONDS", "600")],
    },
    Soak {
        name: "failures",
        about: "full disk, damaged state, QEMU killed: what each ends as, and the restart after it",
        package: "e2e",
        program: "failures",
        tests: "",
        environment: &[],
    },
];

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
    let profile = if HELD_TO_TIMES.contains(&soak.name) { "up" } else { "dev" };
    let programs = step("build the program and the guest agent", || build::build(profile))?;
    step("image for tests", || build::test_image(&programs))?;
    let begun = Instant::now();
    let mut command = process::cargo();
    command.args(["test", "--locked", "--package", soak.package, "--test", soak.program, "--"]);
    command.args([soak.tests, "--nocapture", "--test-threads=1"]);
    command
        .envs(soak.environment.iter().copied())
        .env("DORMOUSE_BIN", &programs.dormouse)
        .env("DORMOUSE_IMAGES", layout::test_images())
        .env("DORMOUSE_TEMPLATES", layout::test_templates())
        .env("DORMOUSE_E2E", layout::test_root());
    command.envs(options.seed.map(|seed| (SEED, seed.to_string())));
    let (ended_well, said) = process::listen(&mut command)?;
    eprintln!("    soak {name}: {:.0} s", begun.elapsed().as_secs_f64());
    // A name that fits no test makes cargo succeed with nothing done. The last such line is the outer run's: each test
    // runs itself once more in its own network namespace and prints one too.
    let closing = said.lines().rev().find_map(|line| line.strip_prefix("test result: ok. "));
    let ran = closing.is_some_and(|rest| !rest.starts_with("0 passed"));
    match (ended_well, ran) {
        (true, true) => Ok(()),
        (true, false) => {
            Err(Failure::new(format!("`{}` has no test `{}`", soak.program, soak.tests)))
        }
        (false, _) => Err(Failure::new(format!("soak {name} failed"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The source of a test program: a file, or a folder of them.
    fn text_of(soak: &Soak) -> String {
        let root = layout::root();
        if soak.package == "e2e" {
            let path = root.join("tests/tests").join(format!("{}.rs", soak.program));
            return std::fs::read_to_string(&path)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        }
        let folder = root.join("crates").join(soak.package).join("tests").join(soak.program);
        let files = std::fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap()).collect()
    }

    #[test]
    fn each_soak_names_a_test_that_exists() {
        for soak in SOAKS {
            let text = text_of(soak);
            assert!(
                text.contains(&format!("fn {}", soak.tests)),
                "{} has no `{}`",
                soak.program,
                soak.tests
            );
            for (variable, _) in soak.environment {
                assert!(text.contains(variable), "{} does not read {variable}", soak.program);
            }
        }
    }
}
