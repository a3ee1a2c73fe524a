//! Who may use the interface: holders of a token, each for its account, and whoever may open the local socket.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{PoisonError, RwLock};

use api::account::{ACCOUNT_DEFAULT, Scope};
use api::id::{ID_CHARS, base32};
use api::{ApiError, Code};
use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::accounts::Accounts;
use crate::catalogue::{Catalogue, now_ms};
use crate::failure::Failure;

/// Bytes of randomness in a token.
const TOKEN_BYTES: usize = 32;
/// The id of the token that the daemon makes.
const ADMIN_ID: &str = "admin";
/// Most keys: each request compares with all of them.
const KEYS_MAX: usize = 10_000;
/// What a key of scope `boxes` opens.
const BOXES_PATHS: [&str; 4] = ["/v1/boxes", "/v1/agents", "/v1/secrets", "/mcp"];
/// Names the account whose boxes and secrets an operator's request is about.
pub(crate) const ACCOUNT_HEADER: &str = "x-dormouse-account";
/// File in the data folder that holds the first token, readable by its owner alone.
pub const ADMIN_TOKEN_FILE: &str = "admin.token";

/// For whom a request acts, and what it may do. The guard puts it into the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    /// Whose boxes it sees.
    pub(crate) account: String,
    /// What it opens.
    pub(crate) scope: Scope,
    /// The key that came with it; `None` over the local socket, which needs none.
    pub(crate) key: Option<String>,
}

impl Grant {
    /// Of whoever may open the local socket.
    pub(crate) fn local() -> Self {
        Self { account: ACCOUNT_DEFAULT.to_owned(), scope: Scope::Admin, key: None }
    }

    /// The same for the account that [`ACCOUNT_HEADER`] names, which only an operator may do for another than his own.
    pub(crate) fn acting_for(
        self,
        headers: &HeaderMap,
        accounts: &Accounts,
    ) -> Result<Self, ApiError> {
        let mut values = headers.get_all(ACCOUNT_HEADER).iter();
        let Some(value) = values.next() else { return Ok(self) };
        if values.next().is_some() {
            let text = format!("`{ACCOUNT_HEADER}` is there more than once");
            return Err(ApiError::invalid(ACCOUNT_HEADER, text).hint("name one account, once"));
        }
        let account = value.to_str().unwrap_or_default();
        if account == self.account {
            return Ok(self);
        }
        if self.scope != Scope::Admin {
            let text = format!("`{ACCOUNT_HEADER}`: this key acts for its own account alone");
            return Err(ApiError::new(Code::Forbidden, text).hint("leave the header out"));
        }
        let found = accounts
            .find(account)
            .map_err(|error| ApiError { field: Some(ACCOUNT_HEADER.to_owned()), ..error })?;
        Ok(Self { account: found.id, ..self })
    }

    /// Whether it opens this path.
    pub(crate) fn check(&self, path: &str) -> Result<(), ApiError> {
        let below = |folder: &str| {
            path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        if self.scope == Scope::Admin || BOXES_PATHS.into_iter().any(below) {
            return Ok(());
        }
        Err(ApiError::new(Code::Forbidden, "this key opens the boxes of its account only")
            .hint("`/v1/boxes`, `/v1/agents`, `/v1/secrets` and `/mcp`; for the rest take a key of scope `admin`"))
    }
}

/// A token, which keys are too, without itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    /// By this it is revoked.
    pub(crate) id: String,
    /// SHA-256 in hex.
    pub(crate) hash: String,
    /// What it is for.
    pub(crate) label: String,
    /// For whom it acts.
    pub(crate) account: String,
    /// What it opens.
    pub(crate) scope: Scope,
    /// Milliseconds since 1970.
    pub(crate) created_ms: i64,
}

/// All tokens.
pub(crate) struct Tokens(RwLock<Vec<Token>>);

impl Tokens {
    /// Reads them; where none opens everything makes one and writes it into [`ADMIN_TOKEN_FILE`], the only place where
    /// it ever stands.
    pub(crate) async fn load(catalogue: &Catalogue, data: &Path) -> Result<Self, Failure> {
        let mut known = catalogue.tokens().await?;
        if !known.iter().any(|token| token.scope == Scope::Admin) {
            let text = draw()?;
            // The file first: a crash before the row only means that the next start writes another one.
            write_private(&data.join(ADMIN_TOKEN_FILE), &text)
                .map_err(Failure::internal("write the first token's file"))?;
            let token = Token {
                id: ADMIN_ID.to_owned(),
                hash: sha256_hex(text.as_bytes()),
                label: "made by the daemon".to_owned(),
                account: ACCOUNT_DEFAULT.to_owned(),
                scope: Scope::Admin,
                created_ms: now_ms(),
            };
            catalogue.add_token(&token).await?;
            tracing::info!(file = ADMIN_TOKEN_FILE, "made the first token");
            known.push(token);
        }
        Ok(Self(RwLock::new(known)))
    }

