//! The verbs about volumes, and what a client is told when one cannot be had.

use api::drive::{Volume, VolumeUser};
use api::{ApiError, Code, SandboxId};
use tokio::io::AsyncRead;

use super::internal;
use crate::clock::rfc3339;
use crate::daemon::Daemon;
use crate::images::ImageError;
use crate::manifest::{DriveKind, DriveUse};
use crate::sandbox::work::is_full;
use crate::volumes::{Note, VolumeClaim, VolumeError};

impl Daemon {
    pub(crate) async fn make_volume(
        &self,
        name: &str,
        archive: Box<dyn AsyncRead + Send + Unpin>,
    ) -> Result<Volume, ApiError> {
        let note = self.ground.volumes.create(name, archive).await;
        let note = note.map_err(|error| self.volume_error("name", name, &error))?;
        Ok(self.volume(name, &note))
    }

    pub(crate) fn all_volumes(&self) -> Result<Vec<Volume>, ApiError> {
        let all = self.ground.volumes.list();
        let all = all.map_err(|error| self.volume_error("name", "", &error))?;
        Ok(all.iter().map(|(name, note)| self.volume(name, note)).collect())
    }

    pub(crate) fn one_volume(&self, name: &str) -> Result<Volume, ApiError> {
        let note = self.ground.volumes.note(name);
        let note = note.map_err(|error| self.volume_error("name", name, &error))?;
        Ok(self.volume(name, &note))
    }

    pub(crate) fn remove_volume(&self, name: &str) -> Result<(), ApiError> {
        let removed = self.ground.volumes.delete(name, || match self.snapshots.of_volume(name) {
            Ok(None) => Ok(()),
            Ok(Some(snapshot)) => Err(Unremoved::Snapshot(snapshot)),
            Err(error) => Err(Unremoved::Unknown(internal("snapshots cannot be read", &error))),
        });
        removed.map_err(|error| match error {
            Unremoved::Volume(error) => self.volume_error("name", name, &error),
            Unremoved::Snapshot(snapshot) => {
                let text = format!("the snapshot `{snapshot}` has the volume `{name}`");
                let error = ApiError::new(Code::InUse, text).hint("delete that snapshot first");
                ApiError { field: Some("name".to_owned()), ..error }
            }
            Unremoved::Unknown(error) => error,
        })
    }

    /// Takes the volumes among these for a sandbox.
    pub(crate) fn claim_volumes(
        &self,
        id: &SandboxId,
        uses: &[DriveUse],
    ) -> Result<VolumeClaim, ApiError> {
        self.ground.volumes.claim(id, uses).map_err(|(at, error)| {
            let before = uses[..at].iter().filter(|other| other.kind == DriveKind::Volume).count();
            let field = format!("volumes[{before}].name");
            let error = self.volume_error(&field, &uses[at].name, &error);
            let code = if error.code == Code::NotFound { Code::Unprocessable } else { error.code };
            ApiError { code, ..error }
        })
    }

    fn volume(&self, name: &str, note: &Note) -> Volume {
        let holders = self.ground.volumes.holders(name).into_iter();
        let stored = vmm::files::allocated_bytes(&self.ground.volumes.disk(name));
        Volume {
            name: name.to_owned(),
            entries: note.entries,
            content_bytes: note.content_bytes,
            // It may have been deleted in between.
            stored_bytes: stored.unwrap_or(0),
            created_at: rfc3339(note.made_at.unix_ms),
            attached_to: holders
                .filter_map(|id| {
                    let name = self.handle(&id).ok()?.manifest().name;
                    Some(VolumeUser { id, name })
                })
                .collect(),
        }
    }

    fn volume_error(&self, field: &str, name: &str, error: &VolumeError) -> ApiError {
        let about = |code, text: String| ApiError {
            field: Some(field.to_owned()),
            ..ApiError::new(code, text)
        };
        match error {
            VolumeError::Missing => about(Code::NotFound, format!("there is no volume `{name}`"))
                .hint("`dormouse volumes list` shows what there is, `dormouse volumes create` makes one"),
            VolumeError::Taken => {
                about(Code::NameTaken, format!("there is a volume `{name}` already"))
                    .hint("a volume never changes: choose another name, or delete that one")
            }
            VolumeError::Held(by) => {
                let name_of = |id: &SandboxId| match self.handle(id) {
                    Ok(handle) => handle.manifest().name,
                    Err(_) => id.to_string(),
                };
                let first = by.first().map(name_of).unwrap_or_default();
                let more = match by.len() {
                    0 | 1 => String::new(),
                    count => format!(" (and {} more)", count - 1),
                };
                about(Code::InUse, format!("the sandbox `{first}`{more} has the volume `{name}`"))
                    .hint("delete those sandboxes, or restart them without the volume")
            }
            VolumeError::Removed => {
                about(Code::BeingDeleted, format!("the volume `{name}` is being deleted"))
            }
            VolumeError::Archive(why) => {
                ApiError::invalid("body", format!("the volume cannot be made: {why}"))
                    .hint("a tar stream of files, folders and links")
            }
            VolumeError::NoSpace => {
                ApiError::new(Code::NoSpace, "the host's disk has no room for the volume")
            }
            VolumeError::FileSystem(ImageError::MissingProgram { .. }) => {
                internal("the host lacks `mke2fs` (Debian's package e2fsprogs)", error)
            }
            error if is_full(error) => ApiError::new(Code::NoSpace, "the host's disk is full"),
            VolumeError::Format(_) | VolumeError::FileSystem(_) | VolumeError::File(..) => {
                internal("the volume cannot be used", error)
            }
        }
    }
}

/// Why a volume was not removed.
enum Unremoved {
    Volume(VolumeError),
    /// This snapshot has it.
    Snapshot(String),
    Unknown(ApiError),
}

impl From<VolumeError> for Unremoved {
    fn from(error: VolumeError) -> Self {
        Self::Volume(error)
    }
}
