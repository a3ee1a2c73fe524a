//! The project's spending limit (S23): what its sandboxes use in a calendar month is looked at again and again, and their host
//! is told whether they may go on.
//!
//! Counted is memory while awake, from the sums that sandboxes have anyway: what all have used, less what they had used when
//! the month began. The host puts them to sleep and wakes none until it is told otherwise; nothing is ever deleted for it.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use api::project::{Spending, SpendingLimit};
use axum::extract::State;

use crate::App;
use crate::catalogue::CountedMonth;
use crate::failure::Failure;

/// Time between two looks: so much may be used beyond the limit.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// What was found at the last look.
#[derive(Default)]
pub(crate) struct Seen(Mutex<Option<(SpendingLimit, Spending)>>);

impl Seen {
    /// The limit and what was used of it, if it was reached.
    pub(crate) fn reached(&self) -> Option<(SpendingLimit, Spending)> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        seen.filter(|(_, spending)| spending.reached)
    }

    fn set(&self, seen: Option<(SpendingLimit, Spending)>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = seen;
    }
}

/// So much memory while awake, for people: `500.2 GiB-hours`; what is below an hour in seconds. Rounded down.
pub(crate) fn amount(gib_seconds: u64) -> String {
    match gib_seconds {
        1 => "1 GiB-second".to_owned(),
        0..3600 => format!("{gib_seconds} GiB-seconds"),
        _ => format!("{}.{} GiB-hours", gib_seconds / 3600, gib_seconds % 3600 / 360),
    }
}

/// Looks again and again until the server stops.
pub(crate) async fn run(app: App) {
    loop {
        if let Err(error) = look(&app).await {
            tracing::error!(error = ?error, "what the project spends is not known; looked at again");
        }
        tokio::select! {
            () = app.stop().cancelled() => return,
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
    }
}

/// What is used of the limit, if there is one; the host is told.
pub(crate) async fn look(app: &App) -> Result<Option<Spending>, Failure> {
    let Some(limit) = app.catalogue().project().spending_limit else {
        app.host().limit_spending(false);
        app.spending().set(None);
        if app.catalogue().spending_month().await?.is_some() {
            app.catalogue().set_spending_month(None).await?;
        }
        return Ok(None);
    };
    let axum::Json(used) = crate::routes::usage::of_all(State(app.clone())).await?;
    let used = used.total.memory_gib_seconds;
    let known = app.catalogue().spending_month().await?;
    let month = counted(known.as_ref(), &this_month(), used);
    if known.as_ref() != Some(&month) {
        app.catalogue().set_spending_month(Some(&month)).await?;
    }
    let spent = whole(used - month.from_gib_seconds);
    let reached = spent >= limit.memory_gib_seconds;
    app.host().limit_spending(reached);
    let spending = Spending { month: month.month, memory_gib_seconds: spent, reached };
    app.spending().set(Some((limit, spending.clone())));
    Ok(Some(spending))
}

/// The month that counts now: another one begins with what was used until then, but the one before goes on where it was (the clock
/// was set). Where less was used than was once known, a sandbox was taken over by another host, and what it had used with it.
fn counted(known: Option<&CountedMonth>, this: &str, used: f64) -> CountedMonth {
    let last = || known.map(|known| (known.month.clone(), known.from_gib_seconds));
    let (from, before) = match known {
        Some(CountedMonth { month, from_gib_seconds, before }) if month == this => {
            (*from_gib_seconds, before.clone())
        }
        Some(CountedMonth { before: Some((month, from)), .. }) if month == this => (*from, last()),
        _ => (used, last()),
    };
    CountedMonth { month: this.to_owned(), from_gib_seconds: from.min(used), before }
}

fn this_month() -> String {
    // `2026-11-30T…Z`: the first seven are the month.
    jiff::Timestamp::now().to_string().chars().take(7).collect()
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a sum of GiB-seconds fits, and is not negative after `max`"
)]
fn whole(number: f64) -> u64 {
    number.max(0.0).floor() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn month(month: &str, from_gib_seconds: f64, before: Option<(&str, f64)>) -> CountedMonth {
        let before = before.map(|(month, from)| (month.to_owned(), from));
        CountedMonth { month: month.to_owned(), from_gib_seconds, before }
    }

    #[test]
    fn s23_an_amount_is_told_as_people_count_it() {
        for (gib_seconds, text) in [
            (0, "0 GiB-seconds"),
            (1, "1 GiB-second"),
            (3599, "3599 GiB-seconds"),
            (3600, "1.0 GiB-hours"),
            (1_800_359, "500.0 GiB-hours"),
            (1_800_360, "500.1 GiB-hours"),
        ] {
            assert_eq!(amount(gib_seconds), text);
        }
    }

    #[test]
    fn s23_each_month_begins_with_nothing_spent() {
        let first = counted(None, "2026-11", 100.0);
        assert_eq!(first, month("2026-11", 100.0, None));
        assert_eq!(counted(Some(&first), "2026-11", 150.0), first);
        let next = counted(Some(&first), "2026-12", 180.5);
        assert_eq!(next, month("2026-12", 180.5, Some(("2026-11", 100.0))));
        assert!((counted(Some(&next), "2026-12", 20.0).from_gib_seconds - 20.0).abs() < 1e-9);
        assert_eq!((whole(2.9), whole(-1.0)), (2, 0));
    }

    #[test]
    fn s23_a_clock_set_over_the_turn_of_the_month_and_back_gives_nothing_back() {
        let november = month("2026-11", 100.0, Some(("2026-10", 0.0)));
        let december = counted(Some(&november), "2026-12", 500.0);
        let again = counted(Some(&december), "2026-11", 510.0);
        assert_eq!(again, month("2026-11", 100.0, Some(("2026-12", 500.0))));
        assert_eq!(counted(Some(&again), "2026-12", 520.0), december);
        // What an earlier version has written is read.
        let earlier = r#"{"month":"2026-11","from_gib_seconds":100.0}"#;
        let read: CountedMonth = serde_json::from_str(earlier).unwrap();
        assert_eq!(read, month("2026-11", 100.0, None));
    }
}
