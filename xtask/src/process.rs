//! Starting programs, and telling a person which step is being taken and how long it took.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

use crate::failure::{Context, Failure, Result};

/// Where programs are looked for besides `PATH`: a user's `PATH` in Debian lacks the `sbin` folders.
const SYSTEM_FOLDERS: [&str; 4] = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// How often a program is looked at that has a limit.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Takes a named step, saying when it begins, and when it is done how long it took.
pub(crate) fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprintln!("==> {name}");
    let begun = Instant::now();
    let result = work();
    let outcome = if result.is_ok() { "done" } else { "failed" };
    eprintln!("    {name}: {outcome} in {:.1} s", begun.elapsed().as_secs_f64());
    result
}

/// Cargo, as it was called for this program: with the same toolchain.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(crate::layout::root());
    // Set by cargo for this program alone; inherited they would make cargo build everything anew.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_")
            || text.starts_with("CARGO_MANIFEST_")
            || text == "CARGO_BIN_NAME"
        {
            command.env_remove(name);
        }
    }
    command
}

/// Where a program is, if it is on this machine.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(SYSTEM_FOLDERS.iter().map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
}

/// Runs a command with its output passed through; it must succeed.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let text = describe(command);
    let status = command.stdin(Stdio::null()).status().context(format!("start `{text}`"))?;
    if status.success() { Ok(()) } else { Err(Failure::new(format!("`{text}`: {status}"))) }
}

/// As [`run`], ended as a failure where it takes longer than `limit`.
pub(crate) fn run_within(limit: Duration, command: &mut Command) -> Result<()> {
    let text = describe(command);
    let mut child = command.stdin(Stdio::null()).spawn().context(format!("start `{text}`"))?;
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().context(format!("wait for `{text}`"))? {
            return if status.success() {
                Ok(())
            } else {
                Err(Failure::new(format!("`{text}`: {status}")))
            };
        }
        if begun.elapsed() > limit {
            child.kill().context(format!("end `{text}`"))?;
            child.wait().context(format!("wait for `{text}`"))?;
            return Err(Failure::new(format!("`{text}`: no end after {} s", limit.as_secs())));
        }
        thread::park_timeout(LOOK_EVERY);
    }
}

/// Runs a command for its standard output; it must succeed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let text = describe(command);
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context(format!("start `{text}`"))?;
    if !output.status.success() {
        return Err(Failure::new(format!("`{text}`: {}", output.status)));
    }
    String::from_utf8(output.stdout).context(format!("read the output of `{text}`"))
}

/// Runs a command with its output passed through and kept; returns whether it succeeded, and all it said.
pub(crate) fn listen(command: &mut Command) -> Result<(bool, String)> {
    let text = describe(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context(format!("start `{text}`"))?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let other = thread::spawn(move || {
        out.map(|out| pass_on(out, |line| println!("{line}"))).unwrap_or_default()
    });
    let mut said = err.map(|err| pass_on(err, |line| eprintln!("{line}"))).unwrap_or_default();
    said.push_str(
        &other.join().map_err(|_| Failure::new("the thread that reads the output panicked"))?,
    );
    let status = child.wait().context(format!("wait for `{text}`"))?;
    Ok((status.success(), said))
}

/// Reads to the end, giving each line to `show`, and returns everything.
fn pass_on(from: impl Read, show: impl Fn(&str)) -> String {
    let mut all = String::new();
    // A line that is no text shows as such; an unreadable pipe ends like a closed one.
    for line in BufReader::new(from).split(b'\n').map_while(std::result::Result::ok) {
        let line = String::from_utf8_lossy(&line);
        show(&line);
        all.push_str(&line);
        all.push('\n');
    }
    all
}

/// The command as a person would type it, nearly.
fn describe(command: &Command) -> String {
    let program = PathBuf::from(command.get_program());
    let mut text = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_program_over_its_limit_is_ended() {
        assert!(run_within(Duration::from_mins(1), &mut shell("exit 0")).is_ok());
        let error =
            run_within(Duration::from_mins(1), &mut shell("exit 3")).unwrap_err().to_string();
        assert!(error.ends_with("exit status: 3"), "{error}");
        let error = run_within(Duration::ZERO, &mut shell("exec tail -f /dev/null"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("no end after 0 s"), "{error}");
    }

    #[test]
    fn what_a_program_says_is_kept_and_its_end_is_told() {
        let (ended_well, said) = listen(&mut shell("echo out; echo err >&2; exit 1")).unwrap();
        assert!(!ended_well);
        assert!(said.contains("out\n") && said.contains("err\n"), "{said}");
        assert_eq!(output(&mut shell("echo out")).unwrap(), "out\n");
        assert!(output(&mut shell("exit 1")).is_err());
    }
}
