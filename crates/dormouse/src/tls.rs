//! TLS to a daemon: its certificate must come from an authority that this system trusts, or that is named.

use std::path::Path;
use std::sync::Arc;

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::problem::Problem;

/// How one daemon is spoken with.
#[derive(Clone)]
pub(crate) struct Tls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Tls {
    /// To a host of this name. `authorities`: a PEM file of those that its certificate may come from; `None`: the system's.
    pub(crate) fn to(host: &str, authorities: Option<&Path>) -> Result<Self, Problem> {
        let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned())
            .map_err(|_| Problem::usage(format!("`{host}` is no name of a host")))?;
        let roots = match authorities {
            Some(file) => named(file)?,
            None => of_the_system()?,
        };
        let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| Problem::new(format!("TLS cannot be used: {error}")))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), name })
    }

    /// Begins TLS on a connection.
    pub(crate) async fn over(
        &self,
        stream: TcpStream,
        address: &str,
    ) -> Result<TlsStream<TcpStream>, Problem> {
        self.connector.connect(self.name.clone(), stream).await.map_err(|error| {
            Problem::unreachable(format!("no TLS with the daemon at {address}: {error}")).hint(
                "`--ca FILE` (`DORMOUSE_CA`) names the authority of its certificate; does the daemon serve HTTPS there at all?",
            )
        })
    }
}

fn named(file: &Path) -> Result<RootCertStore, Problem> {
    let place = file.display();
    let unread = |error| Problem::usage(format!("`--ca`: {place} is not read as PEM: {error}"));
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(file).map_err(unread)? {
        roots
            .add(certificate.map_err(unread)?)
            .map_err(|error| Problem::usage(format!("`--ca`: {place}: {error}")))?;
    }
    if roots.is_empty() {
        return Err(Problem::usage(format!("`--ca`: {place} has no certificate")));
    }
    Ok(roots)
}

fn of_the_system() -> Result<RootCertStore, Problem> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // Some that every system has are of no use to anybody; without any at all nothing is trusted.
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let why = found.errors.first().map(|error| format!(": {error}")).unwrap_or_default();
        return Err(Problem::usage(format!(
            "this system trusts no authority of certificates{why}"
        ))
        .hint(
            "install the package ca-certificates, or name one with `--ca FILE` (`DORMOUSE_CA`)",
        ));
    }
    Ok(roots)
}
