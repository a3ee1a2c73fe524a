//! Accounts, to which boxes belong. Only keys of scope `admin` come here.

use api::account::{Account, AccountList, CreateAccount, SetCredit, UpdateAccount};
use api::{ApiError, Code};
use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;

use super::to_the_end;
use crate::App;
use crate::accounts::{self, check_credit, check_deletable, check_id, check_url_allow, credit_ms};
use crate::boxes::rfc3339;
use crate::catalogue::now_ms;
use crate::credit;
use crate::failure::Failure;
use crate::input::JsonBody;

/// Make an account
///
/// Boxes belong to accounts; one sees nothing of the boxes of another. Programs act for it with its keys.
#[utoipa::path(
    post, path = "/v1/accounts", tag = "accounts", operation_id = "create_account",
    request_body(content = CreateAccount, description = "Its id and limits"),
    responses((status = 201, description = "It is there", body = Account)),
)]
pub(crate) async fn create(
    State(app): State<App>,
    JsonBody(request): JsonBody<CreateAccount>,
) -> Result<(StatusCode, Json<Account>), Failure> {
    check_id(&request.id)?;
    check_credit(request.credit)?;
    check_url_allow(request.url_allow.as_deref())?;
    let account = accounts::Account {
        id: request.id,
        plan: request.plan,
        credit_ms: credit_ms(request.credit),
        url_allow: request.url_allow,
        created_ms: now_ms(),
    };
    to_the_end(async move {
        app.accounts().add(app.catalogue(), account.clone()).await?;
        Ok((StatusCode::CREATED, Json(told(&account))))
    })
    .await
}

/// List accounts
///
/// By id; `default` is always there.
#[utoipa::path(
    get, path = "/v1/accounts", tag = "accounts", operation_id = "list_accounts",
    responses((status = 200, description = "All of them", body = AccountList)),
)]
pub(crate) async fn list(State(app): State<App>) -> Json<AccountList> {
    Json(AccountList { accounts: app.accounts().list().iter().map(told).collect() })
}

/// Tell about an account
///
/// Its plan, what is left of its credit, and from where its boxes' URLs may be opened.
#[utoipa::path(
    get, path = "/v1/accounts/{id}", tag = "accounts", operation_id = "get_account",
    params(("id" = String, Path, description = "Its id", example = "acme")),
    responses((status = 200, description = "The account", body = Account)),
)]
pub(crate) async fn view(
    State(app): State<App>,
    AccountId(id): AccountId,
) -> Result<Json<Account>, Failure> {
    Ok(Json(told(&app.accounts().find(&id)?)))
}

/// Change an account
///
/// Its plan and from where its boxes' URLs may be opened. Boxes that it has go on, also where they are more than a new plan allows.
#[utoipa::path(
    patch, path = "/v1/accounts/{id}", tag = "accounts", operation_id = "update_account",
    params(("id" = String, Path, description = "Its id", example = "acme")),
    request_body(content = UpdateAccount, description = "What shall be different"),
    responses((status = 200, description = "The account after the change", body = Account)),
)]
pub(crate) async fn update(
    State(app): State<App>,
    AccountId(id): AccountId,
    JsonBody(request): JsonBody<UpdateAccount>,
) -> Result<Json<Account>, Failure> {
    check_url_allow(request.url_allow.as_ref().and_then(|list| list.as_deref()))?;
    to_the_end(async move {
        let changed = app.accounts().change(app.catalogue(), &id, |account| {
            account.plan = request.plan.unwrap_or(account.plan);
            if let Some(list) = request.url_allow {
                account.url_allow = list;
            }
        });
        Ok(Json(told(&changed.await?)))
    })
    .await
}

/// Set an account's credit
///
/// What is left of it from now on, whatever was before; null: nothing is counted. With credit boxes go on that were frozen for want of
/// it: the next call that acts on one thaws it.
#[utoipa::path(
    put, path = "/v1/accounts/{id}/credit", tag = "accounts", operation_id = "set_account_credit",
    params(("id" = String, Path, description = "Its id", example = "acme")),
    request_body(content = SetCredit, description = "How much"),
    responses((status = 200, description = "The account after the change", body = Account)),
)]
pub(crate) async fn set_credit(
    State(app): State<App>,
    AccountId(id): AccountId,
    JsonBody(SetCredit { credit }): JsonBody<SetCredit>,
) -> Result<Json<Account>, Failure> {
    check_credit(credit)?;
    to_the_end(async move { Ok(Json(told(&credit::set(&app, &id, credit_ms(credit)).await?))) })
        .await
}

/// Delete an account
///
/// With its keys and secrets. Refused with `in_use` while it has boxes that have not ended, and for `default`.
#[utoipa::path(
    delete, path = "/v1/accounts/{id}", tag = "accounts", operation_id = "delete_account",
    params(("id" = String, Path, description = "Its id", example = "acme")),
    responses((status = 204, description = "It is gone")),
)]
pub(crate) async fn delete(
    State(app): State<App>,
    AccountId(id): AccountId,
) -> Result<StatusCode, Failure> {
    app.accounts().find(&id)?;
    check_deletable(&id)?;
    to_the_end(async move {
        let records = app.boxes().of_account(&id);
        let live = records.iter().filter(|record| record.ended.is_none()).count();
        if live > 0 {
            let boxes = if live == 1 { "box that has" } else { "boxes that have" };
            let text = format!("the account `{id}` has {live} {boxes} not ended");
            return Err(ApiError::new(Code::InUse, text).hint(in_use_hint(&id)).into());
        }
        app.accounts().remove(app.catalogue(), &id).await?;
        app.tokens().forget_account(&id);
        app.secrets().forget_account(&id);
        for record in records {
            app.boxes().forget(app.catalogue(), &record.id).await?;
        }
        Ok(StatusCode::NO_CONTENT)
    })
    .await
}

/// How an operator ends what an account still has. Boxes that were stopped for idleness are among it while their copies are kept, and
/// only a list of all shows them.
fn in_use_hint(id: &str) -> String {
    format!(
        "stop them first: `dormouse --as-account {id} boxes list --all` shows them (those that are `terminated` count while they are \
         restorable), `dormouse --as-account {id} boxes stop BOX` ends one; over HTTP `GET /v1/boxes?all=1` and \
         `DELETE /v1/boxes/{{id}}` with the header `X-Dormouse-Account: {id}`"
    )
}

fn told(account: &accounts::Account) -> Account {
    Account {
        id: account.id.clone(),
        plan: account.plan,
        credit: account.credit(),
        url_allow: account.url_allow.clone(),
        created_at: rfc3339(u64::try_from(account.created_ms).unwrap_or(0)),
    }
}

/// The account that the path names.
pub(crate) struct AccountId(String);

impl FromRequestParts<App> for AccountId {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        crate::input::path_param(parts, app, "id").await.map(Self)
    }
}
