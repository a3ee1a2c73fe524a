//! The guest's kernel: Debian's own for clouds, fetched and unpacked, never installed on the host.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::process::Command;

use super::apt::{self, Mirrors, PrivateApt};
use super::build::Say;
use super::disk::{Bench, at, sha256, write_new};
use super::{ImageError, KERNEL_FILE, Part, commands, modules};

/// Where the kernel is from: 6.12 is the first long-term release with what is needed built in.
pub(super) const SUITE: &str = "bookworm-backports";
/// The package that depends on the newest one.
pub(super) const META_PACKAGE: &str = "linux-image-cloud-amd64";

/// How long unpacking a package of 35 MB may take.
const UNPACK_LIMIT: Duration = Duration::from_mins(5);
/// Bytes of room that fetching and unpacking it need: 35 MB packed, 36 MB unpacked, lists.
pub(super) const ROOM_BYTES: u64 = 256 << 20;

/// Folder of the modules within the part.
pub(super) const MODULES_FOLDER: &str = "modules";

/// What the cache knows of a kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct KernelPart {
    /// As `uname -r` says it.
    pub(super) release: String,
    /// `name=version`.
    pub(super) package: String,
    /// Names in load order; files are `modules/<name>.ko`.
    pub(super) modules: Vec<String>,
    /// The bzImage.
    pub(super) vmlinuz: Part,
}

/// Fetches the newest kernel into `bench`: `vmlinuz` and `modules/`.
pub(super) async fn make(
    mirrors: &Mirrors,
    bench: &Bench,
    say: &mut Say<'_>,
) -> Result<KernelPart, ImageError> {
    let scratch = tempdir_in(bench.path())?;
    let apt = PrivateApt::new(&scratch, &[apt::source(&mirrors.main, SUITE)])?;
    say.line("kernel: looking up the newest");
    apt.update().await?;
    let meta = apt.show(META_PACKAGE).await?;
    let package = apt::field(&meta, "Depends")
        .and_then(|depends| depends.split([' ', ',']).find(|name| name.starts_with("linux-image-")))
        .ok_or_else(|| ImageError::Unexpected {
            doing: "look up the newest kernel",
            what: format!("`{META_PACKAGE}` of {SUITE} names no kernel"),
        })?
        .to_owned();
    apt::check_package(&package)?;
    let record = apt.show(&package).await?;
    let version = apt::field(&record, "Version").unwrap_or("unknown").to_owned();

    say.line(&format!("kernel: fetching {package} {version}"));
    let file = apt.download(&package).await?;
    let tree = scratch.join("tree");
    let mut command = Command::new(commands::program("dpkg-deb", "dpkg")?);
    command.arg("-x").arg(&file).arg(&tree);
    commands::run(command, "unpack the kernel", UNPACK_LIMIT, &mut |_| {}).await?;

    let release = package.trim_start_matches("linux-image-").to_owned();
    let boot = tree.join("boot").join(format!("vmlinuz-{release}"));
    let vmlinuz = bench.path().join(KERNEL_FILE);
    write_new(&vmlinuz, &std::fs::read(&boot).map_err(at("read", &boot))?)?;

    say.line("kernel: choosing modules");
    let found =
        modules::collect(&tree.join("lib/modules").join(&release), &modules::WANTED, &scratch)
            .await?;
    let folder = bench.path().join(MODULES_FOLDER);
    std::fs::create_dir(&folder).map_err(at("create folder", &folder))?;
    for module in &found {
        write_new(&folder.join(format!("{}.ko", module.name)), &module.content)?;
    }
    super::disk::sync_folder(&folder)?;
    std::fs::remove_dir_all(&scratch).map_err(at("remove folder", &scratch))?;
    let bytes = std::fs::metadata(&vmlinuz).map_err(at("look at", &vmlinuz))?.len();
    Ok(KernelPart {
        release,
        package: format!("{package}={version}"),
        modules: found.into_iter().map(|module| module.name).collect(),
        vmlinuz: Part { sha256: sha256(&vmlinuz)?, bytes },
    })
}

/// A folder for what is needed only while building.
fn tempdir_in(dir: &Path) -> Result<std::path::PathBuf, ImageError> {
    let path = dir.join("scratch");
    std::fs::create_dir(&path).map_err(at("create folder", &path))?;
    Ok(path)
}
