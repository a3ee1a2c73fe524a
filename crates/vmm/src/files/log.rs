//! Logs that others append to, kept short.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use super::FileError;

/// Cuts a file that has more than `max` bytes to its last `kept`. True if it did. A missing file is short.
///
/// Whoever writes it meanwhile must append (`O_APPEND`): the cut happens in place, and what is written in that instant may come before the kept part or be lost. Blocking.
pub fn shorten_log(path: &Path, max: u64, kept: u64) -> Result<bool, FileError> {
    let file = match File::options().read(true).append(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(FileError::new("open", path, error)),
    };
    let length = file.metadata().map_err(|error| FileError::new("look at", path, error))?.len();
    if length <= max {
        return Ok(false);
    }
    cut(file, length, kept).map_err(|error| FileError::new("cut", path, error))?;
    Ok(true)
}

fn cut(mut file: File, length: u64, kept: u64) -> std::io::Result<()> {
    file.seek(SeekFrom::Start(length.saturating_sub(kept)))?;
    let mut tail = Vec::new();
    (&mut file).take(kept).read_to_end(&mut tail)?;
    file.set_len(0)?;
    file.write_all(&tail)
}

/// The last words in a log, for an error's text. Empty if there are none.
pub(crate) fn log_tail(path: &Path, bytes: u64) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(bytes)))?;
        let mut tail = Vec::new();
        file.take(bytes).read_to_end(&mut tail)?;
        Ok(tail)
    };
    read().map(|tail| String::from_utf8_lossy(&tail).trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_log_keeps_its_end_and_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console");
        let mut writer = File::options().create(true).append(true).open(&path).unwrap();
        writer.write_all(b"0123456789").unwrap();
        assert!(!shorten_log(&path, 10, 4).unwrap());
        writer.write_all(b"ab").unwrap();
        assert!(shorten_log(&path, 10, 4).unwrap());
        writer.write_all(b"c").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"89abc");
        assert_eq!(log_tail(&path, 3), "abc");
        assert!(!shorten_log(&folder.path().join("none"), 1, 1).unwrap());
    }
}
