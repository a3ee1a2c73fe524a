//! Connections into sandboxes that have carried a request and can carry another.
//!
//! They are kept only while other requests to the same port are in progress, and end with the last of them: an end that comes
//! later would wake who sleeps by then, and whoever holds a sandbox awake for an idle connection keeps it from sleeping. So one
//! request alone costs a connection of its own, as its end says at once that it is over; many at a time share some. A port that
//! is asked all the time ([`BUSY_REQUESTS`]) is held for a moment longer ([`LINGER`]), so that its connections do not end in each
//! of the gaps between them.
//!
//! A connection that was open for a while may end in the moment it is used, and nobody knows whether what was sent arrived.
//! Only what may be sent twice goes over one ([`may_repeat`]), and is sent again over a new one then.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use api::SandboxId;
use api::host::Hold;
use axum::http::{Method, Request};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1::SendRequest;
use tokio_util::sync::CancellationToken;

use super::body::{AbortOnDrop, Asking};
use crate::failure::chain;

/// Most connections to one port that are kept without a request: as many as browsers and proxies have at a time; any more are
/// closed when their request has ended.
const KEPT_MAX: usize = 128;

/// How long one may have been without a request to be used again: servers of the field close after five seconds at the least.
const KEPT_TIME_MAX: Duration = Duration::from_secs(3);

/// Requests within a second or less from which on a port is busy.
const BUSY_REQUESTS: u32 = 32;

/// How long the connections to a busy port and what holds its sandbox awake outlast the last request. Whoever asks for a sleep
/// meanwhile is told that it is needed.
const LINGER: Duration = Duration::from_millis(100);

/// Over which time requests are counted.
const WINDOW: Duration = Duration::from_secs(1);

/// Ports that are remembered before those are forgotten that nobody has asked for within the last [`WINDOW`].
const PORTS_BEFORE_PRUNING: usize = 256;

/// Whether a request may be sent again when nobody knows whether it arrived (RFC 9110, 9.2.2), and can be: it has no body.
pub(super) fn may_repeat(request: &Request<Incoming>) -> bool {
    let safe = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    safe && request.body().is_end_stream()
}

/// A connection into a sandbox.
pub(super) struct Line {
    pub(super) sender: SendRequest<Asking>,
    pub(super) wire: Wire,
    /// Fires when the machine has ended that it leads to.
    pub(super) machine: CancellationToken,
}

/// What carries a connection's bytes. Dropped, it ends the connection.
pub(super) enum Wire {
    /// Whoever waits for the answer. That spares each request some turns of other tasks, which under load cost more than all
    /// the rest; it will do only where nothing else has to flow meanwhile, such as a request's body.
    Waiter(Pin<Box<Carrier>>),
    /// A task of its own.
    Task { _ends: AbortOnDrop },
    /// Nobody any more: it has ended.
    Ended,
}

/// Carries bytes until both sides have ended.
pub(super) type Carrier = dyn Future<Output = hyper::Result<()>> + Send;

impl Wire {
    /// Carries what can be carried now; wakes the task when there is more.
    pub(super) fn carry(&mut self, cx: &mut Context<'_>) {
        if let Self::Waiter(carrier) = self
            && let Poll::Ready(ended) = carrier.as_mut().poll(cx)
        {
            if let Err(error) = ended {
                tracing::debug!(error = chain(&error), "a connection into a sandbox broke");
            }
            *self = Self::Ended;
        }
    }

    /// Waits for what needs bytes to be carried.
    pub(super) async fn carry_for<T>(&mut self, waited: impl Future<Output = T>) -> T {
        let mut waited = pin!(waited);
        poll_fn(|cx| {
            if let Poll::Ready(done) = waited.as_mut().poll(cx) {
                return Poll::Ready(done);
            }
            self.carry(cx);
            // What came by that is there at once.
            waited.as_mut().poll(cx)
        })
        .await
    }

    /// Leaves it to a task of its own.
    pub(super) fn leave(self) -> Self {
        match self {
            Self::Waiter(carrier) => {
                let task = tokio::spawn(async move {
                    if let Err(error) = carrier.await {
                        tracing::debug!(error = chain(&error), "a connection into a sandbox broke");
                    }
                });
                Self::Task { _ends: AbortOnDrop(task.abort_handle()) }
            }
            other => other,
        }
    }
}

/// Of all sandboxes.
#[derive(Default)]
pub(crate) struct Pool(Arc<Mutex<Ports>>);

type Ports = HashMap<(SandboxId, u16), Port>;

#[derive(Default)]
struct Port {
    /// Requests in progress.
    visits: usize,
    /// The newest last.
    kept: Vec<(Instant, Line)>,
    /// What holds its sandbox awake for a moment after the last request, and until when.
    lingers: Option<(Instant, Box<dyn Hold>)>,
    window: Window,
}

