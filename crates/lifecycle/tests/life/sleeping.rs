//! S7 to S9: how it sleeps, and what wakes it.

use lifecycle::{
    Call, CallKind, CaptureId, CaptureOf, Cause, Death, FailureCode, Heard, Left, Phase, Policy,
    Refusal, Report, Sandbox, Served, SleepCause, SleepTier, Status, Tier, What, Work,
};

use crate::obedient::{Obedient, PACKET, after_30s, at, ordered, say};

// S7 and S8: asleep and woken.

#[test]
fn s07_goes_from_memory_to_disk_without_waking() {
    let mut host = Obedient::asleep(Policy::default());
    host.pass_until(at(299_999));
    assert_eq!(host.sandbox.sleep_tier(), Some(SleepTier::Memory));
    host.pass_until(at(300_000));
    assert_eq!(host.sandbox.sleep_tier(), Some(SleepTier::Disk));
    assert_eq!(host.woke(Tier::Memory) + host.woke(Tier::Disk), 0);
    let Phase::Asleep { since, .. } = host.phase() else { panic!("{:?}", host.phase()) };
    assert_eq!(since, at(0), "it sleeps since it fell asleep");
}

#[test]
fn s07_under_memory_pressure_it_goes_to_disk_at_once() {
    let mut host = Obedient::asleep(Policy::default());
    host.sandbox.handle_demote(host.now);
    host.obey();
    assert_eq!(host.sandbox.sleep_tier(), Some(SleepTier::Disk));
    host.sandbox.handle_demote(host.now);
    assert_eq!(host.sandbox.poll_order(), None);
}

#[test]
fn s07_a_failed_demotion_sleeps_on_and_is_tried_again_later() {
    let mut sandbox = Obedient::asleep(Policy::default()).sandbox;
    sandbox.handle_deadline(at(300_000));
    let demote = ordered(&mut sandbox, Work::Demote);
    let report = Report::Failed { code: FailureCode::DiskFull, left: Left::Asleep };
    say(&mut sandbox, at(301_000), demote, report);
    assert_eq!(sandbox.sleep_tier(), Some(SleepTier::Memory));
    assert_eq!(sandbox.poll_order(), None);
    assert_eq!(sandbox.poll_deadline(), Some(at(361_000)));
}

#[test]
fn s08_everything_that_needs_it_wakes_it_once() {
    let causes = [
        PACKET,
        Cause::Terminal,
        Cause::Call(Call::of(CallKind::Files)),
        Cause::Call(Call::to_port(CallKind::EdgeRequest, 8000)),
    ];
    for policy in [Policy::default(), after_30s()] {
        for cause in causes {
            let mut sandbox = Obedient::asleep(policy.clone()).sandbox;
            for _ in 0..50 {
                assert_eq!(sandbox.handle_need(at(1), cause), Ok(Served::Later));
            }
            let order = sandbox.poll_order().expect("a wake");
            assert!(matches!(order.work, Work::Wake { .. }), "{order:?}");
            assert_eq!(sandbox.poll_order(), None, "one wake for all");
            say(&mut sandbox, at(2), order.attempt, Report::Ready);
            assert_eq!(sandbox.handle_need(at(3), cause), Ok(Served::Now));
            assert_eq!(sandbox.last_wake().expect("it woke").cause, cause);
        }
    }
}

#[test]
fn s08_a_need_while_it_falls_asleep_cancels_if_it_can() {
    let mut sandbox = Obedient::running(after_30s()).sandbox;
    sandbox.handle_sleep(at(1), SleepCause::Asked, None).expect("accepted");
    let suspend = ordered(&mut sandbox, Work::Suspend { tier: Tier::Disk });
    let call = Call::of(CallKind::Exec);
    assert_eq!(sandbox.handle_call_began(at(2), call), Ok(Served::Later));
    assert_eq!(sandbox.handle_need(at(2), PACKET), Ok(Served::Later));
    assert_eq!(ordered(&mut sandbox, Work::Cancel), suspend);
    assert_eq!(sandbox.poll_order(), None, "asked once");
    say(&mut sandbox, at(3), suspend, Report::BackAwake);
    assert_eq!(sandbox.status(), Status::Running);
    assert_eq!(sandbox.poll_order(), None);
    assert_eq!(sandbox.calls(CallKind::Exec), 1);
}

