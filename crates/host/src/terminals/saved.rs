//! Screens on disk: so that a daemon that starts knows what is on the terminals of a sandbox that sleeps.
//!
//! A file is an aid, not a promise: the guest keeps the output, and a screen that is older than that is brought up to date
//! when the sandbox is awake. So nothing is synced, and what cannot be read is left out.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use api::exec::Exit;
use api::terminal::TerminalSize;
use serde::{Deserialize, Serialize};

/// Largest file that is read: the largest screen with a colour for each character, and some room.
const FILE_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// One terminal.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Saved {
    /// Number of its exec.
    pub(super) id: u64,
    pub(super) pid: u32,
    pub(super) command: String,
    pub(super) size: TerminalSize,
    /// Bytes of output that the screen has seen.
    pub(super) offset: u64,
    /// What draws the screen.
    pub(super) drawing: String,
    pub(super) exit: Option<Exit>,
}

/// Writes one, whole or not at all.
pub(super) fn write(file: &Path, saved: &Saved) -> io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    // What somebody looks at is nobody else's business: the folder above may be passed through by guests' accounts.
    match std::fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let draft = file.with_extension("new");
    std::fs::write(&draft, serde_json::to_vec(saved).map_err(io::Error::other)?)?;
    std::fs::rename(&draft, file)
}

/// Reads all in a folder.
pub(super) fn read(folder: &Path) -> Vec<Saved> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let files = entries.flatten().map(|entry| entry.path());
    files
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .filter_map(|path| match read_one(&path) {
            Ok(saved) => Some(saved),
            Err(error) => {
                tracing::warn!(file = %path.display(), %error, "a terminal's screen was not read");
                None
            }
        })
        .collect()
}

/// Where one lies.
pub(super) fn file(folder: &Path, id: u64) -> PathBuf {
    folder.join(format!("{id:016x}.json"))
}

fn read_one(path: &Path) -> io::Result<Saved> {
    if std::fs::metadata(path)?.len() > FILE_BYTES_MAX {
        return Err(io::Error::other("too large"));
    }
    serde_json::from_slice(&std::fs::read(path)?).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_damage_costs_one() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("terminals");
        assert_eq!(read(&folder), []);
        let saved = Saved {
            id: 7,
            pid: 12,
            command: "login shell".into(),
            size: TerminalSize { columns: 80, rows: 24 },
            offset: 5,
            drawing: "\u{1b}[Hü".into(),
            exit: None,
        };
        write(&file(&folder, 7), &saved).unwrap();
        write(&file(&folder, 7), &saved).unwrap();
        std::fs::write(file(&folder, 8), "{").unwrap();
        assert_eq!(read(&folder), [saved]);
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&folder).unwrap());
        assert_eq!(mode & 0o777, 0o700);
    }
}
