//! What happened to a sandbox, and why it is as it is.

use std::time::Duration;

use api::Event;
use api::event::EventPage;
use api::sandbox::Why;
use http_body_util::BodyExt;

use super::sandboxes::path;
use crate::cli::{EventsArgs, LogsArgs};
use crate::client::{Client, full};
use crate::problem::Problem;
use crate::show;

/// How long a broken stream is tried anew.
const RECONNECT_TIME_MAX: Duration = Duration::from_mins(1);
/// Between two tries.
const RECONNECT_PAUSE: Duration = Duration::from_millis(200);
/// Most bytes of one server-sent event.
const EVENT_BYTES_MAX: usize = 1024 * 1024;

pub(crate) async fn why(client: &Client, name: &str, json: bool) -> Result<i32, Problem> {
    let why: Why = client.get(&format!("{}/why", path(name))).await?;
    if json {
        show::json(&why)?;
        return Ok(0);
    }
    show::data(&why.summary)?;
    show::data(&format!("slept {}×, woken {}×", why.sleeps, why.wakes))?;
    show::data("")?;
    why.timeline.iter().try_for_each(|event| show::data(&line(event)))?;
    Ok(0)
}

pub(crate) async fn events(
    client: &Client,
    arguments: EventsArgs,
    json: bool,
) -> Result<i32, Problem> {
    let EventsArgs { name, follow, mut after } = arguments;
    let print =
        |event: &Event| if json { show::json_line(event) } else { show::data(&line(event)) };
    if !follow {
        loop {
            let page: EventPage =
                client.get(&format!("{}/events?limit=1000&after={after}", path(&name))).await?;
            if page.events.is_empty() {
                return Ok(0);
            }
            page.events.iter().try_for_each(print)?;
            after = page.next_after;
        }
    }
    let mut broken_since: Option<tokio::time::Instant> = None;
    loop {
        match stream(client, &name, &mut after, &mut broken_since, &print).await {
            Ok(true) => return Ok(0),
            Ok(false) => {}
            Err(problem) if problem.is_unreachable() => {
                let since = *broken_since.get_or_insert_with(tokio::time::Instant::now);
                if since.elapsed() > RECONNECT_TIME_MAX {
                    return Err(problem);
                }
            }
            Err(problem) => return Err(problem),
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}

pub(crate) async fn logs(client: &Client, arguments: LogsArgs) -> Result<i32, Problem> {
    // `--console` is the default; it is there so that it can be said.
    let kind = if arguments.daemon && !arguments.console { "daemon" } else { "console" };
    let place =
        format!("{}/logs?kind={kind}&max_bytes={}", path(&arguments.name), arguments.max_bytes);
    let answer = client.send(client.request("GET", &place), full("")).await?;
    let log = answer.into_body().collect().await.map_err(crate::client::cut)?.to_bytes();
    if log.is_empty() {
        eprintln!(
            "note: the log is empty: {}",
            if kind == "console" {
                "its console has said nothing; a copy of a template or of another sandbox does not boot"
            } else {
                "the daemon has had nothing to say about it"
            }
        );
    }
    show::bytes(&log)?;
    Ok(0)
}

/// Follows one stream to its end. `true`: the sandbox was deleted, nothing more will come.
async fn stream(
    client: &Client,
    name: &str,
    after: &mut u64,
    broken_since: &mut Option<tokio::time::Instant>,
    print: &impl Fn(&Event) -> Result<(), Problem>,
) -> Result<bool, Problem> {
    let place = format!("{}/events?after={after}&stream=true", path(name));
    let mut body = client.send(client.request("GET", &place), full("")).await?.into_body();
    *broken_since = None;
    let mut text = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(bytes) = frame.map_err(crate::client::cut)?.into_data() else { continue };
        text.extend_from_slice(&bytes);
        while let Some(end) = text.windows(2).position(|pair| pair == b"\n\n") {
            let block: Vec<u8> = text.drain(..end + 2).collect();
            let block = String::from_utf8_lossy(&block);
            let Some(data) = block.lines().find_map(|line| line.strip_prefix("data: ")) else {
                continue;
            };
            let event: Event = serde_json::from_str(data).map_err(|error| {
                Problem::new(format!("the daemon's event is not understood: {error}"))
            })?;
            *after = event.seq;
            print(&event)?;
            if event.kind == "sandbox.deleted" {
                return Ok(true);
            }
        }
        if text.len() > EVENT_BYTES_MAX {
            return Err(Problem::new("the daemon's event is longer than any should be"));
        }
    }
    Ok(false)
}

/// Time, what, why, and how long each phase took.
fn line(event: &Event) -> String {
    let kind = event.kind.strip_prefix("sandbox.").unwrap_or(&event.kind);
    let mut text = format!("{}  {kind:<10} {}", event.at, event.text);
    if let Some(total) = event.data.get("total_ms").and_then(serde_json::Value::as_f64) {
        text = format!("{text}, {total:.1} ms");
    }
    if let Some(phases) = event.data.get("phases_ms").and_then(serde_json::Value::as_object) {
        let parts: Vec<String> = phases
            .iter()
            .map(|(phase, ms)| {
                ms.as_f64().map_or_else(|| format!("{phase} {ms}"), |ms| format!("{phase} {ms:.1}"))
            })
            .collect();
        if !parts.is_empty() {
            text = format!("{text} ({})", parts.join(", "));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_timeline() {
        let event: Event = serde_json::from_value(serde_json::json!({
            "seq": 7, "at": "2026-11-30T10:15:30.123Z", "sandbox_id": "k3vq7mzt2abc", "type": "sandbox.woke",
            "text": "woken by a request to port 8000",
            "data": {"total_ms": 31.25, "phases_ms": {"spawn": 21.3, "load": 9.95}},
        }))
        .unwrap();
        let want = "2026-11-30T10:15:30.123Z  woke       woken by a request to port 8000, 31.2 ms (spawn 21.3, load 9.9)";
        assert_eq!(line(&event), want);
    }
}
