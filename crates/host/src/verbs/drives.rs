//! The verbs about drives, and what a client is told when one cannot be had.

use api::drive::{
    AttachDrive, AttachVolume, CreateDrive, DRIVE_MIB_DEFAULT, DRIVES_MAX, Drive, DriveUser,
};
use api::{ApiError, Code, SandboxId};

use super::{internal, no_room, no_space};
use crate::clock::rfc3339;
use crate::daemon::Daemon;
use crate::drive_trouble;
use crate::drives::{self, Claim, DriveError, Note};
use crate::ground::FREE_BYTES_MIN;
use crate::images::ImageError;
use crate::manifest::{DriveKind, DriveUse};
use crate::sandbox::Handle;
use crate::sandbox::work::is_full;
use crate::volumes::VolumeClaim;

/// Drives and volumes that a sandbox has while this lives, and keeps if [`keep`](Self::keep) is called.
#[derive(Debug)]
pub(crate) struct Claims {
    drives: Claim,
    volumes: VolumeClaim,
}

impl Claims {
    /// They are the sandbox's until it gives them back.
    pub(crate) fn keep(self) {
        self.drives.keep();
        self.volumes.keep();
    }
}

/// Drives that a sandbox shall have.
pub(crate) fn drive_uses(wanted: &[AttachDrive]) -> Vec<DriveUse> {
    let uses = wanted.iter().map(|drive| DriveUse {
        name: drive.name.clone(),
        path: drive.path.clone(),
        read_only: drive.read_only,
        kind: DriveKind::Drive,
    });
    uses.collect()
}

/// How often a sandbox is booted for a restart with other drives: a boot that was under way does not count.
const RESTARTS_MAX: u32 = 2;

impl Daemon {
    pub(crate) async fn make_drive(&self, new: CreateDrive) -> Result<Drive, ApiError> {
        let size_mib = new.size_mib.unwrap_or(DRIVE_MIB_DEFAULT);
        let room = self.ground.room.promise(drives::bytes_at_first(size_mib), FREE_BYTES_MIN);
        let _room = room.map_err(|error| no_room("the drive", &error))?;
        let made = self.ground.drives.create(&new.name, size_mib).await;
        let note = made.map_err(|error| self.drive_error("name", &new.name, &error))?;
        Ok(self.drive(&new.name, &note))
    }

    pub(crate) fn all_drives(&self) -> Result<Vec<Drive>, ApiError> {
        let all =
            self.ground.drives.list().map_err(|error| self.drive_error("name", "", &error))?;
        Ok(all.iter().map(|(name, note)| self.drive(name, note)).collect())
    }

    pub(crate) fn one_drive(&self, name: &str) -> Result<Drive, ApiError> {
        let note = self.ground.drives.note(name);
        let note = note.map_err(|error| self.drive_error("name", name, &error))?;
        Ok(self.drive(name, &note))
    }

    pub(crate) fn remove_drive(&self, name: &str) -> Result<(), ApiError> {
        let removed = self.ground.drives.delete(name);
        removed.map_err(|error| self.drive_error("name", name, &error))
    }

    /// Takes drives and volumes for a sandbox: drives have the first places.
    pub(crate) fn claim_all(
        &self,
        id: &SandboxId,
        mut uses: Vec<DriveUse>,
        volumes: &[AttachVolume],
    ) -> Result<(Vec<DriveUse>, Claims), ApiError> {
        uses.extend(volumes.iter().map(|volume| DriveUse {
            name: volume.name.clone(),
            path: volume.path.clone(),
            read_only: true,
            kind: DriveKind::Volume,
        }));
        let claimed = self.ground.drives.claim(id, &uses).map_err(|(at, error)| {
            let name = &uses[at].name;
            let error = self.drive_error(&format!("drives[{at}].name"), name, &error);
            // What is not there is no place that was asked for, but a field that is wrong.
            let code = if error.code == Code::NotFound { Code::Unprocessable } else { error.code };
            ApiError { code, ..error }
        })?;
        let volumes = self.claim_volumes(id, &uses)?;
        Ok((uses, Claims { drives: claimed, volumes }))
    }

