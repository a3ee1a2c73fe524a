//! The whole transition table: every phase times every wish, fact and report, as one text.
//!
//! A change of behaviour shows as a change of that text. `UPDATE_EXPECT=1 cargo test -p lifecycle` writes it anew; read
//! the difference before committing it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use expect_test::expect_file;
use lifecycle::{
    Attempt, Call, CallKind, CaptureId, Cause, Death, FailureCode, Heard, Left, Phase, Policy,
    Recovered, Report, Sample, Sandbox, SleepCause, Start, Tier, Tiers, Time, What, Work,
};

const NOW: Time = Time::from_millis(1_000);
const CAUSE: Cause = Cause::Packet { peer: None, port: None };

fn policy() -> Policy {
    Policy { tiers: Tiers::MemoryThenDisk { memory_tier_ms: 60_000 }, ..Policy::default() }
}

fn drained(mut sandbox: Sandbox) -> Sandbox {
    while sandbox.poll_order().is_some() || sandbox.poll_event().is_some() {}
    sandbox
}

fn recovered(found: Recovered) -> Sandbox {
    drained(Sandbox::recover(NOW, policy(), found))
}

fn asleep(tier: Tier) -> Sandbox {
    let timer_due = Some(Time::from_millis(2_000_000));
    recovered(Recovered::Asleep { tier, since: NOW, cause: SleepCause::Idle, timer_due })
}

fn with(mut sandbox: Sandbox, step: impl FnOnce(&mut Sandbox)) -> Sandbox {
    step(&mut sandbox);
    drained(sandbox)
}

fn need(sandbox: &mut Sandbox) {
    sandbox.handle_need(NOW, CAUSE).expect("accepted");
}

fn fail(sandbox: &mut Sandbox) {
    let attempt = under_way(sandbox);
    let report = Report::Failed { code: FailureCode::WakeFailed, left: Left::Asleep };
    assert_eq!(sandbox.handle_report(NOW, attempt, report), Heard::Taken);
}

fn sleep(sandbox: &mut Sandbox) {
    sandbox.handle_sleep(NOW, SleepCause::Idle, None).expect("accepted");
}

fn capture(sandbox: &mut Sandbox) {
    sandbox.handle_capture(NOW, CaptureId(1)).expect("accepted");
}

/// Every phase, with what makes a difference within it.
fn phases() -> Vec<(&'static str, Sandbox)> {
    let running = || recovered(Recovered::Running);
    let falling = || with(running(), sleep);
    let demoting = || with(asleep(Tier::Memory), |sandbox| sandbox.handle_demote(NOW));
    let copied = || with(asleep(Tier::Disk), capture);
    let failed = |has_run, saved| {
        recovered(Recovered::Failed { code: FailureCode::WakeFailed, since: NOW, has_run, saved })
    };
    vec![
        ("Starting (create)", recovered(Recovered::Unstarted)),
        ("Starting (boot)", recovered(Recovered::Unbooted)),
        ("Running", running()),
        ("CapturingAwake", with(running(), capture)),
        ("Suspending", falling()),
        ("Suspending, needed", with(falling(), need)),
        ("Asleep (memory)", asleep(Tier::Memory)),
        ("Asleep (disk)", asleep(Tier::Disk)),
        ("Asleep (store)", asleep(Tier::Store)),
        ("Demoting", demoting()),
        ("Demoting, needed", with(demoting(), need)),
        ("CapturingAsleep", copied()),
        ("CapturingAsleep, needed", with(copied(), need)),
        ("Waking (memory)", with(asleep(Tier::Memory), need)),
        ("Waking (disk)", with(asleep(Tier::Disk), need)),
        ("Waking (disk), failed once", with(with(asleep(Tier::Disk), need), fail)),
        ("Off", recovered(Recovered::Off { death: Death::Killed, since: NOW })),
        ("Failed (never ran)", failed(false, false)),
        ("Failed (memory stored)", failed(true, true)),
        ("Deleting", recovered(Recovered::Deleting)),
        ("Deleting, failed once", with(recovered(Recovered::Deleting), fail)),
        (
            "Deleted",
            with(recovered(Recovered::Deleting), |sandbox| {
                let attempt = under_way(sandbox);
                assert_eq!(sandbox.handle_report(NOW, attempt, Report::Destroyed), Heard::Taken);
            }),
        ),
    ]
}

