//! A host that carries out every order at once and well, and a guest that does what the test says.

use lifecycle::{
    Attempt, Cause, Event, Heard, Order, Phase, Policy, Refusal, Report, SAMPLE_EVERY_MS, Sample,
    Sandbox, Served, Start, Status, Tier, Tiers, Time, What, Work,
};

/// What a test's guest does. Its CPU, timers and connections go on only while it is awake.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Guest {
    pub(crate) cpu_usec: u64,
    /// How much of a core its programs use from now on, in thousandths.
    pub(crate) load_permille: u64,
    pub(crate) outbound_tcp: u32,
    /// When its earliest timer fires.
    pub(crate) timer: Option<Time>,
    /// After how many milliseconds a timer that fired is due again.
    pub(crate) timer_every_ms: Option<u64>,
    pub(crate) holds: u32,
    pub(crate) hold_connections: u32,
    /// Commands that run in it, started by calls.
    pub(crate) commands: u32,
}

/// A sandbox with its obedient host.
pub(crate) struct Obedient {
    pub(crate) sandbox: Sandbox,
    pub(crate) now: Time,
    pub(crate) guest: Guest,
    /// Whether the guest answers when it is asked for a sample.
    pub(crate) samples: bool,
    /// How late each timer fired, in milliseconds.
    pub(crate) timers_late_ms: Vec<u64>,
    pub(crate) awake_ms: u64,
    pub(crate) works: Vec<(Time, Work)>,
    pub(crate) events: Vec<Event>,
    next_sample: Time,
}

/// The policy of most tests: sleep after 30 s, on disk at once.
pub(crate) fn after_30s() -> Policy {
    Policy { tiers: Tiers::Disk, ..Policy::default() }
}

pub(crate) fn at(ms: u64) -> Time {
    Time::from_millis(ms)
}

impl Obedient {
    /// It runs at time zero, just created, with one sample taken.
    pub(crate) fn running(policy: Policy) -> Self {
        let mut host = Self {
            sandbox: Sandbox::create(at(0), policy),
            now: at(0),
            guest: Guest::default(),
            samples: true,
            timers_late_ms: Vec::new(),
            awake_ms: 0,
            works: Vec::new(),
            events: Vec::new(),
            next_sample: at(0),
        };
        host.obey();
        assert_eq!(host.sandbox.status(), Status::Running);
        host.sample();
        host
    }

    /// Put to sleep on request right after it was created.
    pub(crate) fn asleep(policy: Policy) -> Self {
        let mut host = Self::running(policy);
        host.sandbox
            .handle_sleep(host.now, lifecycle::SleepCause::Asked, None)
            .expect("a running sandbox can be put to sleep");
        host.obey();
        assert_eq!(host.sandbox.status(), Status::Sleeping);
        host
    }

    /// Carries out all orders.
    pub(crate) fn obey(&mut self) {
        while let Some(Order { attempt, work }) = self.sandbox.poll_order() {
            self.works.push((self.now, work));
            let report = match work {
                Work::Create | Work::Boot => {
                    self.guest.cpu_usec = 0;
                    Report::Ready
                }
                Work::Wake { .. } => Report::Ready,
                Work::Suspend { tier } => Report::Suspended { tier },
                Work::Demote => Report::Demoted,
                Work::Capture { .. } => Report::Captured,
                Work::Destroy => Report::Destroyed,
                Work::Cancel | Work::Notice { .. } => continue,
                Work::Sample => {
                    self.sample();
                    continue;
                }
            };
            self.report(attempt, report);
            if self.sandbox.is_awake() {
                self.fire_timers();
                self.sample();
            }
        }
        while let Some(event) = self.sandbox.poll_event() {
            self.events.push(event);
        }
    }

    fn report(&mut self, attempt: Attempt, report: Report) {
        assert_eq!(self.sandbox.handle_report(self.now, attempt, report), Heard::Taken);
    }

