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

/// The subnet of a daemon that was told no other.
const SUBNET_DEFAULT: Subnet = Subnet(10, 118);

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
        for subnet in subnets(&data)? {
            if subnet.is_held()? {
                eprintln!("    {}: another daemon uses it", subnet.gateway());
                continue;
            }
            subnet.remove_taps()?;
            subnet.remove_rules()?;
            remove_address(&format!("{}/32", subnet.gateway()))?;
        }
        remove_ipv6_gateway(&data)?;
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

/// The first two numbers of a /16 from which sandboxes had their addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Subnet(u8, u8);

/// The subnets that daemons over this data folder have used.
fn subnets(data: &Path) -> Result<Vec<Subnet>> {
    let path = data.join("subnets");
    let noted = match fs::read_to_string(&path) {
        // Of an earlier version, or never started.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        noted => noted.context(format!("read {}", path.display()))?,
    };
    let mut all: Vec<Subnet> = noted.lines().filter_map(subnet).collect();
    if all.is_empty() {
        all.push(SUBNET_DEFAULT);
    }
    Ok(all)
}

fn subnet(line: &str) -> Option<Subnet> {
    let [a, b, _, _] = line.trim().parse::<std::net::Ipv4Addr>().ok()?.octets();
    Some(Subnet(a, b))
}

impl Subnet {
    /// The address at which guests know their host, on the loopback.
    fn gateway(self) -> String {
        format!("{}.{}.0.1", self.0, self.1)
    }

    /// Begins the name of every sandbox's link on the host.
    fn tap_prefix(self) -> String {
        if self == SUBNET_DEFAULT {
            return "dmouse".to_owned();
        }
        format!("dm{:02x}{:02x}-", self.0, self.1)
    }

    /// The daemon's table in the packet filter.
    fn table(self) -> String {
        if self == SUBNET_DEFAULT {
            return "dormouse".to_owned();
        }
        format!("dormouse_{}_{}", self.0, self.1)
    }

    /// Whether a daemon, over another data folder, uses it now.
    fn is_held(self) -> Result<bool> {
        let sockets = fs::read_to_string("/proc/net/unix").context("list sockets")?;
        let name = format!("@dormouse/{}", self.gateway());
        Ok(sockets.lines().any(|line| line.ends_with(&name)))
    }

    /// Removes the sandboxes' links. Asked of `ip`: `/sys` may be that of another network namespace.
    fn remove_taps(self) -> Result<()> {
        let links = process::output(tool("ip")?.args(["-oneline", "link", "show"]))?;
        for name in links.lines().filter_map(|line| self.tap(line)) {
            process::run(tool("ip")?.args(["link", "delete", name]))?;
        }
        Ok(())
    }

    /// The name in a line such as `7: dmouse3: <BROADCAST,…`, if it is a sandbox's link.
    fn tap(self, line: &str) -> Option<&str> {
        let name = line.split(": ").nth(1)?;
        name.strip_prefix(&self.tap_prefix())?.parse::<u32>().ok().map(|_| name)
    }

    fn remove_rules(self) -> Result<()> {
        // Adding first makes deleting succeed whether it was there or not.
        for verb in ["add", "delete"] {
            process::run(tool("nft")?.args([verb, "table", "inet", &self.table()]))?;
        }
        Ok(())
    }
}

/// The gateway's address in IPv6 is the first after the installation's own prefix.
fn remove_ipv6_gateway(data: &Path) -> Result<()> {
    let prefix = fs::read_to_string(data.join("ipv6-prefix")).unwrap_or_default();
    match prefix.trim().strip_suffix("/64") {
        Some(prefix) => remove_address(&format!("{prefix}1/128")),
        None => Ok(()),
    }
}

/// Takes an address off the loopback, if it is there.
fn remove_address(address: &str) -> Result<()> {
    let present = process::output(tool("ip")?.args(["-oneline", "address", "show", "dev", "lo"]))?;
    if present.split_whitespace().any(|word| word == address) {
        process::run(tool("ip")?.args(["address", "delete", address, "dev", "lo"]))?;
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
const IN_DATA: [&str; 24] = [
    "dormouse.db",
    "dormouse.db-journal",
    "dormouse.db-shm",
    "dormouse.db-wal",
    "dormouse.sock",
    "admin.token",
    "daemon.lock",
    "daemon.log",
    "daemon.process",
    "fork-sets",
    "forwarding.before",
    "qemu.json",
    "host.id",
    "drives",
    "emulators",
    "ipv6-prefix",
    "subnets",
    "moved",
    "images",
    "quarantine",
    "sandboxes",
    "snapshots",
    "templates",
    "volumes",
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
        let default = SUBNET_DEFAULT;
        let line = "7: dmouse3: <BROADCAST,MULTICAST,UP> mtu 1500 qdisc fq_codel";
        assert_eq!(default.tap(line), Some("dmouse3"));
        let other = Subnet(10, 119);
        assert_eq!(other.tap("8: dm0a77-12: <UP>"), Some("dm0a77-12"));
        assert_eq!((other.tap(line), default.tap("8: dm0a77-12: <UP>")), (None, None));
        assert_eq!((other.table(), default.table()), ("dormouse_10_119".into(), "dormouse".into()));
        for line in [
            "8: dm0a77-x: <UP>",
            "1: lo: <LOOPBACK,UP> mtu 65536",
            "2: dmousex: <UP>",
            "3: dmouse: <UP>",
            "4: mydmouse3: <UP>",
            "",
        ] {
            assert_eq!(default.tap(line), None, "{line}");
        }
    }

    #[test]
    fn every_subnet_that_was_used_is_cleaned_and_without_a_note_the_default_one() {
        let folder = std::env::temp_dir().join(format!("dormouse-down-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        assert_eq!(subnets(&folder).expect("read"), [SUBNET_DEFAULT]);
        fs::write(folder.join("subnets"), "10.119.0.0\n172.20.0.0\nnonsense\n").expect("written");
        assert_eq!(subnets(&folder).expect("read"), [Subnet(10, 119), Subnet(172, 20)]);
        fs::remove_dir_all(&folder).expect("removed");
    }
}
