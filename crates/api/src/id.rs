//! Identifiers: short, random, usable as a DNS label part and as a folder name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Characters in a sandbox id. Twelve of 32 give 60 bits: no two by chance.
pub const ID_CHARS: usize = 12;

/// Lower-case base 32 (RFC 4648) alphabet: no capitals, no `-`, so that ids fit into host names.
pub const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// The identity of a sandbox for its whole life: 12 characters of `a-z2-7`.
#[derive(
    Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, utoipa::ToSchema,
)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, example = "k3vq7mzt2abc", pattern = "^[a-z2-7]{12}$")]
pub struct SandboxId(String);

/// The text is not an id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a sandbox id has {ID_CHARS} characters of a-z and 2-7")]
pub struct NotAnId;

impl SandboxId {
    /// An id from random bytes (the caller's randomness: this crate has none).
    pub fn from_random(bytes: [u8; ID_CHARS]) -> Self {
        Self(base32(&bytes))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// One character of [`ALPHABET`] per byte (its low five bits).
pub fn base32(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(ALPHABET[usize::from(byte & 31)])).collect()
}

impl FromStr for SandboxId {
    type Err = NotAnId;

    fn from_str(text: &str) -> Result<Self, NotAnId> {
        let good = text.len() == ID_CHARS && text.bytes().all(|byte| ALPHABET.contains(&byte));
        if good { Ok(Self(text.to_owned())) } else { Err(NotAnId) }
    }
}

impl TryFrom<String> for SandboxId {
    type Error = NotAnId;

    fn try_from(text: String) -> Result<Self, NotAnId> {
        text.parse()
    }
}

impl From<SandboxId> for String {
    fn from(id: SandboxId) -> Self {
        id.0
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_read_back_and_others_are_refused() {
        let id = SandboxId::from_random(*b"\x00\x1f\x20\xff56789012");
        assert_eq!(id.as_str().parse(), Ok(id.clone()));
        for bad in ["", "short", "UPPERCASE123", "abcdefghijk1", "../../../etc", "abcdefghijkl2"] {
            assert_eq!(bad.parse::<SandboxId>(), Err(NotAnId), "{bad}");
        }
    }
}
