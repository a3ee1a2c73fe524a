//! Load on a service of a box, by three ways that take turns: through the edge, through nginx in front of the same port, and
//! with nobody between, which tells how much of it is the guest's.
//!
//! What asks as fast as it can is `wrk` (Debian's). What asks at a steady rate is ours ([`steady`]): it reads each answer and
//! knows whose it is.

mod nginx;
mod steady;
mod wrk;

use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::bench::{api, sleepers};
use crate::{Lab, boxes, net, proc, until};

use nginx::Nginx;
pub use steady::{Steady, steady};
pub use wrk::Round;

/// The sandbox of which the sleepers are copies.
const WEB: &str = "web";
/// Where the server in it listens.
const PORT: u16 = 8080;
/// Connections at a time.
pub const CONNECTIONS: usize = 32;
/// Boxes that nobody uses are soon frozen. The one that is asked is held by the server, a command in the background, while
/// nothing comes through the edge.
const FREEZE_SOON: [(&str, &str); 1] = [("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "3")];
/// The server.
const SERVER: &str = include_str!("server.c");

/// Where to ask, and under which name.
#[derive(Clone, Debug)]
pub struct Target {
    /// Address and port.
    pub server: SocketAddr,
    /// The `Host` header.
    pub host: String,
}

/// How much is done.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// How often each way is measured.
    pub rounds: usize,
    /// How long each time, seconds.
    pub seconds: u64,
    /// How long at half of the rate, seconds.
    pub steady_seconds: u64,
    /// Sandboxes that sleep meanwhile.
    pub sleepers: u32,
    /// Boxes that are in the list beside the one that is asked, frozen.
    pub boxes: u32,
}

/// What came of one way.
#[derive(Clone, Debug, Default)]
pub struct Way {
    /// Each time it was its turn.
    pub rounds: Vec<Round>,
}

impl Way {
    /// The middle one of the rates, requests a second.
    pub fn rate(&self) -> f64 {
        median(self.rounds.iter().map(|round| round.rate))
    }

    /// The middle one of the times in which 99 of 100 requests were answered, milliseconds.
    pub fn p99_ms(&self) -> f64 {
        median(self.rounds.iter().map(|round| round.p99_ms))
    }

    fn guest_percent(&self) -> f64 {
        median(self.rounds.iter().map(|round| round.guest_percent))
    }

    fn between_percent(&self) -> f64 {
        median(self.rounds.iter().map(|round| round.between_percent))
    }
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Through the edge.
    pub edge: Way,
    /// Through nginx.
    pub nginx: Way,
    /// With nobody between.
    pub direct: Way,
    /// The same edge at half of its rate.
    pub steady: Steady,
    nginx_version: String,
    accelerator: String,
    plan: Plan,
}

impl Measured {
    /// The edge's rate as a part of nginx's.
    pub fn rate_ratio(&self) -> f64 {
        self.edge.rate() / self.nginx.rate()
    }

    /// The edge's 99th per cent of times as a multiple of nginx's.
    pub fn p99_ratio(&self) -> f64 {
        self.edge.p99_ms() / self.nginx.p99_ms()
    }

    /// The table, with what it was measured under.
    pub fn table(&self) -> String {
        let mut text = String::from(
            "| way | requests/s | p99 | QEMU, % of a core | between, % of a core |\n| --- | --- | --- | --- | --- |\n",
        );
        for (name, way) in
            [("the edge", &self.edge), ("nginx", &self.nginx), ("nobody between", &self.direct)]
        {
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "| {name} | {:.0} | {:.1} ms | {:.0} | {:.0} |",
                way.rate(),
                way.p99_ms(),
                way.guest_percent(),
                way.between_percent()
            );
        }
        let Plan { rounds, seconds, sleepers, boxes, .. } = self.plan;
        let steady = &self.steady;
        let _ = writeln!(
            text,
            "\nThe edge has {:.2} of nginx's rate (promised: 0.8) and {:.2} times its p99 (promised: at most 1.5).\n\
             At half of its rate for {} s: {} of {:.0} requests (who is answered late asks later), {} errors, p99 {:.1} ms.\n\
             {CONNECTIONS} connections that stay open, {rounds} rounds of {seconds} s each in turn, medians; {boxes} other boxes are frozen and {sleepers} sandboxes sleep meanwhile. {} with \
             {} workers and {} idle connections to the guest. The guest has one processor (accelerator {}).",
            self.rate_ratio(),
            self.p99_ratio(),
            steady.seconds,
            steady.requests,
            steady.rate * f64::from(u32::try_from(steady.seconds).unwrap_or(u32::MAX)),
            steady.errors.len(),
            steady.p99_ms(),
            self.nginx_version,
            nginx::WORKERS,
            nginx::KEPT,
            self.accelerator,
        );
        text
    }
}

