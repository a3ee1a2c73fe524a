//! Plants known faults, one at a time, and looks whether a test notices: a test that cannot fail proves nothing.
//!
//! Each fault is a patch in `mutants/`, whose first lines say what is wrong with it. The tree that this runs in is never
//! edited: a copy of it is made under `target/mutants`, with a build folder of its own that all patches share. A patch
//! that does not apply, does not compile or is not noticed is a failure, since then it proves nothing any more.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::failure::{Context, Failure, Result};
use crate::layout;
use crate::process::{self, step};

/// How long the tests of one patched crate may take, in seconds, building not included. Ten times what they take on a
/// slow machine: a fault that makes a test run without end is noticed by this.
const TESTS_SECONDS_MAX: u32 = 300;

/// What `timeout` exits with when the time is over.
const TIMED_OUT: i32 = 124;

/// Plant known faults one at a time and see that a test notices each.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only the patches whose file name contains one of these
    names: Vec<String>,
}

/// A fault to be planted.
struct Mutant {
    /// File name without `.patch`.
    name: String,
    path: PathBuf,
    /// What the fault is: the lines before the patch proper.
    fault: String,
    /// Files it changes, from the root of the repository.
    files: Vec<PathBuf>,
    /// Packages whose tests must notice it.
    packages: BTreeSet<String>,
}

/// Runs `cargo xtask mutants`.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mutants = find(&layout::root().join("mutants"), &options.names)?;
    let scratch = Scratch::new()?;
    step("copy the tree", || scratch.copy_tree())?;
    let packages: BTreeSet<_> = mutants.iter().flat_map(|mutant| mutant.packages.clone()).collect();
    step("tests without a fault", || match scratch.test(&packages)? {
        Verdict::Unnoticed => Ok(()),
        Verdict::Broken(said) => Err(Failure::new(format!("the tree does not build:\n{said}"))),
        Verdict::Noticed(tests) => {
            Err(Failure::new(format!("tests fail without any fault: {}", tests.join(", "))))
        }
    })?;

    let begun = Instant::now();
    let mut missed = 0;
    for mutant in &mutants {
        let (noticed, text) = match scratch.plant(mutant)? {
            Err(said) => (false, format!("does not apply: {said}")),
            Ok(()) => match scratch.test(&mutant.packages)? {
                Verdict::Unnoticed => (false, "no test notices it".to_owned()),
                Verdict::Broken(said) => (false, format!("does not compile:\n{said}")),
                Verdict::Noticed(tests) => (true, noticed_by(&tests)),
            },
        };
        scratch.restore(mutant)?;
        println!("{} {:<32} {text}", if noticed { "ok    " } else { "MISSED" }, mutant.name);
        if !noticed {
            missed += 1;
            println!("       {}", mutant.fault);
        }
    }
    eprintln!("    {} faults in {:.0} s", mutants.len(), begun.elapsed().as_secs_f64());
    if missed == 0 {
        Ok(())
    } else {
        Err(Failure::new(format!("{missed} of {} faults were not noticed", mutants.len())))
    }
}

fn noticed_by(tests: &[String]) -> String {
    match tests {
        [] => format!("the tests did not end within {TESTS_SECONDS_MAX} s"),
        [test] => test.clone(),
        [test, others @ ..] => format!("{test} (and {} more)", others.len()),
    }
}

/// Every patch in the folder that one of the names fits, by name.
fn find(folder: &Path, names: &[String]) -> Result<Vec<Mutant>> {
    let mut mutants = Vec::new();
    for entry in fs::read_dir(folder).context(format!("list {}", folder.display()))? {
        let path = entry.context(format!("list {}", folder.display()))?.path();
        if path.extension().is_some_and(|extension| extension == "patch") {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if names.is_empty() || names.iter().any(|wanted| name.contains(wanted.as_str())) {
                mutants.push(Mutant::read(name, path)?);
            }
        }
    }
    if mutants.is_empty() {
        return Err(Failure::new(format!("no patch in {} fits {names:?}", folder.display())));
    }
    mutants.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(mutants)
}

impl Mutant {
    fn read(name: String, path: PathBuf) -> Result<Self> {
        let text = fs::read_to_string(&path).context(format!("read {}", path.display()))?;
        let comment = text.lines().map_while(|line| line.strip_prefix('#'));
        let fault = comment.map(str::trim).collect::<Vec<_>>().join(" ");
        let files: Vec<_> = text
            .lines()
            .filter_map(|line| line.strip_prefix("+++ b/"))
            .map(PathBuf::from)
            .collect();
        let packages: BTreeSet<_> = files.iter().filter_map(|file| package(file)).collect();
        if fault.is_empty() {
            return Err(Failure::new(format!(
                "{name}: the first line must be `# <what the fault is>`"
            )));
        }
        if packages.is_empty() {
            return Err(Failure::new(format!("{name}: it changes no file under `crates/`")));
        }
        Ok(Self { name, path, fault, files, packages })
    }
}

/// The package that a file belongs to: packages are named like their folders.
fn package(file: &Path) -> Option<String> {
    let name = file.strip_prefix("crates").ok()?.components().next()?;
    Some(name.as_os_str().to_string_lossy().into_owned())
}

/// How the tests took it.
enum Verdict {
    Unnoticed,
    /// By these tests; by none in particular if they did not end.
    Noticed(Vec<String>),
    /// It does not compile; this is what the compiler says.
    Broken(String),
}

/// The copy of the tree in which faults are planted.
struct Scratch {
    from: PathBuf,
    tree: PathBuf,
    target: PathBuf,
}

impl Scratch {
    fn new() -> Result<Self> {
        let folder = layout::target().join("mutants");
        fs::create_dir_all(&folder).context(format!("make {}", folder.display()))?;
        Ok(Self { from: layout::root(), tree: folder.join("tree"), target: folder.join("target") })
    }

