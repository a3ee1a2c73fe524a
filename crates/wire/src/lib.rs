//! What host and guest agent say to each other, and how it is framed.
//!
//! A sandbox that slept for a year wakes with a year-old agent in its memory, so this crate is the longest promise the
//! project makes. Rules that keep it:
//!
//! 1. Enums are append-only: a variant never changes its place, its fields or its meaning. Something new is a new variant.
//! 2. Structs are frozen once released: postcard has no field names, so a new field is a new struct in a new variant.
//! 3. [`Hello`](control::HostHello) negotiates a version, and a side uses only what the agreed version has.
//! 4. `tests/recorded/` holds conversations as bytes; old ones are replayed by the tests for ever.
//!
//! Everything here is pure: bytes in, values out. The other side is not trusted: a length is compared with its limit
//! before anything is allocated for it, and a damaged frame costs that frame, never the reader.
//!
//! The protocol as prose is in `docs/guest-protocol.md`.
#![forbid(unsafe_code)]

pub mod channel;
pub mod control;
pub mod credit;
pub mod exec;
pub mod failure;
pub mod files;
pub mod frame;
pub mod sample;
pub mod sockets;

use serde::{Serialize, de::DeserializeOwned};

pub use channel::{LONG_REQUEST_MAX, LoopbackWay, Reply, Request};
pub use control::{
    GuestHello, Held, HostHello, Identity, Ipv6Network, LinkId, Mount, Network, Quiesce, Quiesced,
    SleepNotice, Step, StepOutcome, StepReport, ToGuest, ToHost, VersionRange, Wake, Woke,
};
pub use credit::{CreditError, ReceiveWindow};
pub use exec::{
    Ended, ExecId, ExecInfo, ExecSpec, ExecState, OutputChunk, OutputFrom, Program, Stdin, Stream,
    TerminalSize, TerminalSpec,
};
pub use failure::{Failure, FailureCode};
pub use files::{Entry, EntryKind, Stat, WriteSpec};
pub use frame::{Decoder, Frame, FrameError, FrameKind};
pub use sample::Sample;
pub use sockets::{Connection, Listener, Sockets, Transport};

/// The protocol versions that this build speaks. 2 has terminals, requests longer than a frame, and notices about sleep
/// and holds; IPv6, and what is open on the network. 4 mounts drives. 5 leads ports
/// of the guest's loopback elsewhere.
pub const VERSIONS: VersionRange = VersionRange { oldest: 1, newest: 5 };

/// The first version that has requests longer than a frame ([`Request::Long`]).
pub const LONG_REQUESTS_SINCE: u16 = 2;

/// The first version that has programs on terminals of their own.
pub const TERMINALS_SINCE: u16 = 2;

/// The first version in which a guest tells what is held, and can be told that it sleeps soon.
pub const HELD_SINCE: u16 = 2;

/// The first version in which a guest can be given an IPv6 address, and tells what is open on its network.
pub const NETWORK_SINCE: u16 = 2;

/// Since which version the guest writes to disk when asked, while its programs run on ([`Request::Flush`]).
pub const FLUSH_SINCE: u16 = 3;

/// The first version in which a guest can be told to mount drives.
pub const MOUNTS_SINCE: u16 = 4;

/// The first version in which ports of the guest's loopback can lead elsewhere.
pub const LOOPBACK_SINCE: u16 = 5;

/// The name of the virtio-serial port that carries the protocol (`/sys/class/virtio-ports/*/name`).
pub const PORT_NAME: &str = "dormouse.agent";

/// Channels that may be open on one link at a time; the next one is refused with [`FailureCode::TooMany`].
///
/// Each may hold up to [`credit::WINDOW`] bytes in each direction, so this bounds a link's memory to 64 MiB either way.
pub const CHANNELS_MAX: usize = 256;

/// Why a message could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// The message does not fit into one frame, or a long request is over its limit.
    #[error("message of {bytes} bytes is over the limit of {max} bytes")]
    TooLarge {
        /// Size of the encoded message in bytes.
        bytes: usize,
        /// The limit, [`frame::PAYLOAD_MAX`] or [`LONG_REQUEST_MAX`].
        max: usize,
    },
    /// The message could not be encoded.
    #[error("encode message")]
    Encode(#[source] postcard::Error),
    /// The bytes are no message of this kind; perhaps one of a later version.
    #[error("decode message")]
    Decode(#[source] postcard::Error),
}

/// Encodes a message as the payload of one frame.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, MessageError> {
    let bytes = postcard::to_stdvec(message).map_err(MessageError::Encode)?;
    if bytes.len() > frame::PAYLOAD_MAX {
        return Err(MessageError::TooLarge { bytes: bytes.len(), max: frame::PAYLOAD_MAX });
    }
    Ok(bytes)
}

/// Encodes a request that may be too long for one frame, for [`Request::Long`].
pub fn encode_long(request: &Request) -> Result<Vec<u8>, MessageError> {
    let bytes = postcard::to_stdvec(request).map_err(MessageError::Encode)?;
    if bytes.len() > LONG_REQUEST_MAX {
        return Err(MessageError::TooLarge { bytes: bytes.len(), max: LONG_REQUEST_MAX });
    }
    Ok(bytes)
}

/// Decodes the payload of one frame. Bytes after the message are an error.
pub fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, MessageError> {
    match postcard::take_from_bytes(payload) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(MessageError::Decode(postcard::Error::DeserializeBadEncoding)),
        Err(error) => Err(MessageError::Decode(error)),
    }
}
