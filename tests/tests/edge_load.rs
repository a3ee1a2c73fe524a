//! The edge under load, beside nginx in front of the same port.

use e2e::load::{Plan, measure};
use e2e::{isolated, test_name};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().expect("a number"))
}

/// Of nginx's rate.
const RATE_LEAST: f64 = 0.8;
/// Times nginx's 99th per cent of times.
const P99_MOST: f64 = 1.5;

/// No request of a load is lost or answered with another's answer. In the long form, with programs as users have them, the
/// edge keeps up with nginx, too; other builds are not held to times.
#[test]
fn t17_no_request_of_a_load_fails_and_the_edge_keeps_up_with_nginx() {
    isolated(test_name!(), |lab| {
        let is_long = std::env::var_os("DORMOUSE_SOAK_EDGE_ROUNDS").is_some();
        let plan = Plan {
            rounds: usize::try_from(number("DORMOUSE_SOAK_EDGE_ROUNDS", 1)).expect("few"),
            seconds: number("DORMOUSE_SOAK_EDGE_SECONDS", 2),
            steady_seconds: number("DORMOUSE_SOAK_EDGE_STEADY_SECONDS", 3),
            boxes: u32::try_from(number("DORMOUSE_SOAK_EDGE_BOXES", 1)).expect("few"),
            sleepers: u32::try_from(number("DORMOUSE_SOAK_EDGE_SLEEPERS", 5)).expect("few"),
        };
        let measured = measure(lab, plan);
        println!("{}", measured.table());
        let errors = &measured.steady.errors;
        assert!(errors.is_empty(), "{errors:#?}\n{}", lab.daemon_log());
        assert!(measured.steady.requests > 0);
        for round in &measured.edge.rounds {
            assert_eq!(round.errors, 0, "{round:?}\n{}", lab.daemon_log());
            assert!(round.rate > 0.0, "{round:?}");
        }
        if is_long {
            let (rate, p99) = (measured.rate_ratio(), measured.p99_ratio());
            assert!(rate >= RATE_LEAST, "{rate:.2} of nginx's rate, promised {RATE_LEAST}");
            assert!(p99 <= P99_MOST, "{p99:.2} times nginx's p99, promised {P99_MOST}");
        }
    });
}
