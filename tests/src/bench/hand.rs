//! Doing it by hand: the same QEMU with the same command line over a copy of the same guest, and nothing of ours.
//!
//! The image is taken from a running guest, so that nothing in it waits for us: a guest that the daemon put to sleep has
//! its programs frozen until the daemon says otherwise.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{SeekFrom, copy_file_range, seek};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::Signal;
use serde_json::Value;

use super::qmp::Qmp;
use crate::{net, proc, until};

/// The daemon's address towards guests, and the hardware address that they know it by.
const GATEWAY: &str = "10.118.0.1";
const GATEWAY_MAC: &str = "02:64:6d:00:00:01";

/// Where the bare server listens, in each guest.
pub(crate) const BARE_PORT: u16 = 7001;

/// What a machine consists of, in its folder.
const MEMORY: &str = "memory";
const DISK: &str = "disk.qcow2";
const STATE: &str = "state";

/// A guest's memory, disk and devices of one moment, and the command line of its QEMU.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    folder: PathBuf,
    /// QEMU's command line; paths are those of the sandbox it was taken from.
    line: Vec<String>,
    /// Where the sandbox's files were.
    origin: String,
    /// The guest's address.
    pub(crate) address: String,
    tap: String,
}

impl Image {
    /// Takes an image of a running sandbox whose daemon is dead.
    #[track_caller]
    pub(crate) fn take(origin: &Path, address: &str, folder: PathBuf) -> Self {
        let pids = proc::qemus_below(origin);
        let [pid] = pids[..] else { panic!("not one QEMU below {}: {pids:?}", origin.display()) };
        let line = fs::read(format!("/proc/{pid}/cmdline")).expect("command line of QEMU");
        let line =
            line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
        let mut line: Vec<String> = line.collect();
        line.pop();
        fs::create_dir_all(&folder).expect("folder for an image");
        let mut qmp = Qmp::open(&origin.join("qmp.sock"));
        qmp.run("stop", &Value::Null);
        qmp.agree();
        let state = qmp.save();
        for part in [MEMORY, DISK] {
            copy_sparse(&origin.join(part), &folder.join(part));
        }
        qmp.run("cont", &Value::Null);
        write_synced(&folder.join(STATE), &state);
        for part in [MEMORY, DISK] {
            sync(&folder.join(part));
        }
        let last = address.rsplit('.').next().expect("an address");
        let origin = origin.to_string_lossy().into_owned();
        Self { folder, line, origin, address: address.to_owned(), tap: format!("hand{last}") }
    }

    /// Makes the guest's link, once its sandbox is deleted.
    pub(crate) fn link_up(&self) {
        let octets = self.address.split('.').map(|octet| octet.parse::<u8>().expect("an octet"));
        let guest_mac = octets.fold("06:64".to_owned(), |mac, octet| format!("{mac}:{octet:02x}"));
        let (tap, to) = (self.tap.as_str(), format!("{}/32", self.address));
        for arguments in [
            vec!["tuntap", "add", tap, "mode", "tap", "vnet_hdr"],
            vec!["link", "set", tap, "address", GATEWAY_MAC],
            vec!["link", "set", tap, "up"],
            vec![
                "neighbour",
                "replace",
                &self.address,
                "lladdr",
                &guest_mac,
                "dev",
                tap,
                "nud",
                "permanent",
            ],
            vec!["route", "replace", &to, "dev", tap, "src", GATEWAY],
        ] {
            net::output("ip", &arguments);
        }
    }

    /// Removes the link.
    #[track_caller]
    pub(crate) fn link_down(&self) {
        net::output("ip", &["link", "delete", &self.tap]);
    }

    /// QEMU itself.
    pub(crate) fn program(&self) -> String {
        self.line.first().cloned().unwrap_or_default()
    }

    /// The value of an option of its command line.
    pub(crate) fn option(&self, name: &str) -> Option<String> {
        let at = self.line.iter().position(|word| word == name)?;
        self.line.get(at + 1).cloned()
    }

    /// Bytes that its memory takes on disk.
    pub(crate) fn memory_bytes(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(self.folder.join(MEMORY)).expect("the image's memory").blocks() * 512
    }

    /// A copy of it, to be run.
    pub(crate) fn copy(&self, folder: PathBuf) -> Machine {
        fs::create_dir_all(&folder).expect("folder for a machine");
        for part in [MEMORY, DISK, STATE] {
            copy_sparse(&self.folder.join(part), &folder.join(part));
        }
        Machine { image: self.clone(), folder, process: None }
    }
}

