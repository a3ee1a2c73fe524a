//! Building an image: parts from the cache or made anew, joined into a folder, published in one step.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::apt::{self, Mirrors};
use super::cpio::Archive;
use super::disk::{self, Bench, Workshop, at, write_new};
use super::kernel::{self, KernelPart};
use super::rootfs::{self, RootPart};
use super::{
    DEFAULT_NAME, FORMAT, GuestAgent, INITRD_FILE, Image, ImageError, ImageId, KERNEL_FILE, Kernel,
    MANIFEST_FILE, Manifest, Part, Parts, ROOT_FILE, modules,
};

/// Debian packages in the guest besides Debian's minimum.
pub const DEFAULT_PACKAGES: [&str; 9] = [
    "bash",
    "ca-certificates",
    "coreutils",
    "cron",
    "curl",
    "git",
    "iproute2",
    "procps",
    "python3",
];

/// Largest guest agent, in bytes: it stays in every guest's memory. A static release build has some 2 MiB.
const GUEST_BYTES_MAX: u64 = 64 << 20;
/// Largest record of a cached part, in bytes.
const RECORD_BYTES_MAX: u64 = 1 << 20;
/// Bytes of room for an initial RAM disk and the rest that is never cached.
const ROOM_BYTES: u64 = 128 << 20;

/// What to build, and where.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// Folder of the images; made if missing.
    pub images: PathBuf,
    /// The guest agent: a static program for x86-64 Linux.
    pub guest: PathBuf,
    /// Its version, for the manifest.
    pub guest_version: String,
    /// The newest version of the guest protocol that the agent speaks; `None`: all that it knows. For trying how sandboxes with an
    /// older agent fare.
    pub protocol_max: Option<u16>,
    /// Debian packages besides Debian's minimum, by name.
    pub packages: Vec<String>,
    /// Address of Debian's archive; `None`: the one the host's apt uses.
    pub mirror: Option<String>,
    /// Fetch kernel and packages anew although they are in the cache: for security updates.
    pub refresh: bool,
    /// Whether the image becomes the default one.
    pub make_default: bool,
}

impl BuildOptions {
    /// The default image below `images`, with the guest agent that stands beside the running program.
    ///
    /// # Errors
    ///
    /// The running program's own path cannot be found out.
    pub fn new(images: PathBuf) -> Result<Self, ImageError> {
        let own = std::env::current_exe().map_err(at("find", Path::new("/proc/self/exe")))?;
        Ok(Self {
            images,
            guest: own.with_file_name("dormouse-guest"),
            guest_version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol_max: None,
            packages: DEFAULT_PACKAGES.iter().map(|name| (*name).to_owned()).collect(),
            mirror: None,
            refresh: false,
            make_default: true,
        })
    }
}

