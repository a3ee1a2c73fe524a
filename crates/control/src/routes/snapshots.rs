//! Snapshots: taking, listing and deleting them.

use api::snapshot::{Snapshot, SnapshotList, TakeSnapshot};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use super::to_the_end;
use crate::App;
use crate::failure::Failure;
use crate::input::{At, JsonBody, SnapshotName};
use crate::validate;

/// Take a snapshot
///
/// Memory, devices and disk of this moment, kept under a name. One that runs pauses meanwhile and goes on; one that sleeps on
/// disk is not woken. Others are made from it with `snapshot` at create.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/snapshots", tag = "snapshots", operation_id = "take_snapshot",
    params(("id" = String, Path, description = "Id or name of the sandbox", example = "web")),
    request_body(content = TakeSnapshot, description = "Its name"),
    responses((status = 201, description = "It is kept", body = Snapshot)),
)]
pub(crate) async fn take(
    State(app): State<App>,
    At(entry): At,
    JsonBody(request): JsonBody<TakeSnapshot>,
) -> Result<(StatusCode, Json<Snapshot>), Failure> {
    validate::name("name", &request.name)?;
    let snapshot =
        to_the_end(async move { Ok(app.host().snapshot_take(&entry.id, &request.name).await?) });
    Ok((StatusCode::CREATED, Json(snapshot.await?)))
}

/// List snapshots
///
/// Oldest first. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/snapshots", tag = "snapshots", operation_id = "list_snapshots",
    responses((status = 200, description = "All of them", body = SnapshotList)),
)]
pub(crate) async fn list(State(app): State<App>) -> Result<Json<SnapshotList>, Failure> {
    Ok(Json(SnapshotList { snapshots: app.host().snapshots().await? }))
}

/// Tell about a snapshot
///
/// Whose it is, when it was taken, and what it takes on disk. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/snapshots/{name}", tag = "snapshots", operation_id = "get_snapshot",
    params(("name" = String, Path, description = "Its name", example = "ready")),
    responses((status = 200, description = "What it is", body = Snapshot)),
)]
pub(crate) async fn view(
    State(app): State<App>,
    SnapshotName(name): SnapshotName,
) -> Result<Json<Snapshot>, Failure> {
    Ok(Json(app.host().snapshot_view(&name).await?))
}

/// Delete a snapshot
///
/// What was made from it stays as it is.
#[utoipa::path(
    delete, path = "/v1/snapshots/{name}", tag = "snapshots", operation_id = "delete_snapshot",
    params(("name" = String, Path, description = "Its name", example = "ready")),
    responses((status = 204, description = "It is gone")),
)]
pub(crate) async fn delete(
    State(app): State<App>,
    SnapshotName(name): SnapshotName,
) -> Result<StatusCode, Failure> {
    to_the_end(async move { Ok(app.host().snapshot_delete(&name).await?) }).await?;
    Ok(StatusCode::NO_CONTENT)
}
