//! A drive or volume that a guest could not have: what is wrong in words, and which field of a request that is about.
//!
//! The guest agent says which disk it could not mount and what its kernel said to that. Whether the place or the disk is at fault
//! follows from that word; which drive it is, from the place that its disk has in the machine.

use api::{ApiError, Code};

use crate::manifest::{DriveKind, DriveUse};

/// What the guest's kernel says when the folder to mount at cannot be had: (errno, in words).
const ABOUT_THE_PATH: [(i32, &str); 8] = [
    (errno::EEXIST, "a file is there"),
    (errno::ENOTDIR, "a part of this path is a file"),
    (errno::EROFS, "no folder can be made there, it is read-only"),
    (errno::EPERM, "no folder can be made there"),
    (errno::EACCES, "no folder can be made there"),
    (errno::ENOENT, "no folder can be made there"),
    (errno::ENAMETOOLONG, "a part of this path is too long"),
    (errno::ELOOP, "links on the way there go round in a circle"),
];

/// How a sandbox is cured that has failed for its drives.
pub(crate) const CURE: &str = "restart it with another path or other drives (`--drive NAME:PATH`, `--volume NAME:PATH`), or \
    without (`--no-drives`, `--no-volumes`), or delete it";

/// What a guest has said about its drives, in words; `None`: it is not about one of these.
pub(crate) fn explain(said: &str, drives: &[DriveUse]) -> Option<String> {
    // Such as `mount drive0 at /etc/passwd: File exists (os error 17)`.
    let (_, rest) = said.split_once("mount drive")?;
    let (place, rest) = rest.split_once(" at ")?;
    let drive = drives.get(place.parse::<usize>().ok()?)?;
    let cause = rest.strip_prefix(drive.path.as_str())?.strip_prefix(": ")?;
    let errno = cause.rsplit_once("(os error ").and_then(|(_, number)| number.split_once(')'));
    let errno = errno.and_then(|(number, _)| number.parse().ok());
    let of_path = ABOUT_THE_PATH.iter().find(|(known, _)| Some(*known) == errno);
    Some(match of_path {
        Some((_, words)) => format!("{}{words}", no_place(drive)),
        None => format!("{}{cause}", no_disk(drive)),
    })
}

/// That the disk of a drive is not there.
pub(crate) fn gone(drive: &DriveUse) -> String {
    format!("{}its disk is gone", no_disk(drive))
}

/// What [`explain`] or [`gone`] has said, for who asked for these drives in these places.
pub(crate) fn error(text: String, drives: &[DriveUse]) -> ApiError {
    let is_volume = |drive: &DriveUse| drive.kind == DriveKind::Volume;
    let about = drives.iter().enumerate().find_map(|(place, drive)| {
        let of_place = text.contains(&no_place(drive));
        let of_disk = text.contains(&no_disk(drive));
        let (list, index) = match drive.kind {
            // Nobody has asked for it.
            DriveKind::Copy => return None,
            DriveKind::Drive => ("drives", place),
            // Drives have the first places.
            DriveKind::Volume => {
                ("volumes", drives[..place].iter().filter(|one| is_volume(one)).count())
            }
        };
        match (of_place, of_disk) {
            (true, _) => Some((
                format!("{list}[{index}].path"),
                "name a folder in the sandbox, or a path at which there is nothing yet: it is made",
            )),
            (_, true) => Some((format!("{list}[{index}].name"), "attach another one")),
            (false, false) => None,
        }
    });
    let error = ApiError::new(Code::DriveUnusable, text);
    match about {
        Some((field, hint)) => ApiError { field: Some(field), ..error }.hint(hint),
        None => error,
    }
}

fn no_place(drive: &DriveUse) -> String {
    format!("the {} `{}` cannot be mounted at `{}`: ", kind(drive), drive.name, drive.path)
}

fn no_disk(drive: &DriveUse) -> String {
    format!("the {} `{}` cannot be mounted: ", kind(drive), drive.name)
}

fn kind(drive: &DriveUse) -> &'static str {
    match drive.kind {
        DriveKind::Drive => "drive",
        DriveKind::Copy => "copy of the drive",
        DriveKind::Volume => "volume",
    }
}

/// Numbers of errors as Linux has them on every architecture that guests run on.
mod errno {
    use rustix::io::Errno;

    pub(super) const EEXIST: i32 = Errno::EXIST.raw_os_error();
    pub(super) const ENOTDIR: i32 = Errno::NOTDIR.raw_os_error();
    pub(super) const EROFS: i32 = Errno::ROFS.raw_os_error();
    pub(super) const EPERM: i32 = Errno::PERM.raw_os_error();
    pub(super) const EACCES: i32 = Errno::ACCESS.raw_os_error();
    pub(super) const ENOENT: i32 = Errno::NOENT.raw_os_error();
    pub(super) const ENAMETOOLONG: i32 = Errno::NAMETOOLONG.raw_os_error();
    pub(super) const ELOOP: i32 = Errno::LOOP.raw_os_error();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drives() -> Vec<DriveUse> {
        let drive = |name: &str, path: &str, kind| DriveUse {
            name: name.to_owned(),
            path: path.to_owned(),
            read_only: false,
            kind,
        };
        vec![
            drive("data", "/data", DriveKind::Drive),
            drive("more", "/etc/passwd", DriveKind::Drive),
            drive("models", "/bin/sh/x", DriveKind::Volume),
        ]
    }

    fn told(said: &str) -> (String, Option<String>) {
        let text = explain(said, &drives()).expect("about a drive");
        let error = error(text, &drives());
        assert_eq!(error.code, Code::DriveUnusable);
        (error.error, error.field)
    }

    #[test]
    fn s22_a_place_that_is_a_file_is_told_from_a_disk_that_is_damaged() {
        let said =
            "guest did not go on: Mounts: mount drive1 at /etc/passwd: File exists (os error 17)";
        let (text, field) = told(said);
        assert_eq!(text, "the drive `more` cannot be mounted at `/etc/passwd`: a file is there");
        assert_eq!(field.as_deref(), Some("drives[1].path"));
        let (text, field) = told("mount drive2 at /bin/sh/x: Not a directory (os error 20)");
        assert_eq!(
            text,
            "the volume `models` cannot be mounted at `/bin/sh/x`: a part of this path is a file"
        );
        assert_eq!(field.as_deref(), Some("volumes[0].path"));
        let (text, field) = told("mount drive0 at /data: Invalid argument (os error 22)");
        assert_eq!(text, "the drive `data` cannot be mounted: Invalid argument (os error 22)");
        assert_eq!(field.as_deref(), Some("drives[0].name"));
        let (text, _) = told("mount drive0 at /data: the disk is empty");
        assert_eq!(text, "the drive `data` cannot be mounted: the disk is empty");
        for said in ["", "mount drive7 at /data: x", "mount drive0 at /other: x", "no drives"] {
            assert_eq!(explain(said, &drives()), None, "{said}");
        }
    }

    #[test]
    fn of_a_copy_that_nobody_asked_for_no_field_is_named() {
        let copy = DriveUse { kind: DriveKind::Copy, ..drives().remove(0) };
        let error = error(gone(&copy), &[copy]);
        assert_eq!(error.error, "the copy of the drive `data` cannot be mounted: its disk is gone");
        assert_eq!(error.field, None);
    }
}
