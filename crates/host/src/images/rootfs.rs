//! The guest's root file system: a small Debian 12 in an ext4 disk that mounts quickly and grows sparsely.
//!
//! # What the guest finds
//!
//! - Root's password is locked: the way in is the guest agent, not a login.
//! - `/etc/resolv.conf` is a plain file, `/etc/machine-id` is empty, `/etc/hostname` is a placeholder: the
//!   guest agent writes all three, for a clone is someone else than its template.
//! - `/work` is there, empty: where people put things.
//! - Nothing of apt's lists and caches.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::process::Command;

use super::apt::{self, Mirrors};
use super::build::Say;
use super::disk::{self, Bench, at, seal};
use super::{ImageError, Part, ROOT_FILE, commands};

/// The Debian release in the guest.
pub(super) const SUITE: &str = "bookworm";

/// Size of the disk as the guest sees it, in bytes. It costs nothing until written.
pub(super) const DISK_BYTES: u64 = 8 << 30;

/// Bytes of room that building it needs: a tree of 220 MB, packages, the disk.
pub(super) const ROOM_BYTES: u64 = 1 << 30;

/// How long fetching and unpacking Debian may take: 20 s on a good line, minutes on a slow one.
const DEBIAN_LIMIT: Duration = Duration::from_mins(30);
/// How long making the file system may take: a second.
const FILE_SYSTEM_LIMIT: Duration = Duration::from_mins(5);

