//! Accounts: plans, credit, from where URLs open, and secrets, on real guests.

use e2e::boxes::{PAGE_LOAD, call_as, call_for, done, get, serve_counter, set_up};
use e2e::mcp::Http;
use e2e::{Lab, isolated, proc, test_name, until};
use serde_json::{Value, json};

/// A server that answers with whom it was asked for.
const FORWARDED: &str = "import http.server as h\n\
    class E(h.BaseHTTPRequestHandler):\n\
    \x20   def do_GET(self):\n\
    \x20       b = str(self.headers.get_all('X-Forwarded-For')).encode()\n\
    \x20       self.send_response(200); self.send_header('Content-Length', str(len(b))); self.end_headers(); self.wfile.write(b)\n\
    \x20   def log_message(self, *a): pass\n\
    h.ThreadingHTTPServer(('0.0.0.0', 8000), E).serve_forever(poll_interval=None)\n";

/// The account `acme`, through its key.
struct Acme(String);

impl Acme {
    /// Makes it, with these limits.
    fn new(lab: &Lab, limits: &Value) -> Self {
        let mut body = json!({ "id": "acme" });
        for (field, value) in limits.as_object().expect("limits") {
            body[field] = value.clone();
        }
        done(lab, "POST", "/v1/accounts", &body);
        let key = done(lab, "POST", "/v1/keys", &json!({ "account": "acme" }));
        Self(key["key"].as_str().expect("a key").to_owned())
    }

    #[track_caller]
    fn done(&self, method: &str, path: &str, body: &Value) -> Value {
        let (status, answer) = call_as(&self.0, method, path, body);
        assert!((200..300).contains(&status), "{method} {path}: {status} {answer}");
        answer
    }

    /// Code and sentence of an error.
    #[track_caller]
    fn refused(&self, method: &str, path: &str, body: &Value) -> (u16, String) {
        let (status, answer) = call_as(&self.0, method, path, body);
        (status, answer["error"].as_str().expect("an error").to_owned())
    }

    fn start(&self, spec: &Value) -> Value {
        self.done("POST", "/v1/boxes", spec)
    }

    fn exec(&self, id: &str, line: &str) -> Value {
        self.done("POST", &format!("/v1/boxes/{id}/exec"), &json!({ "command": line }))
    }

    fn sh(&self, id: &str, line: &str) -> String {
        let ran = self.exec(id, line);
        assert_eq!(ran["exitCode"], 0, "{line}: {ran}");
        ran["output"].as_str().expect("output").trim_end_matches('\n').to_owned()
    }

    fn background(&self, id: &str, line: &str) {
        let body = json!({ "command": line, "background": true });
        self.done("POST", &format!("/v1/boxes/{id}/exec"), &body);
    }

    /// Stops all of its boxes: nobody else sees them.
    fn stop_all(&self) {
        let list = self.done("GET", "/v1/boxes", &Value::Null);
        for box_ in list["boxes"].as_array().expect("boxes") {
            self.done("DELETE", &format!("/v1/boxes/{}", id_of(box_)), &Value::Null);
        }
    }

    fn wait_status(&self, id: &str, status: &str) -> Value {
        until(&format!("the box is {status}"), || {
            let view = self.done("GET", &format!("/v1/boxes/{id}"), &Value::Null);
            (view["status"] == status).then_some(view)
        })
    }
}

fn id_of(box_: &Value) -> String {
    box_["id"].as_str().expect("an id").to_owned()
}

fn web() -> Value {
    json!({ "services": [{ "name": "web.internal", "port": 8000, "web": true }] })
}

#[test]
fn b42_t14_a_plan_counts_running_and_frozen_boxes() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[("DORMOUSE_BOX_FREEZE_AFTER_SECONDS", "2")]);
        let acme = Acme::new(lab, &json!({ "plan": "free" }));
        let first = id_of(&acme.start(&json!({ "goal": "first" })));
        let frozen = acme.wait_status(&first, "frozen");
        let ids = [1, 2].map(|_| id_of(&acme.start(&Value::Null)));
        let (status, text) = acme.refused("POST", "/v1/boxes", &Value::Null);
        assert_eq!(status, 429);
        let begins = "plan free allows 3 boxes at once and 3 are running or frozen; ";
        assert!(text.starts_with(begins), "{text}");
        let stops_at = frozen["stopsAt"].as_str().expect("B25");
        assert!(text.contains(&format!("the idle rules stop box {first} first, at ")), "{text}");
        assert!(text.contains(&stops_at[..16]), "{text} {stops_at}");
        // Over MCP it is the same answer.
        let mcp = Http::new(lab);
        assert!(mcp.tool("sandbox_list", json!({}))["isError"] != json!(true));
        // T15: a place is waited for as room is.
        let waits = json!({ "waitForCapacitySec": 16 });
        let (status, text) = acme.refused("POST", "/v1/boxes", &waits);
        assert_eq!(status, 429);
        assert!(text.contains("No box was created by this call. Waited 15s and gave up"), "{text}");
        acme.done("DELETE", &format!("/v1/boxes/{}", ids[0]), &Value::Null);
        let started = acme.start(&waits);
        assert_eq!(started["status"], "ready", "{started}");
        assert_eq!(acme.refused("POST", "/v1/boxes", &Value::Null).0, 429);
        // Other accounts have their own.
        done(lab, "POST", "/v1/boxes", &Value::Null);
        acme.stop_all();
    });
}