fn under_way(sandbox: &Sandbox) -> Attempt {
    match *sandbox.phase() {
        Phase::Starting { attempt, .. }
        | Phase::CapturingAwake { attempt, .. }
        | Phase::Suspending { attempt, .. }
        | Phase::Demoting { attempt, .. }
        | Phase::CapturingAsleep { attempt, .. }
        | Phase::Waking { attempt, .. }
        | Phase::Deleting { attempt, .. } => attempt,
        Phase::Running { .. }
        | Phase::Asleep { .. }
        | Phase::Off { .. }
        | Phase::Failed { .. }
        | Phase::Deleted => Attempt(0),
    }
}

type Input = (&'static str, fn(&mut Sandbox) -> String);

fn report(sandbox: &mut Sandbox, report: Report) -> String {
    let attempt = under_way(sandbox);
    format!("{:?}", sandbox.handle_report(NOW, attempt, report))
}

fn failed(sandbox: &mut Sandbox, left: Left) -> String {
    report(sandbox, Report::Failed { code: FailureCode::DiskFull, left })
}

/// Everything that can happen. What comes back is how it was answered.
fn inputs() -> Vec<Input> {
    fn answer<T: std::fmt::Debug>(answer: Result<T, lifecycle::Refusal>) -> String {
        match answer {
            Ok(served) => format!("{served:?}"),
            Err(refusal) => format!("refused: {refusal}"),
        }
    }
    vec![
        ("need", |sandbox| answer(sandbox.handle_need(NOW, CAUSE))),
        ("call", |sandbox| answer(sandbox.handle_call_began(NOW, Call::of(CallKind::Exec)))),
        ("call ends", |sandbox| {
            sandbox.handle_call_ended(NOW, CallKind::Exec);
            String::new()
        }),
        ("sleep", |sandbox| answer(sandbox.handle_sleep(NOW, SleepCause::Asked, None))),
        ("sleep on disk", |sandbox| {
            answer(sandbox.handle_sleep(NOW, SleepCause::Shutdown, Some(Tier::Disk)))
        }),
        ("demote", |sandbox| {
            sandbox.handle_demote(NOW);
            String::new()
        }),
        ("capture", |sandbox| answer(sandbox.handle_capture(NOW, CaptureId(2)))),
        ("restart", |sandbox| answer(sandbox.handle_restart(NOW))),
        ("delete", |sandbox| format!("{:?}", sandbox.handle_delete(NOW))),
        ("settings", |sandbox| {
            sandbox.handle_policy(NOW, Policy { tiers: Tiers::Disk, ..policy() });
            String::new()
        }),
        ("packets", |sandbox| {
            sandbox.handle_packets(NOW);
            String::new()
        }),
        ("sample, timer near", |sandbox| {
            let sample = Sample { timer_due_ms: Some(1_000), ..Sample::default() };
            sandbox.handle_sample(NOW, sample);
            String::new()
        }),
        ("holds", |sandbox| {
            sandbox.handle_holds(NOW, 1, 1);
            String::new()
        }),
        ("a second later", |sandbox| {
            sandbox.handle_deadline(NOW.plus_ms(1_000));
            String::new()
        }),
        ("an hour later", |sandbox| {
            sandbox.handle_deadline(NOW.plus_ms(3_600_000));
            String::new()
        }),
        ("died", |sandbox| match sandbox.machine() {
            Some(machine) => format!("{:?}", sandbox.handle_died(NOW, machine, Death::Killed)),
            None => "no machine".to_owned(),
        }),
        ("died (another)", |sandbox| {
            format!("{:?}", sandbox.handle_died(NOW, Attempt(999), Death::Killed))
        }),
        ("Ready", |sandbox| report(sandbox, Report::Ready)),
        ("Suspended (memory)", |sandbox| report(sandbox, Report::Suspended { tier: Tier::Memory })),
        ("Suspended (disk)", |sandbox| report(sandbox, Report::Suspended { tier: Tier::Disk })),
        ("BackAwake", |sandbox| report(sandbox, Report::BackAwake)),
        ("Demoted", |sandbox| report(sandbox, Report::Demoted)),
        ("StillInMemory", |sandbox| report(sandbox, Report::StillInMemory)),
        ("Captured", |sandbox| report(sandbox, Report::Captured)),
        ("Destroyed", |sandbox| report(sandbox, Report::Destroyed)),
        ("Failed, awake", |sandbox| failed(sandbox, Left::Awake)),
        ("Failed, asleep", |sandbox| failed(sandbox, Left::Asleep)),
        ("Failed, lost", |sandbox| failed(sandbox, Left::Lost)),
        ("Failed, no use", |sandbox| {
            report(sandbox, Report::Failed { code: FailureCode::StateDamaged, left: Left::Asleep })
        }),
        ("stale Ready", |sandbox| {
            let stale = Attempt(under_way(sandbox).0.saturating_sub(1));
            format!("{:?}", sandbox.handle_report(NOW, stale, Report::Ready))
        }),
    ]
}

fn phase(sandbox: &Sandbox) -> String {
    fn needed(wake: Option<Cause>) -> &'static str {
        if wake.is_some() { ", needed" } else { "" }
    }
    match sandbox.phase() {
        Phase::Starting { how: Start::Create, .. } => "Starting (create)".to_owned(),
        Phase::Starting { how: Start::Boot, .. } => "Starting (boot)".to_owned(),
        Phase::Running { .. } => "Running".to_owned(),
        Phase::CapturingAwake { .. } => "CapturingAwake".to_owned(),
        Phase::Suspending { wake, cause, tier, .. } => {
            format!("Suspending ({cause:?}, {tier:?}{})", needed(*wake))
        }
        Phase::Asleep { tier, .. } => format!("Asleep ({tier:?})"),
        Phase::Demoting { wake, .. } => format!("Demoting{}", needed(*wake)),
        Phase::CapturingAsleep { wake, .. } => format!("CapturingAsleep{}", needed(*wake)),
        Phase::Waking { from, failed_tries, retry_at, .. } => {
            let waits = if retry_at.is_some() { ", waits" } else { "" };
            format!("Waking ({from:?}, failed {failed_tries}{waits})")
        }
        Phase::Off { death, .. } => format!("Off ({death:?})"),
        Phase::Failed { code, saved, .. } => {
            format!("Failed ({code}{})", if *saved { ", memory stored" } else { "" })
        }
        Phase::Deleting { failed_tries, retry_at, .. } => {
            let waits = if retry_at.is_some() { ", waits" } else { "" };
            format!("Deleting (failed {failed_tries}{waits})")
        }
        Phase::Deleted => "Deleted".to_owned(),
    }
}

