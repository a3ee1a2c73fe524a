//! Who waits for what: callers that are answered when the sandbox has got somewhere.

use std::time::Instant;

use api::{ApiError, Code};
use lifecycle::{Call, CaptureId, FailureCode, Refusal, What};
use tokio::sync::oneshot;

use super::{Ready, story};
use crate::drive_trouble;
use crate::exec::stands_still_error;
use crate::verbs::no_space;

/// Callers of one sandbox that wait until it is awake, at most. More are refused: a crowd this large is a mistake or an
/// attack, and each waits with a connection open.
pub(super) const WAITERS_MAX: usize = 4096;

/// A call that waits until the sandbox is awake.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) call: Call,
    pub(super) began: Instant,
    pub(super) reply: oneshot::Sender<Result<Ready, ApiError>>,
}

/// What else is waited for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Goal {
    Asleep,
    Started,
    /// Runs again after it was stopped for good.
    Awake,
    Gone,
    Captured(CaptureId),
}

/// Somebody who waits for a [`Goal`].
pub(super) type Watcher = (Goal, oneshot::Sender<Result<(), ApiError>>);

/// What an event means to somebody who waits for a goal: `None`, wait on. `need`: what it was needed for before the event, in the
/// words of whoever had the need.
pub(super) fn outcome(
    goal: &Goal,
    event: &What,
    failure: Option<&str>,
    need: Option<&str>,
) -> Option<Result<(), ApiError>> {
    let refused = |refusal: Refusal| Some(Err(refusal_error(refusal, failure)));
    match (goal, event) {
        // One that slept in memory and was to move to disk may be woken before it has: there is no other word of that.
        (Goal::Asleep, What::SleepCancelled { cause: Some(cause) } | What::Woke { cause, .. }) => {
            Some(Err(needed_error(&story::need(*cause, need))))
        }
        (Goal::Asleep, What::SleepCancelled { cause: None }) => {
            Some(Err(ApiError::new(Code::SleepFailed, "it was kept awake before it slept")))
        }
        (Goal::Asleep, What::Slept { .. } | What::Demoted)
        | (Goal::Started, What::Started { .. })
        | (Goal::Awake, What::Started { .. } | What::Woke { .. })
        | (Goal::Gone, What::Deleted) => Some(Ok(())),
        (
            Goal::Asleep,
            What::SleepFailed { code: FailureCode::DiskFull }
            | What::DemoteFailed { code: FailureCode::DiskFull },
        ) => {
            let error = ApiError::new(Code::NoSpace, "the host's disk has no room for its sleep");
            Some(Err(error.hint("it is as it was; make room on the host")))
        }
        (Goal::Asleep, What::SleepFailed { code } | What::DemoteFailed { code }) => {
            let error = ApiError::new(
                Code::SleepFailed,
                format!("it could not be put to sleep ({})", code.as_str()),
            );
            Some(Err(error.hint("it is as it was; see its events for the reason")))
        }
        (Goal::Captured(wanted), What::CaptureEnded { capture, result }) if wanted == capture => {
            match result {
                Ok(()) => Some(Ok(())),
                Err(refusal) => refused(*refusal),
            }
        }
        (Goal::Asleep, What::Starting { .. }) => {
            Some(Err(ApiError::new(Code::SleepFailed, "it was restarted before it slept")))
        }
        // With no room it comes back frozen (T14).
        (Goal::Awake, What::WakeFailed { code, again: false }) if code.is_shortage() => {
            Some(Ok(()))
        }
        (Goal::Started | Goal::Awake, What::StartRefused { code }) => {
            Some(Err(shortage_error(*code, failure)))
        }
        (Goal::Asleep, What::Died { .. }) => {
            let error = ApiError::new(Code::SleepFailed, "its machine ended before it slept");
            Some(Err(error.hint(
                "what was written to its disk is there; its events say how the machine ended",
            )))
        }
        (Goal::Started, What::Failed { code: code @ FailureCode::DriveUnusable }) => {
            let error = refusal_error(Refusal::Failed { code: *code }, failure);
            Some(Err(ApiError { code: Code::DriveUnusable, ..error }))
        }
        (Goal::Asleep | Goal::Started | Goal::Awake | Goal::Captured(_), What::Failed { code }) => {
            refused(Refusal::Failed { code: *code })
        }
        (
            Goal::Asleep | Goal::Started | Goal::Awake | Goal::Captured(_),
            What::Deleting | What::Deleted,
        ) => refused(Refusal::Deleted),
        _ => None,
    }
}

