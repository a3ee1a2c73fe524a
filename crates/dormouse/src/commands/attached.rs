//! A command's streams, passed through as they are until it ends.
//!
//! If the connection breaks (the daemon is restarted), the command is attached to again from the bytes received so far; it
//! does not notice. If whoever reads our standard output goes away, the command is told as it would be by a broken pipe.

use std::io::Write;
use std::time::Duration;

use api::Code;
use api::exec::{
    ATTACH_STDERR, ATTACH_STDIN, ATTACH_STDOUT, AttachMessage, Exec, ExecStatus, Exit, Output,
};
use futures_util::{SinkExt, StreamExt};
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;
use tokio_tungstenite::tungstenite::Message;

use crate::client::Client;
use crate::problem::Problem;
use crate::show;

/// How long a broken connection is tried anew: a daemon's restart takes seconds, a host's much longer.
pub(super) const RECONNECT_TIME_MAX: Duration = Duration::from_mins(1);
/// Between two tries.
pub(super) const RECONNECT_PAUSE: Duration = Duration::from_millis(200);
/// Bytes of standard input in one message.
const STDIN_BYTES: usize = 32 * 1024;
/// Most bytes of standard input that the command has not taken yet; then no more are read.
const STDIN_AHEAD_MAX: u64 = 256 * 1024;
/// How long a command may go on after it was told that nobody reads its output, before it is killed.
const BROKEN_PIPE_TIME: Duration = Duration::from_secs(2);

/// What becomes of a command's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sink {
    /// It goes to our own streams.
    Pass,
    /// It is kept, for one JSON document.
    Keep,
    /// It is dropped.
    Drop,
}

/// A command that is followed.
pub(super) struct Attached<'a> {
    client: &'a Client,
    /// Where it is in the interface.
    exec: String,
    exec_id: String,
    /// Wait for its result, which keeps the sandbox awake.
    hold: bool,
    sinks: [Sink; 2],
    /// Bytes received of standard output and standard error.
    received: [u64; 2],
    kept: [Vec<u8>; 2],
    /// `None`: closed, or never given.
    stdin: Option<tokio::io::Stdin>,
    /// Bytes of standard input sent and taken, over this connection.
    sent: u64,
    taken: u64,
    /// Those that are meant for the command. `None`: they end this program, and the command goes on.
    signals: Option<Signals>,
    /// Since when nobody reads our standard output.
    no_reader_since: Option<Instant>,
    /// The command was killed for it.
    killed: bool,
}

/// How it went.
pub(super) struct Outcome {
    pub(super) exit: Exit,
    /// What was kept of both streams.
    pub(super) kept: [Vec<u8>; 2],
    /// Whoever read our standard output went away before the end.
    pub(super) no_reader: bool,
}

/// How one connection ended.
enum End {
    Exit(Exit),
    /// It broke; another may go on.
    Broken,
}

/// What a message of the daemon means for us.
enum Told {
    Nothing,
    Exit(Exit),
    /// Its output could not be passed on, because nobody reads.
    NoReader,
}

impl<'a> Attached<'a> {
    /// The command at `exec`, from these positions of both streams.
    pub(super) fn new(
        client: &'a Client,
        exec: String,
        exec_id: String,
        sinks: [Sink; 2],
        from: [u64; 2],
    ) -> Self {
        Self {
            client,
            exec,
            exec_id,
            hold: false,
            sinks,
            received: from,
            kept: [Vec::new(), Vec::new()],
            stdin: None,
            sent: 0,
            taken: 0,
            signals: None,
            no_reader_since: None,
            killed: false,
        }
    }

    /// Waits for the result: the sandbox stays awake for it.
    pub(super) fn holding(self) -> Self {
        Self { hold: true, ..self }
    }

    /// Passes these on to the command.
    pub(super) fn with(self, stdin: Option<tokio::io::Stdin>, signals: Signals) -> Self {
        Self { stdin, signals: Some(signals), ..self }
    }

