//! HTTPS from certificate files, with HTTP/2 and HTTP/1.1.

use std::process::Command;

use e2e::lab::LISTEN_PROGRAM;
use e2e::pty::Pty;
use e2e::{isolated, net, test_name, until};

/// What `curl` says: the body, the status and the version of HTTP.
fn curl(arguments: &[&str]) -> (String, String) {
    let output = Command::new("curl")
        .args(["-sS", "--max-time", "60", "-w", "\n%{http_code} %{http_version}"])
        .args(arguments)
        .output()
        .expect("curl starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let (body, last) = text.rsplit_once('\n').unwrap_or(("", &text));
    assert!(output.status.success(), "curl {arguments:?}: {errors}{text}");
    (body.to_owned(), last.to_owned())
}

#[test]
fn t17_https_with_http2_to_the_interface_and_to_a_sandbox_that_sleeps() {
    isolated(test_name!(), |lab| {
        let (cert, key) = net::certificate(lab.scratch());
        lab.ok(&["sandboxes", "create", "--name", "web"]);
        lab.write_file("web", "/work/serve.py", LISTEN_PROGRAM);
        lab.ok(&[
            "exec",
            "web",
            "--background",
            "--",
            "python3",
            "/work/serve.py",
            "0.0.0.0",
            "8000",
        ]);
        lab.stop_daemon();
        lab.daemon_env.push(("DORMOUSE_TLS_CERT".to_owned(), cert.clone()));
        lab.daemon_env.push(("DORMOUSE_TLS_KEY".to_owned(), key.clone()));
        lab.launch();
        let socket = lab.data().join("dormouse.sock");
        until("the daemon answers", || {
            net::call(&socket, "GET", "/v1/health", "").ok().filter(|answer| answer.status == 200)
        });
        let health = "https://localhost:8420/v1/health";
        assert_eq!(curl(&["--cacert", &cert, health]).1, "200 2");
        assert_eq!(curl(&["--cacert", &cert, "--http1.1", health]).1, "200 1.1");
        let link = lab.ok(&["link", "web", "8000"]);
        let link = link.trim();
        assert!(link.starts_with("https://"), "{link}");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        let host = link.trim_start_matches("https://").split(':').next().expect("a host");
        let resolve = format!("{host}:8420:127.0.0.1");
        let (body, last) = curl(&["--cacert", &cert, "--resolve", &resolve, link]);
        assert_eq!(last, "200 2", "{body}");
        assert!(body.contains("Directory listing"), "{body}");
        let upload = "x".repeat(300_000);
        let file = lab.scratch().join("upload");
        std::fs::write(&file, upload).expect("written");
        let from = format!("@{}", file.to_string_lossy());
        // A body over HTTP/2 is passed on too; this server has no POST.
        let (_, last) =
            curl(&["--cacert", &cert, "--resolve", &resolve, "--data-binary", &from, link]);
        assert_eq!(last, "501 2");
        // Whoever speaks without TLS gets nothing, and harms nobody.
        assert!(net::http(lab.address(), "localhost", "/v1/health").is_err());
        assert_eq!(curl(&["--cacert", &cert, health]).1, "200 2");
        // The command line and what it upgrades go over it as well, with the certificate that is named and without it not.
        let token = std::fs::read_to_string(lab.data().join("admin.token")).expect("a token");
        let far = ["--url", "https://localhost:8420", "--token", token.trim()];
        let trusting = [&far[..], &["--ca", &cert]].concat();
        let said = lab.ok(&[&trusting[..], &["exec", "web", "--", "echo", "over TLS"]].concat());
        assert_eq!(said, "over TLS\n");
        let shell = [&trusting[..], &["shell", "web", "--", "echo", "on a terminal"]].concat();
        let mut shell = Pty::start(&lab.command(&shell), 80, 24);
        shell.shows("on a terminal");
        assert_eq!(shell.ends(), Some(0));
        let output = lab.run(&[&far[..], &["sandboxes", "list"]].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{said}");
        assert!(said.contains("no TLS with the daemon at localhost:8420"), "{said}");
        assert!(said.contains("DORMOUSE_CA"), "{said}");
        let plain = ["--url", "http://localhost:8420", "--token", token.trim()];
        let output = lab.run(&[&plain[..], &["sandboxes", "list"]].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{said}");
        assert!(said.contains("`--url https://localhost:8420`"), "{said}");
        // A key that does not fit is told at the start.
        lab.stop_daemon();
        std::fs::write(&key, "no key\n").expect("written");
        lab.launch();
        until("it has ended", || lab.daemon_log().contains("no private key in PEM").then_some(()));
        lab.reap_daemon();
        lab.daemon_env.clear();
        lab.start();
    });
}
