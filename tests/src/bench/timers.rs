//! How late programs' own timers fire when their sandbox sleeps until shortly before, from both tiers.
//!
//! A program in the guest notes by the guest's own wall clock how late each of its sleeps ended. The timeline must tell as many
//! wakes by timers.

use serde_json::json;

use super::Options;
use super::api::Api;
use super::figure::{Figure, Series, Side, show_ms};
use super::stage::new_sandbox;
use crate::{Lab, until};

/// Timers of each tier; each takes as many seconds as [`EVERY_SECONDS`].
const TIMERS: usize = 7;
/// The same for `--quick`.
const TIMERS_QUICK: usize = 3;
/// Seconds of a timer: a sandbox stays awake for one that is due within five, and falls asleep a second after the last.
const EVERY_SECONDS: u32 = 9;
/// Milliseconds that the middle one may be late.
const MEDIAN_MS_MOST: f64 = 50.0;
/// Milliseconds that the latest may be.
const WORST_MS_MOST: f64 = 500.0;

/// Arguments: how many, and seconds of each.
const PROGRAM: &str = r"
import sys, time
count, every = int(sys.argv[1]), float(sys.argv[2])
out = open('/work/late', 'w')
for n in range(count):
    due = time.time() + every
    time.sleep(every)
    out.write('%.3f\n' % ((time.time() - due) * 1000)); out.flush()
out.write('end\n'); out.flush()
";

pub(crate) fn figures(options: &Options) -> Vec<Figure> {
    eprintln!("==> timers of sleepers");
    let mut lab = Lab::new("timers");
    lab.start();
    let api = Api::of(&lab);
    let count = if options.quick { TIMERS_QUICK } else { TIMERS };
    for (tier, seconds) in [("memory", 3600), ("disk", 0)] {
        let mut body = new_sandbox(tier, super::stage::MEMORY_MIB);
        body["sleep_after_seconds"] = json!(1);
        body["memory_tier_seconds"] = json!(seconds);
        api.call("POST", "/v1/sandboxes", &body);
        lab.write_file(tier, "/work/timers.py", PROGRAM);
        let (count, every) = (count.to_string(), EVERY_SECONDS.to_string());
        let line = ["exec", tier, "--background", "--", "python3", "/work/timers.py"];
        lab.ok(&[line.as_slice(), &[count.as_str(), every.as_str()]].concat());
    }
    let mut late = Series::default();
    let mut wakes = 0;
    for tier in ["memory", "disk"] {
        // Each wakes by itself until it has nothing left to wait for; asked before, it would be woken by that.
        until("its last timer has fired", || {
            (lab.events(tier, "woke").len() >= count && lab.view(tier)["status"] == "sleeping")
                .then_some(())
        });
        let woke = lab.events(tier, "woke");
        wakes += woke.iter().filter(|event| event["data"]["cause"] == "timer").count();
        let text = lab.sh(tier, "cat /work/late");
        assert!(text.ends_with("end"), "{tier}: it is not done: {text}");
        text.lines().take(count).for_each(|ms| late.add_ms(ms.parse().expect("milliseconds")));
    }
    assert_eq!(wakes, 2 * count, "each timer woke its sandbox");
    lab.tear_down();
    let worst = late.values().iter().copied().fold(f64::NAN, f64::max);
    let row = |what, promise: f64, value| Figure {
        what,
        promise: format!("≤ {promise} ms"),
        ours: Side { text: show_ms(value), series: late.clone() },
        hand: None,
        value,
        at_most: Some(promise),
        parts: None,
    };
    vec![
        row(
            "timers of sleepers in both tiers: how late, the middle one",
            MEDIAN_MS_MOST,
            late.median(),
        ),
        row("timers of sleepers in both tiers: how late, the latest", WORST_MS_MOST, worst),
    ]
}