#[test]
fn b14_b20_without_credit_boxes_freeze_at_once_and_go_on_with_more() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[("DORMOUSE_BOX_PAGE_HOLD_MS", "30000")]);
        let acme = Acme::new(lab, &json!({ "credit": 1000 }));
        let started = acme.start(&web());
        let (id, url) = (id_of(&started), started["webUrl"].as_str().expect("a URL").to_owned());
        acme.background(
            &id,
            "n=0; while :; do n=$((n+1)); echo $n > /work/m; mv /work/m /work/n; sleep 0.1; done",
        );
        acme.sh(&id, "until test -s /work/n; do sleep 0.1; done");
        let credit = |units: u64| {
            let body = json!({ "credit": units });
            done(lab, "PUT", "/v1/accounts/acme/credit", &body)
        };
        credit(3);
        let exec = format!("/v1/boxes/{id}/exec");
        let waits = json!({ "command": "cat /proc/sys/kernel/random/boot_id > /work/boot; sleep 8; echo over > /work/over" });
        let (status, text) = acme.refused("POST", &exec, &waits);
        assert_eq!((status, text.as_str()), (402, "the account has no credit left"));
        acme.wait_status(&id, "frozen");
        assert_eq!(proc::qemus_below(&lab.data()), Vec::<i32>::new(), "nothing of it runs");

        // Nothing thaws it and none is started; telling and stopping go on.
        for (method, path, body) in [
            ("POST", exec.clone(), json!({ "command": "true" })),
            ("POST", format!("/v1/boxes/{id}/wake"), Value::Null),
            ("POST", "/v1/boxes".to_owned(), Value::Null),
        ] {
            assert_eq!(acme.refused(method, &path, &body).0, 402, "{method} {path}");
        }
        let page = get(&url, "GET", &PAGE_LOAD);
        assert_eq!(page.status, 402, "{}", page.head);
        assert!(page.body.contains("This box is paused"), "{}", page.body);
        assert!(!page.body.contains("http-equiv") && page.header("retry-after").is_none());
        let other = get(&url, "GET", &[]);
        assert_eq!(other.status, 402);
        assert_eq!(other.body, r#"{"error":"box is paused","status":"frozen"}"#);
        // Also for the next daemon.
        lab.stop_daemon();
        lab.start();
        assert_eq!(acme.refused("POST", &exec, &json!({ "command": "true" })).0, 402);
        let view = acme.done("GET", &format!("/v1/boxes/{id}"), &Value::Null);
        assert_eq!(view["status"], "frozen");
        let why = view["statusReason"].as_str().expect("why").to_owned();
        assert!(why.contains("has no credit"), "{why}");

        let body = json!({ "credit": 1000 });
        done(lab, "PUT", "/v1/accounts/acme/credit", &body);
        // Both go on where they were, in the same machine.
        let n: u64 = acme.sh(&id, "cat /work/n").parse().expect("a number");
        let line = "cmp /work/boot /proc/sys/kernel/random/boot_id && until test -s /work/over; do sleep 0.1; done; cat /work/over /work/n";
        let told = acme.sh(&id, line);
        let (over, later) = told.split_once('\n').expect("two lines");
        assert_eq!(over, "over");
        assert!(later.parse::<u64>().expect("a number") > n, "{later} {n}");
        let left = done(lab, "GET", "/v1/accounts/acme", &Value::Null);
        assert!(left["credit"].as_u64().expect("counted") <= 1000, "{left}");
        acme.stop_all();
    });
}

