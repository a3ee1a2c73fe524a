//! What is known about a running sandbox, and what follows from it: why it is awake and when it may sleep.
//!
//! [`Facts`] only remembers. A policy is a function from facts to a [`Verdict`], the list of awake reasons and the
//! moment at which they end. Here is that of the sandbox face (S2-S4, S10-S12); the box face gets a second such
//! function over the same facts, and nothing else in this crate knows the difference.
//!
//! The rule behind [`sandbox_verdict`]: for each thing that must be quiet there is a moment since when it is. The
//! latest of these, plus `sleep_after_ms`, is when it sleeps.

use std::collections::VecDeque;

use crate::boxed::{Activity, BoxFacts};
use crate::limits::{CPU_IDLE_PERMILLE, CPU_SAMPLES_MAX, SAMPLE_FRESH_MS, TIMER_NEAR_MS};
use crate::need::{CallKind, SleepCause};
use crate::order::FailureCode;
use crate::policy::Policy;
use crate::reason::{AwakeReason, Reason};
use crate::time::Time;

/// What a guest says of itself, taken about once every [`SAMPLE_EVERY_MS`](crate::SAMPLE_EVERY_MS).
///
/// It comes from a guest, so it may be a lie; the worst that a lie does is to keep that guest awake or put it to sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// CPU time its own programs have used so far, in microseconds, as a counter that only grows: neither the guest
    /// agent's nor that of the kernel's own threads. One that shrinks is taken for a new count.
    pub cpu_usec: u64,
    /// How many TCP connections to the outside it holds, without those on its own IPv6 address.
    pub outbound_tcp: u32,
    /// In how many milliseconds its earliest user timer is due; `None`: it has none.
    pub timer_due_ms: Option<u64>,
    /// How many holds are raised on the awake socket, over all its connections.
    pub holds: u32,
    /// How many connections the awake socket has: who can be told that it sleeps soon.
    pub hold_connections: u32,
    /// How many commands run, started by calls.
    pub commands: u32,
}

/// What is known about a sandbox that runs.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// Since when it runs.
    awake_since: Time,
    /// When it was last needed by something that is not a call.
    needed_at: Time,
    /// Calls that wait on it, by [`CallKind::ALL`].
    calls: [u32; CallKind::ALL.len()],
    call_ended: Option<(Time, CallKind)>,
    packet_at: Option<Time>,
    /// When the newest sample since it became awake came.
    sample_at: Option<Time>,
    /// Used CPU, oldest first. May begin with the value from before it slept.
    cpu: VecDeque<(Time, u64)>,
    /// Since when the CPU has been quiet, if that is longer than [`Facts::cpu`] goes back.
    cpu_quiet_from: Option<Time>,
    tcp: u32,
    tcp_seen_at: Option<Time>,
    /// When the earliest timer is due, or was.
    timer_due: Option<Time>,
    /// Until when an earlier timer was due within [`TIMER_NEAR_MS`].
    timer_near_until: Option<Time>,
    holds: u32,
    hold_connections: u32,
    hold_lowered_at: Option<Time>,
    commands: u32,
    activities: [bool; Activity::ALL.len()],
    /// Until when it is not tried again, and why.
    sleep_failed: Option<(Time, FailureCode)>,
}

/// What a policy makes of the facts.
pub(crate) struct Verdict {
    /// Why it is awake.
    pub(crate) reasons: Vec<AwakeReason>,
    /// When it sleeps if nothing new happens; `None` if that cannot be foreseen.
    pub(crate) sleep: Option<Forecast>,
}

/// When it sleeps if nothing new happens. May lie in the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Forecast {
    pub(crate) at: Time,
    pub(crate) cause: SleepCause,
}

impl Facts {
    pub(crate) fn new(now: Time) -> Self {
        Self {
            awake_since: now,
            needed_at: now,
            calls: [0; CallKind::ALL.len()],
            call_ended: None,
            packet_at: None,
            sample_at: None,
            cpu: VecDeque::new(),
            cpu_quiet_from: None,
            tcp: 0,
            tcp_seen_at: None,
            timer_due: None,
            timer_near_until: None,
            holds: 0,
            hold_connections: 0,
            hold_lowered_at: None,
            commands: 0,
            activities: [false; Activity::ALL.len()],
            sleep_failed: None,
        }
    }

