//! Secrets of accounts (T13): stored under names, given to the commands of boxes, and told to nobody.
//!
//! They are encrypted with a key of this installation's own, which lies beside the catalogue and which its owner alone can read:
//! a copy of the catalogue alone opens none. Account and name are sealed with the value, so that no row stands for another.
//!
//! A box has the names; its commands get the values that are stored when each starts. So no host writes one down, a new value holds
//! from the next command on, and one that is deleted is given to none any more.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use api::secret::{SECRET_BYTES_MAX, SECRET_NAME_CHARS_MAX, SECRETS_BYTES_MAX, SECRETS_MAX};
use api::{ApiError, Code};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use chacha20poly1305::aead::{Aead, KeyInit, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};

use crate::auth::write_private;
use crate::catalogue::{Catalogue, now_ms};
use crate::failure::Failure;

/// File in the data folder that holds the key, base64, readable by its owner alone.
const KEY_FILE: &str = "secrets.key";
/// Bytes of the key.
const KEY_BYTES: usize = 32;
/// Bytes of a nonce: enough to draw each by chance.
const NONCE_BYTES: usize = 24;

/// A secret, as it is kept.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Stored {
    /// Nonce and ciphertext, base64.
    pub(crate) sealed: String,
    /// Milliseconds since 1970.
    pub(crate) updated_ms: i64,
}

/// All secrets, by account and name.
pub(crate) struct Secrets {
    cipher: XChaCha20Poly1305,
    known: RwLock<BTreeMap<(String, String), Stored>>,
}

impl Secrets {
    /// Reads what is kept, and the key; makes one where there is none.
    pub(crate) async fn load(catalogue: &Catalogue, data: &Path) -> Result<Self, Failure> {
        let known: BTreeMap<_, _> = catalogue.secrets().await?.into_iter().collect();
        let path = data.join(KEY_FILE);
        let key = match fs::read_to_string(&path) {
            Ok(text) => read_key(&path, &text)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if !known.is_empty() {
                    tracing::error!(
                        file = KEY_FILE,
                        "the key of the secrets is gone: those that are stored cannot be opened, store them again"
                    );
                }
                make_key(&path)?
            }
            Err(error) => return Err(Failure::internal("read the key of the secrets")(error)),
        };
        Ok(Self { cipher: XChaCha20Poly1305::new(&key.into()), known: RwLock::new(known) })
    }

    /// Stores a secret, in place of the one of this name. Tells when.
    pub(crate) async fn put(
        &self,
        catalogue: &Catalogue,
        account: &str,
        name: &str,
        value: &str,
    ) -> Result<i64, Failure> {
        let id = (account.to_owned(), name.to_owned());
        let count = self.read().keys().filter(|(of, _)| of == account).count();
        if count >= SECRETS_MAX && !self.read().contains_key(&id) {
            let text = format!("the account has {SECRETS_MAX} secrets already");
            return Err(ApiError::new(Code::NoCapacity, text)
                .hint("`DELETE /v1/secrets/{name}` removes those that nobody needs")
                .into());
        }
        let stored = Stored { sealed: self.seal(account, name, value)?, updated_ms: now_ms() };
        let updated_ms = stored.updated_ms;
        catalogue.keep_secret(account, name, &stored).await?;
        self.known.write().unwrap_or_else(PoisonError::into_inner).insert(id, stored);
        Ok(updated_ms)
    }

    /// Forgets one. `false`: there is none of this name.
    pub(crate) async fn remove(
        &self,
        catalogue: &Catalogue,
        account: &str,
        name: &str,
    ) -> Result<bool, Failure> {
        let id = (account.to_owned(), name.to_owned());
        if !self.read().contains_key(&id) {
            return Ok(false);
        }
        catalogue.forget_secret(account, name).await?;
        Ok(self.known.write().unwrap_or_else(PoisonError::into_inner).remove(&id).is_some())
    }

    /// Forgets those of an account whose rows are gone.
    pub(crate) fn forget_account(&self, account: &str) {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        known.retain(|(of, _), _| of != account);
    }

    /// Names of an account's secrets, and when each was stored.
    pub(crate) fn list(&self, account: &str) -> Vec<(String, i64)> {
        let known = self.read();
        let own = known.iter().filter(|((of, _), _)| of == account);
        own.map(|((_, name), stored)| (name.clone(), stored.updated_ms)).collect()
    }

    /// Whether all of these can be given to a box together: they are stored, and fit into an environment.
    pub(crate) fn check(
        &self,
        account: &str,
        field: &str,
        names: &[String],
    ) -> Result<(), ApiError> {
        let (env, missing) = self.env(account, names)?;
        if !missing.is_empty() {
            let names: Vec<_> = missing.iter().map(|name| format!("`{name}`")).collect();
            let text = format!("`{field}`: no secret is stored under {}", names.join(", "));
            return Err(ApiError::unprocessable(field, text)
                .hint("store it with `PUT /v1/secrets/{name}` or `dormouse secrets set`; `GET /v1/secrets` lists them"));
        }
        let bytes: usize = env.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
        if bytes > SECRETS_BYTES_MAX {
            let text = format!("`{field}`: {bytes} bytes of secrets");
            return Err(ApiError::unprocessable(field, text)
                .hint(format!("a box has at most {SECRETS_BYTES_MAX} bytes of them")));
        }
        Ok(())
    }

    /// Secrets as environment variables, and the names under which nothing is stored.
    pub(crate) fn env(
        &self,
        account: &str,
        names: &[String],
    ) -> Result<(BTreeMap<String, String>, Vec<String>), ApiError> {
        let (mut env, mut missing) = (BTreeMap::new(), Vec::new());
        for name in names {
            let stored = self.read().get(&(account.to_owned(), name.clone())).cloned();
            match stored {
                Some(stored) => {
                    let value = self.open(account, name, &stored).ok_or_else(|| {
                        let text = format!("the secret `{name}` cannot be opened any more");
                        ApiError::new(Code::CannotStart, text)
                            .hint("the key of the secrets was replaced; store it again")
                    })?;
                    env.insert(name.clone(), value);
                }
                None => missing.push(name.clone()),
            }
        }
        Ok((env, missing))
    }

    fn seal(&self, account: &str, name: &str, value: &str) -> Result<String, Failure> {
        let mut nonce = [0; NONCE_BYTES];
        getrandom::fill(&mut nonce).map_err(Failure::internal("draw a nonce"))?;
        let about = about(account, name);
        let payload = Payload { msg: value.as_bytes(), aad: about.as_bytes() };
        let sealed = self
            .cipher
            .encrypt(&XNonce::from(nonce), payload)
            .map_err(|_| Failure::internal("seal a secret")(io::Error::other("too long")))?;
        Ok(STANDARD.encode([&nonce, sealed.as_slice()].concat()))
    }

    fn open(&self, account: &str, name: &str, stored: &Stored) -> Option<String> {
        let bytes = STANDARD.decode(&stored.sealed).ok()?;
        let (nonce, sealed) = bytes.split_first_chunk::<NONCE_BYTES>()?;
        let about = about(account, name);
        let payload = Payload { msg: sealed, aad: about.as_bytes() };
        let value = self.cipher.decrypt(&XNonce::from(*nonce), payload).ok()?;
        String::from_utf8(value).ok()
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<(String, String), Stored>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a text can be a secret's name, which is that of an environment variable.
pub(crate) fn check_name(name: &str) -> Result<(), ApiError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let good = (1..=SECRET_NAME_CHARS_MAX).contains(&name.len())
        && name.bytes().all(plain)
        && !name.starts_with(|first: char| first.is_ascii_digit());
    if good {
        return Ok(());
    }
    Err(ApiError::invalid("name", "the name is none of an environment variable").hint(format!(
        "1-{SECRET_NAME_CHARS_MAX} of letters, digits and `_`, not beginning with a digit, such as API_TOKEN"
    )))
}

