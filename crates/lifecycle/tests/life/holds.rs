//! Holding it awake from inside: S10 to S14.

use lifecycle::{Policy, SleepCause, Status, Work};

use crate::obedient::{Obedient, after_30s, at};

fn held(policy: Policy) -> Obedient {
    let mut host = Obedient::running(policy);
    host.guest.holds = 1;
    host.guest.hold_connections = 1;
    host.sample();
    host
}

fn lower(host: &mut Obedient) {
    host.guest.holds = 0;
    host.sandbox.handle_holds(host.now, 0, host.guest.hold_connections);
    host.obey();
}

fn raise(host: &mut Obedient) {
    host.guest.holds = 1;
    host.sandbox.handle_holds(host.now, 1, host.guest.hold_connections);
    host.obey();
}

fn notices(host: &Obedient) -> Vec<(u64, Work)> {
    let notice = |work: &Work| matches!(work, Work::Notice { .. });
    host.works
        .iter()
        .filter(|(_, work)| notice(work))
        .map(|&(now, work)| (now.as_millis(), work))
        .collect()
}

#[test]
fn s11_a_hold_keeps_awake_and_says_so() {
    let mut host = held(after_30s());
    host.pass_until(at(40_000));
    assert_eq!(host.reasons(), ["held"]);
    let awake = host.sandbox.awake_because(host.now)[0];
    assert_eq!(awake.text(), "its guest holds it awake (1 hold)");
    assert_eq!(awake.until, Some(at(60_000)));
}

#[test]
fn s11_after_the_last_hold_is_lowered_it_is_idle_from_that_moment() {
    let mut host = held(after_30s());
    host.pass_until(at(50_000));
    lower(&mut host);
    assert_eq!(host.sandbox.will_sleep_at(host.now), Some(at(80_000)));
    host.pass_until(at(100_000));
    assert_eq!(host.slept_at(), [80_000]);
    assert_eq!(host.sandbox.last_sleep().expect("it slept").cause, SleepCause::Idle);
}

#[test]
fn s12_holds_alone_keep_awake_for_thirty_seconds_and_are_still_there_after_waking() {
    let mut host = held(after_30s());
    host.pass_until(at(100_000));
    assert_eq!(host.slept_at(), [60_000]);
    assert_eq!(host.sandbox.last_sleep().expect("it slept").cause, SleepCause::HoldCap);
    host.need(lifecycle::Cause::Terminal).expect("accepted");
    host.pass_until(at(200_000));
    assert_eq!(host.slept_at(), [60_000, 160_000], "counted anew");
}

#[test]
fn s12_the_time_is_counted_from_when_all_else_is_quiet() {
    let mut host = held(Policy { sleep_hold_max_ms: 5_000, ..after_30s() });
    host.pass_until(at(20_000));
    host.sandbox.handle_packets(host.now);
    host.pass_until(at(100_000));
    assert_eq!(host.slept_at(), [55_000]);
}

#[test]
fn s12_zero_ignores_holds() {
    let mut host = held(Policy { sleep_hold_max_ms: 0, ..after_30s() });
    host.pass_until(at(100_000));
    assert_eq!(host.slept_at(), [30_000]);
}

#[test]
fn s12_raising_and_lowering_by_turns_wins_at_most_one_more_window() {
    let mut host = held(after_30s());
    while host.sandbox.status() == Status::Running && host.now < at(1_000_000) {
        host.pass_ms(7_000);
        lower(&mut host);
        host.pass_ms(1_000);
        raise(&mut host);
    }
    assert!(host.slept_at()[0] <= 90_000, "{:?}", host.slept_at());
}

#[test]
fn s13_a_notice_comes_before_sleep_and_sleep_comes_without_an_answer() {
    let mut host = Obedient::running(Policy { sleep_notice_ms: Some(2_000), ..after_30s() });
    host.guest.hold_connections = 1;
    host.sample();
    assert_eq!(host.sandbox.will_sleep_at(host.now), Some(at(30_000)));
    host.pass_until(at(29_000));
    assert_eq!(notices(&host), [(28_000, Work::Notice { in_ms: 2_000, cap: false })]);
    assert!(host.reasons().contains(&"noticed"));
    host.pass_until(at(50_000));
    assert_eq!(host.slept_at(), [30_000]);
}

#[test]
fn s13_with_nobody_connected_nothing_is_announced_or_waited_for() {
    let mut host = Obedient::running(Policy { sleep_notice_ms: Some(2_000), ..after_30s() });
    host.pass_until(at(50_000));
    assert_eq!(notices(&host), []);
    assert_eq!(host.slept_at(), [30_000]);
}

#[test]
fn s13_a_hold_after_the_notice_keeps_awake_until_its_cap_and_that_is_announced_too() {
    let mut host = Obedient::running(Policy { sleep_notice_ms: Some(2_000), ..after_30s() });
    host.guest.hold_connections = 1;
    host.sample();
    host.pass_until(at(29_000));
    raise(&mut host);
    host.pass_until(at(59_000));
    let cap = Work::Notice { in_ms: 2_000, cap: true };
    assert_eq!(
        notices(&host),
        [(28_000, Work::Notice { in_ms: 2_000, cap: false }), (58_000, cap)]
    );
    // Holding does not stop this one.
    lower(&mut host);
    raise(&mut host);
    lower(&mut host);
    host.pass_until(at(80_000));
    assert_eq!(host.slept_at(), [60_000]);
}

#[test]
fn s13_activity_after_the_notice_makes_it_void_and_the_next_sleep_is_announced_again() {
    let mut host = Obedient::running(Policy { sleep_notice_ms: Some(2_000), ..after_30s() });
    host.guest.hold_connections = 1;
    host.sample();
    host.pass_until(at(29_000));
    host.sandbox.handle_packets(host.now);
    assert!(!host.reasons().contains(&"noticed"));
    host.pass_until(at(100_000));
    let times: Vec<_> = notices(&host).iter().map(|&(now, _)| now).collect();
    assert_eq!(times, [28_000, 57_000]);
    assert_eq!(host.slept_at(), [59_000]);
}

#[test]
fn s13_a_requested_sleep_is_not_announced() {
    let mut host = Obedient::running(Policy { sleep_notice_ms: Some(2_000), ..after_30s() });
    host.guest.hold_connections = 1;
    host.sample();
    host.sandbox.handle_sleep(host.now, SleepCause::Asked, None).expect("accepted");
    host.obey();
    assert_eq!(notices(&host), []);
    assert_eq!(host.slept_at(), [0]);
}
