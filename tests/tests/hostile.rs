//! Wrong, huge, half and hostile requests to the interface, to the tools of agents and through a link.

use std::fmt::Write;
use std::net::TcpStream;
use std::time::Duration;

use e2e::hostile::{Case, Face, Heard, Kind, SERVER, Slow, Want, everywhere, exchange, json};
use e2e::lab::Lab;
use e2e::mcp::token;
use e2e::{isolated, net, proc, test_name, until};

/// The server in the sandbox.
const PORT: &str = "8000";
/// How long a head or a body of JSON may take to arrive, and a while for the machine to say so.
const SLOW_MAX: Duration = Duration::from_secs(30 + 15);
/// Connections that say nothing, at a time; the long form asks for more.
const SILENT: usize = 500;

fn silent() -> usize {
    let text = std::env::var("DORMOUSE_SOAK_SILENT_CONNECTIONS").ok();
    text.map_or(SILENT, |text| text.parse().expect("a number"))
}

/// Starts the daemon with a sandbox whose server writes down what arrives; how to ask each face.
fn faces(lab: &Lab) -> [Face; 3] {
    lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
    lab.write_file("web", "/work/server.py", SERVER);
    lab.ok(&["exec", "web", "-b", "--", "python3", "/work/server.py", PORT]);
    let (host, server) = net::split_link(&lab.ok(&["link", "web", PORT]));
    let token = token(lab);
    let edge = Face { kind: Kind::Edge, server, host, token: String::new() };
    let api = Face { kind: Kind::Api, server, host: "localhost:8420".to_owned(), token };
    let mcp = Face { kind: Kind::Mcp, ..api.clone() };
    for face in [&api, &mcp, &edge] {
        until("a good request is answered", || good(face).ok());
    }
    [api, mcp, edge]
}

/// A good request on a new connection is answered as one.
fn good(face: &Face) -> Result<(), String> {
    let heard = exchange(face.server, face.good().as_bytes(), false, 1);
    let right = match face.kind {
        Kind::Edge => "guest",
        Kind::Mcp => "sandbox_start",
        Kind::Api => "\"sandboxes\"",
    };
    if heard.statuses == [200] && heard.names(right) { Ok(()) } else { Err(heard.text()) }
}

/// What has arrived in the sandbox since the last time.
#[track_caller]
fn arrived(edge: &Face) -> Vec<String> {
    let answer = net::http(edge.server, &edge.host, "/log").expect("the log");
    serde_json::from_str(&answer.body).unwrap_or_else(|error| panic!("{error}: {answer:?}"))
}

/// What is wrong with an answer, if anything is.
fn judge(case: &Case, heard: &Heard) -> Option<String> {
    let mut heard = heard.clone();
    // What asks for more is no answer yet.
    heard.statuses.retain(|status| *status != 100);
    let good = heard.statuses.iter().filter(|status| (200..400).contains(*status)).count();
    let refused = heard.statuses.iter().all(|status| (400..600).contains(status) && *status != 500)
        && heard.statuses.len() <= 1;
    match case.want {
        Want::Refused if good > 0 => Some("it was done".to_owned()),
        Want::Refused if !refused => Some("not refused clearly".to_owned()),
        Want::Refused if heard.statuses.is_empty() && !heard.ended => Some("left open".to_owned()),
        Want::Ended if good > 1 || heard.statuses.contains(&500) => {
            Some("not one answer".to_owned())
        }
        Want::Ended if !heard.ended => Some("left open".to_owned()),
        Want::OneAtMost if good > 1 => Some("taken for several requests".to_owned()),
        Want::OneAtMost if heard.statuses.contains(&500) => Some("an error of ours".to_owned()),
        Want::OneAtMost if heard.statuses.is_empty() && !heard.ended => {
            Some("left open".to_owned())
        }
        Want::Good(count) if good != count => Some(format!("{good} good answers, not {count}")),
        Want::Named(status) if heard.statuses != [status] => Some(format!("not {status}")),
        _ => None,
    }
}

/// What arrived must be whole requests, each with one host and one length, and none that was hidden in another.
fn judge_arrived(edge: &Face, requests: &[String]) -> Option<String> {
    for request in requests {
        let head = request.split("\r\n\r\n").next().unwrap_or_default();
        let fields: Vec<String> = head.split("\r\n").skip(1).map(str::to_ascii_lowercase).collect();
        let count = |name: &str| {
            fields.iter().filter(|field| field.starts_with(&format!("{name}:"))).count()
        };
        let (length, chunked) = (count("content-length"), count("transfer-encoding"));
        if request.starts_with("GET /smuggled") {
            return Some("smuggled a request into the sandbox".to_owned());
        }
        if length + chunked > 1 {
            return Some(format!("arrived with two lengths: {head:?}"));
        }
        if count("host") != 1
            || !fields.iter().any(|field| *field == format!("x-forwarded-host: {}", edge.host))
        {
            return Some(format!("arrived under another host: {head:?}"));
        }
        if head.replace("\r\n", "").contains(['\r', '\n', '\0']) {
            return Some(format!("arrived with line breaks: {head:?}"));
        }
    }
    None
}

