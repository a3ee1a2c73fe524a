//! S15 to S17, S22 and S24: restart, failure, deletion, and never an older memory.

use lifecycle::{
    Call, CallKind, CaptureId, CaptureOf, Cause, Death, Event, FailureCode, Heard, Left, Phase,
    Policy, Recovered, Refusal, Report, Sandbox, Served, SleepCause, SleepTier, Start, Status,
    Tier, WAKE_TRIES_MAX, What, Work,
};

use crate::obedient::{Obedient, PACKET, after_30s, at, ordered, say};

// S15 to S17: restart and failure.

#[test]
fn s15_a_restart_boots_from_disk_in_every_phase_that_has_one() {
    let mut awake = Obedient::running(after_30s()).sandbox;
    let mut falling = Obedient::running(after_30s()).sandbox;
    falling.handle_sleep(at(0), SleepCause::Asked, None).expect("accepted");
    let suspend = ordered(&mut falling, Work::Suspend { tier: Tier::Disk });
    let mut asleep = Obedient::asleep(after_30s()).sandbox;
    let mut in_memory = Obedient::asleep(Policy::default()).sandbox;
    let mut waking = Obedient::asleep(after_30s()).sandbox;
    waking.handle_need(at(0), PACKET).expect("accepted");
    ordered(&mut waking, Work::Wake { from: Tier::Disk });
    for sandbox in [&mut awake, &mut falling, &mut asleep, &mut in_memory, &mut waking] {
        assert_eq!(sandbox.handle_restart(at(1)), Ok(Served::Later));
        let boot = ordered(sandbox, Work::Boot);
        assert_eq!(sandbox.handle_restart(at(1)), Ok(Served::Later));
        assert_eq!(sandbox.poll_order(), None, "one boot for both");
        assert_eq!(sandbox.status(), Status::Starting);
        say(sandbox, at(2), boot, Report::Ready);
        assert_eq!(sandbox.last_wake().expect("it runs").cause, Cause::Restart);
        assert_eq!(sandbox.failure_code(), None);
    }
    // What the restart superseded says nothing any more.
    let late = falling.handle_report(at(3), suspend, Report::Suspended { tier: Tier::Disk });
    assert_eq!(late, Heard::Stale);
    assert!(falling.is_awake());
}

#[test]
fn s15_a_restart_forgets_what_ran() {
    let mut host = Obedient::running(after_30s());
    host.guest.timer = Some(at(3_600_000));
    host.guest.holds = 2;
    host.sample();
    host.sandbox.handle_restart(host.now).expect("accepted");
    let boot = ordered(&mut host.sandbox, Work::Boot);
    say(&mut host.sandbox, host.now, boot, Report::Ready);
    assert_eq!(host.sandbox.timer_due(), None);
    assert_eq!(host.reasons(), ["just_woke", "no_sample"]);
}

#[test]
fn s16_a_machine_that_stops_by_itself_is_off_and_the_next_need_boots_it() {
    for death in [Death::Reboot, Death::Poweroff, Death::Panic] {
        let mut host = Obedient::running(after_30s());
        host.pass_ms(5_000);
        let machine = host.sandbox.machine().expect("a machine");
        assert_eq!(host.sandbox.handle_died(host.now, machine, death), Heard::Taken);
        assert_eq!(host.phase(), Phase::Off { death, since: at(5_000) });
        assert!(host.sandbox.awake_because(host.now).is_empty());
        assert_eq!(host.sandbox.failure_code(), None, "it did so itself");
        assert_eq!(host.sandbox.last_death(), Some(death));
        host.pass_ms(1_000_000);
        assert_eq!(host.started(Start::Boot), 0, "nothing needs it");
        assert_eq!(host.need(PACKET), Ok(Served::Later));
        assert_eq!(host.started(Start::Boot), 1);
        assert_eq!(host.sandbox.status(), Status::Running);
    }
}

