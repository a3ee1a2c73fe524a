//! Work in a box: its commands, processes and files.

use std::time::Duration;

use api::boxes::act::{BoxCommand, BoxCommands, BoxExec, BoxExecResult, BoxProcesses};
use api::boxes::view::Done;
use api::exec::{Output, SignalRequest};
use api::file::FileInfo;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;

use super::execs::{Part, StdinQuery, parse_signal, read_output, write_stdin};
use super::files::{WriteQuery, read_mode};
use crate::App;
use crate::answer::add_wake;
use crate::boxes::{self, Way, Who};
use crate::failure::Failure;
use crate::input::{BoxId, ExecId, JsonBody, Query, body_reader};
use crate::openapi::Raw;
use crate::validate;

/// Bytes of output in an answer, unless asked otherwise.
const OUTPUT_BYTES: u64 = 1024 * 1024;
/// The longest that one answer follows the output of a command: as long as one is waited for.
const FOLLOW_MAX: Duration = Duration::from_hours(1);

/// Run a command in a box
///
/// Waits for its end, for at most `waitSec`; then it runs on, and the same call with `execId` and `offset` reads on. With `background`
/// it answers at once. Use of the box until it answers.
#[utoipa::path(
    post, path = "/v1/boxes/{id}/exec", tag = "boxes", operation_id = "box_exec",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a")),
    request_body(content = BoxExec, description = "The command, or which one to read on"),
    responses((status = 200, description = "What came of it so far", body = BoxExecResult)),
)]
pub(crate) async fn exec(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
    JsonBody(request): JsonBody<BoxExec>,
) -> Result<Json<BoxExecResult>, Failure> {
    let way = Way { bytes: OUTPUT_BYTES, waits: None, notes: true };
    Ok(Json(boxes::exec(&app, &who, &id, way, request).await?))
}

/// List the commands of a box
///
/// Those since it was booted, running or ended, newest last. No use of the box: a frozen one is told as it froze.
#[utoipa::path(
    get, path = "/v1/boxes/{id}/execs", tag = "boxes", operation_id = "list_box_execs",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a")),
    responses((status = 200, description = "The commands", body = BoxCommands)),
)]
pub(crate) async fn commands(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
) -> Result<Json<BoxCommands>, Failure> {
    Ok(Json(boxes::commands(&app, &who, &id).await?))
}

/// Tell about a command of a box
///
/// Whether it runs, how it ended, how much it wrote. No use of the box: of a frozen one it is told as it froze.
#[utoipa::path(
    get, path = "/v1/boxes/{id}/execs/{exec_id}", tag = "boxes", operation_id = "get_box_exec",
    params(
        ("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a"),
        ("exec_id" = String, Path, description = "Id of the command", example = "hnkainteaodl"),
    ),
    responses((status = 200, description = "The command", body = BoxCommand)),
)]
pub(crate) async fn command(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
    ExecId(exec): ExecId,
) -> Result<Json<BoxCommand>, Failure> {
    Ok(Json(boxes::command(&app, &who, &id, &exec).await?))
}

/// Which bytes of a command's output.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct OutputQuery {
    /// Position of the first byte; default 0.
    #[param(example = 0)]
    offset: Option<u64>,
    /// Go on until the command has ended, for an hour at most, or as long as the host lets one answer follow (`--follow-seconds`);
    /// default false: what is there now.
    #[param(example = false)]
    follow: Option<bool>,
}

