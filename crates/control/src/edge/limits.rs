//! How long the edge waits for whom.
//!
//! | waiting for | limit | then |
//! | --- | --- | --- |
//! | a connection into an awake sandbox | [`CONNECT_TIME_MAX`] | 504 `timeout` |
//! | the first byte of an answer, while no byte of the request flows either | [`EdgeLimits::answer`] | 504 `timeout` |
//! | the next byte of an answer | [`EdgeLimits::idle`], or the sandbox's `connection_idle_seconds` | the answer is cut |
//! | the next byte of an upgraded connection | the sandbox's `connection_idle_seconds`; none: for ever | it is closed |
//! | the rest of a connection of which one side has ended | [`EdgeLimits::answer`] of silence | it is closed |

use std::ops::RangeInclusive;
use std::time::Duration;

/// How long a connection to a port may take once the sandbox is awake: a host tries a port that refuses for ten seconds after
/// a wake, and a connection that nobody answers for five, on two ways.
pub(super) const CONNECT_TIME_MAX: Duration = Duration::from_secs(30);

/// How long a silent server is waited for, unless set otherwise: ten minutes. Proxies of the field give up after one; what runs
/// in sandboxes builds, tests and asks language models, and answers when it is done.
pub const ANSWER_TIME_DEFAULT: Duration = Duration::from_mins(10);

/// How long an answer that has begun may be silent, unless set otherwise: an hour. Event streams are silent for long, and a
/// silent one keeps nothing awake; but what nobody ends must end.
pub const IDLE_TIME_DEFAULT: Duration = Duration::from_hours(1);

/// Least and most seconds of either.
pub const EDGE_SECONDS_RANGE: RangeInclusive<u64> = 1..=86_400;

/// What an operator may set. See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EdgeLimits {
    /// How long a server may be silent before it begins its answer.
    pub answer: Duration,
    /// How long an answer that has begun may be silent.
    pub idle: Duration,
}

impl Default for EdgeLimits {
    fn default() -> Self {
        Self { answer: ANSWER_TIME_DEFAULT, idle: IDLE_TIME_DEFAULT }
    }
}
