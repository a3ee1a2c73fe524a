//! The `dormouse` program: the daemon, and the command line that talks to it.
//!
//! Data goes to standard output, everything else to standard error. Where a guest's command is run or waited for, the exit code
//! is its own (128 + the signal that ended it), and 125 to 127 where it did not come to that; else 0, 1 (it could not be done)
//! or 2 (wrong usage).
#![forbid(unsafe_code)]

mod account_args;
mod box_args;
mod boxes_args;
mod cli;
mod client;
mod commands;
mod doctor;
mod mcp;
mod problem;
mod serve;
mod show;
mod tls;
mod tree;

use std::io;

use clap::Parser;

use boxes_args::BoxesCommand;
use cli::{Cli, Command, ExecsCommand, ImagesCommand, SandboxesCommand};
use client::Client;
use problem::Problem;

/// Commands whose exit code is that of a command in a guest.
const RUNNERS: [&str; 3] = ["exec", "run", "shell"];

fn main() {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => std::process::exit(misused(&error)),
    };
    let json = cli.json;
    let beside_commands = matches!(
        &cli.command,
        Command::Exec(_)
            | Command::Run(_)
            | Command::Shell(_)
            | Command::Execs(ExecsCommand::Wait { .. })
            | Command::Boxes(BoxesCommand::Exec(_))
    );
    let code = match run(cli) {
        Ok(code) => code,
        Err(problem) => {
            problem.print(json);
            if beside_commands { problem.exit_code_beside_commands() } else { problem.exit_code() }
        }
    };
    // Not by returning: a thread that still reads standard input would be waited for.
    std::process::exit(code);
}

/// Says what is wrong with what was typed, or the help that was asked for; answers the exit code.
fn misused(error: &clap::Error) -> i32 {
    // Nobody can be told that neither stream can be written to.
    let _ = error.print();
    let runner = std::env::args().nth(1).is_some_and(|word| RUNNERS.contains(&word.as_str()));
    if error.use_stderr() && runner { problem::EXIT_OWN_FAILURE } else { error.exit_code() }
}

fn run(cli: Cli) -> Result<i32, Problem> {
    match &cli.command {
        Command::Openapi => {
            show::data(control::openapi().trim_end())?;
            return Ok(0);
        }
        Command::Completions { shell } => {
            let mut command = <Cli as clap::CommandFactory>::command();
            // It panics where it cannot write, as into `head` that has seen enough.
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut command, "dormouse", &mut text);
            show::bytes(&text)?;
            return Ok(0);
        }
        _ => {}
    }
    if let Command::Serve(_) = &cli.command {
        go_before_guests();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Problem::new(format!("cannot start: {error}")))?;
    let result = runtime.block_on(dispatch(cli));
    // What still waits for standard input is left behind.
    runtime.shutdown_background();
    result
}

/// How much the daemon goes before its guests on a busy machine, as a "nice" value: what passes through it is waited for by
/// people, while guests may compute for hours. Guests run at the usual 0.
const DAEMON_NICE: i32 = -5;

/// Unless whoever started it has said otherwise. Threads have it from the one that makes them, so there must be no others yet.
fn go_before_guests() {
    if rustix::process::getpriority_process(None) != Ok(0) {
        return;
    }
    let mut set = rustix::process::setpriority_process(None, DAEMON_NICE).map_err(io::Error::from);
    // Where the kernel shares processors out to sessions first (`sched_autogroup_enabled`), that counts within a session alone. As a
    // service it has one of its own; that of somebody's shell is not changed.
    if set.is_ok() && leads_its_session() {
        set = match std::fs::write("/proc/self/autogroup", DAEMON_NICE.to_string()) {
            // A kernel without.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            written => written,
        };
    }
    // Without the right to do so it goes as all others do.
    if let Err(error) = set {
        eprintln!("dormouse: does not go before its guests on a busy machine: {error}");
    }
}

/// Asks `/proc`, by proc(5)'s field 6: `getsid` answers 0 in a container whose session was begun outside of it, which is no id.
fn leads_its_session() -> bool {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name, in brackets, may hold anything: fields count from the last bracket, the third on.
    let session = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().nth(3));
    session.and_then(|session| session.parse().ok()) == Some(std::process::id())
}

