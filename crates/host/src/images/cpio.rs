//! The archive that Linux unpacks as its first root folder: cpio in the "new ASCII" form.
//!
//! The format is a header of 13 hexadecimal numbers of eight digits, the name, and the content, each padded
//! to four bytes, as described in the kernel's `Documentation/driver-api/early-userspace/buffer-format.rst`.
//! Times are zero and inode numbers count up, so the same content gives the same bytes.

/// Type bits of a folder in a mode.
const FOLDER: u32 = 0o040_000;
/// Type bits of a regular file in a mode.
const FILE: u32 = 0o100_000;
/// Type bits of a character device in a mode.
const CHARACTER_DEVICE: u32 = 0o020_000;

/// Writes an archive in memory: an initial RAM disk is a few MiB.
#[derive(Debug, Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// A folder that belongs to root. Parents must be added first.
    pub(super) fn folder(&mut self, name: &str, permissions: u32) {
        self.entry(name, FOLDER | permissions, (0, 0), &[]);
    }

    /// A regular file that belongs to root. Parents must be added first.
    pub(super) fn file(&mut self, name: &str, permissions: u32, content: &[u8]) {
        self.entry(name, FILE | permissions, (0, 0), content);
    }

    /// A character device with its major and minor number.
    pub(super) fn character_device(&mut self, name: &str, permissions: u32, device: (u32, u32)) {
        self.entry(name, CHARACTER_DEVICE | permissions, device, &[]);
    }

    /// Ends the archive.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size =
            u32::try_from(content.len()).expect("a part of the initial RAM disk is below 4 GiB");
        let name_size = u32::try_from(name.len() + 1).expect("names are ours and short");
        let links = if mode & FOLDER == FOLDER { 2 } else { 1 };
        let (owner, group, time, checksum) = (0, 0, 0, 0);
        let numbers = [
            self.entries,
            mode,
            owner,
            group,
            links,
            time,
            size,
            0,
            0,
            device.0,
            device.1,
            name_size,
            checksum,
        ];
        self.bytes.extend_from_slice(b"070701");
        for number in numbers {
            self.bytes.extend_from_slice(format!("{number:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    /// To the next multiple of four.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Name, mode, device and content.
    type Entry = (String, u32, (u32, u32), Vec<u8>);

    /// Reads an archive the way the kernel does.
    fn read(mut bytes: &[u8]) -> Vec<Entry> {
        let whole = bytes.len();
        let mut entries = Vec::new();
        loop {
            assert_eq!(&bytes[..6], b"070701");
            let number = |i: usize| {
                let digits = std::str::from_utf8(&bytes[6 + 8 * i..14 + 8 * i]).unwrap();
                u32::from_str_radix(digits, 16).unwrap()
            };
            let (mode, size, name_size) = (number(1), number(6) as usize, number(11) as usize);
            let device = (number(9), number(10));
            let name = std::str::from_utf8(&bytes[110..110 + name_size - 1]).unwrap().to_owned();
            assert_eq!(bytes[110 + name_size - 1], 0);
            let start = (110 + name_size).next_multiple_of(4);
            let content = bytes[start..start + size].to_vec();
            let next = (start + size).next_multiple_of(4);
            if name == "TRAILER!!!" {
                assert_eq!(bytes.len(), next, "nothing follows the trailer");
                assert_eq!(whole % 4, 0);
                return entries;
            }
            entries.push((name, mode, device, content));
            bytes = &bytes[next..];
        }
    }

    #[test]
    fn what_is_put_in_comes_out() {
        let mut archive = Archive::default();
        archive.folder("dev", 0o755);
        archive.character_device("dev/console", 0o600, (5, 1));
        for length in 0..6 {
            archive.file(&format!("f{}", "x".repeat(length)), 0o755, &vec![7; length]);
        }
        let entries = read(&archive.finish());
        assert_eq!(entries[0], ("dev".to_owned(), 0o040_755, (0, 0), vec![]));
        assert_eq!(entries[1], ("dev/console".to_owned(), 0o020_600, (5, 1), vec![]));
        for (length, entry) in entries[2..].iter().enumerate() {
            let name = format!("f{}", "x".repeat(length));
            assert_eq!(*entry, (name, 0o100_755, (0, 0), vec![7; length]));
        }
        assert_eq!(entries.len(), 8);
    }
}
