//! The box face: use, freezing, thawing, stopping for good (B3-B29).

use lifecycle::{
    Activity, Blocker, BoxPolicy, Call, CallKind, Cause, Phase, Policy, Refusal, SleepCause,
    StopCause, Tier, Time, What, Work,
};

use crate::obedient::{Obedient, PACKET, at};

const SECOND: u64 = 1_000;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;

fn a_box() -> Obedient {
    Obedient::running(Policy::of_box(BoxPolicy::default()))
}

fn a_box_with_timeout(minutes: u64) -> Obedient {
    let policy = BoxPolicy { idle_timeout_ms: Some(minutes * MINUTE), ..BoxPolicy::default() };
    Obedient::running(Policy::of_box(policy))
}

impl Obedient {
    /// A call of so long.
    fn call(&mut self, kind: CallKind, ms: u64) {
        self.begin(kind);
        self.pass_ms(ms);
        self.end(kind);
    }

    fn begin(&mut self, kind: CallKind) {
        self.sandbox.handle_call_began(self.now, Call::of(kind)).expect("accepted");
        self.obey();
    }

    fn end(&mut self, kind: CallKind) {
        self.sandbox.handle_call_ended(self.now, kind);
        self.obey();
    }

    fn blocked_by(&self) -> Vec<(&'static str, Option<u64>)> {
        let blocked = self.sandbox.blocked_by(self.now);
        blocked.iter().map(|one| (one.by.as_str(), one.until.map(Time::as_millis))).collect()
    }

    fn is_frozen(&self) -> bool {
        matches!(self.phase(), Phase::Asleep { tier: Tier::Disk, .. })
    }

    /// When it freezes, which it then does.
    fn freezes_at(&mut self) -> u64 {
        let foreseen = self.sandbox.freeze(self.now).at.expect("it can be foreseen");
        self.pass_until(foreseen.minus_ms(1));
        assert!(!self.is_frozen(), "earlier than it said");
        self.pass_until(foreseen);
        assert!(self.is_frozen(), "when it said, not {:?}", self.phase());
        foreseen.as_millis()
    }

    fn stopped(&self) -> Option<(u64, StopCause)> {
        self.sandbox.stopped().map(|stopped| (stopped.at.as_millis(), stopped.cause))
    }
}

#[test]
fn b03_b05_use_is_a_call_from_its_start_to_its_end_and_a_thaw() {
    let mut host = a_box();
    for (kind, is_use) in CallKind::ALL.map(|kind| (kind, kind.is_use())) {
        host.pass_ms(MINUTE);
        let before = host.sandbox.uses().last_used;
        host.begin(kind);
        assert_eq!(host.sandbox.uses().last_used == host.now, is_use, "{kind:?} begins");
        host.pass_ms(MINUTE);
        host.end(kind);
        let expected = if is_use { host.now } else { before };
        assert_eq!(host.sandbox.uses().last_used, expected, "{kind:?} ends");
    }
    host.freezes_at();
    host.pass_ms(HOUR);
    host.need(Cause::Terminal).expect("thawed");
    assert_eq!(host.sandbox.uses().last_used, host.now, "a thaw");
    host.pass_ms(MINUTE);
    host.sandbox.handle_used(host.now);
    assert_eq!(host.sandbox.uses().last_used, host.now, "a person");
}

#[test]
fn b06_an_acting_call_holds_the_box_however_long_it_takes() {
    let mut host = a_box();
    host.begin(CallKind::Tool);
    host.pass_ms(5 * HOUR);
    assert!(host.sandbox.is_awake());
    assert_eq!(host.blocked_by(), [("foreground", None)]);
    assert_eq!(host.sandbox.freeze(host.now).at, None);
    host.end(CallKind::Tool);
    assert_eq!(host.freezes_at(), 5 * HOUR + 10 * MINUTE);
}

#[test]
fn b07_a_call_while_it_freezes_thaws_it() {
    let mut host = a_box();
    host.pass_ms(10 * MINUTE - 1);
    let now = host.now.plus_ms(1);
    host.now = now;
    host.sandbox.handle_deadline(now);
    while !matches!(host.sandbox.phase(), Phase::Suspending { .. }) {
        host.sample();
        host.sandbox.handle_deadline(now);
    }
    host.begin(CallKind::Tool);
    assert!(host.sandbox.is_awake(), "{:?}", host.phase());
}

#[test]
fn b08_ten_minutes_without_activity_freeze_it_on_disk() {
    let mut host = a_box();
    host.guest.load_permille = 900;
    host.guest.outbound_tcp = 3;
    host.guest.timer = Some(at(10 * MINUTE + 2 * SECOND));
    host.guest.holds = 1;
    assert_eq!(host.freezes_at(), 10 * MINUTE, "B44: none of that is activity");
    assert_eq!(host.sandbox.last_sleep().expect("it slept").cause, SleepCause::Idle);
}