async fn dispatch(cli: Cli) -> Result<i32, Problem> {
    let json = cli.json;
    let data = cli.connection.data.clone();
    let client = || Client::new(&cli.connection);
    match cli.command {
        Command::Serve(arguments) => Box::pin(serve::serve(&data, arguments)).await,
        Command::Mcp(arguments) => mcp::serve(client()?, &arguments).await,
        Command::Doctor(arguments) => doctor::doctor(&data, &arguments, json).await,
        Command::Images(ImagesCommand::Build(arguments)) => {
            commands::images::build(&data, arguments, json).await
        }
        Command::Sandboxes(SandboxesCommand::Create(arguments)) => {
            commands::sandboxes::create(&client()?, arguments, json).await
        }
        Command::Sandboxes(SandboxesCommand::List(arguments)) => {
            commands::sandboxes::list(&client()?, arguments, json).await
        }
        Command::Sandboxes(SandboxesCommand::Get { name }) => {
            commands::sandboxes::get(&client()?, &name, json).await
        }
        Command::Sandboxes(SandboxesCommand::Update(arguments)) => {
            commands::sandboxes::update(&client()?, arguments, json).await
        }
        Command::Sandboxes(SandboxesCommand::Sleep(arguments)) => {
            commands::sandboxes::sleep(&client()?, arguments, json).await
        }
        Command::Sandboxes(SandboxesCommand::Restart {
            name,
            drives,
            no_drives,
            volumes,
            no_volumes,
        }) => {
            let drives = (no_drives || !drives.is_empty()).then_some(drives);
            let volumes = (no_volumes || !volumes.is_empty()).then_some(volumes);
            let body = api::sandbox::RestartRequest { drives, volumes };
            commands::sandboxes::restart(&client()?, &name, &body, json).await
        }
        Command::Sandboxes(SandboxesCommand::Delete { names }) => {
            commands::sandboxes::delete(&client()?, &names, json).await
        }
        Command::Boxes(command) => commands::boxes::boxes(&client()?, command, json).await,
        Command::Fork(arguments) => commands::sandboxes::fork(&client()?, arguments, json).await,
        Command::Exec(arguments) => commands::exec::exec(&client()?, arguments, json).await,
        Command::Run(arguments) => commands::exec::run(&client()?, arguments, json).await,
        Command::Shell(arguments) => commands::shell::shell(&client()?, arguments).await,
        Command::Terminals(command) => commands::shell::terminals(&client()?, command, json).await,
        Command::Execs(ExecsCommand::List { name }) | Command::Ps { name } => {
            commands::execs::list(&client()?, &name, json).await
        }
        Command::Execs(ExecsCommand::Output(arguments)) => {
            commands::execs::output(&client()?, arguments, json).await
        }
        Command::Execs(ExecsCommand::Wait { name, exec }) => {
            commands::execs::wait(&client()?, &name, &exec, json).await
        }
        Command::Execs(ExecsCommand::Kill { name, exec, signal }) => {
            commands::execs::kill(&client()?, &name, &exec, signal).await
        }
        Command::Files(command) => commands::files::files(&client()?, command, json).await,
        Command::Link { name, port } => {
            commands::sandboxes::link(&client()?, &name, port, json).await
        }
        Command::Drives(command) => commands::drives::drives(&client()?, command, json).await,
        Command::Volumes(command) => commands::volumes::volumes(&client()?, command, json).await,
        Command::Snapshots(command) => {
            commands::snapshots::snapshots(&client()?, command, json).await
        }
        Command::Checkpoints(command) => {
            commands::checkpoints::checkpoints(&client()?, command, json).await
        }
        Command::Accounts(command) => commands::accounts::accounts(&client()?, command, json).await,
        Command::Keys(command) => commands::accounts::keys(&client()?, command, json).await,
        Command::Secrets(command) => commands::secrets::secrets(&client()?, command, json).await,
        Command::Project { delete_after_idle_days, spending_limit } => {
            let change = commands::project::change(delete_after_idle_days, spending_limit);
            commands::project::project(&client()?, change, json).await
        }
        Command::Forward(arguments) => commands::forward::forward(&client()?, arguments).await,
        Command::Usage { name } => commands::usage::usage(&client()?, name.as_deref(), json).await,
        Command::Drain { stop } => commands::usage::drain(&client()?, stop, json).await,
        Command::Why { name } => commands::events::why(&client()?, &name, json).await,
        Command::Events(arguments) => commands::events::events(&client()?, arguments, json).await,
        Command::Logs(arguments) => commands::events::logs(&client()?, arguments).await,
        Command::Openapi | Command::Completions { .. } => Ok(0),
    }
}
