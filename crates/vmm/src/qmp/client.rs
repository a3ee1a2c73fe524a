//! The task that owns a QMP connection, and the handle through which orders reach it.
//!
//! A caller that gives up (its future is dropped) leaves its command to be finished by the task, so the next one still starts
//! on a clean line. A command that takes longer than its limit ends the connection: after that nobody could tell which answer
//! belongs to what QEMU did.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, timeout_at};

use super::message::{LINE_BYTES_MAX, Message, MessageError, parse};
use super::{Migration, Seen};

/// Orders that wait for their turn. A machine's owner gives one at a time; a second may come from one that gave up.
const REQUESTS_MAX: usize = 4;
/// How long QEMU may take from its start (or SIGCONT) to its greeting and the first answer. 25 ms on a quiet host; a host with many starts at once needs seconds.
pub(crate) const GREETING_MAX: Duration = Duration::from_secs(15);
/// How long an ordinary command may take. All answer within some milliseconds, except on a host that is badly overloaded.
pub(crate) const COMMAND_MAX: Duration = Duration::from_secs(10);

/// A handle to the task that talks to one QEMU. When all handles are gone the connection ends; QEMU goes on.
#[derive(Debug)]
pub struct Qmp {
    requests: mpsc::Sender<Request>,
    seen: watch::Receiver<Seen>,
}

/// A QMP command that did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The connection ended: QEMU is gone or another client took it, or it spoke nonsense (then the log has it).
    #[error("QMP {command}: connection ended")]
    Closed {
        /// The command.
        command: &'static str,
    },
    /// No answer within the limit. The connection is given up.
    #[error("QMP {command}: no answer within {limit:?}")]
    TimedOut {
        /// The command.
        command: &'static str,
        /// Its limit.
        limit: Duration,
    },
    /// QEMU answered that it would not.
    #[error("QMP {command}: refused: {description}")]
    Refused {
        /// The command.
        command: &'static str,
        /// QEMU's words.
        description: String,
    },
}

struct Request {
    command: &'static str,
    arguments: Value,
    fd: Option<OwnedFd>,
    limit: Duration,
    reply: oneshot::Sender<Result<Value, QmpError>>,
}

impl Qmp {
    /// Takes a connected socket and greets in the background: the first command waits for that. A QEMU that is stopped (SIGSTOP) at the
    /// moment does not greet, so do not open one before it goes on.
    pub fn open(stream: UnixStream) -> Self {
        let (requests, inbox) = mpsc::channel(REQUESTS_MAX);
        let (seen_sender, seen) = watch::channel(Seen::default());
        let connection = Connection { stream, buffer: Vec::new(), seen: seen_sender, next_id: 0 };
        tokio::spawn(connection.run(inbox));
        Self { requests, seen }
    }

    /// Runs a command.
    pub async fn run(&self, command: &'static str, arguments: Value) -> Result<Value, QmpError> {
        self.send(command, arguments, None, COMMAND_MAX).await
    }

    /// Runs a command that may take longer than others.
    pub(crate) async fn run_within(
        &self,
        command: &'static str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        self.send(command, arguments, None, limit).await
    }

    /// Runs `getfd`: QEMU keeps the descriptor under `name` until a command uses it.
    pub async fn give_fd(&self, name: &str, fd: OwnedFd) -> Result<(), QmpError> {
        self.send("getfd", json!({ "fdname": name }), Some(fd), COMMAND_MAX).await.map(drop)
    }

    /// What was reported so far, and changes to it.
    pub fn seen(&self) -> watch::Receiver<Seen> {
        self.seen.clone()
    }

    /// Waits until a migration that was begun with `command` has ended. True if it completed.
    pub(crate) async fn migration_ended(
        &self,
        command: &'static str,
        limit: Duration,
    ) -> Result<bool, QmpError> {
        let mut seen = self.seen.clone();
        let ended = seen.wait_for(|seen| {
            seen.closed || matches!(seen.migration, Some(Migration::Completed | Migration::Failed))
        });
        let ended = tokio::time::timeout(limit, ended)
            .await
            .map_err(|_| QmpError::TimedOut { command, limit })?;
        match ended {
            Ok(seen) if !seen.closed || seen.migration == Some(Migration::Completed) => {
                Ok(seen.migration == Some(Migration::Completed))
            }
            Ok(_) | Err(_) => Err(QmpError::Closed { command }),
        }
    }

    async fn send(
        &self,
        command: &'static str,
        arguments: Value,
        fd: Option<OwnedFd>,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        let (reply, answer) = oneshot::channel();
        let request = Request { command, arguments, fd, limit, reply };
        self.requests.send(request).await.map_err(|_| QmpError::Closed { command })?;
        answer.await.unwrap_or(Err(QmpError::Closed { command }))
    }
}

struct Connection {
    stream: UnixStream,
    buffer: Vec<u8>,
    seen: watch::Sender<Seen>,
    next_id: u64,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("QEMU closed the connection")]
    Eof,
    #[error("read or write")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Message(#[from] MessageError),
    #[error("{0} not answered in time")]
    Late(&'static str),
    #[error("{0} refused")]
    NoCapabilities(String),
}

