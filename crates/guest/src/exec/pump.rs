//! One exec's task: it takes what the program prints, ends it at its time limit, and knows its end.

use std::{io, os::unix::process::ExitStatusExt, process::ExitStatus};

use tokio::{net::unix::pipe, sync::oneshot, time::Instant};
use wire::{Ended, ExecState, Stream};

use super::{Exec, Execs, now_ms};

/// Bytes taken from each pipe after the first process ended. More than a pipe holds, and an end to what a process that was
/// left behind prints without pause.
const DRAIN_MAX: usize = 1024 * 1024;
/// Bytes read from a pipe at a time; a record in the log, and a frame on the wire.
const READ_CHUNK: usize = 32 * 1024;

impl Exec {
    /// Takes output until both pipes are closed and the end is known.
    pub(super) async fn pump(
        &self,
        stdout: pipe::Receiver,
        stderr: pipe::Receiver,
        mut exited: oneshot::Receiver<ExitStatus>,
        execs: &Execs,
    ) {
        let mut pipes = [Source::new(stdout, Stream::Stdout), Source::new(stderr, Stream::Stderr)];
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
                    execs.tidy();
                }
                () = sleep_until(deadline), if deadline.is_some() && self.runs() => {
                    deadline = None;
                    timed_out = true;
                    if let Err(error) = self.kill() {
                        eprintln!("kill exec {} at its time limit: {error}", self.id);
                    }
                }
                ready = out.pipe.readable(), if out.open => out.take(self, ready.is_ok()),
                ready = err.pipe.readable(), if err.open => err.take(self, ready.is_ok()),
            }
        }
    }
}

struct Source {
    pipe: pipe::Receiver,
    stream: Stream,
    open: bool,
}

impl Source {
    fn new(pipe: pipe::Receiver, stream: Stream) -> Self {
        Self { pipe, stream, open: true }
    }

    fn take(&mut self, exec: &Exec, ready: bool) {
        if ready {
            self.read(exec);
        } else {
            self.open = false;
        }
    }

    /// One read. Gives the number of bytes, none when there are none for now.
    fn read(&mut self, exec: &Exec) -> Option<usize> {
        let mut chunk = vec![0; READ_CHUNK];
        match self.pipe.try_read(&mut chunk) {
            Ok(0) => self.open = false,
            Ok(read) => {
                exec.append(self.stream, &chunk[..read]);
                return Some(read);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                eprintln!("read output of exec {}: {error}", exec.id);
                self.open = false;
            }
        }
        None
    }

    fn drain(&mut self, exec: &Exec) {
        let mut drained = 0;
        while self.open && drained < DRAIN_MAX {
            match self.read(exec) {
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
