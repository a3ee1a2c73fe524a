//! The task that owns one sandbox.

mod calls;
mod checkpoints;
mod guest;
mod halt;
mod room;

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::SandboxId;
use lifecycle::{
    Attempt, Call, CallKind, CaptureId, Cause, Death, FailureCode, Heard, Order, Phase, Recovered,
    Report, Sandbox, Start, Tier, Time, What, Work,
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
use super::replies::{Waiter, Watcher, outcome, shortage_error, spending_error};
use super::work::{CaptureTo, Done, Said, Signals, Worker, chain, without_paths};
use super::{Handle, Message, STARTS_MAX, story, view};
use crate::budget::Offer;
use crate::checkpoints::Keeper;
use crate::clock::{self, Moment};
use crate::ground::Ground;
use crate::guest::GuestLink;
use crate::manifest::{BoxUse, DriveUse, Manifest, State};
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

/// What the task wakes up for.
/// Most messages that are taken before everything else is looked at again.
const MESSAGES_AT_ONCE: usize = 64;

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

    /// Who waited when the machine ended still needs it: their need was counted as served by the machine that is gone.
    fn need_again(&mut self) -> bool {
        let Phase::Off { .. } = self.core.phase() else { return false };
        let Some(waiter) = self.waiters.first() else { return false };
        self.core.handle_need(now(), Cause::Call(waiter.call)).is_ok()
    }

    async fn on_event(&mut self, what: &What, data: &mut Option<Map<String, Value>>) {
        let need = self.need.clone();
        if self.on_checkpoint_event(what) {
            return;
        }
        if let Some((kind, text, mut facts)) = story::tell(what, self.need.as_deref()) {
            if has_phases(what)
                && let Some(mut measured) = data.take()
            {
                facts.append(&mut measured);
            }
            if let What::FallingAsleep { .. } = what {
                facts.insert(
                    "awake_seconds".to_owned(),
                    self.awake_since.elapsed().as_secs().into(),
                );
                facts.insert(
                    "kept_awake_by".to_owned(),
                    self.last_reasons.take().unwrap_or_default(),
                );
            }
            self.timeline.add(kind, text, facts);
        }
        match what {
            What::Waking { cause, .. } => {
                let because = story::need(*cause, self.need.as_deref());
                self.woke_because = Some(because);
            }
            What::Woke { .. } | What::Started { .. } => {
                self.awake_since = Instant::now();
                self.flush_owed = true;
                self.need = None;
                self.failure = None;
                if matches!(what, What::Started { how: Start::Boot })
                    && self.core.last_death().is_some()
                {
                    self.note(|manifest| manifest.boots += 1).await;
                }
                let told = self.core.last_death().is_none()
                    && self.record.with(|manifest| manifest.last_end.is_some());
                if told {
                    self.note(|manifest| manifest.last_end = None).await;
                }
            }
            // What kept it awake is served; the next need has words of its own.
            What::SleepCancelled { .. } => self.need = None,
            What::Slept { .. } => {
                // Put to sleep under calls that are under way: they need it still. One that waits for a command's result can
                // wait, whoever asked for the sleep has seen to that.
                let kinds = [
                    CallKind::Api,
                    CallKind::Files,
                    CallKind::EdgeRequest,
                    CallKind::Terminal,
                    CallKind::Tool,
                ];
                if let Some(kind) = kinds.into_iter().find(|kind| self.core.calls(*kind) > 0) {
                    self.need.get_or_insert_with(|| "a call that was under way".to_owned());
                    if let Err(refusal) = self.core.handle_need(now(), Cause::Call(Call::of(kind)))
                    {
                        tracing::debug!(sandbox = %self.id, %refusal, "a call under way cannot be served");
                    }
                }
            }
            What::Died { death } => {
                let code = story::death_code(*death);
                self.note(move |manifest| {
                    manifest.state = State::Off { code: code.to_owned() };
                    manifest.since = Moment::now();
                    manifest.last_end = Some(code.to_owned());
                })
                .await;
            }
            What::Failed { code } => {
                let text = self.failure.clone().unwrap_or_default();
                self.note(move |manifest| {
                    let saved = match &manifest.state {
                        State::SleepingOnDisk(saved) => Some(saved.clone()),
                        _ => None,
                    };
                    manifest.state = State::Failed { code: code.as_str().to_owned(), text, saved };
                    manifest.since = Moment::now();
                })
                .await;
            }
            _ => {}
        }
        let lacking = match what {
            What::WakeFailed { code, again: false }
                if matches!(
                    self.core.phase(),
                    // Or what it sleeps with is about to be copied.
                    Phase::Asleep { .. } | Phase::CapturingAsleep { .. } | Phase::Demoting { .. }
                ) =>
            {
                Some(*code)
            }
            What::StartRefused { code } => {
                self.note(|manifest| {
                    manifest.state = State::Off { code: self.end_code().to_owned() };
                    manifest.since = Moment::now();
                })
                .await;
                Some(*code)
            }
            _ => None,
        };
        if let Some(code) = lacking {
            self.refuse_waiters(|failure| shortage_error(code, failure));
            let error = shortage_error(code, self.failure.as_deref());
            self.refuse_restarts(error.code, &error.error);
        }
        let failure = self.failure.as_deref();
        let mut still = Vec::new();
        for (goal, reply) in self.watchers.drain(..) {
            match outcome(&goal, what, failure, need.as_deref()) {
                // The caller may have gone away: then nobody needs the answer.
                Some(result) => drop(reply.send(result)),
                None => still.push((goal, reply)),
            }
        }
        self.watchers = still;
    }

    /// How its machine ended, for programs.
    fn end_code(&self) -> &'static str {
        match self.core.phase() {
            Phase::Off { death, .. } => story::death_code(*death),
            _ => story::death_code(Death::Killed),
        }
    }

    /// Notes something in the manifest. A disk that refuses is logged: the living state is right, and a new daemon finds out
    /// by looking at the processes.
    async fn note(&self, change: impl FnOnce(&mut Manifest)) {
        if let Err(error) = self.record.change(change).await {
            tracing::error!(sandbox = %self.id, error = chain(&error), "manifest not written");
        }
    }

    fn take_order(&mut self, order: Order) {
        match order.work {
            Work::Cancel => {
                if let Some((attempt, signals)) = &self.signals
                    && *attempt == order.attempt
                {
                    signals.send_modify(|said| said.cancel = true);
                } else {
                    self.waiting.retain(|waiting| waiting.attempt != order.attempt);
                }
            }
            Work::Sample => self.sample_now(),
            Work::Notice { in_ms, cap } => self.tell_sleep(in_ms, cap),
            _ => {
                // A newer order supersedes every earlier one.
                self.waiting.clear();
                if let Some((_, signals)) = &self.signals {
                    signals.send_modify(|said| said.superseded = true);
                }
                self.waiting.push_back(order);
            }
        }
    }

    fn begin_work(&mut self) {
        if self.body.is_none() {
            return;
        }
        let Some(order) = self.waiting.pop_front() else { return };
        let Some(mut body) = self.body.take() else { return };
        if body.machine.as_ref().is_some_and(|machine| machine.exit().is_some()) {
            body.machine = None;
            body.seat = None;
        }
        let waited_for = self.restarts.take_seat();
        if order.work == Work::Boot && body.seat.is_none() {
            body.seat = waited_for;
        }
        self.forget_halt();
        let (say, signals) = Signals::new();
        self.signals = Some((order.attempt, say));
        let capture_to = match order.work {
            Work::Capture { capture, .. } => {
                let at = self.capture_to.iter().position(|(id, _)| *id == capture);
                at.map(|at| self.capture_to.swap_remove(at).1)
            }
            _ => None,
        };
        let drives = match order.work {
            Work::Boot | Work::Create => self.drives_next.take(),
            _ => None,
        };
        let from_disk = matches!(order.work, Work::Wake { from: Tier::Disk | Tier::Store });
        let worker = Worker {
            ground: Arc::clone(&self.ground),
            id: self.id.clone(),
            record: self.record.clone(),
            body,
            phases: crate::phases::Phases::begin(),
            signals,
            messages: self.messages.clone(),
            next_life: self.life + 1,
            place: from_disk.then(|| self.ground.restores.stand_in_line(self.asked_at())),
            woke_because: self.woke_because.clone(),
            capture_to,
            drives,
        };
        let done = self.done.clone();
        tracing::debug!(sandbox = %self.id, ?order, "order");
        tokio::spawn(async move {
            let finished = worker.carry_out(order).await;
            // The task waits for this; it is gone only when the daemon goes down.
            let _ = done.send(finished);
        });
    }

    /// When it was asked for what is ordered now.
    fn asked_at(&self) -> Instant {
        self.waiters.iter().map(|waiter| waiter.began).min().unwrap_or_else(Instant::now)
    }

    async fn on_done(&mut self, done: Done) {
        self.signals = None;
        self.link = done.body.link.clone();
        if let Some(error) = &done.error {
            let of_guest =
                matches!(done.report, Report::Failed { code: FailureCode::DriveUnusable, .. });
            // Of a drive nothing is said but where it should be in the guest.
            self.failure = Some(if of_guest { error.clone() } else { without_paths(error) });
        }
        self.log_failure(&done);
        let machine = done.body.machine.as_ref().map(vmm::Machine::exit_watch);
        let mut body = done.body;
        if machine.is_none() {
            body.seat = None;
        }
        self.body = Some(body);
        let now = now();
        let heard = self.core.handle_report(now, done.attempt, done.report);
        if heard == Heard::OutOfPlace {
            tracing::error!(sandbox = %self.id, report = ?done.report, phase = ?self.core.phase(), "report out of place");
        }
        if heard == Heard::Taken && done.report == Report::Ready {
            self.life += 1;
            // Not at once: what it was woken for comes first.
            self.sample_next();
        }
        // After a stale report the machine is an earlier one, which the waiting order ends: its end is no news.
        self.exit = match (machine, self.core.machine()) {
            (Some(watch), Some(attempt)) if heard == Heard::Taken => Some((attempt, watch)),
            _ => None,
        };
        self.pump(done.data).await;
    }

    /// An order that failed is logged; one that a newer order has ended early has not failed, and a lack of the host that
    /// lasts is said once.
    fn log_failure(&mut self, done: &Done) {
        let Some(error) = &done.error else {
            self.short_of = None;
            return;
        };
        let lacking = match done.report {
            Report::Failed { code, .. } if code.is_shortage() => Some(code),
            _ => None,
        };
        let known = lacking.is_some() && lacking == self.short_of;
        self.short_of = lacking;
        if known || !self.waiting.is_empty() {
            tracing::debug!(sandbox = %self.id, error, report = ?done.report, "an order failed");
        } else {
            tracing::warn!(sandbox = %self.id, error, report = ?done.report, "an order failed");
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

/// Whether the event ends an order whose phases were measured.
fn has_phases(what: &What) -> bool {
    matches!(
        what,
        What::Started { .. }
            | What::Slept { .. }
            | What::Woke { .. }
            | What::Demoted
            | What::SleepFailed { .. }
            | What::SleepCancelled { .. }
            | What::WakeFailed { .. }
            | What::Failed { .. }
            | What::CaptureEnded { .. }
    )
}
