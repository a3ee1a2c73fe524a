//! What is sent, and what may come back.

use super::{Face, Kind};

/// What may come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Taken in one of two ways that are both right, or refused; and the connection ends after it.
    Ended,
    /// Refused, or the connection ended: nothing of it was done, and nothing after it on the connection.
    Refused,
    /// One answer, whatever it is, and no second one: what follows is no request.
    OneAtMost,
    /// So many good answers.
    Good(usize),
    /// Refused as a body that is wrong, which must be said.
    Named(u16),
}

/// One of them.
#[derive(Clone, Debug)]
pub struct Case {
    /// As the table tells it.
    pub name: &'static str,
    /// What is sent.
    pub bytes: Vec<u8>,
    /// Afterwards it is said that no more will come.
    pub half: bool,
    /// What may come back.
    pub want: Want,
}

/// A request that must never be taken for one.
const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n";
/// Past every limit of a head.
const HUGE: usize = 300 * 1024;

/// Cases for every face.
pub fn everywhere(face: &Face) -> Vec<Case> {
    [
        framing(face),
        lines(face),
        heads(face),
        hosts(face),
        protocols(face),
        paths(face),
        halves(face),
    ]
    .concat()
}

fn case(name: &'static str, bytes: impl Into<Vec<u8>>, want: Want) -> Case {
    Case { name, bytes: bytes.into(), half: false, want }
}

/// Where a body ends must be clear.
fn framing(face: &Face) -> Vec<Case> {
    let post = |name, headers: &str, body: &str, want| {
        case(name, format!("{}{headers}\r\n{body}", face.head("POST")), want)
    };
    let chunked = "Transfer-Encoding: chunked\r\n";
    let smuggling = format!("0\r\n\r\n{SMUGGLED}");
    let refused = Want::Refused;
    let mut cases = vec![
        post("CL before TE", &format!("Content-Length: 4\r\n{chunked}"), &smuggling, Want::Ended),
        post("TE before CL", &format!("{chunked}Content-Length: 4\r\n"), &smuggling, Want::Ended),
        post("CL 0 before TE", &format!("Content-Length: 0\r\n{chunked}"), &smuggling, Want::Ended),
        post("two different CL", "Content-Length: 0\r\nContent-Length: 40\r\n", SMUGGLED, refused),
        post("two different CL in one line", "Content-Length: 0, 40\r\n", SMUGGLED, refused),
        post("two equal CL", "Content-Length: 2\r\nContent-Length: 2\r\n", "{}", Want::OneAtMost),
    ];
    for (name, value) in [
        ("CL with a sign", "+2"),
        ("CL below zero", "-1"),
        ("CL hexadecimal", "0x2"),
        ("CL with a space in it", "2 2"),
        ("CL beyond 64 bits", "99999999999999999999999"),
        ("CL empty", ""),
        ("CL a word", "two"),
    ] {
        cases.push(post(name, &format!("Content-Length: {value}\r\n"), "{}", refused));
    }
    cases.push(post(
        "TE with a line break before it",
        "X: y\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        &smuggling,
        Want::Ended,
    ));
    for (name, header) in [
        ("TE of another name", "Transfer-Encoding: xchunked\r\n"),
        ("TE not chunked at its end", "Transfer-Encoding: chunked, identity\r\n"),
        ("TE identity", "Transfer-Encoding: identity\r\n"),
        ("TE chunked twice", "Transfer-Encoding: chunked, chunked\r\n"),
        (
            "TE in two lines, chunked first",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        ),
        ("TE with a space before the colon", "Transfer-Encoding : chunked\r\n"),
        ("TE with a tab before the colon", "Transfer-Encoding\t: chunked\r\n"),
        ("TE behind a vertical tab", "Transfer-Encoding: \x0bchunked\r\n"),
        ("TE on a continued line", "X: y\r\n Transfer-Encoding: chunked\r\n"),
        ("TE quoted", "Transfer-Encoding: \"chunked\"\r\n"),
        ("TE with a parameter", "Transfer-Encoding: chunked;q=1\r\n"),
        ("TE in a name with a NUL", "Transfer-Encoding\0: chunked\r\n"),
    ] {
        cases.push(post(name, &format!("{header}Content-Length: 4\r\n"), &smuggling, refused));
    }
    for (name, body) in [
        ("chunk's length beyond 64 bits", "fffffffffffffffff\r\nx\r\n0\r\n\r\n".to_owned()),
        ("chunk's length below zero", "-1\r\nx\r\n0\r\n\r\n".to_owned()),
        ("chunk's length with 0x", "0x1\r\nx\r\n0\r\n\r\n".to_owned()),
        ("chunk longer than it says", "1\r\nxyz\r\n0\r\n\r\n".to_owned()),
        ("chunk without a length", "\r\nx\r\n0\r\n\r\n".to_owned()),
        ("chunk's length ends with a bare LF", "1\nx\r\n0\r\n\r\n".to_owned()),
        ("chunk extension of 300 KiB", format!("1;{}\r\nx\r\n0\r\n\r\n", "x".repeat(HUGE))),
        ("chunk extension with a bare LF", format!("1;a\nb\r\nx\r\n0\r\n\r\n{SMUGGLED}")),
        ("trailers of 300 KiB", format!("0\r\nX: {}\r\n\r\n", "x".repeat(HUGE))),
        ("10,000 trailers", format!("0\r\n{}\r\n", "X: y\r\n".repeat(10_000))),
    ] {
        cases.push(post(name, chunked, &body, refused));
    }
    let lengths = "0\r\nContent-Length: 40\r\nHost: other\r\n\r\n";
    cases.push(post("trailers that speak of framing", chunked, lengths, Want::OneAtMost));
    let junk = format!("Content-Length: 0\r\n\r\n\x01\x02 junk\r\n\r\n{SMUGGLED}");
    cases.push(case(
        "junk after the request",
        format!("{}{junk}", face.head("GET")),
        Want::OneAtMost,
    ));
    cases
}

