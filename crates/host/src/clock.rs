//! The clocks that decisions rest on.
//!
//! Deadlines and idle times use the clock that counts on through a suspend of the host and knows no steps. How long
//! something slept is measured on it too, as long as the host was not booted in between; only then the wall clock decides.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// By how much the wall clock must have moved against the clock that counts since boot before it counts as set, milliseconds:
/// more than a busy host lets pass between two looks at clocks, and less than anybody takes for the same time.
const STEP_MIN_MS: u64 = 1000;

/// A moment, on every clock of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// Milliseconds of the clock that counts since this boot of the host.
    pub boot_ms: u64,
    /// Which boot of the host.
    pub boot_id: String,
    /// Milliseconds since 1970 of the wall clock.
    pub unix_ms: u64,
}

impl Moment {
    /// Now.
    pub fn now() -> Self {
        Self { boot_ms: since_boot_ms(), boot_id: boot_id(), unix_ms: unix_ms() }
    }

    /// How long ago this moment was: exact within one boot of the host, by the wall clock after that (never negative).
    pub fn elapsed(&self) -> Duration {
        let now = Self::now();
        let ms = if now.boot_id == self.boot_id {
            now.boot_ms.saturating_sub(self.boot_ms)
        } else {
            now.unix_ms.saturating_sub(self.unix_ms)
        };
        Duration::from_millis(ms)
    }

    /// When this moment was by the wall clock as it goes now, milliseconds since 1970: what the wall clock said then, unless it has
    /// been set since within this boot.
    pub fn unix_ms_now(&self) -> u64 {
        if self.boot_id != boot_id() {
            return self.unix_ms;
        }
        let by_now = boot_to_unix_ms(self.boot_ms);
        if by_now.abs_diff(self.unix_ms) < STEP_MIN_MS { self.unix_ms } else { by_now }
    }

    /// A moment of the state machine's clock.
    pub fn at(time: lifecycle::Time) -> Self {
        let boot_ms = time.as_millis().saturating_sub(BEFORE_BOOT_MS);
        Self { boot_ms, boot_id: boot_id(), unix_ms: unix_ms_of(time) }
    }

    /// This moment on the state machine's clock. One of an earlier boot by the wall clock, and not in the future.
    pub fn time(&self) -> lifecycle::Time {
        if self.boot_id == boot_id() {
            lifecycle::Time::from_millis(self.boot_ms.saturating_add(BEFORE_BOOT_MS))
        } else {
            now().minus_ms(unix_ms().saturating_sub(self.unix_ms))
        }
    }
}

/// Milliseconds by which the clocks may seem to differ without having been set.
const JITTER_MAX_MS: u64 = 20;

/// How far before the host's boot the state machine's clock begins, in milliseconds: ten years, so that moments of earlier boots
/// have a place on it.
const BEFORE_BOOT_MS: u64 = 3_650 * 86_400_000;

/// This moment, on the state machine's clock.
pub fn now() -> lifecycle::Time {
    lifecycle::Time::from_millis(since_boot_ms().saturating_add(BEFORE_BOOT_MS))
}

/// The wall-clock time of a moment of the state machine's clock, as it stands now, in milliseconds since 1970.
pub fn unix_ms_of(time: lifecycle::Time) -> u64 {
    boot_to_unix(i128::from(time.as_millis()) - i128::from(BEFORE_BOOT_MS))
}

/// Milliseconds since the host was booted, suspends included.
pub fn since_boot_ms() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    millis(time.tv_sec, time.tv_nsec)
}

/// Milliseconds of the wall clock since 1970.
pub fn unix_ms() -> u64 {
    u64::try_from(since_1970().as_millis()).unwrap_or(u64::MAX)
}

/// Nanoseconds of the wall clock since 1970.
pub fn unix_ns() -> i64 {
    i64::try_from(since_1970().as_nanos()).unwrap_or(i64::MAX)
}

/// By how much the wall clock is ahead of the clock that counts since boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead(u64);

impl Ahead {
    /// Now.
    pub fn now() -> Self {
        Self(unix_ms().saturating_sub(since_boot_ms()))
    }

    /// Whether the wall clock was set between two looks.
    pub fn is_stepped(self, other: Self) -> bool {
        self.0.abs_diff(other.0) >= STEP_MIN_MS
    }
}

