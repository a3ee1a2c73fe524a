//! What wakes a sandbox, and what does not.

use std::io::{Read, Write};
use std::sync::{Arc, Barrier};

use e2e::lab::Lab;
use e2e::{isolated, net, proc, test_name, until};

/// A sandbox with the counter of the examples on port 8000; answers its link.
fn counter(lab: &Lab, name: &str) -> String {
    lab.ok(&["sandboxes", "create", "--name", name, "--sleep-after-seconds", "never"]);
    lab.ok(&["files", "put", "./examples/counter", &format!("{name}:/work")]);
    lab.ok(&["exec", name, "--background", "--", "python3", "/work/counter/server.py", "8000"]);
    let link = lab.ok(&["link", name, "8000"]).trim().to_owned();
    // On a busy machine Python may take longer to start than a closed port is tried.
    let answer = until("the counter listens", || {
        net::follow(&link).ok().filter(|answer| answer.status == 200)
    });
    assert_eq!(answer.body.trim(), "1", "{answer:?}");
    link
}

#[test]
fn s08_fifty_requests_at_once_wake_it_once() {
    isolated(test_name!(), |lab| {
        let link = counter(lab, "web");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        assert_eq!(proc::qemus_below(&lab.data()), Vec::<i32>::new());
        let start = Arc::new(Barrier::new(50));
        let threads: Vec<_> = (0..50)
            .map(|_| {
                let (start, link) = (Arc::clone(&start), link.clone());
                std::thread::spawn(move || {
                    start.wait();
                    net::follow(&link).expect("answered without a retry")
                })
            })
            .collect();
        let answers: Vec<_> =
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
        let mut numbers: Vec<u32> =
            answers.iter().map(|answer| answer.body.trim().parse().expect("a number")).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (2..52).collect::<Vec<u32>>());
        assert!(answers.iter().any(|answer| {
            answer.header("server-timing").is_some_and(|value| value.contains("wake;dur="))
        }));
        assert_eq!(lab.events("web", "woke").len(), 1, "{:?}", lab.events("web", ""));
        assert_eq!(proc::qemus_below(&lab.data()).len(), 1);
    });
}

#[test]
fn s08_a_packet_wakes_it_and_is_delivered_in_both_tiers() {
    isolated(test_name!(), |lab| {
        counter(lab, "web");
        let address = lab.view("web")["address"].as_str().expect("an address").to_owned();
        let mut expected = 1;
        for tier in ["memory", "disk"] {
            lab.ok(&["sandboxes", "sleep", "web", "--tier", tier]);
            let mut stream = net::connect(&address, 8000);
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n").expect("sent");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("answered");
            expected += 1;
            assert!(answer.trim_end().ends_with(&expected.to_string()), "{tier}: {answer}");
            let woke = lab.events("web", "woke");
            let last = woke.last().expect("it woke");
            assert_eq!(last["data"]["cause"], "packet", "{last}");
        }
    });
}

#[test]
fn s08_reading_and_listing_wake_nothing_and_hold_nothing_awake() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--sleep-after-seconds", "3"]);
        until("it sleeps although it is looked at all the time", || {
            lab.json(&["sandboxes", "list"]);
            lab.events("web", "");
            lab.ok(&["why", "web"]);
            lab.ok(&["logs", "web", "--console"]);
            (lab.view("web")["status"] == "sleeping").then_some(())
        });
        for _ in 0..20 {
            lab.json(&["sandboxes", "list"]);
            lab.ok(&["why", "web"]);
            lab.ok(&["link", "web", "80"]);
        }
        assert_eq!(lab.view("web")["status"], "sleeping");
        assert_eq!(lab.events("web", "woke").len(), 0);
    });
}

/// How long everything is read that can be; the long form asks for 120.
fn poll_seconds() -> u64 {
    let text = std::env::var("DORMOUSE_SOAK_POLL_SECONDS").ok();
    text.map_or(8, |text| text.parse().expect("a number"))
}

