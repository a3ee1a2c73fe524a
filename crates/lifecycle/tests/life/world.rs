//! A world that knows what machines and memories there really are, and panics when it is told to do something that
//! would make a second machine, go on from an older memory, or throw a living memory away.
//!
//! It judges orders by what it holds in its hands, not by what phase the sandbox says it is in.

use std::collections::BTreeSet;
use std::collections::VecDeque;

use lifecycle::{
    Attempt, Call, CallKind, CaptureId, CaptureOf, Cause, Death, Event, FailureCode, Heard, Left,
    Order, Phase, Policy, Recovered, Refusal, Report, Sample, Sandbox, Served, SleepCause, Tier,
    Time, What, Work,
};

/// How the world carries out an order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Luck {
    Well,
    /// Turns back if it was asked to, otherwise [`Luck::Well`].
    TurnsBack,
    Fails(FailureCode),
    /// Fails, and the memory with it.
    Loses,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Machine {
    number: Attempt,
    stopped: bool,
}

/// One sandbox in its world.
pub(crate) struct World {
    pub(crate) sandbox: Sandbox,
    pub(crate) now: Time,
    machine: Option<Machine>,
    /// Goes up whenever the guest runs: what its memory is worth.
    memory: u64,
    /// What is stored on disk, and whether a machine has gone on from it since.
    stored: Option<u64>,
    /// Whether there is a disk.
    disk: bool,
    /// The order to be carried out, and whether it was asked to turn back.
    todo: Option<(Order, bool)>,
    /// What has been carried out but not said yet.
    outbox: VecDeque<Said>,
    said: Vec<(Attempt, Report)>,
    buried: Vec<Attempt>,

    restart_wished: bool,
    delete_wished: bool,
    /// Something was promised that it will be there.
    waiting: bool,
    captures: BTreeSet<CaptureId>,
    next_capture: u64,
    calls: Vec<CallKind>,

    /// What is known of its idleness, by a way of reckoning of our own.
    pub(crate) quiet: Quiet,
    pub(crate) samples_asked: u32,
}

/// Everything that was seen since it became awake.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quiet {
    busy_at: Time,
    samples: Vec<(Time, Sample)>,
}

#[derive(Clone, Copy, Debug)]
enum Said {
    Report(Attempt, Report),
    Death(Attempt, Death),
}

impl World {
    pub(crate) fn new(policy: Policy) -> Self {
        let now = Time::from_millis(1_000);
        let mut world = Self {
            sandbox: Sandbox::create(now, policy),
            now,
            machine: None,
            memory: 0,
            stored: None,
            disk: false,
            todo: None,
            outbox: VecDeque::new(),
            said: Vec::new(),
            buried: Vec::new(),
            restart_wished: false,
            delete_wished: false,
            waiting: false,
            captures: BTreeSet::new(),
            next_capture: 0,
            calls: Vec::new(),
            quiet: Quiet::default(),
            samples_asked: 0,
        };
        world.listen();
        world
    }

