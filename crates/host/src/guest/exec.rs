//! Programs in the guest. An exec lives in the guest, apart from all links: it can be waited for, read and signalled by id
//! after the daemon, or the sandbox's machine, was stopped and came back.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::Stream as FuturesStream;

use wire::{
    Ended, ExecId, ExecInfo, ExecSpec, ExecState, Failure, FailureCode, OutputChunk, OutputFrom,
    Reply, Request, Sample, Sockets, TerminalSize, TerminalSpec,
};

use super::{
    channel::{ANSWER_LIMIT, Channel, Incoming},
    error::GuestError,
    files::Upload,
    link::GuestLink,
};

/// Which output is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// Standard output only.
    Stdout,
    /// Standard error only.
    Stderr,
    /// Both, in the order in which the agent read them.
    Both,
}

/// A program that was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecStarted {
    /// Its id from now on.
    pub id: ExecId,
    /// Its process id in the guest.
    pub pid: u32,
}

impl GuestLink {
    /// Whether the agent answers.
    pub async fn ping(&self) -> Result<(), GuestError> {
        match self.ask(Request::Ping, Some(ANSWER_LIMIT)).await? {
            Reply::Done => Ok(()),
            _ => Err(GuestError::BadAnswer { request: "ping" }),
        }
    }

    /// How busy the guest is.
    pub async fn sample(&self) -> Result<Sample, GuestError> {
        match self.ask(Request::Sample, Some(ANSWER_LIMIT)).await? {
            Reply::Sample(sample) => Ok(sample),
            _ => Err(GuestError::BadAnswer { request: "sample" }),
        }
    }

    /// What is open on the guest's network.
    ///
    /// # Errors
    /// Also [`GuestError::Failed`] with `unsupported` when the guest's agent is older than this question.
    pub async fn sockets(&self) -> Result<Sockets, GuestError> {
        if !self.speaks(wire::NETWORK_SINCE) {
            return Err(GuestError::Failed(Failure {
                code: FailureCode::Unsupported,
                errno: None,
                field: None,
                message: "this guest's agent does not tell what is open on its network".to_owned(),
            }));
        }
        match self.ask(Request::Sockets, Some(ANSWER_LIMIT)).await? {
            Reply::Sockets(sockets) => Ok(sockets),
            _ => Err(GuestError::BadAnswer { request: "sockets" }),
        }
    }

    /// Has the guest write everything to its disk, while its programs run on; `false`: its agent is older than this request,
    /// and does so only when it makes them stand still.
    pub async fn flush(&self, limit: Duration) -> Result<bool, GuestError> {
        if !self.speaks(wire::FLUSH_SINCE) {
            return Ok(false);
        }
        match self.ask(Request::Flush, Some(limit)).await? {
            Reply::Done => Ok(true),
            _ => Err(GuestError::BadAnswer { request: "flush" }),
        }
    }

    /// Starts a program; answers when it runs.
    ///
    /// # Errors
    /// [`GuestError::Failed`] with `not_found`, `permission`, `bad_cwd`, `unknown_user`, `invalid` or `too_many` says why it does not.
    pub async fn exec_start(&self, spec: ExecSpec) -> Result<ExecStarted, GuestError> {
        match self.ask(Request::ExecStart(spec), Some(ANSWER_LIMIT)).await? {
            Reply::ExecStarted { id, pid } => Ok(ExecStarted { id, pid }),
            _ => Err(GuestError::BadAnswer { request: "exec start" }),
        }
    }

    /// As [`exec_start`](Self::exec_start), on a terminal of its own.
    ///
    /// # Errors
    /// Also [`GuestError::Failed`] with `unsupported` when the guest's agent is older than terminals.
    pub async fn terminal_start(&self, spec: TerminalSpec) -> Result<ExecStarted, GuestError> {
        if !self.speaks(wire::TERMINALS_SINCE) {
            return Err(GuestError::Failed(Failure {
                code: FailureCode::Unsupported,
                errno: None,
                field: None,
                message: "the sandbox's guest agent is older than terminals".to_owned(),
            }));
        }
        match self.ask(Request::TerminalStart(spec), Some(ANSWER_LIMIT)).await? {
            Reply::ExecStarted { id, pid } => Ok(ExecStarted { id, pid }),
            _ => Err(GuestError::BadAnswer { request: "terminal start" }),
        }
    }

