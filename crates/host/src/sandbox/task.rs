//! The task that owns one sandbox.

mod calls;
mod checkpoints;
mod events;
mod guest;
mod halt;
mod orders;
mod room;

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::SandboxId;
use lifecycle::{
    Attempt, CaptureId, Cause, Death, FailureCode, Heard, Order, Phase, Recovered, Sandbox, Tier,
    Time,
};
use serde_json::{Map, Value};
use tokio::sync::{Semaphore, mpsc, watch};
use vmm::{ExitCause, ExitWatch};
use wire::Held;

use self::checkpoints::Checkpoints;
use self::guest::{detached, held_changed};
use self::halt::{Halt, disk_changed};
use self::room::Restarts;
use super::body::Body;
use super::replies::{Waiter, Watcher, spending_error};
use super::work::{CaptureTo, Done, Said};
use super::{Handle, Message, STARTS_MAX, story, view};
use crate::budget::Offer;
use crate::checkpoints::Keeper;
use crate::clock;
use crate::ground::Ground;
use crate::guest::GuestLink;
use crate::manifest::{BoxUse, DriveUse, State};
use crate::record::Record;
use crate::tap::Arrival;
use crate::timeline::Timeline;

/// The longest nap between two looks at the clock, so that a suspend of the host, during which timers of this process stand
/// still, delays nothing by more than this.
const NAP_MAX: Duration = Duration::from_secs(20);

/// How long after a link ended the end of its machine is waited for, before the link is made anew: ten times what it takes.
const REATTACH_AFTER: Duration = Duration::from_millis(500);

/// How often a lost link is made anew.
const REATTACH_EVERY: Duration = Duration::from_secs(15);

/// How long the guest agent may take to answer then.
const REATTACH_LIMIT: Duration = Duration::from_secs(10);

/// How much of a box's use a crash of the daemon may cost, in milliseconds: so much earlier it may be frozen then.
const USES_KEPT_EVERY_MS: u64 = 5_000;

/// How a sandbox's task begins.
pub(crate) struct Beginning {
    pub(crate) ground: Arc<Ground>,
    pub(crate) record: Record,
    pub(crate) body: Body,
    pub(crate) timeline: Timeline,
    /// What was found of it, and how its machine ended last; `None`: it is new.
    pub(crate) found: Option<(Recovered, Option<Death>)>,
    /// Told when nothing is left of it.
    pub(crate) gone: mpsc::UnboundedSender<SandboxId>,
}

/// Starts the task of a sandbox.
pub(crate) fn start(beginning: Beginning) -> Handle {
    let Beginning { ground, record, body, timeline, found, gone } = beginning;
    let manifest = record.get();
    let (messages, inbox) = mpsc::unbounded_channel();
    let (done, done_inbox) = mpsc::unbounded_channel();
    let now = now();
    let policy = view::policy(&manifest.policy);
    let found_running = matches!(found, Some((Recovered::Running, _)));
    let core = match found {
        None => Sandbox::create(now, policy),
        Some((found, death)) => {
            let core = Sandbox::recover(now, policy, found).with_last_death(death);
            match &manifest.box_use {
                Some(known) => core.with_uses(known.uses()),
                None => core,
            }
        }
    };
    let address = ground.subnet.address(body.slot.number());
    let exit = body.machine.as_ref().map(|machine| (Attempt::RECOVERED, machine.exit_watch()));
    let handle = Handle {
        id: manifest.id.clone(),
        files: body.files.clone(),
        address,
        record: record.clone(),
        starts: Arc::new(Semaphore::new(STARTS_MAX)),
        attaching: Arc::default(),
        messages: messages.clone(),
    };
    let failure = match &manifest.state {
        State::Failed { text, .. } => Some(text.clone()),
        _ => None,
    };
    let disk_low = ground.disk_low.clone();
    let mut spending = ground.spending.subscribe();
    // What it says now the task looks at first.
    spending.mark_changed();
    let checkpoints = Checkpoints::of(&ground, &manifest, &body.files);
    let task = Task {
        id: manifest.id,
        ground,
        record,
        core,
        link: body.link.clone(),
        body: Some(body),
        timeline,
        address,
        life: manifest.life,
        awake_since: Instant::now(),
        messages,
        done,
        waiting: VecDeque::new(),
        signals: None,
        exit,
        waiters: Vec::new(),
        watchers: Vec::new(),
        need: None,
        woke_because: manifest.woke_because.clone(),
        failure,
        last_reasons: None,
        captures: 0,
        capture_to: Vec::new(),
        checkpoints,
        ended_keeper: None,
        sampling: false,
        flush_owed: false,
        held: Held::default(),
        offer: None,
        sample_at: Instant::now(),
        sample_by: Instant::now(),
        // One that was found running is met at once.
        reattach_at: found_running.then(Instant::now),
        halt: None,
        restarts: Restarts::default(),
        drives_next: None,
        short_of: None,
        disk_low,
        spending,
        limited: false,
        gone,
    };
    tokio::spawn(task.run(inbox, done_inbox));
    handle
}

