//! Credit of accounts (B14): their boxes' time awake is paid for with it, a box of size 4 four times as much as one of size 1.
//!
//! What each box has been awake its host sums up anyway; what of it is paid for is kept beside the credit, so that no crash pays
//! twice. It is looked at again and again, the sooner the less is left. When nothing is left the host is told of each box: it is
//! frozen whatever holds it, and calls that wait on it are answered 402.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::boxes::BoxStatus;
use api::{Code, SandboxId};
use tokio::sync::Notify;

use crate::App;
use crate::accounts::{Account, Accounts};
use crate::boxes::BoxRecord;
use crate::catalogue::Catalogue;
use crate::failure::{Failure, chain};

/// Time between two looks at most: nobody is charged for less than what a box uses within a fraction of it beyond its credit.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Time between two looks at least, milliseconds: so much may be used beyond the credit.
const LOOK_MS_MIN: u64 = 100;

/// What is paid for, and who may not go on.
pub(crate) struct Credit {
    /// Milliseconds awake of each box that are paid for.
    meters: Mutex<HashMap<SandboxId, u64>>,
    /// Boxes that their hosts keep frozen.
    limited: Mutex<HashSet<SandboxId>>,
    /// Held while it is looked at.
    looking: tokio::sync::Mutex<()>,
    /// A box has begun to be awake: look sooner.
    begun: Notify,
}

impl Credit {
    /// Reads what is kept.
    pub(crate) async fn load(catalogue: &Catalogue) -> Result<Self, Failure> {
        let meters = catalogue.meters().await?.into_iter().collect();
        Ok(Self {
            meters: Mutex::new(meters),
            limited: Mutex::default(),
            looking: tokio::sync::Mutex::default(),
            begun: Notify::new(),
        })
    }

    /// A box of this account has begun to be awake.
    pub(crate) fn begun(&self, accounts: &Accounts, account: &str) {
        if accounts.get(account).is_some_and(|account| account.credit_ms.is_some()) {
            self.begun.notify_one();
        }
    }

    fn meters(&self) -> MutexGuard<'_, HashMap<SandboxId, u64>> {
        self.meters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn limited(&self) -> MutexGuard<'_, HashSet<SandboxId>> {
        self.limited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Looks again and again until the server stops.
pub(crate) async fn run(app: App) {
    loop {
        let pause = look(&app).await.unwrap_or_else(|error| {
            tracing::error!(
                error = chain(&error),
                "what boxes use is not charged; looked at again"
            );
            LOOK_EVERY
        });
        tokio::select! {
            () = app.stop().cancelled() => return,
            () = app.credit().begun.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Charges what was used, and tells hosts who may go on. Gives when to look again.
pub(crate) async fn look(app: &App) -> Result<Duration, Failure> {
    let _looking = app.credit().looking.lock().await;
    let mut pause = LOOK_EVERY;
    let any = !app.credit().limited().is_empty();
    for account in app.accounts().list() {
        if account.credit_ms.is_none() && !any {
            continue;
        }
        pause = pause.min(look_at(app, &account).await?);
    }
    Ok(pause)
}

/// Sets what is left of an account's credit from now on; what was used until then is charged before.
pub(crate) async fn set(app: &App, id: &str, credit_ms: Option<u64>) -> Result<Account, Failure> {
    let _looking = app.credit().looking.lock().await;
    let account = app.accounts().find(id)?;
    // Where nothing was counted, what was used until now is free.
    let used: Vec<_> =
        used(app, &account.id).await?.into_iter().map(|one| (one.0, one.1)).collect();
    let changed = app
        .accounts()
        .charge(app.catalogue(), id, &used, |account| account.credit_ms = credit_ms)
        .await?;
    app.credit().meters().extend(used);
    look_at(app, &changed).await?;
    app.accounts().find(id).map_err(Failure::from)
}

/// A box was taken over from another host: what it had used before is not charged here.
pub(crate) async fn took_over(app: &App, account: &str, id: &SandboxId) -> Result<(), Failure> {
    let _looking = app.credit().looking.lock().await;
    let used = milliseconds(app.host().usage(id).await?.awake_seconds);
    app.accounts().charge(app.catalogue(), account, &[(id.clone(), used)], |_| {}).await?;
    app.credit().meters().insert(id.clone(), used);
    app.credit().limited().remove(id);
    Ok(())
}

/// A box has ended: nothing of it is charged any more.
pub(crate) async fn forget(app: &App, id: &SandboxId) -> Result<(), Failure> {
    app.credit().limited().remove(id);
    if app.credit().meters().remove(id).is_some() {
        app.catalogue().forget_meter(id).await?;
    }
    Ok(())
}

async fn look_at(app: &App, account: &Account) -> Result<Duration, Failure> {
    let mut pause = LOOK_EVERY;
    let mut left = account.credit_ms;
    if let Some(before) = account.credit_ms {
        let (mut cost, mut speed, mut paid) = (0, 0, Vec::new());
        for (id, awake_ms, record) in used(app, &account.id).await? {
            let until = app.credit().meters().get(&id).copied().unwrap_or(0);
            if awake_ms > until {
                cost += (awake_ms - until) * u64::from(record.size);
                paid.push((id.clone(), awake_ms));
            }
            if is_awake(app, &id).await? {
                speed += u64::from(record.size);
            }
        }
        if cost > 0 {
            let charged = app.accounts().charge(app.catalogue(), &account.id, &paid, |account| {
                account.credit_ms = account.credit_ms.map(|credit| credit.saturating_sub(cost));
            });
            left = charged.await?.credit_ms;
            app.credit().meters().extend(paid);
            if left == Some(0) && before > 0 {
                tracing::info!(
                    account = account.id,
                    "its credit has run out: its boxes are frozen"
                );
            }
        }
        if let Some(lasts) = left.unwrap_or(0).checked_div(speed).filter(|_| left != Some(0)) {
            pause = pause.min(Duration::from_millis(lasts.max(LOOK_MS_MIN)));
        }
    }
    tell(app, &account.id, left == Some(0));
    Ok(pause)
}

/// Tells hosts of those boxes that may not go on, or may again.
fn tell(app: &App, account: &str, reached: bool) {
    for record in app.boxes().live_of(account) {
        let mut limited = app.credit().limited();
        let changed =
            if reached { limited.insert(record.id.clone()) } else { limited.remove(&record.id) };
        if changed {
            app.host().limit_box(&record.id, reached);
        }
    }
}

/// How long an account's boxes have been awake, milliseconds each.
async fn used(app: &App, account: &str) -> Result<Vec<(SandboxId, u64, Arc<BoxRecord>)>, Failure> {
    let mut all = Vec::new();
    for record in app.boxes().live_of(account) {
        match app.host().usage(&record.id).await {
            Ok(usage) => all.push((record.id.clone(), milliseconds(usage.awake_seconds), record)),
            // It is being made, or its host has lost it, or another one has it.
            Err(error) if matches!(error.code, Code::NotFound | Code::SandboxMoved) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(all)
}

async fn is_awake(app: &App, id: &SandboxId) -> Result<bool, Failure> {
    match app.host().view(id).await {
        Ok(known) => Ok(known.boxed.is_some_and(|life| {
            matches!(life.status, BoxStatus::Claimed | BoxStatus::Ready | BoxStatus::Takeover)
        })),
        Err(error) if matches!(error.code, Code::NotFound | Code::SandboxMoved) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "seconds of a sandbox's life fit, and are not negative after `max`"
)]
fn milliseconds(seconds: f64) -> u64 {
    (seconds * 1000.0).max(0.0).floor() as u64
}
