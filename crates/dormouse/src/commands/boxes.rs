//! Boxes that are there: listing them, telling about them, stopping them and bringing them back.
//!
//! A box is found by its id or by its name, in the list of boxes, which is no use of any (B4).

use api::boxes::act::{BoxCheckpoint, BoxCommands, BoxProcesses};
use api::boxes::start::{StartBox, StartedBox, UpdateBox};
use api::boxes::view::{BoxCheckpointView, BoxEvents, BoxList, BoxView, Done};
use api::exec::SignalRequest;
use api::{ApiError, Code};

use super::{box_exec, box_view};
use crate::boxes_args::{BoxesCommand, WhichBox};
use crate::client::{Client, full, quote};
use crate::problem::Problem;
use crate::show;

pub(crate) async fn boxes(
    client: &Client,
    command: BoxesCommand,
    json: bool,
) -> Result<i32, Problem> {
    match command {
        BoxesCommand::List { all } => {
            let boxes = list(client, all).await?;
            if json { show::json(&boxes)? } else { box_view::table(&boxes)? }
        }
        BoxesCommand::Get { which } => {
            let id = find(client, &which, lives).await?.id;
            let view: BoxView = client.get(&place(&id)).await?;
            if json { show::json(&view)? } else { show::data(&box_view::describe(&view))? }
        }
        BoxesCommand::Timeline { which } => timeline(client, &which, json).await?,
        BoxesCommand::Link { which, service } => {
            let view = find(client, &which, lives).await?;
            let url = box_view::url(&view, service.as_deref())?;
            if json {
                show::json(&serde_json::json!({ "url": url }))?;
            } else {
                show::data(&url)?;
            }
        }
        BoxesCommand::Stop { boxes } => return stop(client, &boxes, json).await,
        BoxesCommand::Restore { which } => restore(client, &which, json).await?,
        BoxesCommand::Wake { which } => {
            let view = find(client, &which, lives).await?;
            let place = format!("{}/wake", place(&view.id));
            let woken = client.json("POST", &place, None::<&()>).await;
            let woken: BoxView = woken.map_err(|problem| with_way_back(problem, &view))?;
            told(&woken, json)?;
        }
        BoxesCommand::Exec(arguments) => {
            let view = find(client, &arguments.which, lives).await?;
            let done = box_exec::exec(client, &place(&view.id), arguments, json).await;
            return done.map_err(|problem| with_way_back(problem, &view));
        }
        BoxesCommand::Execs { which } => {
            let view = find(client, &which, lives).await?;
            let listed = client.get(&format!("{}/execs", place(&view.id))).await;
            let BoxCommands { execs } = listed.map_err(|problem| with_way_back(problem, &view))?;
            if json { show::json(&execs)? } else { box_exec::commands(&execs)? }
        }
        BoxesCommand::Kill { which, exec, signal } => {
            let view = find(client, &which, lives).await?;
            let place = format!("{}/execs/{}/signal", place(&view.id), quote(&exec));
            let sent = client.json("POST", &place, Some(&SignalRequest { signal })).await;
            let Done { .. } = sent.map_err(|problem| with_way_back(problem, &view))?;
        }
        BoxesCommand::Ps { which } => {
            let view = find(client, &which, lives).await?;
            let listed = client.get(&format!("{}/procs", place(&view.id))).await;
            let BoxProcesses { processes } =
                listed.map_err(|problem| with_way_back(problem, &view))?;
            if json { show::json(&processes)? } else { box_exec::processes(&processes)? }
        }
        BoxesCommand::Update { which, title, goal, idle_timeout } => {
            let view = find(client, &which, lives).await?;
            let change = UpdateBox {
                name: title.map(Some),
                goal: goal.map(Some),
                idle_timeout_min: idle_timeout.map(Some),
            };
            let changed = client.json("PATCH", &place(&view.id), Some(&change)).await;
            told(&changed.map_err(|problem| with_way_back(problem, &view))?, json)?;
        }
        BoxesCommand::Checkpoint { which, every } => {
            let id = find(client, &which, lives).await?.id;
            let body = BoxCheckpoint { every_seconds: Some(every.0) };
            let place = format!("{}/checkpoint", place(&id));
            let set: BoxCheckpointView = client.json("PUT", &place, Some(&body)).await?;
            if json {
                show::json(&set)?;
            } else {
                eprintln!("{id}: checkpoints {}", box_view::checkpoint(&set));
            }
        }
    }
    Ok(0)
}

