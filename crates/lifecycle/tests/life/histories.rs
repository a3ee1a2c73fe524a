//! Random histories: wishes, delays, failures, deaths, repeated and late reports, crashes of the daemon.

use lifecycle::{
    Call, CallKind, Cause, Death, FailureCode, Phase, Policy, Sample, SleepCause, Tier, Tiers,
};
use proptest::prelude::*;

use crate::world::{Luck, World};

#[derive(Clone, Debug)]
enum Op {
    Need(Cause),
    Begin(CallKind),
    End,
    Sleep(SleepCause, Option<Tier>),
    Demote,
    Capture,
    Restart,
    Delete,
    Policy(Policy),
    Pass(u64),
    Packets,
    /// The host's disk is full, or has room again.
    Halt(bool),
    Sample(Sample),
    /// A quiet guest, told once a second for so many seconds.
    Quiet(u64),
    Work(Luck),
    Deliver,
    Die(Death),
    Repeat(usize),
    Crash,
}

fn luck() -> impl Strategy<Value = Luck> {
    let codes = prop::sample::select(vec![
        FailureCode::DiskFull,
        FailureCode::NoCapacity,
        FailureCode::StateDamaged,
        FailureCode::SleepFailed,
    ]);
    prop_oneof![
        12 => Just(Luck::Well),
        4 => Just(Luck::TurnsBack),
        3 => codes.prop_map(Luck::Fails),
        1 => Just(Luck::Loses),
    ]
}

fn policy() -> impl Strategy<Value = Policy> {
    let windows = prop::sample::select(vec![1_000, 5_000, 30_000]);
    let sleep_after_ms = prop::option::weighted(0.9, windows);
    let tiers = prop_oneof![
        2 => prop::sample::select(vec![0, 10_000, 60_000])
            .prop_map(|memory_tier_ms| Tiers::MemoryThenDisk { memory_tier_ms }),
        1 => Just(Tiers::Disk),
    ];
    let notice = prop::option::weighted(0.2, Just(2_000));
    (sleep_after_ms, tiers, prop::bool::weighted(0.05), notice).prop_map(
        |(sleep_after_ms, tiers, awake_ports, sleep_notice_ms)| Policy {
            // The world reckons idleness by the common rules only: one with awake ports sleeps only when asked here.
            sleep_after_ms: sleep_after_ms.filter(|_| !awake_ports),
            tiers,
            awake_ports,
            sleep_notice_ms,
            ..Policy::default()
        },
    )
}

fn sample() -> impl Strategy<Value = Sample> {
    let timer = prop::option::weighted(0.3, prop::sample::select(vec![100, 4_000, 9_000, 100_000]));
    let cpu = prop::sample::select(vec![0, 0, 10_000, 5_000_000]);
    (cpu, prop::bool::weighted(0.1), timer, 0..2_u32, 0..2_u32).prop_map(
        |(cpu_usec, connected, timer_due_ms, holds, hold_connections)| Sample {
            commands: 0,
            cpu_usec,
            outbound_tcp: connected.into(),
            timer_due_ms,
            holds,
            hold_connections,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let cause = prop::sample::select(vec![
        Cause::Terminal,
        Cause::Packet { peer: None, port: Some(80) },
        Cause::Call(Call::of(CallKind::Api)),
    ]);
    let asked = prop::sample::select(vec![SleepCause::Asked, SleepCause::Shutdown]);
    let tier = prop::sample::select(vec![None, Some(Tier::Memory), Some(Tier::Disk)]);
    let death = prop::sample::select(vec![Death::Killed, Death::Reboot, Death::Panic]);
    prop_oneof![
        40 => luck().prop_map(Op::Work),
        40 => Just(Op::Deliver),
        14 => cause.prop_map(Op::Need),
        10 => (asked, tier).prop_map(|(cause, tier)| Op::Sleep(cause, tier)),
        8 => (1..40_u64).prop_map(Op::Quiet),
        8 => (0..70_000_u64).prop_map(Op::Pass),
        6 => Just(Op::Capture),
        5 => Just(Op::Demote),
        5 => prop::sample::select(CallKind::ALL.to_vec()).prop_map(Op::Begin),
        7 => Just(Op::End),
        5 => sample().prop_map(Op::Sample),
        3 => Just(Op::Packets),
        3 => any::<bool>().prop_map(Op::Halt),
        3 => policy().prop_map(Op::Policy),
        3 => death.prop_map(Op::Die),
        6 => any::<usize>().prop_map(Op::Repeat),
        3 => Just(Op::Crash),
        2 => Just(Op::Restart),
        1 => Just(Op::Delete),
    ]
}

fn apply(world: &mut World, op: Op) {
    match op {
        Op::Need(cause) => world.need(cause),
        Op::Begin(kind) => world.begin(kind),
        Op::End => world.end(),
        Op::Sleep(cause, tier) => world.sleep(cause, tier),
        Op::Demote => world.demote(),
        Op::Capture => world.capture(),
        Op::Restart => world.restart(),
        Op::Delete => world.delete(),
        Op::Policy(policy) => world.policy(policy),
        Op::Pass(ms) => world.pass(ms),
        Op::Packets => world.packets(),
        Op::Halt(halt) => world.halt(halt),
        Op::Sample(sample) => world.sample(sample),
        Op::Quiet(seconds) => {
            for _ in 0..seconds {
                world.pass(1_000);
                world.sample(Sample::default());
            }
        }
        Op::Work(luck) => world.work(luck),
        Op::Deliver => world.deliver(),
        Op::Die(death) => world.die(death),
        Op::Repeat(index) => world.repeat(index),
        Op::Crash => world.crash(),
    }
    world.check();
}

/// A thousand histories of each sort; more or fewer with `PROPTEST_CASES`.
fn config() -> ProptestConfig {
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default(),
        None => ProptestConfig::with_cases(1_000),
    }
}

proptest! {
    #![proptest_config(config())]

    /// The invariants of the crate, whatever happens in whatever order.
    #[test]
    fn any_history_keeps_the_invariants(policy in policy(), ops in prop::collection::vec(op(), 0..150)) {
        let mut world = World::new(policy);
        for op in ops {
            apply(&mut world, op);
        }

        // Never stuck: once the host does its work, all that goes on comes to an end.
        world.settle();
        world.check();
        prop_assert!(!world.is_waiting(), "a need is still waiting");
        prop_assert_eq!(world.captures_open(), 0, "a capture never ended");

        // And what is needed then is there.
        let (failed, deleted) = match world.sandbox.phase() {
            Phase::Failed { .. } => (true, false),
            Phase::Deleted => (false, true),
            _ => (false, false),
        };
        world.need(Cause::Terminal);
        world.settle();
        world.check();
        prop_assert_eq!(world.sandbox.is_awake(), !failed && !deleted);

        // A failed one is cured by a restart.
        if failed {
            world.restart();
            world.settle();
            world.check();
            prop_assert!(world.sandbox.is_awake());
        }

        // And it can always be deleted.
        world.delete();
        world.settle();
        world.check();
        prop_assert_eq!(world.sandbox.phase(), &Phase::Deleted);
    }

    /// In the midst of anything a deletion ends, and leaves nothing.
    #[test]
    fn a_deletion_in_the_midst_of_anything_ends(policy in policy(), ops in prop::collection::vec(op(), 0..60)) {
        let mut world = World::new(policy);
        for op in ops {
            apply(&mut world, op);
        }
        world.delete();
        world.settle();
        world.check();
        prop_assert_eq!(world.sandbox.phase(), &Phase::Deleted);
        prop_assert_eq!(world.captures_open(), 0);
    }
}
