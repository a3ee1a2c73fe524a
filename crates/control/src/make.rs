//! Making sandboxes, once per request however often it is sent and whenever the daemon dies.
//!
//! 1. The row with the chosen id and the idempotency key are written, in one transaction.
//! 2. The host is told, with that id: telling it twice makes one sandbox.
//! 3. The answer is written; a repeated request gets it without the host.
//!
//! The work is a task of its own: a client that goes away after its request has arrived changes nothing.

use std::collections::HashMap;

use api::host::{Kind, NewFork, NewSandbox};
use api::id::{ID_CHARS, base32};
use api::sandbox::{CreateSandbox, ForkRequest, MEMORY_MIB_DEFAULT, Sandbox};
use api::{ApiError, Code, SandboxId};
use tokio::sync::watch;
use tokio::time::{Duration, Instant};

use crate::App;
use crate::auth::sha256_hex;
use crate::boxes::{self, Claim, NewBox};
use crate::catalogue::{Entry, Face, Reservation, State, Wanted, now_ms};
use crate::failure::{Failure, chain};
use crate::validate::fork_name;

/// Characters of a URL's key: 20 of 32 give 100 bits.
pub(crate) const KEY_CHARS: usize = 20;
/// How long a repeated request waits for the first one before it is told `in_progress`.
const REPEAT_WAIT_MAX: Duration = Duration::from_mins(1);
/// How often an id is drawn before giving up; twice would already be a wonder.
const DRAWS_MAX: u32 = 4;

/// The image of a sandbox whose request names none.
const IMAGE_DEFAULT: &str = "default";
/// Virtual processors of a sandbox whose request names no number.
const CPUS_DEFAULT: u32 = 1;

/// What shall be made.
#[derive(Clone, Debug)]
pub(crate) enum Order {
    /// A new one.
    Create(Box<CreateSandbox>),
    /// A copy, or several of one moment.
    Fork(SandboxId, ForkRequest),
    /// A new box.
    Box(Box<NewBox>),
}

/// Sandboxes that were made, now or by the same request earlier.
pub(crate) struct Made {
    pub(crate) sandboxes: Vec<Sandbox>,
    /// It is the stored answer of an earlier request.
    pub(crate) replayed: bool,
}

/// The sandboxes that are being made in this process. The lock is held from before a row is written until it is
/// entered here, so that a repeated request finds either both or none.
#[derive(Default)]
pub(crate) struct Making(tokio::sync::Mutex<HashMap<SandboxId, watch::Receiver<()>>>);

/// Makes a sandbox (or as many as are asked for), or answers what the same request made before.
pub(crate) async fn make(app: &App, key: Option<&str>, order: Order) -> Result<Made, Failure> {
    let hash = fingerprint(&order)?;
    let until = Instant::now() + REPEAT_WAIT_MAX;
    loop {
        let mut making = app.making().0.lock().await;
        let entries = new_entries(app, &order)?;
        let spec = spec_json(&order)?;
        let wanted = Wanted {
            host: app.host().name(),
            key: key.map(|key| (key, hash.as_str())),
            entries: entries.clone(),
            spec: &spec,
        };
        let wanted_count = entries.len();
        let reserved = app.catalogue().reserve(wanted).await;
        if !matches!(reserved, Ok(Reservation::New)) {
            // Nothing is made under these ids.
            for entry in &entries {
                app.host().release(&entry.id);
            }
        }
        // What an earlier attempt has begun has its place.
        let mut claims = Vec::new();
        let (entries, resumed) = match reserved? {
            Reservation::New => {
                if let Order::Box(new) = &order {
                    match claim_all(app, &new.account, &entries).await {
                        Ok(claimed) => claims = claimed,
                        Err(error) => {
                            for entry in &entries {
                                app.host().release(&entry.id);
                                app.catalogue().remove(&entry.id).await?;
                            }
                            return Err(error.into());
                        }
                    }
                }
                (entries, false)
            }
            Reservation::Answered(sandboxes) => return Ok(Made { sandboxes, replayed: true }),
            Reservation::Mismatch => {
                return Err(ApiError::new(
                    Code::IdempotencyMismatch,
                    "the idempotency key belongs to another request",
                )
                .hint("take a new key for a new request")
                .into());
            }
            Reservation::NameTaken(name) => return Err(name_taken(&name).into()),
            Reservation::Begun(entries) => {
                if entries.iter().any(|entry| entry.state == State::Deleting) {
                    let text = "what an earlier attempt left is being removed";
                    return Err(ApiError::new(Code::BeingDeleted, text).into());
                }
                let done = entries.iter().find_map(|entry| making.get(&entry.id));
                if let Some(done) = done.filter(|done| done.has_changed().is_ok()) {
                    let mut done = done.clone();
                    drop(making);
                    // Its sender is dropped when the work has ended, well or not.
                    if tokio::time::timeout_at(until, done.changed()).await.is_ok() {
                        continue;
                    }
                    return Err(ApiError::new(
                        Code::InProgress,
                        "the same request is still being worked on",
                    )
                    .into());
                }
                let is_kept = entries.iter().any(|entry| entry.state == State::Ready);
                if entries.len() < wanted_count && !is_kept {
                    // An undoing that was cut off has left some of several: they are all of one moment, or none.
                    for entry in &entries {
                        undo(app, entry).await;
                    }
                    drop(making);
                    if Instant::now() < until {
                        continue;
                    }
                    let text = "what an earlier attempt left could not be removed";
                    return Err(ApiError::new(Code::InProgress, text).into());
                }
                (entries, true)
            }
        };
        let (ended, wait) = watch::channel(());
        making.retain(|_, other| other.has_changed().is_ok());
        for entry in &entries {
            making.insert(entry.id.clone(), wait.clone());
        }
        drop(making);
        let work = {
            let app = app.clone();
            tokio::spawn(async move {
                let result = carry_out(&app, &entries, order, resumed).await;
                drop(claims);
                drop(ended);
                result
            })
        };
        return work
            .await
            .map_err(Failure::internal("make a sandbox"))?
            .map(|sandboxes| Made { sandboxes, replayed: resumed });
    }
}

