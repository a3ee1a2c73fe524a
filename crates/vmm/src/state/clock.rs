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
pub const SLEPT_MAX: Duration = Duration::from_secs(200 * 366 * 24 * 3600);

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