struct Task {
    id: SandboxId,
    ground: Arc<Ground>,
    record: Record,
    core: Sandbox,
    /// With an order while it works.
    body: Option<Body>,
    link: GuestLink,
    timeline: Timeline,
    address: Ipv4Addr,
    life: u64,
    awake_since: Instant,
    messages: mpsc::UnboundedSender<Message>,
    done: mpsc::UnboundedSender<Done>,
    /// Orders that wait for the body.
    waiting: VecDeque<Order>,
    /// The order under way, and the means to speak to it.
    signals: Option<(Attempt, watch::Sender<Said>)>,
    /// Tells the end of the machine that exists.
    exit: Option<(Attempt, ExitWatch)>,
    waiters: Vec<Waiter>,
    watchers: Vec<Watcher>,
    /// The need that was first in making it wake, in words.
    need: Option<String>,
    /// What it woke for, or is waking for, in words. Kept in the manifest once it runs.
    woke_because: Option<String>,
    failure: Option<String>,
    /// What kept it awake when it was last looked at, for the entry about its falling asleep.
    last_reasons: Option<Value>,
    captures: u64,
    capture_to: Vec<(CaptureId, CaptureTo)>,
    /// It is kept in the object store while it is awake.
    checkpoints: Option<Checkpoints>,
    /// Of checkpoints that were turned off.
    ended_keeper: Option<Arc<Keeper>>,
    sampling: bool,
    /// Its guest has not been asked to write to its disk since it woke.
    flush_owed: bool,
    /// When its guest is looked at next; not put off beyond `sample_by`.
    sample_at: Instant,
    sample_by: Instant,
    /// What the guest's programs held when it was last told.
    held: Held,
    /// Asleep in memory, it can make room for others.
    offer: Option<Offer>,
    /// The link of a running guest is being, or was in vain, made anew until this moment.
    reattach_at: Option<Instant>,
    /// Its guest stands still because the disk is nearly full.
    halt: Option<Halt>,
    /// Restarts that wait for room.
    restarts: Restarts,
    /// Drives that the next boot gives it.
    drives_next: Option<Vec<DriveUse>>,
    /// What an order failed for the last time, where the host lacks it: that is logged once, not each time it is tried.
    short_of: Option<FailureCode>,
    disk_low: watch::Receiver<bool>,
    /// Whether the project's spending limit is reached.
    spending: watch::Receiver<bool>,
    /// Whether its own limit is: its account has no credit (B14).
    limited: bool,
    gone: mpsc::UnboundedSender<SandboxId>,
}

/// Most messages that are taken before everything else is looked at again.
const MESSAGES_AT_ONCE: usize = 64;

/// What the task wakes up for.
enum Next {
    Message(Option<Message>),
    Done(Option<Box<Done>>),
    Died(Attempt, ExitCause),
    Arrived(std::io::Result<Arrival>),
    Time,
    Sample,
    Detached,
    Disk,
    Halt,
    Held(Held),
    RoomNeeded,
    Checkpoint,
    Spending,
}

