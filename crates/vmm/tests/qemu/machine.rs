//! One machine against a real QEMU: each order, and each way to end.

use std::time::{Duration, Instant};

use crate::support::{Bench, Guest, STEP_MAX, until};
use vmm::machine::{Adopted, GuestState, OrderError, SaveError, StartError};
use vmm::process::ProcessState;
use vmm::state::StateMark;
use vmm::{Exit, ExitCause, Machine, MachineSpec};

/// Slept hours pass for the guest too: its clock has moved on, and a timer that came due meanwhile fires.
#[tokio::test(flavor = "multi_thread")]
async fn an_hour_asleep_on_disk_is_an_hour_for_the_guest() {
    let bench = Bench::new();
    let spec = bench.spec_with_disk().await;
    let (mut machine, mut guest) = bench.boot(&spec).await;
    assert_eq!(guest.ask("disk-write one").await, "ok");
    assert_eq!(guest.ask("sleep 1800").await, "ok");
    let before = clock(&guest.ask("clock").await);
    let since = Instant::now();

    let pause = machine.pause().await.unwrap();
    assert_eq!(machine.guest_state().await.unwrap(), GuestState::Standing);
    let state = bench.path("state");
    let saved = machine.save_state(&state).await.unwrap();
    let fingerprint = machine.fingerprint().clone();
    let quit_since = Instant::now();
    assert_eq!(machine.quit().await.unwrap(), Exit { cause: ExitCause::Quit });
    let quit = quit_since.elapsed();
    assert!(matches!(machine.cont().await, Err(OrderError::Ended(_))));

    let hour = Duration::from_hours(1);
    let slept = hour + since.elapsed();
    let mut machine =
        Machine::restore(&bench.qemu, &spec, &state, &saved.mark, &fingerprint, slept)
            .await
            .unwrap();
    assert_eq!(machine.guest_state().await.unwrap(), GuestState::Standing);
    let cont = machine.cont().await.unwrap();
    let mut guest = Guest::of(&machine);
    assert_eq!(guest.ask("ping").await, "pong");
    let after = clock(&guest.ask("clock").await);
    let real = since.elapsed();
    println!("pause {pause:?}, {saved:?}, quit {quit:?}, {:?}, cont {cont:?}", machine.started());

    for (name, jump) in [("monotonic", after.0 - before.0), ("wall", after.1 - before.1)] {
        let expected = hour + real;
        let apart = Duration::from_nanos(jump).abs_diff(expected);
        assert!(
            apart < Duration::from_millis(300),
            "{name} clock moved by {jump} ns, expected {expected:?}"
        );
    }
    // The sleep of half an hour is over, as late as the machine was asleep.
    let slept = wait_slept(&mut guest).await;
    assert!((3600..3610).contains(&slept.as_secs()), "{slept:?}");
    assert_eq!(guest.ask("disk-read").await, "one");
    machine.kill().await.unwrap();
}

/// QEMU has nothing to make up for, however long the sleep: going on takes no longer after a month.
#[tokio::test(flavor = "multi_thread")]
async fn a_month_asleep_is_not_worked_through_by_qemu() {
    let bench = Bench::new();
    let spec = bench.spec();
    let (mut machine, mut guest) = bench.boot(&spec).await;
    let before = clock(&guest.ask("clock").await);
    let state = bench.path("state");
    machine.pause().await.unwrap();
    let mark = machine.save_state(&state).await.unwrap().mark;
    let fingerprint = machine.fingerprint().clone();
    machine.quit().await.unwrap();
    let month = Duration::from_hours(30 * 24);
    let mut machine =
        Machine::restore(&bench.qemu, &spec, &state, &mark, &fingerprint, month).await.unwrap();
    let cont = machine.cont().await.unwrap();
    println!("cont {cont:?}");
    // It was half a minute before the interval timer was moved on.
    assert!(cont < Duration::from_secs(1), "{cont:?}");
    let after = clock(&Guest::of(&machine).ask("clock").await);
    assert!(Duration::from_nanos(after.0 - before.0) > month);
    machine.kill().await.unwrap();
}

