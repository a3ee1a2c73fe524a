//! The installed QEMU: what it is, what it runs on, and what a stored state must match.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

mod discover;
mod keep;
mod tsc;

pub use keep::kept_name;

/// An installed QEMU that was looked at once.
#[derive(Debug, Clone)]
pub struct Qemu {
    pub(crate) binary: PathBuf,
    pub(crate) image_tool: PathBuf,
    pub(crate) data_dirs: Vec<PathBuf>,
    /// Its firmware.
    pub(crate) firmware: PathBuf,
    /// Where it finds its modules (`QEMU_MODULE_DIR`); `None`: where it was built to.
    pub(crate) modules: Option<PathBuf>,
    pub(crate) version: Version,
    pub(crate) accelerator: Accelerator,
    pub(crate) binary_digest: String,
    pub(crate) firmware_digest: String,
    pub(crate) tsc_khz: u32,
    pub(crate) known: Known,
}

/// QEMU's version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 7 of 7.2.22
    pub major: u32,
    /// 2 of 7.2.22
    pub minor: u32,
    /// 22 of 7.2.22
    pub micro: u32,
}

/// What runs the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

/// Where to look. All None: `qemu-system-x86_64` and `qemu-img` on `PATH`, with QEMU's own search for its data.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// The emulator.
    pub binary: Option<PathBuf>,
    /// `qemu-img`. None: beside the emulator, else on `PATH`.
    pub image_tool: Option<PathBuf>,
    /// Folders with QEMU's data and firmware (`-L`), in order. Empty: QEMU's own.
    pub data_dirs: Vec<PathBuf>,
}

/// What is costly to find out and does not change. The caller keeps it (as JSON) and hands it in at the next start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Known {
    /// The host's TSC rate and the boot it was measured in.
    pub tsc: Option<KnownTsc>,
    /// SHA-256 by path.
    pub digests: BTreeMap<PathBuf, KnownDigest>,
}

/// A TSC rate, good for one boot of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownTsc {
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
    /// kHz.
    pub khz: u32,
}

/// A digest, good while size and time of change are the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownDigest {
    /// Bytes.
    pub size: u64,
    /// Nanoseconds since 1970.
    pub modified_ns: i128,
    /// Hexadecimal.
    pub sha256: String,
}

/// What a stored state was made with. It goes into manifests; a state is only restored where [`Fingerprint::compatible`] agrees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Such as `7.2.22`.
    pub qemu_version: String,
    /// SHA-256 of the emulator, hexadecimal.
    pub binary_sha256: String,
    /// SHA-256 of the firmware image microvm loads, hexadecimal.
    pub firmware_sha256: String,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// The `-cpu` argument.
    pub cpu_model: String,
    /// Machine type, processors, memory and devices: all of the command line that shapes the state.
    pub machine_line: String,
    /// The host's TSC rate in kHz, which the guest took for its own when it booted.
    pub tsc_khz: u32,
}

/// The first thing in which a state's fingerprint differs from this host's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// Another QEMU version.
    #[error("saved by QEMU {saved}, here is {here}")]
    QemuVersion {
        /// In the state.
        saved: String,
        /// On this host.
        here: String,
    },
    /// The same version, built differently.
    #[error("saved by another build of QEMU ({saved}, here is {here})")]
    Binary {
        /// In the state.
        saved: String,
        /// On this host.
        here: String,
    },
    /// Other firmware.
    #[error("saved with other firmware ({saved}, here is {here})")]
    Firmware {
        /// In the state.
        saved: String,
        /// On this host.
        here: String,
    },
    /// KVM against TCG.
    #[error("saved under {saved}, this host has {here}")]
    Accelerator {
        /// In the state.
        saved: String,
        /// On this host.
        here: String,
    },
    /// Another `-cpu`.
    #[error("saved with processor {saved}, this host gives {here}")]
    CpuModel {
        /// In the state.
        saved: String,
        /// On this host.
        here: String,
    },
    /// Other devices, memory or processors.
    #[error("saved as machine {saved:?}, asked for {here:?}")]
    MachineLine {
        /// In the state.
        saved: String,
        /// On this host.
        here: String,
    },
    /// The guest's clock would run at another rate.
    #[error("saved at a TSC rate of {saved} kHz, this host has {here} kHz")]
    TscRate {
        /// In the state.
        saved: u32,
        /// On this host.
        here: u32,
    },
}

