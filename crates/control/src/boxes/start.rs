//! Starting a box, or bringing one back (T1-T19, B27).

use std::time::Duration;

use api::account::ACCOUNT_DEFAULT;
use api::boxes::start::{
    GOAL_CHARS_MAX, IDLE_TIMEOUT_MIN_MAX, SIZES, StartBox, StartedBox, TITLE_CHARS_MAX,
    WAIT_FOR_CAPACITY_SEC_MAX,
};
use api::boxes::view::BoxView;
use api::boxes::{BoxLimits, BoxStatus};
use api::{ApiError, Code};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{BoxRecord, Who, act, checkpoint, links, secrets, services, view};
use crate::App;
use crate::failure::Failure;
use crate::make::{Order, make};

/// Between two tries while there is no room (T15).
const TRY_EVERY: Duration = Duration::from_secs(15);
/// Languages that may be named, which changes nothing (T4).
const IGNORED: [&str; 6] = ["go", "node", "nodejs", "python", "python3", "python-3.11"];
/// What of them the image has.
const IMAGE_HAS: &str = "the image has python3 (3.11, without pip and venv), and neither Go nor Node; install what is missing with \
                         apt-get, where the box has a network";
/// Most names of secrets and toolchains.
pub(crate) const NAMES_MAX: usize = 64;

/// How a start is asked for, beside what is asked for.
#[derive(Default)]
pub(crate) struct Asked<'a> {
    /// `Idempotency-Key`.
    pub(crate) key: Option<&'a str>,
    /// A tool asks: then the goal is required (T1).
    pub(crate) by_tool: bool,
    /// How long the client can wait for this one call; `None`: as long as it likes.
    pub(crate) client_waits: Option<Duration>,
    /// Fires when the client is gone: room is not waited for any more. What is begun is done all the same.
    pub(crate) gone: CancellationToken,
}

/// Told while there is no room.
pub(crate) type Progress<'a> = &'a (dyn Fn(String) + Send + Sync);

/// A box that was started.
pub(crate) struct Started {
    pub(crate) body: StartedBox,
    /// It is the answer of an earlier request.
    pub(crate) replayed: bool,
}

/// What is to be made, checked and completed.
#[derive(Clone, Debug)]
pub(crate) struct NewBox {
    /// Without id, key and time, which are drawn later.
    pub(crate) account: String,
    pub(crate) agent: Option<super::AgentId>,
    pub(crate) spec: StartBox,
    pub(crate) size: u32,
    pub(crate) cpus: u32,
    pub(crate) memory_mib: u32,
    pub(crate) external: Vec<usize>,
    pub(crate) limits: BoxLimits,
}

/// What an answer says beside the box.
#[derive(Default)]
struct Notes {
    toolchains: Option<String>,
    idle_timeout: Option<String>,
}

/// Starts a box, or brings one back; waits for room as long as the request says.
pub(crate) async fn start(
    app: &App,
    who: &Who,
    asked: Asked<'_>,
    request: StartBox,
    progress: Progress<'_>,
) -> Result<Started, Failure> {
    check_goal(&request, asked.by_tool)?;
    let waits = wait(&request, asked.client_waits)?;
    if let Some(id) = request.restore.clone() {
        let restored = || restore(app, who, &id);
        return with_room(&asked, waits, progress, restored).await;
    }
    let (new, notes) = complete(app, who, request)?;
    // Another account's keys are its own.
    let key = asked.key.map(|key| match who.account.as_str() {
        ACCOUNT_DEFAULT => key.to_owned(),
        account => format!("{account}\n{key}"),
    });
    let made = with_room(&asked, waits, progress, || {
        make(app, key.as_deref(), Order::Box(Box::new(new.clone())))
    });
    let made = made.await?;
    app.credit().begun(app.accounts(), &who.account);
    let id = made.sandboxes.first().map(|sandbox| sandbox.id.clone());
    let id = id.ok_or_else(|| ApiError::new(Code::Internal, "none was made"))?;
    let started = view::status(app, who, id.as_str()).await?;
    let next = next(&started);
    let body = StartedBox {
        started,
        toolchains_note: notes.toolchains,
        idle_timeout_note: notes.idle_timeout,
        next,
    };
    Ok(Started { body, replayed: made.replayed })
}

