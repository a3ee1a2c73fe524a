//! Takes room away on the disk under the data folder.

use std::io::Write;
use std::path::PathBuf;

use crate::lab::Lab;

/// A file that takes room, and gives it back when dropped.
#[derive(Debug)]
pub struct Filler(PathBuf);

impl Filler {
    /// Takes all that is left.
    #[track_caller]
    pub fn fill(lab: &Lab) -> Self {
        Self::fill_but(lab, 0)
    }

    /// Leaves about so many MiB.
    #[track_caller]
    pub fn fill_but(lab: &Lab, mib: u64) -> Self {
        let path = lab.data().join("filler");
        let mut file = std::fs::File::create(&path).expect("a filler");
        let block = vec![1_u8; 64 * 1024];
        let mut size = block.len();
        while size > 0 {
            let stat = rustix::fs::statvfs(lab.data()).expect("free space");
            if stat.f_bavail * stat.f_frsize <= mib << 20 && mib > 0 {
                break;
            }
            if file.write_all(&block[..size]).is_err() {
                size /= 2;
            }
        }
        Self(path)
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).expect("the filler goes");
    }
}