    /// Takes what the sandbox wants. Called after everything it is told.
    fn listen(&mut self) {
        let mut superseding = 0;
        while let Some(order) = self.sandbox.poll_order() {
            if let Work::Suspend { .. } | Work::Capture { of: CaptureOf::Awake, .. } = order.work {
                assert_eq!(self.sandbox.halted_since(), None, "of one that stands still");
            }
            match order.work {
                Work::Cancel => {
                    if let Some((todo, cancelled)) = &mut self.todo
                        && todo.attempt == order.attempt
                    {
                        *cancelled = true;
                    }
                }
                Work::Sample => self.samples_asked += 1,
                Work::Notice { .. } => {}
                Work::Create
                | Work::Boot
                | Work::Suspend { .. }
                | Work::Demote
                | Work::Wake { .. }
                | Work::Capture { .. }
                | Work::Destroy => {
                    superseding += 1;
                    self.todo = Some((order, false));
                }
            }
        }
        assert!(superseding <= 1, "two orders at once");
        while let Some(Event { what, at }) = self.sandbox.poll_event() {
            assert!(at <= self.now);
            match what {
                What::CaptureEnded { capture, .. } => {
                    assert!(self.captures.remove(&capture), "ended twice: {capture:?}");
                }
                What::FallingAsleep { cause: SleepCause::Idle } => self.assert_idle(),
                // Who waited has been refused.
                What::WakeFailed { again: false, .. }
                    if matches!(
                        self.sandbox.phase(),
                        // Or what it sleeps with is about to be copied.
                        Phase::Asleep { .. }
                            | Phase::CapturingAsleep { wake: None, .. }
                            | Phase::Demoting { wake: None, .. }
                    ) =>
                {
                    self.waiting = false;
                }
                What::StartRefused { .. } => {
                    self.waiting = false;
                    self.restart_wished = false;
                }
                _ => {}
            }
        }
    }

    /// Invariant 6, reckoned anew from everything that was seen.
    fn assert_idle(&self) {
        let policy = self.sandbox.policy();
        let window_ms = policy.sleep_after_ms.expect("one that never sleeps fell asleep");
        assert!(self.calls.is_empty(), "asleep under a call");
        assert!(self.now.ms_since(self.quiet.busy_at) >= window_ms, "asleep too early");
        let &(newest_at, newest) = self.quiet.samples.last().expect("a sample");
        assert!(self.now.ms_since(newest_at) <= 250, "on an old sample");
        assert_eq!(newest.outbound_tcp, 0);
        assert!(newest.timer_due_ms.is_none_or(|ms| ms + 250 > 5_000), "a timer is near");
        let from = self.now.minus_ms(window_ms);
        let mut before = self.quiet.samples.iter().rev().filter(|(at, _)| *at <= from);
        let &(base_at, base) = before.next().expect("a sample from before the window");
        let used = newest.cpu_usec.saturating_sub(base.cpu_usec);
        assert!(used < 20 * newest_at.ms_since(base_at).max(window_ms), "it computes");
        for (at, sample) in self.quiet.samples.iter().filter(|(at, _)| *at > from) {
            assert_eq!(sample.outbound_tcp, 0, "connected at {at:?}");
        }
    }

    fn busy(&mut self) {
        self.quiet.busy_at = self.now;
    }

    // What people want.

    pub(crate) fn need(&mut self, cause: Cause) {
        let served = self.sandbox.handle_need(self.now, cause);
        self.busy();
        self.judge(served);
    }

    pub(crate) fn begin(&mut self, kind: CallKind) {
        let served = self.sandbox.handle_call_began(self.now, Call::of(kind));
        self.busy();
        if served.is_ok() {
            self.calls.push(kind);
        }
        self.judge(served);
    }

    pub(crate) fn end(&mut self) {
        if let Some(kind) = self.calls.pop() {
            self.busy();
            self.sandbox.handle_call_ended(self.now, kind);
            self.listen();
        }
    }

    fn judge(&mut self, served: Result<Served, Refusal>) {
        match served {
            Ok(Served::Now) => assert!(self.sandbox.is_awake()),
            Ok(Served::Later) => self.waiting = true,
            Err(Refusal::Failed { .. }) => {
                assert!(matches!(self.sandbox.phase(), Phase::Failed { .. }));
            }
            Err(Refusal::Deleted) => assert!(self.delete_wished),
            Err(refusal) => panic!("a need was refused: {refusal}"),
        }
        self.listen();
    }

    pub(crate) fn sleep(&mut self, cause: SleepCause, tier: Option<Tier>) {
        // Accepted or refused, the table says which.
        let _ = self.sandbox.handle_sleep(self.now, cause, tier);
        self.listen();
    }

    pub(crate) fn demote(&mut self) {
        self.sandbox.handle_demote(self.now);
        self.listen();
    }

