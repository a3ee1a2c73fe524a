//! Whether an account that owns nothing can get to a file: QEMU's account must be able to enter every folder on the way.
//!
//! A home of mode 0700 is the usual obstacle, and QEMU's own word for it (`Permission denied`, of the file) names everything but
//! the folder.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Others may enter.
const ENTER: u32 = 0o001;

/// A folder that others may not enter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closed {
    /// Which.
    pub folder: PathBuf,
    /// Its mode, without the file's type.
    pub mode: u32,
}

/// The topmost folder on the way to a path, and the path itself if it is one, that others may not enter; `None`: the way is
/// free. What is not there yet is no obstacle: it will be made so that it is none. Access lists are not looked at.
///
/// # Errors
///
/// What is there cannot be looked at.
pub fn closed_to_others(path: &Path) -> io::Result<Option<Closed>> {
    let there = path.ancestors().find(|ancestor| ancestor.exists());
    let Some(there) = there else { return Ok(None) };
    // Where links lead counts, not where they stand.
    let real = there.canonicalize()?;
    let mut way: Vec<&Path> = real.ancestors().collect();
    way.reverse();
    for folder in way {
        let meta = folder.metadata()?;
        if meta.is_dir() && meta.mode() & ENTER == 0 {
            let mode = meta.mode() & 0o7777;
            return Ok(Some(Closed { folder: folder.to_owned(), mode }));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, create_dir, create_dir_all, set_permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn the_closed_folder_is_named() {
        let root = tempfile::tempdir().unwrap();
        set_permissions(root.path(), Permissions::from_mode(0o711)).unwrap();
        let home = root.path().join("home");
        create_dir_all(home.join("data")).unwrap();
        set_permissions(&home, Permissions::from_mode(0o711)).unwrap();
        assert_eq!(closed_to_others(&home.join("data/images/not-yet")).unwrap(), None);

        set_permissions(&home, Permissions::from_mode(0o700)).unwrap();
        let closed = Some(Closed { folder: home.canonicalize().unwrap(), mode: 0o700 });
        assert_eq!(closed_to_others(&home.join("data/not-yet")).unwrap(), closed);
        let link = root.path().join("link");
        symlink(home.join("data"), &link).unwrap();
        assert_eq!(closed_to_others(&link.join("x")).unwrap(), closed);

        let beside = root.path().join("beside");
        create_dir(&beside).unwrap();
        assert_eq!(closed_to_others(&beside).unwrap(), None);
    }
}
