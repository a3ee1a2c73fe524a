//! Descriptors of other processes.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use crate::process::{NoProcess, Process, ProcessId};

/// Why a descriptor could not be taken from a process.
#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    /// The process is not there.
    #[error(transparent)]
    Process(#[from] NoProcess),
    /// It holds no descriptor of that tap.
    #[error("process {pid} has no descriptor of tap {name}")]
    Absent {
        /// The pid.
        pid: u32,
        /// The tap.
        name: String,
    },
    /// It was taken, but is not to be used: it is not in our network namespace, for instance.
    #[error(transparent)]
    Tap(#[from] crate::tap::TapError),
    /// The system refused.
    #[error("take tap {name} from process {pid}")]
    Take {
        /// The pid.
        pid: u32,
        /// The tap.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Duplicates the descriptor of the tap `name` that a running process holds. The number is found by what
/// `/proc/<pid>/fdinfo` says (`iff:`), so nobody needs to have written it down.
pub(crate) fn take_tap(id: &ProcessId, name: &str) -> Result<OwnedFd, TakeError> {
    let process = Process::find(id)?;
    let fail = |source| TakeError::Take { pid: id.pid, name: name.to_owned(), source };
    let entries = std::fs::read_dir(format!("/proc/{}/fdinfo", id.pid)).map_err(fail)?;
    for entry in entries {
        let entry = entry.map_err(fail)?;
        let Some(number) = entry.file_name().to_str().and_then(|number| number.parse().ok()) else {
            continue;
        };
        if is_tap(&entry.path(), name) {
            return pidfd_getfd(process.pidfd(), number, PidfdGetfdFlags::empty())
                .map_err(|errno| fail(errno.into()));
        }
    }
    Err(TakeError::Absent { pid: id.pid, name: name.to_owned() })
}

/// A descriptor that was closed meanwhile is not the tap.
fn is_tap(fdinfo: &Path, name: &str) -> bool {
    let Ok(text) = std::fs::read_to_string(fdinfo) else { return false };
    text.lines().any(|line| line.strip_prefix("iff:").is_some_and(|rest| rest.trim() == name))
}
