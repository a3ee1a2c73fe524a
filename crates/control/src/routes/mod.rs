//! The interface under `/v1`: one file per subject, each handler documented where it stands.

mod accounts;
mod attach;
mod box_work;
mod boxes;
mod checkpoints;
mod drives;
mod events;
mod execs;
mod files;
mod forward;
mod keys;
mod project;
mod sandboxes;
mod secrets;
mod snapshots;
mod system;
mod terminals;
pub(crate) mod usage;
mod volumes;

pub(crate) use sandboxes::{CURSOR_MS_DIGITS_MAX, LogKind, idempotency_key};

use api::sandbox::Sandbox;
use api::{ApiError, Code, SandboxId};
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use rmcp::ServerHandler;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::App;
use crate::auth::Grant;
use crate::failure::Failure;
use crate::mcp;
use crate::server::Peer;

/// Every documented route.
pub(crate) fn documented() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(sandboxes::create, sandboxes::list))
        .routes(routes!(sandboxes::view, sandboxes::update, sandboxes::delete))
        .routes(routes!(sandboxes::sleep))
        .routes(routes!(sandboxes::restart))
        .routes(routes!(sandboxes::fork))
        .routes(routes!(snapshots::take))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::view, snapshots::delete))
        .routes(routes!(drives::create, drives::list))
        .routes(routes!(drives::view, drives::delete))
        .routes(routes!(volumes::list))
        .routes(routes!(volumes::create, volumes::view, volumes::delete))
        .routes(routes!(checkpoints::list))
        .routes(routes!(checkpoints::restore))
        .routes(routes!(sandboxes::link))
        .routes(routes!(sandboxes::logs))
        .routes(routes!(events::of_one))
        .routes(routes!(events::of_all))
        .routes(routes!(events::why))
        .routes(routes!(execs::start, execs::list))
        .routes(routes!(execs::view))
        .routes(routes!(execs::output))
        .routes(routes!(execs::stdin))
        .routes(routes!(execs::signal))
        .routes(routes!(attach::attach))
        .routes(routes!(terminals::start, terminals::list))
        .routes(routes!(terminals::view, terminals::close))
        .routes(routes!(terminals::screen))
        .routes(routes!(terminals::resize))
        .routes(routes!(terminals::attach))
        .routes(routes!(files::read, files::write, files::remove))
        .routes(routes!(files::stat))
        .routes(routes!(files::list))
        .routes(routes!(files::mkdir))
        .routes(routes!(files::rename))
        .routes(routes!(files::read_tree, files::write_tree))
        .routes(routes!(project::view, project::update))
        .routes(routes!(forward::forward))
        .routes(routes!(boxes::start, boxes::list))
        .routes(routes!(boxes::view, boxes::update, boxes::stop))
        .routes(routes!(boxes::wake))
        .routes(routes!(boxes::events))
        .routes(routes!(box_work::exec))
        .routes(routes!(box_work::commands))
        .routes(routes!(box_work::command))
        .routes(routes!(box_work::output))
        .routes(routes!(box_work::signal))
        .routes(routes!(box_work::stdin))
        .routes(routes!(box_work::procs))
        .routes(routes!(boxes::wire))
        .routes(routes!(box_work::read, box_work::write))
        .routes(routes!(box_work::pull, box_work::push))
        .routes(routes!(boxes::add_secrets))
        .routes(routes!(boxes::set_checkpoint))
        .routes(routes!(boxes::heartbeat))
        .routes(routes!(secrets::list))
        .routes(routes!(secrets::put, secrets::delete))
        .routes(routes!(boxes::leave))
        .routes(routes!(accounts::create, accounts::list))
        .routes(routes!(accounts::view, accounts::update, accounts::delete))
        .routes(routes!(accounts::set_credit))
        .routes(routes!(keys::create, keys::list))
        .routes(routes!(keys::delete))
        .routes(routes!(usage::of_one))
        .routes(routes!(usage::of_all))
        .routes(routes!(system::drain))
        .routes(routes!(system::metrics))
        .routes(routes!(system::health))
        .routes(routes!(system::openapi))
}

/// The whole interface, guarded.
pub(crate) fn router<H: ServerHandler + Clone>(app: App, hosts: mcp::Hosts, tools: H) -> Router {
    let (router, _) = documented().split_for_parts();
    router
        .route_service(mcp::PATH, mcp::service(&app, hosts, tools))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(from_fn_with_state(app.clone(), guard))
        // Files and trees are streams of any size; JSON has its own limit.
        .layer(axum::extract::DefaultBodyLimit::disable())
        .with_state(app)
}

/// Paths that anybody may read.
const OPEN_PATHS: [&str; 2] = ["/v1/health", "/v1/openapi.json"];

/// Where figures are read; open to anybody if the operator says so.
const METRICS_PATH: &str = "/metrics";

/// Lets in who may come in, and puts into the request for whom it acts ([`Grant`]).
async fn guard(
    State(app): State<App>,
    mut request: Request,
    next: Next,
) -> Result<Response, Failure> {
    let local = request.extensions().get::<Peer>() == Some(&Peer::Local);
    let is_open = app.open_metrics() && request.uri().path() == METRICS_PATH;
    if local {
        let grant = Grant::local().acting_for(request.headers(), app.accounts())?;
        request.extensions_mut().insert(grant);
    } else if !is_open && !OPEN_PATHS.contains(&request.uri().path()) {
        let grant = app.tokens().check(request.headers())?;
        grant.check(request.uri().path())?;
        let grant = grant.acting_for(request.headers(), app.accounts())?;
        request.extensions_mut().insert(grant);
    }
    Ok(next.run(request).await)
}

async fn no_route() -> Failure {
    ApiError::new(Code::NotFound, "no such path")
        .hint("`GET /v1/openapi.json` describes every one")
        .into()
}

async fn no_method() -> Failure {
    ApiError::new(Code::MethodNotAllowed, "this path does not have this method")
        .hint("the `Allow` header lists those it has")
        .into()
}

/// The path is a connection of this protocol, and the request asks for none.
fn upgrade_required(protocol: &'static str, error: ApiError) -> Response {
    let error = ApiError { field: Some("Upgrade".to_owned()), ..error };
    let mut response = Failure::from(error).into_response();
    response.headers_mut().insert(header::UPGRADE, HeaderValue::from_static(protocol));
    response
}

/// What its host tells of a sandbox, unless it is on its way out.
async fn told(app: &App, id: &SandboxId) -> Result<Sandbox, Failure> {
    let known = app.host().view(id).await?;
    if known.going {
        return Err(ApiError::new(Code::BeingDeleted, "the sandbox is being deleted").into());
    }
    Ok(known.sandbox)
}

/// Runs work to its end even if the client goes away meanwhile.
pub(crate) async fn to_the_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, Failure> {
    tokio::spawn(tracing::Instrument::in_current_span(work))
        .await
        .map_err(Failure::internal("carry out a request"))?
}
