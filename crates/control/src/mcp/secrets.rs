//! `sandbox_secrets`: more of the account's stored secrets for a box.

use api::boxes::act::{BoxSecretNames, BoxSecrets};
use rmcp::model::{JsonObject, Tool};

use super::Call;
use super::answer::Outcome;
use super::tool::{Does, about_a_box, read_about, tool};
use crate::boxes;
use crate::failure::Failure;

const SECRETS: &str = "\
Gives a box more of the secrets that its owner has stored, by name: each is an environment variable of every command that starts from \
then on, and of none that runs already. Values are never told, to you neither: use them by their names, as $NAME. A name that nobody has \
stored is refused, and says so: ask the person to store it (dormouse secrets set, or PUT /v1/secrets/{name}). It is use of the box: a \
frozen one is thawed first.";

pub(super) fn secrets_tool() -> Tool {
    about_a_box(tool::<BoxSecrets, BoxSecretNames>(
        "sandbox_secrets",
        "Give a box secrets",
        Does::Add,
        SECRETS,
    ))
}

pub(super) async fn secrets(call: &Call, arguments: JsonObject) -> Result<Outcome, Failure> {
    let (id, request): (String, BoxSecrets) = read_about(arguments)?;
    let names = boxes::add_secrets(&call.app, &call.who, &id, &request).await?;
    let text = if names.secrets.is_empty() {
        "The box has no secrets.".to_owned()
    } else {
        format!("Commands that start now have: {}", names.secrets.join(", "))
    };
    Outcome::new(text, &names)
}