/// Builds an image, or finds that it is there already, and returns its digest.
///
/// `progress` is given a line at each step, with the time it took where it was long. With kernel and root
/// file system in the cache it needs neither network nor other programs and takes well under a second.
/// One build runs at a time; a second one waits for the first.
///
/// # Errors
///
/// What is missing on the host and how to get it, or which step failed and its last words. Nothing is
/// published then, and nothing that was there is changed.
pub async fn build(
    options: BuildOptions,
    progress: &mut (dyn FnMut(&str) + Send),
) -> Result<ImageId, ImageError> {
    let mut say = Say { progress };
    let guest = read_guest(&options.guest)?;
    if let Some(wanted) = options.protocol_max {
        let wire::VersionRange { oldest, newest } = wire::VERSIONS;
        if !(oldest..=newest).contains(&wanted) {
            return Err(ImageError::BadProtocol { wanted, oldest, newest });
        }
    }
    for name in &options.packages {
        apt::check_package(name)?;
    }
    if let Some(mirror) = &options.mirror {
        apt::check_mirror(mirror)?;
    }
    let images = options.images.clone();
    let workshop = tokio::task::spawn_blocking(move || Workshop::open(&images))
        .await
        .map_err(|e| at("open images folder", &options.images)(std::io::Error::other(e)))??;

    let cache =
        Cache { workshop: &workshop, refresh: options.refresh, mirror: options.mirror.as_deref() };
    let (kernel_dir, kernel) = cache.kernel(&mut say).await?;
    let (root_dir, root) = cache.root(&options.packages, &mut say).await?;

    workshop.need_space(ROOM_BYTES)?;
    let initrd = initrd(&guest, options.protocol_max, &kernel_dir, &kernel)?;
    let manifest = Manifest {
        format: FORMAT,
        created_at: jiff::Timestamp::from_second(jiff::Timestamp::now().as_second())
            .unwrap_or_default()
            .to_string(),
        kernel: Kernel {
            release: kernel.release,
            package: kernel.package,
            modules: kernel.modules,
        },
        guest: GuestAgent {
            version: options.guest_version,
            sha256: disk::sha256_of(&guest),
            protocol_max: options.protocol_max,
        },
        parts: Parts {
            vmlinuz: kernel.vmlinuz,
            initrd: Part { sha256: disk::sha256_of(&initrd), bytes: initrd.len() as u64 },
            root: root.root,
        },
        packages: root.packages,
    };
    let id = manifest.id();
    let target = workshop.dir().join(id.as_str());
    if target.exists() {
        Image::open(&target)?;
        say.line(&format!("image {id} is there already"));
    } else {
        let bench = workshop.bench("image")?;
        for (dir, file) in [(&kernel_dir, KERNEL_FILE), (&root_dir, ROOT_FILE)] {
            let link = bench.path().join(file);
            fs::hard_link(dir.join(file), &link)
                .map_err(at("hard-link a cached part to", &link))?;
        }
        write_new(&bench.path().join(INITRD_FILE), &initrd)?;
        write_record(&bench.path().join(MANIFEST_FILE), &manifest)?;
        bench.publish(&target)?;
        say.line(&format!("image {id} built"));
    }
    if options.make_default {
        workshop.point(DEFAULT_NAME, id.as_str())?;
    }
    Ok(id)
}

/// Tells whoever started the build what is going on.
pub(super) struct Say<'a> {
    progress: &'a mut (dyn FnMut(&str) + Send),
}

impl Say<'_> {
    pub(super) fn line(&mut self, text: &str) {
        (self.progress)(text);
    }
}

/// Kernels and root file systems by what they were made from.
struct Cache<'a> {
    workshop: &'a Workshop,
    refresh: bool,
    mirror: Option<&'a str>,
}

