//! `sandbox_start` and `sandbox_stop`.

use api::SandboxId;
use api::boxes::BoxStatus;
use api::boxes::start::{StartBox, StartedBox};
use api::boxes::view::BoxView;
use rmcp::model::{JsonObject, Tool};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::answer::Outcome;
use super::tool::{
    Does, Nothing, about_a_box, described_elsewhere, read, read_about, requiring, tool,
};
use super::{Call, look};
use crate::boxes::{self, Asked};
use crate::failure::Failure;
use crate::routes::{idempotency_key, to_the_end};

const START: &str = "\
Starts a box: a Linux machine of its own (x86_64, Debian 12, root, a /work folder) in which you run and test code, ready in about a \
second. Returns its id, which every other tool takes, and its URLs. Next: copy your project into /work with sandbox_sync, then run \
things with sandbox_exec (background: true for servers).

goal is required: one or two sentences, in the language the person reads, on why this box exists and what done looks like. Give name \
too: people see it as the box's title.

services declares what runs in it by the names that its programs call: {name, port, targetPort, web}. Each name has an address of its \
own in the box and name:port reaches the process that listens on targetPort (default: port) on 0.0.0.0. web: true gives it a URL that a \
person opens in a browser (never for an API, a database or JSON). Ports 80 and 9095 of the box are taken: what is called on port 80 \
needs another targetPort. fromBox makes a name lead to a service in another box of yours. The box's own URL (sceneUrl) leads to the service \
that is declared first, with web or without: declare first what a person may see. A URL's key is its only guard: share it with those \
only who may use the service.

externalBaseUrl is for services that run elsewhere as long as their process does not run in the box: all start in external mode, and \
requests to name:port go there. sandbox_wire then leads a name to a process of the box, and back.

Idle rules: An idle box is frozen after 10 minutes without a call, with /work kept; the next call thaws it. A frozen box is stopped \
for good 24 hours after its last use. idleTimeoutMin sets your own limit instead of these: the box stops for good after that many \
minutes without a call, frozen or not. It is capped at 10080 minutes (7 days). Commands started with background: true (a dev server, a \
long build) count as activity for up to 1 hour after your last call; after that a box freezes anyway (they carry on when the next call \
thaws it). Requests through the box's URLs count as activity for up to 2 hours after the last call; after that the box freezes, and the \
next page load in a browser wakes it again (a few seconds). Background fetches from an open tab don't wake it. A box that these rules \
stopped is kept for 24 hours more: restore: <its id> brings the same box back as it was when it froze, running, with /work, programs, id \
and URLs. One ended by sandbox_stop keeps nothing.

Costs: an awake box holds processors and memory (size units), a frozen one only disk. With no room on any host it fails with \"no box \
capacity right now\" and starts nothing; waitForCapacitySec waits for room instead.";

pub(super) fn start_tool() -> Tool {
    let start = tool::<StartBox, StartedBox>("sandbox_start", "Start a box", Does::Add, START);
    described_elsewhere(requiring(start, "goal"))
}

pub(super) async fn start(call: Call, arguments: JsonObject) -> Result<Outcome, Failure> {
    let request: StartBox = read(arguments)?;
    let key = idempotency_key(&call.headers)?.map(str::to_owned);
    // A client that goes away meanwhile changes nothing of a box that is being made.
    let started = to_the_end(async move {
        let asked = Asked {
            key: key.as_deref(),
            by_tool: true,
            client_waits: Some(call.waits),
            gone: call.gone.clone(),
        };
        let progress = |line| {
            // Full: the client does not read them, and loses some.
            if call.progress.try_send(line).is_err() {
                tracing::debug!("a client does not take progress");
            }
        };
        boxes::start(&call.app, &call.who, asked, request, &progress).await
    })
    .await?;
    let body = started.body;
    let mut text = look::line(&body.started);
    for note in [&body.toolchains_note, &body.idle_timeout_note].into_iter().flatten() {
        text = format!("{text}\n{note}");
    }
    for warning in body.started.services.iter().filter_map(|service| service.warning.as_ref()) {
        text = format!("{text}\n{warning}");
    }
    let mut outcome = Outcome::new(format!("{text}\nNext: {}", body.next), &body)?;
    outcome.id = body.started.id.parse::<SandboxId>().ok();
    Ok(outcome)
}

const STOP: &str = "\
Stops a box for good, frozen or not: its programs and /work are gone and cannot be brought back, its URLs stop working, and its slot is \
free. Get out first what you still need (sandbox_pull). Not needed to save costs between two steps: an unused box is frozen by itself \
and costs nothing then. Stopping one that has ended already is a success.";

/// A box that was stopped.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct Stopped {
    /// Its id.
    id: String,
    /// `terminated`.
    status: BoxStatus,
}

pub(super) fn stop_tool() -> Tool {
    about_a_box(tool::<Nothing, Stopped>("sandbox_stop", "Stop a box for good", Does::End, STOP))
}

pub(super) async fn stop(call: Call, arguments: JsonObject) -> Result<Outcome, Failure> {
    let (id, Nothing {}) = read_about(arguments)?;
    let view: BoxView = to_the_end(async move {
        boxes::stop(&call.app, &call.who, &id, "stopped by sandbox_stop").await?;
        boxes::status(&call.app, &call.who, &id).await
    })
    .await?;
    let text = format!("Box {} is stopped for good.", view.id);
    Outcome::new(text, &Stopped { id: view.id, status: view.status })
}
