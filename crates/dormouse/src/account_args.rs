//! What may be typed about accounts, keys and secrets.

use std::path::PathBuf;

use api::account::{Plan, Scope};
use api::network::Network;
use clap::{Subcommand, ValueEnum};

#[derive(Debug, Subcommand)]
pub(crate) enum AccountsCommand {
    /// Make an account.
    Create {
        /// Its id: 1-40 of a-z, 0-9 and `-`.
        id: String,
        /// How many boxes it may have at once.
        #[arg(long, value_enum, default_value_t = PlanArg::None)]
        plan: PlanArg,
        /// Seconds that a box of size 1 may be awake; `none`: nothing is counted.
        #[arg(long, value_name = "UNITS|none", value_parser = units, default_value = "none")]
        credit: Units,
        /// From where its boxes' URLs may be opened, such as `192.0.2.0/24`; may be given several times. Default: from anywhere.
        #[arg(long, value_name = "RANGE")]
        url_allow: Vec<Network>,
    },
    /// List accounts.
    #[command(visible_alias = "ls")]
    List,
    /// Change an account's limits.
    Update {
        /// Its id.
        id: String,
        /// How many boxes it may have at once.
        #[arg(long, value_enum)]
        plan: Option<PlanArg>,
        /// From where its boxes' URLs may be opened, in place of what was there; may be given several times.
        #[arg(long, value_name = "RANGE", conflicts_with = "no_url_allow")]
        url_allow: Vec<Network>,
        /// Its boxes' URLs may be opened from anywhere.
        #[arg(long)]
        no_url_allow: bool,
    },
    /// Set what is left of an account's credit.
    Credit {
        /// Its id.
        id: String,
        /// Seconds that a box of size 1 may be awake from now on; `none`: nothing is counted.
        #[arg(value_name = "UNITS|none", value_parser = units)]
        credit: Units,
    },
    /// Delete accounts with their keys; refused while they have boxes.
    #[command(visible_alias = "rm")]
    Delete {
        /// Ids.
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum KeysCommand {
    /// Make a key; prints it, once and never again.
    Create {
        /// The account for which it acts.
        #[arg(long, value_name = "ID", default_value = api::account::ACCOUNT_DEFAULT)]
        account: String,
        /// What it opens.
        #[arg(long, value_enum, default_value_t = ScopeArg::Boxes)]
        scope: ScopeArg,
        /// What it is for.
        #[arg(long, default_value = "")]
        label: String,
    },
    /// List keys, without the keys themselves.
    #[command(visible_alias = "ls")]
    List,
    /// Revoke keys.
    #[command(visible_alias = "rm")]
    Delete {
        /// Ids.
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum SecretsCommand {
    /// Store a secret, from standard input or a file; a line break at its end is left out.
    Set {
        /// The environment variable that it becomes: letters, digits and `_`.
        name: String,
        /// The file that holds its value; default: standard input.
        #[arg(long, value_name = "PATH")]
        file: Option<PathBuf>,
    },
    /// List the names of secrets.
    #[command(visible_alias = "ls")]
    List,
    /// Delete secrets.
    #[command(visible_alias = "rm")]
    Delete {
        /// Names.
        #[arg(required = true)]
        names: Vec<String>,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum PlanArg {
    /// 3 boxes.
    Free,
    /// 5 boxes.
    Pro,
    /// 20 boxes.
    Max,
    /// As many as it likes.
    None,
}

impl From<PlanArg> for Option<Plan> {
    fn from(plan: PlanArg) -> Self {
        match plan {
            PlanArg::Free => Some(Plan::Free),
            PlanArg::Pro => Some(Plan::Pro),
            PlanArg::Max => Some(Plan::Max),
            PlanArg::None => None,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ScopeArg {
    /// Everything.
    Admin,
    /// The boxes of its account.
    Boxes,
}

impl From<ScopeArg> for Scope {
    fn from(scope: ScopeArg) -> Self {
        match scope {
            ScopeArg::Admin => Self::Admin,
            ScopeArg::Boxes => Self::Boxes,
        }
    }
}

/// Units of credit, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Units(pub(crate) Option<u64>);

fn units(text: &str) -> Result<Units, String> {
    if text == "none" {
        return Ok(Units(None));
    }
    text.parse().map(|units| Units(Some(units))).map_err(|_| "a whole number or `none`".to_owned())
}