impl Cache<'_> {
    async fn kernel(&self, say: &mut Say<'_>) -> Result<(PathBuf, KernelPart), ImageError> {
        let recipe = format!(
            "kernel 1\n{}\n{}\n{}\n",
            kernel::SUITE,
            kernel::META_PACKAGE,
            modules::WANTED.join("\n")
        );
        let dir = self.dir("kernel", &recipe);
        if let Some(part) = self.known(&dir, KERNEL_FILE)? {
            say.line("kernel: from the cache");
            return Ok((dir, part));
        }
        self.need(kernel::ROOM_BYTES)?;
        let begun = Instant::now();
        let bench = self.workshop.bench("kernel")?;
        let part = kernel::make(&self.mirrors()?, &bench, say).await?;
        self.keep(bench, &dir, &part)?;
        say.line(&format!("kernel: {} in {:.1} s", part.release, begun.elapsed().as_secs_f64()));
        Ok((dir, part))
    }

    async fn root(
        &self,
        packages: &[String],
        say: &mut Say<'_>,
    ) -> Result<(PathBuf, RootPart), ImageError> {
        let mut packages = packages.to_vec();
        packages.sort();
        packages.dedup();
        let dir = self.dir("root", &rootfs::recipe(&packages));
        if let Some(part) = self.known(&dir, ROOT_FILE)? {
            say.line("root: from the cache");
            return Ok((dir, part));
        }
        self.need(rootfs::ROOM_BYTES)?;
        let begun = Instant::now();
        let bench = self.workshop.bench("root")?;
        let part = rootfs::make(&self.mirrors()?, &packages, &bench, say).await?;
        self.keep(bench, &dir, &part)?;
        let seconds = begun.elapsed().as_secs_f64();
        say.line(&format!(
            "root: Debian 12 with {} packages in {seconds:.1} s",
            part.packages.len()
        ));
        Ok((dir, part))
    }

    /// Making a part needs room, and root's rights for the owners of its files.
    fn need(&self, room: u64) -> Result<(), ImageError> {
        if !rustix::process::geteuid().is_root() {
            return Err(ImageError::NotRoot);
        }
        self.workshop.need_space(room)
    }

    fn mirrors(&self) -> Result<Mirrors, ImageError> {
        let mut mirrors = Mirrors::of_host()?;
        if let Some(mirror) = self.mirror {
            mirror.trim_end_matches('/').clone_into(&mut mirrors.main);
        }
        Ok(mirrors)
    }

    fn dir(&self, what: &str, recipe: &str) -> PathBuf {
        let digest = disk::sha256_of(recipe.as_bytes());
        self.workshop.dir().join(".cache").join(format!("{what}-{}", &digest[..16]))
    }

    /// The part in `dir`, if it was made before and is not to be made anew.
    fn known<T: DeserializeOwned>(&self, dir: &Path, file: &str) -> Result<Option<T>, ImageError> {
        let record = dir.join(MANIFEST_FILE);
        if self.refresh || !record.exists() || !dir.join(file).exists() {
            return Ok(None);
        }
        let text = disk::read_limited(&record, RECORD_BYTES_MAX)?;
        serde_json::from_slice(&text)
            .map(Some)
            .map_err(|source| ImageError::Manifest { path: record, source })
    }

    /// Publishes a part. An older one of the same recipe goes; images made of it keep their links to it.
    fn keep<T: Serialize>(&self, bench: Bench, dir: &Path, part: &T) -> Result<(), ImageError> {
        write_record(&bench.path().join(MANIFEST_FILE), part)?;
        let parent = self.workshop.dir().join(".cache");
        fs::create_dir_all(&parent).map_err(at("create folder", &parent))?;
        if dir.exists() {
            let old = self.workshop.bench("old")?;
            let aside = old.path().join("part");
            fs::rename(dir, &aside).map_err(at("put aside", dir))?;
            return bench.publish(dir);
        }
        bench.publish(dir)
    }
}

fn write_record<T: Serialize>(path: &Path, record: &T) -> Result<(), ImageError> {
    let mut text = serde_json::to_vec_pretty(record)
        .map_err(|source| ImageError::Manifest { path: path.to_owned(), source })?;
    text.push(b'\n');
    write_new(path, &text)
}

/// Reads the guest agent and looks that it can be the first program of a guest.
fn read_guest(path: &Path) -> Result<Vec<u8>, ImageError> {
    if !path.is_file() {
        return Err(ImageError::NoGuestAgent { path: path.to_owned() });
    }
    let content = disk::read_limited(path, GUEST_BYTES_MAX)?;
    let bad = |why| ImageError::BadGuestAgent { path: path.to_owned(), why };
    match is_static(&content) {
        None => Err(bad("it is not an ELF program for x86-64")),
        Some(false) => Err(bad(
            "it needs a dynamic loader, which the initial RAM disk has not: `cargo xtask build` links it statically",
        )),
        Some(true) => Ok(content),
    }
}

/// Whether an ELF program for x86-64 starts without a dynamic loader. `None`: it is no such program.
fn is_static(elf: &[u8]) -> Option<bool> {
    /// `PT_INTERP`: the segment that names the dynamic loader.
    const INTERPRETER: u32 = 3;
    /// `EM_X86_64`.
    const X86_64: u16 = 62;

    let u16_at = |at: usize| Some(u16::from_le_bytes(elf.get(at..at + 2)?.try_into().ok()?));
    if elf.get(..6)? != b"\x7fELF\x02\x01" || u16_at(18)? != X86_64 {
        return None;
    }
    let table = usize::try_from(u64::from_le_bytes(elf.get(32..40)?.try_into().ok()?)).ok()?;
    let (size, count) = (usize::from(u16_at(54)?), usize::from(u16_at(56)?));
    for i in 0..count {
        let at = table.checked_add(i * size)?;
        let kind = elf.get(at..at.checked_add(4)?)?;
        if kind == INTERPRETER.to_le_bytes() {
            return Some(false);
        }
    }
    Some(true)
}