    /// For whom these headers speak, which carry a known token.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<Grant, ApiError> {
        let unauthorized = |text: &str| {
            Err(ApiError::new(Code::Unauthorized, text)
                .hint("send `Authorization: Bearer <token>`; the first token is in `admin.token` in the data folder"))
        };
        let Some(value) = headers.get(header::AUTHORIZATION) else {
            return unauthorized("no token was sent");
        };
        let token = value.to_str().ok().and_then(|value| {
            let (scheme, token) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
        });
        let Some(token) = token else {
            return unauthorized("the `Authorization` header is not `Bearer <token>`");
        };
        let hash = sha256_hex(token.as_bytes());
        let tokens = self.0.read().unwrap_or_else(PoisonError::into_inner);
        // Every hash is compared, all of it, so that the time says nothing.
        let mut found = None;
        for one in tokens.iter() {
            if bool::from(one.hash.as_bytes().ct_eq(hash.as_bytes())) {
                found = Some(one);
            }
        }
        match found {
            Some(token) => Ok(Grant {
                account: token.account.clone(),
                scope: token.scope,
                key: Some(token.id.clone()),
            }),
            None => unauthorized("the token is not known"),
        }
    }

    /// All that there are, oldest first.
    pub(crate) fn list(&self) -> Vec<Token> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes one; the text is told to whom it is for, and kept nowhere.
    pub(crate) async fn make(
        &self,
        catalogue: &Catalogue,
        account: &str,
        scope: Scope,
        label: &str,
    ) -> Result<(Token, String), Failure> {
        if self.list().len() >= KEYS_MAX {
            let text = format!("there are {KEYS_MAX} keys already");
            return Err(ApiError::new(Code::NoCapacity, text)
                .hint("`DELETE /v1/keys/{id}` revokes those that nobody uses")
                .into());
        }
        let text = draw()?;
        let mut random = [0; ID_CHARS];
        getrandom::fill(&mut random).map_err(Failure::internal("draw a key's id"))?;
        let token = Token {
            id: base32(&random),
            hash: sha256_hex(text.as_bytes()),
            label: label.to_owned(),
            account: account.to_owned(),
            scope,
            created_ms: now_ms(),
        };
        catalogue.add_token(&token).await?;
        self.0.write().unwrap_or_else(PoisonError::into_inner).push(token.clone());
        Ok((token, text))
    }

    /// Revokes one: the next request with it is refused. `false`: there is none of this id.
    pub(crate) async fn revoke(&self, catalogue: &Catalogue, id: &str) -> Result<bool, Failure> {
        if !self.list().iter().any(|token| token.id == id) {
            return Ok(false);
        }
        catalogue.forget_token(id).await?;
        self.0.write().unwrap_or_else(PoisonError::into_inner).retain(|token| token.id != id);
        Ok(true)
    }

    /// Forgets those of an account whose rows are gone.
    pub(crate) fn forget_account(&self, account: &str) {
        let mut tokens = self.0.write().unwrap_or_else(PoisonError::into_inner);
        tokens.retain(|token| token.account != account);
    }
}

fn draw() -> Result<String, Failure> {
    let mut random = [0; TOKEN_BYTES];
    getrandom::fill(&mut random).map_err(Failure::internal("draw a token"))?;
    Ok(format!("dm_{}", hex(&random)))
}

/// SHA-256 in hex.
pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Writes a file for its owner alone, on the disk before its name is.
pub(crate) fn write_private(path: &Path, text: &str) -> io::Result<()> {
    let draft = path.with_extension("new");
    match fs::remove_file(&draft) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
    writeln!(file, "{text}")?;
    file.sync_all()?;
    fs::rename(&draft, path)?;
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b43_a_key_for_boxes_opens_boxes_alone() {
        let boxes = Grant { account: "acme".to_owned(), scope: Scope::Boxes, key: None };
        for open in ["/v1/boxes", "/v1/boxes/x/exec", "/v1/agents/a/leave", "/v1/secrets", "/mcp"] {
            assert_eq!(boxes.check(open), Ok(()), "{open}");
        }
        for shut in
            ["/v1/boxesx", "/v1/sandboxes", "/v1/keys", "/v1/accounts", "/metrics", "/", "/mcpx"]
        {
            assert_eq!(boxes.check(shut).expect_err(shut).code, Code::Forbidden);
            assert_eq!(Grant::local().check(shut), Ok(()), "{shut}");
        }
    }
}
