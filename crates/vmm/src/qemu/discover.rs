//! Looks at the installed QEMU, once, at the daemon's start.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::UNIX_EPOCH;

use super::{Accelerator, DiscoverError, Known, KnownDigest, Places, Qemu, Version};
use crate::state::Digest;

/// The firmware that microvm loads.
pub(super) const FIRMWARE: &str = "bios-microvm.bin";
/// The oldest version this was measured with.
const OLDEST: Version = Version { major: 7, minor: 2, micro: 0 };

impl Qemu {
    /// Looks at QEMU and the host. Blocking: up to a second at first, some milliseconds with [`Known`] from the last time.
    pub fn discover(places: &Places, known: Known) -> Result<Self, DiscoverError> {
        let mut known = known;
        let binary = match &places.binary {
            Some(path) => existing(path, "qemu-system-x86")?,
            None => on_path("qemu-system-x86_64", "qemu-system-x86")?,
        };
        let image_tool = match &places.image_tool {
            Some(path) => existing(path, "qemu-utils")?,
            None => match binary.with_file_name("qemu-img") {
                beside if beside.is_file() => beside,
                _ => on_path("qemu-img", "qemu-utils")?,
            },
        };
        let version = version(&binary)?;
        if version < OLDEST {
            return Err(DiscoverError::TooOld { found: version });
        }
        let firmware = firmware(&binary, &places.data_dirs)?;
        let tsc = super::tsc::khz(known.tsc.as_ref())
            .map_err(|source| system("measure the TSC rate", source))?;
        let tsc_khz = tsc.khz;
        known.tsc = Some(tsc);
        let binary_digest = digest(&mut known, &binary)?;
        let firmware_digest = digest(&mut known, &firmware)?;
        known.digests.retain(|path, _| *path == binary || *path == firmware);
        Ok(Self {
            binary,
            image_tool,
            data_dirs: places.data_dirs.clone(),
            firmware,
            modules: None,
            version,
            accelerator: accelerator(),
            binary_digest,
            firmware_digest,
            tsc_khz,
            known,
        })
    }

    /// An emulator at a place of its own, with its data folders (`-L`).
    pub fn at(binary: &Path, data_dirs: &[PathBuf], known: Known) -> Result<Self, DiscoverError> {
        let places = Places {
            binary: Some(binary.to_owned()),
            image_tool: None,
            data_dirs: data_dirs.to_owned(),
        };
        Self::discover(&places, known)
    }
}

fn system(doing: impl Into<String>, source: io::Error) -> DiscoverError {
    DiscoverError::System { doing: doing.into(), source }
}

fn existing(path: &Path, package: &'static str) -> Result<PathBuf, DiscoverError> {
    if path.is_file() {
        Ok(path.to_owned())
    } else {
        Err(DiscoverError::Absent { program: path.display().to_string(), package })
    }
}

fn on_path(program: &str, package: &'static str) -> Result<PathBuf, DiscoverError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| DiscoverError::Absent { program: program.to_owned(), package })
}

fn version(binary: &Path) -> Result<Version, DiscoverError> {
    let output = Command::new(binary)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|source| system(format!("run {} --version", binary.display()), source))?;
    let said =
        String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned();
    parse_version(&said).ok_or_else(|| DiscoverError::Version { binary: binary.to_owned(), said })
}

/// `QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)`
fn parse_version(said: &str) -> Option<Version> {
    let numbers = said.strip_prefix("QEMU emulator version ")?.split_ascii_whitespace().next()?;
    let mut numbers = numbers.split('.').map(str::parse);
    let mut next = || numbers.next()?.ok();
    Some(Version { major: next()?, minor: next()?, micro: next()? })
}

/// KVM where the processor has it *and* the kernel lets us: a `/dev/kvm` alone says nothing (it opens inside some containers without the hardware).
fn accelerator() -> Accelerator {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let opens = || std::fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
    if has_virtualization(&cpuinfo) && opens() { Accelerator::Kvm } else { Accelerator::Tcg }
}

fn has_virtualization(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|line| {
        line.split_ascii_whitespace().any(|flag| flag == "vmx" || flag == "svm")
    })
}

/// In the data folders given, else where QEMU itself says that it searches.
fn firmware(binary: &Path, data_dirs: &[PathBuf]) -> Result<PathBuf, DiscoverError> {
    let mut searched = data_dirs.to_owned();
    if searched.is_empty() {
        let output = Command::new(binary)
            .args(["-L", "help"])
            .stdin(Stdio::null())
            .output()
            .map_err(|source| system(format!("run {} -L help", binary.display()), source))?;
        searched = String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect();
    }
    let found = searched.iter().map(|folder| folder.join(FIRMWARE)).find(|path| path.is_file());
    found.ok_or(DiscoverError::Firmware { searched })
}

fn digest(known: &mut Known, path: &Path) -> Result<String, DiscoverError> {
    let fail = |source| system(format!("read {}", path.display()), source);
    let file = std::fs::File::open(path).map_err(fail)?;
    let metadata = file.metadata().map_err(fail)?;
    let modified_ns = modified_ns(&metadata).map_err(fail)?;
    if let Some(known) = known.digests.get(path)
        && (known.size, known.modified_ns) == (metadata.len(), modified_ns)
    {
        return Ok(known.sha256.clone());
    }
    let sha256 = Digest::of_reader(file).map_err(fail)?.to_string();
    known.digests.insert(
        path.to_owned(),
        KnownDigest { size: metadata.len(), modified_ns, sha256: sha256.clone() },
    );
    Ok(sha256)
}

/// When a file was changed last, nanoseconds since 1970.
pub(super) fn modified_ns(metadata: &std::fs::Metadata) -> io::Result<i128> {
    Ok(match metadata.modified()?.duration_since(UNIX_EPOCH) {
        Ok(after) => i128::try_from(after.as_nanos()).unwrap_or(i128::MAX),
        Err(before) => -i128::try_from(before.duration().as_nanos()).unwrap_or(i128::MAX),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_as_distributions_write_them() {
        let of = |said| parse_version(said).map(|version| version.to_string());
        assert_eq!(
            of("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)").as_deref(),
            Some("7.2.22")
        );
        assert_eq!(of("QEMU emulator version 10.0.2").as_deref(), Some("10.0.2"));
        assert_eq!(of("QEMU emulator version 10"), None);
        assert_eq!(of("bash: not found"), None);
    }

    #[test]
    fn only_a_whole_flag_counts() {
        assert!(has_virtualization("processor : 0\nflags\t\t: fpu vme svm nx\n"));
        assert!(!has_virtualization("flags\t\t: fpu vmxoff svm_lock\nbugs : vmx\n"));
        assert!(!has_virtualization(""));
    }

    #[test]
    fn a_program_that_is_missing_is_named_with_its_package() {
        let error = Qemu::at(Path::new("/no/qemu"), &[], Known::default()).unwrap_err();
        assert_eq!(error.to_string(), "/no/qemu not found; install the package qemu-system-x86");
    }

    #[test]
    fn a_digest_is_kept_until_the_file_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "one").unwrap();
        let mut known = Known::default();
        let first = digest(&mut known, &path).unwrap();
        // A wrong value in what is known shows that the file was not read again.
        known.digests.get_mut(&path).unwrap().sha256 = "remembered".into();
        assert_eq!(digest(&mut known, &path).unwrap(), "remembered");
        std::fs::write(&path, "three").unwrap();
        assert_ne!(digest(&mut known, &path).unwrap(), first);
        assert_eq!(known.digests.len(), 1);
    }
}
