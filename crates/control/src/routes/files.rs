//! Files and trees of a sandbox: streams of any size, never held here.

use api::ApiError;
use api::file::{FileInfo, FileList, MkdirRequest, MoveRequest};
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use serde::Deserialize;
use tokio::io::AsyncRead;
use tokio_util::io::ReaderStream;

use crate::App;
use crate::answer::{Timed, add_wake};
use crate::failure::Failure;
use crate::input::{At, JsonBody, Query, body_reader};
use crate::openapi::Raw;
use crate::validate;

/// Bytes read at once from a file on its way out.
const READ_BYTES: usize = 64 * 1024;
/// Most permission bits: set-user-id, set-group-id and sticky, too.
const MODE_MAX: u32 = 0o7777;
/// Most digits of them, with a zero before them.
const MODE_CHARS_MAX: usize = 5;

/// Which file.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PathQuery {
    /// Absolute path in the sandbox.
    #[param(example = "/work/notes.txt")]
    path: String,
}

/// Which part of which file.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ReadQuery {
    /// Absolute path in the sandbox.
    #[param(example = "/work/notes.txt")]
    path: String,
    /// Position of the first byte; default 0.
    #[param(example = 0)]
    offset: Option<u64>,
    /// At most this many bytes; default all.
    length: Option<u64>,
}

/// Read a file
///
/// Its raw bytes, all or a part.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files", tag = "files", operation_id = "read_file",
    params(("id" = String, Path, description = "Id or name", example = "web"), ReadQuery),
    responses((status = 200, description = "The bytes", body = Raw, content_type = "application/octet-stream",
        headers(
            ("dormouse-file-size" = u64, description = "Bytes of the whole file"),
            ("dormouse-file-mode" = String, description = "Permission bits in octal, such as `0644`"),
        ),
    )),
)]
pub(crate) async fn read(
    State(app): State<App>,
    At(entry): At,
    Query(query): Query<ReadQuery>,
) -> Result<Response, Failure> {
    validate::path("path", &query.path)?;
    let offset = query.offset.unwrap_or(0);
    let answer = app.host().file_read(&entry.id, &query.path, offset, query.length).await?;
    let (info, reader) = answer.value;
    let mut response = bytes(&info, reader, ());
    add_wake(response.headers_mut(), answer.woke_ms);
    Ok(response)
}

/// A file's bytes. `held` lives until the last of them has been passed on.
pub(super) fn bytes(
    info: &FileInfo,
    reader: Box<dyn AsyncRead + Send + Unpin>,
    held: impl Send + 'static,
) -> Response {
    let mut response = stream(reader, held);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert("dormouse-file-size", info.size.into());
    let mode = HeaderValue::try_from(format!("{:04o}", info.mode & MODE_MAX));
    headers.insert("dormouse-file-mode", mode.expect("digits are a header value"));
    response
}

/// A tree's archive. `held` lives until the last byte of it has been passed on.
pub(super) fn tree(
    reader: Box<dyn AsyncRead + Send + Unpin>,
    held: impl Send + 'static,
) -> Response {
    let mut response = stream(reader, held);
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-tar"));
    response
}

fn stream(reader: Box<dyn AsyncRead + Send + Unpin>, held: impl Send + 'static) -> Response {
    let pieces = ReaderStream::with_capacity(reader, READ_BYTES);
    Body::from_stream(pieces.map(move |piece| {
        let _held = &held;
        piece
    }))
    .into_response()
}

/// Where to write, and with which permissions.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct WriteQuery {
    /// Absolute path in the sandbox.
    #[param(example = "/work/notes.txt")]
    pub(super) path: String,
    /// Permission bits in octal, such as `0644`; default: those of the file that was there, else `0644`.
    #[param(example = "0644")]
    pub(super) mode: Option<String>,
}

/// Write a file
///
/// The body's raw bytes, of any length, become the whole file. The old one stays until the new one is complete: a body
/// that breaks off changes nothing. Missing folders are made.
#[utoipa::path(
    put, path = "/v1/sandboxes/{id}/files", tag = "files", operation_id = "write_file",
    params(("id" = String, Path, description = "Id or name", example = "web"), WriteQuery),
    request_body(content = Raw, description = "The bytes", content_type = "application/octet-stream"),
    responses((status = 200, description = "The file as it is now", body = FileInfo)),
)]
pub(crate) async fn write(
    State(app): State<App>,
    At(entry): At,
    Query(query): Query<WriteQuery>,
    body: Body,
) -> Result<Timed<FileInfo>, Failure> {
    validate::path("path", &query.path)?;
    let mode = query.mode.as_deref().map(read_mode).transpose()?;
    Ok(Timed(app.host().file_write(&entry.id, &query.path, mode, body_reader(body)).await?))
}