    pub(crate) fn capture(&mut self) {
        let capture = CaptureId(self.next_capture);
        self.next_capture += 1;
        // Its end may be told at once.
        self.captures.insert(capture);
        if self.sandbox.handle_capture(self.now, capture).is_err() {
            self.captures.remove(&capture);
        }
        self.listen();
    }

    pub(crate) fn restart(&mut self) {
        if self.sandbox.handle_restart(self.now).is_ok() {
            self.restart_wished = true;
        }
        self.listen();
    }

    pub(crate) fn delete(&mut self) {
        self.delete_wished = true;
        self.sandbox.handle_delete(self.now);
        self.listen();
    }

    pub(crate) fn policy(&mut self, policy: Policy) {
        self.sandbox.handle_policy(self.now, policy);
        self.listen();
    }

    // What goes on.

    pub(crate) fn pass(&mut self, ms: u64) {
        self.now = self.now.plus_ms(ms);
        self.sandbox.handle_deadline(self.now);
        self.listen();
    }

    pub(crate) fn halt(&mut self, halt: bool) {
        if halt {
            self.sandbox.handle_halted(self.now);
        } else {
            self.sandbox.handle_resumed(self.now);
        }
        self.listen();
    }

    pub(crate) fn packets(&mut self) {
        self.busy();
        self.sandbox.handle_packets(self.now);
        self.listen();
    }

    pub(crate) fn sample(&mut self, sample: Sample) {
        if self.machine.is_none_or(|machine| machine.stopped) {
            return;
        }
        self.quiet.samples.push((self.now, sample));
        self.sandbox.handle_sample(self.now, sample);
        self.listen();
    }

    /// The machine dies; the host notices when it gets to it.
    pub(crate) fn die(&mut self, death: Death) {
        if let Some(machine) = self.machine.take() {
            self.buried.push(machine.number);
            self.outbox.push_back(Said::Death(machine.number, death));
        }
    }

    /// Says again what was said before, or what is long superseded: nothing may change.
    pub(crate) fn repeat(&mut self, index: usize) {
        let before = self.sandbox.phase().clone();
        if !self.said.is_empty() {
            let (attempt, report) = self.said[index % self.said.len()];
            assert_eq!(self.sandbox.handle_report(self.now, attempt, report), Heard::Stale);
        }
        let early = Attempt(u64::MAX);
        let heard = self.sandbox.handle_report(self.now, early, Report::Ready);
        assert_eq!(heard, Heard::OutOfPlace);
        assert_eq!(*self.sandbox.phase(), before);
        self.listen();
    }

    /// The host says the oldest thing that it has not said yet.
    pub(crate) fn deliver(&mut self) {
        let Some(said) = self.outbox.pop_front() else { return };
        let heard = match said {
            Said::Report(attempt, report) => {
                self.said.push((attempt, report));
                self.sandbox.handle_report(self.now, attempt, report)
            }
            Said::Death(machine, death) => self.sandbox.handle_died(self.now, machine, death),
        };
        assert_ne!(heard, Heard::OutOfPlace, "{said:?} in {:?}", self.sandbox.phase());
        // There, if only for a moment: what waited has been let in.
        self.waiting &= !self.sandbox.is_awake();
        self.listen();
    }

    /// The host carries out the order that it has, and will say so some time.
    pub(crate) fn work(&mut self, luck: Luck) {
        let Some((Order { attempt, work }, cancelled)) = self.todo.take() else { return };
        let report = self.carry_out(attempt, work, cancelled, luck);
        self.outbox.push_back(Said::Report(attempt, report));
    }

