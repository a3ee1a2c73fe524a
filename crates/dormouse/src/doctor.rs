//! What this machine lacks to run sandboxes, and how to get it.
//!
//! Looks only: nothing is changed. Exit code 1 if something that is needed is missing. What this user may not look at is said to
//! be unknown, not missing: root knows.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;

use crate::cli::DoctorArgs;
use crate::problem::Problem;
use crate::show;

/// Free space under which a warning is due, bytes: some ten sandboxes' worth.
const FREE_BYTES_LOW: u64 = 10 << 30;
/// Free space under which nothing works, bytes: an image and a template.
const FREE_BYTES_LEAST: u64 = 3 << 30;
/// Open files under which a warning is due.
const OPEN_FILES_LOW: u64 = 8192;
/// The oldest QEMU whose snapshots are known to work.
const QEMU_LEAST: (u32, u32) = (7, 2);

/// What was found.
#[derive(Debug, Serialize)]
struct Finding {
    /// What was looked at.
    check: &'static str,
    /// How it is.
    state: State,
    /// What was found.
    text: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// As it should be.
    Ok,
    /// Works, but somebody should know.
    Note,
    /// Sandboxes do not work without.
    Missing,
    /// This user may not look.
    Unknown,
}

pub(crate) async fn doctor(
    data: &Path,
    arguments: &DoctorArgs,
    json: bool,
) -> Result<i32, Problem> {
    let images = arguments.images.clone().unwrap_or_else(|| data.join("images"));
    let data = data.to_owned();
    let findings = tokio::task::spawn_blocking(move || {
        vec![
            root(),
            qemu(),
            program("qemu-img", "--version", "qemu-utils", "makes each sandbox's disk"),
            program("nft", "--version", "nftables", "keeps sandboxes apart and lets them out"),
            program("ip", "-V", "iproute2", "addresses and routes of sandboxes"),
            program("mke2fs", "-V", "e2fsprogs", "makes the guest's file system"),
            accelerator(),
            tun(),
            forwarding(),
            cgroups(),
            open_files(),
            image(&images),
            passage(&data, &images),
            disk(&data),
            daemon(&data),
        ]
    })
    .await
    .map_err(|error| Problem::new(format!("the examination broke: {error}")))?;
    let missing = findings.iter().filter(|finding| finding.state == State::Missing).count();
    if json {
        show::json(&findings)?;
    } else {
        for Finding { check, state, text, hint } in &findings {
            let sign = match state {
                State::Ok => "ok     ",
                State::Note => "note   ",
                State::Missing => "MISSING",
                State::Unknown => "unknown",
            };
            show::data(&format!("{sign}  {check:<16} {text}"))?;
            if let Some(hint) = hint {
                show::data(&format!("         {:<16} hint: {hint}", ""))?;
            }
        }
    }
    if missing == 0 {
        return Ok(0);
    }
    eprintln!("error: {missing} {} missing", if missing == 1 { "thing is" } else { "things are" });
    eprintln!(
        "hint: `cargo xtask setup` installs Debian's packages, `cargo xtask up` does everything"
    );
    Ok(1)
}

fn root() -> Finding {
    let check = "user";
    if rustix::process::geteuid().is_root() {
        return ok(check, "root");
    }
    unknown(check, "not root, who runs the daemon: what only root may look at is unknown here")
}

fn qemu() -> Finding {
    let check = "qemu";
    let install = "apt-get install qemu-system-x86";
    match first_line("qemu-system-x86_64", "--version") {
        Err(error) => missing(check, format!("qemu-system-x86_64: {error}"), install),
        Ok(line) => {
            let version = line.split_whitespace().find_map(|word| {
                let mut numbers = word.split('.');
                Some((numbers.next()?.parse::<u32>().ok()?, numbers.next()?.parse::<u32>().ok()?))
            });
            match version {
                Some(version) if version >= QEMU_LEAST => ok(check, line),
                Some(_) => {
                    missing(check, format!("{line}: too old"), "7.2 or newer, as in Debian 12")
                }
                None => {
                    note(check, format!("{line}: version not understood"), "7.2 or newer is needed")
                }
            }
        }
    }
}

fn program(name: &'static str, argument: &str, package: &str, why: &str) -> Finding {
    match first_line(name, argument) {
        Ok(line) => ok(name, line),
        Err(error) => {
            missing(name, format!("{error}; it {why}"), format!("apt-get install {package}"))
        }
    }
}

fn accelerator() -> Finding {
    let check = "accelerator";
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = cpu.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let capable = flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    let kvm = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    match (capable, kvm) {
        (true, Ok(_)) => ok(check, "KVM: guests run on the processor itself"),
        (true, Err(error)) => note(
            check,
            format!(
                "TCG: the processor could, but /dev/kvm: {error}; guests compute some ten times slower"
            ),
            "load the kvm_intel or kvm_amd module",
        ),
        (false, _) => note(
            check,
            "TCG: the processor's vmx or svm is not there; everything works, guests compute some ten times slower",
            "use a machine with hardware virtualization (in a VM: nested) for speed",
        ),
    }
}

fn tun() -> Finding {
    let check = "/dev/net/tun";
    match fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun") {
        Ok(_) => ok(check, "can be opened"),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            unknown(check, "this user may not open it")
        }
        Err(error) => missing(check, error.to_string(), "modprobe tun"),
    }
}

