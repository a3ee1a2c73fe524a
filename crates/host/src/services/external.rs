//! Services in external mode: each HTTP request goes to the external base, with its path kept and its `Host` rewritten (T11).

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use api::ApiError;
use api::boxes::wiring::{Wiring, external_refused, never_external};
use futures_util::TryStreamExt;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyDataStream, BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{CONNECTION, HOST, HeaderName, TE, TRAILER, TRANSFER_ENCODING, UPGRADE};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream};

use crate::network::Subnet;

/// How long the external base may take to take a connection.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// How long a connection is kept without a request. What lies between may have changed meanwhile without a word, and whoever asks over
/// such a connection waits in vain; servers of the field close theirs after five seconds at the least.
const KEPT_TIME_MAX: Duration = Duration::from_secs(3);
/// Bytes that wait between the edge and an external service.
const PIPE_BYTES: usize = 64 * 1024;
/// How long a request's head may take to arrive.
const HEAD_MAX: Duration = Duration::from_secs(30);
/// Headers that speak about one connection only (RFC 9110, 7.6.1).
const HOP_BY_HOP: [HeaderName; 7] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

type Body = BoxBody<Bytes, reqwest::Error>;

/// What an address is that no external base is at; `None`: it may be.
type Refused = dyn Fn(IpAddr) -> Option<&'static str> + Send + Sync;

/// How external bases are asked. One for all boxes: what it keeps open is shared.
#[derive(Clone)]
pub(super) struct External {
    client: reqwest::Client,
    refused: Arc<Refused>,
}

impl External {
    /// For guests of this subnet, which no base leads into: who is there is reached by links, and those are the account's own.
    pub(super) fn new(subnet: Subnet) -> Self {
        Self::but(Arc::new(move |ip| {
            let guests = || subnet.contains(ip).then_some("the network of this host's guests");
            never_external(ip).or_else(guests)
        }))
    }

    fn but(refused: Arc<Refused>) -> Self {
        let builder = reqwest::Client::builder()
            .connect_timeout(CONNECT_MAX)
            .pool_idle_timeout(KEPT_TIME_MAX)
            // A redirect is the caller's to follow, and what the host's environment says is not the guests'.
            .redirect(reqwest::redirect::Policy::none())
            .dns_resolver(Arc::new(Elsewhere(Arc::clone(&refused))))
            .no_proxy();
        #[expect(
            clippy::expect_used,
            reason = "made once, when the daemon starts, from what is written above; one without its resolver would lead anywhere"
        )]
        let client = builder.build().expect("a client");
        Self { client, refused }
    }

    /// Whether a base may be asked, as far as its URL tells: a name is looked up when it is called, and looked at again then.
    pub(super) fn check(&self, base: &str) -> Result<(), ApiError> {
        let url = Url::parse(base).map_err(|_| {
            ApiError::invalid("externalBaseUrl", "`externalBaseUrl`: not a URL")
                .hint("`http(s)://host[/path]`")
        })?;
        // As the client reads it, which does not ask its resolver for what is an address.
        let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
        let what = host.parse().ok().and_then(|ip| (self.refused)(ip));
        what.map_or(Ok(()), |what| Err(external_refused(what)))
    }

    /// Serves the requests of one connection.
    pub(super) async fn serve(&self, wiring: &Wiring, stream: impl AsyncRead + AsyncWrite + Unpin) {
        let Some(base) = wiring.external_base_url.clone() else { return };
        let service = hyper::service::service_fn(|request| self.pass_on(&base, request));
        let served = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_MAX)
            .serve_connection(TokioIo::new(stream), service);
        if let Err(error) = served.await {
            tracing::debug!(%error, "services: a connection to an external service broke");
        }
    }

    /// A connection that is served so, from within this process.
    pub(super) fn connect(&self, wiring: Wiring) -> DuplexStream {
        let (near, far) = tokio::io::duplex(PIPE_BYTES);
        let external = self.clone();
        tokio::spawn(async move { external.serve(&wiring, far).await });
        near
    }

    async fn pass_on(
        &self,
        base: &str,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Infallible> {
        let (mut parts, body) = request.into_parts();
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        // `*` would become a part of the host's name.
        let url = format!("{base}{}", if path.starts_with('/') { path } else { "/" });
        if let Err(error) = self.check(&url) {
            return Ok(bad_gateway(format!("not asked: {}\n", error.error)));
        }
        for name in HOP_BY_HOP.iter().chain([&HOST]) {
            parts.headers.remove(name);
        }
        let mut asked = self.client.request(parts.method, url).headers(parts.headers);
        if !hyper::body::Body::is_end_stream(&body) {
            asked = asked.body(reqwest::Body::wrap_stream(BodyDataStream::new(body)));
        }
        let answered = match asked.send().await {
            Ok(answered) => answered,
            Err(error) => {
                tracing::debug!(%error, "services: an external service does not answer");
                return Ok(unreachable(base, &error));
            }
        };
        Ok(passed_back(answered))
    }
}

impl std::fmt::Debug for External {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("External").finish_non_exhaustive()
    }
}

fn passed_back(answered: reqwest::Response) -> Response<Body> {
    let mut response = Response::new(());
    *response.status_mut() = answered.status();
    *response.headers_mut() = answered.headers().clone();
    for name in HOP_BY_HOP {
        response.headers_mut().remove(name);
    }
    let body = StreamBody::new(answered.bytes_stream().map_ok(Frame::data));
    response.map(|()| BodyExt::boxed(body))
}

