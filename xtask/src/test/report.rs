//! What a test runner said, read from its own report: JUnit's XML from nextest, lines from `cargo test`.

/// How all tests went.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) tests: Vec<Test>,
    /// Whether the runner itself ended well. It also fails for what is no test: a crate that does not compile.
    pub(super) ended_well: bool,
    /// The runner's own last lines.
    pub(super) closing: Vec<String>,
}

/// How one test went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Test {
    pub(super) package: String,
    /// With its modules: `idle::tests::s02_cpu_keeps_awake`.
    pub(super) name: String,
    pub(super) outcome: Outcome,
    /// On which guests, as the test has printed it: `web: QEMU 1234, boot id …, tiers memory, disk`.
    pub(super) guests: Vec<String>,
}

/// How a test can go. The worse is the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Outcome {
    Passed,
    Skipped,
    Failed,
}

impl Report {
    /// Whether everything ran and nothing failed. No test at all is a failure: something was misspelt.
    pub(super) fn is_good(&self) -> bool {
        self.ended_well && self.number(Outcome::Passed) > 0 && self.number(Outcome::Failed) == 0
    }

    /// Names of the failed tests.
    pub(super) fn failed(&self) -> impl Iterator<Item = String> {
        let failed = self.tests.iter().filter(|test| test.outcome == Outcome::Failed);
        failed.map(|test| format!("{} {}", test.package, test.name))
    }

    /// One line with the numbers.
    pub(super) fn count(&self) -> String {
        let (passed, failed) = (self.number(Outcome::Passed), self.number(Outcome::Failed));
        format!("{passed} passed, {failed} failed, {} skipped", self.number(Outcome::Skipped))
    }

    fn number(&self, outcome: Outcome) -> usize {
        self.tests.iter().filter(|test| test.outcome == outcome).count()
    }

    /// Adds tests; see [`add`](Self::add).
    pub(super) fn extend(&mut self, tests: Vec<Test>) {
        for test in tests {
            self.add(test);
        }
    }

    /// Adds a test; of two results for the same one the worse counts.
    pub(super) fn add(&mut self, test: Test) {
        let same = |other: &&mut Test| other.package == test.package && other.name == test.name;
        match self.tests.iter_mut().find(same) {
            Some(known) => known.outcome = known.outcome.max(test.outcome),
            None => self.tests.push(test),
        }
    }
}

/// Reads nextest's JUnit file. Only what is needed of it: `testcase` elements, their names, and what is inside them.
pub(super) fn read_junit(xml: &str) -> Vec<Test> {
    let mut tests = Vec::new();
    let mut package = String::new();
    for element in xml.split('<') {
        let (tag, attributes) = element.split_once([' ', '>', '/']).unwrap_or((element, ""));
        match tag {
            // One suite for each test program: `host`, `e2e::tour`.
            "testsuite" => {
                let name = attribute(attributes, "name").unwrap_or_default();
                name.split("::").next().unwrap_or_default().clone_into(&mut package);
            }
            "testcase" => {
                let name = attribute(attributes, "name").unwrap_or_default();
                tests.push(Test {
                    package: package.clone(),
                    name,
                    outcome: Outcome::Passed,
                    guests: Vec::new(),
                });
            }
            "system-out" => {
                let text = attributes.split_once('>').map_or(attributes, |(_, text)| text);
                if let Some(test) = tests.last_mut() {
                    test.guests.extend(guests(text));
                }
            }
            "failure" | "error" | "skipped" => {
                if let Some(test) = tests.last_mut() {
                    test.outcome =
                        if tag == "skipped" { Outcome::Skipped } else { Outcome::Failed };
                }
            }
            _ => {}
        }
    }
    tests
}

/// What a test has printed about its guests, wherever in a line.
fn guests(output: &str) -> impl Iterator<Item = String> {
    let told = output.lines().filter_map(|line| line.split_once("guest ").map(|(_, told)| told));
    told.filter(|told| told.contains(": QEMU ")).map(|told| told.trim().to_owned())
}

