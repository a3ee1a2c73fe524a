//! A daemon under test, with its data folder and its command line.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use rustix::process::Signal;
use serde_json::Value;

use crate::{proc, until};

/// How many clones the daemon keeps ready.
pub const POOL: &str = "DORMOUSE_POOL";

/// Set in the re-executed test: it is in its own network namespace already.
const INSIDE: &str = "DORMOUSE_E2E_INSIDE";

/// Where the daemon under test listens, in its own namespace.
pub const LISTEN: &str = "127.0.0.1:8420";

/// An HTTP server in Python that waits for nothing but requests (`http.server` itself looks twice a second whether it shall
/// stop, a timer that keeps a sandbox awake). Arguments: address, port.
pub const LISTEN_PROGRAM: &str = "import sys, http.server as h\n\
    h.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), h.SimpleHTTPRequestHandler).serve_forever(poll_interval=None)";

/// Runs a test in a network namespace of its own, with a fresh daemon. `name` from [`test_name`](crate::test_name).
#[track_caller]
pub fn isolated(name: &str, test: impl FnOnce(&mut Lab)) {
    isolated_on(name, None, test);
}

/// As [`isolated`], with the data folder on a file system of this many MiB.
#[track_caller]
pub fn isolated_on_small_disk(name: &str, mib: u32, test: impl FnOnce(&mut Lab)) {
    isolated_on(name, Some(mib), test);
}

#[track_caller]
fn isolated_on(name: &str, disk_mib: Option<u32>, test: impl FnOnce(&mut Lab)) {
    if std::env::var_os(INSIDE).is_none() {
        let itself = std::env::current_exe().expect("path of the test program");
        let status = Command::new("unshare")
            .args(["--net", "--mount", "--"])
            .arg(itself)
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .env(INSIDE, "1")
            .stdin(Stdio::null())
            .status()
            .expect("`unshare` (util-linux) starts");
        assert!(status.success(), "{name} failed in its network namespace: {status}");
        return;
    }
    crate::net::output("ip", &["link", "set", "lo", "up"]);
    let mut lab = Lab::new(name);
    if let Some(mib) = disk_mib {
        let data = lab.data();
        std::fs::create_dir_all(&data).expect("data folder");
        let size = format!("size={mib}m,mode=711");
        crate::net::output(
            "mount",
            &["-t", "tmpfs", "-o", &size, "tmpfs", &data.to_string_lossy()],
        );
    }
    lab.start();
    test(&mut lab);
    lab.tear_down();
}

/// A daemon, its folder and its command line.
#[derive(Debug)]
pub struct Lab {
    folder: tempfile::TempDir,
    daemon: Option<Child>,
    starts: u32,
    /// Where it listens; another than [`LISTEN`] where two daemons run side by side.
    pub listen: String,
    /// More environment for the daemon, such as a fault to plant.
    pub daemon_env: Vec<(String, String)>,
}

impl Lab {
    /// A lab without a daemon yet. For programs that are in a network namespace of their own already; tests call
    /// [`isolated`].
    pub fn new(name: &str) -> Self {
        let base = root().join("runs");
        std::fs::create_dir_all(&base).expect("folder for runs");
        // Short: the daemon's socket is below it, and paths of sockets have 107 bytes.
        let prefix: String = name.chars().take(12).filter(char::is_ascii_alphanumeric).collect();
        let folder = tempfile::Builder::new()
            .prefix(&format!("{prefix}-"))
            .tempdir_in(base)
            .expect("temp folder");
        // Guests' processes have accounts of their own and must be able to get to their files.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o711);
        std::fs::set_permissions(folder.path(), mode).expect("permissions");
        Self { folder, daemon: None, starts: 0, listen: LISTEN.to_owned(), daemon_env: Vec::new() }
    }

    /// The daemon's data folder.
    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// A folder for the test's own files.
    pub fn scratch(&self) -> &Path {
        self.folder.path()
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.listen.parse().expect("an address")
    }

    /// Process id of the daemon.
    #[track_caller]
    pub fn daemon_pid(&self) -> i32 {
        let daemon = self.daemon.as_ref().expect("the daemon runs");
        i32::try_from(daemon.id()).expect("a process id")
    }

    /// Starts the daemon and waits until it answers.
    #[track_caller]
    pub fn start(&mut self) {
        self.launch();
        self.wait_ready();
    }

