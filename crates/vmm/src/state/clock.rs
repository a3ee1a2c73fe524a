//! Moves a saved machine's clock on by the time it slept.
//!
//! Under TCG the guest's time hangs on two numbers in the section `timer`: QEMU's virtual clock (all device timers are absolute on it,
//! so they become overdue) and the offset of the guest's TSC. Under KVM the TSC is in every processor's state and kvmclock has a section of its own.
//!
//! One device must not become overdue: the old interval timer (i8254) in a periodic mode. Firmware leaves it at 18.2 Hz, Linux does not use it and lets it
//! run, and QEMU would make up for every period missed: 15 ms for an hour asleep, minutes for a year. So its times are moved on too, as if it had not seen the sleep.

use std::time::Duration;

use super::stream::{Stream, StreamError};

/// By how much, and at which TSC rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockAdvance {
    /// The time slept.
    pub slept: Duration,
    /// The rate that the guest believes its TSC to have ([`crate::Fingerprint::tsc_khz`] of the *saved* state), kHz.
    pub guest_tsc_khz: u32,
}

/// Longest sleep: 200 years. Beyond some 292 the nanosecond counters of guest kernels overflow.
///
/// A Linux guest works through a jump second by second (its leap second check): 0.5 s after a month, 4 s after a year under TCG before its first answer.
pub const SLEPT_MAX: Duration = Duration::from_hours(200 * 366 * 24);

/// Moves the clock of the machine in `bytes` on. Nothing else of the state is touched.
pub fn advance(bytes: &mut [u8], by: ClockAdvance) -> Result<(), StreamError> {
    let slept = by.slept.min(SLEPT_MAX);
    let stream = Stream::parse(bytes)?;
    // At most 6.3e18, so it fits.
    let nanoseconds = u64::try_from(slept.as_nanos()).unwrap_or(u64::MAX);
    let ticks = slept.as_nanos() * u128::from(by.guest_tsc_khz) / 1_000_000;
    // The counter wraps at 64 bits, as the hardware's does.
    #[expect(clippy::cast_possible_truncation, reason = "a counter modulo 2^64")]
    let ticks = ticks as u64;
    let mut edits = vec![
        (stream.field_u64("timer/cpu_clock_offset")?, nanoseconds),
        (stream.field_u64("timer/cpu_ticks_offset")?, ticks),
    ];
    if stream.has("kvmclock/clock") {
        edits.push((stream.field_u64("kvmclock/clock")?, nanoseconds));
        edits.extend(stream.fields_u64_named("env.tsc")?.into_iter().map(|at| (at, ticks)));
    }
    for channel in 0..INTERVAL_TIMERS {
        if let Some(mode) = stream.fields().get(&format!("i8254/channels[{channel}]/mode"))
            && bytes[mode.at] & PERIODIC != 0
        {
            // The next transition is there twice for the first channel; 0 and -1 say that there is none.
            edits.push((
                stream.field_u64(&format!("i8254/channels[{channel}]/count_load_time"))?,
                nanoseconds,
            ));
            let next = ["/", "."].map(|separator| {
                format!("i8254/channels[{channel}]{separator}next_transition_time")
            });
            let next = next.iter().filter_map(|path| stream.field_u64(path).ok());
            edits.extend(
                next.filter(|&at| i64::from_be_bytes(read(bytes, at)) > 0)
                    .map(|at| (at, nanoseconds)),
            );
        }
    }
    for (at, add) in edits {
        let value = u64::from_be_bytes(read(bytes, at)).wrapping_add(add);
        bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
    }
    Ok(())
}

/// Channels of the interval timer.
const INTERVAL_TIMERS: usize = 3;
/// The bit of a channel's mode that its two periodic modes (2 and 3, also written 6 and 7) have and the others have not.
const PERIODIC: u8 = 2;

/// A field that [`Stream`] has found.
fn read(bytes: &[u8], at: usize) -> [u8; 8] {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[at..at + 8]);
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::stream::samples;

    const KHZ: u32 = 2_596_094;

    /// Which fields an advance changes, and by how much.
    fn changes(bytes: &[u8], by: ClockAdvance) -> Vec<(String, u64)> {
        let mut moved = bytes.to_vec();
        advance(&mut moved, by).unwrap();
        let stream = Stream::parse(&moved).unwrap();
        let mut changed = Vec::new();
        let mut bytes_changed = 0;
        for (path, field) in stream.fields() {
            let place = field.at..field.at + field.bytes;
            if moved[place.clone()] != bytes[place.clone()] {
                let [old, new] =
                    [bytes, &moved].map(|bytes| u64::from_be_bytes(read(bytes, field.at)));
                changed.push((path.clone(), new.wrapping_sub(old)));
                bytes_changed += place.filter(|&at| moved[at] != bytes[at]).count();
            }
        }
        // Nothing outside the fields has changed.
        assert_eq!(bytes_changed, moved.iter().zip(bytes).filter(|(new, old)| new != old).count());
        changed
    }

    #[test]
    fn the_clock_the_counter_and_the_interval_timer_move_and_nothing_else() {
        let hour = ClockAdvance { slept: Duration::from_hours(1), guest_tsc_khz: KHZ };
        for bytes in [samples::qemu_7(), samples::qemu_10()] {
            let expected = [
                ("i8254/channels[0].next_transition_time", 3_600_000_000_000),
                ("i8254/channels[0]/count_load_time", 3_600_000_000_000),
                ("i8254/channels[0]/next_transition_time", 3_600_000_000_000),
                ("i8254/channels[1]/count_load_time", 3_600_000_000_000),
                ("timer/cpu_clock_offset", 3_600_000_000_000),
                ("timer/cpu_ticks_offset", 3600 * u64::from(KHZ) * 1000),
            ];
            assert_eq!(changes(&bytes, hour), expected.map(|(path, by)| (path.to_owned(), by)));
        }
    }

    #[test]
    fn no_time_changes_nothing() {
        let none = ClockAdvance { slept: Duration::ZERO, guest_tsc_khz: KHZ };
        assert_eq!(changes(&samples::qemu_7(), none), []);
    }

    /// A timer that fires once is to become overdue: it may be what the guest waits for.
    #[test]
    fn an_interval_timer_that_fires_once_stays() {
        let mut bytes = samples::qemu_7();
        let mode = Stream::parse(&bytes).unwrap().fields()["i8254/channels[0]/mode"].at;
        bytes[mode] = 0;
        let moved =
            changes(&bytes, ClockAdvance { slept: Duration::from_hours(1), guest_tsc_khz: KHZ });
        assert!(!moved.iter().any(|(path, _)| path.contains("channels[0]")), "{moved:?}");
    }

    #[test]
    fn fractions_count_and_centuries_do_not_overflow() {
        let by = |slept| changes(&samples::qemu_7(), ClockAdvance { slept, guest_tsc_khz: KHZ });
        let moved = by(Duration::from_nanos(1_500_000_001));
        assert!(moved.contains(&("timer/cpu_clock_offset".to_owned(), 1_500_000_001)));
        assert!(moved.contains(&("timer/cpu_ticks_offset".to_owned(), 3_894_141_002)));
        let longest = u64::try_from(SLEPT_MAX.as_nanos()).unwrap();
        assert!(by(Duration::MAX).contains(&("timer/cpu_clock_offset".to_owned(), longest)));
    }
}
