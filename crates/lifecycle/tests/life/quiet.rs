//! S1 to S6: why it is awake, and when it falls asleep.

use lifecycle::{
    Call, CallKind, CaptureId, Cause, FailureCode, Left, Phase, Policy, Recovered, Refusal, Report,
    SAMPLE_SILENCE_MS, Sample, Sandbox, Served, SleepCause, SleepTier, Status, Tier, Tiers, Time,
    What, Work,
};

use crate::obedient::{Obedient, PACKET, after_30s, at, ordered, say};

// S1: status and why.

#[test]
fn s01_status_has_four_words_in_a_life() {
    let mut sandbox = Sandbox::create(at(0), after_30s());
    assert_eq!(sandbox.status().as_str(), "starting");
    let create = ordered(&mut sandbox, Work::Create);
    say(&mut sandbox, at(1), create, Report::Ready);
    assert_eq!(sandbox.status().as_str(), "running");
    sandbox.handle_sleep(at(2), SleepCause::Asked, None).expect("accepted");
    assert_eq!(sandbox.status().as_str(), "running", "until it sleeps");
    let suspend = ordered(&mut sandbox, Work::Suspend { tier: Tier::Disk });
    say(&mut sandbox, at(3), suspend, Report::Suspended { tier: Tier::Disk });
    assert_eq!(sandbox.status().as_str(), "sleeping");
    assert_eq!(sandbox.handle_need(at(4), PACKET), Ok(Served::Later));
    let wake = ordered(&mut sandbox, Work::Wake { from: Tier::Disk });
    assert_eq!(sandbox.status().as_str(), "sleeping", "until it is awake");
    let left = Left::Asleep;
    say(&mut sandbox, at(5), wake, Report::Failed { code: FailureCode::StateDamaged, left });
    assert_eq!(sandbox.status().as_str(), "failed");
}

#[test]
fn s01_awake_because_names_each_reason_with_text_and_end() {
    let mut host = Obedient::running(after_30s());
    host.pass_ms(1_000);
    host.guest.outbound_tcp = 2;
    host.sandbox.handle_call_began(host.now, Call::of(CallKind::Exec)).expect("accepted");
    host.sandbox.handle_packets(host.now);
    host.sample();
    let told: Vec<_> = host
        .sandbox
        .awake_because(host.now)
        .iter()
        .map(|awake| (awake.reason.as_str(), awake.text(), awake.until.map(Time::as_millis)))
        .collect();
    let text = |text: &str| text.to_owned();
    assert_eq!(
        told,
        [
            ("just_woke", text("it was needed a moment ago"), Some(31_000)),
            ("calls", text("1 command waits on it"), None),
            ("packets", text("packets crossed its network link"), Some(31_000)),
            ("outbound_tcp", text("it holds 2 outbound connections"), None),
        ]
    );
    assert_eq!(host.sandbox.will_sleep_at(host.now), None);
}

#[test]
fn s01_a_sleeper_has_no_reasons_and_asking_changes_nothing() {
    let mut host = Obedient::asleep(after_30s());
    let before = format!("{:?}", host.sandbox);
    assert!(host.sandbox.awake_because(host.now).is_empty());
    assert_eq!(host.sandbox.will_sleep_at(host.now), None);
    assert_eq!(format!("{:?}", host.sandbox), before);
    assert_eq!(host.sandbox.poll_order(), None);
}

// S2: when it sleeps.

#[test]
fn s02_sleeps_after_thirty_quiet_seconds() {
    let mut host = Obedient::running(Policy::default());
    assert_eq!(host.sandbox.will_sleep_at(host.now), Some(at(30_000)));
    host.pass_until(at(29_999));
    assert_eq!(host.sandbox.status(), Status::Running);
    host.pass_until(at(30_000));
    assert_eq!(host.slept_at(), [30_000]);
    let slept = host.sandbox.last_sleep().expect("it slept");
    assert_eq!((slept.cause, slept.at), (SleepCause::Idle, at(30_000)));
}

