//! `sandbox_start` over a connection that may break, by a client that may take the call back (T16): whether a box was started is found
//! out, and the next identical start gets that box instead of a second one, once.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::boxes::BoxStatus;
use api::boxes::start::{GOAL_CHARS_MAX, StartedBox};
use api::boxes::view::{BoxList, BoxView};
use rmcp::model::{CallToolResult, JsonObject};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::Inner;
use super::outcome::{done, failed};
use super::upstream::{Failed, Upstream};
use crate::problem::Problem;

/// Its name.
pub(super) const NAME: &str = "sandbox_start";
/// How long a box is looked for after its answer was lost: a daemon that starts anew, and a box that is being made, take seconds.
const LOOK_TIME_MAX: Duration = Duration::from_secs(20);
/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Most starts without an answer that are remembered; then the oldest is forgotten.
const LOST_MAX: usize = 16;

/// What the starts of this conversation came to.
#[derive(Default)]
pub(super) struct Starts(Mutex<State>);

#[derive(Default)]
struct State {
    /// Starts whose answer nobody got.
    lost: Vec<Lost>,
    /// Boxes that the client was told of.
    told: HashSet<String>,
    /// Makes the key of each start another one.
    count: u64,
}

/// A start whose answer nobody got.
#[derive(Clone, Debug, PartialEq)]
struct Lost {
    arguments: JsonObject,
    /// Under which the daemon makes one box only.
    key: String,
    /// The box that it has started.
    id: Option<String>,
}

impl Lost {
    /// Whether another start means the same box.
    fn is_same(&self, arguments: &JsonObject) -> bool {
        told_name(&self.arguments) == told_name(arguments)
            && told_goal(&self.arguments) == told_goal(arguments)
    }
}

impl Starts {
    /// A sentence about a box that was started and nobody was told of.
    pub(super) fn sentence(&self) -> Option<String> {
        let state = self.lock();
        let lost = state.lost.iter().rev().find(|lost| lost.id.is_some())?;
        let id = lost.id.as_ref()?;
        let name =
            told_name(&lost.arguments).map(|name| format!(" (\"{name}\")")).unwrap_or_default();
        Some(format!(
            "Note: an interrupted sandbox_start of this conversation has started box {id}{name}: call sandbox_start again with the \
             same name and goal to get it, or sandbox_stop to end it."
        ))
    }

    /// A call names its box: then the client knows of it.
    pub(super) fn forget_named(&self, arguments: &JsonObject) {
        let Some(id) = arguments.get("id").and_then(Value::as_str) else { return };
        let mut state = self.lock();
        state.lost.retain(|lost| lost.id.as_deref() != Some(id));
        state.told.insert(id.to_owned());
    }

    fn take_lost(&self, arguments: &JsonObject) -> Option<Lost> {
        let mut state = self.lock();
        let place = state.lost.iter().position(|lost| lost.is_same(arguments))?;
        Some(state.lost.remove(place))
    }

    fn remember(&self, lost: Lost) {
        let mut state = self.lock();
        state.lost.retain(|other| other.key != lost.key);
        if state.lost.len() >= LOST_MAX {
            state.lost.remove(0);
        }
        state.lost.push(lost);
    }

    /// The box of a lost start was found.
    fn found(&self, key: &str, id: &str) {
        let mut state = self.lock();
        if let Some(lost) = state.lost.iter_mut().find(|lost| lost.key == key) {
            lost.id = Some(id.to_owned());
        }
    }

    fn tell(&self, id: &str) {
        self.lock().told.insert(id.to_owned());
    }

    fn is_told(&self, id: &str) -> bool {
        self.lock().told.contains(id)
    }

