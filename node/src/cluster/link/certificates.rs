//! Who is a peer: mutual TLS 1.3, with certificates of the operator or such as follow from the cluster key.

use std::fmt;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ED25519,
};
use rustls::client::Resumption;
use rustls::crypto::aws_lc_rs as provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::cluster::ClusterKey;

/// The name that the certificate of every node must have, whatever its address is.
pub const SERVER_NAME: &str = "peer.fanfare.internal";

const ALPN: &[u8] = b"h2";
/// What the keys of the CAs are derived for.
const CA_PURPOSE: &str = "peer ca ed25519";
/// PKCS#8 of an Ed25519 key up to its 32 bytes.
const ED25519_PKCS8: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// Why there are no certificates to meet peers with. It never holds anything of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerTlsError(&'static str);

impl fmt::Display for PeerTlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for PeerTlsError {}

/// Both sides of TLS between nodes. Nothing is resumed, so that a key that was taken away ends with its links.
#[derive(Clone)]
pub struct PeerTls {
    pub(super) server: Arc<ServerConfig>,
    pub(super) client: Arc<ClientConfig>,
}

impl PeerTls {
    /// From the lines of the cluster key: each has a CA that all nodes with that line derive alike. All are trusted,
    /// and the first signs a certificate with a fresh key, which lives as long as this node.
    ///
    /// # Errors
    /// The system has no random bytes for the key.
    pub fn from_key(key: &ClusterKey) -> Result<Self, PeerTlsError> {
        let authorities = key.derive(CA_PURPOSE, b"").map(|seed| authority(&seed));
        let authorities = authorities.collect::<Result<Vec<_>, _>>()?;
        let mut roots = RootCertStore::empty();
        for (_, certificate) in &authorities {
            roots.add(certificate.clone()).map_err(|_| UNUSABLE)?;
        }
        let (issuer, _) = authorities.first().ok_or(UNUSABLE)?;
        let key = KeyPair::generate().map_err(|_| UNUSABLE)?;
        let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()]).map_err(|_| UNUSABLE)?;
        params.distinguished_name.push(DnType::CommonName, "fanfare node");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, issuer).map_err(|_| UNUSABLE)?;
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        Self::of(roots, vec![certificate.der().clone()], key.into())
    }

    /// From PEM: the CAs that are trusted, this node's chain with its own certificate first, and its key. The
    /// certificate must name [`SERVER_NAME`] and serve both sides.
    pub fn from_pem(ca: &[u8], certificate: &[u8], key: &[u8]) -> Result<Self, PeerTlsError> {
        let mut roots = RootCertStore::empty();
        for ca in certificates(ca, "the CA file of peers is not valid PEM")? {
            roots.add(ca).map_err(|_| PeerTlsError("the CA file of peers holds what is no CA"))?;
        }
        if roots.is_empty() {
            return Err(PeerTlsError("the CA file of peers holds no certificate"));
        }
        let chain = certificates(certificate, "the certificate for peers is not valid PEM")?;
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|_| PeerTlsError("the key file for peers holds no private key in PEM"))?;
        Self::of(roots, chain, key)
    }

    fn of(
        roots: RootCertStore,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, PeerTlsError> {
        let provider = Arc::new(provider::default_provider());
        let roots = Arc::new(roots);
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(|_| UNUSABLE)?;
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(|_| UNUSABLE)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(|_| UNUSABLE)?;
        server.alpn_protocols = vec![ALPN.to_vec()];
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|_| UNUSABLE)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(|_| UNUSABLE)?;
        client.alpn_protocols = vec![ALPN.to_vec()];
        client.resumption = Resumption::disabled();
        Ok(Self { server: Arc::new(server), client: Arc::new(client) })
    }
}

const UNUSABLE: PeerTlsError = PeerTlsError("the certificate and key for peers cannot be used together");

fn certificates(pem: &[u8], refusal: &'static str) -> Result<Vec<CertificateDer<'static>>, PeerTlsError> {
    CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().map_err(|_| PeerTlsError(refusal))
}

/// The CA that follows from what one line derives. Its name and key are what nodes compare; the rest is each node's own.
fn authority(seed: &[u8; 32]) -> Result<(Issuer<'static, KeyPair>, CertificateDer<'static>), PeerTlsError> {
    let mut pkcs8 = [0; 48];
    pkcs8[..16].copy_from_slice(&ED25519_PKCS8);
    pkcs8[16..].copy_from_slice(seed);
    let key = PrivatePkcs8KeyDer::from(&pkcs8[..]);
    let key = KeyPair::from_pkcs8_der_and_sign_algo(&key, &PKCS_ED25519).map_err(|_| UNUSABLE)?;
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.distinguished_name.push(DnType::CommonName, "fanfare cluster");
    let certificate = params.self_signed(&key).map_err(|_| UNUSABLE)?.der().clone();
    Ok((Issuer::new(params, key), certificate))
}

#[cfg(test)]
impl PeerTls {
    /// What trusts the nodes of this key.
    pub(super) fn roots_of(key: &ClusterKey) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        for seed in key.derive(CA_PURPOSE, b"") {
            let (_, certificate) = authority(&seed).expect("a seed makes a CA");
            roots.add(certificate).expect("it is a CA");
        }
        roots
    }
}
