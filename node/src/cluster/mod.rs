//! What makes several nodes one service.

pub mod inbound;
mod key;
pub mod link;
pub mod membership;

pub use key::{ClusterKey, ClusterKeyError};
