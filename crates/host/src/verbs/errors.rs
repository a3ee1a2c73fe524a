//! What goes wrong with the host itself, as callers are told.

use std::io;

use api::{ApiError, Code};

use crate::promises::NoRoom;
use crate::sandbox::work::chain;
use crate::snapshots::SnapshotError;

pub(super) fn snapshot_error(error: &SnapshotError) -> ApiError {
    match error {
        SnapshotError::Missing => ApiError::new(Code::NotFound, error.to_string())
            .hint("`dormouse snapshots list` shows what there is"),
        SnapshotError::Taken => ApiError {
            field: Some("name".to_owned()),
            ..ApiError::new(Code::NameTaken, error.to_string())
        },
        SnapshotError::File(_, source) if source.kind() == io::ErrorKind::StorageFull => {
            no_space("the host's disk is full")
        }
        SnapshotError::Format(_) | SnapshotError::File(..) => {
            internal("the snapshot cannot be used", error)
        }
    }
}

/// The host's disk has no room: later it may have some.
pub(crate) fn no_space(text: impl Into<String>) -> ApiError {
    let mut error = ApiError::new(Code::NoSpace, text);
    error.retryable = true;
    error.hint("make room on the host: `dormouse doctor` tells how much is free")
}

/// What this is for would leave too little beside what is promised to others.
pub(crate) fn no_room(what: &str, error: &NoRoom) -> ApiError {
    match error {
        NoRoom::Unknown(source) => internal("free space is not known", source),
        NoRoom::Short { .. } => {
            no_space(format!("the host's disk has no room for {what}: {error}"))
        }
    }
}

/// A fault of ours: the client learns that it is one, the log what it is.
pub(crate) fn internal(text: &str, error: &(dyn std::error::Error + 'static)) -> ApiError {
    tracing::error!(error = chain(error), "{text}");
    ApiError::new(Code::Internal, text)
}