fn forwarding() -> Finding {
    let check = "ip_forward";
    match fs::read_to_string("/proc/sys/net/ipv4/ip_forward").map(|text| text.trim() == "1") {
        Ok(true) => ok(check, "on"),
        Ok(false) => note(
            check,
            "off; the daemon turns it on, without it sandboxes reach nothing outside",
            None,
        ),
        Err(error) => missing(check, error.to_string(), "sandboxes need IPv4 forwarding"),
    }
}

fn cgroups() -> Finding {
    let check = "cgroups";
    match fs::read_to_string("/sys/fs/cgroup/cgroup.controllers") {
        Ok(controllers) if controllers.split_whitespace().any(|one| one == "memory") => {
            ok(check, format!("version 2 with {}", controllers.trim()))
        }
        Ok(controllers) => note(
            check,
            format!("version 2 with only `{}`: guests' limits are QEMU's own", controllers.trim()),
            None,
        ),
        Err(_) if Path::new("/sys/fs/cgroup/memory").exists() => note(check, "version 1", None),
        Err(_) => note(check, "none: guests' limits are QEMU's own", None),
    }
}

fn open_files() -> Finding {
    let check = "open files";
    match rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum {
        Some(most) if most < OPEN_FILES_LOW => note(
            check,
            format!("at most {most}: enough for some hundred sandboxes"),
            "raise the hard limit (`ulimit -Hn`)",
        ),
        Some(most) => ok(check, format!("at most {most}")),
        None => ok(check, "no limit"),
    }
}

fn image(images: &Path) -> Finding {
    let check = "image";
    if let Err(error) = fs::read_dir(images)
        && error.kind() == io::ErrorKind::PermissionDenied
    {
        return unknown(check, format!("this user may not look into {}", images.display()));
    }
    match host::images::find_default(images) {
        Ok(image) => ok(check, format!("default is {}", image.id().as_str())),
        Err(error) => missing(check, format!("no default image: {error}"), "dormouse images build"),
    }
}

/// Whether QEMU's account gets to what it opens.
fn passage(data: &Path, images: &Path) -> Finding {
    let check = "way";
    for path in [data, images] {
        match host::passage::closed_to_others(path) {
            Ok(None) => {}
            Ok(Some(closed)) => {
                let folder = closed.folder.display();
                let text = format!(
                    "QEMU's account cannot enter {folder} (mode {:04o}) on the way to {}",
                    closed.mode,
                    path.display()
                );
                return missing(check, text, format!("chmod o+x {folder}, or another data folder"));
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return unknown(check, format!("this user may not go to {}", path.display()));
            }
            Err(error) => {
                return missing(
                    check,
                    format!("{}: {error}", path.display()),
                    "look at the folder",
                );
            }
        }
    }
    ok(check, "QEMU's account can enter every folder on its way")
}

fn disk(data: &Path) -> Finding {
    let check = "disk";
    // The folder may not be there yet: then what is above it counts.
    let there: Option<PathBuf> = data.ancestors().find(|path| path.exists()).map(Path::to_owned);
    let Some(there) = there else {
        return missing(check, "no such folder", "name one with `--data`");
    };
    match rustix::fs::statvfs(&there) {
        Err(error) => missing(check, error.to_string(), "the data folder must be readable"),
        Ok(stat) => {
            let free = stat.f_bavail.saturating_mul(stat.f_frsize);
            let text = format!("{} free in {}", show::size(free), there.display());
            if free < FREE_BYTES_LEAST {
                missing(check, text, "at least 3 GiB are needed for an image and its template")
            } else if free < FREE_BYTES_LOW {
                note(check, text, "each sandbox needs some hundred MiB and what is written in it")
            } else {
                ok(check, text)
            }
        }
    }
}

fn daemon(data: &Path) -> Finding {
    let check = "daemon";
    let socket = data.join(control::SOCKET_FILE);
    let way = control::SocketPath::to(&socket);
    match way.and_then(|way| std::os::unix::net::UnixStream::connect(way.path())) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            unknown(check, format!("this user may not ask at {}", socket.display()))
        }
        Ok(_) => ok(check, format!("answers at {}", socket.display())),
        Err(error) => {
            note(check, format!("none at {}: {error}", socket.display()), "dormouse serve")
        }
    }
}

/// The first line a program prints about itself.
fn first_line(program: &str, argument: &str) -> io::Result<String> {
    // Debian keeps some of these where an ordinary user's PATH does not look.
    let path = std::env::var("PATH").unwrap_or_default();
    let output =
        Command::new(program).arg(argument).env("PATH", format!("{path}:/usr/sbin:/sbin")).output();
    let output = output.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::new(io::ErrorKind::NotFound, "not installed"),
        _ => error,
    })?;
    let text = if output.stdout.is_empty() { output.stderr } else { output.stdout };
    Ok(String::from_utf8_lossy(&text).lines().next().unwrap_or_default().to_owned())
}

fn ok(check: &'static str, text: impl Into<String>) -> Finding {
    Finding { check, state: State::Ok, text: text.into(), hint: None }
}

fn note(
    check: &'static str,
    text: impl Into<String>,
    hint: impl Into<Option<&'static str>>,
) -> Finding {
    Finding { check, state: State::Note, text: text.into(), hint: hint.into().map(str::to_owned) }
}

fn unknown(check: &'static str, text: impl Into<String>) -> Finding {
    let hint = Some("run `dormouse doctor` as root".to_owned());
    Finding { check, state: State::Unknown, text: text.into(), hint }
}

fn missing(check: &'static str, text: impl Into<String>, hint: impl Into<String>) -> Finding {
    Finding { check, state: State::Missing, text: text.into(), hint: Some(hint.into()) }
}
