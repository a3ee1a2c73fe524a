//! The host's TSC rate.
//!
//! A guest's kernel is told it (`tsc_early_khz`), because its own measurement fails on a busy host and the boot then hangs. The host kernel has
//! measured it well, but says so only in its log; where that is gone or barred it is measured here against the raw monotonic clock.
#![expect(unsafe_code, reason = "the rdtsc instruction")]

use std::io;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::KnownTsc;

/// How long to measure. The two readings are each right to some 100 ns, so this gives a few ppm.
const MEASURE: Duration = Duration::from_millis(50);
/// How often to measure; the middle one counts, so that one or two disturbed ones do not.
const ROUNDS: usize = 5;

/// The rate in kHz: as known for this boot, else from the kernel's log, else measured (a quarter of a second). Blocking.
pub(super) fn khz(known: Option<&KnownTsc>) -> io::Result<KnownTsc> {
    let boot_id = crate::process::boot_id()?;
    if let Some(known) = known.filter(|known| known.boot_id == boot_id && known.khz > 0) {
        return Ok(known.clone());
    }
    let khz = from_log().map_or_else(measure, Ok)?;
    Ok(KnownTsc { boot_id, khz })
}

/// From `/dev/kmsg`. None if it may not be read or has forgotten the beginning.
fn from_log() -> Option<u32> {
    use std::io::Read as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let mut log = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/kmsg")
        .ok()?;
    let mut best = None;
    // One record a read; the end is EAGAIN, a record that was overwritten meanwhile is EPIPE.
    let mut record = [0; 8192];
    loop {
        match log.read(&mut record) {
            Ok(0) => return best,
            Ok(bytes) => best = parse(&String::from_utf8_lossy(&record[..bytes])).or(best),
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
            Err(_) => return best,
        }
    }
}

/// `tsc: Detected 2596.094 MHz processor`, later perhaps `tsc: Refined TSC clocksource calibration: 2596.121 MHz`.
fn parse(record: &str) -> Option<u32> {
    let (_, rest) = record.split_once("tsc: ")?;
    let number = rest
        .strip_prefix("Detected ")
        .or_else(|| rest.strip_prefix("Refined TSC clocksource calibration: "))?;
    let (mhz, thousandths) = number.split_once(" MHz")?.0.split_once('.')?;
    if thousandths.len() != 3 {
        return None;
    }
    mhz.parse::<u32>()
        .ok()?
        .checked_mul(1000)?
        .checked_add(thousandths.parse().ok()?)
        .filter(|&khz| khz > 0)
}

fn measure() -> io::Result<u32> {
    let mut rounds = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let (start_ns, start) = reading();
        #[expect(
            clippy::disallowed_methods,
            reason = "the time itself is what is measured; the function is blocking and says so"
        )]
        std::thread::sleep(MEASURE);
        let (end_ns, end) = reading();
        let elapsed = end_ns.saturating_sub(start_ns).max(1);
        rounds.push(u128::from(end.wrapping_sub(start)) * 1_000_000 / elapsed);
    }
    rounds.sort_unstable();
    u32::try_from(rounds[ROUNDS / 2])
        .ok()
        .filter(|&khz| khz > 100_000)
        .ok_or_else(|| io::Error::other("the time stamp counter does not run at a plausible rate"))
}

/// Clock and counter at the same moment, as nearly as one try of several comes to it.
fn reading() -> (u128, u64) {
    let mut best = (u64::MAX, 0, 0);
    for _ in 0..16 {
        let before = counter();
        let time = clock_gettime(ClockId::MonotonicRaw);
        let after = counter();
        let gap = after.wrapping_sub(before);
        if gap < best.0 {
            let nanoseconds = u128::from(time.tv_sec.unsigned_abs()) * 1_000_000_000
                + u128::from(time.tv_nsec.unsigned_abs());
            best = (gap, nanoseconds, before.wrapping_add(gap / 2));
        }
    }
    (best.1, best.2)
}

#[cfg(target_arch = "x86_64")]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, Linux lets programs use it, and it touches no memory.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_words_are_understood() {
        assert_eq!(parse("6,1,65,-;tsc: Detected 2596.094 MHz processor\n"), Some(2_596_094));
        assert_eq!(
            parse("6,1,65,-;tsc: Refined TSC clocksource calibration: 1996.250 MHz\n"),
            Some(1_996_250)
        );
        for other in [
            "",
            "tsc: Fast TSC calibration using PIT",
            "tsc: Detected x MHz",
            "tsc: Detected 2.5 MHz",
            "tsc: Detected 4294968.000 MHz",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn measured_and_logged_rate_agree_to_a_thousandth() {
        let measured = measure().unwrap();
        // Where the log is barred there is nothing to compare with; then two measurements must agree.
        let other = from_log().map_or_else(measure, Ok).unwrap();
        let apart = u64::from(measured.abs_diff(other)) * 1000;
        assert!(apart < u64::from(measured), "{measured} against {other}");
    }

    #[test]
    fn what_is_known_for_this_boot_is_taken() {
        let known = KnownTsc { boot_id: crate::process::boot_id().unwrap(), khz: 1_234_567 };
        assert_eq!(khz(Some(&known)).unwrap(), known);
        let older = KnownTsc { boot_id: "another".into(), khz: 1_234_567 };
        assert_ne!(khz(Some(&older)).unwrap().khz, 1_234_567);
    }
}
