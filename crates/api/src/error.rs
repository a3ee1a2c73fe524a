//! The one error body of the interface and its codes.

use serde::{Deserialize, Serialize};

/// What went wrong, for programs. The list only grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Code {
    /// A field has the wrong type, an unknown name or a value out of its range: 400.
    InvalidRequest,
    /// No or a wrong token: 401.
    Unauthorized,
    /// The key opens other paths than this one: 403.
    Forbidden,
    /// The project's spending limit is reached, or the account has no credit left: 402.
    SpendingLimit,
    /// No such sandbox, exec, file or route: 404.
    NotFound,
    /// The method does not exist on this path: 405.
    MethodNotAllowed,
    /// The name is taken by another sandbox: 409.
    NameTaken,
    /// The idempotency key was used with another body: 409.
    IdempotencyMismatch,
    /// The same idempotency key is still being worked on: 409, retryable.
    InProgress,
    /// The command's machine ended before the command did (restart, reboot, power off, crash): 409.
    CommandLost,
    /// The sandbox has failed; restart or delete it: 409.
    SandboxFailed,
    /// The sandbox is being deleted: 409.
    BeingDeleted,
    /// Another host has taken the sandbox over: 409.
    SandboxMoved,
    /// The box is frozen, and this request does not thaw one: 503.
    BoxFrozen,
    /// The box was stopped for good; it can be brought back while its copy is kept: 409.
    BoxStopped,
    /// This host has no store in which checkpoints are kept: 409.
    CheckpointsUnavailable,
    /// The checkpoint is damaged, or does not fit this host: 409.
    CheckpointUnusable,
    /// It is in use (a drive that a sandbox has): 409.
    InUse,
    /// A drive is missing, damaged, or does not fit the sandbox: 409.
    DriveUnusable,
    /// It exists already (a file or folder): 409.
    Exists,
    /// The path is not a folder, or is one: 409.
    WrongFileType,
    /// The guest's user may not do that, or the folder is read-only: 403.
    PermissionDenied,
    /// The program to run cannot be started: 422.
    CannotStart,
    /// There is no such program to run: 422.
    ProgramNotFound,
    /// The body is over the limit: 413.
    TooLarge,
    /// Nothing listens on that port in the sandbox: 502.
    PortClosed,
    /// What listens on that port in the sandbox broke off or does not speak HTTP: 502.
    BadAnswer,
    /// The guest's or the host's disk is full: 507.
    NoSpace,
    /// The host has no room for one more: 503, retryable.
    NoCapacity,
    /// The account has as many boxes as its plan allows: 429, retryable.
    PlanLimit,
    /// It is not put to sleep, because something needs it at this moment: 409, retryable.
    Needed,
    /// It could not be put to sleep now; it goes on running: 503, retryable.
    SleepFailed,
    /// It could not be woken: 503.
    WakeFailed,
    /// It did not come in time: 504, retryable.
    Timeout,
    /// The request is well formed, and asks for what cannot be: it names what is not there, names something twice, or gives a
    /// time that has passed: 422.
    Unprocessable,
    /// The path is a connection (WebSocket, forward), and the request asks for none: 426.
    UpgradeRequired,
    /// A fault of Dormouse; the log of the daemon has it: 500.
    Internal,
}

impl Code {
    /// Every code, for documents and tests.
    pub const ALL: [Self; 37] = [
        Self::InvalidRequest,
        Self::Unauthorized,
        Self::Forbidden,
        Self::SpendingLimit,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::NameTaken,
        Self::IdempotencyMismatch,
        Self::InProgress,
        Self::CommandLost,
        Self::SandboxFailed,
        Self::BeingDeleted,
        Self::SandboxMoved,
        Self::BoxFrozen,
        Self::BoxStopped,
        Self::CheckpointsUnavailable,
        Self::CheckpointUnusable,
        Self::InUse,
        Self::DriveUnusable,
        Self::Exists,
        Self::WrongFileType,
        Self::PermissionDenied,
        Self::CannotStart,
        Self::ProgramNotFound,
        Self::TooLarge,
        Self::PortClosed,
        Self::BadAnswer,
        Self::NoSpace,
        Self::NoCapacity,
        Self::PlanLimit,
        Self::Needed,
        Self::SleepFailed,
        Self::WakeFailed,
        Self::Timeout,
        Self::Unprocessable,
        Self::UpgradeRequired,
        Self::Internal,
    ];

