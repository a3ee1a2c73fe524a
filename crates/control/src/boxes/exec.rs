//! Commands in a box: waited for, in the background, or read on.

use std::time::Duration;

use api::boxes::act::{BoxCommand, BoxCommands, BoxExec, BoxExecResult};
use api::exec::{Exec, ExecRequest, ExecStatus, Exit};
use api::host::{OutputEvent, OutputFrom};
use api::{ApiError, Code, SandboxId};
use tokio::time::Instant;

use super::{Acting, Who, act, secrets};
use crate::App;
use crate::failure::Failure;
use crate::validate;

/// Most bytes of output in one answer.
const OUTPUT_BYTES_MAX: u64 = 1024 * 1024;
/// The longest that a command is waited for in one call, seconds.
const WAIT_SEC_MAX: u64 = 3_600;
/// What each command of a box begins with: both streams in one, in the order in which they are written; in one line with it, by which
/// bash counts in what it says.
const BOTH_STREAMS: &str = "exec 2>&1;";
/// Lists processes and what they listen on, for [`procs`](super::procs): nobody has asked for this command, so it is not listed.
pub(super) const LISTING: &str =
    "ps -eo pid=,ppid=,rss=,cputimes=,args= && echo --listening-- && ss -ltnpH";
/// The longest `timeoutSec`: a day.
const TIMEOUT_SEC_MAX: u64 = 86_400;

/// What the caller's way in allows.
#[derive(Clone, Copy)]
pub(crate) struct Way {
    /// Bytes of output unless asked otherwise.
    pub(crate) bytes: u64,
    /// The longest that it can wait; `None`: as long as asked.
    pub(crate) waits: Option<Duration>,
    /// A note in the answer reaches somebody.
    pub(crate) notes: bool,
}

/// Runs a command, or reads one on. A foreground command is waited for as long as the caller can wait; then it runs on by itself
/// and the answer says how to read on.
pub(crate) async fn exec(
    app: &App,
    who: &Who,
    id: &str,
    way: Way,
    request: BoxExec,
) -> Result<BoxExecResult, Failure> {
    check(&request)?;
    let until = Instant::now() + wait(&request, way);
    let bytes = request.max_bytes.unwrap_or(way.bytes);
    let mut acting = act(app, who, id, "sandbox_exec").await?;
    let record = acting.record.clone();
    let work = async {
        let done = run(app, &mut acting, &request, until, bytes).await?;
        if way.notes {
            acting.noted(app).await;
        }
        Ok(done)
    };
    super::while_paid(app, &record, work).await
}

async fn run(
    app: &App,
    acting: &mut Acting,
    request: &BoxExec,
    until: Instant,
    bytes: u64,
) -> Result<BoxExecResult, Failure> {
    let (exec_id, offset) = match (&request.exec_id, &request.command) {
        (Some(exec_id), _) => (exec_id.clone(), request.offset.unwrap_or(0)),
        (None, Some(command)) => (begin(app, acting, request, command).await?, 0),
        (None, None) => return Err(ApiError::invalid("command", "`command` is missing").into()),
    };
    if request.background {
        let note = acting.note.clone();
        return Ok(BoxExecResult {
            exec_id,
            running: true,
            exit_code: None,
            signal: None,
            timed_out: false,
            output: String::new(),
            next_offset: 0,
            truncated: false,
            note,
        });
    }
    read(app, acting, &exec_id, offset, bytes, until).await
}

fn check(request: &BoxExec) -> Result<(), ApiError> {
    match (&request.command, &request.exec_id) {
        (Some(_), None) if request.offset.is_some() => {
            return Err(ApiError::invalid("offset", "`offset` goes with `execId`"));
        }
        (Some(command), None) if command.trim().is_empty() => {
            return Err(ApiError::invalid("command", "`command` is blank").hint("a line for bash"));
        }
        (None, Some(_)) if request.background => {
            return Err(ApiError::invalid("background", "`background` goes with `command`"));
        }
        _ if request.open_stdin && !request.background => {
            let text = "nobody could write to it while this call waits for the end";
            return Err(ApiError::invalid("openStdin", text)
                .hint("add `\"background\": true`, with `command`"));
        }
        (Some(_), None) | (None, Some(_)) => {}
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid("execId", "give `command` or `execId`, not both"));
        }
        (None, None) => {
            return Err(ApiError::invalid("command", "`command` is missing")
                .hint("a line for bash, or `execId` to read a command on"));
        }
    }
    for (field, given, least, most) in [
        ("waitSec", request.wait_sec, 0, WAIT_SEC_MAX),
        ("timeoutSec", request.timeout_sec, 1, TIMEOUT_SEC_MAX),
        ("maxBytes", request.max_bytes, 1, OUTPUT_BYTES_MAX),
    ] {
        if let Some(given) = given.filter(|given| !(least..=most).contains(given)) {
            return Err(validate::out_of_range(field, given, least, most));
        }
    }
    Ok(())
}

