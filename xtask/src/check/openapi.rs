//! The description of the HTTP interface in `docs/openapi.json` is the one that the code has.
//!
//! It is a promise to people who write clients, so a change of it is to be seen in review.

use std::fs;

use crate::failure::{Context, Failure, Result};
use crate::{layout, process};

/// Compares, or with `bless` writes.
pub(super) fn run(bless: bool) -> Result<()> {
    let mut command = process::cargo();
    command.args(["run", "--locked", "--quiet", "--package", "dormouse", "--", "openapi"]);
    let current = process::output(&mut command)?;
    let path = layout::root().join("docs/openapi.json");
    let stored = fs::read_to_string(&path).unwrap_or_default();
    if stored == current {
        return Ok(());
    }
    if bless {
        return fs::write(&path, current).context(format!("write {}", path.display()));
    }
    let line = stored.lines().zip(current.lines()).take_while(|(a, b)| a == b).count() + 1;
    Err(Failure::new(format!(
        "docs/openapi.json is not what the code says, from line {line} on: `cargo xtask check --bless openapi` \
         rewrites it, then look at the difference"
    )))
}
