//! Accounts: to whom boxes belong, how many each may have, and from where their URLs may be opened.
//!
//! Who calls for which account its key decides ([`crate::auth`]).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{PoisonError, RwLock};

use api::account::{ACCOUNT_DEFAULT, ACCOUNT_ID_CHARS_MAX, CREDIT_MAX, Plan, URL_ALLOW_MAX};
use api::network::Network;
use api::{ApiError, Code, SandboxId};

use crate::catalogue::Catalogue;
use crate::failure::Failure;

/// Most accounts.
const ACCOUNTS_MAX: usize = 10_000;
/// Milliseconds of a unit of credit.
const UNIT_MS: u64 = 1000;

/// An account, as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Account {
    pub(crate) id: String,
    /// How many boxes it may have at once; `None`: as many as it likes.
    pub(crate) plan: Option<Plan>,
    /// What is left of its credit, milliseconds of a box of size 1; `None`: nothing is counted.
    pub(crate) credit_ms: Option<u64>,
    /// From where its boxes' URLs may be opened; `None`: from anywhere.
    pub(crate) url_allow: Option<Vec<Network>>,
    /// Milliseconds since 1970.
    pub(crate) created_ms: i64,
}

impl Account {
    /// Units of credit that are left: a part of one is one, so that 0 is told when nothing is left.
    pub(crate) fn credit(&self) -> Option<u64> {
        self.credit_ms.map(|ms| ms.div_ceil(UNIT_MS))
    }
}

/// Units of credit as they are kept.
pub(crate) fn credit_ms(credit: Option<u64>) -> Option<u64> {
    credit.map(|credit| credit * UNIT_MS)
}

/// All accounts.
pub(crate) struct Accounts {
    known: RwLock<BTreeMap<String, Account>>,
    /// Held while one is changed: what is kept and what is known change together.
    changing: tokio::sync::Mutex<()>,
    /// Tells that one has changed.
    changed: tokio::sync::watch::Sender<()>,
}

impl Accounts {
    /// Reads what is kept.
    pub(crate) async fn load(catalogue: &Catalogue) -> Result<Self, Failure> {
        let known = catalogue.accounts().await?;
        let known = known.into_iter().map(|account| (account.id.clone(), account)).collect();
        Ok(Self {
            known: RwLock::new(known),
            changing: tokio::sync::Mutex::default(),
            changed: tokio::sync::watch::Sender::new(()),
        })
    }

    /// An account.
    pub(crate) fn get(&self, id: &str) -> Option<Account> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    /// As [`get`](Self::get), for somebody who named it.
    pub(crate) fn find(&self, id: &str) -> Result<Account, ApiError> {
        self.get(id).ok_or_else(|| {
            ApiError::new(Code::NotFound, "there is no account of this id")
                .hint("`GET /v1/accounts` or `dormouse accounts list` shows them")
        })
    }

    /// Whether the URLs of an account's boxes open for somebody at this address; on this machine itself (`None`) they do.
    pub(crate) fn opens_to(&self, id: &str, peer: Option<IpAddr>) -> bool {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let list = known.get(id).and_then(|account| account.url_allow.as_ref());
        match (list, peer) {
            (Some(list), Some(peer)) => list.iter().any(|network| network.contains(peer)),
            _ => true,
        }
    }

    /// All, by id.
    pub(crate) fn list(&self) -> Vec<Account> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Makes one.
    pub(crate) async fn add(&self, catalogue: &Catalogue, new: Account) -> Result<(), Failure> {
        let _changing = self.changing.lock().await;
        if self.get(&new.id).is_some() {
            let error = ApiError::new(Code::NameTaken, format!("there is an account `{}`", new.id));
            return Err(ApiError { field: Some("id".to_owned()), ..error }.into());
        }
        if self.list().len() >= ACCOUNTS_MAX {
            let text = format!("there are {ACCOUNTS_MAX} accounts already");
            return Err(ApiError::new(Code::NoCapacity, text).into());
        }
        self.keep(catalogue, new).await
    }

    /// Changes one, and tells what it is then.
    pub(crate) async fn change(
        &self,
        catalogue: &Catalogue,
        id: &str,
        change: impl FnOnce(&mut Account),
    ) -> Result<Account, Failure> {
        let _changing = self.changing.lock().await;
        let mut account = self.find(id)?;
        change(&mut account);
        self.keep(catalogue, account.clone()).await?;
        Ok(account)
    }

