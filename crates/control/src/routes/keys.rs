//! Keys: making, listing and revoking them. Only keys of scope `admin` come here.

use api::account::{ACCOUNT_DEFAULT, CreateKey, CreatedKey, Key, KeyList, LABEL_CHARS_MAX, Scope};
use api::{ApiError, Code};
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::{Extension, Json};

use super::to_the_end;
use crate::App;
use crate::auth::{Grant, Token};
use crate::boxes::rfc3339;
use crate::failure::Failure;
use crate::input::JsonBody;

/// Make a key
///
/// The answer is the only place where the key itself ever stands: only its hash is kept.
#[utoipa::path(
    post, path = "/v1/keys", tag = "accounts", operation_id = "create_key",
    request_body(content = CreateKey, description = "For whom, and what it opens; may be left out"),
    responses((status = 201, description = "It can be used", body = CreatedKey)),
)]
pub(crate) async fn create(
    State(app): State<App>,
    JsonBody(request): JsonBody<CreateKey>,
) -> Result<(StatusCode, Json<CreatedKey>), Failure> {
    let account = request.account.unwrap_or_else(|| ACCOUNT_DEFAULT.to_owned());
    if app.accounts().get(&account).is_none() {
        return Err(ApiError::unprocessable("account", "`account`: there is no such account")
            .hint("`GET /v1/accounts` or `dormouse accounts list` shows them")
            .into());
    }
    let label = request.label.unwrap_or_default();
    if label.chars().count() > LABEL_CHARS_MAX || label.chars().any(char::is_control) {
        let text = format!("`label`: {} characters", label.chars().count());
        return Err(ApiError::invalid("label", text)
            .hint(format!("at most {LABEL_CHARS_MAX}, none of which is a control character"))
            .into());
    }
    let scope = request.scope.unwrap_or(Scope::Boxes);
    to_the_end(async move {
        let (token, key) =
            app.tokens().make(app.catalogue(), &account, scope, label.trim()).await?;
        Ok((StatusCode::CREATED, Json(CreatedKey { about: told(&token), key })))
    })
    .await
}

/// List keys
///
/// Oldest first, of all accounts; without the keys themselves.
#[utoipa::path(
    get, path = "/v1/keys", tag = "accounts", operation_id = "list_keys",
    responses((status = 200, description = "All of them", body = KeyList)),
)]
pub(crate) async fn list(State(app): State<App>) -> Json<KeyList> {
    Json(KeyList { keys: app.tokens().list().iter().map(told).collect() })
}

/// Revoke a key
///
/// Requests that come with it from now on are refused; those in progress go on. A key does not revoke itself (`in_use`), so that nobody
/// locks himself out: take another one, or the local socket. Where none is left that opens everything, the daemon's
/// next start makes one, in `admin.token`; the local socket needs none.
#[utoipa::path(
    delete, path = "/v1/keys/{id}", tag = "accounts", operation_id = "delete_key",
    params(("id" = String, Path, description = "Its id", example = "k3vq7mzt2abc")),
    responses((status = 204, description = "It is revoked")),
)]
pub(crate) async fn delete(
    State(app): State<App>,
    Extension(grant): Extension<Grant>,
    KeyId(id): KeyId,
) -> Result<StatusCode, Failure> {
    if grant.key.as_ref() == Some(&id) {
        return Err(ApiError::new(Code::InUse, "this is the key that the request came with")
            .hint("revoke it with another key of scope `admin`, or over the local socket (`dormouse keys delete` on the host)")
            .into());
    }
    to_the_end(async move {
        if app.tokens().revoke(app.catalogue(), &id).await? {
            return Ok(StatusCode::NO_CONTENT);
        }
        Err(ApiError::new(Code::NotFound, "there is no key of this id")
            .hint("`GET /v1/keys` or `dormouse keys list` shows them")
            .into())
    })
    .await
}

fn told(token: &Token) -> Key {
    Key {
        id: token.id.clone(),
        account: token.account.clone(),
        scope: token.scope,
        label: token.label.clone(),
        created_at: rfc3339(u64::try_from(token.created_ms).unwrap_or(0)),
    }
}

/// The key that the path names.
pub(crate) struct KeyId(String);

impl FromRequestParts<App> for KeyId {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        crate::input::path_param(parts, app, "id").await.map(Self)
    }
}
