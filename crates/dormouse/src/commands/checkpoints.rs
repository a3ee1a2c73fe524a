//! Checkpoints: listing what the store has, and taking sandboxes over.

use api::checkpoint::{Checkpoint, CheckpointList};
use api::sandbox::Sandbox;

use crate::cli::CheckpointsCommand;
use crate::client::{Client, quote};
use crate::problem::Problem;
use crate::show;

pub(crate) async fn checkpoints(
    client: &Client,
    command: CheckpointsCommand,
    json: bool,
) -> Result<i32, Problem> {
    match command {
        CheckpointsCommand::List => {
            let CheckpointList { checkpoints } = client.get("/v1/checkpoints").await?;
            if json {
                show::json(&checkpoints)?;
                return Ok(0);
            }
            let row = |checkpoint: &Checkpoint| {
                let here = if checkpoint.here { "this one" } else { &checkpoint.host };
                vec![
                    checkpoint.id.to_string(),
                    checkpoint.name.clone(),
                    here.to_owned(),
                    format!("{} MiB", checkpoint.memory_mib),
                    show::size(checkpoint.stored_bytes),
                    show::age(&checkpoint.taken_at),
                ]
            };
            let rows: Vec<_> = checkpoints.iter().map(row).collect();
            show::table(&["ID", "NAME", "HOST", "MEMORY", "STORED", "TAKEN"], &rows)?;
        }
        CheckpointsCommand::Restore { ids } => {
            for id in ids {
                let place = format!("/v1/checkpoints/{}/restore", quote(&id));
                let sandbox: Sandbox = client.json("POST", &place, None::<&()>).await?;
                if json {
                    show::json(&sandbox)?;
                } else {
                    show::data(&sandbox.name)?;
                }
            }
        }
    }
    Ok(0)
}
