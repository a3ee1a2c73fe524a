//! Commands in a guest, as the interface speaks of them.

use std::collections::BTreeMap;
use std::time::Duration;

use api::exec::{ARGUMENT_BYTES_MAX, Exec, ExecRequest, ExecStatus, Exit, Output};
use api::host::{OutputEvent, OutputFrom};
use api::{ApiError, Code};
use bytes::Bytes;
use futures_util::StreamExt;
use tokio::sync::mpsc;

use crate::exec_names::{ExecNames, is_of};
use crate::guest::{
    Ended, ExecId, ExecInfo, ExecSpec, ExecState, Failure, FailureCode, GuestError, GuestLink,
    Program, Stdin, Stream, Which,
};

/// The working folder where none is asked for, if the image has it.
pub(crate) const CWD_DEFAULT: &str = "/work";

/// Name of commands that the daemon runs itself, in templates: every copy remembers them, and nobody wants to see them.
const OURS: &str = "dormouse";

/// Pieces of output that wait for a slow reader; then the guest waits too.
const OUTPUT_BACKLOG: usize = 16;

/// A request, checked, as the guest agent takes it.
pub(crate) fn spec(
    request: &ExecRequest,
    sandbox_env: &BTreeMap<String, String>,
) -> Result<ExecSpec, ApiError> {
    let program = match (&request.argv, &request.command) {
        (Some(argv), None) => {
            if argv.first().is_none_or(String::is_empty) {
                return Err(ApiError::invalid("argv", "`argv` must begin with a program")
                    .hint(r#"such as ["ls", "-l"]"#));
            }
            Program::Argv(argv.clone())
        }
        (None, Some(line)) => {
            if line.trim().is_empty() {
                return Err(ApiError::invalid("command", "`command` is empty")
                    .hint("such as `ls -l | wc -l`"));
            }
            Program::Shell(line.clone())
        }
        (None, None) => {
            return Err(ApiError::invalid("argv", "a command needs `argv` or `command`"));
        }
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid("command", "give `argv` or `command`, not both"));
        }
    };
    let (field, arguments) = match &program {
        Program::Argv(argv) => ("argv", argv.as_slice()),
        Program::Shell(line) => ("command", std::slice::from_ref(line)),
    };
    for (index, argument) in arguments.iter().enumerate() {
        if argument.len() > ARGUMENT_BYTES_MAX {
            let field = if field == "argv" { format!("argv[{index}]") } else { field.to_owned() };
            return Err(too_long(&field, argument.len()));
        }
    }
    for (name, value) in &request.env {
        let bytes = name.len() + 1 + value.len();
        if bytes > ARGUMENT_BYTES_MAX {
            return Err(too_long(&format!("env.{name}"), bytes));
        }
    }
    let mut env = sandbox_env.clone();
    env.extend(request.env.clone());
    let piped = request.open_stdin || request.stdin.is_some();
    Ok(ExecSpec {
        program,
        cwd: request.cwd.clone(),
        env: env.into_iter().collect(),
        user: request.user.clone(),
        stdin: if piped { Stdin::Pipe } else { Stdin::Null },
        timeout_ms: request.timeout_ms,
        name: None,
    })
}

/// A string is longer than Linux passes to a program.
fn too_long(field: &str, bytes: usize) -> ApiError {
    let mut error = ApiError::new(Code::TooLarge, format!("`{field}`: {bytes} bytes"));
    error.field = Some(field.to_owned());
    error.hint(format!("Linux takes at most {ARGUMENT_BYTES_MAX}; put longer ones into a file"))
}

/// Starts a command: in the default folder if none was asked for and the guest has it.
pub(crate) async fn start(
    link: &GuestLink,
    names: ExecNames,
    request: &ExecRequest,
    env: &BTreeMap<String, String>,
) -> Result<Exec, ApiError> {
    let mut spec = spec(request, env)?;
    let asked = spec.cwd.is_some();
    if !asked {
        spec.cwd = Some(CWD_DEFAULT.to_owned());
    }
    let mut started = link.exec_start(spec.clone()).await;
    if !asked && let Err(GuestError::Failed(Failure { code: FailureCode::BadCwd, .. })) = &started {
        spec.cwd = None;
        started = link.exec_start(spec).await;
    }
    let started = started.map_err(guest_error)?;
    if let Some(text) = &request.stdin {
        let mut stdin = link.exec_stdin(started.id, !request.open_stdin).map_err(guest_error)?;
        match stdin.write(text.as_bytes()).await {
            Ok(()) => match stdin.finish().await {
                Ok(_) => {}
                Err(error) if is_closed(&error) => {}
                Err(error) => return Err(guest_error(error)),
            },
            // A command need not read its input.
            Err(error) if is_closed(&error) => {}
            Err(error) => return Err(guest_error(error)),
        }
    }
    let command = request
        .argv
        .as_ref()
        .map_or_else(|| request.command.clone().unwrap_or_default(), |argv| argv.join(" "));
    Ok(Exec {
        exec_id: names.name(started.id),
        pid: started.pid,
        status: ExecStatus::Running,
        command,
        exit: None,
        stdout_bytes: 0,
        stderr_bytes: 0,
    })
}

