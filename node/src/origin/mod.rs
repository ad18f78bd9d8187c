//! Work that only the node does at which a message entered the cluster.

pub mod backup;
mod disk;
pub mod history;
pub mod metering;
pub mod outbox;
pub mod queues;
pub mod targets;
