//! `sandbox_get`, and how files go in and out where the caller's own files are out of reach: `sandbox_pull` and `sandbox_sync`, which
//! `dormouse mcp` carries out itself on the caller's machine.

use std::fmt::Write as _;

use api::{ApiError, Code};
use rmcp::model::{JsonObject, Tool};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;

use super::Call;
use super::answer::Outcome;
use super::tool::{Does, about_a_box, read_about, tool};
use crate::boxes;
use crate::failure::Failure;
use crate::validate;

/// Bytes of a file in one answer unless asked otherwise: as much as a model reads at once.
const PAGE_BYTES: u64 = 30_000;
/// Most bytes that can be asked for.
const PAGE_BYTES_MAX: u64 = 262_144;
/// Where projects are, unless said otherwise.
const WORK: &str = "/work";

const GET: &str = "\
Reads a text file of a box, from offset (bytes, default 0), at most length bytes (default 30000, at most 262144). Where more is true, \
go on with offset: nextOffset. Binary files are refused: get those with sandbox_pull. Thaws the box if it is frozen.";

/// Which part of which file.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Part {
    /// An absolute path in the box, such as /work/app.py.
    path: String,
    /// Position of the first byte; default 0.
    offset: Option<u64>,
    /// Most bytes (1-262144); default 30000.
    length: Option<u64>,
}

/// A part of a text file.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct Page {
    /// Its path.
    path: String,
    /// Bytes of the whole file.
    size: u64,
    /// Where this part begins.
    offset: u64,
    /// The text.
    content: String,
    /// Position after it.
    next_offset: u64,
    /// There is more: go on from `nextOffset`.
    more: bool,
}

pub(super) fn get_tool() -> Tool {
    about_a_box(tool::<Part, Page>("sandbox_get", "Read a file", Does::Tell, GET))
}

pub(super) async fn get(call: &Call, arguments: JsonObject) -> Result<Outcome, Failure> {
    let (id, Part { path, offset, length }) = read_about(arguments)?;
    validate::path("path", &path)?;
    let (offset, length) = (offset.unwrap_or(0), length.unwrap_or(PAGE_BYTES));
    if !(1..=PAGE_BYTES_MAX).contains(&length) {
        return Err(validate::out_of_range("length", length, 1, PAGE_BYTES_MAX).into());
    }
    let acting = boxes::act(&call.app, &call.who, &id, "sandbox_get").await?;
    let file = call.app.host().file_read(&acting.record.id, &path, offset, Some(length)).await?;
    let (info, reader) = file.value;
    if offset > info.size {
        return Err(validate::out_of_range("offset", offset, 0, info.size).into());
    }
    let mut bytes = Vec::new();
    reader.take(length).read_to_end(&mut bytes).await.map_err(|error| {
        ApiError::new(Code::Timeout, format!("the file could not be read to its end: {error}"))
    })?;
    let is_last = offset + bytes.len() as u64 >= info.size;
    let (begin, content) = text(&bytes, is_last).ok_or_else(|| {
        ApiError::invalid("path", format!("`{path}` is no text (UTF-8)"))
            .hint("get it with sandbox_pull, or look at it with sandbox_exec (file, xxd, iconv)")
    })?;
    let offset = offset + begin as u64;
    let next_offset = offset + content.len() as u64;
    let page = Page {
        size: info.size,
        offset,
        next_offset,
        more: next_offset < info.size,
        content: content.to_owned(),
        path,
    };
    let mut told = page.content.clone();
    if page.more || offset > 0 {
        if !told.ends_with('\n') {
            told.push('\n');
        }
        let go_on =
            if page.more { format!("; go on with offset: {next_offset}") } else { String::new() };
        // Writing to a string cannot fail.
        let _ = write!(told, "[bytes {offset}-{next_offset} of {}{go_on}]", page.size);
    }
    Outcome::new(told, &page)
}