#[test]
fn s08_who_reads_everything_all_the_time_neither_wakes_it_nor_keeps_it_awake() {
    isolated(test_name!(), |lab| {
        let after = ["--sleep-after-seconds", "3"];
        let create =
            |name: &str| lab.ok(&["sandboxes", "create", "--name", name, after[0], after[1]]);
        create("web");
        lab.ok(&["exec", "web", "--background", "--", "sleep", "100000"]);
        lab.ok(&["snapshots", "create", "web", "kept"]);
        let socket = lab.data().join("dormouse.sock");
        let document = net::call(&socket, "GET", "/v1/openapi.json", "").expect("the description");
        let document: serde_json::Value = serde_json::from_str(&document.body).expect("JSON");
        // What needs the guest itself is no reading of the host's: files, and output beyond what the host keeps.
        let needs_guest = |path: &str| path.contains("/files") || path.contains("/trees");
        let needs_upgrade = |path: &str| path.ends_with("/attach") || path.contains("/ports/");
        let paths: Vec<String> = document["paths"]
            .as_object()
            .expect("paths")
            .iter()
            .filter(|(path, item)| {
                item.get("get").is_some() && !needs_guest(path) && !needs_upgrade(path)
            })
            .map(|(path, _)| {
                let path = path.replace("{id}", "web").replace("{port}", "80");
                let path = path.replace("{exec_id}", "1").replace("{name}", "kept");
                path.replace("{terminal_id}", "1")
            })
            .collect();
        assert!(paths.len() > 12, "{paths:?}");
        // Streams stay open all the time.
        let _streams: Vec<_> = ["/v1/events", "/v1/sandboxes/web/events?stream=true"]
            .into_iter()
            .map(|path| {
                use std::io::Write;
                let mut stream =
                    std::os::unix::net::UnixStream::connect(&socket).expect("connects");
                let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
                stream.write_all(head.as_bytes()).expect("sent");
                stream
            })
            .collect();
        let endless = |path: &str| path == "/v1/events";
        let mut asked = 0;
        let mut read_all = || {
            for path in paths.iter().filter(|path| !endless(path)) {
                let answer = net::call(&socket, "GET", path, "").expect("an answer");
                assert!(answer.status < 500, "{path}: {} {}", answer.status, answer.body);
                asked += 1;
            }
        };
        until("it sleeps on time although everything is read", || {
            read_all();
            (lab.view("web")["status"] == "sleeping").then_some(())
        });
        let begun = std::time::Instant::now();
        let limit = std::time::Duration::from_secs(poll_seconds() + 60);
        e2e::within(limit, "everything was read for so long", || {
            read_all();
            assert_eq!(lab.view("web")["status"], "sleeping");
            (begun.elapsed().as_secs() >= poll_seconds()).then_some(())
        });
        assert_eq!(lab.events("web", "woke").len(), 0);
        println!("{asked} requests to {} paths, and it slept on: {paths:?}", paths.len());
        lab.sh("web", "true");
        assert_eq!(lab.events("web", "woke").len(), 1);
    });
}

#[test]
fn s08_a_request_while_it_falls_asleep_is_served() {
    isolated(test_name!(), |lab| {
        let link = counter(lab, "web");
        let mut expected = 1;
        let mut refused = 0;
        for tier in ["memory", "disk"] {
            for after_ms in [0, 2, 5, 10, 20, 40, 60, 80, 100] {
                let sleeping = lab
                    .command(&["--json", "sandboxes", "sleep", "web", "--tier", tier])
                    .stdout(std::process::Stdio::null())
                    .stderr(std::process::Stdio::piped())
                    .spawn()
                    .expect("`dormouse` starts");
                let begun = std::time::Instant::now();
                until("the moment has come", || {
                    (begun.elapsed().as_millis() >= after_ms).then_some(())
                });
                let answer = net::follow(&link).expect("answered without a retry");
                expected += 1;
                assert_eq!(
                    (answer.status, answer.body.trim()),
                    (200, expected.to_string().as_str()),
                    "{tier}, {after_ms} ms"
                );
                // Whoever asked for the sleep is told what came first.
                let output = sleeping.wait_with_output().expect("the call ends");
                if !output.status.success() {
                    let told = String::from_utf8_lossy(&output.stderr);
                    println!("{tier}, {after_ms} ms: {told}");
                    assert!(told.contains(r#""code":"needed""#), "{told}");
                    assert!(told.contains("needed at this moment: request through"), "{told}");
                    assert!(told.contains(r#""retryable":true"#), "{told}");
                    refused += 1;
                }
            }
        }
        let (slept, woke) = (lab.events("web", "slept").len(), lab.events("web", "woke").len());
        println!(
            "18 races: {slept} sleeps, {woke} wakes, {} cancelled, {refused} told so",
            lab.events("web", "awake").len()
        );
    });
}

/// Something that needs the guest.
type Call = Box<dyn Fn(&Lab)>;

#[test]
fn s08_every_kind_of_call_wakes_it() {
    isolated(test_name!(), |lab| {
        let link = counter(lab, "web");
        lab.sh("web", "echo text > /work/file");
        let calls: [(&str, Call); 5] = [
            ("command", Box::new(|lab| assert_eq!(lab.sh("web", "cat /work/file"), "text"))),
            (
                "file read",
                Box::new(|lab| assert_eq!(lab.ok(&["files", "cat", "web:/work/file"]), "text\n")),
            ),
            ("file write", Box::new(|lab| lab.write_file("web", "/work/other", "more"))),
            (
                "list of files",
                Box::new(|lab| assert!(lab.ok(&["files", "ls", "web:/work"]).contains("other"))),
            ),
            (
                "request",
                Box::new(move |_| assert_eq!(net::follow(&link).expect("answered").status, 200)),
            ),
        ];
        for (number, (what, call)) in calls.iter().enumerate() {
            let tier = if number % 2 == 0 { "disk" } else { "memory" };
            lab.ok(&["sandboxes", "sleep", "web", "--tier", tier]);
            call(lab);
            assert_eq!(
                lab.events("web", "woke").len(),
                number + 1,
                "a {what} wakes it from {tier}"
            );
        }
    });
}
