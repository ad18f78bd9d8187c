//! Who can meet whom with which lines of a cluster key, or with certificates of their own.

use super::*;

const OTHER: [u8; 32] = [8; 32];

#[tokio::test]
async fn lines_rotate_without_a_cut() {
    let before = Node::start(1).await;
    let between = Node::start_with(2, &[SECRET, OTHER], LinkSettings::default()).await;
    let turned = Node::start_with(3, &[OTHER, SECRET], LinkSettings::default()).await;
    let after = Node::start_with(4, &[OTHER], LinkSettings::default()).await;
    before.link_to(&[&between]).await;
    between.link_to(&[&before, &turned]).await;
    turned.link_to(&[&between, &after]).await;
    after.link_to(&[&turned]).await;
}

#[tokio::test]
async fn certificates_of_the_operator_serve_as_well() {
    let authority = rcgen::KeyPair::generate().expect("a key");
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca = params.self_signed(&authority).expect("a CA").pem();
    let issuer = rcgen::Issuer::new(params, authority);
    let tls = || {
        let key = rcgen::KeyPair::generate().expect("a key");
        let params = rcgen::CertificateParams::new(vec![SERVER_NAME.to_owned()]).expect("a name");
        let certificate = params.signed_by(&key, &issuer).expect("a certificate").pem();
        PeerTls::from_pem(ca.as_bytes(), certificate.as_bytes(), key.serialize_pem().as_bytes())
            .expect("they belong together")
    };
    let node = |incarnation| Node::start_by(incarnation, tls(), LinkSettings::default());
    let (one, two) = (node(1).await, node(2).await);
    one.link_to(&[&two]).await;
    assert_eq!(timeout(DEADLINE, one.send(&two, "room", 1)).await, Ok(Ok(())));
    let refused = PeerTls::from_pem(ca.as_bytes(), ca.as_bytes(), b"no key").err();
    assert_eq!(
        refused.map(|e| e.to_string()).as_deref(),
        Some("the key file for peers holds no private key in PEM")
    );
}
