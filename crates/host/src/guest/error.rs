//! What can go wrong between host and guest, by who asked: the owner of the link, or somebody with a request.

use std::time::Duration;

use wire::{Failure, VersionRange, Woke};

use super::link::LinkState;

/// Why the link itself failed. The guest is then in an unknown state unless the text says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The call does not fit the state; nothing was done.
    #[error("cannot {call} a guest link that is {state:?}")]
    State {
        /// What was asked.
        call: &'static str,
        /// The state that does not allow it.
        state: LinkState,
    },
    /// The guest did not answer in time.
    #[error("guest did not answer {call} within {limit:?}")]
    TimedOut {
        /// What was asked.
        call: &'static str,
        /// How long was waited.
        limit: Duration,
    },
    /// The link broke while waiting.
    #[error("guest is gone: {reason}")]
    Lost {
        /// Why.
        reason: String,
    },
    /// The two sides have no version in common; the guest must be booted with a newer agent.
    #[error("guest agent speaks protocol {guest:?}, this host {host:?}")]
    Version {
        /// What the guest speaks.
        guest: VersionRange,
        /// What we speak.
        host: VersionRange,
    },
    /// The agent is older than drives.
    #[error(
        "its guest agent is older than drives: build the image anew (`dormouse images build`) and make a new sandbox"
    )]
    NoDrives,
    /// No random bytes could be had for the guest.
    #[error("draw entropy for the guest: {reason}")]
    Entropy {
        /// The operating system's error.
        reason: String,
    },
}

/// Why a guest is not awake.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WakeError {
    /// The link failed.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The guest answered, but keeps the user's programs frozen because a step failed that may not (a fork's entropy, thawing).
    #[error("guest does not run: {}", failed_steps(.0))]
    NotRunning(Woke),
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GuestError {
    /// The guest says no.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// The guest is gone, and with it what was under way.
    #[error("guest is gone: {reason}")]
    Gone {
        /// Why.
        reason: String,
    },
    /// The guest did not answer in the time that it ran.
    #[error("guest did not answer {request} within {limit:?}")]
    TimedOut {
        /// What was asked.
        request: &'static str,
        /// How long was waited, not counting time that the guest stood still.
        limit: Duration,
    },
    /// The guest ended the channel in the middle.
    #[error("guest reset the channel of {request}")]
    Reset {
        /// What was asked.
        request: &'static str,
    },
    /// The guest answered something that is no answer to this.
    #[error("guest gave no sensible answer to {request}")]
    BadAnswer {
        /// What was asked.
        request: &'static str,
    },
    /// The guest is made to stand still by the host, for longer than whoever waits for an answer is let wait
    /// ([`GuestLink::stand_still`](super::GuestLink::stand_still)). What was asked may still be done when it goes on.
    #[error("guest is made to stand still by the host")]
    StandsStill,
    /// Too many requests on one guest at a time ([`wire::CHANNELS_MAX`]).
    #[error("more than {} requests at once on one guest", wire::CHANNELS_MAX)]
    Busy,
    /// The request does not fit into a frame.
    #[error("request of {bytes} bytes is over the limit of {max} bytes")]
    TooLarge {
        /// Its size in bytes.
        bytes: usize,
        /// The limit in bytes.
        max: usize,
    },
}

impl From<GuestError> for std::io::Error {
    fn from(error: GuestError) -> Self {
        Self::other(error)
    }
}

fn failed_steps(woke: &Woke) -> String {
    let failed: Vec<String> = woke
        .steps
        .iter()
        .filter_map(|report| match &report.outcome {
            wire::StepOutcome::Failed(text) => Some(format!("{:?}: {text}", report.step)),
            wire::StepOutcome::Done | wire::StepOutcome::Skipped => None,
        })
        .collect();
    failed.join("; ")
}
