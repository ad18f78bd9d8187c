//! What only the node does at which a message entered.

mod disk;
pub mod history;
pub mod metering;
pub mod outbox;
pub mod queues;
pub mod targets;
