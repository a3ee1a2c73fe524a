//! The OpenAPI document: made from the routes themselves, checked in, and the same bytes each time.

mod rules;

use api::ApiError;
use utoipa::OpenApi;
use utoipa::openapi::content::ContentBuilder;
use utoipa::openapi::path::Operation;
use utoipa::openapi::response::ResponseBuilder;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Ref, RefOr, Required};

use serde_json::json;

use crate::routes;

/// Title, text and tags.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Dormouse",
        description = "Sandboxes that sleep when nothing needs them and wake, exactly where they were, when anything does. \
                       There is no wake call: every call that needs a sandbox wakes it, and says in `Server-Timing: wake;dur=<ms>` \
                       what that took. Reading and listing wake nothing.\n\nUnknown fields and parameters are refused. \
                       Every error has the same body; its codes are in `docs/errors.md`.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    servers((url = "http://localhost:8420", description = "The default of `dormouse serve`")),
    tags(
        (name = "sandboxes", description = "Making, changing, sleeping, forking and deleting"),
        (name = "snapshots", description = "Kept moments of sandboxes, from which others are made"),
        (name = "drives", description = "Disks that outlive sandboxes, and volumes that many of them share"),
        (name = "checkpoints", description = "Awake sandboxes in an object store, for when their host is lost"),
        (name = "execs", description = "Commands in a sandbox"),
        (name = "terminals", description = "Terminals in a sandbox, looked at and typed to by several"),
        (name = "files", description = "Files and trees of a sandbox"),
        (name = "events", description = "What happened to a sandbox, and why"),
        (name = "usage", description = "What sandboxes have used, for bills"),
        (name = "boxes", description = "Sandboxes for AI agents and the people who watch them: frozen when nobody uses them, stopped for good when nobody wants them any more"),
        (name = "accounts", description = "To whom boxes belong, and the keys with which programs act for them; only for keys of scope `admin`"),
        (name = "system", description = "The service itself"),
    ),
    components(schemas(ApiError, api::exec::AttachMessage, api::terminal::TerminalMessage, routes::LogKind)),
)]
struct Base;

/// Bytes as they are, for the document alone.
#[derive(utoipa::ToSchema)]
#[schema(value_type = String, format = Binary)]
#[expect(dead_code, reason = "only its schema is used")]
pub(crate) struct Raw(Vec<u8>);

/// Operations whose body may be left out: everything in it has a default.
const BODY_OPTIONAL: [&str; 20] = [
    "create_sandbox",
    "update_sandbox",
    "update_account",
    "update_project",
    "sleep_sandbox",
    "restart_sandbox",
    "fork_sandbox",
    "start_terminal",
    "drain_host",
    "start_box",
    "update_box",
    "box_push",
    "box_put",
    "write_box_exec_stdin",
    "write_exec_stdin",
    "write_tree",
    "create_volume",
    "write_file",
    "agent_heartbeat",
    "create_key",
];

/// The document as pretty JSON with a newline at the end.
///
/// # Panics
///
/// Never: a document made of plain data is always JSON.
pub fn document() -> String {
    let (_, made) = routes::documented().split_for_parts();
    let mut document = Base::openapi().merge_from(made);
    document.components.get_or_insert_default().add_security_scheme(
        "token",
        SecurityScheme::Http(
            HttpBuilder::new()
                .scheme(HttpAuthScheme::Bearer)
                .description(Some(
                    "`Authorization: Bearer <token>`; not needed on the local socket",
                ))
                .build(),
        ),
    );
    for item in document.paths.paths.values_mut() {
        for operation in
            [&mut item.get, &mut item.put, &mut item.post, &mut item.delete, &mut item.patch]
        {
            operation.iter_mut().for_each(complete);
        }
    }
    let mut document = serde_json::to_value(&document).expect("plain data");
    rules::constrain(&mut document);
    let mut text = serde_json::to_string_pretty(&document).expect("plain data");
    text.push('\n');
    text
}

/// What is the same for every operation: the token, and the one error body.
fn complete(operation: &mut Operation) {
    operation
        .security
        .get_or_insert_with(|| vec![SecurityRequirement::new("token", [] as [&str; 0])]);
    let example = json!({
        "error": "no sandbox has the id or name `web`",
        "code": "not_found",
        "hint": "`GET /v1/sandboxes` or `dormouse sandboxes list` shows what there is",
        "retryable": false,
    });
    let schema = RefOr::Ref(Ref::from_schema_name("ApiError"));
    let content = ContentBuilder::new().schema(Some(schema)).example(Some(example)).build();
    let error = ResponseBuilder::new()
        .description("Not done. `code` says why; the status goes with it")
        .content("application/json", content)
        .build();
    let id = operation.operation_id.as_deref().unwrap_or_default();
    if let Some(RefOr::T(body)) = &mut operation.request_body
        && BODY_OPTIONAL.contains(&id)
    {
        body.required = Some(Required::False);
    }
    operation.responses.responses.insert("default".to_owned(), RefOr::T(error));
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    /// Generators of clients stumble over operations that lack any of these.
    #[test]
    fn every_operation_is_described() {
        let document: Value = serde_json::from_str(&super::document()).unwrap();
        assert_eq!(document["openapi"], "3.1.0");
        let mut ids = std::collections::BTreeSet::new();
        for (path, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                let place = format!("{method} {path}");
                let text = |field: &str| operation[field].as_str().unwrap_or_default().to_owned();
                assert!(!text("summary").is_empty(), "{place} lacks a summary");
                assert!(!text("description").is_empty(), "{place} lacks a description");
                assert!(operation["tags"][0].is_string(), "{place} lacks a tag");
                assert!(ids.insert(text("operationId")), "{place} has the operationId of another");
                assert!(
                    operation["responses"]["default"].is_object(),
                    "{place} lacks the error body"
                );
                for (status, response) in operation["responses"].as_object().unwrap() {
                    let described =
                        response["description"].as_str().is_some_and(|text| !text.is_empty());
                    assert!(described, "{place}: {status} lacks a description");
                }
                for parameter in operation["parameters"].as_array().into_iter().flatten() {
                    assert!(
                        parameter["description"].is_string(),
                        "{place}: {} lacks a description",
                        parameter["name"]
                    );
                }
                // The error body is the same everywhere; an example must be of this operation.
                let mut own = operation.clone();
                own["responses"].as_object_mut().unwrap().remove("default");
                let schemas = &document["components"]["schemas"];
                let mut text = own.to_string();
                for (name, schema) in schemas.as_object().unwrap() {
                    if text.contains(&format!("/schemas/{name}\"")) {
                        text += &schema.to_string();
                    }
                }
                assert!(text.contains("\"example\""), "{place} lacks an example");
            }
        }
        assert!(ids.len() > 20, "only {} operations", ids.len());
    }

    #[test]
    fn the_checked_in_document_is_current() {
        let checked_in = include_str!("../../../../docs/openapi.json");
        assert!(
            checked_in == super::document(),
            "write it anew: `dormouse openapi > docs/openapi.json`"
        );
    }

    #[test]
    fn every_schema_that_is_named_is_there() {
        let text = super::document();
        let document: Value = serde_json::from_str(&text).unwrap();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        for named in text.split("\"#/components/schemas/").skip(1) {
            let name = named.split('"').next().unwrap();
            assert!(schemas.contains_key(name), "`{name}` is named and not there");
        }
    }

    #[test]
    fn it_is_the_same_each_time() {
        assert_eq!(super::document(), super::document());
    }
}
