//! Accounts, to which boxes belong, and the keys with which programs act for them.
//!
//! Names are `camelCase`, as on the face of the boxes.

use serde::{Deserialize, Serialize};

use crate::network::Network;

/// The account to which everything belongs unless a key says otherwise. It has no plan, and cannot be deleted.
pub const ACCOUNT_DEFAULT: &str = "default";
/// Most characters of an account's id.
pub const ACCOUNT_ID_CHARS_MAX: usize = 40;
/// Most characters of a key's label.
pub const LABEL_CHARS_MAX: usize = 100;
/// Most ranges of addresses in an allow-list.
pub const URL_ALLOW_MAX: usize = 64;
/// Most credit: a million units for a year.
pub const CREDIT_MAX: u64 = 31_536_000_000_000;

/// How many boxes an account may have at once (B42).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Plan {
    /// 3.
    Free,
    /// 5.
    Pro,
    /// 20.
    Max,
}

impl Plan {
    /// Boxes at once; frozen ones count.
    pub fn boxes(self) -> usize {
        match self {
            Self::Free => 3,
            Self::Pro => 5,
            Self::Max => 20,
        }
    }

    /// Its name as it stands in requests and answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Pro => "pro",
            Self::Max => "max",
        }
    }
}

/// An account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(example = json!({"id": "acme", "plan": "pro", "credit": 36000, "urlAllow": ["192.0.2.0/24"], "createdAt": "2026-12-01T12:00:00.000Z"}))]
pub struct Account {
    /// Its id.
    pub id: String,
    /// How many boxes it may have at once: `free` 3, `pro` 5, `max` 20; null: as many as it likes.
    pub plan: Option<Plan>,
    /// What is left of its credit: seconds that a box of size 1 may still be awake. At 0 its boxes are frozen and none is started
    /// or thawed. Null: nothing is counted.
    pub credit: Option<u64>,
    /// From where its boxes' URLs may be opened; null: from anywhere.
    pub url_allow: Option<Vec<Network>>,
    /// When it was made, RFC 3339.
    pub created_at: String,
}

/// A new account.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(example = json!({"id": "acme", "plan": "pro", "credit": 36000, "urlAllow": ["192.0.2.0/24"]}))]
pub struct CreateAccount {
    /// Its id: 1-40 of a-z, 0-9 and `-`, not beginning or ending with `-`.
    #[schema(min_length = 1, max_length = 40, pattern = "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
    pub id: String,
    /// How many boxes it may have at once; default and null: as many as it likes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<Plan>,
    /// Seconds that a box of size 1 may be awake (0-31536000000000), one of size 4 a quarter of them; default and null: nothing is
    /// counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 31_536_000_000_000_u64)]
    pub credit: Option<u64>,
    /// From where its boxes' URLs may be opened, 1-64 ranges of addresses; default and null: from anywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_items = 1, max_items = 64)]
    pub url_allow: Option<Vec<Network>>,
}

/// Changes of an account; what is absent stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(example = json!({"plan": "max", "urlAllow": null}))]
pub struct UpdateAccount {
    /// How many boxes it may have at once; null: as many as it likes. Boxes that are over it go on.
    #[serde(
        default,
        deserialize_with = "crate::sandbox::some_option",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<Plan>)]
    pub plan: Option<Option<Plan>>,
    /// From where its boxes' URLs may be opened, 1-64 ranges of addresses; null: from anywhere. For requests from now on.
    #[serde(
        default,
        deserialize_with = "crate::sandbox::some_option",
        skip_serializing_if = "Option::is_none"
    )]
    #[schema(value_type = Option<Vec<Network>>, min_items = 1, max_items = 64)]
    pub url_allow: Option<Option<Vec<Network>>>,
}

/// What is left of an account's credit, from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"credit": 36000}))]
pub struct SetCredit {
    /// Seconds that a box of size 1 may be awake from now on (0-31536000000000); null: nothing is counted.
    #[serde(deserialize_with = "Option::deserialize")]
    #[schema(required, minimum = 0, maximum = 31_536_000_000_000_u64)]
    pub credit: Option<u64>,
}

/// Accounts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"accounts": [{"id": "default", "plan": null, "credit": null, "urlAllow": null, "createdAt": "2026-12-01T12:00:00.000Z"}]}))]
pub struct AccountList {
    /// By id.
    pub accounts: Vec<Account>,
}

/// What a key opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Everything.
    Admin,
    /// The boxes of its account: `/v1/boxes`, `/v1/agents`, `/v1/secrets` and `/mcp`.
    Boxes,
}

impl Scope {
    /// Its name as it stands in requests and answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Boxes => "boxes",
        }
    }
}

/// A key, without the key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(example = json!({"id": "k3vq7mzt2abc", "account": "acme", "scope": "boxes", "label": "CI", "createdAt": "2026-12-01T12:00:00.000Z"}))]
pub struct Key {
    /// By this it is revoked.
    pub id: String,
    /// For whom it acts.
    pub account: String,
    /// What it opens.
    pub scope: Scope,
    /// What it is for, in words.
    pub label: String,
    /// When it was made, RFC 3339.
    pub created_at: String,
}

/// A new key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(example = json!({"account": "acme", "scope": "boxes", "label": "CI"}))]
pub struct CreateKey {
    /// For whom it acts; default `default`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    /// What it opens: `boxes` (default) or `admin`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<Scope>,
    /// What it is for, at most 100 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 100)]
    pub label: Option<String>,
}

/// A key that was made.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(example = json!({"id": "k3vq7mzt2abc", "account": "acme", "scope": "boxes", "label": "CI", "createdAt": "2026-12-01T12:00:00.000Z", "key": "dm_…"}))]
pub struct CreatedKey {
    /// What it is.
    #[serde(flatten)]
    pub about: Key,
    /// The key itself. It is told here and never again: only its hash is kept.
    pub key: String,
}

/// Without the key: logs must not have it.
impl std::fmt::Debug for CreatedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CreatedKey").field("about", &self.about).finish_non_exhaustive()
    }
}

/// Keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(example = json!({"keys": [{"id": "admin", "account": "default", "scope": "admin", "label": "made by the daemon", "createdAt": "2026-12-01T12:00:00.000Z"}]}))]
pub struct KeyList {
    /// Oldest first.
    pub keys: Vec<Key>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credit_must_be_said_also_where_it_is_none() {
        let read = |text: &str| serde_json::from_str::<SetCredit>(text);
        assert_eq!(read(r#"{"credit": null}"#).unwrap(), SetCredit { credit: None });
        assert_eq!(read(r#"{"credit": 5}"#).unwrap(), SetCredit { credit: Some(5) });
        assert!(read("{}").unwrap_err().to_string().contains("missing field `credit`"));
        assert!(read(r#"{"credit": -1}"#).is_err());
    }

    #[test]
    fn absent_and_null_are_different_wishes() {
        let read = |text: &str| serde_json::from_str::<UpdateAccount>(text).unwrap();
        assert_eq!(read("{}"), UpdateAccount::default());
        assert_eq!(read(r#"{"plan": null}"#).plan, Some(None));
        assert_eq!(read(r#"{"plan": "max"}"#).plan, Some(Some(Plan::Max)));
    }
}
