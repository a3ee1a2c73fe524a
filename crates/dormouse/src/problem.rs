//! What went wrong, for the person at the terminal.

use api::{ApiError, Code};

/// Exit code where it is Dormouse that failed, not the command.
pub(crate) const EXIT_OWN_FAILURE: i32 = 125;
/// Exit code where the program cannot be started.
const EXIT_CANNOT_START: i32 = 126;
/// Exit code where there is no such program.
const EXIT_NOT_FOUND: i32 = 127;

/// Why a command was not carried out.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    error: Box<ApiError>,
    /// Whether the daemon said so itself.
    from_api: bool,
    exit_code: i32,
    /// The daemon could not be reached, or the connection to it broke: trying again may help.
    unreachable: bool,
}

impl Problem {
    /// Something on this side failed.
    pub(crate) fn new(text: impl Into<String>) -> Self {
        let error = Box::new(ApiError::new(Code::Internal, text));
        Self { error, from_api: false, exit_code: 1, unreachable: false }
    }

    /// What was typed makes no sense.
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self { exit_code: 2, ..Self::new(text) }
    }

    /// The daemon cannot be reached, or no longer.
    pub(crate) fn unreachable(text: impl Into<String>) -> Self {
        Self { unreachable: true, ..Self::new(text) }
    }

    /// Adds what to do about it.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.error.hint = Some(hint.into());
        self
    }

    pub(crate) fn exit_code(&self) -> i32 {
        self.exit_code
    }

    /// The exit code where others are a command's own: as shells and container tools have it.
    pub(crate) fn exit_code_beside_commands(&self) -> i32 {
        match self.code() {
            Some(Code::ProgramNotFound) => EXIT_NOT_FOUND,
            Some(Code::CannotStart) => EXIT_CANNOT_START,
            _ => EXIT_OWN_FAILURE,
        }
    }

    pub(crate) fn is_unreachable(&self) -> bool {
        self.unreachable
    }

    /// The daemon's code; `None`: the daemon did not say this.
    pub(crate) fn code(&self) -> Option<Code> {
        self.from_api.then_some(self.error.code)
    }

    /// It, and what to do about it, for somebody who reads text.
    pub(crate) fn sentence(&self) -> String {
        let code = self.code().and_then(|code| serde_json::to_value(code).ok());
        let mut text = self.error.error.clone();
        if let Some(code) = code.as_ref().and_then(serde_json::Value::as_str) {
            text = format!("{text} ({code})");
        }
        match &self.error.hint {
            Some(hint) => format!("{text}\nWhat to do: {hint}"),
            None => text,
        }
    }

    /// Prints it to standard error.
    pub(crate) fn print(&self, json: bool) {
        if json && self.from_api {
            // Plain data is always JSON.
            eprintln!("{}", serde_json::to_string(&self.error).unwrap_or_default());
            return;
        }
        eprintln!("error: {}", self.error.error);
        if let Some(hint) = &self.error.hint {
            eprintln!("hint: {hint}");
        }
        if let Some(option) = self.error.field.as_deref().and_then(option_of)
            && self.from_api
        {
            eprintln!("hint: here it is given with `{option}`");
        }
    }
}

/// Fields of the interface whose option has another name.
const OPTIONS: [(&str, &str); 9] = [
    ("x-dormouse-account", "--as-account"),
    ("timeoutSec", "--timeout"),
    ("everySeconds", "SECONDS"),
    ("size_mib", "--size"),
    ("labels", "--label"),
    ("awake_ports", "--awake-port"),
    ("drives", "--drive"),
    ("volumes", "--volume"),
    ("spending_limit", "--spending-limit"),
];

/// The option that sets a field, where one would not guess it.
fn option_of(field: &str) -> Option<&'static str> {
    let field = field.split(['.', '[']).next()?;
    OPTIONS.iter().find(|(name, _)| *name == field).map(|(_, option)| *option)
}

impl From<ApiError> for Problem {
    fn from(error: ApiError) -> Self {
        Self { error: Box::new(error), from_api: true, exit_code: 1, unreachable: false }
    }
}
