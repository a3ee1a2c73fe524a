//! Secrets of the account that asks (T13). Their values come in and are never told again.

use api::secret::{PutSecret, Secret, SecretList};
use api::{ApiError, Code};
use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;

use super::to_the_end;
use crate::App;
use crate::boxes::{Who, rfc3339};
use crate::failure::Failure;
use crate::input::JsonBody;
use crate::secrets::{check_name, check_value};

/// Store a secret
///
/// Under the name of the environment variable that it becomes in boxes that are started with it; in place of the one of this name, from
/// the next command on. It is kept encrypted, and no answer ever has it.
#[utoipa::path(
    put, path = "/v1/secrets/{name}", tag = "boxes", operation_id = "put_secret",
    params(("name" = String, Path, description = "1-128 of letters, digits and `_`, not beginning with a digit", example = "API_TOKEN")),
    request_body(content = PutSecret, description = "Its value"),
    responses((status = 200, description = "It is stored", body = Secret)),
)]
pub(crate) async fn put(
    State(app): State<App>,
    who: Who,
    SecretName(name): SecretName,
    JsonBody(PutSecret { value }): JsonBody<PutSecret>,
) -> Result<Json<Secret>, Failure> {
    check_name(&name)?;
    check_value(&value)?;
    to_the_end(async move {
        let at = app.secrets().put(app.catalogue(), &who.account, &name, &value).await?;
        Ok(Json(told(name, at)))
    })
    .await
}

/// List secrets
///
/// Names alone, of the account that asks.
#[utoipa::path(
    get, path = "/v1/secrets", tag = "boxes", operation_id = "list_secrets",
    responses((status = 200, description = "Their names", body = SecretList)),
)]
pub(crate) async fn list(State(app): State<App>, who: Who) -> Json<SecretList> {
    let secrets = app.secrets().list(&who.account).into_iter();
    Json(SecretList { secrets: secrets.map(|(name, at)| told(name, at)).collect() })
}

/// Delete a secret
///
/// Boxes that have it go on; their next commands go without it.
#[utoipa::path(
    delete, path = "/v1/secrets/{name}", tag = "boxes", operation_id = "delete_secret",
    params(("name" = String, Path, description = "Its name", example = "API_TOKEN")),
    responses((status = 204, description = "It is gone")),
)]
pub(crate) async fn delete(
    State(app): State<App>,
    who: Who,
    SecretName(name): SecretName,
) -> Result<StatusCode, Failure> {
    to_the_end(async move {
        if app.secrets().remove(app.catalogue(), &who.account, &name).await? {
            return Ok(StatusCode::NO_CONTENT);
        }
        Err(ApiError::new(Code::NotFound, "no secret is stored under this name")
            .hint("`GET /v1/secrets` or `dormouse secrets list` shows their names")
            .into())
    })
    .await
}

fn told(name: String, updated_ms: i64) -> Secret {
    Secret { name, updated_at: rfc3339(u64::try_from(updated_ms).unwrap_or(0)) }
}

/// The secret that the path names.
pub(crate) struct SecretName(String);

impl FromRequestParts<App> for SecretName {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        crate::input::path_param(parts, app, "name").await.map(Self)
    }
}
