//! Commands that were started before: listed, read, waited for and signalled by number.

use api::exec::{Exec, ExecList, ExecStatus, Exit, SignalRequest};
use http_body_util::BodyExt;
use serde_json::json;

use super::attached::{Attached, Sink};
use super::exec::exit_code;
use super::sandboxes::path;
use crate::cli::{ExecOutputArgs, StreamArg};
use crate::client::{Client, cut, full, quote};
use crate::problem::Problem;
use crate::show;

pub(crate) async fn list(client: &Client, name: &str, json: bool) -> Result<i32, Problem> {
    let list: ExecList = client.get(&format!("{}/execs", path(name))).await?;
    if json {
        show::json(&list.execs)?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = list
        .execs
        .iter()
        .map(|exec| {
            let written =
                format!("{} / {}", show::size(exec.stdout_bytes), show::size(exec.stderr_bytes));
            let status = status(exec.status, exec.exit);
            vec![exec.exec_id.clone(), exec.pid.to_string(), status, written, exec.command.clone()]
        })
        .collect();
    show::table(&["EXEC", "PID", "STATUS", "OUT / ERR", "COMMAND"], &rows)?;
    Ok(0)
}

pub(crate) async fn output(
    client: &Client,
    arguments: ExecOutputArgs,
    json: bool,
) -> Result<i32, Problem> {
    let ExecOutputArgs { name, exec, follow, stream, from_offset } = arguments;
    let place = place(&name, &exec);
    // An offset is one stream's.
    let stream = stream.or_else(|| from_offset.map(|_| StreamArg::Stdout));
    let from = from_offset.unwrap_or(0);
    if follow && !json {
        let view: Exec = client.get(&place).await?;
        let (sinks, begin) = match stream {
            None => ([Sink::Pass, Sink::Pass], [0, 0]),
            Some(StreamArg::Stdout) => ([Sink::Pass, Sink::Drop], [from, view.stderr_bytes]),
            Some(StreamArg::Stderr) => ([Sink::Drop, Sink::Pass], [view.stdout_bytes, from]),
        };
        Attached::new(client, place, exec, sinks, begin).follow().await?;
        return Ok(0);
    }
    for (each, word) in [(StreamArg::Stdout, "stdout"), (StreamArg::Stderr, "stderr")] {
        if stream.is_some_and(|stream| stream != each) {
            continue;
        }
        let query = format!("{place}/output?stream={word}&offset={from}&follow={follow}");
        let answer = client.send(client.request("GET", &query), full("")).await?;
        let header = |name: &str| {
            answer.headers().get(name).and_then(|value| value.to_str().ok()?.parse::<u64>().ok())
        };
        let (begin, next) = (header("dormouse-offset"), header("dormouse-next-offset"));
        if let Some(missing) = begin.and_then(|begin| begin.checked_sub(from)).filter(|n| *n > 0) {
            eprintln!("note: {} of output were no longer kept", show::size(missing));
        }
        if json {
            let bytes = answer.into_body().collect().await.map_err(cut)?.to_bytes();
            let next = next.or(begin.map(|begin| begin + bytes.len() as u64));
            show::json_line(&json!({
                "stream": word, "offset": begin, "next_offset": next,
                "text": String::from_utf8_lossy(&bytes),
            }))?;
            continue;
        }
        let mut body = answer.into_body();
        while let Some(frame) = body.frame().await {
            let Ok(bytes) = frame.map_err(cut)?.into_data() else { continue };
            match each {
                StreamArg::Stdout => show::bytes(&bytes)?,
                StreamArg::Stderr => {
                    // Nobody can be told that standard error is gone.
                    let _ = std::io::Write::write_all(&mut std::io::stderr().lock(), &bytes);
                }
            }
        }
    }
    Ok(0)
}

pub(crate) async fn wait(
    client: &Client,
    name: &str,
    exec: &str,
    json: bool,
) -> Result<i32, Problem> {
    let place = place(name, exec);
    let view: Exec = client.get(&place).await?;
    let exit = if let Some(exit) = view.exit {
        exit
    } else {
        let from = [view.stdout_bytes, view.stderr_bytes];
        let sinks = [Sink::Drop, Sink::Drop];
        let waiting = Attached::new(client, place.clone(), exec.to_owned(), sinks, from);
        waiting.holding().follow().await?.exit
    };
    if json {
        show::json(&client.get::<Exec>(&place).await?)?;
    }
    Ok(exit_code(exit))
}

pub(crate) async fn kill(
    client: &Client,
    name: &str,
    exec: &str,
    signal: String,
) -> Result<i32, Problem> {
    let body = serde_json::to_vec(&SignalRequest { signal })
        .map_err(|error| Problem::new(format!("cannot write the request: {error}")))?;
    let request = client
        .request("POST", &format!("{}/signal", place(name, exec)))
        .header("content-type", "application/json");
    client.send(request, full(body)).await?;
    Ok(0)
}

/// How a command is, in a word or two.
pub(super) fn status(status: ExecStatus, exit: Option<Exit>) -> String {
    match (status, exit) {
        (ExecStatus::Running, _) => "running".to_owned(),
        (ExecStatus::Exited, Some(Exit { signal: Some(signal), .. })) => format!("signal {signal}"),
        (ExecStatus::Exited, Some(Exit { exit_code: Some(code), .. })) => format!("exit {code}"),
        (ExecStatus::Exited, _) => "lost".to_owned(),
    }
}

fn place(name: &str, exec: &str) -> String {
    format!("{}/execs/{}", path(name), quote(exec))
}
