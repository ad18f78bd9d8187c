//! Cluster: membership, links between peers, and the routing of messages over several nodes.

pub mod inbound;
mod key;
pub mod link;
pub mod membership;
pub mod routing;
#[cfg(test)]
mod simulation;

pub use key::{ClusterKey, ClusterKeyError};
