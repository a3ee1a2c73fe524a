//! What neither the compiler nor clippy looks at: that files say why they exist, that nothing unfinished or private
//! is in them, that pure crates touch no world, and that the rules are all there.

use std::fs;
use std::path::{Path, PathBuf};

use crate::failure::{Context, Failure, Result};
use crate::layout;

/// Lines from which on a file is named in the output: past it, most people lose the thread.
const LINES_LONG: usize = 400;
/// Lines that a file may have at most. Only a state machine with its tests comes near it.
const LINES_MAX: usize = 1500;

/// Folders that hold our text.
const FOLDERS: [&str; 8] =
    ["crates", "docs", "examples", "tests", "xtask", ".cargo", ".ci", ".config"];
/// Files of ours at the top.
const FILES: [&str; 4] = ["README.md", "Cargo.toml", "clippy.toml", "rustfmt.toml"];

/// Text that must not be in any file, and why. Written in halves here, or this file would hold it.
const FORBIDDEN: [(&str, &str, &str); 10] = [
    ("to", "do!(", "unfinished: finish it, or leave it out"),
    ("unimple", "mented!(", "unfinished: finish it, or leave it out"),
    (
        "#[ig",
        "nore",
        "a test that is not run proves nothing: mend it, or say in docs what is not yet there",
    ),
    (
        "#[al",
        "low(",
        "use #[expect(lint, reason = \"…\")], which fails once it is no longer needed",
    ),
    ("TO", "DO", "do it, or write down in docs what is not yet there"),
    ("FIX", "ME", "mend it, or write down in docs what is wrong"),
    ("../sha", "red", "not part of this repository"),
    ("/work/ma", "in", "a path of somebody's machine"),
    ("/work/sha", "red", "a path of somebody's machine"),
    ("/ro", "ot/.", "a path of somebody's machine"),
];

/// Crates that decide and are told everything, time included.
const PURE: [&str; 2] = ["crates/lifecycle/src", "crates/wire/src"];
/// What they must not touch.
const WORLD: [&str; 8] = [
    "std::fs",
    "std::net",
    "std::process",
    "std::thread",
    "std::env",
    "Instant::now",
    "SystemTime::now",
    "std::os",
];

/// Crates in which `unsafe` may be.
const MAY_BE_UNSAFE: [&str; 2] = ["crates/vmm/", "crates/guest/"];

/// Rules of the specification: letter, and the highest number.
pub(crate) const RULES: [(char, u32); 3] = [('S', 24), ('B', 45), ('T', 20)];

/// Looks at every file.
pub(super) fn run() -> Result<()> {
    let root = layout::root();
    let mut files: Vec<PathBuf> = FILES.iter().map(|file| root.join(file)).collect();
    for folder in FOLDERS {
        collect(&root.join(folder), &mut files)?;
    }
    let mut wrong = Vec::new();
    for path in &files {
        let Ok(text) = fs::read_to_string(path) else {
            wrong.push(format!("{}: cannot be read as text", path.display()));
            continue;
        };
        let name = path.strip_prefix(&root).unwrap_or(path).to_string_lossy().into_owned();
        wrong.extend(look(&name, &text));
        let lines = text.lines().count();
        if is_rust(&name) && (LINES_LONG..=LINES_MAX).contains(&lines) {
            eprintln!("    note: {name} has {lines} lines");
        }
    }
    let path = root.join("docs/specification.md");
    let text = fs::read_to_string(&path).context(format!("read {}", path.display()))?;
    wrong.extend(missing_rules(&text));
    if wrong.is_empty() { Ok(()) } else { Err(Failure::new(wrong.join("\n"))) }
}

/// All files below a folder, if it exists, in order.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    let list = || fs::read_dir(folder)?.collect::<std::io::Result<Vec<_>>>();
    let mut entries = list().context(format!("list {}", folder.display()))?;
    entries.sort_by_key(fs::DirEntry::path);
    for entry in entries {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path
            .extension()
            .is_some_and(|e| ["rs", "toml", "md", "sql", "py", "json"].iter().any(|k| e == *k))
            || path.file_name().is_some_and(|name| name == "run")
        {
            files.push(path);
        }
    }
    Ok(())
}

