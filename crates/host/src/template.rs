//! Templates: a guest that was booted once, for everybody who comes after.
//!
//! No sandbox boots on its user's time: it is a copy of a template's memory, devices and disk, woken with an identity of its
//! own. There is one template per image, size and machine (QEMU, processor, TSC rate, places for drives); it is made on first use and kept.
//! It lies in a folder named by what it depends on, is published by renaming that folder, and is never changed again.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::SandboxId;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::Mutex;
use vmm::{BootImage, Fingerprint, Machine};

use crate::budget;
use crate::clock::Moment;
use crate::ground::{FREE_BYTES_MIN, Ground};
use crate::guest::{
    Continuity, GuestError, GuestLink, LinkError, QuiesceOptions, WakeError, WakeParams,
};
use crate::images::Image;
use crate::manifest::hex;
use crate::pool::Kind;
use crate::sandbox::body::{Shape, machine_spec, make_folder};
use crate::settings::Files;
use crate::tap::Port;
use crate::turns::Urgency;

/// How long a boot may take until the guest agent answers: ten times what it takes under emulation on a busy machine.
pub const BOOT_LIMIT: Duration = Duration::from_secs(90);

/// How often a boot is tried: a rare one stays silent for reasons that nobody has found (some 1 in 10 on a busy machine
/// under emulation, before the TSC rate was given to the kernel).
pub const BOOT_TRIES: u32 = 3;

/// How long the template's guest may take to write everything to disk and stand still.
const QUIESCE_LIMIT: Duration = Duration::from_secs(30);

/// How long one of the commands that warm a template up may take.
const WARM_UP_LIMIT: Duration = Duration::from_mins(1);

/// Room on the disk that one is promised before it is made: twice what the memory, disk and devices of a Debian take that was
/// booted and warmed up (135 to 141 MiB).
const BYTES: u64 = 280 << 20;

/// Format of a template's manifest.
const FORMAT: u32 = 1;

/// A template on disk.
#[derive(Clone, Debug)]
pub struct Template {
    /// Its parts.
    pub files: Files,
    /// What is known about them.
    pub about: About,
}

/// Manifest of a template.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct About {
    format: u32,
    /// The image it was booted from.
    pub image_digest: String,
    /// When its guest stopped.
    pub saved_at: Moment,
    /// Size and digest of the state file.
    pub state: vmm::state::StateMark,
    /// What must be the same to load it.
    pub machine: Fingerprint,
    /// Version of the guest agent in it.
    pub guest_version: String,
    /// Bytes of memory that are not zero.
    pub memory_bytes: u64,
    /// Processor time its programs had used, microseconds: every copy's count begins with that. `None`: made before this was
    /// asked.
    #[serde(default)]
    pub cpu_usec: Option<u64>,
}