async fn timeline(client: &Client, which: &WhichBox, json: bool) -> Result<(), Problem> {
    let view = find(client, which, lives).await?;
    let BoxEvents { events } = client.get(&format!("{}/events", place(&view.id))).await?;
    if json {
        return show::json(&events);
    }
    show::data(&box_view::headline(&view))?;
    show::data("")?;
    events.iter().try_for_each(|event| show::data(&box_view::event(event)))
}

async fn stop(client: &Client, given: &[String], json: bool) -> Result<i32, Problem> {
    let known = list(client, true).await?;
    let mut code = 0;
    for given in given {
        let stopped = async {
            let view = pick(&known, given, lives)?;
            client.send(client.request("DELETE", &place(&view.id)), full("")).await?;
            Ok::<_, Problem>(view)
        };
        match stopped.await {
            Ok(view) => eprintln!("stopped {}", box_view::called(view)),
            // The others are stopped all the same.
            Err(problem) => {
                problem.print(json);
                code = problem.exit_code();
            }
        }
    }
    Ok(code)
}

async fn restore(client: &Client, which: &WhichBox, json: bool) -> Result<(), Problem> {
    let view = find(client, which, |view| view.restorable_until.is_some()).await?;
    let body = StartBox { restore: Some(view.id), ..StartBox::default() };
    let StartedBox { started, .. } = client.json("POST", "/v1/boxes", Some(&body)).await?;
    if view.restorable_until.is_none() {
        eprintln!("note: it was not stopped: nothing was changed");
    }
    told(&started, json)
}

/// What became of a box that was acted on.
fn told(view: &BoxView, json: bool) -> Result<(), Problem> {
    if json {
        return show::json(view);
    }
    eprintln!("{}", box_view::headline(view));
    Ok(())
}

/// All boxes of the account, oldest first; with `all` also those that have ended.
async fn list(client: &Client, all: bool) -> Result<Vec<BoxView>, Problem> {
    let BoxList { boxes } = client.get(if all { "/v1/boxes?all=1" } else { "/v1/boxes" }).await?;
    Ok(boxes)
}

/// The box that is meant; of several of one name the only one that is `rather` it.
async fn find(
    client: &Client,
    which: &WhichBox,
    rather: fn(&BoxView) -> bool,
) -> Result<BoxView, Problem> {
    let known = list(client, true).await?;
    pick(&known, &which.given, rather).cloned()
}

fn pick<'a>(
    known: &'a [BoxView],
    given: &str,
    rather: fn(&BoxView) -> bool,
) -> Result<&'a BoxView, Problem> {
    if let Some(view) = known.iter().find(|view| view.id == given) {
        return Ok(view);
    }
    let named: Vec<_> = known.iter().filter(|view| view.name.as_deref() == Some(given)).collect();
    let better: Vec<_> = named.iter().copied().filter(|view| rather(view)).collect();
    match if better.is_empty() { &named[..] } else { &better[..] } {
        [view] => Ok(view),
        [] => {
            let given = show::plain(given);
            let error = ApiError::new(
                Code::NotFound,
                format!("there is no box of the id or name `{given}`"),
            );
            Err(error.hint("`dormouse boxes list --all` shows those that there are; those of another account with `--as-account`").into())
        }
        several => {
            let ids: Vec<_> = several
                .iter()
                .map(|view| format!("{} ({})", view.id, box_view::status(view)))
                .collect();
            let text = format!("{} boxes have the name `{}`", ids.len(), show::plain(given));
            Err(Problem::new(text).hint(format!("take an id instead: {}", ids.join(", "))))
        }
    }
}

