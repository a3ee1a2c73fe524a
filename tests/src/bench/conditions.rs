//! What the figures were measured on.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::Options;
use super::stage::{MEMORY_MIB, Stage, WEB};
use crate::lab::workspace;
use crate::net::output;

/// Names and values, in the order of the table.
#[derive(Clone, Debug)]
pub(crate) struct Conditions {
    rows: Vec<(&'static str, String)>,
    load_at_start: String,
}

impl Conditions {
    #[track_caller]
    pub(crate) fn begin(options: &Options) -> Self {
        let median = format!("{}, the median is shown", options.rounds());
        let rows = vec![
            ("date", output("date", &["-u", "+%Y-%m-%d %H:%M UTC"]).trim().to_owned()),
            ("version", version()),
            ("processor", format!("{}, {} cores, {} MiB", processor(), cores(), memory_mib())),
            ("host's kernel", output("uname", &["-r"]).trim().to_owned()),
            ("repetitions", median),
            ("seed", options.seed.to_string()),
        ];
        Self { rows, load_at_start: load() }
    }

    /// What only a guest and its QEMU can say.
    #[track_caller]
    pub(crate) fn meet_guest(&mut self, stage: &Stage<'_>) {
        let kernel = stage.lab.sh(WEB, "uname -r");
        let word = |name| stage.image.option(name).unwrap_or_default();
        let version = output(&stage.image.program(), &["--version"]);
        let version = version.lines().next().unwrap_or_default();
        let version = version.trim_start_matches("QEMU emulator version ").to_owned();
        let mib = |bytes: u64| bytes >> 20;
        let copies = format!(
            "{} MiB for create, {} MiB for the rest",
            mib(stage.plain.memory_bytes()),
            mib(stage.image.memory_bytes())
        );
        self.rows.extend([
            ("file system of the data folder", file_system(&stage.lab.data())),
            ("QEMU", version),
            ("accelerator, processor model", format!("{}, {}", word("-accel"), word("-cpu"))),
            ("guest's kernel, memory", format!("{kernel}, {MEMORY_MIB} MiB")),
            ("memory of the image for doing it by hand that is not a hole", copies),
        ]);
    }

    pub(crate) fn end(&mut self) {
        self.rows.push((
            "load average, at the start and at the end",
            format!("{} and {}", self.load_at_start, load()),
        ));
    }

    pub(crate) fn rows(&self) -> &[(&'static str, String)] {
        &self.rows
    }
}

fn version() -> String {
    let commit = Command::new("git")
        .args(["rev-parse", "--short", "HEAD"])
        .current_dir(workspace())
        .output();
    // Sources without a repository have a version all the same.
    let commit = commit.ok().filter(|output| output.status.success()).map(|output| output.stdout);
    let commit = commit.map(|commit| String::from_utf8_lossy(&commit).trim().to_owned());
    let version = env!("CARGO_PKG_VERSION");
    commit.map_or_else(|| version.to_owned(), |commit| format!("{version} ({commit})"))
}

fn processor() -> String {
    let about = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = about.lines().find_map(|line| line.strip_prefix("model name"));
    name.map_or_else(
        || "unknown".to_owned(),
        |name| name.trim_start_matches([' ', '\t', ':']).to_owned(),
    )
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(0, usize::from)
}

fn memory_mib() -> u64 {
    let about = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = about.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .map_or(0, |kib| kib / 1024)
}

fn file_system(path: &Path) -> String {
    output("stat", &["--file-system", "--format=%T", &path.to_string_lossy()]).trim().to_owned()
}

/// Of the last minute.
fn load() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().unwrap_or_default().to_owned()
}
