//! A small client over real sockets, and a control plane of the test's own.

use std::net::SocketAddr;
use std::sync::Arc;

use api::sandbox::Sandbox;
use api::{ApiError, Event};
use bytes::Bytes;
use control::{EdgeLimits, Server, Settings};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::fake::Fake;

/// A control plane over a fake host, on a port of its own.
pub(crate) struct World {
    pub(crate) fake: Arc<Fake>,
    pub(crate) data: TempDir,
    pub(crate) server: Option<Server>,
    pub(crate) token: String,
    pub(crate) address: SocketAddr,
    _root: TempDir,
}

/// An answer, read to its end.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: hyper::HeaderMap,
    pub(crate) body: Bytes,
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with(EdgeLimits::default()).await
    }

    pub(crate) async fn with(edge: EdgeLimits) -> Self {
        let (root, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let fake = Fake::new(root.path());
        let server = start(&fake, &data, edge).await;
        let token = std::fs::read_to_string(data.path().join(control::ADMIN_TOKEN_FILE))
            .unwrap()
            .trim()
            .to_owned();
        Self { fake, data, address: server.address(), server: Some(server), token, _root: root }
    }

    /// Stops the control plane and starts it again, over the same host.
    pub(crate) async fn restart(&mut self) {
        self.server.take().unwrap().stop().await;
        let server = start(&self.fake, &self.data, EdgeLimits::default()).await;
        self.address = server.address();
        self.server = Some(server);
    }

    /// A connection to the listener.
    pub(crate) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// One request with the token.
    pub(crate) async fn call(&self, method: &str, path: &str, body: impl Into<Bytes>) -> Answer {
        self.send(self.request(method, path).body(Full::new(body.into())).unwrap()).await
    }

    pub(crate) fn request(&self, method: &str, path: &str) -> hyper::http::request::Builder {
        let authorization = format!("Bearer {}", self.token);
        Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("authorization", authorization)
    }

    pub(crate) async fn send<B>(&self, request: Request<B>) -> Answer
    where
        B: hyper::body::Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        Answer::read(self.open(request).await).await
    }

    /// Sends a request and answers before the body has arrived.
    pub(crate) async fn open<B>(&self, request: Request<B>) -> Response<Incoming>
    where
        B: hyper::body::Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        send_over(self.connect().await, request).await
    }

    /// Makes a sandbox of this name.
    pub(crate) async fn sandbox(&self, name: &str) -> Sandbox {
        let answer = self.call("POST", "/v1/sandboxes", format!(r#"{{"name": "{name}"}}"#)).await;
        assert_eq!(answer.status, 201, "{:?}", answer.body);
        answer.json()
    }

    /// The host name of a link.
    pub(crate) async fn link(&self, name: &str, port: u16) -> String {
        let link: api::sandbox::Link =
            self.call("GET", &format!("/v1/sandboxes/{name}/links/{port}"), "").await.json();
        link.url.strip_prefix("http://").unwrap().trim_end_matches('/').to_owned()
    }
}

pub(crate) async fn start(fake: &Arc<Fake>, data: &TempDir, edge: EdgeLimits) -> Server {
    let settings = Settings { edge, ..settings(data) };
    control::serve(Arc::clone(fake) as _, settings).await.unwrap()
}

/// A control plane on any free port, with everything as it is unless said otherwise.
pub(crate) fn settings(data: &TempDir) -> Settings {
    Settings {
        data: data.path().to_owned(),
        listen: "127.0.0.1:0".into(),
        domain: "localhost".into(),
        public_url: None,
        edge: EdgeLimits::default(),
        boxes: control::BoxSettings::default(),
        tls: None,
        trusted_proxies: Vec::new(),
        open_metrics: false,
        follow_max: None,
    }
}

/// One request over a connection of its own.
pub(crate) async fn send_over<S, B>(stream: S, request: Request<B>) -> Response<Incoming>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
    B: hyper::body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let (mut sender, wire) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(wire.with_upgrades());
    sender.send_request(request).await.unwrap()
}

impl Answer {
    pub(crate) async fn read(response: Response<Incoming>) -> Self {
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Self { status: head.status.as_u16(), headers: head.headers, body }
    }

    pub(crate) fn json<T: DeserializeOwned>(&self) -> T {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?}", self.body))
    }

    /// Status, code, field and sentence of an error.
    pub(crate) fn error(&self) -> String {
        let error: ApiError = self.json();
        assert_eq!(error.code.status(), self.status, "{error:?}");
        let code = serde_json::to_value(error.code).unwrap();
        let field = error.field.map(|field| format!(" {field}")).unwrap_or_default();
        format!("{} {}{field}: {}", self.status, code.as_str().unwrap(), error.error)
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(crate) fn value(&self) -> Value {
        self.json()
    }
}

/// Reads server-sent events one by one.
pub(crate) struct Sse {
    body: Incoming,
    text: String,
}

impl Sse {
    pub(crate) fn new(response: Response<Incoming>) -> Self {
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self { body: response.into_body(), text: String::new() }
    }

    /// Id and event; `None`: the stream has ended.
    pub(crate) async fn next(&mut self) -> Option<(String, Event)> {
        let (id, _, data) = self.next_raw().await?;
        Some((id, serde_json::from_value(data).unwrap()))
    }

    /// Id, name and data.
    pub(crate) async fn next_raw(&mut self) -> Option<(String, String, Value)> {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| {
                    block.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned)
                };
                let told = field("data: ").map(|data| {
                    let data = serde_json::from_str(&data).unwrap();
                    (field("id: ").unwrap(), field("event: ").unwrap(), data)
                });
                let rest = rest.to_owned();
                self.text = rest;
                if told.is_some() {
                    return told;
                }
                continue;
            }
            let frame = self.body.frame().await?.unwrap();
            self.text.push_str(std::str::from_utf8(&frame.into_data().unwrap()).unwrap());
        }
    }
}