/// How lines end, and what is in them.
fn lines(face: &Face) -> Vec<Case> {
    let get = face.head("GET");
    let refused = Want::Refused;
    let with = |name, header: &str| case(name, format!("{get}{header}\r\n\r\n"), refused);
    vec![
        with("header on a continued line", "X: a\r\n b"),
        with("header that begins with a space", " X: a"),
        with("header without a colon", "nonsense"),
        with("header without a name", ": a"),
        with("header with a space in its name", "X Y: a"),
        with("header with a NUL", "X: a\0b"),
        with("header with a bare CR", "X: a\rSet: b"),
        with("header's name not ASCII", "X\u{e9}: a"),
        case("lines that end with LF alone", get.replace("\r\n", "\n") + "\n", Want::OneAtMost),
        case(
            "lines before the request",
            format!("\r\n\r\n{get}Connection: close\r\n\r\n"),
            Want::OneAtMost,
        ),
        case("a NUL instead of a request", "\0\r\n\r\n", refused),
        case("a megabyte of nothing", vec![0; 1 << 20], refused),
        case("a megabyte of line breaks", "\r\n".repeat(1 << 19), refused),
    ]
}

/// Limits of a head.
fn heads(face: &Face) -> Vec<Case> {
    let get = face.head("GET");
    let line = |path: &str| get.replacen(face.path(), path, 1);
    let refused = Want::Refused;
    let many = |count: usize| {
        let headers: Vec<String> = (0..count).map(|n| format!("X-{n}: y\r\n")).collect();
        headers.concat()
    };
    vec![
        case("request line of 300 KiB", line(&format!("/{}", "x".repeat(HUGE))) + "\r\n", refused),
        case("request line without an end", format!("GET /{}", "x".repeat(HUGE)), refused),
        case("header of 300 KiB", format!("{get}X: {}\r\n\r\n", "x".repeat(HUGE)), refused),
        case("header without an end", format!("{get}X: {}", "x".repeat(HUGE)), refused),
        case("1,000 headers", format!("{get}{}\r\n", many(1000)), refused),
        case("header's name of 300 KiB", format!("{get}{}: y\r\n\r\n", "x".repeat(HUGE)), refused),
        case(
            "method of 10,000 letters",
            get.replacen("GET", &"G".repeat(10_000), 1) + "\r\n",
            refused,
        ),
        case("90 headers", format!("{get}{}Connection: close\r\n\r\n", many(90)), Want::OneAtMost),
    ]
}

