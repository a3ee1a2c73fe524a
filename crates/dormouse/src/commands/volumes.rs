//! Volumes: making, listing, deleting.

use std::path::PathBuf;

use api::drive::{Volume, VolumeList};

use crate::cli::VolumesCommand;
use crate::client::{Client, full, quote, read_json};
use crate::problem::Problem;
use crate::{show, tree};

pub(crate) async fn volumes(
    client: &Client,
    command: VolumesCommand,
    json: bool,
) -> Result<i32, Problem> {
    match command {
        VolumesCommand::Create { name, folder } => {
            let body = if folder == "-" {
                tree::stream(tokio::io::stdin())
            } else {
                let folder = PathBuf::from(&folder);
                if !folder.is_dir() {
                    let text = format!("`{}` is no folder", folder.display());
                    return Err(Problem::usage(text).hint("or `-` for a tar stream"));
                }
                tree::pack(folder, ".".to_owned())
            };
            let request =
                client.request("PUT", &place(&name)).header("content-type", "application/x-tar");
            let volume: Volume = read_json(client.send(request, body).await?).await?;
            if json {
                show::json(&volume)?;
            } else {
                show::data(&volume.name)?;
            }
        }
        VolumesCommand::List => {
            let VolumeList { volumes } = client.get("/v1/volumes").await?;
            if json {
                show::json(&volumes)?;
            } else {
                table(&volumes)?;
            }
        }
        VolumesCommand::Get { name } => {
            let volume: Volume = client.get(&place(&name)).await?;
            if json {
                show::json(&volume)?;
            } else {
                table(&[volume])?;
            }
        }
        VolumesCommand::Delete { names } => {
            for name in names {
                client.send(client.request("DELETE", &place(&name)), full("")).await?;
                if !json {
                    show::data(&format!("deleted {name}"))?;
                }
            }
        }
    }
    Ok(0)
}

fn place(name: &str) -> String {
    format!("/v1/volumes/{}", quote(name))
}

fn table(volumes: &[Volume]) -> Result<(), Problem> {
    let row = |volume: &Volume| {
        let users: Vec<&str> = volume.attached_to.iter().map(|user| user.name.as_str()).collect();
        vec![
            volume.name.clone(),
            volume.entries.to_string(),
            show::size(volume.stored_bytes),
            users.join(","),
            show::age(&volume.created_at),
        ]
    };
    let rows: Vec<_> = volumes.iter().map(row).collect();
    show::table(&["NAME", "ENTRIES", "STORED", "SANDBOXES", "CREATED"], &rows)
}