/// Tries again and again while hosts are full or the plan is at its limit (T15).
async fn with_room<T, F: Future<Output = Result<T, Failure>>>(
    asked: &Asked<'_>,
    waits: Duration,
    progress: Progress<'_>,
    work: impl Fn() -> F,
) -> Result<T, Failure> {
    let begun = Instant::now();
    loop {
        let error = match work().await {
            Ok(done) => return Ok(done),
            Err(Failure::Told(error))
                if matches!(error.code, Code::NoCapacity | Code::PlanLimit) =>
            {
                error
            }
            // What its sandbox calls `memory_mib`.
            Err(Failure::Told(error))
                if error.code == Code::Unprocessable
                    && error.field.as_deref() == Some("memory_mib") =>
            {
                let error = ApiError { field: Some("size".to_owned()), ..error };
                return Err(error.into());
            }
            Err(failure) => return Err(failure),
        };
        let waited = begun.elapsed();
        if waited + TRY_EVERY > waits || asked.gone.is_cancelled() {
            return Err(no_room(error, waited, waits).into());
        }
        progress(format!(
            "No room for the box yet: {}. Waited {} of {}; trying again in {}.",
            error.error,
            short(waited),
            short(waits),
            short(TRY_EVERY)
        ));
        // Who is gone is told at once that there is no room, and nothing is made later.
        let cut = asked.gone.run_until_cancelled(tokio::time::sleep(TRY_EVERY)).await;
        if cut.is_none() {
            return Err(no_room(error, begun.elapsed(), waits).into());
        }
    }
}

/// What is told in the end: why, that nothing was made, and how long was waited.
fn no_room(error: ApiError, waited: Duration, waits: Duration) -> ApiError {
    let why = match error.code {
        Code::NoCapacity => format!("no box capacity right now: {}", error.error),
        _ => error.error,
    };
    let mut text = format!("{why}. No box was created by this call.");
    if !waits.is_zero() {
        text = format!("{text} Waited {} and gave up: nothing became free.", short(waited));
    }
    let told = ApiError::new(error.code, text);
    match (error.code, error.hint) {
        (Code::PlanLimit, Some(hint)) => told.hint(hint),
        _ => told.hint(
            "try again in about 5 minutes, give `waitForCapacitySec`, or stop a box that is no longer needed",
        ),
    }
}

/// A time as `45s` or `5m0s`.
fn short(time: Duration) -> String {
    let seconds = time.as_secs();
    if seconds < 60 { format!("{seconds}s") } else { format!("{}m{}s", seconds / 60, seconds % 60) }
}

fn wait(request: &StartBox, client: Option<Duration>) -> Result<Duration, ApiError> {
    let seconds = request.wait_for_capacity_sec.unwrap_or(0);
    if seconds > WAIT_FOR_CAPACITY_SEC_MAX {
        return Err(crate::validate::out_of_range(
            "waitForCapacitySec",
            seconds,
            0,
            WAIT_FOR_CAPACITY_SEC_MAX,
        ));
    }
    let asked = Duration::from_secs(seconds);
    Ok(client.map_or(asked, |client| asked.min(client)))
}

fn check_goal(request: &StartBox, by_tool: bool) -> Result<(), ApiError> {
    let blank = request.goal.as_deref().is_none_or(|goal| goal.trim().is_empty());
    if by_tool && blank {
        return Err(ApiError::invalid(
            "goal",
            "goal is required: one or two sentences, in the language the person reads, on why this box exists and what done \
             looks like. The person sees it on the box's card, and whoever picks the box up if this conversation is closed \
             reads it in sandbox_status. Call sandbox_start again with goal set.",
        ));
    }
    Ok(())
}

