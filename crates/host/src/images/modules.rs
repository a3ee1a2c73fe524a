//! Kernel modules the guest agent loads before it has a root file system, and the order to load them in.
//!
//! A package that was unpacked but not installed has no `modules.dep`, so each module is asked itself: it
//! carries `depends=a,b` in its `.modinfo`.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::process::Command;

use super::disk::at;
use super::{ImageError, commands};

/// What a guest needs, by what it needs it for. Built in or as a module; dependencies are found.
pub(super) const WANTED: [&str; 12] = [
    "virtio_mmio",    // the bus of a microvm
    "virtio_console", // the port to the host
    "virtio_blk",     // its disk
    "virtio_net",     // its link
    "virtio_balloon", // gives freed memory back to the host
    "virtio_rng",     // entropy from the host
    "pvpanic_mmio",   // tells the host of a panic
    "ext4",           // its root
    "overlay",        // containers in it
    "inet_diag",      // which TCP connections there are, for the idle sample
    "tcp_diag",
    "udp_diag", // which UDP ports are open
];

/// How long unpacking one module may take: milliseconds, but the machine may be busy.
const UNPACK_LIMIT: Duration = Duration::from_mins(1);

/// A module ready to load.
#[derive(Debug)]
pub(super) struct Module {
    /// With `_`, as the kernel says it.
    pub(super) name: String,
    /// The ELF file.
    pub(super) content: Vec<u8>,
}

/// The wanted modules and their dependencies below `tree` (`lib/modules/<release>`), in load order.
pub(super) async fn collect(
    tree: &Path,
    wanted: &[&str],
    scratch: &Path,
) -> Result<Vec<Module>, ImageError> {
    let release = tree.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let builtin_path = tree.join("modules.builtin");
    let builtin = fs::read_to_string(&builtin_path).map_err(at("read", &builtin_path))?;
    let builtin: Vec<String> = builtin.lines().map(|line| module_name(Path::new(line))).collect();
    let mut files = HashMap::new();
    find_files(tree, &mut files)?;

    let mut ordered: Vec<Module> = Vec::new();
    // Depth first with an explicit stack: a module is pushed again below its dependencies.
    let mut stack: Vec<(String, Option<Vec<u8>>)> =
        wanted.iter().rev().map(|name| ((*name).to_owned(), None)).collect();
    while let Some((name, content)) = stack.pop() {
        if builtin.contains(&name) || ordered.iter().any(|module| module.name == name) {
            continue;
        }
        if let Some(content) = content {
            ordered.push(Module { name, content });
            continue;
        }
        // Waiting for its dependencies already, and met again among them.
        if stack.iter().any(|(other, content)| *other == name && content.is_some()) {
            return Err(ImageError::Unexpected {
                doing: "order the kernel's modules",
                what: format!("`{name}` depends on itself"),
            });
        }
        let file = files.get(&name).ok_or_else(|| ImageError::NoModule {
            kernel: release.clone(),
            module: name.clone(),
        })?;
        let content = unpack(file, scratch).await?;
        let needs = depends(&content);
        stack.push((name, Some(content)));
        stack.extend(needs.into_iter().rev().map(|need| (need, None)));
    }
    Ok(ordered)
}

/// File names use `-` and `_` as their authors liked; the kernel knows `_` alone.
fn module_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.split(".ko").next().unwrap_or_default().replace('-', "_")
}

/// All modules below `dir` by name.
fn find_files(dir: &Path, files: &mut HashMap<String, PathBuf>) -> Result<(), ImageError> {
    for entry in fs::read_dir(dir).map_err(at("list", dir))? {
        let entry = entry.map_err(at("list", dir))?;
        let path = entry.path();
        if entry.file_type().map_err(at("look at", &path))?.is_dir() {
            find_files(&path, files)?;
        } else if entry.file_name().to_string_lossy().contains(".ko") {
            files.insert(module_name(&path), path);
        }
    }
    Ok(())
}

/// Content of a module's file, which Debian compresses.
async fn unpack(file: &Path, scratch: &Path) -> Result<Vec<u8>, ImageError> {
    if file.extension().is_some_and(|extension| extension == "ko") {
        return fs::read(file).map_err(at("read", file));
    }
    if file.extension().is_none_or(|extension| extension != "xz") {
        return Err(ImageError::Unexpected {
            doing: "unpack a kernel module",
            what: format!("{} is neither plain nor compressed by xz", file.display()),
        });
    }
    let unpacked = scratch.join("module.ko");
    let out = fs::File::create(&unpacked).map_err(at("create", &unpacked))?;
    let mut command = Command::new(commands::program("xz", "xz-utils")?);
    command.args(["-dc", "--"]).arg(file);
    commands::run_into(command, "unpack a kernel module", UNPACK_LIMIT, out).await?;
    fs::read(&unpacked).map_err(at("read", &unpacked))
}

/// Names after `depends=` in a module.
fn depends(content: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = content.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let value = content[at + KEY.len()..].split(|b| *b == 0).next().unwrap_or_default();
    let names = String::from_utf8_lossy(value);
    names.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn dependencies_come_first_and_once_and_what_is_built_in_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("6.12");
        fs::create_dir_all(tree.join("kernel/drivers/net")).unwrap();
        fs::write(tree.join("modules.builtin"), "kernel/fs/ext4/ext4.ko\nkernel/lib/crc-16.ko\n")
            .unwrap();
        for (name, needs) in [
            ("virtio_net", "net_failover,crc_16"),
            ("net_failover", "failover"),
            ("failover", ""),
            ("pvpanic-mmio", "pvpanic"),
            ("pvpanic", ""),
            ("twice", "failover,pvpanic"),
        ] {
            let content = format!("ELF\0license=GPL\0depends={needs}\0name=x\0");
            fs::write(tree.join("kernel/drivers/net").join(format!("{name}.ko")), content).unwrap();
        }
        let wanted = ["virtio_net", "ext4", "twice", "pvpanic_mmio"];
        let modules = collect(&tree, &wanted, dir.path()).await.unwrap();
        let names: Vec<_> = modules.iter().map(|module| module.name.as_str()).collect();
        assert_eq!(
            names,
            ["failover", "net_failover", "virtio_net", "pvpanic", "twice", "pvpanic_mmio"]
        );

        let error = collect(&tree, &["overlay"], dir.path()).await.unwrap_err().to_string();
        assert_eq!(error, "kernel 6.12 has no `overlay`, neither built in nor as a module");

        fs::write(tree.join("kernel/circle.ko"), "\0depends=circle\0").unwrap();
        let error = collect(&tree, &["circle"], dir.path()).await.unwrap_err().to_string();
        assert!(error.contains("depends on itself"), "{error}");
    }

    #[tokio::test]
    async fn a_compressed_module_is_unpacked() {
        let dir = tempfile::tempdir().unwrap();
        let plain = dir.path().join("m.ko");
        fs::write(&plain, b"\x7fELF\0\xff\0depends=\0").unwrap();
        let packed = std::process::Command::new("xz").args(["-k"]).arg(&plain).status().unwrap();
        assert!(packed.success());
        let content = unpack(&dir.path().join("m.ko.xz"), dir.path()).await.unwrap();
        assert_eq!(content, fs::read(&plain).unwrap());
    }
}