#[test]
fn s16_the_death_of_an_earlier_machine_changes_nothing() {
    let mut host = Obedient::running(after_30s());
    let first = host.sandbox.machine().expect("a machine");
    host.sandbox.handle_sleep(host.now, SleepCause::Asked, None).expect("accepted");
    host.obey();
    assert_eq!(host.sandbox.handle_died(host.now, first, Death::Killed), Heard::Stale);
    host.need(PACKET).expect("accepted");
    assert_eq!(host.sandbox.handle_died(host.now, first, Death::Killed), Heard::Stale);
    assert_eq!(host.sandbox.status(), Status::Running);
}

#[test]
fn s17_a_failed_start_says_why_and_a_restart_clears_it() {
    let mut sandbox = Sandbox::create(at(0), after_30s());
    let create = ordered(&mut sandbox, Work::Create);
    let code = FailureCode::NoCapacity;
    say(&mut sandbox, at(1), create, Report::Failed { code, left: Left::Lost });
    assert_eq!(sandbox.status(), Status::Failed);
    assert_eq!(sandbox.failure_code(), Some(code));
    assert_eq!(sandbox.handle_need(at(2), PACKET), Err(Refusal::Failed { code }));
    assert_eq!(sandbox.calls(CallKind::Exec), 0);
    let call = Call::of(CallKind::Exec);
    assert_eq!(sandbox.handle_call_began(at(2), call), Err(Refusal::Failed { code }));
    assert_eq!(sandbox.calls(CallKind::Exec), 0, "a refused call does not count");

    sandbox.handle_restart(at(3)).expect("accepted");
    let create = ordered(&mut sandbox, Work::Create);
    assert_eq!(sandbox.failure_code(), None);
    say(&mut sandbox, at(4), create, Report::Ready);
    assert_eq!(sandbox.status(), Status::Running);
}

#[test]
fn s17_a_boot_that_dies_is_a_failed_start() {
    let found = Recovered::Off { death: Death::Poweroff, since: at(0) };
    let mut sandbox = Sandbox::recover(at(0), after_30s(), found);
    sandbox.handle_need(at(1), PACKET).expect("accepted");
    let boot = ordered(&mut sandbox, Work::Boot);
    assert_eq!(sandbox.handle_died(at(2), boot, Death::Panic), Heard::Taken);
    assert_eq!(sandbox.failure_code(), Some(FailureCode::BootFailed));
    assert_eq!(sandbox.handle_report(at(3), boot, Report::Ready), Heard::Stale);
    sandbox.handle_restart(at(4)).expect("accepted");
    ordered(&mut sandbox, Work::Boot);
}

// S22: deletion.

#[test]
fn s22_a_deletion_is_tried_until_it_succeeds_and_asking_again_does_not_hurt() {
    let mut sandbox = Obedient::running(after_30s()).sandbox;
    assert_eq!(sandbox.handle_delete(at(0)), Served::Later);
    assert!(sandbox.is_going());
    let mut now = at(0);
    let mut waits = Vec::new();
    for _ in 0..12 {
        let destroy = ordered(&mut sandbox, Work::Destroy);
        assert_eq!(sandbox.handle_delete(now), Served::Later);
        assert_eq!(sandbox.poll_order(), None);
        let report = Report::Failed { code: FailureCode::DestroyFailed, left: Left::Lost };
        say(&mut sandbox, now, destroy, report);
        // Somebody may have to see to it.
        assert!(!sandbox.is_going());
        assert_eq!(sandbox.failure_code(), Some(FailureCode::DestroyFailed));
        let again = sandbox.poll_deadline().expect("it is tried again");
        waits.push(again.ms_since(now));
        now = again;
        sandbox.handle_deadline(now);
    }
    assert_eq!(
        waits,
        [250, 500, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000, 60_000, 60_000]
    );
    let destroy = ordered(&mut sandbox, Work::Destroy);
    say(&mut sandbox, now, destroy, Report::Destroyed);
    assert_eq!(sandbox.phase(), &Phase::Deleted);
    assert_eq!(sandbox.handle_delete(now), Served::Now);
    assert_eq!(sandbox.handle_need(now, PACKET), Err(Refusal::Deleted));
}

