//! Bodies on their way through the edge, and what lives as long as they do.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use api::host::Hold;
use axum::http::Request;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

use super::activity::Activity;

/// A request's body on its way in.
pub(super) struct Asking {
    body: Incoming,
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
        let request = request.map(|body| Self { body, activity, broke: broke.clone() });
        (request, broke)
    }
}

impl HttpBody for Asking {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        self.activity.touch();
        if let Some(Err(_)) = &frame {
            self.broke.0.store(true, Ordering::Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What an answer on its way has of the sandbox.
pub(super) struct Exchange {
    hold: Mutex<Option<Box<dyn Hold>>>,
    wire: AbortOnDrop,
}

impl Exchange {
    pub(super) fn new(hold: Option<Box<dyn Hold>>, wire: AbortOnDrop) -> Arc<Self> {
        Arc::new(Self { hold: Mutex::new(hold), wire })
    }

    /// Ends the connection into the sandbox and lets it go.
    fn end(&self) {
        self.wire.0.abort();
        drop(self.hold.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// An answer on its way: it ends by itself, with its client, with the machine, or when nothing flows any more. The last two
/// are watched from outside: a body is not asked for more while its client does not read.
pub(super) struct Answering {
    body: Incoming,
    activity: Activity,
    _exchange: Arc<Exchange>,
    _watch: AbortOnDrop,
}

impl Answering {
    pub(super) fn new(
        body: Incoming,
        exchange: Arc<Exchange>,
        activity: Activity,
        idle: Duration,
        machine: CancellationToken,
    ) -> Self {
        activity.touch();
        let (seen, watched) = (activity.clone(), Arc::downgrade(&exchange));
        let watch = tokio::spawn(async move {
            let why = tokio::select! {
                () = seen.silence(idle) => "nothing has flowed for too long",
                () = machine.cancelled() => "its machine has ended",
            };
            if let Some(exchange) = watched.upgrade() {
                tracing::debug!(why, "an answer is cut");
                exchange.end();
            }
        });
        let watch = AbortOnDrop(watch.abort_handle());
        Self { body, activity, _exchange: exchange, _watch: watch }
    }
}

impl HttpBody for Answering {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        self.activity.touch();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Ends a task when dropped.
pub(super) struct AbortOnDrop(pub(super) AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