#[test]
fn t20_urls_open_from_the_allow_list_alone() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        let acme = Acme::new(lab, &json!({ "urlAllow": ["203.0.113.0/24"] }));
        let started = acme.start(&web());
        let (id, url) = (id_of(&started), started["webUrl"].as_str().expect("a URL").to_owned());
        let access = started["boxUrlAccess"].as_str().expect("T20");
        assert!(access.contains("203.0.113.0/24"), "{access}");
        acme.sh(&id, &format!("cat > /work/e.py <<'END'\n{FORWARDED}END"));
        acme.background(&id, "exec python3 /work/e.py");
        acme.sh(&id, "until ss -ltnH 'sport = :8000' | grep -q . ; do sleep 0.1 ; done");

        // To others it is as one that does not exist; and nobody is believed.
        let nowhere = url.replace(&id, "aaaaaaaaaaaa");
        let stranger = get(&nowhere, "GET", &[]);
        assert_eq!(stranger.status, 404);
        for headers in [vec![], vec![("X-Forwarded-For", "203.0.113.9")]] {
            let answer = get(&url, "GET", &headers);
            assert_eq!((answer.status, &answer.body), (404, &stranger.body));
        }
        let change =
            |list: Value| done(lab, "PATCH", "/v1/accounts/acme", &json!({ "urlAllow": list }));
        change(json!(["127.0.0.0/8", "203.0.113.0/24"]));
        let answer = get(&url, "GET", &[("X-Forwarded-For", "203.0.113.9")]);
        assert_eq!((answer.status, answer.body.as_str()), (200, "['127.0.0.1']"));
        change(json!(["203.0.113.0/24"]));

        // Through a trusted proxy it is whom that was asked by who counts, and who is passed on.
        set_up(lab, &[("DORMOUSE_TRUSTED_PROXIES", "127.0.0.1,10.0.0.0/8")]);
        for (forwarded, expected) in [
            (vec!["203.0.113.9"], Some("203.0.113.9")),
            (vec!["198.51.100.1, 203.0.113.9, 10.1.2.3"], Some("203.0.113.9")),
            (vec!["203.0.113.9, 198.51.100.1"], None),
            (vec!["203.0.113.9", "198.51.100.1"], None),
            (vec!["203.0.113.9, nobody"], None),
            (vec![], None),
        ] {
            let headers: Vec<_> =
                forwarded.iter().map(|value| ("X-Forwarded-For", *value)).collect();
            let answer = get(&url, "GET", &headers);
            match expected {
                Some(from) => assert_eq!(answer.body, format!("['{from}']"), "{forwarded:?}"),
                None => assert_eq!(
                    (answer.status, &answer.body),
                    (404, &stranger.body),
                    "{forwarded:?}"
                ),
            }
        }
        done(lab, "PATCH", "/v1/accounts/acme", &json!({ "urlAllow": null }));
        assert_eq!(get(&url, "GET", &[]).status, 200);
        let view = acme.done("GET", &format!("/v1/boxes/{id}"), &Value::Null);
        assert_eq!(view["boxUrlAccess"], Value::Null, "{view}");
        acme.stop_all();
    });
}

#[test]
fn t13_secrets_are_in_the_environment_of_commands_and_nowhere_else() {
    const VALUE: &str = "hunter2-and-more";
    isolated(test_name!(), |lab| {
        set_up(lab, &[("DORMOUSE_LOG", "debug"), ("RUST_LOG", "debug")]);
        let acme = Acme::new(lab, &json!({}));
        acme.done("PUT", "/v1/secrets/API_TOKEN", &json!({ "value": VALUE }));
        acme.done("PUT", "/v1/secrets/OTHER", &json!({ "value": "not asked for" }));
        let unknown = json!({ "secrets": ["API_TOKEN", "MISSING"] });
        let (status, text) = acme.refused("POST", "/v1/boxes", &unknown);
        assert_eq!((status, text.contains("`MISSING`")), (422, true), "{text}");
        let mut spec = web();
        spec["secrets"] = json!(["API_TOKEN"]);
        let started = acme.start(&spec);
        let id = id_of(&started);
        assert_eq!(started["secrets"], json!(["API_TOKEN"]));
        assert_eq!(acme.sh(&id, "echo \"$API_TOKEN\"-${OTHER-none}"), format!("{VALUE}-none"));
        acme.background(&id, "printf %s \"$API_TOKEN\" | sha256sum > /work/sum");
        acme.sh(&id, "until test -s /work/sum; do sleep 0.1; done");
        let added = json!({ "add": ["OTHER"] });
        let all = acme.done("POST", &format!("/v1/boxes/{id}/secrets"), &added);
        assert_eq!(all, json!({ "secrets": ["API_TOKEN", "OTHER"] }));
        assert_eq!(acme.sh(&id, "echo $OTHER"), "not asked for");

        // The host keeps none of it: what is written of the box, logs and the catalogue have no trace. (Its memory has, which the
        // state of a frozen box is made of.)
        let mut looked_at = 0;
        let mut folders = vec![lab.scratch().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                let meta = std::fs::symlink_metadata(&path).expect("its attributes");
                if meta.is_dir() {
                    folders.push(path);
                } else if meta.is_file() && meta.len() < 8 << 20 {
                    let bytes = std::fs::read(&path).expect("its bytes");
                    let found = bytes.windows(VALUE.len()).any(|part| part == VALUE.as_bytes());
                    assert!(!found, "{} has a secret", path.display());
                    looked_at += 1;
                }
            }
        }
        assert!(looked_at > 5, "{looked_at} files");
        acme.stop_all();
    });
}

