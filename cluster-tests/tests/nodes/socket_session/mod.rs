//! A session on the realtime socket, frame by frame.

mod basics;
mod credentials;
mod library;
mod limits;
mod order;

use fanfare_client::sign::{self, JwtParams};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Socket, http};

const KEY: &str = "secret.with.dots.k1";
const EVERYTHING: &str = r#"{"*":["subscribe","publish","presence","history"]}"#;

async fn node() -> Node {
    Node::start(options()).await
}

fn options() -> NodeOptions {
    NodeOptions::default()
        .directory(Directory::default().account("acme").key("k1", "secret.with.dots", ALL), KEY)
}

fn token(capability: &str, client_id: Option<&str>, ttl_s: u64) -> String {
    let params = JwtParams {
        capability: capability.into(),
        client_id: client_id.map(Into::into),
        issued_s: None,
        ttl_s,
    };
    sign::jwt(&KEY.parse().expect("a key"), &params).expect("a token")
}

async fn with_token(node: &Node, query: &str, token: &str) -> Socket {
    Socket::open_as(node, query, &http::bearer(token)).await
}