/// The whole characters of a part of a text, and how many bytes of a cut one were before them; `None`: it is no text.
fn text(bytes: &[u8], is_last: bool) -> Option<(usize, &str)> {
    let begin = bytes.iter().take(3).take_while(|byte| (0x80..0xC0).contains(*byte)).count();
    let whole = &bytes[begin..];
    let text = match std::str::from_utf8(whole) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() && !is_last && error.valid_up_to() > 0 => {
            std::str::from_utf8(&whole[..error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    (!text.contains('\0')).then_some((begin, text))
}

/// How files are fetched or brought over HTTP.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct How {
    /// `GET` or `PUT`.
    method: String,
    /// The URL; it needs the same `Authorization` header as this connection.
    url: String,
    /// A tar archive, uncompressed.
    content_type: String,
    /// A command that does it.
    example: String,
}

impl How {
    fn new(call: &Call, id: &str, path: &str, method: &str) -> Self {
        let host = &call.host;
        let path: String = form_urlencoded::byte_serialize(path.as_bytes()).collect();
        let scheme = call.app.links().scheme();
        let url = format!("{scheme}://{host}/v1/boxes/{id}/tree?path={path}");
        let curl = "curl -fsS -H \"Authorization: Bearer $DORMOUSE_TOKEN\"";
        let example = if method == "GET" {
            format!("mkdir -p DIR && {curl} '{url}' | tar -x -C DIR")
        } else {
            format!("tar -c -C DIR --exclude-vcs --exclude-vcs-ignores . | {curl} -T - '{url}'")
        };
        Self { method: method.into(), url, content_type: "application/x-tar".into(), example }
    }
}

const PULL: &str = "\
Copies a folder (or a file of any kind) out of a box. This connection cannot write to your machine, so the answer is the URL of a tar \
archive of it and a command that fetches it; the URL needs the same token as this connection. The adapter (dormouse mcp) writes the \
files itself. Thaws the box if it is frozen.";

/// What to copy out.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Pull {
    /// An absolute path in the box; default /work.
    path: Option<String>,
}

pub(super) fn pull_tool() -> Tool {
    about_a_box(tool::<Pull, How>("sandbox_pull", "Copy files out of a box", Does::Tell, PULL))
}

pub(super) async fn pull(call: &Call, arguments: JsonObject) -> Result<Outcome, Failure> {
    let (id, Pull { path }) = read_about(arguments)?;
    let path = path.as_deref().unwrap_or(WORK);
    validate::path("path", path)?;
    let acting = boxes::act(&call.app, &call.who, &id, "sandbox_pull").await?;
    call.app.host().file_stat(&acting.record.id, path).await?;
    let how = How::new(call, acting.record.id.as_str(), path, "GET");
    Outcome::new(format!("Fetch the tar archive at {}\nsuch as: {}", how.url, how.example), &how)
}

const SYNC: &str = "\
Copies a folder of your machine into a box. This connection cannot read your machine's files, so the answer is the URL to which you \
send a tar archive of the folder, and a command that does it; the URL needs the same token as this connection. What is in the box and \
not in the archive stays. The adapter (dormouse mcp) sends the files itself, and only what changed. Thaws the box if it is frozen.";

/// Where to copy.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Sync {
    /// The folder in the box, absolute; default /work.
    to: Option<String>,
}

pub(super) fn sync_tool() -> Tool {
    about_a_box(tool::<Sync, How>("sandbox_sync", "Copy files into a box", Does::Change, SYNC))
}

pub(super) async fn sync(call: &Call, arguments: JsonObject) -> Result<Outcome, Failure> {
    let (id, Sync { to }) = read_about(arguments)?;
    let to = to.as_deref().unwrap_or(WORK);
    validate::path("to", to)?;
    let acting = boxes::act(&call.app, &call.who, &id, "sandbox_sync").await?;
    let how = How::new(call, acting.record.id.as_str(), to, "PUT");
    Outcome::new(format!("Send a tar archive to {}\nsuch as: {}", how.url, how.example), &how)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_texts_are_whole_characters() {
        let bytes = "aéz".as_bytes();
        assert_eq!(text(bytes, true), Some((0, "aéz")));
        assert_eq!(
            text(&bytes[..2], false),
            Some((0, "a")),
            "é is cut, and told with the next part"
        );
        assert_eq!(
            text(&bytes[2..], true),
            Some((1, "z")),
            "the rest of a cut character is left out"
        );
        assert_eq!(text(&bytes[..2], true), None, "a file that ends within a character is no text");
        assert_eq!(text(b"\x7fELF\0\0", false), None);
        assert_eq!(text(&[0xff, 0xfe, 0x41], false), None);
        assert_eq!(text(b"", true), Some((0, "")));
    }
}
