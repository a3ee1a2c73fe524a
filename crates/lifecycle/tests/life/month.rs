//! Months of a sandbox's life in seconds, with totals that were worked out by hand.

use lifecycle::{Call, CallKind, Cause, Policy, Start, Tier, Tiers, What, Work};

use crate::obedient::{Obedient, after_30s, at};

const MINUTE_MS: u64 = 60_000;
const HOUR_MS: u64 = 60 * MINUTE_MS;
const MONTH_MS: u64 = 30 * 24 * HOUR_MS;

/// A cron job every two minutes, a call of two seconds in each hour, somebody who polls every ten seconds.
#[test]
fn s03_a_month_of_cron_jobs_calls_and_polls() {
    let mut host = Obedient::running(after_30s());
    host.guest.timer = Some(at(2 * MINUTE_MS));
    host.guest.timer_every_ms = Some(2 * MINUTE_MS);
    host.sample();

    for hour in 0..MONTH_MS / HOUR_MS {
        for poll in 0..HOUR_MS / 10_000 {
            host.pass_until(at(hour * HOUR_MS + poll * 10_000));
            assert!(host.sandbox.awake_because(host.now).is_empty() != host.sandbox.is_awake());
            assert_eq!(host.sandbox.will_wake_at().is_some(), !host.sandbox.is_awake());
            // In the second half of a cycle, when it sleeps.
            if poll == 7 {
                assert!(!host.sandbox.is_awake());
                let call = Call::of(CallKind::Exec);
                host.sandbox.handle_call_began(host.now, call).expect("accepted");
                host.obey();
                host.pass_ms(2_000);
                host.sandbox.handle_call_ended(host.now, CallKind::Exec);
            }
        }
    }
    host.pass_until(at(MONTH_MS));

    let cycles = MONTH_MS / (2 * MINUTE_MS);
    let hours = MONTH_MS / HOUR_MS;
    assert_eq!(host.timers_late_ms.len() as u64, cycles);
    assert_eq!(host.timers_late_ms.iter().max(), Some(&0), "every job ran on time");
    // The first 30 s; each cycle 0.4 s before its job and 30 s after it; each call and 30 s after it. The last cycle
    // has only begun.
    assert_eq!(host.awake_ms, 30_000 + cycles * 400 + (cycles - 1) * 30_000 + hours * 32_000);
    assert_eq!(host.woke(Tier::Disk) as u64, cycles + hours);
    assert_eq!(host.slept_at().len() as u64, cycles + hours);
    assert_eq!(host.started(Start::Create), 1);
    assert_eq!(host.started(Start::Boot), 0);
}

/// A request every seven minutes: each time it slept in memory for five minutes and then on disk.
#[test]
fn s07_a_month_of_requests_goes_through_both_tiers() {
    let policy = Policy {
        tiers: Tiers::MemoryThenDisk { memory_tier_ms: 5 * MINUTE_MS },
        ..Policy::default()
    };
    let mut host = Obedient::running(policy);
    let rounds = MONTH_MS / (7 * MINUTE_MS);
    for round in 1..=rounds {
        host.pass_until(at(round * 7 * MINUTE_MS));
        host.need(Cause::Packet { peer: None, port: Some(80) }).expect("accepted");
        assert!(host.sandbox.is_awake());
    }
    host.pass_ms(MINUTE_MS);

    assert_eq!(host.awake_ms, (rounds + 1) * 30_000);
    assert_eq!(host.woke(Tier::Disk) as u64, rounds);
    assert_eq!(host.woke(Tier::Memory), 0);
    assert_eq!(host.count(|work| *work == Work::Suspend { tier: Tier::Memory }) as u64, rounds + 1);
    assert_eq!(host.count(|work| *work == Work::Demote) as u64, rounds);
    let slept: u64 = host
        .events
        .iter()
        .map(|event| if let What::Woke { slept_ms, .. } = event.what { slept_ms } else { 0 })
        .sum();
    assert_eq!(slept + host.awake_ms, rounds * 7 * MINUTE_MS + 30_000);
}

/// Requests so close that it never gets to disk.
#[test]
fn s07_requests_every_two_minutes_stay_in_memory() {
    let mut host = Obedient::running(Policy::default());
    for round in 1..=1_000 {
        host.pass_until(at(round * 2 * MINUTE_MS));
        host.need(Cause::Terminal).expect("accepted");
    }
    assert_eq!(host.woke(Tier::Memory), 1_000);
    assert_eq!(host.count(|work| *work == Work::Demote), 0);
    assert_eq!(host.awake_ms, 1_000 * 30_000);
}