/// Left out of the guest: what programs do not read. Licences stay.
const LEFT_OUT: [&str; 7] = [
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/lintian/*",
];

/// Identity of the file system and seed of its name hashes: fixed, so that the same tree gives the same disk.
const FILE_SYSTEM_ID: &str = "d0e50b5e-0000-4000-8000-000000000001";
/// Seconds since 1970 that the file system says it was made at, for the same reason: 2026-01-01.
const FILE_SYSTEM_TIME: &str = "1767225600";

/// What the cache knows of a root file system.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RootPart {
    /// `name=version`, in order.
    pub(super) packages: Vec<String>,
    /// The disk.
    pub(super) root: Part,
}

/// Everything that decides what is in the disk, short of what Debian has on the day.
pub(super) fn recipe(packages: &[String]) -> String {
    format!("root 1\n{SUITE}\n{DISK_BYTES}\n{}\n{}\n", LEFT_OUT.join("\n"), packages.join("\n"))
}

/// Builds the disk into `bench`.
pub(super) async fn make(
    mirrors: &Mirrors,
    packages: &[String],
    bench: &Bench,
    say: &mut Say<'_>,
) -> Result<RootPart, ImageError> {
    apt::need_keyring()?;
    // Before the long part, so that what is missing is said at once.
    let mmdebstrap = commands::program("mmdebstrap", "mmdebstrap")?;
    let mke2fs = commands::program("mke2fs", "e2fsprogs")?;

    let tree = bench.path().join("tree");
    let mut command = Command::new(mmdebstrap);
    command.args([
        "--mode=root",
        "--format=directory",
        "--variant=minbase",
        "--architectures=amd64",
    ]);
    command.arg(format!("--include={}", packages.join(",")));
    command.args([
        "--aptopt=APT::Install-Recommends \"false\"",
        "--aptopt=Acquire::Languages \"none\"",
    ]);
    command.args(["--aptopt=Acquire::Retries \"3\""]);
    command.args(LEFT_OUT.map(|option| format!("--dpkgopt={option}")));
    command.arg(SUITE).arg(&tree).args(mirrors.sources(SUITE));
    say.line("root: Debian 12 from its archive (about 70 MB, half a minute on a good line)");
    // Its remarks are the only sign of life on a slow line.
    let mut hear = |line: &str| {
        if let Some(step) = line.strip_prefix("I: ") {
            say.line(&format!("root: {}", step.trim_end_matches('.')));
        }
    };
    commands::run(command, "make the guest's Debian (mmdebstrap)", DEBIAN_LIMIT, &mut hear).await?;
    let packages = settle(&tree)?;

    say.line("root: file system");
    let disk = bench.path().join(ROOT_FILE);
    let mut command = Command::new(mke2fs);
    command.env("E2FSPROGS_FAKE_TIME", FILE_SYSTEM_TIME);
    command.args([
        "-q",
        "-F",
        "-t",
        "ext4",
        "-b",
        "4096",
        "-m",
        "1",
        "-L",
        "dormouse",
        "-U",
        FILE_SYSTEM_ID,
    ]);
    // Tables are holes that read as zeros already. Left to the guest, its first mount would write 128 MiB
    // of zeros into every sandbox's overlay.
    command.args([
        "-E",
        &format!("hash_seed={FILE_SYSTEM_ID},lazy_itable_init=0,lazy_journal_init=0,discard"),
    ]);
    command.args(["-J", "size=64", "-e", "remount-ro", "-d"]).arg(&tree).arg(&disk);
    command.arg(format!("{}k", DISK_BYTES / 1024));
    commands::run(command, "make the guest's file system (mke2fs)", FILE_SYSTEM_LIMIT, &mut |_| {})
        .await?;
    fs::remove_dir_all(&tree).map_err(at("remove folder", &tree))?;
    disk::trim(&disk)?;
    seal(&disk)?;

    say.line("root: checksum");
    let hashed = disk.clone();
    let sha256 =
        tokio::task::spawn_blocking(move || disk::sha256(&hashed)).await.map_err(|source| {
            ImageError::Io { doing: "read", path: disk.clone(), source: io::Error::other(source) }
        })??;
    Ok(RootPart { packages, root: Part { sha256, bytes: DISK_BYTES } })
}

/// Makes a fresh Debian tree into a guest's, and returns its packages.
fn settle(tree: &Path) -> Result<Vec<String>, ImageError> {
    lock_root(&tree.join("etc/shadow"))?;
    replace(&tree.join("etc/hostname"), "dormouse\n")?;
    replace(
        &tree.join("etc/hosts"),
        "127.0.0.1 localhost dormouse\n::1 localhost ip6-localhost ip6-loopback\n",
    )?;
    replace(
        &tree.join("etc/resolv.conf"),
        "# The guest agent writes the resolver's address here.\n",
    )?;
    replace(&tree.join("etc/machine-id"), "")?;
    // Proxies and the like of the machine it was built on.
    remove(&tree.join("etc/apt/apt.conf.d/99mmdebstrap"))?;
    remove(&tree.join("var/lib/dbus/machine-id"))?;
    for folder in
        ["var/lib/apt/lists", "var/cache/apt", "var/cache/debconf", "var/log", "tmp", "run"]
    {
        empty(&tree.join(folder))?;
    }
    let work = tree.join("work");
    fs::create_dir(&work).map_err(at("create folder", &work))?;
    fs::set_permissions(&work, fs::Permissions::from_mode(0o755))
        .map_err(at("set permissions of", &work))?;

    let status = tree.join("var/lib/dpkg/status");
    Ok(installed(&fs::read_to_string(&status).map_err(at("read", &status))?))
}

/// Root's password field becomes one that no password matches.
fn lock_root(shadow: &Path) -> Result<(), ImageError> {
    let text = fs::read_to_string(shadow).map_err(at("read", shadow))?;
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let root = lines.iter_mut().find(|line| line.starts_with("root:")).ok_or_else(|| {
        ImageError::Unexpected {
            doing: "lock root's password",
            what: "no root in /etc/shadow".to_owned(),
        }
    })?;
    let mut fields: Vec<&str> = root.split(':').collect();
    if let Some(password) = fields.get_mut(1) {
        *password = "*";
    }
    *root = fields.join(":");
    // Written in place: owner and mode stay.
    fs::write(shadow, lines.join("\n") + "\n").map_err(at("write", shadow))
}

/// A plain file with this text, whatever (a link, say) was there.
fn replace(path: &Path, text: &str) -> Result<(), ImageError> {
    remove(path)?;
    fs::write(path, text).map_err(at("write", path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644))
        .map_err(at("set permissions of", path))
}

fn remove(path: &Path) -> Result<(), ImageError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Removes the files below a folder and keeps the folders, which programs expect with their owners.
fn empty(folder: &Path) -> Result<(), ImageError> {
    if !folder.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(folder).map_err(at("list", folder))? {
        let entry = entry.map_err(at("list", folder))?;
        let path = entry.path();
        if entry.file_type().map_err(at("look at", &path))?.is_dir() {
            empty(&path)?;
        } else {
            remove(&path)?;
        }
    }
    Ok(())
}

/// `name=version` of each package in dpkg's record, in order.
fn installed(status: &str) -> Vec<String> {
    let mut packages: Vec<String> = status
        .split("\n\n")
        .filter(|record| apt::field(record, "Status").is_some_and(|s| s.ends_with(" installed")))
        .filter_map(|record| {
            Some(format!("{}={}", apt::field(record, "Package")?, apt::field(record, "Version")?))
        })
        .collect();
    packages.sort();
    packages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fresh_tree_becomes_a_guests() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path();
        for folder in [
            "etc/apt/apt.conf.d",
            "var/lib/dpkg",
            "var/lib/apt/lists/partial",
            "var/cache/apt",
            "var/log",
        ] {
            fs::create_dir_all(tree.join(folder)).unwrap();
        }
        fs::write(tree.join("etc/shadow"), "root:$y$secret:19000:0:::::\ndaemon:*:1::::::\n")
            .unwrap();
        std::os::unix::fs::symlink("/run/resolv.conf", tree.join("etc/resolv.conf")).unwrap();
        fs::write(tree.join("etc/machine-id"), "0123\n").unwrap();
        fs::write(tree.join("etc/apt/apt.conf.d/99mmdebstrap"), "Acquire::http::Proxy").unwrap();
        fs::write(tree.join("var/lib/apt/lists/partial/x"), "").unwrap();
        fs::write(
            tree.join("var/lib/dpkg/status"),
            "Package: zlib1g\nStatus: install ok installed\nVersion: 1:1.2\n\n\
             Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n\n\
             Package: bash\nStatus: install ok installed\nVersion: 5.2\nDescription: shell\n a b: c\n",
        )
        .unwrap();

        assert_eq!(settle(tree).unwrap(), ["bash=5.2", "zlib1g=1:1.2"]);
        let read = |path: &str| fs::read_to_string(tree.join(path)).unwrap();
        assert_eq!(read("etc/shadow"), "root:*:19000:0:::::\ndaemon:*:1::::::\n");
        assert!(fs::symlink_metadata(tree.join("etc/resolv.conf")).unwrap().is_file());
        assert_eq!(read("etc/machine-id"), "");
        assert!(!tree.join("etc/apt/apt.conf.d/99mmdebstrap").exists());
        assert!(tree.join("var/lib/apt/lists/partial").is_dir());
        assert!(!tree.join("var/lib/apt/lists/partial/x").exists());
        assert_eq!(fs::metadata(tree.join("work")).unwrap().permissions().mode() & 0o777, 0o755);
    }
}
