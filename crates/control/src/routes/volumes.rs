//! Volumes: making, listing and deleting them. They are attached when a sandbox is made or restarted.

use api::drive::{Volume, VolumeList};
use api::{ApiError, Code};
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;

use super::to_the_end;
use crate::App;
use crate::failure::Failure;
use crate::input::{VolumeName, body_reader};
use crate::openapi::Raw;
use crate::validate;

/// Make a volume
///
/// Of the files in the body, a tar stream of any size. It never changes, and any number of sandboxes have it at once, none of
/// which can write it: it is named in `volumes` when a sandbox is made or restarted.
#[utoipa::path(
    put, path = "/v1/volumes/{name}", tag = "drives", operation_id = "create_volume",
    params(("name" = String, Path, description = "Its name: 1-63 characters of a-z, 0-9 and `-`", example = "models")),
    request_body(content = Raw, description = "The tar stream", content_type = "application/x-tar"),
    responses((status = 201, description = "It is there", body = Volume)),
)]
pub(crate) async fn create(
    State(app): State<App>,
    VolumeName(name): VolumeName,
    body: Body,
) -> Result<(StatusCode, Json<Volume>), Failure> {
    validate::name("name", &name)?;
    let volume = app.host().volume_create(&name, body_reader(body)).await?;
    Ok((StatusCode::CREATED, Json(volume)))
}

/// List volumes
///
/// By name, with the sandboxes that have each. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/volumes", tag = "drives", operation_id = "list_volumes",
    responses((status = 200, description = "All of them", body = VolumeList)),
)]
pub(crate) async fn list(State(app): State<App>) -> Result<Json<VolumeList>, Failure> {
    Ok(Json(VolumeList { volumes: app.host().volumes().await? }))
}

/// Tell about a volume
///
/// What is in it, what it takes on disk, and which sandboxes have it. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/volumes/{name}", tag = "drives", operation_id = "get_volume",
    params(("name" = String, Path, description = "Its name", example = "models")),
    responses((status = 200, description = "What it is", body = Volume)),
)]
pub(crate) async fn view(
    State(app): State<App>,
    VolumeName(name): VolumeName,
) -> Result<Json<Volume>, Failure> {
    Ok(Json(app.host().volume_view(&named(&name)?).await?))
}

/// Delete a volume
///
/// Refused with `in_use` while a sandbox has it, awake or asleep, or a snapshot.
#[utoipa::path(
    delete, path = "/v1/volumes/{name}", tag = "drives", operation_id = "delete_volume",
    params(("name" = String, Path, description = "Its name", example = "models")),
    responses((status = 204, description = "It is gone")),
)]
pub(crate) async fn delete(
    State(app): State<App>,
    VolumeName(name): VolumeName,
) -> Result<StatusCode, Failure> {
    let name = named(&name)?;
    to_the_end(async move { Ok(app.host().volume_delete(&name).await?) }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What is no name is nobody's.
fn named(name: &str) -> Result<String, ApiError> {
    if validate::is_name(name) {
        return Ok(name.to_owned());
    }
    let error = ApiError::new(Code::NotFound, "there is no volume of this name");
    Err(error.hint("`GET /v1/volumes` lists them"))
}