impl Task {
    async fn run(
        mut self,
        mut inbox: mpsc::UnboundedReceiver<Message>,
        mut done: mpsc::UnboundedReceiver<Done>,
    ) {
        self.ask_newest();
        if self.reattach_at.is_some() && *self.disk_low.borrow() {
            // Found on a disk that is nearly full: it stands still before anybody speaks to it.
            self.halt_or_go_on().await;
        }
        self.pump(Map::new()).await;
        while !matches!(self.core.phase(), Phase::Deleted) {
            match self.next(&mut inbox, &mut done).await {
                Next::Message(Some(message)) => {
                    self.on_message(message).await;
                    self.on_more_messages(&mut inbox).await;
                }
                Next::Done(Some(done)) => self.on_done(*done).await,
                // Both have a sender here.
                Next::Message(None) | Next::Done(None) => break,
                Next::Died(machine, cause) => self.on_died(machine, cause),
                Next::Arrived(arrival) => self.on_arrival(arrival),
                Next::Time => self.core.handle_deadline(now()),
                Next::Sample => self.ask_sample(),
                Next::Detached => self.reattach(),
                Next::Disk => self.halt_or_go_on().await,
                Next::Halt => self.on_halt_due().await,
                Next::Held(held) => self.on_held(held),
                Next::Checkpoint => self.take_checkpoint(),
                Next::Spending => self.on_spending(),
                Next::RoomNeeded => self.core.handle_demote(now()),
            }
            self.pump(Map::new()).await;
            self.keep_uses().await;
        }
        // Nobody is told anything any more: waiting callers see that it is gone.
        let _ = self.gone.send(self.id);
    }

    /// Takes what has come meanwhile. Looking at everything else for each message costs more than most of them do: a sandbox that
    /// serves thousands of requests a second has as many begin and end.
    async fn on_more_messages(&mut self, inbox: &mut mpsc::UnboundedReceiver<Message>) {
        for _ in 0..MESSAGES_AT_ONCE {
            self.pump(Map::new()).await;
            if matches!(self.core.phase(), Phase::Deleted) {
                return;
            }
            let Ok(message) = inbox.try_recv() else { return };
            self.on_message(message).await;
        }
    }

    async fn next(
        &mut self,
        inbox: &mut mpsc::UnboundedReceiver<Message>,
        done: &mut mpsc::UnboundedReceiver<Done>,
    ) -> Next {
        let nap = self
            .core
            .poll_deadline()
            .map_or(NAP_MAX, |at| Duration::from_millis(at.ms_since(now())))
            .min(NAP_MAX);
        let asleep = matches!(self.core.phase(), Phase::Asleep { .. });
        let awake = self.core.is_awake() && !self.sampling && self.halt.is_none();
        let halt_due = self.halt_due();
        let sample_in = self.sample_at.saturating_duration_since(Instant::now());
        let checkpoint_in = self.checkpoint_in();
        let exit = self.exit.clone();
        let running = self.body.is_some() && matches!(self.core.phase(), Phase::Running { .. });
        let awake_at_rest = self.core.is_awake() && self.body.is_some();
        let detached = detached(&self.link, self.reattach_at, awake_at_rest && self.halt.is_none());
        let held = held_changed(&self.link, self.held, self.core.is_awake());
        // No packet thaws a box (B44): what comes waits in the queue of its tap.
        let heard = asleep && self.core.policy().boxed.is_none();
        let port =
            if heard { self.body.as_mut().and_then(|body| body.port.as_mut()) } else { None };
        tokio::select! {
            biased;
            message = done.recv() => Next::Done(message.map(Box::new)),
            message = inbox.recv() => Next::Message(message),
            died = died(exit) => Next::Died(died.0, died.1),
            arrival = async { match port { Some(port) => port.arrival().await, None => std::future::pending().await } } => {
                Next::Arrived(arrival)
            }
            () = disk_changed(&mut self.disk_low, self.halt.as_ref(), running) => Next::Disk,
            Ok(()) = self.spending.changed() => Next::Spending,
            () = until(halt_due) => Next::Halt,
            () = detached => Next::Detached,
            held = held => Next::Held(held),
            () = asked(self.offer.as_ref()) => Next::RoomNeeded,
            () = tokio::time::sleep(sample_in), if awake => Next::Sample,
            () = tokio::time::sleep(checkpoint_in.unwrap_or_default()), if checkpoint_in.is_some() => Next::Checkpoint,
            () = tokio::time::sleep(nap) => Next::Time,
        }
    }