#[test]
fn s02_a_call_that_waits_keeps_awake_and_the_quiet_begins_at_its_end() {
    for kind in CallKind::ALL {
        let mut host = Obedient::running(after_30s());
        host.sandbox.handle_call_began(host.now, Call::of(kind)).expect("accepted");
        host.sandbox.handle_call_began(host.now, Call::of(kind)).expect("accepted");
        host.pass_ms(200_000);
        host.sandbox.handle_call_ended(host.now, kind);
        assert_eq!(host.sandbox.calls(kind), 1);
        host.pass_ms(100_000);
        assert_eq!(host.sandbox.will_sleep_at(host.now), None, "{kind:?}");
        host.sandbox.handle_call_ended(host.now, kind);
        host.pass_ms(100_000);
        assert_eq!(host.slept_at(), [330_000], "{kind:?}");
    }
}

#[test]
fn s02_an_end_without_a_begin_does_not_count_below_zero() {
    let mut host = Obedient::running(after_30s());
    host.sandbox.handle_call_ended(host.now, CallKind::Exec);
    host.sandbox.handle_call_began(host.now, Call::of(CallKind::Exec)).expect("accepted");
    assert_eq!(host.sandbox.calls(CallKind::Exec), 1);
}

#[test]
fn s02_cpu_of_two_percent_keeps_awake_and_less_does_not() {
    for (load_permille, sleeps) in [(0, true), (5, true), (18, true), (20, false), (25, false)] {
        let mut host = Obedient::running(after_30s());
        host.guest.load_permille = load_permille;
        host.pass_ms(600_000);
        assert_eq!(
            host.sandbox.status() == Status::Sleeping,
            sleeps,
            "{load_permille} thousandths"
        );
        if !sleeps {
            assert_eq!(host.reasons(), ["cpu"]);
            let text = host.sandbox.awake_because(host.now)[0].text();
            assert_eq!(text, format!("its programs use 2.{} % of a core", load_permille - 20));
        }
    }
}

#[test]
fn s02_cpu_counts_on_average_over_the_quiet_window() {
    let mut host = Obedient::running(after_30s());
    host.pass_until(at(10_000));
    host.guest.load_permille = 1_000;
    host.pass_until(at(12_000));
    host.guest.load_permille = 0;
    host.pass_until(at(100_000));
    // Two seconds are more than 2 % of 30 s (0.6 s). By 41.5 s less than that lies within the last 30 s, and the
    // samples of each second show it at 42 s.
    let slept = host.slept_at();
    assert_eq!(slept.len(), 1);
    assert!((41_000..=42_500).contains(&slept[0]), "{slept:?}");
}

#[test]
fn s02_a_burst_below_the_average_does_not_keep_awake() {
    let mut host = Obedient::running(after_30s());
    host.pass_until(at(10_000));
    host.guest.load_permille = 500;
    host.pass_until(at(11_000));
    host.guest.load_permille = 0;
    host.pass_until(at(40_000));
    assert_eq!(host.slept_at(), [30_000]);
}

#[test]
fn s02_a_program_that_begins_to_compute_in_the_last_second_is_seen() {
    let mut host = Obedient::running(Policy { sleep_after_ms: Some(5_000), ..after_30s() });
    host.pass_until(at(4_100));
    host.guest.load_permille = 1_000;
    host.pass_until(at(20_000));
    assert_eq!(host.sandbox.status(), Status::Running);
}

#[test]
fn s02_falls_asleep_only_on_what_the_guest_says_at_that_moment() {
    let mut host = Obedient::running(after_30s());
    host.pass_until(at(28_500));
    assert_eq!(host.sandbox.poll_deadline(), Some(at(30_000)));
    host.sandbox.handle_deadline(at(30_000));
    ordered(&mut host.sandbox, Work::Sample);
    assert!(host.sandbox.is_awake());
    assert_eq!(host.reasons(), ["just_woke"], "until it has answered");
    host.sandbox.handle_deadline(at(30_001));
    assert_eq!(host.sandbox.poll_order(), None, "asked once");
    host.sandbox.handle_sample(at(30_002), Sample::default());
    ordered(&mut host.sandbox, Work::Suspend { tier: Tier::Disk });
}

#[test]
fn s02_long_windows_are_judged_as_exactly_as_short_ones() {
    let hour_ms = 3_600_000;
    let mut host = Obedient::running(Policy { sleep_after_ms: Some(hour_ms), ..after_30s() });
    host.guest.load_permille = 1_000;
    host.pass_until(at(100_000));
    host.guest.load_permille = 0;
    host.pass_until(at(2 * hour_ms));
    // 2 % of an hour is 72 s of the 100 s, so it is quiet from second 28; seen in steps of 1/64 of the window.
    let slept = host.slept_at();
    let (earliest, step) = (hour_ms + 28_000, hour_ms / 64 + 2_000);
    assert!((earliest..=earliest + step).contains(&slept[0]), "{slept:?}");
}

