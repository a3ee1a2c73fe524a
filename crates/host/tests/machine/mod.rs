//! A guest without a machine: the real agent in this process, behind something that treats sockets as QEMU does.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use guest::{Agent, Settings, system::System};
use host::guest::{Continuity, GuestLink, Identity, Ipv6Network, Mount, Network};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    sync::mpsc,
};

/// For everything in these tests that must come, whatever the machine is busy with.
pub(crate) const LIMIT: Duration = Duration::from_mins(1);

/// A running agent.
pub(crate) struct Machine {
    pub(crate) system: Recorder,
    pub(crate) folder: tempfile::TempDir,
    sockets: mpsc::UnboundedSender<UnixStream>,
}

impl Machine {
    pub(crate) fn boot() -> Self {
        let folder = tempfile::tempdir().expect("temp dir");
        let settings = Settings {
            cgroup: None,
            execs: folder.path().join("exec"),
            awake_socket: None,
            reap_all: false,
            proc: "/proc".into(),
            etc: "/etc".into(),
            versions: wire::VERSIONS,
        };
        let system = Recorder::default();
        let agent = Agent::start(settings, Arc::new(system.clone())).expect("agent starts");
        let (port, device) = UnixStream::pair().expect("pair");
        tokio::spawn(guest::link::serve(agent, port));
        let (sockets, taken) = mpsc::unbounded_channel();
        tokio::spawn(device_of(device, taken));
        Self { system, folder, sockets }
    }

    /// A new socket to the guest, as from a new QEMU or for a new daemon.
    pub(crate) fn socket(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().expect("pair");
        self.sockets.send(theirs).expect("the machine runs");
        ours
    }

    /// A new link that has met the guest.
    pub(crate) async fn link(&self, continuity: Continuity) -> GuestLink {
        let link = GuestLink::random().expect("random");
        link.attach(self.socket(), continuity, LIMIT).await.expect("attach");
        link
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().expect("utf-8").to_owned()
    }
}

/// The virtio-serial device: one socket at a time; while there is none the guest's bytes wait, and what is under way when
/// one goes is lost.
async fn device_of(mut device: UnixStream, mut sockets: mpsc::UnboundedReceiver<UnixStream>) {
    let (mut from_guest, mut to_guest) = device.split();
    while let Some(mut socket) = sockets.recv().await {
        let (mut from_host, mut to_host) = socket.split();
        let down = async {
            let mut bytes = vec![0; 10_000];
            while let Ok(read) = from_host.read(&mut bytes).await
                && read > 0
                && to_guest.write_all(&bytes[..read]).await.is_ok()
            {}
        };
        let up = async {
            let mut bytes = vec![0; 10_000];
            while let Ok(read) = from_guest.read(&mut bytes).await
                && read > 0
                && to_host.write_all(&bytes[..read]).await.is_ok()
            {}
        };
        tokio::select! { () = down => {} () = up => {} }
    }
}

/// Writes down what would have been done to the guest.
#[derive(Debug, Clone, Default)]
pub(crate) struct Recorder {
    pub(crate) calls: Arc<Mutex<Vec<String>>>,
    pub(crate) entropy_fails: Arc<AtomicBool>,
    pub(crate) network_fails: Arc<AtomicBool>,
    pub(crate) mount_fails: Arc<AtomicBool>,
}

impl Recorder {
    pub(crate) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock().expect("not poisoned"))
    }

    fn call(&self, text: impl Into<String>) {
        self.calls.lock().expect("not poisoned").push(text.into());
    }
}

impl System for Recorder {
    fn set_clock(&self, _: i64) -> Result<i64, String> {
        self.call("clock");
        Ok(7)
    }

    fn reseed(&self, entropy: &[u8]) -> Result<(), String> {
        self.call(format!("entropy {}", entropy.len()));
        if self.entropy_fails.load(Ordering::Relaxed) { Err("no luck".into()) } else { Ok(()) }
    }

    fn identify(&self, identity: &Identity) -> Result<(), String> {
        self.call(format!("identity {}", identity.hostname));
        Ok(())
    }

    fn cut_connections(&self) -> Result<(), String> {
        self.call("connections");
        Ok(())
    }

    fn network(&self, network: &Network) -> Result<(), String> {
        self.call(format!("network {:?}", network.address));
        if self.network_fails.load(Ordering::Relaxed) { Err("no card".into()) } else { Ok(()) }
    }

    fn ipv6(&self, network: &Ipv6Network) -> Result<(), String> {
        self.call(format!("ipv6 {}", std::net::Ipv6Addr::from(network.address)));
        Ok(())
    }

    fn mount(&self, mounts: &[Mount]) -> Result<(), String> {
        for mount in mounts {
            let path = String::from_utf8_lossy(&mount.path).into_owned();
            self.call(format!("mount {} {path}", mount.serial));
        }
        if self.mount_fails.load(Ordering::Relaxed) { Err("no disk".into()) } else { Ok(()) }
    }

    fn still_drives(&self) -> Result<(), String> {
        Ok(())
    }

    fn free_drives(&self) -> Result<(), String> {
        Ok(())
    }
}