    /// Its guest goes on from memory: its counters, timers and holds go on too, all else begins anew.
    pub(crate) fn woke(&mut self, now: Time) {
        let cpu = self.cpu.back().map(|&(_, used)| (now, used)).into_iter().collect();
        *self = Self {
            calls: self.calls,
            cpu,
            timer_due: self.timer_due,
            holds: self.holds,
            hold_connections: self.hold_connections,
            commands: self.commands,
            activities: self.activities,
            ..Self::new(now)
        };
    }

    /// A new machine that remembers nothing. Calls are the host's to end, so their count stays.
    pub(crate) fn booted(&mut self, now: Time) {
        *self = Self { calls: self.calls, ..Self::new(now) };
    }

    /// It was nearly put to sleep, and runs on. All it knew is still so, but it is quiet from now at the earliest.
    pub(crate) fn stayed(&mut self, now: Time) {
        self.needed_at = now;
    }

    pub(crate) fn sleep_failed(&mut self, until: Time, code: FailureCode) {
        self.sleep_failed = Some((until, code));
    }

    /// What was quiet by the old settings may not be so by the new ones.
    pub(crate) fn settings_changed(&mut self) {
        self.cpu_quiet_from = None;
    }

    pub(crate) fn needed(&mut self, now: Time) {
        self.needed_at = now;
    }

    pub(crate) fn packet(&mut self, now: Time) {
        self.packet_at = Some(now);
    }

    pub(crate) fn call_began(&mut self, kind: CallKind) {
        let count = &mut self.calls[kind as usize];
        *count = count.saturating_add(1);
    }

    pub(crate) fn call_ended(&mut self, now: Time, kind: CallKind) {
        let count = &mut self.calls[kind as usize];
        *count = count.saturating_sub(1);
        self.call_ended = Some((now, kind));
    }

    pub(crate) fn calls(&self, kind: CallKind) -> u32 {
        self.calls[kind as usize]
    }

    pub(crate) fn timer_due(&self) -> Option<Time> {
        self.timer_due
    }

    pub(crate) fn set_timer_due(&mut self, due: Option<Time>) {
        self.timer_due = due;
    }

    pub(crate) fn hold_connections(&self) -> u32 {
        self.hold_connections
    }

    /// When the guest was last heard of, counted from when it became awake.
    pub(crate) fn heard_at(&self) -> Time {
        self.sample_at.unwrap_or(self.awake_since)
    }

    pub(crate) fn has_sample(&self, now: Time, newer_than_ms: u64) -> bool {
        self.sample_at.is_some_and(|at| now.ms_since(at) <= newer_than_ms)
    }

    /// It falls asleep: a timer that has fired already is none to wake for.
    pub(crate) fn drop_fired_timer(&mut self, now: Time) {
        self.timer_due = self.timer_due.filter(|&due| due > now);
    }

    /// `hold_counts`: whether lowering the last hold begins a new quiet time (not after a notice with `cap`, S13).
    pub(crate) fn sample(&mut self, now: Time, sample: Sample, policy: &Policy, hold_counts: bool) {
        self.sample_at = Some(now);
        let window_ms = policy.sleep_after_ms.unwrap_or(0);
        self.push_cpu(now, sample.cpu_usec, window_ms);
        self.cpu_quiet_from = self.cpu_quiet_since(window_ms).map(|(since, _)| since);

        self.tcp = sample.outbound_tcp;
        if sample.outbound_tcp > 0 {
            self.tcp_seen_at = Some(now);
        }

        if let Some(due) = self.timer_due.filter(|due| due.minus_ms(TIMER_NEAR_MS) <= now) {
            self.timer_near_until = self.timer_near_until.max(Some(due.min(now)));
        }
        self.timer_due = sample.timer_due_ms.map(|ms| now.plus_ms(ms));

        self.set_holds(now, sample.holds, sample.hold_connections, hold_counts);
        self.commands = sample.commands;
    }