#[test]
fn s22_whoever_deletes_again_need_not_wait_for_the_next_try() {
    let mut sandbox = Sandbox::recover(at(0), after_30s(), Recovered::Deleting);
    let destroy = ordered(&mut sandbox, Work::Destroy);
    let report = Report::Failed { code: FailureCode::DestroyFailed, left: Left::Lost };
    say(&mut sandbox, at(0), destroy, report);
    assert_eq!(sandbox.handle_delete(at(1)), Served::Later);
    ordered(&mut sandbox, Work::Destroy);
}

// S24: never an older memory without saying so.

#[test]
fn s24_a_machine_that_is_killed_awake_boots_from_disk_and_says_so() {
    let mut host = Obedient::asleep(after_30s());
    host.need(PACKET).expect("accepted");
    let machine = host.sandbox.machine().expect("a machine");
    assert_eq!(host.sandbox.handle_died(host.now, machine, Death::Killed), Heard::Taken);
    assert_eq!(host.sandbox.failure_code(), Some(FailureCode::MachineLost));
    host.need(PACKET).expect("accepted");
    assert_eq!(host.sandbox.status(), Status::Running);
    assert_eq!(host.started(Start::Boot), 1);
    assert_eq!(host.woke(Tier::Disk), 1, "not from what it had woken from before");
    let code = host.sandbox.failure_code();
    assert_eq!(code, Some(FailureCode::MachineLost), "it still says so");
    host.sandbox.handle_restart(host.now).expect("accepted");
    assert_eq!(host.sandbox.failure_code(), None);
}

#[test]
fn s24_one_that_dies_while_a_need_waits_is_booted_for_it() {
    for death in [Death::Killed, Death::Panic] {
        let mut sandbox = Obedient::running(after_30s()).sandbox;
        sandbox.handle_sleep(at(1), SleepCause::Asked, None).expect("accepted");
        sandbox.handle_need(at(2), PACKET).expect("accepted");
        let machine = sandbox.machine().expect("a machine");
        assert_eq!(sandbox.handle_died(at(3), machine, death), Heard::Taken);
        ordered(&mut sandbox, Work::Boot);

        let mut sandbox = Obedient::asleep(Policy::default()).sandbox;
        let machine = sandbox.machine().expect("stopped, but there");
        sandbox.handle_need(at(2), PACKET).expect("accepted");
        assert_eq!(sandbox.handle_died(at(3), machine, death), Heard::Taken);
        ordered(&mut sandbox, Work::Boot);
    }
}

#[test]
fn s24_a_sleeper_in_memory_whose_process_is_killed_is_lost_too() {
    let mut host = Obedient::asleep(Policy::default());
    let machine = host.sandbox.machine().expect("stopped, but there");
    assert_eq!(host.sandbox.handle_died(host.now, machine, Death::Killed), Heard::Taken);
    assert_eq!(host.sandbox.sleep_tier(), Some(SleepTier::Off));
    assert_eq!(host.sandbox.failure_code(), Some(FailureCode::MachineLost));
}

#[test]
fn s24_a_wake_that_fails_before_the_guest_ran_is_tried_again_a_few_times() {
    let mut sandbox = Obedient::asleep(after_30s()).sandbox;
    sandbox.handle_need(at(0), PACKET).expect("accepted");
    let mut now = at(0);
    let mut waits = Vec::new();
    for left_tries in (0..WAKE_TRIES_MAX).rev() {
        let wake = ordered(&mut sandbox, Work::Wake { from: Tier::Disk });
        let code = FailureCode::AgentSilent;
        say(&mut sandbox, now, wake, Report::Failed { code, left: Left::Asleep });
        if left_tries > 0 {
            assert_eq!(sandbox.handle_need(now, PACKET), Ok(Served::Later));
            let again = sandbox.poll_deadline().expect("it is tried again");
            waits.push(again.ms_since(now));
            now = again;
            sandbox.handle_deadline(now);
        }
    }
    assert_eq!(waits, [100, 200, 400]);
    assert_eq!(sandbox.failure_code(), Some(FailureCode::WakeFailed));
    // What it remembered is given up by a restart, which says so.
    sandbox.handle_restart(now).expect("accepted");
    let boot = ordered(&mut sandbox, Work::Boot);
    say(&mut sandbox, now, boot, Report::Ready);
    assert_eq!(sandbox.failure_code(), Some(FailureCode::MachineLost));
}