#[test]
fn t19_hostile_requests_are_refused_clearly_and_cost_nobody_else_anything() {
    isolated(test_name!(), |lab| {
        let lab = &*lab;
        let [api, mcp, edge] = faces(lab);
        arrived(&edge);
        let (daemon, open) = (lab.daemon_pid(), proc::open_files(lab.daemon_pid()));
        let before_mib = proc::resident_mib(daemon);
        // Begun first and looked at last: meanwhile all the rest is done.
        let mut slow: Vec<Slow> = [&api, &mcp, &edge].into_iter().flat_map(slow_ones).collect();

        let mut table =
            String::from("| face | what was sent | what came back |\n| --- | --- | --- |\n");
        let mut wrong = Vec::new();
        for face in [&api, &mcp, &edge] {
            let of_json = if face.kind == Kind::Edge { Vec::new() } else { json(face) };
            for case in everywhere(face).into_iter().chain(of_json) {
                let awaited = match case.want {
                    Want::Good(count) => count,
                    _ => 1,
                };
                let heard = exchange(face.server, &case.bytes, case.half, awaited);
                let _ = writeln!(table, "| {:?} | {} | {} |", face.kind, case.name, heard.told());
                let mut found = judge(&case, &heard);
                if face.kind == Kind::Edge {
                    found = found.or(judge_arrived(&edge, &arrived(&edge)));
                }
                found = found
                    .or(good(face).err().map(|told| format!("then a good request failed: {told}")));
                let text: String = heard.text().chars().take(400).collect();
                wrong.extend(
                    found.map(|found| {
                        format!("{:?}, {}: {found}\n    {text:?}", face.kind, case.name)
                    }),
                );
                slow.iter_mut().for_each(Slow::go_on);
            }
        }
        // Connections that say nothing are in nobody's way.
        let idle: Vec<TcpStream> =
            (0..silent()).map(|_| TcpStream::connect(api.server).expect("connected")).collect();
        for face in [&api, &mcp, &edge] {
            wrong.extend(
                good(face)
                    .err()
                    .map(|told| format!("{:?}, beside silent connections: {told}", face.kind)),
            );
        }
        let _ = writeln!(
            table,
            "| Api | {} connections that say nothing | good requests are answered |",
            idle.len()
        );
        drop(idle);

        let begun = std::time::Instant::now();
        until("who is slow has been ended", || {
            slow.iter_mut().for_each(Slow::go_on);
            let over = slow.iter().all(|one| one.ended.is_some());
            (over || begun.elapsed() > SLOW_MAX).then_some(())
        });
        for one in &slow {
            match &one.ended {
                Some((after, text)) => {
                    let after = after.as_secs();
                    let _ = writeln!(table, "| {} | ended after {after} s: {text} |", one.name);
                }
                None => {
                    wrong.push(format!("{} goes on after {} s", one.name, one.lasts().as_secs()));
                }
            }
        }
        println!("{table}");
        for face in [&api, &mcp, &edge] {
            good(face).unwrap_or_else(|told| panic!("{:?}: {told}", face.kind));
        }
        // What was no good framing was a good request for a sandbox all the same.
        for one in lab.json(&["sandboxes", "list"]).as_array().expect("a list") {
            if one["name"] != "web" {
                lab.ok(&["sandboxes", "delete", one["id"].as_str().expect("an id")]);
            }
        }
        until("nothing is left of it", || (proc::open_files(daemon) <= open + 5).then_some(()));
        println!(
            "the daemon's memory: {before_mib} MiB before, {} MiB after",
            proc::resident_mib(daemon)
        );
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(!lab.daemon_log().contains("panicked"), "{}", lab.daemon_log());
    });
}

/// Heads and bodies that come a byte at a time, and connections on which nothing comes.
fn slow_ones(face: &Face) -> Vec<Slow> {
    let kind = face.kind;
    let begin = |what: &str, beginning: &str, drip| {
        Slow::begin(format!("{kind:?} | {what}"), face.server, beginning, drip)
    };
    let mut all = vec![
        begin("a head, a byte at a time", &format!("{}X: ", face.head("GET")), b'x'),
        begin("half a head, then nothing", &face.head("GET"), 0),
        begin("nothing at all", "", 0),
    ];
    if kind != Kind::Edge {
        let head = format!(
            "{}Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n",
            face.head("POST")
        );
        all.push(begin("a body, a byte at a time", &head, b' '));
    }
    all
}
