//! A client of the same library on the other end of a pipe in memory.

mod certificate;
mod connection;

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use super::*;

const NAME: &str = "node.test";

/// A certificate that signs itself, and its key, as two files.
struct TestCertificate {
    folder: tempfile::TempDir,
    certificate: PathBuf,
    key: PathBuf,
}

impl TestCertificate {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (certificate, key) = (folder.path().join("node.crt"), folder.path().join("node.key"));
        let files = Self { folder, certificate, key };
        files.renew();
        files
    }

    /// Replaces the files by a fresh pair.
    fn renew(&self) {
        let (certificate, key) = pair();
        std::fs::write(&self.certificate, certificate).unwrap();
        std::fs::write(&self.key, key).unwrap();
    }

    fn open(&self) -> Result<Arc<Certificates>, CertificateError> {
        Certificates::open(&self.certificate, &self.key)
    }

    /// A client that trusts the certificate now in the file.
    fn client(&self) -> ClientConnection {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&self.certificate).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        ClientConnection::new(Arc::new(config), NAME.try_into().unwrap()).unwrap()
    }
}

/// Certificate and key in PEM.
fn pair() -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec![NAME.to_owned()]).unwrap().self_signed(&key).unwrap();
    (certificate.pem(), key.serialize_pem())
}

/// The server's socket: `incoming` is what it can read, `capacity` what it still takes.
struct TlsTestPipe {
    incoming: VecDeque<u8>,
    ended: bool,
    outgoing: Vec<u8>,
    capacity: usize,
}

impl TlsTestPipe {
    fn new() -> Self {
        Self { incoming: VecDeque::new(), ended: false, outgoing: Vec::new(), capacity: usize::MAX }
    }
}

impl Read for TlsTestPipe {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.incoming.is_empty() && !self.ended {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.incoming.read(buffer)
    }
}

impl Write for TlsTestPipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.capacity);
        if count == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.capacity -= count;
        self.outgoing.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