    /// Changes a terminal's size. While the guest stands still the request waits, and is the first thing done when it goes on.
    pub async fn terminal_resize(&self, id: ExecId, size: TerminalSize) -> Result<(), GuestError> {
        match self.ask(Request::TerminalResize { id, size }, Some(ANSWER_LIMIT)).await? {
            Reply::Done => Ok(()),
            _ => Err(GuestError::BadAnswer { request: "terminal resize" }),
        }
    }

    /// Waits for a program's end, however long that takes.
    pub async fn exec_wait(&self, id: ExecId) -> Result<Ended, GuestError> {
        match self.ask(Request::ExecWait(id), None).await? {
            Reply::ExecState(ExecState::Ended(ended)) => Ok(ended),
            _ => Err(GuestError::BadAnswer { request: "exec wait" }),
        }
    }

    /// A program's output from an offset on. With `follow` the stream goes on until the program has ended and all its output
    /// was read; without, it ends with what there is.
    pub fn exec_output(
        &self,
        id: ExecId,
        which: Which,
        from: OutputFrom,
        follow: bool,
    ) -> Result<ExecOutput, GuestError> {
        let stdout = matches!(which, Which::Stdout | Which::Both).then_some(from.stdout);
        let stderr = matches!(which, Which::Stderr | Which::Both).then_some(from.stderr);
        let channel = self.open(&Request::ExecOutput { id, stdout, stderr, follow })?;
        Ok(ExecOutput { channel })
    }

    /// Bytes for a program's standard input. With `close`, [`Upload::finish`] closes it.
    pub fn exec_stdin(&self, id: ExecId, close: bool) -> Result<Upload, GuestError> {
        Ok(Upload::new(self.open(&Request::ExecStdin { id, close })?))
    }

    /// Sends a signal to a program's process group; `SIGKILL` (9) ends everything that it started.
    pub async fn exec_signal(&self, id: ExecId, signal: i32) -> Result<(), GuestError> {
        match self.ask(Request::ExecSignal { id, signal }, Some(ANSWER_LIMIT)).await? {
            Reply::Done => Ok(()),
            _ => Err(GuestError::BadAnswer { request: "exec signal" }),
        }
    }

    /// All programs that the agent knows, oldest first: those that run and the newest that have ended.
    pub async fn exec_list(&self) -> Result<Vec<ExecInfo>, GuestError> {
        let mut channel = self.open(&Request::ExecList)?;
        self.within("exec list", ANSWER_LIMIT, async {
            let mut execs = Vec::new();
            while let Some(incoming) = channel.recv().await? {
                match incoming {
                    Incoming::Reply(Reply::Execs(some)) if execs.len() < EXECS_MAX => {
                        execs.extend(some);
                    }
                    _ => return Err(GuestError::BadAnswer { request: "exec list" }),
                }
            }
            Ok(execs)
        })
        .await
    }
}

/// Execs taken from one guest's list, about; far above what an agent keeps, so only a hostile one meets it.
const EXECS_MAX: usize = 10_000;

/// A program's output; see [`GuestLink::exec_output`]. Dropping it ends the reading, not the program.
#[derive(Debug)]
pub struct ExecOutput {
    channel: Channel,
}

impl FuturesStream for ExecOutput {
    type Item = Result<OutputChunk, GuestError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(match ready!(self.channel.poll_recv(cx)) {
            Ok(None) => None,
            Ok(Some(Incoming::Data(payload))) => {
                let chunk = OutputChunk::from_payload(&payload);
                Some(chunk.ok_or(GuestError::BadAnswer { request: "exec output" }))
            }
            Ok(Some(Incoming::Reply(_))) => {
                Some(Err(GuestError::BadAnswer { request: "exec output" }))
            }
            Err(error) => Some(Err(error)),
        })
    }
}
