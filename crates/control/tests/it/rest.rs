//! The interface.

use crate::client::World;

#[tokio::test]
async fn create_list_get_exec_delete() {
    let world = World::new().await;
    let made = world.sandbox("web").await;
    assert_eq!(made.name, "web");
    let list = world.call("GET", "/v1/sandboxes", "").await.value();
    assert_eq!(list["sandboxes"][0]["id"], made.id.as_str());
    for path in ["/v1/sandboxes/web", &format!("/v1/sandboxes/{}", made.id)] {
        assert_eq!(world.call("GET", path, "").await.value()["name"], "web");
    }
    let body = r#"{"argv": ["sh", "-c", "echo out; echo err >&2; exit 3"]}"#;
    let result = world.call("POST", "/v1/sandboxes/web/execs", body).await;
    assert_eq!(result.status, 200);
    let result = result.value();
    assert_eq!((&result["stdout"], &result["stderr"], &result["exit_code"]), (&"out\n".into(), &"err\n".into(), &3.into()));
    assert_eq!(world.call("DELETE", "/v1/sandboxes/web", "").await.status, 204);
    assert_eq!(
        world.call("GET", "/v1/sandboxes/web", "").await.error(),
        "404 not_found: no sandbox has the id or name `web`"
    );
}
