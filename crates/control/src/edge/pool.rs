//! Connections into sandboxes that have carried a request and can carry another.
//!
//! They are kept only while other requests to the same port are in progress, and end with the last of them: an end that comes
//! later would wake who sleeps by then, and whoever holds a sandbox awake for an idle connection keeps it from sleeping. So one
//! request alone costs a connection of its own, as its end says at once that it is over; many at a time share some.
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
}

impl Pool {
    /// Counts a request until its answer has been passed on.
    pub(super) fn visit(&self, id: &SandboxId, port: u16) -> Visit {
        let key = (id.clone(), port);
        lock(&self.0).entry(key.clone()).or_default().visits += 1;
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

    /// Keeps a connection on which an answer has ended, if another request may want it.
    pub(super) fn give(&self, line: Line) {
        if line.sender.is_closed() {
            return;
        }
        let mut ports = lock(&self.ports);
        let refused = match ports.get_mut(&self.key) {
            Some(port) if port.visits > 1 && port.kept.len() < KEPT_MAX => {
                port.kept.push((Instant::now(), line));
                None
            }
            _ => Some(line),
        };
        drop(ports);
        drop(refused);
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut ports = lock(&self.ports);
        let Entry::Occupied(mut port) = ports.entry(self.key.clone()) else { return };
        port.get_mut().visits -= 1;
        let last = (port.get().visits == 0).then(|| port.remove());
        drop(ports);
        drop(last);
    }
}

fn lock(ports: &Mutex<Ports>) -> MutexGuard<'_, Ports> {
    ports.lock().unwrap_or_else(PoisonError::into_inner)
}
