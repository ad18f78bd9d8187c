//! Rules of credentials, one in each row: TokenRequests, their tokens, and tokens that were signed elsewhere.

mod exchange;
mod request;
mod requests;
mod signed;

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Directory, Node, NodeOptions};

const KEY: &str = "top.secret.k1";
const SECRET: &str = "top.secret";
const MAC_ERROR: &str = "invalid token request mac";
const EVERYTHING: &str = r#"{"*":["subscribe","publish","presence","history"]}"#;

async fn node() -> Node {
    Node::start(options()).await
}

fn options() -> NodeOptions {
    let directory = Directory::default()
        .account("acme")
        .key("k1", SECRET, ALL)
        .key("narrow", "narrow", r#"{ "chat:*" = ["subscribe", "history"] }"#)
        .revoked_key("gone", "gone")
        .account("other")
        .key("k2", "k2", ALL);
    NodeOptions::default().directory(directory, KEY)
}