fn complete(app: &App, who: &Who, mut request: StartBox) -> Result<(NewBox, Notes), ApiError> {
    let mut notes = Notes::default();
    check_name(request.name.as_deref())?;
    request.goal = request.goal.as_deref().and_then(one_line);
    let size = request.size.unwrap_or(1);
    if !SIZES.contains(&size) {
        let text = format!("`size`: {size} is no size");
        return Err(ApiError::invalid("size", text).hint("1, 2, 4 or 8"));
    }
    services::check(&request.services)?;
    resolve_links(app, who, &mut request)?;
    if let Some(url) = &request.external_base_url {
        request.external_base_url = Some(services::check_external(url)?);
    }
    notes.toolchains = check_toolchains(&mut request.toolchains)?;
    secrets::check(app, who, &mut request)?;
    let minutes = request.idle_timeout_min.unwrap_or(0);
    if minutes > IDLE_TIMEOUT_MIN_MAX {
        notes.idle_timeout = Some(format!(
            "idleTimeoutMin was cut to {IDLE_TIMEOUT_MIN_MAX}, which is a week and the most there is"
        ));
    }
    request.idle_timeout_min = idle_minutes(minutes);
    request.wait_for_capacity_sec = None;
    let settings = &app.boxes().settings;
    let limits =
        BoxLimits { idle_timeout_ms: idle_ms(request.idle_timeout_min), ..settings.limits.clone() };
    // With a base every service that is here starts there (T11).
    let external = match request.external_base_url {
        Some(_) => {
            let services = request.services.iter().enumerate();
            services.filter(|(_, service)| service.is_here()).map(|(place, _)| place).collect()
        }
        None => Vec::new(),
    };
    let new = NewBox {
        account: who.account.clone(),
        agent: who.agent.clone(),
        size,
        cpus: settings.unit_cpus * size,
        memory_mib: settings.unit_memory_mib * size,
        external,
        limits,
        spec: request,
    };
    Ok((new, notes))
}

/// Links lead to boxes of the same account that have not ended (T10), and there to a port that is settled now: which services a box
/// has does not change.
fn resolve_links(app: &App, who: &Who, request: &mut StartBox) -> Result<(), ApiError> {
    for (place, service) in request.services.iter_mut().enumerate() {
        let Some(id) = &service.from_box else { continue };
        let record = id.parse().ok().and_then(|id| app.boxes().record(&id));
        let lives = |box_: &BoxRecord| box_.account == who.account && box_.ended.is_none();
        let Some(there) = record.filter(|box_| lives(box_)) else {
            let field = format!("services[{place}].fromBox");
            return Err(ApiError::unprocessable(
                &field,
                format!("`{field}`: there is no such box"),
            )
            .hint("sandbox_list (GET /v1/boxes) shows the boxes that there are"));
        };
        if service.from_port.is_none() {
            service.from_port = links::port_there(service, &there);
        }
    }
    Ok(())
}

pub(super) fn check_name(name: Option<&str>) -> Result<(), ApiError> {
    let Some(name) = name else { return Ok(()) };
    let count = name.chars().count();
    if name.chars().any(char::is_control) {
        let text = "`name` has a line break or another control character";
        return Err(ApiError::invalid("name", text).hint("one line of text"));
    }
    if name.trim().is_empty() || count > TITLE_CHARS_MAX {
        let text = format!("`name`: {count} characters");
        return Err(ApiError::invalid("name", text).hint(format!("1-{TITLE_CHARS_MAX}, not blank")));
    }
    Ok(())
}

/// A goal in one line, cut to what is kept: what is told to models must not read like several. `None`: nothing is left of it.
pub(super) fn one_line(goal: &str) -> Option<String> {
    let goal = goal.split(char::is_control).collect::<Vec<_>>().join(" ");
    let goal: String = goal.trim().chars().take(GOAL_CHARS_MAX).collect();
    (!goal.is_empty()).then_some(goal)
}

/// `idleTimeoutMin` as it is kept: cut to the most there is; 0 is none (B24).
pub(super) fn idle_minutes(given: u64) -> Option<u64> {
    let minutes = given.min(IDLE_TIMEOUT_MIN_MAX);
    (minutes > 0).then_some(minutes)
}

pub(super) fn idle_ms(minutes: Option<u64>) -> Option<u64> {
    minutes.map(|minutes| minutes * 60_000)
}

