//! The client's side of TLS.

use std::io;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{CertificateError, ClientConfig, Error as TlsError, RootCertStore};

use crate::Error;

/// Opens TLS on a stream. `name` is the name that the node's certificate must be for; `authorities` (PEM)
/// stand in place of the platform's.
pub(crate) async fn connect(
    stream: TcpStream,
    name: &str,
    authorities: Option<&[u8]>,
) -> Result<TlsStream<TcpStream>, Error> {
    let host = name;
    let name = ServerName::try_from(host.to_owned())
        .map_err(|_| Error::BadUrl(format!("{host} cannot be the name of a certificate")))?;
    let roots = match authorities {
        Some(pem) => roots_of(pem)?,
        None => platform_roots().await?,
    };
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Protocol(format!("{error}")))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let connected = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
    connected.map_err(|error| explained(host, error))
}

/// Makes an error that tells an operator what to do, for the faults that an operator can mend.
fn explained(host: &str, error: io::Error) -> Error {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<TlsError>());
    let unknown_issuer = matches!(cause, Some(TlsError::InvalidCertificate(CertificateError::UnknownIssuer)));
    let reason = match cause {
        Some(TlsError::InvalidCertificate(reason)) => reason,
        Some(TlsError::InvalidMessage(_)) => return Error::Protocol("no TLS is spoken there".into()),
        _ => return Error::Io(error),
    };
    let reason = match reason {
        CertificateError::UnknownIssuer => "no authority that is trusted here has signed it".to_owned(),
        // The error is found by its text, since its type is private to the verifier.
        CertificateError::Other(other) if other.to_string() == "CaUsedAsEndEntity" => {
            "it is that of an authority (CA:TRUE), which no node may use as its own; give the node one with CA:FALSE, signed by the \
             authority or by itself (openssl req -x509 -addext basicConstraints=critical,CA:FALSE)"
                .to_owned()
        }
        other => other.to_string(),
    };
    Error::Untrusted { host: host.to_owned(), reason, unknown_issuer }
}

fn roots_of(pem: &[u8]) -> Result<RootCertStore, Error> {
    let unusable = |_| Error::BadValue("the CA certificate is not valid PEM".into());
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(unusable)?;
        roots
            .add(certificate)
            .map_err(|error| Error::BadValue(format!("the CA certificate cannot be used: {error}")))?;
    }
    if roots.is_empty() {
        return Err(Error::BadValue("the CA certificate holds no certificate in PEM".into()));
    }
    Ok(roots)
}

/// Reads the platform's authorities, some hundred files or more, on a thread where no other task waits.
async fn platform_roots() -> Result<RootCertStore, Error> {
    let loaded = tokio::task::spawn_blocking(rustls_native_certs::load_native_certs).await;
    let mut roots = RootCertStore::empty();
    if let Ok(loaded) = loaded {
        roots.add_parsable_certificates(loaded.certs);
    }
    if roots.is_empty() {
        return Err(Error::BadValue("this machine has no CA certificates; name one".into()));
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_root_certificates_are_refused_with_a_reason() {
        let damaged = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        for (pem, reason) in [
            (&b""[..], "holds no certificate"),
            (b"nothing", "holds no certificate"),
            (damaged, "cannot be used"),
            (b"-----BEGIN CERTIFICATE-----\n?\n-----END CERTIFICATE-----\n", "not valid PEM"),
        ] {
            let error = roots_of(pem).expect_err("refused").to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
