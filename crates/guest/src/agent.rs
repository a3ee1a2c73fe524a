//! What the agent is, apart from any link: the execs, the holds, and whether the guest stands still.

use std::{
    os::fd::AsFd,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::sync::watch;
use wire::{
    Ipv6Network, LoopbackWay, Mount, Quiesce, Quiesced, Step, StepOutcome, StepReport,
    VersionRange, Wake, Woke,
};

use crate::{awake::Holds, cgroup::Cgroup, exec::Execs, loopback::Loopback, system::System};

/// Turns that the runtime is given before a program is started: in each, it looks at all descriptors, and then runs
/// every task that is ready. From the device to the reader of the link it takes two, so in the third all has been read.
const TURNS_TO_READ: usize = 3;

/// Where the agent finds and puts things.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The cgroup (v2) of the user's programs. `None`, for tests without one: programs are killed by process group, and
    /// nothing can be frozen.
    pub cgroup: Option<PathBuf>,
    /// Output of execs is kept below this directory, which is emptied at the start.
    pub execs: PathBuf,
    /// Socket on which programs hold the sandbox awake; `None`: not offered.
    pub awake_socket: Option<PathBuf>,
    /// Whether to reap all children, also those that were orphaned elsewhere: for pid 1.
    pub reap_all: bool,
    /// `/proc`.
    pub proc: PathBuf,
    /// `/etc`, for `passwd` and `group`.
    pub etc: PathBuf,
    /// Versions of the protocol that it speaks; what later ones have it does not understand.
    pub versions: VersionRange,
}

/// The agent.
#[derive(Debug)]
pub struct Agent {
    pub(crate) settings: Settings,
    pub(crate) execs: Execs,
    pub(crate) holds: Arc<Holds>,
    cgroup: Option<Cgroup>,
    system: Arc<dyn System>,
    boot: [u8; 16],
    quiesced: watch::Sender<bool>,
    starts: tokio::sync::Mutex<()>,
    owed: Mutex<Owed>,
    /// Number of the attempt to stand still.
    stills: Arc<AtomicU64>,
    /// Where ports of the loopback lead; begun when the first does.
    loopback: Mutex<Option<Loopback>>,
}

/// What the kernel is to let go of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flush {
    /// Changes, to the disks.
    pub(crate) sync: bool,
    /// What it keeps of the disks in memory.
    pub(crate) drop_caches: bool,
}

/// What a fork still needs before its programs may run, over as many wakes as that takes.
#[derive(Debug, Default)]
struct Owed {
    entropy: bool,
    identity: bool,
    mounts: bool,
}

impl Agent {
    /// Makes the agent and starts what it does without being asked: reaping, and the awake socket. Must be called within
    /// the runtime.
    ///
    /// # Errors
    /// When the cgroup, the output directory or the socket cannot be made.
    pub fn start(settings: Settings, system: Arc<dyn System>) -> std::io::Result<Arc<Self>> {
        let mut boot = [0; 16];
        rustix::rand::getrandom(&mut boot[..], rustix::rand::GetRandomFlags::empty())?;
        let cgroup = settings.cgroup.clone().map(Cgroup::make).transpose()?;
        let holds = Arc::new(Holds::default());
        if let Some(path) = &settings.awake_socket {
            Holds::serve(Arc::clone(&holds), path)?;
        }
        let execs = Execs::start(&settings, cgroup.clone(), boot)?;
        Ok(Arc::new(Self {
            execs,
            holds,
            cgroup,
            system,
            boot,
            quiesced: watch::Sender::new(false),
            starts: tokio::sync::Mutex::default(),
            owed: Mutex::default(),
            stills: Arc::default(),
            loopback: Mutex::default(),
            settings,
        }))
    }

    /// Random per boot.
    pub fn boot(&self) -> [u8; 16] {
        self.boot
    }

    /// Whether the user's programs stand still.
    pub fn quiesced(&self) -> bool {
        *self.quiesced.borrow()
    }

    /// From now on these ports of 127.0.0.1 lead elsewhere for the user's programs, and no others.
    pub(crate) fn lead_loopback(&self, ways: &[LoopbackWay]) -> std::io::Result<()> {
        let mut loopback = self.loopback.lock().unwrap_or_else(PoisonError::into_inner);
        let known = match (loopback.take(), &self.cgroup) {
            (Some(known), _) => known,
            (None, _) if ways.is_empty() => return Ok(()),
            (None, Some(cgroup)) => Loopback::below(cgroup.open()?.as_fd())?,
            (None, None) => return Err(std::io::ErrorKind::Unsupported.into()),
        };
        let set = known.set(ways);
        *loopback = Some(known);
        set
    }

