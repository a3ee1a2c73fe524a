//! What is done with ext4 file systems of drives and volumes from outside, while no machine has them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use tokio::process::Command;

use crate::images::{ImageError, commands};

/// How long the removal of an empty folder may take.
const EMPTY_LIMIT: Duration = Duration::from_mins(1);

/// Whether nothing is left in the journal of the ext4 file system on a disk, so that it can be mounted without writing it.
pub(crate) fn is_clean(disk: &Path) -> io::Result<bool> {
    /// Where the superblock's word of incompatible features is.
    const FEATURES: u64 = 1024 + 0x60;
    /// The journal needs recovery.
    const RECOVER: u32 = 0x4;
    let mut word = [0; 4];
    File::open(disk)?.read_exact_at(&mut word, FEATURES)?;
    Ok(u32::from_le_bytes(word) & RECOVER == 0)
}

/// Removes the folder `lost+found` from a file system that was just made: databases refuse a folder that is not empty, and nobody has
/// put it there. Whoever repairs a file system makes one when there is something for it (e2fsck(8)).
pub(crate) async fn empty(disk: &Path) -> Result<(), ImageError> {
    let mut command = Command::new(commands::program("debugfs", "e2fsprogs")?);
    command.args(["-w", "-R", "rmdir lost+found"]).arg(disk);
    let doing = "empty the new file system (debugfs)";
    commands::run(command, doing, EMPTY_LIMIT, &mut |_| {}).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_new_one_is_empty_and_clean_until_it_is_mounted() {
        let folder = tempfile::tempdir().expect("folder");
        let disk = folder.path().join("disk");
        let run = |program: &'static str, arguments: &[&str]| {
            let program = commands::program(program, "e2fsprogs");
            let mut command = std::process::Command::new(program.expect("there"));
            let output = command.args(arguments).arg(&disk).output().expect("run");
            assert!(output.status.success(), "{output:?}");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        File::create(&disk).and_then(|disk| disk.set_len(16 << 20)).expect("made");
        run("mke2fs", &["-q", "-F", "-t", "ext4"]);
        assert!(run("debugfs", &["-R", "ls"]).contains("lost+found"));
        empty(&disk).await.expect("emptied");
        assert!(!run("debugfs", &["-R", "ls"]).contains("lost+found"));
        assert!(is_clean(&disk).expect("read"));
        let file = File::options().write(true).open(&disk).expect("opened");
        file.write_all_at(&[0x46], 1024 + 0x60).expect("as one that is mounted");
        assert!(!is_clean(&disk).expect("read"));
    }
}
