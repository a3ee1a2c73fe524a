//! What may be typed about boxes that are there. How the daemon sets boxes up is in [`box_args`](crate::box_args).

use clap::{Args, Subcommand};

use crate::cli::{Checkpointed, checkpoint, pair};

#[derive(Debug, Subcommand)]
pub(crate) enum BoxesCommand {
    /// List boxes: what each is for, who uses it, and why it is awake or not. Thaws nothing.
    #[command(visible_alias = "ls")]
    List {
        /// Also those that have ended within the last week, and those that can be restored.
        #[arg(long)]
        all: bool,
    },
    /// Tell about a box: what it does and why, when it is frozen and stopped, its services and URLs. Thaws nothing.
    Get {
        #[command(flatten)]
        which: WhichBox,
    },
    /// Print the timeline of a box: each change of its state, with time and reason. Thaws nothing.
    #[command(visible_alias = "events")]
    Timeline {
        #[command(flatten)]
        which: WhichBox,
    },
    /// Print a URL of a box: that of a service, or the one that people open. Thaws nothing.
    Link {
        #[command(flatten)]
        which: WhichBox,
        /// Name of one of its services; with `:PORT` where the name has several.
        service: Option<String>,
    },
    /// Stop boxes for good: all that is in them is gone. A frozen one is not thawed for it.
    ///
    /// Of one that was stopped for idleness the copy goes, from which it could be restored.
    #[command(visible_alias = "rm")]
    Stop {
        /// Ids, or names that no other box has.
        #[arg(required = true, value_name = "BOX")]
        boxes: Vec<String>,
    },
    /// Bring back a box that was stopped for idleness, as it was when it froze.
    Restore {
        #[command(flatten)]
        which: WhichBox,
    },
    /// Thaw a box; from then on its idle time counts anew.
    Wake {
        #[command(flatten)]
        which: WhichBox,
    },
    /// Run a command in a box and get its output and exit code. Thaws it.
    ///
    /// Standard output and standard error come as one. The command has no standard input.
    Exec(BoxExecArgs),
    /// List the commands that were run in a box since it was booted, and how each ended. Thaws nothing.
    Execs {
        #[command(flatten)]
        which: WhichBox,
    },
    /// Send a signal to a command of a box; `KILL` ends everything it has started. Thaws it.
    Kill {
        #[command(flatten)]
        which: WhichBox,
        /// Id of the command, as `boxes execs` tells it.
        exec: String,
        /// The signal, such as `TERM`, `SIGINT` or `9`.
        #[arg(long, short, default_value = "TERM")]
        signal: String,
    },
    /// List the processes of a box, with the ports on which they listen. Thaws it.
    Ps {
        #[command(flatten)]
        which: WhichBox,
    },
    /// Change what a box is called, what it is for, or how long it may be unused. Thaws nothing.
    #[command(group = clap::ArgGroup::new("change").required(true).multiple(true))]
    Update {
        #[command(flatten)]
        which: WhichBox,
        /// What people call it.
        #[arg(long = "name", value_name = "TEXT", group = "change")]
        title: Option<String>,
        /// Why it exists and what done looks like.
        #[arg(long, value_name = "TEXT", group = "change")]
        goal: Option<String>,
        /// Minutes without use after which it is stopped for good (at most 10080); 0: 24 hours after it froze.
        #[arg(long, value_name = "MINUTES", group = "change")]
        idle_timeout: Option<u64>,
    },
    /// Set how often a box is kept in the object store while it is awake, so that another host can take it up. Thaws nothing.
    Checkpoint {
        #[command(flatten)]
        which: WhichBox,
        /// Seconds (1-600) from one checkpoint to the next; `on`: 10; `off`: none any more.
        #[arg(value_name = "SECONDS|on|off", value_parser = checkpoint)]
        every: Checkpointed,
    },
}

/// A box.
#[derive(Clone, Debug, Args)]
pub(crate) struct WhichBox {
    /// Id, or a name that no other box has.
    #[arg(id = "box", value_name = "BOX")]
    pub(crate) given: String,
}

#[derive(Debug, Args)]
pub(crate) struct BoxExecArgs {
    #[command(flatten)]
    pub(crate) which: WhichBox,
    /// Working folder in the box; default `/work`.
    #[arg(long, value_name = "PATH")]
    pub(crate) cwd: Option<String>,
    /// Added to its environment; may be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) env: Vec<(String, String)>,
    /// Kill it after so many seconds (1-86400); default: never.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) timeout: Option<u64>,
    /// Print the command's id at once and let it run.
    #[arg(long, short)]
    pub(crate) background: bool,
    /// Instead of a new command: the output of one that was started before, from its beginning, until it ends.
    #[arg(long, value_name = "ID", conflicts_with_all = ["argv", "cwd", "env", "timeout", "background"])]
    pub(crate) read: Option<String>,
    /// The command and its arguments, after `--`.
    #[arg(required_unless_present = "read", last = true, value_name = "COMMAND")]
    pub(crate) argv: Vec<String>,
}