#[test]
fn b09_requests_keep_it_awake_until_two_hours_after_the_last_use() {
    let mut host = a_box();
    while host.now.as_millis() < 2 * HOUR - MINUTE {
        host.call(CallKind::EdgeRequest, 0);
        host.pass_ms(MINUTE);
    }
    host.call(CallKind::EdgeRequest, 0);
    let last = host.now.as_millis();
    assert_eq!(host.blocked_by(), [("url", Some(last + 10 * MINUTE))]);
    assert_eq!(host.sandbox.uses().last_used.as_millis(), 0, "B3: no use");
    // Past the two hours they count no more, even in the middle of somebody's use.
    let end = last + 10 * MINUTE;
    host.pass_until(at(2 * HOUR + 1));
    while host.now.as_millis() < end - 1 {
        host.call(CallKind::EdgeRequest, 0);
        let next = (host.now.as_millis() + MINUTE).min(end - 1);
        host.pass_until(at(next));
        assert!(host.sandbox.is_awake() || host.now.as_millis() >= 2 * HOUR);
        if host.is_frozen() {
            break;
        }
    }
    host.pass_until(at(end));
    assert!(host.is_frozen());
}

#[test]
fn b10_never_frozen_under_a_person_a_command_or_a_link() {
    for (word, kind) in [("foreground", CallKind::Exec), ("link", CallKind::Link)] {
        let mut host = a_box();
        host.begin(kind);
        host.pass_ms(30 * HOUR);
        assert_eq!(host.blocked_by(), [(word, None)]);
        assert!(host.sandbox.is_awake());
        assert_eq!(host.sandbox.stops_at(host.now), None, "B25");
        host.end(kind);
        assert_eq!(host.freezes_at(), 30 * HOUR + 10 * MINUTE);
    }
    let mut host = a_box();
    host.sandbox.handle_activity(host.now, Activity::Takeover, true);
    host.pass_ms(30 * HOUR);
    assert_eq!(host.blocked_by(), [("takeover", None)]);
    host.sandbox.handle_activity(host.now, Activity::Takeover, false);
    assert_eq!(host.freezes_at(), 30 * HOUR + 10 * MINUTE);
}

#[test]
fn b11_commands_in_the_background_keep_it_awake_for_an_hour_after_the_last_use() {
    let mut host = a_box();
    host.guest.commands = 2;
    host.pass_ms(MINUTE);
    assert_eq!(host.blocked_by(), [("background", Some(HOUR))]);
    host.call(CallKind::Tool, 0);
    assert_eq!(host.freezes_at(), HOUR + MINUTE);
    // They go on at the next thaw, and keep it awake again.
    host.pass_ms(HOUR);
    host.call(CallKind::Tool, 0);
    assert_eq!(host.freezes_at(), 3 * HOUR + MINUTE);
    // One that was started counts at once, and then as the guest says.
    let mut host = a_box();
    host.sandbox.handle_command(host.now);
    assert_eq!(host.blocked_by(), [("background", Some(HOUR))]);
    host.pass_ms(MINUTE);
    assert_eq!(host.blocked_by(), []);
    // Those that end let it freeze.
    let mut host = a_box();
    host.guest.commands = 1;
    host.pass_ms(20 * MINUTE);
    host.guest.commands = 0;
    host.pass_ms(2 * SECOND);
    assert!(host.is_frozen());
}

#[test]
fn b11_a_command_that_is_waited_for_is_in_the_foreground() {
    let mut host = a_box();
    host.begin(CallKind::Exec);
    host.guest.commands = 1;
    host.pass_ms(2 * HOUR);
    assert_eq!(host.blocked_by(), [("foreground", None)]);
}

#[test]
fn b13_says_when_it_freezes_and_what_it_waits_for() {
    let mut host = a_box();
    host.guest.commands = 1;
    host.pass_ms(5 * MINUTE);
    host.call(CallKind::EdgeRequest, 0);
    host.sandbox.handle_activity(host.now, Activity::Recording, true);
    host.pass_ms(SECOND);
    assert_eq!(
        host.blocked_by(),
        [("background", Some(HOUR)), ("url", Some(15 * MINUTE)), ("recording", Some(HOUR))]
    );
    assert_eq!(host.sandbox.freeze(host.now).at, Some(at(HOUR)));
    host.sandbox.handle_activity(host.now, Activity::Phone, true);
    let freeze = host.sandbox.freeze(host.now);
    assert_eq!(freeze.at, None, "its end cannot be foreseen");
    assert!(freeze.blocked_by.iter().any(|one| one.by == Blocker::Phone && one.until.is_none()));
    let reasons = host.reasons();
    assert_eq!(reasons, ["used", "background", "url", "recording", "phone"]);
}

