//! Running commands: their bytes pass through as they are, and their exit code becomes ours.
//!
//! The command is started in the background and attached to, waiting for its result. If the connection breaks (the daemon
//! is restarted), it is attached to again from the bytes received so far; the command itself does not notice.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use api::Code;
use api::exec::{
    ATTACH_STDERR, ATTACH_STDIN, ATTACH_STDOUT, AttachMessage, Exec, ExecList, ExecRequest,
    ExecStatus, Exit, Output,
};
use futures_util::{SinkExt, StreamExt};
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;
use tokio_tungstenite::tungstenite::Message;

use super::sandboxes::{self, path};
use crate::cli::{ExecArgs, ExecOptions, RunArgs};
use crate::client::Client;
use crate::problem::Problem;
use crate::show;

/// How long a broken connection is tried anew: a daemon's restart takes seconds, a host's much longer.
const RECONNECT_TIME_MAX: Duration = Duration::from_mins(1);
/// Between two tries.
const RECONNECT_PAUSE: Duration = Duration::from_millis(200);
/// Bytes of standard input in one message.
const STDIN_BYTES: usize = 32 * 1024;
/// Most bytes of standard input that the command has not taken yet; then no more are read.
const STDIN_AHEAD_MAX: u64 = 256 * 1024;
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
    let RunArgs { size, cwd, user, timeout, interactive, argv } = arguments;
    let body = sandboxes::new_sandbox(size, None, api::sandbox::PolicyPatch::default());
    let sandbox = sandboxes::make(client, "/v1/sandboxes", &body, None).await?;
    let options = ExecOptions { cwd, env: Vec::new(), user, timeout, interactive };
    let result = run_in(client, sandbox.id.as_str(), options, argv, json).await;
    if let Err(problem) = sandboxes::delete_one(client, sandbox.id.as_str()).await {
        eprintln!("note: the sandbox `{}` is left over", sandbox.name);
        problem.print(json);
    }
    result
}