#[test]
fn s02_a_counter_that_begins_anew_is_no_negative_load() {
    let mut host = Obedient::running(after_30s());
    host.guest.cpu_usec = 50_000_000;
    host.pass_until(at(20_000));
    host.guest.cpu_usec = 0;
    host.pass_until(at(49_000));
    assert_eq!(host.sandbox.status(), Status::Running, "nothing is known from before");
    host.pass_until(at(55_000));
    assert_eq!(host.sandbox.status(), Status::Sleeping);
}

#[test]
fn s02_packets_keep_awake() {
    let mut host = Obedient::running(after_30s());
    for second in [10, 25, 50] {
        host.pass_until(at(second * 1_000));
        host.sandbox.handle_packets(host.now);
    }
    assert_eq!(host.reasons(), ["packets"]);
    host.pass_until(at(100_000));
    assert_eq!(host.slept_at(), [80_000]);
}

#[test]
fn s02_an_outbound_connection_keeps_awake_and_the_quiet_begins_at_its_end() {
    let mut host = Obedient::running(after_30s());
    host.guest.outbound_tcp = 1;
    host.pass_until(at(100_500));
    assert_eq!(host.reasons(), ["outbound_tcp"]);
    assert_eq!(host.sandbox.will_sleep_at(host.now), None);
    host.guest.outbound_tcp = 0;
    host.pass_until(at(200_000));
    // It was last seen at second 100.
    assert_eq!(host.slept_at(), [130_000]);
}

#[test]
fn s02_null_never_sleeps_by_itself() {
    let mut host = Obedient::running(Policy { sleep_after_ms: None, ..Policy::default() });
    host.pass_ms(10_000_000);
    assert_eq!(host.sandbox.status(), Status::Running);
    assert_eq!(host.reasons(), ["never_sleeps"]);
    assert_eq!(host.sandbox.will_sleep_at(host.now), None);
    assert_eq!(host.sandbox.handle_sleep(host.now, SleepCause::Asked, None), Ok(Served::Later));
}

#[test]
fn s02_without_a_sample_it_is_not_called_idle_and_silence_is_told_once() {
    let mut host = Obedient::running(after_30s());
    host.pass_until(at(10_000));
    host.samples = false;
    host.pass_until(at(600_000));
    assert_eq!(host.sandbox.status(), Status::Running);
    assert_eq!(host.reasons(), ["no_sample"]);
    assert_eq!(host.sandbox.will_sleep_at(host.now), None, "nobody can tell");
    let silences: Vec<_> = host
        .events
        .iter()
        .filter(|event| matches!(event.what, What::GuestSilent { .. }))
        .map(|event| (event.at.as_millis(), event.what.clone()))
        .collect();
    let since = at(10_000);
    assert_eq!(silences, [(10_000 + SAMPLE_SILENCE_MS, What::GuestSilent { since })]);
    assert_eq!(host.sandbox.poll_deadline(), None);

    host.samples = true;
    host.sample();
    host.obey();
    assert_eq!(host.slept_at(), [600_000], "it was quiet all the time, as it turns out");
}

#[test]
fn s02_one_that_never_gave_a_sample_is_told_as_silent() {
    let mut sandbox = Sandbox::recover(at(5_000), after_30s(), Recovered::Running);
    assert_eq!(sandbox.poll_deadline(), Some(at(5_000 + SAMPLE_SILENCE_MS)));
    sandbox.handle_deadline(at(500_000));
    assert_eq!(sandbox.status(), Status::Running);
    let told = sandbox.poll_event().expect("an event").what;
    assert_eq!(told, What::GuestSilent { since: at(5_000) });
}

#[test]
fn s02_a_wake_begins_a_new_quiet_window() {
    let mut host = Obedient::asleep(after_30s());
    host.pass_until(at(500_000));
    host.need(Cause::Terminal).expect("accepted");
    assert_eq!(host.reasons(), ["just_woke"]);
    host.pass_until(at(600_000));
    assert_eq!(host.slept_at(), [0, 530_000]);
}

