//! Many days of many boxes with random use: none frozen while something holds it, none stopped before its time, each in time.
//!
//! How many: `DORMOUSE_BOX_DAYS` and `DORMOUSE_BOXES`; a soak sets them high.

use lifecycle::{
    BoxPolicy, Call, CallKind, Heard, Order, Phase, Policy, Report, Sample, Sandbox, Time, What,
    Work,
};

const SECOND: u64 = 1_000;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;
/// How long before its stop a person is warned (B26).
const WARNED_BEFORE: u64 = 30 * MINUTE;

/// As [xorshift64*](https://en.wikipedia.org/wiki/Xorshift#xorshift*): the histories need no better numbers.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

struct Life {
    sandbox: Sandbox,
    now: Time,
    commands: u32,
    held: Vec<(Time, CallKind)>,
    /// What was foreseen when something last happened to it.
    stops_at: Option<Time>,
    warned: bool,
    thaws: u64,
    freezes: u64,
    stops: u64,
    warnings: u64,
}

impl Life {
    fn new(policy: BoxPolicy, now: Time) -> Self {
        let sandbox = Sandbox::create(now, Policy::of_box(policy));
        let (thaws, freezes, stops, warnings) = (0, 0, 0, 0);
        let held = Vec::new();
        let mut life = Self {
            sandbox,
            now,
            commands: 0,
            held,
            stops_at: None,
            warned: false,
            thaws,
            freezes,
            stops,
            warnings,
        };
        life.obey();
        life
    }

    fn obey(&mut self) {
        while let Some(Order { attempt, work }) = self.sandbox.poll_order() {
            let report = match work {
                Work::Create | Work::Boot | Work::Wake { .. } => Report::Ready,
                Work::Suspend { tier } => Report::Suspended { tier },
                Work::Destroy => Report::Destroyed,
                Work::Sample => {
                    let sample = Sample { commands: self.commands, ..Sample::default() };
                    self.sandbox.handle_sample(self.now, sample);
                    continue;
                }
                Work::Cancel => continue,
                Work::Demote | Work::Capture { .. } | Work::Notice { .. } => {
                    panic!("no such order for a box: {work:?}")
                }
            };
            assert_eq!(self.sandbox.handle_report(self.now, attempt, report), Heard::Taken);
        }
        while let Some(event) = self.sandbox.poll_event() {
            match event.what {
                What::Slept { .. } => {
                    self.freezes += 1;
                    assert!(self.held.is_empty(), "frozen while held: {:?}", self.held);
                }
                What::Woke { .. } => self.thaws += 1,
                What::StoppedForGood { .. } => {
                    self.stops += 1;
                    assert!(self.held.is_empty(), "stopped while held: {:?}", self.held);
                    let foreseen = self.stops_at.expect("a stop that nobody foresaw");
                    assert!(self.now >= foreseen, "stopped before {foreseen:?}, at {:?}", self.now);
                    assert!(self.warned, "stopped without a warning");
                }
                _ => {}
            }
        }
    }

    /// Lives on, deadline by deadline and warning by warning.
    fn pass_until(&mut self, end: Time) {
        loop {
            self.stops_at = self.sandbox.stops_at(self.now).or(self.stops_at);
            let warn_at = self.stops_at.map(|at| at.minus_ms(WARNED_BEFORE));
            if self.sandbox.stops_at(self.now).is_some() {
                let due = warn_at.is_some_and(|at| at <= self.now);
                if due && !self.warned {
                    self.warnings += 1;
                }
                self.warned = due;
            }
            let release = self.held.iter().map(|&(at, _)| at).min();
            let deadline = self.sandbox.poll_deadline();
            let warn = warn_at.filter(|&at| at > self.now);
            let next = [deadline, release, warn, Some(end)].into_iter().flatten().min();
            let next = next.unwrap_or(end).max(self.now);
            if next >= end {
                self.now = end;
                break;
            }
            self.now = next;
            if let Some(done) = self.held.iter().position(|&(at, _)| at <= self.now) {
                let (_, kind) = self.held.swap_remove(done);
                self.sandbox.handle_call_ended(self.now, kind);
            }
            self.sandbox.handle_deadline(self.now);
            self.obey();
        }
        self.sandbox.handle_deadline(self.now);
        self.obey();
    }

    fn use_at_random(&mut self, dice: &mut Dice) {
        if self.sandbox.stopped().is_some() {
            if dice.below(2) == 0 {
                self.sandbox.handle_restore(self.now).expect("its copy is kept");
                self.obey();
            }
            return;
        }
        let kind = match dice.below(10) {
            0..=4 => CallKind::EdgeRequest,
            5..=7 => CallKind::Tool,
            8 => CallKind::Exec,
            _ => CallKind::Link,
        };
        let before = self.sandbox.is_awake();
        match self.sandbox.handle_call_began(self.now, Call::of(kind)) {
            Ok(_) => {
                self.obey();
                let long = if kind.is_use() && dice.below(20) == 0 { 3 * HOUR } else { 5 * SECOND };
                if kind.is_use() {
                    self.held.push((self.now.plus_ms(1 + dice.below(long)), kind));
                } else {
                    self.sandbox.handle_call_ended(self.now, kind);
                }
                assert!(self.sandbox.is_awake(), "served: {:?}", self.sandbox.phase());
            }
            Err(refusal) => assert!(!kind.is_use() && !before, "{kind:?}: {refusal}"),
        }
        if kind == CallKind::Tool {
            self.commands = u32::from(dice.below(4) == 0);
        }
    }
}

fn from_env(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn b23_b24_b26_days_of_boxes_with_random_use() {
    let (days, boxes) = (from_env("DORMOUSE_BOX_DAYS", 60), from_env("DORMOUSE_BOXES", 20));
    let (mut thaws, mut freezes, mut stops, mut warnings, mut gone) = (0, 0, 0, 0, 0);
    for number in 0..boxes {
        let mut dice =
            Dice(0x9E37_79B9_7F4A_7C15 ^ (number + 1).wrapping_mul(0xD134_2543_DE82_EF95));
        let timeout = [None, Some(5 * MINUTE), Some(45 * MINUTE), Some(7 * DAY)];
        let idle_timeout_ms = timeout[usize::try_from(dice.below(4)).expect("small")];
        let policy = BoxPolicy { idle_timeout_ms, ..BoxPolicy::default() };
        let mut life = Life::new(policy.clone(), Time::from_millis(number));
        let end = Time::from_millis(days * DAY);
        while life.now < end {
            // Most of the time somebody works with it; sometimes nobody comes for days.
            let pause = match dice.below(30) {
                0 => dice.below(4 * DAY),
                1..=5 => dice.below(5 * HOUR),
                _ => dice.below(20 * MINUTE),
            };
            life.pass_until(life.now.plus_ms(pause).min(end));
            if *life.sandbox.phase() == Phase::Deleted {
                gone += 1;
                let fresh = Life::new(policy.clone(), life.now);
                thaws += life.thaws;
                freezes += life.freezes;
                stops += life.stops;
                warnings += life.warnings;
                life = fresh;
            }
            life.use_at_random(&mut dice);
        }
        thaws += life.thaws;
        freezes += life.freezes;
        stops += life.stops;
        warnings += life.warnings;
    }
    println!(
        "{boxes} boxes, {days} days each: frozen {freezes} times, thawed {thaws} times, {warnings} warnings, \
         stopped for good {stops} times, {gone} given up"
    );
    assert!(freezes > 0 && thaws > 0 && stops > 0 && gone > 0 && warnings > 0);
}
