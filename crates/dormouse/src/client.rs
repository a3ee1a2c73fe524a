//! Talking to the daemon, over its local socket or over the network.

use std::path::{Path, PathBuf};

use api::ApiError;
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::http::Uri;
use hyper::http::request::Builder;
use hyper::upgrade::Upgraded;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite;

use crate::cli::ConnectionArgs;
use crate::problem::Problem;
use crate::tls::Tls;

/// Most bytes of an error's body that are read.
const ERROR_BYTES_MAX: usize = 64 * 1024;

/// A body of a request.
pub(crate) type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// A connection's bytes.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// The daemon. Each request has a connection of its own.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    endpoint: Endpoint,
    /// Whose boxes it is about, unless it is whom the token is for.
    account: Option<String>,
}

#[derive(Clone, Debug)]
enum Endpoint {
    Socket(PathBuf),
    Tcp { authority: String, address: String, token: String, tls: Option<Tls> },
}

impl Client {
    /// The daemon that the options and the environment name.
    pub(crate) fn new(arguments: &ConnectionArgs) -> Result<Self, Problem> {
        let endpoint = match &arguments.url {
            None => Endpoint::Socket(
                arguments
                    .socket
                    .clone()
                    .unwrap_or_else(|| arguments.data.join(control::SOCKET_FILE)),
            ),
            Some(url) => {
                let not_a_url = || {
                    Problem::usage(format!("`{url}` is not a URL of a daemon"))
                        .hint("such as `http://localhost:8420` or `https://dormouse.example`")
                };
                let uri: Uri = url.parse().map_err(|_| not_a_url())?;
                let authority = uri.authority().ok_or_else(not_a_url)?;
                if !matches!(uri.path(), "" | "/") {
                    return Err(not_a_url());
                }
                let (tls, port) = match uri.scheme_str() {
                    Some("http") => (None, 80),
                    Some("https") => {
                        (Some(Tls::to(authority.host(), arguments.ca.as_deref())?), 443)
                    }
                    _ => return Err(not_a_url()),
                };
                let token = arguments.token.clone().ok_or_else(|| {
                    Problem::usage("a token is needed with a URL")
                        .hint("set `DORMOUSE_TOKEN`; the first one is in `admin.token` in the daemon's data folder")
                })?;
                let address =
                    format!("{}:{}", authority.host(), authority.port_u16().unwrap_or(port));
                Endpoint::Tcp { authority: authority.to_string(), address, token, tls }
            }
        };
        Ok(Self { endpoint, account: arguments.account.clone() })
    }

    /// A request with JSON that is answered with JSON.
    pub(crate) async fn json<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, Problem> {
        let body = body.map_or(Ok(Vec::new()), serde_json::to_vec);
        let body =
            body.map_err(|error| Problem::new(format!("cannot write the request: {error}")))?;
        let request = self.request(method, path).header("content-type", "application/json");
        read_json(self.send(request, full(body)).await?).await
    }

