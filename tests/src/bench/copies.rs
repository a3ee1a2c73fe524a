//! Copies of a running sandbox: how long it stands still for one, and whether the hundredth is as fast as the first.

use std::time::Instant;

use serde_json::{Value, json};

use super::figure::{Figure, Series};
use super::sleep::{Ticks, wake_and_work};
use super::stage::{Stage, WEB};

/// Snapshots in the chain.
const CHAIN: usize = 100;
/// The same for a few rounds.
const CHAIN_SHORT: usize = 10;
/// Rounds from which on the chain is a long one.
const ROUNDS_LONG: usize = 7;
/// The first and the last so many are compared.
const ENDS: usize = 5;

pub(crate) fn figures(stage: &mut Stage<'_>) -> Vec<Figure> {
    eprintln!("==> fork of a running one");
    let (mut pause, mut pause_hand) = (Series::default(), Series::default());
    for round in 0..stage.rounds {
        let name = format!("copy{round}");
        let mut by_us = |stage: &mut Stage<'_>| {
            wake_and_work(&stage.address);
            let ticks = Ticks::begin(&stage.address);
            let begun = Instant::now();
            let body: Value = json!({ "name": name });
            stage.api.call("POST", &format!("/v1/sandboxes/{WEB}/fork"), &body);
            pause.add(ticks.longest_gap_after(begun));
            stage.api.delete(&name);
        };
        let mut by_hand = |stage: &mut Stage<'_>| {
            stage.hand.wake();
            wake_and_work(&stage.hand_address);
            let ticks = Ticks::begin(&stage.hand_address);
            let begun = Instant::now();
            stage.hand.copy_running(&stage.lab.scratch().join("running"));
            pause_hand.add(ticks.longest_gap_after(begun));
            stage.hand.end();
        };
        if round.is_multiple_of(2) {
            by_us(stage);
            by_hand(stage);
        } else {
            by_hand(stage);
            by_us(stage);
        }
    }
    let figure =
        Figure::ratio("fork of a running one: how long it stands still", &pause, &pause_hand, 2.0);
    vec![figure, chain(stage)]
}

/// A snapshot, a sandbox made from it, a snapshot of that, and so on: how long each takes to be taken.
fn chain(stage: &Stage<'_>) -> Figure {
    let length = if stage.rounds < ROUNDS_LONG { CHAIN_SHORT } else { CHAIN };
    eprintln!("==> a chain of {length} snapshots");
    let mut took = Vec::new();
    let mut of = WEB.to_owned();
    for n in 0..length {
        let snapshot = format!("link{n}");
        let begun = Instant::now();
        let body: Value = json!({ "name": snapshot });
        stage.api.call("POST", &format!("/v1/sandboxes/{of}/snapshots"), &body);
        took.push(begun.elapsed());
        if of != WEB {
            stage.api.delete(&of);
        }
        of = format!("chain{n}");
        let body = json!({ "name": of, "snapshot": snapshot, "sleep_after_seconds": null });
        stage.api.call("POST", "/v1/sandboxes", &body);
        stage.api.exec_true(&of);
        stage.api.call("DELETE", &format!("/v1/snapshots/{snapshot}"), &Value::Null);
    }
    stage.api.delete(&of);
    let (mut first, mut last) = (Series::default(), Series::default());
    took.iter().take(ENDS).for_each(|time| first.add(*time));
    took.iter().rev().take(ENDS).for_each(|time| last.add(*time));
    let figure = Figure::ratio(
        "a chain of snapshots, each of a sandbox made from the one before: the last ones",
        &last,
        &first,
        1.5,
    );
    Figure { promise: format!("≤ 1.5 × the first ones, of {length}"), ..figure }
}
