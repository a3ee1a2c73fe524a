//! New sandboxes: from the wish to the result of a first command.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::figure::{Figure, Parts, Phase, Series, millis, show_ms};
use super::hand::{Bare, Image};
use super::stage::{MEMORY_MIB, Stage, WEB, new_sandbox};

/// Cold boots: each takes seconds, and they differ little.
const BOOTS: usize = 3;

/// A new one may cost this much of a cold boot.
const OF_A_BOOT: f64 = 0.2;

pub(crate) fn figures(stage: &mut Stage<'_>) -> Vec<Figure> {
    eprintln!("==> cold boots");
    let boots = cold_boots(stage);
    eprintln!("==> create");
    // Before it is measured, once: the template of this size is there then, as it is for everybody but the very first.
    let mut create = Compared::default();
    let mut fork = Compared::default();
    for round in 0..stage.rounds {
        let name = format!("new{round}");
        let body = new_sandbox(&name, MEMORY_MIB);
        create.round(stage, round, &stage.plain.clone(), &|stage| {
            let begun = Instant::now();
            stage.api.call("POST", "/v1/sandboxes", &body);
            let made = Instant::now();
            stage.api.exec_true(&name);
            let (took, command) = (begun.elapsed(), made.elapsed());
            (took, stage.api.phases(&name, "running"), command)
        });
        stage.api.delete(&name);
    }
    eprintln!("==> fork of a sleeping one");
    stage.api.sleep(WEB, "disk");
    for round in 0..stage.rounds {
        let name = format!("fork{round}");
        let body: Value = json!({ "name": name });
        fork.round(stage, round, &stage.image.clone(), &|stage| {
            let begun = Instant::now();
            stage.api.call("POST", &format!("/v1/sandboxes/{WEB}/fork"), &body);
            let made = Instant::now();
            stage.api.exec_true(&name);
            let (took, command) = (begun.elapsed(), made.elapsed());
            let copied = stage.api.phases(WEB, "copied");
            (took, [copied, stage.api.phases(&name, "running")].concat(), command)
        });
        stage.api.delete(&name);
    }
    [create.figures(CREATE, &boots), fork.figures(FORK, &boots)].concat()
}

const CREATE: [&str; 2] = ["create to the first command's result", "the same beside a cold boot"];
const FORK: [&str; 2] =
    ["fork of a sleeping one to the first command's result", "the same beside a cold boot"];

/// Boots from its disk and runs the same command.
fn cold_boots(stage: &Stage<'_>) -> Series {
    let name = "cold";
    stage.api.call("POST", "/v1/sandboxes", &new_sandbox(name, MEMORY_MIB));
    let mut boots = Series::default();
    for _ in 0..BOOTS {
        let begun = Instant::now();
        stage.api.call("POST", &format!("/v1/sandboxes/{name}/restart"), &Value::Null);
        stage.api.exec_true(name);
        boots.add(begun.elapsed());
    }
    stage.api.delete(name);
    boots
}

/// How long it took, the phases of it, and how long the command alone took.
type Made = (Duration, Vec<Phase>, Duration);

#[derive(Default)]
struct Compared {
    ours: Series,
    hand: Series,
    parts: Parts,
    parts_hand: Parts,
}

impl Compared {
    fn round(
        &mut self,
        stage: &Stage<'_>,
        round: usize,
        image: &Image,
        ours: &dyn Fn(&Stage<'_>) -> Made,
    ) {
        let ((took, phases, exec), (hand, steps, exec_hand)) = if round.is_multiple_of(2) {
            let made = ours(stage);
            (made, by_hand(stage, image))
        } else {
            let hand = by_hand(stage, image);
            (ours(stage), hand)
        };
        self.ours.add(took);
        self.hand.add(hand);
        self.parts.add(took, &phases, exec);
        self.parts_hand.add(hand, &steps, exec_hand);
    }

    fn figures(self, what: [&'static str; 2], boots: &Series) -> Vec<Figure> {
        let beside_hand = Figure::ratio(what[0], &self.ours, &self.hand, 2.0)
            .with_parts(self.parts, self.parts_hand);
        let beside_boot = Figure::ratio(what[1], &self.ours, boots, OF_A_BOOT);
        let promise = format!("≤ 1/5 of a cold boot ({})", show_ms(boots.median()));
        vec![beside_hand, Figure { promise, ..beside_boot }]
    }
}

/// Copies sparsely, starts, loads, goes on, runs the same command; the whole, its steps, and the command alone.
fn by_hand(stage: &Stage<'_>, image: &Image) -> Made {
    let begun = Instant::now();
    let mut clone = image.copy(stage.lab.scratch().join("clone"));
    let copied = begun.elapsed();
    let steps = clone.wake();
    let woke = Instant::now();
    Bare::open(&image.address).order(b't');
    let (took, command) = (begun.elapsed(), woke.elapsed());
    clone.remove();
    let steps = [("copy", copied)]
        .into_iter()
        .chain(steps)
        .map(|(name, took)| (name.to_owned(), millis(took)));
    (took, steps.collect(), command)
}
