//! Changing a box while it lives.

use api::boxes::start::UpdateBox;
use api::boxes::view::BoxView;
use api::host::Change;

use super::start::{check_name, idle_minutes, idle_ms, one_line};
use super::{BoxRecord, Who, act, checkpoint, view};
use crate::App;
use crate::failure::Failure;

/// Gives a box another name, goal or `idleTimeoutMin`. No use of it (B4), and a frozen one stays so.
pub(crate) async fn update(
    app: &App,
    who: &Who,
    id: &str,
    request: UpdateBox,
) -> Result<BoxView, Failure> {
    let record = act::find(app, who, id)?;
    act::not_ended(&record)?;
    let name = request.name;
    check_name(name.as_ref().and_then(Option::as_deref))?;
    let goal = request.goal.map(|goal| goal.as_deref().and_then(one_line));
    let idle = request.idle_timeout_min.map(|minutes| minutes.and_then(idle_minutes));
    let _one_at_a_time = app.boxes().updating.turn(&record.id).await;
    if let Some(minutes) = idle {
        // One that the rules have stopped has no more use to be counted from.
        act::living(app, &record).await?;
        let change = Change { idle_timeout_ms: Some(idle_ms(minutes)), ..Change::default() };
        app.host().update(&record.id, change).await?;
    }
    let change = |record: &mut BoxRecord| {
        if let Some(name) = name {
            record.spec.name = name;
        }
        if let Some(goal) = goal {
            record.spec.goal = goal;
        }
        if let Some(minutes) = idle {
            record.spec.idle_timeout_min = minutes;
        }
    };
    app.boxes().change(app.catalogue(), &record.id, change).await?;
    checkpoint::carry(app, &record.id).await?;
    view::status(app, who, id).await
}
