//! The link as its owner sees it: attach, quiesce, wake, lose. How bytes get through is in `connection`.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    net::UnixStream,
    sync::{mpsc, oneshot, watch},
    task::AbortHandle,
};
use wire::{
    ExecInfo, Frame, GuestHello, Held, HostHello, Identity, Ipv6Network, LinkId, Mount, Quiesce,
    Quiesced, SleepNotice, Sockets, ToGuest, Wake, Woke, control::ENTROPY_LEN,
};

use crate::clock::{self, Ahead};

use super::{
    channel::Entry,
    connection::{self, Control, Then},
    error::{LinkError, WakeError},
};

/// What is known about the guest's decoder and channels when a socket is given to a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Continuity {
    /// The guest may be in the middle of a frame: it runs (or boots), and another link had it. All channels begin anew.
    Unknown,
    /// The guest was quiesced by another link, or nobody has spoken with it since its template was saved. All channels begin anew.
    Clean,
    /// The guest was quiesced by this very link: channels go on.
    Resumed,
}

/// Where a link is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkState {
    /// There is no guest: never attached, or lost. Requests end at once.
    Detached,
    /// The guest answers.
    Running,
    /// The guest was told to stand still and has not answered, or did not in time. [`GuestLink::wake`] ends this.
    Quiescing,
    /// The guest stands still. Requests wait.
    Quiesced,
    /// It stands still and there is no socket: it is saved. Requests wait.
    Parked,
}

/// How to stand still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuiesceOptions {
    /// Write everything to the guest's disk.
    pub sync: bool,
    /// Drop clean caches, so that the saved memory gets smaller (0.06–0.5 s).
    pub drop_caches: bool,
}

/// How to wake. The wall clock and fresh entropy are added by the link at the moment of sending.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WakeParams {
    /// A new identity, for a fork or a clone.
    pub identity: Option<Identity>,
    /// A copy of a guest that may still run: see [`Wake::fork`].
    pub fork: bool,
}

/// The host's end of the channel to one guest agent; a cheap handle, clone it freely.
#[derive(Debug, Clone)]
pub struct GuestLink {
    pub(super) inner: Arc<Inner>,
    /// What is asked through this handle ends when the guest is made to stand still.
    pub(super) impatient: bool,
}

impl GuestLink {
    /// A link without a guest. `id` must be random and new: it is how a guest tells this link from any before it, also from
    /// the one whose copy a fork carries in its memory.
    pub fn new(id: LinkId) -> Self {
        let (outbound, queue) = mpsc::unbounded_channel();
        Self {
            inner: Arc::new(Inner {
                id,
                state: watch::Sender::new(LinkState::Detached),
                stands_still: watch::Sender::new(false),
                held: watch::Sender::default(),
                loopback: super::loopback::Told::default(),
                core: Mutex::new(Core::default()),
                outbound,
                queue: Arc::new(tokio::sync::Mutex::new(queue)),
            }),
            impatient: false,
        }
    }

