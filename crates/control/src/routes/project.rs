//! Settings of the project.

use api::project::{
    DELETE_AFTER_IDLE_DAYS_MAX, Project, SPENDING_LIMIT_MAX, SpendingLimit, UpdateProject,
};
use axum::Json;
use axum::extract::State;

use super::to_the_end;
use crate::App;
use crate::failure::Failure;
use crate::input::JsonBody;
use crate::{spending, validate};

/// Get the project's settings
///
/// What holds for every sandbox that does not say otherwise.
#[utoipa::path(
    get, path = "/v1/project", tag = "project", operation_id = "get_project",
    responses((status = 200, description = "The settings", body = Project)),
)]
pub(crate) async fn view(State(app): State<App>) -> Result<Json<Project>, Failure> {
    told(&app).await
}

/// Change the project's settings
///
/// Takes effect within seconds, for sandboxes that sleep already too.
#[utoipa::path(
    patch, path = "/v1/project", tag = "project", operation_id = "update_project",
    request_body(content = UpdateProject, description = "What shall be different"),
    responses((status = 200, description = "The settings after the change", body = Project)),
)]
pub(crate) async fn update(
    State(app): State<App>,
    JsonBody(request): JsonBody<UpdateProject>,
) -> Result<Json<Project>, Failure> {
    if let Some(Some(days)) = request.delete_after_idle_days
        && !(1..=DELETE_AFTER_IDLE_DAYS_MAX).contains(&days)
    {
        let field = "delete_after_idle_days";
        return Err(validate::out_of_range(field, days, 1, DELETE_AFTER_IDLE_DAYS_MAX).into());
    }
    if let Some(Some(SpendingLimit { memory_gib_seconds: limit })) = request.spending_limit
        && !(1..=SPENDING_LIMIT_MAX).contains(&limit)
    {
        let field = "spending_limit.memory_gib_seconds";
        return Err(validate::out_of_range(field, limit, 1, SPENDING_LIMIT_MAX).into());
    }
    to_the_end(async move {
        let mut project = app.catalogue().project();
        if let Some(days) = request.delete_after_idle_days {
            project.delete_after_idle_days = days;
        }
        if let Some(limit) = request.spending_limit {
            project.spending_limit = limit;
        }
        app.catalogue().set_project(project).await?;
        told(&app).await
    })
    .await
}

async fn told(app: &App) -> Result<Json<Project>, Failure> {
    let spending = spending::look(app).await?;
    Ok(Json(Project { spending, ..app.catalogue().project() }))
}
