//! A certificate authority for tests, the certificate of a node, and clients that trust the authority.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};

use crate::{NodeOptions, Raw, http};

pub use tokio_rustls::rustls::version::{TLS12, TLS13};

/// Name in a node's certificate, beside 127.0.0.1.
pub const NAME: &str = "localhost";

/// Certificate files of one node. Dropping it removes them.
pub struct Tls {
    folder: TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Default for Tls {
    fn default() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("a certificate");
        let tls = Self { folder, issuer };
        std::fs::write(tls.authority(), tls.issuer.pem()).expect("the folder is writable");
        tls.renew();
        tls
    }
}

impl Tls {
    /// Gives options of a node that uses the certificate.
    pub fn node(&self) -> NodeOptions {
        NodeOptions::default()
            .environment("FANFARE_TLS_CERT", &self.certificate().display().to_string())
            .environment("FANFARE_TLS_KEY", &self.key().display().to_string())
    }

    pub fn certificate(&self) -> PathBuf {
        self.current().join("node.crt")
    }

    pub fn key(&self) -> PathBuf {
        self.current().join("node.key")
    }

    /// Link to the folder of the files in use, as in mounted secrets.
    fn current(&self) -> PathBuf {
        self.folder.path().join("current")
    }

    /// Certificate of the authority.
    pub fn authority(&self) -> PathBuf {
        self.folder.path().join("ca.crt")
    }

    /// Replaces certificate and key by new ones, both at once, and returns the certificate.
    pub fn renew(&self) -> CertificateDer<'static> {
        let names = vec![NAME.to_owned(), "127.0.0.1".to_owned()];
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(names).expect("names");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        let pair = tempfile::tempdir_in(self.folder.path()).expect("the folder is writable").keep();
        for (file, text) in [("node.crt", certificate.pem()), ("node.key", key.serialize_pem())] {
            std::fs::write(pair.join(file), text).expect("the folder is writable");
        }
        let link = pair.with_extension("link");
        std::os::unix::fs::symlink(&pair, &link).expect("the folder is writable");
        std::fs::rename(link, self.current()).expect("the folder is writable");
        certificate.der().clone()
    }

    /// Gives the configuration of a client that trusts the authority.
    pub fn client(&self, version: &'static SupportedProtocolVersion) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).expect("a certificate");
        ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_protocol_versions(&[version])
            .expect("a version")
            .with_root_certificates(roots)
            .with_no_client_auth()
    }

    pub async fn connect(&self, addr: SocketAddr) -> TlsStream<TcpStream> {
        let stream = TcpStream::connect(addr).await.expect("the node accepts");
        handshake(stream, self.client(&TLS13)).await.expect("a handshake")
    }

    pub async fn raw(&self, addr: SocketAddr) -> Raw {
        Raw::over(self.connect(addr).await)
    }

    /// Connects as [`Raw::connect_slow`] does, under TLS.
    pub async fn raw_slow(&self, addr: SocketAddr, receive_buffer_bytes: u32) -> Raw {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(receive_buffer_bytes).expect("a socket option");
        let stream = socket.connect(addr).await.expect("the node accepts");
        Raw::over(handshake(stream, self.client(&TLS13)).await.expect("a handshake"))
    }

    /// Opens a connection for many requests.
    pub async fn http(&self, addr: SocketAddr) -> http::Connection {
        http::Connection::over(self.connect(addr).await, addr).await.expect("a connection")
    }
}

/// Makes a TLS connection over a socket of the caller.
pub async fn handshake(
    stream: TcpStream,
    config: impl Into<Arc<ClientConfig>>,
) -> std::io::Result<TlsStream<TcpStream>> {
    stream.set_nodelay(true)?;
    let name = ServerName::try_from(NAME).expect("a name");
    TlsConnector::from(config.into()).connect(name, stream).await
}

/// Gives the certificate of the node in a connection.
pub fn peer(stream: &TlsStream<TcpStream>) -> CertificateDer<'static> {
    let chain = stream.get_ref().1.peer_certificates().expect("a handshake");
    chain[0].clone().into_owned()
}