/// Whose request it is must have one answer.
fn hosts(face: &Face) -> Vec<Case> {
    let get = face.head("GET");
    let host = format!("Host: {}\r\n", face.host);
    let with = |name, instead: &str, want| {
        case(name, get.replacen(&host, instead, 1) + "Connection: close\r\n\r\n", want)
    };
    let refused = Want::Refused;
    let absolute = |authority: &str| {
        let line = format!("GET {} ", face.path());
        get.replacen(&line, &format!("GET http://{authority}{} ", face.path()), 1)
            + "Connection: close\r\n\r\n"
    };
    vec![
        with("no Host", "", refused),
        with("Host twice", &host.repeat(2), refused),
        with("Host twice, different", &format!("Host: other.example\r\n{host}"), refused),
        with("Host empty", "Host:\r\n", refused),
        with("Host with a space", "Host: a b\r\n", refused),
        with("Host with a path", &format!("Host: {}/x\r\n", face.host), refused),
        with("Host with a user", &format!("Host: user@{}\r\n", face.host), refused),
        with("Host not ASCII", "Host: h\u{e9}\r\n", refused),
        with("Host with a port that is none", "Host: localhost:99999\r\n", refused),
        with("Host with a comma", &format!("Host: {},other.example\r\n", face.host), refused),
        case("absolute request line of another host", absolute("other.example"), Want::OneAtMost),
        case("absolute request line of the same host", absolute(&face.host), Want::OneAtMost),
        case(
            "absolute request line with a user",
            absolute(&format!("user:word@{}", face.host)),
            refused,
        ),
    ]
}

/// Other protocols, versions and methods.
fn protocols(face: &Face) -> Vec<Case> {
    // Tools are asked for with a body.
    let many = (face.kind != Kind::Mcp).then(|| {
        let thirty = format!("{}\r\n", face.head("GET")).repeat(30);
        case("30 requests at once", thirty, Want::Good(30))
    });
    [one_protocol_each(face), many.into_iter().collect()].concat()
}

fn one_protocol_each(face: &Face) -> Vec<Case> {
    let get = face.head("GET");
    let refused = Want::Refused;
    let version =
        |name, version: &str| case(name, get.replacen("HTTP/1.1", version, 1) + "\r\n", refused);
    let method = |name, line: &str| {
        let old = format!("GET {} ", face.path());
        case(name, get.replacen(&old, line, 1) + "Connection: close\r\n\r\n", refused)
    };
    let upgrade = |name, headers: &str| {
        case(name, format!("{get}{headers}Connection: close\r\n\r\n"), Want::OneAtMost)
    };
    let hello = [0x16, 3, 1, 0, 0xa5, 1, 0, 0, 0xa1, 3, 3].into_iter().chain([7; 160]);
    vec![
        case(
            "HTTP/2 from the start",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
            refused,
        ),
        case("TLS", hello.collect::<Vec<u8>>(), refused),
        case("SSH", "SSH-2.0-OpenSSH_9.2\r\n", refused),
        case("HTTP/0.9", format!("GET {}\r\n\r\n", face.path()), refused),
        version("HTTP/1.2", "HTTP/1.2"),
        version("HTTP/2.0 in the line", "HTTP/2.0"),
        version("HTTP/11.1", "HTTP/11.1"),
        version("http/1.1", "http/1.1"),
        method("CONNECT", "CONNECT 127.0.0.1:22 "),
        method("CONNECT to itself", &format!("CONNECT {} ", face.host)),
        method("TRACE", &format!("TRACE {} ", face.path())),
        method("a method of its own with brackets", &format!("G(T {} ", face.path())),
        upgrade("upgrade to h2c", "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"),
        upgrade("upgrade to nothing", "Upgrade:\r\n"),
        case(
            "WebSocket without a key",
            format!("{get}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"),
            Want::OneAtMost,
        ),
        case(
            "hop-by-hop headers named in Connection",
            format!("{get}Connection: close, Host, X-Forwarded-For, Content-Length\r\n\r\n"),
            Want::OneAtMost,
        ),
        case(
            "Expect of something else",
            format!(
                "{}Expect: 200-ok\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}",
                face.head("POST")
            ),
            Want::OneAtMost,
        ),
        Case {
            half: true,
            ..case(
                "Expect: 100-continue, and no body",
                format!(
                    "{}Expect: 100-continue\r\nContent-Length: 20\r\nConnection: close\r\n\r\n",
                    face.head("POST")
                ),
                refused,
            )
        },
    ]
}

