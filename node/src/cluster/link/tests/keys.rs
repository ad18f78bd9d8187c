//! Combinations of cluster keys and of an operator's certificates with which peers can meet.

use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use super::*;
use crate::model::Clock;

const OTHER: [u8; 32] = [8; 32];

#[tokio::test]
async fn lines_rotate_without_a_cut() {
    let before = LinkTestNode::start(1).await;
    let between = LinkTestNode::start_with(2, &[SECRET, OTHER], LinkSettings::default()).await;
    let turned = LinkTestNode::start_with(3, &[OTHER, SECRET], LinkSettings::default()).await;
    let after = LinkTestNode::start_with(4, &[OTHER], LinkSettings::default()).await;
    before.link_to(&[&between]).await;
    between.link_to(&[&before, &turned]).await;
    turned.link_to(&[&between, &after]).await;
    after.link_to(&[&turned]).await;
}

/// A CA of an operator.
struct Authority {
    folder: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let (folder, key) = (tempfile::tempdir().expect("a folder"), KeyPair::generate().expect("a key"));
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = params.self_signed(&key).expect("a CA").pem();
        std::fs::write(folder.path().join("ca.crt"), ca).expect("the folder is writable");
        Self { folder, issuer: Issuer::new(params, key) }
    }

    /// A certificate that allows only these `usages`.
    fn opened(&self, name: &str, usages: &[ExtendedKeyUsagePurpose]) -> Result<PeerTls, PeerTlsError> {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        params.extended_key_usages = usages.to_vec();
        let pem = params.signed_by(&key, &self.issuer).expect("a certificate").pem();
        let [certificate, key_file, ca] =
            ["node.crt", "node.key", "ca.crt"].map(|file| self.folder.path().join(file));
        std::fs::write(&certificate, pem).expect("the folder is writable");
        std::fs::write(&key_file, key.serialize_pem()).expect("the folder is writable");
        let files = PeerFiles { certificate: &certificate, key: &key_file, ca: &ca };
        PeerTls::open(files, Clock::system().now_ms())
    }

    async fn node(&self, incarnation: u64) -> LinkTestNode {
        let tls = self.opened(SERVER_NAME, &[]).expect("they belong together");
        LinkTestNode::with(incarnation, tls, LinkSettings::default()).await
    }
}

#[tokio::test]
async fn certificates_of_the_operator_serve_as_well() {
    let (authority, other) = (Authority::new(), Authority::new());
    let (one, two, foreign) = (authority.node(1).await, authority.node(2).await, other.node(3).await);
    let derived = LinkTestNode::start(4).await;
    for stranger in [&foreign, &derived] {
        stranger.links.set_peers(vec![one.at(one.addr)]);
        stranger.send(&one, "room", 1);
    }
    let peers = [&two, &foreign, &derived];
    one.links.set_peers(peers.iter().map(|peer| peer.at(peer.addr)).collect());
    one.until("the link is up", |seen| seen.is_up(2)).await;
    two.link_to(&[&one]).await;
    assert_eq!(timeout(DEADLINE, two.send(&one, "room", 2)).await, Ok(Ok(())));
    // Longer than an attempt and the next one.
    tokio::time::sleep(RETRY * 3).await;
    for stranger in [&foreign, &derived] {
        let to = stranger.peer.incarnation;
        assert!(!one.seen.borrow().is_up(to) && !stranger.seen.borrow().is_up(1), "{to}");
    }
    assert_eq!(one.seen.borrow().sequences("room"), [2]);
}

#[test]
fn a_certificate_that_peers_would_refuse_is_refused_at_once() {
    use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    let authority = Authority::new();
    for (name, usages, opens) in [
        (SERVER_NAME, &[ServerAuth, ClientAuth][..], true),
        (SERVER_NAME, &[], true),
        (SERVER_NAME, &[ServerAuth], false),
        (SERVER_NAME, &[ClientAuth], false),
        ("node.example", &[], false),
    ] {
        let refused = authority.opened(name, usages).err().map(|error| error.file);
        let expected = (!opens).then_some(Some(PeerFile::Certificate));
        assert_eq!(refused, expected, "{name} {usages:?}");
    }
}