fn is_closed(error: &GuestError) -> bool {
    matches!(
        error,
        GuestError::Failed(Failure { code: FailureCode::StdinClosed | FailureCode::Ended, .. })
    )
}

/// Runs a shell line to its end, its output unread.
pub(crate) async fn run_to_end(
    link: &GuestLink,
    line: &str,
    limit: Duration,
) -> Result<Ended, GuestError> {
    let mut spec = ExecSpec::shell(line);
    spec.name = Some(OURS.to_owned());
    spec.timeout_ms = Some(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX));
    let started = link.exec_start(spec).await?;
    link.exec_wait(started.id).await
}

/// The commands of a guest that somebody has asked for.
pub(crate) fn asked_for(infos: &[ExecInfo], names: ExecNames) -> impl Iterator<Item = Exec> {
    let asked_for = infos.iter().filter(|info| info.name.as_deref() != Some(OURS));
    asked_for.map(move |info| exec(info, names))
}

/// What the interface tells about a command.
pub(crate) fn exec(info: &ExecInfo, names: ExecNames) -> Exec {
    let ended = match info.state {
        ExecState::Running => None,
        ExecState::Ended(ended) => Some(exit(ended)),
    };
    Exec {
        exec_id: names.name(info.id),
        pid: info.pid,
        status: if ended.is_some() { ExecStatus::Exited } else { ExecStatus::Running },
        command: info.command.clone(),
        exit: ended,
        stdout_bytes: info.output_end.stdout,
        stderr_bytes: info.output_end.stderr,
    }
}

/// How a command ended, as the interface tells it.
pub(crate) fn exit(ended: Ended) -> Exit {
    Exit { exit_code: ended.code, signal: ended.signal, timed_out: ended.timed_out }
}

pub(crate) fn unknown_exec(id: &str) -> ApiError {
    ApiError::new(Code::NotFound, format!("the sandbox has no command `{id}`"))
        .hint("commands of an earlier boot, and old ones that have ended, are forgotten")
}

/// An error of the guest about a command, for a client. A command of another boot than the guest's was lost with its machine:
/// the guest of now has never heard of it.
pub(crate) fn command_error(link: &GuestLink, id: ExecId, error: GuestError) -> ApiError {
    let unknown =
        matches!(&error, GuestError::Failed(failure) if failure.code == FailureCode::UnknownExec);
    let of_now = link.hello().is_some_and(|hello| is_of(id, hello.boot));
    if unknown && !of_now {
        let text = "the machine of this command ended before all of the command was told";
        return ApiError::new(Code::CommandLost, text)
            .hint("what was written to its disk is there; its events say how the machine ended");
    }
    guest_error(error)
}

/// The same, where its standard input was to be written.
pub(crate) fn stdin_error(link: &GuestLink, id: ExecId, name: &str, error: GuestError) -> ApiError {
    if !is_closed(&error) {
        return command_error(link, id, error);
    }
    ApiError::new(Code::Exists, format!("the command `{name}` has no open standard input"))
        .hint("it was started without `open_stdin` (in a box `openStdin`), it was closed, or the command has ended")
}