    fn carry_out(&mut self, attempt: Attempt, work: Work, cancelled: bool, luck: Luck) -> Report {
        let failed = |code, left| Report::Failed { code, left };
        match work {
            Work::Create | Work::Boot => {
                if work == Work::Create {
                    assert!(!self.disk, "created over a disk that exists");
                    assert_eq!(self.machine, None);
                } else {
                    assert!(self.disk, "booted without a disk");
                    let memory_lives = self.machine.is_some() || self.stored == Some(self.memory);
                    assert!(!memory_lives || self.restart_wished, "threw a living memory away");
                }
                self.machine = None;
                self.stored = None;
                match luck {
                    Luck::Well | Luck::TurnsBack => {
                        self.disk = true;
                        self.restart_wished = false;
                        self.runs(Machine { number: attempt, stopped: false }, false);
                        Report::Ready
                    }
                    Luck::Fails(code) => failed(code, Left::Lost),
                    Luck::Loses => failed(FailureCode::BootFailed, Left::Lost),
                }
            }
            Work::Wake { from: Tier::Memory } => {
                let Some(machine) = self.machine else {
                    return failed(FailureCode::MachineLost, Left::Lost);
                };
                assert!(machine.stopped, "woke what runs");
                match luck {
                    Luck::Well | Luck::TurnsBack => {
                        self.runs(Machine { stopped: false, ..machine }, true);
                        Report::Ready
                    }
                    Luck::Fails(code) => failed(code, Left::Asleep),
                    Luck::Loses => self.lost(),
                }
            }
            Work::Wake { .. } => {
                assert_eq!(self.machine, None, "a second machine");
                assert_eq!(self.stored, Some(self.memory), "went on from an older memory");
                match luck {
                    Luck::Well | Luck::TurnsBack => {
                        self.runs(Machine { number: attempt, stopped: false }, true);
                        Report::Ready
                    }
                    Luck::Fails(code) => failed(code, Left::Asleep),
                    Luck::Loses => self.lost(),
                }
            }
            Work::Suspend { tier } => {
                let Some(machine) = self.machine else {
                    return failed(FailureCode::MachineLost, Left::Lost);
                };
                assert!(!machine.stopped, "put to sleep what sleeps");
                match luck {
                    Luck::TurnsBack if cancelled => Report::BackAwake,
                    Luck::Well | Luck::TurnsBack => {
                        self.machine = Some(Machine { stopped: true, ..machine });
                        if tier == Tier::Disk {
                            self.stored = Some(self.memory);
                            self.machine = None;
                        }
                        Report::Suspended { tier }
                    }
                    Luck::Fails(code @ FailureCode::DiskFull) => {
                        self.machine = Some(Machine { stopped: true, ..machine });
                        failed(code, Left::Asleep)
                    }
                    Luck::Fails(code) => failed(code, Left::Awake),
                    Luck::Loses => self.lost(),
                }
            }
            Work::Demote => {
                let Some(machine) = self.machine else {
                    return failed(FailureCode::MachineLost, Left::Lost);
                };
                assert!(machine.stopped, "demoted what runs");
                match luck {
                    Luck::TurnsBack if cancelled => Report::StillInMemory,
                    Luck::Well | Luck::TurnsBack => {
                        self.stored = Some(self.memory);
                        self.machine = None;
                        Report::Demoted
                    }
                    Luck::Fails(code) => failed(code, Left::Asleep),
                    Luck::Loses => self.lost(),
                }
            }
            Work::Capture { of: CaptureOf::Awake, .. } => {
                let Some(machine) = self.machine else {
                    return failed(FailureCode::MachineLost, Left::Lost);
                };
                assert!(!machine.stopped, "a sleeper was copied as if it ran");
                match luck {
                    Luck::Well | Luck::TurnsBack => Report::Captured,
                    Luck::Fails(code) => failed(code, Left::Awake),
                    Luck::Loses => self.lost(),
                }
            }
            Work::Capture { of: CaptureOf::AsleepOnDisk, .. } => {
                assert_eq!(self.machine, None, "copied under a machine");
                assert_eq!(self.stored, Some(self.memory), "copied an older memory");
                match luck {
                    Luck::Well | Luck::TurnsBack => Report::Captured,
                    Luck::Fails(code) => failed(code, Left::Asleep),
                    Luck::Loses => self.lost(),
                }
            }
            Work::Destroy => {
                assert!(self.delete_wished, "destroyed without a wish");
                match luck {
                    Luck::Well | Luck::TurnsBack => {
                        self.machine = None;
                        self.stored = None;
                        self.disk = false;
                        Report::Destroyed
                    }
                    Luck::Fails(code) => failed(code, Left::Lost),
                    Luck::Loses => failed(FailureCode::DestroyFailed, Left::Lost),
                }
            }
            Work::Cancel | Work::Sample | Work::Notice { .. } => unreachable!("not carried out"),
        }
    }

