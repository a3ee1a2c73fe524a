//! What sandboxes have used (S23).

use std::collections::HashMap;

use api::SandboxId;
use api::sandbox::Sandbox;
use api::usage::{SandboxUsage, Usage, UsageReport};
use axum::Json;
use axum::extract::State;
use futures_util::StreamExt;

use crate::App;
use crate::failure::Failure;
use crate::input::At;

/// How many are asked at a time: each is a look at a few files.
const ASKED_AT_ONCE: usize = 16;

/// Tell what a sandbox has used
///
/// Seconds awake and asleep, processor time, memory, and what it keeps on disk, since it was made. Survives restarts of the
/// daemon. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/usage", tag = "usage", operation_id = "get_usage",
    params(("id" = String, Path, description = "Id or name", example = "web")),
    responses((status = 200, description = "Its sums up to now", body = SandboxUsage)),
)]
pub(crate) async fn of_one(
    State(app): State<App>,
    At(entry): At,
) -> Result<Json<SandboxUsage>, Failure> {
    let sandbox = super::told(&app, &entry.id).await?;
    Ok(Json(told(&app, sandbox).await?))
}

/// Tell what all have used
///
/// Each sandbox, those that were deleted together, and the sum. Wakes nothing.
#[utoipa::path(
    get, path = "/v1/usage", tag = "usage", operation_id = "list_usage",
    responses((status = 200, description = "Sums up to now", body = UsageReport, example = json!({
        "sandboxes": [], "deleted": Usage::default(), "total": Usage::default(),
    }))),
)]
pub(crate) async fn of_all(State(app): State<App>) -> Result<Json<UsageReport>, Failure> {
    let views = app.host().list().await.into_iter().map(|known| known.sandbox);
    let mut views: HashMap<SandboxId, Sandbox> =
        views.map(|sandbox| (sandbox.id.clone(), sandbox)).collect();
    let known = app.catalogue().all().into_iter().filter_map(|entry| views.remove(&entry.id));
    let known: Vec<Sandbox> = known.collect();
    let asked = known.into_iter().map(|sandbox| told(&app, sandbox));
    let sandboxes: Vec<SandboxUsage> = futures_util::stream::iter(asked)
        .buffered(ASKED_AT_ONCE)
        // One that goes away meanwhile is told among the deleted.
        .filter_map(|told| std::future::ready(told.ok()))
        .collect()
        .await;
    let deleted = app.catalogue().usage_of_deleted().await?;
    let total = sandboxes.iter().fold(deleted.clone(), |sum, one| sum.plus(&one.usage));
    Ok(Json(UsageReport { sandboxes, deleted, total }))
}

async fn told(app: &App, sandbox: Sandbox) -> Result<SandboxUsage, Failure> {
    let usage: Usage = app.host().usage(&sandbox.id).await?;
    let Sandbox { id, name, created_at, .. } = sandbox;
    let box_name = app.boxes().record(&id).and_then(|record| record.spec.name.clone());
    Ok(SandboxUsage { id, name, box_name, since: created_at, usage })
}