    pub(crate) fn add_command(&mut self) {
        self.commands = self.commands.saturating_add(1);
    }

    pub(crate) fn set_activity(&mut self, activity: Activity, goes_on: bool) {
        self.activities[activity as usize] = goes_on;
    }

    pub(crate) fn goes_on(&self, activity: Activity) -> bool {
        self.activities[activity as usize]
    }

    /// What of it concerns a box.
    pub(crate) fn of_box(&self, now: Time) -> BoxFacts<'_> {
        BoxFacts {
            calls: &self.calls,
            // A command whose caller waits is one of the calls.
            background: self.commands.saturating_sub(self.calls(CallKind::Exec)),
            activities: &self.activities,
            sleep_failed: self.sleep_failed,
            heard: self.has_sample(now, SAMPLE_FRESH_MS),
        }
    }

    pub(crate) fn set_holds(&mut self, now: Time, holds: u32, connections: u32, hold_counts: bool) {
        if self.holds > 0 && holds == 0 && hold_counts {
            self.hold_lowered_at = Some(now);
        }
        self.holds = holds;
        self.hold_connections = connections;
    }

    fn push_cpu(&mut self, now: Time, used: u64, window_ms: u64) {
        if self.cpu.back().is_some_and(|&(_, before)| used < before) {
            self.cpu.clear();
            self.cpu_quiet_from = None;
        }
        // The newest is always kept, and those before it in steps.
        let step_ms = window_ms / 64;
        if let [.., (before, _), (last, _)] = *self.cpu.make_contiguous()
            && last.ms_since(before) < step_ms
        {
            self.cpu.pop_back();
        }
        self.cpu.push_back((now, used));
        // One from before the window is needed, to know what was used in it.
        while self.cpu.get(1).is_some_and(|&(second, _)| now.ms_since(second) >= window_ms)
            || self.cpu.len() > CPU_SAMPLES_MAX
        {
            self.cpu.pop_front();
        }
    }

    /// Since when less than [`CPU_IDLE_PERMILLE`] of a window has been used, and how many thousandths of a core were
    /// used over what is known of the window, if that is what keeps it from being quiet for longer.
    fn cpu_quiet_since(&self, window_ms: u64) -> Option<(Time, Option<u32>)> {
        let &(newest, total) = self.cpu.back()?;
        let &(oldest, first) = self.cpu.front()?;
        let limit_usec = window_ms.saturating_mul(CPU_IDLE_PERMILLE);
        let quiet = self
            .cpu
            .iter()
            .position(|&(_, used)| total - used < limit_usec)
            .unwrap_or(self.cpu.len() - 1);
        let permille = (quiet > 0).then(|| {
            // A microsecond per millisecond is a thousandth.
            let permille = (total - first) / newest.ms_since(oldest).max(1);
            u32::try_from(permille).unwrap_or(u32::MAX)
        });
        let since = self.cpu[quiet].0;
        let longer = self.cpu_quiet_from.filter(|_| quiet == 0);
        Some((longer.map_or(since, |from| from.min(since)), permille))
    }
}

