//! One request on one channel.

use std::sync::Arc;

use wire::{
    ExecId, Failure, FailureCode, LONG_REQUEST_MAX, Reply, Request, exec::CHUNK_HEADER_LEN,
};

use crate::{
    agent::{Agent, Flush},
    channel::{Inbox, Outbox},
    exec::{Cursor, Input},
    failure::{failure, io_failure},
    files, ports, sample, sockets, tree,
};

/// How a handler leaves its channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Our direction is over.
    Fin,
    /// Our direction is over, and the host was told.
    Sent,
    /// Both are.
    Reset,
}

/// Execs described in one message: each is at most some 400 bytes, and a name as long as a request allows is cut before.
const EXECS_PER_MESSAGE: usize = 50;
/// Longest name of an exec, in bytes.
const EXEC_NAME_MAX: usize = 200;

/// Carries a request out and answers it.
pub(crate) async fn request(
    agent: &Arc<Agent>,
    request: Request,
    mut inbox: Inbox,
    outbox: &Outbox,
) -> End {
    let request = match request {
        Request::Long { bytes } => match long(&mut inbox, bytes).await {
            Ok(request) => request,
            Err(failure) => {
                outbox.fail(failure).await;
                return End::Fin;
            }
        },
        request => request,
    };
    let reply = match request {
        Request::Connect { port } => return ports::connect(port, inbox, outbox).await,
        Request::Ping => Ok(Some(Reply::Done)),
        Request::Sample => sample::take(agent).map(Reply::Sample).map(Some),
        Request::Sockets => sockets::look(&agent.settings.proc)
            .map(|sockets| Some(Reply::Sockets(sockets)))
            .map_err(|error| io_failure(&error, "sockets", "look at the sockets")),
        Request::Flush => agent
            .flush(Flush { sync: true, drop_caches: false })
            .await
            .map(|()| Some(Reply::Done))
            .map_err(|error| io_failure(&error, "flush", "write to disk")),
        Request::Loopback(ways) => agent
            .lead_loopback(&ways)
            .map(|()| Some(Reply::Done))
            .map_err(|error| io_failure(&error, "ways", "lead ports of the loopback elsewhere")),
        Request::ExecStart(spec) => match name_fits(spec.name.as_deref()) {
            Ok(()) => {
                let _turn = agent.turn_to_start().await;
                agent.execs.run(&spec).map(|(id, pid)| Some(Reply::ExecStarted { id, pid }))
            }
            Err(failure) => Err(failure),
        },
        Request::TerminalStart(spec) => match name_fits(spec.exec.name.as_deref()) {
            Ok(()) => {
                let _turn = agent.turn_to_start().await;
                let started = agent.execs.run_on_terminal(&spec);
                started.map(|(id, pid)| Some(Reply::ExecStarted { id, pid }))
            }
            Err(failure) => Err(failure),
        },
        Request::TerminalResize { id, size } => {
            agent.execs.find(id).and_then(|exec| exec.resize(size)).map(|()| Some(Reply::Done))
        }
        // Taken apart above; one within another is not taken.
        Request::Long { .. } => {
            Err(failure(FailureCode::Invalid, None, "a long request within another"))
        }
        Request::ExecWait(id) => match agent.execs.find(id) {
            Ok(exec) => Ok(Some(Reply::ExecState(exec.wait().await))),
            Err(failure) => Err(failure),
        },
        Request::ExecOutput { id, stdout, stderr, follow } => {
            output(agent, id, Cursor::new(stdout, stderr), follow, outbox).await.map(|()| None)
        }
        Request::ExecStdin { id, close } => {
            stdin(agent, id, close, &mut inbox).await.map(|bytes| Some(Reply::Written { bytes }))
        }
        Request::ExecSignal { id, signal } => {
            agent.execs.find(id).and_then(|exec| exec.signal(signal)).map(|()| Some(Reply::Done))
        }
        Request::ExecList => {
            for some in agent.execs.list().chunks(EXECS_PER_MESSAGE) {
                outbox.reply(&Reply::Execs(some.to_vec())).await;
            }
            Ok(None)
        }
        Request::FileRead { path, offset, length } => {
            files::read(outbox, path, offset, length).await.map(|()| None)
        }
        Request::FileWrite(spec) => {
            files::write(&mut inbox, spec).await.map(|bytes| Some(Reply::Written { bytes }))
        }
        Request::FileStat { path } => files::stat(path).await.map(Reply::Stat).map(Some),
        Request::FileList { path } => files::list(outbox, path).await.map(|()| None),
        Request::FileMkdir { path, parents } => {
            files::mkdir(path, parents).await.map(|()| Some(Reply::Done))
        }
        Request::FileRename { from, to } => {
            files::rename(from, to).await.map(|()| Some(Reply::Done))
        }
        Request::FileRemove { path, recursive } => {
            files::remove(path, recursive).await.map(|()| Some(Reply::Done))
        }
        Request::TreeRead { path } => tree::read(outbox, path).await.map(|()| None),
        Request::TreeWrite { path } => {
            tree::write(&mut inbox, path).await.map(|bytes| Some(Reply::Written { bytes }))
        }
    };
    match reply {
        Ok(Some(reply)) => outbox.reply(&reply).await,
        Ok(None) => {}
        Err(failure) => outbox.fail(failure).await,
    }
    End::Fin
}