fn is_rust(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "rs")
}

/// What is wrong with one file.
fn look(name: &str, text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let is_rust = is_rust(name);
    if is_rust && !text.starts_with("//!") {
        wrong.push(format!("{name}:1: begins without `//!`: say why the file exists"));
    }
    let lines = text.lines().count();
    if is_rust && lines > LINES_MAX {
        wrong.push(format!("{name}: {lines} lines are too many, at most {LINES_MAX}"));
    }
    for (number, line) in text.lines().enumerate() {
        let number = number + 1;
        for (begin, end, why) in FORBIDDEN {
            if line.split(begin).skip(1).any(|rest| rest.starts_with(end)) {
                wrong.push(format!("{name}:{number}: `{begin}{end}`: {why}"));
            }
        }
        if !is_rust {
            continue;
        }
        let code = line.split("//").next().unwrap_or_default();
        if PURE.iter().any(|folder| name.starts_with(folder)) {
            for world in WORLD.iter().filter(|world| code.contains(**world)) {
                wrong.push(format!(
                    "{name}:{number}: `{world}` in a crate that must not touch the world"
                ));
            }
        }
        let is_unsafe = code.contains("unsafe {")
            || code.contains("unsafe fn ")
            || code.contains("unsafe impl ");
        if is_unsafe
            && !MAY_BE_UNSAFE.iter().any(|folder| name.starts_with(folder))
            && !name.starts_with("xtask/")
        {
            wrong.push(format!("{name}:{number}: `unsafe` outside the crates that may use it"));
        }
    }
    wrong
}

/// Rules that the specification has no heading for.
fn missing_rules(specification: &str) -> Vec<String> {
    let headed = |rule: &str| {
        specification.lines().any(|line| {
            line.strip_prefix("### ")
                .and_then(|rest| rest.strip_prefix(rule))
                .is_some_and(|rest| rest.starts_with(". "))
        })
    };
    RULES
        .iter()
        .flat_map(|(letter, highest)| (1..=*highest).map(move |number| format!("{letter}{number}")))
        .filter(|rule| !headed(rule))
        .map(|rule| format!("docs/specification.md: no heading `### {rule}. …`"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_is_named_with_its_line() {
        let ignore = format!("{}{}]", "#[ig", "nore");
        let text = format!(
            "//! Why.\n{ignore}\nlet a = Instant::now(); // Instant::now\n// std::fs is not used\n"
        );
        assert_eq!(
            look("crates/lifecycle/src/a.rs", &text)
                .iter()
                .map(|w| w.split(": ").next().unwrap())
                .collect::<Vec<_>>(),
            ["crates/lifecycle/src/a.rs:2", "crates/lifecycle/src/a.rs:3"]
        );
        assert_eq!(
            look("crates/host/src/a.rs", "//! Why.\nInstant::now();\n"),
            Vec::<String>::new()
        );
        assert_eq!(look("crates/host/src/a.rs", "fn a() {}\n").len(), 1);
        assert_eq!(look("crates/host/src/a.rs", "//! Why.\nunsafe { a() }\n").len(), 1);
        assert_eq!(look("crates/vmm/src/a.rs", "//! Why.\nunsafe { a() }\n").len(), 0);
    }

    #[test]
    fn a_rule_without_heading_is_named() {
        let (letter, highest) = RULES[0];
        let all: String = RULES
            .iter()
            .flat_map(|(letter, highest)| {
                (1..=*highest).map(move |n| format!("### {letter}{n}. Name\n"))
            })
            .collect();
        assert!(missing_rules(&all).is_empty());
        let without = all.replace(&format!("### {letter}{highest}. "), "### Something else. ");
        assert_eq!(
            missing_rules(&without),
            [format!("docs/specification.md: no heading `### {letter}{highest}. …`")]
        );
    }
}
