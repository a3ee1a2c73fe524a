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

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
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
            // As it looks when QEMU was ended with something of ours unread. Whoever watches its process tells how it ended.
            Err(Broken::Io(error)) if is_gone(&error) => {
                tracing::debug!(%error, "qmp connection ended");
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "qmp connection given up");
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::Shutdown;
    use std::sync::Arc;
    use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};

    /// QEMU's end, played by the test.
    struct Played(BufReader<UnixStream>);

    impl Played {
        /// Greets, agrees on capabilities.
        async fn begin() -> (Qmp, Self) {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let qmp = Qmp::open(ours);
            let mut played = Self(BufReader::new(theirs));
            played.say(r#"{"QMP": {"version": {}, "capabilities": []}}"#).await;
            assert_eq!(played.hear().await["execute"], "qmp_capabilities");
            played.say(r#"{"return": {}, "id": 1}"#).await;
            (qmp, played)
        }

        async fn say(&mut self, line: &str) {
            self.0.get_mut().write_all(format!("{line}\r\n").as_bytes()).await.unwrap();
        }

        async fn hear(&mut self) -> Value {
            let mut line = String::new();
            self.0.read_line(&mut line).await.unwrap();
            serde_json::from_str(&line).unwrap()
        }
    }

    #[tokio::test]
    async fn two_commands_never_interleave_even_if_the_first_is_given_up() {
        let (qmp, mut qemu) = Played::begin().await;
        let qmp = Arc::new(qmp);
        let first = tokio::spawn({
            let qmp = Arc::clone(&qmp);
            async move { qmp.run("stop", Value::Null).await }
        });
        assert_eq!(qemu.hear().await, json!({"execute": "stop", "id": 2}));
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        let second = tokio::spawn({
            let qmp = Arc::clone(&qmp);
            async move { qmp.run("cont", json!({"a": 1})).await }
        });
        // Until the first is answered nothing more is said.
        tokio::task::yield_now().await;
        let quiet = qemu.0.get_ref().try_read(&mut [0; 1]).unwrap_err();
        assert_eq!(quiet.kind(), io::ErrorKind::WouldBlock);
        qemu.say(r#"{"return": {"late": true}, "id": 2}"#).await;
        assert_eq!(qemu.hear().await, json!({"execute": "cont", "arguments": {"a": 1}, "id": 3}));
        qemu.say(r#"{"return": {"second": true}, "id": 3}"#).await;
        assert_eq!(second.await.unwrap().unwrap(), json!({"second": true}));
    }

    #[tokio::test]
    async fn events_before_between_and_after_are_kept() {
        let (qmp, mut qemu) = Played::begin().await;
        let mut seen = qmp.seen();
        let asked = tokio::spawn(async move { (qmp.run("query-status", Value::Null).await, qmp) });
        qemu.hear().await;
        qemu.say(r#"{"event": "GUEST_PANICKED", "data": {"action": "shutdown"}}"#).await;
        qemu.say(r#"{"event": "MIGRATION", "data": {"status": "active"}}"#).await;
        qemu.say(r#"{"return": {"status": "running"}, "id": 2}"#).await;
        qemu.say(r#"{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-panic"}}"#)
            .await;
        drop(qemu);
        let (answer, _qmp) = asked.await.unwrap();
        assert_eq!(answer.unwrap()["status"], "running");
        let seen = *seen.wait_for(|seen| seen.closed).await.unwrap();
        let expected = Seen {
            ready: true,
            shutdown: Some(Shutdown::GuestPanic),
            panicked: true,
            migration: Some(Migration::Underway),
            closed: true,
        };
        assert_eq!(seen, expected);
    }

    #[tokio::test]
    async fn a_refusal_is_an_error_and_the_next_command_works() {
        let (qmp, mut qemu) = Played::begin().await;
        let asked = tokio::spawn(async move {
            (qmp.run("cont", Value::Null).await, qmp.run("stop", Value::Null).await)
        });
        qemu.hear().await;
        qemu.say(r#"{"id": 2, "error": {"class": "GenericError", "desc": "Resetting the VM is required"}}"#).await;
        qemu.hear().await;
        qemu.say(r#"{"return": {}, "id": 3}"#).await;
        let (refused, done) = asked.await.unwrap();
        assert_eq!(
            refused.unwrap_err().to_string(),
            "QMP cont: refused: Resetting the VM is required"
        );
        done.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_does_not_come_ends_the_connection() {
        let (qmp, mut qemu) = Played::begin().await;
        let error = qmp.run("query-status", Value::Null).await.unwrap_err();
        assert_eq!(error.to_string(), "QMP query-status: no answer within 10s");
        qemu.hear().await;
        let error = qmp.run("query-status", Value::Null).await.unwrap_err();
        assert_eq!(error.to_string(), "QMP query-status: connection ended");
    }

    #[tokio::test]
    async fn nonsense_and_endless_lines_end_the_connection() {
        for line in ["nonsense\n".to_owned(), "x".repeat(LINE_BYTES_MAX + 10_000)] {
            let (qmp, mut qemu) = Played::begin().await;
            // The connection may be given up before all of it is written.
            drop(qemu.0.get_mut().write_all(line.as_bytes()).await);
            qmp.seen().wait_for(|seen| seen.closed).await.unwrap();
            assert!(matches!(
                qmp.run("stop", Value::Null).await,
                Err(QmpError::Closed { command: "stop" })
            ));
        }
    }

    #[tokio::test]
    async fn a_descriptor_goes_with_its_command() {
        use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
        let (qmp, mut qemu) = Played::begin().await;
        let (reader, writer) = std::io::pipe().unwrap();
        let asked = tokio::spawn(async move { qmp.give_fd("state", reader.into()).await });
        let mut line = [0; 256];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let stream = qemu.0.get_ref();
        stream.readable().await.unwrap();
        let received = stream
            .try_io(Interest::READABLE, || {
                let mut parts = [io::IoSliceMut::new(&mut line)];
                Ok(recvmsg(stream, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?)
            })
            .unwrap();
        let given: Vec<OwnedFd> = ancillary
            .drain()
            .filter_map(|message| {
                if let RecvAncillaryMessage::ScmRights(fds) = message { Some(fds) } else { None }
            })
            .flatten()
            .collect();
        let command: Value = serde_json::from_slice(&line[..received.bytes]).unwrap();
        assert_eq!(command["arguments"], json!({"fdname": "state"}));
        qemu.say(r#"{"return": {}, "id": 2}"#).await;
        asked.await.unwrap().unwrap();
        let [given] = <[OwnedFd; 1]>::try_from(given).unwrap();
        std::io::Write::write_all(&mut &writer, b"through").unwrap();
        drop(writer);
        let mut text = String::new();
        std::io::Read::read_to_string(&mut std::fs::File::from(given), &mut text).unwrap();
        assert_eq!(text, "through");
    }
}