    /// Changes the credit of one, with what it has paid for.
    pub(crate) async fn charge(
        &self,
        catalogue: &Catalogue,
        id: &str,
        paid: &[(SandboxId, u64)],
        change: impl FnOnce(&mut Account),
    ) -> Result<Account, Failure> {
        let _changing = self.changing.lock().await;
        let mut account = self.find(id)?;
        change(&mut account);
        catalogue.charge(id, account.credit_ms, paid).await?;
        self.know(account.clone());
        Ok(account)
    }

    /// Whether the account's credit is counted and used up. Asked for each request, so nothing is copied.
    pub(crate) fn lacks_credit(&self, id: &str) -> bool {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        known.get(id).is_some_and(|account| account.credit_ms == Some(0))
    }

    /// Ends when the account has no credit left; where none is counted: never.
    pub(crate) async fn without_credit(&self, id: &str) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            if self.lacks_credit(id) {
                return;
            }
            // Its sender is here.
            if changed.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Forgets one that has no boxes, with its keys.
    pub(crate) async fn remove(&self, catalogue: &Catalogue, id: &str) -> Result<(), Failure> {
        let _changing = self.changing.lock().await;
        catalogue.forget_account(id).await?;
        self.known.write().unwrap_or_else(PoisonError::into_inner).remove(id);
        Ok(())
    }

    async fn keep(&self, catalogue: &Catalogue, account: Account) -> Result<(), Failure> {
        catalogue.keep_account(&account).await?;
        self.know(account);
        Ok(())
    }

    fn know(&self, account: Account) {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        known.insert(account.id.clone(), account);
        drop(known);
        self.changed.send_replace(());
    }
}

/// Whether a text can be an account's id.
pub(crate) fn check_id(id: &str) -> Result<(), ApiError> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let good = (1..=ACCOUNT_ID_CHARS_MAX).contains(&id.len())
        && id.bytes().all(plain)
        && !id.starts_with('-')
        && !id.ends_with('-');
    if good {
        return Ok(());
    }
    Err(ApiError::invalid("id", "`id` is no id of an account").hint(format!(
        "1-{ACCOUNT_ID_CHARS_MAX} of a-z, 0-9 and `-`, not beginning or ending with `-`"
    )))
}

/// Whether an allow-list can be kept: none at all is said with null.
pub(crate) fn check_url_allow(list: Option<&[Network]>) -> Result<(), ApiError> {
    match list {
        Some(list) if !(1..=URL_ALLOW_MAX).contains(&list.len()) => {
            let text = format!("`urlAllow`: {} ranges of addresses", list.len());
            Err(ApiError::invalid("urlAllow", text)
                .hint(format!("1-{URL_ALLOW_MAX}, or null: from anywhere")))
        }
        _ => Ok(()),
    }
}

/// Whether credit is within its limits.
pub(crate) fn check_credit(credit: Option<u64>) -> Result<(), ApiError> {
    match credit {
        Some(credit) if credit > CREDIT_MAX => {
            Err(crate::validate::out_of_range("credit", credit, 0, CREDIT_MAX))
        }
        _ => Ok(()),
    }
}

/// The account that a request names, which can only be one that is no default.
pub(crate) fn check_deletable(id: &str) -> Result<(), ApiError> {
    if id != ACCOUNT_DEFAULT {
        return Ok(());
    }
    Err(ApiError::new(Code::InUse, "the default account cannot be deleted")
        .hint("the daemon's first token and its local socket belong to it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_accounts() {
        for good in ["a", "acme", "acme-2", &"x".repeat(40)] {
            assert_eq!(check_id(good), Ok(()), "{good}");
        }
        for bad in ["", "-a", "a-", "Acme", "a b", "a/b", &"x".repeat(41)] {
            assert!(check_id(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn credit_is_told_in_whole_units_and_zero_only_when_nothing_is_left() {
        let with = |credit_ms| Account {
            id: "a".to_owned(),
            plan: None,
            credit_ms,
            url_allow: None,
            created_ms: 0,
        };
        assert_eq!(with(None).credit(), None);
        assert_eq!(with(Some(0)).credit(), Some(0));
        assert_eq!(with(Some(1)).credit(), Some(1));
        assert_eq!(with(credit_ms(Some(7))).credit(), Some(7));
    }
}
