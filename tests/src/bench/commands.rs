//! What an awake sandbox costs: a command, and a request at the edge.

use std::time::Instant;

use super::figure::{Figure, Series};
use super::hand::Bare;
use super::request::Target;
use super::stage::{COUNTER_PORT, Stage, WEB};

/// Commands and requests per round: they are short, and more of them cost nothing.
const EACH: usize = 5;

/// Both sides in the very same guest.
pub(crate) fn figures(stage: &mut Stage<'_>) -> Vec<Figure> {
    eprintln!("==> an awake sandbox");
    // Wakes it.
    stage.api.exec_true(WEB);
    let mut bare = Bare::open(&stage.address);
    bare.order(b't');
    let direct = Target::direct(&stage.address, COUNTER_PORT);
    let (mut exec, mut exec_hand) = (Series::default(), Series::default());
    let (mut edge, mut edge_hand) = (Series::default(), Series::default());
    for round in 0..stage.rounds * EACH {
        let mut steps: [&mut dyn FnMut(); 4] = [
            &mut || exec.add(timed(|| stage.api.exec_true(WEB))),
            &mut || exec_hand.add(timed(|| bare.order(b't'))),
            &mut || edge.add(stage.link.ask().0),
            &mut || edge_hand.add(direct.ask().0),
        ];
        if round % 2 == 1 {
            steps.reverse();
        }
        for step in steps {
            step();
        }
    }
    vec![
        Figure::ratio("`/bin/true` in an awake sandbox", &exec, &exec_hand, 2.0),
        Figure::ratio("request at the edge to an awake sandbox", &edge, &edge_hand, f64::NAN)
            .reported(),
    ]
}

fn timed(work: impl FnOnce()) -> std::time::Duration {
    let begun = Instant::now();
    work();
    begun.elapsed()
}