#[test]
fn b43_the_command_line_makes_accounts_keys_and_secrets() {
    isolated(test_name!(), |lab| {
        set_up(lab, &[]);
        lab.ok(&["accounts", "create", "acme", "--plan", "pro", "--url-allow", "127.0.0.0/8"]);
        let key = lab.ok(&["keys", "create", "--account", "acme", "--label", "CI"]);
        let acme = Acme(key.trim().to_owned());
        let changed = lab.json(&["accounts", "update", "acme", "--plan", "max", "--no-url-allow"]);
        assert_eq!((&changed["plan"], &changed["urlAllow"]), (&json!("max"), &Value::Null));
        assert_eq!(lab.json(&["accounts", "credit", "acme", "77"])["credit"], json!(77));
        assert_eq!(lab.json(&["accounts", "credit", "acme", "none"])["credit"], Value::Null);
        let file = lab.scratch().join("value");
        std::fs::write(&file, "from a file\n").expect("written");
        let file = file.to_string_lossy().into_owned();
        lab.ok(&["secrets", "set", "MINE", "--file", &file]);
        assert_eq!(lab.json(&["secrets", "list"])[0]["name"], json!("MINE"));
        let id = id_of(&done(lab, "POST", "/v1/boxes", &json!({ "secrets": ["MINE"] })));
        assert_eq!(e2e::boxes::sh(lab, &id, "echo \"$MINE\""), "from a file");
        serve_counter(lab, &id, 8000);
        assert_eq!(acme.refused("GET", &format!("/v1/boxes/{id}"), &Value::Null).0, 404);
        assert_eq!(acme.refused("GET", "/v1/sandboxes", &Value::Null).0, 403);
        // The operator looks after another account's by naming it; nobody else can.
        let theirs = id_of(&acme.start(&json!({ "goal": "theirs" })));
        let token = std::fs::read_to_string(lab.data().join("admin.token")).expect("a token");
        let ask = |key: &str, account, method, path: &str| {
            call_for(key, Some(account), method, path, &Value::Null)
        };
        let (status, seen) = ask(token.trim(), "acme", "GET", "/v1/boxes");
        assert_eq!((status, &seen["boxes"][0]["id"]), (200, &json!(theirs)), "{seen}");
        assert_eq!(ask(token.trim(), "default", "GET", "/v1/boxes").1["boxes"][0]["id"], json!(id));
        let (status, refused) = ask(token.trim(), "nobody", "GET", "/v1/boxes");
        assert_eq!((status, &refused["field"]), (404, &json!("x-dormouse-account")), "{refused}");
        assert_eq!(ask(&acme.0, "default", "GET", "/v1/boxes").0, 403);
        assert_eq!(ask(&acme.0, "acme", "GET", "/v1/boxes").0, 200);
        assert_eq!(lab.json(&["--as-account", "acme", "secrets", "list"]), json!([]));
        assert_eq!(ask(token.trim(), "acme", "DELETE", &format!("/v1/boxes/{theirs}")).0, 204);
        let keys = lab.json(&["keys", "list"]);
        let keys = keys.as_array().expect("keys");
        let mine = keys.iter().find(|key| key["account"] == "acme").expect("the key");
        lab.ok(&["keys", "delete", mine["id"].as_str().expect("an id")]);
        assert_eq!(acme.refused("GET", "/v1/boxes", &Value::Null).0, 401);
        lab.ok(&["secrets", "delete", "MINE"]);
        lab.ok(&["accounts", "delete", "acme"]);
    });
}
