//! Names in boxes: addresses, wiring, external services and links, on real guests.

use std::io::{Read, Write};
use std::net::TcpListener;

use e2e::boxes::{call, call_as, done, get, serve_counter, set_up, sh, start, view, wait_status};
use e2e::{isolated, net, test_name, until};
use serde_json::{Value, json};

fn id_of(box_: &Value) -> String {
    box_["id"].as_str().expect("an id").to_owned()
}

/// What `curl` says in a box: the body and the status.
fn curl(lab: &e2e::Lab, id: &str, url: &str) -> (String, String) {
    let line = format!("curl -s -m 20 -w '\\n%{{http_code}}' '{url}' || true");
    let text = sh(lab, id, &line);
    let (body, status) = text.rsplit_once('\n').unwrap_or(("", &text));
    (body.trim_end().to_owned(), status.to_owned())
}

#[test]
fn t06_t07_t08_t09_names_reach_their_processes() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        let services = json!([
            { "name": "api.internal", "port": 8080 },
            { "name": "billing.internal", "port": 8080, "targetPort": 8081 },
            { "name": "shop.internal", "port": 80, "targetPort": 8080, "web": true },
            { "name": "172.30.0.0/16", "port": 9000, "targetPort": 8081 },
            { "name": "local.internal", "port": 8082 },
        ]);
        let id = id_of(&start(lab, &json!({ "goal": "x", "services": services })));
        let addresses = sh(
            lab,
            &id,
            "getent ahostsv4 api.internal billing.internal shop.internal | awk '/STREAM/{print $1}'",
        );
        assert_eq!(
            addresses.lines().collect::<Vec<_>>(),
            ["198.18.0.1", "198.18.0.2", "198.18.0.3"]
        );
        assert_eq!(sh(lab, &id, "getent ahosts other.internal || echo none"), "none");
        serve_counter(lab, &id, 8080);
        serve_counter(lab, &id, 8081);
        let pid = |lab: &e2e::Lab, url: &str| {
            let (body, status) = curl(lab, &id, url);
            assert_eq!(status, "200", "{url}: {body}");
            body.split(' ').nth(1).expect("a process").to_owned()
        };
        let (api, billing) =
            (pid(lab, "http://api.internal:8080/"), pid(lab, "http://billing.internal:8080/"));
        assert_ne!(api, billing, "the same port, two processes");
        assert_eq!(pid(lab, "http://shop.internal/"), api, "T8: called on 80");
        assert_eq!(pid(lab, "http://172.30.4.5:9000/"), billing, "T9");
        // T8: port 80 of a name that is declared on another port, and 9095.
        let (body, status) = curl(lab, &id, "http://api.internal/");
        assert_eq!(status, "502", "{body}");
        assert!(body.contains("nothing listens on api.internal:80 in this box"), "{body}");
        assert_eq!(curl(lab, &id, "http://api.internal:9095/").1, "404");
        assert_eq!(curl(lab, &id, "http://api.internal:7777/").1, "000");
        assert_eq!(curl(lab, &id, "http://172.30.4.5:9001/").1, "000");
        // T7: who listens on 127.0.0.1 alone is not reached by name.
        let line = "exec python3 -c \"import http.server as h; h.HTTPServer(('127.0.0.1', 8082), h.SimpleHTTPRequestHandler).serve_forever(poll_interval=None)\"";
        done(
            lab,
            "POST",
            &format!("/v1/boxes/{id}/exec"),
            &json!({ "command": line, "background": true }),
        );
        sh(lab, &id, "until ss -ltnH 'sport = :8082' | grep -q . ; do sleep 0.1 ; done");
        assert_eq!(curl(lab, &id, "http://local.internal:8082/").1, "000");
        assert_eq!(curl(lab, &id, "http://127.0.0.1:8082/").1, "200");
        // T8: localhost:80 reaches the first declared service.
        assert_eq!(pid(lab, "http://localhost/"), api);
        // The wiring outlives the daemon.
        lab.kill_daemon();
        lab.start();
        assert_eq!(pid(lab, "http://billing.internal:8080/"), billing);
    });
}

