//! `sandbox_exec` and `sandbox_procs`.

use std::fmt::Write as _;

use api::boxes::act::{BoxExec, BoxExecResult, BoxProcesses};
use rmcp::model::{JsonObject, Tool};

use super::Call;
use super::answer::Outcome;
use super::tool::{Does, Nothing, about_a_box, read_about, tool};
use crate::boxes::{self, Way};
use crate::failure::Failure;

/// Bytes of output in one answer unless asked otherwise: as much as a model reads at once.
const OUTPUT_BYTES: u64 = 30_000;
/// Most processes in the text; the data has all.
const PROCESSES_MAX: usize = 100;

const EXEC: &str = "\
Runs a command in a box as root with bash (in /work unless cwd says otherwise) and returns its output, standard output and error in the \
order written, and its exit code. Thaws the box if it is frozen, and holds it awake until the answer.

A foreground command is waited for as long as your client can wait for one call (about 25 seconds unless it says more), or waitSec. If \
it has not ended by then it runs on by itself: running is true, and the same tool with execId and offset: nextOffset reads on. Do the \
same where truncated is true: at most 30000 bytes come at once (maxBytes asks for more).

background: true answers at once with an execId and is meant for servers and long builds; let servers listen on 0.0.0.0. Read its output \
later with execId and waitSec: 0 (without waitSec that call waits for the command's end as any other). readOnly: true says that it changes nothing. Commands share the box's files \
and network, but each is a shell of its own: `cd` and variables do not carry over.";

pub(super) fn exec_tool() -> Tool {
    about_a_box(tool::<BoxExec, BoxExecResult>("sandbox_exec", "Run a command", Does::Change, EXEC))
}

pub(super) async fn exec(call: &Call, arguments: JsonObject) -> Result<Outcome, Failure> {
    let (id, request): (_, BoxExec) = read_about(arguments)?;
    let way = Way { bytes: OUTPUT_BYTES, waits: Some(call.waits), notes: true };
    // Nobody waits for the end of a server.
    let wait_sec = if request.background { Some(0) } else { request.wait_sec };
    let done = boxes::exec(&call.app, &call.who, &id, way, request).await?;
    Outcome::new(exec_text(&id, wait_sec, &done), &done)
}

/// `wait_sec`: how long the call that reads on waits for more; `None`: as long as the client can.
fn exec_text(id: &str, wait_sec: Option<u64>, done: &BoxExecResult) -> String {
    let mut text = String::new();
    if let Some(note) = &done.note {
        text = format!("[{note}]\n");
    }
    text.push_str(&done.output);
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    let BoxExecResult { exec_id, next_offset, .. } = done;
    let state = match (done.running, done.exit_code, done.signal) {
        (true, ..) => "it runs".to_owned(),
        _ if done.timed_out => "timeoutSec ran out, and it was killed".to_owned(),
        (false, Some(code), _) => format!("exit code {code}"),
        (false, None, Some(signal)) => format!("ended by signal {signal}"),
        (false, None, None) => "ended".to_owned(),
    };
    let more = match (done.truncated, done.running) {
        (true, _) => "there is more output",
        (false, true) => "read on later",
        (false, false) => "",
    };
    if more.is_empty() {
        // Writing to a string cannot fail.
        let _ = write!(text, "[{state}]");
    } else {
        let mut call = serde_json::json!({ "id": id, "execId": exec_id, "offset": next_offset });
        if let Some(wait_sec) = wait_sec {
            call["waitSec"] = wait_sec.into();
        }
        let _ = write!(text, "[{state}; {more}: sandbox_exec {call}]");
    }
    text
}

const PROCS: &str = "\
Lists the processes of a box with their memory, processor time and the TCP ports on which they listen: whether your server is up, and \
on which port. Thaws the box if it is frozen.";

pub(super) fn procs_tool() -> Tool {
    about_a_box(tool::<Nothing, BoxProcesses>("sandbox_procs", "List processes", Does::Tell, PROCS))
}

pub(super) async fn procs(call: &Call, arguments: JsonObject) -> Result<Outcome, Failure> {
    let (id, Nothing {}) = read_about(arguments)?;
    let listed = boxes::procs(&call.app, &call.who, &id).await?;
    let mut text = "PID  PPID  MiB  CPU-s  PORTS  COMMAND\n".to_owned();
    for one in listed.processes.iter().take(PROCESSES_MAX) {
        let ports: Vec<String> = one.listens.iter().map(u16::to_string).collect();
        let ports = if ports.is_empty() { "-".to_owned() } else { ports.join(",") };
        let command: String = one.command.chars().take(200).collect();
        let _ = writeln!(
            text,
            "{}  {}  {}  {}  {ports}  {command}",
            one.pid, one.ppid, one.memory_mib, one.cpu_sec
        );
    }
    if let Some(more) = listed.processes.len().checked_sub(PROCESSES_MAX).filter(|more| *more > 0) {
        let _ = writeln!(text, "… and {more} more");
    }
    Outcome::new(text, &listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done() -> BoxExecResult {
        BoxExecResult {
            exec_id: "e1".into(),
            running: false,
            exit_code: Some(0),
            signal: None,
            timed_out: false,
            output: "ok".into(),
            next_offset: 2,
            truncated: false,
            note: None,
        }
    }

    #[test]
    fn the_text_says_how_it_ended_and_how_to_read_on() {
        assert_eq!(exec_text("b", None, &done()), "ok\n[exit code 0]");
        let runs = BoxExecResult { running: true, exit_code: None, ..done() };
        assert_eq!(
            exec_text("b", None, &runs),
            "ok\n[it runs; read on later: sandbox_exec {\"id\":\"b\",\"execId\":\"e1\",\"offset\":2}]"
        );
        assert!(exec_text("b", Some(0), &runs).ends_with("\"offset\":2,\"waitSec\":0}]"));
        let long = BoxExecResult { truncated: true, note: Some("Thawed.".into()), ..done() };
        assert_eq!(
            exec_text("b", None, &long),
            "[Thawed.]\nok\n[exit code 0; there is more output: sandbox_exec {\"id\":\"b\",\"execId\":\"e1\",\"offset\":2}]"
        );
        let killed =
            BoxExecResult { exit_code: None, signal: Some(9), output: String::new(), ..done() };
        assert_eq!(exec_text("b", None, &killed), "[ended by signal 9]");
    }
}
