//! Drives: making, listing, deleting.

use api::drive::{CreateDrive, Drive, DriveList};

use crate::cli::DrivesCommand;
use crate::client::{Client, full, quote};
use crate::problem::Problem;
use crate::show;

pub(crate) async fn drives(
    client: &Client,
    command: DrivesCommand,
    json: bool,
) -> Result<i32, Problem> {
    match command {
        DrivesCommand::Create { name, size } => {
            let body = CreateDrive { name, size_mib: size };
            let drive: Drive = client.json("POST", "/v1/drives", Some(&body)).await?;
            if json {
                show::json(&drive)?;
            } else {
                show::data(&drive.name)?;
            }
        }
        DrivesCommand::List => {
            let DriveList { drives } = client.get("/v1/drives").await?;
            if json {
                show::json(&drives)?;
            } else {
                table(&drives)?;
            }
        }
        DrivesCommand::Get { name } => {
            let drive: Drive = client.get(&place(&name)).await?;
            if json {
                show::json(&drive)?;
            } else {
                table(&[drive])?;
            }
        }
        DrivesCommand::Delete { names } => {
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
    format!("/v1/drives/{}", quote(name))
}

fn table(drives: &[Drive]) -> Result<(), Problem> {
    let row = |drive: &Drive| {
        let user = drive.attached_to.as_ref();
        vec![
            drive.name.clone(),
            format!("{} MiB", drive.size_mib),
            show::size(drive.stored_bytes),
            user.map(|user| format!("{}:{}", user.name, user.path)).unwrap_or_default(),
            show::age(&drive.created_at),
        ]
    };
    let rows: Vec<_> = drives.iter().map(row).collect();
    show::table(&["NAME", "SIZE", "STORED", "SANDBOX", "CREATED"], &rows)
}
