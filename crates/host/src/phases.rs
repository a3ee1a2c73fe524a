//! How long each step of an order took: measured as one stretch of time cut into pieces, so that the pieces sum up.

use std::time::Instant;

use serde_json::{Map, Value, json};

/// Steps of one order, in order.
#[derive(Clone, Debug)]
pub(crate) struct Phases {
    begun: Instant,
    last: Instant,
    steps: Vec<(&'static str, f64)>,
}

impl Phases {
    /// Begins now.
    pub(crate) fn begin() -> Self {
        let now = Instant::now();
        Self { begun: now, last: now, steps: Vec::new() }
    }

    /// Everything since the last mark was this step.
    pub(crate) fn mark(&mut self, step: &'static str) {
        let now = Instant::now();
        self.steps.push((step, millis(now.duration_since(self.last))));
        self.last = now;
    }

    /// Milliseconds from the beginning to the last mark.
    pub(crate) fn total_ms(&self) -> f64 {
        millis(self.last.duration_since(self.begun))
    }

    /// `phases_ms` and `total_ms`, for the timeline. Steps of the same name are added up.
    pub(crate) fn to_data(&self) -> Map<String, Value> {
        let mut steps = Map::new();
        for (name, ms) in &self.steps {
            let before = steps.get(*name).and_then(Value::as_f64).unwrap_or(0.0);
            steps.insert((*name).to_owned(), json!(round(before + ms)));
        }
        let mut data = Map::new();
        data.insert("phases_ms".to_owned(), Value::Object(steps));
        data.insert("total_ms".to_owned(), json!(round(self.total_ms())));
        data
    }
}

fn millis(time: std::time::Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// To microseconds: more digits would pretend.
fn round(ms: f64) -> f64 {
    (ms * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_sum_up_to_the_total() {
        let mut phases = Phases::begin();
        for step in ["spawn", "load", "spawn", "guest"] {
            phases.mark(step);
        }
        let data = phases.to_data();
        let sum: f64 =
            data["phases_ms"].as_object().expect("steps").values().filter_map(Value::as_f64).sum();
        assert!((sum - phases.total_ms()).abs() < 0.01, "{data:?}");
        assert_eq!(data["phases_ms"].as_object().map(Map::len), Some(3));
    }
}
