//! Bodies on their way through the edge, and what lives as long as they do.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use api::host::Hold;
use axum::http::Request;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

use super::activity::Activity;
use super::pool::{Line, Visit};

/// A request's body on its way in.
pub(super) struct Asking {
    /// `None`: it has none.
    body: Option<Incoming>,
    activity: Activity,
    broke: Broke,
}

/// Whether a client's body has broken off.
#[derive(Clone, Debug, Default)]
pub(super) struct Broke(Arc<AtomicBool>);

impl Broke {
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Asking {
    pub(super) fn wrap(request: Request<Incoming>, activity: Activity) -> (Request<Self>, Broke) {
        let broke = Broke::default();
        let request = request.map(|body| {
            let body = (!body.is_end_stream()).then_some(body);
            Self { body, activity, broke: broke.clone() }
        });
        (request, broke)
    }

    /// The same request once more; `None`: it has a body, which cannot be sent twice.
    pub(super) fn again(request: &Request<Self>) -> Option<Request<Self>> {
        let Self { body: None, activity, broke } = request.body() else { return None };
        let body = Self { body: None, activity: activity.clone(), broke: broke.clone() };
        let mut again = Request::new(body);
        *again.method_mut() = request.method().clone();
        *again.uri_mut() = request.uri().clone();
        *again.headers_mut() = request.headers().clone();
        Some(again)
    }
}

impl HttpBody for Asking {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(body).poll_frame(cx));
        self.activity.touch();
        if let Some(Err(_)) = &frame {
            self.broke.0.store(true, Ordering::Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

/// What an answer on its way has of the sandbox. Let go in this order: what says to the guest that it is over comes first.
pub(super) struct Held {
    pub(super) line: Line,
    /// Others may have the connection afterwards.
    pub(super) may_keep: bool,
    /// `None`: it counts for nothing.
    pub(super) visit: Option<Visit>,
    pub(super) hold: Option<Box<dyn Hold>>,
}

/// The same, until the answer has ended.
struct Exchange(Mutex<Option<Held>>);

impl Exchange {
    /// Ends the connection into the sandbox and lets it go.
    fn end(&self) {
        drop(self.lock().take());
    }

    /// All of the answer is there: another request may have the connection.
    fn finish(&self) {
        let Some(Held { line, may_keep, visit, hold }) = self.lock().take() else { return };
        match visit {
            Some(visit) if may_keep => visit.end(line, hold),
            visit => {
                drop(line);
                drop(visit);
                drop(hold);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Held>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An answer on its way: it ends by itself, with its client, with the machine, with what it may not outlast, or when nothing flows any
/// more. The last three are watched from outside: a body is not asked for more while its client does not read.
pub(super) struct Answering {
    body: Incoming,
    /// What has come already.
    early: Option<Result<Frame<Bytes>, hyper::Error>>,
    activity: Activity,
    exchange: Arc<Exchange>,
    /// Ends with it.
    watcher: Option<AbortOnDrop>,
}

impl Answering {
    /// Takes what has come already: most answers are whole by then, and need the sandbox no longer. `cut`: what the rest of it may not
    /// outlast.
    pub(super) async fn begin(
        body: Incoming,
        held: Held,
        activity: Activity,
        idle: Duration,
        machine: CancellationToken,
        cut: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        activity.touch();
        let exchange = Arc::new(Exchange(Mutex::new(Some(held))));
        let mut answering = Self { body, early: None, activity, exchange, watcher: None };
        let whole = poll_fn(|cx| {
            let whole = answering.body.is_end_stream() && {
                answering.exchange.finish();
                true
            };
            Poll::Ready(whole || answering.look(cx))
        })
        .await;
        if !whole {
            answering.watch(idle, machine, cut);
        }
        answering
    }

    /// Whether it is whole with what has come already.
    fn look(&mut self, cx: &mut Context<'_>) -> bool {
        // An end without a frame is one that asking again tells, too.
        if let Poll::Ready(frame) = self.next(cx) {
            self.early = frame;
        }
        self.exchange.lock().is_none()
    }

    fn watch(
        &mut self,
        idle: Duration,
        machine: CancellationToken,
        cut: impl Future<Output = ()> + Send + 'static,
    ) {
        let (seen, watched) = (self.activity.clone(), Arc::downgrade(&self.exchange));
        let watch = tokio::spawn(async move {
            let why = tokio::select! {
                () = seen.silence(idle) => "nothing has flowed for too long",
                () = machine.cancelled() => "its machine has ended",
                () = cut => "its box is frozen",
            };
            if let Some(exchange) = watched.upgrade() {
                tracing::debug!(why, "an answer is cut");
                exchange.end();
            }
        });
        self.watcher = Some(AbortOnDrop(watch.abort_handle()));
    }

    fn next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let mut frame = Pin::new(&mut self.body).poll_frame(cx);
        if frame.is_pending() {
            if let Some(held) = &mut *self.exchange.lock() {
                held.line.wire.carry(cx);
            }
            frame = Pin::new(&mut self.body).poll_frame(cx);
        }
        let frame = ready!(frame);
        self.activity.touch();
        let whole = match &frame {
            Some(Ok(_)) => self.body.is_end_stream(),
            Some(Err(_)) => false,
            None => true,
        };
        if whole {
            self.exchange.finish();
        }
        Poll::Ready(frame)
    }
}

impl HttpBody for Answering {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.early.take() {
            Some(frame) => Poll::Ready(Some(frame)),
            None => self.next(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.early.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let early = match &self.early {
            Some(Ok(frame)) => frame.data_ref().map_or(0, Bytes::len) as u64,
            _ => 0,
        };
        let rest = self.body.size_hint();
        let mut all = SizeHint::new();
        all.set_lower(rest.lower() + early);
        if let Some(upper) = rest.upper() {
            all.set_upper(upper + early);
        }
        all
    }
}

/// Ends a task when dropped.
pub(super) struct AbortOnDrop(pub(super) AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