/// By how much two TSC rates may differ, in parts per million. The same host measures some tens of ppm apart from boot to boot, and the
/// guest's time service corrects up to 500.
pub const TSC_TOLERANCE_PPM: u64 = 200;

/// Why an installed QEMU cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiscoverError {
    /// Not on `PATH`, or not where it was said to be.
    #[error("{program} not found; install the package {package}")]
    Absent {
        /// What was looked for.
        program: String,
        /// Debian's package that has it.
        package: &'static str,
    },
    /// A file or the clock could not be read.
    #[error("{doing}")]
    System {
        /// What was being done.
        doing: String,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// `--version` said something else.
    #[error("no version in what {binary:?} says: {said:?}")]
    Version {
        /// The emulator.
        binary: PathBuf,
        /// Its words.
        said: String,
    },
    /// Too old.
    #[error("QEMU {found} is too old: expected 7.2 or later")]
    TooOld {
        /// Its version.
        found: Version,
    },
    /// None of the data folders has microvm's firmware.
    #[error("bios-microvm.bin not found in {searched:?}; install the package seabios")]
    Firmware {
        /// Where it was looked for.
        searched: Vec<PathBuf>,
    },
}

impl Qemu {
    /// Version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The emulator's path.
    pub fn binary(&self) -> &Path {
        &self.binary
    }

    /// `qemu-img`'s path.
    pub fn image_tool(&self) -> &Path {
        &self.image_tool
    }

    /// What will run the guest's instructions.
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// The host's TSC rate, kHz.
    pub fn tsc_khz(&self) -> u32 {
        self.tsc_khz
    }

    /// What to keep for the next [`Qemu::discover`].
    pub fn known(&self) -> &Known {
        &self.known
    }

    /// The `-cpu` argument. QEMU 7's TCG corrupts the flags in `cmpxchg16b`, so the guest must not see that instruction there.
    pub fn cpu_model(&self) -> &'static str {
        match self.accelerator {
            Accelerator::Kvm => "host",
            Accelerator::Tcg if self.version.major < 8 => "max,-cx16",
            Accelerator::Tcg => "max",
        }
    }

    /// What a state saved by a machine of this shape will depend on.
    pub fn fingerprint(&self, spec: &crate::MachineSpec) -> Fingerprint {
        Fingerprint {
            qemu_version: self.version.to_string(),
            binary_sha256: self.binary_digest.clone(),
            firmware_sha256: self.firmware_digest.clone(),
            accelerator: self.accelerator.to_string(),
            cpu_model: self.cpu_model().to_owned(),
            machine_line: crate::command::machine_line(spec),
            tsc_khz: self.tsc_khz,
        }
    }

    /// The argument in a machine's command line that no other machine has; see [`crate::ProcessId::find`].
    pub fn memory_argument(spec: &crate::MachineSpec) -> String {
        crate::command::memory_argument(spec)
    }
}

