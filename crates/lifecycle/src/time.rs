//! The one clock of this crate.
//!
//! A type of its own, because a host has several clocks and only one of them is right here.

/// A moment, in milliseconds of a monotonic clock that also counts while the host itself is suspended
/// (`CLOCK_BOOTTIME` on Linux).
///
/// Wall-clock time would move deadlines when somebody sets the clock, and a clock that stands still during host
/// suspend would let a guest's timers fire late. Two values compare only within one boot of one host; whatever
/// is stored across boots is stored as wall-clock time and converted back by the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// From milliseconds since the clock's own zero.
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms)
    }

    /// Milliseconds since the clock's own zero.
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// This moment moved on by `ms`; the far end of time instead of an overflow.
    #[must_use]
    pub const fn plus_ms(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms))
    }

    /// This moment moved back by `ms`, at most to the clock's zero.
    #[must_use]
    pub const fn minus_ms(self, ms: u64) -> Self {
        Self(self.0.saturating_sub(ms))
    }

    /// Milliseconds from `earlier` until this moment; 0 if `earlier` is the later one.
    pub const fn ms_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
