//! Programs of the host, run one at a time, with a time limit and their last words kept for the error.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader, Split};
use tokio::process::{Child, Command};

use super::ImageError;

/// How many of a program's last lines an error shows.
const TAIL_LINES_MAX: usize = 15;
/// How many characters of each of them.
const TAIL_LINE_CHARS_MAX: usize = 300;
/// How much standard output is kept, in bytes: the longest we ask for is a package's record.
const STDOUT_BYTES_MAX: usize = 1 << 20;
/// How long a program may take to end after it was asked to, before it is killed.
const END_GRACE: Duration = Duration::from_secs(10);

/// Where programs are looked for besides `PATH`: a user's `PATH` in Debian lacks the `sbin` folders.
const SYSTEM_FOLDERS: [&str; 4] = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// The program's path, or which package brings it.
pub(crate) fn program(name: &'static str, package: &'static str) -> Result<PathBuf, ImageError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(SYSTEM_FOLDERS.iter().map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
        .ok_or(ImageError::MissingProgram { program: name, package })
}

/// Runs a command to its end and returns what it wrote to standard output.
///
/// `doing` says what for, in an error. Each line of standard error is given to `heard`.
pub(crate) async fn run(
    mut command: Command,
    doing: &str,
    limit: Duration,
    heard: &mut (dyn FnMut(&str) + Send),
) -> Result<String, ImageError> {
    command.stdout(Stdio::piped());
    start(command, doing, limit, heard).await
}

/// Runs a command to its end with its standard output going into `file`.
pub(super) async fn run_into(
    mut command: Command,
    doing: &str,
    limit: Duration,
    file: std::fs::File,
) -> Result<(), ImageError> {
    command.stdout(file);
    start(command, doing, limit, &mut |_| {}).await?;
    Ok(())
}

async fn start(
    mut command: Command,
    doing: &str,
    limit: Duration,
    heard: &mut (dyn FnMut(&str) + Send),
) -> Result<String, ImageError> {
    command
        .env("LC_ALL", "C.UTF-8")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let program = PathBuf::from(command.as_std().get_program());
    let failed = |source| ImageError::Io { doing: "run", path: program.clone(), source };
    let mut child = command.spawn().map_err(failed)?;
    share_processors(&child);
    let mut said = Said::default();
    let ended = tokio::time::timeout(limit, listen(&mut child, &mut said, heard)).await;
    match ended {
        Ok(Ok(status)) if status.success() => Ok(said.stdout),
        Ok(Ok(status)) => Err(ImageError::Command {
            doing: doing.to_owned(),
            status: status.to_string(),
            tail: said.tail(),
        }),
        Ok(Err(source)) => Err(failed(source)),
        Err(_) => {
            end(&mut child).await;
            Err(ImageError::TimedOut { doing: doing.to_owned(), limit, tail: said.tail() })
        }
    }
}

/// A daemon that goes before its guests does not pass that on to a program that may work for minutes.
fn share_processors(child: &Child) {
    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    let set = match rustix::process::getpriority_process(None) {
        Ok(own) if own < 0 => rustix::process::setpriority_process(pid, 0),
        other => other.map(drop),
    };
    if let Err(error) = set {
        tracing::warn!(%error, "a program of the host goes before guests on a busy machine");
    }
}

/// What a program said so far.
#[derive(Debug, Default)]
struct Said {
    stdout: String,
    last: VecDeque<String>,
}

impl Said {
    fn keep(&mut self, line: &str) {
        if self.last.len() == TAIL_LINES_MAX {
            self.last.pop_front();
        }
        self.last.push_back(line.chars().take(TAIL_LINE_CHARS_MAX).collect());
    }

