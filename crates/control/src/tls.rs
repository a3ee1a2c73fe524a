//! TLS from certificate files: HTTP/2 or HTTP/1.1, as the client likes.
//!
//! The files are looked at anew while connections come, so that a certificate that was renewed is used without a restart; one
//! that cannot be used is logged, and the one before it goes on.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

use crate::failure::chain;

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// The protocols that are offered, the first preferred. WebSockets come over connections of their own in HTTP/1.1: the extended
/// CONNECT of HTTP/2 (RFC 8441) is not offered.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// Where certificate and key are, in PEM.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The certificate, followed by those that lead to its authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Why TLS cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("read {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file has not what it should have.
    #[error("{} has no {what} in PEM", path.display())]
    Pem {
        /// Which.
        path: PathBuf,
        /// What is missing.
        what: &'static str,
    },
    /// Certificate and key do not fit together, or cannot be used.
    #[error("use the certificate {}", path.display())]
    Unusable {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: rustls::Error,
    },
}

/// What connections are served with.
pub(crate) struct Tls {
    files: TlsFiles,
    now: Mutex<Loaded>,
}

struct Loaded {
    config: Arc<ServerConfig>,
    changed: [Option<SystemTime>; 2],
    looked: Instant,
}

impl Tls {
    pub(crate) fn load(files: TlsFiles) -> Result<Self, TlsError> {
        let changed = files.changed();
        let config = files.load()?;
        Ok(Self { files, now: Mutex::new(Loaded { config, changed, looked: Instant::now() }) })
    }

    /// For one connection.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        if now.looked.elapsed() >= LOOK_EVERY {
            now.looked = Instant::now();
            let changed = self.files.changed();
            if changed != now.changed {
                now.changed = changed;
                match self.files.load() {
                    Ok(config) => {
                        tracing::info!(certificate = %self.files.certificate.display(), "the certificate was renewed");
                        now.config = config;
                    }
                    Err(error) => {
                        tracing::error!(
                            error = chain(&error),
                            "the new certificate cannot be used; the old one goes on"
                        );
                    }
                }
            }
        }
        TlsAcceptor::from(Arc::clone(&now.config))
    }
}

impl TlsFiles {
    fn load(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
        };
        let pem = read(&self.certificate)?;
        let missing = |path: &Path, what| TlsError::Pem { path: path.to_owned(), what };
        let certificates: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&pem)
            .collect::<Result<_, _>>()
            .map_err(|_| missing(&self.certificate, "certificate"))?;
        if certificates.is_empty() {
            return Err(missing(&self.certificate, "certificate"));
        }
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key)?)
            .map_err(|_| missing(&self.key, "private key"))?;
        let unusable = |source| TlsError::Unusable { path: self.certificate.clone(), source };
        let mut config =
            ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(unusable)?
                .with_no_client_auth()
                .with_single_cert(certificates, key)
                .map_err(unusable)?;
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).to_vec();
        Ok(Arc::new(config))
    }

    fn changed(&self) -> [Option<SystemTime>; 2] {
        [&self.certificate, &self.key]
            .map(|path| std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok())
    }
}