/// Read the output of a command of a box
///
/// The raw bytes, standard output and standard error in the order in which they were written. `dormouse-offset` is the position of the
/// first byte told (later than asked for if older output is no longer kept); without `follow`, `dormouse-next-offset` is where to go
/// on. An answer that follows ends when the account runs out of credit. Use of the box until the last byte.
#[utoipa::path(
    get, path = "/v1/boxes/{id}/execs/{exec_id}/output", tag = "boxes", operation_id = "get_box_exec_output",
    params(
        ("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a"),
        ("exec_id" = String, Path, description = "Id of the command", example = "hnkainteaodl"),
        OutputQuery,
    ),
    responses((
        status = 200, description = "The bytes", body = Raw, content_type = "application/octet-stream",
        headers(
            ("dormouse-offset" = u64, description = "Position of the first byte"),
            ("dormouse-next-offset" = u64, description = "Where to go on; not with `follow`"),
        ),
    )),
)]
pub(crate) async fn output(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
    ExecId(exec): ExecId,
    Query(query): Query<OutputQuery>,
) -> Result<Response, Failure> {
    let part = Part {
        which: Output::Stdout,
        offset: query.offset.unwrap_or(0),
        follow: query.follow.unwrap_or(false),
    };
    let acting = boxes::act(&app, &who, &id, "the output of a command").await?;
    let (record, woke_ms) = (acting.record.clone(), acting.woke_ms);
    let most = app.follow_max().map_or(FOLLOW_MAX, |most| most.min(FOLLOW_MAX));
    let ends = {
        let (app, account) = (app.clone(), record.account.clone());
        async move {
            if part.follow {
                let paid = app.accounts().without_credit(&account);
                // Whichever comes first.
                let _ended = tokio::time::timeout(most, paid).await;
            } else {
                std::future::pending::<()>().await;
            }
        }
    };
    let work = read_output(&app, &record.id, &exec, part, ends, acting);
    let mut response = boxes::while_paid(&app, &record, work).await?;
    add_wake(response.headers_mut(), woke_ms);
    Ok(response)
}

/// Send a signal to a command of a box
///
/// To its whole process group; `KILL` to everything that it has started. Use of the box.
#[utoipa::path(
    post, path = "/v1/boxes/{id}/execs/{exec_id}/signal", tag = "boxes", operation_id = "signal_box_exec",
    params(
        ("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a"),
        ("exec_id" = String, Path, description = "Id of the command", example = "hnkainteaodl"),
    ),
    request_body(content = SignalRequest, description = "The signal"),
    responses((status = 200, description = "It was sent", body = Done)),
)]
pub(crate) async fn signal(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
    ExecId(exec): ExecId,
    JsonBody(request): JsonBody<SignalRequest>,
) -> Result<Json<Done>, Failure> {
    let signal = parse_signal(&request.signal)?;
    boxes::signal(&app, &who, &id, &exec, signal).await?;
    Ok(Json(Done { ok: true }))
}

/// Write to the standard input of a command of a box
///
/// The body's raw bytes, of any length, go to a command that was started with `openStdin`. Use of the box until it answers.
#[utoipa::path(
    post, path = "/v1/boxes/{id}/execs/{exec_id}/stdin", tag = "boxes", operation_id = "write_box_exec_stdin",
    params(
        ("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a"),
        ("exec_id" = String, Path, description = "Id of the command", example = "hnkainteaodl"),
        StdinQuery,
    ),
    request_body(content = Raw, description = "The bytes", content_type = "application/octet-stream"),
    responses((status = 200, description = "The command has been handed all of it", body = Done)),
)]
pub(crate) async fn stdin(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
    ExecId(exec): ExecId,
    Query(query): Query<StdinQuery>,
    body: Body,
) -> Result<Json<Done>, Failure> {
    let input = async |sandbox: &api::SandboxId| {
        write_stdin(&app, sandbox, &exec, &query, body).await.map(drop)
    };
    boxes::feed(&app, &who, &id, &exec, input).await?;
    Ok(Json(Done { ok: true }))
}

/// List the processes of a box
///
/// With the ports on which they listen. Use of the box.
#[utoipa::path(
    get, path = "/v1/boxes/{id}/procs", tag = "boxes", operation_id = "box_procs",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a")),
    responses((status = 200, description = "The processes", body = BoxProcesses)),
)]
pub(crate) async fn procs(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
) -> Result<Json<BoxProcesses>, Failure> {
    Ok(Json(boxes::procs(&app, &who, &id).await?))
}

/// Where in a box.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PathQuery {
    /// An absolute path.
    #[param(example = "/work/app.py")]
    path: String,
}