    fn tail(&self) -> String {
        self.last.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

/// Reads both outputs to their ends, then waits for the program.
async fn listen(
    child: &mut Child,
    said: &mut Said,
    heard: &mut (dyn FnMut(&str) + Send),
) -> std::io::Result<std::process::ExitStatus> {
    let mut out = Lines::of(child.stdout.take());
    let mut err = Lines::of(child.stderr.take());
    while !(out.ended && err.ended) {
        tokio::select! {
            line = out.next(), if !out.ended => if let Some(line) = line? {
                if said.stdout.len() + line.len() < STDOUT_BYTES_MAX {
                    said.stdout.push_str(&line);
                    said.stdout.push('\n');
                }
                said.keep(&line);
            },
            line = err.next(), if !err.ended => if let Some(line) = line? {
                said.keep(&line);
                heard(&line);
            },
        }
    }
    child.wait().await
}

/// One output of a program, line by line.
struct Lines<R> {
    reader: Option<Split<BufReader<R>>>,
    ended: bool,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    fn of(output: Option<R>) -> Self {
        let reader = output.map(|output| BufReader::new(output).split(b'\n'));
        Self { ended: reader.is_none(), reader }
    }

    /// The next line, whatever bytes are in it. `None` once, at the end. Cancel safe.
    async fn next(&mut self) -> std::io::Result<Option<String>> {
        let line = match &mut self.reader {
            Some(reader) => reader.next_segment().await?,
            None => None,
        };
        self.ended = line.is_none();
        Ok(line.map(|line| String::from_utf8_lossy(&line).into_owned()))
    }
}

/// Asks the program to end, so that it undoes its mounts; kills it if it does not.
async fn end(child: &mut Child) {
    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    if let Some(pid) = pid
        && kill_process(pid, Signal::TERM).is_ok()
        && tokio::time::timeout(END_GRACE, child.wait()).await.is_ok()
    {
        return;
    }
    if let Err(error) = child.kill().await {
        tracing::warn!(%error, "program of the image builder not ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[tokio::test]
    async fn output_is_returned_and_remarks_are_passed_on() {
        let mut heard = Vec::new();
        let mut hear = |line: &str| heard.push(line.to_owned());
        let script = "echo out; echo remark >&2; printf end";
        let output = run(shell(script), "try", END_GRACE, &mut hear).await.unwrap();
        assert_eq!(output, "out\nend\n");
        assert_eq!(heard, ["remark"]);
    }

    /// Lowering the number needs a right that root has; without it there is nothing to pass on.
    #[tokio::test]
    async fn a_program_has_the_usual_share_of_the_processors() {
        let raised = rustix::process::setpriority_process(None, -5);
        let script = "until [ \"$(nice)\" = 0 ]; do :; done";
        run(shell(script), "look", END_GRACE, &mut |_| {}).await.unwrap();
        if raised.is_ok() {
            rustix::process::setpriority_process(None, 0).unwrap();
        }
    }

    #[tokio::test]
    async fn a_failure_shows_the_last_words() {
        let script = "for i in $(seq 40); do echo line $i >&2; done; exit 3";
        let error = run(shell(script), "count", END_GRACE, &mut |_| {}).await.unwrap_err();
        let ImageError::Command { doing, status, tail } = error else { panic!("{error}") };
        assert_eq!((doing.as_str(), status.as_str()), ("count", "exit status: 3"));
        assert!(tail.starts_with("line 26\n") && tail.ends_with("\nline 40"), "{tail}");
    }

    #[tokio::test]
    async fn one_that_does_not_end_is_ended() {
        let script = "echo begun; exec tail -f /dev/null";
        let limit = Duration::from_millis(100);
        let error = run(shell(script), "wait", limit, &mut |_| {}).await.unwrap_err();
        assert!(matches!(error, ImageError::TimedOut { .. }), "{error}");
    }

    #[tokio::test]
    async fn one_that_is_ended_may_clear_up() {
        let mut command =
            shell("trap 'echo cleared; exit 1' TERM; echo ready; while :; do :; done");
        let mut child = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let mut lines = Lines::of(child.stdout.take());
        assert_eq!(lines.next().await.unwrap().as_deref(), Some("ready"));
        end(&mut child).await;
        assert_eq!(lines.next().await.unwrap().as_deref(), Some("cleared"));
    }

    #[test]
    fn a_missing_program_names_its_package() {
        let error = program("no-such-program-here", "its-package").unwrap_err().to_string();
        assert!(error.contains("apt-get install its-package"), "{error}");
    }
}
