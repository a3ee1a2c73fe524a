//! Making, listing, changing, sleeping, restarting, forking and deleting sandboxes; their links.

use std::io::IsTerminal;
use std::time::Duration;

use api::checkpoint::CheckpointSetting;
use api::sandbox::{
    CreateSandbox, ForkList, ForkRequest, Forked, Link, PolicyPatch, RestartRequest, Sandbox,
    SandboxPage, SleepRequest, UpdateSandbox,
};
use hyper::http::request::Builder;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::sandbox_view::{print, status_name, status_text};
use crate::cli::{CreateArgs, ForkArgs, ListArgs, PolicyArgs, SizeArgs, SleepArgs, UpdateArgs};
use crate::client::{Client, full, quote, read_json};
use crate::problem::Problem;
use crate::show;

/// A copy of what is there takes less on most machines.
const TELL_AFTER: Duration = Duration::from_secs(2);

pub(crate) async fn create(
    client: &Client,
    arguments: CreateArgs,
    json: bool,
) -> Result<i32, Problem> {
    let body = CreateSandbox {
        labels: arguments.label.into_iter().collect(),
        ..new_sandbox(arguments.size, arguments.name, policy(arguments.policy))
    };
    let sandbox =
        make(client, "/v1/sandboxes", &body, arguments.idempotency_key.as_deref()).await?;
    print_made(&sandbox, json)
}

pub(crate) async fn fork(client: &Client, arguments: ForkArgs, json: bool) -> Result<i32, Problem> {
    let path = format!("/v1/sandboxes/{}/fork", quote(&arguments.parent));
    let body = ForkRequest { name: arguments.name, count: arguments.count };
    match make(client, &path, &body, arguments.idempotency_key.as_deref()).await? {
        Forked::One(sandbox) => print_made(&sandbox, json),
        Forked::Many(ForkList { forks }) => {
            if json {
                show::json(&forks)?;
            } else {
                for fork in &forks {
                    show::data(&fork.name)?;
                }
            }
            Ok(0)
        }
    }
}