/// Reads a command's output and sends it on, then how it ended. `guard` lives as long as somebody reads.
pub(crate) fn output(
    link: GuestLink,
    id: ExecId,
    from: OutputFrom,
    guard: impl Send + 'static,
) -> Result<mpsc::Receiver<Result<OutputEvent, ApiError>>, ApiError> {
    let which = match (from.stdout, from.stderr) {
        (Some(_), Some(_)) => Which::Both,
        (Some(_), None) => Which::Stdout,
        (None, Some(_)) => Which::Stderr,
        (None, None) => {
            return Err(ApiError::invalid("stream", "choose `stdout`, `stderr` or both"));
        }
    };
    let position =
        wire::OutputFrom { stdout: from.stdout.unwrap_or(0), stderr: from.stderr.unwrap_or(0) };
    let mut chunks = link.exec_output(id, which, position, from.follow).map_err(guest_error)?;
    let (events, receiver) = mpsc::channel(OUTPUT_BACKLOG);
    tokio::spawn(async move {
        let _guard = guard;
        loop {
            // A reader that goes away is noticed though the command says nothing: it waits for nothing any more.
            let chunk = tokio::select! {
                chunk = chunks.next() => chunk,
                () = events.closed() => return,
            };
            let Some(chunk) = chunk else { break };
            let event = chunk.map_err(|error| command_error(&link, id, error)).map(|chunk| {
                OutputEvent::Data {
                    stream: match chunk.stream {
                        Stream::Stdout => Output::Stdout,
                        Stream::Stderr => Output::Stderr,
                    },
                    offset: chunk.offset,
                    bytes: Bytes::from(chunk.bytes),
                }
            });
            let ended = event.is_err();
            if events.send(event).await.is_err() || ended {
                return;
            }
        }
        if from.follow {
            let ended = tokio::select! {
                ended = link.exec_wait(id) => ended,
                () = events.closed() => return,
            };
            let event = ended.map(|ended| OutputEvent::Exit(exit(ended)));
            let event = event.map_err(|error| command_error(&link, id, error));
            // The reader may have gone away.
            let _ = events.send(event).await;
        }
    });
    Ok(receiver)
}

/// An error of the guest, for a client.
#[expect(clippy::needless_pass_by_value, reason = "used as the argument of map_err")]
pub(crate) fn guest_error(error: GuestError) -> ApiError {
    match &error {
        GuestError::Failed(failure) => {
            let code = match failure.code {
                FailureCode::NotFound | FailureCode::UnknownExec => Code::NotFound,
                FailureCode::NotADirectory
                | FailureCode::IsADirectory
                | FailureCode::NotEmpty
                | FailureCode::Symlink => Code::WrongFileType,
                FailureCode::Permission | FailureCode::ReadOnly => Code::PermissionDenied,
                FailureCode::NoSpace => Code::NoSpace,
                FailureCode::Invalid | FailureCode::OutsideTree | FailureCode::BadArchive => {
                    Code::InvalidRequest
                }
                FailureCode::UnknownUser | FailureCode::BadCwd | FailureCode::CrossDevice => {
                    Code::Unprocessable
                }
                FailureCode::Refused => Code::PortClosed,
                FailureCode::TooLarge => Code::TooLarge,
                FailureCode::TooMany | FailureCode::NoResources => Code::NoCapacity,
                FailureCode::Exists
                | FailureCode::StdinClosed
                | FailureCode::Ended
                | FailureCode::Busy => Code::Exists,
                FailureCode::Unsupported | FailureCode::Io | FailureCode::Other(_) => {
                    Code::Internal
                }
            };
            let mut public = ApiError::new(code, failure.message.clone());
            public.field.clone_from(&failure.field);
            match failure.code {
                FailureCode::TooLarge if failure.field.as_deref() == Some("argv") => {
                    public.hint("Linux takes 2 MiB of both together; put long ones into a file")
                }
                FailureCode::Unsupported => {
                    public.hint("a sandbox keeps the agent that it was made with; make a new one")
                }
                _ => public,
            }
        }
        GuestError::Gone { .. } => {
            ApiError::new(Code::CommandLost, "the sandbox's machine ended before this did")
                .hint("what was written to its disk is there; its events say how the machine ended")
        }
        GuestError::TooLarge { bytes, max } => {
            let text = format!(
                "arguments and environment have {bytes} bytes, the guest agent takes {max}"
            );
            let mut error = ApiError::new(Code::TooLarge, text);
            error.field = Some("argv".to_owned());
            error.hint("put a long command or environment into a file and run that")
        }
        GuestError::StandsStill => stands_still_error(),
        GuestError::Busy => ApiError::new(Code::NoCapacity, error.to_string()),
        GuestError::TimedOut { .. } => ApiError::new(Code::Timeout, error.to_string()),
        _ => {
            tracing::warn!(%error, "guest error");
            ApiError::new(Code::Internal, "the guest agent gave an answer that makes no sense")
        }
    }
}

/// For whoever waits for a guest that stands still because the host's disk is nearly full.
pub(crate) fn stands_still_error() -> ApiError {
    let text = "the sandbox stands still, because the host's disk is nearly full";
    let mut error = ApiError::new(Code::NoSpace, text);
    error.retryable = true;
    error.hint("make room on the host; it goes on by itself, and nothing of it is lost")
}

/// As [`guest_error`], for a program that could not be started.
pub(crate) fn start_error(error: ApiError) -> ApiError {
    match error.code {
        Code::NotFound => ApiError { code: Code::ProgramNotFound, ..error },
        Code::PermissionDenied | Code::WrongFileType => {
            ApiError { code: Code::CannotStart, ..error }
        }
        _ => error,
    }
}
