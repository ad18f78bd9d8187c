//! Authentication of peers: mutual TLS 1.3, with certificates of the operator or certificates derived from the cluster key.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ED25519,
};
use rustls::client::danger::ServerCertVerifier as _;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::aws_lc_rs as provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::cluster::ClusterKey;

/// The name that the certificate of every node must have, whatever its address is.
pub const SERVER_NAME: &str = "peer.fanfare.internal";

const ALPN: &[u8] = b"h2";
/// Context string from which the keys of the CAs are derived.
const CA_PURPOSE: &str = "peer ca ed25519";
/// Start of the PKCS#8 form of an Ed25519 key, before its 32 bytes.
const ED25519_PKCS8: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// Files with an operator's own certificates, in PEM.
#[derive(Debug, Clone, Copy)]
pub struct PeerFiles<'a> {
    /// The node's chain, its own certificate first. The certificate must name [`SERVER_NAME`] and allow both client and server use.
    pub certificate: &'a Path,
    pub key: &'a Path,
    /// All trusted CAs. One of them must have issued the node's own certificate.
    pub ca: &'a Path,
}

/// One of the operator's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerFile {
    Certificate,
    Key,
    Ca,
}

/// The reason why there are no certificates for peers. Never holds anything of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerTlsError {
    /// The file that was refused; none without files.
    pub file: Option<PeerFile>,
    reason: String,
}

impl fmt::Display for PeerTlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for PeerTlsError {}

/// TLS configuration of both sides. No sessions are resumed, so that a key that was withdrawn ends with its links.
#[derive(Clone)]
pub struct PeerTls {
    pub(super) server: Arc<ServerConfig>,
    pub(super) client: Arc<ClientConfig>,
}

impl PeerTls {
    /// Builds certificates from the lines of the cluster key. Each line yields a CA that all nodes with that line derive alike. All of
    /// these CAs are trusted. The first one signs a certificate with a fresh key, which lives as long as this node.
    ///
    /// # Errors
    /// The system has no random bytes for the key.
    pub fn from_key(key: &ClusterKey) -> Result<Self, PeerTlsError> {
        let authorities = key.derive(CA_PURPOSE, b"").map(|seed| authority(&seed));
        let authorities = authorities.collect::<Result<Vec<_>, _>>()?;
        let mut roots = RootCertStore::empty();
        for (_, certificate) in &authorities {
            roots.add(certificate.clone()).map_err(unusable)?;
        }
        let (issuer, _) = authorities.first().ok_or_else(|| unusable(()))?;
        let key = KeyPair::generate().map_err(unusable)?;
        let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()]).map_err(unusable)?;
        params.distinguished_name.push(DnType::CommonName, "fanfare node");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, issuer).map_err(unusable)?;
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        Self::of(Arc::new(roots), vec![certificate.der().clone()], key.into()).map_err(unusable)
    }

    /// Reads the operator's files once. Refuses a certificate that other nodes with the same CAs would refuse.
    pub fn open(files: PeerFiles<'_>, now_ms: u64) -> Result<Self, PeerTlsError> {
        let read = |file: PeerFile| {
            std::fs::read(files.path(file)).map_err(|error| {
                let reason = format!("cannot read {}: {error}", files.path(file).display());
                PeerTlsError { file: Some(file), reason }
            })
        };
        let certificates = |file: PeerFile| {
            let chain = CertificateDer::pem_slice_iter(&read(file)?).collect::<Result<Vec<_>, _>>();
            match chain {
                Ok(chain) if chain.is_empty() => Err(files.refused(file, "holds no certificate in PEM")),
                Ok(chain) => Ok(chain),
                Err(_) => Err(files.refused(file, "is not valid PEM")),
            }
        };
        let mut roots = RootCertStore::empty();
        for ca in certificates(PeerFile::Ca)? {
            roots.add(ca).map_err(|_| files.refused(PeerFile::Ca, "holds what is no CA"))?;
        }
        let chain = certificates(PeerFile::Certificate)?;
        // The parser's error text could repeat a line of the key.
        let key = PrivateKeyDer::from_pem_slice(&read(PeerFile::Key)?)
            .map_err(|_| files.refused(PeerFile::Key, "holds no private key in PEM"))?;
        let roots = Arc::new(roots);
        meets_itself(&roots, &chain, now_ms).map_err(|error| {
            let ca = files.ca.display();
            files.refused(
                PeerFile::Certificate,
                format_args!("is not for peers that trust {ca} and look for {SERVER_NAME}: {error}"),
            )
        })?;
        Self::of(roots, chain, key).map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => {
                let certificate = files.certificate.display();
                let reason = format_args!("does not hold the key of the certificate in {certificate}");
                files.refused(PeerFile::Key, reason)
            }
            _ => files.refused(PeerFile::Key, "holds a key that cannot be used"),
        })
    }

    fn of(
        roots: Arc<RootCertStore>,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, rustls::Error> {
        let provider = Arc::new(provider::default_provider());
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(of_clients(&roots)?)
            .with_single_cert(chain.clone(), key.clone_key())?;
        server.alpn_protocols = vec![ALPN.to_vec()];
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)?;
        client.alpn_protocols = vec![ALPN.to_vec()];
        client.resumption = Resumption::disabled();
        Ok(Self { server: Arc::new(server), client: Arc::new(client) })
    }
}