    /// Copies what belongs to the repository, with what is not committed yet, over the copy of an earlier run: files that
    /// are the same keep their times, so that only what has changed is built anew.
    fn copy_tree(&self) -> Result<()> {
        let listed = process::output(Command::new("git").current_dir(&self.from).args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ]))?;
        let wanted: BTreeSet<PathBuf> =
            listed.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect();
        for file in &wanted {
            // Deleted, but not committed so.
            if self.from.join(file).is_file() {
                self.copy(file)?;
            }
        }
        remove_others(&self.tree, &self.tree, &|file| {
            wanted.contains(file) && self.from.join(file).is_file()
        })
    }

    fn copy(&self, file: &Path) -> Result<()> {
        let (from, to) = (self.from.join(file), self.tree.join(file));
        let new = fs::read(&from).context(format!("read {}", from.display()))?;
        // One that cannot be read is written anew.
        if fs::read(&to).is_ok_and(|old| old == new) {
            return Ok(());
        }
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder).context(format!("make {}", folder.display()))?;
        }
        fs::write(&to, new).context(format!("write {}", to.display()))
    }

    /// `Err` within: the patch does not apply, and why.
    fn plant(&self, mutant: &Mutant) -> Result<std::result::Result<(), String>> {
        let output = Command::new("git")
            .args(["apply", "--whitespace=nowarn"])
            .arg(&mutant.path)
            .current_dir(&self.tree)
            // The copy lies within the repository, and must not be taken for a part of it.
            .env("GIT_CEILING_DIRECTORIES", self.tree.parent().unwrap_or(&self.tree))
            .stdin(Stdio::null())
            .output()
            .context("start `git apply`")?;
        Ok(if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
        })
    }

    fn restore(&self, mutant: &Mutant) -> Result<()> {
        for file in &mutant.files {
            if self.from.join(file).is_file() {
                self.copy(file)?;
            } else {
                // The patch made it. One that was never made need not be removed.
                match fs::remove_file(self.tree.join(file)) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(error).context(format!("remove {}", file.display()));
                    }
                    Ok(()) | Err(_) => {}
                }
            }
        }
        Ok(())
    }

    fn test(&self, packages: &BTreeSet<String>) -> Result<Verdict> {
        let mut build = self.cargo_test(packages);
        let built = build.args(["--quiet", "--no-run"]).output().context("start `cargo test`")?;
        if !built.status.success() {
            return Ok(Verdict::Broken(String::from_utf8_lossy(&built.stderr).into_owned()));
        }
        let mut run = limited(self.cargo_test(packages).arg("--no-fail-fast"));
        let ran = run.output().context("start `timeout cargo test`")?;
        if ran.status.success() {
            return Ok(Verdict::Unnoticed);
        }
        let said = String::from_utf8_lossy(&ran.stdout);
        let mut tests: Vec<String> = said
            .lines()
            .filter_map(|line| line.strip_prefix("test ")?.strip_suffix(" ... FAILED"))
            .map(str::to_owned)
            .collect();
        // Random histories may find it today and not tomorrow: name first what finds it always, and best a rule.
        tests.sort_by_key(|test| (test.contains("histories"), test.contains("transition_table")));
        if tests.is_empty() && ran.status.code() != Some(TIMED_OUT) {
            let error = String::from_utf8_lossy(&ran.stderr);
            return Err(Failure::new(format!(
                "`cargo test` failed without a failed test:\n{error}"
            )));
        }
        Ok(Verdict::Noticed(tests))
    }

    fn cargo_test(&self, packages: &BTreeSet<String>) -> Command {
        let mut command = process::cargo();
        command
            .args(["test", "--offline"])
            .args(packages.iter().flat_map(|package| ["--package", package]))
            .current_dir(&self.tree)
            .env("CARGO_TARGET_DIR", &self.target)
            // A fault must not become what is expected, nor be remembered for the next one; and where it lies in a long
            // history does not matter here.
            .env_remove("UPDATE_EXPECT")
            .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1")
            .env("PROPTEST_MAX_SHRINK_ITERS", "0")
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null());
        command
    }
}

/// The same command, ended after [`TESTS_SECONDS_MAX`].
fn limited(command: &Command) -> Command {
    let mut limited = Command::new("timeout");
    limited.args(["--kill-after=5", &TESTS_SECONDS_MAX.to_string()]);
    limited.arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
    if let Some(folder) = command.get_current_dir() {
        limited.current_dir(folder);
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    limited
}

/// Removes files that are not wanted, by their paths from `root`.
fn remove_others(root: &Path, folder: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<()> {
    for entry in fs::read_dir(folder).context(format!("list {}", folder.display()))? {
        let entry = entry.context(format!("list {}", folder.display()))?;
        let path = entry.path();
        if entry.file_type().context(format!("look at {}", path.display()))?.is_dir() {
            remove_others(root, &path, wanted)?;
        } else if !path.strip_prefix(root).is_ok_and(wanted) {
            fs::remove_file(&path).context(format!("remove {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_belongs_to_the_package_named_like_its_folder() {
        assert_eq!(package(Path::new("crates/wire/src/lib.rs")).as_deref(), Some("wire"));
        assert_eq!(package(Path::new("docs/architecture.md")), None);
    }

    #[test]
    fn every_patch_says_what_its_fault_is_and_changes_one_crate() {
        let mutants = find(&layout::root().join("mutants"), &[]).expect("patches that can be read");
        for mutant in &mutants {
            assert_eq!(mutant.packages.len(), 1, "{}", mutant.name);
            assert!(mutant.fault.len() > 20, "{}: {}", mutant.name, mutant.fault);
        }
        assert!(mutants.len() >= 20);
    }
}
