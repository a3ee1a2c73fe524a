//! `sandbox_sync`: a folder of this machine is copied into a box, and afterwards only what changed.
//!
//! What was copied stands in the box, in `.sbx/sync.json` of the folder there: each file with its size, mode and SHA-256. A file is
//! sent again where that differs from the one here, or where the box's own has changed since (its size, time or mode, which
//! `.sbx/sync.stat` has). What is gone here is removed there, if it was copied; what the box made itself stays.

use std::collections::BTreeSet;
use std::path::PathBuf;

use api::Code;
use api::boxes::act::{BoxExec, BoxExecResult};
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Inner;
use super::files::{self, Tree, arguments, at};
use super::upstream::Upstream;
use crate::client::{cut, full, quote};
use crate::problem::Problem;
use crate::tree;

/// Its name.
pub(super) const NAME: &str = "sandbox_sync";
/// Where projects go.
const WORK: &str = "/work";
/// The record's version.
const VERSION: u32 = 1;
/// Most bytes of the record: of as many files as there can be.
const RECORD_BYTES_MAX: usize = 128 * 1024 * 1024;
/// Most bytes of the list of files that the box has changed.
const CHANGED_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Tells that the box has no record.
const NO_RECORD: i32 = 44;

const DESCRIPTION: &str = "\
Copies a folder of your machine into a box, by default the one in which your client runs into /work. The first time all of it, later \
only what changed: call it after each edit. What .gitignore leaves out is left out (node_modules, build output: make those in the box), \
.git too. Files that you deleted since the last time are deleted in the box; what the box made itself stays. Where both sides changed a \
file, yours wins. Thaws the box if it is frozen.";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sync {
    id: String,
    from: Option<String>,
    to: Option<String>,
}

/// What was copied into a folder of a box.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    version: u32,
    files: Tree,
}

/// What is to be done.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    send: Vec<String>,
    bytes: u64,
    remove: Vec<String>,
    deleted: usize,
    unchanged: usize,
}

pub(super) fn described(
    name: &'static str,
    title: &'static str,
    description: &'static str,
    input: Value,
    output: Value,
    hints: ToolAnnotations,
) -> Tool {
    let object = |schema: Value| match schema {
        Value::Object(object) => std::sync::Arc::new(object),
        other => unreachable!("{other} is no schema of an object"),
    };
    Tool::new(name, description, object(input))
        .with_title(title)
        .with_annotations(hints)
        .with_raw_output_schema(object(output))
}

pub(super) fn tool() -> Tool {
    let input = json!({
        "type": "object",
        "properties": {
            "id": { "type": "string", "description": "Id of the box." },
            "from": { "type": "string", "description": "The folder on your machine. Relative to the folder in which the adapter runs, which is the default." },
            "to": { "type": "string", "description": "The folder in the box, absolute. Default: /work." },
        },
        "required": ["id"],
        "additionalProperties": false,
    });
    let count = |what: &str| json!({ "type": "integer", "minimum": 0, "description": what });
    let output = json!({
        "type": "object",
        "properties": {
            "id": { "type": "string" },
            "from": { "type": "string" },
            "to": { "type": "string" },
            "sent": count("Files that were copied."),
            "sentBytes": count("Their bytes."),
            "deleted": count("Files that were deleted in the box."),
            "unchanged": count("Files that the box had already."),
            "leftOut": count("Files that can be no part of it: sockets, devices, names that are no UTF-8."),
        },
        "required": ["id", "from", "to", "sent", "sentBytes", "deleted", "unchanged", "leftOut"],
    });
    let hints = ToolAnnotations::with_title("Copy files into a box")
        .read_only(false)
        .destructive(true)
        .idempotent(true)
        .open_world(false);
    described(NAME, "Copy files into a box", DESCRIPTION, input, output, hints)
}

pub(super) async fn sync(inner: &Inner, given: JsonObject) -> Result<(String, Value), Problem> {
    let Sync { id, from, to } = arguments(given)?;
    let (from, to) = (at(&inner.folder, from.as_deref()), to.unwrap_or_else(|| WORK.to_owned()));
    if !from.is_dir() {
        return Err(Problem::new(format!("{} is not a folder of this machine", from.display()))
            .hint("`from`: an absolute path, or one below the folder in which the adapter runs"));
    }
    let there = There { upstream: &inner.upstream, id: &id, to: &to };
    let local = read(from.clone()).await?;
    let (record, changed) = there.look().await?;
    let plan = plan(&local.files, &record.files, &changed);
    there.remove(&plan.remove).await?;
    if !plan.send.is_empty() || local.files != record.files {
        there.send(from.clone(), &plan.send, local.files).await?;
    }
    let data = json!({
        "id": id, "from": from.to_string_lossy(), "to": to,
        "sent": plan.send.len(), "sentBytes": plan.bytes,
        "deleted": plan.deleted, "unchanged": plan.unchanged, "leftOut": local.odd,
    });
    let mut text = format!(
        "{} is in box {id} at {to}: {} sent ({} bytes), {} deleted, {} unchanged.",
        from.display(),
        plan.send.len(),
        plan.bytes,
        plan.deleted,
        plan.unchanged
    );
    if local.odd > 0 {
        text =
            format!("{text} {} left out: sockets, devices, or names that are no UTF-8.", local.odd);
    }
    Ok((text, data))
}

