//! `wrk`: asks as fast as it is answered.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use super::{CONNECTIONS, Target};
use crate::bench::sleepers::cpu_seconds;

/// Has it end with numbers for programs.
const REPORT: &str = include_str!("report.lua");

/// One run.
#[derive(Clone, Debug)]
pub struct Round {
    /// Requests that were answered, a second.
    pub rate: f64,
    /// In which 99 of 100 were answered, milliseconds.
    pub p99_ms: f64,
    /// Requests that were not answered with success.
    pub errors: u64,
    /// Processors' time that QEMU took, per cent of one.
    pub guest_percent: f64,
    /// The same of what stands between.
    pub between_percent: f64,
}

/// Asks for so many seconds. `guest`, `between`: processes whose time is taken.
#[track_caller]
pub(super) fn run(
    folder: &Path,
    target: &Target,
    seconds: u64,
    guest: &[i32],
    between: &[i32],
) -> Round {
    let script = folder.join("report.lua");
    std::fs::write(&script, REPORT).expect("the script");
    let of = |pids: &[i32]| pids.iter().map(|pid| cpu_seconds(*pid)).sum::<f64>();
    let (begun, guest_before, between_before) = (Instant::now(), of(guest), of(between));
    let mut command = Command::new("wrk");
    command.args(["--threads", "1", "--connections", &CONNECTIONS.to_string(), "--latency"]);
    command.args(["--duration", &format!("{seconds}s"), "--timeout", "20s", "--script"]);
    command.arg(&script).args(["--header", &format!("Host: {}", target.host)]);
    command.arg(format!("http://{}/wrk", target.server));
    let ran = command.output().expect("`wrk` starts");
    let text = String::from_utf8_lossy(&ran.stdout);
    let took = begun.elapsed().as_secs_f64();
    let numbers: Vec<f64> = text
        .lines()
        .find_map(|line| line.strip_prefix("numbers "))
        .unwrap_or_else(|| panic!("wrk: {text}{}", String::from_utf8_lossy(&ran.stderr)))
        .split(' ')
        .map(|word| word.parse().expect("a number"))
        .collect();
    let [requests, micros, p99, errors @ ..] = numbers.as_slice() else { panic!("wrk: {text}") };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts")]
    let errors = errors.iter().sum::<f64>() as u64;
    Round {
        rate: requests / micros * 1e6,
        p99_ms: p99 / 1000.0,
        errors,
        guest_percent: (of(guest) - guest_before) / took * 100.0,
        between_percent: (of(between) - between_before) / took * 100.0,
    }
}