    /// The same link for whoever waits for an answer: what is asked through it ends with
    /// [`GuestError::StandsStill`](super::GuestError::StandsStill) when the guest is made to stand still.
    #[must_use]
    pub fn impatient(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), impatient: true }
    }

    /// The same link for whoever merely looks on: what is asked through it goes on when the guest does.
    #[must_use]
    pub fn patient(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), impatient: false }
    }

    /// The guest is made to stand still by the host, or goes on. Not what a sleep is: nobody waits for a wake meanwhile. What
    /// impatient ones wait for ends, and what they ask for until it goes on is not even begun.
    pub fn stand_still(&self, still: bool) {
        let core = self.inner.core();
        self.inner.stands_still.send_replace(still);
        if still {
            for entry in core.channels.values() {
                entry.stands_still();
            }
        }
    }

    /// To be told whether the guest is made to stand still.
    pub fn watch_stand_still(&self) -> watch::Receiver<bool> {
        self.inner.stands_still.subscribe()
    }

    /// A link with a random id.
    ///
    /// # Errors
    /// When the operating system gives no random bytes.
    pub fn random() -> Result<Self, LinkError> {
        Ok(Self::new(LinkId(random()?)))
    }

    /// Where the link is.
    pub fn state(&self) -> LinkState {
        *self.inner.state.borrow()
    }

    /// To be told when the state changes, such as [`LinkState::Detached`] when the guest went away by itself.
    pub fn watch_state(&self) -> watch::Receiver<LinkState> {
        self.inner.state.subscribe()
    }

    /// To be told what its programs hold on the awake socket, as it changes.
    pub fn watch_held(&self) -> watch::Receiver<Held> {
        self.inner.held.subscribe()
    }

    /// Whether the agent tells what is held when it changes. One of an earlier version says it in samples alone.
    pub fn tells_held(&self) -> bool {
        self.inner.core().tells_held()
    }

    /// Has everybody on the awake socket told that the guest sleeps soon. An agent of an earlier version cannot, and tells of
    /// nobody who is connected.
    ///
    /// # Errors
    /// When the guest does not run.
    pub fn tell_sleep(&self, notice: SleepNotice) -> Result<(), LinkError> {
        let core = self.inner.core();
        let state = self.state();
        if state != LinkState::Running {
            return Err(LinkError::State { call: "sleep notice", state });
        }
        if core.tells_held() {
            core.tell(Control::message(&ToGuest::SleepNotice(notice), Then::Stay))?;
        }
        Ok(())
    }

    /// What the guest said of itself when it was last met.
    pub fn hello(&self) -> Option<GuestHello> {
        self.inner.core().hello.clone()
    }

    /// Begins to speak over a socket. With [`Continuity::Resumed`] nothing is sent and the answer is the one of the first
    /// meeting; otherwise the guest is greeted, and `limit` must cover its boot.
    ///
    /// Afterwards the link is `Running`, or `Quiesced` if the guest stands still: then [`wake`](Self::wake) is next.
    ///
    /// # Errors
    /// On any error the link is `Detached`, but a `Resumed` one that is refused for its state stays as it is.
    pub async fn attach(
        &self,
        socket: UnixStream,
        continuity: Continuity,
        limit: Duration,
    ) -> Result<GuestHello, LinkError> {
        if continuity == Continuity::Resumed {
            return self.resume(socket);
        }
        self.inner.lose("another guest takes its place");
        self.inner.held.send_replace(Held::default());
        let (answer, answered) = oneshot::channel();
        {
            let mut core = self.inner.core();
            core.epoch += 1;
            core.answers.hello = Some(answer);
            let hello = HostHello { link: self.inner.id, versions: wire::VERSIONS };
            let connection = connection::start(&self.inner, socket, core.epoch, Phase::Greeting);
            if continuity == Continuity::Unknown {
                connection.send(Control { bytes: wire::frame::preamble(), then: Then::Stay });
            }
            connection.send(Control::message(&ToGuest::Hello(hello), Then::Stay));
            core.connection = Some(connection);
        }
        // A caller that gives up must not leave a half-met guest behind.
        let undo = OnDrop(Some(|| self.inner.lose("gave up greeting")));
        let hello = self.answer("hello", limit, answered).await?;
        if wire::VERSIONS.agree(hello.versions).is_none() {
            return Err(LinkError::Version { guest: hello.versions, host: wire::VERSIONS });
        }
        undo.disarm();
        let mut core = self.inner.core();
        core.hello = Some(hello.clone());
        if hello.quiesced {
            self.inner.state.send_replace(LinkState::Quiesced);
        } else {
            core.tell(Control { bytes: Vec::new(), then: Then::Go })?;
            self.inner.state.send_replace(LinkState::Running);
        }
        Ok(hello)
    }

    fn resume(&self, socket: UnixStream) -> Result<GuestHello, LinkError> {
        let mut core = self.inner.core();
        let state = self.state();
        let (LinkState::Parked | LinkState::Quiesced, Some(hello)) = (state, core.hello.clone())
        else {
            return Err(LinkError::State { call: "resume", state });
        };
        core.connection = Some(connection::start(&self.inner, socket, core.epoch, Phase::Met));
        self.inner.state.send_replace(LinkState::Quiesced);
        Ok(hello)
    }

    /// The programs of a guest that stands still, as they were just before; `None`: it does not, or did not say.
    pub fn execs_seen(&self) -> Option<Vec<ExecInfo>> {
        let core = self.inner.core();
        match self.state() {
            LinkState::Quiesced | LinkState::Parked => core.execs.clone(),
            LinkState::Detached | LinkState::Running | LinkState::Quiescing => None,
        }
    }

    /// Notes what commands there are, for when the guest stands still. To be asked right before that, while it can be asked.
    /// Without an answer nobody knows then, and whoever wants to must wake it.
    pub async fn note_execs(&self) {
        let execs = tokio::time::timeout(EXEC_LIST_LIMIT, self.exec_list()).await;
        self.inner.core().execs = execs.ok().and_then(Result::ok);
    }

    /// Makes the guest stand still, with nothing under way in either direction. Afterwards the machine may be stopped.
    ///
    /// May be given up at any time, by dropping it or by its limit: then [`wake`](Self::wake) is next.
    ///
    /// # Errors
    /// When the link is not `Running`; when no answer comes within `limit`.
    pub async fn quiesce(
        &self,
        options: QuiesceOptions,
        limit: Duration,
    ) -> Result<Quiesced, LinkError> {
        let (answer, answered) = oneshot::channel();
        {
            let mut core = self.inner.core();
            let state = self.state();
            if state != LinkState::Running {
                return Err(LinkError::State { call: "quiesce", state });
            }
            core.attempt += 1;
            let quiesce = Quiesce {
                attempt: core.attempt,
                sync: options.sync,
                drop_caches: options.drop_caches,
                freeze_limit_ms: FREEZE_LIMIT_MS,
            };
            core.answers.quiesced = Some((core.attempt, answer));
            core.sockets = None;
            core.tell(Control::message(&ToGuest::Quiesce(quiesce), Then::Hold))?;
            self.inner.state.send_replace(LinkState::Quiescing);
        }
        self.answer("quiesce", limit, answered).await
    }

    /// Sets clock and entropy (and identity) right and lets the user's programs go on, then everything that waited.
    ///
    /// Also ends a quiesce that is under way. Harmless on a guest that runs.
    ///
    /// # Errors
    /// When the guest keeps the user's programs frozen, it says so by step; call again to try again.
    pub async fn wake(&self, params: WakeParams, limit: Duration) -> Result<Woke, WakeError> {
        self.wake_with(params, None, Vec::new(), limit).await
    }

    /// As [`wake`](Self::wake), gives the guest an IPv6 address, and has it mount drives. An agent of an earlier version gets no
    /// address, which shows in the steps it reports.
    ///
    /// # Errors
    /// As [`wake`](Self::wake); [`LinkError::NoDrives`] where the agent is too old for drives: nothing was done then.
    pub async fn wake_with(
        &self,
        params: WakeParams,
        ipv6: Option<Ipv6Network>,
        mounts: Vec<Mount>,
        limit: Duration,
    ) -> Result<Woke, WakeError> {
        let (answer, answered) = oneshot::channel();
        let entropy = random::<ENTROPY_LEN>()?.to_vec();
        {
            let mut core = self.inner.core();
            let state = self.state();
            if matches!(state, LinkState::Detached | LinkState::Parked) {
                return Err(LinkError::State { call: "wake", state }.into());
            }
            if !mounts.is_empty() && !core.speaks(wire::MOUNTS_SINCE) {
                return Err(LinkError::NoDrives.into());
            }
            core.attempt += 1;
            let wake = Wake {
                link: self.inner.id,
                attempt: core.attempt,
                realtime_ns: Some(clock::unix_ns()),
                entropy,
                identity: params.identity,
                fork: params.fork,
            };
            core.answers.quiesced = None;
            core.answers.woke = Some((core.attempt, answer));
            core.clock_told = Some(Ahead::now());
            let message = match ipv6 {
                _ if !mounts.is_empty() => ToGuest::WakeWithMounts(wake, ipv6, mounts),
                Some(ipv6) if core.speaks(wire::NETWORK_SINCE) => ToGuest::WakeWithIpv6(wake, ipv6),
                _ => ToGuest::Wake(wake),
            };
            core.tell(Control::message(&message, Then::Stay))?;
        }
        let woke = self.answer("wake", limit, answered).await?;
        if !woke.running {
            return Err(WakeError::NotRunning(woke));
        }
        Ok(woke)
    }

    /// Sets a running guest's wall clock again if the host's was set since the guest was last told. It is told as one that wakes is,
    /// with nothing but the time; nobody waits for the answer, for a guest that does not answer shows otherwise.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn keep_clock(&self) -> Result<(), LinkError> {
        let mut core = self.inner.core();
        let now = Ahead::now();
        let is_right = core.clock_told.is_none_or(|told| !told.is_stepped(now));
        if is_right || self.state() != LinkState::Running {
            return Ok(());
        }
        core.attempt += 1;
        let wake = Wake {
            link: self.inner.id,
            attempt: core.attempt,
            realtime_ns: Some(clock::unix_ns()),
            entropy: Vec::new(),
            identity: None,
            fork: false,
        };
        core.tell(Control::message(&ToGuest::Wake(wake), Then::Stay))?;
        core.clock_told = Some(now);
        Ok(())
    }

    /// What is open on the network of a guest that stands still, as it said when it began to. `None`: it did not say.
    pub fn sockets_at_rest(&self) -> Option<Sockets> {
        self.inner.core().sockets.clone()
    }

    /// The machine is saved and its QEMU goes: lets the socket go and keeps the channels for [`Continuity::Resumed`].
    ///
    /// # Errors
    /// When the guest does not stand still.
    pub fn detach(&self) -> Result<(), LinkError> {
        let mut core = self.inner.core();
        match self.state() {
            LinkState::Parked => Ok(()),
            LinkState::Quiesced => {
                core.connection = None;
                self.inner.state.send_replace(LinkState::Parked);
                Ok(())
            }
            state => Err(LinkError::State { call: "detach", state }),
        }
    }

    /// The guest is dead: everything that waits on it ends with [`GuestError::Gone`](super::GuestError::Gone).
    pub fn lost(&self, reason: &str) {
        self.inner.lose(reason);
    }

    async fn answer<T>(
        &self,
        call: &'static str,
        limit: Duration,
        answered: oneshot::Receiver<T>,
    ) -> Result<T, LinkError> {
        match tokio::time::timeout(limit, answered).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => {
                let reason = self.inner.core().gone.clone();
                Err(LinkError::Lost { reason: reason.unwrap_or_else(|| "superseded".into()) })
            }
            Err(_) => Err(LinkError::TimedOut { call, limit }),
        }
    }
}