fn name_fits(name: Option<&str>) -> Result<(), Failure> {
    match name {
        Some(name) if name.len() > EXEC_NAME_MAX => {
            let message = format!("name is longer than {EXEC_NAME_MAX} bytes");
            Err(failure(FailureCode::Invalid, Some("name"), message))
        }
        _ => Ok(()),
    }
}

/// Takes a request that comes in pieces.
async fn long(inbox: &mut Inbox, bytes: u32) -> Result<Request, Failure> {
    let bytes = bytes as usize;
    if bytes > LONG_REQUEST_MAX {
        let message = format!("request of {bytes} bytes is over the limit of {LONG_REQUEST_MAX}");
        return Err(failure(FailureCode::TooLarge, None, message));
    }
    let mut encoded = Vec::new();
    while let Some(piece) = inbox.recv().await {
        if encoded.len() + piece.len() > bytes {
            return Err(failure(FailureCode::Invalid, None, "request is longer than announced"));
        }
        encoded.extend_from_slice(&piece);
    }
    if encoded.len() < bytes {
        return Err(failure(FailureCode::Invalid, None, "request broke off"));
    }
    match wire::decode::<Request>(&encoded) {
        Ok(request) if !request.host_sends() => Ok(request),
        Ok(_) => Err(failure(FailureCode::Invalid, None, "this request cannot come in pieces")),
        Err(error) => {
            let message = format!("request not understood by this agent: {error}");
            Err(failure(FailureCode::Unsupported, None, message))
        }
    }
}

async fn output(
    agent: &Agent,
    id: ExecId,
    mut cursor: Cursor,
    follow: bool,
    outbox: &Outbox,
) -> Result<(), Failure> {
    let exec = agent.execs.find(id)?;
    let mut changed = exec.changed.subscribe();
    loop {
        // In this order: what comes after the look at the log makes `changed` ready, and what came before the end is seen
        // by one more look after it.
        changed.mark_unchanged();
        let ended = exec.ended();
        loop {
            let chunk = exec.log().read(&mut cursor);
            let chunk = chunk
                .map_err(|error| io_failure(&error, "id", &format!("read output of exec {id}")))?;
            let Some(chunk) = chunk else { break };
            debug_assert!(chunk.bytes.len() + CHUNK_HEADER_LEN <= wire::frame::PAYLOAD_MAX);
            outbox.whole(chunk.to_payload()).await;
            if ended.is_some_and(|ended| cursor.reached(ended.output_end)) {
                break;
            }
        }
        if !follow || ended.is_some() {
            return Ok(());
        }
        // The sender is the exec's own, which we hold.
        let _never = changed.changed().await;
    }
}

async fn stdin(agent: &Agent, id: ExecId, close: bool, inbox: &mut Inbox) -> Result<u64, Failure> {
    let exec = agent.execs.find(id)?;
    let mut written = 0;
    while let Some(bytes) = inbox.recv().await {
        // Taken for each portion, so that the end of the exec can close it in between.
        let mut stdin = exec.stdin.lock().await;
        let Some(pipe) = stdin.as_mut() else { return Err(closed(id)) };
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let ready = tokio::select! {
                biased;
                // What it left behind may hold the other end and never read; the end of the exec waits for the lock.
                _ = exec.wait() => return Err(closed(id)),
                ready = pipe.writable() => ready,
            };
            match ready.and_then(|()| pipe.try_write(rest)) {
                Ok(bytes) => {
                    rest = &rest[bytes..];
                    written += bytes as u64;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    return Err(io_failure(&error, "id", &format!("write to stdin of exec {id}")));
                }
            }
        }
    }
    let mut stdin = exec.stdin.lock().await;
    match stdin.as_ref() {
        None => return Err(closed(id)),
        Some(Input::Pipe(_)) if close => *stdin = None,
        Some(Input::Terminal(terminal)) if close => {
            let hung_up = terminal.hang_up();
            hung_up.map_err(|error| io_failure(&error, "id", &format!("hang up exec {id}")))?;
        }
        Some(Input::Pipe(_) | Input::Terminal(_)) => {}
    }
    Ok(written)
}

fn closed(id: ExecId) -> Failure {
    failure(FailureCode::StdinClosed, Some("id"), format!("exec {id} has no open stdin"))
}
