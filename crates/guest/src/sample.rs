//! How busy the user's programs are.
//!
//! Timers are read from `/proc/timer_list`, by an allow-list: the kernel's own timers have other functions and their names
//! change, those of programs do not. The agent's own wait is not in the list, because it is running while it reads.

use std::{fs, path::Path, sync::Arc};

use tokio::time::Instant;
use wire::{Failure, Sample};

use crate::{agent::Agent, cgroup::Cgroup, failure::io_failure, sockets};

/// What the kernel calls when a program's timer is due: `nanosleep`, `poll`, `select`, `epoll_wait`, `futex` (all
/// `hrtimer_wakeup`), timerfd, alarm clocks, `setitimer` and `alarm`, `timer_create`. Seen on 6.12.
const USER_TIMERS: [&str; 5] =
    ["hrtimer_wakeup", "timerfd_tmrproc", "alarmtimer_fired", "it_real_fn", "posix_timer_fn"];

pub(crate) fn take(agent: &Arc<Agent>) -> Result<Sample, Failure> {
    let proc = &agent.settings.proc;
    let cpu_usec = match &agent.settings.cgroup {
        Some(cgroup) => Cgroup::cpu_usec(cgroup)
            .map_err(|error| io_failure(&error, "sample", "read processor time"))?,
        None => 0,
    };
    // Looked at as before a sleep, though only the number is told: so the look before a sleep finds its code translated, of the
    // kernel's as of ours, where the processor is emulated. It costs a third of a millisecond here, and some five there.
    let (_, tcp_outbound) = sockets::look_and_count(proc)
        .map_err(|error| io_failure(&error, "sample", "look at the sockets"))?;
    let timer_ns = match (timers(proc), agent.settings.cgroup.is_some()) {
        (Ok(list), _) => earliest(&list),
        // Without privileges, in a test.
        (Err(_), false) => None,
        (Err(error), true) => return Err(io_failure(&error, "sample", "read timers")),
    };
    let limit_ms = agent.execs.deadline().map(|at| {
        let left = at.saturating_duration_since(Instant::now());
        u64::try_from(left.as_millis()).unwrap_or(u64::MAX)
    });
    let timer_ms = timer_ns.map(|ns| ns.div_ceil(1_000_000));
    Ok(Sample {
        cpu_usec,
        tcp_outbound,
        timer_due_ms: [timer_ms, limit_ms].into_iter().flatten().min(),
        holds: agent.holds.count(),
        execs_running: agent.execs.running(),
    })
}

fn timers(proc: &Path) -> std::io::Result<String> {
    fs::read_to_string(proc.join("timer_list"))
}

/// Nanoseconds until the earliest of the programs' timers; 0 for one that is overdue.
fn earliest(list: &str) -> Option<u64> {
    let mut due = None;
    let mut users = false;
    for line in list.lines() {
        let line = line.trim_start();
        if let Some(rest) = line.strip_prefix('#') {
            if rest.starts_with(|digit: char| digit.is_ascii_digit()) {
                // ` #3: <0000000000000000>, hrtimer_wakeup, S:01`
                users = rest.split(", ").any(|word| USER_TIMERS.contains(&word));
            } else if users && let Some(ns) = expires(rest) {
                due = Some(due.map_or(ns, |earlier: u64| earlier.min(ns)));
            }
        }
    }
    due
}

/// The later number of ` expires at A-B nsecs [in X to Y nsecs]`, which is the hard limit.
fn expires(line: &str) -> Option<u64> {
    let (_, range) = line.trim_start().strip_prefix("expires at")?.split_once("[in ")?;
    let (_, hard) = range.split_once(" to ")?;
    let hard: i64 = hard.split(' ').next()?.parse().ok()?;
    Some(u64::try_from(hard).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s03_only_timers_of_programs_count_and_of_a_range_its_end() {
        let list = " clock 0:
  .base:       0000000000000000
active timers:
 #0: <0000000000000000>, tick_nohz_handler, S:01
 # expires at 66320000000-66320000000 nsecs [in 1190000 to 1190000 nsecs]
 #1: <0000000000000000>, hrtimer_wakeup, S:01
 # expires at 70320000000-70370000000 nsecs [in 4000000000 to 4050000000 nsecs]
 clock 1:
active timers:
 #0: <0000000000000000>, timerfd_tmrproc, S:01
 # expires at 1-1 nsecs [in 9000000000 to 9000000000 nsecs]
";
        assert_eq!(earliest(list), Some(4_050_000_000));
        assert_eq!(earliest(&list.replace("in 9000000000 to 9000000000", "in -5 to -5")), Some(0));
        assert_eq!(earliest(&list.replace("hrtimer_wakeup", "x").replace("timerfd", "y")), None);
    }
}
