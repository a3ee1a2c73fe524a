//! Copying, listing, moving and removing files of a sandbox.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use api::Code;
use api::file::{FileInfo, FileKind, FileList, MkdirRequest, MoveRequest};
use http_body_util::BodyExt;
use hyper::Response;
use hyper::body::Incoming;
use tokio::io::AsyncWriteExt;

use super::sandboxes::path;
use crate::cli::{FilesCommand, Remote};
use crate::client::{Client, cut, full, quote};
use crate::problem::Problem;
use crate::{show, tree};

pub(crate) async fn files(
    client: &Client,
    command: FilesCommand,
    json: bool,
) -> Result<i32, Problem> {
    match command {
        FilesCommand::Put { local, remote } => put(client, &local, &remote).await?,
        FilesCommand::Get { remote, local } => get(client, &remote, &local).await?,
        FilesCommand::Cat { remote } => print(read(client, &remote).await?).await?,
        FilesCommand::Ls { remote } => {
            let list: FileList = client.get(&at(&remote, "/files/list")).await?;
            if json {
                show::json(&list.files)?;
            } else {
                list.files.iter().try_for_each(|file| show::data(&line(file)))?;
            }
        }
        FilesCommand::Stat { remote } => {
            let info = stat(client, &remote).await?;
            if json { show::json(&info)? } else { show::data(&line(&info))? }
        }
        FilesCommand::Mkdir { remote } => {
            let body = MkdirRequest { path: remote.path };
            let info: FileInfo = client
                .json("POST", &format!("{}/files/mkdir", path(&remote.sandbox)), Some(&body))
                .await?;
            if json {
                show::json(&info)?;
            }
        }
        FilesCommand::Mv { from, to } => {
            // `web:/b` is as good as `/b`, but only within the same sandbox.
            let to = match to.split_once(':') {
                Some((sandbox, path)) if sandbox == from.sandbox => path.to_owned(),
                Some(_) if !to.starts_with('/') => {
                    return Err(Problem::usage("files move within one sandbox")
                        .hint("`dormouse files get` and `put` copy between sandboxes"));
                }
                _ => to,
            };
            let body = MoveRequest { from: from.path, to };
            let info: FileInfo = client
                .json("POST", &format!("{}/files/move", path(&from.sandbox)), Some(&body))
                .await?;
            if json {
                show::json(&info)?;
            }
        }
        FilesCommand::Rm { remote } => {
            client.send(client.request("DELETE", &at(&remote, "/files")), full("")).await?;
        }
    }
    Ok(0)
}

async fn put(client: &Client, local: &str, remote: &Remote) -> Result<(), Problem> {
    if local == "-" {
        let body = tree::stream(tokio::io::stdin());
        client.send(client.request("PUT", &at(remote, "/files")), body).await?;
        return Ok(());
    }
    let meta = fs::metadata(local).map_err(local_error(local))?;
    // The name that `cp -r` would give it: its own, also for `.` and `folder/`.
    let own_name = Path::new(local).canonicalize().map_err(local_error(local))?;
    let own_name = own_name.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    let is_folder = match stat(client, remote).await {
        Ok(info) => {
            info.kind == FileKind::Directory || links_to_folder(client, remote, &info).await?
        }
        Err(problem)
            if problem.code() == Some(Code::NotFound) && !no_sandbox(client, remote).await? =>
        {
            remote.path.ends_with('/')
        }
        Err(problem) => return Err(problem),
    };
    if meta.is_dir() {
        // Into a folder that is there under its own name, else as the new folder itself.
        let (folder, name) = if is_folder {
            let name = own_name
                .ok_or_else(|| Problem::usage(format!("`{local}` has no name that can be sent")))?;
            (remote.path.clone(), name)
        } else {
            split(&remote.path)?
        };
        let target = Remote { sandbox: remote.sandbox.clone(), path: folder };
        let request = client
            .request("PUT", &at(&target, "/tree"))
            .header("content-type", "application/x-tar");
        client.send(request, tree::pack(PathBuf::from(local), name)).await?;
        return Ok(());
    }
    let target = if is_folder {
        let name = own_name
            .ok_or_else(|| Problem::usage(format!("`{local}` has no name that can be sent")))?;
        join(&remote.path, &name)
    } else {
        remote.path.clone()
    };
    let target = Remote { sandbox: remote.sandbox.clone(), path: target };
    let mode = std::os::unix::fs::PermissionsExt::mode(&meta.permissions()) & 0o7777;
    let file = tokio::fs::File::open(local).await.map_err(local_error(local))?;
    let place = format!("{}&mode={mode:04o}", at(&target, "/files"));
    client.send(client.request("PUT", &place), tree::stream(file)).await?;
    Ok(())
}

