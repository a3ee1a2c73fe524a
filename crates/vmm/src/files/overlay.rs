//! A machine's own disk: a qcow2 overlay over the image it shares with others.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::FileError;
use crate::qemu::Qemu;

/// How long `qemu-img` may take; 11 to 16 ms were measured.
const CREATE_MAX: Duration = Duration::from_secs(30);

/// Creates an empty overlay over a raw `base`, as large as the base or, if given, `bytes`. An overlay for the same base and size is the same
/// bytes each time, so a caller in a hurry copies one instead.
///
/// The base's path is written into the overlay for people who look; machines name it themselves ([`crate::Disk`]).
pub async fn create_overlay(
    qemu: &Qemu,
    overlay: &Path,
    base: &Path,
    bytes: Option<u64>,
) -> Result<(), FileError> {
    let fail = |source| FileError::new("create overlay", overlay, source);
    let mut command = tokio::process::Command::new(qemu.image_tool());
    command.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(base).arg(overlay);
    if let Some(bytes) = bytes {
        command.arg(bytes.to_string());
    }
    command.kill_on_drop(true).stdin(std::process::Stdio::null());
    let output = tokio::time::timeout(CREATE_MAX, command.output())
        .await
        .map_err(|_| {
            fail(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("qemu-img took more than {CREATE_MAX:?}"),
            ))
        })?
        .map_err(fail)?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim();
    let kind = if said.contains("No space left") {
        io::ErrorKind::StorageFull
    } else {
        io::ErrorKind::Other
    };
    Err(fail(io::Error::new(kind, format!("qemu-img: {said}"))))
}
