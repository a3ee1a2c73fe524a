//! TLS to a daemon: its certificate must come from an authority that this system trusts, or that is named.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::problem::Problem;

/// How long the other side may take for its part of the handshake: a daemon needs milliseconds, a far one on a bad line a second
/// or two, and one that speaks no TLS may never say anything.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);

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
        Self::trusting(name, roots)
    }

    fn trusting(name: ServerName<'static>, roots: RootCertStore) -> Result<Self, Problem> {
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
        let no_tls =
            |why: &str| Problem::unreachable(format!("no TLS with the daemon at {address}: {why}"));
        let shaken = self.connector.connect(self.name.clone(), stream);
        match tokio::time::timeout(HANDSHAKE_TIME_MAX, shaken).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => Err(no_tls(&error.to_string()).hint(
                "`--ca FILE` (`DORMOUSE_CA`) names the authority of its certificate; does the daemon serve HTTPS there at all?",
            )),
            Err(_) => {
                let seconds = HANDSHAKE_TIME_MAX.as_secs();
                Err(no_tls(&format!("it did not answer the handshake within {seconds} s"))
                    .hint("does the daemon serve HTTPS there at all, and is it alive?"))
            }
        }
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

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// The clock goes on by itself where everybody waits.
    #[tokio::test(start_paused = true)]
    async fn a_handshake_that_is_not_answered_ends_in_time() {
        let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = silent.local_addr().expect("its address");
        let stream = TcpStream::connect(address).await.expect("connected");
        let name = ServerName::try_from("localhost").expect("a name");
        let tls = Tls::trusting(name, RootCertStore::empty()).expect("TLS");
        let begun = tokio::time::Instant::now();
        let problem = tls.over(stream, "localhost:1").await.expect_err("nobody answers");
        assert_eq!(begun.elapsed(), HANDSHAKE_TIME_MAX);
        let said = problem.sentence();
        assert!(
            said.starts_with("no TLS with the daemon at localhost:1: it did not answer"),
            "{said}"
        );
        assert!(said.contains("within 10 s"), "{said}");
    }
}
