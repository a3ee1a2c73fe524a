//! Listeners, connections, and stopping without breaking what is in progress.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::host::Host;
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Request, Response};
use axum::response::IntoResponse;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rmcp::ServerHandler;
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;
use tracing::Instrument;

use crate::accounts::Accounts;
use crate::auth::Tokens;
use crate::boxes::Boxes;
use crate::catalogue::Catalogue;
use crate::credit::Credit;
use crate::edge::{Bursts, Links, Machines, Pool, Proxies};
use crate::failure::{ErrorCode, chain};
use crate::journal::Journal;
use crate::make::Making;
use crate::metrics::{Face, Metrics};
use crate::secrets::Secrets;
use crate::socket::SocketPath;
use crate::tls::{Tls, TlsError};
use crate::{
    App, Failure, Inner, OpenError, SOCKET_FILE, Settings, boxes, clear, credit, edge, journal,
    mcp, reconcile, retire, routes, spending,
};

/// Most open connections per listener; more wait in the kernel's queue.
pub(crate) const CONNECTIONS_MAX: usize = 8192;
/// Most bytes of a request's head (line and headers); more is answered with 431. Looked at after each read, so up to twice
/// as much may get through.
pub(crate) const HEAD_BYTES_MAX: usize = 64 * 1024;
/// Most requests at a time on one connection of HTTP/2.
const STREAMS_MAX: u32 = 250;
/// Most headers of a request; more is answered with 431.
pub(crate) const HEADERS_MAX: usize = 100;
/// How long a request's head may take to arrive.
pub(crate) const HEAD_TIME_MAX: Duration = Duration::from_secs(30);
/// How long requests in progress may go on after the server was told to stop; then they are cut.
pub(crate) const DRAIN_TIME_MAX: Duration = Duration::from_secs(5);
/// Silence on a connection after which the client is probed.
const KEEP_ALIVE_IDLE: Duration = Duration::from_secs(30);
/// Between two probes.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Unanswered probes after which the client is given up.
const KEEP_ALIVE_PROBES: u32 = 3;
/// How long bytes for a client may wait for its word that they came: as long as the probes take together, which are not sent
/// meanwhile. A client that lives and does not read has as long.
const UNHEARD_MAX: Duration = Duration::from_mins(1);
/// Pause after `accept` failed for want of file descriptors, so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Why the control plane could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The catalogue could not be opened.
    #[error(transparent)]
    Catalogue(#[from] OpenError),
    /// Catalogue and host could not be made to agree, or the tokens could not be read.
    #[error("start the control plane")]
    Start(#[source] Failure),
    /// The address is taken or not ours.
    #[error("listen on {address}")]
    Listen {
        /// What was asked for.
        address: String,
        /// Why not.
        source: io::Error,
    },
    /// The local socket could not be made.
    #[error("listen on the local socket {}", path.display())]
    Socket {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The certificate cannot be used.
    #[error("serve TLS")]
    Tls(#[from] TlsError),
    /// The public URL is not one.
    #[error("public URL `{0}` is not `http://host[:port]` or `https://host[:port]`")]
    PublicUrl(String),
}

/// A running control plane.
pub struct Server {
    address: SocketAddr,
    socket: PathBuf,
    app: App,
    listeners: JoinSet<()>,
}

/// Opens the catalogue, makes it agree with the host, and serves until [`Server::stop`].
pub async fn serve(host: Arc<dyn Host>, settings: Settings) -> Result<Server, ServeError> {
    serve_with(host, settings, mcp::handler).await
}

/// As [`serve`], but another handler answers at `/mcp`: suites that test servers of the Model Context Protocol call tools, prompts and
/// resources of their own, which are none of ours. Nothing but tests uses it.
pub async fn serve_handler<H: ServerHandler + Clone>(
    host: Arc<dyn Host>,
    settings: Settings,
    handler: H,
) -> Result<Server, ServeError> {
    serve_with(host, settings, |_| handler).await
}

async fn serve_with<H: ServerHandler + Clone>(
    host: Arc<dyn Host>,
    settings: Settings,
    handler: impl FnOnce(&App) -> H,
) -> Result<Server, ServeError> {
    // First, so that a second daemon on the same folder changes nothing.
    let socket = settings.data.join(SOCKET_FILE);
    let unix = bind_private(&socket)
        .map_err(|source| ServeError::Socket { path: socket.clone(), source })?;
    let catalogue = Catalogue::open(&settings.data).await?;
    let accounts = Accounts::load(&catalogue).await.map_err(ServeError::Start)?;
    let credit = Credit::load(&catalogue).await.map_err(ServeError::Start)?;
    let tokens = Tokens::load(&catalogue, &settings.data).await.map_err(ServeError::Start)?;
    let secrets = Secrets::load(&catalogue, &settings.data).await.map_err(ServeError::Start)?;
    let listen_failed = |source| ServeError::Listen { address: settings.listen.clone(), source };
    let tcp = TcpListener::bind(&settings.listen).await.map_err(listen_failed)?;
    let address = tcp.local_addr().map_err(listen_failed)?;
    let tls = settings.tls.map(Tls::load).transpose()?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let links =
        Links::new(&settings.domain, settings.public_url.as_deref(), scheme, address.port())
            .ok_or_else(|| {
                ServeError::PublicUrl(settings.public_url.clone().unwrap_or_default())
            })?;
    let boxes = Boxes::load(&catalogue, settings.boxes).await.map_err(ServeError::Start)?;
    let app = App(Arc::new(Inner {
        host,
        catalogue,
        boxes,
        accounts,
        credit,
        spending: spending::Seen::default(),
        tokens,
        secrets,
        making: Making::default(),
        links,
        edge: settings.edge,
        proxies: Proxies(settings.trusted_proxies),
        machines: Machines::default(),
        pool: Pool::default(),
        bursts: Bursts::default(),
        journal: Journal::new().map_err(ServeError::Start)?,
        metrics: Metrics::new(),
        open_metrics: settings.open_metrics,
        follow_max: settings.follow_max,
        leave: CancellationToken::new(),
        stop: CancellationToken::new(),
    }));
    tokio::spawn(journal::keep(app.clone(), app.host().watch()));
    tokio::spawn(boxes::keep(app.clone(), app.host().watch()));
    // Before the first request: afterwards names and rows are what requests make them.
    reconcile::run(&app).await.map_err(ServeError::Start)?;
    boxes::settle(&app).await.map_err(ServeError::Start)?;
    // Nor may one wake what must sleep.
    if let Err(error) = spending::look(&app).await {
        tracing::error!(error = ?error, "what the project spends is not known; looked at again");
    }

    let hosts = mcp::Hosts::new(settings.public_url.as_deref(), &settings.domain, &settings.listen);
    if let Err(error) = credit::look(&app).await {
        tracing::error!(error = ?error, "what boxes use is not charged; looked at again");
    }

    let handler = handler(&app);
    let router = routes::router(app.clone(), hosts, handler);
    let mut listeners = JoinSet::new();
    listeners.spawn(retire::run(app.clone()));
    listeners.spawn(spending::run(app.clone()));
    listeners.spawn(accept_tcp(tcp, tls, Service { app: app.clone(), router: router.clone() }));
    listeners.spawn(credit::run(app.clone()));
    listeners.spawn(accept_unix(unix, Service { app: app.clone(), router }));
    tracing::info!(%address, socket = %socket.display(), "serving");
    Ok(Server { address, socket, app, listeners })
}

impl Server {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its local socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Waits until somebody asks for the daemon's end, over the interface.
    pub async fn asked_to_leave(&self) {
        self.app.leave().cancelled().await;
    }

    /// Takes no more connections, ends endless streams, lets requests in progress end (at most [`DRAIN_TIME_MAX`]), and
    /// closes the catalogue. Sandboxes are the host's and go on.
    pub async fn stop(mut self) {
        self.app.stop().cancel();
        while let Some(ended) = self.listeners.join_next().await {
            if let Err(error) = ended {
                tracing::error!(error = chain(&error), "a listener broke");
            }
        }
        // Nobody asks any more: what outlasts requests would only keep a host from putting all to sleep.
        drop(edge::quieten(&self.app, None));
        self.app.catalogue().close().await;
        match std::fs::remove_file(&self.socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(error = %error, "cannot remove the local socket");
            }
            _ => {}
        }
        tracing::info!("stopped serving");
    }
}

/// Where a request came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// Over the local socket: whoever may open it may do everything.
    Local,
    /// Over the network.
    Tcp(SocketAddr),
}

#[derive(Clone)]
struct Service {
    app: App,
    router: axum::Router,
}

impl Service {
    /// One request: to a sandbox's port, or to the interface.
    async fn handle(
        self,
        mut request: Request<Incoming>,
        peer: Peer,
    ) -> Result<Response<Body>, std::convert::Infallible> {
        let id = request_id();
        let span = tracing::info_span!("request", id, method = %request.method(), path = request.uri().path());
        let begun = Instant::now();
        let mut face = Face::Api;
        let mut response = async {
            if let Err(error) = clear::check(&request) {
                return Failure::from(error).into_response();
            }
            if let Some(address) = edge::address(&self.app, &request) {
                face = Face::Edge;
                if let Err(error) = clear::no_trace(&request) {
                    return Failure::from(error).into_response();
                }
                return edge::handle(&self.app, address, request, peer).await;
            }
            request.extensions_mut().insert(peer);
            let Ok(mut response) = self.router.clone().oneshot(request.map(Body::new)).await;
            response.extensions_mut().insert(Ours);
            response
        }
        .instrument(span.clone())
        .await;
        // What a sandbox's server answered is passed on as it made it.
        let code = response.extensions().get::<ErrorCode>().map(|code| code.0);
        if code.is_some() || response.extensions().get::<Ours>().is_some() {
            let value = HeaderValue::try_from(&id).expect("hex is a header value");
            response.headers_mut().insert(REQUEST_ID, value);
        }
        self.app.metrics().answered(face, response.status(), code, begun.elapsed());
        span.in_scope(|| tracing::debug!(status = response.status().as_u16(), ?code, "answered"));
        Ok(response)
    }
}

/// On an answer of the interface.
#[derive(Clone, Copy, Debug)]
struct Ours;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

async fn accept_tcp(listener: TcpListener, tls: Option<Tls>, service: Service) {
    let mut connections = Connections::new(service);
    while let Some(permit) = connections.room().await {
        let stop = connections.service.app.stop().clone();
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        match accepted {
            Ok((stream, from)) => {
                if let Err(error) = prepare(&stream) {
                    // Only slower, or later to notice a client's end.
                    tracing::debug!(error = %error, "cannot prepare a connection");
                }
                match &tls {
                    Some(tls) => connections.spawn_tls(tls.acceptor(), stream, from, permit),
                    None => connections.spawn(stream, Peer::Tcp(from), permit),
                }
            }
            Err(error) => pause(&error).await,
        }
    }
    drop(listener);
    connections.drain().await;
}

async fn accept_unix(listener: UnixListener, service: Service) {
    let mut connections = Connections::new(service);
    while let Some(permit) = connections.room().await {
        let stop = connections.service.app.stop().clone();
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        match accepted {
            Ok((stream, _)) => connections.spawn(stream, Peer::Local, permit),
            Err(error) => pause(&error).await,
        }
    }
    drop(listener);
    connections.drain().await;
}

/// The connections of one listener.
struct Connections {
    service: Service,
    room: Arc<Semaphore>,
    tasks: JoinSet<()>,
}

impl Connections {
    fn new(service: Service) -> Self {
        Self { service, room: Arc::new(Semaphore::new(CONNECTIONS_MAX)), tasks: JoinSet::new() }
    }

    /// Waits until there is room for one more; `None`: the server stops.
    async fn room(&mut self) -> Option<tokio::sync::OwnedSemaphorePermit> {
        // Ended tasks are taken away here, so that they do not pile up.
        while let Some(ended) = self.tasks.try_join_next() {
            log_broken(ended);
        }
        tokio::select! {
            permit = Arc::clone(&self.room).acquire_owned() => permit.ok(),
            () = self.service.app.stop().cancelled() => None,
        }
    }

    fn spawn<S>(&mut self, stream: S, peer: Peer, permit: tokio::sync::OwnedSemaphorePermit)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let service = self.service.clone();
        self.tasks.spawn(async move {
            let _room = permit;
            serve_http1(service, stream, peer).await;
        });
    }

    /// As [`spawn`](Self::spawn), once both sides have agreed on keys and on a protocol.
    fn spawn_tls(
        &mut self,
        acceptor: TlsAcceptor,
        stream: TcpStream,
        from: SocketAddr,
        permit: tokio::sync::OwnedSemaphorePermit,
    ) {
        let service = self.service.clone();
        self.tasks.spawn(async move {
            let _room = permit;
            let stream = match tokio::time::timeout(HEAD_TIME_MAX, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => stream,
                // Whoever speaks something else, or nothing.
                Ok(Err(error)) => return tracing::debug!(error = chain(&error), "no TLS"),
                Err(_) => return tracing::debug!("no TLS in time"),
            };
            if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
                serve_http2(service, stream, Peer::Tcp(from)).await;
            } else {
                serve_http1(service, stream, Peer::Tcp(from)).await;
            }
        });
    }

    async fn drain(mut self) {
        let all = async {
            while let Some(ended) = self.tasks.join_next().await {
                log_broken(ended);
            }
        };
        if tokio::time::timeout(DRAIN_TIME_MAX, all).await.is_err() {
            tracing::warn!(
                connections = self.tasks.len(),
                "cutting requests that did not end in time"
            );
            self.tasks.shutdown().await;
        }
    }
}