/// Whether a text can be a secret. It stands in no message.
pub(crate) fn check_value(value: &str) -> Result<(), ApiError> {
    if value.len() > SECRET_BYTES_MAX {
        let text = format!("`value`: {} bytes", value.len());
        return Err(ApiError::invalid("value", text).hint(format!("at most {SECRET_BYTES_MAX}")));
    }
    if value.contains('\0') {
        return Err(ApiError::invalid("value", "`value` contains a NUL byte")
            .hint("an environment variable cannot hold one"));
    }
    Ok(())
}

/// What is sealed with a value.
fn about(account: &str, name: &str) -> String {
    format!("{account}\n{name}")
}

fn make_key(path: &Path) -> Result<[u8; KEY_BYTES], Failure> {
    let mut key = [0; KEY_BYTES];
    getrandom::fill(&mut key).map_err(Failure::internal("draw the key of the secrets"))?;
    write_private(path, &STANDARD.encode(key))
        .map_err(Failure::internal("write the key of the secrets"))?;
    Ok(key)
}

fn read_key(path: &Path, text: &str) -> Result<[u8; KEY_BYTES], Failure> {
    let mode = fs::metadata(path).map_err(Failure::internal("read the key of the secrets"))?;
    if mode.permissions().mode() & 0o077 != 0 {
        tracing::warn!(file = KEY_FILE, "others could read the key of the secrets; no more");
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))
            .map_err(Failure::internal("shut the key of the secrets"))?;
    }
    let key = STANDARD.decode(text.trim()).ok().and_then(|key| key.try_into().ok());
    key.ok_or_else(|| {
        Failure::internal("read the key of the secrets")(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{} is no key: put the right one back, or remove it", path.display()),
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets(key: u8) -> Secrets {
        let cipher = XChaCha20Poly1305::new(&[key; KEY_BYTES].into());
        Secrets { cipher, known: RwLock::default() }
    }

    #[test]
    fn t13_a_sealed_secret_opens_for_its_account_and_name_and_with_its_key_alone() {
        let ours = secrets(1);
        let sealed = ours.seal("acme", "TOKEN", "s3cret").unwrap();
        assert!(!sealed.contains("s3cret") && !sealed.contains(&STANDARD.encode("s3cret")));
        assert_ne!(sealed, ours.seal("acme", "TOKEN", "s3cret").unwrap(), "each has its own nonce");
        let stored = Stored { sealed, updated_ms: 0 };
        assert_eq!(ours.open("acme", "TOKEN", &stored).as_deref(), Some("s3cret"));
        assert_eq!(ours.open("other", "TOKEN", &stored), None);
        assert_eq!(ours.open("acme", "OTHER", &stored), None);
        assert_eq!(secrets(2).open("acme", "TOKEN", &stored), None);
        let cut = Stored { sealed: STANDARD.encode([0; 5]), updated_ms: 0 };
        assert_eq!(ours.open("acme", "TOKEN", &cut), None);
    }

    #[test]
    fn t13_names_are_those_of_environment_variables() {
        for good in ["A", "_x", "API_TOKEN_2", &"N".repeat(SECRET_NAME_CHARS_MAX)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for bad in ["", "2A", "A-B", "A=B", "A B", "Ä", &"N".repeat(SECRET_NAME_CHARS_MAX + 1)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
        assert!(check_value("a\0b").is_err());
        assert!(check_value(&"x".repeat(SECRET_BYTES_MAX + 1)).is_err());
        assert_eq!(check_value(&"x".repeat(SECRET_BYTES_MAX)), Ok(()));
    }
}
