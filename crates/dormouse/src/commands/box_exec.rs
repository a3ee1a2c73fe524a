//! What runs in a box: running a command, whose exit code becomes ours, reading on the output of one, and tables of commands and
//! processes.

use api::boxes::act::{BoxCommand, BoxExec, BoxExecResult, BoxProcess};

use super::EXIT_NO_READER;
use crate::boxes_args::BoxExecArgs;
use crate::client::Client;
use crate::problem::Problem;
use crate::show;

/// How long one call waits for the end of the command: so late what it writes is shown.
const WAIT_SECONDS: u64 = 1;
/// What a line begins with that becomes a program.
const BECOMES: &str = "exec -- ";
/// Exit code after Ctrl-C, as shells have it.
const EXIT_INTERRUPTED: i32 = 128 + 2;

/// `place`: where the box is in the interface.
pub(super) async fn exec(
    client: &Client,
    place: &str,
    arguments: BoxExecArgs,
    json: bool,
) -> Result<i32, Problem> {
    let BoxExecArgs { which, cwd, env, timeout, background, read, argv } = arguments;
    let place = format!("{place}/exec");
    let first = BoxExec {
        command: read.is_none().then(|| line(&argv)),
        exec_id: read,
        cwd,
        env: env.into_iter().collect(),
        background,
        timeout_sec: timeout,
        wait_sec: Some(WAIT_SECONDS),
        ..BoxExec::default()
    };
    let mut result: BoxExecResult = client.json("POST", &place, Some(&first)).await?;
    if let Some(note) = &result.note {
        eprintln!("note: {}", show::plain(note));
    }
    if background {
        if json {
            show::json(&result)?;
        } else {
            show::data(&result.exec_id)?;
        }
        return Ok(0);
    }
    let interrupted = tokio::signal::ctrl_c();
    tokio::pin!(interrupted);
    let mut kept = String::new();
    loop {
        if json {
            kept.push_str(&result.output);
        } else if let Err(error) = show::pass(result.output.as_bytes()) {
            if error.kind() == std::io::ErrorKind::BrokenPipe {
                return Ok(EXIT_NO_READER);
            }
            return Err(Problem::new(format!("cannot write to standard output: {error}")));
        }
        if !result.running && !result.truncated {
            break;
        }
        let on = BoxExec {
            exec_id: Some(result.exec_id.clone()),
            offset: Some(result.next_offset),
            wait_sec: Some(WAIT_SECONDS),
            ..BoxExec::default()
        };
        result = tokio::select! {
            read = client.json("POST", &place, Some(&on)) => read?,
            _ = &mut interrupted => {
                let (given, id) = (quoted(&which.given), &result.exec_id);
                eprintln!("note: the command goes on: `dormouse boxes exec {given} --read {id}` shows it");
                return Ok(EXIT_INTERRUPTED);
            }
        };
    }
    if result.timed_out {
        eprintln!("note: the command was killed when its time-out ran out");
    }
    let code = result.exit_code.unwrap_or_else(|| 128 + result.signal.unwrap_or_default());
    if json {
        show::json(&BoxExecResult { output: kept, ..result })?;
    }
    Ok(code)
}

/// A line for bash that becomes this program with these arguments: no word of it is one of the shell's own.
fn line(argv: &[String]) -> String {
    let words: Vec<_> = argv.iter().map(|word| quoted(word)).collect();
    format!("{BECOMES}{}", words.join(" "))
}

/// A word that a shell takes as it is.
fn quoted(word: &str) -> String {
    let harmless = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:@%+,".contains(&byte);
    if !word.is_empty() && word.bytes().all(harmless) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Commands in a table.
pub(super) fn commands(commands: &[BoxCommand]) -> Result<(), Problem> {
    let rows: Vec<_> = commands.iter().map(row).collect();
    show::table(&["ID", "STATUS", "PID", "OUTPUT", "COMMAND"], &rows)
}

fn row(command: &BoxCommand) -> Vec<String> {
    let status = match (command.running, command.exit_code, command.signal) {
        (true, ..) => "running".to_owned(),
        (false, _, Some(signal)) => format!("signal {signal}"),
        (false, Some(code), _) => format!("exit {code}"),
        (false, None, None) => "lost".to_owned(),
    };
    let line = command.command.strip_prefix(BECOMES).unwrap_or(&command.command);
    vec![
        command.exec_id.clone(),
        if command.timed_out { format!("{status} (time-out)") } else { status },
        command.pid.to_string(),
        show::size(command.output_bytes),
        show::plain(line),
    ]
}

/// Processes in a table.
pub(super) fn processes(processes: &[BoxProcess]) -> Result<(), Problem> {
    let row = |process: &BoxProcess| {
        let listens: Vec<_> = process.listens.iter().map(u16::to_string).collect();
        vec![
            process.pid.to_string(),
            process.ppid.to_string(),
            format!("{} MiB", process.memory_mib),
            show::seconds(process.cpu_sec),
            listens.join(","),
            show::plain(&process.command),
        ]
    };
    let rows: Vec<_> = processes.iter().map(row).collect();
    show::table(&["PID", "PARENT", "MEMORY", "CPU", "LISTENS", "COMMAND"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_told_as_it_was_typed_with_how_it_ended() {
        let told = |more: serde_json::Value| {
            let mut command = serde_json::json!({
                "execId": "hnkainteaodl", "pid": 412, "command": "exec -- npm test", "running": false, "outputBytes": 3,
            });
            for (field, value) in more.as_object().unwrap() {
                command[field] = value.clone();
            }
            row(&serde_json::from_value(command).unwrap())[1..].join(" | ")
        };
        assert_eq!(told(serde_json::json!({ "exitCode": 0 })), "exit 0 | 412 | 3 B | npm test");
        let killed = serde_json::json!({ "signal": 9, "timedOut": true, "command": "a\nb" });
        assert_eq!(told(killed), "signal 9 (time-out) | 412 | 3 B | a b");
        assert_eq!(told(serde_json::json!({ "running": true })), "running | 412 | 3 B | npm test");
    }

    #[test]
    fn arguments_arrive_as_they_were_typed() {
        let argv = ["printf", "%s\n", "it's", "", "$HOME", "a b", "A=b", "ü"];
        let line = line(&argv.map(str::to_owned));
        let run =
            |line: &str| std::process::Command::new("bash").args(["-c", line]).output().unwrap();
        let text = String::from_utf8(run(&line).stdout).unwrap();
        assert_eq!(text, "it's\n\n$HOME\na b\nA=b\nü\n", "{line}");
        for word in ["if", "A=b", "-a", "no such program"] {
            let line = super::line(&[word.to_owned()]);
            assert_eq!(run(&line).status.code(), Some(127), "{line}");
        }
    }
}
