//! The processes of a box, as its own programs tell them.

use std::collections::HashMap;
use std::time::Duration;

use api::ApiError;
use api::boxes::act::{BoxExec, BoxProcess, BoxProcesses};

use super::exec::{self, Way};
use super::{Who, exec as run};
use crate::App;
use crate::failure::Failure;

/// How long the listing may take.
const WAIT: Duration = Duration::from_secs(30);
/// Most bytes of the listing.
const BYTES_MAX: u64 = 1024 * 1024;
/// Stands between the two lists, on a line of its own: the listing's own command has it too.
const BETWEEN: &str = "--listening--";

/// The guest agent's process id. It is what runs when the machine stands still, so the kernel counts the time for which a box was
/// frozen, or its template lay, as processor time of it: nothing that is told of it would be true.
const GUEST_AGENT: u32 = 1;

/// Lists them, without the guest's own.
pub(crate) async fn procs(app: &App, who: &Who, id: &str) -> Result<BoxProcesses, Failure> {
    let request = BoxExec { command: Some(exec::LISTING.to_owned()), ..BoxExec::default() };
    let way = Way { bytes: BYTES_MAX, waits: Some(WAIT), notes: false };
    let listed = run(app, who, id, way, request).await?;
    if let Some(error) = exec::failed(&listed, "listing its processes") {
        return Err(error.into());
    }
    Ok(BoxProcesses { processes: parse(&listed.output)? })
}

fn parse(text: &str) -> Result<Vec<BoxProcess>, ApiError> {
    let (processes, listening) = text.split_once(&format!("\n{BETWEEN}\n")).ok_or_else(|| {
        ApiError::new(api::Code::Internal, "the box told its processes in another form")
    })?;
    let mut listens = listens(listening);
    let process = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let mut number = || words.next()?.parse::<u64>().ok();
        let (pid, ppid, rss_kib, cpu_sec) = (number()?, number()?, number()?, number()?);
        let command = words.collect::<Vec<_>>().join(" ");
        let pid = u32::try_from(pid).ok()?;
        Some(BoxProcess {
            pid,
            ppid: u32::try_from(ppid).ok()?,
            memory_mib: rss_kib.div_ceil(1024),
            cpu_sec,
            listens: listens.remove(&pid).unwrap_or_default(),
            command,
        })
    };
    // Kernel threads have no memory of their own, and neither the listing itself nor the guest agent is the box's.
    let own = |process: &BoxProcess| {
        process.pid != GUEST_AGENT && process.memory_mib > 0 && !process.command.contains(BETWEEN)
    };
    let ours = |process: &BoxProcess| !process.command.starts_with("ps -eo pid=,ppid=");
    Ok(processes.lines().filter_map(process).filter(|one| own(one) && ours(one)).collect())
}

/// The ports on which each process listens.
fn listens(text: &str) -> HashMap<u32, Vec<u16>> {
    let mut found: HashMap<u32, Vec<u16>> = HashMap::new();
    for line in text.lines() {
        // `LISTEN 0 5 0.0.0.0:8000 0.0.0.0:* users:(("python3",pid=412,fd=3))`
        let Some(port) = line
            .split_ascii_whitespace()
            .nth(3)
            .and_then(|address| address.rsplit_once(':')?.1.parse::<u16>().ok())
        else {
            continue;
        };
        for pid in line.split("pid=").skip(1).filter_map(|rest| {
            rest.split(|char: char| !char.is_ascii_digit()).next()?.parse::<u32>().ok()
        }) {
            let ports = found.entry(pid).or_default();
            if !ports.contains(&port) {
                ports.push(port);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_the_box_are_told_with_the_ports_on_which_they_listen() {
        // Of the guest agent: 36 minutes that the template lay.
        let text = "      1       0  3100  2160 /sbin/init\n    412       1 20480    12 python3 -m http.server 8000\n\
                    \x20   413       1  3100     0 x\n\
                    \x20   500       1  3100     0 /bin/bash -c exec 2>&1 ps && echo --listening-- && ss\n\
                    --listening--\nLISTEN 0 5 0.0.0.0:8000 0.0.0.0:* users:((\"python3\",pid=412,fd=3))\n\
                    LISTEN 0 5 [::]:8001 [::]:* users:((\"python3\",pid=412,fd=4),(\"x\",pid=413,fd=1))\n";
        let found = parse(text).expect("understood");
        assert_eq!(found.iter().map(|one| one.pid).collect::<Vec<_>>(), [412, 413]);
        assert_eq!((found[0].memory_mib, found[0].cpu_sec), (20, 12));
        assert_eq!(found[0].command, "python3 -m http.server 8000");
        assert_eq!(found[0].listens, [8000, 8001]);
        assert_eq!(found[1].listens, [8001]);
        parse("nonsense").expect_err("another form");
    }
}