/// How long the guest may take to freeze the user's programs, in milliseconds. Milliseconds are usual; a program in an
/// uninterruptible wait holds it up, and then the guest says so instead of waiting on.
pub const FREEZE_LIMIT_MS: u32 = 1_000;

/// How long a guest that is to stand still may take to list its programs: it takes a millisecond or two, and a sleep must
/// not wait for it.
const EXEC_LIST_LIMIT: Duration = Duration::from_millis(500);

/// What all handles of a link share.
#[derive(Debug)]
pub(super) struct Inner {
    id: LinkId,
    pub(super) state: watch::Sender<LinkState>,
    /// Changed only under the lock of `core`.
    pub(super) stands_still: watch::Sender<bool>,
    pub(super) held: watch::Sender<Held>,
    pub(super) loopback: super::loopback::Told,
    core: Mutex<Core>,
    /// Frames of channels on their way out. Unbounded as a type, bounded by credit: no channel puts more than its window in.
    pub(super) outbound: mpsc::UnboundedSender<(u64, Frame)>,
    /// The other end of it, held by the writer of the connection.
    pub(super) queue: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<(u64, Frame)>>>,
}

/// Whether the guest has answered on this connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// What comes before its `Hello` is from an earlier life.
    Greeting,
    /// It is met.
    Met,
}

