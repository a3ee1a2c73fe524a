//! Bytes both ways over a connection that was made through a link or a forward: a WebSocket, or anything else.
//!
//! Open and silent it keeps nothing awake, except on a port of `awake_ports` (S4). What a client sends is a need like any
//! other: it wakes the sandbox before it is passed on, and holds it awake while it flows. What a server sends counts as the
//! packets that it is made of.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use api::SandboxId;
use api::host::{Caller, Hold, HoldKind};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

use super::activity::Activity;
use super::bursts::Burst;
use crate::App;
use crate::failure::chain;

/// Bytes read at a time in each direction.
const PIECE_BYTES: usize = 16 * 1024;

/// How long after a client's last byte the sandbox is held for it: what is sent in pieces is one need, not many.
const BURST: Duration = Duration::from_millis(500);

/// How often rules and silence are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// One connection to a port of a sandbox.
pub(crate) struct Conversation {
    app: App,
    id: SandboxId,
    port: u16,
    caller: Caller,
    machine: CancellationToken,
    activity: Activity,
    /// Holds it awake because it is open (S4).
    standing: Mutex<Option<Box<dyn Hold>>>,
    /// Holds it awake because its client sends.
    burst: Burst,
    /// One side has said all it had to say.
    half: AtomicBool,
    /// What its client sends is a need; not with a box, which counts that it was opened (B9).
    counts: bool,
}

/// Why a conversation was ended from here.
#[derive(Debug)]
enum End {
    Idle,
    MachineEnded,
    Stopping,
    Gone,
}

impl Conversation {
    /// Begins to count. `machine`: fires with the end of what it is connected to.
    pub(crate) async fn begin(
        app: &App,
        id: &SandboxId,
        port: u16,
        caller: Caller,
        machine: CancellationToken,
        counts: bool,
    ) -> Result<Self, api::ApiError> {
        let conversation = Self {
            app: app.clone(),
            id: id.clone(),
            port,
            caller,
            machine,
            activity: Activity::new(),
            standing: Mutex::default(),
            burst: app.bursts().open(id),
            half: AtomicBool::new(false),
            counts,
        };
        conversation.look().await?;
        Ok(conversation)
    }

    /// Copies until both sides have ended, one has broken, or the rules say so.
    pub(crate) async fn copy(
        self,
        client: impl AsyncRead + AsyncWrite + Unpin,
        server: impl AsyncRead + AsyncWrite + Unpin,
    ) {
        let (mut from_client, mut to_client) = tokio::io::split(client);
        let (mut from_server, mut to_server) = tokio::io::split(server);
        let both = async {
            tokio::try_join!(
                self.pump(&mut from_client, &mut to_server, true),
                self.pump(&mut from_server, &mut to_client, false),
            )
        };
        let stop = self.app.stop().clone();
        let end = tokio::select! {
            ended = both => match ended {
                Ok((up, down)) => return tracing::debug!(up, down, "a connection ended"),
                Err(error) => return tracing::debug!(error = chain(&error), "a connection broke"),
            },
            end = self.watch() => end,
            () = self.machine.cancelled() => End::MachineEnded,
            () = stop.cancelled() => End::Stopping,
        };
        tracing::debug!(?end, port = self.port, "a connection is closed");
    }

    async fn pump(
        &self,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
        is_client: bool,
    ) -> io::Result<u64> {
        let mut piece = vec![0; PIECE_BYTES];
        let mut total = 0;
        loop {
            let read = from.read(&mut piece).await?;
            self.activity.touch();
            if read == 0 {
                // No need of its own: a client that goes away wakes nobody.
                self.half.store(true, Ordering::Relaxed);
                to.shutdown().await?;
                return Ok(total);
            }
            if is_client && self.counts {
                self.need().await.map_err(io::Error::other)?;
            }
            to.write_all(&piece[..read]).await?;
            to.flush().await?;
            self.activity.touch();
            total += read as u64;
        }
    }

    /// Awake from here on, for as long as the client sends.
    async fn need(&self) -> Result<(), api::ApiError> {
        let mut burst = self.burst.held.lock().await;
        if burst.is_none() {
            let caller = self.caller.clone();
            *burst = Some(self.app.host().hold(&self.id, HoldKind::Request, caller).await?.value);
        }
        Ok(())
    }

    /// Looks at rules and silence until they say that it is over.
    async fn watch(&self) -> End {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            match self.look().await {
                Ok(None) => {}
                Ok(Some(end)) => return end,
                Err(error) => {
                    tracing::debug!(error = chain(&error), "a connection's sandbox is gone");
                    return End::Gone;
                }
            }
        }
    }

    async fn look(&self) -> Result<Option<End>, api::ApiError> {
        let rules = self.app.host().connection_rules(&self.id, self.port)?;
        let silent = self.activity.silent_for();
        let mut standing = self.standing.lock().await;
        match (rules.keeps_awake, standing.is_some()) {
            (true, false) => {
                let (host, caller) = (self.app.host(), self.caller.clone());
                let held = host.hold(&self.id, HoldKind::AwakeConnection, caller).await?;
                *standing = Some(held.value);
            }
            (false, true) => *standing = None,
            (true, true) | (false, false) => {}
        }
        if silent >= BURST {
            // Not waited for: whoever has it just now is about to need it.
            if let Ok(mut burst) = self.burst.held.try_lock() {
                *burst = None;
            }
        }
        let half = self.half.load(Ordering::Relaxed) && silent >= self.app.edge().answer;
        let idle = rules.idle.is_some_and(|idle| silent >= idle);
        Ok((half || idle).then_some(End::Idle))
    }
}
