//! `sandbox_pull`: a folder or file of a box is written to this machine.

use api::Code;
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde::Deserialize;
use serde_json::{Value, json};

use super::Inner;
use super::files::{arguments, at};
use crate::client::{full, quote};
use crate::problem::Problem;
use crate::tree;

/// Its name.
pub(super) const NAME: &str = "sandbox_pull";
/// Where projects are.
const WORK: &str = "/work";

const DESCRIPTION: &str = "\
Copies a folder (or a file of any kind) out of a box onto your machine: results, reports, pictures, or all of /work before the box \
stops. What is in the target folder and not in the box stays; files of the same names are written over. Thaws the box if it is frozen.";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Pull {
    id: String,
    path: Option<String>,
    to: String,
}

pub(super) fn tool() -> Tool {
    let input = json!({
        "type": "object",
        "properties": {
            "id": { "type": "string", "description": "Id of the box." },
            "path": { "type": "string", "description": "What to copy: an absolute path in the box. Default: /work." },
            "to": { "type": "string", "description": "Where on your machine: the folder into which a folder's contents go, made if it is not there; for a single file the new file, or a folder that is there (or ends with /). Relative to the folder in which the adapter runs." },
        },
        "required": ["id", "to"],
        "additionalProperties": false,
    });
    let output = json!({
        "type": "object",
        "properties": {
            "id": { "type": "string" },
            "path": { "type": "string", "description": "What was copied, in the box." },
            "to": { "type": "string", "description": "Where it is now, on your machine." },
        },
        "required": ["id", "path", "to"],
    });
    let hints = ToolAnnotations::with_title("Copy files out of a box")
        .read_only(false)
        .destructive(true)
        .idempotent(true)
        .open_world(false);
    super::sync::described(NAME, "Copy files out of a box", DESCRIPTION, input, output, hints)
}

pub(super) async fn pull(inner: &Inner, given: JsonObject) -> Result<(String, Value), Problem> {
    let Pull { id, path, to: given_to } = arguments(given)?;
    let (path, to) = (path.as_deref().unwrap_or(WORK), at(&inner.folder, Some(&given_to)));
    let tree = async |path: &str| {
        let address = format!("/v1/boxes/{}/tree?path={}", quote(&id), quote(path));
        inner.upstream.send(inner.upstream.request("GET", &address), full("")).await
    };
    // A folder with one file in it and that file make the same archive. As a folder only a folder can be asked for.
    let into_folder = given_to.ends_with('/') || to.is_dir();
    let as_folder = if into_folder { None } else { Some(tree(&format!("{path}/.")).await) };
    let written = match as_folder {
        None => tree::unpack(tree(path).await?.into_body(), to.clone()).await,
        Some(Ok(answer)) => tree::unpack(answer.into_body(), to.clone()).await,
        Some(Err(problem)) if problem.code() == Some(Code::WrongFileType) => {
            tree::unpack_file(tree(path).await?.into_body(), to.clone()).await
        }
        // What is refused by the path that was given names that.
        Some(Err(problem)) => return Err(tree(path).await.err().unwrap_or(problem)),
    };
    written.map_err(|error| {
        Problem::new(format!(
            "{path} of box {id} could not be written to {}: {error}",
            to.display()
        ))
    })?;
    let text = format!("{path} of box {id} is in {} now.", to.display());
    Ok((text, json!({ "id": id, "path": path, "to": to.to_string_lossy() })))
}