#[derive(Debug, Default)]
pub(super) struct Core {
    pub(super) connection: Option<Connection>,
    /// Goes up with each guest that is met; frames and channels of an earlier one are dropped.
    pub(super) epoch: u64,
    pub(super) channels: HashMap<u32, Entry>,
    pub(super) channel_last: u32,
    pub(super) answers: Answers,
    pub(super) hello: Option<GuestHello>,
    pub(super) gone: Option<String>,
    /// Its programs when it was last told to stand still.
    execs: Option<Vec<ExecInfo>>,
    /// What was open on its network when it stood still last.
    pub(super) sockets: Option<Sockets>,
    attempt: u64,
    /// How the host's wall clock went when the guest was last told the time; `None`: not told yet.
    clock_told: Option<Ahead>,
}

#[derive(Debug, Default)]
pub(super) struct Answers {
    pub(super) hello: Option<oneshot::Sender<GuestHello>>,
    pub(super) quiesced: Option<(u64, oneshot::Sender<Quiesced>)>,
    pub(super) woke: Option<(u64, oneshot::Sender<Woke>)>,
}

/// The two tasks that serve a socket; they end with this.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) control: mpsc::UnboundedSender<Control>,
    pub(super) tasks: [AbortHandle; 2],
    pub(super) number: u64,
}