fn wait(request: &BoxExec, way: Way) -> Duration {
    let asked = Duration::from_secs(request.wait_sec.unwrap_or(WAIT_SEC_MAX));
    way.waits.map_or(asked, |most| asked.min(most))
}

async fn begin(
    app: &App,
    acting: &mut Acting,
    request: &BoxExec,
    command: &str,
) -> Result<String, Failure> {
    let (mut env, missing) = secrets::env(app, acting)?;
    if let Some(missing) = missing {
        acting.note =
            Some(acting.note.take().map_or(missing.clone(), |note| format!("{note} {missing}")));
    }
    // What the call itself says comes first.
    env.extend(request.env.clone());
    let exec = ExecRequest {
        command: Some(format!("{BOTH_STREAMS}{command}")),
        open_stdin: request.open_stdin,
        cwd: request.cwd.clone(),
        env,
        timeout_ms: request.timeout_sec.map(|seconds| seconds * 1000),
        background: request.background,
        ..ExecRequest::default()
    };
    validate::exec(&exec)?;
    Ok(app.host().exec_start(&acting.record.id, exec).await?.value.exec_id)
}

/// Reads output from a position, until the command ends, the answer is full or the time is over.
async fn read(
    app: &App,
    acting: &Acting,
    exec_id: &str,
    offset: u64,
    bytes_max: u64,
    until: Instant,
) -> Result<BoxExecResult, Failure> {
    let id = &acting.record.id;
    let view = app.host().exec_view(id, exec_id).await?.value;
    if offset > view.stdout_bytes {
        let error = validate::out_of_range("offset", offset, 0, view.stdout_bytes);
        return Err(ApiError { code: Code::Unprocessable, ..error }.into());
    }
    // Held as a whole by the call itself.
    let from = OutputFrom { stdout: Some(offset), stderr: None, follow: true, hold: true };
    let mut events = app.host().exec_output(id, exec_id, from).await?.value;
    let limit = usize::try_from(bytes_max).unwrap_or(usize::MAX);
    let mut output = Vec::new();
    let mut begin = offset;
    let mut exit: Option<Exit> = None;
    let mut truncated = false;
    while let Ok(Some(event)) = tokio::time::timeout_at(until, events.recv()).await {
        match event? {
            OutputEvent::Data { offset, bytes, .. } => {
                if output.is_empty() {
                    // Later than asked for, if older output is no longer kept.
                    begin = offset;
                }
                // What does not fit is read on from there; the end of the command is waited for all the same.
                let take = bytes.len().min(limit - output.len());
                output.extend_from_slice(&bytes[..take]);
                truncated |= take < bytes.len();
            }
            OutputEvent::Exit(ended) => {
                exit = Some(ended);
                break;
            }
        }
    }
    if truncated || exit.is_none() {
        let view = app.host().exec_view(id, exec_id).await?.value;
        exit = view.exit.filter(|_| view.status == ExecStatus::Exited);
        truncated = view.stdout_bytes > begin + output.len() as u64;
    }
    // A character that is cut is told whole the next time, unless there is room for nothing else.
    if (truncated || exit.is_none()) && whole_characters(&output) > 0 {
        output.truncate(whole_characters(&output));
    }
    let next_offset = begin + output.len() as u64;
    Ok(BoxExecResult {
        exec_id: exec_id.to_owned(),
        running: exit.is_none(),
        exit_code: exit.and_then(|exit| exit.exit_code),
        signal: exit.and_then(|exit| exit.signal),
        timed_out: exit.is_some_and(|exit| exit.timed_out),
        output: String::from_utf8_lossy(&output).into_owned(),
        next_offset,
        truncated,
        note: acting.note.clone(),
    })
}