#[test]
fn b14_without_credit_it_freezes_at_once_and_nothing_thaws_it() {
    let mut host = a_box();
    host.begin(CallKind::Tool);
    host.sandbox.handle_spending(host.now, true);
    host.obey();
    assert!(host.is_frozen());
    assert_eq!(host.need(Cause::Call(Call::of(CallKind::Tool))), Err(Refusal::SpendingLimit));
    host.sandbox.handle_spending(host.now, false);
    host.need(Cause::Call(Call::of(CallKind::Tool))).expect("thawed");
    assert!(host.sandbox.is_awake());
}

#[test]
fn b15_b19_b44_only_use_thaws() {
    let mut host = a_box();
    host.guest.timer = Some(at(30 * MINUTE));
    host.sample();
    host.freezes_at();
    for cause in [
        PACKET,
        Cause::Timer { due: at(30 * MINUTE) },
        Cause::Call(Call::to_port(CallKind::EdgeRequest, 8000)),
        Cause::Call(Call::to_port(CallKind::AwakeConnection, 8000)),
    ] {
        assert_eq!(host.need(cause), Err(Refusal::Frozen), "{cause:?}");
    }
    let edge = Call::to_port(CallKind::EdgeRequest, 8000);
    assert_eq!(host.sandbox.handle_call_began(host.now, edge), Err(Refusal::Frozen));
    host.pass_ms(HOUR);
    assert!(host.is_frozen(), "no timer thaws it");
    for cause in [CallKind::Tool, CallKind::Link, CallKind::Exec, CallKind::Files] {
        host.need(Cause::Call(Call::of(cause))).expect("thawed");
        assert!(host.sandbox.is_awake(), "{cause:?}");
        host.guest.timer = None;
        host.sample();
        host.freezes_at();
    }
}

#[test]
fn b19_a_request_while_it_freezes_does_not_stop_that() {
    let mut host = a_box();
    host.pass_ms(10 * MINUTE - 1);
    host.now = host.now.plus_ms(1);
    while !matches!(host.sandbox.phase(), Phase::Suspending { .. }) {
        host.sample();
        host.sandbox.handle_deadline(host.now);
    }
    let edge = Call::to_port(CallKind::EdgeRequest, 80);
    assert_eq!(host.sandbox.handle_call_began(host.now, edge), Err(Refusal::Frozen));
    host.obey();
    assert!(host.is_frozen());
}

#[test]
fn b23_b25_b29_frozen_for_a_day_it_is_stopped_for_good() {
    let mut host = a_box();
    assert_eq!(host.sandbox.stops_at(host.now), Some(at(10 * MINUTE + 24 * HOUR)));
    let frozen = host.freezes_at();
    assert_eq!(host.sandbox.stops_at(host.now), Some(at(frozen + 24 * HOUR)));
    host.pass_until(at(frozen + 24 * HOUR - 1));
    assert_eq!(host.stopped(), None);
    host.pass_ms(1);
    assert_eq!(host.stopped(), Some((frozen + 24 * HOUR, StopCause::FrozenUnused)));
    assert_eq!(host.sandbox.stops_at(host.now), None);
    let unused_ms = 24 * HOUR + 10 * MINUTE;
    let told = What::StoppedForGood { cause: StopCause::FrozenUnused, unused_ms };
    assert_eq!(host.events.last().expect("told").what, told, "B29");
}

#[test]
fn b24_an_idle_timeout_counts_from_the_last_use_frozen_or_not() {
    let mut host = a_box_with_timeout(30);
    assert_eq!(host.sandbox.stops_at(host.now), Some(at(30 * MINUTE)));
    assert_eq!(host.freezes_at(), 10 * MINUTE, "it freezes all the same");
    host.pass_ms(MINUTE);
    host.call(CallKind::Tool, 0);
    host.pass_until(at(41 * MINUTE));
    assert_eq!(
        host.stopped(),
        Some((41 * MINUTE, StopCause::IdleTimeout)),
        "a thaw restarts the count"
    );
}

#[test]
fn b24_one_that_is_stopped_awake_is_frozen_first() {
    let mut host = a_box_with_timeout(5);
    host.pass_until(at(5 * MINUTE));
    assert_eq!(host.stopped(), Some((5 * MINUTE, StopCause::IdleTimeout)));
    assert!(host.is_frozen());
    assert_eq!(host.sandbox.last_sleep().expect("it slept").cause, SleepCause::IdleTimeout);
}

