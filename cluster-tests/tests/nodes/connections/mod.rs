//! Live connections: their limit, their listing, and changes that end them or narrow their capability.

mod ceiling;
mod listings;
mod narrowing;

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Response, http};

/// Key of the tenant's first account. The next ones are of its second account, and of another tenant.
const KEY: &str = "secret-one.k1";
const SECOND: &str = "secret-two.k2";
const OTHER: &str = "secret-other.k3";

fn directory(connection_limit: Option<u64>) -> Directory {
    Directory::default()
        .tenant("acme", connection_limit)
        .account_of_tenant("acme-one")
        .key("k1", "secret-one", ALL)
        .account_of_tenant("acme-two")
        .key("k2", "secret-two", ALL)
        .account("other")
        .key("k3", "secret-other", ALL)
}

async fn node(connection_limit: Option<u64>) -> Node {
    Node::start(NodeOptions::default().directory(directory(connection_limit), KEY)).await
}

async fn get(node: &Node, path: &str, key: &str) -> Response {
    http::request(node.addr(), "GET", path, &[("authorization", &http::basic(key))], "").await
}
