//! Whether an account may have one more box: credit (B14), and room in its plan (B42, T14).
//!
//! What counts is what hosts tell of its boxes, and those that are being started or brought back at this moment: each of these has a
//! [`Claim`], which is made in turn, so that two starts at once do not both take the last place.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use api::account::Plan;
use api::boxes::BoxStatus;
use api::{ApiError, Code, SandboxId};

use super::rfc3339;
use crate::App;

/// The boxes that are being started or brought back, with their accounts.
#[derive(Default)]
pub(crate) struct Claims {
    claimed: Mutex<HashMap<SandboxId, String>>,
    /// Held while one is made.
    turn: tokio::sync::Mutex<()>,
}

/// A place in the plan for a box, until its host tells of it. Dropped with the work that makes it.
pub(crate) struct Claim {
    app: App,
    id: SandboxId,
}

/// What counts for a plan.
#[derive(Debug, Default, PartialEq, Eq)]
struct Count {
    /// Running or frozen, or about to be.
    all: usize,
    frozen: usize,
    /// The one that the rules of idleness stop first, and when, milliseconds since 1970.
    first: Option<(u64, SandboxId)>,
}

/// Takes a place for a box that is about to be started or brought back.
pub(crate) async fn claim(app: &App, account: &str, id: &SandboxId) -> Result<Claim, ApiError> {
    let claims = &app.boxes().claims;
    let _turn = claims.turn.lock().await;
    let limits = app.accounts().get(account);
    if limits.as_ref().is_some_and(|account| account.credit_ms == Some(0)) {
        return Err(no_credit());
    }
    if let Some(plan) = limits.and_then(|account| account.plan) {
        let count = count(app, account, id).await;
        if count.all >= plan.boxes() {
            return Err(at_the_limit(plan, &count));
        }
    }
    claims.lock().insert(id.clone(), account.to_owned());
    Ok(Claim { app: app.clone(), id: id.clone() })
}

/// The account has no credit left.
pub(crate) fn no_credit() -> ApiError {
    ApiError::new(Code::SpendingLimit, "the account has no credit left").hint(
        "its boxes are frozen and keep everything; they go on when there is credit again, which the operator gives",
    )
}

/// Counts an account's boxes, but for this one. Its turn is held: nothing is claimed meanwhile.
async fn count(app: &App, account: &str, but: &SandboxId) -> Count {
    // First: a claim that is dropped meanwhile is then told by the host.
    let mut ids: HashSet<SandboxId> = {
        let claimed = app.boxes().claims.lock();
        claimed.iter().filter(|(_, of)| *of == account).map(|(id, _)| id.clone()).collect()
    };
    let mut count = Count::default();
    for known in app.host().list().await {
        let id = known.sandbox.id;
        let Some(life) = known.boxed.filter(|life| life.status.is_live() && !known.going) else {
            continue;
        };
        if app.boxes().record(&id).is_none_or(|record| record.account != account) {
            continue;
        }
        count.frozen += usize::from(life.status == BoxStatus::Frozen);
        let stops = life.stops_at_unix_ms.map(|at| (at, id.clone()));
        count.first = count.first.into_iter().chain(stops).min();
        ids.insert(id);
    }
    ids.remove(but);
    count.all = ids.len();
    count
}

fn at_the_limit(plan: Plan, count: &Count) -> ApiError {
    let first = match &count.first {
        Some((at, id)) => {
            format!("the idle rules stop box {id} first, at {}, if nothing uses it", rfc3339(*at))
        }
        None => "something holds each of them, so that the idle rules stop none soon".to_owned(),
    };
    let text = format!(
        "plan {} allows {} boxes at once and {} are running or frozen; {} of them frozen. List them with sandbox_list (GET /v1/boxes) \
         and stop one that is no longer needed with sandbox_stop (DELETE /v1/boxes/{{id}}); {first}",
        plan.as_str(),
        plan.boxes(),
        count.all,
        count.frozen,
    );
    ApiError::new(Code::PlanLimit, text)
        .hint("stop one, or give `waitForCapacitySec` to wait until one has ended")
}

impl Claims {
    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, String>> {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.app.boxes().claims.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b42_the_refusal_says_what_to_do() {
        let id: SandboxId = "k3b5qj2m4x7a".parse().unwrap();
        let count = Count { all: 3, frozen: 2, first: Some((1_790_856_000_000, id)) };
        let error = at_the_limit(Plan::Free, &count);
        assert_eq!((error.code.status(), error.retryable), (429, true));
        assert!(
            error.error.starts_with(
                "plan free allows 3 boxes at once and 3 are running or frozen; 2 of them frozen. List them"
            ),
            "{}",
            error.error
        );
        let first = "the idle rules stop box k3b5qj2m4x7a first, at 2026-10-01T";
        assert!(error.error.contains(first), "{}", error.error);
        let none = at_the_limit(Plan::Max, &Count { all: 20, ..Count::default() });
        assert!(none.error.contains(
            "plan max allows 20 boxes at once and 20 are running or frozen; 0 of them frozen"
        ));
        assert!(none.error.ends_with("the idle rules stop none soon"), "{}", none.error);
    }
}