pub(crate) async fn list(client: &Client, arguments: ListArgs, json: bool) -> Result<i32, Problem> {
    let mut query = String::new();
    if let Some(status) = arguments.status {
        query = format!("&status={}", status_name(status.into()));
    }
    if !arguments.label.is_empty() {
        query = format!("{query}&label={}", quote(&arguments.label.join(",")));
    }
    let mut sandboxes = Vec::new();
    let mut cursor = String::new();
    loop {
        let page: SandboxPage =
            client.get(&format!("/v1/sandboxes?limit=1000{query}{cursor}")).await?;
        sandboxes.extend(page.sandboxes);
        match page.next_cursor {
            Some(next) => cursor = format!("&cursor={}", quote(&next)),
            None => break,
        }
    }
    if json {
        show::json(&sandboxes)?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = sandboxes
        .iter()
        .map(|sandbox| {
            vec![
                sandbox.name.clone(),
                sandbox.id.to_string(),
                status_text(sandbox),
                format!("{} MiB", sandbox.memory_mib),
                show::age(&sandbox.created_at),
            ]
        })
        .collect();
    show::table(&["NAME", "ID", "STATUS", "MEMORY", "CREATED"], &rows)?;
    Ok(0)
}

pub(crate) async fn get(client: &Client, name: &str, json: bool) -> Result<i32, Problem> {
    let sandbox: Sandbox = client.get(&path(name)).await?;
    if json {
        show::json(&sandbox)?;
    } else {
        print(&sandbox)?;
    }
    Ok(0)
}

pub(crate) async fn update(
    client: &Client,
    arguments: UpdateArgs,
    json: bool,
) -> Result<i32, Problem> {
    let PolicyPatch {
        sleep_after_seconds,
        memory_tier_seconds,
        awake_ports,
        connection_idle_seconds,
        sleep_hold_max_ms,
        sleep_notice_ms,
        delete_after_idle_ms,
        expires_at,
        checkpoint,
    } = policy(arguments.policy);
    let body = UpdateSandbox {
        name: arguments.name,
        labels: arguments
            .label
            .or(arguments.no_labels.then(Vec::new))
            .map(|labels| labels.into_iter().collect()),
        sleep_after_seconds,
        memory_tier_seconds,
        awake_ports: awake_ports.or(arguments.no_awake_ports.then(Vec::new)),
        connection_idle_seconds,
        sleep_hold_max_ms,
        sleep_notice_ms,
        delete_after_idle_ms,
        expires_at,
        checkpoint,
    };
    if body == UpdateSandbox::default() {
        return Err(Problem::usage("there is nothing to change")
            .hint("such as `--sleep-after-seconds 300`"));
    }
    let sandbox: Sandbox = client.json("PATCH", &path(&arguments.sandbox), Some(&body)).await?;
    if json {
        show::json(&sandbox)?;
    } else {
        print(&sandbox)?;
    }
    Ok(0)
}

pub(crate) async fn sleep(
    client: &Client,
    arguments: SleepArgs,
    json: bool,
) -> Result<i32, Problem> {
    let body = SleepRequest { tier: arguments.tier.map(Into::into) };
    let sandbox: Sandbox =
        client.json("POST", &format!("{}/sleep", path(&arguments.name)), Some(&body)).await?;
    print_changed(&sandbox, json)
}

pub(crate) async fn restart(
    client: &Client,
    name: &str,
    body: &RestartRequest,
    json: bool,
) -> Result<i32, Problem> {
    let sandbox: Sandbox =
        client.json("POST", &format!("{}/restart", path(name)), Some(body)).await?;
    print_changed(&sandbox, json)
}

pub(crate) async fn delete(client: &Client, names: &[String], json: bool) -> Result<i32, Problem> {
    let mut code = 0;
    for name in names {
        match delete_one(client, name).await {
            Ok(()) => eprintln!("deleted {name}"),
            // The others are deleted all the same.
            Err(problem) => {
                problem.print(json);
                code = problem.exit_code();
            }
        }
    }
    Ok(code)
}

pub(crate) async fn link(
    client: &Client,
    name: &str,
    port: u16,
    json: bool,
) -> Result<i32, Problem> {
    let link: Link = client.get(&format!("{}/links/{port}", path(name))).await?;
    if json {
        show::json(&link)?;
    } else {
        show::data(&link.url)?;
    }
    Ok(0)
}

/// Makes a sandbox with these settings.
pub(crate) fn new_sandbox(
    size: SizeArgs,
    name: Option<String>,
    policy: PolicyPatch,
) -> CreateSandbox {
    CreateSandbox {
        name,
        image: size.image,
        snapshot: size.snapshot,
        cpus: size.cpus,
        memory_mib: size.memory_mib,
        drives: size.drives,
        volumes: size.volumes,
        env: size.env.into_iter().collect(),
        labels: std::collections::BTreeMap::new(),
        sleep_after_seconds: policy.sleep_after_seconds,
        memory_tier_seconds: policy.memory_tier_seconds,
        awake_ports: policy.awake_ports,
        connection_idle_seconds: policy.connection_idle_seconds,
        sleep_hold_max_ms: policy.sleep_hold_max_ms,
        sleep_notice_ms: policy.sleep_notice_ms,
        delete_after_idle_ms: policy.delete_after_idle_ms,
        expires_at: policy.expires_at,
        checkpoint: policy.checkpoint,
    }
}

/// Asks for a sandbox.
pub(crate) async fn make<T: DeserializeOwned>(
    client: &Client,
    path: &str,
    body: &impl Serialize,
    key: Option<&str>,
) -> Result<T, Problem> {
    let body = serde_json::to_vec(body)
        .map_err(|error| Problem::new(format!("cannot write the request: {error}")))?;
    let mut request: Builder =
        client.request("POST", path).header("content-type", "application/json");
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    let response = telling(client.send(request, full(body))).await?;
    if response.headers().contains_key("idempotency-replayed") {
        eprintln!(
            "note: made by an earlier request with this key; it may have been changed or deleted since"
        );
    }
    read_json(response).await
}

/// Waits for a sandbox that is being made, and says why that takes long where it does. Only to a person.
async fn telling<T>(made: impl Future<Output = T>) -> T {
    let mut made = std::pin::pin!(made);
    if std::io::stderr().is_terminal() {
        if let Ok(answer) = tokio::time::timeout(TELL_AFTER, &mut made).await {
            return answer;
        }
        eprintln!(
            "note: it is being made; the first one of an image and size takes longest, as it is booted for all that follow"
        );
    }
    made.await
}

/// Deletes one.
pub(crate) async fn delete_one(client: &Client, name: &str) -> Result<(), Problem> {
    client.send(client.request("DELETE", &path(name)), full("")).await.map(drop)
}

/// Where a sandbox is in the interface.
pub(crate) fn path(name: &str) -> String {
    format!("/v1/sandboxes/{}", quote(name))
}

fn policy(arguments: PolicyArgs) -> PolicyPatch {
    PolicyPatch {
        sleep_after_seconds: arguments.sleep_after_seconds.map(|seconds| seconds.0),
        memory_tier_seconds: arguments.memory_tier_seconds,
        awake_ports: arguments.awake_ports,
        connection_idle_seconds: arguments.connection_idle_seconds.map(|seconds| seconds.0),
        sleep_hold_max_ms: arguments.sleep_hold_max_ms,
        sleep_notice_ms: arguments.sleep_notice_ms.map(|ms| ms.0),
        delete_after_idle_ms: arguments.delete_after_idle_ms.map(|ms| ms.0),
        expires_at: arguments.expires_at.map(|at| (at != "never").then_some(at)),
        checkpoint: arguments.checkpoint.map(|checkpoint| {
            checkpoint.0.map(|every_seconds| CheckpointSetting { every_seconds })
        }),
    }
}

fn print_made(sandbox: &Sandbox, json: bool) -> Result<i32, Problem> {
    if json {
        show::json(sandbox)?;
    } else {
        show::data(&sandbox.name)?;
    }
    Ok(0)
}

fn print_changed(sandbox: &Sandbox, json: bool) -> Result<i32, Problem> {
    if json {
        show::json(sandbox)?;
    } else {
        eprintln!("{}: {}", sandbox.name, status_text(sandbox));
    }
    Ok(0)
}
