//! What may be typed.

use std::path::PathBuf;

use crate::account_args::{AccountsCommand, KeysCommand, SecretsCommand};
use crate::box_args::BoxArgs;
use crate::boxes_args::BoxesCommand;
use api::drive::{AttachDrive, AttachVolume};
use api::sandbox::{SleepTier, Status};
use clap::{Args, Parser, Subcommand, ValueEnum};

/// The data folder, unless told otherwise.
pub(crate) const DATA_DEFAULT: &str = "/var/lib/dormouse";

/// Sandboxes that sleep.
///
/// Each sandbox is a small virtual machine. It sleeps when nothing needs it and wakes, exactly where it was, when
/// anything does: a command, a file, a request to one of its ports: there is no command for waking one.
/// Boxes are the sandboxes of AI clients (`dormouse mcp`); `dormouse boxes` looks after them.
#[derive(Debug, Parser)]
#[command(name = "dormouse", version, propagate_version = true, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,

    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXIT_CODES: &str = "\
Exit codes:
  exec, run, shell, execs wait, boxes exec
             the command's own; 128 + the signal's number if a signal ended it;
             127 if there is no such program, 126 if it cannot be started,
             125 if Dormouse itself failed, 141 if nobody reads standard output any more
  all others
             0 done; 1 not done, standard error says why; 2 wrong usage";

/// Where the daemon is.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Connection")]
pub(crate) struct ConnectionArgs {
    /// Local socket of the daemon; default `dormouse.sock` in the data folder.
    #[arg(long, global = true, env = "DORMOUSE_SOCKET", value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// URL of a daemon to talk to over the network, such as `https://dormouse.example`; needs a token.
    #[arg(long, global = true, env = "DORMOUSE_URL", value_name = "URL")]
    pub(crate) url: Option<String>,