/// A machine that is run by hand; asleep on disk at first.
#[derive(Debug)]
pub(crate) struct Machine {
    image: Image,
    folder: PathBuf,
    process: Option<(Child, Qmp)>,
}

/// How long the steps of a wake took, as the timeline has them for ours.
pub(crate) type Woke = [(&'static str, Duration); 3];

/// The moments of a sleep, and how long its steps took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slept {
    pub(crate) begun: Instant,
    pub(crate) published: Instant,
    pub(crate) steps: [(&'static str, Duration); 5],
}

impl Machine {
    /// Starts QEMU, loads the state, lets the guest go on.
    #[track_caller]
    pub(crate) fn wake(&mut self) -> Woke {
        assert!(self.process.is_none(), "it is awake");
        let begun = Instant::now();
        let state = fs::read(self.folder.join(STATE)).expect("the state");
        let child = self.spawn();
        let mut qmp = Qmp::open(&self.folder.join("qmp.sock"));
        qmp.agree();
        let spawned = Instant::now();
        qmp.load(&state);
        let loaded = Instant::now();
        qmp.run("cont", &Value::Null);
        let woke =
            [("spawn", spawned - begun), ("load", loaded - spawned), ("cont", loaded.elapsed())];
        self.process = Some((child, qmp));
        woke
    }

    /// Has the guest write everything to its disk, stops it, saves and syncs everything and publishes it; then ends QEMU.
    #[track_caller]
    pub(crate) fn sleep(&mut self, bare: &mut Bare) -> Slept {
        let (mut child, mut qmp) = self.process.take().expect("it is awake");
        let begun = Instant::now();
        let mut last = begun;
        let mut step = |name| (name, std::mem::replace(&mut last, Instant::now()).elapsed());
        bare.order(b's');
        let guest = step("guest");
        qmp.run("stop", &Value::Null);
        let pause = step("pause");
        qmp.agree();
        let state = qmp.save();
        write_synced(&self.folder.join(STATE), &state);
        let save = step("save");
        sync(&self.folder.join(MEMORY));
        sync(&self.folder.join(DISK));
        let synced = step("sync");
        write_synced(&self.folder.join("manifest.new"), b"{\"state\": \"asleep\"}");
        fs::rename(self.folder.join("manifest.new"), self.folder.join("manifest.json"))
            .expect("published");
        let publish = step("publish");
        let published = Instant::now();
        File::open(&self.folder).and_then(|folder| folder.sync_all()).expect("folder synced");
        qmp.run("quit", &Value::Null);
        child.wait().expect("QEMU ends");
        Slept { begun, published, steps: [guest, pause, save, synced, publish] }
    }

    /// Pauses, saves, copies everything, goes on: a copy of a running machine.
    #[track_caller]
    pub(crate) fn copy_running(&mut self, to: &Path) {
        let (_, qmp) = self.process.as_mut().expect("it is awake");
        fs::create_dir_all(to).expect("folder for a copy");
        qmp.run("stop", &Value::Null);
        qmp.agree();
        let state = qmp.save();
        for part in [MEMORY, DISK] {
            copy_sparse(&self.folder.join(part), &to.join(part));
        }
        qmp.run("cont", &Value::Null);
        fs::write(to.join(STATE), state).expect("the state is written");
        fs::remove_dir_all(to).expect("the copy is removed");
    }

    /// Puts it to sleep without anybody looking.
    #[track_caller]
    pub(crate) fn end(&mut self) {
        let mut bare = Bare::open(&self.image.address);
        self.sleep(&mut bare);
    }

    /// Stops the process where it is.
    #[track_caller]
    pub(crate) fn stop(&self) {
        let pid = self.pid();
        proc::kill(pid, Signal::STOP);
        until("QEMU is stopped", || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            stat.rsplit_once(')')
                .is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
                .then_some(())
        });
    }

    /// Lets the stopped process go on.
    pub(crate) fn go_on(&self) {
        proc::kill(self.pid(), Signal::CONT);
    }

    /// Ends QEMU and removes its files.
    #[track_caller]
    pub(crate) fn remove(mut self) {
        self.kill();
        fs::remove_dir_all(&self.folder).expect("files removed");
    }

    #[track_caller]
    fn pid(&self) -> i32 {
        let (child, _) = self.process.as_ref().expect("it is awake");
        i32::try_from(child.id()).expect("a process id")
    }

    fn kill(&mut self) {
        if let Some((mut child, _)) = self.process.take() {
            child.kill().expect("QEMU is killed");
            child.wait().expect("QEMU ends");
        }
    }

    fn spawn(&self) -> Child {
        // QEMU is given sockets that listen already, so that nobody has to try again and again until it does.
        let sockets = ["qmp.sock", "guest.sock"].map(|name| {
            let path = self.folder.join(name);
            // A socket that is left from last time; when there is none that is as good.
            let _ = fs::remove_file(&path);
            let socket = UnixListener::bind(&path).expect("a socket for QEMU");
            fcntl_setfd(&socket, FdFlags::empty()).expect("a socket to be inherited");
            socket
        });
        let log = File::create(self.folder.join("qemu.out")).expect("a log for QEMU");
        let line = self.line(&sockets);
        let (program, arguments) = line.split_first().expect("a command line");
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        command.stdout(log.try_clone().expect("descriptor duplicated")).stderr(log);
        command.spawn().expect("QEMU starts")
    }

    /// The command line, with this machine's files, sockets and tap.
    fn line(&self, sockets: &[UnixListener; 2]) -> Vec<String> {
        use std::os::fd::AsRawFd;
        let mut line = Vec::new();
        let mut words = self.image.line.iter();
        while let Some(word) = words.next() {
            let word = word.replace(&self.image.origin, &self.folder.to_string_lossy());
            // A machine that was booted is restored like any other.
            if ["-kernel", "-initrd", "-append"].contains(&word.as_str()) {
                words.next();
                continue;
            }
            let listening = |id, socket: &UnixListener| {
                format!("socket,id={id},fd={},server=on,wait=off", socket.as_raw_fd())
            };
            line.push(match word.split(',').next().unwrap_or_default() {
                "socket" if word.contains("id=qmp") => listening("qmp", &sockets[0]),
                "socket" if word.contains("id=guest") => listening("guest", &sockets[1]),
                "tap" => format!(
                    "tap,id=net,ifname={},script=no,downscript=no,vnet_hdr=on",
                    self.image.tap
                ),
                _ => word,
            });
        }
        if !line.iter().any(|word| word == "-incoming") {
            line.extend(["-S", "-incoming", "defer"].map(str::to_owned));
        }
        line
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A connection to the bare server in a guest.
#[derive(Debug)]
pub(crate) struct Bare(TcpStream);

impl Bare {
    /// Connects as soon as it can be.
    #[track_caller]
    pub(crate) fn open(address: &str) -> Self {
        Self(net::connect(address, BARE_PORT))
    }

    /// Has an order carried out.
    #[track_caller]
    pub(crate) fn order(&mut self, order: u8) {
        self.0.write_all(&[order]).expect("order sent");
        let mut done = [0];
        self.0.read_exact(&mut done).expect("order carried out");
        assert_eq!(done[0], order);
    }
}

/// Copies what is not a hole.
#[track_caller]
pub(crate) fn copy_sparse(from: &Path, to: &Path) {
    let source = File::open(from).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    let target = File::create(to).unwrap_or_else(|error| panic!("{}: {error}", to.display()));
    target.set_len(source.metadata().expect("length").len()).expect("length set");
    let mut at = 0;
    loop {
        match seek(&source, SeekFrom::Data(at)) {
            Ok(data) => at = data,
            Err(Errno::NXIO) => return,
            Err(errno) => panic!("{}: {errno}", from.display()),
        }
        let end = seek(&source, SeekFrom::Hole(at)).expect("end of data");
        let mut written = at;
        while at < end {
            let left = usize::try_from(end - at).expect("a length");
            let copied = copy_file_range(&source, Some(&mut at), &target, Some(&mut written), left)
                .expect("copied");
            assert!(copied > 0, "{} has become shorter", from.display());
        }
    }
}

#[track_caller]
fn write_synced(path: &Path, bytes: &[u8]) {
    let mut file = File::create(path).expect("file created");
    file.write_all(bytes).and_then(|()| file.sync_data()).expect("file written");
}

#[track_caller]
fn sync(path: &Path) {
    File::open(path).and_then(|file| file.sync_data()).expect("file synced");
}