/// A sleep that is given up before it is published: the same machine goes on, and can be saved again.
#[tokio::test(flavor = "multi_thread")]
async fn a_saved_machine_goes_on_and_is_saved_again() {
    let bench = Bench::new();
    let spec = bench.spec_with_disk().await;
    let (mut machine, mut guest) = bench.boot(&spec).await;
    for round in ["one", "two"] {
        machine.pause().await.unwrap();
        machine.save_state(&bench.path(round)).await.unwrap();
        machine.cont().await.unwrap();
        assert_eq!(guest.ask(&format!("disk-write {round}")).await, "ok");
        assert_eq!(guest.ask("disk-read").await, round);
    }
    // A place that cannot be written: an error, and the machine goes on.
    machine.pause().await.unwrap();
    machine.save_state(&bench.path("no/such/folder")).await.unwrap_err();
    machine.cont().await.unwrap();
    assert_eq!(guest.ask("ping").await, "pong");
    machine.kill().await.unwrap();
}

/// Copies of one saved machine run beside each other, each on its own memory and disk; here with two processors.
#[tokio::test(flavor = "multi_thread")]
async fn s22_copies_of_one_machine_live_apart() {
    let bench = Bench::new();
    let spec = MachineSpec { cpus: 2, ..bench.spec_with_disk().await };
    let (mut machine, mut guest) = bench.boot(&spec).await;
    assert_eq!(guest.ask("disk-write parent").await, "ok");
    machine.pause().await.unwrap();
    let state = bench.path("state");
    let saved = machine.save_state(&state).await.unwrap();
    let fingerprint = machine.fingerprint().clone();
    let mut clones = Vec::new();
    for name in ["left", "right"] {
        let folder = bench.path(name);
        std::fs::create_dir(&folder).unwrap();
        let since = Instant::now();
        let disk = spec.disk.clone().unwrap();
        let clone = MachineSpec {
            label: name.to_owned(),
            memory: folder.join("memory"),
            disk: Some(vmm::Disk { overlay: folder.join("disk"), ..disk.clone() }),
            outlets: vmm::Outlets {
                sockets: folder.clone(),
                console: folder.join("console"),
                log: folder.join("log"),
            },
            ..spec.clone()
        };
        let copied = vmm::files::copy_sparse(&spec.memory, &clone.memory).unwrap();
        vmm::files::copy_sparse(&disk.overlay, &folder.join("disk")).unwrap();
        println!("{name}: {copied:?} in {:?}", since.elapsed());
        assert!(copied.bytes < clone.memory_bytes());
        clones.push(clone);
    }
    machine.cont().await.unwrap();
    let mut lives = Vec::new();
    for clone in &clones {
        let slept = Duration::ZERO;
        let mut machine =
            Machine::restore(&bench.qemu, clone, &state, &saved.mark, &fingerprint, slept)
                .await
                .unwrap();
        machine.cont().await.unwrap();
        let mut guest = Guest::of(&machine);
        assert_eq!(guest.ask("disk-read").await, "parent");
        assert_eq!(guest.ask(&format!("disk-write {}", clone.label)).await, "ok");
        lives.push((clone.label.clone(), machine, guest));
    }
    lives.push(("parent".to_owned(), machine, guest));
    for (name, mut machine, mut guest) in lives {
        assert_eq!(guest.ask("disk-read").await, name);
        machine.kill().await.unwrap();
    }
}