fn check_toolchains(toolchains: &mut Vec<String>) -> Result<Option<String>, ApiError> {
    if toolchains.len() > NAMES_MAX {
        let text = format!("`toolchains`: {} of them", toolchains.len());
        return Err(ApiError::invalid("toolchains", text).hint(format!("at most {NAMES_MAX}")));
    }
    let mut named = toolchains.iter().enumerate();
    if let Some((place, name)) = named.find(|(_, name)| !IGNORED.contains(&name.as_str())) {
        let field = format!("toolchains[{place}]");
        let text = format!("`{field}`: this host's image has no toolchain `{name}`");
        return Err(
            ApiError::unprocessable(&field, text).hint(format!("leave it out; {IMAGE_HAS}"))
        );
    }
    let ignored = std::mem::take(toolchains);
    Ok((!ignored.is_empty())
        .then(|| format!("toolchains ({}) were ignored: {IMAGE_HAS}", ignored.join(", "))))
}

fn next(started: &BoxView) -> String {
    let copy = "Copy your project into /work with sandbox_sync, then run it with sandbox_exec (background: true for servers)";
    let next = match (&started.web_url, started.services.is_empty()) {
        (Some(url), _) => format!("{copy}; a person opens it at {url}"),
        (None, false) => format!(
            "{copy}; its services are reached by their names inside the box. None has web: true; the box's own URL leads to the one \
             that was declared first."
        ),
        (None, true) => format!("{copy}. No service is declared, so its URL answers 503."),
    };
    match &started.external_base_url {
        Some(base) => format!(
            "{next} Its services are in external mode: requests to their names go to {base}. sandbox_wire leads one to a process of the \
             box once that listens, and back."
        ),
        None => next,
    }
}

/// Brings back a box that was stopped for idleness (B27, T14): it needs credit and a place in the plan as a new one does.
async fn restore(app: &App, who: &Who, id: &str) -> Result<Started, Failure> {
    let record = act::find(app, who, id)?;
    // One at a time: of several who ask at once one brings it back, and all get it.
    let _turn = app.boxes().restoring.turn(&record.id).await;
    let Some((_, life)) = view::known(app, &record).await? else {
        let text = format!("box {id} keeps no copy that could be brought back");
        return Err(ApiError::new(Code::BoxStopped, text)
            .hint("start a new one with sandbox_start, without `restore`")
            .into());
    };
    if life.stopped_unix_ms.is_none() {
        // An answer that was lost is asked for again; and somebody else may have been first.
        act::living(app, &record).await?;
        let started = view::status(app, who, id).await?;
        let next = "It is not stopped (somebody may have brought it back before): nothing was changed. Call it as it is; what acts \
                    on it thaws it.";
        return Ok(restored(started, next));
    }
    let place = super::claim(app, &record.account, &record.id).await?;
    app.host().restore(&record.id).await?;
    drop(place);
    app.credit().begun(app.accounts(), &record.account);
    let (boxes, agent) = (app.boxes(), who.agent.clone());
    boxes
        .change(app.catalogue(), &record.id, |record| {
            record.agent = agent.or(record.agent.take());
        })
        .await?;
    checkpoint::carry(app, &record.id).await?;
    let started = view::status(app, who, id).await?;
    let next = if started.status == BoxStatus::Frozen {
        "It is back as it was when it froze: /work, programs, id and URLs. No host has room to run it just now, so it is frozen; \
         the next call that acts on it thaws it."
    } else {
        "It is back as it was when it froze, and running: /work, programs, id and URLs."
    };
    Ok(restored(started, next))
}

fn restored(started: BoxView, next: &str) -> Started {
    let body = StartedBox {
        started,
        toolchains_note: None,
        idle_timeout_note: None,
        next: next.to_owned(),
    };
    Started { body, replayed: false }
}

impl NewBox {
    /// How its names are wired.
    pub(crate) fn wiring(&self) -> api::boxes::Wiring {
        services::wiring(&self.spec, &self.external)
    }

    /// What is kept of it, once its id is drawn.
    pub(crate) fn record(&self, entry: &crate::catalogue::Entry) -> BoxRecord {
        BoxRecord {
            id: entry.id.clone(),
            account: self.account.clone(),
            spec: self.spec.clone(),
            size: self.size,
            cpus: self.cpus,
            memory_mib: self.memory_mib,
            key: entry.link_key.clone(),
            external: self.external.clone(),
            agent: self.agent.clone(),
            created_ms: entry.created_ms,
            last_used_ms: entry.created_ms,
            timeline: Vec::new(),
            stop_reason: None,
            told: super::BootsTold::default(),
            ended: None,
        }
    }
}