    /// Starts the daemon.
    #[track_caller]
    pub fn launch(&mut self) {
        assert!(self.daemon.is_none(), "the daemon runs already");
        self.starts += 1;
        let log = File::create(self.folder.path().join(format!("daemon-{}.log", self.starts)))
            .expect("log file");
        let mut command = Command::new(dormouse());
        command
            .args(["serve", "--listen", &self.listen])
            .envs(self.env())
            .envs(self.daemon_env.iter().cloned());
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("log file")).stderr(log);
        self.daemon = Some(command.spawn().expect("the daemon starts"));
    }

    /// Waits until the daemon answers.
    #[track_caller]
    pub fn wait_ready(&mut self) {
        let address = self.address();
        until("the daemon answers", || {
            let daemon = self.daemon.as_mut()?;
            let ended = daemon.try_wait().expect("state of the daemon");
            assert!(ended.is_none(), "the daemon ended: {ended:?}\n{}", self.daemon_log());
            crate::net::http(address, "localhost", "/v1/health")
                .ok()
                .filter(|answer| answer.status == 200)
        });
    }

    /// Kills the daemon as a crash would; its guests live on.
    #[track_caller]
    pub fn kill_daemon(&mut self) {
        let mut daemon = self.daemon.take().expect("the daemon runs");
        daemon.kill().expect("killed");
        daemon.wait().expect("gone");
    }

    /// Takes note of a daemon that has ended by itself.
    #[track_caller]
    pub fn reap_daemon(&mut self) {
        self.daemon.take().expect("a daemon was there").wait().expect("gone");
    }

    /// Whether the daemon has ended by itself, in order; takes note of that. One that has ended otherwise fails the test.
    #[track_caller]
    pub fn has_ended_in_order(&mut self) -> bool {
        let daemon = self.daemon.as_mut().expect("a daemon was there");
        let Some(status) = daemon.try_wait().expect("state of the daemon") else { return false };
        assert!(status.success(), "the daemon ended with {status}\n{}", self.daemon_log());
        self.daemon = None;
        true
    }

    /// Asks the daemon to end and waits for it.
    #[track_caller]
    pub fn stop_daemon(&mut self) {
        let pid = self.daemon_pid();
        proc::kill(pid, Signal::TERM);
        let status = self.daemon.take().expect("the daemon runs").wait().expect("gone");
        assert!(status.success(), "the daemon ended with {status}\n{}", self.daemon_log());
    }

    /// What the daemon has logged since its last start.
    pub fn daemon_log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join(format!("daemon-{}.log", self.starts)))
            .unwrap_or_default()
    }

    /// A command line of `dormouse`, not yet started.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(dormouse());
        command.args(arguments).envs(self.env()).current_dir(workspace()).stdin(Stdio::null());
        command
    }

    /// Runs `dormouse …` to its end, whatever it is.
    #[track_caller]
    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("`dormouse` starts")
    }

    /// Standard output of `dormouse …`, which must succeed.
    #[track_caller]
    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "dormouse {arguments:?}: {}\n{stderr}\n{}",
            output.status,
            self.daemon_log()
        );
        String::from_utf8(output.stdout).expect("text")
    }

    /// As [`ok`](Self::ok), as JSON.
    #[track_caller]
    pub fn json(&self, arguments: &[&str]) -> Value {
        let text = self.ok(&[&["--json"], arguments].concat());
        serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("dormouse {arguments:?}: {error}: {text}"))
    }

    /// Runs a shell line in a sandbox and answers its standard output, without the last line break.
    #[track_caller]
    pub fn sh(&self, sandbox: &str, line: &str) -> String {
        self.ok(&["exec", sandbox, "--", "sh", "-c", line]).trim_end_matches('\n').to_owned()
    }

    /// Writes a file into a sandbox.
    #[track_caller]
    pub fn write_file(&self, sandbox: &str, path: &str, text: &str) {
        let local = self.folder.path().join("put");
        std::fs::write(&local, text).expect("file written");
        self.ok(&["files", "put", &local.to_string_lossy(), &format!("{sandbox}:{path}")]);
    }

    /// The program under test.
    pub fn program(&self) -> PathBuf {
        dormouse()
    }

    /// What is told about a sandbox.
    #[track_caller]
    pub fn view(&self, sandbox: &str) -> Value {
        self.json(&["sandboxes", "get", sandbox])
    }

    /// Waits until a sandbox has this status.
    #[track_caller]
    pub fn wait_status(&self, sandbox: &str, status: &str) -> Value {
        until(&format!("{sandbox} is {status}"), || {
            let view = self.view(sandbox);
            (view["status"] == status).then_some(view)
        })
    }

    /// The timeline of a sandbox: events of one kind (without `sandbox.`), or all for "".
    #[track_caller]
    pub fn events(&self, sandbox: &str, kind: &str) -> Vec<Value> {
        let text = self.ok(&["events", sandbox, "--json"]);
        let wanted = format!("sandbox.{kind}");
        let events = text
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).expect("an event per line"));
        events.filter(|event| kind.is_empty() || event["type"] == wanted.as_str()).collect()
    }

    /// The environment of the daemon and the command line.
    pub fn env(&self) -> Vec<(String, String)> {
        let shared = root();
        let path = |path: PathBuf| path.to_string_lossy().into_owned();
        let or =
            |name: &str, default: PathBuf| std::env::var(name).unwrap_or_else(|_| path(default));
        vec![
            // Where processes are counted, those that nobody has asked for would only be in the way.
            (POOL.to_owned(), "0".to_owned()),
            ("DORMOUSE_DATA".to_owned(), path(self.data())),
            ("DORMOUSE_IMAGES".to_owned(), or("DORMOUSE_IMAGES", shared.join("images"))),
            ("DORMOUSE_TEMPLATES".to_owned(), or("DORMOUSE_TEMPLATES", shared.join("templates"))),
        ]
    }

    /// Prints a line for each guest that is there at the end, for whoever wants to know on what a rule was proven:
    /// `guest web: QEMU 1234, boot id 5f3c…, tiers memory, disk`. Wakes none: one that sleeps on disk has no QEMU.
    fn tell_guests(&self, all: &Value) {
        let qemus = proc::qemus_below(&self.data());
        for sandbox in all.as_array().into_iter().flatten() {
            let (id, name) = (sandbox["id"].as_str().unwrap_or(""), sandbox["name"].as_str());
            let mut tiers: Vec<String> = Vec::new();
            for slept in self.events(id, "slept").iter().chain(&self.events(id, "demoted")) {
                let tier = slept["data"]["tier"].as_str().unwrap_or("").to_owned();
                if !tiers.contains(&tier) {
                    tiers.push(tier);
                }
            }
            let tiers = if tiers.is_empty() { "none".to_owned() } else { tiers.join(", ") };
            let own = qemus.iter().find(|pid| {
                let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                !id.is_empty() && String::from_utf8_lossy(&line).contains(id)
            });
            let qemu = own.map_or_else(|| "none".to_owned(), i32::to_string);
            let is_awake = sandbox["status"] == "running" && sandbox["waits_for"].is_null();
            let boot = is_awake.then(|| self.boot_id(id)).flatten();
            let boot = boot.unwrap_or_else(|| "not asked".to_owned());
            println!("guest {}: QEMU {qemu}, boot id {boot}, tiers {tiers}", name.unwrap_or(id));
        }
    }

    fn boot_id(&self, sandbox: &str) -> Option<String> {
        let asked = self.run(&["exec", sandbox, "--", "cat", "/proc/sys/kernel/random/boot_id"]);
        let id = String::from_utf8(asked.stdout).ok()?.trim().to_owned();
        (asked.status.success() && !id.is_empty()).then_some(id)
    }

    /// Deletes every sandbox, ends the daemon, and looks that nothing is left.
    #[track_caller]
    pub fn tear_down(&mut self) {
        if self.daemon.is_none() {
            return;
        }
        let all = self.json(&["sandboxes", "list"]);
        self.tell_guests(&all);
        for sandbox in all.as_array().into_iter().flatten() {
            self.ok(&["sandboxes", "delete", sandbox["id"].as_str().expect("an id")]);
        }
        let boxes = crate::boxes::call(self, "GET", "/v1/boxes", &Value::Null).1;
        for id in boxes["boxes"].as_array().into_iter().flatten().map(|one| &one["id"]) {
            let path = format!("/v1/boxes/{}", id.as_str().expect("an id"));
            crate::boxes::call(self, "DELETE", &path, &Value::Null);
        }
        if !self.daemon_env.iter().any(|(name, _)| name == POOL) {
            assert_eq!(proc::qemus_below(&self.data()), Vec::<i32>::new(), "QEMUs are left");
        }
        self.stop_daemon();
        assert_eq!(proc::qemus_below(&self.data()), Vec::<i32>::new(), "QEMUs are left");
        assert_eq!(crate::net::taps(), Vec::<String>::new(), "taps are left");
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- daemon log ---\n{}", self.daemon_log());
        }
        if let Some(mut daemon) = self.daemon.take() {
            // A failed test still ends what it has started; nothing more can be done about errors here.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        for pid in proc::qemus_below(&self.data()) {
            proc::kill(pid, Signal::KILL);
        }
    }
}

/// Where everything that tests make lies: `DORMOUSE_E2E`, or a folder below `target`. Accounts of guests must be able to enter it.
fn root() -> PathBuf {
    std::env::var_os("DORMOUSE_E2E").map_or_else(|| workspace().join("target/e2e"), PathBuf::from)
}

/// Root of the workspace.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

/// The program under test: `DORMOUSE_BIN`, or the one beside the test.
fn dormouse() -> PathBuf {
    std::env::var_os("DORMOUSE_BIN")
        .map_or_else(|| workspace().join("target/debug/dormouse"), PathBuf::from)
}