/// The commands of a box since it was booted. No use of it, and a frozen one stays so (B4).
pub(crate) async fn commands(app: &App, who: &Who, id: &str) -> Result<BoxCommands, Failure> {
    let record = act::find(app, who, id)?;
    act::living(app, &record).await?;
    let execs = app.host().exec_list(&record.id).await?.value;
    let execs = execs.into_iter().filter(|exec| !exec.command.ends_with(LISTING));
    Ok(BoxCommands { execs: execs.map(told).collect() })
}

/// One of them. No use of the box either.
pub(crate) async fn command(
    app: &App,
    who: &Who,
    id: &str,
    exec_id: &str,
) -> Result<BoxCommand, Failure> {
    let record = act::find(app, who, id)?;
    act::living(app, &record).await?;
    Ok(told(app.host().exec_view(&record.id, exec_id).await?.value))
}

/// Sends a signal to a command's process group; the strongest one to all that it has started. Use of the box.
pub(crate) async fn signal(
    app: &App,
    who: &Who,
    id: &str,
    exec_id: &str,
    signal: i32,
) -> Result<(), Failure> {
    let acting = act::act(app, who, id, "a signal for a command").await?;
    app.host().exec_signal(&acting.record.id, exec_id, signal).await?;
    Ok(())
}

/// Hands a command what goes to its standard input. Use of the box until it has all of it.
pub(crate) async fn feed(
    app: &App,
    who: &Who,
    id: &str,
    exec_id: &str,
    input: impl AsyncFnOnce(&SandboxId) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let acting = act::act(app, who, id, "input for a command").await?;
    let record = &acting.record;
    // Before anything is read of it.
    app.host().exec_view(&record.id, exec_id).await?;
    super::while_paid(app, record, input(&record.id)).await
}

fn told(exec: Exec) -> BoxCommand {
    let exit = exec.exit.filter(|_| exec.status == ExecStatus::Exited);
    BoxCommand {
        exec_id: exec.exec_id,
        pid: exec.pid,
        command: own_line(&exec.command).to_owned(),
        running: exec.status == ExecStatus::Running,
        exit_code: exit.and_then(|exit| exit.exit_code),
        signal: exit.and_then(|exit| exit.signal),
        timed_out: exit.is_some_and(|exit| exit.timed_out),
        output_bytes: exec.stdout_bytes,
    }
}

/// The line that was asked for, of the one that is run.
fn own_line(command: &str) -> &str {
    command.split_once(BOTH_STREAMS).map_or(command, |(_, own)| own)
}

/// How many bytes end with a whole character, where the last one may be cut.
fn whole_characters(bytes: &[u8]) -> usize {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.len(),
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        // No UTF-8 at all: as it is.
        Err(_) => bytes.len(),
    }
}

/// A command runs only in a box that is there.
pub(super) fn failed(exec: &BoxExecResult, what: &str) -> Option<ApiError> {
    let failed = exec.running || exec.exit_code != Some(0);
    failed.then(|| {
        let text = format!("{what} failed in the box: {}", exec.output.trim());
        ApiError::new(Code::CannotStart, text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_that_is_cut_is_left_for_the_next_time() {
        assert_eq!(whole_characters("añ".as_bytes()), 3);
        assert_eq!(whole_characters(&"añ".as_bytes()[..2]), 1);
        assert_eq!(whole_characters(&[0xff, 0xfe]), 2);
    }

    #[test]
    fn one_of_command_and_exec_id() {
        let field = |request: BoxExec| check(&request).expect_err("refused").field;
        assert_eq!(field(BoxExec::default()).as_deref(), Some("command"));
        let both =
            BoxExec { command: Some("ls".into()), exec_id: Some("x".into()), ..BoxExec::default() };
        assert_eq!(field(both).as_deref(), Some("execId"));
        let offset = BoxExec { command: Some("ls".into()), offset: Some(1), ..BoxExec::default() };
        assert_eq!(field(offset).as_deref(), Some("offset"));
        let wait =
            BoxExec { command: Some("ls".into()), wait_sec: Some(9999), ..BoxExec::default() };
        assert_eq!(field(wait).as_deref(), Some("waitSec"));
    }
}
