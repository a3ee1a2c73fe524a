//! How boxes are set up: the arguments of `dormouse serve` for them.

use std::time::Duration;

use clap::Args;

#[derive(Debug, Args)]
#[expect(clippy::struct_field_names, reason = "the names are those of the arguments")]
#[command(next_help_heading = "Boxes")]
pub(crate) struct BoxArgs {
    /// Virtual processors of a unit, of which a box has 1, 2, 4 or 8.
    #[arg(long, env = "DORMOUSE_BOX_UNIT_CPUS", value_name = "NUMBER", default_value_t = 2,
        value_parser = clap::value_parser!(u32).range(1..=8))]
    box_unit_cpus: u32,
    /// Memory of a unit, MiB.
    #[arg(long, env = "DORMOUSE_BOX_UNIT_MEMORY_MIB", value_name = "MIB", default_value_t = 8192,
        value_parser = clap::value_parser!(u32).range(256..=65_536))]
    box_unit_memory_mib: u32,
    /// Without activity for so long a box is frozen, seconds.
    #[arg(long, env = "DORMOUSE_BOX_FREEZE_AFTER_SECONDS", value_name = "SECONDS", default_value_t = 600,
        value_parser = seconds())]
    box_freeze_after_seconds: u64,
    /// Requests through its URLs are activity until so long after its last use, seconds.
    #[arg(long, env = "DORMOUSE_BOX_URL_WINDOW_SECONDS", value_name = "SECONDS", default_value_t = 7_200,
        value_parser = seconds())]
    box_url_window_seconds: u64,
    /// Commands in the background keep a box awake until so long after its last use, seconds; recordings too.
    #[arg(long, env = "DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", value_name = "SECONDS", default_value_t = 3_600,
        value_parser = seconds())]
    box_background_window_seconds: u64,
    /// Frozen for so long a box is stopped for good, seconds, unless it has an `idleTimeoutMin`.
    #[arg(long, env = "DORMOUSE_BOX_STOP_AFTER_SECONDS", value_name = "SECONDS", default_value_t = 86_400,
        value_parser = seconds())]
    box_stop_after_seconds: u64,
    /// A box that was stopped for idleness can be brought back for so long, seconds.
    #[arg(long, env = "DORMOUSE_BOX_KEEP_COPY_SECONDS", value_name = "SECONDS", default_value_t = 86_400,
        value_parser = seconds())]
    box_keep_copy_seconds: u64,
    /// How long a page load that thaws a box is held before it is answered by a page that reloads itself, milliseconds.
    #[arg(long, env = "DORMOUSE_BOX_PAGE_HOLD_MS", value_name = "MS", default_value_t = 1_000,
        value_parser = clap::value_parser!(u64).range(..=60_000))]
    box_page_hold_ms: u64,
    /// Within so long page loads thaw a box once, seconds.
    #[arg(long, env = "DORMOUSE_BOX_WAKE_EVERY_SECONDS", value_name = "SECONDS", default_value_t = 15,
        value_parser = seconds())]
    box_wake_every_seconds: u64,
    /// A conversation that gave signs of life and was silent for so long has ended, seconds.
    #[arg(long, env = "DORMOUSE_BOX_AGENT_SILENCE_SECONDS", value_name = "SECONDS", default_value_t = 180,
        value_parser = seconds())]
    box_agent_silence_seconds: u64,
}

/// From a second to ten years.
fn seconds() -> clap::builder::RangedU64ValueParser<u64> {
    clap::value_parser!(u64).range(1..=315_360_000)
}

impl BoxArgs {
    pub(crate) fn settings(&self) -> control::BoxSettings {
        control::BoxSettings {
            unit_cpus: self.box_unit_cpus,
            unit_memory_mib: self.box_unit_memory_mib,
            limits: api::boxes::BoxLimits {
                freeze_after_ms: self.box_freeze_after_seconds * 1000,
                url_window_ms: self.box_url_window_seconds * 1000,
                background_window_ms: self.box_background_window_seconds * 1000,
                recording_window_ms: self.box_background_window_seconds * 1000,
                stop_after_ms: self.box_stop_after_seconds * 1000,
                idle_timeout_ms: None,
                keep_copy_ms: self.box_keep_copy_seconds * 1000,
            },
            page_hold: Duration::from_millis(self.box_page_hold_ms),
            wake_every: Duration::from_secs(self.box_wake_every_seconds),
            agent_silence: Duration::from_secs(self.box_agent_silence_seconds),
        }
    }
}