/// Another sandbox has this name.
pub(crate) fn name_taken(name: &str) -> ApiError {
    let error = ApiError {
        field: Some("name".to_owned()),
        ..ApiError::new(Code::NameTaken, format!("the name `{name}` is taken"))
    };
    error.hint("choose another name, or delete or rename the sandbox that has it")
}

/// Takes a place in the account's plan for each box.
async fn claim_all(app: &App, account: &str, entries: &[Entry]) -> Result<Vec<Claim>, ApiError> {
    let mut claims = Vec::new();
    for entry in entries {
        claims.push(boxes::claim(app, account, &entry.id).await?);
    }
    Ok(claims)
}

async fn carry_out(
    app: &App,
    entries: &[Entry],
    order: Order,
    resumed: bool,
) -> Result<Vec<Sandbox>, Failure> {
    let host = app.host();
    let result = match order {
        Order::Create(request) => {
            let mut made = Vec::new();
            for entry in entries {
                made.push(host.create(new_sandbox(entry, (*request).clone())).await);
            }
            made.into_iter().collect()
        }
        Order::Box(new) => {
            let mut made = Vec::new();
            for entry in entries {
                app.boxes().keep(app.catalogue(), new.record(entry)).await?;
                let created = host.create(box_sandbox(entry, &new)).await;
                if created.is_err() {
                    app.boxes().forget(app.catalogue(), &entry.id).await?;
                }
                made.push(created);
            }
            made.into_iter().collect()
        }
        Order::Fork(parent, _) => {
            // After a crash the host may have them already; then they are not made from their parent a second time. It has all
            // or none: of those that are there for all to see, whichever is missing was deleted since.
            let mut known = Vec::new();
            for entry in entries.iter().filter(|_| resumed) {
                known.extend(host.view(&entry.id).await.map(|known| known.sandbox));
            }
            let is_kept = entries.iter().any(|entry| entry.state == State::Ready);
            if known.len() == entries.len() || is_kept && !known.is_empty() {
                Ok(known)
            } else {
                let new = entries.iter().map(|entry| NewFork {
                    id: entry.id.clone(),
                    name: entry.name.clone(),
                    link_key: entry.link_key.clone(),
                    epoch: entry.epoch,
                });
                host.fork(&parent, new.collect()).await
            }
        }
    };
    match result {
        Ok(sandboxes) => {
            app.catalogue().answer(&sandboxes).await?;
            Ok(sandboxes)
        }
        Err(error) => {
            for entry in entries {
                undo(app, entry).await;
            }
            Err(error.into())
        }
    }
}

/// Nothing is left of a sandbox that could not be made; its name and its idempotency key are free again.
async fn undo(app: &App, entry: &Entry) {
    if let Err(error) = app.host().delete(&entry.id).await {
        tracing::error!(sandbox = %entry.id, error = %error, "cannot remove what is left of a failed create; the next start tries again");
        if let Err(error) = app.catalogue().set_state(&entry.id, State::Deleting).await {
            tracing::error!(sandbox = %entry.id, error = chain(&error), "cannot write the catalogue");
        }
        return;
    }
    if let Err(error) = app.catalogue().remove(&entry.id).await {
        tracing::error!(sandbox = %entry.id, error = chain(&error), "cannot forget a sandbox that could not be made");
    }
}

