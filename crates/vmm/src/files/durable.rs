//! A file that is there whole or not at all, also after a power cut.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use super::FileError;

/// Writes `bytes` to `path`: into a temporary file beside it, synced, renamed over it, and the folder synced. Blocking.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let fresh = path.with_file_name(name);
    let mut file = File::create(&fresh).map_err(|error| FileError::new("create", &fresh, error))?;
    file.write_all(bytes).map_err(|error| FileError::new("write", &fresh, error))?;
    file.sync_all().map_err(|error| FileError::new("sync", &fresh, error))?;
    std::fs::rename(&fresh, path).map_err(|error| FileError::new("rename to", path, error))?;
    sync_folder(path.parent().unwrap_or(Path::new("/")))
}

/// Makes what was created, renamed or removed in a folder durable. Blocking.
pub fn sync_folder(folder: &Path) -> Result<(), FileError> {
    let folder_file =
        File::open(folder).map_err(|error| FileError::new("open folder", folder, error))?;
    folder_file.sync_all().map_err(|error| FileError::new("sync folder", folder, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_new_content_replaces_the_old_and_nothing_else_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("manifest.json");
        replace(&path, b"one").unwrap();
        replace(&path, b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_error_names_the_step_and_the_file() {
        let error = replace(Path::new("/no/such/folder/x"), b"").unwrap_err();
        assert_eq!(error.to_string(), "create \"/no/such/folder/x.new\"");
        assert!(!error.is_full());
    }
}