async fn serve_http1<S>(service: Service, stream: S, peer: Peer)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let stop = service.app.stop().clone();
    let handler = hyper::service::service_fn(move |request| service.clone().handle(request, peer));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), handler)
        .with_upgrades();
    tokio::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        // Clients that go away, mostly.
        tracing::debug!(error = chain(&error), "connection ended early");
    }
}

async fn serve_http2<S>(service: Service, stream: S, peer: Peer)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let stop = service.app.stop().clone();
    let handler = hyper::service::service_fn(move |request| service.clone().handle(request, peer));
    let header_bytes = u32::try_from(HEAD_BYTES_MAX).unwrap_or(u32::MAX);
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_header_list_size(header_bytes)
        .max_concurrent_streams(STREAMS_MAX)
        .keep_alive_interval(KEEP_ALIVE_IDLE)
        .serve_connection(TokioIo::new(stream), handler);
    tokio::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(error = chain(&error), "connection ended early");
    }
}

/// Small answers go at once, and a client that vanished is noticed within about a minute: until then its request keeps a
/// sandbox awake.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_ALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEP_ALIVE_PROBES)?;
    let unheard_ms = u32::try_from(UNHEARD_MAX.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(stream, unheard_ms)?;
    Ok(())
}

fn log_broken(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(error = chain(&error), "a connection's task panicked");
    }
}

async fn pause(error: &io::Error) {
    tracing::warn!(error = %error, "cannot accept a connection");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

/// A socket that its owner alone may open. A dead one left by a crash is replaced; a living one is not.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    if let Ok(found) = std::fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "something else has this name",
            ));
        }
        if std::os::unix::net::UnixStream::connect(SocketPath::to(path)?.path()).is_ok() {
            return Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                "another daemon serves this data folder",
            ));
        }
        std::fs::remove_file(path)?;
    }
    // Made under a name that nobody looks for, so that it never stands open under its own.
    let draft = path.with_extension("new");
    match std::fs::remove_file(&draft) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(SocketPath::to(&draft)?.path())?;
    std::fs::set_permissions(&draft, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&draft, path)?;
    Ok(listener)
}

/// Sixteen hex digits, unique enough to find a request in a log.
fn request_id() -> String {
    let mut random = [0; 8];
    // Without randomness the request is still served; its id then says nothing.
    if getrandom::fill(&mut random).is_err() {
        random = [0; 8];
    }
    format!("{:016x}", u64::from_be_bytes(random))
}