async fn read(folder: PathBuf) -> Result<files::Local, Problem> {
    tokio::task::spawn_blocking(move || files::read(&folder))
        .await
        .map_err(|error| Problem::new(format!("reading the folder broke: {error}")))?
}

/// `record`: what was copied; `changed`: what of it the box has changed since.
fn plan(local: &Tree, record: &Tree, changed: &BTreeSet<String>) -> Plan {
    let mut plan = Plan::default();
    for (name, content) in local {
        if record.get(name) == Some(content) && !changed.contains(name) {
            plan.unchanged += 1;
            continue;
        }
        plan.bytes += content.size();
        plan.send.push(name.clone());
        if record.get(name).is_some_and(|before| !before.is_like(content)) {
            plan.remove.push(name.clone());
        }
    }
    let gone: Vec<_> = record.keys().filter(|name| !local.contains_key(*name)).cloned().collect();
    plan.deleted = gone.len();
    plan.remove.extend(gone);
    plan
}

/// The folder in the box.
struct There<'a> {
    upstream: &'a Upstream,
    id: &'a str,
    to: &'a str,
}

impl There<'_> {
    fn address(&self, what: &str, path: &str) -> String {
        format!("/v1/boxes/{}/{what}?path={}", quote(self.id), quote(path))
    }

    /// What was copied there, and what of it the box has changed since. None of it, where there is no record that can be relied on.
    async fn look(&self) -> Result<(Record, BTreeSet<String>), Problem> {
        let line = format!(
            "cd -- {} 2>/dev/null && [ -f .sbx/sync.stat ] && [ -f .sbx/sync.paths ] || exit {NO_RECORD}\n\
             export LC_ALL=C\n\
             {{ {STAT}; true; }} | sort -z | comm -z -23 .sbx/sync.stat -",
            shell(self.to)
        );
        let (code, changed) = self.run(&line).await?;
        if code == NO_RECORD {
            return Ok((Record::default(), BTreeSet::new()));
        }
        let Some(record) = self.record().await?.filter(|_| code == 0) else {
            return Ok((Record::default(), BTreeSet::new()));
        };
        Ok((record, changed.split('\0').filter_map(stat_name).collect()))
    }

    async fn record(&self) -> Result<Option<Record>, Problem> {
        let request = self.upstream.request("GET", &self.address("files", &self.kept("sync.json")));
        let answer = match self.upstream.send(request, full("")).await {
            Ok(answer) => answer,
            Err(problem) if problem.code() == Some(Code::NotFound) => return Ok(None),
            Err(problem) => return Err(problem),
        };
        let mut body = answer.into_body();
        let mut bytes = Vec::new();
        while let Some(frame) = http_body_util::BodyExt::frame(&mut body).await {
            if let Ok(data) = frame.map_err(cut)?.into_data() {
                bytes.extend_from_slice(&data);
            }
            if bytes.len() > RECORD_BYTES_MAX {
                return Ok(None);
            }
        }
        // One of another version, or damaged by the box: as if it were not there.
        let record = serde_json::from_slice::<Record>(&bytes).ok();
        Ok(record.filter(|record| record.version == VERSION))
    }

    fn kept(&self, name: &str) -> String {
        format!("{}/.sbx/{name}", self.to.trim_end_matches('/'))
    }

    /// Removes files, and the folders that are empty then.
    async fn remove(&self, names: &[String]) -> Result<(), Problem> {
        if names.is_empty() {
            return Ok(());
        }
        self.push(tree::pack_some(PathBuf::new(), Vec::new(), vec![(GONE.into(), list(names))]))
            .await?;
        let line = format!(
            "cd -- {} && xargs -0 -r -a {GONE} rm -f -- && \
             {{ xargs -0 -r -a {GONE} dirname -z -- | sort -zu | xargs -0 -r rmdir -p --ignore-fail-on-non-empty -- 2>/dev/null; \
             rm -f {GONE}; }}",
            shell(self.to)
        );
        let (code, output) = self.run(&line).await?;
        if code == 0 {
            return Ok(());
        }
        Err(Problem::new(format!("files could not be removed from the box: {}", output.trim())))
    }

    /// Sends files, and writes down what is there then.
    async fn send(&self, from: PathBuf, names: &[String], files: Tree) -> Result<(), Problem> {
        let paths: Vec<String> = files.keys().cloned().collect();
        let record = serde_json::to_vec(&Record { version: VERSION, files })
            .map_err(|error| Problem::new(format!("cannot write the record: {error}")))?;
        // Last, so that what breaks off is no record of what did not come.
        let kept = vec![
            (".sbx/sync.paths".to_owned(), list(&paths)),
            (".sbx/sync.json".to_owned(), record),
        ];
        self.push(tree::pack_some(from, names.to_vec(), kept)).await?;
        let line = format!(
            "cd -- {} && export LC_ALL=C && {{ {STAT}; true; }} | sort -z > .sbx/sync.stat",
            shell(self.to)
        );
        let (code, output) = self.run(&line).await?;
        if code == 0 {
            return Ok(());
        }
        Err(Problem::new(format!(
            "the record of what was copied could not be written: {}",
            output.trim()
        )))
    }

    async fn push(&self, body: crate::client::Body) -> Result<(), Problem> {
        let request = self.upstream.request("PUT", &self.address("tree", self.to));
        self.upstream.send(request, body).await?;
        Ok(())
    }

    /// Runs a line in the box to its end.
    async fn run(&self, line: &str) -> Result<(i32, String), Problem> {
        let path = format!("/v1/boxes/{}/exec", quote(self.id));
        let mut request =
            BoxExec { command: Some(line.to_owned()), cwd: Some("/".into()), ..BoxExec::default() };
        let mut output = String::new();
        loop {
            let part: BoxExecResult = self.upstream.json("POST", &path, &request).await?;
            output.push_str(&part.output);
            if output.len() > CHANGED_BYTES_MAX {
                return Err(Problem::new("the box tells of too many changed files"));
            }
            if !part.running && !part.truncated {
                return Ok((part.exit_code.unwrap_or(-1), output));
            }
            request = BoxExec {
                exec_id: Some(part.exec_id),
                offset: Some(part.next_offset),
                ..BoxExec::default()
            };
        }
    }
}