#[test]
fn s02_a_failed_sleep_is_not_tried_without_end() {
    let mut host = Obedient::running(Policy { sleep_after_ms: Some(1_000), ..after_30s() });
    let mut failed = Vec::new();
    while failed.len() < 3 {
        host.now = host.sandbox.poll_deadline().expect("it will sleep");
        host.sample();
        host.sandbox.handle_deadline(host.now);
        if let Phase::Suspending { attempt, .. } = host.phase() {
            while host.sandbox.poll_order().is_some() {}
            failed.push(host.now.as_millis());
            let report = Report::Failed { code: FailureCode::DiskFull, left: Left::Awake };
            say(&mut host.sandbox, host.now, attempt, report);
            assert!(host.sandbox.is_awake());
            assert!(host.reasons().contains(&"sleep_failed"));
        }
    }
    assert_eq!(failed, [1_000, 31_000, 61_000]);
}

// S3: timers.

#[test]
fn s03_timer_due_within_five_seconds_keeps_awake() {
    let mut host = Obedient::running(after_30s());
    host.guest.timer = Some(at(34_000));
    host.sample();
    host.pass_until(at(33_000));
    assert_eq!(host.reasons(), ["timer"]);
    host.pass_until(at(100_000));
    assert_eq!(host.timers_late_ms, [0]);
    // What it started has the whole quiet window to show itself.
    assert_eq!(host.slept_at(), [64_000]);
}

#[test]
fn s03_a_later_timer_does_not_keep_awake_and_wakes_four_tenths_of_a_second_before() {
    for tiers in [Tiers::Disk, Tiers::MemoryThenDisk { memory_tier_ms: 300_000 }] {
        let mut host = Obedient::running(Policy { tiers, ..after_30s() });
        host.guest.timer = Some(at(40_000));
        host.sample();
        host.pass_until(at(35_000));
        assert_eq!(host.slept_at(), [30_000]);
        assert_eq!(host.sandbox.will_wake_at(), Some(at(39_600)));
        host.pass_until(at(39_599));
        assert_eq!(host.sandbox.status(), Status::Sleeping);
        host.pass_until(at(39_600));
        assert_eq!(host.sandbox.status(), Status::Running);
        let woke = host.sandbox.last_wake().expect("it woke");
        assert_eq!((woke.cause, woke.at), (Cause::Timer { due: at(40_000) }, at(39_600)));
        host.pass_until(at(100_000));
        assert_eq!(host.timers_late_ms, [0]);
        assert_eq!(host.slept_at(), [30_000, 70_000]);
    }
}

#[test]
fn s03_a_timer_set_in_the_last_moment_keeps_awake() {
    let mut host = Obedient::running(after_30s());
    host.pass_until(at(29_500));
    host.guest.timer = Some(at(33_000));
    host.pass_until(at(31_000));
    assert_eq!(host.reasons(), ["timer"]);
    host.pass_until(at(100_000));
    assert_eq!(host.timers_late_ms, [0]);
    assert_eq!(host.slept_at(), [63_000]);
}

#[test]
fn s03_a_timer_is_remembered_through_a_wake_in_which_the_guest_said_nothing() {
    let (since, timer_due) = (at(0), Some(at(90_000)));
    let cause = SleepCause::Idle;
    let found = Recovered::Asleep { tier: Tier::Disk, since, cause, timer_due };
    let mut sandbox = Sandbox::recover(at(20_000), after_30s(), found);
    sandbox.handle_need(at(20_000), PACKET).expect("accepted");
    let wake = ordered(&mut sandbox, Work::Wake { from: Tier::Disk });
    say(&mut sandbox, at(20_001), wake, Report::Ready);
    sandbox.handle_sleep(at(20_002), SleepCause::Asked, None).expect("accepted");
    let suspend = ordered(&mut sandbox, Work::Suspend { tier: Tier::Disk });
    say(&mut sandbox, at(20_003), suspend, Report::Suspended { tier: Tier::Disk });
    assert_eq!(sandbox.poll_deadline(), Some(at(89_600)));
}