    /// The HTTP status that goes with it.
    pub fn status(self) -> u16 {
        match self {
            Self::InvalidRequest => 400,
            Self::Unauthorized => 401,
            Self::SpendingLimit => 402,
            Self::Forbidden | Self::PermissionDenied => 403,
            Self::NotFound => 404,
            Self::MethodNotAllowed => 405,
            Self::NameTaken
            | Self::IdempotencyMismatch
            | Self::InProgress
            | Self::CommandLost
            | Self::SandboxFailed
            | Self::BeingDeleted
            | Self::SandboxMoved
            | Self::BoxStopped
            | Self::CheckpointsUnavailable
            | Self::CheckpointUnusable
            | Self::InUse
            | Self::DriveUnusable
            | Self::Exists
            | Self::WrongFileType
            | Self::Needed => 409,
            Self::TooLarge => 413,
            Self::CannotStart | Self::ProgramNotFound | Self::Unprocessable => 422,
            Self::UpgradeRequired => 426,
            Self::PlanLimit => 429,
            Self::Internal => 500,
            Self::PortClosed | Self::BadAnswer => 502,
            Self::BoxFrozen | Self::NoCapacity | Self::SleepFailed | Self::WakeFailed => 503,
            Self::Timeout => 504,
            Self::NoSpace => 507,
        }
    }

    /// Whether the same request may succeed later without a change.
    pub fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::InProgress
                | Self::NoCapacity
                | Self::PlanLimit
                | Self::Needed
                | Self::SleepFailed
                | Self::Timeout
        )
    }
}

/// The body of every answer that is not a success.
#[derive(
    Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error, utoipa::ToSchema,
)]
#[error("{error}")]
pub struct ApiError {
    /// One sentence for a person. Never carries internals (paths of the host, stack traces).
    #[schema(example = "no sandbox is called `web`")]
    pub error: String,
    /// What went wrong, for a program.
    pub code: Code,
    /// The field of the request that is wrong.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub field: Option<String>,
    /// What would be right, or what to do next.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub hint: Option<String>,
    /// Whether the same request may succeed later.
    pub retryable: bool,
}

impl ApiError {
    /// An error with this code and sentence.
    pub fn new(code: Code, error: impl Into<String>) -> Self {
        Self { error: error.into(), code, field: None, hint: None, retryable: code.is_retryable() }
    }

    /// A field of the request is wrong.
    pub fn invalid(field: &str, error: impl Into<String>) -> Self {
        Self { field: Some(field.to_owned()), ..Self::new(Code::InvalidRequest, error) }
    }

    /// A field of the request is well formed, and asks for what cannot be.
    pub fn unprocessable(field: &str, error: impl Into<String>) -> Self {
        Self { field: Some(field.to_owned()), ..Self::new(Code::Unprocessable, error) }
    }

    /// Adds what would be right or what to do.
    #[must_use]
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `docs/errors.md` lists each code, with its status and whether trying again may help, and no other.
    #[test]
    fn the_document_lists_every_code() {
        let document = include_str!("../../../docs/errors.md");
        let told: Vec<&str> = document.lines().filter(|line| line.starts_with("| `")).collect();
        let mut expected = Vec::new();
        for code in Code::ALL {
            let name = serde_json::to_value(code).unwrap();
            let again = if code.is_retryable() { "yes" } else { "no" };
            expected.push(format!(
                "| `{}` | {} | {again} |",
                name.as_str().unwrap(),
                code.status()
            ));
        }
        for (line, expected) in told.iter().zip(&expected) {
            assert!(
                line.starts_with(expected.as_str()),
                "docs/errors.md says `{line}`, not `{expected} …`"
            );
        }
        assert_eq!(told.len(), expected.len(), "docs/errors.md lists other codes than `Code::ALL`");
    }

    /// A new variant does not compile until it was counted here, and then fails until `ALL` has it.
    #[test]
    fn all_is_complete() {
        let place = |code: Code| match code {
            Code::InvalidRequest => 0,
            Code::Unauthorized => 1,
            Code::Forbidden => 2,
            Code::SpendingLimit => 3,
            Code::NotFound => 4,
            Code::MethodNotAllowed => 5,
            Code::NameTaken => 6,
            Code::IdempotencyMismatch => 7,
            Code::InProgress => 8,
            Code::CommandLost => 9,
            Code::SandboxFailed => 10,
            Code::BeingDeleted => 11,
            Code::SandboxMoved => 12,
            Code::BoxFrozen => 13,
            Code::BoxStopped => 14,
            Code::CheckpointsUnavailable => 15,
            Code::CheckpointUnusable => 16,
            Code::InUse => 17,
            Code::DriveUnusable => 18,
            Code::Exists => 19,
            Code::WrongFileType => 20,
            Code::PermissionDenied => 21,
            Code::CannotStart => 22,
            Code::ProgramNotFound => 23,
            Code::TooLarge => 24,
            Code::PortClosed => 25,
            Code::BadAnswer => 26,
            Code::NoSpace => 27,
            Code::NoCapacity => 28,
            Code::PlanLimit => 29,
            Code::Needed => 30,
            Code::SleepFailed => 31,
            Code::WakeFailed => 32,
            Code::Timeout => 33,
            Code::Unprocessable => 34,
            Code::UpgradeRequired => 35,
            Code::Internal => 36,
        };
        for (index, code) in Code::ALL.into_iter().enumerate() {
            assert_eq!(place(code), index);
        }
    }
}
