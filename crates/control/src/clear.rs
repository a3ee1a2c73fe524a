//! What of a request must have one meaning only. Two would let a proxy before us, and a server behind us, disagree with us on
//! whose request it is, or where it ends (RFC 9112, 3.2 and 11.2).
//!
//! The rest of that is the HTTP library's: it refuses lengths that differ or are no numbers, ends a connection after a request
//! with both a length and chunks, of which it takes the chunks alone, and refuses names and values with line breaks in them.

use api::{ApiError, Code};
use axum::http::{Method, Request, Version, header};

/// Most characters of a method. The longest that is registered has 17.
const METHOD_CHARS_MAX: usize = 32;

/// Refuses `TRACE`, for a server in a sandbox. The interface's own paths refuse it as any method that they do not have.
pub(crate) fn no_trace<B>(request: &Request<B>) -> Result<(), ApiError> {
    if *request.method() == Method::TRACE {
        return Err(ApiError::new(Code::MethodNotAllowed, "`TRACE` is not answered")
            .hint("it would tell a page what its browser sends besides"));
    }
    Ok(())
}

/// Refuses what could be understood in two ways.
pub(crate) fn check<B>(request: &Request<B>) -> Result<(), ApiError> {
    one_host(request)?;
    if request.method().as_str().len() > METHOD_CHARS_MAX {
        let text = format!("the method has over {METHOD_CHARS_MAX} characters");
        return Err(ApiError::invalid("method", text));
    }
    let path = request.uri().path();
    let whole = path == "*" && *request.method() == Method::OPTIONS;
    if !path.starts_with('/') && !whole && *request.method() != Method::CONNECT {
        return Err(ApiError::invalid("path", "the path does not begin with `/`"));
    }
    // Checked by the library as to its end; what stands before that would be lost on whoever comes after us.
    let mut codings = request.headers().get_all(header::TRANSFER_ENCODING).iter();
    let first = codings.next().map(|value| value.as_bytes().trim_ascii());
    let plain = first.is_none_or(|value| value.eq_ignore_ascii_case(b"chunked"));
    if !plain || codings.next().is_some() {
        return Err(ApiError::invalid(
            "Transfer-Encoding",
            "the transfer encoding is not `chunked` alone",
        ));
    }
    Ok(())
}

/// Whose request it is.
fn one_host<B>(request: &Request<B>) -> Result<(), ApiError> {
    let invalid = |text: &str| ApiError::invalid("Host", text);
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let given = hosts.next();
    let authority = request.uri().authority();
    if hosts.next().is_some() {
        return Err(invalid("there is more than one `Host` header"));
    }
    let Some(given) = given else {
        if authority.is_none() && request.version() >= Version::HTTP_11 {
            return Err(invalid("there is no `Host` header"));
        }
        return match authority {
            Some(authority) if !is_host(authority.as_str()) => Err(not_a_host()),
            _ => Ok(()),
        };
    };
    let host = given.to_str().ok().filter(|host| is_host(host)).ok_or_else(not_a_host)?;
    let Some(authority) = authority else { return Ok(()) };
    if !is_host(authority.as_str()) {
        return Err(not_a_host());
    }
    // In HTTP/1.1 an absolute request line goes before the header (RFC 9112, 3.2.2); HTTP/2 has one of them, or the same twice.
    if request.version() > Version::HTTP_11 && !authority.as_str().eq_ignore_ascii_case(host) {
        return Err(invalid("the `Host` header and the request's address name different hosts"));
    }
    Ok(())
}

fn not_a_host() -> ApiError {
    ApiError::invalid("Host", "the `Host` header is not a host's name")
        .hint("a name or an address, with `:` and a port where it is not the usual one")
}

/// Whether this is a name or an address, with or without a port, and nothing else.
fn is_host(text: &str) -> bool {
    let (name, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let Some((address, after)) = rest.split_once(']') else { return false };
            if address.parse::<std::net::Ipv6Addr>().is_err() {
                return false;
            }
            match after.strip_prefix(':') {
                Some(port) => ("", Some(port)),
                None if after.is_empty() => return true,
                None => return false,
            }
        }
        None => match text.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (text, None),
        },
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    let right_port = |port: &str| {
        port.bytes().all(|byte| byte.is_ascii_digit())
            && (port.is_empty() || port.parse::<u16>().is_ok())
    };
    (text.starts_with('[') || !name.is_empty() && name.bytes().all(plain))
        && port.is_none_or(right_port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t19_what_a_host_is() {
        for right in [
            "localhost",
            "a-b.example:8420",
            "A_b.Example.",
            "10.0.0.1:1",
            "[::1]",
            "[fd00::1]:8420",
            "x:",
        ] {
            assert!(is_host(right), "{right}");
        }
        for wrong in [
            "", ":80", "a b", "a/x", "user@a", "a,b", "a:1:2", "a:99999", "a:+1", "[::1", "[::1]x",
            "[a]", "::1", "h\u{e9}", "a%00",
        ] {
            assert!(!is_host(wrong), "{wrong}");
        }
    }

    /// What is refused: its field.
    fn refused(request: axum::http::request::Builder) -> Option<String> {
        check(&request.body(()).unwrap()).err().map(|error| error.field.unwrap_or_default())
    }

    #[test]
    fn t19_what_has_two_meanings_is_refused_by_its_name() {
        let get = |uri: &str| Request::builder().uri(uri).header("host", "a.example:1");
        assert_eq!(refused(get("/")), None);
        assert_eq!(refused(get("http://a.example:1/")), None);
        assert_eq!(refused(get("http://A.Example:1/")), None);
        assert_eq!(refused(get("http://b.example/")), None, "it goes before the header");
        assert_eq!(refused(get("*").method("OPTIONS")), None);
        assert_eq!(refused(get("/").header("transfer-encoding", "Chunked")), None);
        for (request, field) in [
            (get("http://b.example/").version(Version::HTTP_2), "Host"),
            (get("http://user@a.example/"), "Host"),
            (get("/").header("host", "a.example:1"), "Host"),
            (Request::builder().uri("/"), "Host"),
            (Request::builder().uri("http://user@a.example/"), "Host"),
            (get("*"), "path"),
            (get("/").method("X".repeat(33).as_str()), "method"),
            (get("/").header("transfer-encoding", "chunked, chunked"), "Transfer-Encoding"),
            (
                get("/")
                    .header("transfer-encoding", "chunked")
                    .header("transfer-encoding", "chunked"),
                "Transfer-Encoding",
            ),
        ] {
            assert_eq!(refused(request).as_deref(), Some(field));
        }
        assert_eq!(refused(get("/").method("TRACE")).as_deref(), None);
    }

    #[test]
    fn t19_trace_is_refused_for_servers_in_sandboxes() {
        let answered =
            |method: &str| no_trace(&Request::builder().method(method).body(()).unwrap());
        assert_eq!(answered("TRACE").expect_err("refused").code, Code::MethodNotAllowed);
        for other in ["GET", "OPTIONS", "PROPFIND", "trace"] {
            assert_eq!(answered(other), Ok(()), "{other}: methods are told apart by case");
        }
    }
}
