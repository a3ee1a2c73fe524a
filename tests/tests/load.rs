//! Sleep after sleep under everything that people do, with requests that come in the moment of falling asleep.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use e2e::lab::Lab;
use e2e::pty::Pty;
use e2e::{isolated, net, test_name, until};

/// Sleeps; the long form asks for 1000.
fn cycles() -> usize {
    let text = std::env::var("DORMOUSE_SOAK_LOAD_CYCLES").ok();
    text.map_or(24, |text| text.parse().expect("a number"))
}

/// Instead of the number of a cycle: there are no more.
const NO_MORE: usize = usize::MAX;

/// A server that counts, and adds the length of what it is sent.
const SERVER: &str = r"
import http.server
n = 0
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        global n
        n += 1
        b = b'%d' % n
        self.send_response(200); self.send_header('Content-Length', str(len(b))); self.end_headers()
        self.wfile.write(b)
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(('0.0.0.0', 8000), H).serve_forever(poll_interval=None)
";

/// Prints numbers without an end, a hundred at a time.
const NUMBERS: &str = r"
import sys, time
n = 0
while True:
    for _ in range(100):
        print(n); n += 1
    sys.stdout.flush()
    time.sleep(0.02)
";

/// The numbers that a followed output has shown so far must be all, in order: nothing lost, nothing twice.
fn follow_numbers(lab: &Lab, id: &str, busy: &AtomicBool) -> u64 {
    use std::io::BufRead;
    let mut follower = lab
        .command(&["execs", "output", "web", id, "--follow"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("`dormouse` starts");
    let output = follower.stdout.take().expect("its output");
    let mut expected = 0;
    for line in std::io::BufReader::new(output).lines() {
        let line = line.expect("a line");
        assert_eq!(line, expected.to_string(), "a line is lost or told twice");
        expected += 1;
        if !busy.load(Ordering::Relaxed) {
            break;
        }
    }
    follower.kill().expect("ended");
    follower.wait().expect("gone");
    expected
}

/// Waits for a cycle in which it is one's turn; false: there are no more. Were everybody busy all the time, no sleep would
/// ever come to its end.
fn next_turn(cycle: &AtomicUsize, last: &mut usize, is_mine: impl Fn(usize) -> bool) -> bool {
    until("a turn", || {
        let now = cycle.load(Ordering::Relaxed);
        let mine = now != *last && is_mine(now);
        (mine || now == NO_MORE).then(|| *last = now)
    });
    *last != NO_MORE
}

/// Copies files there and back again, which must be the same.
fn copy_files(lab: &Lab, cycle: &AtomicUsize) -> usize {
    let (mut copies, mut last) = (0, NO_MORE);
    while next_turn(cycle, &mut last, |cycle| cycle % 4 == 1) {
        let text = format!("{copies} of a line that is long\n").repeat(50_000);
        lab.write_file("web", "/work/copy", &text);
        assert_eq!(lab.ok(&["files", "cat", "web:/work/copy"]), text, "copy {copies}");
        copies += 1;
    }
    copies
}

/// Types into a terminal and waits for the answer.
fn type_on(lab: &Lab, cycle: &AtomicUsize) -> usize {
    let mut shell = Pty::start(&lab.command(&["shell", "web"]), 100, 30);
    let (mut lines, mut last) = (0, NO_MORE);
    while next_turn(cycle, &mut last, |cycle| cycle % 4 == 3) {
        lines += 1;
        shell.types(&format!("echo said-$(({lines}+100000))\r"));
        shell.shows(&format!("said-{}", lines + 100_000));
    }
    lines
}

#[test]
fn s07_nothing_is_lost_and_nothing_refused_over_sleeps_under_load() {
    isolated(test_name!(), |lab| {
        let lab = &*lab;
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "never"]);
        lab.write_file("web", "/work/server.py", SERVER);
        lab.write_file("web", "/work/numbers.py", NUMBERS);
        lab.ok(&["exec", "web", "--background", "--", "python3", "/work/server.py"]);
        let numbers = lab.ok(&["exec", "web", "--background", "--", "python3", "/work/numbers.py"]);
        let link = lab.ok(&["link", "web", "8000"]);
        let mut count: u64 = until("the server answers", || {
            net::follow(&link).ok().filter(|answer| answer.status == 200)
        })
        .body
        .parse()
        .expect("a number");
        let socket = lab.data().join("dormouse.sock");
        let busy = AtomicBool::new(true);
        let slept = AtomicUsize::new(0);
        let needed_count = AtomicUsize::new(0);
        let current = AtomicUsize::new(0);
        let mut outcomes: BTreeMap<u64, BTreeMap<String, u32>> = BTreeMap::new();
        std::thread::scope(|scope| {
            let follower = scope.spawn(|| follow_numbers(lab, numbers.trim(), &busy));
            let copier = scope.spawn(|| copy_files(lab, &current));
            let typist = scope.spawn(|| type_on(lab, &current));
            for cycle in 0..cycles() {
                current.store(cycle, Ordering::Relaxed);
                let tier = if cycle / 2 % 2 == 0 { "memory" } else { "disk" };
                // From 1 to 100 ms after it begins, in no order.
                let after_ms = (cycle as u64 * 37) % 100 + 1;
                let (socket, slept, needed_count) = (&socket, &slept, &needed_count);
                let sleeping = scope.spawn(move || {
                    let body = format!(r#"{{"tier": "{tier}"}}"#);
                    let answer = net::call(socket, "POST", "/v1/sandboxes/web/sleep", &body)
                        .expect("an answer");
                    // One that something needed in that moment is told so.
                    let needed = answer.status == 409 && answer.body.contains("\"needed\"");
                    let told = if needed { needed_count } else { slept };
                    assert!(
                        needed || answer.status == 200,
                        "sleep: {} {}",
                        answer.status,
                        answer.body
                    );
                    told.fetch_add(1, Ordering::Relaxed);
                });
                // In one of three it sleeps first.
                if cycle % 3 == 2 {
                    until("the sleep is answered", || sleeping.is_finished().then_some(()));
                }
                let begun = Instant::now();
                while begun.elapsed() < Duration::from_millis(after_ms) {
                    std::thread::yield_now();
                }
                let asked = Instant::now();
                let answer = net::follow(&link).expect("answered without a retry");
                count += 1;
                assert_eq!(
                    (answer.status, answer.body.as_str()),
                    (200, count.to_string().as_str()),
                    "{tier}, {after_ms} ms"
                );
                let how = if answer.header("server-timing").is_some() {
                    "woke it"
                } else {
                    "met it awake"
                };
                *outcomes
                    .entry(after_ms / 10 * 10)
                    .or_default()
                    .entry(how.to_owned())
                    .or_default() += 1;
                let body = r#"{"argv": ["echo", "here"]}"#;
                let done =
                    net::call(socket, "POST", "/v1/sandboxes/web/execs", body).expect("an answer");
                assert!((200..300).contains(&done.status), "exec: {} {}", done.status, done.body);
                assert!(asked.elapsed() < Duration::from_mins(2), "stuck: {tier}, {after_ms} ms");
                sleeping.join().expect("the sleep is answered");
            }
            current.store(NO_MORE, Ordering::Relaxed);
            busy.store(false, Ordering::Relaxed);
            let (told, copies, lines) = (
                follower.join().expect("all numbers came"),
                copier.join().expect("all files are whole"),
                typist.join().expect("all keys were answered"),
            );
            println!("{told} numbers followed, {copies} files copied, {lines} lines typed");
            assert!(told > 0 && copies > 0 && lines > 0);
        });
        println!(
            "{} cycles; sleeps answered: {}, of which were needed in that moment: {}",
            cycles(),
            slept.load(Ordering::Relaxed) + needed_count.load(Ordering::Relaxed),
            needed_count.load(Ordering::Relaxed)
        );
        println!(
            "{} slept, {} woke, {} stayed awake",
            lab.events("web", "slept").len(),
            lab.events("web", "woke").len(),
            lab.events("web", "awake").len()
        );
        for (from_ms, outcomes) in outcomes {
            println!("{from_ms:3}-{:3} ms: {outcomes:?}", from_ms + 9);
        }
    });
}