/// The initial RAM disk: `/init`, the modules, `/etc/dormouse/modules` with their paths in load order, and where the agent is not to
/// speak every version that it knows `/etc/dormouse/protocol-max`.
///
/// Not compressed: unpacking costs an emulated guest more than reading.
fn initrd(
    guest: &[u8],
    protocol_max: Option<u16>,
    kernel_dir: &Path,
    kernel: &KernelPart,
) -> Result<Vec<u8>, ImageError> {
    let mut archive = Archive::default();
    let folders = [
        "dev",
        "etc",
        "etc/dormouse",
        "lib",
        "lib/dormouse-modules",
        "mnt",
        "proc",
        "root",
        "run",
        "sys",
        "tmp",
    ];
    for folder in folders {
        archive.folder(folder, 0o755);
    }
    // The kernel opens these for the first program before anything is mounted on /dev.
    archive.character_device("dev/console", 0o600, (5, 1));
    archive.character_device("dev/null", 0o666, (1, 3));
    let mut list = String::new();
    for (i, name) in kernel.modules.iter().enumerate() {
        let file = kernel_dir.join(kernel::MODULES_FOLDER).join(format!("{name}.ko"));
        let path = format!("lib/dormouse-modules/{i:02}-{name}.ko");
        archive.file(&path, 0o644, &fs::read(&file).map_err(at("read", &file))?);
        list.push('/');
        list.push_str(&path);
        list.push('\n');
    }
    archive.file("etc/dormouse/modules", 0o644, list.as_bytes());
    if let Some(newest) = protocol_max {
        archive.file("etc/dormouse/protocol-max", 0o644, format!("{newest}\n").as_bytes());
    }
    archive.file("init", 0o755, guest);
    Ok(archive.finish())
}

#[cfg(test)]
mod tests {
    use super::super::find_default;
    use super::*;

    /// The smallest thing that passes for a static program, with some bytes of its own.
    fn guest(bytes: &[u8]) -> Vec<u8> {
        let mut elf = vec![0; 64];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[18] = 62;
        elf.extend_from_slice(bytes);
        elf
    }

    /// Options for a build whose kernel and root are in the cache, so that nothing is fetched.
    fn prepared(dir: &Path) -> BuildOptions {
        let options = BuildOptions {
            images: dir.join("images"),
            guest: dir.join("guest"),
            guest_version: "0.1.0".to_owned(),
            protocol_max: None,
            packages: vec!["bash".to_owned()],
            mirror: None,
            refresh: false,
            make_default: true,
        };
        fs::write(&options.guest, guest(b"one")).unwrap();
        let workshop = Workshop::open(&options.images).unwrap();
        let cache = Cache { workshop: &workshop, refresh: false, mirror: None };
        let part = |bench: &Bench, file: &str| {
            write_new(&bench.path().join(file), file.as_bytes()).unwrap();
            Part { sha256: disk::sha256_of(file.as_bytes()), bytes: file.len() as u64 }
        };
        let bench = workshop.bench("kernel").unwrap();
        fs::create_dir(bench.path().join("modules")).unwrap();
        fs::write(bench.path().join("modules/virtio_blk.ko"), "module").unwrap();
        let vmlinuz = part(&bench, KERNEL_FILE);
        let kernel = KernelPart {
            release: "6.12".to_owned(),
            package: "linux=6.12".to_owned(),
            modules: vec!["virtio_blk".to_owned()],
            vmlinuz,
        };
        let recipe = format!(
            "kernel 1\n{}\n{}\n{}\n",
            kernel::SUITE,
            kernel::META_PACKAGE,
            modules::WANTED.join("\n")
        );
        cache.keep(bench, &cache.dir("kernel", &recipe), &kernel).unwrap();
        let bench = workshop.bench("root").unwrap();
        let root =
            RootPart { packages: vec!["bash=5.2".to_owned()], root: part(&bench, ROOT_FILE) };
        cache.keep(bench, &cache.dir("root", &rootfs::recipe(&options.packages)), &root).unwrap();
        options
    }

    #[tokio::test]
    async fn a_second_build_changes_nothing_and_a_new_agent_shares_the_rest() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let options = prepared(dir.path());
        fs::create_dir(options.images.join("not-ours")).unwrap();

