//! Nodes with certificates of the operator: a node without a certificate of that CA is no peer, even with the cluster
//! key.

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::{Node, NodeOptions, SOON, Socket, wait_until};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::{Value, json};
use tempfile::TempDir;

const NAME: &str = "peer.fanfare.internal";
const REFUSED: &str = "fanfare_peer_handshakes_refused_total";
/// Number of attempts, more than one for each peer stream.
const ATTEMPTS: f64 = 6.0;

/// A CA with certificates for nodes.
struct Authority(TempDir);

impl Authority {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let ca = CertifiedIssuer::self_signed(params, key).expect("a CA");
        let params = CertificateParams::new(vec![NAME.to_owned()]).expect("a name");
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &ca).expect("a certificate");
        for (file, text) in [("cert", certificate.pem()), ("key", key.serialize_pem()), ("ca", ca.pem())] {
            std::fs::write(folder.path().join(file), text).expect("the folder is writable");
        }
        Self(folder)
    }

    fn vouches_for(&self, options: NodeOptions) -> NodeOptions {
        ["cert", "key", "ca"].into_iter().fold(options, |options, file| {
            let name = format!("FANFARE_PEER_{}", file.to_uppercase());
            options.environment(&name, &self.0.path().join(file).to_string_lossy())
        })
    }
}

/// Whether the node knows the other one without a peer stream.
async fn knows_unlinked(node: &Node, other: &str) -> bool {
    let answer = node.operate("GET", "/debug/members").await;
    let view: Value = serde_json::from_slice(&answer.body).expect("the view is JSON");
    let members = view["members"].as_array().expect("a list of members");
    members.iter().any(|member| member["nodeId"] == other && member["linkUp"] == false)
}

#[tokio::test(flavor = "multi_thread")]
async fn node_with_a_certificate_of_another_ca_is_refused() {
    let (own, foreign) = (Authority::new(), Authority::new());
    let mut cluster = Cluster::linked_with(2, |options| own.vouches_for(options)).await;
    let with_foreign = foreign.vouches_for(cluster.one_more("foreign"));
    let with_derived = cluster.one_more("derived");
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    for (name, options) in [("foreign", with_foreign), ("derived", with_derived)] {
        let before = n0.metric(REFUSED).await;
        let refused = wait_until(SOON, "the stranger is refused", async || {
            knows_unlinked(n0, name).await && n0.metric(REFUSED).await >= before + ATTEMPTS
        });
        tokio::select! {
            _ = Node::start(options) => panic!("{name} has linked to all others"),
            () = refused => {}
        }
        assert!(knows_unlinked(n0, name).await, "{name}");
        assert_eq!(n0.metric("fanfare_peers_known").await, 1.0, "{name}");
        let peer = format!(r#""peer":"{name}""#);
        let is_why = |line: &str| line.contains(&peer) && line.contains("--peer-ca");
        let says_why = || n0.log().lines().any(is_why);
        wait_until(SOON, "the settings to be named", async || says_why()).await;
    }
    let mut subscriber = Socket::open(n1, "").await;
    subscriber.attach("room").await;
    Socket::open(n0, "").await.publish("room", json!({"data": 1})).await;
    assert_eq!(subscriber.message("room").await["messages"][0]["data"], 1);
}