    /// A request without a body that is answered with JSON.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Problem> {
        self.json("GET", path, None::<&()>).await
    }

    /// The beginning of a request.
    pub(crate) fn request(&self, method: &str, path: &str) -> Builder {
        let mut builder = Request::builder().method(method).uri(path);
        if let Some(account) = &self.account {
            builder = builder.header("x-dormouse-account", account);
        }
        match &self.endpoint {
            Endpoint::Socket(_) => builder.header("host", "localhost"),
            Endpoint::Tcp { authority, token, .. } => {
                builder.header("host", authority).header("authorization", format!("Bearer {token}"))
            }
        }
    }

    /// Sends it; an answer that is no success is the problem it tells.
    pub(crate) async fn send(
        &self,
        request: Builder,
        body: Body,
    ) -> Result<Response<Incoming>, Problem> {
        let request = request
            .body(body)
            .map_err(|error| Problem::usage(format!("cannot send this: {error}")))?;
        let stream = self.connect().await?;
        let broke = |error: hyper::Error| self.broke(&error);
        let (mut sender, wire) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broke)?;
        // Ends with the request and its answer, which tell of any error.
        tokio::spawn(wire);
        let response = sender.send_request(request).await.map_err(broke)?;
        if response.status().is_success() { Ok(response) } else { Err(refusal(response).await) }
    }

    /// Changes a connection to another protocol; from then on its bytes are that protocol's.
    pub(crate) async fn upgrade(&self, path: &str, protocol: &str) -> Result<Upgraded, Problem> {
        let request = self
            .request("GET", path)
            .header("connection", "Upgrade")
            .header("upgrade", protocol)
            .body(full(""))
            .map_err(|error| Problem::usage(format!("cannot send this: {error}")))?;
        let stream = self.connect().await?;
        let broke = |error: hyper::Error| self.broke(&error);
        let (mut sender, wire) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broke)?;
        tokio::spawn(wire.with_upgrades());
        let response = sender.send_request(request).await.map_err(broke)?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(refusal(response).await);
        }
        hyper::upgrade::on(response).await.map_err(broke)
    }

    /// Opens a WebSocket.
    pub(crate) async fn web_socket(
        &self,
        path: &str,
    ) -> Result<WebSocketStream<Box<dyn Stream>>, Problem> {
        let stream = self.connect().await?;
        let host = match &self.endpoint {
            Endpoint::Socket(_) => "localhost",
            Endpoint::Tcp { authority, .. } => authority,
        };
        let mut request = tungstenite::client::IntoClientRequest::into_client_request(format!(
            "ws://{host}{path}"
        ))
        .map_err(|error| Problem::usage(format!("cannot send this: {error}")))?;
        if let Endpoint::Tcp { token, .. } = &self.endpoint {
            let value = format!("Bearer {token}")
                .parse()
                .map_err(|_| Problem::usage("the token is not plain text"))?;
            request.headers_mut().insert("authorization", value);
        }
        match tokio_tungstenite::client_async(request, stream).await {
            Ok((socket, _)) => Ok(socket),
            Err(tungstenite::Error::Http(response)) => {
                let status = response.status();
                let error = response
                    .into_body()
                    .and_then(|body| serde_json::from_slice::<ApiError>(&body).ok());
                Err(error.map_or_else(
                    || Problem::new(format!("the daemon answered {status}")),
                    Problem::from,
                ))
            }
            Err(error) => Err(self.broke(&error)),
        }
    }

    /// A connection that was there broke before it had brought an answer.
    fn broke(&self, error: &dyn std::error::Error) -> Problem {
        let text = format!("the connection to the daemon broke: {}", with_sources(error));
        let problem = Problem::unreachable(text);
        match &self.endpoint {
            // So it looks from here when the other side speaks TLS.
            Endpoint::Tcp { authority, tls: None, .. } => problem.hint(format!(
                "does the daemon serve HTTPS there? Then it is `--url https://{authority}`"
            )),
            _ => problem,
        }
    }

    async fn connect(&self) -> Result<Box<dyn Stream>, Problem> {
        match &self.endpoint {
            Endpoint::Socket(path) => match connect_local(path).await {
                Ok(stream) => Ok(Box::new(stream)),
                Err(error) => {
                    let place = path.display();
                    let problem = Problem::unreachable(format!(
                        "cannot reach the daemon at {place}: {error}"
                    ));
                    Err(problem.hint(if error.kind() == std::io::ErrorKind::PermissionDenied {
                        "run this as the user whose daemon it is"
                    } else {
                        "is `dormouse serve` running? `--data` or `DORMOUSE_DATA` says where its data folder is"
                    }))
                }
            },
            Endpoint::Tcp { address, tls, .. } => match TcpStream::connect(address).await {
                Ok(stream) => {
                    // Only slower without.
                    let _ = stream.set_nodelay(true);
                    match tls {
                        None => Ok(Box::new(stream)),
                        Some(tls) => Ok(Box::new(Box::pin(tls.over(stream, address)).await?)),
                    }
                }
                Err(error) => Err(Problem::unreachable(format!(
                    "cannot reach the daemon at {address}: {error}"
                ))
                .hint("is `dormouse serve` running there?")),
            },
        }
    }
}

async fn connect_local(path: &Path) -> std::io::Result<UnixStream> {
    let way = control::SocketPath::to(path)?;
    UnixStream::connect(way.path()).await
}

/// Reads a body as JSON.
pub(crate) async fn read_json<T: DeserializeOwned>(
    response: Response<Incoming>,
) -> Result<T, Problem> {
    let body = response.into_body().collect().await.map_err(cut)?.to_bytes();
    serde_json::from_slice(&body).map_err(|error| {
        Problem::new(format!("the daemon's answer is not understood: {error}"))
            .hint("`dormouse --version` and the daemon's version should be the same")
    })
}

/// A body of known bytes.
pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// The answer ended too early.
#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
pub(crate) fn cut(error: hyper::Error) -> Problem {
    Problem::unreachable(format!("the answer broke off: {}", with_sources(&error)))
}

/// Text that may stand in a path or query.
pub(crate) fn quote(text: &str) -> String {
    use std::fmt::Write as _;
    text.bytes().fold(String::new(), |mut quoted, byte| {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            quoted.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(quoted, "%{byte:02X}");
        }
        quoted
    })
}

async fn refusal(response: Response<Incoming>) -> Problem {
    let status = response.status();
    let body = http_body_util::Limited::new(response.into_body(), ERROR_BYTES_MAX).collect().await;
    let error =
        body.ok().and_then(|body| serde_json::from_slice::<ApiError>(&body.to_bytes()).ok());
    error.map_or_else(|| Problem::new(format!("the daemon answered {status}")), Problem::from)
}

fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text.push_str(": ");
        text.push_str(&source.to_string());
        next = source.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::quote;

    #[test]
    fn quoting() {
        assert_eq!(quote("/a b&c=ü"), "%2Fa%20b%26c%3D%C3%BC");
    }
}