impl Connection {
    async fn run(mut self, mut inbox: mpsc::Receiver<Request>) {
        let ended = self.serve(&mut inbox).await;
        self.seen.send_modify(|seen| seen.closed = true);
        match ended {
            Ok(()) | Err(Broken::Eof) => tracing::debug!("qmp connection ended"),
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "qmp connection given up")
            }
        }
        // Dropping `inbox` answers whoever still waits with `Closed`.
    }

    async fn serve(&mut self, inbox: &mut mpsc::Receiver<Request>) -> Result<(), Broken> {
        let deadline = Instant::now() + GREETING_MAX;
        timeout_at(deadline, self.greet()).await.map_err(|_| Broken::Late("greeting"))??;
        self.seen.send_modify(|seen| seen.ready = true);
        loop {
            tokio::select! {
                request = inbox.recv() => match request {
                    Some(request) => self.answer(request).await?,
                    None => return Ok(()),
                },
                message = next_message(&self.stream, &mut self.buffer) => self.note(message?),
            }
        }
    }

    async fn greet(&mut self) -> Result<(), Broken> {
        // Events cannot come before capabilities are agreed, and one that did would only be noted.
        while self.next().await? != Message::Greeting {}
        let agreed = self.exchange("qmp_capabilities", Value::Null, None).await?;
        agreed.map(drop).map_err(Broken::NoCapabilities)
    }

    async fn answer(&mut self, request: Request) -> Result<(), Broken> {
        let Request { command, arguments, fd, limit, reply } = request;
        if command == "migrate" || command == "migrate-incoming" {
            self.seen.send_modify(|seen| seen.migration = None);
        }
        let exchanged = tokio::time::timeout(limit, self.exchange(command, arguments, fd)).await;
        let (outcome, after) = match exchanged {
            Ok(Ok(Ok(value))) => (Ok(value), Ok(())),
            Ok(Ok(Err(description))) => (Err(QmpError::Refused { command, description }), Ok(())),
            Ok(Err(broken)) => (Err(QmpError::Closed { command }), Err(broken)),
            Err(_) => (Err(QmpError::TimedOut { command, limit }), Err(Broken::Late(command))),
        };
        // Nobody there any more: the caller gave up waiting, and the command is done all the same.
        drop(reply.send(outcome));
        after
    }

    async fn exchange(
        &mut self,
        command: &'static str,
        arguments: Value,
        fd: Option<OwnedFd>,
    ) -> Result<Result<Value, String>, Broken> {
        self.next_id += 1;
        let mut line = json!({ "execute": command, "id": self.next_id });
        if !arguments.is_null() {
            line["arguments"] = arguments;
        }
        let mut line = line.to_string().into_bytes();
        line.push(b'\n');
        self.write(&line, fd).await?;
        loop {
            match self.next().await? {
                Message::Reply { id, result } if id == Some(self.next_id) => return Ok(result),
                other => self.note(other),
            }
        }
    }

    /// Writes a line; the descriptor goes with its first byte.
    async fn write(&self, line: &[u8], mut fd: Option<OwnedFd>) -> io::Result<()> {
        let mut rest = line;
        while !rest.is_empty() {
            self.stream.writable().await?;
            let sent = self.stream.try_io(Interest::WRITABLE, || {
                let mut space =
                    [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut ancillary = SendAncillaryBuffer::new(&mut space);
                let fds = fd.as_ref().map(|fd| [fd.as_fd()]);
                if let Some(fds) = &fds {
                    ancillary.push(SendAncillaryMessage::ScmRights(fds));
                }
                Ok(sendmsg(
                    &self.stream,
                    &[io::IoSlice::new(rest)],
                    &mut ancillary,
                    SendFlags::NOSIGNAL,
                )?)
            });
            match sent {
                Ok(bytes) => {
                    rest = &rest[bytes..];
                    fd = None;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn next(&mut self) -> Result<Message, Broken> {
        next_message(&self.stream, &mut self.buffer).await
    }

    fn note(&self, message: Message) {
        match message {
            Message::Event { name, data } => {
                tracing::trace!(event = name, "qmp event");
                self.seen.send_if_modified(|seen| seen.note(&name, &data));
            }
            // An answer nobody waits for cannot come (a late one ends the connection); saying so is all there is to do.
            Message::Reply { id, .. } => tracing::debug!(?id, "qmp answer without a question"),
            Message::Greeting => tracing::debug!("qmp greeting repeated"),
        }
    }
}

/// The next line. Cancel safe: what was read stays in `buffer`.
async fn next_message(stream: &UnixStream, buffer: &mut Vec<u8>) -> Result<Message, Broken> {
    loop {
        if let Some(end) = buffer.iter().position(|&byte| byte == b'\n') {
            let message = parse(&buffer[..end]);
            buffer.drain(..=end);
            return Ok(message?);
        }
        if buffer.len() > LINE_BYTES_MAX {
            return Err(MessageError::TooLong.into());
        }
        stream.readable().await?;
        let mut chunk = [0; 4096];
        match stream.try_read(&mut chunk) {
            Ok(0) => return Err(Broken::Eof),
            Ok(bytes) => buffer.extend_from_slice(&chunk[..bytes]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
}
