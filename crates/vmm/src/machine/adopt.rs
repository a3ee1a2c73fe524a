//! Taking up a machine that another daemon, or this one in an earlier life, has started.

use std::io;
use std::sync::Arc;

use super::watch::Watched;
use super::{GuestState, Machine, OrderError, Started};
use crate::process::{NoProcess, Process, ProcessId, ProcessState};
use crate::qemu::Fingerprint;
use crate::spec::Outlets;

/// How an adopted machine was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Adopted {
    /// Its process is stopped; QEMU is asked once it goes on ([`Machine::continue_process`]).
    Stopped,
    /// Its process goes, and QEMU says this of the guest.
    Going(GuestState),
}

/// A machine that could not be taken up. It is left as it is.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// It has ended.
    #[error(transparent)]
    Process(#[from] NoProcess),
    /// It cannot be watched.
    #[error("watch the process")]
    Watch(#[source] io::Error),
    /// QEMU does not answer.
    #[error(transparent)]
    Order(#[from] OrderError),
}

impl Machine {
    /// Takes up a running or stopped machine; `fingerprint` is what [`Machine::fingerprint`] said when it was started. Must not be called while another `Machine` for it exists: QEMU serves one QMP connection at a time.
    pub async fn adopt(
        id: &ProcessId,
        outlets: &Outlets,
        fingerprint: &Fingerprint,
    ) -> Result<(Self, Adopted), AdoptError> {
        let process = Process::find(id)?;
        let stopped = process.state() == ProcessState::Stopped;
        let watched =
            Watched::begin(&process, None, outlets, !stopped).map_err(AdoptError::Watch)?;
        let mut machine = Self {
            process: Arc::new(process),
            outlets: outlets.clone(),
            qmp: None,
            watched,
            fingerprint: fingerprint.clone(),
            started: Started::default(),
        };
        if stopped {
            return Ok((machine, Adopted::Stopped));
        }
        machine.qmp = Some(machine.connect_qmp()?);
        let state = machine.guest_state().await?;
        machine.watched.set_going(state == GuestState::Running);
        Ok((machine, Adopted::Going(state)))
    }
}
