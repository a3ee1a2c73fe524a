//! Why the guest could not do what was asked.

use serde::{Deserialize, Serialize};

/// A refusal or failure, as the guest reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What kind of failure; stable, for programs.
    pub code: FailureCode,
    /// The kernel's error number where there was one.
    pub errno: Option<i32>,
    /// The field of the request that is to blame, where one is (`path`, `cwd`, `user`, …).
    pub field: Option<String>,
    /// For people: what was being done, to what, and what went wrong.
    pub message: String,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal $text:literal,)*) => {
        /// The kind of a [`Failure`].
        ///
        /// A number on the wire, so that a code which is new to this build arrives as [`FailureCode::Other`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(from = "u16", into = "u16")]
        pub enum FailureCode {
            $($(#[$doc])* $name,)*
            /// A code of a later version.
            Other(u16),
        }

        impl From<u16> for FailureCode {
            fn from(number: u16) -> Self {
                match number { $($number => Self::$name,)* other => Self::Other(other) }
            }
        }

        impl From<FailureCode> for u16 {
            fn from(code: FailureCode) -> Self {
                match code { $(FailureCode::$name => $number,)* FailureCode::Other(other) => other }
            }
        }

        impl FailureCode {
            /// The code as a stable word, such as `not_found`.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* Self::Other(_) => "other" }
            }
        }
    };
}

codes! {
    /// No such file, directory or program.
    NotFound = 1 "not_found",
    /// A part of the path is no directory.
    NotADirectory = 2 "not_a_directory",
    /// A directory stands where a file was wanted.
    IsADirectory = 3 "is_a_directory",
    /// Not permitted.
    Permission = 4 "permission",
    /// It exists already.
    Exists = 5 "exists",
    /// The disk (or quota) is full.
    NoSpace = 6 "no_space",
    /// The directory is not empty.
    NotEmpty = 7 "not_empty",
    /// The request itself is wrong; `field` names where.
    Invalid = 8 "invalid",
    /// Nobody listens on that port.
    Refused = 9 "refused",
    /// There is no exec with that id (any more).
    UnknownExec = 10 "unknown_exec",
    /// The guest has no such user.
    UnknownUser = 11 "unknown_user",
    /// The working directory does not exist, is no directory, or may not be entered.
    BadCwd = 12 "bad_cwd",
    /// The exec has no open stdin.
    StdinClosed = 13 "stdin_closed",
    /// An archive entry would have been written outside of the target directory.
    OutsideTree = 14 "outside_tree",
    /// Over a limit on size.
    TooLarge = 15 "too_large",
    /// Over a limit on number.
    TooMany = 16 "too_many",
    /// The guest agent does not know this request.
    Unsupported = 17 "unsupported",
    /// The file system is read-only.
    ReadOnly = 18 "read_only",
    /// Too many symbolic links, or a link where none may be.
    Symlink = 19 "symlink",
    /// The two paths are on different file systems.
    CrossDevice = 20 "cross_device",
    /// It is in use.
    Busy = 21 "busy",
    /// An archive is damaged or has an entry of a kind that is not taken.
    BadArchive = 22 "bad_archive",
    /// The exec has ended, so there is nothing to signal.
    Ended = 23 "ended",
    /// No memory or no process slot in the guest.
    NoResources = 24 "no_resources",
    /// Anything else; `errno` says more.
    Io = 25 "io",
}
