//! By which names it may be called. A page in a browser can make a name of its own lead here (DNS rebinding); no such name is ours.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::task::{Context, Poll};

use api::{ApiError, Code};
use axum::body::Body;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Request, Uri, header};
use axum::response::{IntoResponse, Response};
use futures_util::future::BoxFuture;
use tower::Service;

use super::envelope;
use crate::failure::Failure;

/// The names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hosts(Arc<Vec<String>>);

impl Hosts {
    /// Those of the public URL, the domain, the listen address, and this machine's own name for itself.
    pub(crate) fn new(public_url: Option<&str>, domain: &str, listen: &str) -> Self {
        let public = public_url.and_then(|url| url.split_once("://")).map(|(_, rest)| rest);
        let names = [public, Some(domain), Some(listen), Some("localhost")];
        Self(Arc::new(names.into_iter().flatten().map(name).collect()))
    }

    /// Whether a `Host` header names us. An address is no name, and nobody can make it lead elsewhere.
    fn has(&self, host: &str) -> bool {
        let name = name(host);
        let address = name.trim_matches(['[', ']']);
        self.0.contains(&name) || address.parse::<IpAddr>().is_ok()
    }
}

/// A host's name without port and path.
fn name(host: &str) -> String {
    let host = host.split('/').next().unwrap_or(host);
    // An IPv6 address has colons itself, within brackets.
    let end = host.rfind(']').map_or(0, |end| end + 1);
    let port = host[end..].find(':').map_or(host.len(), |colon| end + colon);
    host[..port].trim_end_matches('.').to_ascii_lowercase()
}

/// The name that a client has written: in HTTP/2, and in an absolute request line, it is part of the address.
pub(super) fn written<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> Option<&'a str> {
    let host = || headers.get(header::HOST).and_then(|host| host.to_str().ok());
    uri.authority().map(Authority::as_str).or_else(host)
}

/// A service that answers to these names only, and reads messages only.
#[derive(Clone)]
pub(crate) struct Guarded<S> {
    service: S,
    hosts: Hosts,
}

impl<S> Guarded<S> {
    pub(super) fn new(service: S, hosts: Hosts) -> Self {
        Self { service, hosts }
    }
}

impl<S> Service<Request<Body>> for Guarded<S>
where
    S: Service<Request<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Response: IntoResponse,
    S::Future: Send + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let written = written(request.uri(), request.headers());
        if !written.is_some_and(|host| self.hosts.has(host)) {
            let host =
                written.unwrap_or_default().chars().take(NAME_CHARS_TOLD).collect::<String>();
            let error = ApiError::new(
                Code::PermissionDenied,
                format!("`{host}` is not a name of this daemon"),
            )
            .hint("`dormouse serve --public-url` says by which name it is called from outside");
            return Box::pin(async move { Ok(Failure::from(error).into_response()) });
        }
        let other = self.service.clone();
        // The one that is ready.
        let mut service = std::mem::replace(&mut self.service, other);
        Box::pin(async move {
            let request = match envelope::read(request).await {
                Ok(request) => request,
                Err(refused) => return Ok(refused),
            };
            let Ok(answer) = service.call(request).await;
            Ok(answer.into_response())
        })
    }
}

/// Most characters of a wrong name that are repeated.
const NAME_CHARS_TOLD: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_ours() {
        let hosts =
            Hosts::new(Some("https://Dormouse.example:8443/"), "boxes.test", "127.0.0.1:8420");
        for ours in [
            "dormouse.example",
            "dormouse.example:1",
            "DORMOUSE.example.",
            "boxes.test:8420",
            "localhost",
            "localhost:8420",
            "127.0.0.1:8420",
            "10.1.2.3:8420",
            "[::1]:8420",
            "[fd00::1]",
        ] {
            assert!(hosts.has(ours), "{ours}");
        }
        for other in
            ["evil.test", "localhost.evil.test", "x.dormouse.example", "", "127.0.0.1.evil.test"]
        {
            assert!(!hosts.has(other), "{other}");
        }
    }
}
