//! Connections into sandboxes that have carried a request and can carry another.
//!
//! They are kept only while other requests to the same port are in progress, and end with the last of them: an end that comes
//! later would wake who sleeps by then, and whoever holds a sandbox awake for an idle connection keeps it from sleeping. So one
//! request alone costs a connection of its own, as its end says at once that it is over; many at a time share some. A port that
//! is asked all the time ([`BUSY_REQUESTS`]) is held for a moment longer ([`LINGER`]), so that its connections do not end in each
//! of the gaps between them. Whoever asks for a sleep ends that moment ([`Pool::quieten`]): it is nobody's request any more.
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

/// How long the connections to a busy port and what holds its sandbox awake outlast the last request, unless somebody asks for a
/// sleep meanwhile.
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
pub(crate) struct Pool(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    ports: HashMap<(SandboxId, u16), Port>,
    /// The sleeps that are being asked for; `None`: all sandboxes'.
    quiet: Vec<Option<SandboxId>>,
}

impl Inner {
    fn is_quiet(&self, id: &SandboxId) -> bool {
        self.quiet.iter().any(|quiet| quiet.as_ref().is_none_or(|quiet| quiet == id))
    }
}

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
        let mut inner = lock(&self.0);
        if inner.ports.len() >= PORTS_BEFORE_PRUNING {
            inner.ports.retain(|_, port| !port.is_over());
        }
        let port = inner.ports.entry(key.clone()).or_default();
        port.visits += 1;
        port.window.count();
        drop(inner);
        Visit { pool: Arc::clone(&self.0), key }
    }

    /// Before a sandbox (`None`: each of them) is put to sleep: what outlasts requests ends, and nothing outlasts one until this
    /// is dropped. Requests in progress count as ever.
    pub(super) fn quieten(&self, id: Option<&SandboxId>) -> Quiet {
        let mut inner = lock(&self.0);
        inner.quiet.push(id.cloned());
        let (mut lines, mut holds) = (Vec::new(), Vec::new());
        for ((of, _), port) in &mut inner.ports {
            if id.is_none_or(|id| id == of) {
                holds.extend(port.lingers.take());
                // Else they end with the last request.
                if port.visits == 0 {
                    lines.append(&mut port.kept);
                }
            }
        }
        drop(inner);
        // In this order: an end that came to a sleeper would wake it.
        drop(lines);
        drop(holds);
        Quiet { pool: Arc::clone(&self.0), id: id.cloned() }
    }
}

/// A sleep is being asked for: see [`Pool::quieten`].
pub(crate) struct Quiet {
    pool: Arc<Mutex<Inner>>,
    id: Option<SandboxId>,
}

impl Drop for Quiet {
    fn drop(&mut self) {
        let mut inner = lock(&self.pool);
        if let Some(at) = inner.quiet.iter().position(|quiet| *quiet == self.id) {
            inner.quiet.swap_remove(at);
        }
    }
}

/// A request in progress.
pub(super) struct Visit {
    pool: Arc<Mutex<Inner>>,
    key: (SandboxId, u16),
}

impl Visit {
    /// A connection that has been used before.
    pub(super) fn take(&self) -> Option<Line> {
        let mut old = Vec::new();
        let mut inner = lock(&self.pool);
        let kept = &mut inner.ports.get_mut(&self.key)?.kept;
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
        drop(inner);
        found
    }

    /// The request has ended with its answer, and its connection can carry another.
    pub(super) fn end(self, line: Line, hold: Option<Box<dyn Hold>>) {
        let mut inner = lock(&self.pool);
        let is_quiet = inner.is_quiet(&self.key.0);
        let Some(port) = inner.ports.get_mut(&self.key) else { return };
        let is_busy = port.window.is_busy() && hold.is_some() && !is_quiet;
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
            drop(inner);
            if earlier.is_none() {
                tokio::spawn(linger(Arc::clone(&self.pool), self.key.clone()));
            }
            drop(earlier);
        } else {
            drop(inner);
        }
        // In this order: nothing of it is open any more when nothing holds the sandbox.
        let (line, hold) = dropped;
        drop(line);
        drop(self);
        drop(hold);
    }
}

