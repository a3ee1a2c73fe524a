//! Secrets of an account: told once, and then only to the commands of its boxes (T13).
//!
//! Names are `camelCase`, as on the face of the boxes.

use serde::{Deserialize, Serialize};

/// Most characters of a secret's name.
pub const SECRET_NAME_CHARS_MAX: usize = 128;
/// Most bytes of a secret: a key or a certificate, not a file of data.
pub const SECRET_BYTES_MAX: usize = 32 * 1024;
/// Most secrets of an account.
pub const SECRETS_MAX: usize = 1_000;
/// Most bytes of all secrets that a box has, names included: half of what a command's environment takes.
pub const SECRETS_BYTES_MAX: usize = crate::sandbox::ENV_BYTES_MAX / 2;

/// A secret to store.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"value": "…"}))]
pub struct PutSecret {
    /// At most 32768 bytes, without NUL. No answer ever has it.
    #[schema(max_length = 32768)]
    pub value: String,
}

/// Without the value: logs must not have it.
impl std::fmt::Debug for PutSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PutSecret").finish_non_exhaustive()
    }
}

/// A stored secret, without its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(example = json!({"name": "API_TOKEN", "updatedAt": "2026-12-01T12:00:00.000Z"}))]
pub struct Secret {
    /// The environment variable that it becomes.
    pub name: String,
    /// When its value was stored, RFC 3339.
    pub updated_at: String,
}

/// The secrets of an account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"secrets": [{"name": "API_TOKEN", "updatedAt": "2026-12-01T12:00:00.000Z"}]}))]
pub struct SecretList {
    /// By name.
    pub secrets: Vec<Secret>,
}
