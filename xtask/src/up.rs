//! From a machine with nothing but Rust to a running daemon and a first sandbox; the second time, in seconds.
//!
//! What it changes on the machine, and [`down`](crate::down) takes away again: Debian packages (these stay), the two
//! programs below `/usr/local`, the data folder, a daemon, and what the daemon sets up for its guests' network.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::build::Programs;
use crate::daemon::Daemon;
use crate::failure::{Context, Failure, Result};
use crate::layout::{self, COMMAND_LINK, GUEST_AGENT, PROGRAM, PROGRAMS};
use crate::process::{self, step};
use crate::{build, setup};

/// cargo's profile for the program: see `.cargo/config.toml` for why it is not `release`.
const PROFILE: &str = "up";

/// Whether the host forwarded packets before; [`down`](crate::down) puts it back.
pub(crate) const FORWARDING: &str = "/proc/sys/net/ipv4/ip_forward";

/// Take this machine from nothing to a running daemon and a first sandbox
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Where the daemon listens
    #[arg(long, value_name = "ADDRESS", default_value = layout::LISTEN_DEFAULT)]
    listen: String,
    /// Go on as root with programs that were built already
    #[arg(long, hide = true, value_name = "FOLDER")]
    built: Option<PathBuf>,
}

/// Runs `cargo xtask up`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let begun = Instant::now();
    let programs = if let Some(folder) = &options.built {
        Programs { dormouse: folder.join(PROGRAM), guest: folder.join(GUEST_AGENT) }
    } else {
        step("1/6 packages of the machine", || setup::run(&setup::Options::default()))?;
        step("2/6 programs (the first time a few minutes)", || build::build(PROFILE))?
    };
    if !setup::is_root() {
        return as_root(options, &programs);
    }

    let data = layout::data();
    let installed =
        step(&format!("3/6 installed in {PROGRAMS}, `dormouse` in /usr/local/bin"), || {
            install(&programs)
        })?;
    step(&format!("4/6 guest image in {}", data.display()), || {
        process::run(dormouse(&installed, &data).args(["images", "build"]))
    })?;
    let listen = step("5/6 daemon", || start(&installed, &data, options))?;
    step(
        "6/6 a first sandbox (the very first boots the template; all others are copies of it)",
        || first_sandbox(&installed, &data),
    )?;

    let log = Daemon::over(&data).log();
    eprintln!("\nDormouse is up, after {:.0} s.", begun.elapsed().as_secs_f64());
    eprintln!(
        "  data    {}\n  log     {}\n  answers http://{}",
        data.display(),
        log.display(),
        listen
    );
    eprintln!("  next    dormouse sandboxes create --name web\n  undo    cargo xtask down");
    Ok(())
}

/// The rest needs root's rights: this program once more, through sudo.
fn as_root(options: &Options, programs: &Programs) -> Result<()> {
    let own = env::current_exe().context("find this program")?;
    let folder = programs.dormouse.parent().unwrap_or(Path::new("."));
    let words = [
        format!("DORMOUSE_DATA={}", layout::data().display()),
        own.display().to_string(),
        "up".to_owned(),
        format!("--listen={}", options.listen),
        format!("--built={}", folder.display()),
    ];
    eprintln!(
        "    the rest needs root's rights: virtual machines get links and accounts of their own"
    );
    process::run(&mut setup::as_root(&words.each_ref().map(String::as_str))?)
}

/// Puts the two programs where everybody finds them, and returns the path of `dormouse`.
fn install(programs: &Programs) -> Result<PathBuf> {
    let folder = Path::new(PROGRAMS);
    fs::create_dir_all(folder).context(format!("create {PROGRAMS}"))?;
    let installed = folder.join(PROGRAM);
    let changed = build::replace(&programs.dormouse, &installed)?;
    let changed = build::replace(&programs.guest, &folder.join(GUEST_AGENT))? || changed;
    let link = Path::new(COMMAND_LINK);
    match fs::read_link(link) {
        Ok(target) if target == installed => {}
        Ok(_) => {
            return Err(Failure::new(format!(
                "{COMMAND_LINK} points at something else: move it away, then try again"
            )));
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            symlink(&installed, link).context(format!("create {COMMAND_LINK}"))?;
        }
        Err(error) => return Err(error).context(format!("look at {COMMAND_LINK}")),
    }
    eprintln!("    {}", if changed { "new" } else { "unchanged" });
    Ok(installed)
}

/// A command line of `dormouse` that finds this data folder and the daemon over it.
fn dormouse(program: &Path, data: &Path) -> Command {
    let mut command = Command::new(program);
    // Whatever else the person who runs this has set for other daemons.
    for name in ["DORMOUSE_SOCKET", "DORMOUSE_URL", "DORMOUSE_TOKEN", "DORMOUSE_IMAGES"] {
        command.env_remove(name);
    }
    command.env("DORMOUSE_DATA", data);
    command
}

/// Starts the daemon, or the new one in the old one's place; leaves one that is current alone. Answers where it listens.
fn start(program: &Path, data: &Path, options: &Options) -> Result<String> {
    let daemon = Daemon::over(data);
    if let Some(process) = daemon.running() {
        if !Daemon::is_outdated(process) {
            let listen = Daemon::listens(process).unwrap_or_else(|| options.listen.clone());
            eprintln!("    runs already at {listen}, as process {}", process.id);
            if listen != options.listen {
                eprintln!(
                    "    to have it at {}: `cargo xtask down`, then `up` again; sandboxes are kept",
                    options.listen
                );
            }
            return Ok(listen);
        }
        eprintln!(
            "    an older one runs, as process {}: it is replaced, its sandboxes go on",
            process.id
        );
        daemon.end(process)?;
    }
    fs::create_dir_all(data).context(format!("create {}", data.display()))?;
    remember_forwarding(data)?;
    daemon.start(program, &options.listen)?;
    eprintln!("    at {}", options.listen);
    // What this machine lacks is better said now than by a sandbox that fails.
    process::run(dormouse(program, data).arg("doctor"))?;
    Ok(options.listen.clone())
}

/// Writes down whether the host forwarded packets before it had guests; once, for the first answer is the true one.
fn remember_forwarding(data: &Path) -> Result<()> {
    let record = data.join("forwarding.before");
    if record.try_exists().context(format!("look at {}", record.display()))? {
        return Ok(());
    }
    let before = fs::read_to_string(FORWARDING).context(format!("read {FORWARDING}"))?;
    if before.trim() == "0" {
        eprintln!(
            "    the daemon switches IPv4 forwarding on: sandboxes reach the internet through this machine"
        );
    }
    fs::write(&record, before).context(format!("write {}", record.display()))
}

/// Creates a sandbox, runs a command in it, deletes it.
fn first_sandbox(program: &Path, data: &Path) -> Result<()> {
    let name = format!("hello-{}", std::process::id());
    let timed = |what: &str, arguments: &[&str]| -> Result<String> {
        let begun = Instant::now();
        let output = process::output(dormouse(program, data).args(arguments))?;
        eprintln!("    {what}: {:.2} s", begun.elapsed().as_secs_f64());
        Ok(output)
    };
    timed("created", &["sandboxes", "create", "--name", &name])?;
    let script = "echo \"Hello from $(. /etc/os-release; echo $PRETTY_NAME), Linux $(uname -r)\"";
    let said = timed("ran a command in it", &["exec", &name, "--", "sh", "-c", script]);
    // Also when the command failed: the next run must find no leftover.
    let deleted = timed("deleted", &["sandboxes", "delete", &name]);
    eprintln!("    it said: {}", said?.trim_end());
    deleted.map(drop)
}