#[test]
fn s03_a_timer_set_while_it_falls_asleep_is_heeded() {
    let mut host = Obedient::running(after_30s());
    host.pass_until(at(29_900));
    host.now = at(30_000);
    host.sample();
    let Phase::Suspending { attempt, .. } = host.phase() else { panic!("{:?}", host.phase()) };
    ordered(&mut host.sandbox, Work::Suspend { tier: Tier::Disk });
    let sample = Sample { timer_due_ms: Some(3_000), ..Default::default() };
    host.sandbox.handle_sample(at(30_010), sample);
    assert_eq!(ordered(&mut host.sandbox, Work::Cancel), attempt);
    say(&mut host.sandbox, at(30_011), attempt, Report::BackAwake);
    assert!(host.sandbox.is_awake());

    // Asked for, it sleeps nevertheless, and the timer wakes it.
    host.sandbox.handle_sleep(at(30_020), SleepCause::Asked, None).expect("accepted");
    let suspend = ordered(&mut host.sandbox, Work::Suspend { tier: Tier::Disk });
    host.sandbox.handle_sample(at(30_030), sample);
    assert_eq!(host.sandbox.poll_order(), None);
    say(&mut host.sandbox, at(30_040), suspend, Report::Suspended { tier: Tier::Disk });
    assert_eq!(host.sandbox.poll_deadline(), Some(at(32_630)));
}

#[test]
fn s03_a_timer_that_fired_long_ago_does_not_wake() {
    let mut host = Obedient::running(after_30s());
    host.guest.timer = Some(at(20_000));
    host.sample();
    host.samples = false;
    host.pass_until(at(21_000));
    host.sandbox.handle_sleep(host.now, SleepCause::Asked, None).expect("accepted");
    host.obey();
    host.pass_ms(100_000);
    assert_eq!(host.sandbox.status(), Status::Sleeping);
    assert_eq!(host.sandbox.will_wake_at(), None);
}

#[test]
fn s03_a_timer_that_comes_due_while_it_goes_to_disk_turns_it_back() {
    let mut host = Obedient::asleep(Policy::default());
    host.pass_until(at(299_000));
    let timer_due = Some(at(300_600));
    let found =
        Recovered::Asleep { tier: Tier::Memory, since: at(0), cause: SleepCause::Idle, timer_due };
    let mut sandbox = Sandbox::recover(host.now, Policy::default(), found);
    assert_eq!(sandbox.poll_deadline(), Some(at(300_000)));
    sandbox.handle_deadline(at(300_000));
    let demote = ordered(&mut sandbox, Work::Demote);
    assert_eq!(sandbox.poll_deadline(), Some(at(300_200)));
    sandbox.handle_deadline(at(300_200));
    assert_eq!(ordered(&mut sandbox, Work::Cancel), demote);
    say(&mut sandbox, at(300_210), demote, Report::StillInMemory);
    ordered(&mut sandbox, Work::Wake { from: Tier::Memory });
}

#[test]
fn s03_a_recovered_sleeper_keeps_its_timer() {
    let timer_due = Some(at(90_000));
    let found = Recovered::Asleep {
        tier: Tier::Disk,
        since: at(10_000),
        cause: SleepCause::Idle,
        timer_due,
    };
    let mut sandbox = Sandbox::recover(at(20_000), after_30s(), found);
    assert_eq!(sandbox.poll_order(), None);
    assert_eq!(sandbox.poll_deadline(), Some(at(89_600)));
    assert_eq!(sandbox.timer_due(), timer_due);
}

// S4: awake ports.

#[test]
fn s04_with_awake_ports_connections_requests_and_calls_alone_decide() {
    let mut host = Obedient::running(Policy { awake_ports: true, ..after_30s() });
    host.guest.load_permille = 500;
    host.guest.outbound_tcp = 3;
    host.guest.timer = Some(at(31_000));
    host.guest.timer_every_ms = Some(3_000);
    host.guest.holds = 1;
    host.guest.hold_connections = 1;
    host.sample();
    let call = Call::to_port(CallKind::AwakeConnection, 9222);
    host.sandbox.handle_call_began(host.now, call).expect("accepted");
    host.pass_until(at(100_000));
    assert_eq!(host.reasons(), ["calls"]);
    let text = host.sandbox.awake_because(host.now)[0].text();
    assert_eq!(text, "1 connection to an awake port waits on it");
    host.sandbox.handle_call_ended(host.now, CallKind::AwakeConnection);
    host.pass_until(at(500_000));
    assert_eq!(host.slept_at(), [130_000], "and no timer wakes it");
    assert_eq!(host.sandbox.will_wake_at(), None);
}

// S5: sleep now.

