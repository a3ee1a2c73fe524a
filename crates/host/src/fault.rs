//! Points at which tests have the daemon die or fail.
//!
//! A daemon that is killed at the worst moment must be survived, so the worst moments have names. In a daemon started without
//! `DORMOUSE_FAULT` a point costs one look at an empty cell.
//!
//! `DORMOUSE_FAULT=<point>[:<n>]` kills the daemon with SIGKILL when it passes the point for the n-th time (default 1).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// The environment variable that plants a fault.
pub const VARIABLE: &str = "DORMOUSE_FAULT";

/// The names of all points, for tests that go through them.
pub const POINTS: [&str; 13] = [
    "create_copied",
    "saving",
    "saved_not_published",
    "published_qemu_alive",
    "restoring",
    "restored_not_running",
    "fork_copied",
    "fork_published",
    "forks_kept",
    "deleting",
    "checkpoint_carrying",
    "checkpoint_carried",
    "checkpoint_listed",
];

struct Planted {
    point: String,
    nth: u32,
    passed: AtomicU32,
}

/// Dies here if a test has said so.
pub(crate) fn point(name: &'static str) {
    static PLANTED: OnceLock<Option<Planted>> = OnceLock::new();
    debug_assert!(POINTS.contains(&name), "{name} is not in the list");
    let Some(planted) = PLANTED.get_or_init(read) else { return };
    if planted.point == name && planted.passed.fetch_add(1, Ordering::Relaxed) + 1 == planted.nth {
        tracing::warn!(point = name, "planted fault: dying");
        let itself = rustix::process::getpid();
        // It cannot fail on oneself; if it does, going on is what a missed fault looks like.
        let _ = rustix::process::kill_process(itself, rustix::process::Signal::KILL);
    }
}

fn read() -> Option<Planted> {
    let text = std::env::var(VARIABLE).ok()?;
    let (point, nth) = text.split_once(':').unwrap_or((&text, "1"));
    Some(Planted {
        point: point.to_owned(),
        nth: nth.parse().unwrap_or(1),
        passed: AtomicU32::new(0),
    })
}
