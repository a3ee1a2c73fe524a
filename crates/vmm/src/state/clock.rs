//! Moves a saved machine's clock on by the time it slept.
//!
//! Under TCG the guest's time hangs on two numbers in the section `timer`: QEMU's virtual clock (all device timers are absolute on it,
//! so they become overdue) and the offset of the guest's TSC. Under KVM the TSC is in every processor's state and kvmclock has a section of its own.

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
    for (at, add) in edits {
        let field: &mut [u8] = &mut bytes[at..at + 8];
        let mut value = [0; 8];
        value.copy_from_slice(field);
        field.copy_from_slice(&u64::from_be_bytes(value).wrapping_add(add).to_be_bytes());
    }
    Ok(())
}