/// Why there is no template.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// A file could not be made, read or moved.
    #[error("{doing}")]
    File {
        /// What was being done.
        doing: &'static str,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
    /// The same, told by the files' own module.
    #[error("make the template's files")]
    Files(#[from] vmm::files::FileError),
    /// All addresses are taken.
    #[error("all addresses are taken")]
    NoSlot,
    /// QEMU did not do as told.
    #[error("run the template's machine")]
    Machine(#[from] vmm::machine::OrderError),
    /// QEMU did not start.
    #[error("start the template's machine")]
    Start(#[from] vmm::machine::StartError),
    /// QEMU did not save.
    #[error("save the template's machine")]
    Save(#[from] vmm::machine::SaveError),
    /// The guest agent.
    #[error("speak with the template's guest")]
    Link(#[from] LinkError),
    /// There is no room in memory.
    #[error(transparent)]
    Room(#[from] budget::NoRoom),
    /// There is no room on the disk.
    #[error(transparent)]
    Disk(#[from] crate::promises::NoRoom),
    /// The guest agent said no.
    #[error("wake the template's guest")]
    Wake(#[from] WakeError),
    /// A command that warms it up.
    #[error("warm the template up")]
    WarmUp(#[source] GuestError),
    /// Every try failed; the console of the last one is kept.
    #[error("the template did not boot in {BOOT_TRIES} tries of {} s; its console is in {}", BOOT_LIMIT.as_secs(), console.display())]
    Silent {
        /// Serial console of the last try.
        console: PathBuf,
    },
}

/// All templates of a host.
#[derive(Debug, Default)]
pub struct Templates {
    /// One at a time: two boots at once on a small machine take longer than one after the other.
    making: Mutex<()>,
}

impl Templates {
    /// The template for sandboxes of this kind, if there is one already.
    pub(crate) fn find(ground: &Ground, image: &Image, kind: &Kind) -> Option<Template> {
        let machine = ground.fingerprint(kind.cpus, kind.memory_mib, kind.drives);
        // What cannot be read whoever needs it is told.
        open(&ground.settings.templates_dir().join(name(image, &machine)), &machine).ok()?
    }

    /// The template for an image and a size, with places for drives or without; made now when there is none.
    pub(crate) async fn get(
        &self,
        ground: &Ground,
        image: &Image,
        cpus: u32,
        memory_mib: u32,
        drives: bool,
    ) -> Result<Arc<Template>, TemplateError> {
        let machine = ground.fingerprint(cpus, memory_mib, drives);
        let name = name(image, &machine);
        let dir = ground.settings.templates_dir().join(&name);
        if let Some(template) = open(&dir, &machine)? {
            return Ok(Arc::new(template));
        }
        let _alone = self.making.lock().await;
        let _alone_on_this_host = lock(&ground.settings.templates_dir()).await?;
        if let Some(template) = open(&dir, &machine)? {
            return Ok(Arc::new(template));
        }
        let mut last_console = dir.join("console.log");
        for attempt in 1..=BOOT_TRIES {
            let scratch = ground.settings.templates_dir().join(format!(".new-{name}"));
            remove_folder(&scratch)?;
            tracing::info!(
                image = image.id().as_str(),
                cpus,
                memory_mib,
                drives,
                attempt,
                "booting a template"
            );
            let shape = Shape { cpus, memory_mib, drives: drives.then(Vec::new) };
            match make(ground, image, shape, &scratch).await {
                Ok(()) => {
                    let rename = std::fs::rename(&scratch, &dir);
                    rename.map_err(|source| TemplateError::File {
                        doing: "publish the template",
                        source,
                    })?;
                    vmm::files::sync_folder(&ground.settings.templates_dir())?;
                    let made = open(&dir, &machine)?
                        .ok_or(TemplateError::Silent { console: last_console })?;
                    tracing::info!(
                        template = name,
                        memory_bytes = made.about.memory_bytes,
                        "template ready"
                    );
                    return Ok(Arc::new(made));
                }
                Err(TemplateError::Link(error)) if attempt < BOOT_TRIES => {
                    tracing::warn!(%error, attempt, "a template's boot stayed silent; trying again");
                }
                Err(TemplateError::Link(error)) => {
                    tracing::error!(%error, "a template did not boot");
                    last_console = Files::in_dir(&scratch).console();
                }
                Err(error) => return Err(error),
            }
        }
        Err(TemplateError::Silent { console: last_console })
    }
}

/// Boots, warms up, saves. Leaves everything in `scratch`, synced.
async fn make(
    ground: &Ground,
    image: &Image,
    shape: Shape,
    scratch: &Path,
) -> Result<(), TemplateError> {
    let _seat = ground
        .budget
        .seat(None, Urgency::Call, shape.memory_mib, ground.settings.memory_wait)
        .await?;
    let room = ground.room.promise(BYTES, FREE_BYTES_MIN)?;
    room.is_for(scratch);
    let files = Files::in_dir(scratch);
    make_folder(&files)
        .map_err(|source| TemplateError::File { doing: "make the template's folder", source })?;
    vmm::files::create_overlay(&ground.qemu, &files.disk(), &image.root(), None).await?;
    let slot = ground.slots.take().ok_or(TemplateError::NoSlot)?;
    let port = Port::open(ground.subnet, slot.number());
    let mut port =
        port.map_err(|source| TemplateError::File { doing: "make the template's tap", source })?;
    // Only a label in the process list: a template is nobody's sandbox.
    let label = SandboxId::from_random([0; api::id::ID_CHARS]);
    let spec =
        machine_spec(ground, &label, &files, slot.number(), shape, image.root(), port.tap_fd());
    let made = match Machine::boot(&ground.qemu_now(), &spec, &boot_image(ground, image)).await {
        Ok(mut machine) => {
            let made = warm_up_and_save(image, &files, &mut machine).await;
            machine.kill().await?;
            made
        }
        Err(error) => Err(error.into()),
    };
    let removed = port.remove();
    removed.map_err(|source| TemplateError::File { doing: "remove the template's tap", source })?;
    made
}

async fn warm_up_and_save(
    image: &Image,
    files: &Files,
    machine: &mut Machine,
) -> Result<(), TemplateError> {
    let link = GuestLink::random()?;
    let hello = link.attach(machine.guest_stream()?, Continuity::Unknown, BOOT_LIMIT).await?;
    link.wake(WakeParams { identity: None, fork: false }, BOOT_LIMIT).await?;
    warm_up(&link).await.map_err(TemplateError::WarmUp)?;
    let used = link.sample().await.map_err(TemplateError::WarmUp)?;
    link.quiesce(QuiesceOptions { sync: true, drop_caches: false }, QUIESCE_LIMIT).await?;
    machine.pause().await?;
    let saved = machine.save_state(&files.state()).await?;
    let saved_at = Moment::now();
    let about = About {
        format: FORMAT,
        image_digest: image.id().as_str().to_owned(),
        saved_at,
        state: saved.mark,
        machine: machine.fingerprint().clone(),
        guest_version: hello.agent,
        memory_bytes: vmm::files::allocated_bytes(&files.memory())?,
        cpu_usec: Some(used.cpu_usec),
    };
    machine.quit().await?;
    for path in [files.memory(), files.disk()] {
        sync_and_protect(&path)
            .map_err(|source| TemplateError::File { doing: "sync the template", source })?;
    }
    let text = serde_json::to_vec_pretty(&about).map_err(std::io::Error::from);
    let text =
        text.map_err(|source| TemplateError::File { doing: "describe the template", source })?;
    vmm::files::replace(&files.manifest(), &text)?;
    Ok(())
}

/// Programs that nearly every sandbox runs, so that their pages (and under emulation their translated code's pages) are in
/// memory already. A missing one is no fault.
async fn warm_up(link: &GuestLink) -> Result<(), GuestError> {
    for line in [
        "true",
        "ls / >/dev/null",
        "python3 -c 'import json, socket, http.server'",
        "id >/dev/null; date >/dev/null",
    ] {
        let wait = crate::exec::run_to_end(link, line, WARM_UP_LIMIT).await?;
        tracing::debug!(line, ?wait, "warm-up");
    }
    Ok(())
}

/// Kernel, initial RAM disk and command line of an image on this host.
pub(crate) fn boot_image(ground: &Ground, image: &Image) -> BootImage {
    let cmdline = format!("{} quiet", vmm::qemu::kernel_parameters(ground.qemu.tsc_khz()));
    BootImage { kernel: image.kernel(), initrd: image.initrd(), cmdline }
}

/// A template's folder name: the digest of all that it depends on, but the TSC rate, which is never measured twice the same.
fn name(image: &Image, machine: &Fingerprint) -> String {
    let Fingerprint {
        qemu_version,
        binary_sha256,
        firmware_sha256,
        accelerator,
        cpu_model,
        machine_line,
        ..
    } = machine;
    let text = format!(
        "{FORMAT}|{}|{qemu_version}|{binary_sha256}|{firmware_sha256}|{accelerator}|{cpu_model}|{machine_line}",
        image.id().as_str(),
    );
    hex(&Sha256::digest(text.as_bytes()))[..32].to_owned()
}

/// A published template; `None` where there is none. One that cannot be read is moved aside and made anew: nothing but time
/// is lost, as every sandbox has its own copy.
fn open(dir: &Path, machine: &Fingerprint) -> Result<Option<Template>, TemplateError> {
    let files = Files::in_dir(dir);
    let text = match std::fs::read(files.manifest()) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(TemplateError::File { doing: "read the template's manifest", source });
        }
    };
    let why = match serde_json::from_slice::<About>(&text) {
        Ok(about) if about.format != FORMAT => format!("it has format {}", about.format),
        Ok(about) => match about.machine.compatible(machine) {
            Ok(()) => return Ok(Some(Template { files, about })),
            Err(mismatch) => mismatch.to_string(),
        },
        Err(error) => error.to_string(),
    };
    let aside = dir.with_extension(format!("unusable-{}", crate::clock::unix_ms()));
    tracing::warn!(dir = %dir.display(), aside = %aside.display(), why, "unusable template moved aside");
    let moved = std::fs::rename(dir, aside);
    moved.map_err(|source| TemplateError::File {
        doing: "move an unusable template aside",
        source,
    })?;
    Ok(None)
}

/// Held while a template is made: daemons may share the folder.
async fn lock(dir: &Path) -> Result<std::fs::File, TemplateError> {
    let failed = |source| TemplateError::File { doing: "lock the folder of templates", source };
    std::fs::create_dir_all(dir).map_err(failed)?;
    std::fs::set_permissions(dir, Permissions::from_mode(0o711)).map_err(failed)?;
    let file = std::fs::File::create(dir.join(".lock")).map_err(failed)?;
    let locked = tokio::task::spawn_blocking(move || file.lock().map(|()| file)).await;
    locked.map_err(|error| failed(std::io::Error::other(error)))?.map_err(failed)
}

fn sync_and_protect(path: &Path) -> std::io::Result<()> {
    std::fs::File::open(path)?.sync_all()?;
    std::fs::set_permissions(path, Permissions::from_mode(0o400))
}

fn remove_folder(path: &Path) -> Result<(), TemplateError> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(TemplateError::File { doing: "clear the template's folder", source: error })
        }
        _ => Ok(()),
    }
}
