//! Nodes with TLS behind a load balancer that passes the addresses of clients on.

use std::fs::read_to_string;

use fanfare_cluster_tests::kubernetes::{HOST, in_cluster};
use fanfare_cluster_tests::tls::{NAME, Tls};
use fanfare_cluster_tests::{RunningCommand, SOON, wait_until};
use serde_json::json;

use crate::release::{self, helm};

#[test]
fn tls_behind_the_proxy_protocol_shows_the_client_address() {
    in_cluster(2, async |kubernetes| {
        let tls = Tls::default();
        let read = |path| read_to_string(path).expect("a file");
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": {"name": "tls"},
            "stringData": {"tls.crt": read(tls.certificate()), "tls.key": read(tls.key()), "ca.crt": read(tls.authority())},
        });
        kubernetes.apply(&secret.to_string()).await;
        let values = format!("replicas=2,tls.existingSecret=tls,test.host={NAME},test.ca=true");
        helm(&kubernetes, "install", &values).await;
        release::test(&kubernetes).await;

        let annotation = "service.annotations.fanfare\\.test/proxy-protocol=v2";
        let values = format!("{values},{annotation},trustedProxies={{{HOST}}},proxyProtocol=true");
        helm(&kubernetes, "upgrade", &values).await;
        let balancer = release::balancer(&kubernetes, 443).await;
        let (url, authority) = (format!("https://{NAME}"), tls.authority());
        let authority = authority.to_str().expect("a path in UTF-8");
        let roundtrip = async |key: &str| {
            let node = ["--url", &url, "--through", &balancer, "--ca-cert", authority, "--key", key];
            RunningCommand::start(&[&["roundtrip", "demo"], &node[..]].concat()).ended().await.success()
        };
        wait_until(SOON, "a message through the balancer", async || {
            roundtrip(&release::key(&kubernetes).await).await
        })
        .await;
        assert!(!roundtrip("wrong.main").await);
        // A client of the test has the balancer's own address, and that of the host when it connects to pods directly.
        let (client, _) = balancer.split_once(':').expect("host and port");
        wait_until(SOON, "the refused credential", async || {
            let logs =
                kubernetes.kubectl(&["logs", "--selector", "app.kubernetes.io/name=fanfare", "--tail=-1"]);
            let logs = logs.await;
            let mut refused = logs.lines().filter(|line| line.contains("credential refused"));
            refused.any(|line| line.contains(client) && !line.contains(HOST))
        })
        .await;
    });
}
