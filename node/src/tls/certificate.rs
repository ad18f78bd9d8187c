//! The certificate in use: read at start, and again when one of its files has changed.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::NoServerSessionStorage;
use rustls::{ServerConfig, ServerConnection};
use sha2::{Digest as _, Sha256};

use super::TlsConnection;

/// Interval of the comparison. Contents are compared, not times or inodes: a mounted secret is swapped by renaming a
/// link far above the files.
const POLL: Duration = Duration::from_millis(500);
const ALPN: &[u8] = b"http/1.1";

/// Reason for which a certificate and key were refused. Never contains anything of the key.
#[derive(Debug)]
pub enum CertificateError {
    Unreadable { path: PathBuf, source: std::io::Error },
    Unusable { path: PathBuf, reason: String },
}

impl CertificateError {
    fn unusable(path: &Path, reason: impl Into<String>) -> Self {
        Self::Unusable { path: path.to_owned(), reason: reason.into() }
    }

    pub fn path(&self) -> &Path {
        let (Self::Unreadable { path, .. } | Self::Unusable { path, .. }) = self;
        path
    }
}

impl fmt::Display for CertificateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { path, source } => write!(f, "cannot read {}: {source}", path.display()),
            Self::Unusable { path, reason } => write!(f, "{} {reason}", path.display()),
        }
    }
}

impl std::error::Error for CertificateError {}

/// The certificate for new connections. Unusable files change nothing.
pub struct Certificates {
    certificate: PathBuf,
    key: PathBuf,
    current: RwLock<Arc<ServerConfig>>,
    seen: Mutex<CertificateDigests>,
}

/// Digests of both files together.
struct CertificateDigests {
    /// Digest of the last pair that was accepted or refused.
    done: [u8; 32],
    /// Digest of a pair that may be half replaced: refused if it is still there at the next poll.
    refused_once: Option<[u8; 32]>,
}

impl Certificates {
    /// Reads both files (PEM: the chain with the server's own certificate first, and its key) for the first time.
    pub fn open(certificate: &Path, key: &Path) -> Result<Arc<Self>, CertificateError> {
        let pair = CertificatePair::read(certificate, key);
        let config = pair.config()?;
        publish_generation(1);
        publish_stale(false);
        Ok(Arc::new(Self {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            current: RwLock::new(config),
            seen: Mutex::new(CertificateDigests { done: pair.digest(), refused_once: None }),
        }))
    }

    /// The server's side of a fresh connection. The handshake may take `handshake_bytes` from the client.
    pub fn accept(&self, handshake_bytes: usize) -> Result<Box<TlsConnection>, rustls::Error> {
        let connection = ServerConnection::new(Arc::clone(&self.current.read()))?;
        Ok(Box::new(TlsConnection::new(connection, handshake_bytes)))
    }

    /// Accepts the files if they differ from the last attempt, and returns whether it did. Blocks on the disk, logs the
    /// outcome.
    pub fn reload_if_changed(&self) -> Result<bool, CertificateError> {
        let mut seen = self.seen.lock();
        let pair = CertificatePair::read(&self.certificate, &self.key);
        let digest = pair.digest();
        if digest == seen.done {
            seen.refused_once = None;
            return Ok(false);
        }
        match pair.config() {
            Ok(config) => {
                *self.current.write() = config;
                *seen = CertificateDigests { done: digest, refused_once: None };
                metrics::gauge!(GENERATION).increment(1.0);
                publish_stale(false);
                tracing::info!(path = %self.certificate.display(), "certificate applied");
                Ok(true)
            }
            Err(_) if seen.refused_once != Some(digest) => {
                seen.refused_once = Some(digest);
                Ok(false)
            }
            Err(error) => {
                *seen = CertificateDigests { done: digest, refused_once: None };
                publish_stale(true);
                metrics::counter!("fanfare_tls_certificate_errors_total").increment(1);
                tracing::error!(path = %error.path().display(), reason = %error, "certificate refused, nothing changed");
                Err(error)
            }
        }
    }

    /// Never returns: polls the files. The task that runs it may be dropped at any time.
    pub async fn watch(self: Arc<Self>) {
        loop {
            tokio::time::sleep(POLL).await;
            let certificates = Arc::clone(&self);
            // A refusal has been logged and counted.
            let _outcome = tokio::task::spawn_blocking(move || certificates.reload_if_changed()).await;
        }
    }
}

const GENERATION: &str = "fanfare_tls_certificate_generation";

fn publish_generation(generation: u32) {
    metrics::gauge!(GENERATION).set(f64::from(generation));
}

/// Sets the metric for refused files, while an earlier pair is in use.
fn publish_stale(is_stale: bool) {
    metrics::gauge!("fanfare_certificate_stale").set(u8::from(is_stale));
}

struct CertificatePair<'a> {
    certificate: CertificateFile<'a>,
    key: CertificateFile<'a>,
}

struct CertificateFile<'a> {
    path: &'a Path,
    bytes: std::io::Result<Vec<u8>>,
}

impl<'a> CertificatePair<'a> {
    fn read(certificate: &'a Path, key: &'a Path) -> Self {
        Self { certificate: CertificateFile::read(certificate), key: CertificateFile::read(key) }
    }

    fn digest(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        for file in [&self.certificate, &self.key] {
            digest.update(Sha256::digest(file.bytes.as_deref().unwrap_or_default()));
            digest.update([u8::from(file.bytes.is_ok())]);
        }
        digest.finalize().into()
    }

    /// The TLS configuration, with new ticket keys: sessions of an earlier certificate are not resumed.
    fn config(&self) -> Result<Arc<ServerConfig>, CertificateError> {
        let chain = self.certificate.chain()?;
        let key = self.key.key()?;
        let refused = |error: rustls::Error| match error {
            rustls::Error::InconsistentKeys(_) => CertificateError::unusable(
                self.key.path,
                format!("does not hold the key of the certificate in {}", self.certificate.path.display()),
            ),
            rustls::Error::InvalidCertificate(reason) => CertificateError::unusable(
                self.certificate.path,
                format!("holds a certificate that cannot be used: {reason:?}"),
            ),
            _ => CertificateError::unusable(self.key.path, "holds a key that cannot be used"),
        };
        let provider = Arc::new(aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(refused)?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(refused)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.ticketer = aws_lc_rs::Ticketer::new().map_err(refused)?;
        Ok(Arc::new(config))
    }
}

impl<'a> CertificateFile<'a> {
    fn read(path: &'a Path) -> Self {
        Self { path, bytes: std::fs::read(path) }
    }

    fn bytes(&self) -> Result<&[u8], CertificateError> {
        self.bytes.as_deref().map_err(|error| CertificateError::Unreadable {
            path: self.path.to_owned(),
            source: std::io::Error::new(error.kind(), error.to_string()),
        })
    }

    fn chain(&self) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(self.bytes()?).collect();
        match chain {
            Ok(chain) if chain.is_empty() => {
                Err(CertificateError::unusable(self.path, "holds no certificate in PEM"))
            }
            Ok(chain) => Ok(chain),
            Err(_) => Err(CertificateError::unusable(self.path, "is not valid PEM")),
        }
    }

    fn key(&self) -> Result<PrivateKeyDer<'static>, CertificateError> {
        // The parser's message could repeat a line of the key.
        PrivateKeyDer::from_pem_slice(self.bytes()?)
            .map_err(|_| CertificateError::unusable(self.path, "holds no private key in PEM"))
    }
}
