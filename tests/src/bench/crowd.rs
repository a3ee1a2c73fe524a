//! Fifty sleepers that are asked for at once: beside what one costs the processors, and who is served first.

use std::net::TcpStream;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::Options;
use super::api::Api;
use super::figure::{Figure, Series, Side, show_ms};
use super::request::{Target, counted};
use super::sleepers::{Random, cpu_seconds, multiply, name, own_copies, put_to_rest};
use super::stage::{MEMORY_MIB, WEB, with_counter};
use crate::{Lab, proc, until};

/// How many.
const CROWD: usize = 50;
/// The same for `--quick`.
const CROWD_QUICK: usize = 10;
/// How far apart they are asked for: each is heard of before the next is, also by a daemon whose processors are busy.
const APART: Duration = Duration::from_millis(5);
/// Woken alone, to know what one costs.
const SINGLE: usize = 5;
/// Beside the processors' time of so many.
const TIMES_MOST: f64 = 1.3;

pub(crate) fn figures(options: &Options) -> Vec<Figure> {
    let crowd = if options.quick { CROWD_QUICK } else { CROWD };
    eprintln!("==> {crowd} sleepers woken at once");
    let mut lab = Lab::new("crowd");
    lab.start();
    let api = Api::of(&lab);
    with_counter(&lab, &api, &options.bare, WEB, MEMORY_MIB);
    Target::link(&api.link(WEB)).count();
    put_to_rest(&lab, &api);
    lab.stop_daemon();
    let count = u32::try_from(crowd + SINGLE).expect("few");
    let folders = multiply(&lab, count, &mut Random(options.seed));
    for folder in &folders {
        own_copies(folder);
    }
    lab.start();
    let daemon = lab.daemon_pid();

    let mut cpu_of_one = Series::default();
    for (n, folder) in folders.iter().enumerate().take(SINGLE) {
        let before = cpu_seconds(daemon);
        Target::link(&api.link(&name(n))).count();
        let qemu: f64 = proc::qemus_below(folder).into_iter().map(cpu_seconds).sum();
        cpu_of_one.add(Duration::from_secs_f64(cpu_seconds(daemon) - before + qemu));
        api.delete(&name(n));
    }

    let targets: Vec<Target> =
        (SINGLE..folders.len()).map(|n| Target::link(&api.link(&name(n)))).collect();
    let served = Mutex::new(Vec::new());
    let of_qemu =
        |n: usize| proc::qemus_below(&folders[n]).into_iter().map(cpu_seconds).sum::<f64>();
    let of_daemon = cpu_seconds(daemon);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for (place, target) in targets.iter().enumerate() {
            // So far apart that they arrive in this order.
            #[expect(
                clippy::disallowed_methods,
                reason = "the time between them is what is meant"
            )]
            std::thread::sleep(APART);
            let stream = TcpStream::connect(target.server).expect("connects");
            let stream = target.send(stream);
            let (served, of_qemu) = (&served, &of_qemu);
            scope.spawn(move || {
                counted(stream);
                let until_answered = of_qemu(SINGLE + place);
                served.lock().expect("not poisoned").push((place, until_answered));
            });
        }
    });
    let took = begun.elapsed();
    let served = served.into_inner().expect("not poisoned");
    let of_daemon = cpu_seconds(daemon) - of_daemon;
    let of_all: f64 = (SINGLE..folders.len()).map(of_qemu).sum();
    let until_answered: f64 = served.iter().map(|(_, seconds)| seconds).sum();
    eprintln!(
        "    processors' time: {of_daemon:.2} s of the daemon, {until_answered:.2} s of QEMUs until their answers, {:.2} s after",
        of_all - until_answered
    );
    let served: Vec<usize> = served.into_iter().map(|(place, _)| place).collect();
    let overtaken = served.iter().enumerate().map(|(at, place)| at.abs_diff(*place)).max();
    until("all run", || {
        (SINGLE..folders.len())
            .all(|n| api.get(&format!("/v1/sandboxes/{}", name(n)))["status"] == "running")
            .then_some(())
    });
    for n in SINGLE..folders.len() {
        api.delete(&name(n));
    }
    lab.tear_down();

    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let shares = crowd as f64 / processors as f64;
    let least = cpu_of_one.median() * shares;
    let value = took.as_secs_f64() * 1000.0 / least;
    let row = Figure {
        what: "sleepers on disk woken at once, until the last has answered",
        promise: format!("≤ {TIMES_MOST} × the processors' time of {crowd}"),
        ours: Side::single(show_ms(took.as_secs_f64() * 1000.0), took.as_secs_f64() * 1000.0),
        hand: Some(Side::single(show_ms(least), least)),
        value,
        at_most: Some(TIMES_MOST),
        parts: None,
    };
    let places = overtaken.unwrap_or_default();
    let order = Figure {
        what: "the same: how far any was served from its place in the order of arrival",
        promise: "reported".to_owned(),
        ours: Side { text: format!("{places} places of {crowd}"), series: Series::default() },
        hand: None,
        value: 0.0,
        at_most: None,
        parts: None,
    };
    vec![row, order]
}