impl Fingerprint {
    /// Whether a state with this fingerprint can be restored where `here` is the fingerprint.
    pub fn compatible(&self, here: &Self) -> Result<(), Mismatch> {
        fn differ<T: PartialEq + Clone>(
            saved: &T,
            here: &T,
            build: impl Fn(T, T) -> Mismatch,
        ) -> Result<(), Mismatch> {
            if saved == here { Ok(()) } else { Err(build(saved.clone(), here.clone())) }
        }
        differ(&self.qemu_version, &here.qemu_version, |saved, here| Mismatch::QemuVersion {
            saved,
            here,
        })?;
        differ(&self.binary_sha256, &here.binary_sha256, |saved, here| Mismatch::Binary {
            saved,
            here,
        })?;
        differ(&self.firmware_sha256, &here.firmware_sha256, |saved, here| Mismatch::Firmware {
            saved,
            here,
        })?;
        differ(&self.accelerator, &here.accelerator, |saved, here| Mismatch::Accelerator {
            saved,
            here,
        })?;
        differ(&self.cpu_model, &here.cpu_model, |saved, here| Mismatch::CpuModel { saved, here })?;
        differ(&self.machine_line, &here.machine_line, |saved, here| Mismatch::MachineLine {
            saved,
            here,
        })?;
        let apart = u64::from(self.tsc_khz.abs_diff(here.tsc_khz));
        if apart * 1_000_000 > u64::from(self.tsc_khz) * TSC_TOLERANCE_PPM {
            return Err(Mismatch::TscRate { saved: self.tsc_khz, here: here.tsc_khz });
        }
        Ok(())
    }
}

/// The kernel parameters every guest needs; the caller adds its own (root, console level, …).
///
/// Measured reasons: without `tsc_early_khz` a busy host makes the boot hang for good; `panic=-1` and `reboot=t` make a panic end the machine at once;
/// `nowatchdog` and `rcu_cpu_stall_suppress` keep a kernel quiet whose clock jumped by hours; `cryptomgr.notests` saves 0.3 s of boot; without
/// `edd=off` the kernel asks the firmware for disks before it does anything else, which with QEMU 10 and 2 GiB of memory resets the machine.
pub fn kernel_parameters(tsc_khz: u32) -> String {
    format!(
        "console=ttyS0 panic=-1 reboot=t tsc_early_khz={tsc_khz} tsc=reliable no_timer_check 8250.nr_uarts=1 nowatchdog \
         rcupdate.rcu_cpu_stall_suppress=1 cryptomgr.notests=1 edd=off"
    )
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

impl std::fmt::Display for Accelerator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint() -> Fingerprint {
        Fingerprint {
            qemu_version: "7.2.22".into(),
            binary_sha256: "aa".into(),
            firmware_sha256: "bb".into(),
            accelerator: "tcg".into(),
            cpu_model: "max,-cx16".into(),
            machine_line: "microvm".into(),
            tsc_khz: 2_596_094,
        }
    }

    #[test]
    fn each_field_that_differs_is_named() {
        type Change = fn(&mut Fingerprint);
        let here = fingerprint();
        assert_eq!(here.compatible(&here), Ok(()));
        let changes: [(Change, &str); 7] = [
            (|f| f.qemu_version = "10.0.2".into(), "saved by QEMU 10.0.2, here is 7.2.22"),
            (|f| f.binary_sha256 = "cc".into(), "saved by another build of QEMU (cc, here is aa)"),
            (|f| f.firmware_sha256 = "cc".into(), "saved with other firmware (cc, here is bb)"),
            (|f| f.accelerator = "kvm".into(), "saved under kvm, this host has tcg"),
            (|f| f.cpu_model = "max".into(), "saved with processor max, this host gives max,-cx16"),
            (|f| f.machine_line = "q35".into(), "saved as machine \"q35\", asked for \"microvm\""),
            (
                |f| f.tsc_khz = 2_600_000,
                "saved at a TSC rate of 2600000 kHz, this host has 2596094 kHz",
            ),
        ];
        for (change, text) in changes {
            let mut saved = fingerprint();
            change(&mut saved);
            assert_eq!(saved.compatible(&here).unwrap_err().to_string(), text);
        }
    }

    #[test]
    fn two_boots_of_one_host_agree_on_the_tsc_rate() {
        let saved = Fingerprint { tsc_khz: 2_596_122, ..fingerprint() };
        assert_eq!(saved.compatible(&fingerprint()), Ok(()));
    }
}
