//! What the guest tells about how busy it is.

use serde::{Deserialize, Serialize};

/// One look at the guest's own programs (not the agent, not the kernel's threads).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Processor time of the user's programs since boot, in microseconds, over all processors.
    pub cpu_usec: u64,
    /// Established TCP connections that a program in the guest opened to somewhere outside.
    pub tcp_outbound: u32,
    /// Milliseconds until the earliest timer of a user's program (or time limit of an exec) is due; `None`: there is none.
    pub timer_due_ms: Option<u64>,
    /// Holds raised on the awake socket.
    pub holds: u32,
    /// Execs that have not ended.
    pub execs_running: u32,
}