    /// Keeps how a box is used, so that a later daemon knows it.
    async fn keep_uses(&mut self) {
        let uses = self.core.uses();
        let due = self.record.with(|manifest| {
            let boxed = manifest.policy.boxed.is_some() && manifest.state != State::Deleting;
            boxed
                && manifest.box_use.as_ref().is_none_or(|kept| {
                    let kept = kept.uses();
                    kept.stopped.is_some() != uses.stopped.is_some()
                        || uses.last_used.ms_since(kept.last_used) >= USES_KEPT_EVERY_MS
                })
        });
        if due {
            let uses = BoxUse::of(uses);
            self.note(move |manifest| manifest.box_use = Some(uses)).await;
        }
    }

    /// Writes down what happened, gives out orders, answers those whose wish came true.
    async fn pump(&mut self, data: Map<String, Value>) {
        let mut data = Some(data).filter(|data| !data.is_empty());
        loop {
            while let Some(event) = self.core.poll_event() {
                self.on_event(&event.what, &mut data).await;
            }
            while let Some(order) = self.core.poll_order() {
                self.take_order(order);
            }
            if !self.need_again() && !self.restart_if_room() {
                break;
            }
        }
        self.begin_work();
        self.answer_waiters();
        self.offer_room();
    }

    /// Says whether it can make room in memory for others: asleep there, and on its way to disk.
    fn offer_room(&mut self) {
        let (Phase::Asleep { tier: Tier::Memory, since }
        | Phase::Demoting { since, wake: None, .. }) = *self.core.phase()
        else {
            self.offer = None;
            return;
        };
        if self.offer.is_none() {
            let memory_mib = self.record.with(|manifest| manifest.memory_mib);
            self.offer = Some(self.ground.budget.offer(since.as_millis(), memory_mib));
        }
    }

    fn on_died(&mut self, machine: Attempt, cause: ExitCause) {
        self.exit = None;
        let death = match cause {
            ExitCause::Poweroff => Death::Poweroff,
            ExitCause::Reboot => Death::Reboot,
            ExitCause::Panic => Death::Panic,
            // Ended by an order, which reports it itself.
            ExitCause::Quit | ExitCause::Killed => return,
            ExitCause::Died(how) => {
                tracing::warn!(sandbox = %self.id, ?how, "QEMU died");
                Death::Killed
            }
        };
        if self.core.handle_died(now(), machine, death) == Heard::Taken {
            self.forget_halt();
            self.link.lost(story::death_code(death));
            if let Some(body) = &mut self.body {
                body.machine = None;
                body.seat = None;
            }
        }
    }

    /// The project's spending limit or its own is reached, or is not any more: who waits for it to wake is told.
    fn on_spending(&mut self) {
        let reached = *self.spending.borrow_and_update() || self.limited;
        if reached == self.core.is_withheld() {
            return;
        }
        self.core.handle_spending(now(), reached);
        if reached {
            self.refuse_waiters(|_| spending_error());
        }
    }

    fn on_arrival(&mut self, arrival: std::io::Result<Arrival>) {
        match arrival {
            Ok(Arrival::Wake { peer, port }) => {
                let refused = self.core.handle_need(now(), Cause::Packet { peer, port }).err();
                if let Some(refusal) = refused {
                    tracing::debug!(sandbox = %self.id, %refusal, "packet for a sandbox that cannot wake");
                }
            }
            Ok(Arrival::Nothing) => {}
            Err(error) => {
                tracing::error!(sandbox = %self.id, %error, "tap");
            }
        }
    }
}

/// The moment, on the state machine's clock.
fn now() -> Time {
    clock::now()
}

/// Waits until a moment, if there is one.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

/// Waits until others need room.
async fn asked(offer: Option<&Offer>) {
    match offer {
        Some(offer) => offer.asked().await,
        None => std::future::pending().await,
    }
}

async fn died(exit: Option<(Attempt, ExitWatch)>) -> (Attempt, ExitCause) {
    match exit {
        Some((attempt, mut watch)) => (attempt, watch.exited().await.cause),
        None => std::future::pending().await,
    }
}
