//! Services in external mode: each HTTP request goes to the external base, with its path kept and its `Host` rewritten (T11).

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use api::boxes::wiring::Wiring;
use futures_util::TryStreamExt;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyDataStream, BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{CONNECTION, HOST, HeaderName, TE, TRAILER, TRANSFER_ENCODING, UPGRADE};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream};

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

/// Serves the requests of one connection.
pub(super) async fn serve(wiring: &Wiring, stream: impl AsyncRead + AsyncWrite + Unpin) {
    let Some(base) = wiring.external_base_url.clone() else { return };
    let service = hyper::service::service_fn(|request| pass_on(&base, request));
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_MAX)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = served.await {
        tracing::debug!(%error, "services: a connection to an external service broke");
    }
}

/// A connection that is served so, from within this process.
pub(super) fn connect(wiring: Wiring) -> DuplexStream {
    let (near, far) = tokio::io::duplex(PIPE_BYTES);
    tokio::spawn(async move { serve(&wiring, far).await });
    near
}

async fn pass_on(base: &str, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let (mut parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    for name in HOP_BY_HOP.iter().chain([&HOST]) {
        parts.headers.remove(name);
    }
    let mut asked = client().request(parts.method, format!("{base}{path}")).headers(parts.headers);
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
    let mut response = Response::new(());
    *response.status_mut() = answered.status();
    *response.headers_mut() = answered.headers().clone();
    for name in HOP_BY_HOP {
        response.headers_mut().remove(name);
    }
    let body = StreamBody::new(answered.bytes_stream().map_ok(Frame::data));
    Ok(response.map(|()| BodyExt::boxed(body)))
}

fn unreachable(base: &str, error: &reqwest::Error) -> Response<Body> {
    let why = if error.is_connect() { "takes no connection" } else { "does not answer" };
    let text = format!("the external base {base} of this box {why}: {}\n", cause(error));
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

/// One client for all: what it keeps open is shared.
fn client() -> reqwest::Client {
    static CLIENT: OnceLock<reqwest::Client> = OnceLock::new();
    let make = || {
        let builder = reqwest::Client::builder()
            .connect_timeout(CONNECT_MAX)
            .pool_idle_timeout(KEPT_TIME_MAX)
            // A redirect is the caller's to follow, and what the host's environment says is not the guests'.
            .redirect(reqwest::redirect::Policy::none())
            .dns_resolver(Arc::new(Elsewhere))
            .no_proxy();
        builder.build().unwrap_or_default()
    };
    CLIENT.get_or_init(make).clone()
}

/// Looks names up as this host does, without what leads back to it by its loopback or to its own link: what a base may not say by
/// its number it cannot say by a name either.
struct Elsewhere;

impl Resolve for Elsewhere {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let found: Vec<SocketAddr> = found.filter(|at| leads_elsewhere(at.ip())).collect();
            if found.is_empty() {
                return Err("it leads to this host itself, or nowhere".into());
            }
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

fn leads_elsewhere(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => !(ip.is_loopback() || ip.is_unspecified() || ip.is_link_local()),
        IpAddr::V6(ip) => !(ip.is_loopback() || ip.is_unspecified() || ip.is_unicast_link_local()),
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
    async fn ask(base: &str) -> String {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let wiring = Wiring { wires: Vec::new(), external_base_url: Some(base.to_owned()) };
        let mut asking = connect(wiring);
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
        for _ in 0..2 {
            assert!(ask(&base).await.ends_with("there"), "over one connection");
        }
        let ended = tokio::task::spawn_blocking(|| server.join().expect("no panic")).await;
        assert_eq!(ended.expect("waited"), Ok(0));
    }

    #[tokio::test]
    async fn t11_why_the_external_base_is_not_reached_is_told() {
        let closed = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = closed.local_addr().expect("its address");
        drop(closed);
        let answer = ask(&format!("http://{address}")).await;
        assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
        assert!(answer.contains("takes no connection: Connection refused"), "{answer}");
        let answer = ask("http://localhost:1").await;
        assert!(answer.contains("it leads to this host itself, or nowhere"), "{answer}");
    }

    #[tokio::test]
    async fn t11_a_name_that_leads_to_this_host_itself_is_no_external_base() {
        for name in ["localhost", "ip6-localhost"] {
            let found = Elsewhere.resolve(name.parse().expect("a name")).await;
            assert!(found.is_err(), "{name}");
        }
        for (ip, elsewhere) in [
            ("127.8.9.1", false),
            ("0.0.0.0", false),
            ("169.254.169.254", false),
            ("::1", false),
            ("::ffff:127.0.0.1", false),
            ("fe80::1", false),
            ("10.1.2.3", true),
            ("2001:db8::1", true),
        ] {
            assert_eq!(leads_elsewhere(ip.parse().expect("an address")), elsewhere, "{ip}");
        }
    }
}
