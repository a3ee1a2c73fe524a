//! Numbers: what was measured several times, what it is compared with, and whether a promise is kept.

use std::time::Duration;

use serde_json::{Value, json};

/// One measurement, repeated. Milliseconds, or whatever the figure says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series(Vec<f64>);

impl Series {
    pub(crate) fn add(&mut self, time: Duration) {
        self.0.push(millis(time));
    }

    pub(crate) fn add_ms(&mut self, ms: f64) {
        self.0.push(ms);
    }

    /// The middle one, or the mean of the two in the middle.
    pub(crate) fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        match sorted.len() {
            0 => f64::NAN,
            length if length % 2 == 1 => sorted[middle],
            _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
        }
    }

    pub(crate) fn values(&self) -> &[f64] {
        &self.0
    }
}

/// Milliseconds.
pub(crate) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// A row of the table.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) what: &'static str,
    pub(crate) promise: String,
    pub(crate) ours: Side,
    /// What it is compared with.
    pub(crate) hand: Option<Side>,
    /// The number that the promise is about.
    pub(crate) value: f64,
    /// The largest that keeps the promise; `None`: nothing is promised.
    pub(crate) at_most: Option<f64>,
    /// Where the time went, ours and by hand.
    pub(crate) parts: Option<[Parts; 2]>,
}

/// One column of a row.
#[derive(Clone, Debug)]
pub(crate) struct Side {
    pub(crate) text: String,
    pub(crate) series: Series,
}

impl Side {
    /// Times, shown as their median.
    pub(crate) fn ms(series: &Series) -> Self {
        Self { text: show_ms(series.median()), series: series.clone() }
    }

    /// A single number with its unit.
    pub(crate) fn single(text: String, value: f64) -> Self {
        Self { text, series: Series(vec![value]) }
    }
}

impl Figure {
    /// A figure that is promised to be at most `times` what it is by hand.
    pub(crate) fn ratio(what: &'static str, ours: &Series, hand: &Series, times: f64) -> Self {
        Self {
            what,
            promise: format!("≤ {times} × by hand"),
            ours: Side::ms(ours),
            hand: Some(Side::ms(hand)),
            value: ours.median() / hand.median(),
            at_most: Some(times),
            parts: None,
        }
    }

    /// Nothing is promised.
    pub(crate) fn reported(self) -> Self {
        Self { promise: "reported".to_owned(), at_most: None, ..self }
    }

    pub(crate) fn with_parts(self, ours: Parts, hand: Parts) -> Self {
        Self { parts: Some([ours, hand]), ..self }
    }

    /// A number that could not be had keeps no promise.
    pub(crate) fn holds(&self) -> bool {
        self.at_most.is_none_or(|limit| self.value <= limit)
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({
            "what": self.what,
            "promise": self.promise,
            "measured": self.ours.text,
            "measured_values": self.ours.series.values(),
            "by_hand": self.hand.as_ref().map(|hand| hand.text.clone()),
            "by_hand_values": self.hand.as_ref().map(|hand| hand.series.values()),
            "value": self.value,
            "at_most": self.at_most,
            "holds": self.holds(),
            "parts_ms": self.parts.as_ref().map(|[ours, hand]| json!({ "ours": ours.to_json(), "by_hand": hand.to_json() })),
        })
    }
}

/// A time for people: three digits at least, no more than make sense.
pub(crate) fn show_ms(ms: f64) -> String {
    if ms >= 10_000.0 {
        format!("{:.1} s", ms / 1000.0)
    } else if ms >= 100.0 {
        format!("{ms:.0} ms")
    } else if ms >= 10.0 {
        format!("{ms:.1} ms")
    } else {
        format!("{ms:.2} ms")
    }
}

/// A phase and how many milliseconds it took.
pub(crate) type Phase = (String, f64);

