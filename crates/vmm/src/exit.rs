//! How a machine ended.
//!
//! QEMU's exit code is 0 for a power-off, a reboot (with `-no-reboot`) and a panic alike, so the cause is read from its last
//! QMP events; the process's end itself is seen through a pidfd, which works for children and adopted processes. Both take well
//! under 0.1 s; nothing here polls.

use tokio::sync::watch;

/// The end of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// Why.
    pub cause: ExitCause,
}

/// Why a machine ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitCause {
    /// The guest switched itself off.
    Poweroff,
    /// The guest asked for a reset.
    Reboot,
    /// The guest's kernel panicked (known only if the guest loaded its pvpanic driver; a panic with `panic=-1` and without it is a [`ExitCause::Reboot`]).
    Panic,
    /// [`crate::Machine::quit`].
    Quit,
    /// [`crate::Machine::kill`].
    Killed,
    /// The process ended in another way: killed from outside, crashed, or unable to start.
    Died(Died),
}

/// What is known of a process that ended by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Died {
    /// It called `exit` with this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
    /// It was another process's child, so the kernel does not tell us.
    Unknown,
}

/// Tells when a machine has ended. Cheap to clone; outlives the [`crate::Machine`].
#[derive(Debug, Clone)]
pub struct ExitWatch(watch::Receiver<Option<Exit>>);

impl ExitWatch {
    pub(crate) fn new(receiver: watch::Receiver<Option<Exit>>) -> Self {
        Self(receiver)
    }

    /// The end, if it has come.
    pub fn exited_yet(&self) -> Option<Exit> {
        *self.0.borrow()
    }

    /// Waits for the end. Cancel safe.
    pub async fn exited(&mut self) -> Exit {
        match self.0.wait_for(Option::is_some).await {
            Ok(seen) => seen.unwrap_or(LOST),
            // The watching task never ends without a word, unless the runtime is going down.
            Err(_) => LOST,
        }
    }
}

const LOST: Exit = Exit { cause: ExitCause::Died(Died::Unknown) };
