//! Which rule of the specification is proven by which test, and how it went.
//!
//! A test's name has the rules it proves, each in two digits: `s08_request_wakes`, `s05_asked_and_s09_says`. The headings
//! of `docs/specification.md` say which rules there are: `### S8. What wakes it`.

use super::report::{Outcome, Report, Test};

/// All rules with their tests.
#[derive(Debug)]
pub(super) struct Rules(Vec<Rule>);

#[derive(Debug)]
struct Rule {
    id: String,
    title: String,
    tests: Vec<Test>,
}

/// Puts the rules and the tests together.
pub(super) fn of(specification: &str, report: &Report) -> Rules {
    let heading = |line: &str| {
        let (id, title) = line.strip_prefix("### ")?.split_once(". ")?;
        let is_rule = id.len() > 1
            && id.starts_with(['S', 'B', 'T'])
            && id[1..].bytes().all(|b| b.is_ascii_digit());
        is_rule.then(|| (id.to_owned(), title.to_owned()))
    };
    let rules = specification.lines().filter_map(heading).map(|(id, title)| {
        let proves = |test: &&Test| proven_by(&test.name).contains(&id);
        let tests = report.tests.iter().filter(proves).cloned().collect();
        Rule { id, title, tests }
    });
    Rules(rules.collect())
}

/// The rules in a test's name: words of a letter and two digits, with more of a name after them.
fn proven_by(name: &str) -> Vec<String> {
    let name = name.rsplit("::").next().unwrap_or_default();
    let mut words: Vec<_> = name.split('_').collect();
    words.pop();
    let rule = |word: &str| match word.as_bytes() {
        [letter @ (b's' | b'b' | b't'), tens @ b'0'..=b'9', ones @ b'0'..=b'9'] => {
            let number = u32::from(tens - b'0') * 10 + u32::from(ones - b'0');
            Some(format!("{}{number}", char::from(letter.to_ascii_uppercase())))
        }
        _ => None,
    };
    words.into_iter().filter_map(rule).collect()
}

impl Rules {
    /// The table as Markdown.
    pub(super) fn table(&self) -> String {
        let mut text = String::from(
            "| rule | what | tests | result | guests |\n| --- | --- | --- | --- | --- |\n",
        );
        for rule in &self.0 {
            let names: Vec<_> = rule
                .tests
                .iter()
                .map(|test| format!("`{}` {}{}", test.package, test.name, mark(test)))
                .collect();
            let names = if names.is_empty() { "none yet".to_owned() } else { names.join("<br>") };
            let guests: Vec<_> = rule.tests.iter().flat_map(|test| &test.guests).cloned().collect();
            let guests = guests.join("<br>");
            let (id, title, result) = (&rule.id, &rule.title, rule.result());
            let line = format!("| {id} | {title} | {names} | {result} | {guests} |\n");
            text.push_str(&line);
        }
        text
    }

    /// A few lines for the end of a run.
    pub(super) fn summary(&self) -> String {
        let mut lines = Vec::new();
        for letter in ['S', 'B', 'T'] {
            let of_letter = || self.0.iter().filter(move |rule| rule.id.starts_with(letter));
            let all = of_letter().count();
            let tested = of_letter().filter(|rule| !rule.tests.is_empty()).count();
            let failed: Vec<_> = of_letter()
                .filter(|rule| rule.result() == "failed")
                .map(|rule| rule.id.as_str())
                .collect();
            let without: Vec<_> = of_letter()
                .filter(|rule| rule.tests.is_empty())
                .map(|rule| rule.id.as_str())
                .collect();
            let mut line = format!("rules {letter}: {tested} of {all} have tests");
            if !failed.is_empty() {
                line = format!("{line}; failed: {}", failed.join(" "));
            }
            if tested > 0 && !without.is_empty() {
                line = format!("{line}; none yet: {}", without.join(" "));
            }
            lines.push(line);
        }
        lines.join("\n")
    }
}

impl Rule {
    fn result(&self) -> &'static str {
        match self.tests.iter().map(|test| test.outcome).max() {
            None => "no test yet",
            Some(Outcome::Passed) => "passed",
            Some(Outcome::Skipped) => "not run",
            Some(Outcome::Failed) => "failed",
        }
    }
}

fn mark(test: &Test) -> &'static str {
    match test.outcome {
        Outcome::Passed => "",
        Outcome::Skipped => " (skipped)",
        Outcome::Failed => " (failed)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_its_rules() {
        assert_eq!(proven_by("idle::tests::s02_cpu_keeps_awake"), ["S2"]);
        assert_eq!(proven_by("s02_sleeps_and_s06_at_once"), ["S2", "S6"]);
        assert_eq!(proven_by("b44_closed"), ["B44"]);
        for name in ["sleeps", "s2_short", "s02", "a::s02_::tests", "xs02_y", ""] {
            assert_eq!(proven_by(name), Vec::<String>::new(), "{name}");
        }
    }

    #[test]
    fn the_table_shows_rules_with_and_without_tests() {
        let specification =
            "# S\n\n### S1. Status\n\ntext\n\n### S2. Sleep\n\n### S3. Timers\n\n### How fast\n";
        let mut report = Report::default();
        for (name, outcome) in
            [("s01_a", Outcome::Passed), ("m::s01_b", Outcome::Failed), ("s03_c", Outcome::Passed)]
        {
            let guests = if name == "s03_c" { vec!["web: QEMU 7".to_owned()] } else { Vec::new() };
            report.add(Test { package: "e2e".to_owned(), name: name.to_owned(), outcome, guests });
        }
        let rules = of(specification, &report);
        assert_eq!(
            rules.table(),
            "| rule | what | tests | result | guests |\n| --- | --- | --- | --- | --- |\n\
             | S1 | Status | `e2e` s01_a<br>`e2e` m::s01_b (failed) | failed |  |\n\
             | S2 | Sleep | none yet | no test yet |  |\n\
             | S3 | Timers | `e2e` s03_c | passed | web: QEMU 7 |\n"
        );
        assert_eq!(
            rules.summary(),
            "rules S: 2 of 3 have tests; failed: S1; none yet: S2\nrules B: 0 of 0 have tests\nrules T: 0 of 0 have tests"
        );
    }
}
