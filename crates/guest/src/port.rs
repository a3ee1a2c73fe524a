//! The virtio-serial port, and why it needs more than a file descriptor in the runtime.
//!
//! While no host is attached, `read` gives 0 and `epoll` reports a hang-up that stays. Tokio remembers a hang-up for ever,
//! so a plain `AsyncFd` would spin. The port is therefore watched by an epoll instance of its own, edge-triggered, and only
//! that one is given to the runtime: it becomes readable once per change and never hangs up.
//!
//! Learnt from the driver: a write takes at most 32 KiB, and gives `EAGAIN` while nobody is attached or the queue is full; the
//! port can be opened once only; the agent's descriptor stays good when the host's socket is replaced.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    event::epoll,
    fs::{Mode, OFlags},
    io::Errno,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::UnixStream,
    sync::Notify,
};

/// Something that carries the protocol's bytes. Read and write may be waited for at the same time.
pub trait Transport: Send + Sync + 'static {
    /// Reads at least one byte; 0 means that the transport is over for good.
    fn read(&self, into: &mut [u8]) -> impl Future<Output = io::Result<usize>> + Send;
    /// Writes at least one byte.
    fn write(&self, bytes: &[u8]) -> impl Future<Output = io::Result<usize>> + Send;
}

impl Transport for UnixStream {
    async fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            self.readable().await?;
            match self.try_read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
        }
    }

    async fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            self.writable().await?;
            match self.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
        }
    }
}

/// An open port.
#[derive(Debug)]
pub struct Port {
    file: OwnedFd,
    changed: Arc<Changed>,
}

#[derive(Debug, Default)]
struct Changed {
    readable: Notify,
    writable: Notify,
}

impl Port {
    /// Opens a port's device. Must be called within the runtime.
    pub fn open(device: &Path) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = rustix::fs::open(device, flags, Mode::empty())?;
        let watch = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let interest = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&watch, &file, epoll::EventData::new_u64(0), interest)?;
        // SAFETY: an `OwnedFd` owns its descriptor: it stays open and the same until the `AsyncFd`, which never gives it
        // out, is dropped.
        #[expect(unsafe_code, reason = "registering a descriptor with the runtime")]
        let watch = unsafe { AsyncFd::register_with_interest(watch, Interest::READABLE)? };
        let changed = Arc::new(Changed::default());
        tokio::spawn(pass_changes(watch, Arc::clone(&changed)));
        Ok(Self { file, changed })
    }
}

impl Transport for Port {
    async fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::io::read(&self.file, &mut *into) {
                // 0: no host is attached. One may come.
                Ok(0) | Err(Errno::AGAIN | Errno::INTR) => self.changed.readable.notified().await,
                Ok(read) => return Ok(read),
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match rustix::io::write(&self.file, bytes) {
                Ok(0) | Err(Errno::AGAIN | Errno::INTR) => self.changed.writable.notified().await,
                Ok(written) => return Ok(written),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

async fn pass_changes(watch: AsyncFd<OwnedFd>, changed: Arc<Changed>) {
    while let Ok(mut ready) = watch.readable().await {
        // Cleared before looking: a change in between is then seen by the look or makes it ready again.
        ready.clear_ready();
        // One descriptor is watched, so one event is all there can be.
        let mut events = Vec::with_capacity(1);
        let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        if let Err(error) = epoll::wait(
            watch.get_ref(),
            rustix::buffer::spare_capacity(&mut events),
            Some(&at_once),
        ) {
            eprintln!("watch the port: {error}");
        }
        // A permit is kept if nobody waits just now, so no change is lost.
        changed.readable.notify_one();
        changed.writable.notify_one();
    }
}

/// Finds the device of the port with the protocol's name.
pub fn find(sys: &Path, dev: &Path) -> io::Result<Option<PathBuf>> {
    let ports = match fs::read_dir(sys.join("class/virtio-ports")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        ports => ports?,
    };
    for port in ports {
        let port = port?;
        if fs::read_to_string(port.path().join("name"))?.trim_end() == wire::PORT_NAME {
            return Ok(Some(dev.join(port.file_name())));
        }
    }
    Ok(None)
}