fn new_sandbox(entry: &Entry, request: CreateSandbox) -> NewSandbox {
    let policy = request.policy();
    NewSandbox {
        id: entry.id.clone(),
        name: entry.name.clone(),
        image: request.image.unwrap_or_else(|| IMAGE_DEFAULT.to_owned()),
        snapshot: request.snapshot,
        cpus: request.cpus.unwrap_or(CPUS_DEFAULT),
        memory_mib: request.memory_mib.unwrap_or(MEMORY_MIB_DEFAULT),
        drives: request.drives,
        volumes: request.volumes,
        env: request.env,
        labels: request.labels,
        policy,
        boxed: None,
        wiring: None,
        link_key: entry.link_key.clone(),
        epoch: entry.epoch,
    }
}

fn box_sandbox(entry: &Entry, new: &NewBox) -> NewSandbox {
    let request = CreateSandbox {
        cpus: Some(new.cpus),
        memory_mib: Some(new.memory_mib),
        ..CreateSandbox::default()
    };
    NewSandbox {
        boxed: Some(new.limits.clone()),
        wiring: Some(new.wiring()),
        ..new_sandbox(entry, request)
    }
}

/// Rows of the sandboxes that are to be made.
fn new_entries(app: &App, order: &Order) -> Result<Vec<Entry>, Failure> {
    let mut entries: Vec<Entry> = match order {
        Order::Create(request) => Ok(vec![new_entry(app, order, request.name.clone())?]),
        Order::Box(_) => Ok(vec![new_entry(app, order, None)?]),
        Order::Fork(_, ForkRequest { name, count: None }) => {
            Ok(vec![new_entry(app, order, name.clone())?])
        }
        Order::Fork(_, ForkRequest { name, count: Some(count) }) => {
            let names =
                (1..=*count).map(|number| name.as_deref().map(|name| fork_name(name, number)));
            names.map(|name| new_entry(app, order, name)).collect()
        }
    }?;
    // Lists have the order in which they were asked for, and a millisecond is enough for several.
    for (entry, number) in entries.iter_mut().zip(0..) {
        entry.created_ms += number;
    }
    Ok(entries)
}

fn new_entry(app: &App, order: &Order, name: Option<String>) -> Result<Entry, Failure> {
    for _ in 0..DRAWS_MAX {
        let id = match kind(order).and_then(|kind| app.host().reserve(&kind)) {
            Some(ready) => ready,
            None => draw_id()?,
        };
        // Also no name may read like it.
        if app.catalogue().find(id.as_str()).is_some() {
            continue;
        }
        let mut random = [0; KEY_CHARS];
        getrandom::fill(&mut random).map_err(Failure::internal("draw a URL key"))?;
        let name = name.unwrap_or_else(|| id.to_string());
        let state = State::Creating;
        return Ok(Entry {
            id,
            name,
            state,
            link_key: base32(&random),
            epoch: 1,
            created_ms: now_ms(),
            face: if matches!(order, Order::Box(_)) { Face::Box } else { Face::Sandbox },
        });
    }
    Err(ApiError::new(Code::Internal, "no free id was found").into())
}

/// What a ready copy must be to stand for this order; `None`: none can.
fn kind(order: &Order) -> Option<Kind> {
    match order {
        Order::Create(request)
            if request.snapshot.is_none()
                && request.drives.is_empty()
                && request.volumes.is_empty() =>
        {
            Some(Kind {
                image: request.image.clone().unwrap_or_else(|| IMAGE_DEFAULT.to_owned()),
                cpus: request.cpus.unwrap_or(CPUS_DEFAULT),
                memory_mib: request.memory_mib.unwrap_or(MEMORY_MIB_DEFAULT),
            })
        }
        Order::Box(new) => Some(Kind {
            image: IMAGE_DEFAULT.to_owned(),
            cpus: new.cpus,
            memory_mib: new.memory_mib,
        }),
        Order::Create(_) | Order::Fork(..) => None,
    }
}

fn draw_id() -> Result<SandboxId, Failure> {
    let mut random = [0; ID_CHARS];
    getrandom::fill(&mut random).map_err(Failure::internal("draw an id"))?;
    Ok(SandboxId::from_random(random))
}

fn spec_json(order: &Order) -> Result<String, Failure> {
    let json = match order {
        Order::Create(request) => serde_json::to_string(request),
        Order::Fork(parent, request) => serde_json::to_string(&(parent, request)),
        Order::Box(new) => serde_json::to_string(&(&new.account, &new.spec)),
    };
    json.map_err(Failure::internal("write a request as JSON"))
}

/// The same for the same request, however its JSON was laid out.
fn fingerprint(order: &Order) -> Result<String, Failure> {
    let kind = match order {
        Order::Create(_) => "create",
        Order::Fork(..) => "fork",
        Order::Box(_) => "box",
    };
    Ok(sha256_hex(format!("{kind} {}", spec_json(order)?).as_bytes()))
}
