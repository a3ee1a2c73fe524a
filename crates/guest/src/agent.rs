//! What the agent is, apart from any link: the execs, the holds, and whether the guest stands still.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::watch;
use wire::{Quiesce, Quiesced, Step, StepOutcome, StepReport, Wake, Woke};

use crate::{awake::Holds, cgroup::Cgroup, exec::Execs, system::System};

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
}

/// The agent.
#[derive(Debug)]
pub struct Agent {
    pub(crate) settings: Settings,
    pub(crate) execs: Execs,
    pub(crate) holds: Arc<Holds>,
    cgroup: Option<Cgroup>,
    system: Box<dyn System>,
    boot: [u8; 16],
    quiesced: watch::Sender<bool>,
    owed: Mutex<Owed>,
}

/// What a fork still needs before its programs may run, over as many wakes as that takes.
#[derive(Debug, Default)]
struct Owed {
    entropy: bool,
    identity: bool,
}

impl Agent {
    /// Makes the agent and starts what it does without being asked: reaping, and the awake socket. Must be called within
    /// the runtime.
    ///
    /// # Errors
    /// When the cgroup, the output directory or the socket cannot be made.
    pub fn start(settings: Settings, system: Box<dyn System>) -> std::io::Result<Arc<Self>> {
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
            owed: Mutex::default(),
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

    /// Waits until the user's programs may run. A program that is started in a frozen cgroup would freeze between fork and
    /// exec, and the agent would wait for it.
    pub(crate) async fn running(&self) {
        let mut quiesced = self.quiesced.subscribe();
        // The sender lives as long as this.
        let _never = quiesced.wait_for(|quiesced| !quiesced).await;
    }

    /// Makes the user's programs stand still. If it is dropped half-way, [`wake`](Self::wake) undoes it.
    pub(crate) async fn quiesce(&self, how: Quiesce) -> Quiesced {
        // While programs still run: what takes long does not keep them standing.
        let start = Instant::now();
        if how.sync || how.drop_caches {
            let proc = self.settings.proc.clone();
            let flush = tokio::task::spawn_blocking(move || {
                if how.sync {
                    rustix::fs::sync();
                }
                if how.drop_caches {
                    std::fs::write(proc.join("sys/vm/drop_caches"), "3")?;
                }
                std::io::Result::Ok(())
            });
            match flush.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => eprintln!("drop caches: {error}"),
                Err(error) => eprintln!("flush: {error}"),
            }
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
        Quiesced { attempt: how.attempt, frozen, freeze_us, flush_us }
    }

    /// Sets the guest right and lets the user's programs go on. All of it takes a few milliseconds and is done without
    /// giving up the thread, so that nothing else of the agent runs in a half-woken guest.
    pub(crate) fn wake(&self, wake: &Wake) -> Woke {
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
        // A fork that draws what its parent draws, or speaks with its parent's address, must not run.
        let running = if owed.entropy || owed.identity {
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
