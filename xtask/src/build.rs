//! Builds the two programs: `dormouse`, and the guest agent that it puts into images.
//!
//! The guest agent is built apart from everything else: it is linked statically, for it is the first program of a
//! machine that has no libraries yet. The flag for that must not reach procedural macros, which cargo ensures when a
//! target is named even though it is the same as the host's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::failure::{Context, Failure, Result};
use crate::layout::{self, GUEST_AGENT};
use crate::process::{self, step};

/// The only kind of machine there is so far, for hosts and guests alike.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Build the program and the guest agent and put them side by side.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// How: `dev` as tests use it, `up` as `cargo xtask up` installs it, `release`
    #[arg(long, default_value = "dev")]
    profile: String,
}

/// The two programs in one folder, where the one finds the other.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    pub(crate) dormouse: PathBuf,
    pub(crate) guest: PathBuf,
}

/// Runs `cargo xtask build`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let programs = step("build", || build(&options.profile))?;
    println!("{}\n{}", programs.dormouse.display(), programs.guest.display());
    Ok(())
}

/// Builds both with this profile of cargo's; the guest agent always with its own.
pub(crate) fn build(profile: &str) -> Result<Programs> {
    let mut command = process::cargo();
    command.args(["build", "--locked", "--package", "dormouse", "--profile", profile]);
    let dormouse = built(&mut command)?;

    let agent = build_for_guests("guest", "--bins")?;
    let guest = dormouse.with_file_name(GUEST_AGENT);
    replace(&agent, &guest)?;
    Ok(Programs { dormouse, guest })
}

/// Builds a program that runs in any guest: statically linked, in the profile of the guest agent.
pub(crate) fn build_for_guests(package: &str, which: &str) -> Result<PathBuf> {
    let mut command = process::cargo();
    command.args(["build", "--locked", "--package", package, which, "--profile", "guest"]);
    command.args(["--target", TARGET]);
    command.env("RUSTFLAGS", "-C target-feature=+crt-static");
    command.env_remove("CARGO_ENCODED_RUSTFLAGS");
    built(&mut command)
}

/// Runs `cargo build` and returns where it put the one program, as cargo itself says it.
pub(crate) fn built(command: &mut Command) -> Result<PathBuf> {
    /// What is read of one line of cargo's output.
    #[derive(Deserialize)]
    struct Message {
        executable: Option<PathBuf>,
        target: Option<Target>,
    }
    #[derive(Deserialize)]
    struct Target {
        kind: Vec<String>,
    }

    command.arg("--message-format=json-render-diagnostics");
    let messages = process::output(command)?;
    let program = |line| {
        let message = serde_json::from_str::<Message>(line).ok()?;
        message.target?.kind.iter().any(|kind| kind == "bin").then_some(message.executable?)
    };
    messages.lines().find_map(program).ok_or_else(|| Failure::new("cargo built no program"))
}

/// Puts a copy of `from` at `to` in one step, if it is not there already; a running program is not disturbed.
pub(crate) fn replace(from: &Path, to: &Path) -> Result<bool> {
    let content = fs::read(from).context(format!("read {}", from.display()))?;
    if fs::read(to).is_ok_and(|present| present == content) {
        return Ok(false);
    }
    let fresh = to.with_extension("new");
    fs::copy(from, &fresh).context(format!("write {}", fresh.display()))?;
    fs::rename(&fresh, to).context(format!("replace {}", to.display()))?;
    Ok(true)
}

/// Builds the image that tests boot, or finds that it is current.
pub(crate) fn test_image(programs: &Programs) -> Result<()> {
    let mut command = Command::new(&programs.dormouse);
    command.args(["images", "build", "--images"]).arg(layout::test_images());
    command
        .env("DORMOUSE_IMAGES", layout::test_images())
        .env("DORMOUSE_DATA", layout::target().join("e2e/data"));
    process::run(&mut command)
}