fn work(work: Work) -> String {
    match work {
        Work::Suspend { tier } => format!("suspend to {tier:?}"),
        Work::Wake { from } => format!("wake from {from:?}"),
        Work::Capture { capture, of } => format!("capture {} {of:?}", capture.0),
        Work::Notice { in_ms, cap } => format!("notice {in_ms} {cap}"),
        Work::Create | Work::Boot | Work::Cancel | Work::Demote | Work::Destroy | Work::Sample => {
            format!("{work:?}").to_lowercase()
        }
    }
}

fn event(what: &What) -> String {
    let text = format!("{what:?}");
    text.split([' ', '{']).next().unwrap_or_default().to_owned()
}

#[test]
fn transition_table() {
    let names: Vec<_> = phases().iter().map(|(name, _)| *name).collect();
    let mut table = String::new();
    for name in names {
        writeln!(table, "{name}").unwrap();
        let mut unchanged: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for (input, happens) in inputs() {
            let (_, mut sandbox) = phases().into_iter().find(|(each, _)| *each == name).unwrap();
            let before = sandbox.phase().clone();
            let answer = happens(&mut sandbox);
            let mut line = String::new();
            if *sandbox.phase() != before {
                write!(line, " -> {}", phase(&sandbox)).unwrap();
            }
            let mut orders = Vec::new();
            while let Some(order) = sandbox.poll_order() {
                orders.push(work(order.work));
            }
            let mut events = Vec::new();
            while let Some(told) = sandbox.poll_event() {
                events.push(event(&told.what));
            }
            if !orders.is_empty() {
                write!(line, "; orders {}", orders.join(", ")).unwrap();
            }
            if !events.is_empty() {
                write!(line, "; tells {}", events.join(", ")).unwrap();
            }
            if line.is_empty() {
                let answer = if answer.is_empty() { "nothing".to_owned() } else { answer };
                unchanged.entry(answer).or_default().push(input);
            } else {
                let answer = if answer.is_empty() { answer } else { format!(" [{answer}]") };
                writeln!(table, "  {input}{answer}{line}").unwrap();
            }
        }
        for (answer, inputs) in unchanged {
            writeln!(table, "  as before [{answer}]: {}", inputs.join("; ")).unwrap();
        }
        table.push('\n');
    }
    expect_file!["table.txt"].assert_eq(&table);
}
