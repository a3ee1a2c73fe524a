//! How busy the user's programs are.
//!
//! Timers are read from `/proc/timer_list`, by an allow-list: the kernel's own timers have other functions and their names
//! change, those of programs do not. The agent's own wait is not in the list, because it is running while it reads.

use std::{
    collections::HashSet,
    fs,
    path::Path,
    sync::{Arc, OnceLock},
};

use tokio::time::Instant;
use wire::{Failure, Sample};

use crate::{agent::Agent, cgroup::Cgroup, failure::io_failure};

/// What the kernel calls when a program's timer is due: `nanosleep`, `poll`, `select`, `epoll_wait`, `futex` (all
/// `hrtimer_wakeup`), timerfd, alarm clocks, `setitimer` and `alarm`, `timer_create`. Seen on 6.12.
const USER_TIMERS: [&str; 5] =
    ["hrtimer_wakeup", "timerfd_tmrproc", "alarmtimer_fired", "it_real_fn", "posix_timer_fn"];

/// `01` in `/proc/net/tcp`.
const ESTABLISHED: &str = "01";
/// `0A` there.
const LISTEN: &str = "0A";

pub(crate) fn take(agent: &Arc<Agent>) -> Result<Sample, Failure> {
    let proc = &agent.settings.proc;
    let cpu_usec = match &agent.settings.cgroup {
        Some(cgroup) => Cgroup::cpu_usec(cgroup)
            .map_err(|error| io_failure(&error, "sample", "read processor time"))?,
        None => 0,
    };
    let read = |name: &str| {
        fs::read_to_string(proc.join(name))
            .map_err(|error| io_failure(&error, "sample", &format!("read {name}")))
    };
    let mut tables = read("net/tcp")?;
    if proc.join("net/tcp6").exists() {
        tables.push_str(&read("net/tcp6")?);
    }
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
        tcp_outbound: outbound(&tables),
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

/// Established connections to somewhere outside whose local port nobody listens on: those that were opened from here. Those
/// on the guest's own IPv6 address do not count: while it sleeps the host answers their keepalive probes.
fn outbound(tables: &str) -> u32 {
    let rows: Vec<[&str; 3]> = tables
        .lines()
        .filter_map(|line| {
            let mut words = line.split_ascii_whitespace().skip(1);
            Some([words.next()?, words.next()?, words.next()?])
        })
        .collect();
    let listening: HashSet<&str> = rows
        .iter()
        .filter(|row| row[2] == LISTEN)
        .filter_map(|row| row[0].split_once(':').map(|(_, port)| port))
        .collect();
    let count = rows
        .iter()
        .filter(|row| row[2] == ESTABLISHED && is_v4(row[0]) && !is_loopback(row[1]))
        .filter(|row| row[0].split_once(':').is_some_and(|(_, port)| !listening.contains(port)))
        .count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Whether an address as the kernel prints it is IPv4, or IPv4 over an IPv6 socket.
fn is_v4(address: &str) -> bool {
    match address.split_once(':') {
        Some((host, _)) if host.len() == 32 => {
            host.starts_with(&format!("{:016}{:08X}", 0, u32::from_ne_bytes([0, 0, 0xff, 0xff])))
        }
        _ => true,
    }
}

/// Whether an address as the kernel prints it (hexadecimal, each 32 bits in the machine's order) is this machine itself.
fn is_loopback(address: &str) -> bool {
    static V6: OnceLock<[String; 2]> = OnceLock::new();
    let [one, mapped] = V6.get_or_init(|| {
        let word = |bytes: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(bytes));
        let zeros = word([0; 4]).repeat(2);
        [
            format!("{zeros}{}{}", word([0; 4]), word([0, 0, 0, 1])),
            format!("{zeros}{}", word([0, 0, 0xff, 0xff])),
        ]
    });
    let Some((host, _)) = address.split_once(':') else { return false };
    let v4 = match host.len() {
        8 => host,
        32 if host == one => return true,
        32 => match host.strip_prefix(mapped.as_str()) {
            Some(v4) => v4,
            None => return false,
        },
        _ => return false,
    };
    u32::from_str_radix(v4, 16).is_ok_and(|word| word.to_ne_bytes()[0] == 127)
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

    #[test]
    fn s02_outbound_connections_are_those_opened_from_here_to_outside() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue
   0: 00000000:1F90 00000000:0000 0A 00000000:00000000
   1: 0200000A:1F90 0100000A:C000 01 00000000:00000000
   2: 0200000A:D431 0100000A:01BB 01 00000000:00000000
   3: 0100007F:D432 0100007F:1F90 01 00000000:00000000
   4: 0200000A:D433 0100000A:01BB 06 00000000:00000000
   5: 00000000000000000000000001000000:D4 00000000000000000000000001000000:50 01 0:0
   6: 0000000000000000FFFF00000200000A:D5 0000000000000000FFFF00000100000A:50 01 0:0
   7: 0000000000000000FFFF00000100007F:D6 0000000000000000FFFF00000100007F:50 01 0:0
   8: 000000FD000000000000000002000000:D7 000000FD000000000000000001000000:50 01 0:0
";
        assert_eq!(outbound(table), 2, "rows 2 and 6; row 8 is on its own IPv6 address");
    }
}