pub(crate) async fn ps(client: &Client, name: &str, json: bool) -> Result<i32, Problem> {
    let list: ExecList = client.get(&format!("{}/execs", path(name))).await?;
    if json {
        show::json(&list.execs)?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = list
        .execs
        .iter()
        .map(|exec| {
            let status = match (exec.status, exec.exit) {
                (ExecStatus::Running, _) => "running".to_owned(),
                (ExecStatus::Exited, Some(Exit { signal: Some(signal), .. })) => {
                    format!("signal {signal}")
                }
                (ExecStatus::Exited, exit) => {
                    format!("exit {}", exit.and_then(|exit| exit.exit_code).unwrap_or_default())
                }
            };
            let written =
                format!("{} / {}", show::size(exec.stdout_bytes), show::size(exec.stderr_bytes));
            vec![exec.exec_id.clone(), exec.pid.to_string(), status, written, exec.command.clone()]
        })
        .collect();
    show::table(&["EXEC", "PID", "STATUS", "OUT / ERR", "COMMAND"], &rows)?;
    Ok(0)
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
    let signals = Signals::new()?;
    let exec: Exec = client.json("POST", &format!("{}/execs", path(name)), Some(&request)).await?;
    let stdin = with_stdin.then(tokio::io::stdin);
    let attached = Attached {
        client,
        exec: format!("{}/execs/{}", path(name), exec.exec_id),
        exec_id: exec.exec_id.clone(),
        quiet: json,
        received: [0, 0],
        kept: [Vec::new(), Vec::new()],
        stdin,
        sent: 0,
        taken: 0,
        signals,
    };
    let (exit, [stdout, stderr]) = attached.follow().await?;
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
    Ok(exit.exit_code.unwrap_or_else(|| 128 + exit.signal.unwrap_or_default()))
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

/// A command that is waited for.
struct Attached<'a> {
    client: &'a Client,
    /// Where it is in the interface.
    exec: String,
    exec_id: String,
    /// Keep the output for one JSON document instead of passing it through.
    quiet: bool,
    /// Bytes received of standard output and standard error.
    received: [u64; 2],
    kept: [Vec<u8>; 2],
    /// `None`: closed, or never given.
    stdin: Option<tokio::io::Stdin>,
    /// Bytes of standard input sent and taken, over this connection.
    sent: u64,
    taken: u64,
    signals: Signals,
}

/// How one connection ended.
enum End {
    Exit(Exit),
    /// It broke; another may go on.
    Broken,
}

impl Attached<'_> {
    async fn follow(mut self) -> Result<(Exit, [Vec<u8>; 2]), Problem> {
        let mut broken_since: Option<Instant> = None;
        loop {
            let result = match self.check_input().await {
                Ok(()) => self.once(&mut broken_since).await,
                Err(problem) => Err(problem),
            };
            match result {
                Ok(End::Exit(exit)) => return Ok((exit, self.kept)),
                Ok(End::Broken) => {}
                Err(problem) if problem.is_unreachable() => {
                    if broken_since.is_some_and(|since| since.elapsed() > RECONNECT_TIME_MAX) {
                        return Err(problem.hint(format!(
                            "the command may still be running: its number is {}, `dormouse ps` tells",
                            self.exec_id
                        )));
                    }
                }
                Err(problem) => return Err(problem),
            }
            if broken_since.is_none() {
                eprintln!(
                    "note: the connection to the daemon broke; trying again for {} s",
                    RECONNECT_TIME_MAX.as_secs()
                );
                broken_since = Some(Instant::now());
            }
            tokio::select! {
                () = tokio::time::sleep(RECONNECT_PAUSE) => {}
                // Without a connection there is nobody to tell.
                signal = self.signals.next() => {
                    eprintln!("note: the command may still be running: its number is {}", self.exec_id);
                    std::process::exit(128 + signal.1);
                }
            }
        }
    }

    /// After a cut: input that was on its way is lost or not, nobody knows. Sent again it might arrive twice, left out not
    /// at all; it only does not matter if the command has ended without it.
    async fn check_input(&mut self) -> Result<(), Problem> {
        if self.sent == self.taken {
            return Ok(());
        }
        let exec: Exec = self.client.get(&self.exec).await?;
        if exec.status == ExecStatus::Running {
            return Err(Problem::new("the connection broke while standard input was on its way")
                .hint(format!(
                    "the command may still be running: its number is {}, `dormouse ps` tells",
                    self.exec_id
                )));
        }
        self.stdin = None;
        (self.sent, self.taken) = (0, 0);
        Ok(())
    }

    async fn once(&mut self, broken_since: &mut Option<Instant>) -> Result<End, Problem> {
        let [stdout, stderr] = self.received;
        let place = format!("{}/attach?hold=true&stdout={stdout}&stderr={stderr}", self.exec);
        let mut socket = self.client.web_socket(&place).await?;
        if broken_since.take().is_some() {
            eprintln!("note: connected again");
        }
        (self.sent, self.taken) = (0, 0);
        let mut buffer = vec![0; STDIN_BYTES];
        loop {
            let room = self.sent - self.taken < STDIN_AHEAD_MAX;
            let message = tokio::select! {
                message = socket.next() => match message {
                    Some(Ok(message)) => match self.told(message)? {
                        Some(exit) => return Ok(End::Exit(exit)),
                        None => continue,
                    },
                    Some(Err(_)) | None => return Ok(End::Broken),
                },
                read = read_some(&mut self.stdin, &mut buffer), if self.stdin.is_some() && room => match read {
                    Ok(0) => {
                        self.stdin = None;
                        text(&AttachMessage::CloseStdin)
                    }
                    Ok(read) => {
                        self.sent += read as u64;
                        let mut message = Vec::with_capacity(read + 1);
                        message.push(ATTACH_STDIN);
                        message.extend_from_slice(&buffer[..read]);
                        Message::Binary(message.into())
                    }
                    Err(error) => return Err(Problem::new(format!("cannot read standard input: {error}"))),
                },
                (name, _) = self.signals.next() => text(&AttachMessage::Signal { signal: name.to_owned() }),
            };
            if socket.send(message).await.is_err() {
                // The other side may have said its last before it stopped listening.
                while let Some(Ok(message)) = socket.next().await {
                    if let Some(exit) = self.told(message)? {
                        return Ok(End::Exit(exit));
                    }
                }
                return Ok(End::Broken);
            }
        }
    }

    /// Passes on what the daemon says; the end, when it says that.
    fn told(&mut self, message: Message) -> Result<Option<Exit>, Problem> {
        match message {
            Message::Binary(bytes) => {
                let Some((&tag, bytes)) = bytes.split_first() else { return Ok(None) };
                let index = match tag {
                    ATTACH_STDOUT => 0,
                    ATTACH_STDERR => 1,
                    // A newer daemon may have more streams.
                    _ => return Ok(None),
                };
                self.received[index] += bytes.len() as u64;
                if self.quiet {
                    self.kept[index].extend_from_slice(bytes);
                } else if index == 0 {
                    show::bytes(bytes)?;
                } else {
                    // Nobody can be told that standard error is gone.
                    let _ = std::io::stderr().lock().write_all(bytes);
                }
                Ok(None)
            }
            Message::Text(text) => match serde_json::from_str(&text) {
                Ok(AttachMessage::Exit(exit)) => Ok(Some(exit)),
                Ok(AttachMessage::Error(error)) => {
                    let lost = error.code == Code::CommandLost;
                    let problem = Problem::from(error);
                    Err(if lost {
                        problem.hint(
                            "the machine ended before the command did; `dormouse why` tells more",
                        )
                    } else {
                        problem
                    })
                }
                Ok(AttachMessage::Gap { stream, offset }) => {
                    let index = usize::from(stream == Output::Stderr);
                    let missing = offset.saturating_sub(self.received[index]);
                    eprintln!("note: {} of output were no longer kept", show::size(missing));
                    self.received[index] = offset;
                    Ok(None)
                }
                Ok(AttachMessage::StdinTaken { bytes }) => {
                    self.taken = bytes;
                    Ok(None)
                }
                // A newer daemon may say more.
                Ok(AttachMessage::CloseStdin | AttachMessage::Signal { .. }) | Err(_) => Ok(None),
            },
            Message::Ping(_) | Message::Pong(_) | Message::Close(_) | Message::Frame(_) => Ok(None),
        }
    }
}

async fn read_some(
    stdin: &mut Option<tokio::io::Stdin>,
    buffer: &mut [u8],
) -> std::io::Result<usize> {
    match stdin {
        Some(stdin) => stdin.read(buffer).await,
        None => Ok(0),
    }
}

fn text(message: &AttachMessage) -> Message {
    Message::Text(serde_json::to_string(message).expect("plain data").into())
}

/// Signals that are meant for the command.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    fn new() -> Result<Self, Problem> {
        let listen = |kind| {
            signal(kind)
                .map_err(|error| Problem::new(format!("cannot listen for signals: {error}")))
        };
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hang_up: listen(SignalKind::hangup())?,
        })
    }

    /// Name and number of the next one.
    async fn next(&mut self) -> (&'static str, i32) {
        tokio::select! {
            _ = self.interrupt.recv() => ("INT", 2),
            _ = self.terminate.recv() => ("TERM", 15),
            _ = self.hang_up.recv() => ("HUP", 1),
        }
    }
}
