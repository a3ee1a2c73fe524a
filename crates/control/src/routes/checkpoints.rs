//! Checkpoints: what the store has, and taking a sandbox over from there.

use api::checkpoint::CheckpointList;
use api::sandbox::Sandbox;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use super::to_the_end;
use crate::App;
use crate::failure::Failure;
use crate::input::CheckpointOf;
use crate::reconcile;

/// List checkpoints
///
/// The newest of each sandbox in the host's store, whichever host has kept it; oldest first. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/checkpoints", tag = "checkpoints", operation_id = "list_checkpoints",
    responses((status = 200, description = "All of them", body = CheckpointList)),
)]
pub(crate) async fn list(State(app): State<App>) -> Result<Json<CheckpointList>, Failure> {
    Ok(Json(CheckpointList { checkpoints: app.host().checkpoints().await? }))
}

/// Take over a sandbox
///
/// From its newest checkpoint, when its host is lost: with its id, name, settings, disk, memory and processes, as it was when
/// the checkpoint was taken; the event `sandbox.moved` says when that was. A host that comes back gives it up.
/// A box comes back as a box, with its services and URLs, to the account of the same name, or else to the default one; look at it with
/// `GET /v1/boxes/{id}`.
#[utoipa::path(
    post, path = "/v1/checkpoints/{id}/restore", tag = "checkpoints", operation_id = "restore_checkpoint",
    params(("id" = String, Path, description = "Id of the sandbox", example = "k3vq7mzt2abc")),
    responses((status = 201, description = "It is this host's", body = Sandbox)),
)]
pub(crate) async fn restore(
    State(app): State<App>,
    CheckpointOf(id): CheckpointOf,
) -> Result<(StatusCode, Json<Sandbox>), Failure> {
    to_the_end(async move {
        let known = app.host().checkpoint_restore(&id).await?;
        reconcile::enter(&app, known).await?;
        Ok((StatusCode::CREATED, Json(app.host().view(&id).await?.sandbox)))
    })
    .await
}