    /// From here on what is stored is older than what runs.
    fn runs(&mut self, machine: Machine, woken: bool) {
        self.machine = Some(machine);
        self.memory += 1;
        self.busy();
        // One that was woken counts on from where it was, without having used any in its sleep.
        let counted = self.quiet.samples.pop().filter(|_| woken);
        self.quiet.samples.clear();
        self.quiet.samples.extend(counted.map(|(_, sample)| (self.now, sample)));
    }

    fn lost(&mut self) -> Report {
        if let Some(machine) = self.machine.take() {
            self.buried.push(machine.number);
        }
        self.stored = None;
        Report::Failed { code: FailureCode::MachineLost, left: Left::Lost }
    }

    /// The daemon is killed and started again: it looks at what there is.
    pub(crate) fn crash(&mut self) {
        if *self.sandbox.phase() == Phase::Deleted {
            return;
        }
        let asleep = |tier| Recovered::Asleep {
            tier,
            since: self.now,
            cause: SleepCause::Idle,
            timer_due: self.sandbox.timer_due(),
        };
        let stored = self.stored == Some(self.memory);
        let found = match (self.sandbox.phase(), self.machine) {
            _ if self.delete_wished => Recovered::Deleting,
            (&Phase::Failed { code, since, saved }, _) => {
                Recovered::Failed { code, since, has_run: self.disk, saved }
            }
            _ if self.restart_wished && self.disk => Recovered::Unbooted,
            (_, Some(Machine { stopped: false, .. })) => Recovered::Running,
            (_, Some(Machine { stopped: true, .. })) => asleep(Tier::Memory),
            (_, None) if stored => asleep(Tier::Disk),
            (_, None) if self.disk => Recovered::Off { death: Death::Killed, since: self.now },
            (_, None) => Recovered::Unstarted,
        };
        self.todo = None;
        self.outbox.clear();
        self.said.clear();
        self.buried.clear();
        self.captures.clear();
        self.calls.clear();
        self.waiting = false;
        if let Some(machine) = &mut self.machine {
            machine.number = Attempt::RECOVERED;
        }
        self.busy();
        self.quiet.samples.clear();
        self.sandbox = Sandbox::recover(self.now, self.sandbox.policy().clone(), found);
        self.listen();
    }

    // What must hold after each step.

    pub(crate) fn check(&mut self) {
        self.invariant_a_need_is_never_lost();
        self.invariant_the_dead_are_not_heard();
        self.invariant_at_rest_all_agree();
        self.invariant_no_deadline_is_due_for_ever();
        self.invariant_questions_agree();
    }