/// Paths that try to get out, or are none.
fn paths(face: &Face) -> Vec<Case> {
    let get = face.head("GET");
    let old = format!("GET {} ", face.path());
    let with = |name, path: &str, want| {
        case(
            name,
            get.replacen(&old, &format!("GET {path} "), 1) + "Connection: close\r\n\r\n",
            want,
        )
    };
    // A sandbox's server may have what path it likes; as it came it goes there, once.
    let foreign = if face.kind == Kind::Edge { Want::OneAtMost } else { Want::Refused };
    vec![
        with("path with ..", "/../../../etc/passwd", foreign),
        with("path with .. in per cent", "/v1/%2e%2e/%2e%2e/etc/passwd", foreign),
        with("path with slashes in per cent", "/v1/sandboxes/..%2f..%2fadmin.token", foreign),
        with("path with a backslash", "/v1\\..\\..\\etc", foreign),
        with("path with a NUL in per cent", "/v1/sandboxes/%00", foreign),
        with("path not UTF-8 in per cent", "/v1/sandboxes/%ff%fe", foreign),
        with("path with per cent and nothing", "/v1/sandboxes/%", foreign),
        with("path with a line break in per cent", "/v1/sandboxes/a%0d%0aX:%20y", foreign),
        with("path with two slashes", "//v1//sandboxes", foreign),
        with("path that is a file of the daemon", "/admin.token", foreign),
        with("path without a slash", "v1/sandboxes", Want::Refused),
        with("path with a raw NUL", "/a\0b", Want::Refused),
        with("path with a space", "/a b", Want::Refused),
        with("path not ASCII", "/\u{e9}", foreign),
        with("path with a fragment", "/v1/nothing#/v1/sandboxes", foreign),
        with("path empty", "", Want::Refused),
        with("path *", "*", Want::Refused),
    ]
}

/// Requests that break off.
fn halves(face: &Face) -> Vec<Case> {
    let get = face.head("GET");
    let half = |name, bytes: String| Case { half: true, ..case(name, bytes, Want::Refused) };
    vec![
        half("nothing", String::new()),
        half("half a request line", "GET /".to_owned()),
        half("half a head", get),
        half("half a body", format!("{}Content-Length: 100\r\n\r\nhalf", face.head("POST"))),
        half(
            "half a chunk",
            format!("{}Transfer-Encoding: chunked\r\n\r\n64\r\nhalf", face.head("POST")),
        ),
        half(
            "chunks without an end",
            format!("{}Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", face.head("POST")),
        ),
    ]
}

