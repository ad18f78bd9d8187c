//! Parts that all databases on the local disk share: tables, the queue in front of the writer, and the health of the disk.

pub(super) mod engine;
pub(super) mod health;
pub(super) mod queue;
pub(super) mod snapshot;
pub mod tables;