/// Remove a file or folder
///
/// A folder with all that is in it.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{id}/files", tag = "files", operation_id = "remove_file",
    params(("id" = String, Path, description = "Id or name", example = "web"), PathQuery),
    responses((status = 204, description = "It is gone")),
)]
pub(crate) async fn remove(
    State(app): State<App>,
    At(entry): At,
    Query(query): Query<PathQuery>,
) -> Result<Response, Failure> {
    validate::path("path", &query.path)?;
    if query.path.bytes().all(|byte| byte == b'/') {
        return Err(ApiError::unprocessable("path", "`path`: the whole disk cannot be removed")
            .hint("delete the sandbox")
            .into());
    }
    let answer = app.host().file_remove(&entry.id, &query.path).await?;
    let mut response = StatusCode::NO_CONTENT.into_response();
    add_wake(response.headers_mut(), answer.woke_ms);
    Ok(response)
}

/// Tell what a path is
///
/// Symbolic links are not followed.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files/stat", tag = "files", operation_id = "stat_file",
    params(("id" = String, Path, description = "Id or name", example = "web"), PathQuery),
    responses((status = 200, description = "The file or folder", body = FileInfo)),
)]
pub(crate) async fn stat(
    State(app): State<App>,
    At(entry): At,
    Query(query): Query<PathQuery>,
) -> Result<Timed<FileInfo>, Failure> {
    validate::path("path", &query.path)?;
    Ok(Timed(app.host().file_stat(&entry.id, &query.path).await?))
}

/// List a folder
///
/// What it holds, by name; not what its folders hold.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files/list", tag = "files", operation_id = "list_files",
    params(("id" = String, Path, description = "Id or name", example = "web"), PathQuery),
    responses((status = 200, description = "What it holds", body = FileList)),
)]
pub(crate) async fn list(
    State(app): State<App>,
    At(entry): At,
    Query(query): Query<PathQuery>,
) -> Result<Timed<FileList>, Failure> {
    validate::path("path", &query.path)?;
    Ok(Timed(app.host().file_list(&entry.id, &query.path).await?.map(|files| FileList { files })))
}

/// Make a folder
///
/// And those above it. One that is there already is a success.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/files/mkdir", tag = "files", operation_id = "make_folder",
    params(("id" = String, Path, description = "Id or name", example = "web")),
    request_body(content = MkdirRequest, description = "The folder"),
    responses((status = 200, description = "The folder", body = FileInfo)),
)]
pub(crate) async fn mkdir(
    State(app): State<App>,
    At(entry): At,
    JsonBody(request): JsonBody<MkdirRequest>,
) -> Result<Timed<FileInfo>, Failure> {
    validate::path("path", &request.path)?;
    Ok(Timed(app.host().file_mkdir(&entry.id, &request.path).await?))
}

/// Move or rename
///
/// An existing file at the new path is replaced.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/files/move", tag = "files", operation_id = "move_file",
    params(("id" = String, Path, description = "Id or name", example = "web")),
    request_body(content = MoveRequest, description = "From where to where"),
    responses((status = 200, description = "It, at its new path", body = FileInfo)),
)]
pub(crate) async fn rename(
    State(app): State<App>,
    At(entry): At,
    JsonBody(request): JsonBody<MoveRequest>,
) -> Result<Timed<FileInfo>, Failure> {
    validate::path("from", &request.from)?;
    validate::path("to", &request.to)?;
    Ok(Timed(app.host().file_move(&entry.id, &request.from, &request.to).await?))
}

/// Read a tree
///
/// A folder with all that is in it as a tar stream, with paths relative to it. A single file is a stream of one entry, by its own name.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/tree", tag = "files", operation_id = "read_tree",
    params(("id" = String, Path, description = "Id or name", example = "web"), PathQuery),
    responses((status = 200, description = "The tar stream", body = Raw, content_type = "application/x-tar")),
)]
pub(crate) async fn read_tree(
    State(app): State<App>,
    At(entry): At,
    Query(query): Query<PathQuery>,
) -> Result<Response, Failure> {
    validate::path("path", &query.path)?;
    let answer = app.host().tree_read(&entry.id, &query.path).await?;
    let mut response = tree(answer.value, ());
    add_wake(response.headers_mut(), answer.woke_ms);
    Ok(response)
}

/// Write a tree
///
/// Unpacks the body, a tar stream of any size, below a folder, which is made. Entries that would leave the folder are
/// refused. A body that breaks off leaves what was complete until then.
#[utoipa::path(
    put, path = "/v1/sandboxes/{id}/tree", tag = "files", operation_id = "write_tree",
    params(("id" = String, Path, description = "Id or name", example = "web"), PathQuery),
    request_body(content = Raw, description = "The tar stream", content_type = "application/x-tar"),
    responses((status = 204, description = "All of it was unpacked")),
)]
pub(crate) async fn write_tree(
    State(app): State<App>,
    At(entry): At,
    Query(query): Query<PathQuery>,
    body: Body,
) -> Result<Response, Failure> {
    validate::path("path", &query.path)?;
    let answer = app.host().tree_write(&entry.id, &query.path, body_reader(body)).await?;
    let mut response = StatusCode::NO_CONTENT.into_response();
    add_wake(response.headers_mut(), answer.woke_ms);
    Ok(response)
}

pub(super) fn read_mode(text: &str) -> Result<u32, ApiError> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit());
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|_| plain && text.len() <= MODE_CHARS_MAX)
        .filter(|mode| *mode <= MODE_MAX)
        .ok_or_else(|| {
            ApiError::invalid("mode", "`mode`: no permission bits").hint("octal, such as `0644`")
        })
}