    /// Boots a sandbox with these drives in place of those that it has. One that is being booted at this moment is booted
    /// once more.
    pub(crate) async fn restart_with(
        &self,
        handle: &Handle,
        drives: Option<Vec<AttachDrive>>,
        volumes: Option<Vec<AttachVolume>>,
    ) -> Result<(), ApiError> {
        let _alone = handle.attaching().await;
        // What is not spoken of it keeps, copies among it: their places are the first.
        let (own, shared): (Vec<DriveUse>, Vec<DriveUse>) =
            handle.manifest().drives.into_iter().partition(|drive| drive.kind != DriveKind::Volume);
        let own = drives.map_or(own, |drives| drive_uses(&drives));
        let volumes = volumes.unwrap_or_else(|| {
            let kept = shared.into_iter();
            kept.map(|DriveUse { name, path, .. }| AttachVolume { name, path }).collect()
        });
        if own.len() + volumes.len() > DRIVES_MAX {
            let text = format!("{} drives and {} volumes", own.len(), volumes.len());
            return Err(
                ApiError::unprocessable("drives", text).hint(format!("at most {DRIVES_MAX}"))
            );
        }
        let (uses, claim) = self.claim_all(handle.id(), own, &volumes)?;
        let mut done = Ok(());
        for _ in 0..RESTARTS_MAX {
            done = handle.restart_with(uses.clone()).await;
            if done.is_err() || handle.manifest().drives == uses {
                break;
            }
        }
        claim.keep();
        // What is written down is true, however it ended.
        let drives = handle.manifest().drives;
        self.ground.drives.settle(handle.id(), &drives);
        self.ground.volumes.settle(handle.id(), &drives);
        if let Err(error) = done {
            if error.code == Code::DriveUnusable {
                let field = drive_trouble::error(error.error.clone(), &drives).field;
                return Err(ApiError { field, ..error });
            }
            return Err(error);
        }
        if drives == uses {
            return Ok(());
        }
        let mut error = ApiError::new(Code::InUse, "it was restarted by others, with other drives");
        error.retryable = true;
        Err(error)
    }

    fn drive(&self, name: &str, note: &Note) -> Drive {
        let holder = self.ground.drives.holder(name).and_then(|id| self.handle(&id).ok());
        let attached_to = holder.map(|handle| {
            let of = handle.manifest();
            let place = of.drives.iter().find(|drive| drive.name == name);
            DriveUser {
                id: of.id.clone(),
                name: of.name.clone(),
                path: place.map(|drive| drive.path.clone()).unwrap_or_default(),
            }
        });
        let stored = vmm::files::allocated_bytes(&self.ground.drives.disk(name));
        Drive {
            name: name.to_owned(),
            size_mib: note.size_mib,
            // It may have been deleted in between.
            stored_bytes: stored.unwrap_or(0),
            created_at: rfc3339(note.made_at.unix_ms),
            attached_to,
        }
    }

    pub(crate) fn drive_error(&self, field: &str, name: &str, error: &DriveError) -> ApiError {
        let about = |code, text: String| ApiError {
            field: Some(field.to_owned()),
            ..ApiError::new(code, text)
        };
        match error {
            DriveError::Missing => about(Code::NotFound, format!("there is no drive `{name}`"))
                .hint("`dormouse drives list` shows what there is, `dormouse drives create` makes one"),
            DriveError::Taken => {
                about(Code::NameTaken, format!("there is a drive `{name}` already"))
                    .hint("choose another name, or delete that one")
            }
            DriveError::Held(id) => {
                let who = self.handle(id).map(|handle| handle.manifest().name);
                let who = who.unwrap_or_else(|_| id.to_string());
                about(Code::InUse, format!("the sandbox `{who}` has the drive `{name}`"))
                    .hint("a drive has one sandbox at a time; delete that sandbox, or restart it without the drive")
            }
            DriveError::Removed => {
                about(Code::BeingDeleted, format!("the drive `{name}` is being deleted"))
            }
            DriveError::Unclean => {
                let text = format!(
                    "the drive `{name}` cannot be attached read-only: whoever had it last ended without leaving it in order"
                );
                about(Code::DriveUnusable, text).hint("attach it for writing once")
            }
            DriveError::FileSystem(ImageError::MissingProgram { .. }) => {
                internal("the host lacks `mke2fs` (Debian's package e2fsprogs)", error)
            }
            error if is_full(error) => no_space("the host's disk is full"),
            DriveError::Format(_) | DriveError::FileSystem(_) | DriveError::File(..) => {
                internal("the drive cannot be used", error)
            }
        }
    }
}