/// A server on this machine that says what was asked of it; ends with the test.
fn external_server(address: &str) -> String {
    net::output("ip", &["address", "add", &format!("{address}/32"), "dev", "lo"]);
    let listener = TcpListener::bind((address, 8088)).expect("listens");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read == 1)
            {
                head.push(byte[0]);
            }
            let text = String::from_utf8_lossy(&head).into_owned();
            let line = text.lines().next().unwrap_or_default();
            let host = text
                .lines()
                .find(|line| line.to_ascii_lowercase().starts_with("host:"))
                .unwrap_or_default();
            let body = format!("external {line} {host}");
            let answer = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            );
            if stream.write_all(answer.as_bytes()).is_err() {
                return;
            }
        }
    });
    format!("http://{address}:8088/base")
}

#[test]
fn t11_t17_external_services_and_switching() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        let base = external_server("203.0.113.5");
        let services = json!([
            { "name": "api.internal", "port": 80, "targetPort": 8080, "web": true },
            { "name": "alias.internal", "port": 8080 },
            { "name": "other.internal", "port": 9000 },
        ]);
        let started =
            start(lab, &json!({ "goal": "x", "services": services, "externalBaseUrl": base }));
        let id = id_of(&started);
        assert_eq!(started["services"][0]["mode"], "external");
        let (body, status) = curl(lab, &id, "http://api.internal/a/b?c=1");
        assert_eq!(
            (status.as_str(), body.as_str()),
            ("200", "external GET /base/a/b?c=1 HTTP/1.1 host: 203.0.113.5:8088")
        );
        // T17: the first service's URL goes there too.
        let answer = get(started["sceneUrl"].as_str().expect("a URL"), "GET", &[]);
        assert_eq!(
            answer.body, "external GET /base/ HTTP/1.1 host: 203.0.113.5:8088",
            "{}",
            answer.head
        );
        // Programs in the box find it on their own localhost, too, where the agent listens on nothing.
        for (url, path) in [
            ("http://localhost:9000/there", "/base/there"),
            ("http://127.0.0.1:8080/", "/base/"),
            ("http://localhost/scene", "/base/scene"),
            ("http://[::1]:9000/six", "/base/six"),
            ("http://[::1]/", "/base/"),
            ("http://[::ffff:127.0.0.1]:9000/mapped", "/base/mapped"),
        ] {
            let expected = format!("external GET {path} HTTP/1.1 host: 203.0.113.5:8088");
            assert_eq!(curl(lab, &id, url), (expected, "200".to_owned()), "{url}");
        }
        for elsewhere in ["127.0.0.1:9001", "[::1]:9001", "[::ffff:127.0.0.1]:9001", "[::2]:9000"] {
            assert_eq!(curl(lab, &id, &format!("http://{elsewhere}/")).1, "000", "{elsewhere}");
        }
        assert_eq!(sh(lab, &id, "ss -ltnH | wc -l"), "0", "T11: the port is left free");
        // One's own process can start any time; then the name is switched to it, and those that share it.
        serve_counter(lab, &id, 8080);
        assert!(curl(lab, &id, "http://api.internal/").0.starts_with("external"));
        let switched = done(
            lab,
            "POST",
            &format!("/v1/boxes/{id}/wire"),
            &json!({ "service": "api.internal", "mode": "box" }),
        );
        let modes: Vec<_> = switched["services"]
            .as_array()
            .expect("services")
            .iter()
            .map(|one| one["mode"].as_str().expect("a mode"))
            .collect();
        assert_eq!(modes, ["box", "box", "external"]);
        assert!(curl(lab, &id, "http://api.internal/").0.starts_with("1 "));
        assert!(curl(lab, &id, "http://alias.internal:8080/").0.starts_with("2 "));
        assert!(curl(lab, &id, "http://localhost:8080/").0.starts_with("3 "));
        assert!(curl(lab, &id, "http://localhost/").0.starts_with("4 "));
        assert!(curl(lab, &id, "http://[::1]/").0.starts_with("5 "));
        assert!(curl(lab, &id, "http://localhost:9000/").0.starts_with("external"));
        assert!(curl(lab, &id, "http://other.internal:9000/").0.starts_with("external"));
        // The same as a tool, and back.
        let back = json!({ "id": id, "service": "alias.internal", "mode": "external" });
        let switched = e2e::mcp::Http::new(lab).done("sandbox_wire", back);
        let modes: Vec<_> = switched["services"]
            .as_array()
            .expect("services")
            .iter()
            .map(|one| one["mode"].as_str().expect("a mode"))
            .collect();
        assert_eq!(modes, ["external", "external", "external"]);
        assert!(curl(lab, &id, "http://api.internal/").0.starts_with("external"));
        for (body, field, expected) in [
            (json!({ "service": "nobody", "mode": "box" }), "service", 404),
            (json!({ "service": "api.internal", "mode": "x" }), "mode", 400),
        ] {
            let (status, refused) = call(lab, "POST", &format!("/v1/boxes/{id}/wire"), &body);
            assert_eq!((status, &refused["field"]), (expected, &json!(field)), "{refused}");
        }
    });
}