/// Bodies that are no good JSON, for those who read them.
pub fn json(face: &Face) -> Vec<Case> {
    let kind = if face.kind == Kind::Mcp { "" } else { "Content-Type: application/json\r\n" };
    let post = |name, body: &[u8], want| {
        let head = format!(
            "{}{kind}Content-Length: {}\r\nConnection: close\r\n\r\n",
            face.head("POST"),
            body.len()
        );
        case(name, [head.as_bytes(), body].concat(), want)
    };
    let named = Want::Named(400);
    let deep =
        |open: &str, close: &str| format!("{}{}", open.repeat(100_000), close.repeat(100_000));
    let mut cases = vec![
        post("JSON cut off", b"{\"name\": \"a\"", named),
        post("JSON not UTF-8", b"{\"name\": \"\xff\xfe\"}", named),
        post("JSON with junk behind it", b"{} {}", named),
        post("JSON behind a byte order mark", b"\xef\xbb\xbf{}", named),
        post("arrays 100,000 deep", deep("[", "]").as_bytes(), named),
        post("objects 100,000 deep", deep("{\"a\":", "}").as_bytes(), named),
        post("a field 100,000 deep", format!("{{\"name\": {}}}", deep("[", "]")).as_bytes(), named),
        post("a lone number", b"7", named),
        post("a lone string", b"\"x\"", named),
        post("an array", b"[]", named),
        post("nothing but null", b"null", named),
        post("a number beyond all", b"{\"cpus\": 1e400}", named),
        post("a half pair of UTF-16", b"{\"name\": \"\\ud800\"}", named),
        post(
            "8 MiB",
            format!("{{\"name\": \"{}\"}}", "x".repeat(8 << 20)).as_bytes(),
            Want::Named(413),
        ),
        post("8 MiB of spaces", " ".repeat(8 << 20).as_bytes(), Want::Named(413)),
        case(
            "8 MiB in chunks",
            {
                let head = format!(
                    "{}{kind}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n",
                    face.head("POST")
                );
                let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
                format!("{head}{}0\r\n\r\n", chunk.repeat(128))
            },
            Want::Named(413),
        ),
        case(
            "a body of 1 TB announced",
            format!(
                "{}{kind}Content-Length: 1000000000000\r\nConnection: close\r\n\r\n",
                face.head("POST")
            ),
            Want::Named(413),
        ),
    ];
    let fields: &[(&'static str, &[u8])] = if face.kind == Kind::Api {
        &[
            ("name of a wrong type", b"{\"name\": 7}"),
            ("name with a NUL", b"{\"name\": \"a\\u0000b\"}"),
            ("name of 100,000 letters", b""),
            ("field that is not known", b"{\"nmae\": \"a\"}"),
            ("field twice", b"{\"name\": \"a\", \"name\": \"b\"}"),
            ("memory below zero", b"{\"memory_mib\": -1}"),
            ("memory beyond 64 bits", b"{\"memory_mib\": 99999999999999999999999}"),
            ("memory a fraction", b"{\"memory_mib\": 512.5}"),
            ("labels of a wrong type", b"{\"labels\": [1]}"),
            ("env with a NUL", b"{\"env\": {\"A\": \"a\\u0000\"}}"),
            ("env's name with =", b"{\"env\": {\"A=B\": \"a\"}}"),
        ]
    } else {
        &[
            ("no JSON-RPC", b"{\"a\": 1}"),
            ("method of a wrong type", b"{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": 7}"),
            ("id an object", b"{\"jsonrpc\": \"2.0\", \"id\": {}, \"method\": \"tools/list\"}"),
            ("another version", b"{\"jsonrpc\": \"1.0\", \"id\": 1, \"method\": \"tools/list\"}"),
            ("params an array", b"{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"tools/list\", \"params\": [1]}"),
            ("several at once", b"[{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"tools/list\"}, {\"jsonrpc\": \"2.0\", \"id\": 2, \"method\": \"tools/list\"}]"),
        ]
    };
    for (name, body) in fields {
        let long = format!("{{\"name\": \"{}\"}}", "x".repeat(100_000));
        let body = if body.is_empty() { long.as_bytes() } else { body };
        cases.push(post(name, body, named));
    }
    cases
}
