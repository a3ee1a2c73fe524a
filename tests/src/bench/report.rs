//! The tables: for people, for the specification, for programs.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use serde_json::json;

use super::Options;
use super::conditions::Conditions;
use super::figure::{Figure, show_ms};

/// Between these lines of a document the tables stand.
const BEGIN: &str = "<!-- bench: begin -->";
const END: &str = "<!-- bench: end -->";

/// Prints the tables and puts them where they were asked for. Fails where a promise is missed.
#[track_caller]
pub(crate) fn publish(options: &Options, conditions: &Conditions, figures: &[Figure]) -> ExitCode {
    let text = markdown(conditions, figures);
    println!("{text}");
    if let Some(path) = &options.json {
        let rows =
            conditions.rows().iter().map(|(name, value)| json!({ "name": name, "value": value }));
        let all = json!({
            "conditions": rows.collect::<Vec<_>>(),
            "figures": figures.iter().map(Figure::to_json).collect::<Vec<_>>(),
        });
        fs::write(path, format!("{all:#}\n"))
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    if let Some(path) = &options.write {
        write(path, &text);
    }
    let missed: Vec<_> = figures.iter().filter(|figure| !figure.holds()).collect();
    for figure in &missed {
        println!("missed: {}: {:.2}, promised {}", figure.what, figure.value, figure.promise);
    }
    if missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn markdown(conditions: &Conditions, figures: &[Figure]) -> String {
    let mut text = String::from(
        "| what | promise | measured | beside | ratio | kept |\n| --- | --- | --- | --- | --- | --- |\n",
    );
    for figure in figures {
        let beside = figure.hand.as_ref().map_or("", |hand| hand.text.as_str());
        let ratio = match &figure.hand {
            Some(hand) if hand.text.ends_with('s') => format!("{:.2}", figure.value),
            _ => String::new(),
        };
        let kept = match (figure.at_most, figure.holds()) {
            (None, _) => "",
            (Some(_), true) => "yes",
            (Some(_), false) => "**no**",
        };
        let Figure { what, promise, ours, .. } = figure;
        row(&mut text, &[what, promise, &ours.text, beside, &ratio, kept]);
    }
    text.push_str("\nWhere the time goes (medians of each part, so they sum up only nearly):\n\n");
    text.push_str("| what | all | QEMU | guest agent | request | files | rest | phases, ms |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for figure in figures {
        let Some(parts) = &figure.parts else { continue };
        for (what, parts) in [figure.what, "by hand"].into_iter().zip(parts) {
            let phases: Vec<_> =
                parts.phases().map(|(name, ms)| format!("{name} {ms:.1}")).collect();
            let [all, qemu, agent, request, files, rest] = parts.medians().map(show_ms);
            row(
                &mut text,
                &[what, &all, &qemu, &agent, &request, &files, &rest, &phases.join(", ")],
            );
        }
    }
    text.push_str("\nConditions:\n\n| condition | value |\n| --- | --- |\n");
    for (name, value) in conditions.rows() {
        row(&mut text, &[name, value]);
    }
    text
}

fn row(text: &mut String, cells: &[&str]) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "| {} |", cells.join(" | "));
}

/// Puts the tables between the marks of a document.
#[track_caller]
fn write(path: &Path, tables: &str) {
    let document =
        fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let fresh = replaced(&document, tables);
    let fresh = fresh
        .unwrap_or_else(|| panic!("{} has no `{BEGIN}` with `{END}` after it", path.display()));
    fs::write(path, fresh).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

fn replaced(document: &str, tables: &str) -> Option<String> {
    let (before, rest) = document.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n\n{tables}\n{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_marks_is_replaced() {
        let document = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let fresh = replaced(&document, "new\n").expect("marks");
        assert_eq!(fresh, format!("a\n{BEGIN}\n\nnew\n\n{END}\nb\n"));
        assert_eq!(replaced(&fresh, "new\n"), Some(fresh.clone()));
        assert_eq!(replaced("no marks", "new"), None);
    }
}