    /// The guest tells how it is, if it does.
    pub(crate) fn sample(&mut self) {
        if !self.samples || !self.sandbox.is_awake() {
            return;
        }
        self.next_sample = self.now.plus_ms(SAMPLE_EVERY_MS);
        let guest = self.guest;
        let sample = Sample {
            cpu_usec: guest.cpu_usec,
            outbound_tcp: guest.outbound_tcp,
            timer_due_ms: guest.timer.map(|due| due.ms_since(self.now)),
            holds: guest.holds,
            hold_connections: guest.hold_connections,
            commands: guest.commands,
        };
        self.sandbox.handle_sample(self.now, sample);
    }

    /// Time passes; everything happens when it is due.
    pub(crate) fn pass_ms(&mut self, ms: u64) {
        self.pass_until(self.now.plus_ms(ms));
    }

    pub(crate) fn pass_until(&mut self, end: Time) {
        loop {
            let deadline = self.sandbox.poll_deadline().filter(|&due| due <= end);
            let awake = self.sandbox.is_awake();
            let sample = (awake && self.samples).then_some(self.next_sample);
            let timer = self.guest.timer.filter(|_| awake);
            let next = [deadline, sample, timer, Some(end)].into_iter().flatten().min().unwrap();
            let next = next.max(self.now);
            let ms = next.ms_since(self.now);
            if awake {
                self.awake_ms += ms;
                self.guest.cpu_usec += ms * self.guest.load_permille;
            }
            self.now = next;
            if awake {
                self.fire_timers();
            }
            if awake && self.samples && self.next_sample <= self.now {
                self.sample();
            }
            self.sandbox.handle_deadline(self.now);
            self.obey();
            let spins = self.sandbox.poll_deadline().is_some_and(|due| due <= self.now);
            assert!(!spins, "would be called again at once, for ever: {:?}", self.sandbox);
            if self.now >= end {
                return;
            }
        }
    }

    fn fire_timers(&mut self) {
        while let Some(due) = self.guest.timer.filter(|&due| due <= self.now) {
            self.timers_late_ms.push(self.now.ms_since(due));
            self.guest.timer = self.guest.timer_every_ms.map(|ms| due.plus_ms(ms));
        }
    }

    pub(crate) fn need(&mut self, cause: Cause) -> Result<Served, Refusal> {
        let served = self.sandbox.handle_need(self.now, cause);
        self.obey();
        served
    }

    pub(crate) fn phase(&self) -> Phase {
        self.sandbox.phase().clone()
    }

    /// The reasons for being awake, in their short words.
    pub(crate) fn reasons(&self) -> Vec<&'static str> {
        let reasons = self.sandbox.awake_because(self.now);
        reasons.iter().map(|awake| awake.reason.as_str()).collect()
    }

    /// When it fell asleep, each time.
    pub(crate) fn slept_at(&self) -> Vec<u64> {
        let slept = |event: &Event| matches!(event.what, What::Slept { .. });
        self.events.iter().filter(|event| slept(event)).map(|event| event.at.as_millis()).collect()
    }

    pub(crate) fn count(&self, work: impl Fn(&Work) -> bool) -> usize {
        self.works.iter().filter(|(_, done)| work(done)).count()
    }

    pub(crate) fn started(&self, how: Start) -> usize {
        self.events.iter().filter(|event| event.what == What::Started { how }).count()
    }

    pub(crate) fn woke(&self, from: Tier) -> usize {
        self.count(|work| *work == Work::Wake { from })
    }
}

/// Something from the network needs it.
pub(crate) const PACKET: Cause = Cause::Packet { peer: None, port: Some(8000) };

/// The next order's number, which must be for `work`.
pub(crate) fn ordered(sandbox: &mut Sandbox, work: Work) -> Attempt {
    let order = sandbox.poll_order().expect("an order");
    assert_eq!(order.work, work);
    order.attempt
}

/// The host reports, and is believed.
pub(crate) fn say(sandbox: &mut Sandbox, now: Time, attempt: Attempt, report: Report) {
    assert_eq!(sandbox.handle_report(now, attempt, report), Heard::Taken);
}
