//! Files of this machine as sync sees them: which there are, what `.gitignore` leaves out, and what is in them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ignore::WalkBuilder;
use rmcp::model::JsonObject;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::problem::Problem;

/// Most files of one sync.
const FILES_MAX: usize = 200_000;
/// Bytes read at once.
const READ_BYTES: usize = 64 * 1024;
/// Never copied: the history of a repository, and what the box itself keeps there.
const LEFT_OUT: [&str; 2] = [".git", ".sbx"];

/// What is in a file, or where a symbolic link leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Content {
    /// A regular file.
    File {
        /// Bytes.
        size: u64,
        /// Permission bits.
        mode: u32,
        /// SHA-256 of its bytes, hex.
        sha256: String,
    },
    /// A symbolic link.
    Link {
        /// Where it leads.
        link: String,
    },
}

impl Content {
    pub(super) fn size(&self) -> u64 {
        match self {
            Self::File { size, .. } => *size,
            Self::Link { .. } => 0,
        }
    }

    /// Whether the other is of the same kind: then it can be written over.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        matches!(
            (self, other),
            (Self::File { .. }, Self::File { .. }) | (Self::Link { .. }, Self::Link { .. })
        )
    }
}

/// Files by their path below the folder.
pub(super) type Tree = BTreeMap<String, Content>;

/// What a folder has.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Local {
    pub(super) files: Tree,
    /// How many were left out for what they are: names that are no UTF-8, sockets, devices.
    pub(super) odd: usize,
}

/// Reads a folder. What `.gitignore` (there, above and below it) and `.git/info/exclude` leave out is left out, whether it is a
/// repository or not.
pub(super) fn read(folder: &Path) -> Result<Local, Problem> {
    let mut walk = WalkBuilder::new(folder);
    walk.hidden(false).ignore(false).git_global(false).require_git(false).follow_links(false);
    walk.filter_entry(|entry| {
        entry.depth() == 0 || !LEFT_OUT.iter().any(|name| entry.file_name() == *name)
    });
    let mut local = Local::default();
    for entry in walk.build() {
        let entry =
            entry.map_err(|error| Problem::new(format!("cannot read the folder: {error}")))?;
        let path = entry.path();
        let Ok(below) = path.strip_prefix(folder) else { continue };
        let kind = entry.file_type();
        if below.as_os_str().is_empty() || kind.is_some_and(|kind| kind.is_dir()) {
            continue;
        }
        let at =
            |error: io::Error| Problem::new(format!("cannot read {}: {error}", path.display()));
        let (name, kind) = match (below.to_str(), kind) {
            (Some(name), Some(kind)) if kind.is_file() || kind.is_symlink() => (name, kind),
            _ => {
                local.odd += 1;
                continue;
            }
        };
        let content = if kind.is_file() {
            file(path).map_err(at)?
        } else if let Some(link) = fs::read_link(path).map_err(at)?.to_str() {
            Content::Link { link: link.to_owned() }
        } else {
            local.odd += 1;
            continue;
        };
        local.files.insert(name.to_owned(), content);
        if local.files.len() > FILES_MAX {
            return Err(Problem::new(format!("{} has over {FILES_MAX} files", folder.display()))
                .hint("leave out with .gitignore what the box does not need, or copy a folder below it"));
        }
    }
    Ok(local)
}

fn file(path: &Path) -> io::Result<Content> {
    use std::fmt::Write as _;
    let mut file = File::open(path)?;
    let mode = file.metadata()?.permissions().mode() & 0o777;
    let (mut hash, mut size, mut piece) = (Sha256::new(), 0, vec![0; READ_BYTES]);
    loop {
        let read = file.read(&mut piece)?;
        if read == 0 {
            break;
        }
        hash.update(&piece[..read]);
        size += read as u64;
    }
    let sha256 = hash.finalize().iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    });
    Ok(Content::File { size, mode, sha256 })
}

/// Reads the arguments of a tool.
pub(super) fn arguments<T: DeserializeOwned>(mut given: JsonObject) -> Result<T, Problem> {
    // Models give `null` for what they leave out.
    given.retain(|_, value| !value.is_null());
    serde_json::from_value(Value::Object(given))
        .map_err(|error| Problem::new(format!("the call is not understood: {error}")))
}

/// A path of this machine, from the folder in which the adapter runs.
pub(super) fn at(folder: &Path, given: Option<&str>) -> PathBuf {
    given.map_or_else(|| folder.to_owned(), |given| folder.join(given))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_gitignore_leaves_out_is_left_out_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::write(path, text).expect("written");
        };
        write(".gitignore", "*.log\n/out/\n!keep.log\n");
        write("a.log", "");
        write("keep.log", "kept");
        write("src/.env", "X=1");
        write("src/.gitignore", "tmp\n");
        write("src/tmp/x", "");
        write("src/out/y", "not the one at the top");
        write("out/z", "");
        write(".git/config", "");
        write(".sbx/sync.json", "{}");
        std::os::unix::fs::symlink("src/.env", folder.path().join("link")).expect("linked");
        let local = read(folder.path()).expect("read");
        let names: Vec<&str> = local.files.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            [".gitignore", "keep.log", "link", "src/.env", "src/.gitignore", "src/out/y"]
        );
        assert_eq!(local.files["link"], Content::Link { link: "src/.env".into() });
        let Content::File { size, sha256, .. } = &local.files["keep.log"] else { panic!("a file") };
        assert_eq!((*size, &sha256[..8]), (4, "79f076ab"));
    }
}
