//! A spending limit puts it to sleep and keeps it there (S23).

use lifecycle::{Call, CallKind, Cause, Phase, Refusal, SleepCause, Tier};

use crate::obedient::{Obedient, after_30s};

fn call() -> Call {
    Call::of(CallKind::Exec)
}

#[test]
fn s23_a_spending_limit_puts_it_to_sleep_whatever_holds_it_awake() {
    let mut host = Obedient::running(after_30s());
    let now = host.now;
    host.sandbox.handle_call_began(now, call()).expect("served");
    host.sandbox.handle_spending(now, true);
    host.obey();
    assert!(matches!(host.phase(), Phase::Asleep { tier: Tier::Disk, .. }), "{:?}", host.phase());
    assert_eq!(host.sandbox.last_sleep().expect("it slept").cause, SleepCause::Spending);
    assert!(host.sandbox.is_withheld());
}

#[test]
fn s23_nothing_wakes_it_until_there_is_more_to_spend() {
    let mut host = Obedient::asleep(after_30s());
    let now = host.now;
    host.sandbox.handle_spending(now, true);
    let packet = Cause::Packet { peer: None, port: Some(80) };
    for cause in [Cause::Call(call()), packet, Cause::Terminal] {
        assert_eq!(host.need(cause), Err(Refusal::SpendingLimit));
    }
    assert_eq!(host.sandbox.handle_call_began(now, call()), Err(Refusal::SpendingLimit));
    assert_eq!(host.sandbox.handle_restart(now), Err(Refusal::SpendingLimit));
    assert!(matches!(host.phase(), Phase::Asleep { .. }));
    host.sandbox.handle_spending(now, false);
    host.need(Cause::Call(call())).expect("served");
    assert!(matches!(host.phase(), Phase::Running { .. }), "{:?}", host.phase());
}

#[test]
fn s23_a_need_while_it_falls_asleep_for_the_limit_does_not_wake_it() {
    let mut host = Obedient::running(after_30s());
    let now = host.now;
    host.sandbox.handle_spending(now, true);
    assert!(matches!(host.phase(), Phase::Suspending { cause: SleepCause::Spending, .. }));
    assert_eq!(host.sandbox.handle_need(now, Cause::Terminal), Err(Refusal::SpendingLimit));
    host.obey();
    assert!(matches!(host.phase(), Phase::Asleep { tier: Tier::Disk, .. }));
}

#[test]
fn s23_and_s03_a_timer_waits_for_more_to_spend() {
    let mut host = Obedient::asleep(after_30s());
    let now = host.now;
    let found = lifecycle::Recovered::Asleep {
        tier: Tier::Disk,
        since: now,
        cause: SleepCause::Idle,
        timer_due: Some(now.plus_ms(60_000)),
    };
    host.sandbox = lifecycle::Sandbox::recover(now, after_30s(), found);
    assert!(host.sandbox.will_wake_at().is_some());
    host.sandbox.handle_spending(now, true);
    assert_eq!(host.sandbox.will_wake_at(), None);
    host.sandbox.handle_deadline(now.plus_ms(120_000));
    assert!(matches!(host.phase(), Phase::Asleep { .. }), "{:?}", host.phase());
    host.sandbox.handle_spending(now.plus_ms(120_000), false);
    assert!(matches!(host.phase(), Phase::Waking { cause: Cause::Timer { .. }, .. }));
}

/// The host goes down: a machine that it has then is lost, so a timer waits for the next one, and what wakes sleeps again.
#[test]
fn s24_nothing_wakes_it_on_a_host_that_goes_down() {
    let mut host = Obedient::asleep(after_30s());
    let now = host.now;
    let found = lifecycle::Recovered::Asleep {
        tier: Tier::Disk,
        since: now,
        cause: SleepCause::Idle,
        timer_due: Some(now.plus_ms(60_000)),
    };
    host.sandbox = lifecycle::Sandbox::recover(now, after_30s(), found);
    host.sandbox.handle_leaving(now);
    host.sandbox.handle_deadline(now.plus_ms(120_000));
    assert!(matches!(host.phase(), Phase::Asleep { .. }), "{:?}", host.phase());
    let later = now.plus_ms(120_000);
    assert_eq!(host.sandbox.handle_need(later, Cause::Terminal), Err(Refusal::HostLeaves));
    // More to spend does not bring the host back.
    host.sandbox.handle_spending(later, false);
    assert!(matches!(host.phase(), Phase::Asleep { .. }), "{:?}", host.phase());

    let mut host = Obedient::asleep(after_30s());
    let now = host.now;
    host.sandbox.handle_need(now, Cause::Terminal).expect("served");
    assert!(matches!(host.phase(), Phase::Waking { .. }), "{:?}", host.phase());
    host.sandbox.handle_leaving(now);
    host.sandbox.handle_sleep(now, SleepCause::Drain, Some(Tier::Disk)).expect("served");
    host.obey();
    assert!(matches!(host.phase(), Phase::Asleep { tier: Tier::Disk, .. }), "{:?}", host.phase());
}