    fn new_key(&self, agent: &str, arguments: &JsonObject) -> String {
        use std::fmt::Write as _;
        let mut state = self.lock();
        state.count += 1;
        let named = (agent, told_name(arguments), told_goal(arguments), state.count);
        let hash = Sha256::digest(format!("{named:?}").as_bytes());
        hash.iter().fold("mcp-".to_owned(), |mut key, byte| {
            // Writing to a string cannot fail.
            let _ = write!(key, "{byte:02x}");
            key
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts a box, or gives the one that an interrupted start has started.
pub(super) async fn start(
    inner: &Inner,
    arguments: JsonObject,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResult, ErrorData> {
    let starts = &inner.starts;
    // One that is brought back is named, and never made twice.
    let is_new = arguments.get("restore").is_none_or(Value::is_null);
    let mut key = None;
    if is_new && let Some(lost) = starts.take_lost(&arguments) {
        match find(&inner.upstream, starts, &lost).await {
            Ok(Some(found)) => {
                starts.tell(&found.id);
                return Ok(told_again(
                    found,
                    "This is the box that your interrupted sandbox_start has started; no second one was.",
                ));
            }
            Ok(None) if lost.arguments == arguments => key = Some(lost.key),
            Ok(None) => {}
            Err(problem) => {
                starts.remember(lost);
                return Ok(failed(&problem));
            }
        }
    }
    let key = key.unwrap_or_else(|| starts.new_key(&inner.upstream.agent, &arguments));
    let lost = Lost { arguments: arguments.clone(), key: key.clone(), id: None };
    let params = json!({ "name": NAME, "arguments": arguments });
    let calling = inner.upstream.call_tool(params, Some(&key), context);
    let Some(result) = context.ct.run_until_cancelled(calling).await else {
        if is_new {
            starts.remember(lost.clone());
            tokio::spawn(look_later(Arc::clone(&inner.upstream), Arc::clone(starts), lost));
        }
        // Nobody reads it.
        return Ok(failed(&Problem::new("the call was taken back")));
    };
    match result {
        Ok(result) => {
            let data = result.structured_content.as_ref();
            if let Some(id) = data.and_then(|data| data["id"].as_str()) {
                starts.tell(id);
            }
            Ok(result)
        }
        Err(Failed::Refused(error)) => Err(error),
        Err(Failed::Told(problem)) => Ok(failed(&problem)),
        Err(Failed::Cut(problem)) if !is_new => Ok(failed(&problem)),
        Err(Failed::Cut(problem)) => Ok(after_a_cut(inner, lost, &problem).await),
    }
}

/// The answer broke off, and its client waits: it is told what was found out.
async fn after_a_cut(inner: &Inner, lost: Lost, problem: &Problem) -> CallToolResult {
    let why = problem.sentence();
    match look(&inner.upstream, &inner.starts, &lost).await {
        Ok(Some(found)) => {
            inner.starts.tell(&found.id);
            told_again(
                found,
                "The connection broke before the answer came, but the box was started.",
            )
        }
        Ok(None) => {
            inner.starts.remember(lost);
            let text = format!(
                "the answer was lost ({why}), and no box of this name and goal was started"
            );
            failed(&Problem::new(text).hint("call sandbox_start again"))
        }
        Err(_) => {
            inner.starts.remember(lost);
            let text = format!(
                "the answer was lost ({why}), and whether a box was started is not known: the daemon cannot be reached"
            );
            failed(&Problem::new(text).hint(
                "call sandbox_start again with the same name and goal once it can: a box that was started is given instead of a second one",
            ))
        }
    }
}

fn told_again(found: BoxView, what: &str) -> CallToolResult {
    let text = format!("{what} Box {} is {}.", found.id, found.status.as_str());
    let next = format!(
        "{what} Copy your project into /work with sandbox_sync, then run it with sandbox_exec. Call sandbox_start once more if you \
         want another."
    );
    let body = StartedBox { started: found, toolchains_note: None, idle_timeout_note: None, next };
    match serde_json::to_value(&body) {
        Ok(data) => done(text, data),
        Err(error) => failed(&Problem::new(format!("cannot write the answer: {error}"))),
    }
}

/// After a call was taken back: what became of it is said with the next results.
async fn look_later(upstream: Arc<Upstream>, starts: Arc<Starts>, lost: Lost) {
    // Else it is looked for again when the same is started.
    if let Ok(Some(found)) = look(&upstream, &starts, &lost).await {
        starts.found(&lost.key, &found.id);
    }
}

/// Looks for the box until it is there and ready, or the time is over.
async fn look(
    upstream: &Upstream,
    starts: &Starts,
    lost: &Lost,
) -> Result<Option<BoxView>, Problem> {
    let until = Instant::now() + LOOK_TIME_MAX;
    loop {
        let result = find(upstream, starts, lost).await;
        let ready = matches!(&result, Ok(Some(found)) if found.status != BoxStatus::Claimed);
        if ready || Instant::now() >= until {
            return result;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// The box that a start has started, if it has, and lives.
async fn find(
    upstream: &Upstream,
    starts: &Starts,
    lost: &Lost,
) -> Result<Option<BoxView>, Problem> {
    let list: BoxList = upstream.json("GET", "/v1/boxes", &()).await?;
    let is_it = |one: &BoxView| {
        one.this_conversation
            && one.status.is_live()
            && !starts.is_told(&one.id)
            && one.name.as_deref() == told_name(&lost.arguments)
            && one.goal == told_goal(&lost.arguments)
    };
    Ok(list.boxes.into_iter().rev().find(is_it))
}

fn told_name(arguments: &JsonObject) -> Option<&str> {
    arguments.get("name").and_then(Value::as_str)
}

/// As the daemon keeps it.
fn told_goal(arguments: &JsonObject) -> Option<String> {
    let goal = arguments.get("goal")?.as_str()?.trim();
    Some(goal.chars().take(GOAL_CHARS_MAX).collect::<String>()).filter(|goal| !goal.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(value: Value) -> JsonObject {
        let Value::Object(object) = value else { panic!("an object") };
        object
    }

    #[test]
    fn t16_the_same_start_is_known_by_name_and_goal_and_given_once() {
        let starts = Starts::default();
        let first = arguments(json!({ "name": "a", "goal": " g " }));
        let (key, other) = (starts.new_key("c", &first), starts.new_key("c", &first));
        assert_ne!(key, other, "calling once more starts another");
        starts.remember(Lost { arguments: first, key: key.clone(), id: None });
        assert_eq!(starts.sentence(), None, "nothing is known yet");
        starts.found(&key, "box1");
        let sentence = starts.sentence().expect("a sentence");
        assert!(sentence.contains("box1") && sentence.contains("\"a\""), "{sentence}");
        assert_eq!(starts.take_lost(&arguments(json!({ "name": "b", "goal": "g" }))), None);
        let again = arguments(json!({ "name": "a", "goal": "g", "size": 2 }));
        assert_eq!(starts.take_lost(&again).and_then(|lost| lost.id).as_deref(), Some("box1"));
        assert_eq!((starts.take_lost(&again), starts.sentence()), (None, None));
    }

    #[test]
    fn t16_who_names_the_box_knows_of_it() {
        let starts = Starts::default();
        let lost = Lost { arguments: JsonObject::new(), key: "k".into(), id: Some("box1".into()) };
        starts.remember(lost);
        starts.forget_named(&arguments(json!({ "id": "box2" })));
        assert!(starts.sentence().is_some());
        starts.forget_named(&arguments(json!({ "id": "box1" })));
        assert_eq!(starts.sentence(), None);
    }
}
