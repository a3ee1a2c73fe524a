//! The cgroup (v2) of the user's programs, and a child of it for each exec.
//!
//! No controller is enabled: `cpu.stat` has `usage_usec`, and freezing and killing work without any.

use std::{
    fs::{self, File},
    io::{self, Read, Seek},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags};
use tokio::io::{Interest, unix::AsyncFd};

/// One cgroup.
#[derive(Debug, Clone)]
pub(crate) struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Makes the cgroup unless it is there.
    pub(crate) fn make(path: PathBuf) -> io::Result<Self> {
        match fs::create_dir(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(Self { path }),
        }
    }

    /// Makes a child.
    pub(crate) fn child(&self, name: &str) -> io::Result<Self> {
        Self::make(self.path.join(name))
    }

    /// The file to which a process writes `0` to enter.
    pub(crate) fn entry(&self) -> io::Result<OwnedFd> {
        let procs = self.path.join("cgroup.procs");
        Ok(rustix::fs::open(&procs, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// The cgroup itself, for what the kernel is to do with it.
    pub(crate) fn open(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::open(&self.path, flags, Mode::empty())?)
    }

    /// Kills every process in it.
    pub(crate) fn kill(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.kill"), "1")
    }

    /// Removes it if no process is left. True if it is gone.
    pub(crate) fn remove_if_empty(&self) -> bool {
        match fs::remove_dir(&self.path) {
            Ok(()) => true,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    /// Freezes all processes in it and below; answers when they are frozen.
    pub(crate) async fn freeze(&self) -> io::Result<()> {
        let path = self.path.join("cgroup.events");
        let file = File::open(&path)?;
        fs::write(self.path.join("cgroup.freeze"), "1")?;
        // They freeze when it is their turn, which they are given here: most often all of them at once. Being told is far slower.
        for _ in 0..TURNS_TO_FREEZE {
            rustix::thread::sched_yield();
            if has(&file, "frozen 1")? {
                return Ok(());
            }
        }
        Events::of(file)?.wait_for("frozen 1").await
    }

    /// Lets them go on.
    pub(crate) fn thaw(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.freeze"), "0")
    }

    /// Processor time of all processes that are or were in it, in microseconds.
    pub(crate) fn cpu_usec(path: &Path) -> io::Result<u64> {
        let stat = fs::read_to_string(path.join("cpu.stat"))?;
        stat.lines()
            .find_map(|line| line.strip_prefix("usage_usec ")?.parse().ok())
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "cpu.stat: no usage_usec"))
    }
}

/// Turns that programs are given to freeze before the kernel is asked to tell when they have.
const TURNS_TO_FREEZE: usize = 8;

/// Whether a file has this line.
fn has(mut file: &File, line: &str) -> io::Result<bool> {
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    Ok(text.lines().any(|found| found == line))
}

/// `cgroup.events`: the kernel signals a change by an exceptional condition on the open file.
struct Events(AsyncFd<File>);

impl Events {
    fn of(file: File) -> io::Result<Self> {
        // SAFETY: a `File` owns its descriptor: it stays open and the same until the `AsyncFd`, which gives out no more than
        // a reference, is dropped.
        #[expect(unsafe_code, reason = "registering a descriptor with the runtime")]
        let file = unsafe { AsyncFd::register_with_interest(file, Interest::PRIORITY)? };
        Ok(Self(file))
    }

    async fn wait_for(&self, line: &str) -> io::Result<()> {
        loop {
            if has(self.0.get_ref(), line)? {
                return Ok(());
            }
            self.0.ready(Interest::PRIORITY).await?.clear_ready();
        }
    }
}
