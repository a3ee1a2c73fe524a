//! Accounts and keys: making, listing, changing, deleting.

use api::account::{
    Account, AccountList, CreateAccount, CreateKey, CreatedKey, Key, KeyList, SetCredit,
    UpdateAccount,
};

use crate::account_args::{AccountsCommand, KeysCommand, Units};
use crate::client::{Client, full, quote};
use crate::problem::Problem;
use crate::show;

pub(crate) async fn accounts(
    client: &Client,
    command: AccountsCommand,
    json: bool,
) -> Result<i32, Problem> {
    let account: Account = match command {
        AccountsCommand::Create { id, plan, credit: Units(credit), url_allow } => {
            let url_allow = (!url_allow.is_empty()).then_some(url_allow);
            let body = CreateAccount { id, plan: plan.into(), credit, url_allow };
            client.json("POST", "/v1/accounts", Some(&body)).await?
        }
        AccountsCommand::List => {
            let AccountList { accounts } = client.get("/v1/accounts").await?;
            if json {
                show::json(&accounts)?;
            } else {
                accounts_table(&accounts)?;
            }
            return Ok(0);
        }
        AccountsCommand::Update { id, plan, url_allow, no_url_allow } => {
            let given = no_url_allow || !url_allow.is_empty();
            let url_allow = given.then_some((!no_url_allow).then_some(url_allow));
            let body = UpdateAccount { plan: plan.map(Into::into), url_allow };
            client.json("PATCH", &account_path(&id), Some(&body)).await?
        }
        AccountsCommand::Credit { id, credit: Units(credit) } => {
            let path = format!("{}/credit", account_path(&id));
            client.json("PUT", &path, Some(&SetCredit { credit })).await?
        }
        AccountsCommand::Delete { ids } => {
            for id in ids {
                client.send(client.request("DELETE", &account_path(&id)), full("")).await?;
                if !json {
                    show::data(&format!("deleted {id}"))?;
                }
            }
            return Ok(0);
        }
    };
    if json {
        show::json(&account)?;
    } else {
        accounts_table(&[account])?;
    }
    Ok(0)
}

pub(crate) async fn keys(
    client: &Client,
    command: KeysCommand,
    json: bool,
) -> Result<i32, Problem> {
    match command {
        KeysCommand::Create { account, scope, label } => {
            let body =
                CreateKey { account: Some(account), scope: Some(scope.into()), label: Some(label) };
            let made: CreatedKey = client.json("POST", "/v1/keys", Some(&body)).await?;
            if json {
                show::json(&made)?;
            } else {
                show::data(&made.key)?;
            }
        }
        KeysCommand::List => {
            let KeyList { keys } = client.get("/v1/keys").await?;
            if json {
                show::json(&keys)?;
            } else {
                keys_table(&keys)?;
            }
        }
        KeysCommand::Delete { ids } => {
            for id in ids {
                let path = format!("/v1/keys/{}", quote(&id));
                client.send(client.request("DELETE", &path), full("")).await?;
                if !json {
                    show::data(&format!("revoked {id}"))?;
                }
            }
        }
    }
    Ok(0)
}

fn account_path(id: &str) -> String {
    format!("/v1/accounts/{}", quote(id))
}

fn accounts_table(accounts: &[Account]) -> Result<(), Problem> {
    let row = |account: &Account| {
        let networks = account
            .url_allow
            .as_ref()
            .map(|list| list.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "));
        vec![
            account.id.clone(),
            account.plan.map_or("none", api::account::Plan::as_str).to_owned(),
            account.credit.map_or_else(|| "not counted".to_owned(), |credit| credit.to_string()),
            networks.unwrap_or_else(|| "anywhere".to_owned()),
            show::age(&account.created_at),
        ]
    };
    let rows: Vec<_> = accounts.iter().map(row).collect();
    show::table(&["ID", "PLAN", "CREDIT", "URLS FROM", "CREATED"], &rows)
}

fn keys_table(keys: &[Key]) -> Result<(), Problem> {
    let row = |key: &Key| {
        vec![
            key.id.clone(),
            key.account.clone(),
            key.scope.as_str().to_owned(),
            key.label.clone(),
            show::age(&key.created_at),
        ]
    };
    let rows: Vec<_> = keys.iter().map(row).collect();
    show::table(&["ID", "ACCOUNT", "SCOPE", "LABEL", "CREATED"], &rows)
}