/// QEMU that is killed in the middle of something is an error that says so, and nothing is left of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_killed_while_it_saves_or_loads_is_an_error() {
    let bench = Bench::new();
    let spec = bench.spec();
    let (mut machine, _guest) = bench.boot(&spec).await;
    machine.pause().await.unwrap();
    let state = bench.path("state");
    let fingerprint = machine.fingerprint().clone();
    // A disk that is full.
    let full = machine.save_state(std::path::Path::new("/dev/full")).await.unwrap_err();
    assert!(matches!(&full, SaveError::File(error) if error.is_full()), "{full:?}");

    // QEMU gives its state once for each time that it stands.
    let again = machine.save_state(&bench.path("again")).await.unwrap_err();
    assert!(matches!(again, SaveError::Order(OrderError::Qmp(_))), "{again:?}");
    machine.cont().await.unwrap();
    machine.pause().await.unwrap();
    signal(&machine, "KILL");
    let error = machine.save_state(&bench.path("other")).await.unwrap_err();
    let expected = ExitCause::Died(vmm::exit::Died::Signal(9));
    let SaveError::Order(OrderError::Ended(exit)) = error else { panic!("{error:?}") };
    assert_eq!(exit.cause, expected);

    // From a boot, for the memory of the first has gone on since it was last saved.
    let (mut machine, _guest) = bench.boot(&spec).await;
    machine.pause().await.unwrap();
    let mark = machine.save_state(&state).await.unwrap().mark;
    machine.quit().await.unwrap();
    // The killer strikes as soon as there is a process: somewhere between its start and the loaded state.
    let argument = vmm::Qemu::memory_argument(&spec);
    let killer = tokio::task::spawn_blocking(move || {
        loop {
            if let Some(id) = vmm::ProcessId::find(&argument).unwrap().pop() {
                let pid = rustix::process::Pid::from_raw(i32::try_from(id.pid).unwrap()).unwrap();
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
                return;
            }
        }
    });
    let no_time = Duration::ZERO;
    let error = Machine::restore(&bench.qemu, &spec, &state, &mark, &fingerprint, no_time)
        .await
        .unwrap_err();
    killer.await.unwrap();
    // So early that even its sockets were gone, or after.
    let ended = match &error {
        StartError::Ended { exit, .. } => exit.cause == expected,
        StartError::Socket { source, .. } => source.kind() == std::io::ErrorKind::ConnectionRefused,
        _ => false,
    };
    assert!(ended, "{error:?}");
    // It has not run, so its memory and state are as good as before.
    let mut machine =
        Machine::restore(&bench.qemu, &spec, &state, &mark, &fingerprint, no_time).await.unwrap();
    machine.cont().await.unwrap();
    assert_eq!(Guest::of(&machine).ask("ping").await, "pong");
    machine.kill().await.unwrap();
}

/// SIGSTOP and SIGCONT: the guest stands at once and goes on at once, its time has passed.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_process_takes_no_orders_and_goes_on_where_it_was() {
    let bench = Bench::new();
    let (mut machine, mut guest) = bench.boot(&bench.spec()).await;
    let before = clock(&guest.ask("clock").await);
    let since = Instant::now();
    let stop = machine.stop_process().await.unwrap();
    assert_eq!(machine.process_state(), ProcessState::Stopped);
    assert_eq!(machine.process().state(), ProcessState::Stopped);
    assert!(matches!(machine.pause().await, Err(OrderError::Stopped)));
    assert!(matches!(machine.quit().await, Err(OrderError::Stopped)));
    // What is sent to a stopped guest waits for it.
    guest.tell("clock").await;
    let cont = machine.continue_process().await.unwrap();
    let asked = Instant::now();
    let after = clock(&guest.read().await);
    println!("stop {stop:?}, continue {cont:?}, answer after {:?}", asked.elapsed());
    let passed = Duration::from_nanos(after.0 - before.0);
    assert!(passed.abs_diff(since.elapsed()) < Duration::from_millis(100), "{passed:?}");
    machine.pause().await.unwrap();
    machine.cont().await.unwrap();
    machine.kill().await.unwrap();
}