    /// Waits until it is this program's turn to be started, and programs may run.
    ///
    /// A start keeps the only thread until the program runs, so a crowd of them would keep the agent from reading. Whoever has
    /// given up waiting for its own meanwhile has reset the channel, and must find that nothing was started: so before each
    /// start everything is read that has come. The reset ends the task that waits here.
    pub(crate) async fn turn_to_start(&self) -> tokio::sync::MutexGuard<'_, ()> {
        let turn = self.starts.lock().await;
        for _ in 0..TURNS_TO_READ {
            tokio::task::yield_now().await;
        }
        self.running().await;
        turn
    }

    /// Waits until the user's programs may run. A program that is started in a frozen cgroup would freeze between fork and
    /// exec, and the agent would wait for it.
    async fn running(&self) {
        let mut quiesced = self.quiesced.subscribe();
        // The sender lives as long as this.
        let _never = quiesced.wait_for(|quiesced| !quiesced).await;
    }

    /// Writes to disk, and gives memory back, on a thread of its own.
    pub(crate) async fn flush(&self, what: Flush) -> std::io::Result<()> {
        if !what.sync && !what.drop_caches {
            return Ok(());
        }
        let proc = self.settings.proc.clone();
        let flush = tokio::task::spawn_blocking(move || {
            if what.sync {
                rustix::fs::sync();
            }
            if what.drop_caches {
                std::fs::write(proc.join("sys/vm/drop_caches"), "3")?;
            }
            Ok(())
        });
        flush.await.map_err(std::io::Error::other)?
    }

    /// Makes the user's programs stand still. If it is dropped half-way, [`wake`](Self::wake) undoes it.
    pub(crate) async fn quiesce(&self, how: Quiesce) -> Quiesced {
        // While programs still run: what takes long does not keep them standing.
        let start = Instant::now();
        let flush = Flush { sync: how.sync, drop_caches: how.drop_caches };
        if let Err(error) = self.flush(flush).await {
            eprintln!("flush: {error}");
        }
        let flush_us = micros(start);
        self.quiesced.send_replace(true);
        let start = Instant::now();
        let frozen = match &self.cgroup {
            None => true,
            Some(cgroup) => {
                let limit = Duration::from_millis(how.freeze_limit_ms.into());
                match tokio::time::timeout(limit, cgroup.freeze()).await {
                    Ok(Ok(())) => true,
                    Ok(Err(error)) => {
                        eprintln!("freeze the user's programs: {error}");
                        false
                    }
                    Err(_) => false,
                }
            }
        };
        let freeze_us = micros(start);
        if how.sync && frozen {
            self.still_drives().await;
        }
        Quiesced { attempt: how.attempt, frozen, freeze_us, flush_us }
    }

    /// Brings the file systems of the drives into the state of unmounted ones, while nobody writes them. So what is on a drive is
    /// whole without this memory whenever the guest stands still: for whoever has the drive next, if this guest never goes on.
    async fn still_drives(&self) {
        let attempt = self.stills.fetch_add(1, Ordering::SeqCst) + 1;
        let (system, stills) = (Arc::clone(&self.system), Arc::clone(&self.stills));
        let stilled = tokio::task::spawn_blocking(move || {
            let done = system.still_drives();
            // A wake has come meanwhile, and has found nothing to undo yet.
            if stills.load(Ordering::SeqCst) != attempt {
                return done.and(system.free_drives());
            }
            done
        });
        match stilled.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => eprintln!("{error}"),
            Err(error) => eprintln!("freeze the drives: {error}"),
        }
    }

    /// Sets the guest right and lets the user's programs go on. All of it takes a few milliseconds and is done without
    /// giving up the thread, so that nothing else of the agent runs in a half-woken guest.
    pub(crate) fn wake(&self, wake: &Wake, ipv6: Option<&Ipv6Network>, mounts: &[Mount]) -> Woke {
        self.stills.fetch_add(1, Ordering::SeqCst);
        if let Err(error) = self.system.free_drives() {
            eprintln!("{error}");
        }
        let mut steps = Steps::default();
        let clock_step_ns = match wake.realtime_ns {
            None => steps.skip(Step::Clock),
            Some(ns) => steps.run(Step::Clock, || self.system.set_clock(ns)),
        };
        let mut owed = self.owed.lock().unwrap_or_else(PoisonError::into_inner);
        owed.entropy |= wake.fork;
        owed.identity |= wake.fork && wake.identity.is_some();
        if wake.entropy.is_empty() {
            steps.skip::<()>(Step::Entropy);
        } else if steps.run(Step::Entropy, || self.system.reseed(&wake.entropy)).is_some() {
            owed.entropy = false;
        }
        if let Some(identity) = &wake.identity {
            let mut named = steps.run(Step::Identity, || self.system.identify(identity)).is_some();
            if let Some(network) = &identity.network {
                if owed.identity {
                    let cut = steps.run(Step::Connections, || self.system.cut_connections());
                    named &= cut.is_some();
                } else {
                    steps.skip::<()>(Step::Connections);
                }
                named &= steps.run(Step::Network, || self.system.network(network)).is_some();
            } else {
                steps.skip::<()>(Step::Connections);
                steps.skip::<()>(Step::Network);
            }
            owed.identity &= !named;
        } else {
            steps.skip::<()>(Step::Identity);
            steps.skip::<()>(Step::Connections);
            steps.skip::<()>(Step::Network);
        }
        // Without it there is none, also not a parent's: the card has lost its addresses above.
        if let Some(ipv6) = ipv6 {
            steps.run(Step::Ipv6, || self.system.ipv6(ipv6));
        }
        if !mounts.is_empty() {
            let mounted = steps.run(Step::Mounts, || self.system.mount(mounts));
            owed.mounts = mounted.is_none();
        }
        // A fork that draws what its parent draws, or speaks with its parent's address, must not run; nor may programs write below a
        // folder where their drive should be.
        let running = if owed.entropy || owed.identity || owed.mounts {
            steps.skip::<()>(Step::Thaw);
            false
        } else {
            let thawed = steps.run(Step::Thaw, || {
                self.cgroup.as_ref().map_or(Ok(()), Cgroup::thaw).map_err(|error| error.to_string())
            });
            thawed.is_some()
        };
        self.quiesced.send_replace(!running);
        Woke {
            attempt: wake.attempt,
            running,
            clock_step_ns: clock_step_ns.unwrap_or(0),
            steps: steps.0,
        }
    }
}