/// Where time went, one series per part; every round adds to all of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parts {
    total: Series,
    /// QEMU: start, load, continue, stop, save.
    qemu: Series,
    /// The guest agent.
    agent: Series,
    /// The guest's work on the request, or the command.
    request: Series,
    /// Copies, syncs, publishing.
    files: Series,
    /// The rest: what whoever does it adds.
    rest: Series,
    /// Phases, as the timeline has them.
    phases: Vec<(String, Series)>,
}

/// Which part each phase of the timeline belongs to.
const QEMU: [&str; 12] = [
    "spawn", "ready", "load", "restore", "cont", "pause", "save", "stop", "continue", "quit",
    "end", "start",
];
const AGENT: [&str; 6] = ["attach", "flush", "guest", "back", "boot", "sample"];
const FILES: [&str; 7] = ["prepare", "early", "copy", "template", "sync", "publish", "remove"];

impl Parts {
    /// Adds one round: its whole time, the phases that the timeline tells of it, and the guest's work on the request.
    pub(crate) fn add(&mut self, total: Duration, phases: &[Phase], request: Duration) {
        let sum = |names: &[&str]| -> f64 {
            phases.iter().filter(|(name, _)| names.contains(&name.as_str())).map(|(_, ms)| ms).sum()
        };
        let (qemu, agent, files) = (sum(&QEMU), sum(&AGENT), sum(&FILES));
        self.total.add(total);
        self.qemu.add_ms(qemu);
        self.agent.add_ms(agent);
        self.request.add(request);
        self.files.add_ms(files);
        self.rest.add_ms(millis(total) - qemu - agent - millis(request) - files);
        for (name, ms) in phases {
            let at = self.phases.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
                self.phases.push((name.clone(), Series::default()));
                self.phases.len() - 1
            });
            self.phases[at].1.add_ms(*ms);
        }
    }

    /// Medians: total, QEMU, guest agent, request, files, rest.
    pub(crate) fn medians(&self) -> [f64; 6] {
        [&self.total, &self.qemu, &self.agent, &self.request, &self.files, &self.rest]
            .map(Series::median)
    }

    /// Medians of the phases of the timeline.
    pub(crate) fn phases(&self) -> impl Iterator<Item = (&str, f64)> {
        self.phases.iter().map(|(name, series)| (name.as_str(), series.median()))
    }

    fn to_json(&self) -> Value {
        let [total, qemu, agent, request, files, rest] = self.medians();
        let phases: serde_json::Map<_, _> =
            self.phases().map(|(name, ms)| (name.to_owned(), json!(ms))).collect();
        json!({
            "total": total, "qemu": qemu, "agent": agent, "request": request, "files": files, "rest": rest, "phases": phases
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(values: &[f64]) -> Series {
        Series(values.to_vec())
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(series(&[9.0, 1.0, 5.0]).median().to_bits(), 5.0_f64.to_bits());
        assert_eq!(series(&[9.0, 1.0, 5.0, 3.0]).median().to_bits(), 4.0_f64.to_bits());
    }

    #[test]
    fn a_promise_is_kept_up_to_its_limit_and_never_by_no_number() {
        let figure = |ours, hand| Figure::ratio("x", &series(&[ours]), &series(&[hand]), 1.5);
        assert!(figure(15.0, 10.0).holds());
        assert!(!figure(15.1, 10.0).holds());
        assert!(!Figure::ratio("x", &Series::default(), &series(&[1.0]), 1.5).holds());
        assert!(figure(15.1, 10.0).reported().holds());
    }

    #[test]
    fn parts_sum_up_to_the_total() {
        let mut parts = Parts::default();
        let phases =
            [("restore", 30.0), ("publish", 5.0), ("guest", 10.0), ("never heard of", 1.0)];
        let phases = phases.map(|(name, ms)| (name.to_owned(), ms));
        parts.add(Duration::from_millis(100), &phases, Duration::from_millis(40));
        let [total, qemu, agent, request, files, rest] = parts.medians();
        assert!((total - qemu - agent - request - files - rest).abs() < 1e-9);
        assert!((rest - 15.0).abs() < 1e-9, "{rest}");
    }
}