#[test]
fn s24_a_host_without_room_refuses_the_wake_at_once_and_gives_nothing_up() {
    for code in [FailureCode::DiskFull, FailureCode::NoCapacity] {
        let mut sandbox = Obedient::asleep(after_30s()).sandbox;
        sandbox.handle_need(at(0), PACKET).expect("accepted");
        // The host has waited for room before it says that there is none: nobody waits for that again.
        let wake = ordered(&mut sandbox, Work::Wake { from: Tier::Disk });
        say(&mut sandbox, at(1), wake, Report::Failed { code, left: Left::Asleep });
        assert_eq!((sandbox.poll_order(), sandbox.poll_deadline()), (None, None));
        assert_eq!(sandbox.sleep_tier(), Some(SleepTier::Disk));
        assert_eq!(sandbox.failure_code(), None);
        // When there is room again the next need wakes it from the memory that was never given up.
        assert_eq!(sandbox.handle_need(at(2), PACKET), Ok(Served::Later));
        let wake = ordered(&mut sandbox, Work::Wake { from: Tier::Disk });
        say(&mut sandbox, at(3), wake, Report::Ready);
        assert!(sandbox.is_awake());
    }
}

#[test]
fn s17_a_boot_without_room_leaves_it_off_and_the_next_need_boots_it() {
    for code in [FailureCode::DiskFull, FailureCode::NoCapacity] {
        let mut sandbox = Obedient::asleep(after_30s()).sandbox;
        sandbox.handle_restart(at(0)).expect("accepted");
        let boot = ordered(&mut sandbox, Work::Boot);
        say(&mut sandbox, at(1), boot, Report::Failed { code, left: Left::Lost });
        assert_eq!(sandbox.sleep_tier(), Some(SleepTier::Off));
        assert_eq!((sandbox.failure_code(), sandbox.poll_order()), (None, None));
        let told = std::iter::from_fn(|| sandbox.poll_event()).last().expect("an event");
        assert_eq!(told.what, What::StartRefused { code });
        assert_eq!(sandbox.handle_need(at(2), PACKET), Ok(Served::Later));
        let boot = ordered(&mut sandbox, Work::Boot);
        say(&mut sandbox, at(3), boot, Report::Ready);
        assert!(sandbox.is_awake());
    }
}

#[test]
fn s22_a_copy_of_a_sleeper_that_cannot_be_woken_is_made_of_what_is_stored() {
    let mut sandbox = Obedient::asleep(after_30s()).sandbox;
    sandbox.handle_need(at(0), PACKET).expect("accepted");
    let wake = ordered(&mut sandbox, Work::Wake { from: Tier::Disk });
    let capture = CaptureId(1);
    assert_eq!(sandbox.handle_capture(at(1), capture), Ok(Served::Later));
    let code = FailureCode::NoCapacity;
    say(&mut sandbox, at(2), wake, Report::Failed { code, left: Left::Asleep });
    let copy = ordered(&mut sandbox, Work::Capture { capture, of: CaptureOf::AsleepOnDisk });
    say(&mut sandbox, at(3), copy, Report::Captured);
    let told = std::iter::from_fn(|| sandbox.poll_event()).last().expect("an event");
    assert_eq!(told.what, What::CaptureEnded { capture, result: Ok(()) });
    assert_eq!(sandbox.sleep_tier(), Some(SleepTier::Disk));
}

