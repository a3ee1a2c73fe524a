//! Lifecycle events as entries of the timeline, in words.

use lifecycle::{Cause, Death, Reason, SleepCause, Start, StopCause, Tier, What};
use serde_json::{Map, Value, json};

/// Kind and sentence of an event; `None`: not for people. `what`: the need in the words of whoever had it.
pub(super) fn tell(
    event: &What,
    what: Option<&str>,
) -> Option<(&'static str, String, Map<String, Value>)> {
    let mut data = Map::new();
    let (kind, text) = match event {
        What::Starting { how: Start::Create, .. } => {
            ("starting", "is being started from its copy of memory and disk".to_owned())
        }
        What::Starting { how: Start::Boot, cause } => (
            "starting",
            format!(
                "boots from its disk{}",
                cause.map_or(String::new(), |cause| format!(" for {}", need(cause, what)))
            ),
        ),
        What::Started { how: Start::Create } => ("running", "runs".to_owned()),
        What::Started { how: Start::Boot } => {
            ("restarted", "runs, booted from its disk".to_owned())
        }
        What::FallingAsleep { cause } => {
            data.insert("cause".to_owned(), json!(sleep_cause(*cause).0));
            ("sleeping", format!("falls asleep: {}", sleep_cause(*cause).1))
        }
        What::SleepCancelled { cause } => (
            "awake",
            format!(
                "stays awake{}",
                cause.map_or(String::new(), |cause| format!(": {}", need(cause, what)))
            ),
        ),
        What::SleepFailed { code } => {
            data.insert("code".to_owned(), json!(code.as_str()));
            ("sleep_failed", format!("could not be put to sleep: {}", code.as_str()))
        }
        What::Slept { tier, cause } => {
            data.insert("tier".to_owned(), json!(tier_word(*tier)));
            data.insert("cause".to_owned(), json!(sleep_cause(*cause).0));
            let why = match cause {
                SleepCause::Idle => String::new(),
                cause => format!(": {}", sleep_cause(*cause).1),
            };
            ("slept", format!("sleeps {}{why}", tier_phrase(*tier)))
        }
        What::Demoted => {
            data.insert("tier".to_owned(), json!("disk"));
            ("demoted", "sleeps on disk from now on".to_owned())
        }
        What::DemoteFailed { code } => {
            data.insert("code".to_owned(), json!(code.as_str()));
            ("demote_failed", format!("could not move from memory to disk: {}", code.as_str()))
        }
        What::Waking { from, cause } => {
            data.insert("tier".to_owned(), json!(tier_word(*from)));
            ("waking", format!("is being woken by {}", need(*cause, what)))
        }
        What::WakeFailed { code, again } => {
            data.insert("code".to_owned(), json!(code.as_str()));
            let then = if *again { "; tried again" } else { "" };
            ("wake_failed", format!("could not be woken: {}{then}", code.as_str()))
        }
        What::Woke { from, cause, slept_ms } => {
            data.insert("tier".to_owned(), json!(tier_word(*from)));
            data.insert("cause".to_owned(), json!(cause_word(*cause)));
            data.insert("slept_ms".to_owned(), json!(slept_ms));
            ("woke", format!("woken by {}", need(*cause, what)))
        }
        What::Died { death } => {
            data.insert("code".to_owned(), json!(death_code(*death)));
            ("stopped", death_text(*death).to_owned())
        }
        What::StartRefused { code } => {
            data.insert("code".to_owned(), json!(code.as_str()));
            let text = "could not be booted now, what needs it next tries again";
            ("start_refused", format!("{text}: {}", code.as_str()))
        }
        What::Failed { code } => {
            data.insert("code".to_owned(), json!(code.as_str()));
            ("failed", format!("failed: {}", code.as_str()))
        }
        What::StoppedForGood { cause, unused_ms } => {
            data.insert("unused_seconds".to_owned(), json!(unused_ms / 1000));
            ("stopped_for_good", format!("is stopped for good: {}", stopped(*cause, *unused_ms)))
        }
        What::Restored => ("restored", "is brought back".to_owned()),
        What::CaptureEnded { result: Ok(()), .. } => ("copied", "was copied".to_owned()),
        What::CaptureEnded { result: Err(refusal), .. } => {
            ("copy_failed", format!("could not be copied: {refusal}"))
        }
        What::GuestSilent { .. } => {
            ("guest_silent", "its guest agent has not answered for a while".to_owned())
        }
        What::Deleting => return None,
        What::DeleteFailed { code } => {
            ("delete_failed", format!("could not be removed: {}; tried again", code.as_str()))
        }
        What::Deleted => ("deleted", "is removed".to_owned()),
    };
    Some((kind, text, data))
}

