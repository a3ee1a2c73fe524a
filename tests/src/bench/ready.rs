//! New sandboxes where a copy lies ready: from the wish to the result of a first command.

use std::time::Instant;

use serde_json::Value;

use super::Options;
use super::figure::{Figure, Parts, Series};
use super::hand::Bare;
use super::stage::{MEMORY_MIB, Stage, new_sandbox};
use crate::lab::POOL;
use crate::{Lab, until};

/// Copies that lie ready once a size other than the usual one is asked for: one of each.
const READY: &str = "dormouse_ready_copies 2\n";

pub(crate) fn figures(options: &Options) -> Vec<Figure> {
    let mut lab = Lab::new("ready");
    lab.daemon_env.push((POOL.to_owned(), "1".to_owned()));
    lab.start();
    let mut stage = Stage::set(&mut lab, options);
    eprintln!("==> create where a copy lies ready");
    let figures = measure(&mut stage);
    stage.clear();
    lab.tear_down();
    figures
}

fn measure(stage: &mut Stage<'_>) -> Vec<Figure> {
    // From then on copies of this size are kept ready too.
    create(stage, "first");
    stage.api.delete("first");
    let (mut ours, mut hand) = (Series::default(), Series::default());
    let (mut parts, mut parts_hand) = (Parts::default(), Parts::default());
    for round in 0..stage.rounds {
        until("a copy lies ready", || stage.api.text("/metrics").contains(READY).then_some(()));
        let name = format!("ready{round}");
        let mut by_us = |stage: &mut Stage<'_>| {
            let begun = Instant::now();
            create(stage, &name);
            let made = Instant::now();
            stage.api.exec_true(&name);
            let (took, command) = (begun.elapsed(), made.elapsed());
            ours.add(took);
            let phases = stage.api.phases(&name, "running");
            assert!(phases.iter().any(|(phase, _)| phase == "continue"), "claimed: {phases:?}");
            parts.add(took, &phases, command);
        };
        let mut by_hand = |stage: &mut Stage<'_>| {
            let mut clone = stage.plain.copy(stage.lab.scratch().join("clone"));
            clone.wake();
            Bare::open(&stage.plain.address).order(b't');
            clone.stop();
            let begun = Instant::now();
            clone.go_on();
            Bare::open(&stage.plain.address).order(b't');
            let took = begun.elapsed();
            hand.add(took);
            parts_hand.add(took, &[], took);
            clone.remove();
        };
        if round.is_multiple_of(2) {
            by_us(stage);
            by_hand(stage);
        } else {
            by_hand(stage);
            by_us(stage);
        }
        stage.api.delete(&name);
    }
    let what = "create to the first command's result, where a copy lies ready";
    let figure = Figure::ratio(what, &ours, &hand, 1.5);
    let promise = "≤ 1.5 × SIGCONT by hand and the same command".to_owned();
    vec![Figure { promise, ..figure.with_parts(parts, parts_hand) }]
}

fn create(stage: &Stage<'_>, name: &str) -> Value {
    stage.api.call("POST", "/v1/sandboxes", &new_sandbox(name, MEMORY_MIB))
}
