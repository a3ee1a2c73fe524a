//! Snapshots: taking, listing, deleting.

use api::snapshot::{Snapshot, SnapshotList, TakeSnapshot};

use super::sandboxes::path;
use crate::cli::SnapshotsCommand;
use crate::client::{Client, full, quote};
use crate::problem::Problem;
use crate::show;

pub(crate) async fn snapshots(
    client: &Client,
    command: SnapshotsCommand,
    json: bool,
) -> Result<i32, Problem> {
    match command {
        SnapshotsCommand::Create { sandbox, name } => {
            let place = format!("{}/snapshots", path(&sandbox));
            let snapshot: Snapshot =
                client.json("POST", &place, Some(&TakeSnapshot { name })).await?;
            if json {
                show::json(&snapshot)?;
            } else {
                show::data(&snapshot.name)?;
            }
        }
        SnapshotsCommand::List => {
            let SnapshotList { snapshots } = client.get("/v1/snapshots").await?;
            if json {
                show::json(&snapshots)?;
                return Ok(0);
            }
            let row = |snapshot: &Snapshot| {
                vec![
                    snapshot.name.clone(),
                    snapshot.of_name.clone(),
                    format!("{} MiB", snapshot.memory_mib),
                    show::size(snapshot.stored_bytes),
                    show::age(&snapshot.taken_at),
                ]
            };
            let rows: Vec<_> = snapshots.iter().map(row).collect();
            show::table(&["NAME", "OF", "MEMORY", "STORED", "TAKEN"], &rows)?;
        }
        SnapshotsCommand::Delete { names } => {
            for name in names {
                let place = format!("/v1/snapshots/{}", quote(&name));
                client.send(client.request("DELETE", &place), full("")).await?;
                if !json {
                    show::data(&format!("deleted {name}"))?;
                }
            }
        }
    }
    Ok(0)
}