#[test]
fn s05_sleeps_when_asked_whatever_holds_it_awake() {
    let mut host = Obedient::running(Policy { sleep_after_ms: None, ..Policy::default() });
    host.guest.outbound_tcp = 1;
    host.guest.holds = 1;
    host.sample();
    host.sandbox.handle_call_began(host.now, Call::of(CallKind::Exec)).expect("accepted");
    assert_eq!(host.sandbox.handle_sleep(host.now, SleepCause::Asked, None), Ok(Served::Later));
    host.obey();
    assert_eq!(host.sandbox.sleep_tier(), Some(SleepTier::Memory));
    assert_eq!(host.sandbox.handle_sleep(host.now, SleepCause::Asked, None), Ok(Served::Now));
    assert_eq!(host.sandbox.last_sleep().expect("it slept").cause, SleepCause::Asked);
}

#[test]
fn s05_a_shutdown_brings_each_to_disk() {
    // Awake.
    let mut host = Obedient::running(Policy::default());
    let disk = Some(Tier::Disk);
    host.sandbox.handle_sleep(host.now, SleepCause::Shutdown, disk).expect("accepted");
    host.obey();
    assert_eq!(host.sandbox.sleep_tier(), Some(SleepTier::Disk));
    // Asleep in memory.
    let mut host = Obedient::asleep(Policy::default());
    host.sandbox.handle_sleep(host.now, SleepCause::Shutdown, disk).expect("accepted");
    host.obey();
    assert_eq!(host.sandbox.sleep_tier(), Some(SleepTier::Disk));
    // On its way into memory.
    let mut host = Obedient::running(Policy::default());
    host.sandbox.handle_sleep(host.now, SleepCause::Idle, None).expect("accepted");
    host.sandbox.handle_sleep(host.now, SleepCause::Shutdown, disk).expect("accepted");
    host.obey();
    assert_eq!(host.sandbox.sleep_tier(), Some(SleepTier::Disk));
    assert_eq!(host.sandbox.last_sleep().expect("it slept").cause, SleepCause::Shutdown);
}

#[test]
fn s05_asked_while_it_is_copied_it_sleeps_afterwards() {
    let mut host = Obedient::running(after_30s());
    host.sandbox.handle_capture(host.now, CaptureId(1)).expect("accepted");
    assert_eq!(host.sandbox.handle_sleep(host.now, SleepCause::Asked, None), Ok(Served::Later));
    host.obey();
    assert_eq!(host.sandbox.status(), Status::Sleeping);
}

#[test]
fn s05_is_refused_while_something_waits_for_the_wake() {
    let mut host = Obedient::asleep(after_30s());
    host.sandbox.handle_need(host.now, PACKET).expect("accepted");
    let refused = host.sandbox.handle_sleep(host.now, SleepCause::Asked, None);
    assert_eq!(refused, Err(Refusal::Waking));
    host.obey();
    assert_eq!(host.sandbox.status(), Status::Running);
}

// S6: new settings.

#[test]
fn s06_new_settings_take_effect_at_once() {
    let mut host = Obedient::running(after_30s());
    host.pass_until(at(20_000));
    let with = |sleep_after_ms| Policy { sleep_after_ms, ..after_30s() };
    host.sandbox.handle_policy(host.now, with(Some(300_000)));
    assert_eq!(host.sandbox.will_sleep_at(host.now), Some(at(300_000)));
    host.pass_until(at(100_000));
    assert_eq!(host.sandbox.status(), Status::Running);
    host.sandbox.handle_policy(host.now, with(None));
    assert_eq!(host.sandbox.will_sleep_at(host.now), None);
    host.pass_until(at(1_000_000));
    host.sandbox.handle_policy(host.now, with(Some(10_000)));
    host.obey();
    host.pass_ms(10_000);
    assert_eq!(host.sandbox.status(), Status::Sleeping);
}

#[test]
fn s06_a_shorter_window_that_is_over_already_sleeps_now() {
    let mut host = Obedient::running(Policy { sleep_after_ms: Some(300_000), ..after_30s() });
    host.pass_until(at(100_000));
    host.sandbox.handle_policy(host.now, after_30s());
    host.obey();
    assert_eq!(host.slept_at(), [100_000]);
}

#[test]
fn s06_never_only_in_memory_takes_effect_on_a_sleeper() {
    let mut host = Obedient::asleep(Policy::default());
    assert_eq!(host.sandbox.sleep_tier(), Some(SleepTier::Memory));
    host.sandbox.handle_policy(host.now, after_30s());
    host.obey();
    assert_eq!(host.sandbox.sleep_tier(), Some(SleepTier::Disk));
}
