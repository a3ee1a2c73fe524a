//! Why a task failed, as one text for the person at the terminal: nobody matches on it.

use std::fmt;

/// What a task returns.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// What was being done and why it did not work.
#[derive(Debug)]
pub(crate) struct Failure(String);

impl Failure {
    /// A failure with this text: lower case, no full stop.
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Adds to an error what was being done.
pub(crate) trait Context<T> {
    /// `doing` is a bare verb phrase: "read manifest".
    fn context(self, doing: impl fmt::Display) -> Result<T>;
}

impl<T, E: fmt::Display> Context<T> for std::result::Result<T, E> {
    fn context(self, doing: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Failure(format!("{doing}: {error}")))
    }
}
