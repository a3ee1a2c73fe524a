//! How things look on a terminal.

use std::io::Write;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use crate::problem::Problem;

/// Prints a line of data. A reader that went away (`| head`) ends the program quietly.
pub(crate) fn data(text: &str) -> Result<(), Problem> {
    bytes(format!("{text}\n").as_bytes())
}

/// Prints bytes as they are, at once.
pub(crate) fn pass(bytes: &[u8]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

/// Prints bytes as they are. A reader that went away ends the program quietly.
pub(crate) fn bytes(bytes: &[u8]) -> Result<(), Problem> {
    match pass(bytes) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => Err(Problem::new(format!("cannot write to standard output: {error}"))),
        Ok(()) => Ok(()),
    }
}

/// Prints JSON, laid out for reading.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Problem> {
    let text = serde_json::to_string_pretty(value);
    data(&text.map_err(|error| Problem::new(format!("cannot write this as JSON: {error}")))?)
}

/// Prints JSON in one line.
pub(crate) fn json_line(value: &impl Serialize) -> Result<(), Problem> {
    let text = serde_json::to_string(value);
    data(&text.map_err(|error| Problem::new(format!("cannot write this as JSON: {error}")))?)
}

/// Columns under headings; the last one is not padded.
pub(crate) fn table(headings: &[&str], rows: &[Vec<String>]) -> Result<(), Problem> {
    let widths: Vec<usize> = headings
        .iter()
        .enumerate()
        .map(|(column, heading)| {
            rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0).max(heading.len())
        })
        .collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> =
            cells.zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        data(padded.join("  ").trim_end())
    };
    line(&mut headings.iter().copied())?;
    rows.iter().try_for_each(|row| line(&mut row.iter().map(String::as_str)))
}

/// Text that somebody else wrote, in one line: nothing in it moves the cursor or changes the terminal.
pub(crate) fn plain(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// The same, cut to so many characters.
pub(crate) fn short_plain(text: &str, most: usize) -> String {
    let text = plain(text);
    if text.chars().count() <= most {
        return text;
    }
    let cut: String = text.chars().take(most.saturating_sub(1)).collect();
    format!("{}…", cut.trim_end())
}

/// A point in time with how far away it is, such as `2026-11-30T10:15:30Z (in 4 s)`.
pub(crate) fn time(at: &str) -> String {
    match at.parse::<Timestamp>() {
        Ok(time) => {
            format!("{} ({})", short(time), distance(time.duration_until(Timestamp::now())))
        }
        // What cannot be read is shown as it came.
        Err(_) => at.to_owned(),
    }
}

/// How long ago, such as `5 min ago`.
pub(crate) fn age(at: &str) -> String {
    at.parse::<Timestamp>()
        .map_or_else(|_| at.to_owned(), |time| distance(time.duration_until(Timestamp::now())))
}

/// Bytes, in the largest unit that leaves a whole number.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes, 0);
    let mut rest = 0;
    while value >= 1024 && unit + 1 < UNITS.len() {
        rest = value % 1024;
        value /= 1024;
        unit += 1;
    }
    if unit == 0 || value >= 100 {
        format!("{value} {}", UNITS[unit])
    } else {
        format!("{value}.{} {}", rest * 10 / 1024, UNITS[unit])
    }
}

/// A duration, to the unit that matters.
pub(crate) fn seconds(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// A duration of so many milliseconds, to the unit that matters.
pub(crate) fn milliseconds(ms: u64) -> String {
    if ms < 10_000 && !ms.is_multiple_of(1000) { format!("{ms} ms") } else { seconds(ms / 1000) }
}

fn short(time: Timestamp) -> String {
    Timestamp::from_second(time.as_second()).unwrap_or(time).to_string()
}

fn distance(since: SignedDuration) -> String {
    let whole = since.as_secs().unsigned_abs();
    if since.as_secs() >= 0 {
        format!("{} ago", seconds(whole))
    } else {
        format!("in {}", seconds(whole))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_wrote_is_one_line_of_plain_text() {
        assert_eq!(plain("a\u{1b}[2J\r\nb\u{9b}c"), "a [2J  b c");
        assert_eq!(short_plain("über\nalles", 10), "über alles");
        assert_eq!(short_plain("one two three", 9), "one two…");
        assert_eq!(short_plain("", 3), "");
    }

    #[test]
    fn sizes_and_times() {
        assert_eq!(
            [0, 1023, 1024, 1536, 200 << 20].map(size),
            ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "200 MiB"]
        );
        assert_eq!(
            [0, 119, 120, 7200, 172_800].map(seconds),
            ["0 s", "119 s", "2 min", "2 h", "2 days"]
        );
        assert_eq!([1, 2000, 90_500].map(milliseconds), ["1 ms", "2 s", "90 s"]);
        assert_eq!(distance(SignedDuration::from_secs(-4)), "in 4 s");
    }
}
