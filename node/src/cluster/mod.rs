//! What makes several nodes one service.

pub mod inbound;
mod key;
pub mod link;
pub mod membership;
pub mod routing;
#[cfg(test)]
mod simulation;

pub use key::{ClusterKey, ClusterKeyError};
