//! Snapshots with names.

use e2e::lab::Lab;
use e2e::{isolated, proc, test_name, until};

/// Counts in memory, and tells its number and a random one on each request.
const COUNTER: &str = r"
import http.server, os
n = 0
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global n
        n += 1
        self.send_response(200); self.end_headers()
        self.wfile.write(b'%d %s' % (n, os.urandom(8).hex().encode()))
    def log_message(self, *a): pass
http.server.HTTPServer(('0.0.0.0', 8000), H).serve_forever(poll_interval=None)
";

fn ask(lab: &Lab, sandbox: &str) -> (u32, String) {
    let link = lab.ok(&["link", sandbox, "8000"]);
    let text = until("it answers", || {
        let answer = e2e::net::follow(link.trim()).ok()?;
        (answer.status == 200).then_some(answer.body)
    });
    let (count, random) = text.split_once(' ').expect("two words");
    (count.parse().expect("a number"), random.to_owned())
}

fn names(lab: &Lab) -> Vec<String> {
    let list = lab.json(&["snapshots", "list"]);
    let all = list.as_array().cloned().expect("a list");
    all.iter().map(|one| one["name"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn s22_a_snapshot_of_an_awake_and_of_a_sleeping_one_makes_others_with_memory() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web", "--env", "A=1", "--env", "B=1"]);
        lab.write_file("web", "/work/counter.py", COUNTER);
        lab.ok(&["exec", "web", "--background", "--", "python3", "/work/counter.py"]);
        assert_eq!(ask(lab, "web").0, 1);
        lab.ok(&["snapshots", "create", "web", "awake"]);
        assert_eq!(ask(lab, "web").0, 2, "it goes on");
        lab.ok(&["sandboxes", "sleep", "web", "--tier", "disk"]);
        let wakes = lab.events("web", "woke").len();
        lab.ok(&["snapshots", "create", "web", "asleep"]);
        assert_eq!(lab.view("web")["status"], "sleeping");
        assert_eq!(lab.events("web", "woke").len(), wakes, "it is not woken for it");
        assert_eq!(names(lab), ["awake", "asleep"]);

        let make = |lab: &Lab, name: &str, snapshot: &str| {
            lab.ok(&["sandboxes", "create", "--name", name, "--snapshot", snapshot, "--env", "B=2"])
        };
        make(lab, "one", "awake");
        make(lab, "two", "awake");
        make(lab, "three", "asleep");
        let (one, two, three) = (ask(lab, "one"), ask(lab, "two"), ask(lab, "three"));
        assert_eq!((one.0, two.0, three.0), (2, 2, 3), "each goes on from its moment");
        assert_ne!(one.1, two.1, "with randomness of its own");
        assert_eq!(lab.sh("one", "echo $A$B; hostname"), "12\none");

        // A snapshot outlasts the sandbox, the daemon, and is not needed by what was made from it.
        lab.ok(&["sandboxes", "delete", "web"]);
        lab.kill_daemon();
        std::fs::create_dir(lab.data().join("snapshots/.making-x")).expect("as a crash leaves it");
        lab.start();
        assert_eq!(names(lab), ["awake", "asleep"]);
        assert!(!lab.data().join("snapshots/.making-x").exists());
        make(lab, "four", "asleep");
        assert_eq!(ask(lab, "four").0, 3);
        lab.ok(&["snapshots", "delete", "awake", "asleep"]);
        assert_eq!(names(lab), Vec::<String>::new());
        lab.ok(&["sandboxes", "sleep", "two", "--tier", "disk"]);
        assert_eq!(ask(lab, "two").0, 3);
        assert!(proc::disk_use(&lab.data().join("snapshots")) < 1 << 20);
    });
}

#[test]
fn s22_what_is_wrong_about_a_snapshot_is_said() {
    isolated(test_name!(), |lab| {
        lab.ok(&["sandboxes", "create", "--name", "web"]);
        lab.ok(&["snapshots", "create", "web", "ready"]);
        let refused = |args: &[&str], with: &str| {
            let output = lab.run(args);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && said.contains(with), "{args:?}: {said}");
        };
        refused(&["snapshots", "create", "web", "ready"], "there already");
        refused(&["snapshots", "create", "web", "../etc"], "not a name");
        refused(&["snapshots", "create", "nobody", "other"], "nobody");
        refused(&["snapshots", "delete", "none"], "no snapshot");
        refused(&["sandboxes", "create", "--snapshot", "none"], "no snapshot `none`");
        refused(&["sandboxes", "create", "--snapshot", "ready", "--cpus", "2"], "cannot be used");
        assert_eq!(names(lab), ["ready"]);
        assert_eq!(lab.json(&["sandboxes", "list"]).as_array().map(Vec::len), Some(1));
    });
}
