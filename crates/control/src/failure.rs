//! How a request fails: told to the client, or logged here and told as `internal` without our insides.

use std::error::Error;

use api::{ApiError, Code};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

/// Why a request was not carried out.
#[derive(Debug)]
pub enum Failure {
    /// The client is told this.
    Told(ApiError),
    /// The log is told this; the client that something went wrong here.
    Internal {
        /// What was being done, such as `read the tokens`.
        what: &'static str,
        /// Why it failed.
        source: Box<dyn Error + Send + Sync>,
    },
}

impl Failure {
    /// For `map_err`: this step failed, and it is our fault.
    pub(crate) fn internal<E: Error + Send + Sync + 'static>(
        what: &'static str,
    ) -> impl FnOnce(E) -> Self {
        move |source| Self::Internal { what, source: Box::new(source) }
    }

    /// What the client is told. Logs what it is not.
    pub(crate) fn into_api_error(self) -> ApiError {
        match self {
            Self::Told(error) => error,
            Self::Internal { what, source } if is_full(&*source) => {
                tracing::warn!(error = chain(&*source), what, "the disk is full");
                let mut error = ApiError::new(Code::NoSpace, "the host's disk is full");
                error.retryable = true;
                error.hint("make room on the host, and ask again")
            }
            Self::Internal { what, source } => {
                tracing::error!(error = chain(&*source), what, "request failed inside");
                ApiError::new(Code::Internal, "something went wrong inside Dormouse")
                    .hint("the daemon's log has it under this answer's `x-request-id`")
            }
        }
    }
}

/// On an answer that is an error of ours: which.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ErrorCode(pub(crate) Code);

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self::Told(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let error = self.into_api_error();
        let status =
            StatusCode::from_u16(error.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        // Plain data is always JSON. It ends a line, as on a terminal it should.
        let body = serde_json::to_string(&error).unwrap_or_default() + "\n";
        let json = HeaderValue::from_static("application/json");
        let mut response = (status, [(header::CONTENT_TYPE, json)], body).into_response();
        if error.code == Code::Unauthorized {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(ErrorCode(error.code));
        response
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Told(error) => write!(f, "{error}"),
            Self::Internal { what, .. } => write!(f, "{what}"),
        }
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Told(_) => None,
            Self::Internal { source, .. } => Some(&**source),
        }
    }
}

/// SQLite's result code for a disk without room (`SQLITE_FULL` of its `sqlite3.h`).
const SQLITE_FULL: &str = "13";

/// Whether a full disk is the cause.
fn is_full(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let database = error.downcast_ref::<sqlx::Error>().and_then(sqlx::Error::as_database_error);
        if database.is_some_and(|error| error.code().as_deref() == Some(SQLITE_FULL)) {
            return true;
        }
        let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        if kind == Some(std::io::ErrorKind::StorageFull) {
            return true;
        }
        next = error.source();
    }
    false
}

/// An error and all its sources, in one line.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text.push_str(": ");
        text.push_str(&source.to_string());
        next = source.source();
    }
    text
}