/// Names of files to remove, in the folder.
const GONE: &str = ".sbx/sync.gone";
/// Tells of each file that was copied its size, time, mode and name; of one that is gone, nothing.
const STAT: &str = "xargs -0 -r -a .sbx/sync.paths stat --printf '%s %Y %f %n\\0' -- 2>/dev/null";

/// Names, each ended by a NUL and none beginning with a dash.
fn list(names: &[String]) -> Vec<u8> {
    names.iter().fold(Vec::new(), |mut list, name| {
        list.extend_from_slice(format!("./{name}\0").as_bytes());
        list
    })
}

/// The name in an entry of [`STAT`].
fn stat_name(entry: &str) -> Option<String> {
    Some(entry.splitn(4, ' ').nth(3)?.strip_prefix("./")?.to_owned())
}

/// A word for the shell.
fn shell(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::super::files::Content;
    use super::*;

    fn tree(entries: &[(&str, Content)]) -> Tree {
        entries.iter().map(|(name, content)| ((*name).to_owned(), content.clone())).collect()
    }

    fn file(text: &str) -> Content {
        Content::File { size: text.len() as u64, mode: 0o644, sha256: text.to_owned() }
    }

    #[test]
    fn only_what_changed_is_sent_and_only_what_was_copied_is_removed() {
        let link = Content::Link { link: "a".into() };
        let record = tree(&[
            ("a", file("1")),
            ("b", file("2")),
            ("c", file("3")),
            ("d", file("4")),
            ("e", file("5")),
        ]);
        let local = tree(&[
            ("a", file("1")),
            ("b", file("22")),
            ("c", file("3")),
            ("e", link),
            ("f", file("6")),
        ]);
        let changed = BTreeSet::from(["c".to_owned(), "d".to_owned()]);
        let expected = Plan {
            send: ["b", "c", "e", "f"].map(String::from).to_vec(),
            bytes: 4,
            remove: vec!["e".into(), "d".into()],
            deleted: 1,
            unchanged: 1,
        };
        assert_eq!(plan(&local, &record, &changed), expected);
        assert_eq!(plan(&local, &local, &BTreeSet::new()).unchanged, 5);
    }

    #[test]
    fn words_and_names_are_whole() {
        assert_eq!(shell("/w'o rk"), "'/w'\\''o rk'");
        assert_eq!(list(&["-a".into(), "b c".into()]), b"./-a\0./b c\0");
        assert_eq!(stat_name("12 1700000000 81a4 ./b c\n").as_deref(), Some("b c\n"));
        assert_eq!((stat_name(""), stat_name("1 2 3")), (None, None));
    }

    #[test]
    fn records_are_read_as_they_were_written() {
        let record = Record {
            version: VERSION,
            files: tree(&[("a", file("1")), ("l", Content::Link { link: "a".into() })]),
        };
        let text = serde_json::to_string(&record).expect("written");
        assert_eq!(serde_json::from_str::<Record>(&text).expect("read"), record);
    }
}