/// Ends what is kept of a busy port once nobody has asked for it for a while.
async fn linger(pool: Arc<Mutex<Inner>>, key: (SandboxId, u16)) {
    loop {
        let until = match lock(&pool).ports.get(&key) {
            Some(Port { lingers: Some((until, _)), .. }) => *until,
            _ => return,
        };
        tokio::time::sleep_until(until.into()).await;
        let mut inner = lock(&pool);
        let Some(port) = inner.ports.get_mut(&key) else { return };
        match &port.lingers {
            Some((until, _)) if *until > Instant::now() => {}
            _ => {
                let hold = port.lingers.take();
                // Others are in progress: the connections are theirs.
                let kept =
                    if port.visits == 0 { std::mem::take(&mut port.kept) } else { Vec::new() };
                drop(inner);
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
        let mut inner = lock(&self.pool);
        let Entry::Occupied(mut port) = inner.ports.entry(self.key.clone()) else { return };
        port.get_mut().visits -= 1;
        let is_last = port.get().visits == 0 && port.get().lingers.is_none();
        let kept = if is_last { std::mem::take(&mut port.get_mut().kept) } else { Vec::new() };
        drop(inner);
        drop(kept);
    }
}

fn lock(pool: &Mutex<Inner>) -> MutexGuard<'_, Inner> {
    pool.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use hyper::client::conn::http1;
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt, DuplexStream};

    use super::*;

    /// Tells its end.
    struct Held(Arc<Mutex<bool>>);

    #[async_trait::async_trait]
    impl Hold for Held {}

    impl Drop for Held {
        fn drop(&mut self) {
            *self.0.lock().expect("nobody has panicked") = true;
        }
    }

    /// One request to a port that is asked all the time: the server's end of its connection, and whether its hold has ended.
    async fn busy(pool: &Pool, id: &SandboxId) -> (DuplexStream, Arc<Mutex<bool>>) {
        for _ in 0..BUSY_REQUESTS {
            drop(pool.visit(id, 8000));
        }
        let (near, far) = tokio::io::duplex(1024);
        let (sender, carrier) = http1::handshake(TokioIo::new(near)).await.expect("a connection");
        let line = Line {
            sender,
            wire: Wire::Waiter(Box::pin(carrier)),
            machine: CancellationToken::new(),
        };
        let ended = Arc::default();
        pool.visit(id, 8000).end(line, Some(Box::new(Held(Arc::clone(&ended)))));
        (far, ended)
    }

    fn has_ended(ended: &Mutex<bool>) -> bool {
        *ended.lock().expect("nobody has panicked")
    }

    #[tokio::test]
    async fn s05_what_outlasts_requests_ends_with_a_sleep_that_is_asked_for() {
        let pool = Pool::default();
        let [one, other] = ["aaaaaaaaaaaa", "bbbbbbbbbbbb"].map(|id| id.parse().expect("an id"));
        let (mut server, held) = busy(&pool, &one).await;
        assert!(!has_ended(&held), "the next request comes at once");

        let another = pool.quieten(Some(&other));
        assert!(!has_ended(&held), "another sandbox is put to sleep");
        let quiet = pool.quieten(Some(&one));
        assert!(has_ended(&held));
        assert_eq!(server.read(&mut [0]).await.expect("an end"), 0);

        // What ends while it falls asleep has ended.
        let (mut server, held) = busy(&pool, &one).await;
        assert!(has_ended(&held));
        assert_eq!(server.read(&mut [0]).await.expect("an end"), 0);
        drop((another, quiet));
        let (_server, held) = busy(&pool, &one).await;
        assert!(!has_ended(&held), "nobody asks for a sleep any more");
        let all = pool.quieten(None);
        assert!(has_ended(&held));
        drop(all);
        assert!(lock(&pool.0).quiet.is_empty());
    }

    #[tokio::test]
    async fn s05_a_request_in_progress_counts_whoever_asks_for_a_sleep() {
        let pool = Pool::default();
        let id = "aaaaaaaaaaaa".parse().expect("an id");
        let visit = pool.visit(&id, 8000);
        let (server, held) = busy(&pool, &id).await;
        assert!(has_ended(&held), "it holds nothing while another does");
        let _quiet = pool.quieten(Some(&id));
        assert!(visit.take().is_some(), "its connections are those in progress'");
        drop(server);
    }
}