/// The four ways in which a machine ends by itself are told apart, in less than a quarter of a second.
#[tokio::test(flavor = "multi_thread")]
async fn s16_each_end_is_told_by_its_cause_within_a_quarter_of_a_second() {
    let bench = Bench::new();
    for (order, cause) in [
        ("poweroff", ExitCause::Poweroff),
        ("reboot", ExitCause::Reboot),
        ("panic", ExitCause::Panic),
    ] {
        let (machine, mut guest) = bench.boot(&bench.spec()).await;
        let mut watch = machine.exit_watch();
        assert_eq!(watch.exited_yet(), None);
        let since = Instant::now();
        guest.tell(order).await;
        let exit = tokio::time::timeout(STEP_MAX, watch.exited()).await.unwrap();
        let noticed = since.elapsed();
        println!("{order}: {exit:?} noticed after {noticed:?}");
        assert_eq!(exit.cause, cause);
        assert!(noticed < Duration::from_millis(250), "{order} noticed after {noticed:?}");
        assert_eq!(machine.process().state(), ProcessState::Dead);
    }
    let (mut machine, _guest) = bench.boot(&bench.spec()).await;
    let since = Instant::now();
    signal(&machine, "KILL");
    let exit = tokio::time::timeout(STEP_MAX, machine.exit_watch().exited()).await.unwrap();
    println!("killed: {exit:?} noticed after {:?}", since.elapsed());
    assert_eq!(exit.cause, ExitCause::Died(vmm::exit::Died::Signal(9)));
    assert!(since.elapsed() < Duration::from_millis(250));
    assert!(matches!(machine.stop_process().await, Err(OrderError::Ended(_))));
    // Killing what is dead is no error.
    assert_eq!(machine.kill().await.unwrap(), exit);
    // Nothing of it is left, not even a zombie.
    let pid = machine.process().pid;
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}

/// QEMU goes on without us, running or stopped, and is taken up again.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_outlives_its_owner_and_is_adopted() {
    let bench = Bench::new();
    let spec = bench.spec();
    let (machine, guest) = bench.boot(&spec).await;
    let (id, fingerprint) = (machine.process().clone(), machine.fingerprint().clone());
    drop((machine, guest));
    assert_eq!(
        vmm::ProcessId::find(&vmm::Qemu::memory_argument(&spec)).unwrap(),
        std::slice::from_ref(&id)
    );

    let (mut machine, found) = Machine::adopt(&id, &spec.outlets, &fingerprint).await.unwrap();
    assert_eq!(found, Adopted::Going(GuestState::Running));
    assert_eq!(Guest::of(&machine).ask("ping").await, "pong");
    machine.stop_process().await.unwrap();
    drop(machine);

    let (mut machine, found) = Machine::adopt(&id, &spec.outlets, &fingerprint).await.unwrap();
    assert_eq!(found, Adopted::Stopped);
    assert!(matches!(machine.pause().await, Err(OrderError::Stopped)));
    let since = Instant::now();
    machine.continue_process().await.unwrap();
    let mut guest = Guest::of(&machine);
    assert_eq!(guest.ask("ping").await, "pong");
    println!("adopted stopped, answered after {:?}", since.elapsed());
    machine.pause().await.unwrap();
    let saved = machine.save_state(&bench.path("state")).await.unwrap();
    assert!(saved.mark.bytes > 10_000);
    machine.cont().await.unwrap();

    guest.tell("poweroff").await;
    let exit = tokio::time::timeout(STEP_MAX, machine.exit_watch().exited()).await.unwrap();
    assert_eq!(exit.cause, ExitCause::Poweroff);
    drop(machine);
    Machine::adopt(&id, &spec.outlets, &fingerprint).await.unwrap_err();
}

