//! Waiting for a state, bounded.

use std::time::{Duration, Instant};

/// The longest that any state is waited for: only a hang takes this long, even on a machine that does other work.
pub const WAIT_MAX: Duration = Duration::from_mins(3);

/// How often a state is looked at.
pub const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Looks until `look` finds something; panics with `what` when it takes too long.
#[track_caller]
pub fn until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    within(WAIT_MAX, what, look)
}

/// As [`until`] with a bound of its own.
#[track_caller]
pub fn within<T>(limit: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < limit, "waited {} s in vain for: {what}", limit.as_secs());
        std::thread::park_timeout(LOOK_EVERY);
    }
}

/// Looks for so many seconds that something stays as it is; panics with `what` when it does not.
#[track_caller]
pub fn stays(what: &str, seconds: u64, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    until(what, || {
        assert!(holds(), "no longer: {what}");
        (begun.elapsed() >= Duration::from_secs(seconds)).then_some(())
    });
}