#[test]
fn t11_an_external_base_leads_neither_to_this_host_nor_to_boxes_of_others() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        external_server("203.0.113.5");
        let theirs = id_of(&start(lab, &json!({ "goal": "theirs" })));
        serve_counter(lab, &theirs, 8088);
        let addresses = sh(lab, &theirs, "hostname -I");
        let addresses: Vec<&str> = addresses.split_whitespace().collect();
        assert!(addresses[0].starts_with("10.118."), "{addresses:?}");

        lab.ok(&["accounts", "create", "others"]);
        let key = lab.ok(&["keys", "create", "--account", "others"]);
        let key = key.lines().last().expect("a key").trim();
        let services = json!([{ "name": "api.internal", "port": 8080 }]);
        let begin = |base: &str| {
            let spec = json!({ "goal": "x", "services": services, "externalBaseUrl": base });
            call_as(key, "POST", "/v1/boxes", &spec)
        };
        let mut bases: Vec<String> = addresses
            .iter()
            .map(|ip| if ip.contains(':') { format!("[{ip}]") } else { (*ip).to_owned() })
            .collect();
        let number = addresses[0].parse().map(std::net::Ipv4Addr::to_bits).expect("an address");
        bases.push(number.to_string());
        bases.push(format!("[::ffff:{}]", addresses[0]));
        let same = ["10.118.0.1", "[::ffff:10.118.0.1]", "2130706433", "127.1", "0", "0xa9fea9fe"];
        for host in bases.iter().map(String::as_str).chain(same) {
            let (status, refused) = begin(&format!("http://{host}:8088"));
            assert_eq!(status, 422, "{host}: {refused}");
            assert_eq!(refused["field"], "externalBaseUrl", "{host}: {refused}");
            assert!(refused["hint"].to_string().contains("another machine"), "{host}: {refused}");
        }
        let (_, none) = call_as(key, "GET", "/v1/boxes", &Value::Null);
        assert_eq!(none["boxes"], json!([]), "nothing is left of them");

        // By a name, which leads elsewhere whenever its owner likes.
        let hosts = lab.scratch().join("hosts");
        let leads_to = |ip: &str| {
            std::fs::write(&hosts, format!("127.0.0.1 localhost\n{ip} base.test\n"))
                .expect("written");
        };
        leads_to("203.0.113.5");
        net::output("mount", &["--bind", &hosts.to_string_lossy(), "/etc/hosts"]);
        let (status, mine) = begin("http://base.test:8088");
        assert_eq!(status, 201, "{mine}");
        let path = format!("/v1/boxes/{}/exec", id_of(&mine));
        let ask = || {
            let line = "curl -s -m 20 -w '\\n%{http_code}' http://api.internal:8080/";
            let (_, ran) = call_as(key, "POST", &path, &json!({ "command": line }));
            ran["output"].as_str().unwrap_or_else(|| panic!("{ran}")).to_owned()
        };
        assert!(ask().starts_with("external GET / "), "another machine is reached");
        for ip in addresses.iter().copied().chain(["10.118.0.1", "127.0.0.1", "::1"]) {
            leads_to(ip);
            let told = ask();
            assert!(told.contains("which boxes do not reach"), "{ip}: {told}");
            assert!(told.ends_with("\n502"), "{ip}: {told}");
        }
        leads_to("203.0.113.5");
        assert!(ask().starts_with("external GET / "), "again");
        let asked = sh(lab, &theirs, "curl -s http://127.0.0.1:8088/");
        assert!(asked.starts_with("1 "), "nobody else has asked it: {asked}");
        let (status, told) =
            call_as(key, "DELETE", &format!("/v1/boxes/{}", id_of(&mine)), &Value::Null);
        assert_eq!(status, 204, "{told}");
    });
}