#[derive(Default)]
struct Steps(Vec<StepReport>);

impl Steps {
    fn skip<T>(&mut self, step: Step) -> Option<T> {
        self.0.push(StepReport { step, micros: 0, outcome: StepOutcome::Skipped });
        None
    }

    fn run<T>(&mut self, step: Step, work: impl FnOnce() -> Result<T, String>) -> Option<T> {
        let start = Instant::now();
        let (value, outcome) = match work() {
            Ok(value) => (Some(value), StepOutcome::Done),
            Err(text) => {
                // A long text would not fit into the answer; the first part says what failed.
                let text: String = text.chars().take(STEP_TEXT_MAX).collect();
                (None, StepOutcome::Failed(text))
            }
        };
        self.0.push(StepReport { step, micros: micros(start), outcome });
        value
    }
}

/// Characters of a failed step's text that are sent.
const STEP_TEXT_MAX: usize = 500;

fn micros(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use tokio::{io::AsyncReadExt, net::UnixStream};
    use wire::{
        Decoder, ExecSpec, Frame, FrameKind, HostHello, Identity, LinkId, Network, Reply, Request,
        ToGuest,
    };

    use super::*;

    #[derive(Debug)]
    struct Still;

    impl System for Still {
        fn set_clock(&self, _: i64) -> Result<i64, String> {
            Ok(0)
        }
        fn reseed(&self, _: &[u8]) -> Result<(), String> {
            Ok(())
        }
        fn identify(&self, _: &Identity) -> Result<(), String> {
            Ok(())
        }
        fn cut_connections(&self) -> Result<(), String> {
            Ok(())
        }
        fn network(&self, _: &Network) -> Result<(), String> {
            Ok(())
        }
        fn ipv6(&self, _: &Ipv6Network) -> Result<(), String> {
            Ok(())
        }
        fn mount(&self, _: &[Mount]) -> Result<(), String> {
            Ok(())
        }
        fn still_drives(&self) -> Result<(), String> {
            Ok(())
        }
        fn free_drives(&self) -> Result<(), String> {
            Ok(())
        }
    }

    fn bytes<T: serde::Serialize>(kind: FrameKind, channel: u32, message: &T) -> Vec<u8> {
        let payload = wire::encode(message).unwrap();
        let mut bytes = Vec::new();
        Frame { kind, channel, payload }.write_to(&mut bytes).unwrap();
        bytes
    }

    /// What the agent answers on a channel.
    async fn answer(host: &mut UnixStream, decoder: &mut Decoder, channel: u32) -> Reply {
        loop {
            while let Some(frame) = decoder.next_frame() {
                if frame.kind == FrameKind::Message && frame.channel == channel {
                    return wire::decode(&frame.payload).unwrap();
                }
            }
            let mut chunk = vec![0; 4096];
            let read = host.read(&mut chunk).await.unwrap();
            assert!(read > 0, "the agent is there");
            decoder.push(&chunk[..read]);
        }
    }

    fn agent(folder: &std::path::Path, newest: u16) -> Arc<Agent> {
        let settings = Settings {
            cgroup: None,
            execs: folder.join("exec"),
            awake_socket: None,
            reap_all: false,
            proc: "/proc".into(),
            etc: "/etc".into(),
            versions: VersionRange { newest, ..wire::VERSIONS },
        };
        Agent::start(settings, Arc::new(Still)).unwrap()
    }

    /// Whatever the other side asks for: an older agent would not understand it either.
    #[tokio::test]
    async fn what_the_agreed_version_has_not_is_not_understood() {
        for (guest, host_newest) in [(1, wire::VERSIONS.newest), (wire::VERSIONS.newest, 1)] {
            let folder = tempfile::tempdir().unwrap();
            let agent = agent(folder.path(), guest);
            let (mut host, port) = UnixStream::pair().unwrap();
            tokio::spawn(crate::link::serve(agent, port));
            let versions = VersionRange { newest: host_newest, ..wire::VERSIONS };
            let hello = HostHello { link: LinkId([1; 16]), versions };
            let mut sent = bytes(FrameKind::Control, 0, &ToGuest::Hello(hello));
            let mut decoder = Decoder::default();
            for (channel, request) in [(1, Request::Flush), (2, Request::Sockets)] {
                sent.extend(bytes(FrameKind::Open, channel, &request));
                assert_eq!(host.try_write(&sent).unwrap(), sent.len());
                sent.clear();
                let reply = answer(&mut host, &mut decoder, channel).await;
                let Reply::Failed(failure) = reply else { panic!("{reply:?}") };
                assert_eq!(failure.code, wire::FailureCode::Unsupported);
            }
            let ping = bytes(FrameKind::Open, 3, &Request::Ping);
            assert_eq!(host.try_write(&ping).unwrap(), ping.len());
            assert_eq!(answer(&mut host, &mut decoder, 3).await, Reply::Done);
        }
    }

    /// The reset of a start is in the device when the start's turn comes, and has not been read.
    #[tokio::test]
    async fn a_start_that_was_given_up_while_it_waited_is_not_carried_out() {
        let folder = tempfile::tempdir().unwrap();
        let agent = agent(folder.path(), wire::VERSIONS.newest);
        let (mut host, port) = UnixStream::pair().unwrap();
        tokio::spawn(crate::link::serve(Arc::clone(&agent), port));
        let turn = agent.starts.lock().await;

        let hello = HostHello { link: LinkId([1; 16]), versions: wire::VERSIONS };
        let mut sent = bytes(FrameKind::Control, 0, &ToGuest::Hello(hello));
        for channel in [1, 2] {
            let start = Request::ExecStart(ExecSpec::argv(["true"]));
            sent.extend(bytes(FrameKind::Open, channel, &start));
        }
        sent.extend(bytes(FrameKind::Open, 3, &Request::Ping));
        assert_eq!(host.try_write(&sent).unwrap(), sent.len());
        let mut decoder = Decoder::default();
        // Asked last, so both starts wait by now.
        assert_eq!(answer(&mut host, &mut decoder, 3).await, Reply::Done);
        let mut reset = Vec::new();
        Frame::empty(FrameKind::Reset, 1).write_to(&mut reset).unwrap();
        assert_eq!(host.try_write(&reset).unwrap(), reset.len());
        drop(turn);
        let started = answer(&mut host, &mut decoder, 2).await;
        assert!(matches!(started, Reply::ExecStarted { .. }), "{started:?}");
        assert_eq!(agent.execs.list().len(), 1, "only the other was started");
    }
}