impl Connection {
    fn send(&self, control: Control) {
        // The writer's end is there until the connection is dropped or the socket fails, which the reader reports.
        let _gone = self.control.send(control);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Core {
    fn tells_held(&self) -> bool {
        self.speaks(wire::HELD_SINCE)
    }

    fn speaks(&self, since: u16) -> bool {
        let spoken = self.hello.as_ref().and_then(|hello| wire::VERSIONS.agree(hello.versions));
        spoken.is_some_and(|version| version >= since)
    }

    fn tell(&self, control: Control) -> Result<(), LinkError> {
        match &self.connection {
            Some(connection) => {
                connection.send(control);
                Ok(())
            }
            None => Err(LinkError::Lost {
                reason: self.gone.clone().unwrap_or_else(|| "no connection".into()),
            }),
        }
    }
}

impl Inner {
    pub(super) fn id(&self) -> LinkId {
        self.id
    }

    pub(super) fn core(&self) -> MutexGuard<'_, Core> {
        // No code under this lock can leave it half changed, so a panic elsewhere costs nothing here.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connection and all channels.
    pub(super) fn lose(&self, reason: &str) {
        let mut core = self.core();
        core.connection = None;
        core.gone = Some(reason.to_owned());
        core.answers = Answers::default();
        for (_, entry) in core.channels.drain() {
            entry.gone(reason);
        }
        core.epoch += 1;
        self.state.send_replace(LinkState::Detached);
    }
}

/// Does something on the way out unless disarmed.
struct OnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> OnDrop<F> {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        if let Some(act) = self.0.take() {
            act();
        }
    }
}

fn random<const N: usize>() -> Result<[u8; N], LinkError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| LinkError::Entropy { reason: error.to_string() })?;
    Ok(bytes)
}