#[test]
fn b24_what_keeps_it_awake_defers_the_stop_until_it_ends() {
    let mut host = a_box_with_timeout(5);
    host.guest.commands = 1;
    host.sample();
    assert_eq!(host.sandbox.stops_at(host.now), Some(at(HOUR)));
    host.pass_until(at(HOUR));
    assert_eq!(host.stopped(), Some((HOUR, StopCause::IdleTimeout)), "in the background");

    let mut host = a_box_with_timeout(5);
    host.begin(CallKind::Link);
    assert_eq!(host.sandbox.stops_at(host.now), None);
    host.pass_until(at(8 * HOUR));
    assert_eq!(host.stopped(), None);
    host.end(CallKind::Link);
    host.pass_ms(5 * MINUTE);
    assert_eq!(host.stopped().map(|(at, _)| at), Some(8 * HOUR + 5 * MINUTE), "a link");

    // Requests do not reset the count: when they end the box freezes and, past its limit, stops at once.
    let mut host = a_box_with_timeout(30);
    for minute in 1..=60 {
        host.pass_until(at(minute * MINUTE));
        host.call(CallKind::EdgeRequest, 0);
    }
    assert_eq!(host.stopped(), None);
    host.pass_until(at(70 * MINUTE));
    assert_eq!(host.stopped().map(|(at, _)| at), Some(70 * MINUTE), "requests");
}

#[test]
fn b27_a_stopped_box_keeps_its_copy_for_a_day_and_comes_back_as_it_was() {
    let mut host = a_box();
    host.freezes_at();
    host.pass_ms(24 * HOUR);
    let stopped = host.now;
    assert_eq!(host.sandbox.restorable_until(), Some(stopped.plus_ms(24 * HOUR)));
    for kind in [CallKind::Tool, CallKind::EdgeRequest, CallKind::Exec, CallKind::Link] {
        assert_eq!(host.need(Cause::Call(Call::of(kind))), Err(Refusal::Stopped), "{kind:?}");
    }
    assert_eq!(host.sandbox.handle_restart(host.now), Err(Refusal::Stopped));
    host.pass_ms(23 * HOUR);
    host.sandbox.handle_restore(host.now).expect("restored");
    host.obey();
    assert!(host.sandbox.is_awake());
    assert_eq!(host.woke(Tier::Disk), 1);
    assert_eq!(host.sandbox.uses().last_used, host.now);
    assert_eq!(host.sandbox.stopped(), None);
    host.freezes_at();
    host.pass_ms(24 * HOUR);
    assert!(host.sandbox.stopped().is_some(), "once more");
    host.pass_ms(24 * HOUR);
    assert_eq!(host.phase(), Phase::Deleted, "nobody wanted it back");
    assert_eq!(host.sandbox.handle_restore(host.now), Err(Refusal::Deleted));
}

#[test]
fn b27_what_was_not_stopped_cannot_be_brought_back() {
    let mut host = a_box();
    assert_eq!(host.sandbox.handle_restore(host.now), Err(Refusal::NotStopped));
    let mut host = Obedient::running(Policy::default());
    assert_eq!(host.sandbox.handle_restore(host.now), Err(Refusal::NotStopped));
}

#[test]
fn b44_one_that_powers_itself_off_is_booted_by_the_next_acting_call() {
    let mut host = a_box();
    let machine = host.sandbox.machine().expect("a machine");
    let heard = host.sandbox.handle_died(host.now, machine, lifecycle::Death::Poweroff);
    assert_eq!(heard, lifecycle::Heard::Taken);
    host.obey();
    assert!(matches!(host.phase(), Phase::Off { .. }));
    let edge = Cause::Call(Call::of(CallKind::EdgeRequest));
    assert_eq!(host.need(edge), Err(Refusal::Frozen));
    host.begin(CallKind::Tool);
    assert!(host.sandbox.is_awake());
    assert_eq!(host.count(|work| *work == Work::Boot), 1);
}

#[test]
fn b05_b27_use_and_stop_outlive_the_daemon() {
    let mut host = a_box();
    host.freezes_at();
    host.pass_ms(24 * HOUR);
    let uses = host.sandbox.uses().clone();
    let found = lifecycle::Recovered::Asleep {
        tier: Tier::Disk,
        since: at(10 * MINUTE),
        cause: SleepCause::Idle,
        timer_due: None,
    };
    let policy = Policy::of_box(BoxPolicy::default());
    host.sandbox = lifecycle::Sandbox::recover(host.now, policy, found).with_uses(uses.clone());
    assert_eq!(*host.sandbox.uses(), uses);
    assert_eq!(host.need(Cause::Call(Call::of(CallKind::Tool))), Err(Refusal::Stopped));
    host.pass_ms(24 * HOUR);
    assert_eq!(host.phase(), Phase::Deleted);
}