fn attribute(attributes: &str, name: &str) -> Option<String> {
    let key = format!("{name}=\"");
    let at = attributes.find(&key).filter(|at| *at == 0 || attributes[..*at].ends_with(' '))?;
    let value = attributes[at + key.len()..].split('"').next()?;
    let plain = value
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", "\"")
        .replace("&apos;", "'");
    Some(plain.replace("&amp;", "&"))
}

/// Reads the lines of `cargo test`: `test a::b ... ok`.
pub(super) fn read_lines(package: &str, output: &str) -> Vec<Test> {
    let outcome = |word: &str| match word {
        "ok" => Some(Outcome::Passed),
        "FAILED" => Some(Outcome::Failed),
        "ignored" => Some(Outcome::Skipped),
        _ => None,
    };
    output
        .lines()
        .filter_map(|line| line.strip_prefix("test ")?.rsplit_once(" ... "))
        .filter_map(|(name, word)| {
            let outcome = outcome(word.split([',', ' ']).next()?)?;
            let name = name.trim_end_matches(" - should panic").to_owned();
            Some(Test { package: package.to_owned(), name, outcome, guests: Vec::new() })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(tests: &[Test]) -> Vec<String> {
        tests
            .iter()
            .map(|test| format!("{} {} {:?}", test.package, test.name, test.outcome))
            .collect()
    }

    #[test]
    fn junit_is_read() {
        let xml = r#"<?xml version="1.0" encoding="UTF-8"?>
            <testsuites name="nextest-run" tests="3" failures="1" errors="0" time="0.1">
              <testsuite name="lifecycle" tests="2" disabled="0" errors="0" failures="1">
                <testcase name="tests::s02_quiet" classname="lifecycle" timestamp="x" time="0.001">
                  <system-out>test x ... guest web: QEMU 7, boot id 5f, tiers disk
guest of honour</system-out>
                </testcase>
                <testcase name="tests::s03_timer" classname="lifecycle" time="0.001">
                  <failure message="x &lt;testcase name=&quot;a&quot;&gt;" type="test failure">text</failure>
                  <system-out>&lt;testcase&gt;</system-out>
                </testcase>
              </testsuite>
              <testsuite name="e2e::tour" tests="1"><testcase name="tour" classname="e2e::tour" time="9"/></testsuite>
            </testsuites>"#;
        assert_eq!(
            text(&read_junit(xml)),
            [
                "lifecycle tests::s02_quiet Passed",
                "lifecycle tests::s03_timer Failed",
                "e2e tour Passed"
            ]
        );
        assert_eq!(read_junit(xml)[0].guests, ["web: QEMU 7, boot id 5f, tiers disk"]);
    }

    #[test]
    fn lines_of_cargo_test_are_read() {
        let output = "running 4 tests\ntest a::b ... ok\ntest c - should panic ... ok\ntest d ... FAILED\n\
                      test e ... ignored, why\ntest result: FAILED. 2 passed; 1 failed\ntest f has been running\n";
        assert_eq!(
            text(&read_lines("host", output)),
            ["host a::b Passed", "host c Passed", "host d Failed", "host e Skipped"]
        );
    }

    #[test]
    fn a_run_is_good_only_if_something_passed_and_nothing_failed() {
        let test = |outcome| Test {
            package: "p".to_owned(),
            name: "n".to_owned(),
            outcome,
            guests: Vec::new(),
        };
        let mut report = Report { ended_well: true, ..Report::default() };
        assert!(!report.is_good(), "no test ran");
        report.add(test(Outcome::Passed));
        assert!(report.is_good());
        report.add(test(Outcome::Failed));
        assert!(!report.is_good());
        assert_eq!(report.count(), "0 passed, 1 failed, 0 skipped");
        report.add(test(Outcome::Passed));
        assert_eq!(report.failed().collect::<Vec<_>>(), ["p n"]);
    }
}