fn unreachable(base: &str, error: &reqwest::Error) -> Response<Body> {
    let why = if error.is_connect() { "takes no connection" } else { "does not answer" };
    bad_gateway(format!("the external base {base} of this box {why}: {}\n", cause(error)))
}

fn bad_gateway(text: String) -> Response<Body> {
    let body = Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed();
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response
}

/// What lies at the bottom of an error: the rest is how it came up.
fn cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// Looks names up as this host does, without what no base is at: what a base may not say by its number it cannot say by a name either.
struct Elsewhere(Arc<Refused>);

impl Resolve for Elsewhere {
    fn resolve(&self, name: Name) -> Resolving {
        let refused = Arc::clone(&self.0);
        Box::pin(async move {
            let mut why = None;
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let found: Vec<SocketAddr> = found
                .filter(|at| {
                    let what = refused(at.ip());
                    why = why.or(what);
                    what.is_none()
                })
                .collect();
            if found.is_empty() {
                let what = why.unwrap_or("no machine");
                return Err(format!("it leads to {what}, which boxes do not reach").into());
            }
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};

    use super::*;

    /// How long a test waits for what must happen.
    const PATIENCE: Duration = Duration::from_secs(30);

    /// Asks an external base for `/` and gives the whole answer.
    async fn ask(external: &External, base: &str) -> String {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let wiring = Wiring { wires: Vec::new(), external_base_url: Some(base.to_owned()) };
        let mut asking = external.connect(wiring);
        let request = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        asking.write_all(request.as_bytes()).await.expect("asked");
        let mut answer = String::new();
        asking.read_to_string(&mut answer).await.expect("an answer");
        answer
    }

    /// Answers one request and does not end the connection.
    fn answer(stream: &mut TcpStream) {
        stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
        let (mut head, mut byte) = (Vec::new(), [0]);
        while !head.ends_with(b"\r\n\r\n") {
            stream.read_exact(&mut byte).expect("a request");
            head.push(byte[0]);
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nthere").expect("answered");
    }

    /// Lets a test be the external base itself.
    fn anywhere() -> External {
        External::but(Arc::new(|_| None))
    }

    fn elsewhere() -> External {
        let prefix = "fd12:3456:789a::".parse().expect("a prefix");
        External::new(Subnet::new([10, 118, 0, 0].into()).with_ipv6(Some(prefix)))
    }

    #[tokio::test]
    async fn t11_a_connection_to_the_external_base_is_not_kept_for_long() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let base = format!("http://{}", listener.local_addr().expect("its address"));
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            answer(&mut stream);
            answer(&mut stream);
            // Its end, in time.
            let ended = stream.read(&mut [0]);
            drop(stream.shutdown(Shutdown::Both));
            ended.map_err(|error| error.kind())
        });
        let external = anywhere();
        for _ in 0..2 {
            assert!(ask(&external, &base).await.ends_with("there"), "over one connection");
        }
        let ended = tokio::task::spawn_blocking(|| server.join().expect("no panic")).await;
        assert_eq!(ended.expect("waited"), Ok(0));
    }

    #[tokio::test]
    async fn t11_why_the_external_base_is_not_reached_is_told() {
        let closed = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = closed.local_addr().expect("its address");
        drop(closed);
        let answer = ask(&anywhere(), &format!("http://{address}")).await;
        assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
        assert!(answer.contains("takes no connection: Connection refused"), "{answer}");
        let answer = ask(&elsewhere(), "http://localhost:1").await;
        assert!(answer.contains("it leads to this host itself, which boxes do not"), "{answer}");
    }

    #[tokio::test]
    async fn t11_a_name_that_leads_to_this_host_itself_is_no_external_base() {
        let resolver = Elsewhere(elsewhere().refused);
        for name in ["localhost", "ip6-localhost"] {
            let found = resolver.resolve(name.parse().expect("a name")).await;
            assert!(found.is_err(), "{name}");
        }
    }

    /// A listener that stands for this host: it is never asked, however its address is written.
    #[tokio::test]
    async fn t11_however_it_is_written_a_base_leads_neither_to_this_host_nor_to_its_guests() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("asked without waiting");
        let port = listener.local_addr().expect("its address").port();
        let external = elsewhere();
        for host in [
            "127.0.0.1",
            "2130706433",
            "0x7f000001",
            "127.1",
            "0177.0.0.1",
            "127.0.0.1.",
            "0",
            "[::ffff:127.0.0.1]",
            "[::1]",
            "2852039166",
            "0xa9fea9fe",
            "10.118.0.1",
            "10.118.0.2",
            "10.7733250",
            "0x0a760002",
            "[::ffff:10.118.0.1]",
            "[64:ff9b::10.118.0.2]",
            "[fd12:3456:789a::1]",
            "[FD12:3456:789a:0::2]",
            "198.18.0.1",
        ] {
            let base = format!("http://{host}:{port}");
            let error = external.check(&base).expect_err(&base);
            assert_eq!(error.field.as_deref(), Some("externalBaseUrl"), "{base}");
            // Also where it was stored before that was looked at.
            let answer = ask(&external, &base).await;
            assert!(answer.starts_with("HTTP/1.1 502"), "{base}: {answer}");
            assert!(answer.contains("not asked: "), "{base}: {answer}");
        }
        let asked = listener.accept().map_err(|error| error.kind());
        assert_eq!(asked.expect_err("nobody came"), std::io::ErrorKind::WouldBlock);
        for host in ["10.119.0.2", "10.1.2.3", "192.168.1.1", "[fd12:3456:789b::1]", "x.test"] {
            external.check(&format!("http://{host}/a")).expect(host);
        }
    }
}