    /// Token for `--url`.
    #[arg(
        long,
        global = true,
        env = "DORMOUSE_TOKEN",
        value_name = "TOKEN",
        hide_env_values = true
    )]
    pub(crate) token: Option<String>,

    /// Whose boxes and secrets it is about, for operators; default: the account that the token is for.
    #[arg(long = "as-account", global = true, env = "DORMOUSE_ACCOUNT", value_name = "ID")]
    pub(crate) account: Option<String>,

    /// PEM file of the authorities that a daemon's certificate may come from; default: those of this system.
    #[arg(long, global = true, env = "DORMOUSE_CA", value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,

    /// Data folder of the daemon on this machine.
    #[arg(long = "data", global = true, env = "DORMOUSE_DATA", value_name = "DIR", default_value = DATA_DEFAULT)]
    pub(crate) data: PathBuf,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make, list, change and delete sandboxes.
    #[command(subcommand, visible_alias = "sandbox")]
    Sandboxes(SandboxesCommand),
    /// Boxes, which AI clients start: list them, look into them, stop them and bring them back.
    #[command(subcommand, visible_alias = "box")]
    Boxes(BoxesCommand),
    /// Run a command in a sandbox and get its output and exit code.
    Exec(ExecArgs),
    /// Run one command in a new sandbox that is deleted afterwards.
    Run(RunArgs),
    /// Open a terminal in a sandbox, or join one.
    ///
    /// The terminal goes on while nobody looks, over sleep and restarts of the daemon: `--attach` joins it again. Asleep, its
    /// screen stays, and the next key wakes the sandbox. Enter, `~` and `.` leave it running; Enter, `~` and `~` type a `~`.
    Shell(ShellArgs),
    /// List and close terminals of a sandbox, and read their screens.
    #[command(subcommand)]
    Terminals(TerminalsCommand),
    /// List commands of a sandbox, read their output, wait for them and signal them.
    #[command(subcommand)]
    Execs(ExecsCommand),
    /// List the commands of a sandbox: `execs list`.
    Ps {
        /// Name or id of the sandbox.
        name: String,
    },
    /// Copy, list, move and remove files of a sandbox.
    #[command(subcommand)]
    Files(FilesCommand),
    /// Print the URL of a port of a sandbox.
    Link {
        /// Name or id of the sandbox.
        name: String,
        /// Port in the sandbox.
        #[arg(value_parser = port)]
        port: u16,
    },
    /// Copy a sandbox with its memory, disk and running processes.
    Fork(ForkArgs),
    /// Keep sandboxes of one moment under names, to make others from them (`sandboxes create --snapshot`).
    #[command(subcommand, visible_alias = "snapshot")]
    Snapshots(SnapshotsCommand),
    /// Disks that outlive sandboxes, attached to one at a time (`sandboxes create --drive`).
    #[command(subcommand, visible_alias = "drive")]
    Drives(DrivesCommand),
    /// Files that many sandboxes share and none can write (`sandboxes create --volume`).
    #[command(subcommand, visible_alias = "volume")]
    Volumes(VolumesCommand),
    /// Checkpoints in the object store, from which another host takes up a sandbox.
    #[command(subcommand)]
    Checkpoints(CheckpointsCommand),
    /// Accounts, to which boxes belong: plans, credit, and from where URLs may be opened.
    #[command(subcommand, visible_alias = "account")]
    Accounts(AccountsCommand),
    /// Keys with which programs use the interface, each for an account.
    #[command(subcommand, visible_alias = "key")]
    Keys(KeysCommand),
    /// Secrets that boxes are started with, as environment variables of their commands.
    #[command(subcommand, visible_alias = "secret")]
    Secrets(SecretsCommand),
    /// Show the project's settings, or change them.
    Project {
        /// Days that a sandbox may sleep before it is deleted, unless it has a setting of its own; or `never`.
        #[arg(long, value_name = "DAYS|never", value_parser = or_never)]
        delete_after_idle_days: Option<OrNever>,
        /// What all sandboxes together may use in a calendar month: GiB of memory awake times hours, such as `500h`, as `dormouse
        /// usage` tells them, or times seconds, such as `1800000`. When it is reached they are put to sleep, and none is made or
        /// woken. Or `none`.
        #[arg(long, value_name = "HOURSh|SECONDS|none", value_parser = spending_limit)]
        spending_limit: Option<OrNever>,
    },
    /// Explain why a sandbox is awake or asleep, and what happened to it.
    Why {
        /// Name or id of the sandbox.
        name: String,
    },
    /// Print the timeline of a sandbox.
    Events(EventsArgs),
    /// Print a log of a sandbox: its boot console, or what the daemon did with it.
    Logs(LogsArgs),
    /// Make a port of a sandbox a port of this machine, until interrupted. A connection to it wakes the sandbox.
    Forward(ForwardArgs),
    /// Tell what sandboxes have used: seconds awake and asleep, processor time, bytes kept.
    Usage {
        /// Name or id of one sandbox; default: all.
        name: Option<String>,
    },
    /// Put every sandbox to sleep on disk, as before this machine goes down.
    Drain {
        /// End the daemon afterwards, so that nothing wakes again.
        #[arg(long)]
        stop: bool,
    },
    /// Build guest images.
    #[command(subcommand)]
    Images(ImagesCommand),
    /// Say what this machine lacks to run sandboxes, and how to get it.
    Doctor(DoctorArgs),
    /// Run the daemon.
    Serve(ServeArgs),
    /// Give AI clients the tools of boxes: the Model Context Protocol over standard input and output.
    ///
    /// For the settings of an AI client, which starts it. Files of the folder in which it runs go into boxes with sandbox_sync.
    Mcp(McpArgs),
    /// Print the OpenAPI document.
    Openapi,
    /// Print completions for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum SandboxesCommand {
    /// Make a sandbox; prints its name.
    Create(CreateArgs),
    /// List sandboxes. Wakes nothing.
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Tell about a sandbox: what it does and why, when it will sleep, how it sleeps. Wakes nothing.
    Get {
        /// Name or id.
        name: String,
    },
    /// Change a sandbox.
    Update(UpdateArgs),
    /// Put a sandbox to sleep now.
    Sleep(SleepArgs),
    /// Boot a sandbox anew from its disk: what ran is lost, what was written stays.
    Restart {
        /// Name or id.
        name: String,
        /// A drive that it shall have from now on, in place of those that it has; `:ro`: it cannot write it. May be given
        /// several times.
        #[arg(long = "drive", value_name = "NAME:PATH[:ro]", value_parser = drive)]
        drives: Vec<AttachDrive>,
        /// It shall have no drives from now on.
        #[arg(long, conflicts_with = "drives")]
        no_drives: bool,
        /// A volume that it shall have from now on, in place of those that it has. May be given several times.
        #[arg(long = "volume", value_name = "NAME:PATH", value_parser = volume)]
        volumes: Vec<AttachVolume>,
        /// It shall have no volumes from now on.
        #[arg(long, conflicts_with = "volumes")]
        no_volumes: bool,
    },
    /// Delete sandboxes with all they hold.
    #[command(visible_alias = "rm")]
    Delete {
        /// Names or ids.
        #[arg(required = true)]
        names: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    #[command(flatten)]
    pub(crate) size: SizeArgs,
    /// Name, unique: a-z, 0-9 and `-`; default: its id.
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// A label; may be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) label: Vec<(String, String)>,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
    /// Send the same request again safely: one key makes one sandbox.
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotsCommand {
    /// Take a snapshot of a sandbox, awake or asleep.
    Create {
        /// Name or id of the sandbox.
        sandbox: String,
        /// Name of the snapshot: a-z, 0-9 and `-`.
        name: String,
    },
    /// List snapshots.
    #[command(visible_alias = "ls")]
    List,
    /// Delete snapshots; what was made from them stays.
    #[command(visible_alias = "rm")]
    Delete {
        /// Names.
        #[arg(required = true)]
        names: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum DrivesCommand {
    /// Make an empty drive.
    Create {
        /// Its name: a-z, 0-9 and `-`.
        name: String,
        /// Size of its file system in MiB, or with `G` or `T`: 64 to 1T; default 10G. It takes room only as it is filled.
        #[arg(long, value_name = "SIZE", value_parser = size_mib)]
        size: Option<u64>,
    },
    /// List drives, and which sandbox has each.
    #[command(visible_alias = "ls")]
    List,
    /// Tell about one.
    Get {
        /// Its name.
        name: String,
    },
    /// Delete drives with all that is on them; refused while a sandbox has them.
    #[command(visible_alias = "rm")]
    Delete {
        /// Names.
        #[arg(required = true)]
        names: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum VolumesCommand {
    /// Make a volume of what is in a folder. It never changes.
    Create {
        /// Its name: a-z, 0-9 and `-`.
        name: String,
        /// The folder whose contents it has; `-`: a tar stream from standard input.
        folder: String,
    },
    /// List volumes, and which sandboxes have each.
    #[command(visible_alias = "ls")]
    List,
    /// Tell about one.
    Get {
        /// Its name.
        name: String,
    },
    /// Delete volumes; refused while a sandbox or a snapshot has them.
    #[command(visible_alias = "rm")]
    Delete {
        /// Names.
        #[arg(required = true)]
        names: Vec<String>,
    },
}

/// A volume and where it shall be: `NAME:PATH`.
fn volume(text: &str) -> Result<AttachVolume, String> {
    match text.split_once(':') {
        // A slip of `:ro` must not give a drive that can be written, at a path that nobody meant.
        Some((_, path)) if path.rsplit_once(':').is_some_and(|(_, end)| !end.contains('/')) => {
            Err("after the path only `:ro` may follow, such as `data:/data:ro`".to_owned())
        }
        Some((name, path)) if !name.is_empty() && path.starts_with('/') => {
            Ok(AttachVolume { name: name.to_owned(), path: path.to_owned() })
        }
        _ => {
            Err("the volume's name and a path in the sandbox, such as `models:/models`".to_owned())
        }
    }
}

/// MiB of a size such as `512`, `512M`, `10G` or `1T`.
fn size_mib(text: &str) -> Result<u64, String> {
    let wrong = || "a number of MiB, or of `G` or `T`, such as `512`, `10G` or `1T`".to_owned();
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let factor = match &text[digits.len()..] {
        "" | "M" | "MiB" => 1,
        "G" | "GiB" => 1024,
        "T" | "TiB" => 1024 * 1024,
        _ => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(factor).ok_or_else(wrong)
}

/// A drive and where it shall be: `NAME:PATH`, with `:ro` behind it for reading only.
fn drive(text: &str) -> Result<AttachDrive, String> {
    let (text, read_only) = match text.strip_suffix(":ro") {
        Some(text) => (text, true),
        None => (text, false),
    };
    match text.split_once(':') {
        Some((name, path)) if !name.is_empty() && path.starts_with('/') => {
            Ok(AttachDrive { name: name.to_owned(), path: path.to_owned(), read_only })
        }
        _ => Err("the drive's name and a path in the sandbox, such as `data:/data`".to_owned()),
    }
}

/// What a new sandbox is made of.
#[derive(Clone, Debug, Args)]
pub(crate) struct SizeArgs {
    /// Image to start from: `default` (the default), or the digest of one that was built.
    #[arg(long)]
    pub(crate) image: Option<String>,
    /// Snapshot to start from, with its memory and processes; decides about image and size.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["image", "cpus", "memory_mib"])]
    pub(crate) snapshot: Option<String>,
    /// Virtual processors, 1-8; default 1.
    #[arg(long)]
    pub(crate) cpus: Option<u32>,
    /// Memory in MiB, 256-16384; default 512.
    #[arg(long, value_name = "MIB")]
    pub(crate) memory_mib: Option<u32>,
    /// A drive that it shall have, and the folder where; `:ro`: it cannot write it. May be given several times.
    #[arg(long = "drive", value_name = "NAME:PATH[:ro]", value_parser = drive, conflicts_with = "snapshot")]
    pub(crate) drives: Vec<AttachDrive>,
    /// A volume that it shall have, and the folder where. May be given several times.
    #[arg(long = "volume", value_name = "NAME:PATH", value_parser = volume, conflicts_with = "snapshot")]
    pub(crate) volumes: Vec<AttachVolume>,
    /// Environment of every command; may be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) env: Vec<(String, String)>,
}

/// When and how it sleeps.
#[derive(Clone, Debug, Args)]
pub(crate) struct PolicyArgs {
    /// Quiet seconds after which it sleeps, or `never`; 30 if never said.
    #[arg(long, value_name = "SECONDS|never", value_parser = or_never)]
    pub(crate) sleep_after_seconds: Option<OrNever>,
    /// Seconds it sleeps in memory before it moves to disk; 0: straight to disk.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) memory_tier_seconds: Option<u64>,
    /// A port whose upgraded connections keep it awake; may be given several times.
    #[arg(long = "awake-port", value_name = "PORT", value_parser = port)]
    pub(crate) awake_ports: Option<Vec<u16>>,
    /// Seconds without a byte after which a connection to one of its ports is closed, or `never` (the default).
    #[arg(long, value_name = "SECONDS|never", value_parser = or_never)]
    pub(crate) connection_idle_seconds: Option<OrNever>,
    /// How long programs inside may hold it awake, milliseconds; 30000 if never said.
    #[arg(long, value_name = "MS")]
    pub(crate) sleep_hold_max_ms: Option<u64>,
    /// How long before it sleeps programs inside are told, milliseconds, or `never`.
    #[arg(long, value_name = "MS|never", value_parser = or_never)]
    pub(crate) sleep_notice_ms: Option<OrNever>,
    /// Milliseconds it may sleep before it is deleted, or `never` to go by the project's setting.
    #[arg(long, value_name = "MS|never", value_parser = or_never)]
    pub(crate) delete_after_idle_ms: Option<OrNever>,
    /// When it is deleted whatever it does, such as 2030-01-31T18:00:00Z, or `never`.
    #[arg(long, value_name = "TIME|never")]
    pub(crate) expires_at: Option<String>,
    /// Keep it in the object store each so many seconds (1-600) of being awake, so that another host can take it up; `on`:
    /// each 10; `off`: not.
    #[arg(long, value_name = "SECONDS|on|off", value_parser = checkpoint)]
    pub(crate) checkpoint: Option<Checkpointed>,
}

/// Seconds from one checkpoint to the next, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Checkpointed(pub(crate) Option<u64>);

pub(crate) fn checkpoint(text: &str) -> Result<Checkpointed, String> {
    match text {
        "on" => Ok(Checkpointed(Some(api::checkpoint::EVERY_SECONDS_DEFAULT))),
        "off" => Ok(Checkpointed(None)),
        seconds => match seconds.parse() {
            Ok(seconds) => Ok(Checkpointed(Some(seconds))),
            Err(_) => Err("a number of seconds, `on` or `off`".to_owned()),
        },
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointsCommand {
    /// List the newest checkpoint of each sandbox in the host's object store.
    #[command(visible_alias = "ls")]
    List,
    /// Take over sandboxes whose host is lost, from their newest checkpoints; a host that comes back gives them up.
    Restore {
        /// Ids of the sandboxes.
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Only those in this status.
    #[arg(long)]
    pub(crate) status: Option<StatusArg>,
    /// Only those with this label; may be given several times.
    #[arg(long, value_name = "KEY[=VALUE]")]
    pub(crate) label: Vec<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum StatusArg {
    Starting,
    Running,
    Sleeping,
    Failed,
}

impl From<StatusArg> for Status {
    fn from(status: StatusArg) -> Self {
        match status {
            StatusArg::Starting => Self::Starting,
            StatusArg::Running => Self::Running,
            StatusArg::Sleeping => Self::Sleeping,
            StatusArg::Failed => Self::Failed,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct UpdateArgs {
    /// Name or id.
    pub(crate) sandbox: String,
    /// A new name.
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// A label; replaces all labels; may be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) label: Option<Vec<(String, String)>>,
    /// It shall have no labels from now on.
    #[arg(long, conflicts_with = "label")]
    pub(crate) no_labels: bool,
    /// It shall have no awake ports from now on.
    #[arg(long, conflicts_with = "awake_ports")]
    pub(crate) no_awake_ports: bool,
    #[command(flatten)]
    pub(crate) policy: PolicyArgs,
}

#[derive(Debug, Args)]
pub(crate) struct SleepArgs {
    /// Name or id.
    pub(crate) name: String,
    /// How it shall sleep; default what its settings say.
    #[arg(long)]
    pub(crate) tier: Option<TierArg>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum TierArg {
    Memory,
    Disk,
}

impl From<TierArg> for SleepTier {
    fn from(tier: TierArg) -> Self {
        match tier {
            TierArg::Memory => Self::Memory,
            TierArg::Disk => Self::Disk,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct ForkArgs {
    /// Name or id of the sandbox to copy.
    pub(crate) parent: String,
    /// Name of the fork; default: its id. With `--count` they are called NAME-1, NAME-2 and so on.
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// So many forks of one and the same moment, 1-16: all of them, or none.
    #[arg(long, value_name = "NUMBER", value_parser = fork_count)]
    pub(crate) count: Option<u32>,
    /// Send the same request again safely: one key makes the forks once.
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// Name or id of the sandbox.
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) options: ExecOptions,
    /// Print the command's number at once and let it run.
    #[arg(long, short)]
    pub(crate) background: bool,
    /// The command and its arguments, after `--`.
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub(crate) argv: Vec<String>,
}

/// How a command is run.
#[derive(Clone, Debug, Args)]
pub(crate) struct ExecOptions {
    /// Working folder in the sandbox; default `/work` where it exists.
    #[arg(long, value_name = "PATH")]
    pub(crate) cwd: Option<String>,
    /// Environment of the command; may be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) env: Vec<(String, String)>,
    /// User in the sandbox; default root.
    #[arg(long)]
    pub(crate) user: Option<String>,
    /// Kill the command after this many seconds.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) timeout: Option<f64>,
    /// Give it standard input (default: only if that is no terminal).
    #[arg(long, short)]
    pub(crate) interactive: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ExecsCommand {
    /// List commands, running and ended. Wakes nothing: of a sandbox that sleeps, those when it fell asleep.
    #[command(visible_alias = "ls")]
    List {
        /// Name or id of the sandbox.
        name: String,
    },
    /// Print what a command has written: both streams, unless one is chosen. Wakes the sandbox.
    Output(ExecOutputArgs),
    /// Wait for a command's end; the exit code is the command's own.
    Wait {
        /// Name or id of the sandbox.
        name: String,
        /// Number of the command.
        exec: String,
    },
    /// Send a signal to a command's process group; `KILL` ends everything it has started.
    Kill {
        /// Name or id of the sandbox.
        name: String,
        /// Number of the command.
        exec: String,
        /// The signal, such as `TERM`, `SIGINT` or `9`.
        #[arg(long, short, default_value = "TERM")]
        signal: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ExecOutputArgs {
    /// Name or id of the sandbox.
    pub(crate) name: String,
    /// Number of the command.
    pub(crate) exec: String,
    /// Go on with what it writes, until it ends. Does not keep the sandbox awake.
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Only this stream.
    #[arg(long)]
    pub(crate) stream: Option<StreamArg>,
    /// Begin at this byte of the stream (of standard output, if none is chosen).
    #[arg(long, value_name = "N")]
    pub(crate) from_offset: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StreamArg {
    Stdout,
    Stderr,
}

#[derive(Debug, Args)]
pub(crate) struct ShellArgs {
    /// Name or id of the sandbox.
    pub(crate) name: String,
    /// Join the terminal of this number instead of opening one.
    #[arg(long, value_name = "TERMINAL", conflicts_with_all = ["cwd", "env", "user", "argv"])]
    pub(crate) attach: Option<String>,
    /// Working folder in the sandbox; default `/work` where it exists.
    #[arg(long, value_name = "PATH")]
    pub(crate) cwd: Option<String>,
    /// Environment of the program; may be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) env: Vec<(String, String)>,
    /// User in the sandbox; default root.
    #[arg(long)]
    pub(crate) user: Option<String>,
    /// The program and its arguments, after `--`; default a login shell.
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) argv: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TerminalsCommand {
    /// List terminals, running and ended. Wakes nothing.
    #[command(visible_alias = "ls")]
    List {
        /// Name or id of the sandbox.
        name: String,
    },
    /// Print what is on a terminal's screen. Wakes nothing.
    Screen {
        /// Name or id of the sandbox.
        name: String,
        /// Number of the terminal.
        terminal: String,
    },
    /// Hang a terminal up, and end everything it has started.
    Close {
        /// Name or id of the sandbox.
        name: String,
        /// Number of the terminal.
        terminal: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) size: SizeArgs,
    /// Keep the sandbox afterwards; standard error says its name.
    #[arg(long)]
    pub(crate) keep: bool,
    /// Working folder in the sandbox; default `/work` where it exists.
    #[arg(long, value_name = "PATH")]
    pub(crate) cwd: Option<String>,
    /// User in the sandbox; default root.
    #[arg(long)]
    pub(crate) user: Option<String>,
    /// Kill the command after this many seconds.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) timeout: Option<f64>,
    /// Give it standard input (default: only if that is no terminal).
    #[arg(long, short)]
    pub(crate) interactive: bool,
    /// The command and its arguments, after `--`.
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub(crate) argv: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum FilesCommand {
    /// Copy a local file or folder into a sandbox, like `cp -r`; `-` reads standard input.
    Put {
        /// Local file or folder.
        local: String,
        /// Where to, as NAME:/PATH.
        #[arg(value_parser = remote)]
        remote: Remote,
    },
    /// Copy a file or folder out of a sandbox, like `cp -r`; `-` writes a file to standard output.
    Get {
        /// What, as NAME:/PATH.
        #[arg(value_parser = remote)]
        remote: Remote,
        /// Where to; default: the present folder.
        #[arg(default_value = ".")]
        local: String,
    },
    /// List a folder.
    Ls {
        /// The folder, as NAME:/PATH.
        #[arg(value_parser = remote)]
        remote: Remote,
    },
    /// Print a file.
    Cat {
        /// The file, as NAME:/PATH.
        #[arg(value_parser = remote)]
        remote: Remote,
    },
    /// Move or rename within a sandbox.
    Mv {
        /// What, as NAME:/PATH.
        #[arg(value_parser = remote)]
        from: Remote,
        /// Its new path in the same sandbox.
        #[arg(value_name = "/PATH")]
        to: String,
    },
    /// Remove a file, or a folder with all that is in it.
    Rm {
        /// What, as NAME:/PATH.
        #[arg(value_parser = remote)]
        remote: Remote,
    },
    /// Make a folder and those above it.
    Mkdir {
        /// The folder, as NAME:/PATH.
        #[arg(value_parser = remote)]
        remote: Remote,
    },
    /// Tell what a path is.
    Stat {
        /// The path, as NAME:/PATH.
        #[arg(value_parser = remote)]
        remote: Remote,
    },
}

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Name or id of the sandbox.
    pub(crate) name: String,
    /// Go on as things happen, until the sandbox is deleted.
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Only entries after this number.
    #[arg(long, default_value_t = 0, value_name = "SEQ")]
    pub(crate) after: u64,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// Name or id of the sandbox.
    pub(crate) name: String,
    /// The guest's serial console (the default).
    #[arg(long, conflicts_with = "daemon")]
    pub(crate) console: bool,
    /// What the daemon did with it.
    #[arg(long)]
    pub(crate) daemon: bool,
    /// The newest bytes, at most this many.
    #[arg(long, default_value_t = 65_536, value_name = "BYTES")]
    pub(crate) max_bytes: u64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImagesCommand {
    /// Build an image (Debian 12), by default the default one, or find that it is there already; prints its digest.
    Build(BuildArgs),
}

#[derive(Debug, Args)]
pub(crate) struct BuildArgs {
    /// The guest agent, a static program; default: `dormouse-guest` beside this program.
    #[arg(long, value_name = "PATH")]
    pub(crate) guest: Option<PathBuf>,
    /// The newest version of the guest protocol that the agent speaks, to try how sandboxes with an older agent fare; default: all
    /// that it knows.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) protocol_max: Option<u16>,
    /// Leave the default image as it is; the new one is for whoever names its digest.
    #[arg(long)]
    pub(crate) keep_default: bool,
    /// Folder of the images; default `images` in the data folder.
    #[arg(long, value_name = "DIR")]
    pub(crate) images: Option<PathBuf>,
    /// A Debian package besides the usual ones; may be given several times.
    #[arg(long = "package", value_name = "NAME")]
    pub(crate) packages: Vec<String>,
    /// Address of Debian's archive; default: the one this machine's apt uses.
    #[arg(long, value_name = "URL")]
    pub(crate) mirror: Option<String>,
    /// Fetch kernel and packages anew: for security updates.
    #[arg(long)]
    pub(crate) refresh: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Folder of the images; default `images` in the data folder.
    #[arg(long, env = "DORMOUSE_IMAGES", value_name = "DIR")]
    pub(crate) images: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct McpArgs {
    /// After how many seconds the AI client gives up a call of a tool. Calls wait 35 seconds less for room or for a command, and no
    /// less than a quarter of it.
    #[arg(long, env = "PSBX_TOOL_TIMEOUT_SEC", value_name = "SECONDS", default_value_t = 60,
        value_parser = clap::value_parser!(u64).range(5..=3_600))]
    pub(crate) tool_timeout_sec: u64,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Address to listen on.
    #[arg(long, env = "DORMOUSE_LISTEN", default_value = "127.0.0.1:8420", value_name = "ADDRESS")]
    pub(crate) listen: String,
    /// Ports of sandboxes are at `<id>-<key>-<port>.box.<domain>`.
    #[arg(long, env = "DORMOUSE_DOMAIN", default_value = "localhost")]
    pub(crate) domain: String,
    /// How this daemon is reached from outside, such as `https://dormouse.example`.
    #[arg(long, env = "DORMOUSE_PUBLIC_URL", value_name = "URL")]
    pub(crate) public_url: Option<String>,
    /// Folder of the images; default `images` in the data folder.
    #[arg(long, env = "DORMOUSE_IMAGES", value_name = "DIR")]
    pub(crate) images: Option<PathBuf>,
    /// Folder of the templates; default `templates` in the data folder.
    #[arg(long, env = "DORMOUSE_TEMPLATES", value_name = "DIR")]
    pub(crate) templates: Option<PathBuf>,
    /// The QEMU to use; default `qemu-system-x86_64` from `PATH`.
    #[arg(long, env = "DORMOUSE_QEMU", value_name = "PATH")]
    pub(crate) qemu: Option<PathBuf>,
    /// The first address of the /16 from which sandboxes get theirs.
    #[arg(long, env = "DORMOUSE_SUBNET", value_name = "ADDRESS")]
    pub(crate) subnet: Option<std::net::Ipv4Addr>,
    /// The /64 from which sandboxes get their IPv6 addresses, or `none`; default: a unique local one of this installation's own.
    #[arg(long, env = "DORMOUSE_IPV6_PREFIX", value_name = "PREFIX")]
    pub(crate) ipv6_prefix: Option<host::network::ipv6::Ipv6Setting>,
    /// Let sandboxes reach the internet over IPv6 too: this host then forwards IPv6.
    #[arg(long, env = "DORMOUSE_IPV6_OUTBOUND")]
    pub(crate) ipv6_outbound: bool,
    /// How long sandboxes sleep in memory before they move to disk, seconds, unless they say otherwise.
    #[arg(long, env = "DORMOUSE_MEMORY_TIER_SECONDS", value_name = "SECONDS")]
    pub(crate) memory_tier_seconds: Option<u64>,
    /// How much memory sandboxes may hold resident, MiB; each counts its size and 96 MiB for QEMU. Who finds no room waits
    /// while sleepers move from memory to disk, the longest asleep first. Default: no limit.
    #[arg(long, env = "DORMOUSE_MEMORY_BUDGET_MIB", value_name = "MIB")]
    pub(crate) memory_budget_mib: Option<u64>,
    /// How long a sandbox waits for room in memory before it is refused, seconds.
    #[arg(long, env = "DORMOUSE_MEMORY_WAIT_SECONDS", value_name = "SECONDS",
        default_value_t = host::budget::WAIT_DEFAULT.as_secs())]
    pub(crate) memory_wait_seconds: u64,
    /// How many copies of the default sandbox, and of the kind asked for last, are kept ready to be claimed; each takes the memory
    /// of a sleeper. They are the first to make room. 0: none.
    #[arg(long, env = "DORMOUSE_POOL", value_name = "NUMBER", default_value_t = host::settings::POOL_DEFAULT,
        value_parser = pool_size)]
    pub(crate) pool: usize,
    /// The object store in which checkpoints of sandboxes are kept: `file:///mnt/checkpoints`, a folder, or `s3://bucket/folder`,
    /// which is there, empty at first, and which several hosts may share. For S3 the endpoint, region and credentials are those
    /// of the environment (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; AWS_ALLOW_HTTP=true for
    /// `http://`). Default: none, and no checkpoints.
    #[arg(long, env = "DORMOUSE_STORE", value_name = "URL")]
    pub(crate) store: Option<String>,
    /// How long a server in a sandbox may be silent before it begins to answer a request through a link, seconds.
    #[arg(long, env = "DORMOUSE_EDGE_ANSWER_SECONDS", value_name = "SECONDS", value_parser = edge_seconds,
        default_value_t = control::ANSWER_TIME_DEFAULT.as_secs())]
    pub(crate) edge_answer_seconds: u64,
    /// How long an answer that has begun may be silent, seconds, unless the sandbox has `connection_idle_seconds`.
    #[arg(long, env = "DORMOUSE_EDGE_IDLE_SECONDS", value_name = "SECONDS", value_parser = edge_seconds,
        default_value_t = control::IDLE_TIME_DEFAULT.as_secs())]
    pub(crate) edge_idle_seconds: u64,
    /// Proxies whose `X-Forwarded-For` is believed, as ranges of addresses such as `10.0.0.0/8`, separated by commas: the last address
    /// in it that is none of these is who asks. Default: none, and nothing is believed.
    #[arg(long, env = "DORMOUSE_TRUSTED_PROXIES", value_name = "RANGES", value_delimiter = ',')]
    pub(crate) trusted_proxies: Vec<api::network::Network>,
    #[command(flatten)]
    pub(crate) boxes: BoxArgs,
    /// Serve HTTPS alone, with this certificate (PEM, with those that lead to its authority); looked at anew when it changes.
    #[arg(long, env = "DORMOUSE_TLS_CERT", value_name = "PATH", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The certificate's private key (PEM).
    #[arg(long, env = "DORMOUSE_TLS_KEY", value_name = "PATH", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// How long one `GET …/output?follow=true` follows a command at most, seconds: for proxies that cut what takes longer. Its client
    /// reads on from where it ended. Default: until the command ends.
    #[arg(long, env = "DORMOUSE_FOLLOW_SECONDS", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) follow_seconds: Option<u64>,
    /// `GET /metrics` needs no token.
    #[arg(long, env = "DORMOUSE_OPEN_METRICS")]
    pub(crate) open_metrics: bool,
    /// How the log is written.
    #[arg(long, env = "DORMOUSE_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    pub(crate) log: LogFormat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct ForwardArgs {
    /// Name or id of the sandbox.
    pub(crate) name: String,
    /// Port in the sandbox, and the one on this machine if it shall be another (0: any free one).
    #[arg(required = true, value_name = "PORT[:LOCAL]", value_parser = forwarded)]
    pub(crate) ports: Vec<Forwarded>,
    /// Address on this machine.
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    pub(crate) bind: std::net::IpAddr,
}

/// A port there and a port here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Forwarded {
    pub(crate) port: u16,
    pub(crate) local: u16,
}

fn forwarded(text: &str) -> Result<Forwarded, String> {
    let (port, local) = text.split_once(':').unwrap_or((text, text));
    let parsed = port.parse().ok().filter(|port| *port > 0).zip(local.parse().ok());
    parsed
        .map(|(port, local)| Forwarded { port, local })
        .ok_or_else(|| "not `PORT` or `PORT:LOCAL`, such as `5432:15432`".to_owned())
}

/// A number, or none at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OrNever(pub(crate) Option<u64>);

/// A path in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
    pub(crate) sandbox: String,
    pub(crate) path: String,
}

fn or_never(text: &str) -> Result<OrNever, String> {
    if text == "never" {
        return Ok(OrNever(None));
    }
    text.parse()
        .map(|number| OrNever(Some(number)))
        .map_err(|_| "a whole number or `never`".to_owned())
}

fn spending_limit(text: &str) -> Result<OrNever, String> {
    if text == "none" {
        return Ok(OrNever(None));
    }
    let (number, seconds) = text.strip_suffix('h').map_or((text, 1), |hours| (hours, 3600));
    let number: Option<u64> = number.parse().ok();
    number.and_then(|number| number.checked_mul(seconds)).map(|limit| OrNever(Some(limit))).ok_or_else(|| {
        "a whole number of GiB-hours such as `500h`, of GiB-seconds such as `1800000`, or `none`".to_owned()
    })
}

fn fork_count(text: &str) -> Result<u32, String> {
    let most = api::sandbox::FORKS_MAX;
    text.parse()
        .ok()
        .filter(|count| (1..=most).contains(count))
        .ok_or_else(|| format!("not a whole number from 1 to {most}"))
}

fn pool_size(text: &str) -> Result<usize, String> {
    let most = host::settings::POOL_MAX;
    text.parse()
        .ok()
        .filter(|size| *size <= most)
        .ok_or_else(|| format!("not a whole number from 0 to {most}"))
}

fn edge_seconds(text: &str) -> Result<u64, String> {
    let range = control::EDGE_SECONDS_RANGE;
    text.parse()
        .ok()
        .filter(|seconds| range.contains(seconds))
        .ok_or_else(|| format!("not a whole number from {} to {}", range.start(), range.end()))
}

pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("not `KEY=VALUE`".to_owned()),
    }
}

fn port(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(port) if port > 0 => Ok(port),
        _ => Err("a port is a whole number from 1 to 65535".to_owned()),
    }
}

fn remote(text: &str) -> Result<Remote, String> {
    match text.split_once(':') {
        Some((sandbox, path)) if !sandbox.is_empty() && path.starts_with('/') => {
            Ok(Remote { sandbox: sandbox.to_owned(), path: path.to_owned() })
        }
        _ => Err("not `NAME:/PATH` (the path is absolute)".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn values() {
        assert_eq!(or_never("never"), Ok(OrNever(None)));
        assert_eq!(or_never("5"), Ok(OrNever(Some(5))));
        assert!(or_never("-1").is_err());
        assert_eq!(remote("web:/a:b"), Ok(Remote { sandbox: "web".into(), path: "/a:b".into() }));
        for bad in ["web", "web:a", ":/a", "/a"] {
            assert!(remote(bad).is_err(), "{bad}");
        }
        assert_eq!((port("1"), port("65535")), (Ok(1), Ok(65535)));
        for bad in ["0", "65536", "-1", "http", ""] {
            assert!(port(bad).unwrap_err().contains("from 1 to 65535"), "{bad}");
        }
        assert_eq!(forwarded("5432"), Ok(Forwarded { port: 5432, local: 5432 }));
        assert_eq!(forwarded("5432:0"), Ok(Forwarded { port: 5432, local: 0 }));
        for bad in ["", "0", "x", "5432:", ":1", "5432:65536", "1:2:3"] {
            assert!(forwarded(bad).is_err(), "{bad}");
        }
        assert_eq!((fork_count("1"), fork_count("16")), (Ok(1), Ok(16)));
        for bad in ["x", "0", "17", "-1", "1.5", ""] {
            assert_eq!(fork_count(bad), Err("not a whole number from 1 to 16".to_owned()), "{bad}");
        }
        assert_eq!(spending_limit("500h"), Ok(OrNever(Some(1_800_000))));
        assert_eq!(spending_limit("7"), Ok(OrNever(Some(7))));
        for bad in ["", "h", "1.5h", "-1", "5H", "99999999999999999999h", "18446744073709551615h"] {
            assert!(spending_limit(bad).unwrap_err().contains("500h"), "{bad}");
        }
        assert!(pair("=x").is_err());
        assert_eq!(pair("A=b=c"), Ok(("A".into(), "b=c".into())));
    }
}
