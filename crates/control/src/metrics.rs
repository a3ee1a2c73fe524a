//! Figures for a Prometheus server: counted from the timelines and the answers, or looked at when asked for.
//!
//! What happens to sandboxes is counted from the journal of events, so a metric and a timeline cannot disagree. Labels take only
//! values that this program knows: no names, no ids, nothing that a client or guest chooses.

use std::sync::Mutex;
use std::time::Duration;

use api::Event;
use api::sandbox::{Sandbox, SleepTier, Status};
use api::usage::Usage;
use axum::http::StatusCode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use serde_json::Value;

/// Upper bounds of the buckets for times of orders and their phases, seconds: from a wake in memory to a slow disk's sleep.
const ORDER_BUCKETS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];
/// Upper bounds for the time until an answer through a link begins, seconds.
const ANSWER_BUCKETS: [f64; 12] =
    [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 600.0];

/// Type of the text.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CauseLabels {
    cause: String,
    tier: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OrderLabels {
    order: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabels {
    order: &'static str,
    phase: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    what: &'static str,
    code: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    status: &'static str,
    tier: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AnswerLabels {
    face: &'static str,
    status: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorLabels {
    face: &'static str,
    code: String,
}

/// Who was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Face {
    /// A port of a sandbox.
    Edge,
    /// The interface.
    Api,
}

impl Face {
    fn as_str(self) -> &'static str {
        match self {
            Self::Edge => "edge",
            Self::Api => "api",
        }
    }
}

type Times<L> = Family<L, Histogram, fn() -> Histogram>;

/// See the module.
pub(crate) struct Metrics {
    registry: Registry,
    made: Family<OrderLabels, Counter>,
    wakes: Family<CauseLabels, Counter>,
    sleeps: Family<CauseLabels, Counter>,
    failures: Family<FailureLabels, Counter>,
    orders: Times<OrderLabels>,
    phases: Times<PhaseLabels>,
    answers: Family<AnswerLabels, Counter>,
    answer_times: Histogram,
    errors: Family<ErrorLabels, Counter>,
    events_lost: Counter,
    sandboxes: Family<StateLabels, Gauge>,
    awake_connections: Gauge,
    ready_copies: Gauge,
    state_bytes: Gauge,
    awake_seconds: Counter<f64, std::sync::atomic::AtomicU64>,
    cpu_seconds: Counter<f64, std::sync::atomic::AtomicU64>,
    /// Held while looked-at figures are brought up to date and written: two who ask must not mix theirs.
    asking: Mutex<()>,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let times: fn() -> Histogram = || Histogram::new(ORDER_BUCKETS);
        let mut metrics = Self {
            registry: Registry::with_prefix("dormouse"),
            made: Family::default(),
            wakes: Family::default(),
            sleeps: Family::default(),
            failures: Family::default(),
            orders: Family::new_with_constructor(times),
            phases: Family::new_with_constructor(times),
            answers: Family::default(),
            answer_times: Histogram::new(ANSWER_BUCKETS),
            errors: Family::default(),
            events_lost: Counter::default(),
            sandboxes: Family::default(),
            awake_connections: Gauge::default(),
            ready_copies: Gauge::default(),
            state_bytes: Gauge::default(),
            awake_seconds: Counter::default(),
            cpu_seconds: Counter::default(),
            asking: Mutex::new(()),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let Self { registry, .. } = self;
        registry.register("starts", "Sandboxes that began to run, by how", self.made.clone());
        registry.register(
            "wakes",
            "Wakes, by cause and by the tier they came from",
            self.wakes.clone(),
        );
        registry.register("sleeps", "Sleeps, by cause and tier", self.sleeps.clone());
        registry.register(
            "failures",
            "What failed or ended by itself (stopped), by what and code",
            self.failures.clone(),
        );
        registry.register_with_unit(
            "order",
            "Time of orders (start, sleep, wake, demote, copy), begin to end",
            Unit::Seconds,
            self.orders.clone(),
        );
        registry.register_with_unit(
            "phase",
            "Time of each phase of an order",
            Unit::Seconds,
            self.phases.clone(),
        );
        registry.register(
            "answers",
            "Answers, by face (api, edge) and status",
            self.answers.clone(),
        );
        registry.register_with_unit(
            "edge_answer",
            "Time from a request through a link to the head of its answer, wakes included",
            Unit::Seconds,
            self.answer_times.clone(),
        );
        registry.register(
            "errors",
            "Errors that were answered, by face and code",
            self.errors.clone(),
        );
        registry.register(
            "events_lost",
            "Events that the figures above do not have, because too many came at once",
            self.events_lost.clone(),
        );
        registry.register("sandboxes", "Sandboxes, by status and tier", self.sandboxes.clone());
        registry.register(
            "awake_connections",
            "Open connections to awake ports",
            self.awake_connections.clone(),
        );
        registry.register(
            "ready_copies",
            "Copies that lie ready to become sandboxes",
            self.ready_copies.clone(),
        );
        registry.register_with_unit(
            "state",
            "What all sandboxes keep on the host's disk",
            Unit::Bytes,
            self.state_bytes.clone(),
        );
        registry.register_with_unit(
            "awake",
            "Time awake of all sandboxes together, deleted ones too",
            Unit::Seconds,
            self.awake_seconds.clone(),
        );
        registry.register_with_unit(
            "cpu",
            "Processor time of all sandboxes' own programs together, deleted ones too",
            Unit::Seconds,
            self.cpu_seconds.clone(),
        );
    }

    /// Something happened to a sandbox.
    pub(crate) fn event(&self, event: &Event) {
        let kind = event.kind.strip_prefix("sandbox.").unwrap_or_default();
        let order = match kind {
            "running" | "restarted" => "start",
            "slept" => "sleep",
            "woke" => "wake",
            "demoted" => "demote",
            "copied" => "copy",
            _ => return self.failure(kind, event),
        };
        match kind {
            "running" => self.made.get_or_create(&OrderLabels { order: "create" }).inc(),
            "restarted" => self.made.get_or_create(&OrderLabels { order: "boot" }).inc(),
            "slept" => self.sleeps.get_or_create(&cause(event)).inc(),
            "woke" => self.wakes.get_or_create(&cause(event)).inc(),
            _ => 0,
        };
        if let Some(total) = event.data.get("total_ms").and_then(Value::as_f64) {
            self.orders.get_or_create(&OrderLabels { order }).observe(total / 1000.0);
        }
        let phases = event.data.get("phases_ms").and_then(Value::as_object);
        for (phase, ms) in phases.into_iter().flatten() {
            let labels = PhaseLabels { order, phase: phase.clone() };
            self.phases.get_or_create(&labels).observe(ms.as_f64().unwrap_or(0.0) / 1000.0);
        }
    }

    fn failure(&self, kind: &str, event: &Event) {
        let known = ["failed", "stopped", "wake_failed", "sleep_failed", "demote_failed"];
        if let Some(what) = known.into_iter().find(|what| *what == kind) {
            let labels = FailureLabels { what, code: text(event, "code") };
            self.failures.get_or_create(&labels).inc();
        }
    }

    /// Events were not heard of.
    pub(crate) fn lost(&self, events: u64) {
        self.events_lost.inc_by(events);
    }

    /// A request was answered.
    pub(crate) fn answered(
        &self,
        face: Face,
        status: StatusCode,
        error: Option<api::Code>,
        after: Duration,
    ) {
        let face_word = face.as_str();
        let labels = AnswerLabels { face: face_word, status: status.as_u16().to_string() };
        self.answers.get_or_create(&labels).inc();
        if face == Face::Edge {
            self.answer_times.observe(after.as_secs_f64());
        }
        if let Some(code) = error {
            let code = serde_json::to_value(code).ok();
            let code = code.as_ref().and_then(Value::as_str).unwrap_or_default().to_owned();
            self.errors.get_or_create(&ErrorLabels { face: face_word, code }).inc();
        }
    }

    /// The text, with what is looked at brought up to date.
    pub(crate) fn text(
        &self,
        sandboxes: &[Sandbox],
        used: &Usage,
        ready_copies: usize,
    ) -> Result<String, std::fmt::Error> {
        let _alone = self.asking.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // All there can be: one that has gone must be seen to be zero.
        for status in [Status::Starting, Status::Running, Status::Sleeping, Status::Failed] {
            self.sandboxes.get_or_create(&state(status, None)).set(0);
        }
        for tier in [SleepTier::Memory, SleepTier::Disk, SleepTier::Store, SleepTier::Off] {
            self.sandboxes.get_or_create(&state(Status::Sleeping, Some(tier))).set(0);
        }
        let mut connections = 0;
        for sandbox in sandboxes {
            self.sandboxes.get_or_create(&state(sandbox.status, sandbox.sleep_tier)).inc();
            connections += i64::from(sandbox.awake_connections);
        }
        self.awake_connections.set(connections);
        self.ready_copies.set(i64::try_from(ready_copies).unwrap_or(i64::MAX));
        self.state_bytes.set(i64::try_from(used.state_bytes).unwrap_or(i64::MAX));
        for (counter, sum) in
            [(&self.awake_seconds, used.awake_seconds), (&self.cpu_seconds, used.cpu_seconds)]
        {
            // Only ever more: a sandbox that is being deleted is for a moment in neither sum.
            counter.inc_by((sum - counter.get()).max(0.0));
        }
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

fn cause(event: &Event) -> CauseLabels {
    CauseLabels { cause: text(event, "cause"), tier: text(event, "tier") }
}

fn text(event: &Event, field: &str) -> String {
    event.data.get(field).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn state(status: Status, tier: Option<SleepTier>) -> StateLabels {
    let status = match status {
        Status::Starting => "starting",
        Status::Running => "running",
        Status::Sleeping => "sleeping",
        Status::Failed => "failed",
    };
    let tier = match tier {
        Some(SleepTier::Memory) => "memory",
        Some(SleepTier::Disk) => "disk",
        Some(SleepTier::Store) => "store",
        Some(SleepTier::Off) => "off",
        None => "",
    };
    StateLabels { status, tier }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: &str, data: &Value) -> Event {
        Event {
            seq: 1,
            at: String::new(),
            sandbox_id: api::SandboxId::from_random([7; 12]),
            kind: format!("sandbox.{kind}"),
            text: String::new(),
            data: data.as_object().cloned().unwrap(),
        }
    }

    /// No metric is there that nothing moves: after one of each, none is left without a value.
    #[test]
    fn every_metric_is_moved_by_something() {
        let metrics = Metrics::new();
        let phases = serde_json::json!({"total_ms": 30.0, "phases_ms": {"spawn": 20.0, "load": 10.0},
            "cause": "call", "tier": "disk"});
        for kind in ["running", "restarted", "slept", "woke", "demoted", "copied"] {
            metrics.event(&event(kind, &phases));
        }
        for kind in ["failed", "stopped", "wake_failed", "sleep_failed", "demote_failed"] {
            metrics.event(&event(kind, &serde_json::json!({"code": "machine_lost"})));
        }
        metrics.lost(3);
        let after = Duration::from_millis(20);
        metrics.answered(Face::Edge, StatusCode::OK, None, after);
        metrics.answered(Face::Api, StatusCode::NOT_FOUND, Some(api::Code::NotFound), after);
        let used =
            Usage { awake_seconds: 2.5, cpu_seconds: 0.5, state_bytes: 9, ..Usage::default() };
        let text = metrics.text(&[], &used, 0).unwrap();
        for line in [
            "dormouse_starts_total{order=\"create\"} 1",
            "dormouse_starts_total{order=\"boot\"} 1",
            "dormouse_wakes_total{cause=\"call\",tier=\"disk\"} 1",
            "dormouse_sleeps_total{cause=\"call\",tier=\"disk\"} 1",
            "dormouse_failures_total{what=\"wake_failed\",code=\"machine_lost\"} 1",
            "dormouse_failures_total{what=\"stopped\",code=\"machine_lost\"} 1",
            "dormouse_order_seconds_sum{order=\"wake\"} 0.03",
            "dormouse_order_seconds_count{order=\"start\"} 2",
            "dormouse_phase_seconds_bucket{le=\"0.01\",order=\"wake\",phase=\"load\"} 1",
            "dormouse_answers_total{face=\"edge\",status=\"200\"} 1",
            "dormouse_errors_total{face=\"api\",code=\"not_found\"} 1",
            "dormouse_edge_answer_seconds_count 1",
            "dormouse_events_lost_total 3",
            "dormouse_sandboxes{status=\"sleeping\",tier=\"disk\"} 0",
            "dormouse_awake_connections 0",
            "dormouse_state_bytes 9",
            "dormouse_awake_seconds_total 2.5",
            "dormouse_cpu_seconds_total 0.5",
        ] {
            assert!(text.lines().any(|found| found == line), "no `{line}` in\n{text}");
        }
        // A name that is told without any value would be one that nothing moves.
        for name in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
            let name = name.split(' ').next().unwrap();
            let moved = text.lines().any(|line| line.starts_with(name));
            assert!(moved, "nothing moves `{name}`\n{text}");
        }
        // Sums never shrink.
        let text = metrics.text(&[], &Usage::default(), 0).unwrap();
        assert!(text.contains("dormouse_awake_seconds_total 2.5\n"), "{text}");
    }
}
