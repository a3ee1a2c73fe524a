//! Secrets of a box: which it has, and what its commands get of them (T13).

use std::collections::BTreeMap;

use api::boxes::act::{BoxSecretNames, BoxSecrets};
use api::{ApiError, boxes::start::StartBox};

use super::start::NAMES_MAX;
use super::{Acting, Who, act, checkpoint};
use crate::App;
use crate::failure::Failure;

/// Names each secret once, and refuses those that are not stored.
pub(super) fn check(app: &App, who: &Who, request: &mut StartBox) -> Result<(), ApiError> {
    request.secrets = once(&[], &request.secrets);
    check_names(app, &who.account, "secrets", &request.secrets)
}

/// Adds secrets to those that a box has: for the commands that start from now on.
pub(crate) async fn add_secrets(
    app: &App,
    who: &Who,
    id: &str,
    request: &BoxSecrets,
) -> Result<BoxSecretNames, Failure> {
    // Nothing is thawed for what is wrong.
    check_names(app, &who.account, "add", &request.add)?;
    let acting = act(app, who, id, "sandbox_secrets").await?;
    let record = &acting.record;
    let secrets = once(&record.spec.secrets, &request.add);
    check_names(app, &record.account, "add", &secrets)?;
    let kept = secrets.clone();
    let change = |record: &mut super::BoxRecord| record.spec.secrets = kept;
    app.boxes().change(app.catalogue(), &record.id, change).await?;
    checkpoint::carry(app, &record.id).await?;
    Ok(BoxSecretNames { secrets })
}

/// What a command gets, and what to tell where some of it is not there any more.
pub(super) fn env(
    app: &App,
    acting: &Acting,
) -> Result<(BTreeMap<String, String>, Option<String>), ApiError> {
    let record = &acting.record;
    let (env, missing) = app.secrets().env(&record.account, &record.spec.secrets)?;
    let note = (!missing.is_empty()).then(|| {
        format!(
            "Not stored any more, and not in the command's environment: {}.",
            missing.join(", ")
        )
    });
    Ok((env, note))
}

fn check_names(app: &App, account: &str, field: &str, names: &[String]) -> Result<(), ApiError> {
    if names.len() > NAMES_MAX {
        let text = format!("`{field}`: {} secrets", names.len());
        return Err(ApiError::invalid(field, text).hint(format!("a box has at most {NAMES_MAX}")));
    }
    app.secrets().check(account, field, names)
}

/// These and those, each once, in the order in which they come.
fn once(these: &[String], those: &[String]) -> Vec<String> {
    let mut all = Vec::new();
    for name in these.iter().chain(those) {
        if !all.contains(name) {
            all.push(name.clone());
        }
    }
    all
}
