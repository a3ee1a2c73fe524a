//! Drives: making, listing and deleting them. They are attached when a sandbox is made.

use api::drive::{CreateDrive, Drive, DriveList};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use super::to_the_end;
use crate::App;
use crate::failure::Failure;
use crate::input::{DriveName, JsonBody};
use crate::validate;

/// Make a drive
///
/// A disk with an empty file system, which outlives sandboxes. One sandbox at a time has it: it is named in `drives` when the
/// sandbox is made. It takes room on the host only as it is filled.
#[utoipa::path(
    post, path = "/v1/drives", tag = "drives", operation_id = "create_drive",
    request_body(content = CreateDrive, description = "Its name and size"),
    responses((status = 201, description = "It is there", body = Drive)),
)]
pub(crate) async fn create(
    State(app): State<App>,
    JsonBody(request): JsonBody<CreateDrive>,
) -> Result<(StatusCode, Json<Drive>), Failure> {
    validate::drive(&request)?;
    let drive = to_the_end(async move { Ok(app.host().drive_create(request).await?) }).await?;
    Ok((StatusCode::CREATED, Json(drive)))
}

/// List drives
///
/// By name, with the sandbox that has each. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/drives", tag = "drives", operation_id = "list_drives",
    responses((status = 200, description = "All of them", body = DriveList)),
)]
pub(crate) async fn list(State(app): State<App>) -> Result<Json<DriveList>, Failure> {
    Ok(Json(DriveList { drives: app.host().drives().await? }))
}

/// Tell about a drive
///
/// How large it is, what it takes on disk, and which sandbox has it. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/drives/{name}", tag = "drives", operation_id = "get_drive",
    params(("name" = String, Path, description = "Its name", example = "data")),
    responses((status = 200, description = "What it is", body = Drive)),
)]
pub(crate) async fn view(
    State(app): State<App>,
    DriveName(name): DriveName,
) -> Result<Json<Drive>, Failure> {
    Ok(Json(app.host().drive_view(&name).await?))
}

/// Delete a drive
///
/// With all that is on it. Refused with `in_use` while a sandbox has it, awake or asleep.
#[utoipa::path(
    delete, path = "/v1/drives/{name}", tag = "drives", operation_id = "delete_drive",
    params(("name" = String, Path, description = "Its name", example = "data")),
    responses((status = 204, description = "It is gone")),
)]
pub(crate) async fn delete(
    State(app): State<App>,
    DriveName(name): DriveName,
) -> Result<StatusCode, Failure> {
    to_the_end(async move { Ok(app.host().drive_delete(&name).await?) }).await?;
    Ok(StatusCode::NO_CONTENT)
}