        let first = build(options.clone(), &mut |_| {}).await.unwrap();
        let mut lines = Vec::new();
        let again = build(options.clone(), &mut |line| lines.push(line.to_owned())).await.unwrap();
        assert_eq!(first, again);
        assert!(lines.last().unwrap().contains("is there already"), "{lines:?}");

        let image = find_default(&options.images).unwrap();
        assert_eq!(image.id(), &first);
        image.verify().unwrap();
        assert_eq!(image.manifest().kernel.modules, ["virtio_blk"]);

        fs::write(&options.guest, guest(b"two")).unwrap();
        let second = build(options.clone(), &mut |_| {}).await.unwrap();
        assert_ne!(first, second);
        let new = find_default(&options.images).unwrap();
        assert_eq!(new.id(), &second);
        let inode = |path: PathBuf| fs::metadata(path).unwrap().ino();
        assert_eq!(inode(new.root()), inode(image.root()));
        assert_eq!(inode(new.kernel()), inode(image.kernel()));
        assert_ne!(inode(new.initrd()), inode(image.initrd()));

        assert!(options.images.join("not-ours").is_dir());
        let mut both = vec![first, second];
        both.sort();
        assert_eq!(super::super::list(&options.images).unwrap(), both);
    }

    #[tokio::test]
    async fn an_agent_with_an_older_protocol_makes_an_image_of_its_own_and_leaves_the_default() {
        let dir = tempfile::tempdir().unwrap();
        let options = prepared(dir.path());
        let first = build(options.clone(), &mut |_| {}).await.unwrap();
        let older = BuildOptions { protocol_max: Some(1), make_default: false, ..options.clone() };
        let older = build(older, &mut |_| {}).await.unwrap();
        assert_ne!(first, older);
        assert_eq!(find_default(&options.images).unwrap().id(), &first);
        let image = super::super::find(&options.images, &older).unwrap();
        assert_eq!(image.manifest().guest.protocol_max, Some(1));
        let initrd = fs::read(image.initrd()).unwrap();
        assert!(initrd.windows(12).any(|bytes| bytes == b"protocol-max"));
        for wanted in [0, wire::VERSIONS.newest + 1] {
            let options = BuildOptions { protocol_max: Some(wanted), ..options.clone() };
            let error = build(options, &mut |_| {}).await.unwrap_err().to_string();
            assert!(error.contains("protocol-max") && error.contains("from 1 to"), "{error}");
        }
    }

    #[tokio::test]
    async fn a_changed_part_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let options = prepared(dir.path());
        build(options.clone(), &mut |_| {}).await.unwrap();
        let image = find_default(&options.images).unwrap();
        let initrd = image.initrd();
        let content = fs::read(&initrd).unwrap();
        fs::remove_file(&initrd).unwrap();
        let mut same_size = content.clone();
        same_size[0] ^= 1;
        fs::write(&initrd, same_size).unwrap();
        let error = find_default(&options.images).unwrap().verify().unwrap_err().to_string();
        assert!(error.contains("`initrd` is not the file that was built"), "{error}");
        fs::write(&initrd, "short").unwrap();
        let error = find_default(&options.images).unwrap_err().to_string();
        assert!(error.contains("`initrd` has 5 bytes"), "{error}");
    }

    #[tokio::test]
    async fn a_newer_format_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(MANIFEST_FILE);
        fs::write(&path, r#"{"format": 7, "parts": "who knows"}"#).unwrap();
        let error = Manifest::read(&path).unwrap_err();
        assert!(matches!(error, ImageError::TooNew { found: 7, newest: 1, .. }), "{error}");
    }

    #[tokio::test]
    async fn a_program_that_cannot_be_the_guest_agent_is_refused_before_anything_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = prepared(dir.path());
        let text = dir.path().join("text");
        fs::write(&text, "#!/bin/sh\n").unwrap();
        for (path, expected) in [
            (std::env::current_exe().unwrap(), "dynamic loader"),
            (text, "not an ELF program"),
            (dir.path().join("none"), "no guest agent at"),
        ] {
            options.guest = path;
            let error = build(options.clone(), &mut |_| {}).await.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(super::super::list(&options.images).unwrap().is_empty());
    }
}