/// A refusal of the state machine, for a client.
pub(super) fn refusal_error(refusal: Refusal, failure: Option<&str>) -> ApiError {
    match refusal {
        Refusal::Starting | Refusal::Waking => {
            let mut error = ApiError::new(Code::SleepFailed, refusal.to_string());
            error.retryable = true;
            error
        }
        Refusal::SpendingLimit => spending_error(),
        Refusal::HostLeaves => leaving_error(),
        Refusal::HostDiskFull => stands_still_error(),
        Refusal::Frozen => ApiError::new(Code::BoxFrozen, refusal.to_string()),
        Refusal::Stopped => ApiError::new(Code::BoxStopped, refusal.to_string()),
        // Two have brought it back at once.
        Refusal::NotStopped => ApiError::new(Code::BoxStopped, refusal.to_string())
            .hint("call it as it is; what acts on it thaws it"),
        Refusal::Failed { code } => {
            let text = failure
                .map_or_else(|| refusal.to_string(), |failure| format!("{refusal}: {failure}"));
            let error = match code {
                FailureCode::DiskFull => ApiError::new(Code::NoSpace, text),
                _ => ApiError::new(Code::SandboxFailed, text),
            };
            error.hint(match code {
                FailureCode::DriveUnusable => drive_trouble::CURE,
                _ => "restart it (it boots from its disk), or delete it",
            })
        }
        Refusal::Deleted => ApiError::new(Code::BeingDeleted, refusal.to_string()),
        Refusal::TooManyCaptures => ApiError::new(Code::NoCapacity, refusal.to_string()),
        Refusal::Restarted => ApiError::new(Code::CommandLost, refusal.to_string()),
        Refusal::CaptureFailed { code: FailureCode::DiskFull } => {
            no_space("the host's disk has no room for a copy")
        }
        Refusal::CaptureFailed { code } => capture_error(code, refusal),
    }
}

/// There is no copy of it. What it was, only its next start or its events tell.
fn capture_error(code: FailureCode, refusal: Refusal) -> ApiError {
    let ended = "its machine ended before it was copied";
    let again = |code: Code, text: &str| {
        ApiError { retryable: true, ..ApiError::new(code, text) }
            .hint("nothing was kept of the copy; ask again")
    };
    match code {
        FailureCode::MachineLost => again(Code::SandboxFailed, ended)
            .hint("ask again: it boots from its disk; its events say how the machine ended"),
        FailureCode::AgentSilent => again(Code::SandboxFailed, "its guest agent does not answer"),
        FailureCode::NoCapacity => again(Code::NoCapacity, "the host lacks room for a copy"),
        FailureCode::SleepFailed => {
            again(Code::SleepFailed, "it could not be moved to disk for a copy")
        }
        // Trying again is of no use before somebody has looked.
        FailureCode::StateDamaged => {
            ApiError::new(Code::SandboxFailed, "files of it are missing, so it cannot be copied")
                .hint("restart it (it boots from its disk), or delete it")
        }
        _ => ApiError::new(Code::Internal, refusal.to_string()),
    }
}

/// It is not put to sleep: this needs it.
pub(super) fn needed_error(what: &str) -> ApiError {
    ApiError::new(Code::Needed, format!("it is needed at this moment: {what}"))
        .hint("it sleeps by itself when nothing needs it; ask again if it shall sleep sooner")
}

/// The host goes down: what would wake now would be lost with it.
pub(crate) fn leaving_error() -> ApiError {
    let mut error = ApiError::new(Code::NoCapacity, "this host is going down; it sleeps on disk");
    error.retryable = true;
    error.hint("ask again when the host is back")
}

/// The project's spending limit is reached (S23).
pub(crate) fn spending_error() -> ApiError {
    ApiError::new(Code::SpendingLimit, "the project's spending limit for this month is reached")
        .hint("it sleeps and keeps everything; raise `spending_limit` of the project, or wait for the next month")
}

/// However long it waited there would not be room for it.
pub(crate) fn never_fits_error(error: &crate::budget::NoRoom) -> ApiError {
    let mut error = ApiError::new(Code::NoCapacity, format!("it can never be woken here: {error}"));
    error.retryable = false;
    error.hint("nothing of it is lost; start the daemon with a larger `--memory-budget-mib`, or without one")
}

/// The host lacks something for now; the sandbox sleeps on, whole.
pub(super) fn shortage_error(code: FailureCode, failure: Option<&str>) -> ApiError {
    let code = if code == FailureCode::DiskFull { Code::NoSpace } else { Code::NoCapacity };
    let why = failure.unwrap_or("the host lacks disk or memory");
    let mut error = ApiError::new(code, format!("it cannot be woken now: {why}"));
    error.retryable = true;
    error.hint("it sleeps on and nothing of it is lost; make room on the host, and it wakes")
}

#[cfg(test)]
mod tests {
    use lifecycle::{CallKind, Cause, Tier};

    use super::*;

    #[test]
    fn s05_who_asked_for_sleep_is_told_what_needs_it_when_a_need_comes_first() {
        let cause = Cause::Call(Call::of(CallKind::Api));
        let need = Some("a file read");
        let woke = What::Woke { from: Tier::Memory, cause, slept_ms: 12 };
        let kept = What::SleepCancelled { cause: Some(cause) };
        for event in [woke, kept] {
            let error = outcome(&Goal::Asleep, &event, None, need).expect("answered");
            let error = error.expect_err("it does not sleep");
            assert_eq!((error.code, error.retryable), (Code::Needed, true));
            assert_eq!(error.error, "it is needed at this moment: a file read");
        }
        let waking = What::Waking { from: Tier::Memory, cause };
        assert!(outcome(&Goal::Asleep, &waking, None, need).is_none());
        let slept = What::Slept { tier: Tier::Disk, cause: lifecycle::SleepCause::Asked };
        assert!(matches!(outcome(&Goal::Asleep, &slept, None, need), Some(Ok(()))));
    }
}
