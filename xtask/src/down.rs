//! Undoes what `up` did to the machine. Sandboxes stay, asleep in the data folder, unless `--purge` says otherwise.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::daemon::Daemon;
use crate::failure::{Context, Failure, Result};
use crate::layout::{self, COMMAND_LINK, PROGRAM, PROGRAMS};
use crate::process::{self, find, step};
use crate::setup;
use crate::up::FORWARDING;

/// Begins the name of every sandbox's link on the host.
const TAP_PREFIX: &str = "dmouse";
/// The daemon's table in the packet filter.
const TABLE: [&str; 2] = ["inet", "dormouse"];
/// The address at which guests know their host, on the loopback.
const GATEWAY: &str = "10.118.0.1/32";

/// How long putting all sandboxes to sleep may take: some tens a second, on a slow and busy disk some a minute.
const DRAIN_LIMIT: Duration = Duration::from_mins(15);

/// Undo what `up` did to this machine; keep the sandboxes unless told otherwise
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Delete the data folder too: all sandboxes, images and templates
    #[arg(long)]
    purge: bool,
}

/// Runs `cargo xtask down`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let data = layout::data();
    if !setup::is_root() {
        let own = env::current_exe().context("find this program")?;
        let mut words = vec![
            format!("DORMOUSE_DATA={}", data.display()),
            own.display().to_string(),
            "down".to_owned(),
        ];
        words.extend(options.purge.then(|| "--purge".to_owned()));
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        return process::run(&mut setup::as_root(&words)?);
    }

    step("sandboxes put to sleep, daemon ended", || end_daemon(&data))?;
    step("virtual machines", || end_machines(&data))?;
    step("network", || {
        remove_taps()?;
        remove_rules()?;
        remove_gateway(&data)?;
        restore_forwarding(&data)
    })?;
    step("programs", remove_programs)?;
    if options.purge {
        step(&format!("data folder {}", data.display()), || purge(&data))?;
    } else if data.is_dir() {
        eprintln!(
            "\nKept: {} (sandboxes, images, templates); `cargo xtask down --purge` deletes it.",
            data.display()
        );
    }
    eprintln!("Kept: the Debian packages that `up` installed.");
    Ok(())
}

/// Puts every sandbox to sleep on disk, then asks the daemon to end.
fn end_daemon(data: &Path) -> Result<()> {
    let daemon = Daemon::over(data);
    let Some(running) = daemon.running() else {
        eprintln!("    no daemon of ours runs over {}", data.display());
        return Ok(());
    };
    let program = Path::new(PROGRAMS).join(PROGRAM);
    let mut drain = Command::new(&program);
    drain.env("DORMOUSE_DATA", data).arg("drain");
    if let Err(failure) = process::run_within(DRAIN_LIMIT, &mut drain) {
        // One that cannot be saved must not keep the rest from being undone.
        eprintln!("    not all are saved; those left will boot from their disks: {failure}");
    }
    daemon.end(running)
}

/// Ends what the daemon could not put to sleep: virtual machines over files of this data folder.
fn end_machines(data: &Path) -> Result<()> {
    for id in machines_over(data)? {
        eprintln!("    ending process {id}, a virtual machine that is still there");
        process::run(
            Command::new("sh").args(["-c", &format!("kill -TERM {id}; kill -CONT {id}")]),
        )?;
    }
    Ok(())
}

/// Processes of QEMU that have a file of this folder on their command line.
fn machines_over(data: &Path) -> Result<Vec<u32>> {
    let below = format!("{}/", data.display());
    let mut ids = Vec::new();
    for entry in fs::read_dir("/proc").context("list processes")? {
        let name = entry.context("list processes")?.file_name();
        let Ok(id) = name.to_string_lossy().parse::<u32>() else { continue };
        // One that has ended meanwhile has no command line, and is no machine either.
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line);
        let program = line.split('\0').next().unwrap_or_default();
        if program.contains("qemu-system-") && line.contains(&below) {
            ids.push(id);
        }
    }
    Ok(ids)
}

/// Removes the sandboxes' links. Asked of `ip`: `/sys` may be that of another network namespace.
fn remove_taps() -> Result<()> {
    let links = process::output(tool("ip")?.args(["-oneline", "link", "show"]))?;
    for name in links.lines().filter_map(tap) {
        process::run(tool("ip")?.args(["link", "delete", name]))?;
    }
    Ok(())
}