#[test]
fn s01_one_that_stands_still_for_lack_of_disk_says_so_and_can_neither_sleep_nor_be_copied() {
    let mut host = Obedient::running(after_30s());
    host.sandbox.handle_halted(at(1_000));
    assert_eq!(host.sandbox.halted_since(), Some(at(1_000)));
    assert_eq!(host.reasons().first(), Some(&"host_disk_full"));
    let asked = host.sandbox.handle_sleep(at(1_001), SleepCause::Asked, None);
    assert_eq!(asked, Err(Refusal::HostDiskFull));
    assert_eq!(host.sandbox.handle_capture(at(1_001), CaptureId(1)), Err(Refusal::HostDiskFull));
    // Nobody asks its guest meanwhile, and that it says nothing is no news.
    host.samples = false;
    host.pass_until(at(600_000));
    assert_eq!(host.reasons(), ["host_disk_full"]);
    assert_eq!(host.sandbox.will_sleep_at(host.now), None);
    assert!(host.slept_at().is_empty());
    let silent = |event: &Event| matches!(event.what, What::GuestSilent { .. });
    assert!(!host.events.iter().any(silent), "{:?}", host.events);
    // It goes on where it was, and its quiet begins anew.
    host.samples = true;
    host.sandbox.handle_resumed(host.now);
    assert_eq!(host.sandbox.halted_since(), None);
    host.sample();
    host.pass_until(at(700_000));
    assert_eq!(host.slept_at(), [630_000]);
    assert!(!host.events.iter().any(silent), "{:?}", host.events);
}

#[test]
fn s01_who_waits_for_a_sleep_or_a_copy_of_one_that_is_made_to_stand_still_is_told() {
    let mut sandbox = Obedient::running(after_30s()).sandbox;
    sandbox.handle_capture(at(1), CaptureId(1)).expect("accepted");
    sandbox.handle_capture(at(1), CaptureId(2)).expect("accepted");
    assert_eq!(sandbox.handle_sleep(at(1), SleepCause::Asked, None), Ok(Served::Later));
    let of = CaptureOf::Awake;
    let copy = ordered(&mut sandbox, Work::Capture { capture: CaptureId(1), of });
    sandbox.handle_halted(at(2));
    let code = FailureCode::DiskFull;
    say(&mut sandbox, at(3), copy, Report::Failed { code, left: Left::Awake });
    let result = Err(Refusal::CaptureFailed { code });
    let told: Vec<_> =
        std::iter::from_fn(|| sandbox.poll_event()).map(|event| event.what).collect();
    let ended = |id| What::CaptureEnded { capture: CaptureId(id), result };
    assert_eq!(told[told.len() - 3..], [ended(1), ended(2), What::SleepFailed { code }]);
    assert_eq!(sandbox.poll_order(), None);
}

#[test]
fn s24_what_cannot_help_is_not_tried_again() {
    for code in [FailureCode::SnapshotMismatch, FailureCode::StateDamaged] {
        let mut sandbox = Obedient::asleep(after_30s()).sandbox;
        sandbox.handle_need(at(0), PACKET).expect("accepted");
        let wake = ordered(&mut sandbox, Work::Wake { from: Tier::Disk });
        say(&mut sandbox, at(1), wake, Report::Failed { code, left: Left::Asleep });
        assert_eq!(sandbox.failure_code(), Some(code));
        assert_eq!(sandbox.poll_order(), None);
    }
}

#[test]
fn s24_a_wake_that_fails_after_the_guest_ran_is_never_repeated() {
    let mut sandbox = Obedient::asleep(after_30s()).sandbox;
    sandbox.handle_need(at(0), PACKET).expect("accepted");
    let wake = ordered(&mut sandbox, Work::Wake { from: Tier::Disk });
    let code = FailureCode::AgentSilent;
    say(&mut sandbox, at(1), wake, Report::Failed { code, left: Left::Awake });
    assert!(sandbox.is_awake());
    assert_eq!(sandbox.poll_order(), None);

    let mut sandbox = Obedient::asleep(after_30s()).sandbox;
    sandbox.handle_need(at(0), PACKET).expect("accepted");
    let wake = ordered(&mut sandbox, Work::Wake { from: Tier::Disk });
    say(&mut sandbox, at(1), wake, Report::Failed { code, left: Left::Lost });
    ordered(&mut sandbox, Work::Boot);
    assert_eq!(sandbox.failure_code(), Some(FailureCode::MachineLost));
}

#[test]
fn s24_a_lost_machine_stays_told_when_the_daemon_starts_anew() {
    let sandbox = Sandbox::recover(at(0), after_30s(), Recovered::Running);
    assert_eq!(sandbox.failure_code(), None);
    let sandbox = sandbox.with_last_death(Some(Death::Killed));
    assert_eq!(sandbox.failure_code(), Some(FailureCode::MachineLost));
}