/// Measures everything. The lab's daemon runs and has no sandboxes yet.
#[track_caller]
pub fn measure(lab: &mut Lab, plan: Plan) -> Measured {
    crowd(lab, plan.sleepers);
    let (url, address) = serve(lab, plan.boxes);
    let (host, server) = net::split_link(&url);
    let edge_at = Target { server, host };
    let direct_at = Target { server: SocketAddr::new(address, PORT), host: "guest".to_owned() };
    let qemus = || proc::qemus_below(&lab.data());
    let first = net::http(edge_at.server, &edge_at.host, "/first").expect("an answer");
    assert_eq!((first.status, first.body.as_str()), (200, "/first"), "{}", first.head);
    let nginx = Nginx::start(lab.scratch(), direct_at.server);
    let (mut edge, mut beside, mut direct) = (Way::default(), Way::default(), Way::default());
    let daemon = vec![lab.daemon_pid()];
    for round in 0..plan.rounds {
        for turn in 0..3 {
            // Who begins takes turns, too.
            let (name, way, target, between) = match (round + turn) % 3 {
                0 => ("edge", &mut edge, &edge_at, daemon.clone()),
                1 => ("nginx", &mut beside, nginx.target(), nginx.processes()),
                _ => ("direct", &mut direct, &direct_at, Vec::new()),
            };
            let measured = wrk::run(lab.scratch(), target, plan.seconds, &qemus(), &between);
            eprintln!("    {name}: {measured:?}");
            way.rounds.push(measured);
        }
    }
    let steady = steady(&edge_at, edge.rate() / 2.0, plan.steady_seconds);
    let nginx_version = nginx.end();
    let log = lab.daemon_log();
    let told = log.split("accelerator=").nth(1).and_then(|rest| rest.split_whitespace().next());
    let accelerator = told.unwrap_or("unknown").to_owned();
    Measured { edge, nginx: beside, direct, steady, nginx_version, accelerator, plan }
}

/// Makes so many sleeping sandboxes.
#[track_caller]
fn crowd(lab: &mut Lab, sleepers: u32) {
    boxes::set_up(lab, &FREEZE_SOON);
    if sleepers == 0 {
        return;
    }
    let api = api::Api::of(lab);
    let about = json!({ "name": WEB, "memory_mib": 256, "sleep_after_seconds": null });
    api.call("POST", "/v1/sandboxes", &about);
    sleepers::put_to_rest(lab, &api);
    lab.stop_daemon();
    sleepers::multiply(lab, sleepers, &mut sleepers::Random(u64::from(sleepers)));
    lab.start();
    let all = api.sandboxes();
    assert_eq!(all.len(), sleepers as usize + 1);
    assert!(all.iter().all(|one| one["status"] == "sleeping"), "all sleep");
}

/// Makes so many boxes that freeze, and one with the server in it: its URL, and its address on this host.
#[track_caller]
fn serve(lab: &Lab, others: u32) -> (String, IpAddr) {
    let services = json!([{ "name": "web.internal", "port": PORT, "web": true }]);
    let start = |goal: &str| {
        let started = boxes::start(lab, &json!({ "goal": goal, "services": services }));
        (started["id"].as_str().expect("an id").to_owned(), started)
    };
    let others: Vec<_> = (0..others).map(|other| start(&format!("other {other}")).0).collect();
    for id in others {
        boxes::wait_status(lab, &id, "frozen");
    }
    let (id, started) = start("the one that is asked");
    push(lab, &id, &compile(lab.scratch()));
    let path = format!("/v1/boxes/{id}/exec");
    let line = format!("exec /work/server {PORT}");
    boxes::done(lab, "POST", &path, &json!({ "command": line, "background": true }));
    let addresses = boxes::sh(lab, &id, "hostname -I");
    let address = addresses.split_whitespace().next().expect("an address");
    let address: IpAddr = address.parse().expect("an address");
    until("the server listens", || std::net::TcpStream::connect((address, PORT)).ok());
    (started["webUrl"].as_str().expect("a URL").to_owned(), address)
}

/// Puts a program into a box's `/work`.
#[track_caller]
fn push(lab: &Lab, id: &str, program: &Path) {
    let tar = lab.scratch().join("server.tar");
    let folder = program.parent().expect("a folder");
    let mut command = Command::new("tar");
    command.arg("-cf").arg(&tar).arg("-C").arg(folder).arg("server");
    assert!(command.status().expect("`tar` starts").success());
    let mut command = Command::new("curl");
    command.args(["--silent", "--show-error", "--fail-with-body", "--upload-file"]).arg(&tar);
    command.arg("--unix-socket").arg(lab.data().join("dormouse.sock"));
    let put = command.arg(format!("http://localhost/v1/boxes/{id}/tree?path=/work")).output();
    let put = put.expect("`curl` starts");
    assert!(put.status.success(), "{}", String::from_utf8_lossy(&put.stdout));
}

/// Builds the server so that it runs in any guest.
#[track_caller]
fn compile(folder: &Path) -> PathBuf {
    let (source, program) = (folder.join("server.c"), folder.join("server"));
    std::fs::write(&source, SERVER).expect("the source");
    let mut command = Command::new("cc");
    command.args(["-O2", "-static", "-o"]).arg(&program).arg(&source);
    let built = command.output().expect("`cc` (gcc) starts");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    program
}

/// The middle one, or the mean of the two in the middle.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}