/// The name in a line such as `7: dmouse3: <BROADCAST,…`, if it is a sandbox's link.
fn tap(line: &str) -> Option<&str> {
    let name = line.split(": ").nth(1)?;
    name.strip_prefix(TAP_PREFIX)?.parse::<u32>().ok().map(|_| name)
}

fn remove_rules() -> Result<()> {
    // Adding first makes deleting succeed whether it was there or not.
    for verb in ["add", "delete"] {
        process::run(tool("nft")?.args([verb, "table"]).args(TABLE))?;
    }
    Ok(())
}

/// The gateway's addresses; that in IPv6 is the first after the installation's own prefix.
fn remove_gateway(data: &Path) -> Result<()> {
    let prefix = fs::read_to_string(data.join("ipv6-prefix")).unwrap_or_default();
    let ipv6 = prefix.trim().strip_suffix("/64").map(|prefix| format!("{prefix}1/128"));
    let present = process::output(tool("ip")?.args(["-oneline", "address", "show", "dev", "lo"]))?;
    for gateway in std::iter::once(GATEWAY).chain(ipv6.as_deref()) {
        if present.split_whitespace().any(|word| word == gateway) {
            process::run(tool("ip")?.args(["address", "delete", gateway, "dev", "lo"]))?;
        }
    }
    Ok(())
}

/// Switches forwarding off again where it was off before `up`.
fn restore_forwarding(data: &Path) -> Result<()> {
    let record = data.join("forwarding.before");
    match fs::read_to_string(&record) {
        Ok(before) => {
            fs::write(FORWARDING, before.trim()).context(format!("write {FORWARDING}"))?;
            fs::remove_file(&record).context(format!("remove {}", record.display()))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).context(format!("read {}", record.display())),
    }
}

fn remove_programs() -> Result<()> {
    let link = Path::new(COMMAND_LINK);
    if fs::read_link(link).is_ok_and(|target| target.starts_with(PROGRAMS)) {
        fs::remove_file(link).context(format!("remove {COMMAND_LINK}"))?;
    }
    match fs::remove_dir_all(PROGRAMS) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context(format!("remove {PROGRAMS}"))
        }
        _ => Ok(()),
    }
}

/// Everything that Dormouse puts into a data folder.
const IN_DATA: [&str; 20] = [
    "dormouse.db",
    "dormouse.db-journal",
    "dormouse.db-shm",
    "dormouse.db-wal",
    "dormouse.sock",
    "admin.token",
    "daemon.lock",
    "daemon.log",
    "daemon.process",
    "forwarding.before",
    "qemu.json",
    "host.id",
    "drives",
    "ipv6-prefix",
    "moved",
    "images",
    "quarantine",
    "sandboxes",
    "snapshots",
    "templates",
];

/// Deletes what is Dormouse's in the data folder, if it looks like one, and the folder if nothing else is in it.
fn purge(data: &Path) -> Result<()> {
    if !data.is_dir() {
        return Ok(());
    }
    // None of the names that somebody else's folder may well have.
    let signs = ["dormouse.db", "daemon.lock", "daemon.log", "images/.lock"];
    if !signs.iter().any(|name| data.join(name).exists()) {
        return Err(Failure::new(format!(
            "{} does not look like a data folder: delete it yourself",
            data.display()
        )));
    }
    for path in IN_DATA.iter().map(|name| data.join(name)) {
        let removed =
            if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).context(format!("remove {}", path.display()));
            }
            _ => {}
        }
    }
    match fs::remove_dir(data) {
        Err(error) if error.kind() == std::io::ErrorKind::DirectoryNotEmpty => {
            eprintln!("    what is not Dormouse's stays in {}", data.display());
            Ok(())
        }
        other => other.context(format!("remove {}", data.display())),
    }
}

fn tool(name: &str) -> Result<Command> {
    let path: PathBuf =
        find(name).ok_or_else(|| Failure::new(format!("`{name}` is not on this machine")))?;
    Ok(Command::new(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_links_of_sandboxes_are_taken_away() {
        assert_eq!(
            tap("7: dmouse3: <BROADCAST,MULTICAST,UP> mtu 1500 qdisc fq_codel"),
            Some("dmouse3")
        );
        for line in [
            "1: lo: <LOOPBACK,UP> mtu 65536",
            "2: dmousex: <UP>",
            "3: dmouse: <UP>",
            "4: mydmouse3: <UP>",
            "",
        ] {
            assert_eq!(tap(line), None, "{line}");
        }
    }
}
