//! Waking: from a request to the first byte of its answer.

use std::time::{Duration, Instant};

use super::figure::{Figure, Parts, Phase, Series, millis};
use super::hand::Bare;
use super::request::Target;
use super::stage::{BIG_MIB, Stage, WEB, address};
use super::wire::Wire;

/// The sandbox with much memory.
const BIG: &str = "big";

pub(crate) fn figures(stage: &mut Stage<'_>) -> Vec<Figure> {
    let mut figures = from_disk(stage);
    figures.push(from_memory(stage));
    figures
}

/// Ours by a request at the edge; by hand: start QEMU, load, go on, the same request to the guest's address. Whoever is not
/// measured sleeps.
fn from_disk(stage: &mut Stage<'_>) -> Vec<Figure> {
    eprintln!("==> wake from disk");
    let big = stage.another(BIG, BIG_MIB);
    let mut web = Ours::new(stage, WEB, "disk", stage.link.clone());
    let mut big = Ours::new(stage, BIG, "disk", big);
    let mut hand = ByHand::new(stage);
    for round in 0..stage.rounds {
        if round.is_multiple_of(2) {
            web.round(stage);
            hand.disk_round(stage);
        } else {
            hand.disk_round(stage);
            web.round(stage);
        }
        big.round(stage);
    }
    stage.api.delete(BIG);
    let size = Figure::ratio(
        "the same for a 4 GiB guest beside one of 256 MiB",
        &big.times,
        &web.times,
        1.3,
    );
    let size = Figure { promise: "≤ 1.3 × that of 256 MiB".to_owned(), ..size };
    let size = size.with_parts(big.parts, web.parts.clone());
    let ratio = Figure::ratio(
        "wake from `disk`, request at the edge to first byte",
        &web.times,
        &hand.times,
        1.5,
    );
    vec![ratio.with_parts(web.parts, hand.parts), size]
}

/// Ours by a request at the edge; by hand: a signal, the same request to the guest's address.
fn from_memory(stage: &mut Stage<'_>) -> Figure {
    eprintln!("==> wake from memory");
    let mut web = Ours::new(stage, WEB, "memory", stage.link.clone());
    stage.hand.wake();
    let mut hand = ByHand::new(stage);
    hand.counter.count();
    stage.hand.stop();
    for round in 0..stage.rounds {
        if round.is_multiple_of(2) {
            web.round(stage);
            hand.memory_round(stage);
        } else {
            hand.memory_round(stage);
            web.round(stage);
        }
    }
    stage.hand.go_on();
    stage.hand.sleep(&mut Bare::open(&stage.hand_address));
    let ratio = Figure::ratio(
        "wake from `memory`, request at the edge to first byte",
        &web.times,
        &hand.times,
        1.5,
    );
    ratio.with_parts(web.parts, hand.parts)
}

/// A sandbox of ours that sleeps in some tier between two measurements.
struct Ours {
    name: &'static str,
    tier: &'static str,
    link: Target,
    visits: Option<u64>,
    address: String,
    times: Series,
    parts: Parts,
}

impl Ours {
    fn new(stage: &Stage<'_>, name: &'static str, tier: &'static str, link: Target) -> Self {
        // Awake first: from one tier to the other is another way to sleep.
        stage.api.exec_true(name);
        stage.api.sleep(name, tier);
        let (address, times, parts) =
            (address(&stage.api, name), Series::default(), Parts::default());
        Self { name, tier, link, visits: None, address, times, parts }
    }

    #[track_caller]
    fn round(&mut self, stage: &Stage<'_>) {
        let wire = Wire::watch();
        let (took, count) = self.link.count();
        let answered = wire.answered(&self.address);
        expect_next(&mut self.visits, count);
        self.times.add(took);
        self.parts.add(took, &stage.api.phases(self.name, "woke"), answered);
        stage.api.sleep(self.name, self.tier);
    }
}

/// The machine that is run by hand, likewise.
struct ByHand {
    counter: Target,
    address: String,
    visits: Option<u64>,
    times: Series,
    parts: Parts,
}

impl ByHand {
    fn new(stage: &Stage<'_>) -> Self {
        let (times, parts) = (Series::default(), Parts::default());
        Self {
            counter: stage.hand_counter(),
            address: stage.hand_address.clone(),
            visits: None,
            times,
            parts,
        }
    }

    #[track_caller]
    fn disk_round(&mut self, stage: &mut Stage<'_>) {
        let (wire, begun) = (Wire::watch(), Instant::now());
        let steps = stage.hand.wake().map(|(name, took)| (name.to_owned(), millis(took)));
        self.ask(begun.elapsed(), &steps, wire);
        stage.hand.sleep(&mut Bare::open(&stage.hand_address));
    }

    #[track_caller]
    fn memory_round(&mut self, stage: &Stage<'_>) {
        let (wire, begun) = (Wire::watch(), Instant::now());
        stage.hand.go_on();
        self.ask(begun.elapsed(), &[], wire);
        stage.hand.stop();
    }

    #[track_caller]
    fn ask(&mut self, woke: Duration, steps: &[Phase], wire: Wire) {
        let (request, count) = self.counter.count();
        expect_next(&mut self.visits, count);
        self.times.add(woke + request);
        self.parts.add(woke + request, steps, wire.answered(&self.address));
    }
}

/// A counter counts on: otherwise something else than a wake was measured.
#[track_caller]
fn expect_next(visits: &mut Option<u64>, count: u64) {
    if let Some(before) = visits.replace(count) {
        assert_eq!(count, before + 1, "another memory answered");
    }
}
