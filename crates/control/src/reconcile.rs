//! After a start: what the catalogue and the host say about each other is made to agree.
//!
//! | catalogue | host has it | then |
//! | --- | --- | --- |
//! | nothing | yes | entered again |
//! | creating | yes | ready; a repeated request is answered by it |
//! | creating | no | forgotten: nobody was told of it |
//! | deleting | any | deleted now |
//! | any | on its way out | deleted now: a full disk kept that from being noted here |
//! | ready | no | left alone: its host may come back with it; `DELETE` forgets it |
//!
//! Nothing of a host is deleted because the catalogue does not know it.

use std::collections::HashMap;

use api::SandboxId;
use api::host::{Change, Known};
use api::usage::Usage;

use crate::App;
use crate::boxes;
use crate::catalogue::{Entry, Face, State, now_ms};
use crate::failure::{Failure, chain};

/// Makes catalogue and host agree.
pub(crate) async fn run(app: &App) -> Result<(), Failure> {
    app.catalogue().add_host(app.host().name()).await?;
    let mut known: HashMap<SandboxId, Known> = app
        .host()
        .list()
        .await
        .into_iter()
        .map(|known| (known.sandbox.id.clone(), known))
        .collect();
    for entry in app.catalogue().all() {
        let at_host = known.remove(&entry.id);
        let is_going = at_host.as_ref().is_some_and(|known| known.going);
        match (if is_going { State::Deleting } else { entry.state }, at_host) {
            (State::Creating, None) => {
                tracing::warn!(sandbox = %entry.id, name = entry.name, "was being made when the daemon ended, and its host has nothing of it: forgotten");
                app.catalogue().remove(&entry.id).await?;
            }
            (State::Creating, Some(at_host)) => {
                tracing::warn!(sandbox = %entry.id, name = entry.name, "was being made when the daemon ended, and its host has it: kept");
                app.catalogue().set_state(&entry.id, State::Ready).await?;
                rename_at_host(app, &entry, &at_host).await;
            }
            (State::Ready, Some(at_host)) => {
                // The daemon ended between the row of a box that it took over and the rest.
                if entry.face == Face::Box && app.boxes().record(&entry.id).is_none() {
                    boxes::enter(app, &at_host).await?;
                }
                rename_at_host(app, &entry, &at_host).await;
            }
            (State::Ready, None) => {
                tracing::error!(sandbox = %entry.id, name = entry.name, "its host does not have it; the catalogue keeps its row");
            }
            (State::Deleting, _) => {
                tracing::info!(sandbox = %entry.id, name = entry.name, "was being deleted when the daemon ended: deleting on");
                let app = app.clone();
                tokio::spawn(async move {
                    if let Err(error) = delete(&app, &entry).await {
                        tracing::error!(sandbox = %entry.id, error = chain(&error), "cannot delete on; the next start tries again");
                    }
                });
            }
        }
    }
    // One on its way out that nobody knows here goes without anybody's help.
    for at_host in known.into_values().filter(|known| !known.going) {
        adopt(app, at_host).await?;
    }
    Ok(())
}

/// Deletes for good. The row goes last: until then the name is taken, and a crash goes on here.
pub(crate) async fn delete(app: &App, entry: &Entry) -> Result<(), Failure> {
    // A full disk refuses even this, and must not keep anything from being deleted: the host takes note too, and has room
    // for it kept aside.
    if let Err(error) = app.catalogue().set_state(&entry.id, State::Deleting).await {
        tracing::warn!(sandbox = %entry.id, ?error, "deletion not noted in the catalogue");
    }
    // One that its host does not have any more was kept when it was deleted there, or never was.
    let usage = app.host().usage(&entry.id).await;
    keep_usage(app, entry, usage.ok()).await;
    app.host().delete(&entry.id).await?;
    app.catalogue().remove(&entry.id).await
}

/// Keeps what a sandbox used that is being deleted.
pub(crate) async fn keep_usage(app: &App, entry: &Entry, usage: Option<Usage>) {
    if let Some(usage) = usage
        && let Err(error) = app.catalogue().keep_usage(&entry.id, &entry.name, &usage).await
    {
        tracing::error!(sandbox = %entry.id, error = chain(&error), ?usage, "what it had used is not kept");
    }
}

/// Enters a sandbox that its host has taken over. One that was here before has its row still.
pub(crate) async fn enter(app: &App, at_host: Known) -> Result<(), Failure> {
    match app.catalogue().find(at_host.sandbox.id.as_str()) {
        Some(entry) if entry.id == at_host.sandbox.id => {
            rename_at_host(app, &entry, &at_host).await;
            boxes::enter(app, &at_host).await
        }
        _ => adopt(app, at_host).await,
    }
}

async fn adopt(app: &App, at_host: Known) -> Result<(), Failure> {
    let created_ms = at_host
        .sandbox
        .created_at
        .parse::<jiff::Timestamp>()
        .map_or_else(|_| now_ms(), jiff::Timestamp::as_millisecond);
    let entry = Entry {
        id: at_host.sandbox.id.clone(),
        name: at_host.sandbox.name.clone(),
        state: State::Ready,
        link_key: at_host.link_key.clone(),
        epoch: at_host.epoch,
        created_ms,
        face: if at_host.boxed.is_some() { Face::Box } else { Face::Sandbox },
    };
    tracing::warn!(sandbox = %entry.id, name = entry.name, "its host has it, the catalogue did not: entered again");
    if app.catalogue().adopt(app.host().name(), entry.clone()).await? {
        return boxes::enter(app, &at_host).await;
    }
    let renamed = Entry { name: entry.id.to_string(), ..entry };
    tracing::warn!(sandbox = %renamed.id, name = at_host.sandbox.name, "its name is taken: named after its id");
    if app.catalogue().adopt(app.host().name(), renamed.clone()).await? {
        rename_at_host(app, &renamed, &at_host).await;
        boxes::enter(app, &at_host).await?;
    } else {
        tracing::error!(sandbox = %renamed.id, "another sandbox is named like its id: not entered");
    }
    Ok(())
}

/// The catalogue decides about names; a crash between the two writes of a rename leaves the host behind.
async fn rename_at_host(app: &App, entry: &Entry, at_host: &Known) {
    if at_host.sandbox.name == entry.name {
        return;
    }
    let change = Change { name: Some(entry.name.clone()), ..Change::default() };
    if let Err(error) = app.host().update(&entry.id, change).await {
        tracing::error!(sandbox = %entry.id, name = entry.name, error = %error, "cannot tell the host its name");
    }
}
