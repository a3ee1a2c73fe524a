//! What each order costs, printed; and that it does not grow with the machine.

use std::time::{Duration, Instant};

use crate::support::{Bench, Guest};
use vmm::{Machine, MachineSpec};

const ROUNDS: usize = 9;

/// Memory stays in its file, so its size does not matter: not to pause and save, nor to restore and go on.
#[tokio::test(flavor = "multi_thread")]
async fn sleep_and_wake_cost_the_same_at_any_memory_size() {
    let small = cycle(256).await;
    let large = cycle(2048).await;
    // Medians of few rounds on a busy machine differ by some tens of percent; a copy of 2 GiB would be a matter of hundreds.
    assert!(
        large < small * 2 + Duration::from_millis(20),
        "{small:?} with 256 MiB, {large:?} with 2 GiB"
    );
}

/// The median time of all orders of one sleep and wake.
async fn cycle(memory_mib: u32) -> Duration {
    let bench = Bench::new();
    let spec = MachineSpec { memory_mib, ..bench.spec_with_disk().await };
    let (mut machine, mut guest) = bench.boot(&spec).await;
    let mut table: Vec<(&str, Vec<Duration>)> = Vec::new();
    let mut note = |name, value| match table.iter_mut().find(|(other, _)| *other == name) {
        Some((_, values)) => values.push(value),
        None => table.push((name, vec![value])),
    };
    let state = bench.path("state");
    for _ in 0..ROUNDS {
        note("stop_process", machine.stop_process().await.unwrap());
        note("continue_process", machine.continue_process().await.unwrap());
        let asked = Instant::now();
        assert_eq!(guest.ask("ping").await, "pong");
        note("first answer after it", asked.elapsed());

        let since = Instant::now();
        note("pause", machine.pause().await.unwrap());
        let saved = machine.save_state(&state).await.unwrap();
        note("save: state", saved.state);
        note("save: sync", saved.sync);
        let quit = Instant::now();
        let fingerprint = machine.fingerprint().clone();
        machine.quit().await.unwrap();
        note("quit", quit.elapsed());
        machine = Machine::restore(
            &bench.qemu,
            &spec,
            &state,
            &saved.mark,
            &fingerprint,
            since.elapsed(),
        )
        .await
        .unwrap();
        let started = machine.started();
        note("restore: prepare", started.prepare);
        note("restore: spawn", started.spawn);
        note("restore: ready", started.ready);
        note("restore: load", started.load);
        note("cont", machine.cont().await.unwrap());
        note("all orders", since.elapsed());
        let asked = Instant::now();
        guest = Guest::of(&machine);
        assert_eq!(guest.ask("ping").await, "pong");
        note("first answer after that", asked.elapsed());
    }
    machine.kill().await.unwrap();
    println!("QEMU {}, {memory_mib} MiB, medians of {ROUNDS}:", bench.qemu.version());
    let mut all = Duration::ZERO;
    for (name, mut values) in table {
        values.sort();
        println!("  {name:24} {:8.2} ms", values[ROUNDS / 2].as_secs_f64() * 1e3);
        if name == "all orders" {
            all = values[ROUNDS / 2];
        }
    }
    all
}
