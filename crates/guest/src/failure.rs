//! From the kernel's errors to the protocol's failures.

use std::io;

use rustix::io::Errno;
use wire::{Failure, FailureCode};

/// A failure of `doing` something, for instance `open /etc/x`.
pub(crate) fn io_failure(error: &io::Error, field: &str, doing: &str) -> Failure {
    let errno = error.raw_os_error();
    let code = errno.map_or(FailureCode::Io, code_of);
    Failure {
        code,
        errno,
        field: Some(field.to_owned()),
        message: format!("{doing}: {}", reason(error)),
    }
}

/// A failure of the request itself.
pub(crate) fn invalid(field: &str, message: impl Into<String>) -> Failure {
    failure(FailureCode::Invalid, Some(field), message)
}

/// A failure without an error number.
pub(crate) fn failure(
    code: FailureCode,
    field: Option<&str>,
    message: impl Into<String>,
) -> Failure {
    Failure { code, errno: None, field: field.map(str::to_owned), message: message.into() }
}

/// The code for an error number.
pub(crate) fn code_of(errno: i32) -> FailureCode {
    match Errno::from_raw_os_error(errno) {
        Errno::NOENT => FailureCode::NotFound,
        Errno::NOTDIR => FailureCode::NotADirectory,
        Errno::ISDIR => FailureCode::IsADirectory,
        Errno::ACCESS | Errno::PERM => FailureCode::Permission,
        Errno::EXIST => FailureCode::Exists,
        Errno::NOSPC | Errno::DQUOT => FailureCode::NoSpace,
        Errno::NOTEMPTY => FailureCode::NotEmpty,
        Errno::INVAL | Errno::NAMETOOLONG => FailureCode::Invalid,
        Errno::CONNREFUSED => FailureCode::Refused,
        Errno::ROFS => FailureCode::ReadOnly,
        Errno::LOOP => FailureCode::Symlink,
        Errno::XDEV => FailureCode::CrossDevice,
        Errno::BUSY | Errno::TXTBSY => FailureCode::Busy,
        Errno::NOMEM | Errno::AGAIN | Errno::MFILE | Errno::NFILE => FailureCode::NoResources,
        Errno::FBIG | Errno::TOOBIG => FailureCode::TooLarge,
        Errno::PIPE => FailureCode::StdinClosed,
        _ => FailureCode::Io,
    }
}

/// The error's text without Rust's "(os error 2)", which means nothing to a user.
fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(at) => text[..at].to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_number_becomes_a_code_and_a_readable_text() {
        let failure = io_failure(&io::Error::from(Errno::NOSPC), "path", "write /x");
        assert_eq!(failure.code, FailureCode::NoSpace);
        assert_eq!(failure.message, "write /x: No space left on device");
        assert_eq!(failure.field.as_deref(), Some("path"));
    }
}
