//! Running commands: their bytes pass through as they are, and their exit code becomes ours.

use std::io::IsTerminal;

use api::exec::{Exec, ExecRequest, Exit};
use serde_json::json;

use super::EXIT_NO_READER;
use super::attached::{Attached, Signals, Sink};
use super::sandboxes::{self, path};
use crate::cli::{ExecArgs, ExecOptions, RunArgs};
use crate::client::Client;
use crate::problem::Problem;
use crate::show;

/// The longest time-out that makes sense to type, seconds: a week.
const TIMEOUT_SECONDS_MAX: f64 = 604_800.0;

pub(crate) async fn exec(client: &Client, arguments: ExecArgs, json: bool) -> Result<i32, Problem> {
    let ExecArgs { name, options, background, argv } = arguments;
    if background {
        let request = ExecRequest { background: true, ..request(options, argv)? };
        let exec: Exec =
            client.json("POST", &format!("{}/execs", path(&name)), Some(&request)).await?;
        if json {
            show::json(&exec)?;
        } else {
            show::data(&exec.exec_id)?;
        }
        return Ok(0);
    }
    run_in(client, &name, options, argv, json).await
}

pub(crate) async fn run(client: &Client, arguments: RunArgs, json: bool) -> Result<i32, Problem> {
    let RunArgs { size, keep, cwd, user, timeout, interactive, argv } = arguments;
    let body = sandboxes::new_sandbox(size, None, api::sandbox::PolicyPatch::default());
    let options = ExecOptions { cwd, env: Vec::new(), user, timeout, interactive };
    // What is wrong with it is said before anything is made.
    request(options.clone(), argv.clone())?;
    let mut signals = Signals::new()?;
    let making = sandboxes::make(client, "/v1/sandboxes", &body, None);
    tokio::pin!(making);
    let mut interrupted = None;
    let sandbox: api::sandbox::Sandbox = loop {
        tokio::select! {
            made = &mut making => break made?,
            // One that is being made is there soon, and only then can it be deleted.
            (_, signal) = signals.next() => interrupted = Some(signal),
        }
    };
    let id = sandbox.id.as_str();
    let result = match interrupted {
        Some(signal) => Ok(128 + signal),
        None => run_in(client, id, options, argv, json).await,
    };
    if keep && interrupted.is_none() {
        eprintln!("note: the sandbox `{}` is kept", sandbox.name);
    } else if let Err(problem) = sandboxes::delete_one(client, id).await {
        eprintln!("note: the sandbox `{}` is left over", sandbox.name);
        problem.print(json);
    }
    result
}

async fn run_in(
    client: &Client,
    name: &str,
    options: ExecOptions,
    argv: Vec<String>,
    json: bool,
) -> Result<i32, Problem> {
    let with_stdin = options.interactive || !std::io::stdin().is_terminal();
    let request =
        ExecRequest { background: true, open_stdin: with_stdin, ..request(options, argv)? };
    // Before the command starts: a Ctrl-C in between must reach it.
    let mut signals = Signals::new()?;
    let place = format!("{}/execs", path(name));
    let exec: Exec = tokio::select! {
        exec = client.json("POST", &place, Some(&request)) => exec?,
        // A sandbox that does not answer must not hold whoever asks.
        (_, signal) = signals.next() => {
            eprintln!("note: the command may still be started: `dormouse execs list {name}` tells");
            return Ok(128 + signal);
        }
    };
    let place = format!("{}/execs/{}", path(name), exec.exec_id);
    let sinks = [if json { Sink::Keep } else { Sink::Pass }; 2];
    let outcome = Attached::new(client, place, exec.exec_id.clone(), sinks, [0, 0])
        .holding()
        .with(with_stdin.then(tokio::io::stdin), signals)
        .follow()
        .await?;
    let (exit, [stdout, stderr]) = (outcome.exit, outcome.kept);
    if outcome.no_reader {
        return Ok(EXIT_NO_READER);
    }
    if json {
        show::json(&json!({
            "exec_id": exec.exec_id,
            "pid": exec.pid,
            "exit_code": exit.exit_code,
            "signal": exit.signal,
            "timed_out": exit.timed_out,
            "stdout": String::from_utf8_lossy(&stdout),
            "stderr": String::from_utf8_lossy(&stderr),
        }))?;
    }
    if exit.timed_out {
        eprintln!("note: the command was killed when its time-out ran out");
    }
    Ok(exit_code(exit))
}

/// A command's end as a shell tells it.
pub(super) fn exit_code(exit: Exit) -> i32 {
    exit.exit_code.unwrap_or_else(|| 128 + exit.signal.unwrap_or_default())
}

fn request(options: ExecOptions, argv: Vec<String>) -> Result<ExecRequest, Problem> {
    let timeout_ms = match options.timeout {
        None => None,
        Some(seconds) if seconds > 0.0 && seconds <= TIMEOUT_SECONDS_MAX => {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "between 0 and a week"
            )]
            let ms = (seconds * 1000.0).ceil() as u64;
            Some(ms)
        }
        Some(_) => {
            return Err(Problem::usage("`--timeout` is out of range")
                .hint("seconds, more than 0 and at most 604800"));
        }
    };
    Ok(ExecRequest {
        argv: Some(argv),
        command: None,
        cwd: options.cwd,
        env: options.env.into_iter().collect(),
        user: options.user,
        stdin: None,
        open_stdin: false,
        timeout_ms,
        background: false,
    })
}