impl PeerFiles<'_> {
    fn path(&self, file: PeerFile) -> &Path {
        match file {
            PeerFile::Certificate => self.certificate,
            PeerFile::Key => self.key,
            PeerFile::Ca => self.ca,
        }
    }

    fn refused(&self, file: PeerFile, reason: impl fmt::Display) -> PeerTlsError {
        let reason = format!("{} {reason}", self.path(file).display());
        PeerTlsError { file: Some(file), reason }
    }
}

fn unusable<E>(_: E) -> PeerTlsError {
    let reason = "the certificate and key for peers cannot be used together".to_owned();
    PeerTlsError { file: None, reason }
}

fn of_clients(roots: &Arc<RootCertStore>) -> Result<Arc<dyn ClientCertVerifier>, rustls::Error> {
    let provider = Arc::new(provider::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), provider).build();
    verifier.map_err(|error| rustls::Error::General(error.to_string()))
}

/// Refuses a certificate that a node with the same CAs would refuse, on either side of a link.
fn meets_itself(
    roots: &Arc<RootCertStore>,
    chain: &[CertificateDer<'_>],
    now_ms: u64,
) -> Result<(), rustls::Error> {
    let now = UnixTime::since_unix_epoch(Duration::from_millis(now_ms));
    let Some((own, between)) = chain.split_first() else { return Ok(()) };
    let name = ServerName::try_from(SERVER_NAME).expect("it is a name");
    let provider = Arc::new(provider::default_provider());
    let of_servers = WebPkiServerVerifier::builder_with_provider(Arc::clone(roots), provider).build();
    let of_servers = of_servers.map_err(|error| rustls::Error::General(error.to_string()))?;
    of_servers.verify_server_cert(own, between, &name, &[], now)?;
    of_clients(roots)?.verify_client_cert(own, between, now).map(drop)
}

/// The CA that one line of the key yields. Nodes compare its name and key; the rest may differ from node to node.
fn authority(seed: &[u8; 32]) -> Result<(Issuer<'static, KeyPair>, CertificateDer<'static>), PeerTlsError> {
    let mut pkcs8 = [0; 48];
    pkcs8[..16].copy_from_slice(&ED25519_PKCS8);
    pkcs8[16..].copy_from_slice(seed);
    let key = PrivatePkcs8KeyDer::from(&pkcs8[..]);
    let key = KeyPair::from_pkcs8_der_and_sign_algo(&key, &PKCS_ED25519).map_err(unusable)?;
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.distinguished_name.push(DnType::CommonName, "fanfare cluster");
    let certificate = params.self_signed(&key).map_err(unusable)?.der().clone();
    Ok((Issuer::new(params, key), certificate))
}

#[cfg(test)]
impl PeerTls {
    /// Root certificates that trust the nodes of this key.
    pub(super) fn roots_of(key: &ClusterKey) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        for seed in key.derive(CA_PURPOSE, b"") {
            let (_, certificate) = authority(&seed).expect("a seed makes a CA");
            roots.add(certificate).expect("it is a CA");
        }
        roots
    }
}