async fn get(client: &Client, remote: &Remote, local: &str) -> Result<(), Problem> {
    if local == "-" {
        return print(read(client, remote).await?).await;
    }
    let info = stat(client, remote).await?;
    let mut target = PathBuf::from(local);
    if target.is_dir() {
        let name = Path::new(&remote.path).file_name();
        target.push(name.ok_or_else(|| {
            Problem::usage("`/` has no name").hint("name a folder that does not exist yet")
        })?);
    }
    if info.kind == FileKind::Directory {
        let answer = client.send(client.request("GET", &at(remote, "/tree")), full("")).await?;
        return tree::unpack(answer.into_body(), target.clone()).await.map_err(|error| {
            Problem::new(format!("cannot write `{}`: {error}", target.display()))
        });
    }
    // As `cp` does: through a link, and into what is no file.
    let target = match fs::symlink_metadata(&target) {
        Ok(there) if there.is_symlink() => target.canonicalize().map_err(|error| {
            let shown = target.display();
            Problem::new(format!("`{shown}` is a link that leads nowhere: {error}"))
                .hint("remove it, or name where to write")
        })?,
        _ => target,
    };
    if fs::metadata(&target).is_ok_and(|there| !there.is_file()) {
        let shown = target.display().to_string();
        // Opening a pipe waits for its reader, as it does for everybody.
        let file = tokio::fs::File::options().write(true).open(&target).await;
        let answer = read(client, remote).await?;
        return copy(answer, &mut file.map_err(local_error(&shown))?, &shown).await;
    }
    let answer = read(client, remote).await?;
    // Whole or not at all: a connection that breaks leaves the old file.
    let draft = target.with_file_name(format!(
        ".{}.part",
        target.file_name().unwrap_or_default().to_string_lossy()
    ));
    let shown = target.display().to_string();
    let saved = save(answer, &draft, info.mode).await;
    if let Err(problem) = saved {
        // Only a left-over if this fails as well.
        let _ = fs::remove_file(&draft);
        return Err(problem);
    }
    fs::rename(&draft, &target).map_err(local_error(&shown))
}

async fn save(answer: Response<Incoming>, draft: &Path, mode: u32) -> Result<(), Problem> {
    let shown = draft.display().to_string();
    let mut file = tokio::fs::File::create(draft).await.map_err(local_error(&shown))?;
    copy(answer, &mut file, &shown).await?;
    // Without the bits that let whoever runs it be somebody else: a sandbox has no say in that here.
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode & 0o777);
    file.set_permissions(permissions).await.map_err(local_error(&shown))
}

/// Writes an answer into what is open already.
async fn copy(
    answer: Response<Incoming>,
    file: &mut tokio::fs::File,
    shown: &str,
) -> Result<(), Problem> {
    let mut body = answer.into_body();
    while let Some(frame) = body.frame().await {
        if let Ok(bytes) = frame.map_err(cut)?.into_data() {
            file.write_all(&bytes).await.map_err(local_error(shown))?;
        }
    }
    file.flush().await.map_err(local_error(shown))
}

async fn print(answer: Response<Incoming>) -> Result<(), Problem> {
    let mut body = answer.into_body();
    while let Some(frame) = body.frame().await {
        if let Ok(bytes) = frame.map_err(cut)?.into_data() {
            show::bytes(&bytes)?;
        }
    }
    Ok(())
}

async fn read(client: &Client, remote: &Remote) -> Result<Response<Incoming>, Problem> {
    client.send(client.request("GET", &at(remote, "/files")), full("")).await
}

async fn stat(client: &Client, remote: &Remote) -> Result<FileInfo, Problem> {
    client.get(&at(remote, "/files/stat")).await
}

/// Whether a link leads to a folder: a folder can be listed.
async fn links_to_folder(
    client: &Client,
    remote: &Remote,
    info: &FileInfo,
) -> Result<bool, Problem> {
    if info.kind != FileKind::Symlink {
        return Ok(false);
    }
    match client.get::<FileList>(&at(remote, "/files/list")).await {
        Ok(_) => Ok(true),
        Err(problem) if problem.code().is_some() => Ok(false),
        Err(problem) => Err(problem),
    }
}

/// Whether it is the sandbox, not the file, that does not exist.
async fn no_sandbox(client: &Client, remote: &Remote) -> Result<bool, Problem> {
    client.get::<api::sandbox::Sandbox>(&path(&remote.sandbox)).await.map(|_| false)
}

fn at(remote: &Remote, verb: &str) -> String {
    format!("{}{verb}?path={}", path(&remote.sandbox), quote(&remote.path))
}

fn join(folder: &str, name: &str) -> String {
    format!("{}/{name}", folder.trim_end_matches('/'))
}

/// The folder above, and the last part.
fn split(path: &str) -> Result<(String, String), Problem> {
    let (folder, name) = path.trim_end_matches('/').rsplit_once('/').unwrap_or_default();
    if name.is_empty() {
        return Err(Problem::usage(format!("`{path}` has no name")));
    }
    Ok((if folder.is_empty() { "/" } else { folder }.to_owned(), name.to_owned()))
}

fn line(file: &FileInfo) -> String {
    let kind = match file.kind {
        FileKind::File => '-',
        FileKind::Directory => 'd',
        FileKind::Symlink => 'l',
        FileKind::Other => '?',
    };
    let target = file.target.as_deref().map(|target| format!(" -> {target}")).unwrap_or_default();
    let FileInfo { mode, uid, gid, size, modified_at, path, .. } = file;
    format!(
        "{kind} {mode:04o} {uid:>5} {gid:>5} {:>10}  {modified_at}  {path}{target}",
        show::size(*size)
    )
}

fn local_error(path: &str) -> impl Fn(io::Error) -> Problem + '_ {
    move |error| Problem::new(format!("`{path}`: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        assert_eq!(join("/", "a"), "/a");
        assert_eq!(join("/work/", "a"), "/work/a");
        assert_eq!(split("/a").unwrap(), ("/".to_owned(), "a".to_owned()));
        assert_eq!(split("/a/b/").unwrap(), ("/a".to_owned(), "b".to_owned()));
        assert!(split("/").is_err());
    }
}