/// Nothing that is damaged or foreign reaches QEMU, and nothing is left running.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_or_foreign_state_is_refused() {
    let bench = Bench::new();
    let spec = bench.spec();
    let (mut machine, _guest) = bench.boot(&spec).await;
    machine.pause().await.unwrap();
    let path = bench.path("state");
    let mark = machine.save_state(&path).await.unwrap().mark;
    let fingerprint = machine.fingerprint().clone();
    machine.quit().await.unwrap();
    let good = std::fs::read(&path).unwrap();

    let no_time = Duration::ZERO;
    let refuse = async |bytes: &[u8], mark: &StateMark, fingerprint: &vmm::Fingerprint| {
        std::fs::write(&path, bytes).unwrap();
        let refused = Machine::restore(&bench.qemu, &spec, &path, mark, fingerprint, no_time).await;
        assert_eq!(vmm::ProcessId::find(&vmm::Qemu::memory_argument(&spec)).unwrap(), []);
        let mut text = String::new();
        let mut cause: Option<&dyn std::error::Error> = Some(&refused.unwrap_err());
        while let Some(error) = cause {
            text.push_str(&error.to_string());
            text.push_str("; ");
            cause = error.source();
        }
        text
    };
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    assert!(refuse(&flipped, &mark, &fingerprint).await.contains("has SHA-256"));
    assert!(refuse(&good[..good.len() - 1], &mark, &fingerprint).await.contains("bytes, expected"));
    // Consistent with its mark, and yet not a stream.
    let cut = &good[..good.len() - 1];
    assert!(refuse(cut, &StateMark::of(cut), &fingerprint).await.contains("no description"));
    let garbage = [7; 4096];
    assert!(refuse(&garbage, &StateMark::of(&garbage), &fingerprint).await.contains("'QEVM'"));
    // A stream that we understand and QEMU does not: its own words are in the error.
    let mut other = good.clone();
    let at = find(&other, b"microvm").unwrap();
    other[at] = b'n';
    let text = refuse(&other, &StateMark::of(&other), &fingerprint).await;
    assert!(text.contains("qemu") && text.contains("nicrovm"), "{text}");
    let foreign = vmm::Fingerprint { qemu_version: "6.0.0".into(), ..fingerprint.clone() };
    assert!(refuse(&good, &mark, &foreign).await.contains("saved by QEMU 6.0.0"));

    // And the good one is still good.
    std::fs::write(&path, &good).unwrap();
    let mut machine =
        Machine::restore(&bench.qemu, &spec, &path, &mark, &fingerprint, no_time).await.unwrap();
    machine.cont().await.unwrap();
    assert_eq!(Guest::of(&machine).ask("ping").await, "pong");
    machine.kill().await.unwrap();
}

/// A start that cannot be says why, in QEMU's words, and leaves nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_fails_says_why() {
    let bench = Bench::new();
    let spec = bench.spec();
    let mut image = bench.image.clone();
    image.kernel = bench.path("none");
    let error = Machine::boot(&bench.qemu, &spec, &image).await.unwrap_err();
    assert!(matches!(error, StartError::Ended { .. }), "{error:?}");
    assert!(error.to_string().contains("could not open kernel file"), "{error}");
    assert_eq!(vmm::ProcessId::find(&vmm::Qemu::memory_argument(&spec)).unwrap(), []);
}

/// A guest that talks without end does not fill the disk.
#[tokio::test(flavor = "multi_thread")]
async fn the_console_is_kept_and_kept_short() {
    let bench = Bench::new();
    let spec = bench.spec();
    let (mut machine, mut guest) = bench.boot(&spec).await;
    let console = spec.outlets.console.clone();
    until("the boot's words", || {
        std::fs::read_to_string(&console).unwrap().contains("guest is up").then_some(())
    })
    .await;
    assert_eq!(guest.ask("say 20000").await, "ok");
    assert!(std::fs::metadata(&console).unwrap().len() > vmm::spec::CONSOLE_BYTES_MAX);
    machine.stop_process().await.unwrap();
    until("the cut", || {
        (std::fs::metadata(&console).unwrap().len() <= vmm::spec::CONSOLE_BYTES_KEPT).then_some(())
    })
    .await;
    machine.continue_process().await.unwrap();
    assert_eq!(guest.ask("say 1").await, "ok");
    let text = std::fs::read_to_string(&console).unwrap();
    assert!(
        text.contains("line 19999 ") && text.contains("line 0 "),
        "{}",
        &text[text.len() - 300..]
    );
    machine.kill().await.unwrap();
}

async fn wait_slept(guest: &mut Guest) -> Duration {
    let deadline = Instant::now() + STEP_MAX;
    loop {
        if let Ok(nanoseconds) = guest.ask("slept").await.parse() {
            return Duration::from_nanos(nanoseconds);
        }
        assert!(Instant::now() < deadline, "the guest's sleep did not end");
    }
}

fn clock(text: &str) -> (u64, u64) {
    let (monotonic, wall) = text.split_once(' ').unwrap();
    (monotonic.parse().unwrap(), wall.parse().unwrap())
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

fn signal(machine: &Machine, signal: &str) {
    let pid = machine.process().pid.to_string();
    assert!(
        std::process::Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success()
    );
}