/// The sandbox face: S2, S3, S4, S10, S11, S12.
pub(crate) fn sandbox_verdict(policy: &Policy, facts: &Facts, now: Time) -> Verdict {
    let mut awake = Gathering {
        now,
        window_ms: policy.sleep_after_ms.unwrap_or(0),
        reasons: Vec::new(),
        base: Some(Time::default()),
    };

    if policy.sleep_after_ms.is_none() {
        awake.open(Reason::NeverSleeps);
    }
    let woke = facts.awake_since.max(facts.needed_at);
    awake.quiet_since(woke, Reason::JustWoke);
    for kind in CallKind::ALL {
        let count = facts.calls(kind);
        if count > 0 {
            awake.open(Reason::Calls { kind, count });
        }
    }
    if let Some((ended, kind)) = facts.call_ended {
        awake.quiet_since(ended, Reason::CallEnded { kind });
    }
    if let Some((until, code)) = facts.sleep_failed {
        awake.until(until, Reason::SleepFailed { code });
    }
    if policy.awake_ports {
        return awake.finish();
    }

    if let Some(at) = facts.packet_at {
        awake.quiet_since(at, Reason::Packets);
    }
    match facts.cpu_quiet_since(awake.window_ms) {
        Some((since, Some(permille))) => awake.quiet_since(since, Reason::Cpu { permille }),
        // Quiet for as long as is known. If that began later than all else, it is this that lacks.
        Some((since, None)) if since > woke => awake.quiet_since(since, Reason::NoSample),
        Some((_, None)) | None => {}
    }
    if !facts.has_sample(now, SAMPLE_FRESH_MS) {
        awake.open(Reason::NoSample);
    }
    if facts.tcp > 0 {
        awake.open(Reason::OutboundTcp { count: facts.tcp });
    } else if let Some(seen) = facts.tcp_seen_at {
        awake.quiet_since(seen, Reason::OutboundTcp { count: 0 });
    }
    awake.timers(facts);
    if policy.sleep_hold_max_ms > 0 {
        return awake.holds(facts, policy.sleep_hold_max_ms);
    }
    awake.finish()
}

/// Gathers reasons and the moment at which the last of them ends.
struct Gathering {
    now: Time,
    window_ms: u64,
    reasons: Vec<AwakeReason>,
    /// `None`: the end cannot be foreseen.
    base: Option<Time>,
}

impl Gathering {
    /// Something goes on whose end cannot be foreseen.
    fn open(&mut self, reason: Reason) {
        self.base = None;
        self.reasons.push(AwakeReason { reason, until: None });
    }

    fn quiet_since(&mut self, since: Time, reason: Reason) {
        self.until(since.plus_ms(self.window_ms), reason);
    }

    fn until(&mut self, until: Time, reason: Reason) {
        self.base = self.base.map(|base| base.max(until));
        if until > self.now {
            self.reasons.push(AwakeReason { reason, until: Some(until) });
        }
    }

    /// A timer counts from [`TIMER_NEAR_MS`] before it is due until it is due, and then like everything for the quiet
    /// window: what it starts must not be stopped halfway.
    fn timers(&mut self, facts: &Facts) {
        let counts = |due: &Time| {
            let near_from = due.minus_ms(TIMER_NEAR_MS);
            near_from <= self.now || self.base.is_some_and(|base| near_from <= base)
        };
        let due = facts.timer_due.filter(counts).max(facts.timer_near_until);
        if let Some(due) = due {
            self.quiet_since(due, Reason::Timer { due });
        }
    }

    /// Holds keep it awake for `max_ms` longer than all else does; after the last one is lowered it is quiet from that
    /// moment. One lowered after that time does not count any more, so that raising and lowering by turns wins nothing.
    fn holds(mut self, facts: &Facts, max_ms: u64) -> Verdict {
        let cap = self.base.map(|base| base.plus_ms(max_ms));
        if let Some(lowered) = facts.hold_lowered_at {
            let counted = cap.map_or(lowered, |cap| lowered.min(cap));
            self.quiet_since(counted, Reason::Held { count: facts.holds });
        }
        if facts.holds == 0 {
            return self.finish();
        }
        self.reasons.retain(|awake| !matches!(awake.reason, Reason::Held { .. }));
        self.reasons.push(AwakeReason { reason: Reason::Held { count: facts.holds }, until: cap });
        let at = self.base.zip(cap).map(|(base, cap)| base.max(cap));
        Verdict {
            reasons: self.reasons,
            sleep: at.map(|at| Forecast { at, cause: SleepCause::HoldCap }),
        }
    }

    fn finish(self) -> Verdict {
        let sleep = self.base.map(|at| Forecast { at, cause: SleepCause::Idle });
        Verdict { reasons: self.reasons, sleep }
    }
}