    fn invariant_a_need_is_never_lost(&mut self) {
        if !self.waiting {
            return;
        }
        let answered = match self.sandbox.phase() {
            // On its way.
            Phase::Starting { .. }
            | Phase::Waking { .. }
            | Phase::Suspending { wake: Some(_), .. }
            | Phase::Demoting { wake: Some(_), .. }
            | Phase::CapturingAsleep { wake: Some(_), .. } => false,
            // There, or told that it will not be.
            Phase::Running { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Failed { .. }
            | Phase::Deleting { .. }
            | Phase::Deleted => true,
            lost @ (Phase::Asleep { .. }
            | Phase::Off { .. }
            | Phase::Suspending { wake: None, .. }
            | Phase::Demoting { wake: None, .. }
            | Phase::CapturingAsleep { wake: None, .. }) => panic!("forgot who waits: {lost:?}"),
        };
        self.waiting = !answered;
    }

    fn invariant_the_dead_are_not_heard(&mut self) {
        let current = self.sandbox.machine();
        for &number in self.buried.iter().filter(|number| Some(**number) != current) {
            let before = self.sandbox.phase().clone();
            let heard = self.sandbox.handle_died(self.now, number, Death::Killed);
            assert_eq!(heard, Heard::Stale);
            assert_eq!(*self.sandbox.phase(), before);
        }
    }

    fn invariant_at_rest_all_agree(&self) {
        if self.todo.is_some() || !self.outbox.is_empty() {
            return;
        }
        let stopped = self.machine.map(|machine| machine.stopped);
        match *self.sandbox.phase() {
            Phase::Running { .. } => assert_eq!(stopped, Some(false)),
            Phase::Asleep { tier: Tier::Memory, .. } => assert_eq!(stopped, Some(true)),
            Phase::Asleep { .. } => {
                assert_eq!((stopped, self.stored), (None, Some(self.memory)));
            }
            Phase::Off { .. } => assert_eq!(stopped, None),
            Phase::Failed { .. } => assert_ne!(stopped, Some(false)),
            Phase::Deleted => assert_eq!((stopped, self.stored, self.disk), (None, None, false)),
            // Only while they wait for the next try.
            Phase::Waking { retry_at, .. } | Phase::Deleting { retry_at, .. } => {
                assert!(retry_at.is_some(), "nobody works at it");
            }
            ref stuck @ (Phase::Starting { .. }
            | Phase::CapturingAwake { .. }
            | Phase::Suspending { .. }
            | Phase::Demoting { .. }
            | Phase::CapturingAsleep { .. }) => panic!("nobody works at it: {stuck:?}"),
        }
        if let Some(machine) = self.machine
            && self.sandbox.is_awake()
        {
            assert_eq!(self.sandbox.machine(), Some(machine.number));
        }
    }

    fn invariant_no_deadline_is_due_for_ever(&mut self) {
        self.sandbox.handle_deadline(self.now);
        self.listen();
        if let Some(due) = self.sandbox.poll_deadline() {
            assert!(due > self.now, "due at {due:?}, now {:?}: {:?}", self.now, self.sandbox);
        }
    }

    fn invariant_questions_agree(&self) {
        let awake = !self.sandbox.awake_because(self.now).is_empty();
        assert_eq!(awake, self.sandbox.status() == lifecycle::Status::Running);
        let sleeping = self.sandbox.sleep_tier().is_some();
        assert_eq!(sleeping, self.sandbox.status() == lifecycle::Status::Sleeping);
        if let (Some(due), true) = (self.sandbox.will_sleep_at(self.now), awake) {
            assert!(due >= self.now);
        }
    }

    // How it ends.

    /// All that goes on ends, if from now on the host does its work.
    pub(crate) fn settle(&mut self) {
        self.halt(false);
        for _ in 0..400 {
            self.work(Luck::Well);
            while !self.outbox.is_empty() {
                self.deliver();
            }
            let due = match self.sandbox.phase() {
                Phase::Waking { retry_at, .. } | Phase::Deleting { retry_at, .. } => *retry_at,
                _ => None,
            };
            match due {
                Some(due) => self.pass(due.ms_since(self.now)),
                None if self.todo.is_none() => return,
                None => {}
            }
        }
        panic!("stuck in {:?}", self.sandbox.phase());
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting
    }

    pub(crate) fn captures_open(&self) -> usize {
        self.captures.len()
    }
}
