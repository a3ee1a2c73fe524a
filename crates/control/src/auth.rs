//! Who may use the interface: holders of a token, and whoever may open the local socket.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use api::{ApiError, Code};
use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::catalogue::Catalogue;
use crate::failure::Failure;

/// Bytes of randomness in a token.
const TOKEN_BYTES: usize = 32;
/// File in the data folder that holds the first token, readable by its owner alone.
pub const ADMIN_TOKEN_FILE: &str = "admin.token";

/// The hashes of all tokens.
pub(crate) struct Tokens(Vec<String>);

impl Tokens {
    /// Reads the hashes; at the first start makes a token and writes it into [`ADMIN_TOKEN_FILE`], the only place where
    /// it ever stands.
    pub(crate) async fn load(catalogue: &Catalogue, data: &Path) -> Result<Self, Failure> {
        let hashes = catalogue.token_hashes().await?;
        if !hashes.is_empty() {
            return Ok(Self(hashes));
        }
        let mut random = [0; TOKEN_BYTES];
        getrandom::fill(&mut random).map_err(Failure::internal("draw a token"))?;
        let token = format!("dm_{}", hex(&random));
        // The file first: a crash before the row only means that the next start writes another one.
        write_private(&data.join(ADMIN_TOKEN_FILE), &token)
            .map_err(Failure::internal("write the first token's file"))?;
        let hash = sha256_hex(token.as_bytes());
        catalogue.add_token("admin", "made at the first start", &hash).await?;
        tracing::info!(file = ADMIN_TOKEN_FILE, "made the first token");
        Ok(Self(vec![hash]))
    }

    /// Whether these headers carry a known token.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
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
        // Every hash is compared, all of it, so that the time says nothing.
        let known = self
            .0
            .iter()
            .fold(Choice::from(0), |known, one| known | one.as_bytes().ct_eq(hash.as_bytes()));
        if bool::from(known) { Ok(()) } else { unauthorized("the token is not known") }
    }
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
fn write_private(path: &Path, text: &str) -> io::Result<()> {
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
