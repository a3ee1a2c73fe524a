//! Every number that bounds a sandbox's life, with its unit and its reason.

/// A user timer due within so many milliseconds keeps a sandbox awake (S3): sleeping and waking again for less is
/// dearer than staying.
pub const TIMER_NEAR_MS: u64 = 5_000;

/// So many milliseconds before a timer is due its sandbox is woken (S3): time enough to wake from disk.
pub const TIMER_LEAD_MS: u64 = 400;

/// Below so many thousandths of one core, on average over the quiet window, a guest computes nothing (S2).
pub const CPU_IDLE_PERMILLE: u64 = 20;

/// How often the host should ask a running guest for a [`Sample`](crate::Sample), in milliseconds.
pub const SAMPLE_EVERY_MS: u64 = 1_000;

/// A sample older than so many milliseconds says nothing about now: two may be late or lost, then the guest no longer
/// counts as idle.
pub const SAMPLE_FRESH_MS: u64 = 2_500;

/// It is put to sleep for idleness only on a sample no older than so many milliseconds; if there is none at that moment,
/// one is asked for ([`Work::Sample`](crate::Work::Sample)). What a guest began since then is stopped halfway.
pub const SAMPLE_AT_SLEEP_MS: u64 = 250;

/// After so many milliseconds without a sample a running guest is reported as silent
/// ([`What::GuestSilent`](crate::What::GuestSilent)).
pub const SAMPLE_SILENCE_MS: u64 = 15_000;

/// How many samples of used CPU are kept per sandbox: a quiet window is seen in steps of 1/64 of its length, so that a
/// window of a day costs no more memory than one of a minute. When there are more, the oldest go, which can only make it
/// sleep later.
pub const CPU_SAMPLES_MAX: usize = 128;

/// How often a wake is tried at most before the sandbox fails with `wake_failed`.
pub const WAKE_TRIES_MAX: u32 = 4;

/// How long it waits after the first failed try to wake, in milliseconds; twice that after the second, and so on. Short,
/// since somebody waits, but not nothing, so that what was in the way may pass.
pub const WAKE_RETRY_MS: u64 = 100;

/// After a wake was given up because the host lacks disk or memory, a timer wakes it at the earliest after so many
/// milliseconds. Whoever else needs it tries at once.
pub const WAKE_SHORT_MS: u64 = 5_000;

/// After a sleep for idleness failed, the next one is tried at the earliest after so many milliseconds. Where the disk is
/// full it would otherwise be tried without end.
pub const SLEEP_RETRY_MS: u64 = 30_000;

/// After a demotion failed, the next one is tried at the earliest after so many milliseconds.
pub const DEMOTE_RETRY_MS: u64 = 60_000;

/// How long it waits after the first failed removal, in milliseconds; twice that after the second, and so on.
pub const DESTROY_RETRY_MS: u64 = 250;

/// The longest wait between two tries to remove, in milliseconds. The number of tries has no limit: giving up would
/// leak a machine or a disk for good.
pub const DESTROY_RETRY_MS_MAX: u64 = 60_000;

/// How many forks and snapshots may wait for one sandbox. Further ones are refused.
pub const CAPTURES_WAITING_MAX: usize = 64;

/// How many events wait to be polled. A host polls after each call, so that a handful is the most there ever are; one that
/// does not loses the oldest.
pub const EVENTS_WAITING_MAX: usize = 256;