/// Read a file of a box
///
/// Its bytes, of any size. Use of the box until the last byte.
#[utoipa::path(
    get, path = "/v1/boxes/{id}/files", tag = "boxes", operation_id = "box_get",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a"), PathQuery),
    responses((status = 200, description = "The bytes", body = Raw, content_type = "application/octet-stream")),
)]
pub(crate) async fn read(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
    Query(PathQuery { path }): Query<PathQuery>,
) -> Result<Response, Failure> {
    validate::path("path", &path)?;
    let acting = boxes::act(&app, &who, &id, "sandbox_get").await?;
    let work = async { Ok(app.host().file_read(&acting.record.id, &path, 0, None).await?) };
    let file = boxes::while_paid(&app, &acting.record, work).await?;
    let (info, bytes) = file.value;
    let mut response = super::files::bytes(&info, bytes, acting);
    add_wake(response.headers_mut(), file.woke_ms);
    Ok(response)
}

/// Write a file of a box
///
/// The body's raw bytes, of any length, become the whole file. The old one stays until the new one is complete: a body that breaks off
/// changes nothing. Missing folders are made. Use of the box until it answers.
#[utoipa::path(
    put, path = "/v1/boxes/{id}/files", tag = "boxes", operation_id = "box_put",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a"), WriteQuery),
    request_body(content = Raw, description = "The bytes", content_type = "application/octet-stream"),
    responses((status = 200, description = "The file as it is now", body = FileInfo)),
)]
pub(crate) async fn write(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
    Query(query): Query<WriteQuery>,
    body: Body,
) -> Result<Json<FileInfo>, Failure> {
    validate::path("path", &query.path)?;
    let mode = query.mode.as_deref().map(read_mode).transpose()?;
    let acting = boxes::act(&app, &who, &id, "a file that is written").await?;
    let write = app.host().file_write(&acting.record.id, &query.path, mode, body_reader(body));
    let written = boxes::while_paid(&app, &acting.record, async { Ok(write.await?) }).await?;
    Ok(Json(written.value))
}

/// Read a tree of a box
///
/// A folder with all that is in it as a tar stream, with paths relative to it. A single file is a stream of one entry, by its own
/// name. Use of the box until the last byte.
#[utoipa::path(
    get, path = "/v1/boxes/{id}/tree", tag = "boxes", operation_id = "box_pull",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a"), PathQuery),
    responses((status = 200, description = "A tar archive", body = Raw, content_type = "application/x-tar")),
)]
pub(crate) async fn pull(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
    Query(PathQuery { path }): Query<PathQuery>,
) -> Result<Response, Failure> {
    validate::path("path", &path)?;
    let acting = boxes::act(&app, &who, &id, "sandbox_pull").await?;
    let work = async { Ok(app.host().tree_read(&acting.record.id, &path).await?) };
    let tree = boxes::while_paid(&app, &acting.record, work).await?;
    let mut response = super::files::tree(tree.value, acting);
    add_wake(response.headers_mut(), tree.woke_ms);
    Ok(response)
}

/// Write a tree into a box
///
/// Unpacks a tar stream below a folder, which is made if it is not there. What is there and not in the archive stays. Use of the box
/// until it answers.
#[utoipa::path(
    put, path = "/v1/boxes/{id}/tree", tag = "boxes", operation_id = "box_push",
    params(("id" = String, Path, description = "Its id", example = "k3b5qj2m4x7a"), PathQuery),
    request_body(content = Raw, content_type = "application/x-tar", description = "A tar archive"),
    responses((status = 200, description = "It is there", body = Done)),
)]
pub(crate) async fn push(
    State(app): State<App>,
    who: Who,
    BoxId(id): BoxId,
    Query(PathQuery { path }): Query<PathQuery>,
    body: Body,
) -> Result<Json<Done>, Failure> {
    validate::path("path", &path)?;
    let acting = boxes::act(&app, &who, &id, "sandbox_sync").await?;
    let write = app.host().tree_write(&acting.record.id, &path, body_reader(body));
    boxes::while_paid(&app, &acting.record, async { Ok(write.await?) }).await?;
    Ok(Json(Done { ok: true }))
}