    /// Follows to the end.
    pub(super) async fn follow(mut self) -> Result<Outcome, Problem> {
        let mut broken_since: Option<Instant> = None;
        loop {
            let result = match self.check_input().await {
                Ok(()) => self.once(&mut broken_since).await,
                Err(problem) => Err(problem),
            };
            match result {
                Ok(End::Exit(exit)) => {
                    let no_reader = self.no_reader_since.is_some();
                    return Ok(Outcome { exit, kept: self.kept, no_reader });
                }
                Ok(End::Broken) => {}
                Err(problem) if problem.is_unreachable() => {
                    if broken_since.is_some_and(|since| since.elapsed() > RECONNECT_TIME_MAX) {
                        return Err(problem.hint(format!(
                            "the command may still be running: its id is {}, `dormouse execs list` tells",
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
                signal = next_signal(&mut self.signals) => {
                    eprintln!("note: the command may still be running: its id is {}", self.exec_id);
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
                    "the command may still be running: its id is {}, `dormouse execs list` tells",
                    self.exec_id
                )));
        }
        self.stdin = None;
        (self.sent, self.taken) = (0, 0);
        Ok(())
    }

    async fn once(&mut self, broken_since: &mut Option<Instant>) -> Result<End, Problem> {
        let [stdout, stderr] = self.received;
        let hold = self.hold;
        let place = format!("{}/attach?hold={hold}&stdout={stdout}&stderr={stderr}", self.exec);
        let mut socket = self.client.web_socket(&place).await?;
        if broken_since.take().is_some() {
            eprintln!("note: connected again");
        }
        (self.sent, self.taken) = (0, 0);
        let mut buffer = vec![0; STDIN_BYTES];
        if self.no_reader_since.is_some() && socket.send(signal_message("PIPE")).await.is_err() {
            return Ok(End::Broken);
        }
        loop {
            let room = self.sent - self.taken < STDIN_AHEAD_MAX;
            let kill_at =
                self.no_reader_since.filter(|_| !self.killed).map(|since| since + BROKEN_PIPE_TIME);
            let message = tokio::select! {
                message = socket.next() => match message {
                    Some(Ok(message)) => match self.told(message)? {
                        Told::Exit(exit) => return Ok(End::Exit(exit)),
                        Told::Nothing => continue,
                        // Without signals to pass on we are nothing to the command, and only stop reading.
                        Told::NoReader if self.signals.is_none() => std::process::exit(super::EXIT_NO_READER),
                        Told::NoReader => signal_message("PIPE"),
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
                (name, _) = next_signal(&mut self.signals) => signal_message(name),
                () = tokio::time::sleep_until(kill_at.unwrap_or_else(Instant::now)), if kill_at.is_some() => {
                    self.killed = true;
                    signal_message("KILL")
                }
            };
            if socket.send(message).await.is_err() {
                // The other side may have said its last before it stopped listening.
                while let Some(Ok(message)) = socket.next().await {
                    if let Told::Exit(exit) = self.told(message)? {
                        return Ok(End::Exit(exit));
                    }
                }
                return Ok(End::Broken);
            }
        }
    }

    /// Passes on what the daemon says; the end, when it says that.
    fn told(&mut self, message: Message) -> Result<Told, Problem> {
        match message {
            Message::Binary(bytes) => {
                let Some((&tag, bytes)) = bytes.split_first() else { return Ok(Told::Nothing) };
                let index = match tag {
                    ATTACH_STDOUT => 0,
                    ATTACH_STDERR => 1,
                    // A newer daemon may have more streams.
                    _ => return Ok(Told::Nothing),
                };
                self.received[index] += bytes.len() as u64;
                match self.sinks[index] {
                    Sink::Drop => Ok(Told::Nothing),
                    Sink::Keep => {
                        self.kept[index].extend_from_slice(bytes);
                        Ok(Told::Nothing)
                    }
                    Sink::Pass if index == 0 => self.pass(bytes),
                    Sink::Pass => {
                        // Nobody can be told that standard error is gone.
                        let _ = std::io::stderr().lock().write_all(bytes);
                        Ok(Told::Nothing)
                    }
                }
            }
            Message::Text(text) => match serde_json::from_str(&text) {
                Ok(AttachMessage::Exit(exit)) => Ok(Told::Exit(exit)),
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
                    if self.sinks[index] != Sink::Drop {
                        eprintln!("note: {} of output were no longer kept", show::size(missing));
                    }
                    self.received[index] = offset;
                    Ok(Told::Nothing)
                }
                Ok(AttachMessage::StdinTaken { bytes }) => {
                    self.taken = bytes;
                    Ok(Told::Nothing)
                }
                // A newer daemon may say more.
                Ok(AttachMessage::CloseStdin | AttachMessage::Signal { .. }) | Err(_) => {
                    Ok(Told::Nothing)
                }
            },
            Message::Ping(_) | Message::Pong(_) | Message::Close(_) | Message::Frame(_) => {
                Ok(Told::Nothing)
            }
        }
    }

    /// Passes standard output on; what comes after nobody reads any more is dropped.
    fn pass(&mut self, bytes: &[u8]) -> Result<Told, Problem> {
        if self.no_reader_since.is_some() {
            return Ok(Told::Nothing);
        }
        match show::pass(bytes) {
            Ok(()) => Ok(Told::Nothing),
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                self.no_reader_since = Some(Instant::now());
                Ok(Told::NoReader)
            }
            Err(error) => Err(Problem::new(format!("cannot write to standard output: {error}"))),
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

async fn next_signal(signals: &mut Option<Signals>) -> (&'static str, i32) {
    match signals {
        Some(signals) => signals.next().await,
        None => std::future::pending().await,
    }
}

fn signal_message(name: &str) -> Message {
    text(&AttachMessage::Signal { signal: name.to_owned() })
}

fn text(message: &AttachMessage) -> Message {
    Message::Text(serde_json::to_string(message).expect("plain data").into())
}

/// Signals that are meant for the command.
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Signals {
    pub(super) fn new() -> Result<Self, Problem> {
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
    pub(super) async fn next(&mut self) -> (&'static str, i32) {
        tokio::select! {
            _ = self.interrupt.recv() => ("INT", 2),
            _ = self.terminate.recv() => ("TERM", 15),
            _ = self.hang_up.recv() => ("HUP", 1),
        }
    }
}