/// Counts requests.
struct Window {
    begun: Instant,
    requests: u32,
    /// The one before had enough of them, and has just ended.
    was_busy: bool,
}

impl Default for Window {
    fn default() -> Self {
        Self { begun: Instant::now(), requests: 0, was_busy: false }
    }
}

impl Window {
    fn count(&mut self) {
        let passed = self.begun.elapsed();
        if passed > WINDOW {
            let was_busy = passed < 2 * WINDOW && self.requests >= BUSY_REQUESTS;
            *self = Self { was_busy, ..Self::default() };
        }
        self.requests = self.requests.saturating_add(1);
    }

    fn is_busy(&self) -> bool {
        self.was_busy || self.requests >= BUSY_REQUESTS
    }
}

impl Port {
    fn is_over(&self) -> bool {
        self.visits == 0 && self.lingers.is_none() && self.window.begun.elapsed() > WINDOW
    }
}

impl Pool {
    /// Counts a request until its answer has been passed on.
    pub(super) fn visit(&self, id: &SandboxId, port: u16) -> Visit {
        let key = (id.clone(), port);
        let mut ports = lock(&self.0);
        if ports.len() >= PORTS_BEFORE_PRUNING {
            ports.retain(|_, port| !port.is_over());
        }
        let port = ports.entry(key.clone()).or_default();
        port.visits += 1;
        port.window.count();
        drop(ports);
        Visit { ports: Arc::clone(&self.0), key }
    }
}

/// A request in progress.
pub(super) struct Visit {
    ports: Arc<Mutex<Ports>>,
    key: (SandboxId, u16),
}

impl Visit {
    /// A connection that has been used before.
    pub(super) fn take(&self) -> Option<Line> {
        let mut old = Vec::new();
        let mut ports = lock(&self.ports);
        let kept = &mut ports.get_mut(&self.key)?.kept;
        let found = loop {
            let Some((since, line)) = kept.pop() else { break None };
            if since.elapsed() <= KEPT_TIME_MAX
                && !line.machine.is_cancelled()
                && !line.sender.is_closed()
            {
                break Some(line);
            }
            old.push(line);
        };
        // Closed without the lock.
        drop(ports);
        found
    }

    /// The request has ended with its answer, and its connection can carry another.
    pub(super) fn end(self, line: Line, hold: Option<Box<dyn Hold>>) {
        let mut ports = lock(&self.ports);
        let Some(port) = ports.get_mut(&self.key) else { return };
        let is_busy = port.window.is_busy() && hold.is_some();
        let wanted = port.visits > 1 || is_busy;
        let mut dropped = (None, hold);
        if wanted && !line.sender.is_closed() && port.kept.len() < KEPT_MAX {
            port.kept.push((Instant::now(), line));
        } else {
            dropped.0 = Some(line);
        }
        // The last one: what ends with it is put off, by a task that is under way already or begins.
        if port.visits == 1 && is_busy {
            let until = Instant::now() + LINGER;
            let earlier = match dropped.1.take() {
                Some(hold) => port.lingers.replace((until, hold)),
                None => None,
            };
            drop(ports);
            if earlier.is_none() {
                tokio::spawn(linger(Arc::clone(&self.ports), self.key.clone()));
            }
            drop(earlier);
        } else {
            drop(ports);
        }
        // In this order: nothing of it is open any more when nothing holds the sandbox.
        let (line, hold) = dropped;
        drop(line);
        drop(self);
        drop(hold);
    }
}

/// Ends what is kept of a busy port once nobody has asked for it for a while.
async fn linger(ports: Arc<Mutex<Ports>>, key: (SandboxId, u16)) {
    loop {
        let until = match lock(&ports).get(&key) {
            Some(Port { lingers: Some((until, _)), .. }) => *until,
            _ => return,
        };
        tokio::time::sleep_until(until.into()).await;
        let mut all = lock(&ports);
        let Some(port) = all.get_mut(&key) else { return };
        match &port.lingers {
            Some((until, _)) if *until > Instant::now() => {}
            _ => {
                let hold = port.lingers.take();
                // Others are in progress: the connections are theirs.
                let kept =
                    if port.visits == 0 { std::mem::take(&mut port.kept) } else { Vec::new() };
                drop(all);
                // In this order, as after a request alone.
                drop(kept);
                drop(hold);
                return;
            }
        }
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut ports = lock(&self.ports);
        let Entry::Occupied(mut port) = ports.entry(self.key.clone()) else { return };
        port.get_mut().visits -= 1;
        let is_last = port.get().visits == 0 && port.get().lingers.is_none();
        let kept = if is_last { std::mem::take(&mut port.get_mut().kept) } else { Vec::new() };
        drop(ports);
        drop(kept);
    }
}

fn lock(ports: &Mutex<Ports>) -> MutexGuard<'_, Ports> {
    ports.lock().unwrap_or_else(PoisonError::into_inner)
}
