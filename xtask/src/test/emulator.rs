//! Another QEMU for a run of the tests: as if it were the one that is installed, for this run alone.
//!
//! The run goes into a mount namespace of its own, in which files and folders of an unpacked package lie over those of the system.
//! So programs, firmware and modules are found where a package puts them, and the machine keeps what it has.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::failure::{Context, Failure, Result};
use crate::process;
use crate::setup;

/// Set in the run that is in its mount namespace already.
const INSIDE: &str = "DORMOUSE_XTASK_QEMU_INSIDE";

/// What QEMU is, of the paths below `/usr`. The first must be there; what a package has not stays the system's.
const PARTS: [&str; 5] = [
    "bin/qemu-system-x86_64",
    "bin/qemu-img",
    "share/qemu",
    "share/seabios",
    "lib/x86_64-linux-gnu/qemu",
];

/// Whether this run is the one that has the other QEMU; otherwise it was started, and has ended well.
pub(super) fn is_in_place(tree: &Path) -> Result<bool> {
    if env::var_os(INSIDE).is_some() {
        for (from, to) in parts(tree)? {
            process::run(Command::new("mount").arg("--bind").args([&from, &to]))?;
        }
        return Ok(true);
    }
    parts(tree)?;
    if !setup::is_root() {
        return Err(Failure::new("`--qemu` mounts, which needs root's rights: run this as root"));
    }
    let itself = env::current_exe().context("find this program")?;
    let mut inside = Command::new("unshare");
    inside.args(["--mount", "--"]).arg(itself).args(env::args_os().skip(1)).env(INSIDE, "1");
    process::run(&mut inside)?;
    Ok(false)
}

/// What lies over what.
fn parts(tree: &Path) -> Result<Vec<(PathBuf, PathBuf)>> {
    let usr = tree.join("usr");
    let all = PARTS.map(|part| (usr.join(part), Path::new("/usr").join(part)));
    if !all[0].0.is_file() {
        return Err(Failure::new(format!(
            "`--qemu {}`: there is no usr/{} below it; unpack packages there (`dpkg -x PACKAGE.deb DIR`)",
            tree.display(),
            PARTS[0]
        )));
    }
    Ok(all.into_iter().filter(|(from, to)| from.exists() && to.exists()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_package_has_lies_over_the_system() {
        let tree = env::temp_dir().join(format!("dormouse-emulator-{}", std::process::id()));
        let missing = parts(&tree).unwrap_err().to_string();
        assert!(missing.contains("no usr/bin/qemu-system-x86_64 below it"), "{missing}");
        std::fs::create_dir_all(tree.join("usr/bin")).unwrap();
        std::fs::write(tree.join("usr/bin/qemu-system-x86_64"), "").unwrap();
        // Where it is not installed there is nothing to lie over.
        let installed = Path::new("/usr/bin/qemu-system-x86_64").exists();
        assert_eq!(parts(&tree).unwrap().len(), usize::from(installed));
        std::fs::remove_dir_all(&tree).unwrap();
    }
}