/// A wall-clock time in milliseconds as RFC 3339 in UTC.
pub fn rfc3339(unix_ms: u64) -> String {
    let ms = i64::try_from(unix_ms).unwrap_or(i64::MAX);
    jiff::Timestamp::from_millisecond(ms)
        .map_or_else(|_| String::new(), |time| format!("{time:.3}"))
}

/// The wall-clock time of a moment of the boot clock, as it stands now.
pub fn boot_to_unix_ms(boot_ms: u64) -> u64 {
    boot_to_unix(i128::from(boot_ms))
}

fn boot_to_unix(boot_ms: i128) -> u64 {
    u64::try_from(boot_ms + i128::from(steady_ahead())).unwrap_or(0)
}

/// By how much the wall clock is ahead, the same from call to call while nobody sets it: two clocks that are read one after the
/// other would make each moment a millisecond earlier or later each time that it is told.
fn steady_ahead() -> u64 {
    static AHEAD: AtomicU64 = AtomicU64::new(0);
    let (now, before) = (Ahead::now().0, AHEAD.load(Ordering::Relaxed));
    if now.abs_diff(before) <= JITTER_MAX_MS {
        return before;
    }
    AHEAD.store(now, Ordering::Relaxed);
    now
}

/// By way of the standard library, as every look at the wall clock in the daemon, so that tests can set it for all of it at once.
/// Before 1970 it is 1970.
fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn millis(seconds: i64, nanos: i64) -> u64 {
    u64::try_from(seconds).unwrap_or(0) * 1000 + u64::try_from(nanos).unwrap_or(0) / 1_000_000
}

/// The kernel's random name for this boot of the host.
fn boot_id() -> String {
    use std::sync::OnceLock;
    static BOOT_ID: OnceLock<String> = OnceLock::new();
    BOOT_ID
        .get_or_init(|| {
            std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
                .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
        })
        .clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s07_time_asleep_ignores_steps_of_the_wall_clock_within_one_boot() {
        let mut slept = Moment::now();
        slept.unix_ms += 86_400_000; // The wall clock was set back by a day meanwhile.
        slept.boot_ms -= 5_000;
        assert!((5_000..6_000).contains(&slept.elapsed().as_millis()));
        slept.boot_id = "another boot".to_owned();
        assert_eq!(slept.elapsed(), Duration::ZERO);
        slept.unix_ms = unix_ms() - 7_000;
        assert!((7_000..8_000).contains(&slept.elapsed().as_millis()));
    }

    #[test]
    fn s01_a_moment_keeps_its_distance_when_the_wall_clock_is_set() {
        let then = Moment::now();
        assert_eq!(then.unix_ms_now(), then.unix_ms);
        let day = 86_400_000;
        for unix_ms in [then.unix_ms - day, then.unix_ms + day] {
            let stepped = Moment { unix_ms, ..then.clone() };
            assert!(stepped.unix_ms_now().abs_diff(then.unix_ms) < STEP_MIN_MS);
            let before = Moment { boot_id: "another boot".to_owned(), ..stepped };
            assert_eq!(before.unix_ms_now(), unix_ms);
        }
    }

    #[test]
    fn a_wall_clock_that_was_set_is_told_from_one_that_goes() {
        let now = Ahead::now();
        assert!(!now.is_stepped(Ahead::now()));
        assert!(
            now.is_stepped(Ahead(now.0 - STEP_MIN_MS)) && now.is_stepped(Ahead(now.0 + 86_400_000))
        );
    }

    #[test]
    fn moments_of_earlier_boots_have_a_place_on_the_state_machines_clock() {
        let day_ms = 86_400_000;
        let long_ago = Moment {
            boot_ms: 5_000,
            boot_id: "an earlier boot".to_owned(),
            unix_ms: unix_ms() - 90 * day_ms,
        };
        let ago = now().ms_since(long_ago.time());
        assert!((90 * day_ms..90 * day_ms + 1_000).contains(&ago), "{ago}");
        let back = Moment::at(long_ago.time());
        assert!(back.unix_ms.abs_diff(long_ago.unix_ms) < 1_000);
        let here = Moment::now();
        assert_eq!(Moment::at(here.time()).boot_ms, here.boot_ms);
    }

    #[test]
    fn times_are_written_in_utc_with_milliseconds() {
        assert_eq!(rfc3339(1_796_083_200_123), "2026-12-01T00:00:00.123Z");
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00.000Z");
    }
}
