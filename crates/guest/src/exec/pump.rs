//! One exec's task: it takes what the program prints, ends it at its time limit, and knows its end.

use std::{io, os::unix::process::ExitStatusExt, process::ExitStatus, sync::Arc};

use tokio::{net::unix::pipe, sync::oneshot, time::Instant};
use wire::{Ended, ExecState, Stream};

use super::{Exec, Execs, now_ms, terminal::Terminal};

/// Bytes taken from each pipe after the first process ended. More than a pipe holds, and an end to what a process that was
/// left behind prints without pause.
const DRAIN_MAX: usize = 1024 * 1024;
/// Bytes read from a pipe at a time; a record in the log, and a frame on the wire.
const READ_CHUNK: usize = 32 * 1024;

impl Exec {
    /// Takes output until all of it is closed and the end is known.
    pub(super) async fn pump(
        &self,
        mut pipes: [Source; 2],
        mut exited: oneshot::Receiver<ExitStatus>,
        execs: &Execs,
    ) {
        let mut timed_out = false;
        let mut deadline = self.deadline;
        while self.runs() || pipes.iter().any(|pipe| pipe.open) {
            let [out, err] = &mut pipes;
            tokio::select! {
                biased;
                status = &mut exited, if self.runs() => {
                    for pipe in &mut pipes {
                        pipe.drain(self);
                    }
                    // The table keeps the other end until it has sent.
                    let Ok(status) = status else { return };
                    self.state.send_replace(ExecState::Ended(Ended {
                        code: status.code(),
                        signal: status.signal(),
                        timed_out,
                        at_ms: now_ms(),
                        output_end: self.log().end(),
                    }));
                    self.changed.send_modify(|version| *version += 1);
                    // After the state: whoever fills stdin holds the lock and lets it go when it sees the end.
                    *self.stdin.lock().await = None;
                    // With its last holder the terminal closes, and what still uses it is hung up.
                    *self.terminal() = None;
                    execs.tidy();
                }
                () = sleep_until(deadline), if deadline.is_some() && self.runs() => {
                    deadline = None;
                    timed_out = true;
                    if let Err(error) = self.kill() {
                        eprintln!("kill exec {} at its time limit: {error}", self.id);
                    }
                }
                ready = out.from.readable(), if out.open => out.take(self, ready.is_ok()),
                ready = err.from.readable(), if err.open => err.take(self, ready.is_ok()),
            }
        }
    }
}

/// One stream of output.
pub(super) struct Source {
    from: From,
    stream: Stream,
    open: bool,
}

enum From {
    Pipe(pipe::Receiver),
    Terminal(Arc<Terminal>),
    Nowhere,
}

impl From {
    async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Pipe(pipe) => pipe.readable().await,
            Self::Terminal(terminal) => terminal.readable().await,
            Self::Nowhere => Ok(()),
        }
    }

    fn try_read(&self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Pipe(pipe) => pipe.try_read(into),
            Self::Terminal(terminal) => terminal.try_read(into),
            Self::Nowhere => Ok(0),
        }
    }

    /// The rest that is there after the program's end.
    fn read_rest(&self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Terminal(terminal) => terminal.read_now(into),
            Self::Pipe(_) | Self::Nowhere => self.try_read(into),
        }
    }
}

impl Source {
    pub(super) fn pipe(pipe: pipe::Receiver, stream: Stream) -> Self {
        Self { from: From::Pipe(pipe), stream, open: true }
    }

    pub(super) fn terminal(terminal: Arc<Terminal>) -> Self {
        Self { from: From::Terminal(terminal), stream: Stream::Stdout, open: true }
    }

    /// A stream that a terminal has not.
    pub(super) fn none() -> Self {
        Self { from: From::Nowhere, stream: Stream::Stderr, open: false }
    }

    fn take(&mut self, exec: &Exec, ready: bool) {
        if ready {
            self.read(exec, From::try_read);
        } else {
            self.close();
        }
    }

    /// Lets its descriptor go.
    fn close(&mut self) {
        self.open = false;
        self.from = From::Nowhere;
    }

    /// One read. Gives the number of bytes, none when there are none for now.
    fn read(
        &mut self,
        exec: &Exec,
        how: impl Fn(&From, &mut [u8]) -> io::Result<usize>,
    ) -> Option<usize> {
        let mut chunk = vec![0; READ_CHUNK];
        match how(&self.from, &mut chunk) {
            Ok(0) => self.close(),
            Ok(read) => {
                exec.append(self.stream, &chunk[..read]);
                return Some(read);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                eprintln!("read output of exec {}: {error}", exec.id);
                self.close();
            }
        }
        None
    }

    fn drain(&mut self, exec: &Exec) {
        let mut drained = 0;
        while self.open && drained < DRAIN_MAX {
            match self.read(exec, From::read_rest) {
                Some(read) => drained += read,
                None => break,
            }
        }
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    if let Some(deadline) = deadline {
        tokio::time::sleep_until(deadline).await;
    }
}