#[test]
fn s08_a_need_too_late_to_cancel_wakes_at_once() {
    let mut sandbox = Obedient::running(after_30s()).sandbox;
    sandbox.handle_sleep(at(1), SleepCause::Asked, None).expect("accepted");
    let suspend = ordered(&mut sandbox, Work::Suspend { tier: Tier::Disk });
    sandbox.handle_need(at(2), PACKET).expect("accepted");
    ordered(&mut sandbox, Work::Cancel);
    say(&mut sandbox, at(3), suspend, Report::Suspended { tier: Tier::Disk });
    let wake = ordered(&mut sandbox, Work::Wake { from: Tier::Disk });
    say(&mut sandbox, at(4), wake, Report::Ready);
    assert_eq!(sandbox.last_wake().expect("it woke").cause, PACKET);
}

#[test]
fn s08_a_fork_of_a_running_one_stands_it_still_and_it_does_not_sleep_meanwhile() {
    let mut sandbox = Obedient::running(after_30s()).sandbox;
    assert_eq!(sandbox.handle_capture(at(1), CaptureId(7)), Ok(Served::Later));
    assert_eq!(sandbox.handle_capture(at(1), CaptureId(8)), Ok(Served::Later));
    let of = CaptureOf::Awake;
    let first = ordered(&mut sandbox, Work::Capture { capture: CaptureId(7), of });
    assert_eq!(sandbox.handle_need(at(2), PACKET), Ok(Served::Now));
    sandbox.handle_deadline(at(1_000_000));
    assert_eq!(sandbox.poll_order(), None);
    assert_eq!(sandbox.status(), Status::Running);
    let code = FailureCode::DiskFull;
    say(&mut sandbox, at(3), first, Report::Failed { code, left: Left::Awake });
    let second = ordered(&mut sandbox, Work::Capture { capture: CaptureId(8), of });
    say(&mut sandbox, at(4), second, Report::Captured);
    assert!(matches!(sandbox.phase(), Phase::Running { .. }));
}

#[test]
fn s08_a_fork_of_a_sleeper_is_served_without_waking() {
    for policy in [after_30s(), Policy::default()] {
        let mut host = Obedient::asleep(policy);
        host.sandbox.handle_capture(host.now, CaptureId(1)).expect("accepted");
        host.sandbox.handle_capture(host.now, CaptureId(2)).expect("accepted");
        host.obey();
        assert_eq!(host.sandbox.sleep_tier(), Some(SleepTier::Disk));
        assert_eq!(host.woke(Tier::Disk) + host.woke(Tier::Memory), 0);
        for capture in [CaptureId(1), CaptureId(2)] {
            let work = Work::Capture { capture, of: CaptureOf::AsleepOnDisk };
            assert_eq!(host.count(|done| *done == work), 1);
            let ended = What::CaptureEnded { capture, result: Ok(()) };
            assert!(host.events.iter().any(|event| event.what == ended));
        }
    }
}

#[test]
fn s08_a_need_during_the_fork_of_a_sleeper_wakes_right_after_it() {
    let mut sandbox = Obedient::asleep(after_30s()).sandbox;
    sandbox.handle_capture(at(1), CaptureId(1)).expect("accepted");
    let work = Work::Capture { capture: CaptureId(1), of: CaptureOf::AsleepOnDisk };
    let capture = ordered(&mut sandbox, work);
    assert_eq!(sandbox.handle_need(at(2), PACKET), Ok(Served::Later));
    assert_eq!(sandbox.poll_order(), None, "what is being copied must not change");
    say(&mut sandbox, at(3), capture, Report::Captured);
    ordered(&mut sandbox, Work::Wake { from: Tier::Disk });
}

#[test]
fn s08_too_many_forks_are_refused() {
    let mut sandbox = Sandbox::create(at(0), after_30s());
    for id in 0..64 {
        assert_eq!(sandbox.handle_capture(at(0), CaptureId(id)), Ok(Served::Later));
    }
    assert_eq!(sandbox.handle_capture(at(0), CaptureId(64)), Err(Refusal::TooManyCaptures));
}

// S9: tiers.

#[test]
fn s09_sleep_tier_says_how_it_sleeps() {
    let tier = |sandbox: &Sandbox| sandbox.sleep_tier().map(SleepTier::as_str);
    let mut host = Obedient::running(Policy::default());
    assert_eq!(tier(&host.sandbox), None);
    host.pass_until(at(30_000));
    assert_eq!(tier(&host.sandbox), Some("memory"));
    host.pass_until(at(400_000));
    assert_eq!(tier(&host.sandbox), Some("disk"));
    host.need(PACKET).expect("accepted");
    let machine = host.sandbox.machine().expect("a machine");
    assert_eq!(host.sandbox.handle_died(host.now, machine, Death::Poweroff), Heard::Taken);
    assert_eq!(tier(&host.sandbox), Some("off"));
    assert_eq!(host.sandbox.status(), Status::Sleeping);
}