/// Why a box was stopped for good (B29).
pub(super) fn stopped(cause: StopCause, unused_ms: u64) -> String {
    let unused = in_words(unused_ms);
    match cause {
        StopCause::FrozenUnused => format!("frozen and unused for {unused}"),
        StopCause::IdleTimeout => format!("unused for {unused}, over idleTimeoutMin"),
    }
}

/// A time as a person says it, such as `24 hours` or `31 minutes`.
fn in_words(ms: u64) -> String {
    let (number, unit) = match ms / 1000 {
        seconds if seconds >= 2 * 3600 => (seconds / 3600, "hours"),
        seconds if seconds >= 120 => (seconds / 60, "minutes"),
        seconds => (seconds, "seconds"),
    };
    format!("{number} {unit}")
}

/// What kept it awake, for the entry about its falling asleep.
pub(super) fn reasons(reasons: &[lifecycle::AwakeReason]) -> Value {
    reasons
        .iter()
        .filter(|reason| !matches!(reason.reason, Reason::FallingAsleep))
        .map(|reason| json!({ "reason": reason.reason.as_str(), "text": reason.text() }))
        .collect()
}

/// A need in words.
pub(super) fn need(cause: Cause, what: Option<&str>) -> String {
    match cause {
        Cause::Call(_) => what.unwrap_or("a call").to_owned(),
        Cause::Packet { peer, port } => {
            let to = port.map_or(String::new(), |port| format!(" to port {port}"));
            let from = peer.map_or(String::new(), |peer| format!(" from {peer}"));
            format!("a packet{to}{from}")
        }
        Cause::Terminal => what.unwrap_or("a key press in a terminal").to_owned(),
        Cause::Capture => "a fork".to_owned(),
        Cause::Timer { .. } => "a timer of its own".to_owned(),
        Cause::Restart => "a restart".to_owned(),
        Cause::Restore => "being brought back".to_owned(),
    }
}

fn cause_word(cause: Cause) -> &'static str {
    match cause {
        Cause::Call(_) => "call",
        Cause::Packet { .. } => "packet",
        Cause::Terminal => "terminal",
        Cause::Capture => "capture",
        Cause::Timer { .. } => "timer",
        Cause::Restart => "restart",
        Cause::Restore => "restore",
    }
}

fn sleep_cause(cause: SleepCause) -> (&'static str, &'static str) {
    match cause {
        SleepCause::Idle => ("idle", "nothing needs it"),
        SleepCause::HoldCap => {
            ("hold_cap", "nothing but holds needs it, and they have reached their limit")
        }
        SleepCause::Asked => ("asked", "somebody asked for it"),
        SleepCause::Shutdown => ("shutdown", "the host shuts down"),
        SleepCause::Drain => ("drain", "the host is being emptied"),
        SleepCause::Spending => ("spending", "a limit on spending is reached"),
        SleepCause::IdleTimeout => {
            ("idle_timeout", "nobody used it for longer than idleTimeoutMin")
        }
    }
}

pub(super) fn tier_word(tier: Tier) -> &'static str {
    match tier {
        Tier::Memory => "memory",
        Tier::Disk => "disk",
        Tier::Store => "store",
    }
}

fn tier_phrase(tier: Tier) -> &'static str {
    match tier {
        Tier::Memory => "in memory",
        Tier::Disk => "on disk",
        Tier::Store => "in the object store",
    }
}

/// How a machine ended, for programs.
pub(super) fn death_code(death: Death) -> &'static str {
    match death {
        Death::Reboot => "reboot",
        Death::Poweroff => "poweroff",
        Death::Panic => "panic",
        Death::Killed => "machine_lost",
    }
}

/// The other way round.
pub(crate) fn death_of(code: &str) -> Death {
    match code {
        "reboot" => Death::Reboot,
        "poweroff" => Death::Poweroff,
        "panic" => Death::Panic,
        _ => Death::Killed,
    }
}

fn death_text(death: Death) -> &'static str {
    match death {
        Death::Reboot => "its guest rebooted; the next need boots it from its disk",
        Death::Poweroff => "its guest powered off; the next need boots it from its disk",
        Death::Panic => "its guest's kernel panicked; the next need boots it from its disk",
        Death::Killed => {
            "its machine was lost, and what ran in it; the next need boots it from its disk"
        }
    }
}