#[test]
fn b10_b15_b17_t10_links_between_boxes() {
    isolated(test_name!(), |lab| {
        set_up(
            lab,
            &[
                ("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "3"),
                ("DORMOUSE_BOX_BACKGROUND_WINDOW_SECONDS", "3"),
            ],
        );
        let a = id_of(&start(
            lab,
            &json!({ "goal": "a", "services": [{ "name": "db.internal", "port": 8000 }] }),
        ));
        serve_counter(lab, &a, 8000);
        // Its port there is that of the service of the same name (T10).
        let link = json!([{ "name": "db.internal", "port": 80, "fromBox": a }]);
        let b = id_of(&start(lab, &json!({ "goal": "b", "services": link })));
        assert_eq!(view(lab, &b)["services"][0]["warning"], Value::Null);
        assert_eq!(view(lab, &b)["services"][0]["fromPort"], 8000);
        wait_status(lab, &a, "frozen");
        // A link thaws its target (B15).
        let (body, status) = curl(lab, &b, "http://db.internal/");
        assert_eq!(status, "200", "{body}");
        assert!(body.starts_with("1 "), "{body}");
        assert_eq!(view(lab, &a)["status"], "ready");
        // A connection that is open holds it as long as this box is awake (B10), and not longer.
        let program = "import socket,time\n\
            s = socket.create_connection(('db.internal', 80))\n\
            open('/work/open', 'w').write('1')\n\
            s.settimeout(None)\n\
            d = s.recv(1)\n\
            open('/work/closed', 'w').write(repr(d))\n";
        sh(lab, &b, &format!("mkdir -p /work; cat > /work/hold.py <<'END'\n{program}END"));
        done(
            lab,
            "POST",
            &format!("/v1/boxes/{b}/exec"),
            &json!({ "command": "exec python3 /work/hold.py", "background": true }),
        );
        sh(lab, &b, "until test -e /work/open ; do sleep 0.1 ; done");
        let held = until("the link is told", || {
            let view = view(lab, &a);
            let blocked = view["freeze"]["blockedBy"].as_array()?.clone();
            blocked.iter().any(|one| one["kind"] == "link").then_some(view)
        });
        assert!(held["freeze"]["at"].is_null() && held["stopsAt"].is_null(), "{held}");
        wait_status(lab, &b, "frozen");
        wait_status(lab, &a, "frozen");
        // After the thaw the connection from before is closed; a new one is not (B17).
        assert_eq!(
            sh(
                lab,
                &b,
                "for i in $(seq 150); do test -e /work/closed && break; sleep 0.1; done; cat /work/closed"
            ),
            "b''"
        );
        let (body, status) = curl(lab, &b, "http://db.internal/");
        assert_eq!(status, "200", "{body}");
        assert!(body.starts_with("2 "), "nothing was lost: {body}");
        // A link to a port that is not declared is told, at the start as well, and so is one to a box that has ended.
        let other = json!([{ "name": "db.internal", "port": 80, "fromBox": a, "fromPort": 9000 }]);
        let tool = e2e::mcp::Http::new(lab);
        let started = tool.done("sandbox_start", json!({ "goal": "c", "services": other }));
        let warning = started["services"][0]["warning"].as_str().unwrap_or_default().to_owned();
        assert!(warning.contains("declares no service there (but on 8000)"), "{started}");
        done(lab, "DELETE", &format!("/v1/boxes/{a}"), &Value::Null);
        let status = tool.done("sandbox_status", json!({ "id": b }));
        let warning = status["services"][0]["warning"].as_str().unwrap_or_default().to_owned();
        assert!(warning.contains(&format!("box {a}, which has ended")), "{status}");
        // Boxes of nobody cannot be linked to.
        let (status, refused) = call(
            lab,
            "POST",
            "/v1/boxes",
            &json!({ "services": [{ "name": "x", "port": 1, "fromBox": "aaaaaaaaaaaa" }] }),
        );
        assert_eq!(status, 422, "{refused}");
    });
}