/// Where one is stopped and could be brought back, how that is done here.
fn with_way_back(problem: Problem, view: &BoxView) -> Problem {
    match &view.restorable_until {
        Some(until) if problem.code() == Some(Code::BoxStopped) => {
            let id = &view.id;
            problem.hint(format!("`dormouse boxes restore {id}` brings it back, until {until}"))
        }
        _ => problem,
    }
}

fn lives(view: &BoxView) -> bool {
    view.status.is_live()
}

fn place(id: &str) -> String {
    format!("/v1/boxes/{}", quote(id))
}

#[cfg(test)]
mod tests {
    use super::super::box_view::tests::example;
    use super::*;
    use api::boxes::BoxStatus;

    fn boxes() -> Vec<BoxView> {
        let one = |id: &str, name: Option<&str>, status, until: Option<&str>| BoxView {
            id: id.to_owned(),
            name: name.map(str::to_owned),
            status,
            restorable_until: until.map(str::to_owned),
            ..example()
        };
        vec![
            one("aaaaaaaaaaaa", Some("shop"), BoxStatus::Terminated, Some("2026-12-02T12:00:00Z")),
            one("bbbbbbbbbbbb", Some("shop"), BoxStatus::Frozen, None),
            one("cccccccccccc", Some("twice"), BoxStatus::Ready, None),
            one("dddddddddddd", Some("twice"), BoxStatus::Frozen, None),
            one("eeeeeeeeeeee", Some("cccccccccccc"), BoxStatus::Ready, None),
            one("ffffffffffff", Some("over"), BoxStatus::Terminated, None),
            one("gggggggggggg", None, BoxStatus::Ready, None),
        ]
    }

    #[test]
    fn a_box_is_found_by_its_id_or_its_name() {
        let known = boxes();
        let found = |given| pick(&known, given, lives).map(|view| view.id.as_str());
        assert_eq!(found("gggggggggggg").unwrap(), "gggggggggggg");
        assert_eq!(found("over").unwrap(), "ffffffffffff");
        // The one that lives goes before one that has ended, and an id before a name.
        assert_eq!(found("shop").unwrap(), "bbbbbbbbbbbb");
        assert_eq!(found("cccccccccccc").unwrap(), "cccccccccccc");
        // To be restored is the one that can be.
        let kept = pick(&known, "shop", |view| view.restorable_until.is_some());
        assert_eq!(kept.unwrap().id, "aaaaaaaaaaaa");
    }

    #[test]
    fn a_box_that_is_not_there_or_could_be_several_is_refused() {
        let known = boxes();
        let refused = |given| pick(&known, given, lives).expect_err("refused");
        let unknown = refused("no\u{1b}such");
        assert_eq!((unknown.code(), unknown.exit_code()), (Some(Code::NotFound), 1));
        assert!(unknown.sentence().contains("there is no box of the id or name `no such`"));
        assert_eq!(refused("").code(), Some(Code::NotFound));
        let several = refused("twice");
        assert_eq!(several.exit_code(), 1);
        let text = several.sentence();
        assert!(text.starts_with("2 boxes have the name `twice`"), "{text}");
        assert!(text.contains("cccccccccccc (ready), dddddddddddd (frozen)"), "{text}");
    }

    #[test]
    fn one_that_is_stopped_says_how_it_comes_back() {
        let known = boxes();
        let stopped = || Problem::from(ApiError::new(Code::BoxStopped, "it is terminated"));
        let text = with_way_back(stopped(), &known[0]).sentence();
        assert!(
            text.contains("`dormouse boxes restore aaaaaaaaaaaa` brings it back, until"),
            "{text}"
        );
        let text = with_way_back(stopped(), &known[5]).sentence();
        assert!(!text.contains("restore"), "{text}");
    }
}
